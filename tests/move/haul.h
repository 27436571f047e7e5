/* What tests of movers have in common: a device, a VBAR, pinned weights that can be told apart, a mover. */
#ifndef EBB_HAUL_H
#define EBB_HAUL_H

#include "core/rig.h"
#include "internal.h"
#include "move.h"

typedef struct haul {
    core c;
    ebb_mover *mover;
    ebb_vbar vbar;
    unsigned char *host; /* pinned, as large as the VBAR, its contents haul_value() */
    CUstream compute;
} haul;

/* What the host memory holds at an offset: one byte for each 512. */
static inline int haul_value(uint64_t offset)
{
    return (int)((offset / 512 * 37 + offset / 512 / 251) % 250 + 1);
}

__attribute__((unused)) static void haul_open(haul *h, uint64_t limit, uint64_t ring,
                                              uint64_t weights)
{
    *h = (haul){0};
    core_open(&h->c, 1024 * MIB, limit);
    rig_clock();
    h->compute = core_lasting(&h->c);
    h->vbar = core_vbar(&h->c, weights);
    void *host;
    MUST(ebb_host_alloc(h->c.device, weights, &host));
    h->host = host;
    for (uint64_t at = 0; at < weights; at += 512)
        memset(h->host + at, haul_value(at), 512);
    MUST(ebb_mover_create(h->c.device, &h->mover));
    CHECK_EQ(ebb_mover_set_ring(h->mover, ring), EBB_OK);
}

__attribute__((unused)) static ebb_mover_stats haul_stats(haul *h)
{
    ebb_mover_stats stats = {.size = sizeof stats};
    MUST(ebb_mover_get_stats(h->mover, &stats));
    return stats;
}

__attribute__((unused)) static void haul_check(haul *h)
{
    CHECK_EQ(ebb__mover_check(h->mover), 0);
    core_check(&h->c);
}

__attribute__((unused)) static void haul_shut(haul *h)
{
    haul_check(h);
    CHECK_EQ(ebb_mover_destroy(h->mover), EBB_OK);
    CHECK_EQ(ebb_host_free(h->c.device, h->host), EBB_OK);
    core_close(&h->c);
}

/* The weight at an offset. */
__attribute__((unused)) static ebb_load haul_load(const haul *h, uint64_t offset, uint64_t bytes)
{
    return (ebb_load){.offset = offset, .bytes = bytes, .host = h->host + offset};
}

/* Nothing goes to the VBAR any more: what is fetched is staged. */
__attribute__((unused)) static void haul_stage_all(haul *h)
{
    CHECK_EQ(ebb_vbar_set_watermark(h->vbar, 0), EBB_OK);
}

/* Fetch one weight that is staged: its cargo. */
__attribute__((unused)) static uint64_t haul_fetch(haul *h, ebb_load *load, uint64_t offset,
                                                   uint64_t bytes)
{
    uint64_t cargo = 0;
    *load = haul_load(h, offset, bytes);
    CHECK_EQ(ebb_mover_fetch(h->mover, h->vbar, load, 1, NULL, &cargo), EBB_OK);
    CHECK(cargo && load->staged);
    haul_check(h);
    return cargo;
}

/* Is what is at an address, as work on a stream sees it, the weight that begins at an offset? */
__attribute__((unused)) static bool haul_right(haul *h, uint64_t address, uint64_t offset,
                                               uint64_t bytes, CUstream stream)
{
    MUST(h->c.driver.cuMemcpyDtoHAsync(h->c.host, address, 1, stream));
    MUST(h->c.driver.cuMemcpyDtoHAsync(h->c.host + 1, address + bytes / 2, 1, stream));
    MUST(h->c.driver.cuMemcpyDtoHAsync(h->c.host + 2, address + bytes - 1, 1, stream));
    MUST(h->c.driver.cuStreamSynchronize(stream));
    return h->c.host[0] == haul_value(offset) && h->c.host[1] == haul_value(offset + bytes / 2) &&
           h->c.host[2] == haul_value(offset + bytes - 1);
}

/* Read a cargo of one load on a stream for a while, and be done with it. */
__attribute__((unused)) static void haul_use(haul *h, uint64_t cargo, const ebb_load *load,
                                             uint64_t nanoseconds, CUstream stream)
{
    CHECK_EQ(ebb_mover_use(h->mover, cargo, stream), EBB_OK);
    CHECK_EQ(rig_kernel("reads", load->staged, load->bytes, EBBSIM_READ, nanoseconds, stream), 0);
    CHECK_EQ(ebb_mover_done(h->mover, cargo, stream), EBB_OK);
}

#endif
