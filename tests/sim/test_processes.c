/*
 * Cards shared by the processes of a run: use, memory, events and the clock, while processes come, go
 * and die.
 *
 * The parent tells its children what to do, a line at a time, and reads one number back.
 */
#define _GNU_SOURCE
#include "actor.h"
#include "self.h"

enum { CONTEXT = 4 * MIB, MEMORY = 64 * MIB, MS = 1000000 };

/* ---- the parent's side ---------------------------------------------------------------------------- */

static char answer_text[512];

static long long listen_to(const self *s)
{
    size_t got = 0;
    while (got + 1 < sizeof answer_text && read(s->from, answer_text + got, 1) == 1 &&
           answer_text[got] != '\n') {
        got++;
    }
    answer_text[got] = '\0';
    char *end = NULL;
    long long number = strtoll(answer_text, &end, 10);
    if (end == answer_text) {
        FAIL("a child says \"%s\"", answer_text);
    }
    return number;
}

__attribute__((format(printf, 2, 3))) static long long tell(const self *s, const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    line[length] = '\n';
    REQUIRE(write(s->to, line, (size_t)length + 1) == length + 1);
    return listen_to(s);
}

static self start_actor(void)
{
    self s = self_start("actor", NULL);
    CHECK_EQ(listen_to(&s), 0);
    return s;
}

static void stop(self *s)
{
    CHECK_EQ(self_end(s, answer_text, sizeof answer_text), 0);
}

static void kill_it(self *s)
{
    kill(s->pid, SIGKILL);
    CHECK_EQ(self_end(s, answer_text, sizeof answer_text), 128 + SIGKILL);
}

static char run_path[64];

static void new_run(void)
{
    if (run_path[0] != '\0') {
        unlink(run_path);
    }
    snprintf(run_path, sizeof run_path, "/tmp/ebbtide-test-run-XXXXXX");
    int fd = mkstemp(run_path);
    REQUIRE(fd >= 0);
    close(fd);
    unlink(run_path);
    setenv("EBBTIDE_SIM_RUN", run_path, 1);
    setenv("EBBTIDE_SIM", "memory=64MiB,context=4MiB,clock=virtual,devices=2", 1);
}

/* A run with this process as its first. */
static void set(actor *a)
{
    ebbsim_reset();
    memset(a, 0, sizeof *a);
    new_run();
    actor_start(a);
}

/* ---- use ------------------------------------------------------------------------------------------ */

static void use_is_counted_across_processes(void)
{
    actor a;
    set(&a);
    CHECK_EQ(actor_free_bytes(&a), MEMORY - CONTEXT);
    self b = start_actor(), c = start_actor();
    CHECK_EQ(tell(&b, "frames 3"), 0);
    CHECK_EQ(tell(&c, "frames 1"), 0);
    CHECK_EQ(actor_frames(&a, 2), 0);
    CHECK_EQ(actor_free_bytes(&a), MEMORY - 3 * CONTEXT - 6 * PAGE);
    CHECK_EQ(tell(&b, "free"), actor_free_bytes(&a));
    CHECK_EQ(tell(&c, "free"), actor_free_bytes(&a));
    CHECK_EQ(tell(&b, "check") + tell(&c, "check"), 0);
    stop(&b);
    CHECK_EQ(actor_free_bytes(&a), MEMORY - 2 * CONTEXT - 3 * PAGE);
    CHECK_EQ(tell(&c, "free"), actor_free_bytes(&a));
    stop(&c);
    CHECK_EQ(actor_free_bytes(&a), MEMORY - CONTEXT - 2 * PAGE);
    CHECK(ebbsim_check() == NULL);
}

static void memory_that_another_process_has_is_not_to_be_had(void)
{
    actor a;
    set(&a);
    self b = start_actor();
    long long pages = actor_free_bytes(&a) / PAGE;
    CHECK_EQ(tell(&b, "frames %lld", pages), 0);
    CHECK_EQ(actor_frames(&a, 1), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(tell(&b, "frames 1"), CUDA_ERROR_OUT_OF_MEMORY);
    stop(&b);
    CHECK_EQ(actor_frames(&a, 1), 0);
}

static void a_killed_process_gives_its_use_back(void)
{
    actor a;
    set(&a);
    self b = start_actor(), c = start_actor();
    CHECK_EQ(tell(&b, "frames 4"), 0);
    kill_it(&b);
    CHECK_EQ(actor_free_bytes(&a), MEMORY - 2 * CONTEXT);
    long long pages = actor_free_bytes(&a) / PAGE;
    CHECK_EQ(tell(&c, "frames %lld", pages), 0);
    kill_it(&c);
    CHECK_EQ(actor_frames(&a, 1), 0); /* short of memory: the dead are looked for */
    CHECK_EQ(actor_free_bytes(&a), MEMORY - CONTEXT - PAGE);
}

static void somebody_elses_use_is_seen_by_all(void)
{
    actor a;
    set(&a);
    self b = start_actor();
    CHECK_EQ(tell(&b, "foreign %d", 10 * MIB), 0);
    CHECK_EQ(actor_free_bytes(&a), MEMORY - 2 * CONTEXT - 10 * MIB);
    stop(&b);
    CHECK_EQ(actor_free_bytes(&a), MEMORY - CONTEXT - 10 * MIB); /* nobody's who could die */
}

/* ---- memory --------------------------------------------------------------------------------------- */

static void an_exported_frame_is_one_memory_charged_once(void)
{
    actor a;
    set(&a);
    self b = start_actor();
    long long before = actor_free_bytes(&a);
    int fd = (int)tell(&b, "export 7");
    CHECK_EQ(actor_free_bytes(&a), before - PAGE);
    CHECK_EQ(actor_import(&a, b.pid, fd), 0);
    CHECK_EQ(actor_free_bytes(&a), before - PAGE);
    CHECK_EQ(*(unsigned char *)(uintptr_t)(a.page + PAGE - 1), 7);
    OK(a.k.driver.cuMemsetD8Async(a.page, 9, PAGE, a.stream));
    OK(a.k.driver.cuStreamSynchronize(a.stream));
    CHECK_EQ(tell(&b, "read 12345"), 9);
    CHECK_EQ(tell(&b, "write 11"), 0);
    CHECK_EQ(*(unsigned char *)(uintptr_t)a.page, 11);
    CHECK_EQ(tell(&b, "check"), 0);
    CHECK(ebbsim_check() == NULL);
    actor_drop(&a);
    CHECK_EQ(actor_free_bytes(&a), before - PAGE);
    stop(&b);
    CHECK_EQ(actor_free_bytes(&a), before + CONTEXT);
}

static void a_frame_survives_its_exporter(void)
{
    for (int killed = 0; killed < 2; killed++) {
        actor a;
        set(&a);
        self b = start_actor();
        int fd = (int)tell(&b, "export 7");
        CHECK_EQ(actor_import(&a, b.pid, fd), 0);
        if (killed) {
            kill_it(&b);
        } else {
            stop(&b);
        }
        CHECK_EQ(actor_free_bytes(&a), MEMORY - CONTEXT - PAGE); /* charged, and once */
        CHECK_EQ(*(unsigned char *)(uintptr_t)a.page, 7);
        self c = start_actor(); /* a third may take the dead one's place */
        CHECK_EQ(actor_free_bytes(&a), MEMORY - 2 * CONTEXT - PAGE);
        CHECK(ebbsim_check() == NULL);
        actor_drop(&a);
        CHECK_EQ(actor_free_bytes(&a), MEMORY - 2 * CONTEXT);
        stop(&c);
    }
}

static void a_frame_outlives_its_importer(void)
{
    actor a;
    set(&a);
    int fd = (int)actor_export(&a, 3);
    self b = start_actor();
    CHECK_EQ(tell(&b, "import %d %d", (int)getpid(), fd), 0);
    CHECK_EQ(tell(&b, "read 5"), 3);
    kill_it(&b);
    CHECK_EQ(actor_free_bytes(&a), MEMORY - CONTEXT - PAGE);
    actor_drop(&a);
    CHECK_EQ(actor_free_bytes(&a), MEMORY - CONTEXT - PAGE); /* the file descriptor holds it */
    close(fd);
    CHECK_EQ(actor_free_bytes(&a), MEMORY - CONTEXT);
}

/* Nobody else held it: it is gone with its exporter, also if a newcomer takes the dead one's place
   before anybody has asked. */
static void an_exported_frame_dies_with_the_last_process_that_held_it(void)
{
    actor a;
    set(&a);
    self b = start_actor();
    CHECK(tell(&b, "export 7") >= 0);
    kill_it(&b);
    self c = start_actor();
    CHECK_EQ(tell(&c, "free"), MEMORY - 2 * CONTEXT);
    CHECK_EQ(actor_free_bytes(&a), MEMORY - 2 * CONTEXT);
    stop(&c);
}

/* ---- events and the clock -------------------------------------------------------------------------- */

static void the_virtual_clock_is_shared(void)
{
    actor a;
    set(&a);
    self b = start_actor();
    CHECK_EQ(tell(&b, "now"), ebbsim_now());
    CHECK_EQ(tell(&b, "pass 1000000"), 0);
    uint64_t before = ebbsim_now();
    CHECK_EQ(tell(&b, "now"), before);
    ebbsim_pass(5);
    CHECK_EQ(tell(&b, "now"), before + 5);
    CHECK_EQ(actor_kernel(&a, 7 * MS), 0);
    OK(a.k.driver.cuStreamSynchronize(a.stream)); /* one waits, time passes for both */
    CHECK(tell(&b, "now") >= (long long)before + 7 * MS);
    stop(&b);
}

static void an_event_can_be_asked_and_waited_for_in_another_process(void)
{
    actor a;
    set(&a);
    self b = start_actor();
    CHECK_EQ(tell(&b, "event"), 0);
    CHECK_EQ(actor_open_event(&a, strchr(answer_text, ' ') + 1), 0);
    OK(a.k.driver.cuEventQuery(a.event)); /* never recorded */
    CHECK_EQ(tell(&b, "kernel %d", 5 * MS), 0);
    CHECK_EQ(tell(&b, "record"), 0);
    uint64_t end = ebbsim_now() + 4 * MS;
    CHECK_EQ(a.k.driver.cuEventQuery(a.event), CUDA_ERROR_NOT_READY);
    OK(a.k.driver.cuStreamWaitEvent(a.stream, a.event, 0));
    CHECK_EQ(a.k.driver.cuStreamQuery(a.stream), CUDA_ERROR_NOT_READY);
    OK(a.k.driver.cuStreamSynchronize(a.stream));
    CHECK(ebbsim_now() >= end && ebbsim_now() < end + 2 * MS);
    OK(a.k.driver.cuEventQuery(a.event));
    CHECK_EQ(tell(&b, "query"), 0);
    CHECK_EQ(tell(&b, "kernel %d", 5 * MS), 0);
    CHECK_EQ(tell(&b, "record"), 0); /* again: it stands for the new record now */
    CHECK_EQ(a.k.driver.cuEventQuery(a.event), CUDA_ERROR_NOT_READY);
    OK(a.k.driver.cuEventSynchronize(a.event));
    OK(a.k.driver.cuEventDestroy(a.event));
    CHECK_EQ(tell(&b, "destroy"), 0);
    stop(&b);
}

static void whoever_opened_an_event_may_record_it(void)
{
    actor a;
    set(&a);
    self b = start_actor();
    CHECK_EQ(tell(&b, "event"), 0);
    CHECK_EQ(actor_open_event(&a, strchr(answer_text, ' ') + 1), 0);
    CHECK_EQ(actor_kernel(&a, 3 * MS), 0);
    OK(a.k.driver.cuEventRecord(a.event, a.stream));
    CHECK_EQ(tell(&b, "query"), CUDA_ERROR_NOT_READY);
    CHECK_EQ(tell(&b, "wait"), 0);
    CHECK_EQ(tell(&b, "stream"), 0);
    OK(a.k.driver.cuEventQuery(a.event));
    CHECK_EQ(tell(&b, "query"), 0);
    stop(&b);
}

/* The child's record is held up, the parent's comes later and is there at once. What counts is the
   last record, and it stays reached when the older one is reached too. */
static void an_older_record_that_is_reached_later_takes_nothing_back(void)
{
    actor a;
    set(&a);
    self b = start_actor();
    CHECK_EQ(tell(&b, "event"), 0);
    CHECK_EQ(actor_open_event(&a, strchr(answer_text, ' ') + 1), 0);
    CHECK_EQ(tell(&b, "hold"), 0);
    CHECK_EQ(tell(&b, "record"), 0);
    CHECK_EQ(a.k.driver.cuEventQuery(a.event), CUDA_ERROR_NOT_READY);
    OK(a.k.driver.cuEventRecord(a.event, a.stream));
    OK(a.k.driver.cuEventSynchronize(a.event));
    CHECK_EQ(tell(&b, "query"), 0);
    CHECK_EQ(tell(&b, "go"), 0);
    CHECK_EQ(tell(&b, "query"), 0);
    OK(a.k.driver.cuEventQuery(a.event));
    stop(&b);
}

static void an_event_of_a_dead_process_holds_nobody_up(void)
{
    actor a;
    set(&a);
    self b = start_actor();
    CHECK_EQ(tell(&b, "event"), 0);
    CHECK_EQ(actor_open_event(&a, strchr(answer_text, ' ') + 1), 0);
    CHECK_EQ(tell(&b, "hold"), 0);
    CHECK_EQ(tell(&b, "record"), 0);
    CHECK_EQ(a.k.driver.cuEventQuery(a.event), CUDA_ERROR_NOT_READY);
    kill_it(&b);
    OK(a.k.driver.cuEventSynchronize(a.event)); /* whoever waits buries the dead */
    OK(a.k.driver.cuEventDestroy(a.event));
    CHECK(ebbsim_check() == NULL);
}

/* The importer records, and dies with the work in front of the record undone. */
static void a_record_of_a_dead_importer_holds_nobody_up(void)
{
    for (int way = 0; way < 3; way++) {
        actor a;
        set(&a);
        self b = start_actor();
        char text[256];
        CHECK_EQ(actor_event(&a, text), 0);
        CHECK_EQ(tell(&b, "open 0 %s", text), 0);
        CHECK_EQ(tell(&b, "hold"), 0);
        CHECK_EQ(tell(&b, "record"), 0);
        CHECK_EQ(a.k.driver.cuEventQuery(a.event), CUDA_ERROR_NOT_READY);
        if (way == 1) { /* a stream is waiting already when it happens */
            OK(a.k.driver.cuStreamWaitEvent(a.stream, a.event, 0));
        }
        kill_it(&b);
        if (way == 1) {
            OK(a.k.driver.cuStreamSynchronize(a.stream));
        }
        if (way == 2) {
            ebbsim_pass(1000000);
            usleep(5000);
            CHECK_EQ(a.k.driver.cuEventQuery(a.event), CUDA_ERROR_NOT_READY); /* never over */
        }
        OK(a.k.driver.cuEventSynchronize(a.event));
        OK(a.k.driver.cuEventDestroy(a.event));
        CHECK(ebbsim_check() == NULL);
    }
}

/* ---- beginnings ----------------------------------------------------------------------------------- */

static void processes_that_begin_a_run_at_once_agree_on_it(void)
{
    enum { ACTORS = 4 };
    for (int round = 0; round < 8; round++) {
        self actors[ACTORS];
        ebbsim_reset();
        new_run();
        for (int i = 0; i < ACTORS; i++) {
            actors[i] = self_start("actor", NULL);
        }
        for (int i = 0; i < ACTORS; i++) {
            CHECK_EQ(listen_to(&actors[i]), 0);
            CHECK_EQ(tell(&actors[i], "frames 1"), 0);
        }
        for (int i = 0; i < ACTORS; i++) {
            CHECK_EQ(tell(&actors[i], "free"), MEMORY - ACTORS * (CONTEXT + PAGE));
        }
        for (int i = 0; i < ACTORS; i++) {
            stop(&actors[i]);
        }
    }
}

static void a_file_that_is_no_run_is_said_not_to_be(void)
{
    char text[1024];
    new_run();
    int fd = open(run_path, O_WRONLY | O_CREAT, 0600);
    REQUIRE(fd >= 0 && write(fd, "hello\n", 6) == 6);
    close(fd);
    CHECK_EQ(self_run("actor", NULL, text, sizeof text), 1);
    CHECK_HAS(text, "is not the state of a run");
    CHECK_HAS(text, run_path);
    const char *elsewhere[] = {"EBBTIDE_SIM_RUN=/no/such/place/run", NULL};
    unsetenv("EBBTIDE_SIM_RUN");
    CHECK_EQ(self_run("actor", elsewhere, text, sizeof text), 1);
    CHECK_HAS(text, "cannot open EBBTIDE_SIM_RUN=/no/such/place/run");
}

/* In another process, because it forks: before and after the driver was started. */
static int fork_twice(void)
{
    ebb__driver driver;
    CUcontext context;
    int count = 0, status = 0;
    ebbsim_now(); /* the run is open, the driver is not started */
    pid_t early = fork();
    if (early == 0) {
        actor child;
        memset(&child, 0, sizeof child);
        actor_start(&child);
        exit(actor_frames(&child, 1) == 0 && actor_free_bytes(&child) > 0 ? 5 : 6);
    }
    REQUIRE(waitpid(early, &status, 0) == early);
    printf("early %d\n", WEXITSTATUS(status));
    REQUIRE(ebb__driver_open(&driver, SIM_LIBRARY, NULL, 0) == EBB_OK);
    OK(driver.cuDevicePrimaryCtxRetain(&context, 0));
    OK(driver.cuCtxSetCurrent(context));
    size_t bytes = 0;
    OK(driver.cuMemGetInfo(&bytes, NULL));
    printf("free %zu\n", bytes);
    fflush(stdout);
    pid_t late = fork();
    if (late == 0) {
        _exit((int)driver.cuDeviceGetCount(&count) + 10 * (int)driver.cuInit(0));
    }
    REQUIRE(waitpid(late, &status, 0) == late);
    printf("late %d\n", WEXITSTATUS(status));
    OK(driver.cuMemGetInfo(&bytes, NULL));
    printf("free %zu\n", bytes);
    return 0;
}

static void a_driver_does_not_survive_a_fork_but_may_start_after_one(void)
{
    char text[1024], expected[256];
    ebbsim_reset();
    new_run();
    CHECK_EQ(self_run("forker", NULL, text, sizeof text), 0);
    snprintf(expected, sizeof expected, "early 5\nfree %d\nlate %d\nfree %d\n", MEMORY - CONTEXT,
             CUDA_ERROR_NOT_INITIALIZED * 11, MEMORY - CONTEXT);
    CHECK_STR(text, expected);
}

int main(int argc, char **argv)
{
    alarm(50); /* a wait that never ends is a failure, too */
    if (argc > 1) {
        return strcmp(argv[1], "forker") == 0 ? fork_twice() : actor_obey();
    }
    RUN(use_is_counted_across_processes);
    RUN(memory_that_another_process_has_is_not_to_be_had);
    RUN(a_killed_process_gives_its_use_back);
    RUN(somebody_elses_use_is_seen_by_all);
    RUN(an_exported_frame_is_one_memory_charged_once);
    RUN(a_frame_survives_its_exporter);
    RUN(a_frame_outlives_its_importer);
    RUN(an_exported_frame_dies_with_the_last_process_that_held_it);
    RUN(the_virtual_clock_is_shared);
    RUN(an_event_can_be_asked_and_waited_for_in_another_process);
    RUN(whoever_opened_an_event_may_record_it);
    RUN(an_older_record_that_is_reached_later_takes_nothing_back);
    RUN(an_event_of_a_dead_process_holds_nobody_up);
    RUN(a_record_of_a_dead_importer_holds_nobody_up);
    RUN(processes_that_begin_a_run_at_once_agree_on_it);
    RUN(a_file_that_is_no_run_is_said_not_to_be);
    RUN(a_driver_does_not_survive_a_fork_but_may_start_after_one);
    unlink(run_path);
    ebbsim_reset();
    return REPORT();
}
