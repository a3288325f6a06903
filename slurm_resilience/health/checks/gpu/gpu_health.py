"""The state of each GPU, as NVML tells it: the facts and the judge that `sres replay` uses too.

The driver's own recovery action comes first. A driver that hangs is killed with the probe's
process, and nothing holds a GPU open afterwards, so that it can be reset.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.documents.reading import document_finding
from slurm_resilience.health.documents.smi_facts import SmiOutput
from slurm_resilience.health.documents.smi_judge import judge_smi
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import Finding, Severity

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
LINKS = 18
"""NVLinks of the products that have most."""


class GpusHealth(NamedTuple):
    """``gpus`` in the form of `smi_facts`; ``error``: NVML could not be asked."""

    gpus: tuple[dict[str, str], ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    """For each GPU the NVLinks that are up, and those that the driver shows."""
    error: str = ""
    library: bool = True


def probe(context: CheckContext) -> GpusHealth:
    # Here, not above: only a probe's process carries NVML's constants in memory.
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        return GpusHealth(error=str(error), library=not missing)
    facts, links = [], []
    try:
        for index in range(int(pynvml.nvmlDeviceGetCount())):
            gpu = _read(pynvml, index)
            facts.append(gpu)
            links.append(_links(pynvml, index) if len(gpu) > 2 else (0, 0))
    except pynvml.NVMLError as error:
        return GpusHealth(error=str(error))
    finally:
        pynvml.nvmlShutdown()
    return GpusHealth(tuple(facts), tuple(links))


def _read(nvml: Any, index: int) -> dict[str, str]:
    """Return the facts that a GPU and its driver know; an old driver knows fewer."""
    gpu = {"id": f"GPU {index}"}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return gpu | {"error": _words(nvml, error)}
    for look in (_identity, _recovery, _memory, _clocks, _lanes):
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


def _recovery(nvml: Any, handle: Any) -> dict[str, str]:
    (value,) = nvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_FIELD])
    action = int(value.value.uiVal)
    if value.nvmlReturn or not 0 <= action < len(RECOVERY_ACTIONS):
        return {}
    return {"gpu_recovery_action": RECOVERY_ACTIONS[action]}


def _memory(nvml: Any, handle: Any) -> dict[str, str]:
    facts: dict[str, str] = {}

    def put(read: Callable[[], dict[str, str]]) -> None:
        try:
            facts.update(read())
        except nvml.NVMLError as error:
            # Else this product, or this library, does not count it.
            if error.value not in (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            ):
                raise
        except AttributeError:
            return  # pynvml is older than this fact

    def rows() -> dict[str, str]:
        _, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        return {
            "remapped_rows_uncorrectable": str(uncorrected),
            "remapped_rows_pending": "Yes" if pending else "No",
            "remapped_rows_failure": "Yes" if failed else "No",
        }

    def errors() -> dict[str, str]:
        count = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        return {"ecc_errors_uncorrected_volatile_total": str(count)}

    def sram() -> dict[str, str]:
        status = nvml.c_nvmlEccSramErrorStatus_v1_t()
        nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
        return {"sram_threshold_exceeded": "Yes" if status.bThresholdExceeded else "No"}

    for read in (rows, errors, sram):
        put(read)
    return facts


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


def _links(nvml: Any, index: int) -> tuple[int, int]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    up = shown = 0
    for link in range(LINKS):
        try:
            up += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
            shown += 1
        except nvml.NVMLError:
            break  # the product has no more
    return up, shown


def judge(seen: GpusHealth, context: CheckContext) -> Judgement:
    if seen.error:
        if context.expected.gpus == 0:
            return Judgement("no GPU, and Slurm expects none")
        raise Unjudged(f"NVML does not answer: {seen.error}")
    # The number of GPUs is judged by gpu_count, against what Slurm hands out.
    profile = msgspec.structs.replace(context.expected.profile, gpus=0)
    reading = judge_smi(SmiOutput(seen.gpus), profile)
    findings = tuple(
        msgspec.structs.replace(one, check=CHECK.name, at=context.now)
        for one in (*reading.findings, *_nvlinks(seen, profile))
    )
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{len(seen.gpus)} GPUs without a fault", findings)


def _nvlinks(seen: GpusHealth, profile: NodeProfile) -> list[Finding]:
    found = []
    for gpu, (up, shown) in zip(seen.gpus, seen.links, strict=False):
        # Without a profile: a product of whose links some are up uses them all, but a PCIe card
        # shows links that lead nowhere, all of them inactive.
        wanted = profile.nvlinks if profile.nvlinks is not None else (shown if up else 0)
        if up < wanted and "error" not in gpu:
            text = f"GPU {gpu['id']}: {up} of {wanted} NVLinks are up"
            found.append(
                document_finding("nvlink", Severity.RESET, text, gpu["id"].lower(), "nvlink")
            )
    return found


CHECK = Check(
    "gpu_health",
    probe,
    judge,
    timeout=60.0,
    period=300.0,
    in_child=True,
    source="NVML",
    threshold="the recovery action; any uncorrected error, failed or pending remap; lanes, NVLinks",
    asks_for=(Severity.REPLACE, Severity.REBOOT, Severity.RESET, Severity.MONITOR),
)
