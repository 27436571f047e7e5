/* Movers: contents, overlap, the ring, failures, threads. */
#include "move.h"

#include "core/rig.h"
#include "internal.h"

typedef struct rig {
    core c;
    ebb_mover *mover;
    ebb_vbar vbar;
    unsigned char *host; /* pinned: weight i is `bytes` of value i + 1, at i * bytes */
    uint64_t host_bytes;
    CUstream compute;
} rig;

/* A device with a limit, a mover with a ring, and a VBAR. */
static void rig_open(rig *r, uint64_t limit, uint64_t ring, uint64_t weights)
{
    *r = (rig){.host_bytes = weights};
    core_open(&r->c, 1024 * MIB, limit);
    rig_clock();
    r->compute = core_lasting(&r->c);
    r->vbar = core_vbar(&r->c, weights);
    void *host;
    MUST(ebb_host_alloc(r->c.device, weights, &host));
    r->host = host;
    MUST(ebb_mover_create(r->c.device, &r->mover));
    CHECK_EQ(ebb_mover_set_ring(r->mover, ring), EBB_OK);
}

static ebb_mover_stats moved(rig *r)
{
    ebb_mover_stats stats = {.size = sizeof stats};
    MUST(ebb_mover_get_stats(r->mover, &stats));
    return stats;
}

static void rig_check(rig *r)
{
    CHECK_EQ(ebb__mover_check(r->mover), 0);
    core_check(&r->c);
}

static void rig_shut(rig *r)
{
    rig_check(r);
    CHECK_EQ(ebb_mover_destroy(r->mover), EBB_OK);
    CHECK_EQ(ebb_host_free(r->c.device, r->host), EBB_OK);
    core_close(&r->c);
}

/* The byte at an address, as work on a stream sees it. */
static int byte_at(rig *r, uint64_t address, CUstream stream)
{
    MUST(r->c.driver.cuMemcpyDtoHAsync(r->c.host, address, 1, stream));
    MUST(r->c.driver.cuStreamSynchronize(stream));
    return r->c.host[0];
}

static void what_has_room_is_filled_and_what_has_none_is_staged(void)
{
    rig r;
    rig_open(&r, 3 * LARGE, LARGE, 4 * LARGE);
    ebb_load loads[4];
    uint64_t cargo;
    for (uint64_t i = 0; i < 4; i++) {
        memset(r.host + i * LARGE, (int)i + 1, LARGE);
        loads[i] = (ebb_load){.offset = i * LARGE, .bytes = LARGE / 2, .host = r.host + i * LARGE};
    }
    CHECK_EQ(ebb_vbar_set_watermark(r.vbar, 2 * LARGE), EBB_OK);
    CHECK_EQ(ebb_mover_fetch(r.mover, r.vbar, loads, 4, &cargo), EBB_OK);
    CHECK(cargo);
    CHECK(!loads[0].staged && !loads[1].staged && loads[2].staged && loads[3].staged);
    CHECK(loads[0].signature && loads[1].signature && !loads[2].signature);
    CHECK_EQ(moved(&r).staged, LARGE);
    CHECK_EQ(moved(&r).filled, LARGE);
    CHECK_EQ(ebb_mover_use(r.mover, cargo, r.compute), EBB_OK);
    for (int i = 2; i < 4; i++) {
        CHECK_EQ(byte_at(&r, loads[i].staged, r.compute), i + 1);
        CHECK_EQ(byte_at(&r, loads[i].staged + LARGE / 2 - 1, r.compute), i + 1);
    }
    CHECK_EQ(ebb_mover_done(r.mover, cargo, r.compute), EBB_OK);
    for (uint64_t i = 0; i < 2; i++) {
        uint64_t signature;
        CHECK_EQ(ebb_vbar_fault(r.vbar, i * LARGE, LARGE / 2, r.compute, &signature), EBB_OK);
        CHECK_EQ(signature, loads[i].signature);
        CHECK_EQ(core_read(&r.c, r.vbar, i * LARGE + LARGE / 2 - 1, r.compute), (int)i + 1);
        CHECK_EQ(ebb_vbar_unpin(r.vbar, i * LARGE, LARGE / 2, r.compute), EBB_OK);
    }
    rig_shut(&r);
}

int main(void)
{
    RUN(what_has_room_is_filled_and_what_has_none_is_staged);
    return REPORT();
}
