/* What a VBAR does for one model and for two: residency, priority, watermark, signatures. */
#include "kit.h"

static void a_fault_makes_a_range_resident_and_keeps_its_contents(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 96 * MIB + 5 * MIB);
    CHECK_EQ(core_stats(v).pages, 3 + 3);
    uint64_t offset, signature, again;
    CHECK_EQ(ebb_vbar_alloc(v, 40 * MIB, &offset), EBB_OK);
    CHECK_EQ(offset, 0);
    CHECK_EQ(ebb_vbar_fault(v, 0, 40 * MIB, s, &signature), EBB_OK);
    CHECK(signature != 0);
    core_fill(&c, v, 0, 40 * MIB, 7, s);
    CHECK_EQ(ebb_vbar_filled(v, 0, 40 * MIB, s), EBB_OK);
    CHECK_EQ(ebb_vbar_unpin(v, 0, 40 * MIB, s), EBB_OK);
    CHECK_EQ(core_stats(v).resident, 64 * MIB);
    CHECK_EQ(ebb_vbar_fault(v, 0, 40 * MIB, s, &again), EBB_OK);
    CHECK_EQ(again, signature);
    CHECK_EQ(core_read(&c, v, 39 * MIB, s), 7);
    CHECK_EQ(ebb_vbar_unpin(v, 0, 40 * MIB, s), EBB_OK);
    CHECK_EQ(ebb_vbar_unpin(v, 0, 40 * MIB, s), EBB_NOT_PINNED);
    CHECK_EQ(core_stats(v).hits, 1);
    CHECK_EQ(core_stats(v).misses, 1);
    CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    CHECK_EQ(ebb_vbar_destroy(v), EBB_GONE);
    core_close(&c);
}

static void as_much_of_a_vbar_as_was_asked_for_is_in_small_pages(void)
{
    core c;
    core_open(&c, 512 * MIB, 50 * MIB);
    CUstream s = core_lasting(&c);
    static const struct {
        uint64_t fine, pages;
    } cases[] = {
        {0, 3 + 2},         {4 * MIB, 3 + 2}, {5 * MIB, 2 + 18},
        {36 * MIB, 2 + 18}, {100 * MIB, 50},  {UINT64_MAX, 50},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ebb_vbar_options options = {
            .size = sizeof options, .bytes = 100 * MIB, .fine = cases[i].fine};
        ebb_vbar v;
        CHECK_EQ(ebb_vbar_create(c.device, &options, &v), EBB_OK);
        CHECK_EQ(core_stats(v).pages, cases[i].pages);
        CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    }
    /* All of the limit can be used then. */
    ebb_vbar_options options = {.size = sizeof options, .bytes = 100 * MIB, .fine = 100 * MIB};
    ebb_vbar v;
    uint64_t signature = 0;
    CHECK_EQ(ebb_vbar_create(c.device, &options, &v), EBB_OK);
    for (uint64_t at = 0; at < 100 * MIB; at += 10 * MIB)
        CHECK_EQ(core_use(&c, v, at, 10 * MIB, &signature, 1, s),
                 at < 50 * MIB ? EBB_OK : EBB_OFFLOADED);
    CHECK_EQ(core_stats(v).resident, 50 * MIB);
    CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    core_close(&c);
}

static void what_does_not_fit_is_offloaded_and_a_newer_model_displaces_an_older(void)
{
    core c;
    core_open(&c, 512 * MIB, 128 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar old = core_vbar(&c, 192 * MIB);
    uint64_t of_old[6] = {0}, of_new[2] = {0};
    for (uint64_t i = 0; i < 6; i++)
        CHECK_EQ(core_use(&c, old, i * LARGE, LARGE, &of_old[i], 1, s),
                 i < 4 ? EBB_OK : EBB_OFFLOADED);
    CHECK_EQ(core_stats(old).watermark, 192 * MIB);
    core_check(&c);

    ebb_vbar new = core_vbar(&c, 64 * MIB);
    for (uint64_t i = 0; i < 2; i++)
        CHECK_EQ(core_use(&c, new, i * LARGE, LARGE, &of_new[i], 2, s), EBB_OK);
    CHECK_EQ(core_stats(old).resident, 64 * MIB);
    CHECK_EQ(core_stats(old).watermark, 64 * MIB);
    CHECK_EQ(core_stats(old).evictions[EBB_FOR_WEIGHT], 2);
    uint8_t map[6];
    CHECK_EQ(ebb_vbar_residency(old, map, 6), EBB_OK);
    CHECK(map[0] == 1 && map[1] == 1 && !map[2] && !map[3]);
    /* Above the watermark: no at once. */
    CHECK_EQ(core_use(&c, old, 2 * LARGE, LARGE, &of_old[2], 1, s), EBB_OFFLOADED);

    /* prioritize() brings the first back. */
    CHECK_EQ(ebb_vbar_prioritize(old), EBB_OK);
    uint64_t before = of_old[2];
    CHECK_EQ(core_use(&c, old, 2 * LARGE, LARGE, &of_old[2], 1, s), EBB_OK);
    CHECK(of_old[2] != before);
    CHECK_EQ(core_stats(new).resident, 32 * MIB);
    CHECK_EQ(core_device_stats(&c).held, 128 * MIB);
    core_check(&c);
    core_close(&c);
}

int main(void)
{
    RUN(a_fault_makes_a_range_resident_and_keeps_its_contents);
    RUN(as_much_of_a_vbar_as_was_asked_for_is_in_small_pages);
    RUN(what_does_not_fit_is_offloaded_and_a_newer_model_displaces_an_older);
    return REPORT();
}
