/*
 * Bytes to calls of the core, on the simulated GPU, with arguments that are right, wrong and absurd,
 * and driver calls that fail. Nothing may crash; after every call the books must be in order.
 *
 * What a program must not do on a GPU either is left out: memory that is not pinned is not touched.
 */
#include <string.h>

#include "ebbtide.h"
#include "fuzz.h"

enum { BARS = 6, STREAMS = 4, CALLS = 200 };

typedef struct play {
    const uint8_t *at, *end;
    ebb__driver cu;
    ebb_device device;
    ebb_vbar bars[BARS];
    CUstream streams[STREAMS]; /* the last ones may go and come */
    bool failing;
} play;

static uint8_t byte(play *p)
{
    return p->at < p->end ? *p->at++ : 0;
}

/* Mostly within a VBAR; now and then more than there can be. */
static uint64_t number(play *p)
{
    uint64_t kind = byte(p), n = byte(p);
    if (kind < 120)
        return n << 19; /* half a MiB */
    if (kind < 220)
        return n * 512 + kind;
    return kind < 240 ? UINT64_MAX - n : UINT64_C(1) << (n % 64);
}

static ebb_vbar any_bar(play *p)
{
    uint8_t n = byte(p);
    ebb_vbar vbar = p->bars[n % BARS];
    if (n >= 250)
        vbar.id ^= UINT64_C(1) << (byte(p) % 64);
    return vbar;
}

static ebb_stream any_stream(play *p)
{
    uint8_t n = byte(p);
    return n % (STREAMS + 1) == STREAMS ? NULL : p->streams[n % (STREAMS + 1)];
}

static int page_out(void *user, uint64_t offset, uint64_t bytes)
{
    (void)user;
    return (offset + bytes) % 5 == 1;
}

static void create(play *p)
{
    uint8_t kind = byte(p);
    ebb_vbar *place = &p->bars[kind / 4 % BARS];
    ebb_vbar_stats stats = {.size = sizeof stats};
    if (ebb_vbar_get_stats(*place, &stats) == EBB_OK)
        return;
    ebb_vbar_options options = {.size = sizeof options,
                                .bytes = number(p),
                                .rise = kind & 1,
                                .page_out = kind & 2 ? page_out : NULL};
    ebb_vbar_create(p->device, &options, place);
}

static void fault(play *p, bool unpins)
{
    enum { MOST = 4 };
    ebb_vbar vbar = any_bar(p);
    ebb_stream stream = any_stream(p);
    size_t count = byte(p) % (MOST + 1);
    ebb_range ranges[MOST];
    uint64_t signatures[MOST];
    for (size_t i = 0; i < count; i++)
        ranges[i] = (ebb_range){number(p), number(p)};
    if (unpins) {
        ebb_vbar_unpin_many(vbar, ranges, count, stream);
        return;
    }
    ebb_vbar_stats stats = {.size = sizeof stats};
    if (ebb_vbar_fault_many(vbar, ranges, count, stream, signatures) != EBB_OK)
        return;
    uint8_t then = byte(p);
    /* Only work whose end is told by the right unpin: anybody's may take the pin back later. */
    if (then & 1 && then & 12 && ebb_vbar_get_stats(vbar, &stats) == EBB_OK) {
        ebbsim_range touched = {stats.address + ranges[0].offset, 1, EBBSIM_READ};
        ebbsim_work work = {.size = sizeof work,
                            .name = "use",
                            .ranges = &touched,
                            .range_count = 1,
                            .nanoseconds = 1000u << (then >> 4)};
        ebbsim_launch(&work, stream);
    }
    if (then & 2)
        ebb_vbar_filled(vbar, ranges[0].offset, ranges[0].bytes, stream);
    if (then & 12)
        ebb_vbar_unpin_many(vbar, ranges, count, stream);
}

static void single(play *p)
{
    uint64_t signature;
    ebb_vbar vbar = any_bar(p);
    ebb_stream stream = any_stream(p);
    uint64_t offset = number(p), bytes = number(p);
    if (byte(p) & 1)
        ebb_vbar_fault(vbar, offset, bytes, stream, &signature);
    else
        ebb_vbar_unpin(vbar, offset, bytes, stream);
}

static void capture(play *p)
{
    CUstream stream = p->streams[0];
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUgraph graph = NULL;
    p->cu.cuStreamIsCapturing(stream, &status);
    if (status == CU_STREAM_CAPTURE_STATUS_NONE)
        p->cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    else if (p->cu.cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS && graph)
        p->cu.cuGraphDestroy(graph);
}

/* One of the driver calls that the core makes fails, soon. */
static void plan_failure(play *p)
{
    static const char *const calls[] = {
        "cuMemCreate",      "cuMemMap",           "cuMemSetAccess",    "cuMemUnmap",
        "cuMemRelease",     "cuEventCreate",      "cuEventRecord",     "cuEventQuery",
        "cuMemGetInfo",     "cuEventSynchronize", "cuStreamWaitEvent", "cuMemAddressReserve",
        "cuMemAddressFree",
    };
    static const int codes[] = {1, 2, 600, 999};
    uint8_t which = byte(p), how = byte(p);
    ebbsim_fail(calls[which % (sizeof calls / sizeof *calls)], 1 + how / 4 % 8, codes[how % 4]);
    p->failing = true;
}

static void device_call(play *p)
{
    uint8_t which = byte(p);
    switch (which % 8) {
    case 0:
        ebb_device_set_limit(p->device, number(p));
        break;
    case 1:
        ebb_device_set_headroom(p->device, number(p));
        break;
    case 2:
        ebb_device_trim(p->device, NULL);
        break;
    case 3:
        ebb_device_keep_stream(p->device, any_stream(p), which / 8 % 4); /* kept or not */
        break;
    case 4:
        ebbsim_foreign_use(0, (uint64_t)byte(p) << 20);
        break;
    case 5:
        ebbsim_pass((uint64_t)byte(p) * 10000);
        break;
    case 6:
        plan_failure(p);
        break;
    default:
        capture(p);
    }
}

static void vbar_call(play *p)
{
    uint8_t which = byte(p);
    ebb_vbar vbar = any_bar(p);
    uint64_t offset;
    switch (which % 10) {
    case 0:
        ebb_vbar_destroy(vbar);
        break;
    case 1:
        ebb_vbar_alloc(vbar, number(p), &offset);
        break;
    case 2:
        ebb_vbar_prioritize(vbar);
        break;
    case 3:
        ebb_vbar_deprioritize(vbar);
        break;
    case 4:
        ebb_vbar_free_memory(vbar, number(p), NULL);
        break;
    case 5:
        ebb_vbar_set_watermark(vbar, number(p));
        break;
    case 6:
        ebb_vbar_set_watermark_limit(vbar, number(p));
        break;
    case 7:
        ebb_vbar_graphs_gone(vbar, any_stream(p));
        break;
    case 9:
        ebb_vbar_trade(vbar, any_bar(p));
        break;
    default:
        ebb_vbar_filled(vbar, number(p), number(p), any_stream(p));
    }
}

static void check(const play *p)
{
    char why[256] = "the core's books";
    const char *wrong = ebbsim_check();
    if (ebb_check(p->device, why, sizeof why) != EBB_OK)
        wrong = why;
    ebbsim_hazard hazard;
    if (!wrong && ebbsim_hazard_get(0, &hazard) == 0)
        wrong = hazard.text;
    if (wrong) {
        fprintf(stderr, "%s\n", wrong);
        abort();
    }
}

static void start(play *p)
{
    ebbsim_reset();
    ebbsim_on_hazard(EBBSIM_QUIET);
    ebbsim_clock_virtual(1);
    ebbsim_card card;
    ebbsim_card_default(&card, 192u << 20);
    card.context = 0;
    ebbsim_card_add(&card, NULL);
    ebb_device_options options = {.size = sizeof options,
                                  .library = SIM_LIBRARY,
                                  .limit = (uint64_t)(16 + byte(p) % 128) << 20,
                                  .headroom = 0};
    CUcontext context;
    if (ebb_device_open(&options, &p->device, NULL, 0) != EBB_OK ||
        ebb__driver_open(&p->cu, SIM_LIBRARY, NULL, 0) != EBB_OK ||
        p->cu.cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS)
        abort();
    p->cu.cuCtxSetCurrent(context);
    for (int i = 0; i < STREAMS; i++) {
        p->cu.cuStreamCreate(&p->streams[i], CU_STREAM_NON_BLOCKING);
        if (i < STREAMS / 2)
            ebb_device_keep_stream(p->device, p->streams[i], i ? EBB_NEVER_CAPTURES : 0);
    }
    create(p);
    create(p);
}

/* Unpin what is pinned, forget the graphs, close: nothing is left. */
static void finish(play *p)
{
    ebbsim_fail_clear();
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    p->cu.cuStreamIsCapturing(p->streams[0], &capturing);
    if (capturing != CU_STREAM_CAPTURE_STATUS_NONE)
        capture(p);
    for (unsigned i = 0; i < BARS; i++) {
        ebb_vbar_stats stats = {.size = sizeof stats};
        ebb_range page;
        if (ebb_vbar_get_stats(p->bars[i], &stats) != EBB_OK)
            continue;
        for (uint64_t n = 0; stats.pinned && n < stats.pages && n < 4096; n++)
            if (ebb_vbar_page(p->bars[i], n, &page) == EBB_OK)
                while (ebb_vbar_unpin(p->bars[i], page.offset, page.bytes, NULL) == EBB_OK)
                    ;
        ebb_vbar_graphs_gone(p->bars[i], NULL);
    }
    check(p);
    ebb_status status = ebb_device_close(p->device);
    if (status != EBB_OK) {
        char why[256] = "";
        ebb_device_failure(p->device, why, sizeof why);
        fprintf(stderr, "the device does not close: %s: %s\n", ebb_status_name(status), why);
        ebbsim_hazard hazard;
        if (ebbsim_hazard_get(0, &hazard) == 0)
            fprintf(stderr, "%s\n", hazard.text);
        abort();
    }
    ebbsim_census n = {.size = sizeof n};
    ebbsim_census_take(&n);
    if (!p->failing && n.reservations + n.handles + n.mappings + n.events)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static play p;
    memset(&p, 0, sizeof p);
    p.at = data;
    p.end = data + size;
    start(&p);
    for (int calls = 0; p.at < p.end && calls < CALLS; calls++) {
        uint8_t what = byte(&p);
        if (what < 90)
            fault(&p, false);
        else if (what < 120)
            fault(&p, true);
        else if (what < 150)
            single(&p);
        else if (what < 165)
            create(&p);
        else if (what < 210)
            vbar_call(&p);
        else
            device_call(&p);
        check(&p);
    }
    finish(&p);
    ebb__driver_close(&p.cu);
    return 0;
}
