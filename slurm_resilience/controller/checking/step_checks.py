"""Have the nodes of a failed step check themselves, and tell its supervisor when they have.

The findings go their usual way: sresd reports them, a round diagnoses the node, and that verdict is
the one by which the node is recovered and the job resumed. This module asks, and knows which round
has seen what the nodes found.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.errors import SresError
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.wire.limits import Rate
from slurm_resilience.wire.messages import (
    Evidence,
    NodeAnswer,
    NodeVerdict,
    RunStepChecks,
    StepChecksRun,
)
from slurm_resilience.wire.served_connection import Client

log = logging.getLogger("sresctld")

MAX_SECONDS = 60.0
"""A supervisor waits no longer for the checks of its nodes."""
AT_FAULT = ("dead", "sick", "requested")
"""The last one is also what a sick node is once it has been marked."""
SHARE_OF_NODE = 0.8
"""The part of these seconds that a node has. In the rest its answer travels, and is judged."""
CHECKS_A_SECOND_OF_NODE, CHECKS_AT_ONCE_OF_NODE = 0.1, 3.0
"""A step that fails again and again does not have its nodes check themselves all the time."""
SLICE, SLICE_SECONDS = 200, 0.01
"""So many nodes are asked in one go, and the wire's thread is left to others for so long."""


class AskNode(Protocol):
    """Asks a node's sresd, as `NodeRequests.ask` does."""

    def __call__(
        self,
        node: str,
        kind: str,
        body: msgspec.Raw,
        seconds: float,
        done: Callable[[NodeAnswer], None],
    ) -> None: ...


class CheckedStep:
    """The nodes of one failed step, while they check themselves."""

    def __init__(self, supervisor: Client, nodes: Sequence[str], began: float) -> None:
        self.supervisor = supervisor
        self.nodes = tuple(nodes)
        self.began = began
        self.waiting = set(nodes)
        self.silent: dict[str, str] = {}
        """The reason why a node has not checked itself, by its name."""
        self.answered_in = math.inf
        """The number of the round that is the first to see all answers."""

    def text(self, verdicts: Mapping[str, NodeVerdict], now: float) -> str:
        """Return the outcome in one line."""
        sick = [name for name in self.nodes if verdicts[name].verdict in AT_FAULT]
        judged = [name for name in self.nodes if name not in self.silent]
        if not judged:
            return f"{fold(self.nodes)} did not answer with checks: {self._first_reason()}"
        # Found faulty, and not marked: sresctld is paused, or only observes.
        doubtful = [name for name in self.nodes if verdicts[name].verdict == "suspect"]
        found = f"at fault: {fold(sick)}" if sick else "no fault was found"
        if doubtful:
            found = f"{fold(doubtful)} may be at fault ({verdicts[doubtful[0]].reason})"
        line = f"checks of {fold(judged)} took {now - self.began:.1f} s: {found}"
        if self.silent:
            line += f"; not checked: {fold(self.silent)} ({self._first_reason()})"
        return line

    def _first_reason(self) -> str:
        return self.silent[min(self.silent)]


class StepChecks:
    """The failed steps whose nodes check themselves. Each method may be called from any thread."""

    def __init__(self, ask: AskNode, wake: Callable[[int], None], clock: Clock) -> None:
        """
        Args:
            ask: asks a node's sresd.
            wake: has a round begin for a user, if he has not begun too many.
            clock: its monotonic time counts.
        """
        self._ask = ask
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._rate = Rate(CHECKS_A_SECOND_OF_NODE, CHECKS_AT_ONCE_OF_NODE)
        self._steps: dict[Client, CheckedStep] = {}
        """One of each supervisor."""
        self._round = 0

    def begin(
        self, supervisor: Client, asked: Sequence[str], of_job: Collection[str], seconds: float
    ) -> bool:
        """Ask the nodes of a step that has failed.

        Args:
            supervisor: of the step.
            asked: the nodes that it names.
            of_job: those that its job has: no other one is asked.
            seconds: limit for all.

        Returns:
            Whether any is asked: none twice at once, and none again and again.
        """
        if not 0 < seconds < math.inf:
            return False
        seconds, now = min(seconds, MAX_SECONDS), self._clock.monotonic()
        with self._lock:
            if supervisor in self._steps:
                return False
            names = [name for name in asked if name in of_job and self._rate.take(name, now)]
            if not names:
                return False
            step = self._steps[supervisor] = CheckedStep(supervisor, names, now)
        self._ask_slice(step, 0, seconds * SHARE_OF_NODE)
        return True

    def _ask_slice(self, step: CheckedStep, first: int, seconds: float) -> None:
        body = msgspec.Raw(msgspec.msgpack.encode(RunStepChecks(seconds)))
        for name in step.nodes[first : first + SLICE]:
            try:
                self._ask(
                    name, RunStepChecks.kind, body, seconds, _answer_of(self._answered, step, name)
                )
            except SresError as error:
                self._answered(step, name, NodeAnswer(0, refused=str(error)))
        following = first + SLICE
        if following < len(step.nodes):
            step.supervisor.call_later(
                SLICE_SECONDS, lambda: self._ask_slice(step, following, seconds)
            )

    def _answered(self, step: CheckedStep, name: str, answer: NodeAnswer) -> None:
        why = _why_unchecked(answer)
        with self._lock:
            step.waiting.discard(name)
            if why:
                step.silent[name] = why
            is_last = not step.waiting
            if is_last:
                # A round that is under way may have looked before this node's report came.
                step.answered_in = self._round + 1
        if is_last:
            self._wake(step.supervisor.uid)

    def round_began(self) -> None:
        """Note that a round reads what the nodes have reported, from now on."""
        with self._lock:
            self._round += 1

    def round_ended(self, verdicts: Mapping[str, NodeVerdict]) -> None:
        """Tell the supervisors whose nodes have all been judged by what they found.

        Args:
            verdicts: those of the round.
        """
        now = self._clock.monotonic()
        with self._lock:
            judged = [step for step in self._steps.values() if step.answered_in <= self._round]
            for step in judged:
                del self._steps[step.supervisor]
        for step in judged:
            known = verdicts_on(step.nodes, verdicts)
            text = step.text({verdict.node: verdict for verdict in known}, now)
            log.info("job %s, a step has failed: %s", step.supervisor.subject, text)
            step.supervisor.send(Evidence(known, asked=True, checks="over", text=text))

    def closed(self, supervisor: Client) -> None:
        """Forget a supervisor whose connection is gone."""
        with self._lock:
            self._steps.pop(supervisor, None)


def verdicts_on(
    names: Sequence[str], verdicts: Mapping[str, NodeVerdict]
) -> tuple[NodeVerdict, ...]:
    """Return the verdict on each of these nodes."""
    return tuple(
        verdicts.get(name, NodeVerdict(name, "unknown", "nothing is known")) for name in names
    )


def _answer_of(
    take: Callable[[CheckedStep, str, NodeAnswer], None], step: CheckedStep, name: str
) -> Callable[[NodeAnswer], None]:
    return lambda answer: take(step, name, answer)


def _why_unchecked(answer: NodeAnswer) -> str:
    """Return why a node has not checked itself; empty: it has."""
    if answer.refused:
        return answer.refused
    try:
        run = msgspec.msgpack.decode(answer.body, type=StepChecksRun)
    except msgspec.MsgspecError as error:
        return f"its answer cannot be read: {error}"
    if run.checks and len(run.unjudged) == run.checks:
        return f"none of its {run.checks} checks could tell"
    return ""
