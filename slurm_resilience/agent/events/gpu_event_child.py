"""Wait for Xids in NVML's event set, and tell sresd of each: the process that `GpuEvents` starts.

A process of its own: a driver that hangs can be killed with it, and NVIDIA's library stays out of
sresd. It writes a line of JSON for each thing that it has to say, and one at each beat.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

from slurm_resilience.health.checks.gpu.nvml_facts import recovery_fact

BEAT_SECONDS = 5.0
NICENESS = 10


def main() -> int:
    """Run until the driver ends it, or sresd is gone."""
    import pynvml

    os.nice(NICENESS)
    try:
        pynvml.nvmlInit()
        _follow(pynvml)
    except pynvml.NVMLError as error:
        missing = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        _tell(ended=str(error), library=not missing)
    except BrokenPipeError:
        return 0
    return 1


def _follow(nvml: Any) -> None:
    events = nvml.nvmlEventSetCreate()
    gpus = {}
    for index in range(int(nvml.nvmlDeviceGetCount())):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            known = nvml.nvmlDeviceGetSupportedEventTypes(handle)
            if not known & nvml.nvmlEventTypeXidCriticalError:
                continue
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            bus = nvml.nvmlDeviceGetPciInfo(handle).busId
        except nvml.NVMLError:
            continue  # a lost GPU, or one that has no events
        # By its address in memory: a GPU that has fallen off the bus tells nothing of itself.
        gpus[_memory_address(handle)] = (
            handle,
            bus.decode() if isinstance(bus, bytes) else str(bus),
        )
    if not gpus:
        _tell(ended="no GPU tells of its errors by events")
        return
    _tell(following=len(gpus))
    while True:
        try:
            data = nvml.nvmlEventSetWait_v2(events, int(BEAT_SECONDS * 1000))
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                raise
            _tell()
            continue
        gpu = gpus.get(_memory_address(data.device))
        if gpu and data.eventType & nvml.nvmlEventTypeXidCriticalError:
            _tell(event=_event(nvml, *gpu, int(data.eventData)))


def _event(nvml: Any, handle: Any, bus: str, code: int) -> dict[str, Any]:
    recovery = ""
    if code == 154:
        try:
            recovery = recovery_fact(nvml, handle).get("gpu_recovery_action", "")
        except nvml.NVMLError:
            recovery = ""  # the kernel log says it too
    return {"gpu": bus, "code": code, "recovery": recovery}


def _memory_address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main())
