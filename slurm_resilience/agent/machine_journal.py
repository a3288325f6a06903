"""Read the end of the machine's own journal, where systemd keeps one."""

from __future__ import annotations

import shutil
import subprocess

from slurm_resilience.daemon_log import last_lines

JOURNAL_SECONDS = 3.0
"""A disk that hangs must not keep the rest of the evidence back."""
LINES, LINE_CHARACTERS = 1000, 1000


def machine_journal(max_bytes: int) -> tuple[str, ...]:
    """Return the last lines, oldest first; empty where there is no journal, or it does not answer.

    Args:
        max_bytes: of the lines together.
    """
    journalctl = shutil.which("journalctl")
    if journalctl is None:
        return ()
    words = [journalctl, "--no-pager", "--quiet", f"--lines={LINES}", "--output=short-iso"]
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=JOURNAL_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = done.stdout.decode(errors="replace").splitlines()
    return last_lines([line[:LINE_CHARACTERS] for line in lines], LINES, max_bytes)
