/*
 * The loader: fills the driver table from a library.
 *
 * Only one symbol is taken from the library by name, cuGetProcAddress_v2. Everything else is asked
 * of that function, because it alone takes the version of the interface we were written against:
 * the bare symbol "cuMemAlloc" of a library is the one of 2010, and names such as "cuMemAlloc_v2"
 * are nothing anyone promised to keep.
 */
#include "driver.h"

#include <string.h>

#include "internal.h"
#include "os.h"

typedef CUresult (*get_proc_address)(const char *symbol, void **function, int version,
                                     uint64_t flags, CUdriverProcAddressQueryResult *result);
typedef CUresult (*get_version)(int *version);

typedef struct entry {
    const char *name;
    int since;
    enum { REQUIRED, OPTIONAL } need;
    size_t offset; /* of the pointer in ebb__driver */
} entry;

static const entry entries[] = {
#define ENTRY(need, name, since, parameters) {#name, since, need, offsetof(ebb__driver, name)},
    EBB__DRIVER_FUNCTIONS(ENTRY)
#undef ENTRY
};

static ebb_status too_old(int version, char *detail, size_t length)
{
    ebb__detail(detail, length, "the driver is for CUDA %d.%d, Ebbtide needs %d.%d or newer",
                version / 1000, version % 1000 / 10, EBB__DRIVER_OLDEST / 1000,
                EBB__DRIVER_OLDEST % 1000 / 10);
    return EBB_DRIVER_TOO_OLD;
}

/* A library without cuGetProcAddress_v2 is an old driver if it can say its version. */
static ebb_status not_ours(void *library, const char *path, char *detail, size_t length)
{
    int version = 0;
    get_version version_of = (get_version)ebb__os_library_symbol(library, "cuDriverGetVersion");
    if (version_of && version_of(&version) == CUDA_SUCCESS && version < EBB__DRIVER_OLDEST)
        return too_old(version, detail, length);
    ebb__detail(detail, length, "%s is no CUDA driver: it has no cuGetProcAddress_v2", path);
    return EBB_NO_DRIVER;
}

static void *find(get_proc_address get, const char *name, int since)
{
    /* Drivers say "too new for me" in three ways: a code, the query's result, a NULL. */
    void *function = NULL;
    CUdriverProcAddressQueryResult result = CU_GET_PROC_ADDRESS_SUCCESS;
    CUresult code = get(name, &function, since, 0, &result);
    return code == CUDA_SUCCESS && result == CU_GET_PROC_ADDRESS_SUCCESS ? function : NULL;
}

static ebb_status fill(ebb__driver *driver, get_proc_address get, char *detail, size_t length)
{
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        const entry *e = &entries[i];
        void *function = find(get, e->name, e->since);
        if (!function && e->need == REQUIRED) {
            ebb__detail(detail, length,
                        "the driver (CUDA %d.%d) has no %s in its form of CUDA %d.%d",
                        driver->version / 1000, driver->version % 1000 / 10, e->name,
                        e->since / 1000, e->since % 1000 / 10);
            return EBB_DRIVER_INCOMPLETE;
        }
        memcpy((char *)driver + e->offset, &function, sizeof function);
    }
    return EBB_OK;
}

ebb_status ebb__driver_failed(const ebb__driver *driver, const char *call, CUresult code,
                              char *detail, size_t length)
{
    const char *name = NULL;
    if (!driver->cuGetErrorName || driver->cuGetErrorName(code, &name) != CUDA_SUCCESS || !name)
        name = "a code the driver has no name for";
    ebb__detail(detail, length, "%s failed with %s (%d)", call, name, (int)code);
    return EBB_DRIVER_FAILED;
}

/* The version comes first: below the oldest, a missing function would be the wrong complaint. */
static ebb_status start(ebb__driver *driver, const char *path, char *detail, size_t length)
{
    get_proc_address get =
        (get_proc_address)ebb__os_library_symbol(driver->library, "cuGetProcAddress_v2");
    if (!get)
        return not_ours(driver->library, path, detail, length);

    get_version version_of = (get_version)find(get, "cuDriverGetVersion", 2020);
    if (!version_of) {
        ebb__detail(detail, length, "the driver has no cuDriverGetVersion");
        return EBB_DRIVER_INCOMPLETE;
    }
    CUresult code = version_of(&driver->version);
    if (code != CUDA_SUCCESS)
        return ebb__driver_failed(driver, "cuDriverGetVersion", code, detail, length);
    if (driver->version < EBB__DRIVER_OLDEST)
        return too_old(driver->version, detail, length);

    ebb_status status = fill(driver, get, detail, length);
    if (status != EBB_OK)
        return status;
    code = driver->cuInit(0);
    if (code == CUDA_SUCCESS)
        return EBB_OK;
    status = ebb__driver_failed(driver, "cuInit", code, detail, length);
    return code == CUDA_ERROR_NO_DEVICE ? EBB_NO_DEVICE : status;
}

ebb_status ebb__driver_open(ebb__driver *driver, const char *path, char *detail, size_t length)
{
    memset(driver, 0, sizeof *driver);
    if (!path)
        path = ebb__os_environment("EBBTIDE_DRIVER");
    if (!path)
        path = ebb__os_driver_name();

    driver->library = ebb__os_library_open(path, detail, length);
    if (!driver->library)
        return EBB_NO_DRIVER;
    ebb_status status = start(driver, path, detail, length);
    if (status != EBB_OK)
        ebb__driver_close(driver);
    return status;
}

void ebb__driver_close(ebb__driver *driver)
{
    if (driver->library)
        ebb__os_library_close(driver->library);
    memset(driver, 0, sizeof *driver);
}
