/* What the sharper tests add to the kit: several cards, kernels, victims by name, and a census. */
#ifndef EBB_CORE_RIG_H
#define EBB_CORE_RIG_H

#include "kit.h"

enum { MILLISECOND = 1000000 };

/* Everything that should be zero when all is closed, added up. */
__attribute__((unused)) static unsigned long long rig_left(void)
{
    ebbsim_census n = {.size = sizeof n};
    ebbsim_census_take(&n);
    return n.reservations + n.handles + n.frames + n.mappings + n.allocations + n.host_blocks +
           n.streams + n.events + n.contexts + n.graphs + n.captures;
}

/* Start over with `cards` simulated cards. */
__attribute__((unused)) static void rig_cards(int cards, uint64_t memory, int peer)
{
    ebbsim_reset();
    ebbsim_on_hazard(EBBSIM_PRINT);
    for (int i = 0; i < cards; i++) {
        ebbsim_card card;
        ebbsim_card_default(&card, memory);
        card.context = 0;
        card.peer = peer;
        MUST(ebbsim_card_add(&card, NULL));
    }
}

__attribute__((unused)) static ebb_status rig_device(int index, uint64_t limit, ebb_device *device,
                                                     char *why, size_t length)
{
    ebb_device_options options = {
        .size = sizeof options, .library = SIM_LIBRARY, .index = index, .limit = limit};
    return ebb_device_open(&options, device, why, length);
}

/* A kernel of `nanoseconds` that touches a range. */
__attribute__((unused)) static int rig_kernel(const char *name, uint64_t address, uint64_t bytes,
                                              int access, uint64_t nanoseconds, CUstream stream)
{
    ebbsim_range range = {address, bytes, access};
    ebbsim_work work = {.size = sizeof work,
                        .name = name,
                        .ranges = &range,
                        .range_count = bytes ? 1 : 0,
                        .nanoseconds = nanoseconds};
    return ebbsim_launch(&work, stream);
}

/* Make a page resident, let a kernel read it for a while on a stream, and unpin it. */
__attribute__((unused)) static void rig_busy(core *c, ebb_vbar vbar, uint64_t offset,
                                             uint64_t bytes, uint64_t nanoseconds, CUstream stream)
{
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(vbar, offset, bytes, stream, &signature), EBB_OK);
    CHECK_EQ(rig_kernel("reader", core_stats(vbar).address + offset, bytes, EBBSIM_READ,
                        nanoseconds, stream),
             0);
    CHECK_EQ(ebb_vbar_unpin(vbar, offset, bytes, stream), EBB_OK);
    (void)c;
}

/* Fault a range and unpin it again, nothing queued. What fault said. */
__attribute__((unused)) static ebb_status rig_touch(ebb_vbar vbar, uint64_t offset, uint64_t bytes,
                                                    CUstream stream)
{
    uint64_t signature;
    ebb_status status = ebb_vbar_fault(vbar, offset, bytes, stream, &signature);
    if (status == EBB_OK)
        CHECK_EQ(ebb_vbar_unpin(vbar, offset, bytes, stream), EBB_OK);
    return status;
}

/* A page's flags. */
__attribute__((unused)) static int rig_page(ebb_vbar vbar, uint64_t page)
{
    uint8_t flags[64] = {0};
    REQUIRE(page < sizeof flags);
    MUST(ebb_vbar_residency(vbar, flags, (size_t)page + 1));
    return flags[page];
}

__attribute__((unused)) static ebb_vbar rig_rising(core *c, uint64_t bytes)
{
    ebb_vbar_options options = {.size = sizeof options, .bytes = bytes, .rise = 1};
    ebb_vbar vbar = {0};
    MUST(ebb_vbar_create(c->device, &options, &vbar));
    return vbar;
}

#endif
