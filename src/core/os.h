/*
 * What Ebbtide asks of the operating system. One contract, one file for each platform (os_*.c);
 * nothing outside those files knows which platform it is.
 */
#ifndef EBB_OS_H
#define EBB_OS_H

#include <stddef.h>

/* The system's name for its CUDA driver library, as the loader of libraries knows it. */
const char *ebb__os_driver_name(void);

/* The value of an environment variable; NULL where it is not set, or empty. */
const char *ebb__os_environment(const char *name);

/*
 * Load a library, with all its symbols resolved and none of them visible to other libraries. NULL
 * if that fails; `detail`, of `length` bytes, then holds the system's own words.
 * One ebb__os_library_close() for each successful open; the last one unloads it.
 */
void *ebb__os_library_open(const char *path, char *detail, size_t length);
void ebb__os_library_close(void *library);

/* A symbol the library exports, or NULL. */
void *ebb__os_library_symbol(void *library, const char *name);

#endif
