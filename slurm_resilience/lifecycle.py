"""Run a directory of lifecycle scripts: what a fresh or replaced node does before it joins.

    python -m slurm_resilience.lifecycle --dir /etc/slurm-resilience/lifecycle --log FILE NODE

Every executable called ``NN-name…`` runs in order as ``SCRIPT NODE``, within a time limit, with its
whole output in the log. The first failure ends the run: the node must not join. Scripts have to be
idempotent, because a node that rebooted runs them again.

Standard library only: it runs on nodes that have nothing else yet.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import SresError, UsageError

SCRIPT = re.compile(r"[0-9]{2}-[A-Za-z0-9._-]+")
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Left behind by editors and package managers.
_LEFTOVERS = ("~", ".bak", ".dpkg-old", ".dpkg-new", ".dpkg-dist", ".rpmsave", ".rpmnew", ".swp")
DEFAULT_TIMEOUT_SECONDS = 600.0
TIMED_OUT = 124
CANNOT_RUN = 126


class LifecycleError(SresError):
    """A script failed, so the node must not join; or the run could not start."""


@dataclass(frozen=True)
class Result:
    """The outcome of one script; a line of the results file."""

    name: str
    rc: int | None
    """Its exit code; 128+N: ended by signal N; 124: over the time limit; None: skipped."""
    seconds: float
    skipped: str = ""
    """The reason why it was not run; empty: it was run."""


def scripts(directory: Path) -> list[Path]:
    """List the scripts of a directory in their order, with those that cannot be executed.

    Raises:
        UsageError: it is not a directory that can be read.
    """
    try:
        entries = sorted(directory.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"{directory}: {error.strerror}; name a directory of scripts") from None
    named = [entry for entry in entries if SCRIPT.fullmatch(entry.name) and entry.is_file()]
    return [entry for entry in named if not entry.name.endswith(_LEFTOVERS)]


def run(
    directory: Path, log: Path, node: str, timeout: float = DEFAULT_TIMEOUT_SECONDS
) -> list[Result]:
    """Run every script; the results also go to ``LOG.jsonl``, one line each.

    Raises:
        LifecycleError: one failed (the later ones did not run), or another run is under way.
    """
    found = scripts(directory)
    results = []
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        _only_one(log.with_name(f"{log.name}.lock")),
        log.open("a", encoding="utf-8") as output,
        log.with_name(f"{log.name}.jsonl").open("a", encoding="utf-8") as record,
    ):
        for script in found:
            result = _run_one(script, node, timeout, output)
            results.append(result)
            record.write(json.dumps(asdict(result)) + "\n")
            record.flush()
            if result.rc:
                how = f"took more than {timeout:g} s" if result.rc == TIMED_OUT else "failed"
                raise LifecycleError(
                    f"{script.name} {how} (exit code {result.rc}): {node} must not join; see {log}"
                )
    return results


def _run_one(script: Path, node: str, timeout: float, output: TextIO) -> Result:
    if not os.access(script, os.X_OK):
        output.write(f"== {script.name}: skipped, it is not executable\n")
        return Result(script.name, None, 0.0, skipped="not executable")
    output.write(f"== {script.name} {node} at {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n")
    output.flush()
    began = SYSTEM_CLOCK.monotonic()
    rc = _end_of(script, node, timeout, output)
    seconds = round(SYSTEM_CLOCK.monotonic() - began, 3)
    output.write(f"== {script.name}: exit code {rc} after {seconds} s\n")
    output.flush()
    return Result(script.name, rc, seconds)


def _end_of(script: Path, node: str, timeout: float, output: TextIO) -> int:
    try:
        process = subprocess.Popen(
            [str(script), node],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        output.write(f"{script.name}: cannot be run: {error.strerror}\n")
        return CANNOT_RUN
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        # What it started in the background goes too: the session is its own.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return TIMED_OUT
    return code if code >= 0 else 128 - code


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LifecycleError(f"another run holds {lock}; wait for its end") from None
        yield


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="lifecycle", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dir", type=Path, required=True, help="directory of NN-name scripts")
    parser.add_argument("--log", type=Path, required=True, help="where their output goes")
    parser.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT_SECONDS, help="seconds for each script"
    )
    parser.add_argument("node", metavar="NODE", help="this node's name in Slurm")
    words = parser.parse_args()
    try:
        if not NODE.fullmatch(words.node):
            raise UsageError(f"'{words.node}' is not a node name")
        if not words.timeout > 0:
            raise UsageError("--timeout must be greater than 0")
        results = run(words.dir, words.log, words.node, words.timeout)
    except SresError as error:
        print(f"lifecycle: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"lifecycle: error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    ran = sum(result.rc is not None for result in results)
    print(f"lifecycle: {ran} of {len(results)} scripts ran well on {words.node}")


if __name__ == "__main__":
    main()
