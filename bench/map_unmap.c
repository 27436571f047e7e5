/*
 * How many times a minute can a physical allocation be mapped and unmapped again?
 *
 *   map_unmap [--json]     --json: one object a line, with bench, metric, value and unit
 */
#include "bench.h"
#include "driver.h"

static ebb__driver driver;
static bench b;

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
    double start = bench_now(), took;
    do {
        for (unsigned i = 0; i < 256; i++, pairs++) {
            CUdeviceptr address = range + (i % PLACES) * bytes;
            MUST(cuMemMap, address, bytes, 0, handle, 0);
            if (with_access)
                MUST(cuMemSetAccess, address, bytes, &access, 1);
            MUST(cuMemUnmap, address, bytes);
        }
        took = bench_now() - start;
    } while (took < 2);

    MUST(cuMemRelease, handle);
    MUST(cuMemAddressFree, range, PLACES * bytes);
    double microseconds = took / (double)pairs * 1e6, millions = (double)pairs / took * 60 / 1e6;
    const char *what = with_access ? "map_access_unmap" : "map_unmap";
    char metric[64];
    snprintf(metric, sizeof metric, "%s_%zu_mib", what, bytes >> 20);
    bench_print(&b, metric, microseconds, "us");
    strcat(metric, "_rate");
    bench_print(&b, metric, millions, "million/min");
}

int main(int argc, char **argv)
{
    b = bench_begin("map_unmap", argc, argv);
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
