/*
 * What of fault and unpin takes no lock and never waits, for a caller that holds a lock of its own
 * and would let go of it for a call that may (Python's extension), or only wants to know (the mover).
 */
#ifndef EBB_FAST_H
#define EBB_FAST_H

#include <stdbool.h>

#include "ebbtide.h"

/* Pin, if that is a hit on the stream that used the range last: its signature. 0: nothing was done,
   ask ebb_vbar_fault(). */
uint64_t ebb__vbar_hit(ebb_vbar handle, uint64_t offset, uint64_t bytes, ebb_stream stream);

/* Unpin, likewise. false: nothing was done, ask ebb_vbar_unpin(). */
bool ebb__vbar_part(ebb_vbar handle, uint64_t offset, uint64_t bytes, ebb_stream stream);

/* The signature of a range whose pages are all there, without pinning it: it may go at any time. 0:
   one is not, or there is no such range. Calls no driver. */
uint64_t ebb__vbar_peek(ebb_vbar handle, uint64_t offset, uint64_t bytes);

/* What a device may hold, what it is to leave to others, and what there is. Calls no driver. */
ebb_status ebb__device_limits(ebb_device handle, uint64_t *limit, uint64_t *headroom,
                              uint64_t *total);

/* Whether a stream is promised to last, whoever promised it. */
bool ebb__stream_lasts(ebb_device handle, ebb_stream stream);

/* Whether a range that was offloaded was so for want of room: its watermark would have let it in. */
bool ebb__vbar_wanted(ebb_vbar handle, uint64_t offset, uint64_t bytes);

#endif
