/* The operating system's part, on POSIX systems. */
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "internal.h"
#include "os.h"

const char *ebb__os_driver_name(void)
{
    /* The driver's own name. "libcuda.so" is the development link, absent on most machines. */
    return "libcuda.so.1";
}

const char *ebb__os_environment(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

void *ebb__os_library_open(const char *path, char *detail, size_t length)
{
    /* Local: the simulated GPU exports names that must not stand in for the real driver's. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        ebb__detail(detail, length, "%s", dlerror());
    return library;
}

void ebb__os_library_close(void *library)
{
    dlclose(library);
}

void *ebb__os_library_symbol(void *library, const char *name)
{
    return dlsym(library, name);
}

_Static_assert(sizeof(pthread_mutex_t) <= sizeof(ebb__mutex), "a mutex fits");
_Static_assert(sizeof(pthread_cond_t) <= sizeof(ebb__condition), "a condition fits");

static pthread_mutex_t *mutex_of(ebb__mutex *mutex)
{
    return (pthread_mutex_t *)(void *)mutex->system.space;
}

static pthread_cond_t *condition_of(ebb__condition *condition)
{
    return (pthread_cond_t *)(void *)condition->system.space;
}

void ebb__os_mutex_init(ebb__mutex *mutex)
{
    pthread_mutex_init(mutex_of(mutex), NULL);
}

void ebb__os_lock(ebb__mutex *mutex)
{
    pthread_mutex_lock(mutex_of(mutex));
}

void ebb__os_unlock(ebb__mutex *mutex)
{
    pthread_mutex_unlock(mutex_of(mutex));
}

void ebb__os_condition_init(ebb__condition *condition)
{
    pthread_cond_init(condition_of(condition), NULL);
}

void ebb__os_wait(ebb__condition *condition, ebb__mutex *mutex)
{
    pthread_cond_wait(condition_of(condition), mutex_of(mutex));
}

void ebb__os_wake_all(ebb__condition *condition)
{
    pthread_cond_broadcast(condition_of(condition));
}

void *ebb__os_table_new(size_t bytes)
{
    void *table = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return table == MAP_FAILED ? NULL : table;
}

void ebb__os_table_clear(void *table, size_t bytes)
{
    /* On private anonymous memory this means: zero from now on. */
    madvise(table, bytes, MADV_DONTNEED);
}

void ebb__os_table_free(void *table, size_t bytes)
{
    munmap(table, bytes);
}

uint64_t ebb__os_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void ebb__os_pause(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

uint64_t ebb__os_thread(void)
{
    return (uint64_t)(uintptr_t)pthread_self();
}

void ebb__os_at_fork(void (*child)(void))
{
    pthread_atfork(NULL, NULL, child);
}
