/* The ring of a mover: who waits for whom, and in what order places come free. */
#include "haul.h"
#include "scale.h"

/* ---- who waits for whom ------------------------------------------------------------------------------ */

/* How long until a cargo has arrived. */
static uint64_t arrival(haul *h, uint64_t cargo, const ebb_load *load, CUstream stream)
{
    uint64_t begin = rig_now();
    CHECK_EQ(ebb_mover_use(h->mover, cargo, stream), EBB_OK);
    CHECK(haul_right(h, load->staged, load->offset, load->bytes, stream));
    return rig_now() - begin;
}

static void a_copy_waits_for_those_whose_place_it_takes_and_for_nobody_else(void)
{
    haul h;
    haul_open(&h, 8 * LARGE, 4 * SMALL, 4 * LARGE);
    haul_stage_all(&h);
    CUstream s = core_lasting(&h.c), t = core_lasting(&h.c);
    ebb_load a, b, d, e, f;
    uint64_t length = rig_length(40);
    uint64_t first = haul_fetch(&h, &a, 0, 2 * SMALL), second = haul_fetch(&h, &b, LARGE, SMALL);
    haul_use(&h, second, &b, 1000, t);
    haul_use(&h, first, &a, length, s);
    /* The last quarter is nobody's: at once, though both are done and neither is over. */
    uint64_t third = haul_fetch(&h, &d, 2 * LARGE, SMALL);
    CHECK_EQ(d.staged, a.staged + 3 * SMALL);
    CHECK_EQ(haul_stats(&h).waits, 0);
    CHECK(arrival(&h, third, &d, h.compute) < length / 2);
    CHECK_EQ(h.c.driver.cuStreamQuery(s), CUDA_ERROR_NOT_READY);
    CHECK_EQ(ebb_mover_done(h.mover, third, h.compute), EBB_OK);
    /* The first half of what s reads. */
    uint64_t fourth = haul_fetch(&h, &e, 3 * LARGE, SMALL);
    CHECK_EQ(e.staged, a.staged);
    CHECK_EQ(haul_stats(&h).waits, 1);
    arrival(&h, fourth, &e, h.compute);
    CHECK_EQ(h.c.driver.cuStreamQuery(s), CUDA_SUCCESS);
    CHECK_EQ(ebb_mover_done(h.mover, fourth, h.compute), EBB_OK);
    /* Its second half: that has been waited for. */
    uint64_t fifth = haul_fetch(&h, &f, 0, SMALL);
    CHECK_EQ(f.staged, a.staged + SMALL);
    CHECK_EQ(haul_stats(&h).waits, 1);
    CHECK_EQ(ebb_mover_drop(h.mover, fifth), EBB_OK);
    haul_shut(&h);
}

/* What lies on two that were used comes in two parts: the first does not wait for the second's place. */
static void a_part_waits_for_its_own_place(void)
{
    haul h;
    haul_open(&h, 8 * LARGE, LARGE, 4 * LARGE);
    haul_stage_all(&h);
    CUstream s = core_lasting(&h.c), t = core_lasting(&h.c);
    ebb_load a, b, c;
    uint64_t first = haul_fetch(&h, &a, 0, LARGE / 2),
             second = haul_fetch(&h, &b, LARGE, LARGE / 2);
    haul_use(&h, first, &a, 1000, t);
    haul_use(&h, second, &b, rig_length(40), s);
    uint64_t copies = haul_stats(&h).copies;
    uint64_t third = haul_fetch(&h, &c, 2 * LARGE, LARGE);
    CHECK_EQ(c.staged, a.staged);
    CHECK_EQ(haul_stats(&h).copies, copies + 2);
    CHECK_EQ(haul_stats(&h).waits, 2);
    arrival(&h, third, &c, h.compute);
    CHECK_EQ(h.c.driver.cuStreamQuery(s), CUDA_SUCCESS);
    CHECK_EQ(ebb_mover_done(h.mover, third, h.compute), EBB_OK);
    /* On one, or with little on the other: in one. */
    uint64_t fourth = haul_fetch(&h, &a, 0, LARGE - SMALL / 16);
    CHECK_EQ(haul_stats(&h).copies, copies + 3);
    haul_use(&h, fourth, &a, 1000, t);
    second = haul_fetch(&h, &b, LARGE, SMALL / 16);
    haul_use(&h, second, &b, 1000, s);
    copies = haul_stats(&h).copies;
    CHECK_EQ(ebb_mover_drop(h.mover, haul_fetch(&h, &c, 2 * LARGE, LARGE)), EBB_OK);
    CHECK_EQ(haul_stats(&h).copies, copies + 1);
    haul_shut(&h);
}

static void what_is_left_before_the_end_is_used_if_it_is_worth_it(void)
{
    haul h;
    haul_open(&h, 8 * LARGE, 8 * SMALL, 4 * LARGE);
    haul_stage_all(&h);
    ebb_load a, b;
    CHECK_EQ(ebb_mover_room(h.mover, 9 * SMALL, 1), 8 * SMALL);
    uint64_t first = haul_fetch(&h, &a, 0, 4 * SMALL),
             second = haul_fetch(&h, &b, LARGE, 2 * SMALL);
    CHECK_EQ(ebb_mover_room(h.mover, SMALL, SMALL), SMALL);
    CHECK_EQ(ebb_mover_room(h.mover, 3 * SMALL, UINT64_MAX), 2 * SMALL);
    haul_use(&h, first, &a, 1000, h.compute);
    CHECK_EQ(ebb_mover_room(h.mover, 3 * SMALL, 2 * SMALL), 2 * SMALL);
    CHECK_EQ(ebb_mover_room(h.mover, 3 * SMALL, 2 * SMALL + 1), 3 * SMALL);
    CHECK_EQ(ebb_mover_room(h.mover, 5 * SMALL, UINT64_MAX), 4 * SMALL);
    CHECK_EQ(ebb_mover_drop(h.mover, second), EBB_OK);
    haul_shut(&h);
}

static void every_user_of_a_place_is_waited_for(void)
{
    haul h;
    haul_open(&h, 8 * LARGE, SMALL, 4 * LARGE);
    haul_stage_all(&h);
    CUstream s[3] = {core_lasting(&h.c), core_stream(&h.c), NULL};
    ebb_load a, b;
    for (int last = 0; last < 3; last++) {
        uint64_t cargo = haul_fetch(&h, &a, 0, SMALL), next;
        for (int i = 0; i < 3; i++)
            CHECK_EQ(ebb_mover_use(h.mover, cargo, s[i]), EBB_OK);
        CHECK_EQ(ebb_mover_drop(h.mover, cargo), EBB_BUSY);
        for (int i = 0; i < 3; i++) {
            uint64_t length = i == last ? rig_length(20) : 1000;
            CHECK_EQ(rig_kernel("reads", a.staged, SMALL, EBBSIM_READ, length, s[i]), 0);
            next = 1;
            ebb_load more = haul_load(&h, LARGE, SMALL);
            CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &more, 1, NULL, &next), EBB_OFFLOADED);
            CHECK(!next && !more.staged);
            CHECK_EQ(ebb_mover_done(h.mover, cargo, s[i]), EBB_OK);
        }
        CHECK_EQ(ebb_mover_use(h.mover, cargo, s[0]), EBB_GONE);
        CHECK_EQ(ebb_mover_done(h.mover, cargo, s[0]), EBB_GONE);
        uint64_t waits = haul_stats(&h).waits;
        next = haul_fetch(&h, &b, LARGE, SMALL);
        CHECK_EQ(haul_stats(&h).waits, waits + 3);
        arrival(&h, next, &b, h.compute);
        for (int i = 0; i < 3; i++)
            CHECK_EQ(h.c.driver.cuStreamQuery(s[i]), CUDA_SUCCESS);
        CHECK_EQ(ebb_mover_done(h.mover, next, h.compute), EBB_OK);
    }
    haul_shut(&h);
}

/* ---- places -------------------------------------------------------------------------------------------- */

static void places_come_free_from_the_oldest_on(void)
{
    haul h;
    haul_open(&h, 8 * LARGE, 4 * SMALL, 4 * LARGE);
    haul_stage_all(&h);
    ebb_load load[6];
    uint64_t cargo[6], none = 7;
    for (uint64_t i = 0; i < 4; i++)
        cargo[i] = haul_fetch(&h, &load[i], i * LARGE, SMALL);
    ebb_load more = haul_load(&h, 0, SMALL);
    CHECK_EQ(haul_stats(&h).ring_used, 4 * SMALL);
    CHECK_EQ(ebb_mover_room(h.mover, 1, 1), 0);
    CHECK_EQ(ebb_mover_room(NULL, 1, 1), 0);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &more, 1, NULL, &none), EBB_OFFLOADED);
    haul_use(&h, cargo[2], &load[2], 1000, h.compute);
    CHECK_EQ(ebb_mover_drop(h.mover, cargo[1]), EBB_OK);
    CHECK_EQ(haul_stats(&h).cargoes_out, 2);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &more, 1, NULL, &none), EBB_OFFLOADED);
    CHECK_EQ(haul_stats(&h).no_room, 2);
    haul_use(&h, cargo[0], &load[0], 1000, h.compute);
    CHECK_EQ(haul_stats(&h).ring_used, SMALL);
    CHECK_EQ(ebb_mover_room(h.mover, 3 * SMALL, 1), 3 * SMALL);
    CHECK_EQ(ebb_mover_room(h.mover, 3 * SMALL + 1, 1), 3 * SMALL);
    /* Three quarters at once, from the start. */
    cargo[4] = haul_fetch(&h, &load[4], 0, 3 * SMALL);
    CHECK_EQ(load[4].staged, load[0].staged);
    CHECK_EQ(ebb_mover_drop(h.mover, cargo[1]), EBB_GONE);
    CHECK_EQ(ebb_mover_use(h.mover, cargo[2], h.compute), EBB_GONE);
    CHECK_EQ(ebb_mover_done(h.mover, cargo[3], h.compute), EBB_INVALID);
    CHECK_EQ(ebb_mover_drop(h.mover, cargo[3]), EBB_OK);
    CHECK_EQ(ebb_mover_drop(h.mover, cargo[4]), EBB_OK);
    /* It does not wrap: the quarter that is left at the end is skipped. */
    cargo[5] = haul_fetch(&h, &load[5], 0, 2 * SMALL);
    CHECK_EQ(load[5].staged, load[0].staged);
    CHECK_EQ(ebb_mover_drop(h.mover, cargo[5]), EBB_OK);
    CHECK_EQ(haul_stats(&h).ring_used, 0);
    more.bytes = 4 * SMALL + 1;
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &more, 1, NULL, &none), EBB_OFFLOADED);
    haul_shut(&h);
}

/* Others that are in use keep their places; whoever comes instead must not wait until they are over. */
static void what_was_dropped_last_is_had_again_at_once(void)
{
    haul h;
    haul_open(&h, 8 * LARGE, 4 * SMALL, 4 * LARGE);
    haul_stage_all(&h);
    ebb_load a, b, c, d;
    uint64_t first = haul_fetch(&h, &a, 0, SMALL);
    CHECK_EQ(ebb_mover_use(h.mover, first, h.compute), EBB_OK);
    uint64_t second = haul_fetch(&h, &b, LARGE, 2 * SMALL), waits = haul_stats(&h).waits;
    CHECK_EQ(ebb_mover_drop(h.mover, second), EBB_OK);
    CHECK_EQ(haul_stats(&h).ring_used, SMALL);
    uint64_t third = haul_fetch(&h, &c, 2 * LARGE, 3 * SMALL);
    CHECK_EQ(c.staged, a.staged + SMALL);
    CHECK_EQ(haul_stats(&h).waits, waits); /* what wrote there is on the same stream */
    CHECK_EQ(ebb_mover_use(h.mover, second, h.compute), EBB_GONE);
    CHECK_EQ(ebb_mover_drop(h.mover, second), EBB_GONE);
    CHECK(arrival(&h, third, &c, h.compute));
    haul_check(&h);
    CHECK_EQ(ebb_mover_done(h.mover, third, h.compute), EBB_OK);
    /* It was used: its place is had when the ones before it are over. */
    CHECK_EQ(ebb_mover_room(h.mover, SMALL, 1), 0);
    CHECK_EQ(ebb_mover_done(h.mover, first, h.compute), EBB_OK);
    /* One that is not the last has its place until that one goes, too. */
    first = haul_fetch(&h, &a, 0, SMALL);
    second = haul_fetch(&h, &b, LARGE, SMALL);
    third = haul_fetch(&h, &c, 2 * LARGE, SMALL);
    uint64_t fourth = haul_fetch(&h, &d, 3 * LARGE, SMALL);
    CHECK_EQ(ebb_mover_drop(h.mover, third), EBB_OK);
    CHECK_EQ(ebb_mover_room(h.mover, 3 * SMALL, 1), 0);
    CHECK_EQ(ebb_mover_drop(h.mover, fourth), EBB_OK);
    CHECK_EQ(haul_stats(&h).ring_used, 2 * SMALL);
    fourth = haul_fetch(&h, &d, 3 * LARGE, 2 * SMALL);
    CHECK_EQ(d.staged, c.staged);
    haul_check(&h);
    haul_use(&h, second, &b, 1000, h.compute);
    haul_use(&h, fourth, &d, 1000, h.compute);
    haul_use(&h, first, &a, 1000, h.compute);
    CHECK_EQ(haul_stats(&h).ring_used, 0);
    haul_shut(&h);
}

/* One is in use for long, others come and go behind it. */
static void what_was_used_last_makes_room_if_nothing_else_does(void)
{
    haul h;
    haul_open(&h, 8 * LARGE, 4 * SMALL, 4 * LARGE);
    haul_stage_all(&h);
    ebb_load a, b;
    uint64_t first = haul_fetch(&h, &a, 0, 2 * SMALL);
    CHECK_EQ(ebb_mover_use(h.mover, first, h.compute), EBB_OK);
    CUstream s = core_lasting(&h.c);
    for (uint64_t i = 0; i < 8; i++) {
        uint64_t cargo = haul_fetch(&h, &b, LARGE + i % 3 * LARGE, 2 * SMALL);
        CHECK_EQ(b.staged, a.staged + 2 * SMALL);
        CHECK_EQ(haul_stats(&h).waits, i); /* for the one that was there before */
        haul_use(&h, cargo, &b, 100000, s);
        haul_check(&h);
    }
    CHECK(haul_right(&h, a.staged, 0, 2 * SMALL, h.compute));
    CHECK_EQ(ebb_mover_done(h.mover, first, h.compute), EBB_OK);
    CHECK_EQ(haul_stats(&h).ring_used, 0);
    haul_shut(&h);
}

/* The host waits then: a place that nobody gives back would be in the way for good. */
static void a_use_is_over_also_if_no_event_can_tell(void)
{
    NEEDS_SIM("calls must fail");
    haul h;
    haul_open(&h, 8 * LARGE, SMALL, 4 * LARGE);
    haul_stage_all(&h);
    ebb_load load;
    uint64_t length = rig_length(20);
    for (int i = 0; i < 2; i++) {
        uint64_t cargo = haul_fetch(&h, &load, (uint64_t)i * LARGE, SMALL);
        CHECK_EQ(ebb_mover_use(h.mover, cargo, h.compute), EBB_OK);
        CHECK_EQ(rig_kernel("reads", load.staged, SMALL, EBBSIM_READ, length, h.compute), 0);
        MUST(ebbsim_fail("cuEventRecord", 1, 999));
        CHECK_EQ(ebb_mover_done(h.mover, cargo, h.compute), EBB_OK);
        CHECK_EQ(ebbsim_failures(), (unsigned long)i + 1);
        ebbsim_fail_clear();
        CHECK_EQ(h.c.driver.cuStreamQuery(h.compute), CUDA_SUCCESS);
        CHECK_EQ(haul_stats(&h).ring_used, 0);
    }
    haul_shut(&h);
}

static ebb_status fetch_with(haul *h, ebb_load *load, uint64_t cargo, uint64_t *its)
{
    const ebb_fetch how = {.with = cargo};
    return ebb_mover_fetch(h->mover, h->vbar, load, 1, &how, its);
}

/* What comes next comes with it, as long as nobody has waited for it and there is room behind it. */
static void a_cargo_grows_until_it_is_used(void)
{
    haul h;
    haul_open(&h, 8 * LARGE, 4 * SMALL, 4 * LARGE);
    haul_stage_all(&h);
    ebb_load one, two = haul_load(&h, LARGE, SMALL), three = haul_load(&h, 2 * LARGE, SMALL);
    uint64_t first = haul_fetch(&h, &one, 0, SMALL), with, own, other, last;
    CHECK_EQ(fetch_with(&h, &two, first, &with), EBB_OK);
    CHECK_EQ(with, first);
    CHECK_EQ(two.staged, one.staged + SMALL);
    CHECK_EQ(haul_stats(&h).cargoes_out, 1);
    CHECK_EQ(haul_stats(&h).ring_used, 2 * SMALL);
    /* One wait is for both. */
    CHECK_EQ(ebb_mover_use(h.mover, first, h.compute), EBB_OK);
    CHECK(haul_right(&h, one.staged, 0, SMALL, h.compute));
    CHECK(haul_right(&h, two.staged, LARGE, SMALL, h.compute));
    /* Whoever has waited has not waited for what comes now. */
    CHECK_EQ(fetch_with(&h, &three, first, &own), EBB_OK);
    CHECK(own && own != first);
    /* Nor is it the last. */
    CHECK_EQ(ebb_mover_done(h.mover, first, h.compute), EBB_OK);
    CHECK_EQ(fetch_with(&h, &two, first, &other), EBB_OK);
    CHECK(other && other != first && other != own);
    /* Behind this one the ring ends. */
    CHECK_EQ(fetch_with(&h, &two, other, &last), EBB_OK);
    CHECK(last != other && two.staged == one.staged);
    CHECK_EQ(ebb_mover_drop(h.mover, own), EBB_OK);
    CHECK_EQ(ebb_mover_drop(h.mover, other), EBB_OK);
    CHECK_EQ(ebb_mover_drop(h.mover, last), EBB_OK);
    /* Both places come free behind the one use. */
    with = haul_fetch(&h, &one, 0, SMALL);
    CHECK_EQ(fetch_with(&h, &two, with, &other), EBB_OK);
    CHECK_EQ(other, with);
    haul_use(&h, with, &two, 1000, h.compute);
    with = haul_fetch(&h, &one, 0, 4 * SMALL);
    CHECK_EQ(ebb_mover_use(h.mover, with, h.compute), EBB_OK);
    CHECK(haul_right(&h, one.staged, 0, 4 * SMALL, h.compute));
    CHECK_EQ(ebb_mover_done(h.mover, with, h.compute), EBB_OK);
    haul_shut(&h);
}

static uint64_t fetch_at(haul *h, ebb_load *load, uint64_t at)
{
    uint64_t cargo = 0;
    *load = haul_load(h, 0, SMALL);
    const ebb_fetch how = {.at = at, .skip = 2 * SMALL};
    CHECK_EQ(ebb_mover_fetch(h->mover, h->vbar, load, 1, &how, &cargo), EBB_OK);
    haul_check(h);
    return cargo;
}

/* If that skips little, it is where it was before. */
static void a_cargo_goes_where_it_was(void)
{
    haul h;
    haul_open(&h, 8 * LARGE, 16 * SMALL, 4 * LARGE);
    haul_stage_all(&h);
    ebb_load load, first;
    uint64_t base = haul_stats(&h).address, cargo[4], start, ring;
    CHECK_EQ(ebb_mover_head(h.mover, &start, &ring), base);
    CHECK_EQ(start, base);
    CHECK_EQ(ring, 16 * SMALL);
    cargo[0] = fetch_at(&h, &first, base + 2 * SMALL);
    CHECK_EQ(first.staged, base + 2 * SMALL);
    cargo[1] = fetch_at(&h, &load, base + 6 * SMALL); /* too far */
    CHECK_EQ(load.staged, base + 3 * SMALL);
    cargo[2] = fetch_at(&h, &load, base + 3 * SMALL); /* that is somebody's */
    CHECK_EQ(load.staged, base + 4 * SMALL);
    cargo[3] = haul_fetch(&h, &load, 0, 10 * SMALL);
    CHECK_EQ(ebb_mover_head(h.mover, NULL, NULL), base + 15 * SMALL);
    haul_use(&h, cargo[0], &first, 1000, h.compute);
    cargo[0] = fetch_at(&h, &load, base + SMALL); /* round the end */
    CHECK_EQ(load.staged, base + SMALL);
    CHECK_EQ(ebb_mover_drop(h.mover, cargo[0]), EBB_OK);
    for (int i = 1; i < 4; i++)
        CHECK_EQ(ebb_mover_drop(h.mover, cargo[i]), EBB_OK);
    for (int i = 0; i < 3; i++) { /* no address of the ring */
        const uint64_t wrong[] = {1, base + 16 * SMALL, UINT64_MAX};
        cargo[0] = fetch_at(&h, &load, wrong[i]);
        CHECK(load.staged >= base && load.staged <= base + 15 * SMALL);
        CHECK_EQ(ebb_mover_drop(h.mover, cargo[0]), EBB_OK);
    }
    CHECK_EQ(ebb_mover_head(NULL, &start, &ring), 0);
    CHECK(!start && !ring);
    haul_shut(&h);
}

/* A cargo of the storm: where it came from, and what its readers have seen. */
typedef struct flight {
    ebb_load loads[5];
    size_t count;
    uint64_t cargo;
    unsigned uses;
    CUstream used[3];
} flight;

enum { FLIGHTS = 12, SEEN = 30000 };

static void storm(unsigned seed)
{
    haul h;
    haul_open(&h, 8 * LARGE, 3 * SMALL, LARGE);
    haul_stage_all(&h);
    CUstream streams[3] = {core_lasting(&h.c), core_stream(&h.c), NULL};
    flight flights[FLIGHTS] = {0};
    static int expected[SEEN];
    unsigned seen = 0, grown = 0, placed = 0;
    for (int step = 0; step < SCALED(3000, 500); step++) {
        flight *f = &flights[(unsigned)rand_r(&seed) % FLIGHTS];
        if (!f->cargo) {
            f->count = 1 + (unsigned)rand_r(&seed) % 5;
            f->uses = 0;
            uint64_t most = rand_r(&seed) % 8 ? 100000 : SMALL;
            for (size_t i = 0; i < f->count; i++) {
                uint64_t bytes = 1 + (unsigned)rand_r(&seed) % most;
                uint64_t offset = (unsigned)rand_r(&seed) % (LARGE - bytes);
                if (i && rand_r(&seed) % 2 && f->loads[i - 1].offset + 2 * most < LARGE)
                    offset = f->loads[i - 1].offset + f->loads[i - 1].bytes; /* a neighbour */
                f->loads[i] = haul_load(&h, offset, bytes);
            }
            /* In two parts, sometimes. */
            size_t rest = rand_r(&seed) % 2 ? f->count / 2 : 0;
            uint64_t with = 0;
            f->count -= rest;
            /* Near some place, sometimes. */
            uint64_t at = 0;
            if (rand_r(&seed) % 2)
                at = ebb_mover_head(h.mover, NULL, NULL) +
                     (unsigned)rand_r(&seed) % SMALL / 512 * 512;
            if (rand_r(&seed) % 4 == 0)
                at = haul_stats(&h).address + (unsigned)rand_r(&seed) % SMALL / 512 * 512;
            ebb_fetch how = {.at = at, .skip = SMALL};
            ebb_status status =
                ebb_mover_fetch(h.mover, h.vbar, f->loads, f->count, &how, &f->cargo);
            how.with = f->cargo;
            placed += f->cargo && at && at == f->loads[0].staged;
            CHECK(status == EBB_OK || status == EBB_OFFLOADED);
            CHECK_EQ(f->cargo != 0, status == EBB_OK);
            if (rest && f->cargo)
                status = ebb_mover_fetch(h.mover, h.vbar, f->loads + f->count, rest, &how, &with);
            CHECK(status == EBB_OK || status == EBB_OFFLOADED);
            f->count += with && with == f->cargo ? rest : 0;
            grown += with && with == f->cargo;
            if (with && with != f->cargo)
                CHECK_EQ(ebb_mover_drop(h.mover, with), EBB_OK);
        } else if (f->uses < 2 && rand_r(&seed) % 2) {
            CUstream s = f->used[f->uses++] = streams[(unsigned)rand_r(&seed) % 3];
            CHECK_EQ(ebb_mover_use(h.mover, f->cargo, s), EBB_OK);
            for (size_t i = 0; i < f->count && seen + 2 < SEEN; i++) {
                const ebb_load *l = &f->loads[i];
                MUST(h.c.driver.cuMemcpyDtoHAsync(h.c.host + seen, l->staged, 1, s));
                expected[seen++] = haul_value(l->offset);
                MUST(h.c.driver.cuMemcpyDtoHAsync(h.c.host + seen, l->staged + l->bytes - 1, 1, s));
                expected[seen++] = haul_value(l->offset + l->bytes - 1);
            }
            if (rand_r(&seed) % 4 == 0)
                CHECK_EQ(rig_kernel("reads", f->loads[0].staged, f->loads[0].bytes, EBBSIM_READ,
                                    rig_length(2) / 8, s),
                         0);
        } else if (f->uses) {
            CHECK_EQ(ebb_mover_done(h.mover, f->cargo, f->used[--f->uses]), EBB_OK);
            f->cargo = f->uses ? f->cargo : 0;
        } else {
            CHECK_EQ(ebb_mover_drop(h.mover, f->cargo), EBB_OK);
            f->cargo = 0;
        }
        CHECK_EQ(ebb__mover_check(h.mover), 0);
    }
    for (int i = 0; i < FLIGHTS; i++) {
        while (flights[i].uses)
            CHECK_EQ(ebb_mover_done(h.mover, flights[i].cargo, flights[i].used[--flights[i].uses]),
                     EBB_OK);
        if (flights[i].cargo)
            ebb_mover_drop(h.mover, flights[i].cargo);
    }
    for (int i = 0; i < 3; i++)
        MUST(h.c.driver.cuStreamSynchronize(streams[i]));
    unsigned wrong = 0;
    for (unsigned i = 0; i < seen; i++)
        wrong += h.c.host[i] != expected[i];
    CHECK_EQ(wrong, 0);
    ebb_mover_stats stats = haul_stats(&h);
    CHECK(stats.no_room && stats.waits && stats.cargoes > 50 && !stats.cargoes_out);
    CHECK(grown && placed);
    haul_shut(&h);
}

static void cargoes_of_all_sizes_in_any_order_arrive(void)
{
    for (unsigned seed = 1; seed <= SCALED(6, 2); seed++)
        storm(seed);
}

int main(void)
{
    RUN(a_copy_waits_for_those_whose_place_it_takes_and_for_nobody_else);
    RUN(a_part_waits_for_its_own_place);
    RUN(what_is_left_before_the_end_is_used_if_it_is_worth_it);
    RUN(every_user_of_a_place_is_waited_for);
    RUN(places_come_free_from_the_oldest_on);
    RUN(what_was_dropped_last_is_had_again_at_once);
    RUN(what_was_used_last_makes_room_if_nothing_else_does);
    RUN(a_use_is_over_also_if_no_event_can_tell);
    RUN(a_cargo_grows_until_it_is_used);
    RUN(a_cargo_goes_where_it_was);
    RUN(cargoes_of_all_sizes_in_any_order_arrive);
    return REPORT();
}
