/*
 * Ebbtide: a VRAM allocator for PyTorch.
 *
 * PyTorch hands out addresses. Ebbtide decides what VRAM is behind them.
 *
 * This header is the whole public C API. Rules that hold for every function:
 *
 *   - A function that can fail returns an ebb_status; its results go through pointers, and are
 *     written only on success unless the comment says otherwise.
 *   - Option and result structs start with `size`, which the caller sets to sizeof the struct, so
 *     that a newer library and an older program (or the reverse) understand each other.
 *   - A function may also answer EBB_DRIVER_FAILED, with nothing changed, where the driver will not
 *     make the device's context current.
 *   - Any thread may call any function. None calls the driver's context-wide synchronisation.
 *   - Nothing here needs a CUDA SDK, a current CUDA context, or a GPU to be linked or called.
 *
 * Words:
 *
 *   device     one GPU and everything Ebbtide knows of it
 *   frame      one physical allocation of the driver, 32 MiB or 2 MiB
 *   page       the frame-sized piece of a VBAR that a frame can back
 *   VBAR       a reserved range of addresses with a page table
 *   pin        someone is about to use, or is using, the page, as the CPU sees it; counted
 *   fence      the GPU work that must be over before the page's frame may be taken
 *   watermark  pages at or above it are not loaded; one that is still resident there is a hit
 *   signature  of a range: changes whenever a page of it has got another frame
 *   mover      brings weights to the GPU ahead of their use
 *   cargo      weights on their way through the mover's ring, a piece of VRAM for what stays offloaded
 *
 * Environment variables read by the library:
 *
 *   EBBTIDE_DRIVER   path of the driver library to use instead of the system's libcuda.so.1.
 *                    The simulated GPU's path goes here.
 */
#ifndef EBBTIDE_H
#define EBBTIDE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EBB_VERSION_MAJOR 0
#define EBB_VERSION_MINOR 1
#define EBB_VERSION_PATCH 0

#if defined(_WIN32)
#define EBB_API __declspec(dllexport)
#else
#define EBB_API __attribute__((visibility("default")))
#endif

/*
 * Statuses. One list makes the enum, the names and the sentences (errors.c).
 * Zero is success, negative values are errors, and EBB_OFFLOADED is an answer, not an error.
 * X(name, value, sentence)
 */
#define EBB_STATUSES(X)                                                                            \
    X(EBB_OK, 0, "success")                                                                        \
    X(EBB_INVALID, -1, "an argument makes no sense")                                               \
    X(EBB_NO_HOST_MEMORY, -2, "the host is out of memory")                                         \
    X(EBB_NO_DRIVER, -3, "no CUDA driver library could be loaded")                                 \
    X(EBB_DRIVER_TOO_OLD, -4, "the CUDA driver is older than Ebbtide needs")                       \
    X(EBB_DRIVER_INCOMPLETE, -5, "the CUDA driver lacks a function that Ebbtide needs")            \
    X(EBB_DRIVER_FAILED, -6, "a call of the CUDA driver failed")                                   \
    X(EBB_NO_DEVICE, -7, "there is no such GPU")                                                   \
    X(EBB_NO_VMM, -8, "the GPU does not support virtual memory management (a vGPU, for example)")  \
    X(EBB_OFFLOADED, 1, "the weight is not resident and stays out for now: use a temporary")       \
    X(EBB_GONE, -9, "the device or VBAR was closed, or never was")                                 \
    X(EBB_BUSY, -10, "it is still in use")                                                         \
    X(EBB_NOT_PINNED, -11, "there is no pin to take back")                                         \
    X(EBB_NO_ADDRESSES, -12, "the driver has no such range of addresses to give")                  \
    X(EBB_FULL, -13, "the VBAR has no such range left")                                            \
    X(EBB_FORKED, -14, "a GPU cannot be used in a process forked after it was opened")             \
    X(EBB_BROKEN, -15, "the books do not match: this is a bug of Ebbtide")

typedef enum ebb_status {
#define EBB_STATUS_ENUM(name, value, sentence) name = (value),
    EBB_STATUSES(EBB_STATUS_ENUM)
#undef EBB_STATUS_ENUM
} ebb_status;

/* "EBB_NO_VMM" for EBB_NO_VMM; "unknown" for a value that is no status. Never NULL. */
EBB_API const char *ebb_status_name(ebb_status status);

/* One sentence in plain words, without a full stop. Never NULL. */
EBB_API const char *ebb_status_text(ebb_status status);

/* The library's version, "0.1.0". */
EBB_API const char *ebb_version(void);

/* What ebb_probe() found. */
typedef struct ebb_probe_result {
    size_t size;          /* sizeof(ebb_probe_result), set by the caller */
    int driver_version;   /* 13000 for CUDA 13.0; 0 where the driver did not say */
    int device_count;     /* GPUs the driver shows */
    int exportable;       /* memory of this GPU can be shared as file descriptors */
    int context_events;   /* the driver can record an event of a whole context (12.5 and later) */
    uint64_t total_bytes; /* the GPU's memory */
    size_t granularity;   /* bytes a physical allocation is a multiple of */
    char name[64];        /* the GPU's name */
    char detail[256];     /* in words: what was found, or what is missing. Written on failure too */
} ebb_probe_result;

/*
 * Say whether Ebbtide can work with GPU number `index`, and if not, why.
 *
 * `library` is the path of a driver library, or NULL: EBBTIDE_DRIVER if set, else the system's.
 * Loads the driver, looks, and lets go of it again: no context is made and nothing is left behind.
 *
 * EBB_OK; EBB_INVALID (result is NULL or its size is too small, index is negative); EBB_NO_DRIVER;
 * EBB_DRIVER_TOO_OLD; EBB_DRIVER_INCOMPLETE (detail names the function); EBB_DRIVER_FAILED (detail
 * names the call and the code); EBB_NO_DEVICE; EBB_NO_VMM; EBB_NO_HOST_MEMORY.
 * May take as long as the driver's own start, about a second on a GPU.
 */
EBB_API ebb_status ebb_probe(const char *library, int index, ebb_probe_result *result);

/* ---- devices -------------------------------------------------------------------------------- */

/*
 * One GPU, and everything Ebbtide knows of it. A handle, not a pointer: one whose device was closed
 * is recognised and answered EBB_GONE. Zero is no device.
 */
typedef struct ebb_device {
    uint32_t id;
} ebb_device;

/* A CUDA stream of the device's primary context (a CUstream). NULL: the legacy default stream. */
typedef void *ebb_stream;

/* For `limit`: what the GPU has. For `headroom`: 1/64 of the GPU, at most 128 MiB. */
#define EBB_DEFAULT UINT64_MAX

typedef struct ebb_device_options {
    size_t size;         /* sizeof(ebb_device_options) */
    const char *library; /* driver library; NULL: EBBTIDE_DRIVER if set, else the system's */
    int index;           /* the GPU's number, as the driver counts */
    uint64_t limit;      /* bytes of VRAM that may be held through Ebbtide; or EBB_DEFAULT */
    uint64_t headroom;   /* bytes to leave free for others; or EBB_DEFAULT */
} ebb_device_options;

/*
 * Open a GPU. Opening it again gives the same device (and leaves its limit and headroom alone); one
 * ebb_device_close() for each open. `detail`, of `length` bytes (may be NULL), says in words what is
 * missing when this fails, and then nothing is left behind.
 *
 * The statuses of ebb_probe(), EBB_FORKED, EBB_NO_HOST_MEMORY. Blocks as long as the driver takes to
 * make the context: seconds on a GPU that was idle.
 */
EBB_API ebb_status ebb_device_open(const ebb_device_options *options, ebb_device *device,
                                   char *detail, size_t length);

/*
 * Undo one open. The last one destroys the device's VBARs, waiting for their fences, and frees all.
 * EBB_OK; EBB_GONE; EBB_BUSY: a VBAR is pinned, or held by a graph, there is a mover, or host memory
 * that was not given back, or another thread is in a call, and nothing was undone; EBB_DRIVER_FAILED:
 * the driver would not take something back. The device stays open; try again.
 */
EBB_API ebb_status ebb_device_close(ebb_device device);

/*
 * Change the limit, or the headroom, while running. Lowering the limit gives back at once what can
 * go: free frames, then weights, least important first, waiting for their fences alone.
 * EBB_OK; EBB_BUSY: it is set, but what is pinned is above it, and goes as it is unpinned; EBB_GONE.
 */
EBB_API ebb_status ebb_device_set_limit(ebb_device device, uint64_t bytes);
EBB_API ebb_status ebb_device_set_headroom(ebb_device device, uint64_t bytes);

/* Give free frames back to the driver. *freed (may be NULL): bytes. EBB_OK, EBB_GONE. */
EBB_API ebb_status ebb_device_trim(ebb_device device, uint64_t *freed);

/*
 * What ebb_device_keep_stream() can promise of a stream besides that it lasts. EBB_NEVER_CAPTURES:
 * nothing is ever captured on it, by anyone, that is, no capture begins on it, and it waits for no
 * event of another stream's capture.
 */
enum { EBB_NEVER_CAPTURES = 1 };

/*
 * Promise that `stream` lives as long as the device is open. Unpinning on such a stream makes no
 * driver call but one question, whether it captures; on any other an event is recorded each time,
 * because the stream may be gone when the event is needed. With EBB_NEVER_CAPTURES in `promises` the
 * question is not asked either. A later call replaces the promises: with 0 the stream still lasts,
 * and may capture once the call has returned. The legacy default stream needs neither promise.
 * PyTorch's streams last, and may capture.
 *
 * If something is captured on a stream that was promised never to capture, pages that are unpinned
 * on it meanwhile are not held for the graph: they may be evicted while the graph still uses them,
 * and a launch then reads and writes memory that is another weight's, or none. Nothing prevents that.
 * Where the library asks all the same, it may find out: then `broken_promises` counts it,
 * ebb_device_failure() says it, and the promise is void, that is, the stream is asked again. Pages
 * that were unpinned before that are still not held.
 *
 * EBB_OK; EBB_GONE; EBB_INVALID: the per-thread default stream, or a promise that there is not;
 * EBB_BUSY: promised never to capture, and it is capturing; EBB_NO_HOST_MEMORY, EBB_DRIVER_FAILED.
 * Unless EBB_OK, no promise was made. May wait for what an earlier stream of the same handle did.
 */
EBB_API ebb_status ebb_device_keep_stream(ebb_device device, ebb_stream stream, unsigned promises);

/* Why a VBAR's page was given up. */
typedef enum ebb_reason {
    EBB_FOR_WEIGHT, /* a more important weight faulted */
    EBB_FOR_TENSOR, /* PyTorch needed the memory */
    EBB_FOR_LIMIT,  /* the limit was lowered */
    EBB_FOR_ASKING, /* ebb_vbar_free_memory() */
    EBB_REASONS
} ebb_reason;

typedef struct ebb_device_stats {
    size_t size; /* sizeof(ebb_device_stats) */
    /* now, in bytes */
    uint64_t total;      /* the GPU's memory */
    uint64_t free;       /* as the driver sees it: all processes, all libraries */
    uint64_t limit;      /* settable */
    uint64_t headroom;   /* settable */
    uint64_t held;       /* physical memory this device holds through Ebbtide: never above limit */
    uint64_t resident;   /* of it, behind pages of VBARs */
    uint64_t pinned;     /* of that, pinned at this moment */
    uint64_t for_graphs; /* of `resident`, held by graphs: see ebb_vbar_graphs_gone() */
    uint64_t unused;     /* of `held`, free frames kept for re-use */
    uint64_t poisoned;   /* of `held`, lost behind pages the driver would not unmap */
    uint64_t vbars;      /* how many */
    /* since the device was opened */
    uint64_t hits, misses, offloaded; /* answers of fault: hit, loaded, offloaded */
    uint64_t evictions[EBB_REASONS];  /* pages given up, by reason */
    uint64_t frames_created, frames_recycled, frames_released;
    uint64_t marks;           /* events recorded for fences */
    uint64_t orders;          /* streams made to wait for another's event */
    uint64_t waits, wait_ns;  /* times the host waited for a fence, and how long in all */
    uint64_t retries;         /* driver calls that passed when tried again */
    uint64_t page_outs;       /* page-out functions called */
    uint64_t broken_promises; /* streams found capturing that were promised never to */
} ebb_device_stats;

EBB_API ebb_status ebb_device_get_stats(ebb_device device, ebb_device_stats *stats);

/*
 * Check every invariant of the device's books. EBB_OK, EBB_GONE, or EBB_BROKEN: `detail`, of
 * `length` bytes, says which by number. For tests and reports; costs time by the page.
 */
EBB_API ebb_status ebb_check(ebb_device device, char *detail, size_t length);

/* The last driver call that failed on this device, or promise found broken, in words; empty if there
   was none. */
EBB_API ebb_status ebb_device_failure(ebb_device device, char *detail, size_t length);

/* ---- VBARs ---------------------------------------------------------------------------------- */

/*
 * A range of GPU addresses for the weights of one model. Addresses are fixed; the memory behind them
 * comes with ebb_vbar_fault() and goes under pressure. Lower addresses are more important, and a
 * newer (or prioritised) VBAR is more important than an older one.
 */
typedef struct ebb_vbar {
    uint64_t id;
} ebb_vbar;

/*
 * Called before a page with written weights is given up: save `bytes` at `offset` of the VBAR. The
 * page's fence has passed. Must be finished with the page when it returns; 0 to let it go, anything
 * else keeps it. Called without a lock, on the thread that needs the memory. It must not call
 * Ebbtide with this VBAR.
 */
typedef int (*ebb_page_out)(void *user, uint64_t offset, uint64_t bytes);

typedef struct ebb_vbar_options {
    size_t size;           /* sizeof(ebb_vbar_options) */
    uint64_t bytes;        /* how large; rounded up to the driver's granularity */
    int rise;              /* the watermark rises by itself when VRAM has become free again */
    ebb_page_out page_out; /* or NULL: weights are clean, there is nothing to save */
    void *user;            /* for page_out */
    uint64_t fine;         /* at least so many of the last bytes are in small pages, of the driver's
                              granularity: little can be given up then, but each takes the driver as
                              long as a large one, of 32 MiB */
} ebb_vbar_options;

/*
 * Create a VBAR, the most important of its device. Costs addresses, no VRAM. EBB_OK, EBB_GONE,
 * EBB_INVALID (no bytes, or too many to count), EBB_NO_ADDRESSES, EBB_NO_HOST_MEMORY.
 */
EBB_API ebb_status ebb_vbar_create(ebb_device device, const ebb_vbar_options *options,
                                   ebb_vbar *vbar);

/*
 * Give everything back. Waits for the fences of its pages. EBB_OK; EBB_GONE; EBB_BUSY: pinned, held
 * by a graph, or another thread is in a call; EBB_DRIVER_FAILED: a page could not be unmapped. After
 * the last two the VBAR is still there.
 */
EBB_API ebb_status ebb_vbar_destroy(ebb_vbar vbar);

/*
 * Take the next `bytes` of the VBAR: addresses only, aligned to 512. Take the most important weights
 * first. EBB_OK, EBB_GONE, EBB_INVALID (0 bytes), EBB_FULL.
 */
EBB_API ebb_status ebb_vbar_alloc(ebb_vbar vbar, uint64_t bytes, uint64_t *offset);

/* A range of a VBAR, for the calls that take several. */
typedef struct ebb_range {
    uint64_t offset, bytes;
} ebb_range;

/*
 * Make a range resident, if its importance allows, and pin it for use on `stream`.
 *
 * EBB_OK: it is pinned, until one ebb_vbar_unpin() with the same range. *signature says what is
 * there: equal to the one under which the caller last filled the range, the contents are intact;
 * anything else, the caller fills the range on `stream` and calls ebb_vbar_filled(). Work that the
 * caller queues on `stream` from now on is ordered after every earlier use of the range's pages.
 * EBB_OFFLOADED: not resident, not pinned. Use a temporary.
 * EBB_BUSY: asked by a page-out function, for a page that is being saved: not pinned.
 * EBB_GONE, EBB_INVALID (no bytes, past the end), EBB_FORKED; EBB_DRIVER_FAILED (ebb_device_failure()
 * says more), EBB_NO_HOST_MEMORY: not pinned.
 *
 * A hit on the stream that used the pages last takes no lock and calls no driver. A miss may wait
 * for the fences of the pages it displaces, for nothing else. Any thread.
 */
EBB_API ebb_status ebb_vbar_fault(ebb_vbar vbar, uint64_t offset, uint64_t bytes, ebb_stream stream,
                                  uint64_t *signature);

/* The same for `count` ranges, all or nothing; signatures[i] is that of ranges[i]. */
EBB_API ebb_status ebb_vbar_fault_many(ebb_vbar vbar, const ebb_range *ranges, size_t count,
                                       ebb_stream stream, uint64_t *signatures);

/*
 * Say that the range has been filled by work queued on `stream`: from now on a fault on another
 * stream is ordered after that work. The range must be pinned. EBB_OK, EBB_GONE, EBB_INVALID,
 * EBB_NOT_PINNED, EBB_DRIVER_FAILED.
 */
EBB_API ebb_status ebb_vbar_filled(ebb_vbar vbar, uint64_t offset, uint64_t bytes,
                                   ebb_stream stream);

/*
 * Take back one pin of each page of the range. The pages may be given up once all work that is on
 * `stream` by now is over. If the stream is capturing, they are held for the graph's sake until
 * ebb_vbar_graphs_gone(). EBB_OK, EBB_GONE, EBB_INVALID; EBB_NOT_PINNED, EBB_DRIVER_FAILED (it
 * cannot be known when that work is over; try again): nothing changed.
 */
EBB_API ebb_status ebb_vbar_unpin(ebb_vbar vbar, uint64_t offset, uint64_t bytes,
                                  ebb_stream stream);
EBB_API ebb_status ebb_vbar_unpin_many(ebb_vbar vbar, const ebb_range *ranges, size_t count,
                                       ebb_stream stream);

/*
 * No graph uses this VBAR any more: the graphs are destroyed, and their last launch is behind
 * whatever is on `stream` by now. EBB_OK; EBB_GONE; EBB_BUSY: `stream` is capturing;
 * EBB_DRIVER_FAILED, EBB_NO_HOST_MEMORY. After the last three the pages are still held.
 */
EBB_API ebb_status ebb_vbar_graphs_gone(ebb_vbar vbar, ebb_stream stream);

/* Make it the most important of its device, or the least; prioritising lifts the watermark to its
   limit. EBB_OK, EBB_GONE. */
EBB_API ebb_status ebb_vbar_prioritize(ebb_vbar vbar);
EBB_API ebb_status ebb_vbar_deprioritize(ebb_vbar vbar);

/*
 * Two VBARs of a device trade importance; nothing else about them changes. One that is made to replace
 * another gets its place so, and several are put in order without a word to the rest. EBB_OK; EBB_GONE:
 * one of them is; EBB_INVALID: of two devices.
 */
EBB_API ebb_status ebb_vbar_trade(ebb_vbar vbar, ebb_vbar other);

/*
 * Give up unpinned pages from the top down until `bytes` are back with the driver, or none is left;
 * lowers the watermark. *freed (may be NULL) says how many. Waits for fences. EBB_OK, EBB_GONE.
 */
EBB_API ebb_status ebb_vbar_free_memory(ebb_vbar vbar, uint64_t bytes, uint64_t *freed);

/*
 * The watermark, in bytes from the start: pages that begin at or above it are not loaded. Eviction
 * lowers it to the evicted page. It never stands above its limit. EBB_OK, EBB_GONE.
 */
EBB_API ebb_status ebb_vbar_set_watermark(ebb_vbar vbar, uint64_t bytes);
EBB_API ebb_status ebb_vbar_set_watermark_limit(ebb_vbar vbar, uint64_t bytes);

typedef struct ebb_vbar_stats {
    size_t size;                     /* sizeof(ebb_vbar_stats) */
    uint64_t address;                /* where it begins, on the GPU */
    uint64_t bytes;                  /* how large */
    uint64_t allocated;              /* taken by ebb_vbar_alloc(), alignment included */
    uint64_t resident, pinned, held; /* bytes: with memory; pinned; held by graphs */
    uint64_t watermark, watermark_limit;
    uint64_t pages;                   /* how many */
    int64_t rank;                     /* importance; larger is more important */
    uint64_t hits, misses, offloaded; /* answers of fault */
    uint64_t loads;                   /* pages that got a frame */
    uint64_t evictions[EBB_REASONS];  /* pages given up, by reason */
} ebb_vbar_stats;

EBB_API ebb_status ebb_vbar_get_stats(ebb_vbar vbar, ebb_vbar_stats *stats);

/* A page's flags, as ebb_vbar_residency() writes them. */
enum { EBB_PAGE_RESIDENT = 1, EBB_PAGE_PINNED = 2, EBB_PAGE_HELD = 4, EBB_PAGE_POISONED = 8 };

/* Write a byte of flags for each of the first `count` pages. EBB_OK, EBB_GONE, EBB_INVALID. */
EBB_API ebb_status ebb_vbar_residency(ebb_vbar vbar, uint8_t *flags, size_t count);

/* Where a page begins and how long it is. EBB_OK, EBB_GONE, EBB_INVALID (no such page). */
EBB_API ebb_status ebb_vbar_page(ebb_vbar vbar, uint64_t page, ebb_range *range);

/* ---- moving weights ------------------------------------------------------------------------- */

/*
 * Host memory that the GPU copies from at the link's speed.
 *
 * `bytes` of zeroes, all there, in huge pages where the system has them, pinned for every GPU. To pin
 * takes time (about 0.2 s per GiB) and disturbs a model that runs: take memory ahead, in large
 * pieces, and keep it. EBB_OK; EBB_INVALID (0 bytes); EBB_NO_HOST_MEMORY; EBB_GONE; EBB_FORKED;
 * EBB_DRIVER_FAILED: it could not be pinned. Blocks as long as that takes. While there is such
 * memory, the device cannot be closed (EBB_BUSY).
 */
EBB_API ebb_status ebb_host_alloc(ebb_device device, uint64_t bytes, void **memory);

/*
 * Give it back, when all work that is queued on the GPU by now is over. EBB_OK; EBB_INVALID: it is not
 * from ebb_host_alloc(); EBB_BUSY: part of it is borrowed, or another thread gives it back, or a stream
 * captures; EBB_GONE, EBB_FORKED; EBB_DRIVER_FAILED: it is still there, try again. Blocks.
 */
EBB_API ebb_status ebb_host_free(ebb_device device, void *memory);

/* Memory of this process. */
typedef struct ebb_span {
    const void *start;
    uint64_t bytes;
} ebb_span;

/*
 * Pin memory of somebody else's that is to be copied from, if it is not: a tensor, or part of a file
 * that is mapped. *from: where the GPU copies it from, memory itself or another address of the same
 * pages. One ebb_host_return() for each EBB_OK. Until then these bytes stay mapped, and if they are a
 * file's nobody writes to them: no copy from the GPU can, and where it is mapped privately the GPU
 * reads what the file has, at another address, and not what is written. Of a file all of the mapping
 * that is `within` a span is pinned, once (NULL: the whole mapping; say where weights are, if a file has
 * more than those); of anything else these bytes. What is pinned already, by whomever, is left as it is.
 *
 * EBB_OK: one pinned piece holds all of it. Anything else: copy it into memory of ebb_host_alloc()
 * instead. EBB_INVALID: nothing is mapped there, or it overlaps with what is borrowed or pinned and
 * is not within, or was pinned for another GPU; or it is a privately mapped file to which the program
 * has written, or the system does not say, or which cannot be had by its name any more, or not as a
 * whole. EBB_DRIVER_FAILED: it could not be pinned; EBB_NO_HOST_MEMORY: so much memory is not free to
 * be kept; EBB_GONE, EBB_FORKED. Blocks while pages are pinned (about 30 ms per GiB that is in memory;
 * where the system cannot tell files apart, on overlayfs, say, they are compared too). While something
 * is borrowed, the device cannot be closed (EBB_BUSY).
 */
EBB_API ebb_status ebb_host_borrow(ebb_device device, const void *memory, uint64_t bytes,
                                   const ebb_span *within, const void **from);

/*
 * The piece, pinned as one, that a byte is in, whoever has pinned it: one copy may read as far as that
 * goes, and no further. EBB_OK; EBB_INVALID: it is not pinned; EBB_GONE, EBB_FORKED.
 */
EBB_API ebb_status ebb_host_pinned(ebb_device device, const void *memory, ebb_span *piece);

/*
 * Undo one ebb_host_borrow() of the same range; the last one of what is pinned as one waits until all
 * work that is queued on the GPU by now is over. EBB_OK; EBB_INVALID: it is not borrowed; EBB_GONE,
 * EBB_FORKED; EBB_BUSY: a stream captures; EBB_DRIVER_FAILED. With these two it is still borrowed: try
 * again. Blocks.
 */
EBB_API ebb_status ebb_host_return(ebb_device device, const void *memory, uint64_t bytes);

/*
 * A mover brings weights to the GPU, ahead of their use, on a stream of its own: into their VBAR where
 * there is room for them, else into a ring, a piece of VRAM that what stays offloaded passes through.
 *
 *   fetch  copies are queued; what could not go to the VBAR is one cargo, a piece of the ring
 *   use    the stream waits for the cargo, on the GPU
 *   done   the last work that reads the cargo is queued: its place may be written after that
 *
 * None of the three waits on the host for copies. A pointer, not a handle: after ebb_mover_destroy()
 * it must not be used. Several threads may use one mover at once.
 *
 * Where PyTorch's tensors would find no room even without a single weight, the ring gives way to them, as
 * far as no cargo in use lies on it. A cargo that was not in use yet may be gone then.
 */
typedef struct ebb_mover ebb_mover;

/*
 * A mover with no ring yet. While there is one, the device cannot be closed (EBB_BUSY). EBB_OK,
 * EBB_INVALID, EBB_GONE, EBB_FORKED, EBB_NO_HOST_MEMORY, EBB_DRIVER_FAILED.
 */
EBB_API ebb_status ebb_mover_create(ebb_device device, ebb_mover **mover);

/*
 * Give stream, events and ring back. Waits for the mover's own copies and for the work that read its
 * cargoes, for nothing else. EBB_OK, also for NULL; EBB_BUSY: a cargo is neither done nor dropped, or
 * another thread changes the ring; EBB_FORKED; EBB_DRIVER_FAILED: the mover is still there, perhaps
 * without its ring; try again.
 */
EBB_API ebb_status ebb_mover_destroy(ebb_mover *mover);

/*
 * Make the ring `bytes` large, rounded up to what the GPU's memory comes in; 0: no ring. It counts
 * against the limit, weights make room for it, and it stays, but for what gives way to tensors, until
 * this is called again: then it is whole. EBB_OK;
 * EBB_OFFLOADED: there is no such memory now, and the ring is as it was, or there is none
 * (ebb_mover_get_stats() says); EBB_BUSY: a cargo is out, or another thread changes the ring;
 * EBB_GONE, EBB_FORKED, EBB_NO_ADDRESSES, EBB_NO_HOST_MEMORY, EBB_DRIVER_FAILED. Waits for the work on
 * the ring that was, and for the fences of the weights that make room.
 */
EBB_API ebb_status ebb_mover_set_ring(ebb_mover *mover, uint64_t bytes);

/* One weight of a unit: where it is in the VBAR and on the host. */
typedef struct ebb_load {
    uint64_t offset, bytes; /* in the VBAR */
    const void
        *host; /* its contents: pinned in one piece, and not changed until the copy is over */
    uint64_t signature; /* in and out: under which it was last filled; 0: never */
    uint64_t staged;    /* out: its address in the ring; 0: it is resident, in the VBAR */
} ebb_load;

/* How to fetch; all zero is what NULL is. */
typedef struct ebb_fetch {
    /* A cargo that what is staged may become a part of: if it was the last that was fetched, is not in use
       yet, and has room behind it. *cargo is the same then, and one wait is for all of it. */
    uint64_t with;
    /* An address in the ring, for a cargo of its own: it goes there if that skips no more than so many bytes
       of the ring. Who fetches the same things again and again finds them in few places so. */
    uint64_t at, skip;
    /* Not 0: what is not resident is staged, and its VBAR not asked whether it has room by now. */
    int stage;
} ebb_fetch;

/*
 * Bring `count` weights of a VBAR of the mover's device to the GPU.
 *
 * A weight that is resident with its contents intact costs a look, no driver call. One that its VBAR
 * has room for is made resident and filled. The rest is staged: *cargo names it, for one or more pairs
 * of ebb_mover_use() and ebb_mover_done(), or one ebb_mover_drop(). *cargo is 0 if nothing was staged.
 * A weight with `staged` 0 is not pinned: fault it on the stream of its use, as ever; `signature` says
 * whether it is still what was fetched.
 *
 * EBB_OK. EBB_OFFLOADED: what would have to be staged does not fit into the ring now: nothing is
 * staged. EBB_INVALID (nothing to load, no host memory, a range or VBAR that makes no sense), EBB_GONE,
 * EBB_FORKED, EBB_BUSY (as ebb_vbar_fault()), EBB_NO_HOST_MEMORY, EBB_DRIVER_FAILED: nothing is staged.
 * Without EBB_OK, *cargo and `staged` are 0; weights that were filled stay filled, and `signature` says
 * so. Copies may be queued in any case: to know that none reads `host` any more, wait for what is on
 * ebb_mover_stream() by then, or for work that came after ebb_mover_use().
 *
 * Waits only where ebb_vbar_fault() would: for the fences of pages that a weight displaces. A weight's
 * `signature` must not be in two calls at once.
 */
EBB_API ebb_status ebb_mover_fetch(ebb_mover *mover, ebb_vbar vbar, ebb_load *loads, size_t count,
                                   const ebb_fetch *how, uint64_t *cargo);

/* Where the next cargo will be in the ring, if nothing else is asked for and it has room there; 0: there
   is no ring. *start and *bytes, where they are not NULL: where the ring
   begins, and how large it is. */
EBB_API uint64_t ebb_mover_head(ebb_mover *mover, uint64_t *start, uint64_t *bytes);

/* How many of so many bytes would have room in the ring now, side by side: all, some or none. If there are
   `least` up to the next end of it, or of a piece, then these are meant, and not a place beyond with room for
   more: whoever fetches as many, and then the others, uses all of the ring. */
EBB_API uint64_t ebb_mover_room(ebb_mover *mover, uint64_t bytes, uint64_t least);

/*
 * Order what comes next on `stream` after the cargo's arrival. One ebb_mover_done() for each EBB_OK. A
 * cargo used on several streams is used on all of them before it is done on the last. EBB_OK (cargo 0:
 * nothing to do); EBB_GONE: there is no such cargo, it is done, or it was not in use and has given way to
 * tensors: fetch it again; EBB_BUSY: the stream is capturing, and no copy can be part of a graph;
 * EBB_FORKED, EBB_DRIVER_FAILED. Unless EBB_OK, nothing changed.
 */
EBB_API ebb_status ebb_mover_use(ebb_mover *mover, uint64_t cargo, ebb_stream stream);

/*
 * The last work that reads the cargo is on `stream` by now. When as often done as used, the cargo is
 * gone, and its place is written again after that work. The statuses of ebb_mover_use(), and
 * EBB_INVALID: it is not in use.
 */
EBB_API ebb_status ebb_mover_done(ebb_mover *mover, uint64_t cargo, ebb_stream stream);

/* Give up a cargo that was not used. EBB_OK (cargo 0: nothing to do); EBB_GONE, as ebb_mover_use();
   EBB_BUSY: it is in use; EBB_FORKED. */
EBB_API ebb_status ebb_mover_drop(ebb_mover *mover, uint64_t cargo);

/* The stream that it copies on. It lives as long as the mover, and the caller queues nothing on it. */
EBB_API ebb_stream ebb_mover_stream(const ebb_mover *mover);

/*
 * Marks: to see how long the GPU takes. Set one where `stream` is now (numbers begin with 1), ask later how
 * many milliseconds the GPU took from one to another, and give both back: they are used again. None of it
 * waits. EBB_OK; EBB_BUSY: the stream is being captured, or the GPU has not come to both yet; EBB_INVALID: no
 * such mark is set; EBB_NO_HOST_MEMORY; EBB_DRIVER_FAILED; EBB_GONE; EBB_FORKED.
 */
EBB_API ebb_status ebb_mover_mark(ebb_mover *mover, ebb_stream stream, uint32_t *mark);
EBB_API ebb_status ebb_mover_between(ebb_mover *mover, uint32_t from, uint32_t to,
                                     double *milliseconds);
EBB_API void ebb_mover_unmark(ebb_mover *mover, uint32_t mark);

typedef struct ebb_mover_stats {
    size_t size;      /* sizeof(ebb_mover_stats) */
    uint64_t ring;    /* bytes of the ring, without what has given way */
    uint64_t address; /* where it begins */
    uint64_t end;     /* where it ends: further on than its size, if some between has given way */
    uint64_t pieces;  /* in which it is then */
    uint64_t
        ring_used; /* of them, not to be had now: from the oldest cargo that is out to the newest */
    uint64_t cargoes_out; /* neither done nor dropped */
    /* since it was created */
    uint64_t cargoes; /* fetched */
    uint64_t staged;  /* bytes copied into the ring */
    uint64_t filled;  /* bytes copied into VBARs */
    uint64_t copies;  /* that were queued for both */
    uint64_t waits; /* for work on what a cargo's place held before: by the GPU, not by the host */
    uint64_t no_room;  /* times the ring had no room */
    uint64_t given_up; /* bytes of the ring that have given way to tensors */
} ebb_mover_stats;

/* EBB_OK, EBB_INVALID, EBB_FORKED. */
EBB_API ebb_status ebb_mover_get_stats(ebb_mover *mover, ebb_mover_stats *stats);

/* ---- under PyTorch -------------------------------------------------------------------------- */

/*
 * Put Ebbtide under PyTorch's own caching allocator: from now on the segments that PyTorch asks the
 * CUDA runtime for are made of the same frames as VBARs, within the same limit, and weights give way
 * to them. PyTorch's statistics, streams, graphs and pools are not touched.
 *
 * A device is opened when PyTorch first allocates on it, with this limit and headroom.
 */
typedef struct ebb_attach_options {
    size_t size;         /* sizeof(ebb_attach_options) */
    const char *library; /* driver library; NULL: EBBTIDE_DRIVER if set, else the system's */
    uint64_t devices;    /* bit i: GPU i; all bits: every GPU */
    uint64_t limit;      /* as in ebb_device_options, for each GPU */
    uint64_t headroom;
} ebb_attach_options;

/*
 * EBB_OK; EBB_BUSY: it is attached, or another library has replaced PyTorch's imports (`detail` names
 * it); EBB_NO_DRIVER: PyTorch's CUDA allocator is not loaded; EBB_INVALID: it does not import what
 * there is to replace (a PyTorch with the CUDA runtime linked in); EBB_DRIVER_TOO_OLD: before 12.5.
 */
EBB_API ebb_status ebb_attach(const ebb_attach_options *options, char *detail, size_t length);

/*
 * Undo it. PyTorch's next segments are the CUDA runtime's again. Segments of ours that still live stay
 * valid, and are taken back as PyTorch frees them; *remaining (may be NULL) says how many bytes they
 * are. EBB_OK, also if not attached; EBB_BUSY: another library has replaced the imports since.
 */
EBB_API ebb_status ebb_detach(uint64_t *remaining);

/* The device that PyTorch's GPU `index` is, opened if need be. EBB_OK, EBB_GONE: not attached there;
   the statuses of ebb_device_open(). The handle is the door's: do not close it. */
EBB_API ebb_status ebb_attached(int index, ebb_device *device);

/* Segments that PyTorch had taken before: `address` and bytes. They count against the limit until
   PyTorch frees them. EBB_OK, EBB_GONE, EBB_NO_HOST_MEMORY. */
EBB_API ebb_status ebb_attach_before(int index, const ebb_range *segments, size_t count);

/* A pool of PyTorch's has been opened on a GPU (1) or closed (-1): while one is, PyTorch takes a
   refusal for the end, and none is made. */
EBB_API void ebb_attach_pool(int index, int change);

typedef struct ebb_segment_stats {
    size_t size;                   /* sizeof(ebb_segment_stats) */
    uint64_t segments, bytes;      /* that PyTorch has */
    uint64_t parked, parked_bytes; /* given back, with work that may not be over */
    uint64_t before;               /* bytes PyTorch took before, and still has */
    uint64_t reused;               /* times a parked segment was given out again as it was */
    uint64_t refusals;             /* times PyTorch was asked for what it does not use */
} ebb_segment_stats;

EBB_API ebb_status ebb_attached_stats(int index, ebb_segment_stats *stats);

#ifdef __cplusplus
}
#endif
#endif
