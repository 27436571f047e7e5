/*
 * What crosses files inside the core, grouped by the file that defines it.
 *
 * The driver table has a header of its own (driver.h), and so has the platform (os.h).
 */
#ifndef EBB_INTERNAL_H
#define EBB_INTERNAL_H

#include "ebbtide.h"

/* ---- errors.c ------------------------------------------------------------------------------- */

/*
 * Write a sentence about a failure into `detail`, of `length` bytes, cutting it where it does not
 * fit. Does nothing if `detail` is NULL or `length` is 0, so that callers need not ask.
 */
__attribute__((format(printf, 3, 4))) void ebb__detail(char *detail, size_t length,
                                                       const char *format, ...);

#endif
