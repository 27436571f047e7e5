/*
 * Every interleaving of an eviction with a hit, and with an unpin, that one processor can make: these
 * two take no lock, so the eviction can be made in the middle of them, after any one instruction, by
 * the handler of a single-step trap.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <ucontext.h>

#include "rig.h"

#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define CANNOT_STEP
#endif
#endif
#else
#define CANNOT_STEP
#endif

static ebb_vbar vbar, other;
static long countdown; /* instructions of ours until the eviction; below 0: it is done */
static uint64_t freed;

/* The core is linked into this program: its instructions are between these. */
extern const char __executable_start, etext;

#ifndef CANNOT_STEP
enum { TRAP_FLAG = 0x100 };

static void step(int number, siginfo_t *info, void *data)
{
    (void)number, (void)info;
    ucontext_t *context = data;
    greg_t *registers = context->uc_mcontext.gregs;
    uintptr_t at = (uintptr_t)registers[REG_RIP];
    /* In a library somebody may hold a lock; there nothing of ours can go wrong either. */
    if (at < (uintptr_t)&__executable_start || at >= (uintptr_t)&etext || --countdown >= 0)
        return;
    registers[REG_EFL] &= ~TRAP_FLAG;
    CHECK_EQ(ebb_vbar_free_memory(vbar, LARGE, &freed), EBB_OK);
}

#define STEP_BEGIN()                                                                               \
    __asm__ volatile("lea -128(%%rsp), %%rsp\n pushfq\n orq $0x100, (%%rsp)\n popfq\n"             \
                     "lea 128(%%rsp), %%rsp" ::                                                    \
                         : "memory", "cc")
#define STEP_END()                                                                                 \
    __asm__ volatile("lea -128(%%rsp), %%rsp\n pushfq\n andq $~0x100, (%%rsp)\n popfq\n"           \
                     "lea 128(%%rsp), %%rsp" ::                                                    \
                         : "memory", "cc")
#else
static void step(int number, siginfo_t *info, void *data)
{
    (void)number, (void)info, (void)data, (void)etext, (void)__executable_start;
}
#define STEP_BEGIN() (void)0
#define STEP_END() (void)0
#endif

/* An eviction after each instruction of a hit, or of an unpin, until there are no more. */
static void after_each_instruction(bool of_unpin)
{
    core c;
    core_open(&c, 512 * MIB, 4 * LARGE);
    CUstream s = core_lasting(&c);
    vbar = core_vbar(&c, LARGE);
    other = core_vbar(&c, LARGE);
    struct sigaction action = {.sa_sigaction = step, .sa_flags = SA_SIGINFO};
    sigaction(SIGTRAP, &action, NULL);
    long n = 0;
    int went = 0;
    uint64_t address = core_stats(vbar).address, before, signature;
    for (bool more = true; more && n < 5000; n++) {
        /* A page whose ticket is of an epoch that is over, on a stream that goes on. */
        rig_busy(&c, vbar, 0, LARGE, 1000, s);
        rig_busy(&c, other, 0, LARGE, 1000, s);
        CHECK_EQ(ebb_vbar_free_memory(other, LARGE, NULL), EBB_OK);
        CHECK_EQ(ebb_vbar_prioritize(other), EBB_OK);
        CHECK_EQ(ebb_vbar_fault(vbar, 0, LARGE, s, &before), EBB_OK);
        if (!of_unpin)
            CHECK_EQ(ebb_vbar_unpin(vbar, 0, LARGE, s), EBB_OK);

        countdown = n;
        freed = 0;
        ebb_status status = EBB_OK;
        if (of_unpin) {
            CHECK_EQ(rig_kernel("use", address, LARGE, EBBSIM_READ, MILLISECOND, s), 0);
            STEP_BEGIN();
            status = ebb_vbar_unpin(vbar, 0, LARGE, s);
            STEP_END();
            CHECK_EQ(status, EBB_OK);
        } else {
            STEP_BEGIN();
            status = ebb_vbar_fault(vbar, 0, LARGE, s, &signature);
            STEP_END();
            if (status == EBB_OK) {
                CHECK_EQ(signature == before, freed == 0);
                CHECK_EQ(rig_page(vbar, 0), EBB_PAGE_RESIDENT | EBB_PAGE_PINNED);
                CHECK_EQ(rig_kernel("use", address, LARGE, EBBSIM_READ, 1000, s), 0);
                CHECK_EQ(ebb_vbar_unpin(vbar, 0, LARGE, s), EBB_OK);
            } else {
                CHECK_EQ(status, EBB_OFFLOADED); /* the eviction lowered the watermark */
            }
        }
        more = countdown < 0;
        went += freed > 0;
        CHECK_EQ(core_stats(vbar).pinned, 0);
        CHECK_EQ(ebb_vbar_prioritize(vbar), EBB_OK);
        core_check(&c);
        if (harness_failures > 5)
            break;
    }
    CHECK(n > 30 && n < 5000);
    CHECK(went > 0);
    printf("       %ld instructions, %d evictions\n", n, went);
    core_close(&c);
}

static void an_eviction_after_any_instruction_of_a_hit(void)
{
    after_each_instruction(false);
}

static void an_eviction_after_any_instruction_of_an_unpin(void)
{
    after_each_instruction(true);
}

int main(void)
{
#ifdef CANNOT_STEP
    SKIP("single steps are for plain x86-64 builds");
#endif
    if (getenv("EBBTIDE_TEST_GPU"))
        SKIP("hazards are the simulated GPU's to see");
    RUN(an_eviction_after_any_instruction_of_a_hit);
    RUN(an_eviction_after_any_instruction_of_an_unpin);
    return REPORT();
}
