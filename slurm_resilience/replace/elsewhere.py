"""A try that another machine's sresctld began before this one took over.

Its program cannot be followed from here, and may still run there, or have ended. The try is never
begun again: it is over when the node has booted since, or when the program's time limit has passed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from slurm_resilience.clock import seconds_of
from slurm_resilience.model import Node
from slurm_resilience.replace import program
from slurm_resilience.replace.repair_order import RepairOrder, Run, RunExists

ELSEWHERE = "elsewhere"
"""The name of the replacer, as the run's directory has it."""
_NOTE = "begun"


class _Begun(msgspec.Struct, frozen=True):
    host: str
    at: float


def inherit(runs: Path, run: str, host: str, began: float) -> bool:
    """Note a try that was begun on another machine; False: it has a directory here.

    Args:
        runs: the directory of the runs.
        run: the try, as `INCIDENT-TRY`.
        host: the machine that began it.
        began: when (epoch).

    Raises:
        OSError: it cannot be written.
    """
    if (runs / run).exists() or any(runs.glob(f"{run}.*")):
        return False
    # Whole or not at all: one without its note would have been begun at an unknown time.
    unfinished = runs / f".{run}"
    unfinished.mkdir(parents=True, exist_ok=True)
    _note(unfinished, host, began)
    unfinished.replace(_directory(runs, run))
    return True


def follow_copy(runs: Path, run: str, host: str, began: float) -> bool:
    """Take a run of the program for one of another machine, from which its directory was copied;
    False: there is none here, or it has ended, or it runs on this machine after all.

    Args:
        runs: the directory of the runs.
        run: the try, as `INCIDENT-TRY`.
        host: the machine that began it.
        began: when (epoch).

    Raises:
        OSError: it cannot be written.
    """
    copy = runs / run
    if not copy.is_dir() or program.is_ended(copy) or program.is_unfinished(copy):
        return False
    _note(copy, host, began)
    copy.replace(_directory(runs, run))
    return True


def _directory(runs: Path, run: str) -> Path:
    return runs / f"{run}.{ELSEWHERE}"


def _note(directory: Path, host: str, began: float) -> None:
    (directory / _NOTE).write_bytes(msgspec.json.encode(_Begun(host, began)))


class ElsewhereReplacer:
    """Follows tries of another machine by what Slurm shows of their nodes."""

    def start(self, order: RepairOrder, node: Node, now: float) -> None:
        raise RunExists(f"{order.directory.name} was begun on another machine")

    def status(self, order: RepairOrder, node: Node | None, now: float) -> Run:
        begun = _begun(order.directory, now)
        by = f"the try that {begun.host} began"
        # By the node's own clock: one that is hours ahead shows every boot in the future.
        if node is not None and begun.at < _booted_at(node) <= now:
            return Run("ended", 0, f"{node.name} has booted since", now, by=by, is_followed=False)
        if now - begun.at <= order.seconds:
            return Run("running", by=by)
        text = f"{order.node} has not booted since, and the time limit is over"
        return Run("lost", output=text, ended_at=now, by=by)

    def stop(self, order: RepairOrder) -> None:
        """Do nothing: what runs on another machine cannot be reached."""


def _begun(directory: Path, now: float) -> _Begun:
    """Return what is known of a try. Where its note cannot be read, it is the directory's own time:
    later than the truth, so that nothing is begun sooner."""
    try:
        return msgspec.json.decode((directory / _NOTE).read_bytes(), type=_Begun)
    except (OSError, msgspec.DecodeError):
        pass
    with contextlib.suppress(OSError):
        return _Begun("another machine", directory.stat().st_mtime)
    return _Begun("another machine", now)


def _booted_at(node: Node) -> float:
    with contextlib.suppress(ValueError):
        return seconds_of(node.boot_time)
    return 0.0
