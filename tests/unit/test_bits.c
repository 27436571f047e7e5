/* Sets that find their largest member, against an array of booleans. */
#include "harness.h"
#include "internal.h"

static uint64_t state = 1;

static uint64_t throw(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 20;
}

static uint64_t naive_last(const bool *member, uint64_t count, uint64_t end)
{
    for (uint64_t n = end < count ? end : count; n-- > 0;)
        if (member[n])
            return n;
    return EBB__NONE;
}

static void check_against(uint64_t count, unsigned steps, unsigned spread)
{
    size_t bytes = ebb__bits_bytes(count);
    /* One word more, to see that it is left alone. */
    uint64_t *memory = calloc(bytes / sizeof(uint64_t) + 1, sizeof *memory);
    bool *member = calloc(count, sizeof *member);
    REQUIRE(memory && member);
    memory[bytes / sizeof(uint64_t)] = 0x5A5A5A5A5A5A5A5A;
    ebb__bits bits;
    uint64_t members = 0;
    ebb__bits_over(&bits, memory, count);
    CHECK_EQ(ebb__bits_last(&bits, EBB__NONE), EBB__NONE);
    for (unsigned i = 0; i < steps; i++) {
        uint64_t n = throw() % count;
        if (throw() % spread)
            n = n / 64 * 64; /* few words, so that they come and go */
        bool add = throw() % 2;
        members += add && !member[n];
        members -= !add && member[n];
        member[n] = add;
        if (add)
            ebb__bits_add(&bits, n);
        else
            ebb__bits_remove(&bits, n);
        CHECK_EQ(bits.members, members);
        CHECK_EQ(ebb__bits_has(&bits, n), member[n]);
        uint64_t end = throw() % 4 ? throw() % (count + 2) : EBB__NONE;
        CHECK_EQ(ebb__bits_last(&bits, end), naive_last(member, count, end));
    }
    CHECK_EQ(memory[bytes / sizeof(uint64_t)], 0x5A5A5A5A5A5A5A5A);
    free(member);
    free(memory);
}

static void small_sets_are_right_for_every_end(void)
{
    for (uint64_t count = 1; count <= 130; count++) {
        uint64_t memory[16] = {0};
        bool member[130] = {false};
        REQUIRE(ebb__bits_bytes(count) <= sizeof memory);
        ebb__bits bits;
        ebb__bits_over(&bits, memory, count);
        for (uint64_t n = 0; n < count; n += 1 + n % 5) {
            ebb__bits_add(&bits, n);
            member[n] = true;
            for (uint64_t end = 0; end <= count + 1; end++)
                CHECK_EQ(ebb__bits_last(&bits, end), naive_last(member, count, end));
        }
        for (uint64_t n = 0; n < count; n++) {
            ebb__bits_remove(&bits, n);
            ebb__bits_remove(&bits, n);
            member[n] = false;
            CHECK_EQ(ebb__bits_last(&bits, EBB__NONE), naive_last(member, count, count));
        }
        CHECK_EQ(bits.members, 0);
        for (unsigned i = 0; i < 16; i++)
            CHECK_EQ(memory[i], 0);
    }
}

static void sets_of_every_depth_agree_with_an_array(void)
{
    static const uint64_t counts[] = {1,    63,   64,   65,    127,    128,   4095,
                                      4096, 4097, 8191, 40000, 262144, 262145};
    for (unsigned i = 0; i < sizeof counts / sizeof *counts; i++) {
        check_against(counts[i], 1000, 1);
        check_against(counts[i], 1000, 8);
    }
}

static void a_set_with_several_words_on_top_is_walked(void)
{
    /* 2^24 numbers fill one word of the top level. */
    enum { COUNT = (1 << 24) * 3 + 5 };
    void *memory = calloc(1, ebb__bits_bytes(COUNT));
    REQUIRE(memory != NULL);
    ebb__bits bits;
    ebb__bits_over(&bits, memory, COUNT);
    ebb__bits_add(&bits, 7);
    CHECK_EQ(ebb__bits_last(&bits, EBB__NONE), 7);
    ebb__bits_add(&bits, COUNT - 1);
    CHECK_EQ(ebb__bits_last(&bits, EBB__NONE), COUNT - 1);
    CHECK_EQ(ebb__bits_last(&bits, COUNT - 1), 7);
    ebb__bits_add(&bits, 1 << 24);
    CHECK_EQ(ebb__bits_last(&bits, COUNT - 1), 1 << 24);
    CHECK_EQ(ebb__bits_last(&bits, 1 << 24), 7);
    CHECK_EQ(ebb__bits_last(&bits, 7), EBB__NONE);
    free(memory);
}

int main(void)
{
    RUN(small_sets_are_right_for_every_end);
    RUN(sets_of_every_depth_agree_with_an_array);
    RUN(a_set_with_several_words_on_top_is_walked);
    return REPORT();
}
