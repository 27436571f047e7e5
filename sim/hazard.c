/*
 * Reports: both sides of a hazard, in words that are enough to find the bug.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { KEPT = 1024 };

static struct {
    ebbsim_hazard *kept;
    unsigned long count;
    ebbsim_hazard_mode mode;
} reports;

/* ---- in words --------------------------------------------------------------------------------- */

static void describe_place(char *text, size_t length, int device, int stream_number)
{
    if (device < 0) {
        snprintf(text, length, "on the host");
    } else if (stream_number == 0) {
        snprintf(text, length, "on the default stream of device %d", device);
    } else {
        snprintf(text, length, "on stream %d of device %d", stream_number, device);
    }
}

static void describe(char *text, size_t length, const ebbsim_side *side, const char *verb)
{
    char place[64];
    describe_place(place, sizeof place, side->device, side->stream);
    snprintf(text, length, "%s %s %s [0x%" PRIx64 ", +%" PRIu64 ") (at %.3f ms, thread %ld)",
             side->call, place, verb, side->address, side->bytes, (double)side->when / 1e6,
             side->thread);
}

static ebbsim_side side_of(const work *w, const ebbsim_range *where)
{
    ebbsim_side side = {
        .device = w->device, .stream = w->stream_number, .when = w->when, .thread = w->thread};
    memcpy(side.call, w->call, sizeof side.call);
    if (where != NULL) {
        side.address = where->address;
        side.bytes = where->bytes;
        side.writes = (where->access & EBBSIM_WRITE) != 0;
    }
    return side;
}

static ebbsim_side side_of_host(const char *call, uint64_t address, uint64_t bytes)
{
    ebbsim_side side = {.device = -1,
                        .stream = -1,
                        .writes = 1,
                        .address = address,
                        .bytes = bytes,
                        .when = sim_now(),
                        .thread = sim_thread_number()};
    snprintf(side.call, sizeof side.call, "%s", call);
    return side;
}

/* The range of w that meets [address, +bytes): the one worth naming. A writing one, if there is. */
static const ebbsim_range *meeting(const work *w, uint64_t address, uint64_t bytes)
{
    const ebbsim_range *found = NULL;
    for (size_t i = 0; i < w->range_count; i++) {
        const ebbsim_range *r = &w->ranges[i];
        if (r->address < address + bytes && address < r->address + r->bytes &&
            (found == NULL || (r->access & EBBSIM_WRITE) != 0)) {
            found = r;
        }
    }
    return found != NULL || w->range_count == 0 ? found : &w->ranges[0];
}

__attribute__((format(printf, 2, 3))) static void file(ebbsim_hazard *hazard, const char *format,
                                                       ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(hazard->text, sizeof hazard->text, format, arguments);
    va_end(arguments);
    if (reports.kept == NULL) {
        reports.kept = calloc(KEPT, sizeof *reports.kept);
    }
    if (reports.kept != NULL && reports.count < KEPT) {
        reports.kept[reports.count] = *hazard;
    }
    reports.count++;
    if (reports.mode != EBBSIM_QUIET) {
        fprintf(stderr, "ebbtide sim: HAZARD %lu: %s\n", reports.count, hazard->text);
    }
    if (reports.mode == EBBSIM_ABORT) {
        abort();
    }
}

/* ---- the kinds -------------------------------------------------------------------------------- */

void sim_report_race(const work *first, const ebbsim_range *there, const work *second,
                     const ebbsim_range *where)
{
    ebbsim_hazard h = {.kind = EBBSIM_HAZARD_RACE,
                       .first = side_of(first, there),
                       .second = side_of(second, where)};
    char a[256], b[256], place[64];
    describe(a, sizeof a, &h.first, h.first.writes ? "writes" : "reads");
    describe(b, sizeof b, &h.second, h.second.writes ? "writes" : "reads");
    describe_place(place, sizeof place, h.first.device, h.first.stream);
    file(&h,
         "race: %s, and is not ordered after what %s. Record an event %s behind the first and let "
         "the "
         "second's stream wait for it, or synchronise in between.",
         b, a, place);
}

void sim_report_unmap(const work *first, const char *call, uint64_t address, uint64_t size)
{
    ebbsim_hazard h = {.kind = EBBSIM_HAZARD_UNMAP,
                       .first = side_of(first, meeting(first, address, size)),
                       .second = side_of_host(call, address, size)};
    char a[256], b[256];
    describe(a, sizeof a, &h.first, h.first.writes ? "writes" : "reads");
    describe(b, sizeof b, &h.second, "takes away");
    file(&h,
         "unfinished work: %s, while %s, and nobody has waited for that. Wait for an event "
         "recorded behind it on its own stream first.",
         b, a);
}

void sim_report_source(const work *w)
{
    ebbsim_range source = {.address = w->from, .bytes = w->bytes, .access = EBBSIM_READ};
    ebbsim_hazard h = {.kind = EBBSIM_HAZARD_SOURCE,
                       .first = side_of(w, &source),
                       .second = side_of_host("the host", w->from, w->bytes)};
    char a[256];
    describe(a, sizeof a, &h.first, "reads");
    file(
        &h,
        "source changed: %s, and the host has written to it before it could know that the copy was "
        "over. Wait for an event recorded behind the copy before refilling the buffer.",
        a);
}

void sim_report_access(const work *w, uint64_t address, int owner)
{
    char what[64] = "nothing";
    if (owner >= 0) {
        snprintf(what, sizeof what, "memory of device %d", owner);
    }
    ebbsim_hazard h = {.kind = owner >= 0 ? EBBSIM_HAZARD_ACCESS : EBBSIM_HAZARD_UNMAPPED,
                       .first = side_of_host(what, address, 0),
                       .second = side_of(w, meeting(w, address, 1))};
    h.first.device = owner;
    char b[256];
    describe(b, sizeof b, &h.second, h.second.writes ? "writes" : "reads");
    if (owner >= 0) {
        file(&h,
             "no access: %s, but 0x%" PRIx64 " is %s, and device %d has no such access to it. Give "
             "it with cuMemSetAccess.",
             b, address, what, w->device);
    } else {
        file(&h, "not mapped: %s, but %s is mapped at 0x%" PRIx64 ".", b, what, address);
    }
}

void sim_report_private(const char *call, uint64_t address, uint64_t size)
{
    ebbsim_hazard h = {.kind = EBBSIM_HAZARD_PRIVATE,
                       .first = side_of_host("a private mapping", address, size),
                       .second = side_of_host(call, address, size)};
    char b[256];
    describe(b, sizeof b, &h.second, "pins");
    file(&h,
         "private file: %s, which is a private mapping of a file. The system copies every page for "
         "that, and where it has the file in huge pages the call never returns. Map the file "
         "shared, and pin that.",
         b);
}

/* ---- asking ----------------------------------------------------------------------------------- */

unsigned long ebbsim_hazards(void)
{
    pthread_mutex_lock(&sim.mutex);
    unsigned long count = reports.count;
    pthread_mutex_unlock(&sim.mutex);
    return count;
}

int ebbsim_hazard_get(unsigned long index, ebbsim_hazard *hazard)
{
    pthread_mutex_lock(&sim.mutex);
    bool there = hazard != NULL && index < reports.count && index < KEPT && reports.kept != NULL;
    if (there) {
        *hazard = reports.kept[index];
    }
    pthread_mutex_unlock(&sim.mutex);
    return there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void ebbsim_hazard_clear(void)
{
    pthread_mutex_lock(&sim.mutex);
    reports.count = 0;
    pthread_mutex_unlock(&sim.mutex);
}

void ebbsim_on_hazard(ebbsim_hazard_mode mode)
{
    pthread_mutex_lock(&sim.mutex);
    reports.mode = mode;
    pthread_mutex_unlock(&sim.mutex);
}

void sim_hazards_reset(void)
{
    free(reports.kept);
    reports.kept = NULL;
    reports.count = 0;
}
