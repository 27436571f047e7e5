/* The ring of a mover gives way: what is given and what never is, whatever fails, and threads. */
#include "haul.h"
#include "scale.h"
#include "segment.h"

/* ---- to tensors ----------------------------------------------------------------------------------------- */

/* As PyTorch asks: a second time when it is refused. 0: there is none. */
static uint64_t ask(haul *h, uint64_t bytes)
{
    uint64_t address = 0;
    for (int i = 0; i < 2; i++)
        if (ebb__segment_alloc(h->c.device, bytes, &address) == EBB_OK)
            return address;
    return 0;
}

static void give_open(haul *h, uint64_t limit, uint64_t ring, uint64_t weights)
{
    haul_open(h, limit, ring, weights);
    haul_stage_all(h);
    MUST(ebb__segments_open(h->c.device));
}

static void give_shut(haul *h)
{
    CHECK_EQ(ebb__segments_close(h->c.device), EBB_OK);
    haul_shut(h);
}

static void give_back(haul *h, uint64_t segment)
{
    CHECK_EQ(ebb__segment_free(h->c.device, segment), EBB_OK);
}

/* Written by the tensors' owner: whoever still reads or writes a weight there makes a hazard. */
static void write_to(haul *h, uint64_t segment, uint64_t bytes)
{
    CHECK_EQ(rig_kernel("tensor", segment, bytes, EBBSIM_WRITE, 1000, h->compute), 0);
}

static void a_ring_that_is_not_used_goes_and_comes_back_whole(void)
{
    haul h;
    give_open(&h, 4 * LARGE, 3 * LARGE + SMALL, 4 * LARGE);
    uint64_t first = 0, second = 0, all = 3 * LARGE + SMALL;
    /* PyTorch has been asked first. */
    CHECK_EQ(ebb__segment_alloc(h.c.device, LARGE, &first), EBB_FULL);
    CHECK_EQ(haul_stats(&h).given_up, 0);
    CHECK_EQ(ebb__segment_alloc(h.c.device, LARGE, &first), EBB_OK);
    write_to(&h, first, LARGE);
    CHECK_EQ(haul_stats(&h).given_up, SMALL); /* and no more */
    CHECK_EQ(haul_stats(&h).ring, all - SMALL);
    /* Also if that did not help the last time, and weights would not have waited for it. */
    CHECK_EQ(ebb__segment_alloc(h.c.device, SMALL, &second), EBB_FULL);
    CHECK_EQ(haul_stats(&h).given_up, SMALL);
    CHECK_EQ(ebb__segment_alloc(h.c.device, SMALL, &second), EBB_OK);
    CHECK_EQ(haul_stats(&h).given_up, 2 * SMALL);
    uint64_t left = all - 2 * SMALL;
    CHECK_EQ(haul_stats(&h).ring, left);
    CHECK_EQ(core_device_stats(&h.c).pinned, left);
    /* What cannot be had costs nothing. */
    CHECK_EQ(ask(&h, 4 * LARGE), 0);
    CHECK_EQ(haul_stats(&h).ring, left);
    haul_check(&h);
    /* It is a ring. */
    for (uint64_t i = 0; i < 5; i++) {
        ebb_load load;
        uint64_t cargo = haul_fetch(&h, &load, i % 3 * LARGE, LARGE);
        CHECK(load.staged >= haul_stats(&h).address);
        CHECK_EQ(ebb_mover_use(h.mover, cargo, h.compute), EBB_OK);
        CHECK(haul_right(&h, load.staged, load.offset, LARGE, h.compute));
        CHECK_EQ(ebb_mover_done(h.mover, cargo, h.compute), EBB_OK);
    }
    CHECK_EQ(ebb_mover_room(h.mover, left + 1, UINT64_MAX), left);
    /* As it was, if there is room. */
    CHECK_EQ(ebb_mover_set_ring(h.mover, all), EBB_OFFLOADED);
    CHECK_EQ(haul_stats(&h).ring, left);
    give_back(&h, first);
    CHECK_EQ(ebb_mover_set_ring(h.mover, left), EBB_OK);
    CHECK_EQ(haul_stats(&h).ring, left);
    give_back(&h, second);
    CHECK_EQ(ebb_mover_set_ring(h.mover, all), EBB_OK);
    CHECK_EQ(haul_stats(&h).ring, all);
    CHECK_EQ(core_device_stats(&h.c).pinned, all);
    ebb_load load;
    CHECK_EQ(ebb_mover_drop(h.mover, haul_fetch(&h, &load, 0, all)), EBB_OK);
    /* All of it, and then there is none. */
    first = ask(&h, 4 * LARGE);
    CHECK(first && !haul_stats(&h).ring && !ebb_mover_head(h.mover, NULL, NULL) &&
          !haul_stats(&h).address);
    CHECK_EQ(core_device_stats(&h.c).pinned, 0);
    write_to(&h, first, 4 * LARGE);
    uint64_t none;
    load = haul_load(&h, 0, 512);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &load, 1, NULL, &none), EBB_OFFLOADED);
    give_back(&h, first);
    CHECK_EQ(ebb_mover_set_ring(h.mover, LARGE), EBB_OK);
    CHECK_EQ(haul_stats(&h).ring, LARGE);
    give_shut(&h);
}

/* A large ring is of large pages, but for its end. */
static void large_pages_are_given_as_a_whole(void)
{
    haul h;
    const uint64_t fine = 4 * LARGE, all = fine + 3 * LARGE;
    give_open(&h, all, all, 12 * LARGE);
    ebb_load load[2];
    uint64_t high = haul_fetch(&h, &load[0], 0, all), segment[2];
    CHECK_EQ(ebb_mover_drop(h.mover, high), EBB_OK);
    uint64_t low = haul_fetch(&h, &load[0], 0, LARGE + SMALL);
    high = haul_fetch(&h, &load[1], LARGE, all - LARGE - 2 * SMALL);
    CHECK_EQ(ebb_mover_use(h.mover, high, h.compute), EBB_OK);
    segment[0] = ask(&h, SMALL); /* the end is free */
    CHECK(segment[0] && haul_stats(&h).given_up == SMALL);
    segment[1] = ask(&h, SMALL); /* and now the start, though it is out */
    CHECK(segment[1] && haul_stats(&h).given_up == SMALL + LARGE);
    CHECK_EQ(haul_stats(&h).address, load[0].staged + LARGE);
    CHECK_EQ(ebb_mover_use(h.mover, low, h.compute), EBB_GONE);
    for (int i = 0; i < 2; i++)
        write_to(&h, segment[i], SMALL);
    /* What is left of the page is there for others; the next one is in use. */
    uint64_t rest = ask(&h, LARGE - SMALL);
    CHECK(rest && haul_stats(&h).given_up == SMALL + LARGE);
    CHECK_EQ(ask(&h, SMALL), 0);
    haul_check(&h);
    CHECK(haul_right(&h, load[1].staged, LARGE, load[1].bytes, h.compute));
    CHECK_EQ(ebb_mover_done(h.mover, high, h.compute), EBB_OK);
    for (int i = 0; i < 2; i++)
        give_back(&h, segment[i]);
    give_back(&h, rest);
    give_shut(&h);
}

static bool still_right(haul *h, uint64_t cargo, const ebb_load *load)
{
    bool right = ebb_mover_use(h->mover, cargo, h->compute) == EBB_OK &&
                 haul_right(h, load->staged, load->offset, load->bytes, h->compute);
    CHECK_EQ(ebb_mover_done(h->mover, cargo, h->compute), EBB_OK);
    return right;
}

static void what_is_in_use_stays_and_the_newest_goes_first(void)
{
    haul h;
    give_open(&h, 4 * LARGE, 4 * LARGE, 8 * LARGE);
    ebb_load load[5];
    uint64_t cargo[5], segment[2];
    for (uint64_t i = 0; i < 4; i++)
        cargo[i] = haul_fetch(&h, &load[i], i * LARGE, LARGE);
    CHECK_EQ(ebb_mover_use(h.mover, cargo[0], h.compute), EBB_OK);
    segment[0] = ask(&h, LARGE); /* while it is copied into what was there */
    CHECK(segment[0]);
    write_to(&h, segment[0], LARGE);
    CHECK_EQ(haul_stats(&h).given_up, LARGE);
    CHECK_EQ(haul_stats(&h).cargoes_out, 3);
    CHECK_EQ(ebb_mover_use(h.mover, cargo[3], h.compute), EBB_GONE);
    CHECK_EQ(ebb_mover_drop(h.mover, cargo[3]), EBB_GONE);
    haul_check(&h);
    /* More than is not in use: nothing goes. */
    CHECK_EQ(ebb_mover_use(h.mover, cargo[2], h.compute), EBB_OK);
    CHECK_EQ(ask(&h, LARGE + SMALL), 0);
    CHECK_EQ(haul_stats(&h).cargoes_out, 3);
    CHECK_EQ(haul_stats(&h).ring, 3 * LARGE);
    CHECK(still_right(&h, cargo[1], &load[1]));
    CHECK(haul_right(&h, load[0].staged, 0, LARGE, h.compute));
    CHECK(haul_right(&h, load[2].staged, 2 * LARGE, LARGE, h.compute));
    CHECK_EQ(ebb_mover_done(h.mover, cargo[0], h.compute), EBB_OK);
    /* Now what comes first in the ring comes last in time. */
    cargo[3] = haul_fetch(&h, &load[3], 4 * LARGE, LARGE);
    cargo[4] = haul_fetch(&h, &load[4], 5 * LARGE, LARGE);
    CHECK_EQ(load[3].staged, load[0].staged);
    segment[1] = ask(&h, LARGE);
    CHECK(segment[1]);
    write_to(&h, segment[1], LARGE);
    CHECK_EQ(ebb_mover_use(h.mover, cargo[3], h.compute), EBB_GONE);
    CHECK(still_right(&h, cargo[4], &load[4]));
    CHECK_EQ(haul_stats(&h).address, load[1].staged);
    CHECK_EQ(haul_stats(&h).ring, 2 * LARGE);
    CHECK(haul_right(&h, load[2].staged, 2 * LARGE, LARGE, h.compute));
    CHECK_EQ(ebb_mover_done(h.mover, cargo[2], h.compute), EBB_OK);
    /* What is gone comes again, and to another place. */
    for (int i = 2; i > 0; i--) {
        cargo[3] = haul_fetch(&h, &load[3], 4 * LARGE, LARGE);
        CHECK_EQ(load[3].staged, load[i].staged);
        CHECK(still_right(&h, cargo[3], &load[3]));
    }
    CHECK(core_device_stats(&h.c).held <= 4 * LARGE);
    for (int i = 0; i < 2; i++)
        give_back(&h, segment[i]);
    give_shut(&h);
}

/* One unit in use across the end of the ring: its middle is given, and the pieces are the ring. */
static void the_middle_goes_if_the_ends_are_in_use(void)
{
    haul h;
    give_open(&h, 6 * LARGE, 6 * LARGE, 8 * LARGE);
    ebb_load load[5];
    uint64_t cargo[5], segment[3], base = haul_stats(&h).address;
    uint64_t first = haul_fetch(&h, &load[0], 0, 4 * LARGE);
    cargo[0] = haul_fetch(&h, &load[0], 4 * LARGE, 2 * LARGE);
    CHECK_EQ(ebb_mover_drop(h.mover, first), EBB_OK);
    cargo[1] = haul_fetch(&h, &load[1], 0, LARGE);
    cargo[2] = haul_fetch(&h, &load[2], LARGE, LARGE);
    cargo[3] = haul_fetch(&h, &load[3], 2 * LARGE, LARGE);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(ebb_mover_use(h.mover, cargo[i], h.compute), EBB_OK);
    CHECK_EQ(ask(&h, 3 * LARGE + SMALL), 0);
    CHECK_EQ(haul_stats(&h).given_up, 0);
    /* What is nobody's, and then the newest. */
    segment[0] = ask(&h, LARGE);
    CHECK(segment[0] && haul_stats(&h).cargoes_out == 4);
    write_to(&h, segment[0], LARGE);
    segment[1] = ask(&h, SMALL);
    CHECK(segment[1] && haul_stats(&h).cargoes_out == 3);
    write_to(&h, segment[1], SMALL);
    CHECK_EQ(ebb_mover_use(h.mover, cargo[3], h.compute), EBB_GONE);
    CHECK_EQ(haul_stats(&h).ring, 5 * LARGE - SMALL);
    haul_check(&h);
    for (int i = 0; i < 2; i++)
        CHECK(haul_right(&h, load[i].staged, load[i].offset, load[i].bytes, h.compute));
    CHECK(still_right(&h, cargo[2], &load[2]));
    for (int i = 0; i < 2; i++)
        CHECK_EQ(ebb_mover_done(h.mover, cargo[i], h.compute), EBB_OK);
    /* Round and round, from piece to piece. */
    for (uint64_t i = 0; i < 20; i++) {
        cargo[4] = haul_fetch(&h, &load[4], i % 6 * LARGE, LARGE + i % 3 * SMALL);
        uint64_t at = load[4].staged - base, end = at + load[4].bytes;
        CHECK(end <= 3 * LARGE - SMALL || (at >= 4 * LARGE && end <= 6 * LARGE));
        CHECK(still_right(&h, cargo[4], &load[4]));
    }
    segment[2] = ask(&h, 4 * LARGE); /* all of both */
    CHECK(segment[2]);
    write_to(&h, segment[2], 4 * LARGE);
    for (int i = 0; i < 3; i++)
        give_back(&h, segment[i]);
    CHECK_EQ(ebb_mover_set_ring(h.mover, 6 * LARGE), EBB_OK);
    CHECK_EQ(haul_stats(&h).ring, 6 * LARGE);
    give_shut(&h);
}

/* What cannot be given up is not promised: a request that is too large costs nothing. */
static void so_many_pieces_and_no_more(void)
{
    haul h;
    enum { USED = EBB__PIECES + 5, WIDE = EBB__PIECES - 1 };
    const uint64_t pages = 1 + USED + WIDE + (USED - 1);
    give_open(&h, pages * SMALL, pages * SMALL, 4 * LARGE);
    uint64_t used[USED], gap[USED];
    ebb_load load;
    for (int i = 0; i < USED; i++) {
        used[i] = haul_fetch(&h, &load, 0, SMALL);
        if (i < USED - 1)
            gap[i] = haul_fetch(&h, &load, 0, (i < WIDE ? 2 : 1) * SMALL);
        CHECK_EQ(ebb_mover_use(h.mover, used[i], h.compute), EBB_OK);
    }
    for (int i = 0; i < USED - 1; i++)
        CHECK_EQ(ebb_mover_drop(h.mover, gap[i]), EBB_OK);
    CHECK_EQ(ask(&h, 2 * SMALL), 0);
    CHECK_EQ(haul_stats(&h).given_up, 0);
    uint64_t segment = ask(&h, SMALL); /* the last page is at an end */
    CHECK(segment);
    /* Two less, and all others leave as many pieces as there may be, at most. */
    for (int i = 0; i < USED; i++) {
        CHECK_EQ(ebb_mover_done(h.mover, used[i], h.compute), EBB_OK);
        uint64_t free = 2 * SMALL * (uint64_t)(i + 1);
        uint64_t more = USED - 1 - i > EBB__PIECES ? 0 : ask(&h, free);
        if (!more)
            continue;
        CHECK(haul_stats(&h).pieces <= EBB__PIECES);
        give_back(&h, more);
        break;
    }
    CHECK(haul_stats(&h).given_up > SMALL);
    for (int i = 0; i < USED; i++)
        ebb_mover_done(h.mover, used[i], h.compute);
    give_back(&h, segment);
    give_shut(&h);
}

/* Where both ends could be given up, what is needed last goes. */
static void the_end_is_chosen(void)
{
    haul h;
    give_open(&h, 4 * LARGE, 4 * LARGE, 8 * LARGE);
    ebb_load load[5];
    uint64_t cargo[5], segment[2];
    for (uint64_t i = 0; i < 4; i++)
        cargo[i] = haul_fetch(&h, &load[i], i * LARGE, LARGE);
    haul_use(&h, cargo[0], &load[0], 1000, h.compute);
    CHECK_EQ(ebb_mover_use(h.mover, cargo[1], h.compute), EBB_OK);
    cargo[4] = haul_fetch(&h, &load[4], 4 * LARGE, LARGE);
    CHECK_EQ(load[4].staged, load[0].staged);
    segment[0] = ask(&h, SMALL);
    CHECK(segment[0]);
    CHECK_EQ(ebb_mover_use(h.mover, cargo[4], h.compute), EBB_GONE);
    /* The rest of its place is nobody's, so the other end stays; as long as that is enough. */
    segment[1] = ask(&h, LARGE - SMALL);
    CHECK(segment[1]);
    CHECK_EQ(haul_stats(&h).cargoes_out, 3);
    CHECK_EQ(haul_stats(&h).address, load[1].staged);
    for (int i = 2; i < 4; i++)
        CHECK(still_right(&h, cargo[i], &load[i]));
    CHECK_EQ(ebb_mover_done(h.mover, cargo[1], h.compute), EBB_OK);
    for (int i = 0; i < 2; i++)
        give_back(&h, segment[i]);
    give_shut(&h);
}

/* A page has been read, and its readers are not over: who gets it waits for them, and for nobody else. */
static void readers_are_waited_for(void)
{
    for (int out = 0; out < 2; out++) {
        haul h;
        give_open(&h, 2 * LARGE, 2 * LARGE, 4 * LARGE);
        CUstream s = core_lasting(&h.c), other = core_lasting(&h.c);
        ebb_load load[2];
        uint64_t cargo[2], length = rig_length(20);
        for (uint64_t i = 0; i < 2; i++)
            cargo[i] = haul_fetch(&h, &load[i], i * LARGE, LARGE);
        /* One that is past, or one that is not, because an older one is out. */
        CHECK_EQ(ebb_mover_use(h.mover, cargo[0], h.compute), EBB_OK);
        if (!out)
            CHECK_EQ(ebb_mover_done(h.mover, cargo[0], h.compute), EBB_OK);
        MUST(h.c.driver.cuStreamSynchronize(ebb_mover_stream(h.mover)));
        uint64_t begin = rig_now();
        haul_use(&h, cargo[1], &load[1], length, s);
        CHECK_EQ(rig_kernel("long", 0, 0, 0, rig_forever(), other), 0);
        uint64_t segment = ask(&h, LARGE);
        CHECK(segment && rig_took(rig_now() - begin, length));
        CHECK_EQ(h.c.driver.cuStreamQuery(s), CUDA_SUCCESS);
        CHECK_EQ(h.c.driver.cuStreamQuery(other), CUDA_ERROR_NOT_READY);
        write_to(&h, segment, LARGE);
        haul_check(&h);
        if (out) {
            CHECK(haul_right(&h, load[0].staged, 0, LARGE, h.compute));
            CHECK_EQ(ebb_mover_done(h.mover, cargo[0], h.compute), EBB_OK);
        }
        CHECK_EQ(ebb_mover_drop(h.mover, haul_fetch(&h, &load[1], LARGE, LARGE)), EBB_OK);
        give_back(&h, segment);
        MUST(h.c.driver.cuStreamSynchronize(other));
        give_shut(&h);
    }
}

static void weights_go_before_the_ring_does(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, 2 * LARGE, 4 * LARGE);
    MUST(ebb__segments_open(h.c.device));
    CHECK_EQ(rig_touch(h.vbar, 0, 2 * LARGE, h.compute), EBB_OK);
    uint64_t first = ask(&h, 2 * LARGE);
    CHECK(first && core_stats(h.vbar).resident == 0);
    CHECK_EQ(haul_stats(&h).given_up, 0);
    give_back(&h, first);
    CHECK_EQ(ebb_vbar_prioritize(h.vbar), EBB_OK);
    CHECK_EQ(rig_touch(h.vbar, 0, 2 * LARGE, h.compute), EBB_OK);
    first = ask(&h, 3 * LARGE); /* both */
    CHECK(first && core_stats(h.vbar).resident == 0);
    CHECK_EQ(haul_stats(&h).given_up, LARGE);
    /* Other weights get nothing of it. */
    CHECK_EQ(ebb_vbar_prioritize(h.vbar), EBB_OK);
    CHECK_EQ(rig_touch(h.vbar, 0, LARGE, h.compute), EBB_OFFLOADED);
    CHECK_EQ(haul_stats(&h).ring, LARGE);
    give_back(&h, first);
    give_shut(&h);
}

static void a_limit_that_was_lowered_is_met_by_the_ring(void)
{
    haul h;
    give_open(&h, 4 * LARGE, 3 * LARGE, 4 * LARGE);
    ebb_load load;
    uint64_t cargo = haul_fetch(&h, &load, 0, LARGE);
    CHECK_EQ(ebb_mover_use(h.mover, cargo, h.compute), EBB_OK);
    CHECK_EQ(ebb_device_set_limit(h.c.device, 2 * LARGE), EBB_BUSY);
    /* What is in use stays, so that is not to be had, and costs nothing. */
    CHECK_EQ(ask(&h, LARGE + SMALL), 0);
    CHECK_EQ(haul_stats(&h).given_up, 0);
    uint64_t segment = ask(&h, LARGE);
    CHECK(segment);
    CHECK_EQ(haul_stats(&h).given_up, 2 * LARGE);
    CHECK(core_device_stats(&h.c).held <= 2 * LARGE);
    write_to(&h, segment, LARGE);
    CHECK(haul_right(&h, load.staged, 0, LARGE, h.compute));
    CHECK_EQ(ebb_mover_done(h.mover, cargo, h.compute), EBB_OK);
    haul_check(&h);
    give_back(&h, segment);
    give_shut(&h);
}

static void a_capture_goes_on(void)
{
    haul h;
    give_open(&h, 2 * LARGE, 2 * LARGE, 2 * LARGE);
    CUstream s = core_stream(&h.c);
    ebb_load load;
    uint64_t cargo = haul_fetch(&h, &load, 0, 2 * LARGE), segment = 0;
    haul_use(&h, cargo, &load, 1000, h.compute);
    atomic_fetch_add(&ebb__captures, 1);
    MUST(h.c.driver.cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    /* Nobody is asked: PyTorch gives nothing back then, and does not ask again. */
    CHECK_EQ(ebb__segment_alloc(h.c.device, LARGE, &segment), EBB_OK);
    CUgraph graph;
    CHECK_EQ(h.c.driver.cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    atomic_fetch_sub(&ebb__captures, 1);
    MUST(h.c.driver.cuGraphDestroy(graph));
    CHECK_EQ(haul_stats(&h).ring, LARGE);
    give_back(&h, segment);
    give_shut(&h);
}

static void two_movers_give_together(void)
{
    haul h;
    give_open(&h, 4 * LARGE, 2 * LARGE, 2 * LARGE);
    ebb_mover *other;
    ebb_mover_stats stats = {.size = sizeof stats};
    MUST(ebb_mover_create(h.c.device, &other));
    CHECK_EQ(ebb_mover_set_ring(other, 2 * LARGE), EBB_OK);
    uint64_t segment = ask(&h, 3 * LARGE);
    CHECK(segment);
    MUST(ebb_mover_get_stats(other, &stats));
    CHECK_EQ(stats.given_up + haul_stats(&h).given_up, 3 * LARGE);
    CHECK_EQ(ebb_mover_destroy(other), EBB_OK);
    give_back(&h, segment);
    segment = ask(&h, 4 * LARGE); /* nobody asks the one that is gone */
    CHECK(segment);
    give_back(&h, segment);
    give_shut(&h);
}

/* ---- whatever fails --------------------------------------------------------------------------------------- */

static void done_with(haul *h, uint64_t cargo)
{
    for (int tries = 0; ebb_mover_done(h->mover, cargo, h->compute) != EBB_OK; tries++)
        if (tries > 20) {
            FAIL("a cargo is never done");
            return;
        }
}

/* Two cargoes, one of which gives way; what fails is made up for. The segment, or 0. */
static uint64_t life(haul *h)
{
    ebb_load load[3];
    uint64_t cargo[3] = {0}, segment = 0;
    bool used[2] = {false};
    if (ebb_mover_set_ring(h->mover, 3 * SMALL) != EBB_OK)
        return 0;
    for (uint64_t i = 0; i < 3; i++) {
        load[i] = haul_load(h, i * SMALL, SMALL);
        if (ebb_mover_fetch(h->mover, h->vbar, &load[i], 1, NULL, &cargo[i]) != EBB_OK)
            cargo[i] = 0;
    }
    for (int i = 0; i < 2; i++)
        used[i] = cargo[i] && ebb_mover_use(h->mover, cargo[i], h->compute) == EBB_OK;
    if (used[0]) {
        rig_kernel("reads", load[0].staged, SMALL, EBBSIM_READ, 100000, h->compute);
        done_with(h, cargo[0]);
    }
    segment = ask(h, 2 * SMALL);
    CHECK_EQ(ebb__mover_check(h->mover), 0);
    if (used[1]) {
        rig_kernel("reads", load[1].staged, SMALL, EBBSIM_READ, 1000, h->compute);
        done_with(h, cargo[1]);
    }
    for (int i = 0; i < 3; i++)
        if (cargo[i])
            ebb_mover_drop(h->mover, cargo[i]);
    if (segment)
        rig_kernel("tensor", segment, 2 * SMALL, EBBSIM_WRITE, 1000, h->compute);
    if (!ebb_mover_fetch(h->mover, h->vbar, load, 1, NULL, cargo))
        ebb_mover_drop(h->mover, cargo[0]);
    CHECK_EQ(haul_stats(h).cargoes_out, 0);
    return segment;
}

/* 0: nothing failed any more. */
static unsigned long fail_one(unsigned long n, unsigned row, int code)
{
    haul h;
    give_open(&h, 3 * SMALL, 0, 3 * SMALL);
    for (unsigned i = 0; i < row; i++)
        MUST(ebbsim_fail(NULL, n + i, code));
    uint64_t segment = life(&h);
    unsigned long fired = ebbsim_failures();
    ebbsim_fail_clear();
    CHECK(fired || (segment && haul_stats(&h).given_up == 2 * SMALL));
    haul_check(&h);
    if (segment)
        give_back(&h, segment);
    if (!fired) {
        CHECK_EQ(ebb_mover_set_ring(h.mover, 3 * SMALL), EBB_OK);
        CHECK_EQ(haul_stats(&h).ring, 3 * SMALL);
    }
    give_shut(&h);
    CHECK_EQ(rig_left(), 0);
    return fired;
}

static void every_call_may_fail(void)
{
    NEEDS_SIM("calls must fail");
    /* If the driver fails to map a segment and, next, to take its addresses back, they are lost. */
    for (unsigned row = 1; row <= 2; row++) {
        unsigned long n = 1, fired = 1;
        for (unsigned long step = SCALED(1, 5); fired && n < 1000; n += step) {
            int before = harness_failures;
            fired = fail_one(n, row, 999);
            if (harness_failures != before) {
                FAIL("that was with call %lu failing, %u in a row", n, row);
                return;
            }
        }
        CHECK(n < 1000);
        printf("       %lu calls\n", n - 1);
    }
}

/* ---- threads ------------------------------------------------------------------------------------------------ */

typedef struct actor {
    haul *h;
    unsigned number, seed;
    CUstream stream;
    unsigned char *cells;
    int wrong;
    unsigned seen, gone, segments;
    atomic_bool *over;
} actor;

/* Weights through the ring, as a model's. */
static void *stream_weights(void *data)
{
    actor *a = data;
    haul *h = a->h;
    MUST(h->c.driver.cuCtxSetCurrent(h->c.context));
    for (int step = 0; step < SCALED(600, 150); step++) {
        ebb_load load[2];
        uint64_t cargo[2];
        for (uint64_t i = 0; i < 2; i++) {
            load[i] = haul_load(h, (unsigned)rand_r(&a->seed) % 12 * SMALL, SMALL);
            ebb_status status = ebb_mover_fetch(h->mover, h->vbar, &load[i], 1, NULL, &cargo[i]);
            a->wrong += status != EBB_OK && status != EBB_OFFLOADED;
        }
        if (rand_r(&a->seed) % 4 == 0)
            rig_sleep(200000);
        for (int i = 0; i < 2; i++) {
            ebb_status status = ebb_mover_use(h->mover, cargo[i], a->stream);
            a->gone += status == EBB_GONE;
            a->wrong += status != EBB_OK && status != EBB_GONE;
            if (!cargo[i] || status != EBB_OK)
                continue;
            MUST(h->c.driver.cuMemcpyDtoHAsync(a->cells, load[i].staged, 1, a->stream));
            MUST(h->c.driver.cuMemcpyDtoHAsync(a->cells + 1, load[i].staged + SMALL - 1, 1,
                                               a->stream));
            MUST(h->c.driver.cuStreamSynchronize(a->stream));
            a->wrong += a->cells[0] != haul_value(load[i].offset);
            a->wrong += a->cells[1] != haul_value(load[i].offset + SMALL - 1);
            a->seen++;
            a->wrong += ebb_mover_done(h->mover, cargo[i], a->stream) != EBB_OK;
        }
        a->wrong += ebb__mover_check(h->mover) != 0;
        if (rand_r(&a->seed) % 8 == 0) {
            ebb_status status = ebb_mover_set_ring(h->mover, 8 * SMALL);
            a->wrong += status != EBB_OK && status != EBB_BUSY && status != EBB_OFFLOADED;
        }
    }
    return NULL;
}

/* Tensors that come and go; and movers. */
static void *take_memory(void *data)
{
    actor *a = data;
    haul *h = a->h;
    MUST(h->c.driver.cuCtxSetCurrent(h->c.context));
    while (!atomic_load(a->over)) {
        uint64_t bytes = (1 + (unsigned)rand_r(&a->seed) % 5) * SMALL, segment = ask(h, bytes);
        if (segment) {
            a->segments++;
            MUST(h->c.driver.cuMemsetD8Async(segment, 0, bytes, a->stream));
            rig_sleep(200000);
            a->wrong += ebb__segment_free(h->c.device, segment) != EBB_OK;
        }
        if (a->number & 1) {
            ebb_mover *mover = NULL;
            a->wrong += ebb_mover_create(h->c.device, &mover) != EBB_OK;
            ebb_status status = ebb_mover_set_ring(mover, SMALL);
            a->wrong += status != EBB_OK && status != EBB_OFFLOADED;
            a->wrong += ebb_mover_destroy(mover) != EBB_OK;
        }
    }
    return NULL;
}

static void tensors_and_weights_in_threads(void)
{
    haul h;
    give_open(&h, 12 * SMALL, 8 * SMALL, LARGE);
    if (h.c.sim)
        ebbsim_clock_virtual(0);
    actor actors[4];
    pthread_t threads[4];
    atomic_bool is_over = false;
    for (unsigned i = 0; i < 4; i++)
        actors[i] = (actor){.h = &h,
                            .number = i,
                            .seed = i + 1,
                            .stream = i & 1 ? core_lasting(&h.c) : core_stream(&h.c),
                            .cells = h.c.host + (size_t)64 * i,
                            .over = &is_over};
    for (unsigned i = 0; i < 4; i++)
        MUST(pthread_create(&threads[i], NULL, i < 2 ? stream_weights : take_memory, &actors[i]));
    for (unsigned i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(actors[i].wrong, 0);
        if (i == 1)
            atomic_store(&is_over, true);
    }
    CHECK(actors[0].seen + actors[1].seen > 50);
    CHECK(actors[2].segments + actors[3].segments > 20);
    CHECK(haul_stats(&h).given_up);
    CHECK(core_device_stats(&h.c).held <= 12 * SMALL);
    printf("       %u seen, %u gone, %u segments, %lu MiB given up\n",
           actors[0].seen + actors[1].seen, actors[0].gone + actors[1].gone,
           actors[2].segments + actors[3].segments, (unsigned long)(haul_stats(&h).given_up / MIB));
    give_shut(&h);
}

int main(void)
{
    RUN(a_ring_that_is_not_used_goes_and_comes_back_whole);
    RUN(large_pages_are_given_as_a_whole);
    RUN(what_is_in_use_stays_and_the_newest_goes_first);
    RUN(the_middle_goes_if_the_ends_are_in_use);
    RUN(so_many_pieces_and_no_more);
    RUN(the_end_is_chosen);
    RUN(readers_are_waited_for);
    RUN(weights_go_before_the_ring_does);
    RUN(a_limit_that_was_lowered_is_met_by_the_ring);
    RUN(a_capture_goes_on);
    RUN(two_movers_give_together);
    RUN(every_call_may_fail);
    RUN(tensors_and_weights_in_threads);
    return REPORT();
}
