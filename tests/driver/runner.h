/* Between the runner (main.c) and a case's process (suite.c). */
#ifndef EBB_DRIVER_RUNNER_H
#define EBB_DRIVER_RUNNER_H

#include "suite.h"

enum {
    SUITE_SKIPPED = 77, /* exit status of a case, and of the suite without a device */
    SUITE_TIMEOUT_S = 20,
    SUITE_GATE_TIMEOUT_S = 12, /* by then every gate is opened, so that a hung case can end */
};

/* Name the case this process runs, before its first expectation. */
void suite_begin(const char *name, bool learn);

/* Is the driver library under test the simulated GPU's? False where there is no library. */
bool suite_is_simulated(void);

#endif
