"""The state of each GPU, as NVML tells it: the facts and the judge that `sres replay` uses too.

The driver's own recovery action comes first. A driver that hangs is killed with the probe's
process, and nothing holds a GPU open afterwards, so that it can be reset.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.checks.gpu.nvml_facts import COUNTER, MAX_NVLINKS, read_facts
from slurm_resilience.health.documents.reading import document_finding
from slurm_resilience.health.documents.smi_facts import SmiOutput
from slurm_resilience.health.documents.smi_judge import CORRECTED_LIMIT, judge_smi
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import Finding, Severity

GROWTH_LIMITS = {
    "pcie_replay": 40,
    "nvlink_recovery": 0,
    "nvlink_replay": 100,
    "nvlink_crc": 100,
}
"""Growth of a counter between two runs beyond which it is worth watching: DCGM's eight replays a
minute, and its hundred CRC errors; a link that had to recover has been lost for a moment."""
BUSY_PERCENT = 50
"""Load from which a GPU uses its highest PCIe generation; an idle one lowers it."""


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
            gpu = read_facts(pynvml, index)
            facts.append(gpu)
            links.append(_links(pynvml, index) if len(gpu) > 2 else (0, 0))
    except pynvml.NVMLError as error:
        return GpusHealth(error=str(error))
    finally:
        pynvml.nvmlShutdown()
    return GpusHealth(tuple(facts), tuple(links))


def _links(nvml: Any, index: int) -> tuple[int, int]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    up = shown = 0
    for link in range(MAX_NVLINKS):
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
        for one in (
            *reading.findings,
            *_nvlinks(seen, profile),
            *_slow_lanes(seen, context),
            *_grown(seen, context),
        )
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


def _slow_lanes(seen: GpusHealth, context: CheckContext) -> list[Finding]:
    """Find GPUs whose PCIe lanes were slow at work twice in a row: one reading may have seen the
    moment in which the load began."""
    before: GpusHealth = context.earlier[-1] if context.earlier else GpusHealth()
    slow_before = {gpu["id"] for gpu in before.gpus if _is_slow(gpu)}
    return [
        document_finding(
            "pcie",
            Severity.REBOOT,
            f"GPU {gpu['id']}: PCIe generation {gpu['current_link_gen']} of {gpu['max_link_gen']} "
            "under load",
            gpu["id"].lower(),
            "pcie_generation",
        )
        for gpu in seen.gpus
        if gpu["id"] in slow_before and _is_slow(gpu)
    ]


def _grown(seen: GpusHealth, context: CheckContext) -> list[Finding]:
    """Find counters of errors that grew much since the run before."""
    earlier: GpusHealth = context.earlier[-1] if context.earlier else GpusHealth()
    before = {gpu["id"]: gpu for gpu in earlier.gpus}
    found = []
    for gpu in seen.gpus:
        grown = []
        for name, limit in GROWTH_LIMITS.items():
            counts = [one.get(COUNTER + name, "") for one in (before.get(gpu["id"], {}), gpu)]
            if all(count.isdecimal() for count in counts):
                growth = int(counts[1]) - int(counts[0])
                grown += [f"{growth} {name}"] if growth > limit else []
        if grown:
            text = f"GPU {gpu['id']}: since the run before {', '.join(grown)}"
            found.append(
                document_finding("gpu", Severity.MONITOR, text, gpu["id"].lower(), "counters")
            )
    return found


def _is_slow(gpu: dict[str, str]) -> bool:
    facts = [gpu.get(name, "") for name in ("current_link_gen", "max_link_gen", "gpu_util")]
    if not all(fact.isdecimal() for fact in facts):
        return False
    now, most, load = map(int, facts)
    return now < most and load >= BUSY_PERCENT


CHECK = Check(
    "gpu_health",
    probe,
    judge,
    timeout=60.0,
    period=300.0,
    in_child=True,
    remembers=1,
    source="NVML",
    threshold="the recovery action; any uncorrected error, failed or pending remap; lanes, their "
    "generation under load; NVLinks, fabric; no temperature margin; power that cannot be read; "
    f"{CORRECTED_LIMIT:,} corrected errors; between two runs more than "
    + ", ".join(f"{limit} {name}" for name, limit in GROWTH_LIMITS.items()),
    asks_for=(Severity.REPLACE, Severity.REBOOT, Severity.RESET, Severity.MONITOR),
)
