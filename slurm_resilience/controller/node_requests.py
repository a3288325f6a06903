"""Ask a node's sresd, or a job's supervisor, and hand its answer on.

One question of each kind is under way at a node, each with a time limit. What is asked is between
the asker and sresd: this module carries it, and bounds its size.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from slurm_resilience.controller.registry import Registry
from slurm_resilience.errors import UsageError, WireError
from slurm_resilience.wire.messages import NodeAnswer, NodeRequest
from slurm_resilience.wire.server import Client

MAX_SECONDS = 600.0
SUPERVISOR_SECONDS = 5.0
"""For a supervisor's answer, which takes it no time."""
MAX_ANSWER_BYTES = 1 << 20
MAX_UNDER_WAY = 20_000
"""A step of 10,000 nodes that fails has each of them asked."""

Done = Callable[[NodeAnswer], None]
"""Called once, in the wire's thread: with the answer, or with the reason why there is none."""


class _Question(NamedTuple):
    node: str
    kind: str
    connection: Client
    done: Done


class NodeRequests:
    """The questions that are under way. Each method may be called from any thread."""

    def __init__(self, registry: Registry) -> None:
        """
        Args:
            registry: knows the nodes' connections.
        """
        self._registry = registry
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._under_way: dict[int, _Question] = {}
        self._asked: set[tuple[str, str]] = set()
        """Node and kind of each question that is under way."""

    def ask(self, node: str, kind: str, body: msgspec.Raw, seconds: float, done: Done) -> None:
        """Ask a node's sresd.

        Args:
            node: the node.
            kind: of the question; sresd refuses one that it does not know.
            body: the question.
            seconds: time limit.
            done: called with the answer.

        Raises:
            UsageError: no time limit, or one of hours.
            WireError: the node's sresd is not connected, or has such a question already.
        """
        if not 0 < seconds <= MAX_SECONDS:
            raise UsageError(f"an answer is waited for at most {MAX_SECONDS:.0f} s")
        connection = self._registry.agent_connection(node)
        if connection is None:
            raise WireError(f"the sresd of {node} is not connected; see `sres node show {node}`")
        self._ask(_Question(node, kind, connection, done), body, seconds)

    def ask_supervisor(self, job: int, kind: str, body: msgspec.Raw, done: Done) -> None:
        """Ask the supervisor of a job.

        Args:
            job: job id.
            kind: of the question.
            body: the question.
            done: called with the answer.

        Raises:
            WireError: it has none, or several; or has such a question already.
        """
        supervisors = self._registry.supervisors(job)
        if not supervisors:
            raise WireError(
                f"job {job} has no supervisor that is connected: no srun --auto-resume=1 runs in "
                "it now, or its supervisor is about to connect again (was sresctld just started?)"
            )
        if len(supervisors) > 1:
            many = f"job {job} has {len(supervisors)} supervised sruns now"
            raise WireError(f"{many}: which of them is meant cannot be said")
        question = _Question(f"job {job}", kind, supervisors[0], done)
        self._ask(question, body, SUPERVISOR_SECONDS)

    def _ask(self, question: _Question, body: msgspec.Raw, seconds: float) -> None:
        node, kind, connection, _ = question
        with self._lock:
            if (node, kind) in self._asked:
                raise WireError(f"{node} is being asked for {kind} already; try again")
            if len(self._under_way) >= MAX_UNDER_WAY:
                raise WireError(f"{len(self._under_way)} nodes are being asked; try again")
            number = next(self._numbers)
            self._under_way[number] = question
            self._asked.add((node, kind))
        connection.call_later(seconds, lambda: self._expire(number, seconds))
        connection.send(NodeRequest(number, kind, seconds, body))

    def answered(self, connection: Client, answer: NodeAnswer) -> None:
        """Take an answer. One that comes too late, or was not asked for, is dropped."""
        with self._lock:
            question = self._under_way.get(answer.id)
            if question is None or question.connection is not connection:
                return
            self._take_out(answer.id)
        if len(answer.body) > MAX_ANSWER_BYTES:
            text = f"{question.node} answered {len(answer.body)} bytes, more than are taken"
            answer = NodeAnswer(answer.id, refused=text)
        question.done(answer)

    def closed(self, connection: Client) -> None:
        """End the questions to a node whose connection is gone."""
        with self._lock:
            lost = [n for n, q in self._under_way.items() if q.connection is connection]
            questions = [(number, self._take_out(number)) for number in lost]
        for number, question in questions:
            text = f"the connection to {question.node} was lost before it answered"
            question.done(NodeAnswer(number, refused=text))

    def _expire(self, number: int, seconds: float) -> None:
        with self._lock:
            question = self._take_out(number) if number in self._under_way else None
        if question is not None:
            text = f"{question.node} did not answer within {seconds:g} s"
            question.done(NodeAnswer(number, refused=text))

    def _take_out(self, number: int) -> _Question:
        question = self._under_way.pop(number)
        self._asked.discard((question.node, question.kind))
        return question
