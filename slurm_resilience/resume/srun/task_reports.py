"""Receive what slurmstepd tells of a step's tasks: on which nodes they began, how each one ended.

It comes as datagrams, so that slurmstepd never waits long for us. A lost one that tells of a node's
beginning costs detail only; each end is answered, and told again until it is. Each srun has a token
of its own: what does not carry it is not read.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence

import msgspec

from slurm_resilience.resume.decide.task_ends import (
    DATAGRAM_BYTES,
    NodeBegan,
    TaskEnd,
    answer,
    first_failure,
    parse,
)
from slurm_resilience.resume.facing_socket import open_facing

BUFFER_BYTES = 4 * 1024 * 1024
"""For the ends of all tasks of a large step within one moment; the kernel may give less."""
MOST_NODES = 65536
MOST_TASKS = 1_000_000


class StepReports:
    """All that slurmstepd has told of one srun's tasks. Any thread may call each method."""

    def __init__(self, target: str, on_news: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            target: what the plugin's option --sres-report is to be; empty: nothing will be told.
            on_news: called (in a thread) when something was told.
        """
        self.target = target
        self.has_begun = False
        """Something was told of a task of this very srun."""
        self._on_news = on_news
        self._lock = threading.Lock()
        self._nodes: dict[int, str] = {}
        self._ends: dict[int, TaskEnd] = {}
        self._step: int | None = None
        self._size = (0, 0)
        self._whole: StepReports | None = None
        self._nodes_before = self._tasks_before = 0

    def behind(self, whole: StepReports, nodes: int, tasks: int) -> None:
        """Hand all on to the reports of a world, of which this step is a part.

        Args:
            whole: of the world.
            nodes: in the parts before this one.
            tasks: the same.
        """
        self._whole, self._nodes_before, self._tasks_before = whole, nodes, tasks

    def take(self, told: NodeBegan | TaskEnd) -> None:
        """Take in what was told."""
        self.has_begun = True
        if self._whole is not None:
            told = msgspec.structs.replace(told, node_id=told.node_id + self._nodes_before)
            if isinstance(told, TaskEnd):
                told = msgspec.structs.replace(told, task=told.task + self._tasks_before)
            else:
                told = msgspec.structs.replace(told, nodes=0, tasks=0)
            self._whole.take(told)
            return
        with self._lock:
            self._step = told.step
            if isinstance(told, NodeBegan):
                if len(self._nodes) < MOST_NODES:
                    self._nodes[told.node_id] = told.node
                self._size = (told.nodes, told.tasks) if told.nodes else self._size
            elif len(self._ends) < MOST_TASKS:
                self._ends.setdefault(told.task, told)
        self._on_news()

    @property
    def step(self) -> int | None:
        """Return Slurm's number of the step; None: nothing was told yet."""
        with self._lock:
            return self._step

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes on which tasks began, by node id; none while one between is missing."""
        if self._whole is not None:
            return self._whole.nodes()
        with self._lock:
            known = self._nodes
            ids = range(len(known))
            return tuple(known[i] for i in ids) if all(i in known for i in ids) else ()

    def whole_step(self) -> tuple[tuple[str, ...], int] | None:
        """Return all nodes of the step, by node id, and the number of its tasks; None: a node has
        not told yet, or does not tell it, or there are nodes of other parts of a world."""
        nodes = self.nodes()
        with self._lock:
            size, tasks = self._size
        return (nodes, tasks) if nodes and len(nodes) == size else None

    def first_node(self) -> str:
        """Return the step's node with rank 0; empty while no task has begun there."""
        if self._whole is not None:
            return self._whole.first_node()
        with self._lock:
            return self._nodes.get(0, "")

    def ends(self) -> tuple[TaskEnd, ...]:
        """Return the tasks' ends, in the order in which they were told."""
        if self._whole is not None:
            return self._whole.ends()
        with self._lock:
            return tuple(
                msgspec.structs.replace(end, node=self._nodes.get(end.node_id, ""))
                for end in self._ends.values()
            )

    @property
    def all_ended(self) -> bool:
        """Return whether each task of the step is known to have begun and ended."""
        with self._lock:
            tasks = self._size[1]
            return tasks > 0 and sum(task < tasks for task in self._ends) == tasks

    def crash(self) -> TaskEnd | None:
        """Return the first task that ended by a signal or for want of memory; None: none did."""
        if self._whole is not None:
            return self._whole.crash()
        with self._lock:
            crashed = any(end.crashed for end in self._ends.values())
        first = first_failure(self.ends()) if crashed else None
        return first if first is not None and first.crashed else None


class TaskReports:
    """The supervisor's socket, and the reports of each of its sruns."""

    def __init__(self, ports: Sequence[int] = ()) -> None:
        """
        Args:
            ports: those that the site allows for srun (SrunPortRange); empty: any.
        """
        self._ports = ports
        self._lock = threading.Lock()
        self._of_token: dict[str, StepReports] = {}
        self._socket: socket.socket | None = None

    def expect(self, node_address: str, on_news: Callable[[], None]) -> StepReports:
        """Return the reports of an srun that is about to be started.

        Args:
            node_address: of one of its nodes, best of another machine than this one.
            on_news: called (in a thread) when something was told.
        """
        with self._lock:
            if self._socket is None:
                with contextlib.suppress(OSError):
                    self._socket = open_facing(
                        node_address, self._ports, BUFFER_BYTES, self._receive, "reports"
                    )
            if self._socket is None:
                return StepReports("", on_news)
            token = os.urandom(16).hex()
            own_address, port = self._socket.getsockname()[:2]
            reports = StepReports(f"{token},{port},{own_address}", on_news)
            self._of_token[token] = reports
        return reports

    def _receive(self, listening: socket.socket) -> None:
        while True:
            # One byte more than may be sent, so that a longer one is seen to be longer.
            datagram, sender = listening.recvfrom(DATAGRAM_BYTES + 1)
            read = parse(datagram)
            if read is None:
                continue
            token, told = read
            with self._lock:
                reports = self._of_token.get(token)
            if reports is not None:
                reports.take(told)
                if isinstance(told, TaskEnd):
                    # It is told again, where this cannot be sent.
                    with contextlib.suppress(OSError):
                        listening.sendto(answer(token, told), socket.MSG_DONTWAIT, sender)
