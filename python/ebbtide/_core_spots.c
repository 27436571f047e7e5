/*
 * Spots, where in the ring a unit has been. For each there are tensors over the unit's weights there, and to
 * make those of many small layers takes as long as to compute with them. So a unit goes where it was.
 *
 * Mostly that comes about by itself: what comes in a pass is a number of rings, or a part of one. If not, then
 * all units are a little further on in each pass, and never at a spot again. A unit that finds itself at new
 * ones, time and again, drifts: from then on it goes to the next of a few, a part of its size, or of the
 * ring's, apart. That skips a little of the ring; for many small layers, whose spots are to be `few`, more.
 */
#include "_core.h"

enum { DRIFTS = 4, GRID = 5, COARSE = 2, ALIGNMENT = 512, PAGE = 2 << 20 };

uint64_t spots_near(spots *s, uint64_t size, uint64_t head, uint64_t start, uint64_t ring, bool few)
{
    uint64_t behind = 0, lowest = 0;
    if (start != s->start)
        *s = (spots){.start = start}; /* it is another ring */
    for (unsigned i = 0; i < s->count; i++) {
        uint64_t at = s->at[i];
        if (at >= head && (!behind || at < behind))
            behind = at;
        if (!lowest || at < lowest)
            lowest = at;
    }
    if (!s->drifts)
        return behind ? behind : lowest;
    uint64_t grid = (size > ring / 2 ? size : ring / 2) / (few ? COARSE : GRID);
    /* A page that a unit has a part of cannot be given to tensors as long as that is in use. */
    uint64_t step = grid < PAGE ? ALIGNMENT : PAGE;
    grid = grid ? (grid + step - 1) / step * step : step;
    uint64_t next = start + ((head > start ? head - start : 0) + grid - 1) / grid * grid;
    /* What is left before the end would be a spot of its own, or several. */
    bool round = few && next >= start + ring;
    if (round)
        next = start;
    return behind && (round || behind < next) ? behind : next;
}

void spots_add(spots *s, uint64_t at)
{
    for (unsigned i = 0; i < s->count; i++) {
        if (s->at[i] == at) {
            s->new_in_a_row = 0;
            return;
        }
    }
    s->drifts = s->drifts || ++s->new_in_a_row > DRIFTS || s->count == SPOTS;
    if (s->count == SPOTS)
        s->count = 0; /* as there are tensors for so many, about */
    s->at[s->count++] = at;
}
