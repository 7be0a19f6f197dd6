/* NVML as the binding calls it, for machines without a GPU: eight GPUs, and the faults that the file
 * named by NVML_STUB asks for, which is read at each call. Its lines:
 *   gpus COUNT
 *   FUNCTION GPU CODE      fail with CODE; GPU is an index, or * for all and for what has no GPU
 *   mig GPU 1
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
         if (lookup(name, gpu, &code)) return code; } while (0)
#define DEVICE(name) long gpu = index_of(device); ENTER(name, gpu)

int nvmlInitWithFlags(unsigned flags) {
    int code;
    (void)flags;
    if (lookup("nvmlInit", -1, &code)) return code;
    opened++;
    return 0;
}
int nvmlShutdown(void) { if (!opened) return 1; opened--; generation++; return 0; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the stub"; }
int nvmlDeviceGetCount_v2(unsigned *number) { ENTER("nvmlDeviceGetCount", -1L); *number = (unsigned)count(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    ENTER("nvmlDeviceGetHandleByIndex", (long)index);
    *device = (void *)(intptr_t)(generation * 1000 + index + 1);
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
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
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, 0x44)
#define CHOICE(name, type, value) \
    int name(void *device, unsigned what, type *number) { DEVICE(#name); *number = (value); return 0; }
CHOICE(nvmlDeviceGetTemperature, unsigned, what == 0 ? 60 + (unsigned)gpu : 0)
CHOICE(nvmlDeviceGetClockInfo, unsigned, what == 1 ? 1500 : 2600)
CHOICE(nvmlDeviceGetMaxClockInfo, unsigned, what == 1 ? 1980 : 2619)
int nvmlDeviceGetTotalEccErrors(void *device, unsigned kind, unsigned counter, unsigned long long *number) {
    DEVICE("nvmlDeviceGetTotalEccErrors");
    *number = kind == 1 && counter == 0 ? 3 : 0;
    return 0;
}
