/*
 * Cards: their figures, those a program adds, and those of EBBTIDE_SIM.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

void ebbsim_card_default(ebbsim_card *card, uint64_t memory)
{
    memset(card, 0, sizeof *card);
    card->size = sizeof *card;
    snprintf(card->name, sizeof card->name, "Ebbtide simulated GPU");
    card->memory = memory / SIM_GRANULARITY * SIM_GRANULARITY;
    /* A context of the H200's driver takes 617 MiB; a small card could not pay that. */
    uint64_t share = memory / 32 / SIM_GRANULARITY * SIM_GRANULARITY;
    card->context = share < SIM_GRANULARITY       ? SIM_GRANULARITY
                    : share > (uint64_t)616 << 20 ? (uint64_t)616 << 20
                                                  : share;
    card->h2d_rate = 55.4e9;
    card->d2h_rate = 55.3e9;
    card->duplex_rate = 49.9e9;
    card->pageable_rate = 6.8e9;
    card->memory_rate = 4.3e12;
    card->flops = 790e12;
    card->copy_latency = 2500;
    card->kernel_latency = 2000;
    card->compute_major = 9;
    card->multiprocessors = 132;
    card->peer = 1;
    card->vmm = 1;
    card->exportable = 1;
}

static bool card_makes_sense(const ebbsim_card *card)
{
    return card != NULL && card->size == sizeof *card && card->memory >= 2 * SIM_GRANULARITY &&
           card->memory <= (uint64_t)1 << 46 && card->memory % SIM_GRANULARITY == 0 &&
           card->context < card->memory && card->h2d_rate > 0 && card->d2h_rate > 0 &&
           card->duplex_rate > 0 && card->pageable_rate > 0 && card->memory_rate > 0 &&
           card->flops > 0 && memchr(card->name, '\0', sizeof card->name) != NULL;
}

int ebbsim_card_add(const ebbsim_card *card, int *ordinal)
{
    if (!card_makes_sense(card)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&sim.mutex);
    int code = CUDA_ERROR_INVALID_VALUE;
    if (sim_run_open()) {
        sim_run_lock();
        if (sim.run->card_count < SIM_MAX_CARDS) {
            sim.run->cards[sim.run->card_count] = *card;
            if (ordinal != NULL) {
                *ordinal = sim.run->card_count;
            }
            sim.run->card_count++;
            code = CUDA_SUCCESS;
        }
        sim_run_unlock();
    }
    pthread_mutex_unlock(&sim.mutex);
    return code;
}

/* "8GiB", "512MiB", "1.5GiB", "4096". false: not a size. */
static bool parse_size(const char *text, uint64_t *bytes)
{
    char *end = NULL;
    double value = strtod(text, &end);
    static const struct {
        const char *name;
        double scale;
    } units[] = {{"", 1},     {"B", 1},    {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824},
                 {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}};
    for (size_t i = 0; end != text && i < sizeof units / sizeof *units; i++) {
        if (strcmp(end, units[i].name) == 0 && value >= 0 && value * units[i].scale < 1e15) {
            *bytes = (uint64_t)(value * units[i].scale);
            return true;
        }
    }
    return false;
}

static bool parse_number(const char *text, long least, long most, long *number)
{
    char *end = NULL;
    *number = strtol(text, &end, 10);
    return end != text && *end == '\0' && *number >= least && *number <= most;
}

/* The cards of EBBTIDE_SIM, or one of 8 GiB. Called with a run that has none. */
static void cards_from_environment(run *r)
{
    uint64_t memory = (uint64_t)8 << 30, per_context = 0;
    long devices = 1, peer = 1;
    char text[256] = "";
    const char *given = getenv("EBBTIDE_SIM");
    if (given != NULL) {
        snprintf(text, sizeof text, "%s", given);
    }
    char *rest = NULL;
    for (char *word = strtok_r(text, ",", &rest); word != NULL; word = strtok_r(NULL, ",", &rest)) {
        char *value = strchr(word, '=');
        const char *name = value == NULL ? "memory" : word;
        if (value != NULL) {
            *value++ = '\0';
        } else {
            value = word;
        }
        bool understood = true;
        if (strcmp(name, "memory") == 0) {
            understood = parse_size(value, &memory);
        } else if (strcmp(name, "context") == 0) {
            understood = parse_size(value, &per_context);
        } else if (strcmp(name, "devices") == 0) {
            understood = parse_number(value, 1, SIM_MAX_CARDS, &devices);
        } else if (strcmp(name, "peer") == 0) {
            understood = parse_number(value, 0, 1, &peer);
        } else if (strcmp(name, "clock") == 0) {
            understood = strcmp(value, "virtual") == 0 || strcmp(value, "real") == 0;
            r->clock_virtual = strcmp(value, "virtual") == 0;
        } else {
            understood = false;
        }
        if (!understood) {
            fprintf(stderr, "ebbtide sim: EBBTIDE_SIM: cannot understand %s=%s\n", name, value);
            return;
        }
    }
    ebbsim_card card;
    ebbsim_card_default(&card, memory);
    if (per_context != 0) {
        card.context = per_context;
    }
    card.peer = peer != 0;
    if (!card_makes_sense(&card)) {
        fprintf(stderr, "ebbtide sim: EBBTIDE_SIM=%s: no such card\n", given == NULL ? "" : given);
        return;
    }
    for (long i = 0; i < devices; i++) {
        r->cards[r->card_count++] = card;
    }
}

/* Called by cuInit. How many cards there are; 0: none could be made. */
int sim_cards_ready(void)
{
    sim_run_lock();
    if (sim.run->card_count == 0) {
        cards_from_environment(sim.run);
    }
    int count = sim.run->card_count;
    sim_run_unlock();
    return count;
}

/* ---- CUDA_VISIBLE_DEVICES ----------------------------------------------------------------------- */

/* A word of it: an ordinal, or "GPU-" and a UUID or its beginning. -1: no such card. */
static int place_of(const char *word)
{
    if (strncmp(word, "GPU-", 4) == 0) {
        int found = -1;
        for (int i = 0; i < sim.run->card_count; i++) {
            char uuid[SIM_UUID_TEXT];
            sim_uuid_text(i, uuid);
            if (strncmp(uuid, word, strlen(word)) == 0) {
                if (found >= 0) {
                    return -1; /* the beginning of several */
                }
                found = i;
            }
        }
        return found;
    }
    char *end = NULL;
    long number = strtol(word, &end, 10);
    return end == word || number < 0 || number >= sim.run->card_count ? -1 : (int)number;
}

void sim_uuid_text(int place, char text[SIM_UUID_TEXT])
{
    unsigned char b[16] = "ebbtide-sim-gpu";
    b[15] = (unsigned char)place;
    snprintf(text, SIM_UUID_TEXT,
             "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14],
             b[15]);
}

/* The list ends at the first word that is no card; one that names a card twice is empty. */
int sim_cards_choose(void)
{
    const char *given = getenv("CUDA_VISIBLE_DEVICES");
    sim.chosen = given != NULL;
    sim.visible_count = 0;
    if (given == NULL) {
        return sim_card_count();
    }
    char text[1024], *rest = NULL;
    snprintf(text, sizeof text, "%s", given);
    for (char *word = strtok_r(text, ",", &rest); word != NULL; word = strtok_r(NULL, ",", &rest)) {
        word += strspn(word, " ");
        word[strcspn(word, " ")] = '\0';
        int place = place_of(word);
        if (place < 0) {
            break;
        }
        for (int i = 0; i < sim.visible_count; i++) {
            if (sim.visible[i] == place) {
                sim.visible_count = 0;
                return 0;
            }
        }
        sim.visible[sim.visible_count++] = place;
    }
    return sim.visible_count;
}

int sim_card_count(void)
{
    return sim.chosen ? sim.visible_count : sim.run->card_count;
}

int sim_place(int device)
{
    return sim.chosen ? sim.visible[device] : device;
}

const ebbsim_card *sim_card(int device)
{
    return &sim.run->cards[sim_place(device)];
}

int ebbsim_foreign_use(int ordinal, uint64_t bytes)
{
    pthread_mutex_lock(&sim.mutex);
    int code = CUDA_ERROR_INVALID_VALUE;
    if (sim_run_open() && ordinal >= 0 && ordinal < sim_card_count()) {
        sim_run_lock();
        sim.run->foreign[sim_place(ordinal)] = bytes;
        sim_run_unlock();
        code = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&sim.mutex);
    return code;
}
