/* Policy: pure, so a table of questions and answers. */
#include "harness.h"
#include "internal.h"

#define MIB UINT64_C(1048576)
#define GIB (1024 * MIB)

static void the_cheapest_candidate_goes_and_the_first_of_equals(void)
{
    for (unsigned code = 0; code < 10 * 10 * 10; code++) {
        unsigned costs[3] = {code % 10, code / 10 % 10, code / 100};
        ebb__candidate shown[3] = {{.cost = costs[0]}, {.cost = costs[1]}, {.cost = costs[2]}};
        for (unsigned count = 1; count <= 3; count++) {
            unsigned best = ebb__policy_pick(shown, count);
            REQUIRE(best < count);
            for (unsigned i = 0; i < count; i++)
                CHECK(i < best ? costs[i] > costs[best] : costs[i] >= costs[best]);
        }
    }
}

static void a_watermark_rises_when_it_was_quiet_and_there_is_room_to_spare(void)
{
    static const struct {
        uint64_t missing, room, limit, quiet;
        unsigned setbacks;
        bool may;
    } cases[] = {
        /* 64 GiB: a thirty-second, 2 GiB, must be left */
        {32 * MIB, 2 * GIB + 32 * MIB, 64 * GIB, 16, 0, true},
        {32 * MIB, 2 * GIB + 32 * MIB - 1, 64 * GIB, 16, 0, false},
        {32 * MIB, 32 * MIB, 64 * GIB, 1000, 0, false},
        /* 1 GiB: two large frames */
        {2 * MIB, 66 * MIB, GIB, 16, 0, true},
        {2 * MIB, 66 * MIB - 1, GIB, 16, 0, false},
        /* 256 MiB: an eighth */
        {2 * MIB, 34 * MIB, 256 * MIB, 16, 0, true},
        {2 * MIB, 34 * MIB - 1, 256 * MIB, 16, 0, false},
        /* too soon; twice as long after each setback, up to eight */
        {2 * MIB, GIB, GIB, 15, 0, false},
        {2 * MIB, GIB, GIB, 31, 1, false},
        {2 * MIB, GIB, GIB, 32, 1, true},
        {2 * MIB, GIB, GIB, 4095, 8, false},
        {2 * MIB, GIB, GIB, 4096, 8, true},
        {2 * MIB, GIB, GIB, 4096, 4000000000u, true},
        /* numbers at the edge */
        {UINT64_MAX, UINT64_MAX, GIB, 16, 0, false},
        {UINT64_MAX - 64 * MIB, UINT64_MAX, GIB, 16, 0, true},
        {1, 0, 0, 16, 0, false},
        {1, 1, 0, 16, 0, true},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool may = ebb__policy_may_rise(cases[i].missing, cases[i].room, cases[i].limit,
                                        cases[i].quiet, cases[i].setbacks);
        if (may != cases[i].may)
            FAIL("case %u: %d", i, may);
    }
}

/* More room, more quiet, or less missing never turns a yes into a no. */
static void may_rise_is_monotonous(void)
{
    uint64_t state = 1;
    for (int i = 0; i < 100000; i++) {
        uint64_t of[5];
        for (int k = 0; k < 5; k++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            of[k] = state >> (20 + state % 40);
        }
        unsigned setbacks = (unsigned)(of[4] % 12);
        if (!ebb__policy_may_rise(of[0], of[1], of[2], of[3], setbacks))
            continue;
        CHECK(ebb__policy_may_rise(of[0] / 2, of[1], of[2], of[3], setbacks));
        CHECK(ebb__policy_may_rise(of[0], of[1] * 2, of[2], of[3], setbacks));
        CHECK(ebb__policy_may_rise(of[0], of[1], of[2], of[3] * 2, setbacks));
        CHECK(!setbacks || ebb__policy_may_rise(of[0], of[1], of[2], of[3], setbacks - 1));
    }
}

int main(void)
{
    RUN(the_cheapest_candidate_goes_and_the_first_of_equals);
    RUN(a_watermark_rises_when_it_was_quiet_and_there_is_room_to_spare);
    RUN(may_rise_is_monotonous);
    return REPORT();
}
