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
 *   - Nothing here needs a CUDA SDK, a current CUDA context, or a GPU to be linked or called.
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
 * Zero is success, negative values are errors. X(name, value, sentence)
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
    X(EBB_NO_VMM, -8, "the GPU does not support virtual memory management (a vGPU, for example)")

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

#ifdef __cplusplus
}
#endif
#endif
