"""Read the facts that NVML knows about one GPU, in the words of nvidia-smi.

An old driver, or a product that does not count something, knows fewer facts; none is made up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

RECOVERY_ACTIONS = (
    "none",
    "gpu reset",
    "node reboot",
    "drain p2p",
    "drain and reset",
    "imex",
    "bus reset",
    "system reboot",
)
"""Names of the values of NVML's field 230, in words that Xid 154 uses too."""
RECOVERY_FIELD = 230
THROTTLES = {
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
FABRIC_STATES = {1: "Not Started", 2: "In Progress", 3: "Completed"}
FABRIC_FAULTS = {
    0: "degraded bandwidth",
    2: "route recovery",
    4: "unhealthy route",
    6: "access timeout recovery",
}
"""Places of the faults in the fabric's health mask."""


COUNTER = "counters/"
"""Begins the name of a fact that only grows: what counts is by how much between two looks."""
NVLINK_COUNTERS = {0: "nvlink_replay", 1: "nvlink_recovery", 2: "nvlink_crc", 3: "nvlink_crc"}
"""NVML's error counters of one link, by number: flits and data have one CRC each."""
MAX_NVLINKS = 18
"""NVLinks of the products that have most."""


def read_facts(nvml: Any, index: int) -> dict[str, str]:
    """Return the facts that a GPU and its driver know; an old driver knows fewer."""
    gpu = {"id": f"GPU {index}"}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return gpu | {"error": _words(nvml, error)}
    for look in _LOOKS:
        try:
            gpu |= look(nvml, handle)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                return gpu | {"error": _words(nvml, error)}
        except (AttributeError, TypeError):
            continue  # a library older than this fact
    return gpu


def _words(nvml: Any, error: Any) -> str:
    """Return an error in the words of nvidia-smi, which pynvml does not use for all of them."""
    words = {
        nvml.NVML_ERROR_GPU_IS_LOST: "GPU is lost",
        nvml.NVML_ERROR_RESET_REQUIRED: "GPU requires reset",
    }
    return words.get(error.value, str(error))


def _identity(nvml: Any, handle: Any) -> dict[str, str]:
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    return {"id": bus.decode() if isinstance(bus, bytes) else str(bus)}


def recovery_fact(nvml: Any, handle: Any) -> dict[str, str]:
    """Return the recovery action that the driver asks for; nothing where it knows none."""
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_FIELD])
    action = int(value.value.uiVal)
    if value.nvmlReturn or not 0 <= action < len(RECOVERY_ACTIONS):
        return {}
    return {"gpu_recovery_action": RECOVERY_ACTIONS[action]}


def _rows(nvml: Any, handle: Any) -> dict[str, str]:
    _, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return {
        "remapped_rows_uncorrectable": str(uncorrected),
        "remapped_rows_pending": "Yes" if pending else "No",
        "remapped_rows_failure": "Yes" if failed else "No",
    }


def _pages(nvml: Any, handle: Any) -> dict[str, str]:
    """Return what a product older than Ampere has instead of remapped rows."""
    causes = (
        ("single", nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS),
        ("double", nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR),
    )
    counts = {
        f"retired_pages/{name}_bit_ecc": str(len(nvml.nvmlDeviceGetRetiredPages(handle, cause)))
        for name, cause in causes
    }
    pending = nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)
    return counts | {"retired_pages_pending": "Yes" if pending else "No"}


def _errors(nvml: Any, handle: Any) -> dict[str, str]:
    count = nvml.nvmlDeviceGetTotalEccErrors(
        handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    )
    return {"ecc_errors_uncorrected_volatile_total": str(count)}


def _corrected(nvml: Any, handle: Any) -> dict[str, str]:
    count = nvml.nvmlDeviceGetTotalEccErrors(
        handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
    )
    return {"ecc_errors_corrected_volatile_total": str(count)}


def _power(nvml: Any, handle: Any) -> dict[str, str]:
    """Return nothing where the power can be read, or is not measured."""
    try:
        nvml.nvmlDeviceGetPowerUsage(handle)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_UNKNOWN:
            return {"power_draw": "Unknown Error"}
        raise
    return {}


def _replays(nvml: Any, handle: Any) -> dict[str, str]:
    return {f"{COUNTER}pcie_replay": str(nvml.nvmlDeviceGetPcieReplayCounter(handle))}


def _link_errors(nvml: Any, handle: Any) -> dict[str, str]:
    totals: dict[str, int] = {}
    for link in range(MAX_NVLINKS):
        for number, name in NVLINK_COUNTERS.items():
            try:
                count = int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, number))
            except nvml.NVMLError as error:
                if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                    raise
                # No such link, or one that is down, or a product that counts otherwise.
                break
            totals[name] = totals.get(name, 0) + count
    return {f"{COUNTER}{name}": str(total) for name, total in totals.items()}


def _sram(nvml: Any, handle: Any) -> dict[str, str]:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return {"sram_threshold_exceeded": "Yes" if status.bThresholdExceeded else "No"}


def _clocks(nvml: Any, handle: Any) -> dict[str, str]:
    try:
        mask = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        mask = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))  # its name before 12.2
    return {
        f"clocks_event_reasons/{name}": "Active" for bit, name in THROTTLES.items() if mask & bit
    }


def _lanes(nvml: Any, handle: Any) -> dict[str, str]:
    return {
        "current_link_width": str(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "max_link_width": str(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }


def _generation(nvml: Any, handle: Any) -> dict[str, str]:
    """Return the PCIe generation, and the load that tells whether it has to be the highest."""
    return {
        "current_link_gen": str(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        "max_link_gen": str(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
        "gpu_util": str(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
    }


def _temperature(nvml: Any, handle: Any) -> dict[str, str]:
    return {
        "temperature_gpu": str(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "gpu_temp_tlimit": str(nvml.nvmlDeviceGetMarginTemperature(handle)),
    }


def _fabric(nvml: Any, handle: Any) -> dict[str, str]:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    state = FABRIC_STATES.get(info.state)
    if state is None:
        return {}  # this product has no fabric
    status = "Success" if info.status == 0 else str(nvml.NVMLError(info.status))
    # Two bits each: 1 is a fault, 2 is none, and 0 is not known.
    faults = [name for shift, name in FABRIC_FAULTS.items() if info.healthMask >> shift & 3 == 1]
    return {
        "fabric/state": state,
        "fabric/status": status,
        "fabric/faults": ", ".join(faults),
    }


_LOOKS: tuple[Callable[[Any, Any], dict[str, str]], ...] = (
    _identity,
    recovery_fact,
    _rows,
    _pages,
    _errors,
    _corrected,
    _sram,
    _power,
    _replays,
    _link_errors,
    _clocks,
    _lanes,
    _generation,
    _temperature,
    _fabric,
)
