/*
 * Imports: the slots through which a loaded library calls functions of another, found and replaced.
 *
 * One contract, one file for each kind of binary (imports_elf.c).
 */
#ifndef EBB_IMPORTS_H
#define EBB_IMPORTS_H

#include "ebbtide.h"

enum { EBB__SLOTS = 4 }; /* a function can be imported twice: to be called, and by address */

/* One function that one library imports. */
typedef struct ebb__import {
    void **slots[EBB__SLOTS];
    unsigned count;
    void *original;    /* what the library called before */
    void *replacement; /* what it calls now; NULL: the original */
} ebb__import;

/*
 * Find where the loaded library whose file name begins with `library` imports `function`, and what
 * is there. The library must be loaded and stay so.
 *
 * EBB_OK; EBB_NO_DRIVER: no such library is loaded; EBB_INVALID: it does not import the function (it
 * has a copy of its own, linked in); EBB_BUSY: something else has replaced it already, and `detail`,
 * of `length` bytes, names it.
 */
ebb_status ebb__import_find(const char *library, const char *function, ebb__import *import,
                            char *detail, size_t length);

/*
 * Let the library call `replacement` from now on: all threads, at once. EBB_OK; EBB_BUSY: it has been
 * replaced already; EBB_DRIVER_FAILED: the system would not make the slot writable.
 */
ebb_status ebb__import_replace(ebb__import *import, void *replacement);

/* Undo that. EBB_OK; EBB_BUSY: something else has been put there since, and stays. */
ebb_status ebb__import_restore(ebb__import *import);

/* Another function of the library that the original is in; NULL: it has none such. */
void *ebb__import_sibling(const ebb__import *import, const char *function);

#endif
