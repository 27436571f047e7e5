/*
 * Segments: memory given to PyTorch for its own caching, over our frames.
 *
 * All may be called by any thread, with any lock of PyTorch's held and Python's in any state: they
 * take no lock but the device's and, without that, a mover's, and call nothing of Python's.
 */
#ifndef EBB_SEGMENT_H
#define EBB_SEGMENT_H

#include <stdbool.h>

#include "ebbtide.h"

/* Open the door on a device that is open. EBB_OK (also if it is open), EBB_NO_HOST_MEMORY, EBB_GONE;
   EBB_DRIVER_TOO_OLD: it cannot say when the work on freed memory is over (before 12.5). */
ebb_status ebb__segments_open(ebb_device device);

/* Close it. Parked segments are waited for. EBB_BUSY: a segment lives, or one that is parked cannot be
   known to be over, or somebody is in a call. */
ebb_status ebb__segments_close(ebb_device device);

/*
 * Memory of `bytes`, as cudaMalloc gives it. EBB_OK; EBB_FULL: there is none, or PyTorch is to give
 * back first what it caches and does not use, and to ask again. May wait for fences of weights that
 * give way, of the part of a mover's ring that does, and for work on memory that was given back; for
 * nothing else.
 */
ebb_status ebb__segment_alloc(ebb_device device, uint64_t bytes, uint64_t *address);

/*
 * Give memory back, as cudaFree takes it: without waiting. EBB_INVALID: the address is none of a
 * segment of this device.
 */
ebb_status ebb__segment_free(ebb_device device, uint64_t address);

/* What PyTorch took before, and has not given back: it counts against the limit. */
void ebb__segments_before(ebb_device device, int64_t change);

/*
 * Memory from elsewhere (ebb__segments_before) is about to grow by so many bytes: parked segments and
 * weights give way until that is within limit and headroom, and their frames go back to the driver.
 * EBB_OK; EBB_FULL: not all of it could be had.
 */
ebb_status ebb__segments_press(ebb_device device, uint64_t bytes);

/* The driver has no room for so many bytes, whatever the limit says: as much as that gives way.
   EBB_OK: something has; EBB_FULL: nothing can. */
ebb_status ebb__segments_yield(ebb_device device, uint64_t bytes);

/* Whether an address is in a segment that PyTorch has, or in a VBAR. */
bool ebb__segment_holds(ebb_device device, uint64_t address);

ebb_status ebb__segments_stats(ebb_device device, ebb_segment_stats *stats);

/* A pool of PyTorch's has been opened (+1) or closed (-1), or all are (0): no refusing while one is. */
void ebb__segments_open_pool(ebb_device device, int change);

/* Returns when no call that began before can record an event of the device's context any more. */
void ebb__segments_pass(ebb_device device);

#endif
