"""Other Slurm releases on this machine: the root directories that scripts/slurm-root makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from slurm_resilience.errors import MissingTool, UsageError
from slurm_resilience.lab import conf, programs

VERSIONS = ("22.05", "24.11", "26.05")
"""The releases that the project is tested with, oldest first."""
CACHE = Path("/var/cache/slurm-resilience/roots")
CACHE_VARIABLE = "SRES_SLURM_ROOTS"
"""Names another directory; scripts/slurm-root reads it too."""


def root_of(version: str) -> Path | None:
    """Return the root directory with a Slurm release; None: the machine's own Slurm is that one.

    Raises:
        UsageError: the project is not tested with that release.
        MissingTool: it is not on this machine.
    """
    if version not in VERSIONS:
        raise UsageError(
            f"'{version}' is no Slurm release known here; one of {', '.join(VERSIONS)}"
        )
    if version == own_version():
        return None
    root = Path(os.environ.get(CACHE_VARIABLE) or CACHE) / version
    if not (root / "usr").is_dir():
        raise MissingTool(
            f"Slurm {version} is not on this machine; scripts/slurm-root {version} makes it"
        )
    return root


def own_version() -> str:
    """Return the release of the machine's own Slurm, such as ``22.05``; empty without one."""
    program = programs.find("slurmctld")
    if program is None:
        return ""
    done = subprocess.run([program, "-V"], capture_output=True, text=True, check=False)
    found = conf.version(done.stdout)
    return f"{found[0]}.{found[1]:02}" if found else ""
