/*
 * VBARs: their life, their place among the others, and what they say of themselves.
 *
 * The structures are in chunks that are never freed; a handle holds the device's number, the
 * structure's, and how often that one has been used. Page tables are kept for re-use as well, cleared
 * (see "Handles" in internal.h).
 */
#include <stdlib.h>
#include <string.h>

#include "fast.h"
#include "internal.h"

/* ---- handles ---------------------------------------------------------------------------------- */

#define NO_VBAR UINT32_MAX

ebb_status ebb__vbar_missing(ebb_vbar handle)
{
    uint64_t number = handle.id >> EBB__DEVICE_SHIFT;
    if (number && number <= EBB__DEVICES && atomic_load(&ebb__devices[number - 1].forked))
        return EBB_FORKED;
    return EBB_GONE;
}

/* Find a VBAR and take its device's lock: NULL, and *status says why. */
EBB__TRIES static ebb__vbar *enter(ebb_vbar handle, ebb__scope *scope, ebb_status *status)
{
    ebb__vbar *vbar = ebb__vbar_find(handle);
    if (vbar) {
        ebb__enter(vbar->device, scope);
        bool there = atomic_load(&vbar->id) == handle.id;
        *status = there && scope->ready ? EBB_OK : EBB_DRIVER_FAILED;
        if (*status == EBB_OK)
            return vbar;
        ebb__leave(vbar->device, scope);
        if (there)
            return NULL;
    }
    *status = ebb__vbar_missing(handle);
    return NULL;
}

/* Work on a VBAR under its lock; ends the function it stands in if there is none. */
#define WITH_VBAR(handle)                                                                          \
    ebb__scope scope;                                                                              \
    ebb_status status;                                                                             \
    ebb__vbar *vbar = enter(handle, &scope, &status);                                              \
    if (!vbar)                                                                                     \
    return status

/* ---- structures and tables ------------------------------------------------------------------- */

static ebb__vbar *struct_take_locked(ebb__device *device) EBB__LOCKED
{
    if (device->vbar_free != NO_VBAR) {
        ebb__vbar *vbar = ebb__vbar_number(device, device->vbar_free);
        device->vbar_free = vbar->next_free;
        return vbar;
    }
    uint32_t index = device->vbar_high;
    if (index > EBB__INDEX_MASK)
        return NULL;
    if (!ebb__vbar_number(device, index)) {
        ebb__vbar *vbars = calloc(EBB__VBARS_A_CHUNK, sizeof *vbars);
        if (!vbars)
            return NULL;
        for (uint32_t i = 0; i < EBB__VBARS_A_CHUNK; i++) {
            vbars[i].device = device;
            vbars[i].index = index + i;
        }
        atomic_store(&device->vbar_chunks[index / EBB__VBARS_A_CHUNK], vbars);
    }
    device->vbar_high++;
    return ebb__vbar_number(device, index);
}

static void struct_put_locked(ebb__device *device, ebb__vbar *vbar) EBB__LOCKED
{
    vbar->next_free = device->vbar_free;
    device->vbar_free = vbar->index;
}

/* Tables have room for a power of two of pages: at least for as many as fill some of the host's. */
static unsigned table_size(uint64_t pages)
{
    unsigned shift = 6;
    while (UINT64_C(1) << shift < pages)
        shift++;
    return shift;
}

static ebb__table *table_take_locked(ebb__device *device, uint64_t pages) EBB__LOCKED
{
    unsigned shift = table_size(pages);
    ebb__table *table = device->tables[shift];
    if (table) {
        device->tables[shift] = table->next;
        return table;
    }
    table = malloc(sizeof *table);
    if (!table)
        return NULL;
    *table = (ebb__table){.pages = UINT64_C(1) << shift};
    table->bytes = table->pages * sizeof(ebb__page) + 2 * ebb__bits_bytes(table->pages);
    table->memory = ebb__os_table_new(table->bytes);
    if (!table->memory) {
        free(table);
        return NULL;
    }
    return table;
}

static void table_put_locked(ebb__device *device, ebb__table *table) EBB__LOCKED
{
    ebb__os_table_clear(table->memory, table->bytes);
    unsigned shift = table_size(table->pages);
    table->next = device->tables[shift];
    device->tables[shift] = table;
}

/* ---- life ------------------------------------------------------------------------------------- */

/* Lay out pages and sets over a table; at least the last `fine` bytes are small pages. */
static ebb_status lay_out_locked(ebb__vbar *vbar, uint64_t bytes, uint64_t fine) EBB__LOCKED
{
    ebb__device *device = vbar->device;
    uint64_t large = bytes > fine ? (bytes - fine) >> EBB__LARGE_SHIFT : 0;
    uint64_t small = (bytes - (large << EBB__LARGE_SHIFT)) >> device->small_shift;
    uint64_t count = large + small;
    if (count > SIZE_MAX / 4 / sizeof(ebb__page))
        return EBB_INVALID;
    ebb__table *table = table_take_locked(device, count);
    if (!table)
        return EBB_NO_HOST_MEMORY;
    /* The sets are behind the last page there could be: a thread with an old handle, of a VBAR that
       had more pages, still reads pages. */
    size_t set = ebb__bits_bytes(table->pages);
    char *after = (char *)table->memory + table->pages * sizeof(ebb__page);
    vbar->table = table;
    vbar->page_count = count;
    vbar->large_count = large;
    ebb__bits_over(&vbar->resident, after, count);
    ebb__bits_over(&vbar->evictable, after + set, count);
    atomic_store(&vbar->pages, table->memory);
    atomic_store(&vbar->bytes, bytes);
    atomic_store(&vbar->large_bytes, large << EBB__LARGE_SHIFT);
    return EBB_OK;
}

static ebb_status create_locked(ebb__device *device, const ebb_vbar_options *options,
                                uint64_t bytes, ebb_vbar *handle) EBB__LOCKED
{
    CUdeviceptr base = 0;
    CUresult code = device->driver.cuMemAddressReserve(&base, bytes, 0, 0, 0);
    if (code != CUDA_SUCCESS) {
        ebb__failed_locked(device, "cuMemAddressReserve", code);
        return EBB_NO_ADDRESSES;
    }
    ebb__vbar *vbar = struct_take_locked(device);
    ebb_status status = vbar ? lay_out_locked(vbar, bytes, options->fine) : EBB_NO_HOST_MEMORY;
    if (status != EBB_OK) {
        if (vbar)
            struct_put_locked(device, vbar);
        device->driver.cuMemAddressFree(base, bytes);
        return status;
    }
    vbar->base = base;
    vbar->taken = 0;
    vbar->watermark = vbar->watermark_limit = vbar->page_count;
    vbar->rank = ++device->rank_top;
    vbar->page_out = options->page_out;
    vbar->user = options->user;
    vbar->rise = options->rise != 0;
    vbar->risen = false;
    vbar->setbacks = 0;
    vbar->quiet_since = device->faults;
    vbar->hits = vbar->misses = vbar->offloaded = vbar->loads = 0;
    memset(vbar->evictions, 0, sizeof vbar->evictions);
    vbar->generation++;
    device->vbar_count++;
    handle->id = (uint64_t)(device->number + 1) << EBB__DEVICE_SHIFT |
                 (uint64_t)vbar->generation << EBB__INDEX_BITS | vbar->index;
    atomic_store(&vbar->id, handle->id);
    return EBB_OK;
}

ebb_status ebb_vbar_create(ebb_device handle, const ebb_vbar_options *options, ebb_vbar *vbar)
{
    if (!vbar || !options || options->size < sizeof *options || !options->bytes)
        return EBB_INVALID;
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = ebb__device_enter(handle, &scope, &status);
    if (!device)
        return status;
    uint64_t grain = device->frame_bytes[EBB__SMALL];
    if (options->bytes > UINT64_MAX / 2 - grain)
        status = EBB_INVALID;
    else
        status = create_locked(device, options, (options->bytes + grain - 1) / grain * grain, vbar);
    ebb__leave(device, &scope);
    return status;
}

/* Take every page out of use; all or nothing. */
static bool leave_all_locked(ebb__vbar *vbar) EBB__LOCKED
{
    uint64_t page = EBB__NONE, failed = EBB__NONE;
    bool all = true;
    while (all && (page = ebb__bits_last(&vbar->resident, page)) != EBB__NONE) {
        uint64_t word = atomic_load(&vbar->pages[page].word);
        all = EBB__STATE(word) == EBB__POISONED || ebb__page_leave_locked(vbar, page);
        failed = page;
    }
    if (all)
        return true;
    /* Those above the one that would not are ours to put back. */
    for (page = EBB__NONE; (page = ebb__bits_last(&vbar->resident, page)) != EBB__NONE;) {
        if (page <= failed)
            break;
        ebb__page_back_locked(vbar, page);
    }
    return false;
}

/* Wait for the fences of the pages that left after `departure`, and unmap them. Drops the lock. */
static ebb_status drop_all_locked(ebb__vbar *vbar, uint64_t departure) EBB__LOCKED
{
    ebb_status status = EBB_OK;
    uint64_t page = EBB__NONE, last = vbar->device->departures;
    while ((page = ebb__bits_last(&vbar->resident, page)) != EBB__NONE) {
        ebb__page *p = &vbar->pages[page];
        bool poisoned = EBB__STATE(atomic_load(&p->word)) == EBB__POISONED;
        /* One that was taken back, and may be leaving again, is another thread's by now. */
        bool ours = p->departure > departure && p->departure <= last;
        if (!poisoned && !(ours && ebb__page_settle_locked(vbar, page, p->departure, false)))
            status = status == EBB_OK ? EBB_BUSY : status;
        else if (ebb__page_drop_locked(vbar, page) != EBB_OK)
            status = EBB_DRIVER_FAILED;
    }
    /* While the lock was dropped, pages may have come back, and calls begun. */
    if (status == EBB_OK && (vbar->resident.members || vbar->busy))
        status = EBB_BUSY;
    return status;
}

ebb_status ebb__vbar_destroy_locked(ebb__vbar *vbar)
{
    ebb__device *device = vbar->device;
    uint64_t departure = device->departures;
    if (vbar->busy || !leave_all_locked(vbar))
        return EBB_BUSY;
    ebb_status status = drop_all_locked(vbar, departure);
    if (status != EBB_OK)
        return status;
    /* While a fence was waited for, another thread may have begun to use it again. */
    if (vbar->busy || vbar->resident.members)
        return EBB_BUSY;
    CUresult code = device->driver.cuMemAddressFree(vbar->base, atomic_load(&vbar->bytes));
    if (code != CUDA_SUCCESS)
        return ebb__failed_locked(device, "cuMemAddressFree", code);
    atomic_store(&vbar->id, 0);
    device->gone_hits += vbar->hits;
    device->gone_misses += vbar->misses;
    device->gone_offloaded += vbar->offloaded;
    for (int i = 0; i < EBB_REASONS; i++)
        device->gone_evictions[i] += vbar->evictions[i];
    table_put_locked(device, vbar->table);
    struct_put_locked(device, vbar);
    device->vbar_count--;
    return EBB_OK;
}

ebb_status ebb_vbar_destroy(ebb_vbar handle)
{
    WITH_VBAR(handle);
    status = ebb__vbar_destroy_locked(vbar);
    ebb__leave(vbar->device, &scope);
    return status;
}

ebb_status ebb_vbar_alloc(ebb_vbar handle, uint64_t bytes, uint64_t *offset)
{
    if (!bytes || !offset)
        return EBB_INVALID;
    WITH_VBAR(handle);
    /* `taken` is aligned always, and never past the end. */
    uint64_t left = atomic_load(&vbar->bytes) - vbar->taken;
    if (bytes > left) {
        status = EBB_FULL;
    } else {
        *offset = vbar->taken;
        uint64_t step = (bytes + EBB__ALIGNMENT - 1) / EBB__ALIGNMENT * EBB__ALIGNMENT;
        vbar->taken += step < left ? step : left;
    }
    ebb__leave(vbar->device, &scope);
    return status;
}

/* ---- importance ------------------------------------------------------------------------------- */

static void rank_locked(ebb__vbar *vbar, int64_t rank) EBB__LOCKED
{
    bool listed = vbar->evictable.members > 0;
    if (listed)
        ebb__order_remove(&vbar->device->order, vbar);
    vbar->rank = rank;
    if (listed)
        ebb__order_add(&vbar->device->order, vbar);
}

ebb_status ebb_vbar_prioritize(ebb_vbar handle)
{
    WITH_VBAR(handle);
    rank_locked(vbar, ++vbar->device->rank_top);
    vbar->watermark = vbar->watermark_limit;
    vbar->setbacks = 0;
    vbar->risen = false;
    ebb__leave(vbar->device, &scope);
    return EBB_OK;
}

ebb_status ebb_vbar_deprioritize(ebb_vbar handle)
{
    WITH_VBAR(handle);
    rank_locked(vbar, --vbar->device->rank_bottom);
    ebb__leave(vbar->device, &scope);
    return EBB_OK;
}

ebb_status ebb_vbar_trade(ebb_vbar handle, ebb_vbar with)
{
    WITH_VBAR(handle);
    ebb__vbar *other = ebb__vbar_find(with);
    if (!other) {
        status = ebb__vbar_missing(with);
    } else if (other->device != vbar->device) {
        status = EBB_INVALID;
    } else if (other != vbar) {
        int64_t own = vbar->rank, its = other->rank;
        rank_locked(vbar, --vbar->device->rank_bottom); /* no two may have the same */
        rank_locked(other, own);
        rank_locked(vbar, its);
    }
    ebb__leave(vbar->device, &scope);
    return status;
}

/* The first page that begins at or above `bytes`. */
static uint64_t page_from_locked(const ebb__vbar *vbar, uint64_t bytes) EBB__LOCKED
{
    if (bytes >= atomic_load(&vbar->bytes))
        return vbar->page_count;
    uint64_t page = ebb__page_at_locked(vbar, bytes);
    return ebb__page_offset_locked(vbar, page) < bytes ? page + 1 : page;
}

ebb_status ebb_vbar_set_watermark(ebb_vbar handle, uint64_t bytes)
{
    WITH_VBAR(handle);
    uint64_t page = page_from_locked(vbar, bytes);
    vbar->watermark = page < vbar->watermark_limit ? page : vbar->watermark_limit;
    ebb__leave(vbar->device, &scope);
    return EBB_OK;
}

ebb_status ebb_vbar_set_watermark_limit(ebb_vbar handle, uint64_t bytes)
{
    WITH_VBAR(handle);
    vbar->watermark_limit = page_from_locked(vbar, bytes);
    if (vbar->watermark > vbar->watermark_limit)
        vbar->watermark = vbar->watermark_limit;
    ebb__leave(vbar->device, &scope);
    return EBB_OK;
}

bool ebb__vbar_wanted(ebb_vbar handle, uint64_t offset, uint64_t bytes)
{
    ebb__scope scope;
    ebb_status status;
    ebb__vbar *vbar = enter(handle, &scope, &status);
    if (!vbar)
        return false;
    uint64_t size = atomic_load(&vbar->bytes);
    bool wanted = bytes && offset < size && bytes <= size - offset &&
                  (vbar->rise || ebb__page_at_locked(vbar, offset + bytes - 1) < vbar->watermark);
    ebb__leave(vbar->device, &scope);
    return wanted;
}

/* ---- giving up on request --------------------------------------------------------------------- */

ebb_status ebb_vbar_free_memory(ebb_vbar handle, uint64_t bytes, uint64_t *freed)
{
    WITH_VBAR(handle);
    ebb__device *device = vbar->device;
    uint64_t sum = 0, page = EBB__NONE;
    vbar->busy++;
    while (sum < bytes && (page = ebb__bits_last(&vbar->evictable, page)) != EBB__NONE) {
        if (!ebb__page_leave_locked(vbar, page))
            continue;
        ebb__kind kind = ebb__page_kind_locked(vbar, page);
        uint64_t departure = vbar->pages[page].departure;
        if (!ebb__page_settle_locked(vbar, page, departure, true) ||
            !ebb__page_evict_locked(vbar, page, EBB_FOR_ASKING))
            continue;
        sum += ebb__frames_trim_locked(device, kind, device->frame_bytes[kind]);
    }
    vbar->busy--;
    ebb__leave(device, &scope);
    if (freed)
        *freed = sum;
    return EBB_OK;
}

static bool held(const ebb__vbar *vbar, uint64_t page)
{
    return atomic_load(&vbar->pages[page].word) & EBB__HELD;
}

ebb_status ebb_vbar_graphs_gone(ebb_vbar handle, ebb_stream stream)
{
    WITH_VBAR(handle);
    ebb__device *device = vbar->device;
    ebb__capture capture = ebb__stream_ask_locked(device, stream);
    unsigned slot = ebb__stream_get_locked(device, stream);
    vbar->busy++;
    if (capture == EBB__CAPTURING)
        status = EBB_BUSY;
    else if (capture == EBB__UNTOLD)
        status = ebb__failed_locked(device, "cuStreamIsCapturing", CUDA_ERROR_UNKNOWN);
    else if (!slot && !ebb__stream_drain_locked(device, stream))
        status = EBB_DRIVER_FAILED;
    uint64_t page = EBB__NONE;
    while (status == EBB_OK && (page = ebb__bits_last(&vbar->resident, page)) != EBB__NONE)
        if (held(vbar, page) && slot && !ebb__fence_note_locked(device, &vbar->pages[page], slot))
            status = EBB_NO_HOST_MEMORY;
    /* Only when all have their tickets, and these can pass, does anything change. */
    if (status == EBB_OK && slot && !ebb__fence_seal_locked(device, slot))
        status = EBB_DRIVER_FAILED;
    page = EBB__NONE;
    while (status == EBB_OK && (page = ebb__bits_last(&vbar->resident, page)) != EBB__NONE)
        if (held(vbar, page))
            ebb__page_release_locked(vbar, page);
    vbar->busy--;
    ebb__leave(device, &scope);
    return status;
}

/* ---- what it says of itself --------------------------------------------------------------------- */

ebb_status ebb_vbar_residency(ebb_vbar handle, uint8_t *flags, size_t count)
{
    if (!flags && count)
        return EBB_INVALID;
    WITH_VBAR(handle);
    if (count > vbar->page_count)
        status = EBB_INVALID;
    for (size_t i = 0; i < count && status == EBB_OK; i++) {
        uint64_t word = atomic_load(&vbar->pages[i].word);
        ebb__state state = EBB__STATE(word);
        flags[i] =
            (uint8_t)((state == EBB__RESIDENT || state == EBB__LEAVING ? EBB_PAGE_RESIDENT : 0) |
                      (word & EBB__PINS ? EBB_PAGE_PINNED : 0) |
                      (word & EBB__HELD ? EBB_PAGE_HELD : 0) |
                      (state == EBB__POISONED ? EBB_PAGE_POISONED : 0));
    }
    ebb__leave(vbar->device, &scope);
    return status;
}

ebb_status ebb_vbar_page(ebb_vbar handle, uint64_t page, ebb_range *range)
{
    if (!range)
        return EBB_INVALID;
    WITH_VBAR(handle);
    if (page >= vbar->page_count) {
        status = EBB_INVALID;
    } else {
        range->offset = ebb__page_offset_locked(vbar, page);
        range->bytes = vbar->device->frame_bytes[ebb__page_kind_locked(vbar, page)];
    }
    ebb__leave(vbar->device, &scope);
    return status;
}

ebb_status ebb_vbar_get_stats(ebb_vbar handle, ebb_vbar_stats *stats)
{
    if (!stats || stats->size < sizeof *stats)
        return EBB_INVALID;
    WITH_VBAR(handle);
    *stats = (ebb_vbar_stats){
        .size = stats->size,
        .address = vbar->base,
        .bytes = atomic_load(&vbar->bytes),
        .allocated = vbar->taken,
        .watermark = ebb__page_offset_locked(vbar, vbar->watermark),
        .watermark_limit = ebb__page_offset_locked(vbar, vbar->watermark_limit),
        .pages = vbar->page_count,
        .rank = vbar->rank,
        .misses = vbar->misses,
        .offloaded = vbar->offloaded,
        .loads = vbar->loads,
    };
    memcpy(stats->evictions, vbar->evictions, sizeof stats->evictions);
    ebb__vbar_sums_locked(vbar, &stats->hits, &stats->resident, &stats->pinned, &stats->held);
    ebb__leave(vbar->device, &scope);
    return EBB_OK;
}
