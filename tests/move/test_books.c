/* The books of a ring that loses its ends, and some of its middle, without a GPU. */
#include <stdlib.h>

#include "harness.h"
#include "move.h"

enum { NEAR = 6 }; /* bytes that may be skipped */

static ebb__flag flags[4096];
static size_t flag_count;

static uint64_t add(ebb__ring *ring, uint64_t bytes)
{
    uint64_t start;
    REQUIRE(ebb__ring_ready(ring));
    if (!ebb__ring_place(ring, bytes, UINT64_MAX, NEAR, &start))
        return 0;
    for (ebb__cargo *past; (past = ebb__ring_past(ring, start, start + bytes));)
        ebb__ring_forget(ring, past);
    uint64_t number = ebb__ring_add(ring, start, bytes, &flags[flag_count++ % 4096]);
    CHECK_EQ(ebb__ring_check(ring), 0);
    return number;
}

static uint64_t start_of(const ebb__ring *ring, uint64_t number)
{
    const ebb__cargo *cargo = ebb__ring_find(ring, number);
    REQUIRE(cargo);
    return cargo->start;
}

static void over(ebb__ring *ring, uint64_t number, ebb__flag *done)
{
    ebb__cargo *cargo = ebb__ring_find(ring, number);
    REQUIRE(cargo);
    cargo->done = done;
    CHECK(ebb__ring_over(ring, cargo));
}

static void places_go_round_between_the_new_ends(void)
{
    ebb__ring ring = {0};
    uint64_t at;
    ebb__ring_begin(&ring, 100);
    uint64_t a = add(&ring, 40), b = add(&ring, 60);
    over(&ring, a, NULL);
    ebb__ring_find(&ring, b)->users = 1;
    ebb__ring_cut(&ring, 0, 20); /* a's place, or half of it */
    CHECK_EQ(ebb__ring_check(&ring), 0);
    CHECK_EQ(ebb__ring_used(&ring), 60);
    CHECK(!ebb__ring_place(&ring, 21, UINT64_MAX, NEAR, &at));
    CHECK(!ebb__ring_place(&ring, 21, 10, NEAR, &at)); /* what was given up is no place */
    uint64_t c = add(&ring, 20);
    CHECK_EQ(start_of(&ring, c), 20);
    CHECK_EQ(ebb__ring_used(&ring), 80);
    over(&ring, b, NULL);
    ebb__ring_cut(&ring, 70, 100);
    uint64_t d = add(&ring, 30);
    CHECK_EQ(start_of(&ring, d), 40);
    CHECK(!add(&ring, 1));
    over(&ring, c, NULL);
    uint64_t e = add(&ring, 15);
    CHECK_EQ(start_of(&ring, e), 20);
    CHECK(ebb__ring_place(&ring, 5, 18, NEAR, &at) && at == 35); /* below the ring */
    over(&ring, d, NULL);
    over(&ring, e, NULL);
    uint64_t f = add(&ring, 33);
    CHECK_EQ(ring.head, 68);
    CHECK(ebb__ring_place(&ring, 5, 18, NEAR, &at) && at == 20); /* near, and below the ring */
    CHECK(ebb__ring_place(&ring, 5, 22, NEAR, &at) && at == 22);
    over(&ring, f, NULL);
    ebb__ring_begin(&ring, 50);
    CHECK_EQ(start_of(&ring, add(&ring, 50)), 0);
    ebb__ring_free(&ring);
}

static void what_was_dropped_last_is_room_again(void)
{
    ebb__ring ring = {0};
    ebb__flag read = {0};
    ebb__ring_begin(&ring, 100);
    uint64_t a = add(&ring, 30), b = add(&ring, 10), c = add(&ring, 20), d = add(&ring, 40);
    CHECK(!ebb__ring_in_use(&ring, 0, 100));
    ebb__ring_find(&ring, a)->users = 1;
    CHECK(ebb__ring_in_use(&ring, 29, 100) && !ebb__ring_in_use(&ring, 30, 100));
    CHECK_EQ(ebb__ring_unused(&ring, 0, 30), 0);
    CHECK_EQ(ebb__ring_unused(&ring, 35, 100), b);
    CHECK_EQ(ebb__ring_unused(&ring, 60, 61), d);
    over(&ring, b, &read);
    CHECK(ebb__ring_read(&ring, 0, 31) && !ebb__ring_read(&ring, 40, 100));
    over(&ring, c, NULL);
    CHECK_EQ(ring.head, 100); /* it is not the last */
    over(&ring, d, NULL);
    CHECK_EQ(ring.head, 40); /* behind b, which has been read */
    CHECK_EQ(ebb__ring_check(&ring), 0);
    ebb__ring_cut(&ring, 70, 100);
    CHECK_EQ(ebb__ring_check(&ring), 0);
    CHECK_EQ(ring.head, 40);
    CHECK(!ebb__ring_find(&ring, d));
    uint64_t e = add(&ring, 30);
    CHECK_EQ(start_of(&ring, e), 40);
    CHECK(e != c && e != d); /* whoever knows these does not find another */
    CHECK(!add(&ring, 1));
    over(&ring, a, NULL);
    CHECK_EQ(ring.past_count, 1);
    ebb__ring_free(&ring);
}

static void what_was_read_last_is_past_if_nothing_else_helps(void)
{
    ebb__ring ring = {0};
    ebb__flag read = {0};
    ebb__ring_begin(&ring, 100);
    uint64_t a = add(&ring, 30), b = add(&ring, 50), c = add(&ring, 10);
    ebb__ring_find(&ring, a)->users = 1;
    CHECK(!ebb__ring_recede(&ring)); /* all are out */
    over(&ring, b, &read);
    CHECK(!ebb__ring_recede(&ring)); /* it is not the last */
    over(&ring, c, NULL);
    CHECK_EQ(ring.head, 80);
    CHECK(!add(&ring, 40));
    CHECK(ebb__ring_recede(&ring));
    CHECK_EQ(ring.head, 30);
    CHECK_EQ(ring.past_count, 1);
    CHECK_EQ(ebb__ring_past(&ring, 30, 31)->done, &read);
    CHECK_EQ(ebb__ring_check(&ring), 0);
    CHECK(!ebb__ring_recede(&ring));
    CHECK(!ebb__ring_find(&ring, b) && !ebb__ring_find(&ring, c));
    over(&ring, a, NULL);
    CHECK_EQ(ring.past_count, 1); /* once */
    ebb__ring_free(&ring);
}

/* Behind one that stays: what comes to nothing is not kept in mind for ever. */
static void the_books_do_not_grow_behind_one_that_stays(void)
{
    ebb__ring ring = {0};
    ebb__ring_begin(&ring, 100);
    uint64_t a = add(&ring, 30), dropped = 0, n;
    while (dropped < 600 && (n = add(&ring, 5))) {
        over(&ring, n, NULL);
        dropped++;
    }
    CHECK(dropped > 200 && dropped < 600);
    over(&ring, a, NULL);
    CHECK_EQ(ebb__ring_used(&ring), 0);
    CHECK(add(&ring, 70));
    ebb__ring_free(&ring);
}

/* a and b are in use, around the end: what is between them goes. */
static void the_middle_goes_and_places_go_round_it(void)
{
    ebb__ring ring = {0};
    uint64_t at;
    ebb__ring_begin(&ring, 100);
    uint64_t z = add(&ring, 80), a = add(&ring, 20);
    over(&ring, z, NULL);
    uint64_t b = add(&ring, 20), c = add(&ring, 10);
    ebb__ring_find(&ring, a)->users = ebb__ring_find(&ring, b)->users = 1;
    CHECK_EQ(start_of(&ring, c), 20);
    over(&ring, c, NULL);
    ebb__ring_cut(&ring, 25, 70);
    CHECK_EQ(ebb__ring_check(&ring), 0);
    CHECK_EQ(ebb__ring_size(&ring), 55);
    CHECK_EQ(ebb__ring_used(&ring), 40);
    /* From the head to the gap, or from behind it to the tail; never across. */
    CHECK(ebb__ring_place(&ring, 5, UINT64_MAX, NEAR, &at) && at == 20);
    CHECK(ebb__ring_place(&ring, 6, UINT64_MAX, NEAR, &at) && at == 70);
    CHECK(ebb__ring_place(&ring, 5, 71, NEAR, &at) && at == 20); /* that skips too much */
    CHECK(ebb__ring_place(&ring, 6, 22, NEAR, &at) && at == 70);
    CHECK(!ebb__ring_place(&ring, 11, UINT64_MAX, NEAR, &at));
    CHECK_EQ(ebb__ring_room(&ring, 30, 1), 5);
    CHECK_EQ(ebb__ring_room(&ring, 30, 6), 10);
    CHECK_EQ(ebb__ring_room(&ring, 30, UINT64_MAX), 10);
    uint64_t d = add(&ring, 5), e = add(&ring, 7);
    CHECK_EQ(start_of(&ring, d), 20);
    CHECK_EQ(start_of(&ring, e), 70);
    CHECK_EQ(ebb__ring_used(&ring), 52);
    CHECK(!ebb__ring_extensible(&ring, e, 4) && ebb__ring_extensible(&ring, e, 3));
    CHECK(!add(&ring, 4)); /* the tail */
    over(&ring, a, NULL);
    uint64_t f = add(&ring, 23); /* all of the upper piece, up to its end */
    CHECK_EQ(start_of(&ring, f), 77);
    CHECK(!add(&ring, 1));
    over(&ring, b, NULL);
    over(&ring, d, NULL);
    uint64_t g = add(&ring, 25);
    CHECK_EQ(start_of(&ring, g), 0);
    over(&ring, e, NULL);
    ebb__ring_cut(&ring, 70, 77);
    CHECK_EQ(ring.piece_count, 2);
    over(&ring, g, NULL);
    ebb__ring_cut(&ring, 0, 25); /* a piece as a whole */
    CHECK_EQ(ebb__ring_check(&ring), 0);
    CHECK_EQ(ring.piece_count, 1);
    CHECK_EQ(ebb__ring_used(&ring), 23);
    over(&ring, f, NULL);
    ebb__ring_cut(&ring, 77, 100);
    CHECK_EQ(ebb__ring_size(&ring), 0);
    CHECK(!ebb__ring_place(&ring, 1, 80, NEAR, &at) && ebb__ring_room(&ring, 1, 0) == 0);
    ebb__ring_free(&ring);
}

/* The piece that has a range, if there may be one piece more. */
static const ebb__span *piece_with(const ebb__ring *ring, uint64_t start, uint64_t end)
{
    for (size_t i = 0; i < ring->piece_count && ring->piece_count < EBB__PIECES; i++)
        if (start >= ring->pieces[i].start && end <= ring->pieces[i].end)
            return &ring->pieces[i];
    return NULL;
}

/* Cargoes that have been read, and that has not been waited for. */
static uint64_t readers(const ebb__ring *ring)
{
    uint64_t count = ring->past_count;
    for (uint64_t n = ring->first; n != ring->next; n++)
        count += ring->cargoes[n & (ring->room - 1)].done != NULL;
    return count;
}

/* Anything, in any order, as long as nothing that is in use is given up. */
static void books_in_a_storm(void)
{
    static ebb__flag read;
    unsigned given = 0, round = 0, wrapped = 0, middle = 0, receded = 0;
    for (unsigned seed = 1; seed <= 200; seed++) {
        unsigned state = seed;
        ebb__ring ring = {0};
        ebb__ring_begin(&ring, 64);
        for (int step = 0; step < 200; step++) {
            uint64_t n = ring.first + (unsigned)rand_r(&state) % (ring.next - ring.first + 1);
            ebb__cargo *cargo = ebb__ring_find(&ring, n);
            switch (rand_r(&state) % 8) {
            case 0:
            case 1:
            case 2: {
                uint64_t bytes = 1 + (unsigned)rand_r(&state) % 20, read_by = readers(&ring);
                bool added = add(&ring, bytes);
                if (!added && rand_r(&state) % 2) {
                    receded += ebb__ring_recede(&ring);
                    CHECK_EQ(readers(&ring), read_by); /* whoever was to be waited for still is */
                }
                round += added;
                break;
            }
            case 3:
                if (cargo)
                    cargo->users = 1;
                break;
            case 4:
            case 5:
                if (cargo)
                    over(&ring, n, cargo->users ? &read : NULL);
                break;
            case 6: {
                uint64_t start = (unsigned)rand_r(&state) % 64;
                uint64_t end = start + 1 + (unsigned)rand_r(&state) % 4;
                const ebb__span *piece = piece_with(&ring, start, end);
                if (!piece || ebb__ring_in_use(&ring, start, end))
                    break;
                middle += start > piece->start && end < piece->end;
                ebb__cargo *gone;
                while ((n = ebb__ring_unused(&ring, start, end)))
                    over(&ring, n, NULL);
                while ((gone = ebb__ring_past(&ring, start, end)))
                    ebb__ring_forget(&ring, gone);
                while ((gone = ebb__ring_read(&ring, start, end)))
                    gone->done = NULL;
                ebb__ring_cut(&ring, start, end);
                given++;
                wrapped += ring.first != ring.next && ring.head <= start;
                break;
            }
            default:
                while (ring.past_count)
                    ebb__ring_forget(&ring, ring.past);
                if (!ebb__ring_out(&ring) && rand_r(&state) % 4 == 0)
                    ebb__ring_begin(&ring, 64);
            }
            CHECK_EQ(ebb__ring_check(&ring), 0);
            CHECK(ebb__ring_used(&ring) <= ebb__ring_size(&ring));
        }
        ebb__ring_free(&ring);
    }
    CHECK(given > 500 && round > 1000 && wrapped > 100 && middle > 200 && receded > 100);
}

int main(void)
{
    RUN(places_go_round_between_the_new_ends);
    RUN(what_was_dropped_last_is_room_again);
    RUN(what_was_read_last_is_past_if_nothing_else_helps);
    RUN(the_books_do_not_grow_behind_one_that_stays);
    RUN(the_middle_goes_and_places_go_round_it);
    RUN(books_in_a_storm);
    return REPORT();
}
