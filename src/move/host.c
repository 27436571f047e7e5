/*
 * Host memory that the GPU copies from: our own, and what is borrowed.
 *
 * A copy runs at the link's speed only from pinned memory, and one registration must hold the whole of
 * its source. So what is known here are runs, pieces that are registered as one, and loans, ranges
 * that somebody has borrowed and that lie in a run:
 *
 *   runs     [ ours ]      [ a file's mapping             ]   [ bytes of a tensor ]
 *   loans                    [ weight ][ weight ]  [ w. ]     [ weight            ]
 *
 * Of a file, as much of its mapping becomes one run as whoever borrows says that weights are in. Other
 * memory (a heap, say) holds what is not ours to pin, and addresses that may be given back to the system
 * and mapped anew while pinned, so there a run is the very bytes of a loan.
 *
 * Most files are mapped privately (torch.load(mmap=True) and safetensors do). To pin such a mapping,
 * the system gives the program a page of its own for each of the file's: RAM twice. And where it has
 * the file in huge pages, it never returns. So the file is mapped once more, shared, and that is
 * pinned: the same pages, at an address that the loan tells. It shows what the file has, so what the
 * program has written to its own mapping is not lent.
 *
 * Where they are registered, runs never overlap: two registrations of one byte is what the driver
 * refuses. Where the program knows them, they may: only what is lent has to stay mapped, and other
 * memory, our own too, may come to lie where the rest of a mapping was. There are few of them, a file or
 * a block each, so each is looked at; a run is known by what was mapped, not by its address alone.
 *
 * To register and to unregister take long, and the second may wait for the GPU: the lock is dropped
 * meanwhile, and a run says that it is COMING or GOING. Who needs it waits for that to be over.
 */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

typedef struct run {
    uintptr_t start, end; /* as those who borrow know it */
    uintptr_t at;         /* where it is registered: its start, or its file's other mapping */
    bool sure;            /* that is the same file; else what is borrowed is to be compared */
    uint64_t device, inode, offset; /* of the file that was mapped there, if one was */
    uint64_t loans;
    enum { COMING, THERE, GOING } state;
    bool ours; /* from ebb_host_alloc() */
} run;

typedef struct loan {
    struct loan *next; /* in its place of the table */
    uintptr_t start;
    uint64_t bytes;
    uint64_t times;
    run *in; /* NULL: somebody else has pinned it */
} loan;

enum { PLACES = 1024 };

typedef struct ebb__host {
    run **runs; /* in no order */
    size_t run_count, run_room;
    loan *loans[PLACES];
    size_t loan_count;
} ebb__host;

/* ---- the books ----------------------------------------------------------------------------------- */

/* Made with the first thing that there is to know, and gone with the last. */
static ebb__host *host_locked(ebb__device *device) EBB__LOCKED
{
    if (!device->host) {
        device->host = calloc(1, sizeof *device->host);
        device->busy += device->host != NULL;
    }
    return device->host;
}

static void host_done_locked(ebb__device *device) EBB__LOCKED
{
    ebb__host *host = device->host;
    if (!host || host->run_count || host->loan_count)
        return;
    free(host->runs);
    free(host);
    device->host = NULL;
    device->busy--;
}

static bool overlaps(const run *it, uintptr_t start, uintptr_t end)
{
    return it->start < end && start < it->end;
}

/* A run that is about to be registered. NULL: no memory to know it. */
static run *run_add_locked(ebb__device *device, uintptr_t start, uintptr_t end,
                           uintptr_t at) EBB__LOCKED
{
    ebb__host *host = host_locked(device);
    run *it = host ? calloc(1, sizeof *it) : NULL;
    if (it && host->run_count == host->run_room) {
        size_t room = host->run_room ? 2 * host->run_room : 16;
        run **runs = realloc(host->runs, room * sizeof(run *));
        if (runs) {
            host->runs = runs;
            host->run_room = room;
        }
    }
    if (!it || host->run_count == host->run_room) {
        free(it);
        host_done_locked(device);
        return NULL;
    }
    *it = (run){.start = start, .end = end, .at = at, .sure = true, .state = COMING};
    host->runs[host->run_count++] = it;
    return it;
}

static void run_remove_locked(ebb__device *device, run *it) EBB__LOCKED
{
    ebb__host *host = device->host;
    size_t at = 0;
    while (host->runs[at] != it)
        at++;
    host->runs[at] = host->runs[--host->run_count];
    free(it);
    host_done_locked(device);
    ebb__os_wake_all(&device->changed);
}

static loan **loan_place_locked(ebb__host *host, uintptr_t start, uint64_t bytes) EBB__LOCKED
{
    loan **at = &host->loans[(start * 0x9E3779B97F4A7C15u >> 32) % PLACES];
    while (*at && ((*at)->start != start || (*at)->bytes != bytes))
        at = &(*at)->next;
    return at;
}

/* ---- the driver ----------------------------------------------------------------------------------- */

/* Register addresses, or what is mapped again `at` another one, as a new run.
   On failure there is none. Drops the lock. */
static ebb_status register_locked(ebb__device *device, uintptr_t start, uintptr_t end, uintptr_t at,
                                  unsigned flags, run **in) EBB__LOCKED
{
    run *it = run_add_locked(device, start, end, at);
    *in = NULL;
    if (!it)
        return EBB_NO_HOST_MEMORY;
    ebb__drop(device);
    CUresult code = device->driver.cuMemHostRegister((void *)at, end - start,
                                                     flags | CU_MEMHOSTREGISTER_PORTABLE);
    ebb__retake(device);
    if (code != CUDA_SUCCESS) {
        run_remove_locked(device, it);
        ebb__failed_locked(device, "cuMemHostRegister", code);
        return EBB_DRIVER_FAILED;
    }
    it->state = THERE;
    ebb__os_wake_all(&device->changed);
    *in = it;
    return EBB_OK;
}

/* Unregister a run that is THERE, behind all copies from it, and forget it. EBB_BUSY: a capture is open,
   and what there is to wait for cannot be known; EBB_DRIVER_FAILED. It still is there then. Drops the
   lock. */
static ebb_status unregister_locked(ebb__device *device, run *it) EBB__LOCKED
{
    void *at = (void *)it->at;
    bool again = it->at != it->start;
    size_t bytes = it->end - it->start;
    it->state = GOING;
    /* Copies are the mover's, PyTorch's, anybody's: all streams are waited for, as far as they are now. */
    uint64_t ticket = ebb__ticket_locked(device, EBB__CONTEXT_SLOT);
    ebb_status status = EBB_OK;
    if (!ebb__ticket_wait_locked(device, ticket))
        status = atomic_load(&ebb__captures) ? EBB_BUSY : EBB_DRIVER_FAILED;
    if (status == EBB_OK) {
        ebb__drop(device);
        CUresult code = device->driver.cuMemHostUnregister(at);
        if (code == CUDA_SUCCESS && again)
            ebb__os_host_free(at, bytes);
        ebb__retake(device);
        if (code == CUDA_SUCCESS) {
            run_remove_locked(device, it);
            return EBB_OK;
        }
        ebb__failed_locked(device, "cuMemHostUnregister", code);
        status = EBB_DRIVER_FAILED;
    }
    it->state = THERE;
    ebb__os_wake_all(&device->changed);
    return status;
}

/* The piece, pinned as one, that an address is in, whoever has pinned it, and in which context. EBB_GONE:
   it is not pinned; EBB_INVALID: the driver does not say. */
static ebb_status piece_locked(ebb__device *device, uintptr_t address, ebb_span *piece,
                               CUcontext *context) EBB__LOCKED
{
    const ebb__driver *driver = &device->driver;
    int type = 0;
    CUdeviceptr from = 0;
    size_t size = 0;
    if (driver->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) !=
        CUDA_SUCCESS)
        return EBB_GONE;
    if (type != CU_MEMORYTYPE_HOST ||
        driver->cuPointerGetAttribute(&from, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address) !=
            CUDA_SUCCESS ||
        driver->cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, address) !=
            CUDA_SUCCESS ||
        driver->cuPointerGetAttribute(context, CU_POINTER_ATTRIBUTE_CONTEXT, address) !=
            CUDA_SUCCESS)
        return EBB_INVALID;
    *piece = (ebb_span){(const void *)(uintptr_t)from, size};
    return EBB_OK;
}

/*
 * Whether somebody else has pinned a range: EBB_OK, all of it as one; EBB_GONE, its beginning is not
 * pinned; EBB_INVALID, part of it is, or for another GPU, which may give it back while this one reads.
 */
static ebb_status pinned_locked(ebb__device *device, uintptr_t start, uint64_t bytes) EBB__LOCKED
{
    ebb_span piece;
    CUcontext context = NULL;
    ebb_status status = piece_locked(device, start, &piece, &context);
    if (status != EBB_OK)
        return status;
    uint64_t before = start - (uintptr_t)piece.start;
    bool all = before < piece.bytes && bytes <= piece.bytes - before;
    return all && context == device->context ? EBB_OK : EBB_INVALID;
}

ebb_status ebb_host_pinned(ebb_device handle, const void *memory, ebb_span *piece)
{
    ebb__scope scope;
    ebb_status status;
    CUcontext context;
    if (!piece)
        return EBB_INVALID;
    ebb__device *device = ebb__device_enter(handle, &scope, &status);
    if (!device)
        return status;
    status = piece_locked(device, (uintptr_t)memory, piece, &context);
    ebb__leave(device, &scope);
    return status == EBB_GONE ? EBB_INVALID : status;
}

/* ---- our own --------------------------------------------------------------------------------------- */

ebb_status ebb_host_alloc(ebb_device handle, uint64_t bytes, void **memory)
{
    ebb__scope scope;
    ebb_status status;
    if (!bytes || bytes > SIZE_MAX || !memory)
        return EBB_INVALID;
    if (!ebb__device_find(handle, &status))
        return status;
    /* The longest part, and it needs no lock. */
    void *fresh = ebb__os_host_new((size_t)bytes);
    if (!fresh)
        return EBB_NO_HOST_MEMORY;
    ebb__device *device = ebb__device_enter(handle, &scope, &status);
    if (device) {
        uintptr_t start = (uintptr_t)fresh;
        run *it;
        status = register_locked(device, start, start + (size_t)bytes, start, 0, &it);
        if (status == EBB_OK)
            it->ours = true;
        ebb__leave(device, &scope);
    }
    if (status == EBB_OK)
        *memory = fresh;
    else
        ebb__os_host_free(fresh, (size_t)bytes);
    return status;
}

ebb_status ebb_host_free(ebb_device handle, void *memory)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = ebb__device_enter(handle, &scope, &status);
    if (!device)
        return status;
    run *it = NULL;
    for (size_t i = 0; device->host && i < device->host->run_count && !it; i++)
        if (device->host->runs[i]->ours && device->host->runs[i]->start == (uintptr_t)memory)
            it = device->host->runs[i];
    size_t bytes = 0;
    if (!it) {
        status = EBB_INVALID;
    } else if (it->loans || it->state != THERE) {
        status = EBB_BUSY;
    } else {
        bytes = it->end - it->start;
        status = unregister_locked(device, it);
    }
    ebb__leave(device, &scope);
    if (status == EBB_OK)
        ebb__os_host_free(memory, bytes);
    return status;
}

/* ---- borrowed -------------------------------------------------------------------------------------- */

/* A range that is to be borrowed, and what was found out of it before the lock was taken. */
typedef struct asked {
    uintptr_t start, end;
    bool known;           /* what is mapped there */
    ebb__mapping mapping; /* of it, what may be pinned */
    bool own;   /* it is a file's that is mapped privately, and the program has pages of its own */
    bool large; /* there is not so much memory: all that is pinned stays in it */
} asked;

/* Of a file's mapping, the pages that are in a span, or all if there is none. */
static void cut(ebb__mapping *m, const ebb_span *within, uintptr_t from, uintptr_t to)
{
    if (!within || !m->inode)
        return;
    uintptr_t page = ebb__os_page(), low = (uintptr_t)within->start, high = low + within->bytes;
    low = (low < from ? low : from) / page * page;
    high = ((high > to ? high : to) + page - 1) / page * page;
    if (low > m->start) {
        m->offset += low - m->start;
        m->start = low;
    }
    if (high < m->end)
        m->end = high;
}

static asked ask(const void *memory, size_t bytes, const ebb_span *within)
{
    asked a = {.start = (uintptr_t)memory, .end = (uintptr_t)memory + bytes};
    a.known = ebb__os_mapping(memory, bytes, &a.mapping);
    if (a.known && a.mapping.private_file)
        a.own = !a.mapping.inode || !ebb__os_is_files(memory, bytes);
    if (a.known) {
        cut(&a.mapping, within, a.start, a.end);
        a.large = a.mapping.end - a.mapping.start > ebb__os_available();
    }
    return a;
}

/* Whether a run is of the file that is mapped where the range is, and of the same place in it. */
static bool is_of(const run *it, const asked *a)
{
    const ebb__mapping *m = &a->mapping;
    return a->known && m->inode == it->inode && m->device == it->device &&
           m->offset + (a->start - m->start) == it->offset + (a->start - it->start);
}

/* Whether a run has all of a range, and what is mapped there is still what was when it was made: only
   what is borrowed has to stay. */
static bool is_in(const run *it, const asked *a)
{
    if (it->start > a->start || it->end < a->end)
        return false;
    return !it->inode || (!a->own && is_of(it, a));
}

/* The run that has a range, or else the first that is in its way; NULL: none is. A file that is mapped
   once more for each run has no others in its way but those that come or go. */
static run *run_find_locked(const ebb__host *host, const asked *a) EBB__LOCKED
{
    run *found = NULL;
    for (size_t i = 0; host && i < host->run_count; i++) {
        run *it = host->runs[i];
        if (!overlaps(it, a->start, a->end))
            continue;
        if (it->state == THERE && is_in(it, a))
            return it;
        if (it->state != THERE || !a->mapping.private_file || !is_of(it, a))
            found = found && found->state != THERE ? found : it;
    }
    return found;
}

static bool is_free_locked(const ebb__host *host, uintptr_t start, uintptr_t end) EBB__LOCKED
{
    for (size_t i = 0; host && i < host->run_count; i++)
        if (overlaps(host->runs[i], start, end))
            return false;
    return true;
}

/* Register a range of which nothing is; all of its mapping that may be, if that is a file's, and
   `again` in its place if that is another mapping of it. */
static ebb_status pin_locked(ebb__device *device, const asked *a, const void *again, bool sure,
                             run **in) EBB__LOCKED
{
    const ebb__mapping *m = &a->mapping;
    unsigned flags = m->read_only ? CU_MEMHOSTREGISTER_READ_ONLY : 0;
    ebb_status status = EBB_DRIVER_FAILED;
    *in = NULL;
    if (again || is_free_locked(device->host, m->start, m->end))
        status = register_locked(device, m->start, m->end, again ? (uintptr_t)again : m->start,
                                 flags, in);
    /* Not all of a mapping need have memory behind it, nor be free of others' registrations. The lock
       was dropped, so another's may have come; then the driver says so. What is mapped again is had
       as a whole or not at all. */
    bool wider = m->start < a->start || m->end > a->end;
    if (status == EBB_DRIVER_FAILED && wider && !again &&
        is_free_locked(device->host, a->start, a->end))
        status = register_locked(device, a->start, a->end, a->start, flags, in);
    if (status == EBB_OK) {
        (*in)->sure = sure;
        (*in)->device = m->device;
        (*in)->inode = m->inode;
        (*in)->offset = m->inode ? m->offset + ((*in)->start - m->start) : 0;
    }
    return status;
}

/*
 * The run that holds a range, made if need be; *in stays NULL if somebody else has pinned it. Drops
 * the lock. A loan of the same range may have come meanwhile.
 */
static ebb_status find_pinned_locked(ebb__device *device, const asked *a, run **in) EBB__LOCKED
{
    void *again = NULL; /* another mapping of the same */
    bool sure = true;
    ebb_status status;
    *in = NULL;
    for (;;) {
        run *there = run_find_locked(device->host, a);
        if (there && there->state != THERE) {
            ebb__await(device);
            continue;
        }
        if (there) {
            status = is_in(there, a) ? EBB_OK : EBB_INVALID;
            *in = status == EBB_OK ? there : NULL;
            break;
        }
        status = pinned_locked(device, a->start, a->end - a->start);
        if (status != EBB_GONE)
            break;
        status = !a->known || a->own ? EBB_INVALID : EBB_NO_HOST_MEMORY;
        if (!a->known || a->own || a->large)
            break;
        if (a->mapping.private_file && !again) {
            ebb__drop(device); /* the system may take its time */
            again = ebb__os_file_again(&a->mapping, &sure);
            ebb__retake(device);
            status = EBB_INVALID;
            if (!again)
                break;
            continue;
        }
        status = pin_locked(device, a, again, sure, in);
        break;
    }
    if (again && (!*in || (*in)->at != (uintptr_t)again))
        ebb__os_host_free(again, a->mapping.end - a->mapping.start); /* nobody has seen it */
    return status;
}

static void loan_add_locked(ebb__host *host, loan *it) EBB__LOCKED
{
    loan **at = loan_place_locked(host, it->start, it->bytes);
    it->next = *at;
    *at = it;
    host->loan_count++;
    if (it->in)
        it->in->loans++;
}

/* Where the GPU copies a loan from. */
static const void *where(const loan *it)
{
    return (const void *)(it->in ? it->in->at + (it->start - it->in->start) : it->start);
}

/* Nobody borrows from it any more: it goes, unless it is ours, or as unregister_locked() says. */
static ebb_status let_go_locked(ebb__device *device, run *it) EBB__LOCKED
{
    return it && !it->loans && !it->ours ? unregister_locked(device, it) : EBB_OK;
}

/* Whether the GPU would copy what the program sees, byte by byte. Drops the lock. */
static bool is_same_locked(ebb__device *device, run *it, const asked *a) EBB__LOCKED
{
    it->loans++; /* so that it stays */
    ebb__drop(device);
    bool same = !memcmp((const void *)(it->at + (a->start - it->start)), (const void *)a->start,
                        a->end - a->start);
    ebb__retake(device);
    it->loans--;
    return same;
}

static ebb_status borrow_locked(ebb__device *device, const asked *a, const void **from) EBB__LOCKED
{
    uint64_t bytes = a->end - a->start;
    loan *fresh = malloc(sizeof *fresh), *there;
    ebb__host *host = fresh ? host_locked(device) : NULL;
    if (!host) {
        free(fresh);
        return EBB_NO_HOST_MEMORY;
    }
    *fresh = (loan){.start = a->start, .bytes = bytes, .times = 1};
    host->loan_count++; /* so that the books stay, whatever others return meanwhile */
    ebb_status status = find_pinned_locked(device, a, &fresh->in);
    if (fresh->in && !fresh->in->sure && !is_same_locked(device, fresh->in, a)) {
        let_go_locked(device, fresh->in); /* if it does not go it stays, for the next who asks */
        status = EBB_INVALID;
    }
    host->loan_count--;
    there = *loan_place_locked(host, a->start, bytes);
    if (status == EBB_OK && !there) {
        loan_add_locked(host, fresh);
        *from = where(fresh);
        return EBB_OK;
    }
    if (status == EBB_OK) {            /* it is lent already */
        if (!there->in && fresh->in) { /* others had pinned it then, and do not any more */
            there->in = fresh->in;
            there->in->loans++;
        }
        there->times++;
        *from = where(there);
    }
    free(fresh);
    host_done_locked(device);
    return status;
}

ebb_status ebb_host_borrow(ebb_device handle, const void *memory, uint64_t bytes,
                           const ebb_span *within, const void **from)
{
    uintptr_t start = (uintptr_t)memory;
    if (!start || !bytes || bytes > UINTPTR_MAX - start || !from)
        return EBB_INVALID;
    if (within && within->bytes > UINTPTR_MAX - (uintptr_t)within->start)
        return EBB_INVALID;
    ebb__scope scope;
    ebb_status status;
    if (!ebb__device_find(handle, &status))
        return status;
    const asked a = ask(memory, (size_t)bytes, within);
    ebb__device *device = ebb__device_enter(handle, &scope, &status);
    if (!device)
        return status;
    status = borrow_locked(device, &a, from);
    ebb__leave(device, &scope);
    return status;
}

/* The last return of a loan: it goes first, so that nobody borrows it again from under us. */
static ebb_status end_locked(ebb__device *device, loan **at) EBB__LOCKED
{
    loan *it = *at;
    run *in = it->in;
    *at = it->next;
    device->host->loan_count--;
    if (in)
        in->loans--;
    ebb_status status = let_go_locked(device, in);
    if (status != EBB_OK) {
        loan_add_locked(device->host, it);
        return status;
    }
    free(it);
    host_done_locked(device);
    return EBB_OK;
}

ebb_status ebb_host_return(ebb_device handle, const void *memory, uint64_t bytes)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = ebb__device_enter(handle, &scope, &status);
    if (!device)
        return status;
    loan **at = device->host ? loan_place_locked(device->host, (uintptr_t)memory, bytes) : NULL;
    if (!at || !*at)
        status = EBB_INVALID;
    else if ((*at)->times > 1)
        (*at)->times--;
    else
        status = end_locked(device, at);
    ebb__leave(device, &scope);
    return status;
}
