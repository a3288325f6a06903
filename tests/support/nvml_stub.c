/* A libnvidia-ml.so.1 without a GPU: what it answers stands in the file that $NVML_STUB names, a
 * `name=value` a line, read anew at each call. A name may begin with `gpu0.` for one GPU alone.
 * count, init (the code that nvmlInit returns), handle (the code that a GPU's handle returns),
 * recovery, corrected, uncorrected, pending, ecc_corrected, power (-999: unknown error), replays,
 * link_errors (of each kind and link), failed, retired, retirement, ecc, sram, clocks, width,
 * max_width, generation, max_generation, load, temperature, margin, fabric (its state),
 * fabric_status, fabric_mask, links, links_up, mig (MIG devices), slices (of each), process (a
 * pid). A value of -3 is "not supported".
 * `event=GPU XID` is an event, in the order of the lines; `event=0 -15` makes the wait return 15.
 * Those that stand there when an event set is made are past. `hang=1` lets the wait never return. */
#include <libgen.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10, LOST = 15 };
enum { XID_EVENT = 8 };

static long look(const char *name, long otherwise)
{
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    size_t length = strlen(name);
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, name, length) && line[length] == '=')
            otherwise = atol(line + length + 1);
    if (file)
        fclose(file);
    return otherwise;
}

/* A handle is the GPU's number and 1; that of a MIG device has its own number, and 1, above. */
static long gpu_of(void *device) { return ((long)device & 0xffff) - 1; }

static long of_gpu(void *device, const char *name, long otherwise)
{
    char full[128];
    snprintf(full, sizeof full, "gpu%ld.%s", gpu_of(device), name);
    return look(full, look(name, otherwise));
}

static int put_or(void *device, const char *name, unsigned *value, long otherwise)
{
    long found = of_gpu(device, name, otherwise);
    *value = found < 0 ? 0 : (unsigned)found;
    return found == -NOT_SUPPORTED ? NOT_SUPPORTED : SUCCESS;
}

static int put(void *device, const char *name, unsigned *value)
{
    return put_or(device, name, value, 0);
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return (int)look("init", SUCCESS); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code)
{
    switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case 9: return "Driver Not Loaded";
    case LOST: return "GPU is lost";
    case 16: return "GPU requires reset";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = (unsigned)look("count", 0);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    *device = (void *)(long)(index + 1);
    return (int)of_gpu(*device, "handle", SUCCESS);
}

struct pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(void *device, struct pci *info)
{
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02lX:00.0", gpu_of(device) + 1);
    return SUCCESS;
}

struct field {
    unsigned id, scope;
    long long timestamp, latency;
    unsigned type;
    int code;
    union { unsigned number; unsigned long long wide; } value;
};

int nvmlDeviceGetFieldValues(void *device, int count, struct field *fields)
{
    for (int at = 0; at < count; at++)
        fields[at].code = put(device, "recovery", &fields[at].value.number);
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected,
                              unsigned *pending, unsigned *failed)
{
    put(device, "corrected", corrected);
    put(device, "uncorrected", uncorrected);
    put(device, "pending", pending);
    return put(device, "failed", failed);
}

int nvmlDeviceGetRetiredPages(void *device, int cause, unsigned *count, unsigned long long *pages)
{
    unsigned retired = 0;
    int code = put_or(device, "retired", &retired, -NOT_SUPPORTED);
    if (cause == 1)
        retired = 0; /* all of them for single bits */
    for (unsigned at = 0; pages && at < retired; at++)
        pages[at] = at;
    *count = retired;
    return code;
}

int nvmlDeviceGetRetiredPagesPendingStatus(void *device, unsigned *pending)
{
    return put(device, "retirement", pending);
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *count)
{
    unsigned errors = 0;
    /* Corrected ones are ordinary. */
    int code = kind == 1 ? put(device, "ecc", &errors)
                         : put_or(device, "ecc_corrected", &errors, 1000000);
    (void)counter;
    *count = errors;
    return code;
}

struct sram {
    unsigned version;
    unsigned long long counts[11];
    unsigned exceeded;
};

int nvmlDeviceGetSramEccErrorStatus(void *device, struct sram *status)
{
    return put(device, "sram", &status->exceeded);
}

int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons)
{
    unsigned mask = 0;
    int code = put(device, "clocks", &mask);
    *reasons = mask;
    return code;
}

int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *width)
{
    return put_or(device, "width", width, 16);
}

int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *width)
{
    return put_or(device, "max_width", width, 16);
}

int nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned *generation)
{
    return put_or(device, "generation", generation, 5);
}

int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned *generation)
{
    return put_or(device, "max_generation", generation, 5);
}

struct load { unsigned gpu, memory; };

int nvmlDeviceGetUtilizationRates(void *device, struct load *load)
{
    load->memory = 0;
    return put(device, "load", &load->gpu);
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *degrees)
{
    (void)sensor;
    return put_or(device, "temperature", degrees, 40);
}

struct margin { unsigned version; int degrees; };

int nvmlDeviceGetMarginTemperature(void *device, struct margin *margin)
{
    margin->degrees = (int)of_gpu(device, "margin", 50);
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts)
{
    put_or(device, "power", milliwatts, 90000);
    return of_gpu(device, "power", 90000) == -999 ? 999 : SUCCESS;
}

int nvmlDeviceGetPcieReplayCounter(void *device, unsigned *count)
{
    return put(device, "replays", count);
}

int nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned link, int kind, unsigned long long *count)
{
    unsigned errors = 0;
    int code = put(device, "link_errors", &errors);
    (void)kind;
    *count = errors;
    return (long)link < of_gpu(device, "links", 0) ? code : 2;
}

struct fabric {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique, state, mask;
};

int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric *info)
{
    put(device, "fabric_status", &info->status);
    put(device, "fabric_mask", &info->mask);
    return put(device, "fabric", &info->state);
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active)
{
    *active = (long)link < of_gpu(device, "links_up", of_gpu(device, "links", 0));
    return (long)link < of_gpu(device, "links", 0) ? SUCCESS : 2;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending)
{
    int code = put_or(device, "mig", current, -NOT_SUPPORTED);
    *pending = *current = *current > 0;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count)
{
    (void)device;
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **part)
{
    *part = (void *)((long)device | (long)(index + 1) << 16);
    return (long)index < of_gpu(device, "mig", 0) ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length)
{
    long slices = of_gpu(device, "slices", 1);
    if ((long)device >> 16)
        snprintf(name, length, "NVIDIA H100 80GB HBM3 MIG %ldg.%ldgb", slices, 10 * slices);
    else
        snprintf(name, length, "NVIDIA H100 80GB HBM3");
    return SUCCESS;
}

struct process { unsigned pid; unsigned long long memory; unsigned gpu_part, compute_part; };

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *found)
{
    unsigned pid = 0;
    put(device, "process", &pid);
    *count = pid > 0;
    if (pid && found)
        *found = (struct process){ .pid = pid, .memory = 1 << 20 };
    return pid && !found ? TOO_SMALL : SUCCESS;
}

/* --- events ------------------------------------------------------------------------------- */

static long past; /* of one process there is one event set */

/* Return the number of events; `gpu` and `xid` are those of number `at`, counted from 0. */
static long events(long at, long *gpu, long *xid)
{
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    long count = 0, named, code;
    while (file && fgets(line, sizeof line, file))
        if (strchr(line, '\n') && sscanf(line, "event=%ld %ld", &named, &code) == 2) {
            if (count++ == at) {
                *gpu = named;
                *xid = code;
            }
        }
    if (file)
        fclose(file);
    return count;
}

int nvmlEventSetCreate(void **set)
{
    long none;
    past = events(-1, &none, &none);
    *set = &past;
    return SUCCESS;
}

int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }

int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *kinds)
{
    (void)device;
    *kinds = XID_EVENT | 3;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long kinds, void *set)
{
    (void)device, (void)set;
    return kinds & XID_EVENT ? SUCCESS : 2;
}

struct event {
    void *device;
    unsigned long long kind, data;
    unsigned gpu_part, compute_part;
};

/* Wait until the file may have changed, at most so long: like the real driver, without polling. */
static int wait_for_change(int watch, int milliseconds)
{
    struct pollfd file = { .fd = watch, .events = POLLIN };
    char changes[4096];
    int ready = poll(&file, 1, milliseconds);
    if (ready > 0 && read(watch, changes, sizeof changes) < 0)
        return 0;
    return ready;
}

static long now_milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int nvmlEventSetWait_v2(void *set, struct event *event, unsigned milliseconds)
{
    long gpu = 0, xid = 0;
    char folder[4096];
    int watch = inotify_init1(IN_CLOEXEC), changed = 1;
    (void)set;
    snprintf(folder, sizeof folder, "%s", getenv("NVML_STUB") ? getenv("NVML_STUB") : ".");
    inotify_add_watch(watch, dirname(folder), IN_MODIFY | IN_MOVED_TO);
    long until = now_milliseconds() + milliseconds, left = milliseconds;
    while (events(past, &gpu, &xid) <= past && changed > 0) {
        changed = left > 0 ? wait_for_change(watch, (int)left) : 0;
        left = until - now_milliseconds();
    }
    while (look("hang", 0))
        wait_for_change(watch, -1);
    close(watch);
    if (changed <= 0)
        return TIMEOUT;
    past++;
    if (xid < 0)
        return (int)-xid;
    *event = (struct event){ .device = (void *)(gpu + 1), .kind = XID_EVENT, .data = (unsigned long long)xid };
    return SUCCESS;
}
