"""AMD GPUs by AMD's library amdsmi: their number, and errors that lost data.

Unjudged where such GPUs are in the machine and amdsmi is not installed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.checks.pci_bus import AMD, has_device
from slurm_resilience.model import Finding, Severity

COMPUTE_CLASSES = ("0x0302", "0x0380", "0x1200")
"""Without 0x0300: what drives a screen may be a part of the processor."""


class AmdGpu(NamedTuple):
    """One GPU; None: the product, or a virtual machine, does not count it."""

    address: str
    uncorrected: int | None = None
    pending_pages: int | None = None
    """Pages of memory that wait to be taken out of use."""
    error: str = ""


def absent(context: CheckContext) -> str:
    return "" if has_device(context, AMD, COMPUTE_CLASSES) else "no AMD GPU for computing"


def probe(context: CheckContext) -> tuple[AmdGpu, ...]:
    # Here, not above: it comes with AMD's driver, and only this probe's process carries it.
    try:
        import amdsmi
    except Exception as error:
        # Its import loads the library: what is missing there is no ImportError.
        raise Unjudged(f"AMD GPUs, and amdsmi cannot be loaded: {error}") from None
    try:
        amdsmi.amdsmi_init()
        try:
            return tuple(_look(amdsmi, one) for one in amdsmi.amdsmi_get_processor_handles())
        finally:
            amdsmi.amdsmi_shut_down()
    except amdsmi.AmdSmiException as error:
        raise Unjudged(f"amdsmi does not answer: {error}") from None


def _look(amdsmi: Any, handle: Any) -> AmdGpu:
    try:
        address = str(amdsmi.amdsmi_get_gpu_device_bdf(handle))
    except amdsmi.AmdSmiException as error:
        return AmdGpu("unknown", error=str(error))
    uncorrected = pending = None
    try:
        counts = amdsmi.amdsmi_get_gpu_total_ecc_count(handle)
        uncorrected = int(counts["uncorrectable_count"])
    except (amdsmi.AmdSmiException, KeyError, TypeError, ValueError):
        uncorrected = None
    try:
        pages = amdsmi.amdsmi_get_gpu_bad_page_info(handle)
        # amdsmi hands on the number of the driver's own list, without its name.
        waits = int(amdsmi.AmdSmiMemoryPageStatus.PENDING)
        pending = sum(int(page["status"]) == waits for page in pages)
    except (amdsmi.AmdSmiException, AttributeError, KeyError, TypeError, ValueError):
        pending = None  # a text says that there is none
    return AmdGpu(address, uncorrected, pending)


def judge(seen: tuple[AmdGpu, ...], context: CheckContext) -> Judgement:
    wanted = context.expected.gpus
    answering = [one for one in seen if not one.error]
    found = []
    if wanted is not None and len(answering) < wanted:
        text = f"{len(answering)} AMD GPUs answer, Slurm expects {wanted}"
        why = "; ".join(one.error for one in seen if one.error)
        found.append(
            Finding(CHECK.name, Severity.REBOOT, text, context.now, code="missing", evidence=why)
        )
    for one in answering:
        if one.uncorrected:
            text = f"{one.uncorrected} uncorrected memory errors since the driver was loaded"
            found.append(_fault(one, "uncorrected", text, context.now))
        if one.pending_pages:
            text = f"{one.pending_pages} pages wait to be taken out of use"
            found.append(_fault(one, "pending_pages", text, context.now))
    text = "; ".join(one.text for one in found)
    return Judgement(text or f"{len(seen)} AMD GPUs without a fault", tuple(found))


def _fault(one: AmdGpu, code: str, text: str, now: float) -> Finding:
    said = f"GPU {one.address}: {text}"
    return Finding(CHECK.name, Severity.RESET, said, now, one.address.lower(), code)


CHECK = Check(
    "amd_gpus",
    probe,
    judge,
    timeout=60.0,
    period=300.0,
    in_child=True,
    absent=absent,
    source="amdsmi",
    threshold="fewer answer than Slurm hands out; any uncorrected error; a page to be taken out",
    asks_for=(Severity.REBOOT, Severity.RESET),
)
