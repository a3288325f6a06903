"""Keep what earlier attempts wrote into the files of `--output` and `--error`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurm_resilience.resume.srun.srun_options import SrunCommand

_STREAMS = (("output", "SLURM_STDOUTMODE"), ("error", "SLURM_STDERRMODE"))
_MODE = "SLURM_OPEN_MODE"
_NO_FILES = ("all", "none")


def appending(command: SrunCommand, environment: Mapping[str, str]) -> SrunCommand:
    """Return the command that adds to its files, where the user did not choose."""
    if command.has("open-mode") or environment.get(_MODE):
        return command
    return command.adding("--open-mode=append")


def mark(command: SrunCommand, environment: Mapping[str, str], text: str) -> None:
    """Write a line that tells the attempts apart into the files that all tasks share.

    Not where the user wants them to be emptied. A file that is not there yet is left to srun.
    """
    mode = command.value("open-mode") or environment.get(_MODE, "")
    if mode.startswith("t"):
        return
    for path in dict.fromkeys(shared_files(command, environment)):
        with contextlib.suppress(OSError):
            if path.is_file():
                with path.open("a", encoding="utf-8") as file:
                    file.write(f"sres: {text}\n")


def shared_files(command: SrunCommand, environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the files that srun itself writes for all tasks; not those with a pattern. Pure."""
    for option, variable in _STREAMS:
        name = command.value(option) or environment.get(variable, "")
        if name and "%" not in name and name not in _NO_FILES and not name.isdecimal():
            yield Path(name)
