/*
 * A test program that starts itself again, in another role: to see what another environment does, or
 * to be several processes at once.
 */
#ifndef EBB_SELF_H
#define EBB_SELF_H

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

extern char **environ;

enum { SELF_VARIABLES = 8 };

typedef struct self {
    pid_t pid;
    int from; /* what it writes, on stdout and stderr */
    int to;   /* what it reads on stdin */
} self;

/* Start this program with argv[1] = role and these variables ("NAME=value", ended by NULL). */
__attribute__((unused)) static self self_start(const char *role, const char *const *variables)
{
    int out[2], in[2];
    REQUIRE(pipe2(out, O_CLOEXEC) == 0 && pipe2(in, O_CLOEXEC) == 0);
    size_t count = 0, given = 0;
    while (environ[count] != NULL) {
        count++;
    }
    char **environment = calloc(count + SELF_VARIABLES + 1, sizeof *environment);
    REQUIRE(environment != NULL);
    for (; variables != NULL && variables[given] != NULL; given++) {
        REQUIRE(given < SELF_VARIABLES);
        environment[given] = (char *)(uintptr_t)variables[given];
    }
    memcpy(environment + given, environ, count * sizeof *environ); /* the first of a name counts */
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    posix_spawn_file_actions_adddup2(&actions, out[1], 2);
    char name[] = "self", part[64];
    snprintf(part, sizeof part, "%s", role);
    char *arguments[] = {name, part, NULL};
    self s = {.from = out[0], .to = in[1]};
    REQUIRE(posix_spawn(&s.pid, "/proc/self/exe", &actions, NULL, arguments, environment) == 0);
    posix_spawn_file_actions_destroy(&actions);
    free(environment);
    close(out[1]);
    close(in[0]);
    return s;
}

/* Let it end. Its exit code; 128 + signal if it was killed. What it wrote since is in `text`. */
__attribute__((unused)) static int self_end(self *s, char *text, size_t length)
{
    size_t got = 0;
    ssize_t n;
    close(s->to);
    while (got + 1 < length && (n = read(s->from, text + got, length - got - 1)) > 0) {
        got += (size_t)n;
    }
    text[got] = '\0';
    close(s->from);
    int status = 0;
    REQUIRE(waitpid(s->pid, &status, 0) == s->pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* From start to end. */
__attribute__((unused)) static int self_run(const char *role, const char *const *variables,
                                            char *text, size_t length)
{
    self s = self_start(role, variables);
    return self_end(&s, text, length);
}

#endif
