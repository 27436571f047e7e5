/* A library that imports a function. */
int answer(int question);
int ask(int question);

__attribute__((visibility("default"))) int ask(int question)
{
    return answer(question) * 10;
}
