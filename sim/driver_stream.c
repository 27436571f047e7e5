/*
 * The driver's face: streams and events.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver_face.h"
#include "sim.h"

/* ---- streams ---------------------------------------------------------------------------------- */

static CUresult create_stream(CUstream *out, unsigned flags, int priority)
{
    if (out == NULL || flags > CU_STREAM_NON_BLOCKING) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    stream *s =
        sim_stream_new(sim_current()->device, (flags & CU_STREAM_NON_BLOCKING) != 0, priority);
    if (s == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (CUstream)(uintptr_t)s->id;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    CUresult code = sim_enter(FN_cuStreamCreate);
    return sim_leave(code != CUDA_SUCCESS ? code : create_stream(out, flags, 0));
}

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    CUresult code = sim_enter(FN_cuStreamCreateWithPriority);
    int clamped = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    return sim_leave(code != CUDA_SUCCESS ? code : create_stream(out, flags, clamped));
}

CUresult cuStreamDestroy_v2(CUstream handle)
{
    if (handle == NULL) {
        return CUDA_ERROR_INVALID_HANDLE; /* the driver says so even before cuInit */
    }
    CUresult code;
    stream *s = sim_enter_stream(FN_cuStreamDestroy_v2, handle, &code);
    if (s != NULL && s->nobodys) {
        code = CUDA_ERROR_INVALID_HANDLE;
    } else if (s != NULL) {
        sim_capture_stream_gone(s);
        sim_stream_retire(s);
    }
    return sim_leave(code);
}

/* A capturing stream can be neither asked nor waited for: trying kills the capture. */
static CUresult refuse_capturing(stream *s)
{
    if (s->capture == NULL) {
        return sim_capture_check_implicit(s);
    }
    sim_capture_invalidate(s->capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult cuStreamQuery(CUstream handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuStreamQuery, handle, &code);
    if (s != NULL && (code = refuse_capturing(s)) == CUDA_SUCCESS) {
        code = sim_stream_idle(s) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    }
    return sim_leave(code);
}

CUresult cuStreamSynchronize(CUstream handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuStreamSynchronize, handle, &code);
    if (s != NULL && (code = refuse_capturing(s)) == CUDA_SUCCESS) {
        mark *m = sim_mark_own(s);
        sim_mark_wait(m);
        sim_mark_unref(m);
    }
    return sim_leave(code);
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *out)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuStreamGetCtx, handle, &code);
    if (s != NULL && out == NULL) {
        code = CUDA_ERROR_INVALID_VALUE;
    } else if (s != NULL && sim_capture_is_invalid(s)) {
        code = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else if (s != NULL) {
        *out = (CUcontext)(void *)&sim.contexts[s->device];
    }
    return sim_leave(code);
}

/* What a stream is: an int, or what fits one. */
static CUresult describe(function_id function, CUstream handle, const void *out, stream **found)
{
    CUresult code;
    *found = sim_enter_stream((int)function, handle, &code);
    return *found != NULL && out == NULL ? CUDA_ERROR_INVALID_VALUE : code;
}

CUresult cuStreamGetPriority(CUstream handle, int *priority)
{
    stream *s;
    CUresult code = describe(FN_cuStreamGetPriority, handle, priority, &s);
    if (code == CUDA_SUCCESS) {
        *priority = s->priority;
    }
    return sim_leave(code);
}

CUresult cuStreamGetFlags(CUstream handle, unsigned *flags)
{
    stream *s;
    CUresult code = describe(FN_cuStreamGetFlags, handle, flags, &s);
    if (code == CUDA_SUCCESS) {
        *flags = s->non_blocking ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT;
    }
    return sim_leave(code);
}

CUresult cuStreamGetId(CUstream handle, unsigned long long *id)
{
    stream *s;
    CUresult code = describe(FN_cuStreamGetId, handle, id, &s);
    if (code == CUDA_SUCCESS) {
        *id = s->id;
    }
    return sim_leave(code);
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice *device)
{
    stream *s;
    CUresult code = describe(FN_cuStreamGetDevice, handle, device, &s);
    if (code == CUDA_SUCCESS) {
        *device = s->device;
    }
    return sim_leave(code);
}

CUresult cuStreamWaitValue32_v2(CUstream handle, CUdeviceptr address, uint32_t value,
                                unsigned flags)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuStreamWaitValue32_v2, handle, &code);
    if (s != NULL) {
        code = flags > 3 ? CUDA_ERROR_INVALID_VALUE
                         : sim_word("cuStreamWaitValue32", s, address, value, (int)flags);
    }
    return sim_leave(code);
}

CUresult cuStreamWriteValue32_v2(CUstream handle, CUdeviceptr address, uint32_t value,
                                 unsigned flags)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuStreamWriteValue32_v2, handle, &code);
    if (s != NULL) {
        code = flags > 1 ? CUDA_ERROR_INVALID_VALUE
                         : sim_word("cuStreamWriteValue32", s, address, value, -1);
    }
    return sim_leave(code);
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuLaunchHostFunc, handle, &code);
    if (s != NULL) {
        code = function == NULL ? CUDA_ERROR_INVALID_VALUE : sim_host_function(s, function, data);
    }
    return sim_leave(code);
}

/* ---- events ----------------------------------------------------------------------------------- */

static event *event_get(CUevent handle)
{
    return sim_ids_get(&sim.event_ids, (uint64_t)(uintptr_t)handle);
}

static event *event_new(unsigned flags, int device, CUevent *out)
{
    event *e = calloc(1, sizeof *e);
    uint64_t id = e == NULL ? 0 : sim_ids_add(&sim.event_ids, e);
    if (id == 0) {
        free(e);
        return NULL;
    }
    *e = (event){.id = id, .flags = flags, .device = device, .shared = -1};
    *out = (CUevent)(uintptr_t)id;
    return e;
}

static void event_free(event *e)
{
    sim_ids_drop(&sim.event_ids, e->id);
    if (e->mark != NULL) {
        sim_mark_unref(e->mark);
    }
    if (e->shared >= 0) {
        sim_shared_event_release(e->shared);
    }
    sim_capture_event_gone(e);
    free(e);
}

void sim_events_reset(void)
{
    for (uint32_t i = 0; i < sim.event_ids.capacity; i++) {
        if (sim.event_ids.objects[i] != NULL) {
            event_free(sim.event_ids.objects[i]);
        }
    }
}

CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    CUresult code = sim_enter(FN_cuEventCreate);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    bool travels = (flags & CU_EVENT_INTERPROCESS) != 0;
    if (out == NULL || flags > 7 || (travels && (flags & CU_EVENT_DISABLE_TIMING) == 0)) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    event *e = event_new(flags, sim_current()->device, out);
    if (e == NULL) {
        return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    if (travels && (e->shared = sim_shared_event_new()) < 0) {
        event_free(e);
        return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    return sim_leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent handle)
{
    if (handle == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    CUresult code = sim_enter(FN_cuEventDestroy_v2);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    event *e = event_get(handle);
    if (e == NULL) {
        return sim_leave(CUDA_ERROR_INVALID_HANDLE);
    }
    event_free(e);
    return sim_leave(CUDA_SUCCESS);
}

static void set_mark(event *e, mark *m)
{
    if (e->mark != NULL) {
        sim_mark_unref(e->mark);
    }
    e->mark = m;
    e->captured = false;
    e->captured_in = NULL;
}

static CUresult record(stream *s, CUevent handle)
{
    event *e = event_get(handle);
    if (e == NULL || e->device != s->device) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (s->capture != NULL) {
        return sim_capture_record(s, e);
    }
    CUresult code = sim_capture_check_implicit(s);
    if (code == CUDA_SUCCESS) {
        set_mark(e, sim_mark_stream(s, e->shared));
    }
    return code;
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuEventRecord, stream_handle, &code);
    return sim_leave(s == NULL ? code : record(s, handle));
}

/* External: in a graph, a node that really records. There is none here. */
CUresult cuEventRecordWithFlags(CUevent handle, CUstream stream_handle, unsigned flags)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuEventRecordWithFlags, stream_handle, &code);
    bool outside = s != NULL && flags == CU_EVENT_RECORD_EXTERNAL && s->capture == NULL;
    if (s != NULL && (flags > CU_EVENT_RECORD_EXTERNAL || outside)) {
        return sim_leave(outside ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_INVALID_VALUE);
    }
    if (s != NULL && flags == CU_EVENT_RECORD_EXTERNAL && s->capture != NULL) {
        return sim_leave(CUDA_ERROR_NOT_SUPPORTED);
    }
    return sim_leave(s == NULL ? code : record(s, handle));
}

CUresult cuCtxRecordEvent(CUcontext handle, CUevent event_handle)
{
    CUresult code = sim_enter(FN_cuCtxRecordEvent);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    const context *c = sim_context_of(handle);
    event *e = event_get(event_handle);
    if (c == NULL) {
        return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
    }
    if (e == NULL || e->device != c->device) {
        return sim_leave(CUDA_ERROR_INVALID_HANDLE);
    }
    if (sim_capture_any(c->device)) {
        sim_capture_invalidate_all(c->device);
        return sim_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    set_mark(e, sim_mark_context(c->device, e->shared));
    return sim_leave(CUDA_SUCCESS);
}

/*
 * What the event stands for now, with a reference; NULL: never recorded. An event that travels may
 * have been recorded last by another process.
 */
static mark *current_mark(const event *e)
{
    uint64_t recorded = e->shared < 0 ? 0 : sim_shared_event_recorded(e->shared);
    if (e->shared >= 0 && (e->mark == NULL || e->mark->shared_record != recorded)) {
        return recorded == 0 ? NULL : sim_mark_foreign(e->shared, recorded);
    }
    if (e->mark != NULL) {
        sim_mark_ref(e->mark);
    }
    return e->mark;
}

/* An event recorded on a capturing stream is no fence: to ask it kills the capture, and later it
   never answers until it is recorded again. */
static CUresult refuse_captured(event *e)
{
    if (!e->captured) {
        return CUDA_SUCCESS;
    }
    if (e->captured_in != NULL) {
        sim_capture_invalidate(e->captured_in);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/* Ask, or wait for, an event. That it was captured is found out before a capture forbids asking. */
static CUresult ask(function_id function, CUevent handle, bool wait)
{
    if (handle == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    CUresult code = sim_enter(function);
    event *e = event_get(handle);
    if (e != NULL && e->captured_in != NULL &&
        (code == CUDA_SUCCESS || code == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)) {
        return sim_leave(refuse_captured(e));
    }
    if (code == CUDA_SUCCESS) {
        code = e == NULL ? CUDA_ERROR_INVALID_HANDLE : refuse_captured(e);
    }
    mark *m = code == CUDA_SUCCESS ? current_mark(e) : NULL;
    if (m == NULL) {
        return sim_leave(code);
    }
    if (wait) {
        sim_mark_wait(m);
    } else if (sim_mark_reached(m)) {
        sim_mark_observe(m);
    } else {
        code = CUDA_ERROR_NOT_READY;
    }
    code = sim.contexts[e->device].lost != CUDA_SUCCESS ? sim.contexts[e->device].lost : code;
    sim_mark_unref(m);
    return sim_leave(code);
}

CUresult cuEventQuery(CUevent handle)
{
    return ask(FN_cuEventQuery, handle, false);
}

CUresult cuEventSynchronize(CUevent handle)
{
    return ask(FN_cuEventSynchronize, handle, true);
}

CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuStreamWaitEvent, stream_handle, &code);
    event *e = s == NULL ? NULL : event_get(handle);
    if (s == NULL || e == NULL || flags > 1) {
        return sim_leave(s == NULL   ? code
                         : e == NULL ? CUDA_ERROR_INVALID_HANDLE
                                     : CUDA_ERROR_INVALID_VALUE);
    }
    bool recorded = e->captured || e->mark != NULL || e->shared >= 0;
    if (recorded && (s->capture != NULL || e->captured_in != NULL)) {
        return sim_leave(sim_capture_wait(s, e));
    }
    if (e->captured) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    mark *m = current_mark(e);
    if (m != NULL) { /* never recorded: nothing to wait for */
        sim_wait_mark(s, m);
        sim_mark_unref(m);
    }
    return sim_leave(CUDA_SUCCESS);
}

static CUresult elapsed(float *milliseconds, const event *start, const event *finish)
{
    if (start == NULL || finish == NULL ||
        ((start->flags | finish->flags) & CU_EVENT_DISABLE_TIMING) != 0 ||
        start->device != finish->device) { /* no clock is common to two */
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (start->captured || finish->captured) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (start->mark == NULL || finish->mark == NULL || milliseconds == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!sim_mark_reached(start->mark) || !sim_mark_reached(finish->mark)) {
        return CUDA_ERROR_NOT_READY;
    }
    double from = (double)start->mark->end, to = (double)finish->mark->end;
    *milliseconds = (float)((to - from) / 1e6);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent finish)
{
    if (start == NULL || finish == NULL) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    CUresult code = sim_enter(FN_cuEventElapsedTime);
    return sim_leave(
        code != CUDA_SUCCESS ? code : elapsed(milliseconds, event_get(start), event_get(finish)));
}

/* ---- events that travel ----------------------------------------------------------------------- */

typedef struct ticket { /* what a CUipcEventHandle holds */
    char name[16];
    int index, pid;
} ticket;

static const char ticket_name[16] = "ebbtide-event";

CUresult cuIpcGetEventHandle(CUipcEventHandle *out, CUevent handle)
{
    if (handle == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult code = sim_enter(FN_cuIpcGetEventHandle);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    const event *e = event_get(handle);
    if (out == NULL || e == NULL || e->shared < 0) {
        return sim_leave(out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE);
    }
    ticket t = {.index = e->shared, .pid = (int)getpid()};
    memcpy(t.name, ticket_name, sizeof t.name);
    memset(out, 0, sizeof *out);
    memcpy(out, &t, sizeof t);
    return sim_leave(CUDA_SUCCESS);
}

CUresult cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle handle)
{
    CUresult code = sim_enter(FN_cuIpcOpenEventHandle);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    ticket t;
    memcpy(&t, &handle, sizeof t);
    if (out == NULL) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    if (memcmp(t.name, ticket_name, sizeof t.name) != 0 || !sim_shared_event_hold(t.index)) {
        return sim_leave(CUDA_ERROR_MAP_FAILED);
    }
    if (t.pid == (int)getpid()) {
        sim_shared_event_release(t.index);
        return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
    }
    event *e =
        event_new(CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING, sim_current()->device, out);
    if (e == NULL) {
        sim_shared_event_release(t.index);
        return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    e->shared = t.index;
    return sim_leave(CUDA_SUCCESS);
}
