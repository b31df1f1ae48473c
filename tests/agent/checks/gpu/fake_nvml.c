/* A stand-in for NVIDIA's libnvidia-ml.so.1 with the same ABI, for as much of it as everstep asks.

   It answers as a healthy machine with NVSwitch would, except for what the file nvml.script next to
   the library says. The file is read again whenever it has changed, so a running process sees it.
   One statement a line, a later one wins:

     gpus N                                     how many there are
     FUNCTION [gpu=N] [at=T] [after=N] WHAT     FUNCTION may be * (every call about that GPU)
     event id=N gpu=N xid=N                     handed out by nvmlEventSetWait_v2, once

   at: seconds of CLOCK_BOOTTIME from which it holds. after: calls of FUNCTION that are answered
   normally before. WHAT: value=X | ret=CODE | hang. Parts have names of their own, for example
   nvmlDeviceGetFieldValues/230. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
enum { GPUS = 64, STATEMENTS = 512, EVENTS = 256, FUNCTIONS = 256 };

typedef struct { int index; } Gpu;
typedef struct {
    char function[64], value[96];
    int gpu, ret, hang;
    long after;
    double at;
} Statement;
typedef struct { int id, gpu, xid; } Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Gpu gpus[GPUS];
static Statement statements[STATEMENTS];
static Event events[EVENTS];
static struct { char name[64]; long calls; } counted[FUNCTIONS];
static int n_gpus = 8, n_statements, n_events, n_counted, initialised, told;
static struct stat seen;

static void read_line(char *line) {
    char *word, *rest = line;
    Statement s = {.gpu = -1, .ret = -1};
    Event e = {0};
    if (!(word = strtok_r(line, " \n", &rest))) return;
    snprintf(s.function, sizeof s.function, "%s", word);
    while ((word = strtok_r(NULL, " \n", &rest))) {
        if (!strncmp(word, "gpu=", 4)) s.gpu = e.gpu = atoi(word + 4);
        else if (!strncmp(word, "at=", 3)) s.at = atof(word + 3);
        else if (!strncmp(word, "after=", 6)) s.after = atol(word + 6);
        else if (!strncmp(word, "ret=", 4)) s.ret = atoi(word + 4);
        else if (!strncmp(word, "value=", 6)) snprintf(s.value, sizeof s.value, "%s", word + 6);
        else if (!strncmp(word, "id=", 3)) e.id = atoi(word + 3);
        else if (!strncmp(word, "xid=", 4)) e.xid = atoi(word + 4);
        else if (!strcmp(word, "hang")) s.hang = 1;
        else if (!strcmp(s.function, "gpus")) n_gpus = atoi(word);
    }
    if (!strcmp(s.function, "event") && n_events < EVENTS) events[n_events++] = e;
    else if (strcmp(s.function, "gpus") && n_statements < STATEMENTS) statements[n_statements++] = s;
}

static void read_script(void) {
    static char path[4096];
    char line[512];
    struct stat now;
    FILE *file;
    if (!*path) {
        Dl_info info;
        dladdr((void *)read_script, &info);
        snprintf(path, sizeof path - 16, "%s", info.dli_fname);
        strcpy(strrchr(path, '/') + 1, "nvml.script");
    }
    if (stat(path, &now) || (now.st_ino == seen.st_ino && now.st_size == seen.st_size &&
                             now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec &&
                             now.st_mtim.tv_sec == seen.st_mtim.tv_sec)) return;
    if (!(file = fopen(path, "r"))) return;
    seen = now;
    n_gpus = 8;
    n_statements = n_events = 0;
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
}

static double boottime(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

static long count(const char *function) {
    int at = 0;
    while (at < n_counted && strcmp(counted[at].name, function)) at++;
    if (at == FUNCTIONS) return 0;
    if (at == n_counted) snprintf(counted[n_counted++].name, 64, "%s", function);
    return counted[at].calls++;
}

/* What the script says of this call: its return code; `value` gets a text if there is one. */
static int ask(const char *function, const Gpu *gpu, char *value) {
    int ret = 0, hang = 0, whole = gpu == NULL;
    pthread_mutex_lock(&lock);
    read_script();
    long calls = count(function);
    double now = boottime();
    *value = 0;
    for (int at = 0; at < n_statements; at++) {
        const Statement *s = &statements[at];
        if (strcmp(s->function, function) && (whole || strcmp(s->function, "*"))) continue;
        if ((s->gpu >= 0 && (whole || s->gpu != gpu->index)) || s->at > now || s->after > calls)
            continue;
        if (s->hang) hang = 1;
        else if (s->ret >= 0) ret = s->ret, hang = 0;
        else strcpy(value, s->value), ret = hang = 0;
    }
    pthread_mutex_unlock(&lock);
    while (hang) pause();
    if (!ret && !initialised && strncmp(function, "nvmlInit", 8)) ret = UNINITIALIZED;
    return ret;
}

static int number(const char *function, const Gpu *gpu, double *answer) {
    char value[96];
    int ret = ask(function, gpu, value);
    if (!ret && *value) *answer = atof(value);
    return ret;
}

static int text(const char *function, const Gpu *gpu, char *answer, unsigned size) {
    char value[96];
    int ret = ask(function, gpu, value);
    if (!ret && *value) snprintf(answer, size, "%s", value);
    return ret;
}

#define NUMBER(function, normal)                              \
    int function(Gpu *gpu, unsigned *answer) {                \
        double value = normal;                                \
        int ret = number(#function, gpu, &value);             \
        if (!ret) *answer = (unsigned)value;                  \
        return ret;                                           \
    }
#define NUMBER_OF(function, normal)                           \
    int function(Gpu *gpu, unsigned which, unsigned *answer) { \
        char name[64];                                        \
        double value = normal;                                \
        snprintf(name, sizeof name, #function "/%u", which);  \
        int ret = number(#function, gpu, &value);             \
        if (!ret) ret = number(name, gpu, &value);            \
        if (!ret) *answer = (unsigned)value;                  \
        return ret;                                           \
    }

/* --- the machine --- */

int nvmlInitWithFlags(unsigned flags) {
    double value = 0;
    int ret = number("nvmlInit", NULL, &value);
    (void)flags;
    if (!ret) initialised = 1;
    for (int at = 0; at < GPUS; at++) gpus[at].index = at;
    return ret;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { initialised = 0; return 0; }
const char *nvmlErrorString(int ret) { (void)ret; return "an error of the fake"; }

int nvmlSystemGetDriverVersion(char *answer, unsigned size) {
    snprintf(answer, size, "570.86.15");
    return text("nvmlSystemGetDriverVersion", NULL, answer, size);
}

int nvmlDeviceGetCount_v2(unsigned *answer) {
    char value[96];
    int ret = ask("nvmlDeviceGetCount", NULL, value);
    if (!ret) *answer = *value ? (unsigned)atoi(value) : (unsigned)n_gpus;
    return ret;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **answer) {
    char value[96];
    if (index >= (unsigned)n_gpus) return INVALID;
    *answer = &gpus[index];
    return ask("nvmlDeviceGetHandleByIndex", &gpus[index], value);
}

/* --- who a GPU is --- */

int nvmlDeviceGetPciInfo_v3(Gpu *gpu, void *answer) {
    struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } info;
    memset(&info, 0, sizeof info);
    info.bus = 0x1b + 0x10 * gpu->index;
    snprintf(info.legacy, sizeof info.legacy, "0000:%02X:00.0", info.bus & 0xff);
    snprintf(info.bus_id, sizeof info.bus_id, "00000000:%02X:00.0", info.bus & 0xff);
    int ret = text("nvmlDeviceGetPciInfo", gpu, info.bus_id, sizeof info.bus_id);
    if (!ret) memcpy(answer, &info, sizeof info);
    return ret;
}
int nvmlDeviceGetUUID(Gpu *gpu, char *answer, unsigned size) {
    snprintf(answer, size, "GPU-00000000-fake-0000-0000-%012d", gpu->index);
    return text("nvmlDeviceGetUUID", gpu, answer, size);
}
int nvmlDeviceGetSerial(Gpu *gpu, char *answer, unsigned size) {
    snprintf(answer, size, "16500%08d", gpu->index);
    return text("nvmlDeviceGetSerial", gpu, answer, size);
}
int nvmlDeviceGetName(Gpu *gpu, char *answer, unsigned size) {
    snprintf(answer, size, "NVIDIA H100 80GB HBM3");
    return text("nvmlDeviceGetName", gpu, answer, size);
}

/* --- numbers --- */

NUMBER_OF(nvmlDeviceGetTemperature, 55)
NUMBER_OF(nvmlDeviceGetTemperatureThreshold, which ? 87 : 92)
NUMBER_OF(nvmlDeviceGetClockInfo, 1755)
NUMBER_OF(nvmlDeviceGetMaxClockInfo, 1980)
NUMBER_OF(nvmlDeviceGetNvLinkState, 1)
NUMBER(nvmlDeviceGetPowerUsage, 620000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, 700000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, 700000)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, 16)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, 5)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, 16)

int nvmlDeviceGetUtilizationRates(Gpu *gpu, unsigned answer[2]) {
    double value = 98;
    int ret = number("nvmlDeviceGetUtilizationRates", gpu, &value);
    answer[0] = answer[1] = (unsigned)value;
    return ret;
}
int nvmlDeviceGetMemoryInfo(Gpu *gpu, uint64_t answer[3]) {
    double used = 61440.0 * 1048576;
    int ret = number("nvmlDeviceGetMemoryInfo", gpu, &used);
    answer[0] = 81559ull << 20;
    answer[2] = (uint64_t)used;
    answer[1] = answer[0] - answer[2];
    return ret;
}
static int two(const char *function, Gpu *gpu, double value, unsigned *now, unsigned *pending) {
    int ret = number(function, gpu, &value);
    *now = *pending = (unsigned)value;
    return ret;
}
int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *now, unsigned *pending) {
    return two("nvmlDeviceGetMigMode", gpu, 0, now, pending);
}
int nvmlDeviceGetEccMode(Gpu *gpu, unsigned *now, unsigned *pending) {
    return two("nvmlDeviceGetEccMode", gpu, 1, now, pending);
}
static int reasons(Gpu *gpu, uint64_t *answer) {
    double value = 4; /* the power cap of software: normal under load */
    int ret = number("nvmlDeviceGetCurrentClocksEventReasons", gpu, &value);
    if (!ret) *answer = (uint64_t)value;
    return ret;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, uint64_t *answer) {
    return reasons(gpu, answer);
}

typedef struct {
    uint32_t field, scope;
    int64_t stamp, latency;
    unsigned type, ret;
    union { double d; unsigned u; unsigned long long ull; int i; } value;
} Field;

static double normal_of(unsigned field) {
    switch (field) {
        case 82: return 60;
        case 91: return 18;
        case 194: return -2;
        default: return 0;
    }
}
int nvmlDeviceGetFieldValues(Gpu *gpu, int count, Field *fields) {
    char name[64], value[96];
    int ret = ask("nvmlDeviceGetFieldValues", gpu, value);
    for (int at = 0; !ret && at < count; at++) {
        Field *field = &fields[at];
        double told = normal_of(field->field);
        snprintf(name, sizeof name, "nvmlDeviceGetFieldValues/%u", field->field);
        field->ret = number(name, gpu, &told);
#ifdef OLD
        if (field->field > 145) field->ret = NOT_SUPPORTED;
#endif
        field->type = field->field == 194 ? 5 : 3; /* int, or unsigned long long */
        if (field->type == 5) field->value.i = (int)told;
        else field->value.ull = (unsigned long long)told;
    }
    return ret;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *count, void *answer) {
    struct { unsigned pid; uint64_t used; unsigned gpu_instance, compute_instance; } *out = answer;
    char value[96], *rest, *word;
    unsigned found = 0, room = *count;
    int ret = ask("nvmlDeviceGetComputeRunningProcesses", gpu, value);
    if (ret) return ret;
    for (word = strtok_r(value, ",", &rest); word; word = strtok_r(NULL, ",", &rest), found++)
        if (out && found < room) {
            memset(&out[found], 0, sizeof out[found]);
            out[found].pid = (unsigned)atoi(word);
            out[found].used = 1ull << 30;
        }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : 0;
}

/* --- events --- */

int nvmlEventSetCreate(void **answer) {
    char value[96];
    int ret = ask("nvmlEventSetCreate", NULL, value);
    for (int at = 0; at < n_events; at++)
        if (events[at].id > told) told = events[at].id; /* what was before is not reported */
    *answer = &told;
    return ret;
}
int nvmlEventSetFree(void *set) { (void)set; return 0; }
int nvmlDeviceGetSupportedEventTypes(Gpu *gpu, uint64_t *answer) {
    double value = 0x1f;
    int ret = number("nvmlDeviceGetSupportedEventTypes", gpu, &value);
    if (!ret) *answer = (uint64_t)value;
    return ret;
}
int nvmlDeviceRegisterEvents(Gpu *gpu, uint64_t types, void *set) {
    char value[96];
    (void)types, (void)set;
    return ask("nvmlDeviceRegisterEvents", gpu, value);
}
int nvmlEventSetWait_v2(void *set, void *answer, unsigned timeout_ms) {
    struct { Gpu *gpu; uint64_t type, data; unsigned gpu_instance, compute_instance; } event = {0};
    double until = boottime() + timeout_ms * 1e-3;
    struct timespec nap = {0, 20000000};
    char value[96];
    (void)set;
    do {
        int ret = ask("nvmlEventSetWait", NULL, value);
        if (ret) return ret;
        pthread_mutex_lock(&lock);
        for (int at = 0; at < n_events && !event.gpu; at++)
            if (events[at].id > told) {
                told = events[at].id;
                event.gpu = &gpus[events[at].gpu];
                event.type = 8;
                event.data = (uint64_t)events[at].xid;
            }
        pthread_mutex_unlock(&lock);
        if (event.gpu) {
            memcpy(answer, &event, sizeof event);
            return 0;
        }
        nanosleep(&nap, NULL);
    } while (boottime() < until);
    return TIMEOUT;
}

/* --- what older libraries lack --- */

#ifndef OLD
int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, uint64_t *answer) {
    return reasons(gpu, answer);
}
int nvmlDeviceGetMarginTemperature(Gpu *gpu, int answer[2]) {
    double value = 30;
    int ret = number("nvmlDeviceGetMarginTemperature", gpu, &value);
    if (!ret) answer[1] = (int)value;
    return ret;
}
int nvmlDeviceGetSramEccErrorStatus(Gpu *gpu, void *answer) {
    struct { unsigned version; uint64_t counts[11]; unsigned exceeded; } *status = answer;
    double value = 0;
    int ret = number("nvmlDeviceGetSramEccErrorStatus", gpu, &value);
    if (!ret) status->exceeded = (unsigned)value;
    return ret;
}
int nvmlDeviceGetGpuFabricInfoV(Gpu *gpu, void *answer) {
    struct { unsigned version; uint8_t uuid[16]; unsigned status, clique; uint8_t state; unsigned health; }
        *info = answer;
    double state = 3, status = 0, health = 2;
    int ret = number("nvmlDeviceGetGpuFabricInfo", gpu, &state);
    if (!ret) ret = number("nvmlDeviceGetGpuFabricInfo/status", gpu, &status);
    if (!ret) ret = number("nvmlDeviceGetGpuFabricInfo/health", gpu, &health);
    info->state = (uint8_t)state;
    info->status = (unsigned)status;
    info->health = (unsigned)health;
    return ret;
}

typedef struct { unsigned id, ret; double value; char *names[3]; } Metric;
typedef struct { unsigned version, count; Gpu **first, **second; Metric metrics[]; } Metrics;

int nvmlGpmQueryDeviceSupport(Gpu *gpu, unsigned answer[2]) {
    double value = 1;
    int ret = number("nvmlGpmQueryDeviceSupport", gpu, &value);
    answer[1] = (unsigned)value;
    return ret;
}
int nvmlGpmSampleAlloc(Gpu ***answer) {
    *answer = calloc(1, sizeof **answer);
    return *answer ? 0 : 20;
}
int nvmlGpmSampleFree(Gpu **sample) { free(sample); return 0; }
int nvmlGpmSampleGet(Gpu *gpu, Gpu **sample) {
    char value[96];
    *sample = gpu;
    return ask("nvmlGpmSampleGet", gpu, value);
}
int nvmlGpmMetricsGet(Metrics *asked) {
    char name[64];
    for (unsigned at = 0; at < asked->count; at++) {
        Metric *metric = &asked->metrics[at];
        metric->value = 40;
        snprintf(name, sizeof name, "nvmlGpmMetricsGet/%u", metric->id);
        metric->ret = (unsigned)number(name, *asked->first, &metric->value);
    }
    return 0;
}
#endif
