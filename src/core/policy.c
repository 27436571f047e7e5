/*
 * Policy: pure functions of what they are shown. Nothing here touches a device, so that each can be
 * tested by a table, replaced, and replayed.
 */
#include "internal.h"

unsigned ebb__policy_pick(const ebb__candidate *candidates, unsigned count)
{
    unsigned best = 0;
    for (unsigned i = 1; i < count; i++)
        if (candidates[i].cost < candidates[best].cost)
            best = i;
    return best;
}

/*
 * Two kinds of hysteresis. In bytes: beside what is missing, a thirty-second of the limit and at
 * least two large frames must be left over, so that a request of ordinary size does not take back at
 * once what has just risen. In time, counted in faults: after an eviction a VBAR waits for a round
 * of them, and twice as long each time that a rise was followed by an eviction.
 */
bool ebb__policy_may_rise(uint64_t missing, uint64_t room, uint64_t limit, uint64_t quiet,
                          unsigned setbacks)
{
    enum { FAULTS = 16, MOST_SETBACKS = 8 };
    uint64_t least = UINT64_C(2) << EBB__LARGE_SHIFT;
    uint64_t margin = limit / 32;
    /* A card on which two large frames are much gets along with less. */
    if (margin < least)
        margin = limit / 8 < least ? limit / 8 : least;
    if (quiet < (uint64_t)FAULTS << (setbacks < MOST_SETBACKS ? setbacks : MOST_SETBACKS))
        return false;
    return room >= margin && room - margin >= missing;
}

/*
 * At once, and then after 32, 1,024 ... times that it was not asked, as long as it does not help: a
 * loop that needs its segments again in every step is left alone after two or three of them.
 */
bool ebb__policy_may_ask(uint64_t pressures, unsigned setbacks)
{
    enum { SHIFT = 5, MOST_SETBACKS = 4 };
    return pressures >= UINT64_C(1)
                            << SHIFT * (setbacks < MOST_SETBACKS ? setbacks : MOST_SETBACKS);
}
