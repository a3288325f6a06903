"""Leave out what ``srun --quiet`` leaves out. Pure.

In srun's standard error the supervisor reads that a person has cancelled the step, or that srun
itself ends it. So srun prints it all, and what the user does not want is left out on the way.
"""

from __future__ import annotations

import re

from slurm_resilience.resume.srun.srun_options import SrunCommand

OPTION = "quiet"
_BEGIN = b"srun: "
_LINE_LIMIT_BYTES = 65536
_LINES = rb"[^\n]*\n|[^\n]+"
# Such warnings are shown before srun takes the option in.
_KEPT = {1: (b"error: ", b"fatal: ", b"Warning: ", b"warning: "), 2: (b"fatal: ",)}


def quietness(command: SrunCommand) -> int:
    """Return how often the user gave --quiet; 0 also beside --verbose, which srun refuses."""
    if command.has("verbose"):
        return 0
    return sum(option.called(OPTION) for option in command.options)


def talking(command: SrunCommand) -> SrunCommand:
    """Return the command of an srun that prints all; it refuses --verbose beside --quiet."""
    return command.without(OPTION) if quietness(command) else command


class QuietLines:
    """One stream of what srun and its tasks print."""

    def __init__(self, level: int) -> None:
        """
        Args:
            level: 0: all is shown; 1: srun's errors, and all of its tasks; 2: no errors either.
        """
        self._kept = _KEPT.get(level, ())
        self._shows_all = level == 0
        self._held = b""
        self._is_within = False
        """The line's beginning was passed on."""

    def take(self, data: bytes) -> bytes:
        """Return what is to be shown by now: a line of srun once it is whole, others at once."""
        if self._shows_all:
            return data
        text, self._held = self._held + data, b""
        return b"".join(map(self._passed, re.findall(_LINES, text)))

    def rest(self) -> bytes:
        """Return what is to be shown of the last line."""
        rest, self._held = self._held, b""
        return rest if self._shows(rest) else b""

    def _passed(self, line: bytes) -> bytes:
        is_whole = line.endswith(b"\n")
        may_be_sruns = not self._is_within and (
            line.startswith(_BEGIN) or (not is_whole and _BEGIN.startswith(line))
        )
        if may_be_sruns and not is_whole:
            if len(line) < _LINE_LIMIT_BYTES:
                self._held = line
                return b""
            may_be_sruns = False  # srun's own are shorter
        self._is_within = not is_whole
        return line if not may_be_sruns or self._shows(line) else b""

    def _shows(self, line: bytes) -> bool:
        return not line.startswith(_BEGIN) or line.startswith(self._kept, len(_BEGIN))
