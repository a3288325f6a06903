"""Ask the machine's own tools for what they know: its journal, and the state of its GPUs.

A tool that hangs in the kernel cannot be killed, and is not waited for: the rest of the evidence
must not be lost by it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from slurm_resilience.child_group import end_group
from slurm_resilience.daemon_log import last_lines

TOOL_SECONDS = 3.0
KILL_SECONDS = 0.5
LINES, LINE_CHARACTERS = 1000, 1000
GPU_TOOLS: dict[str, tuple[str, ...]] = {
    "nvidia-smi": ("nvidia-smi", "-q"),
    "nvidia-smi-nvlink": ("nvidia-smi", "nvlink", "--status"),
    "dcgm-health": ("dcgmi", "health", "--check"),
    "neuron-ls": ("neuron-ls", "--json-output"),
}
"""Tools of accelerators: the name of what they print, and the command."""


def machine_journal(max_bytes: int) -> tuple[str, ...]:
    """Return the last lines of the machine's journal, oldest first; empty where there is none, or
    it does not answer.

    Args:
        max_bytes: of the lines together.
    """
    words = ["journalctl", "--no-pager", "--quiet", f"--lines={LINES}", "--output=short-iso"]
    text = _output(words) or ""
    lines = [line[:LINE_CHARACTERS] for line in text.splitlines()]
    return last_lines(lines, LINES, max_bytes)


def gpu_state(max_bytes: int) -> dict[str, str]:
    """Return what the tools of the node's accelerators print, of those that there are.

    Args:
        max_bytes: of all of them together; each has its share, and keeps its beginning.
    """
    share = max_bytes // len(GPU_TOOLS)
    found = {}
    for name, words in GPU_TOOLS.items():
        if shutil.which(words[0]) is not None:
            text = _output(words)
            said = f"no answer within {TOOL_SECONDS:g} s" if text is None else text
            found[name] = said.encode()[:share].decode(errors="ignore")
    return found


class ToolEnd(NamedTuple):
    """The end of a tool."""

    code: int
    text: str


def _output(words: Sequence[str]) -> str | None:
    end = run_tool(words, TOOL_SECONDS)
    return end.text if end is not None else None


def run_tool(words: Sequence[str], seconds: float) -> ToolEnd | None:
    """Run a program; None where it is not there, or does not end in time.

    Args:
        words: its name or path, and its arguments.
        seconds: time limit.
    """
    path = shutil.which(words[0])
    if path is None:
        return None
    try:
        child = subprocess.Popen(
            [path, *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError:
        return None
    try:
        data, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end_group(child, KILL_SECONDS)
        return None
    return ToolEnd(child.returncode, data.decode(errors="replace"))
