"""A try that another machine's sresctld began before this one took over.

Its program cannot be followed from here, and may still run there, or have ended. The try is never
begun again: it is over when the node has booted since, or when the program's time limit has passed.
"""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.model import Node
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
    directory = runs / f"{run}.{ELSEWHERE}"
    directory.mkdir(parents=True)
    (directory / _NOTE).write_bytes(msgspec.json.encode(_Begun(host, began)))
    return True


class ElsewhereReplacer:
    """Follows tries of another machine by what Slurm shows of their nodes."""

    def start(self, order: RepairOrder, node: Node, now: float) -> None:
        raise RunExists(f"{order.directory.name} was begun on another machine")

    def status(self, order: RepairOrder, node: Node | None, now: float) -> Run:
        try:
            begun = msgspec.json.decode((order.directory / _NOTE).read_bytes(), type=_Begun)
        except (OSError, msgspec.DecodeError) as error:
            raise SresError(f"{order.directory}: {error}") from None
        by = f"the try that {begun.host} began"
        if node is not None and _booted_at(node) > begun.at:
            return Run("ended", 0, f"{node.name} has booted since", now, by=by, is_followed=False)
        if now - begun.at <= order.seconds:
            return Run("running", by=by)
        text = f"{order.node} has not booted since, and the time limit is over"
        return Run("lost", output=text, ended_at=now, by=by)

    def stop(self, order: RepairOrder) -> None:
        """Do nothing: what runs on another machine cannot be reached."""


def _booted_at(node: Node) -> float:
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(node.boot_time).timestamp()
    return 0.0
