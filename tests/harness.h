/*
 * The test harness: a program is one topic, a function one behaviour.
 *
 *   static void the_table_is_zero_after_a_failure(void) { CHECK(...); }
 *   int main(void) { RUN(the_table_is_zero_after_a_failure); return REPORT(); }
 *
 * A failed CHECK prints where and what, and the test goes on: the rest may say why. Exit codes: 0
 * all passed, 1 something failed, 77 skipped: the program, or each of its tests.
 */
#ifndef EBB_HARNESS_H
#define EBB_HARNESS_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((unused)) static int harness_failures, harness_tests, harness_skips;
__attribute__((unused)) static const char *harness_skip; /* why the test at hand was */

__attribute__((format(printf, 3, 4), unused)) static void harness_fail(const char *file, int line,
                                                                       const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    harness_failures++;
}

#define FAIL(...) harness_fail(__FILE__, __LINE__, __VA_ARGS__)

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            FAIL("not so: %s", #condition);                                                        \
    } while (0)

/* Two integers, printed where they differ. */
#define CHECK_EQ(got, expected)                                                                    \
    do {                                                                                           \
        long long got_ = (long long)(got), expected_ = (long long)(expected);                      \
        if (got_ != expected_)                                                                     \
            FAIL("%s is %lld, not %s (%lld)", #got, got_, #expected, expected_);                   \
    } while (0)

/* `text` holds `part` somewhere. */
#define CHECK_HAS(text, part)                                                                      \
    do {                                                                                           \
        if (!strstr((text), (part)))                                                               \
            FAIL("%s is \"%s\", which does not hold \"%s\"", #text, (text), (part));               \
    } while (0)

/* Two strings. */
#define CHECK_STR(got, expected)                                                                   \
    do {                                                                                           \
        if (strcmp((got), (expected)))                                                             \
            FAIL("%s is \"%s\", not \"%s\"", #got, (got), (expected));                             \
    } while (0)

/* End the program here: what follows could only crash. */
#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            FAIL("not so, cannot go on: %s", #condition);                                          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define RUN(test)                                                                                  \
    do {                                                                                           \
        int before_ = harness_failures;                                                            \
        harness_skip = NULL;                                                                       \
        test();                                                                                    \
        if (harness_skip && harness_failures == before_) {                                         \
            harness_skips++;                                                                       \
            printf("skipped %s: %s\n", #test, harness_skip);                                       \
        } else {                                                                                   \
            harness_tests++;                                                                       \
            printf("%s %s\n", harness_failures == before_ ? "ok    " : "FAILED", #test);           \
        }                                                                                          \
        fflush(stdout); /* the next one may crash */                                               \
    } while (0)

/* Leave out the test at hand, and say why. */
#define SKIP_TEST(why)                                                                             \
    do {                                                                                           \
        harness_skip = (why);                                                                      \
        return;                                                                                    \
    } while (0)

#define SKIP(why)                                                                                  \
    do {                                                                                           \
        printf("skipped: %s\n", why);                                                              \
        exit(77);                                                                                  \
    } while (0)

#define REPORT()                                                                                   \
    (printf("%d tests, %d failures", harness_tests, harness_failures),                             \
     harness_skips ? printf(", %d skipped\n", harness_skips) : printf("\n"),                       \
     harness_failures                  ? 1                                                         \
     : harness_tests || !harness_skips ? 0                                                         \
                                       : 77)

#endif
