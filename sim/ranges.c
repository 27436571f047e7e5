/*
 * Two small containers: a tree of address ranges, and tables of checked handles.
 *
 * The tree is a treap (a search tree by address, a heap by a random weight): balanced with
 * overwhelming probability, no bookkeeping beyond one word, and split and join in a few lines. Nodes
 * are embedded in what they describe, so inserting never allocates.
 */
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static uint32_t next_weight(void)
{
    static uint32_t state = 0x9E3779B9u; /* only balances the tree: any sequence will do */
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

/* Into those that start below `at` and the rest. */
static void split(range *tree, uint64_t at, range **low, range **high)
{
    if (tree == NULL) {
        *low = *high = NULL;
    } else if (tree->start < at) {
        *low = tree;
        split(tree->right, at, &tree->right, high);
    } else {
        *high = tree;
        split(tree->left, at, low, &tree->left);
    }
}

static range *join(range *low, range *high)
{
    if (low == NULL) {
        return high;
    }
    if (high == NULL) {
        return low;
    }
    if (low->weight > high->weight) {
        low->right = join(low->right, high);
        return low;
    }
    high->left = join(low, high->left);
    return high;
}

void sim_ranges_insert(ranges *set, range *node)
{
    range **link = &set->root;
    node->weight = next_weight();
    while (*link != NULL && (*link)->weight >= node->weight) {
        link = node->start < (*link)->start ? &(*link)->left : &(*link)->right;
    }
    range *below = *link;
    *link = node;
    split(below, node->start, &node->left, &node->right);
    set->count++;
}

void sim_ranges_remove(ranges *set, range *node)
{
    range **link = &set->root;
    while (*link != node) {
        link = node->start < (*link)->start ? &(*link)->left : &(*link)->right;
    }
    *link = join(node->left, node->right);
    node->left = node->right = NULL;
    set->count--;
}

range *sim_ranges_after(const ranges *set, uint64_t address)
{
    range *best = NULL;
    for (range *at = set->root; at != NULL;) {
        if (at->end > address) {
            best = at;
            at = at->left;
        } else {
            at = at->right;
        }
    }
    return best;
}

range *sim_ranges_find(const ranges *set, uint64_t address)
{
    range *node = sim_ranges_after(set, address);
    return node != NULL && node->start <= address ? node : NULL;
}

/*
 * A handle is (generation, tag, index + 1) packed in 64 bits, the low four bits clear so that it can
 * pass for an aligned pointer: 28 bits of generation, 4 of tag, 28 of index, 4 zero.
 */
static uint64_t pack(const ids *table, uint32_t index)
{
    return (uint64_t)(table->generations[index] & 0xFFFFFFF) << 36 | (uint64_t)table->tag << 32 |
           (uint64_t)(index + 1) << 4;
}

static bool grow(ids *table)
{
    uint32_t capacity = table->capacity == 0 ? 64 : table->capacity * 2;
    void **objects = realloc(table->objects, capacity * sizeof *objects);
    if (objects == NULL) {
        return false;
    }
    table->objects = objects;
    uint32_t *generations = realloc(table->generations, capacity * sizeof *generations);
    if (generations == NULL) {
        return false;
    }
    table->generations = generations;
    uint32_t *next_free = realloc(table->next_free, capacity * sizeof *next_free);
    if (next_free == NULL) {
        return false;
    }
    table->next_free = next_free;
    for (uint32_t i = capacity; i-- > table->capacity;) {
        objects[i] = NULL;
        generations[i] = 0;
        next_free[i] = table->free_head;
        table->free_head = i + 1;
    }
    table->capacity = capacity;
    return true;
}

uint64_t sim_ids_add(ids *table, void *object)
{
    if (table->free_head == 0 && !grow(table)) {
        return 0;
    }
    uint32_t index = table->free_head - 1;
    table->free_head = table->next_free[index];
    table->objects[index] = object;
    table->count++;
    return pack(table, index);
}

void *sim_ids_get(const ids *table, uint64_t id)
{
    uint64_t index = (id & 0xFFFFFFFF) >> 4;
    if ((id & 15) != 0 || index == 0 || index > table->capacity) {
        return NULL;
    }
    void *object = table->objects[index - 1];
    return object != NULL && pack(table, (uint32_t)index - 1) == id ? object : NULL;
}

void sim_ids_drop(ids *table, uint64_t id)
{
    uint32_t index = (uint32_t)((id & 0xFFFFFFFF) >> 4) - 1;
    table->objects[index] = NULL;
    table->generations[index]++;
    table->next_free[index] = table->free_head;
    table->free_head = index + 1;
    table->count--;
}

void sim_ids_clear(ids *table)
{
    uint32_t tag = table->tag;
    free(table->objects);
    free(table->generations);
    free(table->next_free);
    memset(table, 0, sizeof *table);
    table->tag = tag;
}
