"""Gather the stacks of a step that hangs: a helper step beside it looks on each node."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.flight.culprit import HangDiagnosis, diagnose_hang
from slurm_resilience.flight.dump_files import read_dumps
from slurm_resilience.resume.attempt import read_file, write_file
from slurm_resilience.resume.fence import open_own
from slurm_resilience.resume.history import KEEP_SECONDS
from slurm_resilience.resume.progress.hang_evidence import NAMES, HangEvidence, NodeSigns
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.wire.frames import UNREADABLE

OUTPUT_BYTES = 64 << 20
FOLDER = "hang-"
_MODULE = "slurm_resilience.resume.progress.node_stacks"
_KEPT = ("SLURM_CONF",)
"""Variables of Slurm: the others would shape the helper step like the step itself."""


class AskedNodes(NamedTuple):
    """The nodes of one allocation."""

    job: int
    nodes: tuple[str, ...]


def helper_command(
    srun: str, asked: AskedNodes, token: str, directory: str, python: str
) -> list[str]:
    """Return the helper step of one allocation. Pure.

    Args:
        srun: path of the real srun.
        asked: the nodes, and their job.
        token: of the attempt whose processes are looked at.
        directory: for copies of dumps; empty: none are made.
        python: the interpreter, which is at the same place on each node.
    """
    count = len(asked.nodes)
    return [
        srun,
        f"--jobid={asked.job}",
        # It takes nothing from the step that hangs, and does not wait for it.
        "--overlap",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        f"--nodelist={fold(asked.nodes)}",
        "--mem=0",
        "--input=none",
        "--kill-on-bad-exit=0",
        "--no-kill",
        "--job-name=sres-stacks",
        "--chdir=/",
        python,
        "-I",
        "-m",
        _MODULE,
        token,
        *([directory] if directory else []),
    ]


def helper_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a helper step. Pure."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "SRES_")) or name in _KEPT
    }


def ask_nodes(
    srun: str,
    environment: Mapping[str, str],
    asked: Sequence[AskedNodes],
    token: str,
    directory: str,
    seconds: float,
) -> tuple[NodeSigns, ...]:
    """Return what the nodes tell; of those that do not answer in time nothing.

    Args:
        srun: path of the real srun.
        environment: the supervisor's own.
        asked: the nodes by allocation.
        token: of the attempt.
        directory: for copies of dumps; empty: none are made.
        seconds: for all of it.
    """
    running = []
    for part in asked:
        with contextlib.suppress(OSError):
            command = helper_command(srun, part, token, directory, sys.executable)
            running.append(
                subprocess.Popen(
                    command,
                    env=helper_environment(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
    signs: list[NodeSigns] = []
    for process in running:
        signs += _read(process, seconds / len(running))
    return tuple(signs)


def _read(process: subprocess.Popen[bytes], seconds: float) -> list[NodeSigns]:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # Nodes that answer have done so by now; srun ends its step where it gets SIGTERM.
        process.terminate()
        try:
            output, _ = process.communicate(timeout=2.0)
        except subprocess.TimeoutExpired as late:
            process.kill()
            output = late.output or b""
    return read_signs(output[:OUTPUT_BYTES].split(b"\n"))


def read_signs(lines: Iterable[bytes]) -> list[NodeSigns]:
    """Return what nodes told, a line for each; what is none is left out."""
    signs = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            signs.append(msgspec.json.decode(line, type=NodeSigns))
    return signs


def make_directory(fence: str, name: str, now: float) -> str:
    """Make a directory for what is gathered, beside the fence's; empty: it cannot be made.

    It is kept for a month, since a person looks at it later.

    Args:
        fence: the fence's directory; empty: there is none.
        name: what the hang is named after, such as an attempt's token.
        now: seconds since the epoch.
    """
    if not fence:
        return ""
    folder = Path(fence).parent
    try:
        os.close(open_own(fence))
    except OSError:
        return ""  # it is gone, or leads to elsewhere
    with contextlib.suppress(OSError):
        for old in folder.glob(f"{FOLDER}*"):
            if now - old.lstat().st_mtime > KEEP_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
    try:
        path = folder / f"{FOLDER}{name}"
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return ""
    return str(path)


def keep(evidence: HangEvidence) -> None:
    """Write all that was gathered into its directory, for `sres explain`."""
    if evidence.directory:
        path = Path(evidence.directory) / NAMES
        new = path.with_suffix(".new")
        with contextlib.suppress(OSError):
            write_file(new, msgspec.json.format(msgspec.json.encode(evidence), indent=1))
            new.replace(path)


def read_kept(directory: Path) -> HangEvidence | None:
    """Return what was gathered in a directory; None: nothing that can be understood."""
    try:
        data = read_file(directory / NAMES, OUTPUT_BYTES)
        return msgspec.json.decode(data, type=HangEvidence)
    except (OSError, *UNREADABLE):
        return None


def diagnose_dumps(evidence: HangEvidence) -> HangDiagnosis | None:
    """Return what the copied dumps say; None: there are none, or they cannot be read."""
    if not evidence.directory or not any(signs.dumps for signs in evidence.signs):
        return None
    try:
        found = read_dumps(Path(evidence.directory))
    except SresError:
        return None
    if not found.dumps:
        return None
    return diagnose_hang(found.dumps.values(), evidence.nodes)
