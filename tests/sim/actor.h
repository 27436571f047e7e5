/*
 * A process of a simulated run that does what it is told: by calls, or line by line from another.
 *
 * A line is a verb and up to two arguments; the answer is a line with a number.
 */
#ifndef EBB_ACTOR_H
#define EBB_ACTOR_H

#include <sys/types.h>

#include "sim_kit.h"

typedef struct actor {
    kit k;
    CUstream stream;
    CUmemGenericAllocationHandle frame;
    CUdeviceptr page;
    CUevent event;
    CUipcEventHandle ticket;
    uint32_t *word;
} actor;

void actor_start(
    actor *a);        /* open the driver; a context, a stream; ends the process if it cannot */
int actor_obey(void); /* lines from stdin until it is closed */

long long actor_free_bytes(actor *a);
long long actor_frames(actor *a, long long count); /* create so many, and keep them */

/* A frame that travels. export: filled with `value`; its file descriptor. import: the code. */
long long actor_export(actor *a, int value);
long long actor_import(actor *a, pid_t pid, int fd);
long long actor_drop(actor *a);

/* An event that travels; its ticket in words, of 129 characters. */
long long actor_event(actor *a, char *ticket);
long long actor_open_event(actor *a, const char *ticket);
long long actor_kernel(actor *a, uint64_t nanoseconds);

#endif
