"""Read what a step wrote to the files behind our own standard output and error: the job's log."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_resilience.resume.srun.output_files import shared_files
from slurm_resilience.resume.srun.srun_options import SrunCommand

if TYPE_CHECKING:
    from slurm_resilience.resume.decide.signatures import Explanation

READ_BYTES = 4 * 1024 * 1024
"""As much of the end of a longer log: a root lies close to the end."""


_ENDED_BY_SLURM = re.compile(r"\*\*\* (?:STEP|JOB) (\d+)\D")
"""slurmstepd's word on the end of a step, or of a job."""


class JobLog:
    """The part of the log that one step has written. Only regular files can be read again."""

    def __init__(self, job: str = "", descriptors: tuple[int, ...] = (1, 2)) -> None:
        """
        Args:
            job: the step's; empty: it is not known. A step that grows by further jobs writes to the
                same log what Slurm says of the end of these.
            descriptors: those that the step writes to.
        """
        self._job = job
        self._begins: dict[Path, int] = {}
        for number in descriptors:
            path = _file_behind(number)
            if path is not None:
                self._begins.setdefault(path, _size(path))

    def explain(self) -> Explanation | None:
        """Return the cause that the log names; None: it names none, or cannot be read."""
        # Late: no step waits for what only a failed one needs.
        from slurm_resilience.resume.decide.signatures import explain

        for path, begins in self._begins.items():
            lines = [line for line in _lines(path, begins) if self._is_own(line)]
            failures = list(explain(lines))
            if failures:
                return failures[-1]
        return None

    def _is_own(self, line: str) -> bool:
        """Return whether a line tells of no other job's end."""
        told = _ENDED_BY_SLURM.search(line) if self._job else None
        return told is None or told[1] == self._job


def job_log_path(command: SrunCommand, environment: Mapping[str, str]) -> Path | None:
    """Return the file to which the tasks' standard output goes; None: none that can be read again.

    Args:
        command: the user's.
        environment: the supervisor's own.
    """
    files = [path for path in shared_files(command, environment) if path.name]
    if files:
        return files[0]
    own_files = command.value("output") or environment.get("SLURM_STDOUTMODE", "")
    return None if own_files else _file_behind(1)


def _file_behind(descriptor: int) -> Path | None:
    """Return the path of a regular file; None: it is something else."""
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        pass  # it is closed
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _lines(path: Path, begins: int) -> list[str]:
    """Return the lines from a place on; none where the file cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # A file that became shorter was emptied meanwhile.
            start = begins if begins <= size else 0
            file.seek(max(start, size - READ_BYTES))
            data = file.read(READ_BYTES)
    except OSError:
        return []
    return data.decode("utf-8", "replace").split("\n")
