/*
 * A run: the cards, who uses how much of them, the clock, and events that travel between processes.
 *
 * It lies in a file that the processes of the run map (EBBTIDE_SIM_RUN), or in memory of this process
 * alone. Use is kept by process, so that a dead process's use returns by itself: whoever is short of
 * memory, or asks how much is free, first strikes out the dead.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"

#define RUN_MAGIC 0x3145444954424245ull /* changes whenever struct run does */

static uint64_t monotonic(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* When the kernel started process `pid`; 0: there is none. Field 22 of /proc/PID/stat. */
static uint64_t start_time(int pid)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0) {
        return 0;
    }
    text[length] = '\0';
    const char *at = strrchr(text, ')'); /* the name before it may hold anything */
    unsigned long long started = 0;
    char state = 0;
    if (at == NULL ||
        sscanf(at + 1,
               " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &state, &started) != 2) {
        return 0;
    }
    return state == 'Z' || state == 'X' ? 0 : started;
}

/* ---- the run's lock -------------------------------------------------------------------------- */

static void lock_run(void)
{
    if (pthread_mutex_lock(&sim.run->mutex) == EOWNERDEAD) {
        /* Its holder died inside. Every field is written whole, and the dead one's use is struck out
           like any other's, so there is nothing to repair. */
        pthread_mutex_consistent(&sim.run->mutex);
    }
}

static void unlock_run(void)
{
    pthread_mutex_unlock(&sim.run->mutex);
}

static void make_run(run *r)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&r->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    r->began = monotonic();
    r->magic = RUN_MAGIC;
}

static run *map_run(int fd)
{
    void *at = mmap(NULL, sizeof(run), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

/* The run named by the environment, made under a file lock so that two processes cannot both. */
static run *open_named_run(const char *path, int *out_fd)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
        fprintf(stderr, "ebbtide sim: cannot open EBBTIDE_SIM_RUN=%s: %s\n", path, strerror(errno));
        return NULL;
    }
    run *r = NULL;
    struct stat status;
    flock(fd, LOCK_EX);
    if (fstat(fd, &status) == 0 && (status.st_size == 0 || status.st_size == sizeof(run)) &&
        ftruncate(fd, sizeof(run)) == 0) {
        r = map_run(fd);
    }
    if (r != NULL && r->magic == 0) {
        make_run(r);
    } else if (r != NULL && r->magic != RUN_MAGIC) {
        munmap(r, sizeof *r);
        r = NULL;
    }
    flock(fd, LOCK_UN);
    if (r == NULL) {
        fprintf(stderr, "ebbtide sim: EBBTIDE_SIM_RUN=%s is not the state of a run\n", path);
        close(fd);
        return NULL;
    }
    *out_fd = fd;
    return r;
}

/* ---- cards ----------------------------------------------------------------------------------- */

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
        lock_run();
        if (sim.run->card_count < SIM_MAX_CARDS) {
            sim.run->cards[sim.run->card_count] = *card;
            if (ordinal != NULL) {
                *ordinal = sim.run->card_count;
            }
            sim.run->card_count++;
            code = CUDA_SUCCESS;
        }
        unlock_run();
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

/* ---- opening and closing --------------------------------------------------------------------- */

static bool is_dead(int process)
{
    const shared_process *p = &sim.run->processes[process];
    return p->pid != 0 && start_time(p->pid) != p->started;
}

/* Strike a process out: its use, its hold on frames, its events. */
static void bury(int process)
{
    for (int i = 0; i < sim.run->frames_high; i++) {
        shared_frame *f = &sim.run->frames[i];
        f->holders &= ~((uint64_t)1 << process);
        if (f->holders == 0) {
            f->inode = 0;
        }
    }
    for (int i = 0; i < SIM_MAX_SHARED_EVENTS; i++) {
        shared_event *e = &sim.run->events[i];
        if (e->owner == sim.run->processes[process].pid) {
            e->users -= e->users > 0;
            e->owner = -1; /* nobody's; others may still hold it, and must not wait for ever */
            __atomic_store_n(&e->settled, e->recorded, __ATOMIC_RELEASE);
        }
    }
    memset(&sim.run->processes[process], 0, sizeof(shared_process));
}

static bool take_process_entry(void)
{
    for (int i = 0; i < SIM_MAX_PROCESSES; i++) {
        shared_process *p = &sim.run->processes[i];
        if (is_dead(i)) {
            bury(i);
        }
        if (p->pid == 0) {
            p->pid = (int)getpid();
            p->started = start_time(p->pid);
            sim.process = i;
            return true;
        }
    }
    fprintf(stderr, "ebbtide sim: more than %d processes in one run\n", SIM_MAX_PROCESSES);
    return false;
}

bool sim_run_open(void)
{
    if (sim.run != NULL) {
        return true;
    }
    const char *path = getenv("EBBTIDE_SIM_RUN");
    sim.run_fd = -1;
    if (path != NULL && path[0] != '\0') {
        sim.run = open_named_run(path, &sim.run_fd);
    } else {
        sim.run_fd = memfd_create("ebbtide-sim-run", MFD_CLOEXEC);
        if (sim.run_fd >= 0 && ftruncate(sim.run_fd, sizeof(run)) == 0) {
            sim.run = map_run(sim.run_fd);
        }
        if (sim.run != NULL) {
            make_run(sim.run);
        }
    }
    if (sim.run == NULL) {
        return false;
    }
    lock_run();
    bool taken = take_process_entry();
    unlock_run();
    if (!taken) {
        sim_run_close();
    }
    return taken;
}

void sim_run_close(void)
{
    if (sim.run == NULL) {
        return;
    }
    if (sim.process >= 0 && !sim.forked) {
        lock_run();
        bury(sim.process);
        unlock_run();
    }
    munmap(sim.run, sizeof *sim.run);
    if (sim.run_fd >= 0) {
        close(sim.run_fd);
    }
    sim.run = NULL;
    sim.run_fd = -1;
    sim.process = -1;
}

/* Called by cuInit. How many cards there are; 0: none could be made. */
int sim_cards_ready(void)
{
    lock_run();
    if (sim.run->card_count == 0) {
        cards_from_environment(sim.run);
    }
    int count = sim.run->card_count;
    unlock_run();
    return count;
}

/* ---- use ------------------------------------------------------------------------------------- */

static uint64_t used_locked(int device)
{
    uint64_t used = sim.run->foreign[device];
    for (int i = 0; i < SIM_MAX_PROCESSES; i++) {
        used += sim.run->processes[i].bytes[device];
    }
    for (int i = 0; i < sim.run->frames_high; i++) {
        if (sim.run->frames[i].inode != 0 && sim.run->frames[i].device == device) {
            used += sim.run->frames[i].bytes;
        }
    }
    return used;
}

/* Processes that died without a word: what they used is free again. */
static void bury_the_dead(void)
{
    for (int i = 0; i < SIM_MAX_PROCESSES; i++) {
        if (i != sim.process && is_dead(i)) {
            bury(i);
        }
    }
}

CUresult sim_charge(int device, uint64_t bytes)
{
    lock_run();
    uint64_t memory = sim.run->cards[device].memory;
    uint64_t used = used_locked(device);
    if (used > memory || memory - used < bytes) {
        bury_the_dead();
        used = used_locked(device);
    }
    bool fits = used <= memory && memory - used >= bytes;
    if (fits) {
        sim.run->processes[sim.process].bytes[device] += bytes;
    }
    unlock_run();
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void sim_uncharge(int device, uint64_t bytes)
{
    lock_run();
    sim.run->processes[sim.process].bytes[device] -= bytes;
    unlock_run();
}

uint64_t sim_card_used(int device)
{
    lock_run();
    bury_the_dead();
    uint64_t used = used_locked(device);
    unlock_run();
    return used;
}

uint64_t sim_own_bytes(int device)
{
    lock_run();
    uint64_t bytes = sim.run->processes[sim.process].bytes[device];
    unlock_run();
    return bytes;
}

int ebbsim_foreign_use(int ordinal, uint64_t bytes)
{
    pthread_mutex_lock(&sim.mutex);
    int code = CUDA_ERROR_INVALID_VALUE;
    if (sim_run_open() && ordinal >= 0 && ordinal < sim.run->card_count) {
        lock_run();
        sim.run->foreign[ordinal] = bytes;
        unlock_run();
        code = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&sim.mutex);
    return code;
}

/* A frame leaves the process's own account for the run's: it may outlive the process now. */
int sim_share_frame(uint64_t inode, uint64_t bytes, int device)
{
    int index = -1;
    lock_run();
    for (int i = 0; i < SIM_MAX_SHARED_FRAMES && index < 0; i++) {
        if (sim.run->frames[i].inode == 0) {
            index = i;
        }
    }
    if (index >= sim.run->frames_high) {
        sim.run->frames_high = index + 1;
    }
    if (index >= 0) {
        sim.run->frames[index] = (shared_frame){.inode = inode,
                                                .bytes = bytes,
                                                .device = device,
                                                .holders = (uint64_t)1 << sim.process};
        sim.run->processes[sim.process].bytes[device] -= bytes;
    }
    unlock_run();
    return index;
}

int sim_find_shared_frame(uint64_t inode)
{
    int index = -1;
    lock_run();
    for (int i = 0; i < sim.run->frames_high && index < 0; i++) {
        if (sim.run->frames[i].inode == inode) {
            sim.run->frames[i].holders |= (uint64_t)1 << sim.process;
            index = i;
        }
    }
    unlock_run();
    return index;
}

void sim_unshare_frame(int index)
{
    lock_run();
    shared_frame *f = &sim.run->frames[index];
    f->holders &= ~((uint64_t)1 << sim.process);
    if (f->holders == 0) {
        f->inode = 0;
    }
    unlock_run();
}

/* ---- events that travel ---------------------------------------------------------------------- */

int sim_shared_event_new(void)
{
    int index = -1;
    lock_run();
    /* One that was never used, if there is: the handle of a destroyed event can still be opened. */
    for (int i = 0; i < 2 * SIM_MAX_SHARED_EVENTS && index < 0; i++) {
        const shared_event *e = &sim.run->events[i % SIM_MAX_SHARED_EVENTS];
        if (e->users == 0 && (i >= SIM_MAX_SHARED_EVENTS || e->owner == 0)) {
            index = i % SIM_MAX_SHARED_EVENTS;
            sim.run->events[index] = (shared_event){.owner = (int)getpid(), .users = 1};
        }
    }
    unlock_run();
    return index;
}

bool sim_shared_event_hold(int index)
{
    bool there = index >= 0 && index < SIM_MAX_SHARED_EVENTS;
    lock_run();
    if (there && (there = sim.run->events[index].owner != 0)) {
        sim.run->events[index].users++;
    }
    unlock_run();
    return there;
}

void sim_shared_event_release(int index)
{
    lock_run();
    sim.run->events[index].users--;
    unlock_run();
}

uint64_t sim_shared_event_record(int index)
{
    return __atomic_add_fetch(&sim.run->events[index].recorded, 1, __ATOMIC_ACQ_REL);
}

uint64_t sim_shared_event_recorded(int index)
{
    return __atomic_load_n(&sim.run->events[index].recorded, __ATOMIC_ACQUIRE);
}

/* ---- the clock ------------------------------------------------------------------------------- */

uint64_t sim_now(void)
{
    return sim.run->clock_virtual ? sim.run->virtual_now : monotonic() - sim.run->began;
}

void sim_clock_add(uint64_t nanoseconds)
{
    if (sim.run->clock_virtual) {
        sim.run->virtual_now += nanoseconds;
    }
}

void sim_clock_reach(uint64_t nanoseconds)
{
    uint64_t now = sim.run->virtual_now;
    while (sim.run->clock_virtual && now < nanoseconds &&
           !__atomic_compare_exchange_n((uint64_t *)&sim.run->virtual_now, &now, nanoseconds, false,
                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}

void ebbsim_clock_virtual(int on)
{
    pthread_mutex_lock(&sim.mutex);
    if (sim_run_open()) {
        /* A run that has not begun to work begins at 0, so that its times are always the same. */
        uint64_t now = on && sim.slots == 0 ? 0 : sim_now();
        sim.run->clock_virtual = on != 0;
        if (on) { /* either way, time never runs backwards */
            sim_clock_reach(now);
        } else {
            sim.run->began = monotonic() - now;
        }
    }
    pthread_mutex_unlock(&sim.mutex);
}

uint64_t ebbsim_now(void)
{
    pthread_mutex_lock(&sim.mutex);
    uint64_t now = sim_run_open() ? sim_now() : 0;
    pthread_mutex_unlock(&sim.mutex);
    return now;
}

void ebbsim_pass(uint64_t nanoseconds)
{
    pthread_mutex_lock(&sim.mutex);
    bool sleeps = sim_run_open() && !sim.run->clock_virtual;
    if (!sleeps && sim.run != NULL) {
        sim_clock_add(nanoseconds);
    }
    pthread_mutex_unlock(&sim.mutex);
    if (sleeps) {
        struct timespec t = {(time_t)(nanoseconds / 1000000000u),
                             (long)(nanoseconds % 1000000000u)};
        while (nanosleep(&t, &t) != 0 && errno == EINTR) {
        }
    }
}
