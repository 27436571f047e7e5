/* A library with a function that others import. */
int answer(int question);
int other_answer(int question);

__attribute__((visibility("default"))) int answer(int question)
{
    return question + 1;
}

__attribute__((visibility("default"))) int other_answer(int question)
{
    return question + 2;
}
