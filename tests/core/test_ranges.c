/* Sizes, pages, ranges and batches of a VBAR. */
#include "rig.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

static void any_size_is_rounded_to_pages(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    static const struct {
        uint64_t bytes, rounded, pages;
    } cases[] = {{1, SMALL, 1},
                 {SMALL, SMALL, 1},
                 {SMALL + 1, 2 * SMALL, 2},
                 {LARGE - 1, LARGE, 1},
                 {LARGE, LARGE, 1},
                 {LARGE + 1, LARGE + SMALL, 2},
                 {3 * LARGE + 5 * SMALL, 3 * LARGE + 5 * SMALL, 8}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ebb_vbar v = core_vbar(&c, cases[i].bytes);
        CHECK_EQ(core_stats(v).bytes, cases[i].rounded);
        CHECK_EQ(core_stats(v).pages, cases[i].pages);
        CHECK_EQ(core_stats(v).watermark, cases[i].rounded);
        /* Its pages lie one after another and fill it. */
        uint64_t at = 0;
        ebb_range page;
        for (uint64_t k = 0; k < cases[i].pages; k++) {
            CHECK_EQ(ebb_vbar_page(v, k, &page), EBB_OK);
            CHECK_EQ(page.offset, at);
            CHECK(page.bytes == SMALL || page.bytes == LARGE);
            at += page.bytes;
        }
        CHECK_EQ(at, cases[i].rounded);
        CHECK_EQ(ebb_vbar_page(v, cases[i].pages, &page), EBB_INVALID);
        /* The last byte can be used, the one behind it not. */
        CHECK_EQ(rig_touch(v, cases[i].rounded - 1, 1, NULL), EBB_OK);
        CHECK_EQ(rig_touch(v, cases[i].rounded, 1, NULL), EBB_INVALID);
        CHECK_EQ(rig_touch(v, cases[i].rounded - 1, 2, NULL), EBB_INVALID);
        core_check(&c);
        CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    }
    core_close(&c);
}

static void ten_terabytes_of_addresses_cost_no_memory(void)
{
    core c;
    core_open(&c, 512 * MIB, 128 * MIB);
    /* A thread sanitizer keeps most addresses for itself. */
    uint64_t bytes = SANITIZED ? UINT64_C(64) << 30 : UINT64_C(10) << 40;
    ebb_vbar v = core_vbar(&c, bytes);
    CHECK_EQ(core_stats(v).pages, bytes / LARGE);
    CHECK_EQ(core_device_stats(&c).held, 0);
    uint64_t places[] = {0, bytes / 2, bytes - LARGE, 77 * LARGE};
    for (int i = 0; i < 4; i++)
        CHECK_EQ(rig_touch(v, places[i], LARGE, NULL), EBB_OK);
    CHECK_EQ(core_stats(v).resident, 128 * MIB);
    /* The top one is the first to go, for a lower one. */
    CHECK_EQ(rig_touch(v, LARGE, LARGE, NULL), EBB_OK);
    CHECK_EQ(core_stats(v).watermark, bytes - LARGE);
    CHECK_EQ(rig_touch(v, bytes - LARGE, LARGE, NULL), EBB_OFFLOADED);
    core_check(&c);
    core_close(&c);
}

static void too_much_is_refused(void)
{
    core c;
    core_open(&c, 512 * MIB, 128 * MIB);
    ebb_vbar v = {77};
    ebb_vbar_options options = {.size = sizeof options, .bytes = UINT64_MAX};
    CHECK_EQ(ebb_vbar_create(c.device, &options, &v), EBB_INVALID);
    options.bytes = UINT64_MAX / 2 - 2 * SMALL;
    CHECK_EQ(ebb_vbar_create(c.device, &options, &v), EBB_NO_ADDRESSES);
    CHECK_EQ(v.id, 77);
    core_close(&c);
}

static void ranges_are_taken_one_after_another_until_it_is_full(void)
{
    core c;
    core_open(&c, 512 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, SMALL);
    uint64_t offset;
    CHECK_EQ(ebb_vbar_alloc(v, 1, &offset), EBB_OK);
    CHECK_EQ(offset, 0);
    CHECK_EQ(ebb_vbar_alloc(v, 513, &offset), EBB_OK);
    CHECK_EQ(offset, 512);
    CHECK_EQ(ebb_vbar_alloc(v, 512, &offset), EBB_OK);
    CHECK_EQ(offset, 512 + 1024);
    CHECK_EQ(core_stats(v).allocated, 2048);
    CHECK_EQ(ebb_vbar_alloc(v, SMALL - 2047, &offset), EBB_FULL);
    CHECK_EQ(ebb_vbar_alloc(v, UINT64_MAX, &offset), EBB_FULL);
    CHECK_EQ(offset, 1536);
    CHECK_EQ(ebb_vbar_alloc(v, SMALL - 2049, &offset), EBB_OK);
    CHECK_EQ(offset, 2048);
    CHECK_EQ(core_stats(v).allocated, SMALL);
    CHECK_EQ(ebb_vbar_alloc(v, 1, &offset), EBB_FULL);
    core_close(&c);
}

static void pins_nest(void)
{
    core c;
    core_open(&c, 512 * MIB, LARGE);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, LARGE);
    uint64_t signature;
    for (int i = 0; i < 3; i++)
        CHECK_EQ(ebb_vbar_fault(v, (uint64_t)i, 100, s, &signature), EBB_OK);
    ebb_vbar newer = core_vbar(&c, LARGE);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(rig_page(v, 0), EBB_PAGE_RESIDENT | EBB_PAGE_PINNED);
        CHECK_EQ(rig_touch(newer, 0, LARGE, s), EBB_OFFLOADED);
        core_check(&c);
        CHECK_EQ(ebb_vbar_unpin(v, 0, 1, s), EBB_OK);
    }
    CHECK_EQ(rig_page(v, 0), EBB_PAGE_RESIDENT);
    CHECK_EQ(ebb_vbar_unpin(v, 0, 1, s), EBB_NOT_PINNED);
    CHECK_EQ(rig_touch(newer, 0, LARGE, s), EBB_OK);
    CHECK_EQ(rig_page(v, 0), 0);
    core_close(&c);
}

static void a_range_over_the_border_pins_large_and_small_pages(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 2 * LARGE + 3 * SMALL);
    uint64_t signature, inner;
    CHECK_EQ(ebb_vbar_fault(v, 2 * LARGE - 1, 2, s, &signature), EBB_OK);
    CHECK_EQ(core_stats(v).resident, LARGE + SMALL);
    CHECK_EQ(core_stats(v).pinned, LARGE + SMALL);
    CHECK_EQ(rig_page(v, 0), 0);
    CHECK_EQ(rig_page(v, 1), EBB_PAGE_RESIDENT | EBB_PAGE_PINNED);
    CHECK_EQ(rig_page(v, 2), EBB_PAGE_RESIDENT | EBB_PAGE_PINNED);
    CHECK_EQ(rig_page(v, 3), 0);
    /* Part of it resident: only the rest is loaded, and the signature is the newest page's. */
    CHECK_EQ(ebb_vbar_fault(v, 2 * LARGE, 2 * SMALL, s, &inner), EBB_OK);
    CHECK(inner > signature);
    CHECK_EQ(core_stats(v).loads, 3);
    CHECK_EQ(ebb_vbar_unpin(v, 2 * LARGE, 2 * SMALL, s), EBB_OK);
    /* More than is pinned cannot be unpinned, and nothing has changed. */
    CHECK_EQ(ebb_vbar_unpin(v, 2 * LARGE - 1, SMALL + 2, s), EBB_NOT_PINNED);
    CHECK_EQ(core_stats(v).pinned, LARGE + SMALL);
    CHECK_EQ(ebb_vbar_unpin(v, 2 * LARGE - 1, 2, s), EBB_OK);
    CHECK_EQ(core_stats(v).pinned, 0);
    core_close(&c);
}

/* ---- batches -------------------------------------------------------------------------------------- */

static void a_batch_is_all_or_nothing(void)
{
    core c;
    core_open(&c, 512 * MIB, 3 * LARGE);
    CUstream s = core_lasting(&c);
    ebb_vbar low = core_vbar(&c, LARGE), v = core_vbar(&c, 4 * LARGE);
    CHECK_EQ(rig_touch(low, 0, LARGE, s), EBB_OK);
    ebb_range ranges[4];
    uint64_t signatures[4] = {5, 5, 5, 5};
    for (uint64_t i = 0; i < 4; i++)
        ranges[i] = (ebb_range){i * LARGE, LARGE};
    CHECK_EQ(ebb_vbar_fault_many(v, ranges, 4, s, signatures), EBB_OFFLOADED);
    CHECK_EQ(core_stats(v).pinned, 0);
    CHECK_EQ(core_stats(v).resident, 0);
    /* What cannot be had for anything costs nobody a page. */
    CHECK_EQ(core_stats(low).resident, LARGE);
    CHECK_EQ(core_stats(v).offloaded, 4);
    CHECK_EQ(ebb_vbar_fault_many(v, ranges, 3, s, signatures), EBB_OK);
    CHECK_EQ(core_stats(v).pinned, 3 * LARGE);
    CHECK_EQ(core_stats(low).resident, 0);
    /* Past the end, or nothing: refused before anything is done. */
    ranges[1].bytes = 0;
    CHECK_EQ(ebb_vbar_unpin_many(v, ranges, 3, s), EBB_INVALID);
    ranges[1].bytes = LARGE;
    CHECK_EQ(ebb_vbar_unpin_many(v, ranges, 4, s), EBB_NOT_PINNED);
    CHECK_EQ(core_stats(v).pinned, 3 * LARGE);
    CHECK_EQ(ebb_vbar_unpin_many(v, ranges, 3, s), EBB_OK);
    CHECK_EQ(core_stats(v).pinned, 0);
    core_close(&c);
}

static void what_pins_make_impossible_costs_nobody_a_page(void)
{
    core c;
    core_open(&c, 512 * MIB, 4 * LARGE);
    CUstream s = core_lasting(&c);
    ebb_vbar low = core_vbar(&c, 2 * LARGE), v = core_vbar(&c, 6 * LARGE);
    CHECK_EQ(rig_touch(low, 0, 2 * LARGE, s), EBB_OK);
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(v, 0, 2 * LARGE, s, &signature), EBB_OK);
    /* Three more: two could be had from the other, and that would be for nothing. */
    CHECK_EQ(rig_touch(v, 2 * LARGE, 3 * LARGE, s), EBB_OFFLOADED);
    CHECK_EQ(core_stats(low).resident, 2 * LARGE);
    CHECK_EQ(core_stats(low).watermark, 2 * LARGE);
    CHECK_EQ(rig_touch(v, 2 * LARGE, 2 * LARGE, s), EBB_OK);
    CHECK_EQ(core_stats(low).resident, 0);
    CHECK_EQ(ebb_vbar_unpin(v, 0, 2 * LARGE, s), EBB_OK);
    core_close(&c);
}

static void a_page_shared_by_ranges_is_counted_once(void)
{
    core c;
    core_open(&c, 512 * MIB, 2 * LARGE);
    CUstream s = core_lasting(&c);
    ebb_vbar low = core_vbar(&c, 2 * LARGE), v = core_vbar(&c, LARGE);
    CHECK_EQ(rig_touch(low, 0, 2 * LARGE, s), EBB_OK);
    ebb_range ranges[8];
    uint64_t signatures[8];
    for (uint64_t i = 0; i < 8; i++)
        ranges[i] = (ebb_range){i * MIB, MIB};
    CHECK_EQ(ebb_vbar_fault_many(v, ranges, 8, s, signatures), EBB_OK);
    CHECK_EQ(core_stats(low).resident, LARGE); /* one page gave way, not eight */
    for (int i = 1; i < 8; i++)
        CHECK_EQ(signatures[i], signatures[0]);
    CHECK_EQ(ebb_vbar_unpin_many(v, ranges, 7, s), EBB_OK);
    CHECK_EQ(core_stats(v).pinned, LARGE);
    /* There is one pin left, not two: nothing changes. */
    CHECK_EQ(ebb_vbar_unpin_many(v, ranges, 2, s), EBB_NOT_PINNED);
    CHECK_EQ(core_stats(v).pinned, LARGE);
    ebb_range apart[3] = {{5, 1}, {3, 1}, {4, 1}};
    CHECK_EQ(ebb_vbar_unpin_many(v, apart, 3, s), EBB_NOT_PINNED);
    CHECK_EQ(ebb_vbar_unpin_many(v, apart, 3, core_stream(&c)), EBB_NOT_PINNED);
    CHECK_EQ(core_stats(v).pinned, LARGE);
    core_check(&c);
    CHECK_EQ(ebb_vbar_unpin(v, 0, 1, s), EBB_OK);
    core_close(&c);
}

static void each_range_has_its_own_signature(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 4 * LARGE);
    CHECK_EQ(rig_touch(v, 2 * LARGE, LARGE, s), EBB_OK);
    ebb_range ranges[3] = {{2 * LARGE, 1}, {0, 1}, {2 * LARGE - 1, 2}};
    uint64_t first[3], second[3];
    CHECK_EQ(ebb_vbar_fault_many(v, ranges, 3, s, first), EBB_OK);
    CHECK_EQ(ebb_vbar_unpin_many(v, ranges, 3, s), EBB_OK);
    CHECK_EQ(first[0], 1);
    CHECK(first[1] != first[0]);
    CHECK(first[2] > first[0]); /* its other page is new */
    CHECK_EQ(ebb_vbar_fault_many(v, ranges, 3, s, second), EBB_OK);
    CHECK_EQ(ebb_vbar_unpin_many(v, ranges, 3, s), EBB_OK);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(second[i], first[i]);
    CHECK_EQ(core_stats(v).hits, 3);
    CHECK_EQ(core_stats(v).misses, 1 + 3);
    core_close(&c);
}

static void a_large_batch_takes_a_great_many_victims(void)
{
    core c;
    core_open(&c, 1024 * MIB, 600 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar small[20];
    for (int i = 0; i < 20; i++) {
        small[i] = core_vbar(&c, 30 * MIB);
        CHECK_EQ(rig_touch(small[i], 0, 30 * MIB, s), EBB_OK);
    }
    CHECK_EQ(core_device_stats(&c).held, 600 * MIB);
    ebb_vbar v = core_vbar(&c, 18 * LARGE);
    CHECK_EQ(rig_touch(v, 0, 18 * LARGE, s), EBB_OK); /* 288 small victims */
    CHECK_EQ(core_stats(v).resident, 18 * LARGE);
    CHECK_EQ(core_device_stats(&c).held, 600 * MIB);
    core_close(&c);
}

int main(void)
{
    RUN(any_size_is_rounded_to_pages);
    RUN(ten_terabytes_of_addresses_cost_no_memory);
    RUN(too_much_is_refused);
    RUN(ranges_are_taken_one_after_another_until_it_is_full);
    RUN(pins_nest);
    RUN(a_range_over_the_border_pins_large_and_small_pages);
    RUN(a_batch_is_all_or_nothing);
    RUN(what_pins_make_impossible_costs_nobody_a_page);
    RUN(a_page_shared_by_ranges_is_counted_once);
    RUN(each_range_has_its_own_signature);
    RUN(a_large_batch_takes_a_great_many_victims);
    return REPORT();
}
