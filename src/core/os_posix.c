/* The operating system's part, on POSIX systems. */
#include <dlfcn.h>
#include <stdlib.h>

#include "internal.h"
#include "os.h"

const char *ebb__os_driver_name(void)
{
    /* The driver's own name. "libcuda.so" is the development link, absent on most machines. */
    return "libcuda.so.1";
}

const char *ebb__os_environment(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

void *ebb__os_library_open(const char *path, char *detail, size_t length)
{
    /* Local: the simulated GPU exports names that must not stand in for the real driver's. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        ebb__detail(detail, length, "%s", dlerror());
    return library;
}

void ebb__os_library_close(void *library)
{
    dlclose(library);
}

void *ebb__os_library_symbol(void *library, const char *name)
{
    return dlsym(library, name);
}
