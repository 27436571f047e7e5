/*
 * Device attributes: what a card says of itself. Figures that no card of ours can change are those
 * of an H200; what is not simulated (managed memory, multicast, arrays, ...) says that it is not
 * there, so that programs take their other way.
 */
#include "sim.h"

/* By CUdevice_attribute. 0 stands for "no" or for what card_attribute() answers. */
static const int fixed[] = {
    /*   0 */ 0,
    1024,
    1024,
    1024,
    64,
    2147483647,
    65535,
    65535,
    49152,
    65536,
    /*  10 */ 32,
    2147483647,
    65536,
    1980000,
    512,
    1,
    0,
    0,
    0,
    1,
    /*  20 */ 0,
    131072,
    131072,
    65536,
    16384,
    16384,
    16384,
    32768,
    32768,
    2048,
    /*  30 */ 512,
    1,
    1,
    0,
    0,
    0,
    3201000,
    6144,
    62914560,
    0,
    /*  40 */ 3,
    1,
    32768,
    2048,
    1,
    32768,
    32768,
    8192,
    8192,
    32768,
    /*  50 */ 0,
    32,
    32768,
    32768,
    2046,
    32768,
    131072,
    65536,
    16384,
    16384,
    /*  60 */ 16384,
    32768,
    2048,
    32768,
    32768,
    2048,
    32768,
    32768,
    2046,
    268435456,
    /*  70 */ 131072,
    65000,
    2097120,
    32768,
    32768,
    0,
    0,
    32768,
    1,
    1,
    /*  80 */ 1,
    0,
    65536,
    0,
    0,
    0,
    0,
    2,
    0,
    0,
    /*  90 */ 1,
    1,
    0,
    0,
    0,
    1,
    0,
    0,
    0,
    1,
    /* 100 */ 0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    39321600,
    134213632,
    /* 110 */ 0,
    1024,
    0,
    1,
    0,
    1,
    0,
    0,
    0,
    0,
    /* 120 */ 0,
    0,
    0,
    0,
    0,
    1,
    4,
    0,
    0,
    0,
    /* 130 */ 0,
    -1,
    0,
    0,
    -1,
    0,
    0,
    0,
    0,
    0x233510DE,
    /* 140 */ 0x18BE10DE,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
};

/* What differs between generations: a multiprocessor's threads, blocks and shared memory. */
static int generation_attribute(const ebbsim_card *card, int attribute)
{
    int generation = card->compute_major * 10 + card->compute_minor;
    bool big = generation == 80 || (generation >= 90 && generation < 120);
    int shared = generation >= 90 && generation < 120 ? 233472 : generation == 80 ? 167936 : 102400;
    switch (attribute) {
    case 39: /* threads of a multiprocessor */
        return big ? 2048 : 1536;
    case 81: /* shared memory of a multiprocessor */
        return shared;
    case 97: /* what a block may opt in to of it */
        return shared - 1024;
    case 106: /* blocks of a multiprocessor */
        return big ? 32 : 24;
    case 120: /* cluster launch */
    case 127: /* tensor maps */
        return card->compute_major >= 9;
    default:
        return 0;
    }
}

static int card_attribute(const ebbsim_card *card, int device, int attribute)
{
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return card->multiprocessors;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        return device + 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return card->compute_major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return card->compute_minor;
    case 85: /* group of a board with several */
        return device;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        return card->vmm;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        return card->vmm && card->exportable;
    default:
        return generation_attribute(card, attribute);
    }
}

CUresult sim_attribute(int device, int attribute, int *value)
{
    int known = (int)(sizeof fixed / sizeof *fixed);
    if (attribute <= 0 || attribute >= known) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int figure = fixed[attribute];
    *value = figure != 0 ? figure : card_attribute(sim_card(device), sim_place(device), attribute);
    return CUDA_SUCCESS;
}

/* ---- looking at the cards, without starting the driver ------------------------------------------ */

static int card_count(void)
{
    if (sim.forked) { /* the parent's cards are still to be seen, if not to be used */
        return sim.run == NULL ? 0 : sim.run->card_count;
    }
    return sim_run_open() ? sim_cards_ready() : 0;
}

int ebbsim_card_count(void)
{
    pthread_mutex_lock(&sim.mutex);
    int count = card_count();
    pthread_mutex_unlock(&sim.mutex);
    return count;
}

int ebbsim_card_get(int ordinal, ebbsim_card *card)
{
    if (card == NULL || card->size != sizeof *card) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&sim.mutex);
    bool there = ordinal >= 0 && ordinal < card_count();
    if (there) {
        *card = sim.run->cards[ordinal]; /* any card, visible or not */
    }
    pthread_mutex_unlock(&sim.mutex);
    return there ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
