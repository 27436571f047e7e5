/* The books of a mover's ring: see move.h. */
#include <stdlib.h>
#include <string.h>

#include "move.h"

static ebb__cargo *cargo_number(const ebb__ring *ring, uint64_t number)
{
    return &ring->cargoes[number & (ring->room - 1)];
}

static bool lies_on(const ebb__cargo *cargo, uint64_t start, uint64_t end)
{
    return cargo->start < end && cargo->end > start;
}

void ebb__ring_begin(ebb__ring *ring, uint64_t bytes)
{
    ring->pieces[0] = (ebb__span){.start = 0, .end = bytes};
    ring->piece_count = bytes > 0;
    ring->head = 0;
    ring->next += !ring->next; /* 0 is no cargo */
    ring->first = ring->next;
}

uint64_t ebb__ring_size(const ebb__ring *ring)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < ring->piece_count; i++)
        bytes += ring->pieces[i].end - ring->pieces[i].start;
    return bytes;
}

void ebb__ring_free(ebb__ring *ring)
{
    free(ring->cargoes);
    free(ring->past);
    *ring = (ebb__ring){0};
}

/* ---- places ------------------------------------------------------------------------------------------ */

static bool is_empty(const ebb__ring *ring)
{
    return ring->first == ring->next;
}

static uint64_t tail_of(const ebb__ring *ring)
{
    return cargo_number(ring, ring->first)->start;
}

/*
 * The i-th stretch that is free, from the head on, round the end, to the tail; false: there are no more. A
 * piece is a stretch, or what is free of it; the one with the head is the first and, from its start on, the
 * last. It may be of no bytes.
 */
static bool stretch(const ebb__ring *ring, size_t i, ebb__span *free)
{
    size_t count = ring->piece_count, at = 0;
    while (at < count && ring->pieces[at].end < ring->head)
        at++;
    at += i;
    if (i > count || at > 2 * count || !count)
        return false;
    bool round = at >= count;
    *free = ring->pieces[at % count];
    if (!round && free->start < ring->head)
        free->start = ring->head;
    if (is_empty(ring))
        return true;
    uint64_t tail = tail_of(ring);
    bool ahead = ring->head > tail; /* the tail is behind the head, and met after the end */
    if (round && !ahead)
        return false;
    if (round == ahead && free->end > tail)
        free->end = free->start < tail ? tail : free->start;
    return true;
}

/* How much is free at a place. */
static uint64_t free_at(const ebb__ring *ring, uint64_t at)
{
    ebb__span free;
    for (size_t i = 0; stretch(ring, i, &free); i++)
        if (at >= free.start && at < free.end)
            return free.end - at;
    return 0;
}

/* Whether `bytes` may be at `at`: there is room, and no more is skipped than may be. */
static bool near(const ebb__ring *ring, uint64_t bytes, uint64_t at, uint64_t skip)
{
    uint64_t skipped = at - ring->head;
    if (at < ring->head) /* round the end */
        skipped = ring->pieces[ring->piece_count - 1].end - ring->head + at - ring->pieces[0].start;
    return skipped <= skip && bytes <= free_at(ring, at);
}

bool ebb__ring_place(const ebb__ring *ring, uint64_t bytes, uint64_t at, uint64_t skip,
                     uint64_t *start)
{
    ebb__span free;
    *start = at;
    if (ring->piece_count && near(ring, bytes, at, skip))
        return true;
    for (size_t i = 0; stretch(ring, i, &free); i++) {
        *start = free.start;
        if (bytes <= free.end - free.start)
            return true;
    }
    return false;
}

uint64_t ebb__ring_room(const ebb__ring *ring, uint64_t bytes, uint64_t least)
{
    uint64_t most = 0;
    ebb__span free;
    for (size_t i = 0; stretch(ring, i, &free); i++) {
        uint64_t room = free.end - free.start;
        most = most < room ? room : most;
        if (most >= bytes || (most && most >= least))
            break;
    }
    return bytes < most ? bytes : most;
}

/* ---- cargoes ----------------------------------------------------------------------------------------- */

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
    return cargo && !cargo->users && bytes <= free_at(ring, ring->head) ? cargo : NULL;
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

/* The first one of those that are over and come last; if `unread`, that nobody has read either. One that
   is out comes before them, or there are none. */
static uint64_t last_ones(const ebb__ring *ring, bool unread)
{
    uint64_t n = ring->next;
    while (n != ring->first && cargo_number(ring, n - 1)->over &&
           !(unread && cargo_number(ring, n - 1)->done))
        n--;
    return n == ring->first ? ring->next : n;
}

/* The room that the last ones had is had again. Their numbers are not: whoever has one may ask for it. */
static void take_back(ebb__ring *ring, uint64_t from)
{
    if (from == ring->next)
        return;
    ring->head = cargo_number(ring, from - 1)->end;
    for (uint64_t n = from; n != ring->next; n++) {
        ebb__cargo *cargo = cargo_number(ring, n);
        if (cargo->done)
            ring->past[ring->past_count++] = *cargo;
        cargo->done = NULL;
        cargo->start = cargo->end = ring->head;
    }
}

/* Cargoes up to which what is dropped is room at once: of those that come to nothing, behind one that is in
   use for long, there could be any number. */
enum { FEW = 256 };

bool ebb__ring_recede(ebb__ring *ring)
{
    uint64_t from = last_ones(ring, false), head = ring->head;
    take_back(ring, from);
    return head != ring->head;
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
    if (ring->next - ring->first <= FEW)
        take_back(ring, last_ones(ring, true));
    return arrived;
}

ebb__cargo *ebb__ring_past(const ebb__ring *ring, uint64_t start, uint64_t end)
{
    for (size_t i = 0; i < ring->past_count; i++)
        if (lies_on(&ring->past[i], start, end))
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
    uint64_t bytes = is_empty(ring) ? 0 : ebb__ring_size(ring);
    ebb__span free;
    for (size_t i = 0; bytes && stretch(ring, i, &free); i++)
        bytes -= free.end - free.start;
    return bytes;
}

uint64_t ebb__ring_out(const ebb__ring *ring)
{
    uint64_t count = 0;
    for (uint64_t n = ring->first; n != ring->next; n++)
        count += !cargo_number(ring, n)->over;
    return count;
}

/* ---- giving up some of it --------------------------------------------------------------------------- */

bool ebb__ring_in_use(const ebb__ring *ring, uint64_t start, uint64_t end)
{
    for (uint64_t n = ring->first; n != ring->next; n++) {
        const ebb__cargo *cargo = cargo_number(ring, n);
        if (!cargo->over && cargo->users && lies_on(cargo, start, end))
            return true;
    }
    return false;
}

uint64_t ebb__ring_unused(const ebb__ring *ring, uint64_t start, uint64_t end)
{
    for (uint64_t n = ring->first; n != ring->next; n++) {
        const ebb__cargo *cargo = cargo_number(ring, n);
        if (!cargo->over && !cargo->users && lies_on(cargo, start, end))
            return n;
    }
    return 0;
}

ebb__cargo *ebb__ring_read(const ebb__ring *ring, uint64_t start, uint64_t end)
{
    for (uint64_t n = ring->first; n != ring->next; n++) {
        ebb__cargo *cargo = cargo_number(ring, n);
        if (cargo->over && cargo->done && lies_on(cargo, start, end))
            return cargo;
    }
    return NULL;
}

/* Take a range out of the piece that has it. */
static void cut_piece(ebb__ring *ring, uint64_t start, uint64_t end)
{
    size_t i = 0, keep = 0;
    while (ring->pieces[i].end < end)
        i++;
    const ebb__span left[] = {{ring->pieces[i].start, start}, {end, ring->pieces[i].end}};
    for (size_t side = 0; side < 2; side++)
        keep += left[side].start < left[side].end;
    memmove(&ring->pieces[i + keep], &ring->pieces[i + 1],
            (ring->piece_count - i - 1) * sizeof *ring->pieces);
    ring->piece_count += keep - 1;
    for (size_t side = 0; side < 2; side++)
        if (left[side].start < left[side].end)
            ring->pieces[i++] = left[side];
}

void ebb__ring_cut(ebb__ring *ring, uint64_t start, uint64_t end)
{
    cut_piece(ring, start, end);
    for (uint64_t n = ring->first; n != ring->next; n++) {
        ebb__cargo *cargo = cargo_number(ring, n);
        if (cargo->over && !cargo->done)
            cargo->end = cargo->start; /* nobody has anything there any more */
    }
    take_back(ring, last_ones(ring, true));
}

/* ---- the checker ---------------------------------------------------------------------------------- */

static const ebb__cargo *any(const ebb__ring *ring, uint64_t i)
{
    return i < ring->past_count ? &ring->past[i]
                                : cargo_number(ring, ring->first + i - ring->past_count);
}

static bool in_a_piece(const ebb__ring *ring, const ebb__cargo *cargo)
{
    for (size_t i = 0; i < ring->piece_count; i++)
        if (cargo->start >= ring->pieces[i].start && cargo->end <= ring->pieces[i].end)
            return true;
    return false;
}

int ebb__ring_check(const ebb__ring *ring)
{
    uint64_t count = ring->past_count + (ring->next - ring->first);
    for (size_t i = 0; i < ring->piece_count; i++)
        if (ring->pieces[i].start >= ring->pieces[i].end ||
            (i && ring->pieces[i].start <= ring->pieces[i - 1].end))
            return 5;
    for (uint64_t i = 0; i < count; i++) {
        const ebb__cargo *a = any(ring, i);
        bool nothing = a->start == a->end && a->over && !a->done;
        if (!nothing && (a->start >= a->end || !in_a_piece(ring, a)))
            return 1;
        for (uint64_t k = 0; k < i; k++)
            if (lies_on(any(ring, k), a->start, a->end))
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
