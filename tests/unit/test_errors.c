/* Statuses have names and sentences; details never overrun. */
#include "harness.h"
#include "internal.h"

static void every_status_has_its_name_and_a_sentence(void)
{
#define CASE(name, value, sentence)                                                                \
    CHECK_EQ(name, value);                                                                         \
    CHECK_STR(ebb_status_name(name), #name);                                                       \
    CHECK_STR(ebb_status_text(name), sentence);                                                    \
    CHECK(ebb_status_text(name)[strlen(ebb_status_text(name)) - 1] != '.');
    EBB_STATUSES(CASE)
#undef CASE
}

static void success_is_zero_and_errors_are_negative(void)
{
    CHECK_EQ(EBB_OK, 0);
    CHECK_EQ(EBB_OFFLOADED, 1); /* an answer, and no error */
#define CASE(name, value, sentence) CHECK((value) <= 0 || (name) == EBB_OFFLOADED);
    EBB_STATUSES(CASE)
#undef CASE
}

static void a_number_that_is_no_status_is_named_unknown(void)
{
    CHECK_STR(ebb_status_name((ebb_status)-999), "unknown");
    CHECK(ebb_status_text((ebb_status)-999) != NULL);
}

static void the_version_is_the_headers(void)
{
    char expected[32];
    snprintf(expected, sizeof expected, "%d.%d.%d", EBB_VERSION_MAJOR, EBB_VERSION_MINOR,
             EBB_VERSION_PATCH);
    CHECK_STR(ebb_version(), expected);
}

static void a_detail_is_cut_where_it_does_not_fit(void)
{
    char detail[8] = "unused.";
    ebb__detail(detail, 5, "%s", "longer than that");
    CHECK_STR(detail, "long");
    CHECK_EQ(detail[5], 'd');
    ebb__detail(detail, 0, "%s", "nothing is written");
    CHECK_STR(detail, "long");
    ebb__detail(NULL, 100, "%s", "nothing is written");
}

int main(void)
{
    RUN(every_status_has_its_name_and_a_sentence);
    RUN(success_is_zero_and_errors_are_negative);
    RUN(a_number_that_is_no_status_is_named_unknown);
    RUN(the_version_is_the_headers);
    RUN(a_detail_is_cut_where_it_does_not_fit);
    return REPORT();
}
