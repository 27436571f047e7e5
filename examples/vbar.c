/*
 * Weights in a VBAR, from C: twelve of 32 MiB in 256 MiB of VRAM.
 *
 *   vbar                                              on a GPU
 *   EBBTIDE_DRIVER=.../libebbtide_sim.so vbar         where there is none
 *
 * The weights are used by nobody here, so that no CUDA is needed to build this; on the default stream.
 */
#include <stdio.h>

#include "ebbtide.h"

enum { WEIGHTS = 12 };
#define BYTES (UINT64_C(32) << 20)

static int failed(const char *call, ebb_status status)
{
    fprintf(stderr, "%s: %s\n", call, ebb_status_text(status));
    return 1;
}

int main(void)
{
    ebb_device_options options = {
        .size = sizeof options, .limit = 8 * BYTES, .headroom = EBB_DEFAULT};
    ebb_device device;
    char why[256];
    ebb_status status = ebb_device_open(&options, &device, why, sizeof why);
    if (status != EBB_OK) {
        fprintf(stderr, "%s: %s\n", ebb_status_text(status), why);
        return 1;
    }

    ebb_vbar vbar;
    ebb_vbar_options size = {.size = sizeof size, .bytes = WEIGHTS * BYTES};
    if ((status = ebb_vbar_create(device, &size, &vbar)) != EBB_OK)
        return failed("ebb_vbar_create", status);
    uint64_t offset[WEIGHTS], filled[WEIGHTS] = {0};
    for (int i = 0; i < WEIGHTS; i++)
        if ((status = ebb_vbar_alloc(vbar, BYTES, &offset[i])) != EBB_OK)
            return failed("ebb_vbar_alloc", status);

    for (int pass = 0; pass < 2; pass++) {
        printf("pass %d: ", pass);
        for (int i = 0; i < WEIGHTS; i++) {
            uint64_t signature;
            status = ebb_vbar_fault(vbar, offset[i], BYTES, NULL, &signature);
            if (status == EBB_OFFLOADED) {
                putchar('.'); /* copy it to a temporary, use that */
                continue;
            }
            if (status != EBB_OK)
                return failed("ebb_vbar_fault", status);
            putchar(signature == filled[i] ? '#' : '+');
            if (signature != filled[i]) {
                /* copy the weight to the VBAR's address + offset[i], on the stream */
                ebb_vbar_filled(vbar, offset[i], BYTES, NULL);
                filled[i] = signature;
            }
            /* use it, on the stream */
            ebb_vbar_unpin(vbar, offset[i], BYTES, NULL);
        }
        puts("   + loaded, # resident, . offloaded");
    }

    ebb_device_stats stats = {.size = sizeof stats};
    ebb_device_get_stats(device, &stats);
    printf("%llu MiB held of %llu allowed, %llu hits\n", (unsigned long long)(stats.held >> 20),
           (unsigned long long)(stats.limit >> 20), (unsigned long long)stats.hits);
    if ((status = ebb_device_close(device)) != EBB_OK)
        return failed("ebb_device_close", status);
    return 0;
}
