/*
 * Two small containers: a tree of address ranges that do not overlap, and tables of checked handles.
 */
#ifndef EBB_SIM_RANGES_H
#define EBB_SIM_RANGES_H

#include <stddef.h>
#include <stdint.h>

typedef struct range {
    uint64_t start, end; /* [start, end) */
    uint32_t weight;
    struct range *left, *right;
} range;

typedef struct ranges {
    range *root;
    size_t count;
} ranges;

void sim_ranges_insert(ranges *set, range *node);             /* must not overlap any */
void sim_ranges_remove(ranges *set, range *node);             /* must be in the set */
range *sim_ranges_find(const ranges *set, uint64_t address);  /* the one that holds it, or NULL */
range *sim_ranges_after(const ranges *set, uint64_t address); /* first with end > address */

/* ---- ids: handles that are checked, so that a stale one is an error and not a crash ---------- */

typedef struct ids {
    void **objects;
    uint32_t *generations;
    uint32_t count, capacity, free_head;
    uint32_t *next_free;
    uint32_t tag; /* tells one kind of handle from another */
} ids;

uint64_t sim_ids_add(ids *table, void *object); /* 0: out of host memory */
void *sim_ids_get(const ids *table, uint64_t id);
void sim_ids_drop(ids *table, uint64_t id);
void sim_ids_clear(ids *table);

#endif
