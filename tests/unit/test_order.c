/* The order of victims against a sorted array. */
#include "harness.h"
#include "internal.h"

enum { MOST = 300 };

static uint64_t state = 1;

static unsigned below(unsigned n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)((state >> 33) % n);
}

static unsigned depth(const ebb__vbar *vbar)
{
    if (!vbar)
        return 0;
    unsigned left = depth(vbar->left), right = depth(vbar->right);
    return 1 + (left > right ? left : right);
}

static void check_links(const ebb__vbar *vbar)
{
    if (!vbar)
        return;
    CHECK(!vbar->left || (vbar->left->up == vbar && vbar->left->chance <= vbar->chance));
    CHECK(!vbar->right || (vbar->right->up == vbar && vbar->right->chance <= vbar->chance));
    check_links(vbar->left);
    check_links(vbar->right);
}

/* The VBARs that are in, by rank, are those that the tree gives one after another. */
static void check_order(ebb__vbar *root, ebb__vbar *all, const bool *in)
{
    int64_t before = INT64_MIN;
    ebb__vbar *at = ebb__order_first(root);
    for (;;) {
        ebb__vbar *next = NULL;
        for (unsigned i = 0; i < MOST; i++)
            if (in[i] && all[i].rank > before && (!next || all[i].rank < next->rank))
                next = &all[i];
        CHECK(at == next);
        if (at != next || !next)
            break;
        before = next->rank;
        at = ebb__order_next(at);
    }
    CHECK(!root || !root->up);
    check_links(root);
}

static void coming_and_going_keeps_the_order(void)
{
    static ebb__vbar all[MOST];
    static bool in[MOST];
    ebb__vbar *root = NULL;
    int64_t top = 0, bottom = 0;
    for (unsigned step = 0; step < 6000; step++) {
        unsigned i = below(MOST);
        if (in[i]) {
            ebb__order_remove(&root, &all[i]);
        } else {
            all[i].rank = below(3) ? ++top : --bottom;
            ebb__order_add(&root, &all[i]);
        }
        in[i] = !in[i];
        if (step % 16 == 0)
            check_order(root, all, in);
    }
    for (unsigned i = 0; i < MOST; i++)
        if (in[i])
            ebb__order_remove(&root, &all[i]);
    CHECK(root == NULL);
}

/* Every order of coming and of going of five. */
static void every_permutation_of_a_few_is_right(void)
{
    static ebb__vbar all[MOST];
    enum { FEW = 5 };
    for (unsigned code = 0; code < 120 * 120; code++) {
        bool in[MOST] = {false};
        ebb__vbar *root = NULL;
        for (unsigned pass = 0, rest; pass < 2; pass++) {
            unsigned left[FEW] = {0, 1, 2, 3, 4};
            rest = pass ? code / 120 : code % 120;
            for (unsigned k = FEW; k > 0; k--) {
                unsigned which = rest % k, i = left[which];
                rest /= k;
                left[which] = left[k - 1];
                all[i].rank = (int64_t)i * 3 - 5;
                if (pass)
                    ebb__order_remove(&root, &all[i]);
                else
                    ebb__order_add(&root, &all[i]);
                in[i] = !pass;
                const ebb__vbar *first = ebb__order_first(root);
                unsigned least = 0;
                while (least < FEW && !in[least])
                    least++;
                CHECK(first == (least < FEW ? &all[least] : NULL));
            }
        }
        CHECK(root == NULL);
    }
}

static void rising_ranks_do_not_make_a_list(void)
{
    enum { MANY = 1 << 16 };
    ebb__vbar *all = calloc(MANY, sizeof *all), *root = NULL;
    REQUIRE(all != NULL);
    for (int i = 0; i < MANY; i++) {
        all[i].rank = i;
        ebb__order_add(&root, &all[i]);
    }
    CHECK(depth(root) < 64); /* about 40: twice the logarithm and some */
    for (int i = 0; i < MANY; i++) {
        CHECK(ebb__order_first(root) == &all[i]);
        ebb__order_remove(&root, &all[i]);
    }
    CHECK(root == NULL);
    free(all);
}

int main(void)
{
    RUN(coming_and_going_keeps_the_order);
    RUN(every_permutation_of_a_few_is_right);
    RUN(rising_ranks_do_not_make_a_list);
    return REPORT();
}
