/*
 * A set of numbers that finds its largest member below a given one in a few steps, however large:
 * words of 64 bits, and above them words that say which of those are not zero, and so on.
 */
#include "internal.h"

enum { LEVELS = 4, WORD_SHIFT = 6, WORD = 1 << WORD_SHIFT };

static uint64_t words(uint64_t count)
{
    return (count + WORD - 1) >> WORD_SHIFT;
}

size_t ebb__bits_bytes(uint64_t count)
{
    uint64_t sum = 0;
    for (int k = 0; k < LEVELS; k++) {
        count = words(count);
        sum += count;
    }
    return (size_t)sum * sizeof(uint64_t);
}

void ebb__bits_over(ebb__bits *bits, void *zeroes, uint64_t count)
{
    *bits = (ebb__bits){.count = count};
    uint64_t *at = zeroes;
    for (int k = 0; k < LEVELS; k++) {
        bits->level[k] = at;
        count = words(count);
        at += count;
    }
}

bool ebb__bits_has(const ebb__bits *bits, uint64_t n)
{
    return bits->level[0][n >> WORD_SHIFT] >> (n & (WORD - 1)) & 1;
}

void ebb__bits_add(ebb__bits *bits, uint64_t n)
{
    if (ebb__bits_has(bits, n))
        return;
    bits->members++;
    for (int k = 0; k < LEVELS; k++) {
        bits->level[k][n >> WORD_SHIFT] |= UINT64_C(1) << (n & (WORD - 1));
        n >>= WORD_SHIFT;
    }
}

void ebb__bits_remove(ebb__bits *bits, uint64_t n)
{
    if (!ebb__bits_has(bits, n))
        return;
    bits->members--;
    for (int k = 0; k < LEVELS; k++) {
        uint64_t *word = &bits->level[k][n >> WORD_SHIFT];
        *word &= ~(UINT64_C(1) << (n & (WORD - 1)));
        if (*word)
            return;
        n >>= WORD_SHIFT;
    }
}

/* The highest bit of a word that is not zero. */
static uint64_t highest(uint64_t word)
{
    return (uint64_t)(63 - __builtin_clzll(word));
}

/*
 * Up until a word has a member below the place we come from, then down along the highest bits. The
 * top level may be several words (2^24 numbers fill one): those are walked.
 */
uint64_t ebb__bits_last(const ebb__bits *bits, uint64_t end)
{
    if (end > bits->count)
        end = bits->count;
    uint64_t n = end; /* members of level k below n are looked for */
    for (int k = 0; k < LEVELS; k++) {
        uint64_t word = n >> WORD_SHIFT, bit = n & (WORD - 1);
        uint64_t below = bit ? bits->level[k][word] & ((UINT64_C(1) << bit) - 1) : 0;
        if (k == LEVELS - 1)
            while (!below && word)
                below = bits->level[k][--word];
        if (!below) {
            n = word;
            continue;
        }
        n = (word << WORD_SHIFT) + highest(below);
        while (k-- > 0)
            n = (n << WORD_SHIFT) + highest(bits->level[k][n]);
        return n;
    }
    return EBB__NONE;
}
