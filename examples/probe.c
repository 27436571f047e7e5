/*
 * Ask whether Ebbtide can work with this machine's first GPU. Exit code 0 if it can.
 *
 *   build/dev/examples/probe                        the system's driver
 *   build/dev/examples/probe path/to/library.so     another one: the simulated GPU, for example
 */
#include <stdio.h>

#include "ebbtide.h"

int main(int argc, char **argv)
{
    ebb_probe_result found = {.size = sizeof found};
    ebb_status status = ebb_probe(argc > 1 ? argv[1] : NULL, 0, &found);
    if (status != EBB_OK) {
        fprintf(stderr, "%s (%s)\n", ebb_status_text(status), found.detail);
        return 1;
    }
    printf("%s: %.1f GiB in pieces of %zu MiB, CUDA %d.%d\n", found.name,
           (double)found.total_bytes / (1 << 30), found.granularity >> 20,
           found.driver_version / 1000, found.driver_version % 1000 / 10);
    return 0;
}
