"""The rivals' own virtual environment, made on demand from rivals.txt."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
LIST = HERE / "rivals.txt"
INSTALL_SECONDS = 900

IMPORTS = {
    "torchrun": ("torch==", "import torch.distributed.run"),
    "nvrx": ("nvidia-resiliency-ext==", "import nvidia_resiliency_ext.inprocess"),
    "torchft": ("torchft-nightly==", "import torchft.manager, torchft.ddp"),
}
"""Rival → how its line in rivals.txt begins, and what must work."""


class Rivals(NamedTuple):
    python: Path
    missing: dict[str, str]
    """Rival that cannot be had → why."""

    @property
    def bin(self) -> Path:
        return self.python.parent


def ready(say: Callable[[str], None]) -> Rivals:
    """Return the environment; make it when it is missing or was made from another list.

    Args:
        say: called with a line about what takes long.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "sres-bench" / "venv"
    python, stamp = place / "bin" / "python", place / ".made-from"
    wanted = hashlib.sha256(LIST.read_bytes()).hexdigest()
    troubles: dict[str, str] = {}
    if not stamp.exists() or stamp.read_text() != wanted:
        say(f"installing the rivals (rivals.txt) into {place}; minutes the first time ...")
        troubles = _make(place, python)
        if not troubles:
            stamp.write_text(wanted)
    missing = {}
    for name, (_, statement) in IMPORTS.items():
        done = _run([str(python), "-W", "ignore", "-c", statement], 120)
        if done:
            missing[name] = troubles.get(name) or troubles.get("torchrun") or done
    return Rivals(python, missing)


def _make(place: Path, python: Path) -> dict[str, str]:
    """Make it; what could not be installed, and why."""
    place.parent.mkdir(parents=True, exist_ok=True)
    trouble = _run([sys.executable, "-m", "venv", "--clear", str(place)], 120)
    if trouble:
        return dict.fromkeys(IMPORTS, trouble)
    lines = [x.strip() for x in LIST.read_text().splitlines() if x[:1] not in ("#", "")]
    optional = {name: start for name, (start, _) in IMPORTS.items() if name != "torchrun"}
    base = [line for line in lines if not line.startswith(tuple(optional.values()))]
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
    pip += ["-c", str(LIST)]
    trouble = _run([*pip, *base], INSTALL_SECONDS)
    if trouble:
        return dict.fromkeys(IMPORTS, trouble)
    found = {}
    for name, start in optional.items():
        # What it depends on is in the list; its own list would ask for more than CPU needs.
        line = next(line for line in lines if line.startswith(start))
        trouble = _run([*pip, "--no-deps", line], INSTALL_SECONDS)
        if trouble:
            found[name] = trouble
    return found


def _run(argv: list[str], limit: float) -> str:
    """Empty when the command went well, else its last line."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in said if "error" in line.lower()]
    return (errors or said or [f"exit code {done.returncode}"])[-1].strip()
