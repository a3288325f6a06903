"""Numbers of tasks and GPUs that are meant for all nodes of a step: cut them to fewer. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from slurm_resilience.resume.srun.srun_options import SrunCommand

_VARIABLES = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GPUS")
"""By these sbatch tells srun what it asked for on all nodes of the job."""
_OPTIONS = ("ntasks", "gpus")
_TOTAL = re.compile(r"(?P<kind>(?:.*:)?)(?P<total>[0-9]{1,9})")


def environment_totals(environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the totals that sbatch or salloc has left in the environment, by variable."""
    for name in _VARIABLES:
        match = _TOTAL.fullmatch(environment.get(name, ""))
        if match is not None:
            yield name, int(match["total"])


def totals(command: SrunCommand, environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield the totals that count for a step: srun's own options come before the environment."""
    for option in _OPTIONS:
        match = _TOTAL.fullmatch(command.value(option) or "")
        if match is not None:
            yield f"--{option}", int(match["total"])
    for name, total in environment_totals(environment):
        if not command.has("gpus" if name == "SLURM_GPUS" else "ntasks"):
            yield name, total


def cut_environment(environment: Mapping[str, str], size: int, count: int) -> dict[str, str]:
    """Return the variables that change from ``size`` nodes to ``count``."""
    changed = {}
    for name, _ in environment_totals(environment):
        changed[name] = _cut(environment[name], size, count)
    return changed


def cut_command(command: SrunCommand, size: int, count: int) -> SrunCommand:
    """Return the command for ``count`` nodes, whose totals were meant for ``size``."""
    for option in _OPTIONS:
        value = command.value(option)
        if value is not None and _TOTAL.fullmatch(value):
            command = command.without(option).adding(f"--{option}={_cut(value, size, count)}")
    return command


def _cut(value: str, size: int, count: int) -> str:
    match = _TOTAL.fullmatch(value)
    assert match is not None
    return f"{match['kind']}{int(match['total']) // size * count}"
