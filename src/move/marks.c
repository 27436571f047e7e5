/*
 * Marks: points in the work of streams, to see how long the GPU takes from one to the next.
 *
 * A mark is an event that keeps the time, made when there is no free one, and set again and again. To ask
 * how far two are apart waits for nothing: where the GPU has not come to them, that is the answer.
 */
#include <stdlib.h>

#include "move.h"

enum { FIRST = 64 }; /* marks there is room for at first */

/* A free mark's number, from 0; `mark_count`: there is none. */
static size_t free_mark(const ebb_mover *mover)
{
    size_t i = 0;
    while (i < mover->mark_count && mover->marks[i].set)
        i++;
    return i;
}

/* One mark more. */
static ebb_status add_mark(ebb_mover *mover, ebb__device *device)
{
    if (mover->mark_count == mover->mark_room) {
        size_t room = mover->mark_room ? 2 * mover->mark_room : FIRST;
        ebb__timed *marks = realloc(mover->marks, room * sizeof *marks);
        if (!marks)
            return EBB_NO_HOST_MEMORY;
        mover->marks = marks;
        mover->mark_room = room;
    }
    ebb__timed *fresh = &mover->marks[mover->mark_count];
    *fresh = (ebb__timed){0};
    CUresult code = device->driver.cuEventCreate(&fresh->event, CU_EVENT_DEFAULT);
    if (code != CUDA_SUCCESS)
        return ebb__mover_failed(device, "cuEventCreate", code);
    mover->mark_count++;
    return EBB_OK;
}

static ebb_status set_mark(ebb_mover *mover, ebb__device *device, CUstream stream, uint32_t *mark)
{
    size_t i = free_mark(mover);
    ebb_status status = i < mover->mark_count ? EBB_OK : add_mark(mover, device);
    if (status != EBB_OK)
        return status;
    CUresult code = device->driver.cuEventRecord(mover->marks[i].event, stream);
    if (code != CUDA_SUCCESS)
        return ebb__mover_failed(device, "cuEventRecord", code);
    mover->marks[i].set = true;
    *mark = (uint32_t)i + 1;
    return EBB_OK;
}

ebb_status ebb_mover_mark(ebb_mover *mover, ebb_stream stream, uint32_t *mark)
{
    ebb__scope scope;
    ebb_status status = ebb__mover_there(mover);
    if (status != EBB_OK)
        return status;
    if (!mark)
        return EBB_INVALID;
    *mark = 0;
    ebb__os_lock(&mover->mu);
    ebb__device *device = ebb__mover_reach(mover, &scope, &status);
    if (device) {
        status = ebb__mover_outside(device, stream);
        if (status == EBB_OK)
            status = set_mark(mover, device, stream, mark);
        ebb__mover_leave(device, &scope);
    }
    ebb__os_unlock(&mover->mu);
    return status;
}

/* A mark that is set, or NULL. Under the mover's lock. */
static ebb__timed *find(const ebb_mover *mover, uint32_t number)
{
    bool there = number && number <= mover->mark_count && mover->marks[number - 1].set;
    return there ? &mover->marks[number - 1] : NULL;
}

ebb_status ebb_mover_between(ebb_mover *mover, uint32_t from, uint32_t to, double *milliseconds)
{
    ebb__scope scope;
    ebb_status status = ebb__mover_there(mover);
    if (status != EBB_OK)
        return status;
    if (!milliseconds)
        return EBB_INVALID;
    *milliseconds = 0;
    ebb__os_lock(&mover->mu);
    const ebb__timed *first = find(mover, from), *last = find(mover, to);
    ebb__device *device = first && last ? ebb__mover_reach(mover, &scope, &status) : NULL;
    if (!first || !last)
        status = EBB_INVALID;
    if (device) {
        float took = 0;
        CUresult code = device->driver.cuEventElapsedTime(&took, first->event, last->event);
        if (code == CUDA_ERROR_NOT_READY)
            status = EBB_BUSY;
        else if (code != CUDA_SUCCESS)
            status = ebb__mover_failed(device, "cuEventElapsedTime", code);
        *milliseconds = status == EBB_OK ? took : 0;
        ebb__mover_leave(device, &scope);
    }
    ebb__os_unlock(&mover->mu);
    return status;
}

void ebb_mover_unmark(ebb_mover *mover, uint32_t mark)
{
    if (ebb__mover_there(mover) != EBB_OK)
        return;
    ebb__os_lock(&mover->mu);
    ebb__timed *found = find(mover, mark);
    if (found)
        found->set = false;
    ebb__os_unlock(&mover->mu);
}

ebb_status ebb__marks_end_locked(ebb_mover *mover, ebb__device *device)
{
    while (mover->mark_count) {
        CUresult code = device->driver.cuEventDestroy(mover->marks[mover->mark_count - 1].event);
        if (code != CUDA_SUCCESS)
            return ebb__failed_locked(device, "cuEventDestroy", code);
        mover->mark_count--;
    }
    return EBB_OK;
}
