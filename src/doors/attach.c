/*
 * attach: the functions that PyTorch's allocator library calls instead of the CUDA runtime's.
 *
 * They have no argument that would lead to an object of ours, so there is one: `door`, the only state
 * of this file. It is changed under its lock by attach and detach; the functions read it without. They
 * run on any thread, with PyTorch's allocator lock held and Python's lock in any state, and never
 * call Python.
 */
#include <stdlib.h>
#include <string.h>

#include "imports.h"
#include "internal.h"
#include "segment.h"

/* The CUDA runtime's codes and kinds that matter here. */
enum { SUCCESS = 0, MEMORY_ALLOCATION = 2, DEVICE_TO_DEVICE = 3, DEFAULT_KIND = 4 };

/* And attributes of its pools. */
enum { POOL_RESERVED = 5, POOL_USED = 7 };

/* The first driver that can record an event of a whole context. */
enum { OLDEST_DRIVER = 12050 };

enum { CAPTURES = 64 }; /* at once; more are not known */

typedef int (*malloc_function)(void **, size_t);
typedef int (*free_function)(void *);
typedef int (*copy_function)(void *, const void *, size_t, int, CUstream);
typedef int (*peer_copy_function)(void *, int, const void *, int, size_t, CUstream);
typedef int (*begin_function)(CUstream, int);
typedef int (*end_function)(CUstream, void **);
typedef int (*device_function)(int *);
typedef int (*malloc_async_function)(void **, size_t, CUstream);
typedef int (*trim_function)(void *, size_t);
typedef int (*pool_function)(void **, int);
typedef int (*attribute_function)(void *, int, void *);
typedef int (*error_function)(void);

/* A segment that PyTorch took from the runtime before we came. */
typedef struct earlier {
    struct earlier *next;
    uint64_t address, bytes;
    int index;
} earlier;

static struct {
    ebb__mutex lock;
    atomic_int ready; /* 0 untouched, 1 being made, 2 the lock can be used */
    bool attached;
    ebb_attach_options options;
    char library[4096];
    ebb__import allocate, release, copy, begin, end, allocate_async, trim;
    device_function current;
    pool_function pool_of;
    attribute_function attribute;
    error_function last_error;
    peer_copy_function peer_copy;
    _Atomic uint32_t devices[EBB__DEVICES]; /* handles' ids, once opened */
    _Atomic unsigned device_count;
    _Atomic uint64_t pooled[EBB__DEVICES]; /* bytes that the runtime's pool holds, as last seen */
    _Atomic(CUstream) capturing[CAPTURES]; /* streams on which PyTorch has begun a capture */
    earlier *earlier;
    _Atomic unsigned earlier_count;
} door;

static void make_ready(void)
{
    int untouched = 0;
    if (atomic_load(&door.ready) == 2)
        return;
    if (atomic_compare_exchange_strong(&door.ready, &untouched, 1)) {
        ebb__os_mutex_init(&door.lock);
        atomic_store(&door.ready, 2);
    }
    while (atomic_load(&door.ready) != 2)
        ebb__os_pause();
}

/* ---- devices -------------------------------------------------------------------------------------- */

static ebb_device known(int index)
{
    ebb_device device = {0};
    if (index >= 0 && index < EBB__DEVICES)
        device.id = atomic_load(&door.devices[index]);
    return device;
}

static void know(int index, ebb_device device)
{
    atomic_store(&door.devices[index], device.id);
    if (device.id)
        atomic_fetch_add(&door.device_count, 1);
    else
        atomic_fetch_sub(&door.device_count, 1);
}

static bool wanted(int index)
{
    return door.attached && index >= 0 && index < EBB__DEVICES && door.options.devices >> index & 1;
}

/* Apply what attach was told to a device that may have been open with something else. */
static void apply_options(ebb_device device)
{
    if (door.options.limit != EBB_DEFAULT)
        ebb_device_set_limit(device, door.options.limit);
    if (door.options.headroom != EBB_DEFAULT)
        ebb_device_set_headroom(device, door.options.headroom);
}

/* The device of a GPU that is attached, opened the first time. */
static ebb_status device_of(int index, ebb_device *device, char *detail, size_t length)
{
    *device = known(index);
    if (device->id)
        return EBB_OK;
    if (!wanted(index))
        return EBB_GONE;
    ebb__os_lock(&door.lock);
    ebb_status status = EBB_OK;
    *device = known(index);
    if (!device->id) {
        ebb_device_options options = {.size = sizeof options,
                                      .library = door.options.library,
                                      .index = index,
                                      .limit = door.options.limit,
                                      .headroom = door.options.headroom};
        status = ebb_device_open(&options, device, detail, length);
        if (status == EBB_OK) {
            apply_options(*device);
            status = ebb__segments_open(*device);
            if (status != EBB_OK)
                ebb_device_close(*device);
        }
        if (status == EBB_OK)
            know(index, *device);
    }
    ebb__os_unlock(&door.lock);
    return status;
}

/* ---- what PyTorch calls ---------------------------------------------------------------------------- */

static int our_malloc(void **address, size_t bytes)
{
    malloc_function original = (malloc_function)door.allocate.original;
    int index = -1;
    ebb_device device;
    uint64_t found = 0;
    if (!bytes || !address || door.current(&index) != SUCCESS ||
        device_of(index, &device, NULL, 0) != EBB_OK)
        return original(address, bytes);
    ebb_status status = ebb__segment_alloc(device, bytes, &found);
    if (status == EBB_FORKED || status == EBB_GONE)
        return original(address, bytes); /* it knows what to say */
    if (status != EBB_OK)
        return MEMORY_ALLOCATION;
    *address = (void *)(uintptr_t)found;
    return SUCCESS;
}

static void forget_earlier(uint64_t address)
{
    ebb__os_lock(&door.lock);
    for (earlier **at = &door.earlier; *at; at = &(*at)->next) {
        earlier *e = *at;
        if (e->address != address)
            continue;
        *at = e->next;
        ebb__segments_before(known(e->index), -(int64_t)e->bytes);
        free(e);
        atomic_fetch_sub(&door.earlier_count, 1);
        break;
    }
    ebb__os_unlock(&door.lock);
}

static int our_free(void *address)
{
    free_function original = (free_function)door.release.original;
    for (int index = 0; address && index < EBB__DEVICES; index++) {
        ebb_device device = known(index);
        if (device.id && ebb__segment_free(device, (uint64_t)(uintptr_t)address) == EBB_OK)
            return SUCCESS;
    }
    int code = original(address);
    if (address && code == SUCCESS && atomic_load(&door.earlier_count))
        forget_earlier((uint64_t)(uintptr_t)address);
    return code;
}

/* Which GPU memory of ours is on; -1: none. */
static int holder_of(const void *address)
{
    for (int index = 0; index < EBB__DEVICES; index++) {
        ebb_device device = known(index);
        if (device.id && ebb__segment_holds(device, (uint64_t)(uintptr_t)address))
            return index;
    }
    return -1;
}

/* A plain copy between GPUs finds its way only in memory of the runtime's own. */
static int our_copy(void *to, const void *from, size_t bytes, int kind, CUstream stream)
{
    copy_function original = (copy_function)door.copy.original;
    if (atomic_load(&door.device_count) > 1 && (kind == DEVICE_TO_DEVICE || kind == DEFAULT_KIND)) {
        int there = holder_of(to), here = holder_of(from);
        if (there >= 0 && here >= 0 && there != here)
            return door.peer_copy(to, there, from, here, bytes, stream);
    }
    return original(to, from, bytes, kind, stream);
}

/* ---- PyTorch's other allocator, cudaMallocAsync ---------------------------------------------------- */

/*
 * There, each tensor is an allocation of a pool of the runtime's. That memory is not ours, but weights
 * give way to it: within the limit, which the pool counts against, and when the card is full.
 */
typedef struct pool {
    int index;
    ebb_device device;
    void *handle;
    uint64_t reserved, used;
} pool;

static bool look_at_pool(pool *p)
{
    uint64_t reserved = 0, used = 0;
    if (door.pool_of(&p->handle, p->index) != SUCCESS ||
        door.attribute(p->handle, POOL_RESERVED, &reserved) != SUCCESS ||
        door.attribute(p->handle, POOL_USED, &used) != SUCCESS)
        return false;
    p->reserved = reserved;
    p->used = used;
    uint64_t before = atomic_exchange(&door.pooled[p->index], reserved);
    ebb__segments_before(p->device, (int64_t)(reserved - before));
    return true;
}

/* Make room for an allocation that the pool has none for. What the pool does not use goes last. */
static bool press(pool *p, uint64_t bytes)
{
    for (int tries = 0; tries < 2; tries++) {
        if (p->used + bytes <= p->reserved)
            return true;
        if (ebb__segments_press(p->device, p->used + bytes - p->reserved) == EBB_OK)
            return true;
        if (tries == 0 &&
            (((trim_function)door.trim.original)(p->handle, 0) != SUCCESS || !look_at_pool(p)))
            return false;
    }
    return false;
}

static int our_malloc_async(void **address, size_t bytes, CUstream stream)
{
    malloc_async_function original = (malloc_async_function)door.allocate_async.original;
    pool p = {.index = -1};
    if (!bytes || !address || door.current(&p.index) != SUCCESS ||
        device_of(p.index, &p.device, NULL, 0) != EBB_OK || !look_at_pool(&p))
        return original(address, bytes, stream);
    if (!press(&p, bytes))
        return MEMORY_ALLOCATION;
    int code = original(address, bytes, stream);
    /* Full all the same: the card, or the pool's pieces are too small. */
    while (code == MEMORY_ALLOCATION && ebb__segments_yield(p.device, bytes) == EBB_OK) {
        door.last_error(); /* nobody shall find it later */
        code = original(address, bytes, stream);
    }
    if (look_at_pool(&p))
        ebb__segments_press(p.device, 0);
    return code;
}

static int our_trim(void *handle, size_t keep)
{
    int code = ((trim_function)door.trim.original)(handle, keep);
    for (int index = 0; index < EBB__DEVICES; index++) {
        pool p = {.index = index, .device = known(index)};
        if (p.device.id && atomic_load(&door.pooled[index]))
            look_at_pool(&p);
    }
    return code;
}

/* ---- captures ------------------------------------------------------------------------------------- */

/*
 * Captures are counted, because an event of the whole context would end one. By their streams: the end
 * of one that began before we came must not be taken for another's.
 */
static bool swap_capture(CUstream from, CUstream to)
{
    for (unsigned i = 0; i < CAPTURES; i++) {
        CUstream there = from;
        if (atomic_compare_exchange_strong(&door.capturing[i], &there, to))
            return true;
    }
    return false;
}

static void capture_over(CUstream stream)
{
    if (stream && swap_capture(stream, NULL))
        atomic_fetch_sub(&ebb__captures, 1);
}

static int our_begin(CUstream stream, int mode)
{
    bool counted = stream && swap_capture(NULL, stream);
    if (counted)
        atomic_fetch_add(&ebb__captures, 1);
    /* Whoever did not see that yet is done when its lock has been ours. */
    for (int index = 0; counted && index < EBB__DEVICES; index++)
        if (known(index).id)
            ebb__segments_pass(known(index));
    int code = ((begin_function)door.begin.original)(stream, mode);
    if (counted && code != SUCCESS)
        capture_over(stream);
    return code;
}

static int our_end(CUstream stream, void **graph)
{
    int code = ((end_function)door.end.original)(stream, graph);
    capture_over(stream);
    return code;
}

/* ---- attach and detach ------------------------------------------------------------------------------ */

#define ALLOCATOR "libc10_cuda.so"
#define TORCH "libtorch_cuda.so"

static ebb_status find_all(char *detail, size_t length)
{
    ebb_status status = ebb__import_find(ALLOCATOR, "cudaMalloc", &door.allocate, detail, length);
    if (status == EBB_OK)
        status = ebb__import_find(ALLOCATOR, "cudaFree", &door.release, detail, length);
    if (status != EBB_OK)
        return status;
    door.current = (device_function)ebb__import_sibling(&door.allocate, "cudaGetDevice");
    door.peer_copy = (peer_copy_function)ebb__import_sibling(&door.allocate, "cudaMemcpyPeerAsync");
    if (!door.current || !door.peer_copy) {
        ebb__detail(detail, length, "the CUDA runtime has no cudaGetDevice or cudaMemcpyPeerAsync");
        return EBB_INVALID;
    }
    /* Asked of the runtime, because that does not start CUDA. */
    device_function version_of =
        (device_function)ebb__import_sibling(&door.allocate, "cudaDriverGetVersion");
    int version = 0;
    if (version_of && version_of(&version) == SUCCESS && version && version < OLDEST_DRIVER) {
        ebb__detail(
            detail, length,
            "the driver is of CUDA %d.%d, and cannot say when the GPU's work on freed memory "
            "is over: 12.5 or newer can",
            version / 1000, version % 1000 / 10);
        return EBB_DRIVER_TOO_OLD;
    }
    /* Without these a PyTorch is served as well, if it has them nowhere. */
    if (ebb__import_find(ALLOCATOR, "cudaMemcpyAsync", &door.copy, NULL, 0) != EBB_OK)
        door.copy.count = 0;
    if (ebb__import_find(TORCH, "cudaStreamBeginCapture", &door.begin, NULL, 0) != EBB_OK ||
        ebb__import_find(TORCH, "cudaStreamEndCapture", &door.end, NULL, 0) != EBB_OK)
        door.begin.count = door.end.count = 0;
    door.pool_of =
        (pool_function)ebb__import_sibling(&door.allocate, "cudaDeviceGetDefaultMemPool");
    door.attribute =
        (attribute_function)ebb__import_sibling(&door.allocate, "cudaMemPoolGetAttribute");
    door.last_error = (error_function)ebb__import_sibling(&door.allocate, "cudaGetLastError");
    if (!door.pool_of || !door.attribute || !door.last_error ||
        ebb__import_find(ALLOCATOR, "cudaMallocAsync", &door.allocate_async, NULL, 0) != EBB_OK ||
        ebb__import_find(ALLOCATOR, "cudaMemPoolTrimTo", &door.trim, NULL, 0) != EBB_OK)
        door.allocate_async.count = door.trim.count = 0;
    return EBB_OK;
}

/* A function as a plain pointer, which is what a slot holds. */
#define CODE(function) ((void *)(uintptr_t)(function))

static ebb_status replace_all(void)
{
    /* Freeing first: no segment of ours may exist that the runtime would be asked to free. */
    const struct {
        ebb__import *import;
        void *ours;
    } all[] = {
        {&door.release, CODE(our_free)},    {&door.copy, CODE(our_copy)},
        {&door.begin, CODE(our_begin)},     {&door.end, CODE(our_end)},
        {&door.trim, CODE(our_trim)},       {&door.allocate_async, CODE(our_malloc_async)},
        {&door.allocate, CODE(our_malloc)},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (!all[i].import->count || all[i].import->replacement)
            continue;
        ebb_status status = ebb__import_replace(all[i].import, all[i].ours);
        if (status == EBB_OK)
            continue;
        while (i-- > 0)
            ebb__import_restore(all[i].import);
        return status;
    }
    return EBB_OK;
}

static ebb_status attach_now(const ebb_attach_options *options, char *detail, size_t length)
{
    if (door.attached) {
        ebb__detail(detail, length, "Ebbtide is attached already");
        return EBB_BUSY;
    }
    /* Still there from the last time, for segments that live: only the way in was closed. */
    bool half = door.release.replacement != NULL;
    door.options = *options;
    door.options.library = NULL;
    if (options->library) {
        if (strlen(options->library) >= sizeof door.library)
            return EBB_INVALID;
        strcpy(door.library, options->library);
        door.options.library = door.library;
    }
    door.attached = true;
    ebb_status status = half ? EBB_OK : find_all(detail, length);
    if (status == EBB_OK)
        status = replace_all();
    if (status != EBB_OK)
        door.attached = false;
    /* Devices that have been kept for segments that live. */
    for (int index = 0; status == EBB_OK && index < EBB__DEVICES; index++) {
        if (known(index).id && wanted(index)) {
            apply_options(known(index));
            ebb__segments_open_pool(known(index), 0);
        }
    }
    return status;
}

ebb_status ebb_attach(const ebb_attach_options *options, char *detail, size_t length)
{
    if (!options || options->size < sizeof *options)
        return EBB_INVALID;
    make_ready();
    ebb__os_lock(&door.lock);
    ebb_status status = attach_now(options, detail, length);
    ebb__os_unlock(&door.lock);
    return status;
}

/* Nobody counts any more what PyTorch had before. */
static void forget_all_earlier(void)
{
    while (door.earlier) {
        earlier *e = door.earlier;
        door.earlier = e->next;
        ebb__segments_before(known(e->index), -(int64_t)e->bytes);
        free(e);
    }
    atomic_store(&door.earlier_count, 0);
    for (int index = 0; index < EBB__DEVICES; index++)
        if (known(index).id)
            ebb__segments_before(known(index), -(int64_t)atomic_exchange(&door.pooled[index], 0));
}

/* Close the devices whose segments are all gone. Bytes that remain. */
static uint64_t close_devices(void)
{
    uint64_t remaining = 0;
    for (int index = 0; index < EBB__DEVICES; index++) {
        ebb_device device = known(index);
        if (!device.id)
            continue;
        ebb_segment_stats stats = {.size = sizeof stats};
        if (ebb__segments_stats(device, &stats) == EBB_OK && stats.segments) {
            remaining += stats.bytes;
        } else if (ebb__segments_close(device) == EBB_OK) {
            know(index, (ebb_device){0});
            ebb_device_close(device);
        }
    }
    return remaining;
}

ebb_status ebb_detach(uint64_t *remaining)
{
    make_ready();
    ebb__os_lock(&door.lock);
    ebb_status status = ebb__import_restore(&door.allocate);
    if (status == EBB_OK)
        status = ebb__import_restore(&door.allocate_async);
    if (status == EBB_OK)
        status = ebb__import_restore(&door.trim);
    uint64_t left = 0;
    if (status == EBB_OK) {
        door.attached = false;
        forget_all_earlier();
        left = close_devices();
        ebb__import *others[] = {&door.begin, &door.end, &door.copy, &door.release};
        for (size_t i = 0; !left && i < 4 && status == EBB_OK; i++)
            status = ebb__import_restore(others[i]);
    }
    ebb__os_unlock(&door.lock);
    if (remaining)
        *remaining = left;
    return status;
}

ebb_status ebb_attached(int index, ebb_device *device)
{
    if (!device)
        return EBB_INVALID;
    make_ready();
    return device_of(index, device, NULL, 0);
}

ebb_status ebb_attach_before(int index, const ebb_range *segments, size_t count)
{
    ebb_device device;
    make_ready();
    ebb_status status = device_of(index, &device, NULL, 0);
    if (status != EBB_OK)
        return status;
    ebb__os_lock(&door.lock);
    for (size_t i = 0; i < count && status == EBB_OK; i++) {
        earlier *e = malloc(sizeof *e);
        if (!e) {
            status = EBB_NO_HOST_MEMORY;
            break;
        }
        *e = (earlier){door.earlier, segments[i].offset, segments[i].bytes, index};
        door.earlier = e;
        atomic_fetch_add(&door.earlier_count, 1);
        ebb__segments_before(device, (int64_t)e->bytes);
    }
    ebb__os_unlock(&door.lock);
    return status;
}

void ebb_attach_pool(int index, int change)
{
    /* Opened if need be: the pool's first segment may be the first there is. */
    ebb_device device;
    make_ready();
    if (change && device_of(index, &device, NULL, 0) == EBB_OK)
        ebb__segments_open_pool(device, change);
}

ebb_status ebb_attached_stats(int index, ebb_segment_stats *stats)
{
    if (!stats || stats->size < sizeof *stats)
        return EBB_INVALID;
    return known(index).id ? ebb__segments_stats(known(index), stats) : EBB_GONE;
}
