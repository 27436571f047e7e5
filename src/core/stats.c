/* Counters, added up when somebody asks. */
#include <string.h>

#include "fast.h"
#include "internal.h"

void ebb__vbar_sums_locked(const ebb__vbar *vbar, uint64_t *hits, uint64_t *resident,
                           uint64_t *pinned, uint64_t *held)
{
    /* Only pages with a frame are looked at: as many as fit into the GPU, however large the VBAR. */
    *hits = vbar->hits;
    *resident = *pinned = *held = 0;
    for (uint64_t page = EBB__NONE; (page = ebb__bits_last(&vbar->resident, page)) != EBB__NONE;) {
        uint64_t word = atomic_load(&vbar->pages[page].word);
        uint64_t bytes = vbar->device->frame_bytes[ebb__page_kind_locked(vbar, page)];
        if (EBB__STATE(word) == EBB__POISONED)
            continue;
        *hits += EBB__HITS(word);
        *resident += bytes;
        *pinned += word & EBB__PINS ? bytes : 0;
        *held += word & EBB__HELD ? bytes : 0;
    }
}

static void add_vbars_locked(const ebb__device *device, ebb_device_stats *stats) EBB__LOCKED
{
    for (uint32_t i = 0; i < device->vbar_high; i++) {
        const ebb__vbar *vbar = ebb__vbar_number(device, i);
        if (!atomic_load(&vbar->id))
            continue;
        uint64_t hits, resident, pinned, held;
        ebb__vbar_sums_locked(vbar, &hits, &resident, &pinned, &held);
        stats->hits += hits;
        stats->misses += vbar->misses;
        stats->offloaded += vbar->offloaded;
        stats->resident += resident;
        stats->pinned += pinned;
        stats->for_graphs += held;
        for (int k = 0; k < EBB_REASONS; k++)
            stats->evictions[k] += vbar->evictions[k];
    }
}

static uint64_t owned_locked(const ebb__device *device, ebb__owner owner) EBB__LOCKED
{
    uint64_t sum = 0;
    for (int kind = 0; kind < EBB__KINDS; kind++)
        sum += device->frame_count[owner][kind] * device->frame_bytes[kind];
    return sum;
}

ebb_status ebb__device_limits(ebb_device handle, uint64_t *limit, uint64_t *headroom,
                              uint64_t *total)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = ebb__device_enter(handle, &scope, &status);
    if (!device)
        return status;
    *limit = device->limit;
    *headroom = device->headroom;
    *total = device->total;
    ebb__leave(device, &scope);
    return EBB_OK;
}

ebb_status ebb_device_get_stats(ebb_device handle, ebb_device_stats *stats)
{
    if (!stats || stats->size < sizeof *stats)
        return EBB_INVALID;
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = ebb__device_enter(handle, &scope, &status);
    if (!device)
        return status;
    size_t free = 0, total = 0;
    CUresult code = device->driver.cuMemGetInfo(&free, &total);
    if (code != CUDA_SUCCESS) {
        status = ebb__failed_locked(device, "cuMemGetInfo", code);
        ebb__leave(device, &scope);
        return status;
    }
    *stats = (ebb_device_stats){
        .size = stats->size,
        .total = device->total,
        .free = free,
        .limit = device->limit,
        .headroom = device->headroom,
        .held = ebb__frames_held_locked(device),
        .unused = owned_locked(device, EBB__OF_NOBODY),
        .poisoned = owned_locked(device, EBB__OF_POISON),
        .vbars = device->vbar_count,
        .hits = device->gone_hits,
        .misses = device->gone_misses,
        .offloaded = device->gone_offloaded,
        .frames_created = device->frames_created,
        .frames_recycled = device->frames_recycled,
        .frames_released = device->frames_released,
        .marks = device->marks,
        .orders = device->orders,
        .waits = device->waits,
        .wait_ns = device->wait_ns,
        .retries = device->retries,
        .page_outs = device->page_outs,
        .broken_promises = device->broken_promises,
    };
    memcpy(stats->evictions, device->gone_evictions, sizeof stats->evictions);
    add_vbars_locked(device, stats);
    ebb__leave(device, &scope);
    return EBB_OK;
}
