"""Keep the record of each lab, and list the labs that there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slurm_resilience.errors import LabError, UsageError
from slurm_resilience.lab.spec import NAME, LabSpec

BASE = Path("/run/sres-lab")
# Its presence says that a directory is a lab's, and so may be emptied.
MARK = "spec.json"
KEEPER_FILE = "lab.json"
HINT = "`sres lab up` makes one, `sres lab list` shows them"


def locate(name_or_directory: str | Path) -> Path:
    """Find the directory of a lab given by name, or by directory (anything with a slash)."""
    text = str(name_or_directory)
    if "/" in text:
        return Path(text).absolute()
    check_name(text)
    return BASE / text


def read(directory: Path) -> tuple[str, Path, LabSpec]:
    """Name, directory and order of a lab that is up."""
    try:
        keeper = json.loads((directory / KEEPER_FILE).read_text())
        spec = LabSpec.from_json((directory / MARK).read_text())
    except (OSError, ValueError):
        raise LabError(f"no lab in {directory}; {HINT}") from None
    if not alive(keeper):
        raise LabError(f"the lab in {directory} has died; `sres lab down` clears it away")
    return str(keeper["name"]), directory, spec


def known() -> list[tuple[str, Path, bool]]:
    """(name, directory, alive) of every lab in the usual place."""
    labs = []
    for directory in sorted(BASE.glob("*")):
        if (directory / MARK).exists():
            try:
                lives = alive(json.loads((directory / KEEPER_FILE).read_text()))
            except (OSError, ValueError):
                lives = False
            labs.append((directory.name, directory, lives))
    return labs


def check_name(name: str) -> None:
    """Raise UsageError for a name that could not be a directory's, a cluster's and a word."""
    if not NAME.fullmatch(name):
        raise UsageError(f"'{name}' is not a lab name; use a-z, 0-9 and -, at most 31 characters")


def stat(pid: int) -> tuple[str, int]:
    """Return a process's state, and when it started: with its number, an identity."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return words[0], int(words[19])


def alive(keeper: dict[str, Any]) -> bool:
    """Tell whether the keeper of a record lives."""
    try:
        state, start = stat(keeper["pid"])
        # One that its parent has not collected yet is as dead as one that is gone.
        return state != "Z" and start == int(keeper["start"])
    except (OSError, IndexError, ValueError):
        return False
