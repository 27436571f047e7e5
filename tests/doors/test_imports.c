/* An import of a loaded library is found, replaced and restored, however it is bound. */
#include <dlfcn.h>
#include <stdint.h>

#include "harness.h"
#include "imports.h"

typedef int (*function)(int);

static int ours(int question)
{
    return question + 100;
}

static int theirs(int question)
{
    return question + 200;
}

#define CODE(f) ((void *)(uintptr_t)(f))

static function load(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, FOLDER "/lib%s.so", name);
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    REQUIRE(library);
    function ask = (function)dlsym(library, "ask");
    REQUIRE(ask);
    return ask;
}

static void replace_and_restore(const char *library, int call_first)
{
    function ask = load(library + 3);
    char why[256] = "";
    if (call_first)
        CHECK_EQ(ask(1), 20);
    ebb__import import;
    CHECK_EQ(ebb__import_find(library, "answer", &import, why, sizeof why), EBB_OK);
    CHECK_STR(why, "");
    CHECK(import.count >= 1);
    function original = (function)import.original;
    REQUIRE(original);
    CHECK_EQ(original(1), 2);
    function sibling = (function)ebb__import_sibling(&import, "other_answer");
    REQUIRE(sibling);
    CHECK_EQ(sibling(1), 3);
    CHECK(!ebb__import_sibling(&import, "no_such_function"));

    CHECK_EQ(ebb__import_replace(&import, CODE(ours)), EBB_OK);
    CHECK_EQ(ask(1), 1010);
    CHECK_EQ(ebb__import_replace(&import, CODE(theirs)), EBB_BUSY);
    CHECK_EQ(ask(1), 1010);
    CHECK_EQ(ebb__import_restore(&import), EBB_OK);
    CHECK_EQ(ask(1), 20);
    CHECK_EQ(ebb__import_restore(&import), EBB_OK);
    CHECK_EQ(ebb__import_replace(&import, CODE(theirs)), EBB_OK);
    CHECK_EQ(ask(1), 2010);
    CHECK_EQ(ebb__import_restore(&import), EBB_OK);
}

static void bound_at_the_first_call_and_not_called_yet(void)
{
    replace_and_restore("libcaller_lazy", 0);
}

static void bound_at_the_first_call_and_called(void)
{
    replace_and_restore("libcaller_lazy", 1);
}

static void bound_at_once_in_read_only_memory(void)
{
    replace_and_restore("libcaller_now", 1);
}

static void called_through_its_address(void)
{
    replace_and_restore("libcaller_address", 1);
}

static void somebody_elses_replacement_is_seen_and_left_alone(void)
{
    function ask = load("caller_now");
    ebb__import first, second;
    char why[256] = "";
    CHECK_EQ(ebb__import_find("libcaller_now", "answer", &first, why, sizeof why), EBB_OK);
    CHECK_EQ(ebb__import_replace(&first, CODE(theirs)), EBB_OK);
    CHECK_EQ(ebb__import_find("libcaller_now", "answer", &second, why, sizeof why), EBB_BUSY);
    CHECK_HAS(why, "answer has been replaced by");
    CHECK_HAS(why, "test_imports");

    /* And one that came after ours keeps its place. */
    CHECK_EQ(ebb__import_restore(&first), EBB_OK);
    CHECK_EQ(ebb__import_find("libcaller_now", "answer", &first, why, sizeof why), EBB_OK);
    second = first;
    CHECK_EQ(ebb__import_replace(&first, CODE(ours)), EBB_OK);
    CHECK_EQ(ebb__import_replace(&second, CODE(theirs)), EBB_OK);
    CHECK_EQ(ebb__import_restore(&first), EBB_BUSY);
    CHECK_EQ(ask(1), 2010);
    CHECK_EQ(ebb__import_restore(&second), EBB_OK);
    CHECK_EQ(ask(1), 20);
}

static void what_is_not_there_is_said(void)
{
    load("caller_now");
    load("caller_static");
    ebb__import import;
    char why[256] = "";
    CHECK_EQ(ebb__import_find("libnowhere", "answer", &import, why, sizeof why), EBB_NO_DRIVER);
    CHECK_STR(why, "libnowhere is not loaded");
    CHECK_EQ(ebb__import_find("libcaller_now", "question", &import, why, sizeof why), EBB_INVALID);
    CHECK_HAS(why, "does not import question");
    /* A copy of its own, whether the loader could still be asked for it or not, is nobody's import. */
    ebb_status status = ebb__import_find("libcaller_static", "answer", &import, why, sizeof why);
    CHECK(status == EBB_INVALID || status == EBB_OK);
}

int main(void)
{
    RUN(bound_at_the_first_call_and_not_called_yet);
    RUN(bound_at_the_first_call_and_called);
    RUN(bound_at_once_in_read_only_memory);
    RUN(called_through_its_address);
    RUN(somebody_elses_replacement_is_seen_and_left_alone);
    RUN(what_is_not_there_is_said);
    return REPORT();
}
