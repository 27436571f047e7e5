/*
 * The order of victims: VBARs that have a page to give up, by rank, least important first.
 *
 * A treap: a tree sorted by rank, and a heap by a number drawn when a VBAR comes in, which keeps it
 * flat whatever the order of coming and going. Finding the first, the next, and coming and going take
 * a number of steps like the logarithm of the VBARs in it. Ranks are unique.
 */
#include "internal.h"

/* Put `vbar` where `old`, a child of its parent or the root, was. */
static void replace(ebb__vbar **root, ebb__vbar *old, ebb__vbar *vbar)
{
    ebb__vbar *up = old->up;
    if (!up)
        *root = vbar;
    else if (up->left == old)
        up->left = vbar;
    else
        up->right = vbar;
    if (vbar)
        vbar->up = up;
}

/* Let `child` and its parent change places, the order kept. */
static void lift(ebb__vbar **root, ebb__vbar *child)
{
    ebb__vbar *parent = child->up;
    ebb__vbar **inner = parent->left == child ? &child->right : &child->left;
    ebb__vbar **outer = parent->left == child ? &parent->left : &parent->right;
    replace(root, parent, child);
    *outer = *inner;
    if (*outer)
        (*outer)->up = parent;
    *inner = parent;
    parent->up = child;
}

/* Spread a rank over all values: neighbours get numbers that have nothing to do with each other. */
static uint64_t draw(int64_t rank)
{
    uint64_t z = (uint64_t)rank * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

void ebb__order_add(ebb__vbar **root, ebb__vbar *vbar)
{
    ebb__vbar *up = NULL, **place = root;
    while (*place) {
        up = *place;
        place = vbar->rank < up->rank ? &up->left : &up->right;
    }
    vbar->left = vbar->right = NULL;
    vbar->up = up;
    vbar->chance = draw(vbar->rank);
    *place = vbar;
    while (vbar->up && vbar->up->chance < vbar->chance)
        lift(root, vbar);
}

void ebb__order_remove(ebb__vbar **root, ebb__vbar *vbar)
{
    while (vbar->left && vbar->right)
        lift(root, vbar->left->chance > vbar->right->chance ? vbar->left : vbar->right);
    replace(root, vbar, vbar->left ? vbar->left : vbar->right);
    vbar->left = vbar->right = vbar->up = NULL;
}

ebb__vbar *ebb__order_first(ebb__vbar *root)
{
    while (root && root->left)
        root = root->left;
    return root;
}

ebb__vbar *ebb__order_next(ebb__vbar *vbar)
{
    if (vbar->right)
        return ebb__order_first(vbar->right);
    while (vbar->up && vbar->up->right == vbar)
        vbar = vbar->up;
    return vbar->up;
}
