/*
 * What happens before what, as an explicit graph: a node for everything that is queued or learnt, an
 * edge for everything that orders, and a search through the edges when a question comes up. No
 * clocks, no shortcuts.
 */
#ifndef EBB_ORDER_H
#define EBB_ORDER_H

#include <stdbool.h>

#include "harness.h"

enum { ORDER_NODES = 512, ORDER_PREDECESSORS = 20 };

typedef struct order {
    unsigned count;
    struct {
        unsigned predecessors[ORDER_PREDECESSORS], count;
    } nodes[ORDER_NODES];
} order;

/* Nothing yet. Node 0 is no node: "nothing queued so far". */
static void order_start(order *o)
{
    o->count = 1;
}

static unsigned order_node(order *o)
{
    REQUIRE(o->count < ORDER_NODES);
    o->nodes[o->count].count = 0;
    return o->count++;
}

static void order_after(order *o, unsigned later, unsigned earlier)
{
    if (earlier != 0) {
        REQUIRE(o->nodes[later].count < ORDER_PREDECESSORS);
        o->nodes[later].predecessors[o->nodes[later].count++] = earlier;
    }
}

/* Everything from which `node` can be reached. */
static void order_ancestors(const order *o, unsigned node, bool is_before[ORDER_NODES])
{
    unsigned stack[ORDER_NODES], depth = 0;
    memset(is_before, 0, ORDER_NODES * sizeof *is_before);
    stack[depth++] = node;
    while (depth > 0) {
        unsigned at = stack[--depth];
        for (unsigned i = 0; i < o->nodes[at].count; i++) {
            unsigned earlier = o->nodes[at].predecessors[i];
            if (!is_before[earlier]) {
                is_before[earlier] = true;
                stack[depth++] = earlier;
            }
        }
    }
}

#endif
