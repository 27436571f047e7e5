/*
 * The runner of the driver suite.
 *
 *   driver_suite [--learn] [--jobs N] [--topic NAME] [CASE...]
 *                            run all cases, those of a topic, or these (a trailing * matches)
 *   driver_suite --list      name them
 *
 * Each case is this program executed again (--case NAME), before any driver is loaded. What it
 * prints is kept and shown in the order of the list, so that --jobs changes nothing in the output.
 * Exit status: 0, 1 upon a failure, 77 if there is no driver or no device.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "runner.h"

static const struct topic {
    const char *name;
    const suite_case *cases;
} topics[] = {
    {"table", table_cases},
    {"device", device_cases},
    {"context", context_cases},
    {"reserve", reserve_cases},
    {"create", create_cases},
    {"map", map_cases},
    {"access", access_cases},
    {"unmap", unmap_cases},
    {"share", share_cases},
    {"ipc_event", ipc_event_cases},
    {"alloc", alloc_cases},
    {"host", host_cases},
    {"pointer", pointer_cases},
    {"copy", copy_cases},
    {"stream", stream_cases},
    {"event", event_cases},
    {"context_event", context_event_cases},
    {"capture", capture_cases},
    {"capture_event", capture_event_cases},
    {"matrix", matrix_cases},
    {"pool", pool_cases},
    {"pool_misuse", pool_misuse_cases},
    {"address", address_cases},
    {"ipc_memory", ipc_memory_cases},
    {"peer", peer_cases},
    {"copy_now", copy_now_cases},
    {"rectangle", rectangle_cases},
    {"about", about_cases},
    {"capture_info", capture_info_cases},
    {"graph", graph_cases},
    {"thread", thread_cases},
    {"strict", strict_cases},
    {"strict_more", strict_more_cases},
};

enum { CASES_MOST = 1024 };

typedef enum run_state { WAITING, RUNNING, OVER, SHOWN } run_state;

struct run {
    const suite_case *test;
    run_state state;
    pid_t pid;
    int output; /* a memory file: what the case prints */
    double started;
    bool timed_out;
    int status; /* from waitpid */
};

struct runner {
    struct run runs[CASES_MOST];
    size_t count;
    bool learn;
    unsigned jobs;
    unsigned passed, failed, skipped;
    char shared[64]; /* folder of the simulated cards' state, one file per case */
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* ---- in the case's process ------------------------------------------------------------------ */

static void open_gates_late(int signal)
{
    (void)signal;
    static const char text[] = "a case takes long: its gates were opened, so that it can end\n";
    gate_open_all();
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0) {
        return;
    }
}

static int run_here(const suite_case *test, bool learn)
{
    suite_begin(test->name, learn);
    struct sigaction action = {.sa_handler = open_gates_late, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    alarm(SUITE_GATE_TIMEOUT_S);
    if (test->simulated_only && !suite_is_simulated()) {
        return SUITE_SKIPPED;
    }
    if (test->start != WITHOUT_DRIVER) {
        open_driver();
    }
    if (test->start == WITH_CONTEXT) {
        open_context();
    }
    test->run();
    gate_open_all();
    fflush(stdout);
    return suite_failed ? 1 : 0;
}

/* ---- in the runner -------------------------------------------------------------------------- */

static void run_start(struct runner *runner, struct run *run)
{
    run->output = memfd_create("case", MFD_CLOEXEC);
    fcntl(run->output, F_SETFL, O_APPEND); /* a case's processes write at the same time */
    fflush(stdout);
    run->started = now();
    run->state = RUNNING;
    run->pid = fork();
    if (run->pid != 0) {
        if (run->pid < 0) {
            abort();
        }
        return;
    }
    /* A group of its own, so that a case that hangs takes the processes it forked with it. */
    setpgid(0, 0);
    dup2(run->output, STDOUT_FILENO);
    char shared[128];
    snprintf(shared, sizeof shared, "%s/%s", runner->shared, run->test->name);
    setenv("EBBTIDE_SIM_RUN", shared, 1); /* its processes share the simulated cards */
    char *arguments[] = {(char[]){"driver_suite"}, (char[]){"--case"}, strdup(run->test->name),
                         runner->learn ? (char[]){"--learn"} : NULL, NULL};
    execv("/proc/self/exe", arguments);
    _exit(127);
}

static void run_poll(struct run *run)
{
    pid_t ended = waitpid(run->pid, &run->status, WNOHANG);
    if (ended == run->pid) {
        run->state = OVER;
        kill(-run->pid, SIGKILL); /* a process it forked and left behind */
    } else if (!run->timed_out && now() - run->started > SUITE_TIMEOUT_S) {
        run->timed_out = true;
        kill(-run->pid, SIGKILL);
    }
}

static void show_output(int output)
{
    char buffer[4096];
    ssize_t got;
    lseek(output, 0, SEEK_SET);
    while ((got = read(output, buffer, sizeof buffer)) > 0) {
        fwrite(buffer, 1, (size_t)got, stdout);
    }
    close(output);
}

static void run_show(struct runner *runner, struct run *run)
{
    char how[64] = "ended";
    const char *verdict = "FAILED";
    bool exited = WIFEXITED(run->status);
    if (run->timed_out) {
        snprintf(how, sizeof how, "hung");
    } else if (!exited) {
        snprintf(how, sizeof how, "signal %d", WTERMSIG(run->status));
    } else if (WEXITSTATUS(run->status) == SUITE_SKIPPED) {
        snprintf(how, sizeof how, "%s",
                 run->test->simulated_only ? "skipped: undefined on a GPU" : "skipped");
        verdict = "skipped";
        runner->skipped++;
    } else if (WEXITSTATUS(run->status) == 0) {
        verdict = "ok";
        runner->passed++;
    }
    if (strcmp(verdict, "FAILED") == 0) {
        runner->failed++;
    }
    show_output(run->output);
    if (runner->learn) {
        printf("%s|0|end of case|%s\n", run->test->name, how);
    } else {
        printf("%-8s%s%s%s  %.2f s\n", verdict, run->test->name, how[0] == 'e' ? "" : "  ",
               how[0] == 'e' ? "" : how, now() - run->started);
    }
    fflush(stdout);
    run->state = SHOWN;
    char shared[128];
    snprintf(shared, sizeof shared, "%s/%s", runner->shared, run->test->name);
    unlink(shared);
}

static bool may_start(const struct runner *runner, const struct run *next)
{
    unsigned running = 0;
    for (size_t i = 0; i < runner->count; i++) {
        if (runner->runs[i].state == RUNNING) {
            running++;
            if (runner->runs[i].test->alone) {
                return false;
            }
        }
    }
    return next->test->alone ? running == 0 : running < runner->jobs;
}

static void run_all(struct runner *runner)
{
    size_t started = 0, shown = 0;
    while (shown < runner->count) {
        while (started < runner->count && may_start(runner, &runner->runs[started])) {
            run_start(runner, &runner->runs[started++]);
        }
        for (size_t i = shown; i < started; i++) {
            if (runner->runs[i].state == RUNNING) {
                run_poll(&runner->runs[i]);
            }
        }
        while (shown < started && runner->runs[shown].state == OVER) {
            run_show(runner, &runner->runs[shown++]);
        }
        pass_milliseconds(1);
    }
}

/* A case before all others: is there anything to test? */
static void nothing(void)
{
}
static const suite_case probe_case = CASE_FROM(nothing, WITHOUT_CONTEXT);

static bool device_there(struct runner *runner)
{
    struct run probe = {.test = &probe_case};
    run_start(runner, &probe);
    while (probe.state == RUNNING) {
        run_poll(&probe);
        pass_milliseconds(1);
    }
    char shared[128];
    snprintf(shared, sizeof shared, "%s/%s", runner->shared, probe_case.name);
    unlink(shared);
    close(probe.output);
    return !(WIFEXITED(probe.status) && WEXITSTATUS(probe.status) == SUITE_SKIPPED);
}

static bool wanted(const char *name, char **names, int count)
{
    for (int i = 0; i < count; i++) {
        size_t length = strlen(names[i]);
        if (length && names[i][length - 1] == '*' ? strncmp(name, names[i], length - 1) == 0
                                                  : strcmp(name, names[i]) == 0) {
            return true;
        }
    }
    return count == 0;
}

static const suite_case *find_case(const char *name)
{
    for (size_t t = 0; t < sizeof topics / sizeof *topics; t++) {
        for (const suite_case *test = topics[t].cases; test->name; test++) {
            if (strcmp(test->name, name) == 0) {
                return test;
            }
        }
    }
    return strcmp(name, probe_case.name) == 0 ? &probe_case : NULL;
}

static void select_cases(struct runner *runner, const char *topic, char **names, int count)
{
    for (size_t t = 0; t < sizeof topics / sizeof *topics; t++) {
        if (topic && strcmp(topic, topics[t].name) != 0) {
            continue;
        }
        for (const suite_case *test = topics[t].cases; test->name; test++) {
            if (wanted(test->name, names, count) && runner->count < CASES_MOST) {
                runner->runs[runner->count++] = (struct run){.test = test};
            }
        }
    }
}

static int run_selected(struct runner *runner)
{
    snprintf(runner->shared, sizeof runner->shared, "/tmp/driver_suite.XXXXXX");
    if (!mkdtemp(runner->shared)) {
        return 1;
    }
    if (!device_there(runner)) {
        rmdir(runner->shared);
        fprintf(stderr, "no driver or no device: nothing was tested\n");
        return SUITE_SKIPPED;
    }
    run_all(runner);
    rmdir(runner->shared);
    fprintf(runner->learn ? stderr : stdout, "%u passed, %u failed, %u skipped\n", runner->passed,
            runner->failed, runner->skipped);
    return runner->failed ? 1 : 0;
}

int main(int count, char **arguments)
{
    static struct runner runner = {.jobs = 1};
    const char *only = NULL, *topic = NULL;
    bool list = false;
    int i = 1;
    for (; i < count && strncmp(arguments[i], "--", 2) == 0; i++) {
        if (strcmp(arguments[i], "--learn") == 0) {
            runner.learn = true;
        } else if (strcmp(arguments[i], "--list") == 0) {
            list = true;
        } else if (strcmp(arguments[i], "--jobs") == 0 && i + 1 < count) {
            runner.jobs = (unsigned)strtoul(arguments[++i], NULL, 10);
        } else if (strcmp(arguments[i], "--topic") == 0 && i + 1 < count) {
            topic = arguments[++i];
        } else if (strcmp(arguments[i], "--case") == 0 && i + 1 < count) {
            only = arguments[++i];
        } else {
            fprintf(stderr,
                    "usage: driver_suite [--learn] [--jobs N] [--topic NAME] [--list] [CASE...]\n");
            return 2;
        }
    }
    if (only) {
        const suite_case *test = find_case(only);
        return test ? run_here(test, runner.learn) : 2;
    }
    select_cases(&runner, topic, arguments + i, count - i);
    if (list) {
        for (size_t k = 0; k < runner.count; k++) {
            printf("%s\n", runner.runs[k].test->name);
        }
        return 0;
    }
    if (runner.count == 0 || runner.jobs == 0) {
        fprintf(stderr, "no such case\n");
        return 2;
    }
    return run_selected(&runner);
}
