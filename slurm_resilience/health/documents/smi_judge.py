"""Judge what nvidia-smi says about GPUs. Pure.

The driver's own recovery action comes first. A PCIe generation below the highest is no fault: an
idle GPU lowers it. Corrected errors are no fault either: they are corrected, and only very many of
them are worth watching.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from slurm_resilience.health.documents.reading import DocumentReading, document_finding
from slurm_resilience.health.documents.smi_facts import GpuFacts, SmiOutput, fact, number
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.health.xid import RECOVERY_WORDS
from slurm_resilience.model import Severity

RETIRED_PAGES_LIMIT = 60
"""Retired pages from which NVIDIA takes a GPU back; its table holds 64."""
REMAPPED_ROWS_LIMIT = 512
"""Rows remapped for uncorrectable errors (Azure's limit)."""

CORRECTED_LIMIT = 20_000_000
"""Corrected errors of a GPU's memory since the driver was loaded (Azure's limit)."""

YES = frozenset({"yes", "true", "1"})
_THROTTLES = (
    "hw_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "hw_power_brake",
    "sw_thermal_slowdown",
)
_THROTTLE_PARENTS = ("clocks_event_reasons", "clocks_throttle_reasons")


class SmiFault(NamedTuple):
    """A fault of one GPU."""

    code: str
    severity: Severity
    text: str


def judge_smi(output: SmiOutput, profile: NodeProfile) -> DocumentReading:
    """Return the findings on every GPU, and on their number."""
    findings = []
    notes: list[str] = []
    for index, gpu in enumerate(output.gpus):
        name = gpu.get("id") or f"GPU {index}"
        for look in _LOOKS:
            for fault in look(gpu):
                text = f"GPU {name}: {fault.text}"
                findings.append(
                    document_finding("nvidia_smi", fault.severity, text, name.lower(), fault.code)
                )
        findings += [
            document_finding(
                "nvidia_smi", f.severity, f"GPU {name}: {f.text}", name.lower(), f.code
            )
            for f in _link_width(gpu, profile)
        ]
        if fact(gpu, "persistence_mode").lower() == "disabled":
            notes.append(f"GPU {name}: persistence mode is off: configuration, not hardware")
    counted = output.attached if output.attached is not None else len(output.gpus)
    reading = DocumentReading(tuple(findings), notes=tuple(notes))
    return reading.plus(judge_gpu_count(counted, profile))


def judge_gpu_count(counted: int, profile: NodeProfile) -> DocumentReading:
    """Return a finding when GPUs are missing."""
    if profile.gpus is None or counted >= profile.gpus:
        if not counted and profile.gpus is None:
            return DocumentReading(unjudged=("no GPU is named, and no profile says how many",))
        return DocumentReading()
    text = f"{counted} GPUs, the profile expects {profile.gpus}"
    return DocumentReading((document_finding("gpu_count", Severity.REBOOT, text, code="missing"),))


def _says_yes(gpu: GpuFacts, *endings: str) -> bool:
    return fact(gpu, *endings).lower() in YES


def _lost(gpu: GpuFacts) -> list[SmiFault]:
    words = {value.lower() for value in gpu.values()}
    if any("gpu is lost" in word or "fallen off the bus" in word for word in words):
        return [SmiFault("lost", Severity.REBOOT, "the GPU is lost")]
    if any("requires reset" in word or "reset required" in word for word in words):
        return [SmiFault("reset_required", Severity.RESET, "the GPU requires a reset")]
    if any(word in ("err!", "unknown error", "[unknown error]") for word in words):
        return [SmiFault("unreadable", Severity.REBOOT, "the driver cannot read it (ERR!)")]
    return []


def _recovery_action(gpu: GpuFacts) -> list[SmiFault]:
    words = fact(gpu, "gpu_recovery_action", "recovery_action").lower()
    severity = next((s for part, s in RECOVERY_WORDS if part in words), Severity.NONE)
    if not words or severity is Severity.NONE:
        return []
    return [SmiFault("recovery_action", severity, f"the driver asks for: {words}")]


def _memory(gpu: GpuFacts) -> list[SmiFault]:
    faults = []
    if _says_yes(
        gpu, "remapped_row_failure", "remapping_failure_occurred", "remapped_rows_failure"
    ):
        faults.append(SmiFault("remap_failure", Severity.REPLACE, "remapping a row failed"))
    rows = number(
        gpu, "remapped_row_unc", "remapped_rows/uncorrectable_error", "remapped_rows_uncorrectable"
    )
    if rows is not None and rows > REMAPPED_ROWS_LIMIT:
        text = f"{rows:g} rows remapped (limit {REMAPPED_ROWS_LIMIT})"
        faults.append(SmiFault("remapped_rows", Severity.REPLACE, text))
    if _says_yes(gpu, "sram_threshold_exceeded"):
        text = "more errors in its SRAM than NVIDIA's threshold allows"
        faults.append(SmiFault("sram_threshold", Severity.REPLACE, text))
    if _says_yes(gpu, "unrepairable_memory"):
        faults.append(SmiFault("unrepairable", Severity.REPLACE, "memory that cannot be repaired"))
    if _says_yes(gpu, "remapped_row_pending", "remapped_rows/pending", "remapped_rows_pending"):
        text = "a row waits to be remapped, which a reset does"
        faults.append(SmiFault("remap_pending", Severity.RESET, text))
    uncorrected = _uncorrected(gpu)
    if uncorrected:
        text = f"{uncorrected:g} uncorrected memory errors since the driver was loaded"
        faults.append(SmiFault("uncorrected", Severity.RESET, text))
    corrected = number(gpu, "ecc_errors_corrected_volatile_total")
    if corrected is not None and corrected > CORRECTED_LIMIT:
        text = f"{corrected:g} corrected memory errors (limit {CORRECTED_LIMIT:g})"
        faults.append(SmiFault("corrected", Severity.MONITOR, text))
    return faults


def _uncorrected(gpu: GpuFacts) -> float:
    total = 0.0
    for path, value in gpu.items():
        is_count = "volatile" in path and "uncorrect" in path and "total" not in path.split("/")[-1]
        is_sum = path == "ecc_errors_uncorrected_volatile_total"
        if (is_count or is_sum) and value.isdecimal():
            total += int(value)
    return total


def _retired_pages(gpu: GpuFacts) -> list[SmiFault]:
    single = number(
        gpu,
        "retired_pages/single_bit_ecc",
        "multiple_single_bit_retirement/retired_count",
        "retired_pages_single_bit_ecc_count",
    )
    double = number(
        gpu,
        "retired_pages/double_bit_ecc",
        "double_bit_retirement/retired_count",
        "retired_pages_double_bit_count",
    )
    pending = _says_yes(
        gpu,
        "pending_page_blacklist",
        "pending_blacklist",
        "pending_retirement",
        "retired_pages_pending",
    )
    faults = []
    total = (single or 0) + (double or 0)
    if total >= RETIRED_PAGES_LIMIT:
        text = f"{total:g} retired pages (limit {RETIRED_PAGES_LIMIT})"
        faults.append(SmiFault("retired_pages", Severity.REPLACE, text))
    if pending:
        text = "a page waits to be retired, which a reboot does"
        faults.append(SmiFault("retirement_pending", Severity.REBOOT, text))
    return faults


def _clocks(gpu: GpuFacts) -> list[SmiFault]:
    active = sorted(
        {
            path.rpartition("/")[2].rpartition("reasons_")[2]
            for path, value in gpu.items()
            if value.lower() == "active"
            and any(parent in path for parent in _THROTTLE_PARENTS)
            and path.endswith(_THROTTLES)
        }
    )
    if not active:
        return []
    names = ", ".join(name.replace("clocks_event_", "") for name in active)
    return [SmiFault("throttled", Severity.MONITOR, f"its clocks are held back: {names}")]


def _temperature(gpu: GpuFacts) -> list[SmiFault]:
    now = number(gpu, "temperature/gpu_temp", "gpu_current_temp", "temperature_gpu")
    limit = number(gpu, "gpu_temp_slow_threshold", "gpu_slowdown_temp")
    margin = number(gpu, "gpu_temp_tlimit", "gpu_t_limit_temp")
    if margin is not None and margin <= 0 and now is not None:
        return [SmiFault("hot", Severity.MONITOR, f"{now:g} °C, no margin is left")]
    if now is None or limit is None or now < limit:
        return []
    return [SmiFault("hot", Severity.MONITOR, f"{now:g} °C (slows down at {limit:g})")]


def _fabric(gpu: GpuFacts) -> list[SmiFault]:
    state = fact(gpu, "fabric/state").lower()
    status = fact(gpu, "fabric/status").lower()
    if state == "completed" and status and status != "success":
        text = f"it could not join the NVLink fabric: {status}"
        return [SmiFault("fabric", Severity.REBOOT, text)]
    if state in ("in progress", "not started"):
        return [SmiFault("fabric", Severity.MONITOR, f"joining the NVLink fabric: {state}")]
    if faults := fact(gpu, "fabric/faults"):
        # It recovers by itself from what names a recovery.
        heals = all(fault.endswith("recovery") for fault in faults.split(", "))
        severity = Severity.MONITOR if heals else Severity.REBOOT
        return [SmiFault("fabric", severity, f"a fault of the NVLink fabric: {faults}")]
    return []


def _link_width(gpu: GpuFacts, profile: NodeProfile) -> list[SmiFault]:
    now = number(gpu, "current_link_width", "link_width/current", "pcie_link_width_current")
    most = number(gpu, "max_link_width", "link_width/max", "pcie_link_width_max")
    wanted = profile.pcie_width if profile.pcie_width is not None else most
    if now is None or wanted is None or now >= wanted:
        return []
    text = f"{now:g} of {wanted:g} PCIe lanes"
    return [SmiFault("pcie_width", Severity.REBOOT, text)]


_LOOKS: tuple[Callable[[GpuFacts], list[SmiFault]], ...] = (
    _lost,
    _recovery_action,
    _memory,
    _retired_pages,
    _clocks,
    _temperature,
    _fabric,
)
