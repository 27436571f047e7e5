/*
 * Memory pools: what is handed out again, to whom, and when it goes back to the card.
 */
#include "kit.h"

static cudaMemPool_t pool;
static cudaStream_t one, two;

static uint64_t attribute(int which)
{
    uint64_t value = 0;
    OK(cudaMemPoolGetAttribute(pool, which, &value));
    return value;
}

enum { RESERVED = CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, USED = CU_MEMPOOL_ATTR_USED_MEM_CURRENT };

static void keep(uint64_t bytes)
{
    OK(cudaMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &bytes));
}

static void start_empty(void)
{
    OK(cudaDeviceSynchronize());
    OK(cudaMemPoolTrimTo(pool, 0));
    CHECK_EQ(attribute(RESERVED), 0);
    ebbsim_hazard_clear();
}

static void use_and_reserve_are_counted(void)
{
    void *a = NULL, *b = NULL;
    start_empty();
    keep(UINT64_MAX);
    OK(cudaMallocAsync(&a, MIB, one));
    OK(cudaMallocAsync(&b, MIB, one));
    CHECK_EQ(attribute(USED), 2 * MIB);
    CHECK_EQ(attribute(RESERVED), 32 * MIB);
    OK(cudaFreeAsync(a, one));
    OK(cudaFreeAsync(b, one));
    CHECK_EQ(attribute(USED), 0);
    CHECK_EQ(attribute(CU_MEMPOOL_ATTR_USED_MEM_HIGH), 2 * MIB);
    OK(cudaStreamSynchronize(one));
    CHECK_EQ(attribute(RESERVED), 32 * MIB);
    OK(cudaMemPoolTrimTo(pool, 0));
    CHECK_EQ(attribute(RESERVED), 0);
    CHECK_EQ(cudaFreeAsync(a, one), cudaErrorInvalidValue);
    cudaGetLastError();
    OK(cudaFreeAsync(NULL, one));
}

static void the_same_stream_gets_it_back_at_once(void)
{
    void *a = NULL, *b = NULL;
    start_empty();
    OK(cudaMallocAsync(&a, 20 * MIB, one));
    busy(one, 1000000);
    OK(cudaFreeAsync(a, one));
    OK(cudaMallocAsync(&b, 20 * MIB, one));
    CHECK(a == b);
    OK(cudaFreeAsync(b, one));
}

static void another_stream_gets_other_memory_until_it_is_ordered(void)
{
    void *a = NULL, *b = NULL, *c = NULL;
    cudaEvent_t event;
    start_empty();
    OK(cudaEventCreateWithFlags(&event, CU_EVENT_DISABLE_TIMING));
    OK(cudaMallocAsync(&a, 20 * MIB, one));
    busy(one, 1000000000);
    OK(cudaFreeAsync(a, one));
    OK(cudaMallocAsync(&b, 20 * MIB, two));
    CHECK(a != b);
    OK(cudaEventRecord(event, one));
    OK(cudaStreamWaitEvent(two, event, 0));
    OK(cudaMallocAsync(&c, 20 * MIB, two));
    CHECK(c == a);
    CHECK_EQ(touch(two, c, 20 * MIB, EBBSIM_WRITE), 0);
    OK(cudaFreeAsync(b, two));
    OK(cudaFreeAsync(c, two));
    OK(cudaDeviceSynchronize());
    OK(cudaEventDestroy(event));
    CHECK_EQ(ebbsim_hazards(), 0);
}

/* What came first had its effect first, although nobody waited in between. */
static void memory_that_changes_hands_keeps_its_order(void)
{
    unsigned char *a = NULL, *b = NULL, out[16];
    start_empty();
    OK(cudaMallocAsync((void **)&a, 20 * MIB, one));
    OK(cudaMemsetAsync(a, 1, 20 * MIB, one));
    OK(cudaFreeAsync(a, one));
    ebbsim_pass(1000000000); /* by the clock it is over, and the pool may look at the clock */
    OK(cudaMallocAsync((void **)&b, 20 * MIB, two));
    CHECK(a == b);
    OK(cudaMemsetAsync(b, 2, 20 * MIB, two));
    OK(cudaMemcpyAsync(out, b, sizeof out, cudaMemcpyDeviceToHost, two));
    CHECK_EQ(out[0], 2);
    OK(cudaFreeAsync(b, two));
    OK(cudaDeviceSynchronize());
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void use_after_the_free_is_a_hazard(void)
{
    void *a = NULL;
    start_empty();
    OK(cudaMallocAsync(&a, MIB, one));
    CHECK_EQ(touch(two, a, MIB, EBBSIM_WRITE), 0);
    OK(cudaFreeAsync(a, one));
    CHECK_EQ(ebbsim_hazards(), 1);
    OK(cudaDeviceSynchronize());
    ebbsim_hazard_clear();
}

static void a_wait_gives_back_what_is_beyond_the_threshold(void)
{
    void *a = NULL;
    size_t before = 0, after = 0, total = 0;
    start_empty();
    keep(0);
    OK(cudaMemGetInfo(&before, &total));
    OK(cudaMallocAsync(&a, 40 * MIB, one));
    CHECK_EQ(attribute(RESERVED), 64 * MIB);
    OK(cudaFreeAsync(a, one));
    CHECK_EQ(attribute(RESERVED), 64 * MIB);
    OK(cudaStreamSynchronize(one));
    CHECK_EQ(attribute(RESERVED), 0);
    OK(cudaMemGetInfo(&after, &total));
    CHECK_EQ(before, after);
    keep(UINT64_MAX);
}

static void short_of_memory_a_pool_waits_for_what_was_freed(void)
{
    void *a = NULL, *b = NULL;
    start_empty();
    OK(cudaMallocAsync(&a, 120 * MIB, one));
    busy(one, 1000000000);
    OK(cudaFreeAsync(a, one));
    OK(cudaMallocAsync(&b, 130 * MIB, two)); /* larger: it does not fit into what comes free */
    CHECK_EQ(cudaMallocAsync(&a, 250 * MIB, two), cudaErrorMemoryAllocation);
    CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
    OK(cudaFreeAsync(b, two));
    OK(cudaDeviceSynchronize());
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void the_synchronous_free_takes_it_too(void)
{
    void *a = NULL;
    start_empty();
    OK(cudaMallocAsync(&a, MIB, one));
    CHECK_EQ(touch(one, a, MIB, EBBSIM_WRITE), 0);
    OK(cudaFree(a)); /* waits for nothing */
    OK(cudaDeviceSynchronize());
    CHECK_EQ(attribute(USED), 0);
    CHECK_EQ(ebbsim_hazards(), 0);
}

/* What a pool grows by lies behind what it had left over, and goes back without the rest. */
static void an_allocation_lies_in_what_was_there_and_what_was_added(void)
{
    char *a = NULL, *b = NULL, *c = NULL, byte = 0;
    start_empty();
    keep(UINT64_MAX);
    OK(cudaMallocAsync((void **)&a, 31 * MIB, one));
    OK(cudaMallocAsync((void **)&b, 33 * MIB, one));
    CHECK_EQ(attribute(RESERVED), 64 * MIB);
    CHECK(b == a + 31 * MIB);
    OK(cudaMemsetAsync(b, 5, 33 * MIB, one));
    OK(cudaMemcpyAsync(a, b, 31 * MIB, cudaMemcpyDeviceToDevice, one));
    OK(cudaMemcpyAsync(&byte, b + 33 * MIB - 1, 1, cudaMemcpyDeviceToHost, one));
    OK(cudaStreamSynchronize(one));
    CHECK_EQ(byte, 5);
    CHECK(b[0] == 5 && b[MIB] == 5 && a[31 * MIB - 1] == 5);
    CHECK_EQ(cudaMemsetAsync(b, 5, 34 * MIB, one), cudaErrorInvalidValue);
    cudaGetLastError();
    OK(cudaFreeAsync(b, one));
    OK(cudaMallocAsync((void **)&c, 100 * MIB, one)); /* takes up where the free memory is */
    CHECK_EQ(attribute(RESERVED), 160 * MIB);
    OK(cudaMemsetAsync(c, 6, 100 * MIB, one));
    OK(cudaFreeAsync(c, one));
    OK(cudaStreamSynchronize(one));
    OK(cudaMemPoolTrimTo(pool, 0));
    CHECK_EQ(attribute(RESERVED), 32 * MIB);
    CHECK_EQ(a[31 * MIB - 1], 5);
    OK(cudaFreeAsync(a, one));
    CHECK_EQ(ebbsim_hazards(), 0);
    start_empty();
}

static void a_pool_of_ones_own(void)
{
    cudaMemPool_t own = NULL, current = NULL;
    cudaMemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                   .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    cudaMemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 1},
                                CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    void *a = NULL;
    int flags = 0;
    OK(cudaMemPoolCreate(&own, &properties));
    OK(cudaMallocFromPoolAsync(&a, MIB, own, one));
    OK(cudaMemPoolSetAccess(own, &access, 1));
    OK(cudaMemPoolGetAccess(&flags, own, &access.location));
    CHECK_EQ(flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    OK(cudaDeviceSetMemPool(0, own));
    OK(cudaDeviceGetMemPool(&current, 0));
    CHECK(current == own);
    OK(cudaMemPoolDestroy(own)); /* what is in use stays */
    CHECK_EQ(touch(one, a, MIB, EBBSIM_WRITE), 0);
    OK(cudaFreeAsync(a, one));
    OK(cudaDeviceGetMemPool(&current, 0));
    CHECK(current == pool);
    CHECK_EQ(cudaMemPoolDestroy(pool), cudaErrorInvalidValue);
    cudaGetLastError();
    OK(cudaDeviceSynchronize());
}

int main(void)
{
    OK(cudaSetDevice(0));
    OK(cudaDeviceGetDefaultMemPool(&pool, 0));
    OK(cudaStreamCreateWithFlags(&one, CU_STREAM_NON_BLOCKING));
    OK(cudaStreamCreateWithFlags(&two, CU_STREAM_NON_BLOCKING));
    RUN(use_and_reserve_are_counted);
    RUN(the_same_stream_gets_it_back_at_once);
    RUN(another_stream_gets_other_memory_until_it_is_ordered);
    RUN(memory_that_changes_hands_keeps_its_order);
    RUN(use_after_the_free_is_a_hazard);
    RUN(a_wait_gives_back_what_is_beyond_the_threshold);
    RUN(short_of_memory_a_pool_waits_for_what_was_freed);
    RUN(the_synchronous_free_takes_it_too);
    RUN(an_allocation_lies_in_what_was_there_and_what_was_added);
    RUN(a_pool_of_ones_own);
    const char *wrong = ebbsim_check();
    CHECK_STR(wrong == NULL ? "" : wrong, "");
    OK(cudaDeviceReset());
    ebbsim_reset();
    return REPORT();
}
