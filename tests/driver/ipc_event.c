/*
 * Events between processes.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/wait.h>

#include "suite.h"

static CUevent make_shared(CUipcEventHandle *handle)
{
    CUevent event = NULL;
    REQUIRE(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
    REQUIRE(cu.cuIpcGetEventHandle(handle, event));
    return event;
}

static void a_shared_event_has_no_timing(void)
{
    CUevent event = NULL;
    EXPECT(INVALID_VALUE, cu.cuEventCreate(&event, CU_EVENT_INTERPROCESS));
    EXPECT(OK, cu.cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
    EXPECT(OK, cu.cuEventDestroy(event));
    EXPECT(OK, cu.cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING |
                                            CU_EVENT_BLOCKING_SYNC));
    EXPECT(OK, cu.cuEventDestroy(event));
}

static void only_a_shared_event_has_a_handle(void)
{
    CUevent plain = make_event();
    CUipcEventHandle handle;
    EXPECT(INVALID_HANDLE, cu.cuIpcGetEventHandle(&handle, plain));
    EXPECT(INVALID_VALUE, cu.cuIpcGetEventHandle(NULL, plain));
}

static void a_handle_of_zeroes_opens_nothing(void)
{
    CUipcEventHandle handle = {{0}};
    CUevent opened = NULL;
    EXPECT(MAPPING_FAILED, cu.cuIpcOpenEventHandle(&opened, handle));
}

static void a_shared_event_works_at_home(void)
{
    CUipcEventHandle handle;
    CUevent event = make_shared(&handle);
    gate busy = gate_make();
    CUstream stream = make_stream();
    EXPECT(OK, cu.cuEventQuery(event));
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    gate_open(&busy);
    EXPECT(OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuEventDestroy(event));
}

/* Sees the event busy, waits for it, and records it in turn. */
static void visitor(int socket)
{
    open_driver();
    open_context();
    CUipcEventHandle handle;
    CUevent event = NULL;
    gate busy = gate_make();
    CUstream stream = make_stream();
    receive_bytes(socket, &handle, sizeof handle);
    EXPECT(OK, cu.cuIpcOpenEventHandle(&event, handle));
    EXPECT(OK, cu.cuEventQuery(event)); /* not recorded yet */
    send_turn(socket);
    receive_turn(socket); /* recorded behind a closed gate */
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuStreamWaitEvent(stream, event, 0));
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    send_turn(socket); /* the other side opens its gate */
    EXPECT(OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    send_turn(socket);
    receive_turn(socket);
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuEventRecord(event, stream));
    send_turn(socket);
    receive_turn(socket); /* the other side has seen it busy */
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    send_turn(socket);
    receive_turn(socket);
    EXPECT(OK, cu.cuEventDestroy(event));
}

static void an_event_is_seen_from_another_process(void)
{
    partner other = partner_start(visitor);
    open_driver();
    open_context();
    CUipcEventHandle handle;
    CUevent event = make_shared(&handle);
    gate busy = gate_make();
    CUstream stream = make_stream();
    send_bytes(other.socket, &handle, sizeof handle);
    receive_turn(other.socket);
    gate_hold(&busy, stream);
    REQUIRE(cu.cuEventRecord(event, stream));
    send_turn(other.socket);
    receive_turn(other.socket);
    pass_milliseconds(50);
    gate_open(&busy);
    receive_turn(other.socket);
    EXPECT(OK, cu.cuEventQuery(event));
    send_turn(other.socket);
    receive_turn(other.socket); /* recorded over there, behind a closed gate */
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    send_turn(other.socket);
    receive_turn(other.socket);
    EXPECT(OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventQuery(event));
    send_turn(other.socket);
    partner_end(&other);
}

static void survivor(int socket)
{
    open_driver();
    open_context();
    CUipcEventHandle handle;
    CUevent event = NULL;
    receive_bytes(socket, &handle, sizeof handle);
    EXPECT(OK, cu.cuIpcOpenEventHandle(&event, handle));
    send_turn(socket);
    receive_turn(socket); /* the maker has destroyed its event */
    EXPECT(OK, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventDestroy(event));
}

static void an_opened_event_outlives_its_maker(void)
{
    partner other = partner_start(survivor);
    open_driver();
    open_context();
    CUipcEventHandle handle;
    CUevent event = make_shared(&handle);
    CUstream stream = make_stream();
    REQUIRE(cu.cuEventRecord(event, stream));
    REQUIRE(cu.cuEventSynchronize(event));
    send_bytes(other.socket, &handle, sizeof handle);
    receive_turn(other.socket);
    EXPECT(OK, cu.cuEventDestroy(event));
    send_turn(other.socket);
    partner_end(&other);
}

static void latecomer(int socket)
{
    open_driver();
    open_context();
    CUipcEventHandle handle;
    CUevent event = NULL;
    receive_bytes(socket, &handle, sizeof handle);
    if (EXPECT(OK, cu.cuIpcOpenEventHandle(&event, handle)) == OK) {
        EXPECT(OK, cu.cuEventQuery(event));
        EXPECT(OK, cu.cuEventSynchronize(event));
        EXPECT(OK, cu.cuEventDestroy(event));
    }
}

/* The handle names a place in the maker's memory, which is there for as long as the maker is. */
static void the_handle_of_a_destroyed_event_still_opens(void)
{
    partner other = partner_start(latecomer);
    open_driver();
    open_context();
    CUipcEventHandle handle;
    CUevent event = make_shared(&handle);
    REQUIRE(cu.cuEventDestroy(event));
    send_bytes(other.socket, &handle, sizeof handle);
    partner_end(&other);
}

static void passing_maker(int socket)
{
    open_driver();
    open_context();
    CUipcEventHandle handle;
    make_shared(&handle);
    send_bytes(socket, &handle, sizeof handle);
    receive_turn(socket);
}

static void the_handle_of_a_process_that_is_gone_still_opens(void)
{
    partner other = partner_start(passing_maker);
    open_driver();
    open_context();
    CUipcEventHandle handle;
    CUevent event = NULL;
    receive_bytes(other.socket, &handle, sizeof handle);
    send_turn(other.socket);
    partner_end(&other);
    EXPECT(OK, cu.cuIpcOpenEventHandle(&event, handle));
}

/* Records behind work that is not done yet, lets it go on and leaves; or dies before. */
static void passing_recorder(int socket)
{
    open_driver();
    open_context();
    CUipcEventHandle handle;
    CUevent event = NULL;
    gate busy = gate_make();
    CUstream stream = make_stream();
    receive_bytes(socket, &handle, sizeof handle);
    EXPECT(OK, cu.cuIpcOpenEventHandle(&event, handle));
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuEventRecord(event, stream));
    send_turn(socket);
    receive_turn(socket);
    gate_open(&busy);
    REQUIRE(cu.cuStreamSynchronize(stream));
}

static void a_record_of_a_process_that_has_left_is_over(void)
{
    partner other = partner_start(passing_recorder);
    open_driver();
    open_context();
    CUipcEventHandle handle;
    CUevent event = make_shared(&handle);
    send_bytes(other.socket, &handle, sizeof handle);
    receive_turn(other.socket);
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    send_turn(other.socket);
    partner_end(&other);
    pass_milliseconds(200);
    EXPECT(OK, cu.cuEventQuery(event));
}

/* Its work is gone with it. Asked, not waited for: whoever waits on a GPU waits for ever. */
static void a_record_of_a_process_that_was_killed_is_never_over(void)
{
    partner other = partner_start(passing_recorder);
    open_driver();
    open_context();
    CUipcEventHandle handle;
    CUevent event = make_shared(&handle);
    send_bytes(other.socket, &handle, sizeof handle);
    receive_turn(other.socket);
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    CHECK(kill(other.pid, SIGKILL) == 0 && waitpid(other.pid, NULL, 0) == other.pid);
    int code = NOT_READY;
    for (int i = 0; i < 20 && code == NOT_READY; i++) {
        pass_milliseconds(100);
        code = (int)cu.cuEventQuery(event);
    }
    EXPECT(NOT_READY, code);
}

const suite_case ipc_event_cases[] = {
    CASE(a_shared_event_has_no_timing),
    CASE(only_a_shared_event_has_a_handle),
    CASE(a_handle_of_zeroes_opens_nothing),
    CASE(a_shared_event_works_at_home),
    CASE_FROM(an_event_is_seen_from_another_process, WITHOUT_DRIVER),
    CASE_FROM(an_opened_event_outlives_its_maker, WITHOUT_DRIVER),
    CASE_FROM(the_handle_of_a_destroyed_event_still_opens, WITHOUT_DRIVER),
    CASE_FROM(the_handle_of_a_process_that_is_gone_still_opens, WITHOUT_DRIVER),
    CASE_FROM(a_record_of_a_process_that_has_left_is_over, WITHOUT_DRIVER),
    CASE_FROM(a_record_of_a_process_that_was_killed_is_never_over, WITHOUT_DRIVER),
    CASE_END,
};
