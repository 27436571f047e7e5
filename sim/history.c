/*
 * Who touched what: the last write of every byte of every frame and pinned host block, and the reads
 * since, as far as the host has not observed them to be over.
 *
 * Kept by physical place, not by address, so that a frame that is mapped twice, or moves from one
 * page to another, keeps its past. Per object a tree of pieces, each with one writer and at most one
 * reader per stream (its latest): a new access races with an older one if and only if it is not
 * ordered after the newest of that stream, so nothing else need be kept.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

typedef struct piece {
    range node; /* first; offsets in the object */
    work *writer;
    work **readers;
    uint32_t reader_count, reader_room;
} piece;

static bool overlap(uint64_t a, uint64_t a_size, uint64_t b, uint64_t b_size)
{
    return a < b + b_size && b < a + a_size;
}

/* ---- pieces ----------------------------------------------------------------------------------- */

static piece *piece_new(memory_object *object, uint64_t start, uint64_t end)
{
    piece *p = calloc(1, sizeof *p);
    if (p == NULL) {
        abort(); /* a simulator that forgets would call wrong programs right */
    }
    p->node.start = start;
    p->node.end = end;
    sim_ranges_insert(&object->pieces, &p->node);
    sim.pieces++;
    if (object->pieces.count == 1) { /* the first: from now on it is swept */
        object->next = sim.objects;
        object->previous = NULL;
        if (sim.objects != NULL) {
            sim.objects->previous = object;
        }
        sim.objects = object;
    }
    return p;
}

static void drop_readers(piece *p)
{
    for (uint32_t i = 0; i < p->reader_count; i++) {
        sim_work_unref(p->readers[i]);
    }
    p->reader_count = 0;
}

static void piece_free(memory_object *object, piece *p)
{
    sim_ranges_remove(&object->pieces, &p->node);
    sim.pieces--;
    if (p->writer != NULL) {
        sim_work_unref(p->writer);
    }
    drop_readers(p);
    free(p->readers);
    free(p);
    if (object->pieces.count == 0) {
        if (object->previous != NULL) {
            object->previous->next = object->next;
        } else {
            sim.objects = object->next;
        }
        if (object->next != NULL) {
            object->next->previous = object->previous;
        }
    }
}

static void add_reader(piece *p, work *w)
{
    for (uint32_t i = 0; i < p->reader_count; i++) {
        if (p->readers[i]->slot == w->slot) {
            /* The later read stands for both: what is ordered after it is so after the earlier. */
            sim_work_unref(p->readers[i]);
            p->readers[i] = w;
            w->refs++;
            return;
        }
    }
    if (p->reader_count == p->reader_room) {
        p->reader_room = p->reader_room == 0 ? 2 : p->reader_room * 2;
        p->readers = realloc(p->readers, p->reader_room * sizeof(work *));
        if (p->readers == NULL) {
            abort();
        }
    }
    p->readers[p->reader_count++] = w;
    w->refs++;
}

/* Cut at `at`; returns the upper part. */
static piece *cut(memory_object *object, piece *p, uint64_t at)
{
    uint64_t end = p->node.end;
    p->node.end = at;
    piece *upper = piece_new(object, at, end);
    upper->writer = p->writer;
    if (upper->writer != NULL) {
        upper->writer->refs++;
    }
    for (uint32_t i = 0; i < p->reader_count; i++) {
        add_reader(upper, p->readers[i]);
    }
    return upper;
}

/* Forget what the host knows to be over. true: nothing is left. */
static bool forget_the_past(piece *p)
{
    if (p->writer != NULL && sim_observed(p->writer)) {
        sim_work_unref(p->writer);
        p->writer = NULL;
    }
    for (uint32_t i = 0; i < p->reader_count;) {
        if (sim_observed(p->readers[i])) {
            sim_work_unref(p->readers[i]);
            p->readers[i] = p->readers[--p->reader_count];
        } else {
            i++;
        }
    }
    return p->writer == NULL && p->reader_count == 0;
}

/* ---- a new access ----------------------------------------------------------------------------- */

/* The state of one note: the work, the range as it named it, and whether all conflicts have run. */
typedef struct note {
    work *w;
    const ebbsim_range *named;
    const vclock *order;
    const memory_object *object;
    bool clear;
} note;

/* The range by which an earlier work touched the same object, as it named it: by another address,
   where the frame has moved or is mapped twice. */
static const ebbsim_range *range_in(const work *earlier, const note *n)
{
    const ebbsim_range *best = &earlier->ranges[0];
    for (size_t i = 0; i < earlier->range_count; i++) {
        const ebbsim_range *r = &earlier->ranges[i];
        const mapping *m = sim_mapping_at(r->address);
        const host_block *b = sim_host_block_at(r->address);
        bool same =
            (m != NULL && &m->frame->object == n->object) || (b != NULL && &b->object == n->object);
        bool likely = m == NULL && b == NULL; /* unmapped since then */
        if (same) {
            return r;
        }
        best = likely ? r : best;
    }
    return best;
}

static void meet(note *n, work *earlier)
{
    work *w = n->w;
    if (earlier == w) {
        return;
    }
    bool ordered =
        earlier->slot == w->slot || earlier->sequence <= sim_vclock_get(n->order, earlier->slot);
    if (!ordered && w->reported != earlier) {
        w->reported = earlier;
        sim_report_race(earlier, range_in(earlier, n), w, n->named);
    }
}

/* What w is about to overwrite must be read, or written, first; and so must be written what it
   reads of pinned memory, because the bytes there now are those it is held to. */
static void make_way(note *n, work *earlier)
{
    if (earlier != n->w && !n->w->now && n->w->effect != EFFECT_NONE) {
        n->clear &= sim_run(earlier->slot, earlier->sequence);
    }
}

static void meet_piece(note *n, piece *p)
{
    bool writes = (n->named->access & EBBSIM_WRITE) != 0;
    forget_the_past(p);
    if (p->writer != NULL) {
        meet(n, p->writer);
        if (writes || n->w->source_pinned) {
            make_way(n, p->writer);
        }
    }
    for (uint32_t i = 0; writes && i < p->reader_count; i++) {
        meet(n, p->readers[i]);
        make_way(n, p->readers[i]);
    }
}

/* The piece that starts at `at` and ends at or before `end`: cut out, or made. */
static piece *piece_at(memory_object *object, uint64_t at, uint64_t end)
{
    piece *p = (piece *)sim_ranges_after(&object->pieces, at);
    if (p == NULL || p->node.start >= end) {
        return piece_new(object, at, end);
    }
    if (p->node.start > at) {
        return piece_new(object, at, p->node.start);
    }
    if (p->node.start < at) {
        p = cut(object, p, at);
    }
    if (p->node.end > end) {
        cut(object, p, end);
    }
    return p;
}

/* The pieces of [start, end) become one, which w has written: the first of them, so that whoever writes
   the same memory again and again finds its piece where it was. */
static void overwrite(piece *first, uint64_t end, work *w)
{
    w->refs++;
    first->node.end = end;
    drop_readers(first);
    if (first->writer != NULL) {
        sim_work_unref(first->writer);
    }
    first->writer = w;
}

static void note_object(note *n, memory_object *object, uint64_t start, uint64_t end)
{
    bool writes = (n->named->access & EBBSIM_WRITE) != 0;
    piece *first = NULL;
    n->object = object;
    for (uint64_t at = start; at < end;) {
        piece *p = piece_at(object, at, end);
        at = p->node.end;
        meet_piece(n, p);
        if (!writes) {
            add_reader(p, n->w);
        } else if (first == NULL) {
            first = p;
        } else {
            piece_free(object, p);
        }
    }
    if (first != NULL) {
        overwrite(first, end, n->w);
    }
}

/*
 * A mapping knows who used it, apart from what its frame remembers: where a frame is mapped twice, a
 * later work through one address hides an earlier one through the other. The latest work of each
 * stream is enough: what is over when it is over is over.
 */
static void note_mapping(mapping *m, work *w)
{
    uint32_t free_place = m->user_count;
    for (uint32_t i = 0; i < m->user_count; i++) {
        if (m->users[i]->slot == w->slot || sim_observed(m->users[i])) {
            free_place = i;
            if (m->users[i]->slot == w->slot) {
                break;
            }
        }
    }
    if (free_place < m->user_count) {
        sim_work_unref(m->users[free_place]);
    } else {
        work **users = realloc(m->users, (m->user_count + 1) * sizeof(work *));
        if (users == NULL) {
            abort();
        }
        m->users = users;
        m->user_count++;
    }
    m->users[free_place] = w;
    w->refs++;
}

/* A word that is waited for, or will be written: meant to be touched by several at once, so it races
   with nobody; but it must be there until its turn has come. */
static void note_word(work *w)
{
    mapping *m = w->range_count > 0 ? sim_mapping_at(w->ranges[0].address) : NULL;
    if (m != NULL) {
        note_mapping(m, w);
    }
}

bool sim_history_note(work *w)
{
    if (w->kind != ENTRY_WORK) {
        note_word(w);
        return true;
    }
    note n = {.w = w, .order = &sim.streams[w->slot]->order, .clear = true};
    for (size_t i = 0; i < w->range_count; i++) {
        n.named = &w->ranges[i];
        uint64_t at = n.named->address, end = at + n.named->bytes;
        while (at < end) {
            mapping *m = sim_mapping_at(at);
            host_block *b = m == NULL ? sim_host_block_at(at) : NULL;
            if (m == NULL && b == NULL) {
                break; /* host memory that is not pinned: the call itself dealt with it */
            }
            const range *where = m != NULL ? &m->node : &b->node;
            if (b != NULL && (n.named->access & EBBSIM_WRITE) != 0) {
                sim_sources_settle(n.named->address, n.named->bytes);
            }
            uint64_t stop = where->end < end ? where->end : end;
            if (m != NULL) {
                note_mapping(m, w);
            }
            note_object(&n, m != NULL ? &m->frame->object : &b->object, at - where->start,
                        stop - where->start);
            at = stop;
        }
    }
    return n.clear;
}

/* ---- leaving ---------------------------------------------------------------------------------- */

static bool touches(const work *w, uint64_t address, uint64_t size)
{
    for (size_t i = 0; i < w->range_count; i++) {
        if (overlap(w->ranges[i].address, w->ranges[i].bytes, address, size)) {
            return true;
        }
    }
    return false;
}

/* Memory is taken from under an unfinished work: report it, once for each call that does, and let the
   work have its effect while there is something to have it on. */
static void take_from(work *w, const char *call, uint64_t address, uint64_t size)
{
    if (w == NULL || w->left == sim.calls_taking || sim_observed(w)) {
        return;
    }
    w->left = sim.calls_taking;
    sim_report_unmap(w, call, address, size);
    sim_run(w->slot, w->sequence); /* or it would write through a hole */
    if (!w->settled || w->end > sim_now()) {
        sim.contexts[w->device].lost = CUDA_ERROR_ILLEGAL_ADDRESS; /* as a GPU's would be */
    }
}

static void leave_words(const char *call, uint64_t address, uint64_t size);

void sim_history_leave(memory_object *object, const char *call, uint64_t address, uint64_t size)
{
    sim.calls_taking++;
    leave_words(call, address, size);
    for (range *at = sim_ranges_after(&object->pieces, 0), *next; at != NULL; at = next) {
        piece *p = (piece *)at;
        next = sim_ranges_after(&object->pieces, at->end);
        if (forget_the_past(p)) {
            piece_free(object, p);
            continue;
        }
        for (uint32_t i = 0; i <= p->reader_count; i++) {
            work *w = i == p->reader_count ? p->writer : p->readers[i];
            if (w != NULL && touches(w, address, size)) {
                take_from(w, call, address, size);
            }
        }
    }
}

/* Words in memory that is not a mapping of its own. */
static void leave_words(const char *call, uint64_t address, uint64_t size)
{
    for (uint32_t i = 0; i < sim.slots; i++) {
        for (work *w = sim.streams[i]->head, *next; w != NULL; w = next) {
            next = w->next;
            if (w->kind != ENTRY_WORK && touches(w, address, size)) {
                w->refs++;
                take_from(w, call, address, size);
                next = w->next;
                sim_work_unref(w);
            }
        }
    }
}

void sim_history_leave_mapping(mapping *m, const char *call)
{
    for (uint32_t i = 0; i < m->user_count; i++) {
        take_from(m->users[i], call, m->node.start, m->node.end - m->node.start);
    }
}

void sim_history_forget_mapping(mapping *m)
{
    for (uint32_t i = 0; i < m->user_count; i++) {
        sim_work_unref(m->users[i]);
    }
    free(m->users);
    m->users = NULL;
    m->user_count = 0;
}

void sim_history_forget(memory_object *object)
{
    while (object->pieces.root != NULL) {
        piece_free(object, (piece *)object->pieces.root);
    }
}

void sim_history_sweep(void)
{
    for (memory_object *object = sim.objects, *next_object; object != NULL; object = next_object) {
        next_object = object->next;
        for (range *at = sim_ranges_after(&object->pieces, 0), *next; at != NULL; at = next) {
            next = sim_ranges_after(&object->pieces, at->end);
            if (forget_the_past((piece *)at)) {
                piece_free(object, (piece *)at);
            }
        }
    }
    sim.sweep_at = 1024 + 2 * sim.pieces; /* so that sweeping costs a constant per access */
}
