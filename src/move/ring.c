/* The books of a mover's ring: see move.h. */
#include <stdlib.h>
#include <string.h>

#include "move.h"

static ebb__cargo *cargo_number(const ebb__ring *ring, uint64_t number)
{
    return &ring->cargoes[number & (ring->room - 1)];
}

void ebb__ring_begin(ebb__ring *ring, uint64_t bytes)
{
    ring->low = 0;
    ring->bytes = bytes;
    ring->head = 0;
    ring->next += !ring->next; /* 0 is no cargo */
    ring->first = ring->next;
}

void ebb__ring_free(ebb__ring *ring)
{
    free(ring->cargoes);
    free(ring->past);
    *ring = (ebb__ring){0};
}

/* Where the room at the head ends. */
static uint64_t room_ends(const ebb__ring *ring)
{
    if (ring->first == ring->next)
        return ring->bytes;
    uint64_t tail = cargo_number(ring, ring->first)->start;
    return ring->head > tail ? ring->bytes : tail;
}

/* Whether `bytes` may be at `at`: there is room, and little is skipped. At the start, room ends at `front`. */
static bool near(const ebb__ring *ring, uint64_t bytes, uint64_t at, uint64_t front)
{
    bool ahead = at >= ring->head;
    uint64_t end = ahead ? room_ends(ring) : front;
    uint64_t skipped = ahead ? at - ring->head : ring->bytes - ring->head + at - ring->low;
    return at >= ring->low && skipped <= ebb__ring_size(ring) / 8 && at <= end && bytes <= end - at;
}

bool ebb__ring_place(const ebb__ring *ring, uint64_t bytes, uint64_t at, uint64_t *start)
{
    uint64_t front = ring->bytes; /* where the room at the start ends */
    if (ring->first != ring->next) {
        uint64_t tail = cargo_number(ring, ring->first)->start;
        front = ring->head > tail ? tail : ring->low;
    }
    if (near(ring, bytes, at, front))
        *start = at;
    else if (bytes <= room_ends(ring) - ring->head)
        *start = ring->head;
    else if (bytes <= front - ring->low)
        *start = ring->low;
    else
        return false;
    return true;
}

bool ebb__ring_ready(ebb__ring *ring)
{
    uint64_t count = ring->next - ring->first;
    if (count == ring->room) {
        uint64_t room = ring->room ? 2 * ring->room : 16;
        ebb__cargo *cargoes = malloc(room * sizeof *cargoes);
        if (!cargoes)
            return false;
        for (uint64_t n = ring->first; n != ring->next; n++)
            cargoes[n & (room - 1)] = *cargo_number(ring, n);
        free(ring->cargoes);
        ring->cargoes = cargoes;
        ring->room = room;
    }
    /* Every cargo will be past one day, and must find its place then. */
    size_t past = ring->past_count + (size_t)count + 1;
    if (past > ring->past_room) {
        size_t room = 2 * past;
        ebb__cargo *cargoes = realloc(ring->past, room * sizeof *cargoes);
        if (!cargoes)
            return false;
        ring->past = cargoes;
        ring->past_room = room;
    }
    return true;
}

uint64_t ebb__ring_add(ebb__ring *ring, uint64_t start, uint64_t bytes, ebb__flag *arrived)
{
    *cargo_number(ring, ring->next) =
        (ebb__cargo){.start = start, .end = start + bytes, .arrived = arrived};
    ring->head = start + bytes;
    return ring->next++;
}

ebb__cargo *ebb__ring_extensible(const ebb__ring *ring, uint64_t number, uint64_t bytes)
{
    ebb__cargo *cargo = number + 1 == ring->next ? ebb__ring_find(ring, number) : NULL;
    return cargo && !cargo->users && bytes <= room_ends(ring) - ring->head ? cargo : NULL;
}

void ebb__ring_extend(ebb__ring *ring, ebb__cargo *cargo, uint64_t bytes)
{
    cargo->end += bytes;
    ring->head = cargo->end;
}

ebb__cargo *ebb__ring_find(const ebb__ring *ring, uint64_t number)
{
    if (number < ring->first || number >= ring->next)
        return NULL;
    ebb__cargo *cargo = cargo_number(ring, number);
    return cargo->over ? NULL : cargo;
}

ebb__flag *ebb__ring_over(ebb__ring *ring, ebb__cargo *cargo)
{
    ebb__flag *arrived = cargo->arrived;
    cargo->arrived = NULL;
    cargo->over = true;
    for (; ring->first != ring->next && cargo_number(ring, ring->first)->over; ring->first++)
        /* What nobody has read need not be waited for: all writing is on one stream. */
        if (cargo_number(ring, ring->first)->done)
            ring->past[ring->past_count++] = *cargo_number(ring, ring->first);
    return arrived;
}

ebb__cargo *ebb__ring_past(const ebb__ring *ring, uint64_t start, uint64_t end)
{
    for (size_t i = 0; i < ring->past_count; i++)
        if (ring->past[i].start < end && ring->past[i].end > start)
            return &ring->past[i];
    return NULL;
}

uint64_t ebb__ring_free_until(const ebb__ring *ring, uint64_t from, uint64_t end)
{
    for (size_t i = 0; i < ring->past_count; i++) {
        const ebb__cargo *past = &ring->past[i];
        if (past->end > from && past->start < end)
            end = past->start > from ? past->start : from;
    }
    return end;
}

void ebb__ring_forget(ebb__ring *ring, ebb__cargo *past)
{
    *past = ring->past[--ring->past_count];
}

uint64_t ebb__ring_used(const ebb__ring *ring)
{
    if (ring->first == ring->next)
        return 0;
    uint64_t tail = cargo_number(ring, ring->first)->start;
    return ring->head > tail ? ring->head - tail : ring->bytes - tail + ring->head - ring->low;
}

uint64_t ebb__ring_out(const ebb__ring *ring)
{
    uint64_t count = 0;
    for (uint64_t n = ring->first; n != ring->next; n++)
        count += !cargo_number(ring, n)->over;
    return count;
}

/* ---- giving up an end of it ------------------------------------------------------------------------- */

void ebb__ring_in_use(const ebb__ring *ring, uint64_t *from, uint64_t *to)
{
    *from = ring->bytes;
    *to = ring->low;
    for (uint64_t n = ring->first; n != ring->next; n++) {
        const ebb__cargo *cargo = cargo_number(ring, n);
        if (cargo->over || !cargo->users)
            continue;
        *from = *from < cargo->start ? *from : cargo->start;
        *to = *to > cargo->end ? *to : cargo->end;
    }
}

uint64_t ebb__ring_unused(const ebb__ring *ring, uint64_t start, uint64_t end)
{
    for (uint64_t n = ring->first; n != ring->next; n++) {
        const ebb__cargo *cargo = cargo_number(ring, n);
        if (!cargo->over && !cargo->users && cargo->start < end && cargo->end > start)
            return n;
    }
    return 0;
}

ebb__cargo *ebb__ring_read(const ebb__ring *ring, uint64_t start, uint64_t end)
{
    for (uint64_t n = ring->first; n != ring->next; n++) {
        ebb__cargo *cargo = cargo_number(ring, n);
        if (cargo->over && cargo->done && cargo->start < end && cargo->end > start)
            return cargo;
    }
    return NULL;
}

static uint64_t within(const ebb__ring *ring, uint64_t place)
{
    if (place < ring->low)
        return ring->low;
    return place < ring->bytes ? place : ring->bytes;
}

void ebb__ring_narrow(ebb__ring *ring, uint64_t low, uint64_t bytes)
{
    ring->low = low;
    ring->bytes = bytes;
    ring->head = within(ring, ring->head);
    uint64_t last = ring->first; /* that keeps its place: the first does, it is out */
    for (uint64_t n = ring->first; n != ring->next; n++) {
        ebb__cargo *cargo = cargo_number(ring, n);
        cargo->start = within(ring, cargo->start);
        cargo->end = within(ring, cargo->end);
        if (!cargo->over || cargo->done)
            last = n;
    }
    /* What was dropped last is had again at once, or what is left of the room behind `last` could not be
       used before that is over. */
    for (uint64_t n = last; n != ring->next; n++) {
        ring->head = cargo_number(ring, last)->end;
        if (n != last)
            cargo_number(ring, n)->start = cargo_number(ring, n)->end = ring->head;
    }
}

/* ---- the checker ---------------------------------------------------------------------------------- */

static const ebb__cargo *any(const ebb__ring *ring, uint64_t i)
{
    return i < ring->past_count ? &ring->past[i]
                                : cargo_number(ring, ring->first + i - ring->past_count);
}

int ebb__ring_check(const ebb__ring *ring)
{
    uint64_t count = ring->past_count + (ring->next - ring->first);
    if (ring->low > ring->bytes || ring->head < ring->low || ring->head > ring->bytes)
        return 5;
    for (uint64_t i = 0; i < count; i++) {
        const ebb__cargo *a = any(ring, i);
        bool nothing = a->start == a->end && a->over && !a->done;
        if ((a->start >= a->end && !nothing) || a->start < ring->low || a->end > ring->bytes)
            return 1;
        for (uint64_t k = 0; k < i; k++)
            if (any(ring, k)->start < a->end && any(ring, k)->end > a->start)
                return 1;
        if (i < ring->past_count && !a->done)
            return 3;
    }
    if (ring->first == ring->next)
        return 0;
    if (cargo_number(ring, ring->first)->over)
        return 2;
    unsigned wraps = 0;
    for (uint64_t n = ring->first; n != ring->next; n++) {
        const ebb__cargo *a = cargo_number(ring, n);
        if (a->over == (a->arrived != NULL))
            return 2;
        uint64_t before = n == ring->first ? a->start : cargo_number(ring, n - 1)->end;
        wraps += a->start < before;
    }
    if (wraps > 1 || cargo_number(ring, ring->next - 1)->end != ring->head)
        return 4;
    return 0;
}
