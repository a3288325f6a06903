/* A libnvidia-ml.so.1 without a GPU: what it answers stands in the file that $NVML_STUB names, a
 * `name=value` a line, read anew at each call. A name may begin with `gpu0.` for one GPU alone.
 * count, init (the code that nvmlInit returns), handle (the code that a GPU's handle returns),
 * recovery, corrected, uncorrected, pending, failed, ecc, sram, clocks, width, max_width, links,
 * links_up. A value of -3 is "not supported". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, LOST = 15 };

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

static long of_gpu(void *device, const char *name, long otherwise)
{
    char full[128];
    snprintf(full, sizeof full, "gpu%ld.%s", (long)device - 1, name);
    return look(full, look(name, otherwise));
}

static int put(void *device, const char *name, unsigned *value)
{
    long found = of_gpu(device, name, 0);
    *value = found < 0 ? 0 : (unsigned)found;
    return found == -NOT_SUPPORTED ? NOT_SUPPORTED : SUCCESS;
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
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02lX:00.0", (long)device);
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

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *count)
{
    unsigned errors = 0;
    int code = put(device, "ecc", &errors);
    (void)counter;
    *count = kind == 1 ? errors : 1000000; /* corrected ones are ordinary */
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
    *width = (unsigned)of_gpu(device, "width", 16);
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *width)
{
    *width = (unsigned)of_gpu(device, "max_width", 16);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active)
{
    *active = (long)link < of_gpu(device, "links_up", of_gpu(device, "links", 0));
    return (long)link < of_gpu(device, "links", 0) ? SUCCESS : 2;
}
