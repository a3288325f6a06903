"""Act on what jobs left behind: have the node's sresd end it, verify, and give the node back."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.controller.act.evidence_collector import Ask
from slurm_resilience.controller.act.reporting import Reporter
from slurm_resilience.controller.actions import ClearLeftOver
from slurm_resilience.controller.journal.records import LEFT_OVER_REMAINS
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.errors import SresError
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.wire.frames import UNREADABLE
from slurm_resilience.wire.messages import EndLeftOver, LeftOverEnded, NodeAnswer

log = logging.getLogger("sresctld")

ANSWER_SECONDS = 30.0


class LeftOverActs:
    """One question for each node at a time; the answer is used while the decision still stands."""

    def __init__(
        self,
        client: SlurmClient,
        reporter: Reporter,
        clock: Clock,
        ask: Ask | None,
        wake: Callable[[], None],
    ) -> None:
        self._client = client
        self._reporter = reporter
        self._clock = clock
        self._ask = ask
        self._wake = wake
        self._asked: dict[str, tuple[str, float]] = {}
        """Slurm's time of the reason, and the moment of the question, by node."""
        self._answers: dict[str, NodeAnswer] = {}

    def clear(self, snapshot: ClusterSnapshot, action: ClearLeftOver) -> None:
        """Ask; and when the answer is there, give the node back or say what remains."""
        name, seen = action.node, snapshot.nodes[action.node]
        moment = self._clock.monotonic()
        reason_at, asked_at = self._asked.get(name, ("", -ANSWER_SECONDS))
        answer = self._answers.pop(name, None)
        if answer is not None and reason_at == seen.reason_at:
            del self._asked[name]
            self._judge(snapshot, name, answer)
        elif self._ask is not None and moment - asked_at >= ANSWER_SECONDS:
            self._begin(snapshot, name, self._ask)

    def _begin(self, snapshot: ClusterSnapshot, name: str, ask: Ask) -> None:
        living = tuple(job.id for job in snapshot.jobs.values() if name in job.nodes)
        self._asked[name] = (snapshot.nodes[name].reason_at, self._clock.monotonic())
        text = "Slurm could not end a job's tasks: sresd ends what is left of jobs that are over"
        self._reporter.event("left-over", text, node=name)

        def answered(answer: NodeAnswer) -> None:
            self._answers[name] = answer
            self._wake()

        body = msgspec.Raw(msgspec.msgpack.encode(EndLeftOver(living)))
        try:
            ask(name, EndLeftOver.kind, body, ANSWER_SECONDS, answered)
        except SresError as error:
            answered(NodeAnswer(0, refused=str(error)))

    def _judge(self, snapshot: ClusterSnapshot, name: str, answer: NodeAnswer) -> None:
        remains = answer.refused
        ended: tuple[str, ...] = ()
        if not remains:
            try:
                told = msgspec.msgpack.decode(answer.body, type=LeftOverEnded)
                remains, ended = ", ".join(told.left), told.ended
            except UNREADABLE as error:
                remains = f"sresd's answer cannot be read: {error}"
        if remains:
            log.warning("%s: left-over processes remain: %s", name, remains)
            self._reporter.event(LEFT_OVER_REMAINS, remains, node=name)
            return
        node, seen = self._client.node(name), snapshot.nodes[name]
        is_same = (node.reason, node.reason_at) == (seen.reason, seen.reason_at)
        if not is_same or node.has_work:
            log.info("%s is %s now (%s): not resumed", name, node.state, node.reason)
            return
        text = f"ended: {', '.join(ended) or 'nothing was left'}; state=resume"
        self._reporter.event("left-over-ended", text, node=name)
        self._client.set_node([name], state="resume")
        log.info("%s: left-over processes are gone, the node is resumed: %s", name, text)
