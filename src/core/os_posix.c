/* The operating system's part, on POSIX systems. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <time.h>
#include <unistd.h>

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

_Static_assert(sizeof(pthread_mutex_t) <= sizeof(ebb__mutex), "a mutex fits");
_Static_assert(sizeof(pthread_cond_t) <= sizeof(ebb__condition), "a condition fits");

static pthread_mutex_t *mutex_of(ebb__mutex *mutex)
{
    return (pthread_mutex_t *)(void *)mutex->system.space;
}

static pthread_cond_t *condition_of(ebb__condition *condition)
{
    return (pthread_cond_t *)(void *)condition->system.space;
}

void ebb__os_mutex_init(ebb__mutex *mutex)
{
    pthread_mutex_init(mutex_of(mutex), NULL);
}

void ebb__os_lock(ebb__mutex *mutex)
{
    pthread_mutex_lock(mutex_of(mutex));
}

void ebb__os_unlock(ebb__mutex *mutex)
{
    pthread_mutex_unlock(mutex_of(mutex));
}

void ebb__os_condition_init(ebb__condition *condition)
{
    pthread_cond_init(condition_of(condition), NULL);
}

void ebb__os_wait(ebb__condition *condition, ebb__mutex *mutex)
{
    pthread_cond_wait(condition_of(condition), mutex_of(mutex));
}

void ebb__os_wake_all(ebb__condition *condition)
{
    pthread_cond_broadcast(condition_of(condition));
}

void *ebb__os_table_new(size_t bytes)
{
    void *table = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return table == MAP_FAILED ? NULL : table;
}

void ebb__os_table_clear(void *table, size_t bytes)
{
    /* On private anonymous memory this means: zero from now on. */
    madvise(table, bytes, MADV_DONTNEED);
}

void ebb__os_table_free(void *table, size_t bytes)
{
    munmap(table, bytes);
}

/* A huge page, on the systems that have them. */
#define HUGE_PAGE ((size_t)2 << 20)

size_t ebb__os_page(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static size_t whole_pages(size_t bytes)
{
    size_t page = ebb__os_page();
    return (bytes + page - 1) / page * page;
}

/* Have every page there. A write to each is how, where the system cannot be asked. */
static bool populate(char *memory, size_t bytes)
{
#if defined(MADV_POPULATE_WRITE)
    if (!madvise(memory, bytes, MADV_POPULATE_WRITE))
        return true;
    if (errno != EINVAL)
        return false;
#endif
    for (size_t at = 0; at < bytes; at += 4096)
        *(volatile char *)(memory + at) = 0;
    return true;
}

/* Some systems would promise any number. */
uint64_t ebb__os_available(void)
{
    unsigned long long found = 0;
    FILE *info = fopen("/proc/meminfo", "re");
    char line[128];
    while (info && !found && fgets(line, sizeof line, info))
        if (sscanf(line, "MemAvailable: %llu kB", &found) == 1)
            found *= 1024;
    if (info)
        fclose(info);
    return found ? found : (uint64_t)sysconf(_SC_PHYS_PAGES) * ebb__os_page();
}

void *ebb__os_host_new(size_t bytes)
{
    if (bytes > ebb__os_available())
        return NULL;
    /* Somewhat more, so that it can begin with a huge page; what is over is given back. */
    size_t slack = bytes >= HUGE_PAGE ? HUGE_PAGE : 0;
    if (bytes > SIZE_MAX - 2 * HUGE_PAGE)
        return NULL;
    bytes = whole_pages(bytes);
    char *whole =
        mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (whole == MAP_FAILED)
        return NULL;
    size_t before = slack ? -(uintptr_t)whole % HUGE_PAGE : 0;
    if (before)
        munmap(whole, before);
    if (slack > before)
        munmap(whole + before + bytes, slack - before);
#if defined(MADV_HUGEPAGE)
    madvise(whole + before, bytes, MADV_HUGEPAGE); /* without it, it is only slower */
#endif
    if (populate(whole + before, bytes))
        return whole + before;
    munmap(whole + before, bytes);
    return NULL;
}

void ebb__os_host_free(void *memory, size_t bytes)
{
    munmap(memory, whole_pages(bytes));
}

/* A line of /proc/self/maps: 7f0000000000-7f0000100000 r--p 00000000 08:01 1234   /a/file */
typedef struct area {
    uintptr_t start, end;
    uint64_t device, inode, offset; /* without a file, no inode */
    bool readable, writable, shared;
    int path; /* where in the line it begins */
} area;

static bool area_read(const char *line, area *a)
{
    unsigned long start, end, offset, inode;
    unsigned major, minor;
    char access[5];
    if (sscanf(line, "%lx-%lx %4s %lx %x:%x %lu %n", &start, &end, access, &offset, &major, &minor,
               &inode, &a->path) != 7)
        return false;
    a->start = start;
    a->end = end;
    a->device = (uint64_t)major << 32 | minor;
    a->inode = inode;
    a->offset = offset;
    a->readable = access[0] == 'r';
    a->writable = access[1] == 'w';
    a->shared = access[3] == 's';
    return true;
}

bool ebb__os_mapping(const void *address, size_t bytes, ebb__mapping *mapping)
{
    uintptr_t from = (uintptr_t)address, end = from + bytes, seen = from;
    FILE *maps = bytes && end > from ? fopen("/proc/self/maps", "re") : NULL;
    if (!maps)
        return false;
    *mapping = (ebb__mapping){.start = from, .end = end};
    char *line = NULL;
    size_t room = 0;
    area a;
    /* Lines are in the order of addresses. */
    while (seen < end && getline(&line, &room, maps) > 0) {
        if (!area_read(line, &a) || a.end <= seen)
            continue;
        if (a.start > seen || !a.readable)
            break;
        mapping->read_only |= !a.writable || a.inode;
        mapping->private_file |= a.inode && !a.shared;
        if (a.inode && a.start <= from && a.end >= end) {
            mapping->start = a.start;
            mapping->end = a.end;
            mapping->device = a.device;
            mapping->inode = a.inode;
            mapping->offset = a.offset;
        }
        seen = a.end;
    }
    free(line);
    fclose(maps);
    return seen >= end;
}

/* The line that a range is in. The caller frees it; NULL: there is none. */
static char *area_of(uintptr_t start, uintptr_t end, area *a)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char *line = NULL;
    size_t room = 0;
    bool found = false;
    while (maps && !found && getline(&line, &room, maps) > 0)
        found = area_read(line, a) && a->start <= start && a->end >= end;
    if (maps)
        fclose(maps);
    if (found)
        return line;
    free(line);
    return NULL;
}

/* Whether a file's numbers are its own, and all that is mapped of it are its pages. On overlayfs the
   file by that name and those numbers may be a copy, by now, and btrfs gives numbers twice. */
static bool is_told_apart(int file)
{
    static const uint64_t those[] = {0xEF53, 0x58465342, 0x01021994}; /* ext4, xfs, tmpfs */
    struct statfs system;
    if (fstatfs(file, &system))
        return false;
    for (size_t i = 0; i < sizeof those / sizeof *those; i++)
        if ((uint64_t)system.f_type == those[i])
            return true;
    return false;
}

void *ebb__os_file_again(const ebb__mapping *mapping, bool *sure)
{
    area old;
    size_t bytes = mapping->end - mapping->start;
    char *line = area_of(mapping->start, mapping->end, &old);
    if (!line)
        return NULL;
    line[strcspn(line, "\n")] = 0;
    bool still = old.inode == mapping->inode && old.device == mapping->device &&
                 old.offset + (mapping->start - old.start) == mapping->offset;
    /* By its name it may be anything by now, and who opens a pipe waits for somebody to write to it. */
    int file = still ? open(line + old.path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    free(line);
    if (file < 0)
        return NULL;
    *sure = is_told_apart(file);
    void *again = mmap(NULL, bytes, PROT_READ, MAP_SHARED, file, (off_t)mapping->offset);
    close(file);
    if (again == MAP_FAILED)
        return NULL;
    /* By its name it may be another file by now. The two lines can be compared where stat() numbers
       files otherwise. The new one may have become part of another, of the same file. */
    ebb__mapping there;
    bool same = ebb__os_mapping(again, bytes, &there) && there.inode == mapping->inode &&
                there.device == mapping->device &&
                there.offset + ((uintptr_t)again - there.start) == mapping->offset;
    if (same)
        return again;
    munmap(again, bytes);
    return NULL;
}

bool ebb__os_is_files(const void *address, size_t bytes)
{
    enum { AT_ONCE = 512 };
    const uint64_t somewhere = UINT64_C(3) << 62, shared = UINT64_C(1) << 61;
    uint64_t pages[AT_ONCE], size = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t at = (uintptr_t)address / size, end = ((uintptr_t)address + bytes + size - 1) / size;
    int map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    bool known = map >= 0;
    while (known && at < end) {
        size_t count = end - at < AT_ONCE ? (size_t)(end - at) : AT_ONCE;
        known = pread(map, pages, count * 8, (off_t)(at * 8)) == (ssize_t)(count * 8);
        /* A page that is in memory or swapped out and not the file's is the program's own. */
        for (size_t i = 0; known && i < count; i++)
            known = !(pages[i] & somewhere) || pages[i] & shared;
        at += count;
    }
    if (map >= 0)
        close(map);
    return known;
}

uint64_t ebb__os_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void ebb__os_pause(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}

uint64_t ebb__os_thread(void)
{
    return (uint64_t)(uintptr_t)pthread_self();
}

void ebb__os_at_fork(void (*child)(void))
{
    pthread_atfork(NULL, NULL, child);
}
