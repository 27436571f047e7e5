/*
 * Movers: weights on their way to the GPU, ahead of their use.
 *
 * All copies are on one stream, the mover's own. That makes the order among them free, and leaves two
 * things to be waited for, both by the GPU:
 *
 *   a user waits for a cargo to arrive         an event behind its copies
 *   a copy waits for the users of its place    an event behind each user's last work, of exactly those
 *                                              past cargoes that it comes to lie on
 *
 *   copies   ---[ A ]--[ B ]----------------wait A--[ C, where A was ]---->
 *   compute  ------- wait A [ uses A ] done A  wait B [ uses B ] --------->
 *
 * The copy of C goes on while B is used. Once the copy stream has waited for a past cargo, every later
 * copy is behind it, so that cargo is forgotten as a whole. An event may be recorded again as soon as
 * the waits for it are queued, so a few events serve for ever.
 *
 * The ring is a VBAR, pinned as long as it is the ring: it counts as any weights do, gets its frames as
 * they do, and no fault is needed per cargo. Where PyTorch would have to do without, it loses pages
 * that nobody uses (give.c): these are unpinned then, and go as any weights do; the rest is the ring, until
 * another is made. What the core must not take from under a copy into a
 * weight's own pages, it knows from the tickets of the mover's stream, which it is told lasts.
 *
 * The mover's lock is taken before the device's, and held while work is queued, never while anything
 * is waited for: changing the ring and destroying the mover are kept apart by `changing` instead.
 */
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "move.h"

/* ---- the driver ----------------------------------------------------------------------------------- */

ebb__device *ebb__mover_reach(const ebb_mover *mover, ebb__scope *scope, ebb_status *status)
{
    ebb__device *device = ebb__device_enter(mover->device, scope, status);
    if (!device)
        return NULL;
    ebb__drop(device);
    return device;
}

void ebb__mover_leave(ebb__device *device, const ebb__scope *scope)
{
    ebb__retake(device);
    ebb__leave(device, scope);
}

ebb_status ebb__mover_failed(ebb__device *device, const char *call, CUresult code)
{
    ebb__retake(device);
    ebb__failed_locked(device, call, code);
    ebb__drop(device);
    return EBB_DRIVER_FAILED;
}

void ebb__mover_lower(ebb_mover *mover, ebb__flag *flag)
{
    flag->next = mover->flags;
    mover->flags = flag;
}

/* A free event, or a new one. */
static ebb_status flag_take(ebb_mover *mover, ebb__device *device, ebb__flag **flag)
{
    *flag = mover->flags;
    if (*flag) {
        mover->flags = (*flag)->next;
        return EBB_OK;
    }
    ebb__flag *fresh = malloc(sizeof *fresh);
    if (!fresh)
        return EBB_NO_HOST_MEMORY;
    CUresult code = device->driver.cuEventCreate(&fresh->event, CU_EVENT_DISABLE_TIMING);
    if (code != CUDA_SUCCESS) {
        free(fresh);
        return ebb__mover_failed(device, "cuEventCreate", code);
    }
    mover->flag_count++;
    *flag = fresh;
    return EBB_OK;
}

ebb_status ebb__mover_raise(ebb_mover *mover, ebb__device *device, CUstream stream,
                            ebb__flag **flag)
{
    bool given = *flag;
    ebb_status status = given ? EBB_OK : flag_take(mover, device, flag);
    if (status != EBB_OK)
        return status;
    CUresult code = device->driver.cuEventRecord((*flag)->event, stream);
    if (code == CUDA_SUCCESS)
        return EBB_OK;
    if (!given)
        ebb__mover_lower(mover, *flag);
    return ebb__mover_failed(device, "cuEventRecord", code);
}

ebb_status ebb__mover_await(ebb_mover *mover, ebb__device *device, ebb__cargo *cargo)
{
    while (cargo->done) {
        ebb__flag *flag = cargo->done;
        CUresult code = device->driver.cuStreamWaitEvent(mover->stream, flag->event, 0);
        if (code != CUDA_SUCCESS)
            return ebb__mover_failed(device, "cuStreamWaitEvent", code);
        mover->waits++;
        cargo->done = flag->next;
        ebb__mover_lower(mover, flag);
    }
    return EBB_OK;
}

ebb_status ebb__mover_follow(ebb_mover *mover, ebb__device *device, uint64_t start, uint64_t end)
{
    ebb__cargo *past;
    while ((past = ebb__ring_past(&mover->ring, start, end))) {
        ebb_status status = ebb__mover_await(mover, device, past);
        if (status != EBB_OK)
            return status;
        ebb__ring_forget(&mover->ring, past);
    }
    return EBB_OK;
}

ebb_status ebb__mover_there(const ebb_mover *mover)
{
    ebb_status status = EBB_INVALID;
    if (mover)
        ebb__device_find(mover->device, &status);
    return status;
}

/* ---- pins that are owed ---------------------------------------------------------------------------- */

void ebb__mover_unpin(ebb_mover *mover, ebb_vbar vbar, uint64_t offset, uint64_t bytes)
{
    ebb_status status = EBB_DRIVER_FAILED;
    for (int i = 0; i < 2 && status == EBB_DRIVER_FAILED; i++)
        status = ebb_vbar_unpin(vbar, offset, bytes, mover->stream);
    ebb__debt *owed = status == EBB_DRIVER_FAILED ? malloc(sizeof *owed) : NULL;
    if (!owed)
        return;
    ebb__os_lock(&mover->mu);
    *owed = (ebb__debt){.next = mover->debts, .vbar = vbar, .offset = offset, .bytes = bytes};
    mover->debts = owed;
    ebb__os_unlock(&mover->mu);
}

ebb_status ebb__mover_pay(ebb_mover *mover)
{
    ebb__os_lock(&mover->mu);
    ebb__debt *list = mover->debts;
    mover->debts = NULL;
    ebb__os_unlock(&mover->mu);
    while (list) {
        ebb__debt *it = list;
        list = it->next;
        ebb__mover_unpin(mover, it->vbar, it->offset, it->bytes); /* which may owe it anew */
        free(it);
    }
    ebb__os_lock(&mover->mu);
    bool paid = !mover->debts;
    ebb__os_unlock(&mover->mu);
    return paid ? EBB_OK : EBB_DRIVER_FAILED;
}

/* ---- the ring itself ---------------------------------------------------------------------------------- */

/* Alone with the ring: no cargo is out, and there will be none. */
static ebb_status begin_change(ebb_mover *mover)
{
    ebb__os_lock(&mover->mu);
    ebb_status status = mover->changing || ebb__ring_out(&mover->ring) ? EBB_BUSY : EBB_OK;
    if (status == EBB_OK)
        mover->changing = true;
    ebb__os_unlock(&mover->mu);
    return status;
}

/* The ring is as it is now: there, or not. */
static ebb_status end_change(ebb_mover *mover, ebb_status status)
{
    ebb__os_lock(&mover->mu);
    if (!mover->pinned)
        ebb__ring_begin(&mover->ring, 0);
    mover->changing = false;
    ebb__os_unlock(&mover->mu);
    return status;
}

/* Unpin the ring's VBAR, behind the last work on it, and give it back. Waits. */
static ebb_status raze(ebb_mover *mover)
{
    ebb__scope scope;
    ebb_status status = EBB_OK;
    if (!mover->vbar.id)
        return EBB_OK;
    if (mover->pinned) {
        ebb__device *device = ebb__mover_reach(mover, &scope, &status);
        if (!device)
            return status;
        ebb__os_lock(&mover->mu);
        ebb__ring *ring = &mover->ring;
        status = ebb__mover_follow(mover, device, 0, mover->size);
        while (status == EBB_OK && ring->piece_count) {
            const ebb__span last = ring->pieces[ring->piece_count - 1];
            status = ebb_vbar_unpin(mover->vbar, last.start, last.end - last.start, mover->stream);
            if (status == EBB_OK)
                ebb__ring_cut(ring, last.start, last.end);
        }
        ebb__os_unlock(&mover->mu);
        ebb__mover_leave(device, &scope);
        if (status != EBB_OK)
            return status;
        mover->pinned = false;
    }
    status = ebb_vbar_destroy(mover->vbar);
    if (status == EBB_OK)
        mover->vbar.id = 0;
    return status;
}

/* As much of the ring is in small pages: PyTorch's segments are mostly small, and a page that is in use
   as a part stays as a whole. More would take the driver too long, when the ring is made. */
static const uint64_t FINE = UINT64_C(128) << 20;

/* Make the ring of a new VBAR: the most important one there is, so whoever can makes room. */
static ebb_status build(ebb_mover *mover, uint64_t bytes)
{
    ebb_vbar_options options = {.size = sizeof options, .bytes = bytes, .fine = FINE};
    ebb_vbar_stats stats = {.size = sizeof stats};
    ebb_vbar fresh = {0};
    uint64_t signature;
    ebb_status status = ebb_vbar_create(mover->device, &options, &fresh);
    if (status != EBB_OK)
        return status;
    mover->vbar = fresh;
    status = ebb_vbar_get_stats(fresh, &stats);
    if (status == EBB_OK)
        status = ebb_vbar_fault(fresh, 0, stats.bytes, mover->stream, &signature);
    if (status != EBB_OK) {
        raze(mover); /* if that fails it is tried again before the next is built */
        return status;
    }
    mover->pinned = true;
    ebb__os_lock(&mover->mu);
    mover->base = stats.address;
    mover->size = stats.bytes;
    ebb__ring_begin(&mover->ring, mover->size);
    ebb__os_unlock(&mover->mu);
    return EBB_OK;
}

ebb_status ebb_mover_set_ring(ebb_mover *mover, uint64_t bytes)
{
    ebb_status status = ebb__mover_there(mover);
    if (status == EBB_OK)
        status = begin_change(mover);
    if (status != EBB_OK)
        return status;
    uint64_t before = mover->pinned ? ebb__ring_size(&mover->ring) : 0;
    const ebb__device *device = ebb__device_find(mover->device, &status);
    uint64_t least = device ? device->frame_bytes[EBB__SMALL] : 0; /* never changes */
    bool in_pieces = mover->ring.piece_count > 1;                  /* then it is put together */
    if (!device || (!in_pieces && bytes <= before && before - bytes < least))
        return end_change(mover, status);
    /* The old one first: its frames are what the new one is made of. */
    status = raze(mover);
    if (status == EBB_OK && bytes)
        status = build(mover, bytes);
    if (status != EBB_OK && before && !mover->vbar.id)
        build(mover, before);
    return end_change(mover, status);
}

/* ---- life ------------------------------------------------------------------------------------------- */

ebb_status ebb_mover_create(ebb_device handle, ebb_mover **mover)
{
    if (!mover)
        return EBB_INVALID;
    ebb__scope scope;
    ebb_status status;
    ebb_mover *fresh = calloc(1, sizeof *fresh);
    if (!fresh)
        return EBB_NO_HOST_MEMORY;
    fresh->device = handle;
    fresh->giver.give = ebb__mover_give;
    ebb__os_mutex_init(&fresh->mu);
    ebb__ring_begin(&fresh->ring, 0);
    ebb__device *device = ebb__device_enter(handle, &scope, &status);
    if (!device) {
        free(fresh);
        return status;
    }
    /* Not blocking: what is on the legacy default stream has nothing to do with it. */
    CUresult code = device->driver.cuStreamCreate(&fresh->stream, CU_STREAM_NON_BLOCKING);
    if (code == CUDA_SUCCESS) {
        device->busy++;
        /* Nobody else queues on it, and what it waits for is outside of captures (cargo.c). */
        status = ebb__stream_keep_locked(device, fresh->stream, EBB_NEVER_CAPTURES);
        if (status == EBB_OK) {
            ebb__giver_add_locked(device, &fresh->giver);
        } else {
            device->driver.cuStreamDestroy(fresh->stream);
            device->busy--;
        }
    } else {
        status = ebb__failed_locked(device, "cuStreamCreate", code);
    }
    ebb__leave(device, &scope);
    if (status == EBB_OK)
        *mover = fresh;
    else
        free(fresh);
    return status;
}

/* Wait for all copies, by an event, with no lock held. */
static ebb_status drain(ebb_mover *mover)
{
    ebb__scope scope;
    ebb_status status;
    ebb__flag *flag = NULL;
    ebb__device *device = ebb__mover_reach(mover, &scope, &status);
    if (!device)
        return status;
    ebb__os_lock(&mover->mu);
    status = ebb__mover_raise(mover, device, mover->stream, &flag);
    ebb__os_unlock(&mover->mu);
    if (status == EBB_OK) {
        CUresult code = device->driver.cuEventSynchronize(flag->event);
        if (code != CUDA_SUCCESS)
            status = ebb__mover_failed(device, "cuEventSynchronize", code);
        ebb__os_lock(&mover->mu);
        ebb__mover_lower(mover, flag);
        ebb__os_unlock(&mover->mu);
    }
    ebb__mover_leave(device, &scope);
    return status;
}

/* Give events and stream back, the stream last: until then the mover could go on. */
static ebb_status dismantle(ebb_mover *mover)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = ebb__device_enter(mover->device, &scope, &status);
    if (!device)
        return status;
    while (mover->flags && status == EBB_OK) {
        ebb__flag *flag = mover->flags;
        CUresult code = device->driver.cuEventDestroy(flag->event);
        if (code != CUDA_SUCCESS) {
            status = ebb__failed_locked(device, "cuEventDestroy", code);
            break;
        }
        mover->flags = flag->next;
        mover->flag_count--;
        free(flag);
    }
    if (status == EBB_OK)
        status = ebb__marks_end_locked(mover, device);
    if (status == EBB_OK) {
        ebb__stream_part_locked(device, mover->stream);
        CUresult code = device->driver.cuStreamDestroy(mover->stream);
        if (code == CUDA_SUCCESS) {
            /* Who asks it now finds no ring. */
            ebb__giver_remove_locked(device, &mover->giver);
            device->busy--;
        } else {
            status = ebb__failed_locked(device, "cuStreamDestroy", code);
        }
    }
    ebb__leave(device, &scope);
    return status;
}

ebb_status ebb_mover_destroy(ebb_mover *mover)
{
    if (!mover)
        return EBB_OK;
    ebb_status status = ebb__mover_there(mover);
    if (status == EBB_OK)
        status = begin_change(mover);
    if (status != EBB_OK)
        return status;
    status = ebb__mover_pay(mover);
    if (status == EBB_OK)
        status = raze(mover);
    if (status == EBB_OK)
        status = drain(mover);
    if (status == EBB_OK)
        status = dismantle(mover);
    if (status != EBB_OK)
        return end_change(mover, status);
    ebb__ring_free(&mover->ring);
    free(mover->marks);
    free(mover);
    return EBB_OK;
}

/* ---- what it says of itself -------------------------------------------------------------------------- */

ebb_stream ebb_mover_stream(const ebb_mover *mover)
{
    return mover ? mover->stream : NULL;
}

uint64_t ebb_mover_head(ebb_mover *mover, uint64_t *start, uint64_t *bytes)
{
    uint64_t first = 0, all = 0, head = 0;
    if (ebb__mover_there(mover) == EBB_OK) {
        ebb__os_lock(&mover->mu);
        all = ebb__ring_size(&mover->ring);
        first = all ? mover->base + mover->ring.pieces[0].start : 0;
        head = all ? mover->base + mover->ring.head : 0;
        ebb__os_unlock(&mover->mu);
    }
    if (start)
        *start = first;
    if (bytes)
        *bytes = all;
    return head;
}

uint64_t ebb_mover_room(ebb_mover *mover, uint64_t bytes, uint64_t least)
{
    if (ebb__mover_there(mover) != EBB_OK)
        return 0;
    ebb__os_lock(&mover->mu);
    uint64_t room = mover->changing ? 0 : ebb__ring_room(&mover->ring, bytes, least);
    ebb__os_unlock(&mover->mu);
    return room;
}

ebb_status ebb_mover_get_stats(ebb_mover *mover, ebb_mover_stats *stats)
{
    if (!stats || stats->size < sizeof *stats)
        return EBB_INVALID;
    ebb_status status = ebb__mover_there(mover);
    if (status != EBB_OK)
        return status;
    ebb__os_lock(&mover->mu);
    const ebb__ring *ring = &mover->ring;
    size_t pieces = ring->piece_count;
    *stats = (ebb_mover_stats){
        .size = stats->size,
        .ring = ebb__ring_size(ring),
        .address = pieces ? mover->base + ring->pieces[0].start : 0,
        .end = pieces ? mover->base + ring->pieces[pieces - 1].end : 0,
        .pieces = pieces,
        .ring_used = ebb__ring_used(ring),
        .cargoes_out = ebb__ring_out(ring),
        .cargoes = mover->cargoes,
        .staged = mover->staged,
        .filled = atomic_load(&mover->filled),
        .copies = atomic_load(&mover->copies),
        .waits = mover->waits,
        .no_room = mover->no_room,
        .given_up = mover->given_up,
    };
    ebb__os_unlock(&mover->mu);
    return EBB_OK;
}

static uint64_t flags_in(const ebb__flag *flag)
{
    uint64_t count = 0;
    for (; flag; flag = flag->next)
        count++;
    return count;
}

int ebb__mover_check(ebb_mover *mover)
{
    ebb__os_lock(&mover->mu);
    const ebb__ring *ring = &mover->ring;
    int wrong = mover->changing ? 0 : ebb__ring_check(ring);
    uint64_t count = flags_in(mover->flags);
    for (size_t i = 0; i < ring->past_count; i++)
        count += flags_in(ring->past[i].done);
    for (uint64_t n = ring->first; n != ring->next; n++) {
        const ebb__cargo *cargo = &ring->cargoes[n & (ring->room - 1)];
        count += (cargo->arrived != NULL) + flags_in(cargo->done);
    }
    if (!wrong && !mover->changing && count != mover->flag_count)
        wrong = 9;
    ebb__os_unlock(&mover->mu);
    return wrong;
}
