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
 * they do, and no fault is needed per cargo. What the core must not take from under a copy into a
 * weight's own pages, it knows from the tickets of the mover's stream, which it is told lasts.
 *
 * The mover's lock is taken before the device's, and held while work is queued, never while anything
 * is waited for: changing the ring and destroying the mover are kept apart by `changing` instead.
 */
#include <stdlib.h>
#include <string.h>

#include "fast.h"
#include "internal.h"
#include "move.h"

/* A pin that the driver would not let us take back; tried again at the next occasion. */
typedef struct debt {
    struct debt *next;
    ebb_vbar vbar;
    uint64_t offset, bytes;
} debt;

struct ebb_mover {
    ebb_device device; /* open as long as the mover is there */
    CUstream stream;
    _Atomic uint64_t filled, copies; /* added to without the lock */
    ebb__mutex mu;
    /* under it */
    bool changing;  /* the ring, or the end of it all */
    ebb_vbar vbar;  /* the ring's; 0: none */
    bool pinned;    /* it is; else it only waits to be destroyed */
    uint64_t base;  /* where the ring begins on the GPU */
    uint64_t size;  /* of the VBAR */
    ebb__ring ring; /* without room while it changes */
    ebb__flag *flags;
    uint64_t flag_count; /* events there are, free or not */
    debt *debts;
    uint64_t cargoes, staged, waits, no_room;
};

/* ---- the driver ----------------------------------------------------------------------------------- */

/*
 * Make the driver ready to be called by this thread, without a lock of the device's: queuing may take
 * its time. The device stays open because the mover is there.
 */
static ebb__device *reach(const ebb_mover *mover, ebb__scope *scope, ebb_status *status)
{
    ebb__device *device = ebb__device_enter(mover->device, scope, status);
    if (!device)
        return NULL;
    ebb__drop(device);
    return device;
}

static void let_go(ebb__device *device, const ebb__scope *scope)
{
    ebb__retake(device);
    ebb__leave(device, scope);
}

static ebb_status failed(ebb__device *device, const char *call, CUresult code)
{
    ebb__retake(device);
    ebb__failed_locked(device, call, code);
    ebb__drop(device);
    return EBB_DRIVER_FAILED;
}

static void flag_put(ebb_mover *mover, ebb__flag *flag)
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
        return failed(device, "cuEventCreate", code);
    }
    mover->flag_count++;
    *flag = fresh;
    return EBB_OK;
}

/* A free event, recorded. */
static ebb_status flag_raise(ebb_mover *mover, ebb__device *device, CUstream stream,
                             ebb__flag **flag)
{
    ebb_status status = flag_take(mover, device, flag);
    if (status != EBB_OK)
        return status;
    CUresult code = device->driver.cuEventRecord((*flag)->event, stream);
    if (code == CUDA_SUCCESS)
        return EBB_OK;
    flag_put(mover, *flag);
    return failed(device, "cuEventRecord", code);
}

/* Order the copies to come behind every use of past cargoes that lie on a range, and forget these. */
static ebb_status follow(ebb_mover *mover, ebb__device *device, uint64_t start, uint64_t end)
{
    ebb__cargo *past;
    while ((past = ebb__ring_past(&mover->ring, start, end))) {
        while (past->done) {
            ebb__flag *flag = past->done;
            CUresult code = device->driver.cuStreamWaitEvent(mover->stream, flag->event, 0);
            if (code != CUDA_SUCCESS)
                return failed(device, "cuStreamWaitEvent", code);
            mover->waits++;
            past->done = flag->next;
            flag_put(mover, flag);
        }
        ebb__ring_forget(&mover->ring, past);
    }
    return EBB_OK;
}

static CUresult copy(ebb_mover *mover, ebb__device *device, CUdeviceptr to, const void *from,
                     uint64_t bytes)
{
    CUresult code = device->driver.cuMemcpyHtoDAsync(to, from, (size_t)bytes, mover->stream);
    if (code == CUDA_SUCCESS)
        atomic_fetch_add(&mover->copies, 1);
    return code;
}

/* ---- into the VBAR ---------------------------------------------------------------------------------- */

/* Take back what fetch pinned. If the driver fails it is owed. */
static void unpin(ebb_mover *mover, ebb_vbar vbar, uint64_t offset, uint64_t bytes)
{
    ebb_status status = EBB_DRIVER_FAILED;
    for (int i = 0; i < 2 && status == EBB_DRIVER_FAILED; i++)
        status = ebb_vbar_unpin(vbar, offset, bytes, mover->stream);
    debt *owed = status == EBB_DRIVER_FAILED ? malloc(sizeof *owed) : NULL;
    if (!owed)
        return;
    ebb__os_lock(&mover->mu);
    *owed = (debt){.next = mover->debts, .vbar = vbar, .offset = offset, .bytes = bytes};
    mover->debts = owed;
    ebb__os_unlock(&mover->mu);
}

/* Try what is owed again. EBB_DRIVER_FAILED: something still is. */
static ebb_status pay(ebb_mover *mover)
{
    ebb__os_lock(&mover->mu);
    debt *list = mover->debts;
    mover->debts = NULL;
    ebb__os_unlock(&mover->mu);
    while (list) {
        debt *it = list;
        list = it->next;
        unpin(mover, it->vbar, it->offset, it->bytes); /* which may owe it anew */
        free(it);
    }
    ebb__os_lock(&mover->mu);
    bool paid = !mover->debts;
    ebb__os_unlock(&mover->mu);
    return paid ? EBB_OK : EBB_DRIVER_FAILED;
}

/* Queue the copy into pages that are pinned. */
static ebb_status fill(ebb_mover *mover, ebb_vbar vbar, const ebb_load *load)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = reach(mover, &scope, &status);
    if (!device)
        return status;
    CUdeviceptr base =
        ebb__vbar_find(vbar)->base; /* pinned, so it is there and stays where it is */
    CUresult code = copy(mover, device, base + load->offset, load->host, load->bytes);
    if (code != CUDA_SUCCESS)
        status = failed(device, "cuMemcpyHtoDAsync", code);
    let_go(device, &scope);
    if (status == EBB_OK)
        status = ebb_vbar_filled(vbar, load->offset, load->bytes, mover->stream);
    if (status == EBB_OK)
        atomic_fetch_add(&mover->filled, load->bytes);
    return status;
}

/* Have a weight in its VBAR. EBB_OFFLOADED: it is to be staged. */
static ebb_status settle(ebb_mover *mover, ebb_vbar vbar, ebb_load *load)
{
    if (load->signature && ebb__vbar_peek(vbar, load->offset, load->bytes) == load->signature)
        return EBB_OK;
    uint64_t signature;
    ebb_status status = ebb_vbar_fault(vbar, load->offset, load->bytes, mover->stream, &signature);
    if (status != EBB_OK)
        return status;
    if (signature != load->signature) {
        status = fill(mover, vbar, load);
        if (status == EBB_OK)
            load->signature = signature;
    }
    unpin(mover, vbar, load->offset, load->bytes);
    return status;
}

/* ---- into the ring ----------------------------------------------------------------------------------- */

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + EBB__ALIGNMENT - 1) / EBB__ALIGNMENT * EBB__ALIGNMENT;
}

/* The next load from `i` on that is to be staged, or `count`. */
static size_t next_staged(const ebb_load *loads, size_t count, size_t i)
{
    while (i < count && !loads[i].staged)
        i++;
    return i;
}

static bool adjacent(const ebb_load *a, const ebb_load *b)
{
    return a->staged + a->bytes == b->staged && (const char *)a->host + a->bytes == b->host;
}

/* Queue the copies of loads that have their addresses: neighbours on both sides as one. */
static ebb_status send(ebb_mover *mover, ebb__device *device, const ebb_load *loads, size_t count)
{
    for (size_t i = next_staged(loads, count, 0), after; i < count; i = after) {
        uint64_t bytes = loads[i].bytes;
        size_t last = i;
        while ((after = next_staged(loads, count, last + 1)) < count &&
               adjacent(&loads[last], &loads[after])) {
            bytes += loads[after].bytes;
            last = after;
        }
        CUresult code = copy(mover, device, loads[i].staged, loads[i].host, bytes);
        /* Neighbours may be pinned each by itself, and no copy goes across two registrations. */
        if (code == CUDA_ERROR_INVALID_VALUE && last > i) {
            code = CUDA_SUCCESS;
            for (size_t k = i; k < after && code == CUDA_SUCCESS;
                 k = next_staged(loads, count, k + 1))
                code = copy(mover, device, loads[k].staged, loads[k].host, loads[k].bytes);
        }
        if (code != CUDA_SUCCESS)
            return failed(device, "cuMemcpyHtoDAsync", code);
    }
    return EBB_OK;
}

/* Give the loads a cargo of `bytes`. `staged` is, of each, its place in the cargo, plus 1. */
static ebb_status stage(ebb_mover *mover, ebb_load *loads, size_t count, uint64_t bytes,
                        uint64_t *cargo)
{
    uint64_t start;
    if (!ebb__ring_place(&mover->ring, bytes, &start)) {
        mover->no_room++;
        return EBB_OFFLOADED;
    }
    if (!ebb__ring_ready(&mover->ring))
        return EBB_NO_HOST_MEMORY;
    for (size_t i = 0; i < count; i++)
        if (loads[i].staged)
            loads[i].staged += mover->base + start - 1;
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = reach(mover, &scope, &status);
    if (!device)
        return status;
    ebb__flag *arrived = NULL;
    status = follow(mover, device, start, start + bytes);
    if (status == EBB_OK)
        status = send(mover, device, loads, count);
    /* A failure leaves copies behind into a place that is nobody's: what comes there comes later on
       the same stream. */
    if (status == EBB_OK)
        status = flag_raise(mover, device, mover->stream, &arrived);
    if (status == EBB_OK) {
        *cargo = ebb__ring_add(&mover->ring, start, bytes, arrived);
        mover->cargoes++;
        for (size_t i = 0; i < count; i++)
            mover->staged += loads[i].staged ? loads[i].bytes : 0;
    }
    let_go(device, &scope);
    return status;
}

/* Whether the mover may be used, before its lock is touched: in a forked process it may be held. */
static ebb_status there(const ebb_mover *mover)
{
    ebb_status status = EBB_INVALID;
    if (mover)
        ebb__device_find(mover->device, &status);
    return status;
}

static bool sensible(const ebb_mover *mover, ebb_vbar vbar, ebb_load *loads, size_t count)
{
    if (!loads || !count || (vbar.id >> EBB__DEVICE_SHIFT) != (mover->device.id & 0xff))
        return false;
    for (size_t i = 0; i < count; i++) {
        loads[i].staged = 0;
        if (!loads[i].host || !loads[i].bytes)
            return false;
    }
    return true;
}

ebb_status ebb_mover_fetch(ebb_mover *mover, ebb_vbar vbar, ebb_load *loads, size_t count,
                           uint64_t *cargo)
{
    ebb_status status = there(mover);
    if (status != EBB_OK)
        return status;
    if (!cargo)
        return EBB_INVALID;
    *cargo = 0;
    if (!sensible(mover, vbar, loads, count))
        return EBB_INVALID;
    pay(mover);
    uint64_t bytes = 0;
    for (size_t i = 0; i < count && status == EBB_OK; i++) {
        status = settle(mover, vbar, &loads[i]);
        if (status != EBB_OFFLOADED)
            continue;
        status = EBB_OK;
        loads[i].staged = bytes + 1;
        bytes += aligned(loads[i].bytes);
    }
    if (status == EBB_OK && bytes) {
        ebb__os_lock(&mover->mu);
        status = stage(mover, loads, count, bytes, cargo);
        ebb__os_unlock(&mover->mu);
    }
    for (size_t i = 0; i < count && status != EBB_OK; i++)
        loads[i].staged = 0;
    return status;
}

/* ---- the use of a cargo ------------------------------------------------------------------------------ */

/* Whether work outside of a capture can be queued on a stream. */
static ebb_status outside(ebb__device *device, ebb_stream stream)
{
    switch (ebb__stream_capture(device, stream)) {
    case EBB__NOT_CAPTURING:
        return EBB_OK;
    case EBB__CAPTURING:
    case EBB__BARRED:
        return EBB_BUSY;
    default:
        return failed(device, "cuStreamIsCapturing", CUDA_ERROR_UNKNOWN);
    }
}

static ebb_status use(ebb_mover *mover, ebb__device *device, ebb__cargo *cargo, ebb_stream stream)
{
    CUresult code = device->driver.cuStreamWaitEvent(stream, cargo->arrived->event, 0);
    if (code != CUDA_SUCCESS)
        return failed(device, "cuStreamWaitEvent", code);
    (void)mover;
    cargo->users++;
    return EBB_OK;
}

static ebb_status done(ebb_mover *mover, ebb__device *device, ebb__cargo *cargo, ebb_stream stream)
{
    ebb__flag *flag;
    if (!cargo->users)
        return EBB_INVALID;
    ebb_status status = flag_raise(mover, device, stream, &flag);
    if (status != EBB_OK)
        return status;
    flag->next = cargo->done;
    cargo->done = flag;
    if (!--cargo->users)
        flag_put(mover, ebb__ring_over(&mover->ring, cargo));
    return EBB_OK;
}

typedef ebb_status step(ebb_mover *, ebb__device *, ebb__cargo *, ebb_stream);

static ebb_status with_cargo(ebb_mover *mover, uint64_t number, ebb_stream stream, step *take)
{
    ebb__scope scope;
    ebb_status status = there(mover);
    if (status != EBB_OK || !number)
        return status;
    ebb__os_lock(&mover->mu);
    ebb__cargo *cargo = ebb__ring_find(&mover->ring, number);
    ebb__device *device = cargo ? reach(mover, &scope, &status) : NULL;
    if (!cargo)
        status = EBB_GONE;
    if (device) {
        status = outside(device, stream);
        if (status == EBB_OK)
            status = take(mover, device, cargo, stream);
        let_go(device, &scope);
    }
    ebb__os_unlock(&mover->mu);
    return status;
}

ebb_status ebb_mover_use(ebb_mover *mover, uint64_t cargo, ebb_stream stream)
{
    return with_cargo(mover, cargo, stream, use);
}

ebb_status ebb_mover_done(ebb_mover *mover, uint64_t cargo, ebb_stream stream)
{
    return with_cargo(mover, cargo, stream, done);
}

ebb_status ebb_mover_drop(ebb_mover *mover, uint64_t number)
{
    ebb_status status = there(mover);
    if (status != EBB_OK || !number)
        return status;
    ebb__os_lock(&mover->mu);
    ebb__cargo *cargo = ebb__ring_find(&mover->ring, number);
    if (!cargo)
        status = EBB_GONE;
    else if (cargo->users)
        status = EBB_BUSY;
    else
        flag_put(mover, ebb__ring_over(&mover->ring, cargo));
    ebb__os_unlock(&mover->mu);
    return status;
}

/* ---- the ring itself ---------------------------------------------------------------------------------- */

/* Alone with the ring: no cargo is out, and there will be none. */
static ebb_status begin_change(ebb_mover *mover)
{
    ebb__os_lock(&mover->mu);
    ebb_status status = mover->changing || ebb__ring_out(&mover->ring) ? EBB_BUSY : EBB_OK;
    if (status == EBB_OK) {
        mover->changing = true;
        mover->ring.bytes = 0;
    }
    ebb__os_unlock(&mover->mu);
    return status;
}

/* The ring is there again, if it is. */
static ebb_status end_change(ebb_mover *mover, ebb_status status)
{
    ebb__os_lock(&mover->mu);
    mover->ring.bytes = mover->pinned ? mover->size : 0;
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
        ebb__device *device = reach(mover, &scope, &status);
        if (!device)
            return status;
        ebb__os_lock(&mover->mu);
        status = follow(mover, device, 0, mover->size);
        ebb__os_unlock(&mover->mu);
        let_go(device, &scope);
        if (status == EBB_OK)
            status = ebb_vbar_unpin(mover->vbar, 0, mover->size, mover->stream);
        if (status != EBB_OK)
            return status;
        mover->pinned = false;
    }
    status = ebb_vbar_destroy(mover->vbar);
    if (status == EBB_OK)
        mover->vbar.id = 0;
    return status;
}

/* Make the ring of a new VBAR: the most important one there is, so whoever can makes room. */
static ebb_status build(ebb_mover *mover, uint64_t bytes)
{
    ebb_vbar_options options = {.size = sizeof options, .bytes = bytes};
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
    mover->base = stats.address;
    mover->size = stats.bytes;
    ebb__os_lock(&mover->mu);
    ebb__ring_begin(&mover->ring, 0);
    ebb__os_unlock(&mover->mu);
    return EBB_OK;
}

ebb_status ebb_mover_set_ring(ebb_mover *mover, uint64_t bytes)
{
    ebb_status status = there(mover);
    if (status == EBB_OK)
        status = begin_change(mover);
    if (status != EBB_OK)
        return status;
    uint64_t before = mover->pinned ? mover->size : 0;
    const ebb__device *device = ebb__device_find(mover->device, &status);
    uint64_t least = device ? device->frame_bytes[EBB__SMALL] : 0; /* never changes */
    if (!device || (bytes <= before && before - bytes < least))
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
        status = ebb__stream_keep_locked(device, fresh->stream);
        if (status != EBB_OK) {
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
    ebb__flag *flag;
    ebb__device *device = reach(mover, &scope, &status);
    if (!device)
        return status;
    ebb__os_lock(&mover->mu);
    status = flag_raise(mover, device, mover->stream, &flag);
    ebb__os_unlock(&mover->mu);
    if (status == EBB_OK) {
        CUresult code = device->driver.cuEventSynchronize(flag->event);
        if (code != CUDA_SUCCESS)
            status = failed(device, "cuEventSynchronize", code);
        ebb__os_lock(&mover->mu);
        flag_put(mover, flag);
        ebb__os_unlock(&mover->mu);
    }
    let_go(device, &scope);
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
    if (status == EBB_OK) {
        ebb__stream_part_locked(device, mover->stream);
        CUresult code = device->driver.cuStreamDestroy(mover->stream);
        if (code == CUDA_SUCCESS)
            device->busy--;
        else
            status = ebb__failed_locked(device, "cuStreamDestroy", code);
    }
    ebb__leave(device, &scope);
    return status;
}

ebb_status ebb_mover_destroy(ebb_mover *mover)
{
    if (!mover)
        return EBB_OK;
    ebb_status status = there(mover);
    if (status == EBB_OK)
        status = begin_change(mover);
    if (status != EBB_OK)
        return status;
    status = pay(mover);
    if (status == EBB_OK)
        status = raze(mover);
    if (status == EBB_OK)
        status = drain(mover);
    if (status == EBB_OK)
        status = dismantle(mover);
    if (status != EBB_OK)
        return end_change(mover, status);
    ebb__ring_free(&mover->ring);
    free(mover);
    return EBB_OK;
}

/* ---- what it says of itself -------------------------------------------------------------------------- */

ebb_stream ebb_mover_stream(const ebb_mover *mover)
{
    return mover ? mover->stream : NULL;
}

ebb_status ebb_mover_get_stats(ebb_mover *mover, ebb_mover_stats *stats)
{
    if (!stats || stats->size < sizeof *stats)
        return EBB_INVALID;
    ebb_status status = there(mover);
    if (status != EBB_OK)
        return status;
    ebb__os_lock(&mover->mu);
    *stats = (ebb_mover_stats){
        .size = stats->size,
        .ring = mover->ring.bytes,
        .ring_used = ebb__ring_used(&mover->ring),
        .cargoes_out = ebb__ring_out(&mover->ring),
        .cargoes = mover->cargoes,
        .staged = mover->staged,
        .filled = atomic_load(&mover->filled),
        .copies = atomic_load(&mover->copies),
        .waits = mover->waits,
        .no_room = mover->no_room,
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
