/* Whichever driver call of a probe fails, the probe says so, and nothing is left behind. */
#include "ebbtide.h"
#include "ebbtide_sim.h"
#include "harness.h"

/* Counts that should be zero, added up. */
static unsigned long long leaked(void)
{
    ebbsim_census c = {.size = sizeof c};
    ebbsim_census_take(&c);
    return c.reservations + c.handles + c.frames + c.mappings + c.allocations + c.host_blocks +
           c.streams + c.events + c.contexts + c.graphs + c.captures + c.pending_works;
}

static void every_call_may_fail(void)
{
    unsigned long n = 0, fired;
    do {
        ebbsim_reset();
        CHECK_EQ(ebbsim_fail(NULL, ++n, 999), 0);
        ebb_probe_result found = {.size = sizeof found};
        ebb_status status = ebb_probe(SIM, 0, &found);
        fired = ebbsim_failures();
        if (!fired) {
            CHECK_EQ(status, EBB_OK);
        } else if (status == EBB_DRIVER_FAILED) {
            CHECK_HAS(found.detail, "cu");
            CHECK_HAS(found.detail, "(999)");
        } else {
            /* The lookup of a function failed: one we need, or one we can do without. */
            CHECK(status == EBB_DRIVER_INCOMPLETE || (status == EBB_OK && !found.context_events));
        }
        CHECK_EQ(leaked(), 0);
        const char *wrong = ebbsim_check();
        if (wrong)
            FAIL("call %lu: %s", n, wrong);
    } while (fired && n < 1000);
    /* Version, start, count, device, name, memory, two attributes, granularity. */
    CHECK(n > 9 && n < 1000);
    printf("       %lu calls\n", n - 1);
}

int main(void)
{
    RUN(every_call_may_fail);
    return REPORT();
}
