"""Reset the GPUs of a node by its sresd: a repair like others, with the machine left as it is.

The order's directory says that it was begun, and how it ended. sresd carries out each order once,
so that a sresctld which was started anew asks how the order of before ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import msgspec

from slurm_resilience.controller.act.evidence_collector import Ask
from slurm_resilience.errors import SresError
from slurm_resilience.model import Node
from slurm_resilience.replace.program import RunHost, write_in_place
from slurm_resilience.replace.repair_order import RepairOrder, Run, RunExists
from slurm_resilience.replace.repair_steps import ReachedStep, begin, read_step, write_step
from slurm_resilience.wire.frames import UNREADABLE
from slurm_resilience.wire.messages import GpusReset, NodeAnswer, ResetGpus

log = logging.getLogger("sresctld")

BY = "its sresd"
ASK_AGAIN = "asks its sresd how the reset of its GPUs ended"
ENDED = "ended"
TIMEOUT_RC = 124
MAX_SECONDS = 300.0
"""Seconds that a reset has, whatever the replacement program has."""
SPARE_SECONDS = 10.0
"""Until an order is over for which no answer came in its time."""


class GpuResetReplacer:
    """Asks a node's sresd to reset its GPUs."""

    def __init__(self, ask: Ask, host: RunHost, wake: Callable[[], None]) -> None:
        """
        Args:
            ask: asks a node's sresd.
            host: makes the orders' directories.
            wake: is called when an answer is there.
        """
        self._ask = ask
        self._host = host
        self._wake = wake
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        """Orders that sresd was asked for since sresctld's start, and has not answered."""

    def start(self, order: RepairOrder, node: Node, now: float) -> None:
        if not order.directory.exists():
            try:
                begin(order.directory, self._host)
                step = ReachedStep("reset", now, now)
                write_step(order.directory, step)
            except FileExistsError:
                raise RunExists(f"{order.directory} was started before") from None
            except OSError as error:
                raise SresError(f"{order.directory} cannot be written: {error}") from None
        elif not self.status(order, node, now).next_act:
            raise RunExists(f"{order.directory} was started before")
        else:
            step = read_step(order.directory) or ReachedStep("reset", now, now)
        name, seconds = order.directory.name, _seconds(order)
        # With its time: a journal that was begun anew may number from 1 again.
        order_name = f"{name} of {step.began:.0f}"

        def answered(answer: NodeAnswer) -> None:
            self._keep(order, answer)
            with self._lock:
                self._asked.discard(name)
            self._wake()

        with self._lock:
            self._asked.add(name)
        body = msgspec.Raw(msgspec.msgpack.encode(ResetGpus(order_name, seconds)))
        try:
            self._ask(order.node, ResetGpus.kind, body, seconds, answered)
        except SresError as error:
            answered(NodeAnswer(0, refused=str(error)))

    def _keep(self, order: RepairOrder, answer: NodeAnswer) -> None:
        """Write down how an order ended, in the wire's thread."""
        rc, text = 1, answer.refused
        if not text:
            try:
                told = msgspec.msgpack.decode(answer.body, type=GpusReset)
                rc, text = (0 if told.is_well else 1), told.text
            except UNREADABLE as error:
                text = f"sresd's answer cannot be read: {error}"
        # Else it is asked for once more, and answered in the same way.
        with contextlib.suppress(OSError):
            write_in_place(order.directory / ENDED, f"{rc} {text}")

    def status(self, order: RepairOrder, node: Node | None, now: float) -> Run:
        step = read_step(order.directory)
        if step is None:
            return Run("lost", output="it was not begun", ended_at=now, by=BY)
        with contextlib.suppress(OSError, ValueError):
            rc, _, text = (order.directory / ENDED).read_text().partition(" ")
            return Run("ended", int(rc), text.strip(), now, by=BY)
        if now - step.began > _seconds(order) + SPARE_SECONDS:
            text = f"no answer within {_seconds(order):.0f} s"
            return Run("ended", TIMEOUT_RC, text, now, by=BY)
        with self._lock:
            is_asked = order.directory.name in self._asked
        return Run("running", next_act="" if is_asked else ASK_AGAIN, by=BY)

    def stop(self, order: RepairOrder) -> None:
        """Let it end: a reset takes seconds, and one that is cut short leaves the GPU unusable."""


def _seconds(order: RepairOrder) -> float:
    return min(order.seconds, MAX_SECONDS)
