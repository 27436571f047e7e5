/*
 * Imports of ELF libraries.
 *
 * A library's dynamic section names its relocations. Those of the kinds JUMP_SLOT (a function that is
 * called) and GLOB_DAT (one whose address is taken) say: write the address of this symbol into this
 * slot. The loader has done so, or will at the first call (lazy binding); writing another address
 * there is all it takes. After start-up the loader makes most slots read-only (RELRO), so the page is
 * made writable for the moment, and then what it was.
 *
 *   dl_iterate_phdr -> PT_DYNAMIC -> DT_JMPREL, DT_RELA -> symbol's name -> slot
 */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "imports.h"
#include "internal.h"

#if defined(__x86_64__)
enum { JUMP_SLOT = R_X86_64_JUMP_SLOT, GLOB_DAT = R_X86_64_GLOB_DAT };
#elif defined(__aarch64__)
enum { JUMP_SLOT = R_AARCH64_JUMP_SLOT, GLOB_DAT = R_AARCH64_GLOB_DAT };
#else
#error "relocations of this machine are not known here"
#endif

/* What is being looked for, and what was found. */
typedef struct search {
    const char *library, *function;
    ebb__import *import;
    bool loaded;
    char path[4096];
    ElfW(Addr) base;
    ElfW(Addr) begin, end; /* of the library's own code and data */
} search;

/* The parts of a dynamic section that matter here. */
typedef struct tables {
    const ElfW(Sym) * symbols;
    const char *names;
    const ElfW(Rela) * jumps, *others;
    size_t jump_count, other_count;
} tables;

static const char *file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static tables read_dynamic(ElfW(Addr) base, const ElfW(Dyn) * dynamic)
{
    tables t = {0};
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        /* The loader has made these absolute, except on a few systems that leave offsets. */
        ElfW(Addr) value = dynamic->d_un.d_ptr;
        const void *at = (const void *)(value < base ? base + value : value);
        switch (dynamic->d_tag) {
        case DT_SYMTAB:
            t.symbols = at;
            break;
        case DT_STRTAB:
            t.names = at;
            break;
        case DT_JMPREL:
            t.jumps = at;
            break;
        case DT_PLTRELSZ:
            t.jump_count = dynamic->d_un.d_val / sizeof(ElfW(Rela));
            break;
        case DT_RELA:
            t.others = at;
            break;
        case DT_RELASZ:
            t.other_count = dynamic->d_un.d_val / sizeof(ElfW(Rela));
            break;
        default:
            break;
        }
    }
    return t;
}

static void scan(search *s, const tables *t, const ElfW(Rela) * relocations, size_t count)
{
    for (size_t i = 0; relocations && i < count; i++) {
        const ElfW(Rela) *r = &relocations[i];
        unsigned type = (unsigned)ELF64_R_TYPE(r->r_info);
        size_t symbol = ELF64_R_SYM(r->r_info);
        if ((type != JUMP_SLOT && type != GLOB_DAT) || !symbol)
            continue;
        if (strcmp(t->names + t->symbols[symbol].st_name, s->function) != 0)
            continue;
        if (s->import->count < EBB__SLOTS)
            s->import->slots[s->import->count++] = (void **)(s->base + r->r_offset);
    }
}

static int look(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    search *s = data;
    if (strncmp(file_name(info->dlpi_name), s->library, strlen(s->library)) != 0)
        return 0;
    s->loaded = true;
    snprintf(s->path, sizeof s->path, "%s", info->dlpi_name);
    s->base = info->dlpi_addr;
    s->begin = s->base;
    const ElfW(Dyn) *dynamic = NULL;
    for (unsigned i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type == PT_DYNAMIC)
            dynamic = (const ElfW(Dyn) *)(s->base + part->p_vaddr);
        if (part->p_type == PT_LOAD && s->base + part->p_vaddr + part->p_memsz > s->end)
            s->end = s->base + part->p_vaddr + part->p_memsz;
    }
    if (!dynamic)
        return 0;
    tables t = read_dynamic(s->base, dynamic);
    if (!t.symbols || !t.names)
        return 0;
    scan(s, &t, t.jumps, t.jump_count);
    scan(s, &t, t.others, t.other_count);
    return 1;
}

/* What a slot leads to: the function itself, once it is bound. */
static void *target(const search *s, void **slot)
{
    void *there = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
    ElfW(Addr) address = (ElfW(Addr))there;
    if (there && (address < s->begin || address >= s->end))
        return there;
    /* Not bound yet: it leads back into the library, which would look the name up, in itself and in
       what it depends on. So do we. */
    void *library = dlopen(s->path, RTLD_LAZY | RTLD_NOLOAD);
    void *found = library ? dlsym(library, s->function) : NULL;
    if (library)
        dlclose(library);
    return found;
}

/* What a name means in the library that some code is in, whose file is `file`. */
static void *of_library(const void *code, const char *name, const char **file)
{
    Dl_info info;
    *file = "code of no library";
    if (!dladdr(code, &info))
        return NULL;
    *file = info.dli_fname;
    void *library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    void *found = library ? dlsym(library, name) : NULL;
    if (library)
        dlclose(library);
    return found;
}

/* Whether a function is in its own home: where the name means this address. */
static bool at_home(void *there, const char *function, char *detail, size_t length)
{
    const char *file;
    if (of_library(there, function, &file) == there)
        return true;
    ebb__detail(detail, length, "%s has been replaced by %s", function, file);
    return false;
}

void *ebb__import_sibling(const ebb__import *import, const char *function)
{
    const char *file;
    return of_library(import->original, function, &file);
}

ebb_status ebb__import_find(const char *library, const char *function, ebb__import *import,
                            char *detail, size_t length)
{
    *import = (ebb__import){.count = 0};
    search s = {.library = library, .function = function, .import = import};
    dl_iterate_phdr(look, &s);
    if (!s.loaded) {
        ebb__detail(detail, length, "%s is not loaded", library);
        return EBB_NO_DRIVER;
    }
    if (!import->count) {
        ebb__detail(detail, length, "%s does not import %s: it was linked with a copy of its own",
                    library, function);
        return EBB_INVALID;
    }
    import->original = target(&s, import->slots[0]);
    if (!import->original) {
        ebb__detail(detail, length, "%s imports %s, which is nowhere to be found", library,
                    function);
        return EBB_INVALID;
    }
    return at_home(import->original, function, detail, length) ? EBB_OK : EBB_BUSY;
}

/* How a page is protected now: from the kernel's own list, since nobody else tells. */
static int protection(const void *address)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    if (!maps)
        return -1;
    int found = -1;
    char line[512];
    while (found < 0 && fgets(line, sizeof line, maps)) {
        unsigned long begin, end;
        char flags[5];
        if (sscanf(line, "%lx-%lx %4s", &begin, &end, flags) != 3)
            continue;
        if ((unsigned long)address >= begin && (unsigned long)address < end)
            found = (flags[0] == 'r' ? PROT_READ : 0) | (flags[1] == 'w' ? PROT_WRITE : 0) |
                    (flags[2] == 'x' ? PROT_EXEC : 0);
    }
    fclose(maps);
    return found;
}

/* Write a slot. The page is writable for as long as that takes, if it is not anyway. */
static bool write_slot(void **slot, void *value)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *start = (void *)((uintptr_t)slot & ~(page - 1));
    int before = protection(slot);
    if (before < 0)
        return false;
    if (!(before & PROT_WRITE) && mprotect(start, page, before | PROT_WRITE) != 0)
        return false;
    __atomic_store_n(slot, value, __ATOMIC_RELEASE);
    if (!(before & PROT_WRITE))
        mprotect(start, page, before);
    return true;
}

ebb_status ebb__import_replace(ebb__import *import, void *replacement)
{
    if (import->replacement)
        return EBB_BUSY;
    for (unsigned i = 0; i < import->count; i++) {
        if (write_slot(import->slots[i], replacement))
            continue;
        while (i-- > 0)
            write_slot(import->slots[i], import->original);
        return EBB_DRIVER_FAILED;
    }
    import->replacement = replacement;
    return EBB_OK;
}

ebb_status ebb__import_restore(ebb__import *import)
{
    if (!import->replacement)
        return EBB_OK;
    for (unsigned i = 0; i < import->count; i++)
        if (__atomic_load_n(import->slots[i], __ATOMIC_ACQUIRE) != import->replacement)
            return EBB_BUSY;
    for (unsigned i = 0; i < import->count; i++)
        write_slot(import->slots[i], import->original);
    import->replacement = NULL;
    return EBB_OK;
}
