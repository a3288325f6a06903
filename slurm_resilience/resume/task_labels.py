"""Number the tasks of one step as those of a whole, in what `srun --label` prints. Pure.

Each step counts its tasks from 0: the lines of a join step, and those of a companion, would be
another task's. Files that srun itself writes (`--output`) cannot be changed on the way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from slurm_resilience.resume.srun.srun_options import SrunCommand

_LABEL = rb" *(\d+): "


class TaskNumbers(msgspec.Struct, frozen=True):
    """The numbers that a step's tasks have in the whole."""

    tasks: tuple[int, ...]
    """By the task's number in its step."""
    total: int
    """Tasks of the whole."""


def labels_lines(command: SrunCommand, environment: Mapping[str, str]) -> bool:
    """Return whether srun labels each line with its task."""
    return command.has("label") or "SLURM_LABELIO" in environment


def writes_files(command: SrunCommand) -> bool:
    """Return whether srun writes output to files of its own."""
    return command.has("output") or command.has("error")


class TaskLabels:
    """One stream of labelled lines."""

    def __init__(self, numbers: TaskNumbers) -> None:
        self._numbers = numbers
        self._rest = b""

    def take(self, data: bytes) -> bytes:
        """Return the lines that are whole by now; srun ends each labelled one."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return b"".join(self._numbered(line) + b"\n" for line in lines)

    def rest(self) -> bytes:
        """Return what came after the last line."""
        rest, self._rest = self._rest, b""
        return self._numbered(rest)

    def _numbered(self, line: bytes) -> bytes:
        label = re.match(_LABEL, line)
        if label is None or int(label[1]) >= len(self._numbers.tasks):
            return line  # of srun itself
        width = len(str(self._numbers.total - 1))
        number = self._numbers.tasks[int(label[1])]
        return f"{number:>{width}}: ".encode() + line[label.end() :]
