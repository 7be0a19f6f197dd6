/* NVML as the binding calls it, for machines without a GPU: eight GPUs, and the faults that the file
 * named by NVML_STUB asks for, which is read at each call. Its lines:
 *   gpus COUNT
 *   FUNCTION GPU CODE      fail with CODE, or take -CODE seconds; GPU is an index, or * for all and for what has no GPU
 *   mig GPU 1, instances GPU COUNT
 *   memory GPU GIB, used GPU GIB, process GPU PID
 *   ecc GPU COUNT, rows GPU (1: one waits for a reset, 2: none left), throttle GPU BITS
 *   width GPU LANES, generation GPU NUMBER, links GPU COUNT (of 18, if any), peers GPU 0
 *   fabric GPU STATE (2: not ready yet, 3: ready), persistence GPU 0, mode GPU NUMBER, driver * CUDA
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int opened = 0;
static long generation = 1;

static int lookup(const char *name, long gpu, int *value) {
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256], word[128], which[32];
    int number, found = 0;
    if (!file) return 0;
    while (!found && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%127s %31s %d", word, which, &number) != 3 || strcmp(word, name)) continue;
        if (!strcmp(which, "*") || (gpu >= 0 && atol(which) == gpu)) { *value = number; found = 1; }
    }
    fclose(file);
    return found;
}

static long count(void) {
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    long number, result = 8;
    if (!file) return result;
    while (fgets(line, sizeof line, file)) if (sscanf(line, "gpus %ld", &number) == 1) result = number;
    fclose(file);
    return result;
}

/* A handle is good until the library is closed: an old one is an error of the caller. */
static long index_of(void *handle) {
    intptr_t value = (intptr_t)handle;
    return value / 1000 == generation ? value % 1000 - 1 : -2;
}

#define ENTER(name, gpu) \
    do { int code; if (!opened) return 1; if ((gpu) == -2) return 2; \
         if (lookup(name, gpu, &code)) { if (code >= 0) return code; sleep((unsigned)-code); } } while (0)
#define DEVICE(name) long gpu = index_of(device); ENTER(name, gpu)

int nvmlInitWithFlags(unsigned flags) {
    int code;
    (void)flags;
    if (lookup("nvmlInit", -1, &code)) return code;
    opened++;
    return 0;
}
int nvmlShutdown(void) { if (!opened) return 1; if (--opened == 0) generation++; return 0; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the stub"; }
int nvmlDeviceGetCount_v2(unsigned *number) { ENTER("nvmlDeviceGetCount", -1L); *number = (unsigned)count(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    ENTER("nvmlDeviceGetHandleByIndex", (long)index);
    *device = (void *)(intptr_t)(generation * 1000 + index + 1);
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    intptr_t instance = -(intptr_t)device;
    if (instance > 0) {
        snprintf(text, size, "MIG-%08lx-0000-0000-0000-%012lx", (long)instance / 10, (long)instance % 10);
        return 0;
    }
    DEVICE("nvmlDeviceGetUUID");
    snprintf(text, size, "GPU-%08lx-0000-0000-0000-000000000000", gpu + 1);
    return 0;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    DEVICE("nvmlDeviceGetName");
    snprintf(text, size, "NVIDIA Stub");
    return 0;
}
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *info) {
    DEVICE("nvmlDeviceGetPciInfo");
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02lX:00.0", gpu);
    return 0;
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending) {
    int value = 0;
    DEVICE("nvmlDeviceGetMigMode");
    lookup("mig", gpu, &value);
    *now = *pending = (unsigned)value;
    return 0;
}
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *device, struct memory *info) {
    DEVICE("nvmlDeviceGetMemoryInfo");
    info->total = 80000; info->used = 1512 + gpu; info->free = info->total - info->used;
    return 0;
}
struct memory2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory2 *info) {
    DEVICE("nvmlDeviceGetMemoryInfo_v2");
    if (info->version != (sizeof *info | 2u << 24)) return 25;
    info->total = 80000; info->reserved = 512; info->used = 1000 + gpu; info->free = 0;
    int gib;
    if (lookup("memory", gpu, &gib)) info->total = (unsigned long long)gib << 30;
    if (lookup("used", gpu, &gib)) info->used = (unsigned long long)gib << 30;
    return 0;
}
struct rates { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *device, struct rates *rates) {
    DEVICE("nvmlDeviceGetUtilizationRates");
    rates->gpu = 90 + gpu; rates->memory = 40;
    return 0;
}
#define NUMBER(name, type, value) \
    int name(void *device, type *number) { DEVICE(#name); *number = (value); return 0; }
NUMBER(nvmlDeviceGetPowerUsage, unsigned, 400000 + (unsigned)gpu)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, 700000)
static int value(const char *name, long gpu, int usual) {
    int number;
    return lookup(name, gpu, &number) ? number : usual;
}
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, (unsigned long long)value("throttle", gpu, 0x44))
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, (unsigned)value("width", gpu, 16))
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, (unsigned)value("generation", gpu, 5))
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 5)
NUMBER(nvmlDeviceGetPerformanceState, unsigned, 0)
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, (unsigned)value("persistence", gpu, 1))
NUMBER(nvmlDeviceGetComputeMode, unsigned, (unsigned)value("mode", gpu, 0))
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, 0)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, 7)
int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    DEVICE("nvmlDeviceGetRemappedRows");
    int rows = value("rows", gpu, 0);
    *corrected = 1; *uncorrected = rows != 0; *pending = rows == 1; *failed = rows == 2;
    return 0;
}
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *state) {
    int up = 0;
    DEVICE("nvmlDeviceGetNvLinkState");
    if (!lookup("links", gpu, &up) || link >= 18) return 3;
    *state = link < (unsigned)up;
    return 0;
}
struct fabric { unsigned char uuid[16]; int status; unsigned clique; unsigned char state; };
int nvmlDeviceGetGpuFabricInfo(void *device, struct fabric *info) {
    int state = 0;
    DEVICE("nvmlDeviceGetGpuFabricInfo");
    if (!lookup("fabric", gpu, &state)) return 3;
    memset(info, 0, sizeof *info);
    info->state = (unsigned char)state;
    return 0;
}
int nvmlDeviceGetP2PStatus(void *device, void *other, int what, unsigned *status) {
    DEVICE("nvmlDeviceGetP2PStatus");
    int up = 0, others = 0;
    if (what == 2) {
        /* By NVLink, where both have any. */
        *status = lookup("links", gpu, &up) && lookup("links", index_of(other), &others) && up && others ? 0 : 3;
        return 0;
    }
    *status = value("peers", gpu, 1) && value("peers", index_of(other), 1) ? 0 : 3;
    return 0;
}
struct process { unsigned pid; unsigned long long used; unsigned instance, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *list) {
    int pid = 0;
    unsigned room = *count;
    DEVICE("nvmlDeviceGetComputeRunningProcesses");
    *count = (unsigned)lookup("process", gpu, &pid);
    if (*count > room) return 7;
    if (*count) list[0] = (struct process){(unsigned)pid, (unsigned long long)value("used", gpu, 1) << 30, 0, 0};
    return 0;
}
/* The handle of an instance is that of its GPU with its number in front. */
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **instance) {
    DEVICE("nvmlDeviceGetMigDeviceHandleByIndex");
    if ((int)index >= value("instances", gpu, 0)) return 6;
    *instance = (void *)(intptr_t)(-(intptr_t)((gpu + 1) * 10 + index));
    return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { ENTER("nvmlSystemGetDriverVersion", -1L); snprintf(text, size, "570.86.15"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *number) {
    ENTER("nvmlSystemGetCudaDriverVersion", -1L);
    *number = value("driver", -1, 12080);
    return 0;
}
#define CHOICE(name, type, value) \
    int name(void *device, unsigned what, type *number) { DEVICE(#name); *number = (value); return 0; }
CHOICE(nvmlDeviceGetPcieThroughput, unsigned, 1000 * (unsigned)(gpu + 1) + what)
struct field { unsigned id, scope; long long timestamp, latency; unsigned type; int code; unsigned long long value; };
int nvmlDeviceGetFieldValues(void *device, int count, struct field *values) {
    struct timespec now;
    int up, number;
    DEVICE("nvmlDeviceGetFieldValues");
    clock_gettime(CLOCK_MONOTONIC, &now);
    for (number = 0; number < count; number++) {
        values[number].code = lookup("links", gpu, &up) && up ? 0 : 3;
        values[number].value = (unsigned long long)now.tv_sec * 1000 + (unsigned long long)now.tv_nsec / 1000000;
    }
    return 0;
}
CHOICE(nvmlDeviceGetTemperature, unsigned, what == 0 ? 60 + (unsigned)gpu : 0)
CHOICE(nvmlDeviceGetClockInfo, unsigned, what == 1 ? 1500 : 2600)
CHOICE(nvmlDeviceGetMaxClockInfo, unsigned, what == 1 ? 1980 : 2619)
int nvmlDeviceGetTotalEccErrors(void *device, unsigned kind, unsigned counter, unsigned long long *number) {
    DEVICE("nvmlDeviceGetTotalEccErrors");
    *number = kind == 1 && counter == 0 ? (unsigned long long)value("ecc", gpu, 3) : 0;
    return 0;
}
