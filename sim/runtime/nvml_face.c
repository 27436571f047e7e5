/*
 * libnvidia-ml.so.1's face: how many cards there are, and which. PyTorch counts devices with it, so
 * that a process can fork afterwards: nothing here starts the driver.
 */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "ebbtide_sim.h"

#define NVML_API __attribute__((visibility("default")))

typedef enum nvmlReturn_t {
    NVML_SUCCESS = 0,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7
} nvmlReturn_t;

typedef struct card *nvmlDevice_t; /* its ordinal, plus one */

/* What nvmlDeviceGetGpuFabricInfoV fills; its beginning is the same in all versions. */
typedef struct nvmlGpuFabricInfoV_t {
    unsigned version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned cliqueId;
    unsigned char state; /* 0: no fabric */
    unsigned healthMask;
} nvmlGpuFabricInfoV_t;

static int ordinal_of(nvmlDevice_t device)
{
    size_t number = (size_t)device;
    return number >= 1 && number <= (size_t)ebbsim_card_count() ? (int)number - 1 : -1;
}

/* ---- start ------------------------------------------------------------------------------------ */

NVML_API nvmlReturn_t nvmlInit_v2(void);
nvmlReturn_t nvmlInit_v2(void)
{
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlInit(void);
nvmlReturn_t nvmlInit(void)
{
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned flags);
nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlShutdown(void);
nvmlReturn_t nvmlShutdown(void)
{
    return NVML_SUCCESS;
}

NVML_API const char *nvmlErrorString(nvmlReturn_t code);
const char *nvmlErrorString(nvmlReturn_t code)
{
    switch (code) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    }
    return "Unknown Error";
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version);
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    if (version == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *version = 13000;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version);
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned length);
nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned length)
{
    bool fits = text != NULL && snprintf(text, length, "580.65.06") < (int)length;
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

/* ---- cards ------------------------------------------------------------------------------------ */

NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count);
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    if (count == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *count = (unsigned)ebbsim_card_count();
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device);
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    if (device == NULL || index >= (unsigned)ebbsim_card_count()) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *device = (nvmlDevice_t)((size_t)index + 1);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device);
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device)
{
    unsigned domain = 0, bus = 0;
    if (text == NULL || sscanf(text, "%x:%x", &domain, &bus) != 2) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    return bus == 0 ? NVML_ERROR_NOT_FOUND : nvmlDeviceGetHandleByIndex_v2(bus - 1, device);
}

/* The bytes of cuDeviceGetUuid, as programs write them. */
NVML_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length);
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length)
{
    int ordinal = ordinal_of(device);
    if (ordinal < 0 || text == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    unsigned char b[16] = "ebbtide-sim-gpu";
    b[15] = (unsigned char)ordinal;
    int needed = snprintf(
        text, length, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
        b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
        b[14], b[15]);
    return needed < (int)length ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *text, nvmlDevice_t *device);
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *text, nvmlDevice_t *device)
{
    for (unsigned i = 0; text != NULL && i < (unsigned)ebbsim_card_count(); i++) {
        char own[64];
        nvmlDevice_t candidate = (nvmlDevice_t)((size_t)i + 1);
        if (nvmlDeviceGetUUID(candidate, own, sizeof own) == NVML_SUCCESS &&
            strcmp(own, text) == 0) {
            return nvmlDeviceGetHandleByIndex_v2(i, device);
        }
    }
    return text == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length);
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length)
{
    ebbsim_card card = {.size = sizeof card};
    if (text == NULL || ebbsim_card_get(ordinal_of(device), &card) != 0) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    bool fits = snprintf(text, length, "%s", card.name) < (int)length;
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

/* ---- what else PyTorch asks ------------------------------------------------------------------- */

/* For the report of an OutOfMemoryError. */
NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count,
                                                           void *processes);
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count,
                                                  void *processes)
{
    (void)processes;
    if (ordinal_of(device) < 0 || count == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *count = 0;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                              void *processes);
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                     void *processes)
{
    return nvmlDeviceGetComputeRunningProcesses(device, count, processes);
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info);
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info)
{
    if (ordinal_of(device) < 0 || info == NULL) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *info = (nvmlGpuFabricInfoV_t){.version = info->version, .status = NVML_SUCCESS};
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t first, nvmlDevice_t second, int index,
                                             int *status);
nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t first, nvmlDevice_t second, int index, int *status)
{
    ebbsim_card a = {.size = sizeof a}, b = {.size = sizeof b};
    (void)index;
    if (status == NULL || ebbsim_card_get(ordinal_of(first), &a) != 0 ||
        ebbsim_card_get(ordinal_of(second), &b) != 0) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *status = a.peer && b.peer ? 0 : 4; /* NVML_P2P_STATUS_OK, _DISABLED_BY_REGKEY */
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link,
                                                          int *type);
nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, int *type)
{
    (void)device, (void)link, (void)type;
    return NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link,
                                                          void *info);
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, void *info)
{
    (void)device, (void)link, (void)info;
    return NVML_ERROR_NOT_SUPPORTED;
}

/* ---- what a card that computes nothing has none of --------------------------------------------- */

#define ABSENT(name)                                                                               \
    NVML_API nvmlReturn_t name(nvmlDevice_t device);                                               \
    nvmlReturn_t name(nvmlDevice_t device)                                                         \
    {                                                                                              \
        return ordinal_of(device) < 0 ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;    \
    }

ABSENT(nvmlDeviceGetTemperature)
ABSENT(nvmlDeviceGetTemperatureV)
ABSENT(nvmlDeviceGetPowerUsage)
ABSENT(nvmlDeviceGetClockInfo)
ABSENT(nvmlDeviceGetUtilizationRates)
ABSENT(nvmlDeviceGetMemoryInfo)
ABSENT(nvmlDeviceGetMemoryInfo_v2)
