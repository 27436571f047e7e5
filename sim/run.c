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

#define RUN_MAGIC 0x3245444954424245ull /* changes whenever struct run does */

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

void sim_run_lock(void)
{
    if (pthread_mutex_lock(&sim.run->mutex) == EOWNERDEAD) {
        /* Its holder died inside. Every field is written whole, and the dead one's use is struck out
           like any other's, so there is nothing to repair. */
        pthread_mutex_consistent(&sim.run->mutex);
    }
}

void sim_run_unlock(void)
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
            e->owner = -1; /* nobody's; others may still hold it */
        }
        if (e->recorder == process + 1) { /* its work is gone with it, and will never be over */
            e->recorder = 0;
            e->lost = e->recorded;
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
    sim_run_lock();
    bool taken = take_process_entry();
    sim_run_unlock();
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
        sim_run_lock();
        bury(sim.process);
        sim_run_unlock();
    }
    munmap(sim.run, sizeof *sim.run);
    if (sim.run_fd >= 0) {
        close(sim.run_fd);
    }
    sim.run = NULL;
    sim.run_fd = -1;
    sim.process = -1;
}

/* ---- use ------------------------------------------------------------------------------------- */

/* By the card's place in the run; what other files call takes the driver's ordinals. */
static uint64_t used_locked(int place)
{
    uint64_t used = sim.run->foreign[place];
    for (int i = 0; i < SIM_MAX_PROCESSES; i++) {
        used += sim.run->processes[i].bytes[place];
    }
    for (int i = 0; i < sim.run->frames_high; i++) {
        if (sim.run->frames[i].inode != 0 && sim.run->frames[i].device == place) {
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
    int place = sim_place(device);
    sim_run_lock();
    uint64_t memory = sim.run->cards[place].memory;
    uint64_t used = used_locked(place);
    if (used > memory || memory - used < bytes) {
        bury_the_dead();
        used = used_locked(place);
    }
    bool fits = used <= memory && memory - used >= bytes;
    if (fits) {
        sim.run->processes[sim.process].bytes[place] += bytes;
    }
    sim_run_unlock();
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void sim_uncharge(int device, uint64_t bytes)
{
    int place = sim_place(device);
    sim_run_lock();
    sim.run->processes[sim.process].bytes[place] -= bytes;
    sim_run_unlock();
}

uint64_t sim_card_used(int device)
{
    int place = sim_place(device);
    sim_run_lock();
    bury_the_dead();
    uint64_t used = used_locked(place);
    sim_run_unlock();
    return used;
}

uint64_t sim_own_bytes(int device)
{
    int place = sim_place(device);
    sim_run_lock();
    uint64_t bytes = sim.run->processes[sim.process].bytes[place];
    sim_run_unlock();
    return bytes;
}

/* A frame leaves the process's own account for the run's: it may outlive the process now. */
int sim_share_frame(uint64_t inode, uint64_t bytes, int device)
{
    int place = sim_place(device);
    int index = -1;
    sim_run_lock();
    for (int i = 0; i < SIM_MAX_SHARED_FRAMES && index < 0; i++) {
        if (sim.run->frames[i].inode == 0) {
            index = i;
        }
    }
    if (index >= sim.run->frames_high) {
        sim.run->frames_high = index + 1;
    }
    if (index >= 0) {
        sim.run->frames[index] = (shared_frame){
            .inode = inode, .bytes = bytes, .device = place, .holders = (uint64_t)1 << sim.process};
        sim.run->processes[sim.process].bytes[place] -= bytes;
    }
    sim_run_unlock();
    return index;
}

int sim_find_shared_frame(uint64_t inode)
{
    int index = -1;
    sim_run_lock();
    for (int i = 0; i < sim.run->frames_high && index < 0; i++) {
        if (sim.run->frames[i].inode == inode) {
            sim.run->frames[i].holders |= (uint64_t)1 << sim.process;
            index = i;
        }
    }
    sim_run_unlock();
    return index;
}

void sim_unshare_frame(int index)
{
    sim_run_lock();
    shared_frame *f = &sim.run->frames[index];
    f->holders &= ~((uint64_t)1 << sim.process);
    if (f->holders == 0) {
        f->inode = 0;
    }
    sim_run_unlock();
}

/* ---- events that travel ---------------------------------------------------------------------- */

int sim_shared_event_new(void)
{
    int index = -1;
    sim_run_lock();
    /* One that was never used, if there is: the handle of a destroyed event can still be opened. */
    for (int i = 0; i < 2 * SIM_MAX_SHARED_EVENTS && index < 0; i++) {
        const shared_event *e = &sim.run->events[i % SIM_MAX_SHARED_EVENTS];
        if (e->users == 0 && (i >= SIM_MAX_SHARED_EVENTS || e->owner == 0)) {
            index = i % SIM_MAX_SHARED_EVENTS;
            sim.run->events[index] = (shared_event){.owner = (int)getpid(), .users = 1};
        }
    }
    sim_run_unlock();
    return index;
}

bool sim_shared_event_hold(int index)
{
    bool there = index >= 0 && index < SIM_MAX_SHARED_EVENTS;
    sim_run_lock();
    if (there && (there = sim.run->events[index].owner != 0)) {
        sim.run->events[index].users++;
    }
    sim_run_unlock();
    return there;
}

void sim_shared_event_release(int index)
{
    sim_run_lock();
    sim.run->events[index].users--;
    sim_run_unlock();
}

uint64_t sim_shared_event_record(int index)
{
    sim_run_lock();
    shared_event *e = &sim.run->events[index];
    e->recorder = sim.process + 1;
    uint64_t number = __atomic_add_fetch(&e->recorded, 1, __ATOMIC_ACQ_REL);
    sim_run_unlock();
    return number;
}

/* Whoever waits for it asks again and again, and looking at a process costs a file: now and then. */
bool sim_shared_event_lost(int index, uint64_t record_number)
{
    static uint64_t last; /* under sim.mutex */
    uint64_t now = monotonic();
    sim_run_lock();
    for (int i = 0; now - last >= 1000000 && i < SIM_MAX_PROCESSES; i++) {
        if (i != sim.process && is_dead(i)) {
            bury(i);
        }
    }
    last = now - last >= 1000000 ? now : last;
    bool lost = sim.run->events[index].lost >= record_number;
    sim_run_unlock();
    return lost;
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
