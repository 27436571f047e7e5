/* Host memory that the GPU copies from: our own, and what is borrowed. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/rig.h"

/* How many registrations there are, beside the kit's own memory. */
static unsigned long long registrations(void)
{
    ebbsim_census n = {.size = sizeof n};
    ebbsim_census_take(&n);
    return n.host_blocks - 1;
}

/* Host memory to the GPU and back, all of it in one copy: is it what it was? */
static bool travels(core *c, ebb_vbar v, const void *host, size_t bytes)
{
    uint64_t signature;
    unsigned char *back = malloc(bytes);
    REQUIRE(back);
    memset(back, 0x77, bytes);
    MUST(ebb_vbar_fault(v, 0, bytes, NULL, &signature));
    CUdeviceptr at = core_stats(v).address;
    int code = (int)c->driver.cuMemcpyHtoDAsync(at, host, bytes, NULL);
    MUST(c->driver.cuMemcpyDtoHAsync(back, at, bytes, NULL));
    MUST(c->driver.cuStreamSynchronize(NULL));
    MUST(ebb_vbar_unpin(v, 0, bytes, NULL));
    bool same = !code && !memcmp(back, host, bytes);
    free(back);
    return same;
}

static void *pages(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)memory)[i] = (unsigned char)(i * 7 + i / 4096);
    return memory;
}

/* A file of so many bytes, and all of it from `skip` on mapped as asked. */
typedef struct kept_file {
    char name[32];
    unsigned char *memory;
    size_t bytes;
} kept_file;

static kept_file mapped_from(size_t bytes, size_t skip, int protection, int flags)
{
    kept_file f = {.name = "/tmp/ebbtide_host.XXXXXX", .bytes = bytes - skip};
    int file = mkstemp(f.name);
    REQUIRE(file >= 0);
    unsigned char *text = pages(bytes);
    REQUIRE(write(file, text, bytes) == (ssize_t)bytes);
    munmap(text, bytes);
    f.memory = mmap(NULL, f.bytes, protection, flags, file, (off_t)skip);
    close(file);
    REQUIRE(f.memory != MAP_FAILED);
    return f;
}

static kept_file mapped_file(size_t bytes, int protection, int flags)
{
    return mapped_from(bytes, 0, protection, flags);
}

static void file_gone(const kept_file *f)
{
    munmap(f->memory, f->bytes);
    unlink(f->name);
}

/* Borrow a range that is pinned where it is. */
static ebb_status borrow(core *c, const void *memory, uint64_t bytes)
{
    const void *from = NULL;
    ebb_status status = ebb_host_borrow(c->device, memory, bytes, NULL, &from);
    CHECK(status != EBB_OK || from == memory);
    return status;
}

/* How often the process has a file mapped. */
static int times_mapped(const char *name)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    int times = 0;
    REQUIRE(maps);
    while (fgets(line, sizeof line, maps))
        times += strstr(line, name) != NULL;
    fclose(maps);
    return times;
}

/* Is it pinned, as far as the driver knows? */
static bool pinned(core *c, const void *memory)
{
    int type = 0;
    CUresult code = c->driver.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                                    (CUdeviceptr)(uintptr_t)memory);
    return code == CUDA_SUCCESS && type == CU_MEMORYTYPE_HOST;
}

static void our_own_is_pinned_zero_and_given_back(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, 64 * MIB);
    static const size_t sizes[] = {1, 4096, 100001, 2 << 20, (6 << 20) + 5, 40 << 20};
    unsigned char *memory[6];
    for (int i = 0; i < 6; i++) {
        void *fresh = NULL;
        MUST(ebb_host_alloc(c.device, sizes[i], &fresh));
        memory[i] = fresh;
        CHECK(pinned(&c, fresh) && pinned(&c, memory[i] + sizes[i] - 1));
        CHECK(!memory[i][0] && !memory[i][sizes[i] - 1]);
        if (sizes[i] >= 2 << 20)
            CHECK_EQ((uintptr_t)fresh % (2 << 20), 0);
        memset(fresh, i + 1, sizes[i]);
        CHECK(travels(&c, v, fresh, sizes[i]));
    }
    CHECK_EQ(ebb_device_close(c.device), EBB_BUSY);
    CHECK_EQ(ebb_host_free(c.device, memory[5] + 4096), EBB_INVALID);
    CHECK_EQ(ebb_host_free(c.device, c.host), EBB_INVALID);
    CHECK_EQ(ebb_host_free(c.device, NULL), EBB_INVALID);
    for (int i = 0; i < 6; i++) {
        CHECK_EQ(ebb_host_free(c.device, memory[i]), EBB_OK);
        CHECK(!pinned(&c, memory[i]));
    }
    CHECK_EQ(ebb_host_free(c.device, memory[0]), EBB_INVALID);
    core_close(&c);
}

static void nonsense_is_refused(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    void *memory = NULL;
    int local = 0;
    CHECK_EQ(ebb_host_alloc(c.device, 0, &memory), EBB_INVALID);
    CHECK_EQ(ebb_host_alloc(c.device, 4096, NULL), EBB_INVALID);
    CHECK_EQ(ebb_host_alloc(c.device, UINT64_MAX, &memory), EBB_NO_HOST_MEMORY);
    CHECK_EQ(ebb_host_alloc(c.device, UINT64_C(1) << 46, &memory), EBB_NO_HOST_MEMORY);
    CHECK_EQ(ebb_host_alloc((ebb_device){0}, 4096, &memory), EBB_GONE);
    CHECK_EQ(borrow(&c, NULL, 4096), EBB_INVALID);
    CHECK_EQ(ebb_host_borrow(c.device, &local, 4, NULL, NULL), EBB_INVALID);
    CHECK_EQ(borrow(&c, &local, 0), EBB_INVALID);
    CHECK_EQ(borrow(&c, &local, UINT64_MAX), EBB_INVALID);
    const void *from;
    CHECK_EQ(ebb_host_borrow((ebb_device){0}, &local, 4, NULL, &from), EBB_GONE);
    CHECK_EQ(ebb_host_return(c.device, &local, 4), EBB_INVALID);
    const size_t part = 65536;
    unsigned char *hole = pages(3 * part);
    munmap(hole + part, part);
    CHECK_EQ(borrow(&c, hole + part, 100), EBB_INVALID);
    CHECK_EQ(borrow(&c, hole + 1000, 2 * part), EBB_INVALID);
    mprotect(hole, part, PROT_NONE);
    CHECK_EQ(borrow(&c, hole, 100), EBB_INVALID);
    munmap(hole, part);
    munmap(hole + 2 * part, part);
    core_close(&c);
}

static void of_a_tensor_its_own_bytes_are_pinned(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, 64 * MIB);
    enum { BYTES = 1 << 20, PIECE = 10000 };
    unsigned char *memory = pages(BYTES);
    /* Neighbours share pages, and none is a page's multiple. */
    for (size_t i = 0; i < 20; i++) {
        CHECK_EQ(borrow(&c, memory + 100 + i * PIECE, PIECE), EBB_OK);
        CHECK(travels(&c, v, memory + 100 + i * PIECE, PIECE));
    }
    CHECK(!pinned(&c, memory) && !pinned(&c, memory + 100 + (size_t)20 * PIECE));
    if (c.sim)
        CHECK_EQ(registrations(), 20);
    /* Within one: it counts. Across two: no copy could go. */
    CHECK_EQ(borrow(&c, memory + 200, 1000), EBB_OK);
    CHECK_EQ(borrow(&c, memory + 200, 1000), EBB_OK);
    CHECK_EQ(borrow(&c, memory + 200, PIECE), EBB_INVALID);
    CHECK_EQ(borrow(&c, memory, BYTES), EBB_INVALID);
    CHECK_EQ(ebb_host_return(c.device, memory + 100, PIECE), EBB_OK);
    CHECK_EQ(ebb_host_return(c.device, memory + 100, PIECE), EBB_INVALID);
    CHECK_EQ(ebb_host_return(c.device, memory + 200, 1000), EBB_OK);
    CHECK(pinned(&c, memory + 100)); /* its run is held by the other one */
    CHECK(travels(&c, v, memory + 200, 1000));
    CHECK_EQ(ebb_host_return(c.device, memory + 200, 1000), EBB_OK);
    CHECK(!pinned(&c, memory + 100));
    CHECK_EQ(ebb_device_close(c.device), EBB_BUSY);
    for (size_t i = 1; i < 20; i++)
        CHECK_EQ(ebb_host_return(c.device, memory + 100 + i * PIECE, PIECE), EBB_OK);
    if (c.sim)
        CHECK_EQ(registrations(), 0);
    munmap(memory, BYTES);
    core_close(&c);
}

static void of_a_file_the_whole_mapping_once(int protection, int flags)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, 64 * MIB);
    enum { BYTES = (3 << 20) + 321, SKIP = 8192, PIECE = 150001 };
    kept_file f = mapped_from(BYTES, SKIP, protection, flags);
    const unsigned char *from = NULL, *at;
    for (size_t i = 0; i < 20; i++) {
        CHECK_EQ(
            ebb_host_borrow(c.device, f.memory + 8 + i * PIECE, PIECE, NULL, (const void **)&at),
            EBB_OK);
        from = i ? from : at - 8;
        CHECK(at == from + 8 + i * PIECE);
    }
    /* Mapped privately it is pinned at another address, and the mapping is as it was. */
    bool again = flags == MAP_PRIVATE;
    CHECK_EQ(from != f.memory, again);
    CHECK_EQ(times_mapped(f.name), 1 + again);
    CHECK(pinned(&c, from) && pinned(&c, f.memory) == !again);
    if (c.sim)
        CHECK_EQ(registrations(), 1);
    CHECK(!memcmp(from, f.memory, f.bytes));
    CHECK(travels(&c, v, from, f.bytes)); /* one registration holds it all */
    CHECK_EQ(ebb_host_borrow(c.device, f.memory, f.bytes, NULL, (const void **)&at), EBB_OK);
    CHECK(at == from);
    for (size_t i = 0; i < 20; i++)
        CHECK_EQ(ebb_host_return(c.device, f.memory + 8 + i * PIECE, PIECE), EBB_OK);
    CHECK(pinned(&c, from));
    CHECK_EQ(ebb_host_return(c.device, f.memory, f.bytes), EBB_OK);
    CHECK(!pinned(&c, from));
    CHECK_EQ(times_mapped(f.name), 1);
    file_gone(&f);
    core_close(&c);
}

static void a_read_only_file_is_pinned_whole(void)
{
    of_a_file_the_whole_mapping_once(PROT_READ, MAP_SHARED);
}

static void a_privately_mapped_file_is_pinned_whole(void)
{
    of_a_file_the_whole_mapping_once(PROT_READ | PROT_WRITE, MAP_PRIVATE);
    of_a_file_the_whole_mapping_once(PROT_READ, MAP_PRIVATE);
}

static void a_shared_file_is_pinned_whole(void)
{
    of_a_file_the_whole_mapping_once(PROT_READ | PROT_WRITE, MAP_SHARED);
}

/* What the GPU would read is what the file has. So nothing is lent of which the program sees other
   bytes, or of which nobody can say. */
static void of_a_private_mapping_only_what_is_the_files_is_lent(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    enum { BYTES = 3 << 20, THERE = 1 << 20 };
    kept_file f = mapped_file(BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    const void *from;
    f.memory[THERE] ^= 1;
    CHECK_EQ(ebb_host_borrow(c.device, f.memory + THERE, 100, NULL, &from), EBB_INVALID);
    CHECK_EQ(ebb_host_borrow(c.device, f.memory, BYTES, NULL, &from), EBB_INVALID);
    CHECK_EQ(times_mapped(f.name), 1);
    CHECK_EQ(ebb_host_borrow(c.device, f.memory, THERE, NULL, &from), EBB_OK);
    CHECK_EQ(ebb_host_borrow(c.device, f.memory + 50, THERE, NULL, &from), EBB_INVALID);
    /* Written to meanwhile: what is lent stays lent, and is not lent once more. */
    f.memory[0] ^= 1;
    CHECK_EQ(ebb_host_borrow(c.device, f.memory, THERE, NULL, &from), EBB_INVALID);
    CHECK_EQ(ebb_host_borrow(c.device, f.memory + 8192, 100, NULL, &from), EBB_OK);
    CHECK_EQ(ebb_host_return(c.device, f.memory, THERE), EBB_OK);
    CHECK_EQ(ebb_host_return(c.device, f.memory + 8192, 100), EBB_OK);
    CHECK_EQ(times_mapped(f.name), 1);
    file_gone(&f);

    f = mapped_file(BYTES, PROT_READ, MAP_PRIVATE);
    unlink(f.name);
    CHECK_EQ(ebb_host_borrow(c.device, f.memory, BYTES, NULL, &from), EBB_INVALID);
    /* Another one by the same name, and by that which the system tells. */
    char told[64];
    snprintf(told, sizeof told, "%s (deleted)", f.name);
    for (int i = 0; i < 2; i++) {
        int other = open(i ? told : f.name, O_RDWR | O_CREAT | O_EXCL, 0600);
        REQUIRE(other >= 0 && !ftruncate(other, BYTES));
        close(other);
        CHECK_EQ(ebb_host_borrow(c.device, f.memory, BYTES, NULL, &from), EBB_INVALID);
        CHECK_EQ(times_mapped(f.name), 1);
    }
    unlink(told);
    file_gone(&f);

    /* Half of it is the program's in another way: two mappings hold the range. */
    f = mapped_file(BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    MUST(mprotect(f.memory, THERE, PROT_READ));
    CHECK_EQ(ebb_host_borrow(c.device, f.memory, BYTES, NULL, &from), EBB_INVALID);
    CHECK_EQ(ebb_host_borrow(c.device, f.memory, THERE, NULL, &from), EBB_OK);
    CHECK_EQ(ebb_host_return(c.device, f.memory, THERE), EBB_OK);
    file_gone(&f);
    core_close(&c);
}

/* Only what is borrowed has to stay: beside it, in the same mapping, another file may come to lie. */
static void what_has_come_into_a_mapping_is_not_lent_for_what_was_there(int flags)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    enum { BYTES = 1 << 20, HALF = BYTES / 2 };
    kept_file f = mapped_file(BYTES, PROT_READ, flags),
              other = mapped_file(BYTES, PROT_READ, flags);
    const void *from;
    CHECK_EQ(ebb_host_borrow(c.device, f.memory, 1000, NULL, &from), EBB_OK);
    CHECK_EQ(ebb_host_borrow(c.device, f.memory + HALF, 1000, NULL, &from), EBB_OK);
    CHECK_EQ(ebb_host_return(c.device, f.memory + HALF, 1000), EBB_OK);
    for (int i = 0; i < 3; i++) { /* another file, another part of the same one, and a heap */
        int file = i < 2 ? open(i ? f.name : other.name, O_RDONLY) : -1;
        void *there =
            mmap(f.memory + HALF, HALF, PROT_READ,
                 (i < 2 ? flags : MAP_PRIVATE | MAP_ANONYMOUS) | MAP_FIXED, file, i ? 0 : HALF);
        REQUIRE(there == f.memory + HALF);
        if (file >= 0)
            close(file);
        CHECK_EQ(ebb_host_borrow(c.device, f.memory + HALF, 1000, NULL, &from), EBB_INVALID);
    }
    CHECK_EQ(ebb_host_return(c.device, f.memory, 1000), EBB_OK);
    file_gone(&f);
    file_gone(&other);
    core_close(&c);
}

static void what_has_come_into_a_mapping_is_not_lent(void)
{
    what_has_come_into_a_mapping_is_not_lent_for_what_was_there(MAP_PRIVATE);
    what_has_come_into_a_mapping_is_not_lent_for_what_was_there(MAP_SHARED);
}

/* On overlayfs a file that is written becomes another one, by the same name and number. */
static void a_file_that_another_has_come_in_place_of_is_compared(void)
{
    char base[] = "/tmp/ebbtide_host.XXXXXX", name[64], options[200];
    enum { BYTES = 1 << 20 };
    /* In a name space of its own, which goes with the test. */
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
        SKIP_TEST("may not mount");
    REQUIRE(mkdtemp(base) && !mount("tmpfs", base, "tmpfs", 0, NULL));
    static const char *const parts[] = {"lower", "upper", "work", "all"};
    for (int i = 0; i < 4; i++) {
        snprintf(name, sizeof name, "%s/%s", base, parts[i]);
        REQUIRE(!mkdir(name, 0700));
    }
    unsigned char *text = pages(BYTES);
    snprintf(name, sizeof name, "%s/lower/file", base);
    int file = open(name, O_RDWR | O_CREAT, 0600);
    REQUIRE(file >= 0 && write(file, text, BYTES) == BYTES);
    close(file);
    snprintf(options, sizeof options, "lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work", base,
             base, base);
    snprintf(name, sizeof name, "%s/all", base);
    bool there = !mount("overlay", name, "overlay", 0, options);
    if (there) {
        core c;
        core_open(&c, 256 * MIB, 128 * MIB);
        const void *from;
        snprintf(name, sizeof name, "%s/all/file", base);
        file = open(name, O_RDONLY);
        unsigned char *memory = mmap(NULL, BYTES, PROT_READ, MAP_PRIVATE, file, 0);
        REQUIRE(memory != MAP_FAILED);
        close(file);
        CHECK_EQ(ebb_host_borrow(c.device, memory, BYTES, NULL, &from), EBB_OK);
        CHECK(from != memory && !memcmp(from, text, BYTES));
        CHECK_EQ(ebb_host_return(c.device, memory, BYTES), EBB_OK);
        file = open(name, O_WRONLY);
        REQUIRE(file >= 0 && pwrite(file, "other", 5, 7000) == 5);
        close(file);
        CHECK(!memcmp(memory, text, BYTES)); /* the program has the old one */
        CHECK_EQ(ebb_host_borrow(c.device, memory, BYTES, NULL, &from), EBB_INVALID);
        CHECK_EQ(times_mapped(name), 1);
        CHECK_EQ(ebb_host_borrow(c.device, memory, 4096, NULL, &from), EBB_OK);
        CHECK(!memcmp(from, text, 4096));
        CHECK_EQ(ebb_host_borrow(c.device, memory + 7000, 10, NULL, &from), EBB_INVALID);
        CHECK_EQ(ebb_host_return(c.device, memory, 4096), EBB_OK);
        CHECK_EQ(times_mapped(name), 1);
        if (c.sim)
            CHECK_EQ(registrations(), 0);
        munmap(memory, BYTES);
        core_close(&c);
    }
    munmap(text, BYTES);
    umount2(base, MNT_DETACH); /* and what is in it */
    rmdir(base);
    if (!there)
        SKIP_TEST("no overlayfs");
}

static void where_the_whole_file_cannot_be_had_a_part_is(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, 64 * MIB);
    enum { BYTES = 1 << 20 };
    kept_file f = mapped_file(BYTES, PROT_READ | PROT_WRITE, MAP_SHARED);
    unsigned char *file = f.memory;
    /* Somebody else has registered part of it. */
    MUST(c.driver.cuMemHostRegister(file + BYTES / 2, 8192, CU_MEMHOSTREGISTER_READ_ONLY));
    CHECK_EQ(borrow(&c, file + 5, 100000), EBB_OK);
    CHECK(travels(&c, v, file + 5, 100000));
    CHECK(!pinned(&c, file) && !pinned(&c, file + 100005));
    CHECK_EQ(borrow(&c, file + BYTES / 2 + 10, 8000), EBB_OK); /* pinned as it is */
    CHECK_EQ(borrow(&c, file + BYTES / 2 + 10, 10000), EBB_INVALID);
    CHECK_EQ(borrow(&c, file + BYTES / 2 - 10, 1000), EBB_DRIVER_FAILED);
    CHECK_EQ(ebb_host_return(c.device, file + 5, 100000), EBB_OK);
    CHECK_EQ(ebb_host_return(c.device, file + BYTES / 2 + 10, 8000), EBB_OK);
    CHECK(pinned(&c, file + BYTES / 2)); /* not ours to take */
    MUST(c.driver.cuMemHostUnregister(file + BYTES / 2));
    file_gone(&f);
    core_close(&c);
}

/* Only what is lent stays mapped: where the rest of a mapping was, other memory may be, our own too. */
static void our_own_may_lie_where_a_mapping_was(void)
{
    enum { BYTES = 2 << 20, HALF = BYTES / 2 };
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    kept_file f = mapped_file(BYTES, PROT_READ, MAP_PRIVATE);
    const void *from;
    CHECK_EQ(ebb_host_borrow(c.device, f.memory, 1000, NULL, &from), EBB_OK);
    munmap(f.memory + HALF, HALF);
    /* Until some lies there. */
    void *own[64];
    int count = 0;
    bool there = false;
    while (count < 64 && !there) {
        MUST(ebb_host_alloc(c.device, HALF, &own[count]));
        there = (unsigned char *)own[count] >= f.memory &&
                (unsigned char *)own[count] < f.memory + BYTES;
        count++;
    }
    if (!there)
        puts("none came to lie there");
    CHECK_EQ(ebb_host_free(c.device, f.memory), EBB_INVALID);
    MUST(ebb_host_return(c.device, f.memory, 1000));
    if (c.sim)
        CHECK_EQ(registrations(), (unsigned)count);
    while (count--)
        MUST(ebb_host_free(c.device, own[count]));
    if (c.sim)
        CHECK_EQ(registrations(), 0);
    munmap(f.memory, HALF);
    unlink(f.name);
    core_close(&c);
}

/* Weights are a part of a file: the rest of it is not pinned. */
static void of_a_file_no_more_than_is_asked_for(int flags)
{
    enum { BYTES = 1 << 20, LOW = 100000, HIGH = 300000, PAGE = 4096 };
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, 64 * MIB);
    kept_file f = mapped_file(BYTES, PROT_READ, flags);
    const ebb_span first = {f.memory + LOW, HIGH - LOW}, second = {f.memory + HIGH, 50000};
    const void *from, *other;
    ebb_span piece;
    CHECK_EQ(ebb_host_borrow(c.device, f.memory + LOW, 5000, &first, &from), EBB_OK);
    if (c.sim)
        CHECK_EQ(registrations(), 1);
    MUST(ebb_host_pinned(c.device, from, &piece));
    CHECK_EQ(piece.bytes, HIGH / PAGE * PAGE + PAGE - LOW / PAGE * PAGE);
    CHECK_EQ((uintptr_t)from - (uintptr_t)piece.start, LOW % PAGE);
    CHECK(travels(&c, v, from, 5000) && !memcmp(from, f.memory + LOW, 5000));
    CHECK_EQ(ebb_host_borrow(c.device, f.memory + HIGH - 900, 900, &first, &other), EBB_OK);
    CHECK_EQ((uintptr_t)other - (uintptr_t)from, HIGH - 900 - LOW);
    if (c.sim)
        CHECK_EQ(registrations(), 1);
    /* The next one begins on a page of the first: of a file that is mapped again that is no matter, and
       else it is refused. */
    ebb_status next = ebb_host_borrow(c.device, f.memory + HIGH + 100, 40000, &second, &other);
    CHECK_EQ(next, flags == MAP_PRIVATE ? EBB_OK : EBB_INVALID);
    if (next == EBB_OK) {
        CHECK(travels(&c, v, other, 40000) && !memcmp(other, f.memory + HIGH + 100, 40000));
        if (c.sim)
            CHECK_EQ(registrations(), 2);
        MUST(ebb_host_return(c.device, f.memory + HIGH + 100, 40000));
    }
    /* What is borrowed is pinned, wherever the span is. */
    CHECK_EQ(ebb_host_borrow(c.device, f.memory + 600000, 70000, &first, &other), EBB_OK);
    CHECK(travels(&c, v, other, 70000) && !memcmp(other, f.memory + 600000, 70000));
    MUST(ebb_host_return(c.device, f.memory + 600000, 70000));
    MUST(ebb_host_return(c.device, f.memory + LOW, 5000));
    MUST(ebb_host_return(c.device, f.memory + HIGH - 900, 900));
    if (c.sim)
        CHECK_EQ(registrations(), 0);
    CHECK_EQ(ebb_host_borrow(c.device, f.memory + 600000, 70000, &second, &other), EBB_OK);
    CHECK(travels(&c, v, other, 70000) && !memcmp(other, f.memory + 600000, 70000));
    MUST(ebb_host_return(c.device, f.memory + 600000, 70000));
    CHECK_EQ(ebb_host_pinned(c.device, f.memory + LOW, &piece), EBB_INVALID);
    file_gone(&f);
    core_close(&c);
}

static void of_a_file_no_more_is_pinned_than_weights_are_in(void)
{
    of_a_file_no_more_than_is_asked_for(MAP_PRIVATE);
    of_a_file_no_more_than_is_asked_for(MAP_SHARED);
}

/* Pinned pages cannot go: a file that is larger than what is free would take the system down with it. */
static void what_there_is_no_memory_for_is_not_pinned(void)
{
    const size_t bytes = 2 * (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    char name[] = "/tmp/ebbtide_host.XXXXXX";
    int file = mkstemp(name);
    REQUIRE(file >= 0);
    unlink(name);
    if (ftruncate(file, (off_t)bytes)) {
        close(file);
        core_close(&c);
        SKIP_TEST("the file system has no files that large");
    }
    const void *from;
    char *memory = mmap(NULL, bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, file, 0);
    REQUIRE(memory != MAP_FAILED);
    const ebb_span within = {memory + (1 << 20), 1 << 20};
    CHECK_EQ(ebb_host_borrow(c.device, memory + (1 << 20), 4096, NULL, &from), EBB_NO_HOST_MEMORY);
    if (c.sim)
        CHECK_EQ(registrations(), 0);
    CHECK_EQ(ebb_host_borrow(c.device, memory + (1 << 20), 4096, &within, &from), EBB_OK);
    MUST(ebb_host_return(c.device, memory + (1 << 20), 4096));
    munmap(memory, bytes);
    close(file);
    core_close(&c);
}

static void what_is_pinned_is_left_as_it_is(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    unsigned long before = c.sim ? ebbsim_calls("cuMemHostRegister") : 0;
    void *own;
    CHECK_EQ(borrow(&c, c.host + 5, 1000), EBB_OK);
    CHECK_EQ(borrow(&c, c.host + 5, 1000), EBB_OK);
    if (c.sim)
        CHECK_EQ(ebbsim_calls("cuMemHostRegister"), before);
    CHECK_EQ(borrow(&c, c.host + KIT_HOST - 10, 20), EBB_INVALID);
    CHECK_EQ(ebb_host_return(c.device, c.host + 5, 1000), EBB_OK);
    CHECK_EQ(ebb_host_return(c.device, c.host + 5, 1000), EBB_OK);
    CHECK_EQ(ebb_host_return(c.device, c.host + 5, 1000), EBB_INVALID);
    /* Our own, too; and it is not freed while it is borrowed. */
    MUST(ebb_host_alloc(c.device, 3 << 20, &own));
    CHECK_EQ(borrow(&c, (char *)own + 100, 1 << 20), EBB_OK);
    CHECK_EQ(ebb_host_free(c.device, own), EBB_BUSY);
    CHECK_EQ(ebb_host_return(c.device, (char *)own + 100, 1 << 20), EBB_OK);
    CHECK(pinned(&c, own));
    CHECK_EQ(ebb_host_free(c.device, own), EBB_OK);
    core_close(&c);
}

static void every_call_fails_once(void)
{
    NEEDS_SIM("calls must fail");
    enum { BYTES = 1 << 20 };
    unsigned long fired = 1, n;
    for (n = 1; fired && n < 500; n++) {
        core c;
        int before = harness_failures;
        core_open(&c, 256 * MIB, 128 * MIB);
        kept_file shared = mapped_file(BYTES, PROT_READ, MAP_SHARED);
        kept_file private = mapped_file(BYTES, PROT_READ, MAP_PRIVATE);
        unsigned char *heap = pages(BYTES);
        const struct {
            unsigned char *memory;
            uint64_t bytes;
        } asked[] = {{shared.memory + 100, 1000},
                     {shared.memory + 5000, 1000},
                     {private.memory + 100, 1000},
                     {private.memory + 5000, 1000},
                     {heap, BYTES},
                     {(unsigned char *)c.host, 10}};
        enum { ASKED = sizeof asked / sizeof *asked };
        bool there[ASKED];
        const void *from;
        void *own = NULL;
        MUST(ebbsim_fail(NULL, n, 999));
        if (ebb_host_alloc(c.device, BYTES, &own) != EBB_OK)
            own = NULL;
        for (int i = 0; i < ASKED; i++)
            there[i] = !ebb_host_borrow(c.device, asked[i].memory, asked[i].bytes, NULL, &from);
        for (int i = 0; i < ASKED; i++)
            there[i] = there[i] && ebb_host_return(c.device, asked[i].memory, asked[i].bytes);
        if (own && ebb_host_free(c.device, own) == EBB_OK)
            own = NULL;
        fired = ebbsim_failures();
        ebbsim_fail_clear();
        /* What was not taken back is still there, and is now. */
        for (int i = 0; i < ASKED; i++)
            CHECK(!there[i] ||
                  ebb_host_return(c.device, asked[i].memory, asked[i].bytes) == EBB_OK);
        CHECK(!own || ebb_host_free(c.device, own) == EBB_OK);
        CHECK_EQ(registrations(), 0);
        CHECK_EQ(times_mapped(private.name), 1);
        file_gone(&shared);
        file_gone(&private);
        munmap(heap, BYTES);
        core_close(&c);
        if (harness_failures != before)
            FAIL("that was with call %lu failing", n);
    }
    CHECK(n > 20 && n < 500);
}

typedef struct borrower {
    core *c;
    unsigned char *file;
    unsigned seed;
    CUstream stream;
    int wrong;
} borrower;

static void *borrow_and_return(void *data)
{
    borrower *b = data;
    MUST(b->c->driver.cuCtxSetCurrent(b->c->context));
    for (int i = 0; i < 200; i++) {
        /* All at once come and go: the mapping is pinned and unpinned again and again. */
        unsigned char *at = b->file + rand_r(&b->seed) % 1000;
        const void *from = NULL;
        b->wrong += ebb_host_borrow(b->c->device, at, 5000, NULL, &from) != EBB_OK;
        b->wrong += !pinned(b->c, from);
        void *own = NULL;
        if (i % 8 == 0)
            b->wrong += ebb_host_alloc(b->c->device, 10000, &own) != EBB_OK;
        /* The driver waits for that when it unregisters, and others come meanwhile. */
        b->wrong += rig_kernel("work", 0, 0, 0, MILLISECOND / 2, b->stream) != 0;
        b->wrong += ebb_host_return(b->c->device, at, 5000) != EBB_OK;
        if (own)
            b->wrong += ebb_host_free(b->c->device, own) != EBB_OK;
    }
    return NULL;
}

static void four_threads_borrow_from_one_file(int flags)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    kept_file f = mapped_file(65536, PROT_READ, flags);
    borrower all[4];
    pthread_t threads[4];
    for (unsigned i = 0; i < 4; i++) {
        all[i] = (borrower){.c = &c, .file = f.memory, .seed = i + 1, .stream = core_stream(&c)};
        MUST(pthread_create(&threads[i], NULL, borrow_and_return, &all[i]));
    }
    for (unsigned i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(all[i].wrong, 0);
    }
    CHECK(!pinned(&c, f.memory));
    CHECK_EQ(times_mapped(f.name), 1);
    file_gone(&f);
    core_close(&c);
}

static void four_threads_borrow_from_a_shared_file(void)
{
    four_threads_borrow_from_one_file(MAP_SHARED);
}

static void four_threads_borrow_from_a_private_file(void)
{
    four_threads_borrow_from_one_file(MAP_PRIVATE);
}

int main(void)
{
    RUN(our_own_is_pinned_zero_and_given_back);
    RUN(nonsense_is_refused);
    RUN(of_a_tensor_its_own_bytes_are_pinned);
    RUN(a_read_only_file_is_pinned_whole);
    RUN(a_privately_mapped_file_is_pinned_whole);
    RUN(a_shared_file_is_pinned_whole);
    RUN(of_a_private_mapping_only_what_is_the_files_is_lent);
    RUN(what_has_come_into_a_mapping_is_not_lent);
    RUN(a_file_that_another_has_come_in_place_of_is_compared);
    RUN(where_the_whole_file_cannot_be_had_a_part_is);
    RUN(our_own_may_lie_where_a_mapping_was);
    RUN(of_a_file_no_more_is_pinned_than_weights_are_in);
    RUN(what_there_is_no_memory_for_is_not_pinned);
    RUN(what_is_pinned_is_left_as_it_is);
    RUN(every_call_fails_once);
    RUN(four_threads_borrow_from_a_shared_file);
    RUN(four_threads_borrow_from_a_private_file);
    return REPORT();
}
