/*
 * Cargoes: weights fetched, into their VBAR or into the ring, used, and done with.
 */
#include "fast.h"
#include "internal.h"
#include "move.h"

static CUresult copy(ebb_mover *mover, ebb__device *device, CUdeviceptr to, const void *from,
                     uint64_t bytes)
{
    CUresult code = device->driver.cuMemcpyHtoDAsync(to, from, (size_t)bytes, mover->stream);
    if (code == CUDA_SUCCESS)
        atomic_fetch_add(&mover->copies, 1);
    return code;
}

/* ---- into the VBAR ---------------------------------------------------------------------------------- */

/* Queue the copy into pages that are pinned. */
static ebb_status fill(ebb_mover *mover, ebb_vbar vbar, const ebb_load *load)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = ebb__mover_reach(mover, &scope, &status);
    if (!device)
        return status;
    CUdeviceptr base =
        ebb__vbar_find(vbar)->base; /* pinned, so it is there and stays where it is */
    CUresult code = copy(mover, device, base + load->offset, load->host, load->bytes);
    if (code != CUDA_SUCCESS)
        status = ebb__mover_failed(device, "cuMemcpyHtoDAsync", code);
    ebb__mover_leave(device, &scope);
    if (status == EBB_OK)
        status = ebb_vbar_filled(vbar, load->offset, load->bytes, mover->stream);
    if (status == EBB_OK)
        atomic_fetch_add(&mover->filled, load->bytes);
    return status;
}

/* Have a weight in its VBAR, or only look whether it is there. EBB_OFFLOADED: it is to be staged. */
static ebb_status settle(ebb_mover *mover, ebb_vbar vbar, ebb_load *load, bool only_look)
{
    if (load->signature && ebb__vbar_peek(vbar, load->offset, load->bytes) == load->signature)
        return EBB_OK;
    if (only_look)
        return EBB_OFFLOADED;
    uint64_t signature;
    ebb_status status = ebb_vbar_fault(vbar, load->offset, load->bytes, mover->stream, &signature);
    if (status != EBB_OK)
        return status;
    if (signature != load->signature) {
        status = fill(mover, vbar, load);
        if (status == EBB_OK)
            load->signature = signature;
    }
    ebb__mover_unpin(mover, vbar, load->offset, load->bytes);
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

/*
 * Copy to an address in the ring, each part as soon as those are done who used its place: what is waited
 * for last, mostly the unit that is computed with now, holds up what lies on it and no more.
 */
static CUresult copy_in_parts(ebb_mover *mover, ebb__device *device, CUdeviceptr to,
                              const void *from, uint64_t bytes, ebb_status *status)
{
    const uint64_t least =
        ebb__ring_size(&mover->ring) / 128; /* less is not worth a copy of its own */
    uint64_t at = to - mover->base, end = at + bytes;
    CUresult code = CUDA_SUCCESS;
    while (at < end && code == CUDA_SUCCESS && *status == EBB_OK) {
        uint64_t stop = end - at > least ? at + least : end;
        *status = ebb__mover_follow(mover, device, at, stop);
        stop = ebb__ring_free_until(&mover->ring, stop, end);
        if (end - stop < least && stop < end) {
            stop = end;
            *status = *status == EBB_OK ? ebb__mover_follow(mover, device, at, end) : *status;
        }
        if (*status == EBB_OK)
            code = copy(mover, device, mover->base + at, (const char *)from + (at + bytes - end),
                        stop - at);
        at = stop;
    }
    return code;
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
        ebb_status status = EBB_OK;
        CUresult code =
            copy_in_parts(mover, device, loads[i].staged, loads[i].host, bytes, &status);
        /* Neighbours may be pinned each by itself, and no copy goes across two registrations. */
        if (code == CUDA_ERROR_INVALID_VALUE && last > i) {
            code = CUDA_SUCCESS;
            for (size_t k = i; k < after && code == CUDA_SUCCESS && status == EBB_OK;
                 k = next_staged(loads, count, k + 1))
                code = copy_in_parts(mover, device, loads[k].staged, loads[k].host, loads[k].bytes,
                                     &status);
        }
        if (status != EBB_OK)
            return status;
        if (code != CUDA_SUCCESS)
            return ebb__mover_failed(device, "cuMemcpyHtoDAsync", code);
    }
    return EBB_OK;
}

/* Give the loads a place of `bytes`: at the end of another cargo, if that can be, or a cargo of their
   own. `staged` is, of each, its place in there, plus 1. */
static ebb_status stage(ebb_mover *mover, ebb_load *loads, size_t count, uint64_t bytes,
                        const ebb_fetch *how, uint64_t *cargo)
{
    uint64_t start = mover->ring.head;
    ebb__cargo *longer = ebb__ring_extensible(&mover->ring, how->with, bytes);
    /* The ring may be another by now. */
    bool there = how->at >= mover->base && how->at % EBB__ALIGNMENT == 0;
    uint64_t at = there ? how->at - mover->base : UINT64_MAX;
    bool placed = longer || ebb__ring_place(&mover->ring, bytes, at, how->skip, &start);
    if (!placed && ebb__ring_recede(&mover->ring))
        placed = ebb__ring_place(&mover->ring, bytes, at, how->skip, &start);
    if (mover->changing || !placed) {
        mover->no_room++;
        return EBB_OFFLOADED;
    }
    if (!longer && !ebb__ring_ready(&mover->ring))
        return EBB_NO_HOST_MEMORY;
    for (size_t i = 0; i < count; i++)
        if (loads[i].staged)
            loads[i].staged += mover->base + start - 1;
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = ebb__mover_reach(mover, &scope, &status);
    if (!device)
        return status;
    ebb__flag *arrived = longer ? longer->arrived : NULL;
    status = send(mover, device, loads, count);
    if (status == EBB_OK) /* what nothing was copied to is a part of it, too */
        status = ebb__mover_follow(mover, device, start, start + bytes);
    /* A failure leaves copies behind into a place that is nobody's: what comes there comes later on
       the same stream. */
    if (status == EBB_OK)
        status = ebb__mover_raise(mover, device, mover->stream, &arrived);
    if (status == EBB_OK) {
        *cargo = longer ? how->with : ebb__ring_add(&mover->ring, start, bytes, arrived);
        if (longer)
            ebb__ring_extend(&mover->ring, longer, bytes);
        mover->cargoes += !longer;
        for (size_t i = 0; i < count; i++)
            mover->staged += loads[i].staged ? loads[i].bytes : 0;
    }
    ebb__mover_leave(device, &scope);
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
                           const ebb_fetch *how, uint64_t *cargo)
{
    ebb_status status = ebb__mover_there(mover);
    if (status != EBB_OK)
        return status;
    if (!cargo)
        return EBB_INVALID;
    *cargo = 0;
    const ebb_fetch plainly = {0};
    how = how ? how : &plainly;
    if (!sensible(mover, vbar, loads, count))
        return EBB_INVALID;
    ebb__mover_pay(mover);
    uint64_t bytes = 0;
    for (size_t i = 0; i < count && status == EBB_OK; i++) {
        status = settle(mover, vbar, &loads[i], how->stage);
        if (status != EBB_OFFLOADED)
            continue;
        status = EBB_OK;
        loads[i].staged = bytes + 1;
        bytes += aligned(loads[i].bytes);
    }
    if (status == EBB_OK && bytes) {
        ebb__os_lock(&mover->mu);
        status = stage(mover, loads, count, bytes, how, cargo);
        ebb__os_unlock(&mover->mu);
    }
    for (size_t i = 0; i < count && status != EBB_OK; i++)
        loads[i].staged = 0;
    return status;
}

/* ---- the use of a cargo ------------------------------------------------------------------------------ */

ebb_status ebb__mover_outside(ebb__device *device, ebb_stream stream)
{
    switch (ebb__stream_capture(device, stream)) {
    case EBB__NOT_CAPTURING:
        return EBB_OK;
    case EBB__CAPTURING:
    case EBB__BARRED:
        return EBB_BUSY;
    default:
        return ebb__mover_failed(device, "cuStreamIsCapturing", CUDA_ERROR_UNKNOWN);
    }
}

static ebb_status use(ebb_mover *mover, ebb__device *device, ebb__cargo *cargo, ebb_stream stream)
{
    CUresult code = device->driver.cuStreamWaitEvent(stream, cargo->arrived->event, 0);
    if (code != CUDA_SUCCESS)
        return ebb__mover_failed(device, "cuStreamWaitEvent", code);
    (void)mover;
    cargo->users++;
    return EBB_OK;
}

/* If no event tells when the work on a stream is over, then it is waited for: a place that nobody would
   give back would be in the way for good. */
static ebb_status done(ebb_mover *mover, ebb__device *device, ebb__cargo *cargo, ebb_stream stream)
{
    ebb__flag *flag = NULL;
    if (!cargo->users)
        return EBB_INVALID;
    ebb_status status = ebb__mover_raise(mover, device, stream, &flag);
    if (status == EBB_OK) {
        flag->next = cargo->done;
        cargo->done = flag;
    } else {
        CUresult code = device->driver.cuStreamSynchronize(stream);
        if (code != CUDA_SUCCESS)
            return ebb__mover_failed(device, "cuStreamSynchronize", code);
    }
    if (!--cargo->users)
        ebb__mover_lower(mover, ebb__ring_over(&mover->ring, cargo));
    return EBB_OK;
}

typedef ebb_status step(ebb_mover *, ebb__device *, ebb__cargo *, ebb_stream);

static ebb_status with_cargo(ebb_mover *mover, uint64_t number, ebb_stream stream, step *take)
{
    ebb__scope scope;
    ebb_status status = ebb__mover_there(mover);
    if (status != EBB_OK || !number)
        return status;
    ebb__os_lock(&mover->mu);
    ebb__cargo *cargo = ebb__ring_find(&mover->ring, number);
    ebb__device *device = cargo ? ebb__mover_reach(mover, &scope, &status) : NULL;
    if (!cargo)
        status = EBB_GONE;
    if (device) {
        status = ebb__mover_outside(device, stream);
        if (status == EBB_OK)
            status = take(mover, device, cargo, stream);
        ebb__mover_leave(device, &scope);
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
    ebb_status status = ebb__mover_there(mover);
    if (status != EBB_OK || !number)
        return status;
    ebb__os_lock(&mover->mu);
    ebb__cargo *cargo = ebb__ring_find(&mover->ring, number);
    if (!cargo)
        status = EBB_GONE;
    else if (cargo->users)
        status = EBB_BUSY;
    else
        ebb__mover_lower(mover, ebb__ring_over(&mover->ring, cargo));
    ebb__os_unlock(&mover->mu);
    return status;
}
