"""The parts of a check of one node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_resilience.clock import SYSTEM_CLOCK, Clock
from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepResult
from slurm_resilience.health.check import CheckContext
from slurm_resilience.health.documents.reading import DocumentReading
from slurm_resilience.model import FAULTY, SEVERITIES, Severity


@dataclass(frozen=True)
class InstanceContext:
    """The facts that every check of a node is given."""

    node: str
    checks: CheckContext
    """The machine's root, the profile, and the GPUs that Slurm hands out."""
    seconds: float
    """The time for which a load runs."""
    scratch: Path
    clock: Clock = SYSTEM_CLOCK

    @property
    def gpus(self) -> int:
        """GPUs that the node should have; 0 when it should have none."""
        wanted = self.checks.expected
        return wanted.gpus if wanted.gpus is not None else wanted.profile.gpus or 0


@dataclass(frozen=True)
class InstanceCheck:
    """One check: `run` raises `Unjudged` where it cannot tell."""

    name: str
    run: Callable[[InstanceContext], DeepResult]
    absent: Callable[[InstanceContext], str] = lambda _: ""
    """Returns why the node has nothing to look at; empty: look."""
    by_default: bool = True
    about: str = ""
    """In a line for people: the things looked at, and the tool."""


def judged(
    check: str, reading: DocumentReading, text: str, block: str = "", output: str = ""
) -> DeepResult:
    """Return the result that follows from a judged document.

    Args:
        check: its name.
        reading: the judgement.
        text: what is said where nothing is wrong.
        block: the printed form.
        output: the tool's own.
    """
    faults = [one for one in reading.findings if one.severity in FAULTY]
    if faults:
        gravest = max((one.severity for one in faults), key=SEVERITIES.index)
        said = "; ".join(one.text for one in faults)
        return DeepResult(check, DeepOutcome.FAILED, said, gravest, block=block, output=output)
    if reading.unjudged:
        said = "; ".join(reading.unjudged)
        return DeepResult(check, DeepOutcome.UNJUDGED, said, block=block, output=output)
    remarks = [one.text for one in reading.findings] + list(reading.notes)
    said = "; ".join([text, *remarks])
    action = Severity.MONITOR if reading.findings else Severity.NONE
    return DeepResult(check, DeepOutcome.PASSED, said, action, block=block, output=output)


def no_gpu(context: InstanceContext) -> str:
    """Return that the node should have no GPU, where that is so."""
    return "" if context.gpus else "Slurm and the profile expect no GPU"
