"""Ask DCGM's command `dcgmi`, which hangs where the driver does."""

from __future__ import annotations

import shutil
import subprocess

from slurm_resilience.errors import SresError

TOOL_SECONDS = 20.0
ALL_GPUS = "0"
"""DCGM's own group of all GPUs."""


def has_dcgmi() -> bool:
    """Tell whether DCGM is installed."""
    return shutil.which("dcgmi") is not None


def ask_dcgmi(*words: str) -> str:
    """Return what dcgmi prints, an error's text too.

    Args:
        words: a subsystem of dcgmi, and its arguments.

    Raises:
        SresError: it is not there, or does not answer.
    """
    try:
        done = subprocess.run(
            [shutil.which("dcgmi") or "dcgmi", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TOOL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise SresError(f"dcgmi does not answer within {TOOL_SECONDS:g} s") from None
    except OSError as error:
        raise SresError(f"dcgmi cannot be started: {error.strerror}") from None
    return done.stdout.decode("utf-8", "replace")
