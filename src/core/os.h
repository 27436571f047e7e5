/*
 * What Ebbtide asks of the operating system. One contract, one file for each platform (os_*.c);
 * nothing outside those files knows which platform it is.
 */
#ifndef EBB_OS_H
#define EBB_OS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The system's name for its CUDA driver library, as the loader of libraries knows it. */
const char *ebb__os_driver_name(void);

/* The value of an environment variable; NULL where it is not set, or empty. */
const char *ebb__os_environment(const char *name);

/*
 * Load a library, with all its symbols resolved and none of them visible to other libraries. NULL
 * if that fails; `detail`, of `length` bytes, then holds the system's own words.
 * One ebb__os_library_close() for each successful open; the last one unloads it. The same library
 * opened twice gives the same pointer.
 */
void *ebb__os_library_open(const char *path, char *detail, size_t length);
void ebb__os_library_close(void *library);

/* A symbol the library exports, or NULL. */
void *ebb__os_library_symbol(void *library, const char *name);

/* A lock, and a condition that is waited for with it. Both are ready when init returns. */
typedef struct ebb__mutex {
    union {
        uint64_t align;
        unsigned char space[64];
    } system;
} ebb__mutex;

typedef struct ebb__condition {
    union {
        uint64_t align;
        unsigned char space[64];
    } system;
} ebb__condition;

void ebb__os_mutex_init(ebb__mutex *mutex);
void ebb__os_lock(ebb__mutex *mutex);
void ebb__os_unlock(ebb__mutex *mutex);
void ebb__os_condition_init(ebb__condition *condition);
void ebb__os_wait(ebb__condition *condition, ebb__mutex *mutex);
void ebb__os_wake_all(ebb__condition *condition);

/*
 * A table of `bytes` zero bytes that costs memory only where it is written: NULL if there is none.
 * clear makes it zero again and costs no memory afterwards, at the same address: who still reads
 * there reads zeroes.
 */
void *ebb__os_table_new(size_t bytes);
void ebb__os_table_clear(void *table, size_t bytes);
void ebb__os_table_free(void *table, size_t bytes);

/* Bytes of a page. */
size_t ebb__os_page(void);

/* Bytes of memory that can be had, or kept there for good, without pushing somebody out. */
uint64_t ebb__os_available(void);

/*
 * Memory that is to be pinned: in huge pages where the system has them, and all of it there. NULL: it
 * has no such amount.
 */
void *ebb__os_host_new(size_t bytes);
void ebb__os_host_free(void *memory, size_t bytes);

/* What a range of this process's addresses is mapped to. */
typedef struct ebb__mapping {
    uintptr_t start, end; /* if one mapping of a file holds the range: of that. Else its own */
    uint64_t device, inode, offset; /* and of which file, from where on. Else 0 */
    bool read_only;    /* it cannot be written, or is a file's: nobody pins those for writing */
    bool private_file; /* part of it is a file's, of which the program may have pages of its own */
} ebb__mapping;

/* false: something of it is not mapped or cannot be read, or the system does not say. */
bool ebb__os_mapping(const void *address, size_t bytes, ebb__mapping *mapping);

/*
 * The file that a private mapping is of, or whole pages of one: the same bytes of it, mapped anew to be
 * read and shared with all, a second address of what is in memory once. NULL: it cannot be had. Undone
 * by ebb__os_host_free(). *sure: it is the same file; else it may be another one in its place, as far
 * as the system says.
 */
void *ebb__os_file_again(const ebb__mapping *mapping, bool *sure);

/* Whether a mapping of a file shows the file here: the program has written to none of these pages. */
bool ebb__os_is_files(const void *address, size_t bytes);

/* Nanoseconds on a clock that never goes back. */
uint64_t ebb__os_now(void);

/* Let others run, about a millisecond at most. */
void ebb__os_pause(void);

/* A number that no other living thread has. */
uint64_t ebb__os_thread(void);

/* Have `child` called in every process that is forked off this one. Once is enough. */
void ebb__os_at_fork(void (*child)(void));

#endif
