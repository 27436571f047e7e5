/*
 * Bytes to driver calls on the simulated GPU, with arguments that are right, wrong and absurd. Nothing
 * may crash, and after every call its books must be in order.
 *
 * What a program must not do on a GPU either is left out: host memory that is named is really there,
 * and nobody waits for a word of memory that nobody will write.
 */
#include "fuzz.h"

#include <string.h>
#include <unistd.h>

/* As in the real driver's library. */
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                             CUdriverProcAddressQueryResult *status);

static unsigned char pageable[16 << 10];
static unsigned char spare[2][8 << 10]; /* to be registered */
static _Alignas(4096) uint32_t words[1024];

/* ---- reading the input -------------------------------------------------------------------------- */

uint8_t fuzz_byte(fuzz *f)
{
    return f->at < f->end ? *f->at++ : 0;
}

uint64_t fuzz_number(fuzz *f)
{
    uint64_t number = 0;
    for (int i = 0; i < 8; i++) {
        number = number << 8 | fuzz_byte(f);
    }
    return number;
}

/* Mostly sensible: some bytes, some pages; sometimes nothing, or more than there can be. */
uint64_t fuzz_size(fuzz *f)
{
    uint8_t kind = fuzz_byte(f);
    if (kind < 100) {
        return 1 + (uint64_t)fuzz_byte(f) * 16;
    }
    if (kind < 220) {
        return (uint64_t)(1 + kind % 4) * PAGE;
    }
    if (kind < 235) {
        return (uint64_t)1 << (kind % 36);
    }
    if (kind < 250) {
        return UINT64_MAX - fuzz_byte(f) * (uint64_t)PAGE;
    }
    return kind == 255 ? 0 : fuzz_number(f) | (uint64_t)1 << 47;
}

/* ---- handles and addresses ------------------------------------------------------------------------ */

void fuzz_keep(pool *p, uint64_t value)
{
    p->values[p->next++ % POOL] = value;
}

/* One of those got so far; 0 if there are none. */
static uint64_t kept(const pool *p, uint8_t which)
{
    unsigned count = p->next < POOL ? p->next : POOL;
    return count == 0 ? 0 : p->values[which % count];
}

/* One that was got once, and may be gone; or anything. */
uint64_t fuzz_pick(fuzz *f, const pool *p)
{
    uint8_t which = fuzz_byte(f);
    if (which < 240) {
        return kept(p, which);
    }
    if (which < 250) {
        return kept(p, which) ^ (uint64_t)1 << (fuzz_byte(f) % 64);
    }
    return which < 253 ? which - 250u : fuzz_number(f);
}

CUstream fuzz_stream(fuzz *f)
{
    return (CUstream)(uintptr_t)fuzz_pick(f, &f->streams);
}

CUdeviceptr fuzz_address(fuzz *f)
{
    uint8_t which = fuzz_byte(f);
    if (which < 140) {
        return kept(&f->spaces, which) + (CUdeviceptr)(fuzz_byte(f) % 8) * PAGE;
    }
    if (which < 180) {
        return kept(&f->spaces, which) + (CUdeviceptr)(fuzz_byte(f) % 8) * PAGE +
               fuzz_byte(f) * (CUdeviceptr)37;
    }
    if (which < 210) {
        return kept(&f->allocations, which) + fuzz_byte(f) * (CUdeviceptr)16;
    }
    if (which < 240) {
        return kept(&f->blocks, which) + fuzz_byte(f) * (CUdeviceptr)16;
    }
    return which < 250 ? (CUdeviceptr)(uintptr_t)spare[which % 2] + fuzz_byte(f) : fuzz_number(f);
}

/* Host memory for a copy: what the driver knows, of any size, or a buffer, with a size that fits. */
void *fuzz_host(fuzz *f, uint64_t *size)
{
    CUdeviceptr address = fuzz_address(f);
    unsigned type = 0;
    *size = fuzz_size(f);
    if (f->cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == 0) {
        return (void *)(uintptr_t)address;
    }
    *size %= sizeof pageable;
    return pageable;
}

/* A place for an answer, or none. */
void *fuzz_out(fuzz *f)
{
    memset(f->out, 0, sizeof f->out);
    return fuzz_byte(f) == 255 ? NULL : f->out;
}

uint64_t fuzz_got(const fuzz *f)
{
    uint64_t value;
    memcpy(&value, f->out, sizeof value);
    return value;
}

/* Whatever waits for a word shall have it. Before every call that may wait. */
void fuzz_release_words(void)
{
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        __atomic_store_n(&words[i], 0x7FFFFFFF, __ATOMIC_RELEASE);
    }
}

void *fuzz_spare(fuzz *f, uint64_t *size)
{
    size_t offset = (size_t)fuzz_byte(f) * 16, room = sizeof spare[0] - offset;
    uint64_t wanted = fuzz_size(f);
    *size = wanted > (uint64_t)1 << 46 || wanted <= room ? wanted : room;
    return spare[fuzz_byte(f) % 2] + offset;
}

/* A word to be waited for, and a value that will come: the four kinds of waiting differ. */
uint32_t *fuzz_word(fuzz *f, unsigned flags, uint32_t *value)
{
    uint32_t *word = &words[fuzz_byte(f)];
    *value = flags == 1 ? 0x7FFFFFFF : 1u + fuzz_byte(f);
    if (fuzz_byte(f) < 128) {
        __atomic_store_n(word, 0, __ATOMIC_RELEASE);
    }
    return word;
}

/* ---- one input ------------------------------------------------------------------------------------ */

static void fill_table(ebb__driver *cu)
{
    static const struct {
        const char *name;
        int since;
        size_t offset;
    } entries[] = {
#define ENTRY(need, name, since, parameters) {#name, since, offsetof(ebb__driver, name)},
        EBB__DRIVER_FUNCTIONS(ENTRY)
#undef ENTRY
    };
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        CUdriverProcAddressQueryResult status;
        void *function = NULL;
        if (cuGetProcAddress_v2(entries[i].name, &function, entries[i].since, 0, &status) != 0 ||
            function == NULL) {
            abort();
        }
        memcpy((char *)cu + entries[i].offset, &function, sizeof function);
    }
}

/* Some of everything, because few inputs would get that far: a space with two pages of memory, one
   of them at two addresses and for both devices; streams, events, pinned memory. */
static void furnish(fuzz *f)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes =
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemAccessDesc access[2] = {
        {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
        {{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    CUdeviceptr space = 0, allocation = 0;
    void *block = NULL;
    f->cu.cuMemAddressReserve(&space, 8 * (size_t)PAGE, 0, 0, 0);
    fuzz_keep(&f->spaces, space);
    for (unsigned i = 0; i < 2; i++) {
        CUmemGenericAllocationHandle frame = 0;
        CUstream stream = NULL;
        CUevent event = NULL;
        f->cu.cuMemCreate(&frame, PAGE, &properties, 0);
        f->cu.cuMemMap(space + i * (CUdeviceptr)PAGE, PAGE, 0, frame, 0);
        f->cu.cuMemMap(space + (3 - i) * (CUdeviceptr)PAGE, PAGE, 0, frame, 0);
        f->cu.cuStreamCreate(&stream, i);
        f->cu.cuEventCreate(&event, 0);
        fuzz_keep(&f->handles, frame);
        fuzz_keep(&f->streams, (uint64_t)(uintptr_t)stream);
        fuzz_keep(&f->events, (uint64_t)(uintptr_t)event);
    }
    f->cu.cuMemSetAccess(space, 3 * (size_t)PAGE, access, 1);
    f->cu.cuMemSetAccess(space, PAGE, access + 1, 1);
    f->cu.cuMemAlloc(&allocation, 8192);
    fuzz_keep(&f->allocations, allocation);
    f->cu.cuMemHostAlloc(&block, 8192, 0);
    fuzz_keep(&f->blocks, (uint64_t)(uintptr_t)block);
}

static void start(fuzz *f)
{
    ebbsim_reset();
    ebbsim_on_hazard(EBBSIM_QUIET);
    ebbsim_card card;
    ebbsim_card_default(&card, 32u << 20);
    uint8_t kind = fuzz_byte(f);
    card.peer = (kind & 1) == 0;
    card.vmm = (kind & 30) != 30;
    ebbsim_card_add(&card, NULL);
    ebbsim_card_add(&card, NULL);
    ebbsim_clock_virtual(1);
    fill_table(&f->cu);
    fuzz_release_words();
    if (kind < 250) { /* else even that is left to chance */
        f->cu.cuInit(0);
        for (int i = 1; i >= 0; i--) {
            CUcontext context = NULL;
            f->cu.cuDevicePrimaryCtxRetain(&context, i);
            f->cu.cuCtxSetCurrent(context);
            fuzz_keep(&f->contexts, (uint64_t)(uintptr_t)context);
        }
        f->cu.cuMemHostRegister(words, sizeof words, 0);
    }
    if (kind < 200) {
        furnish(f);
    }
    fuzz_keep(&f->streams, 0);
    fuzz_keep(&f->streams, 1);
    fuzz_keep(&f->streams, 2);
}

static void check(void)
{
    const char *wrong = ebbsim_check();
    if (wrong != NULL) {
        fprintf(stderr, "%s\n", wrong);
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static fuzz f;
    memset(&f, 0, sizeof f);
    f.at = data;
    f.end = data + size;
    start(&f);
    for (int calls = 0; f.at < f.end && calls < 400; calls++) {
        fuzz_call(&f);
        check();
    }
    fuzz_release_words();
    for (unsigned i = 0; i < POOL; i++) {
        if (f.files[i] > 0) {
            close(f.files[i]);
        }
    }
    ebbsim_reset();
    check();
    return 0;
}
