/*
 * The simulator's books against each other (the invariants of sim.h).
 */
#include <stddef.h>

#include "sim.h"

/* S1: settled and run in order, and the pointers point at the first that is not. */
static const char *check_stream(const stream *s)
{
    bool settled = true, ran = true;
    uint32_t waiting = 0;
    uint64_t sequence = 0;
    for (const work *w = s->head; w != NULL; w = w->next) {
        if (w->sequence <= sequence) {
            return "S1: a stream's entries are out of order";
        }
        sequence = w->sequence;
        if ((w->settled && !settled) || (w->ran && !ran)) {
            return "S1: an entry was settled or run before one that is ahead of it";
        }
        if ((settled && !w->settled && s->to_settle != w) || (ran && !w->ran && s->to_run != w)) {
            return "S1: a stream has lost its place";
        }
        settled = w->settled;
        ran = w->ran;
        waiting += !w->ran;
        if (w->sequence <= sim_vclock_get(&sim.host, s->slot) && !(w->settled && w->ran)) {
            return "S2: the host has observed what is not over";
        }
    }
    return waiting != s->waiting ? "S1: entries waiting for their effect are miscounted" : NULL;
}

/* S4: where memory is reserved, and apart from each other. */
static const char *check_mappings(void)
{
    uint64_t bytes = 0, end = 0;
    for (range *at = sim_ranges_after(&sim.mappings, 0); at != NULL;
         at = sim_ranges_after(&sim.mappings, at->end)) {
        const mapping *m = (const mapping *)at;
        const range *there = sim_ranges_find(&sim.reservations, at->start);
        if (there == NULL || at->start < end || at->end - at->start != m->frame->size ||
            m->handle->mappings == 0 || m->handle->frame != m->frame) {
            return "S4: a mapping is where it cannot be";
        }
        end = at->end;
        bytes += at->end - at->start;
    }
    return bytes != sim.mapped_bytes ? "S4: mapped bytes are miscounted" : NULL;
}

/* S3, S5: this process is charged for its own frames and its contexts, and for nothing else. */
static const char *check_charges(void)
{
    uint64_t own = sim.frame_bytes, charged = 0;
    for (int i = 0; i < sim.run->frames_high; i++) {
        own -= sim.shared_frames[i] == NULL ? 0 : sim.shared_frames[i]->size;
    }
    for (int i = 0; i < sim_card_count(); i++) {
        charged += sim_own_bytes(i) - (sim.contexts[i].active ? sim_card(i)->context : 0);
    }
    return own != charged ? "S5: the bytes charged are not those of the frames" : NULL;
}

const char *ebbsim_check(void)
{
    pthread_mutex_lock(&sim.mutex);
    const char *wrong = NULL;
    for (uint32_t i = 0; i < sim.slots && wrong == NULL; i++) {
        wrong = check_stream(sim.streams[i]);
    }
    if (wrong == NULL) {
        wrong = check_mappings();
    }
    if (wrong == NULL && sim.run != NULL) {
        wrong = check_charges();
    }
    pthread_mutex_unlock(&sim.mutex);
    return wrong;
}
