"""The step that a repair by Slurm has reached, kept beside the journal: each is written down before
Slurm is asked for it, so that a restarted sresctld asks for nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from slurm_resilience.replace.program import RunHost, write_in_place

STEP = "step"
TAKEN_SECONDS = 10.0
"""An order that Slurm does not show within this time was not taken."""


class ReachedStep(NamedTuple):
    """The last step that was written down."""

    name: str
    began: float
    """When the repair began (epoch)."""
    at: float
    """When this step began (epoch)."""
    mark: str = ""
    """A fact of the time before it."""


def begin(directory: Path, host: RunHost) -> None:
    """Make a run's directory, with room for its steps.

    Raises:
        FileExistsError: the run was started before.
        OSError: the disk is full.
    """
    host.make(directory)
    write_in_place(directory / STEP, "")


def write_step(directory: Path, step: ReachedStep) -> None:
    """Write a step down.

    Raises:
        OSError: the disk does not take it.
    """
    words = (step.name, f"{step.began:.1f}", f"{step.at:.1f}", step.mark)
    write_in_place(directory / STEP, " ".join(words))


def read_step(directory: Path) -> ReachedStep | None:
    """Return the step that was written last; None: there is none."""
    try:
        words = (directory / STEP).read_text().split()
        return ReachedStep(words[0], float(words[1]), float(words[2]), *words[3:4])
    except (OSError, ValueError, IndexError):
        return None
