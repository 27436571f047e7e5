/*
 * How many times a minute can a physical allocation be mapped and unmapped again?
 *
 *   map_unmap [--json]     --json: one object a line, with bench, metric, value and unit
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "driver.h"

static ebb__driver driver;
static bool json;

static double seconds(void)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void must(CUresult code, const char *call)
{
    if (code == CUDA_SUCCESS)
        return;
    char detail[256];
    ebb__driver_failed(&driver, call, code, detail, sizeof detail);
    fprintf(stderr, "%s\n", detail);
    exit(1);
}
#define MUST(call, ...) must(driver.call(__VA_ARGS__), #call)

/* Map one handle at one address after another of a range, so that no call finds the last one's
   traces; about two seconds. */
static void measure(CUdevice device, size_t bytes, int with_access)
{
    enum { PLACES = 64 };
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = location};
    CUmemAccessDesc access = {location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr range;
    MUST(cuMemAddressReserve, &range, PLACES * bytes, 0, 0, 0);
    MUST(cuMemCreate, &handle, bytes, &properties, 0);

    unsigned long pairs = 0;
    double start = seconds(), took;
    do {
        for (unsigned i = 0; i < 256; i++, pairs++) {
            CUdeviceptr address = range + (i % PLACES) * bytes;
            MUST(cuMemMap, address, bytes, 0, handle, 0);
            if (with_access)
                MUST(cuMemSetAccess, address, bytes, &access, 1);
            MUST(cuMemUnmap, address, bytes);
        }
        took = seconds() - start;
    } while (took < 2);

    MUST(cuMemRelease, handle);
    MUST(cuMemAddressFree, range, PLACES * bytes);
    double microseconds = took / (double)pairs * 1e6, millions = (double)pairs / took * 60 / 1e6;
    const char *what = with_access ? "map_access_unmap" : "map_unmap";
    if (json) {
        printf("{\"bench\": \"map_unmap\", \"metric\": \"%s_%zu_mib\", \"value\": %.3f, "
               "\"unit\": \"us\"}\n",
               what, bytes >> 20, microseconds);
        printf("{\"bench\": \"map_unmap\", \"metric\": \"%s_%zu_mib_rate\", \"value\": %.3f, "
               "\"unit\": \"million/min\"}\n",
               what, bytes >> 20, millions);
    } else {
        printf("%3zu MiB, map%s, unmap: %6.2f us, %6.2f million a minute\n", bytes >> 20,
               with_access ? ", access" : "", microseconds, millions);
    }
}

int main(int argc, char **argv)
{
    json = argc > 1 && strcmp(argv[1], "--json") == 0;
    if (argc > 1 && !json) {
        fprintf(stderr, "usage: map_unmap [--json]\n");
        return 2;
    }
    char detail[256];
    if (ebb__driver_open(&driver, NULL, detail, sizeof detail) != EBB_OK) {
        fprintf(stderr, "%s\n", detail);
        return 1;
    }
    CUdevice device;
    CUcontext context;
    MUST(cuDeviceGet, &device, 0);
    MUST(cuDevicePrimaryCtxRetain, &context, device);
    MUST(cuCtxSetCurrent, context);
    for (int with_access = 0; with_access < 2; with_access++)
        for (size_t bytes = 2 << 20; bytes <= 32 << 20; bytes *= 16)
            measure(device, bytes, with_access);
    MUST(cuDevicePrimaryCtxRelease, device);
    ebb__driver_close(&driver);
    return 0;
}
