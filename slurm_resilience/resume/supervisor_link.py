"""The supervisor's connection to sresctld, in a thread of its own.

The supervisor works without it too: it still sees node states in Slurm. So the link reconnects
quietly.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import SresError
from slurm_resilience.model import Node
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation.last_words import LastWords
from slurm_resilience.wire.messages import (
    RESIZE,
    AttemptStarted,
    Evidence,
    EvidenceRequest,
    Message,
    NodeAnswer,
    NodeRequest,
    NodeVerdict,
    Refused,
    ResizeOrder,
    ResizeTaken,
    Status,
    StatusRequest,
)

if TYPE_CHECKING:
    from slurm_resilience.wire.client import Connection

FAULTY = ("dead", "sick", "requested")
"""Verdicts on nodes that must be left."""
DOUBTFUL = ("suspect", *FAULTY)
"""Verdicts on nodes that nothing should be started on."""
DOUBT_SECONDS = 1.0
"""For sresctld's answer about nodes that are about to be taken: it costs a running job its time."""
CLOSE_SECONDS = 2.0
"""For what is queued, when the link is closed."""
CLOSE_UNCONNECTED_SECONDS = 0.1
CONNECT_SECONDS = 2.0
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 2.0
MOST_EVENTS = 1000
POLL_SECONDS = 60.0
"""Between two looks at what is to be sent, of which the bell tells."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""Seconds until the kernel asks a silent sresctld's machine for a sign of life, and how often. One
that has lost its power says no goodbye, and a supervisor may have nothing to send for days."""
_BELL_BYTES = 65536


class KnownVerdicts:
    """sresctld's verdicts on the nodes of the running attempt."""

    def __init__(self) -> None:
        self.faulty: dict[str, NodeVerdict] = {}
        self.suspects: dict[str, NodeVerdict] = {}
        """Nodes that have fallen silent, until they are taken."""
        self.checks_run = False
        """The nodes of the failed step check themselves, and more is to come."""
        self._left_incidents: dict[str, int] = {}
        """Newest incident of each node that was left: an older answer may still come."""
        self.last_words = LastWords()
        """On any node, of the attempt or not."""

    def begin(self) -> None:
        """Forget all: another attempt begins, perhaps on other nodes."""
        self.faulty.clear()
        self.suspects.clear()

    def drop(self, node: str) -> None:
        """Forget a verdict: the node was left, or another machine has its name now."""
        self.suspects.pop(node, None)
        verdict = self.faulty.pop(node, None)
        if verdict is not None:
            self._left_incidents[node] = max(self._left_incidents.get(node, 0), verdict.incident)

    def remember(self, verdicts: Iterable[NodeVerdict]) -> None:
        """Keep what is told of any node for a time in which sresctld cannot be asked."""
        for verdict in verdicts:
            if verdict.verdict in FAULTY and not self._is_late(verdict):
                self.last_words.keep(verdict.node, verdict.reason)
            elif verdict.verdict == "healthy":
                self.last_words.forget(verdict.node)

    def _is_late(self, verdict: NodeVerdict) -> bool:
        """Return whether it is about the machine that had this name before."""
        return 0 < verdict.incident <= self._left_incidents.get(verdict.node, 0)

    def note(self, verdicts: Iterable[NodeVerdict]) -> bool:
        """Take verdicts in; return whether any of them is news of a bad node."""
        is_news = False
        for verdict in verdicts:
            if verdict.verdict in FAULTY and not self._is_late(verdict):
                self.faulty[verdict.node] = verdict
                is_news = True
            elif verdict.verdict == "suspect":
                self.suspects[verdict.node] = verdict
                is_news = True
        return is_news


class _Addresses:
    """The machines of which one has the active sresctld."""

    def __init__(self, hosts: Sequence[str], port: int) -> None:
        self._places = [(host, port) for host in hosts]
        self._turn = 0

    @property
    def present(self) -> tuple[str, int]:
        """The one whose turn it is."""
        return self._places[self._turn % len(self._places)]

    def turn(self) -> None:
        """Try the next one: this one did not answer, or is the standby."""
        self._turn += 1


def _keep_alive(number: int) -> None:
    # Without it (the user may open no more files) the link works, too.
    with (
        contextlib.suppress(OSError),
        socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


class _Identity(NamedTuple):
    """The proof of who the two sides are."""

    munge_socket: str
    trusted_uids: frozenset[int]


class SupervisorLink:
    """Send what the supervisor does; collect what sresctld tells about its nodes."""

    def __init__(
        self,
        hosts: Sequence[str],
        port: int,
        job: int,
        munge_socket: str,
        trusted_uids: frozenset[int],
    ) -> None:
        self._addresses, self._job = _Addresses(hosts, port), job
        self._identity = _Identity(munge_socket, trusted_uids)
        self._resize: Callable[[ResizeOrder], ResizeTaken] | None = None
        self._outbox: queue.Queue[Message] = queue.Queue()
        self._verdicts = KnownVerdicts()
        self._current: AttemptStarted | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._bell = socket.socketpair()
        """A byte in it ends the wait of the thread. A look from time to time instead would
        cost a machine with a hundred supervisors a tenth of a processor."""
        for end in self._bell:
            end.setblocking(False)
        self.connected = threading.Event()
        self.news = threading.Event()
        """Set when a node of ours turned bad."""
        self._answers: queue.Queue[Evidence] | None = None
        """Answers to all questions, while `doubts` waits for its own."""
        self.refusal = ""
        """The reason for which sresctld did not do what it was last asked for."""
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Connect, in a thread."""
        self._thread.start()

    def on_resize(self, take: Callable[[ResizeOrder], ResizeTaken]) -> None:
        """Have a person's order heard.

        Args:
            take: takes another target, or raises `SresError`; called in the link's thread.
        """
        self._resize = take

    def close(self) -> None:
        """Send what is queued, then end."""
        self._stop.set()
        self._ring()
        if self._thread.is_alive():
            # A controller that is not there is not waited for.
            connected = self.connected.is_set()
            self._thread.join(CLOSE_SECONDS if connected else CLOSE_UNCONNECTED_SECONDS)

    def attempt(self, message: AttemptStarted) -> None:
        """Announce the running attempt, now and after each reconnection."""
        with self._lock:
            self._current = message
            self._verdicts.begin()
        self._ring()

    def moved(self, message: AttemptStarted) -> None:
        """Announce other nodes of the running attempt; verdicts on those it keeps still hold."""
        with self._lock:
            self._current = message
            for name in set(self._verdicts.faulty) - set(message.nodes):
                self._verdicts.drop(name)
        self._ring()

    def forgive(self, node: str) -> None:
        """Drop the verdict on a node: another machine has its name now."""
        with self._lock:
            self._verdicts.drop(node)
            self._verdicts.last_words.forget(node)

    def see(self, nodes: Iterable[Node]) -> None:
        """Take in what Slurm shows of its nodes."""
        with self._lock:
            self._verdicts.last_words.see(nodes)

    def send(self, message: Message) -> None:
        """Queue a message."""
        self._outbox.put(message)
        self._ring()

    def ask(self, nodes: tuple[str, ...]) -> None:
        """Ask for the verdicts on some nodes; the answer comes as news."""
        self.send(EvidenceRequest(nodes))

    def ask_checks(self, nodes: tuple[str, ...], seconds: float) -> None:
        """Have these nodes check themselves: a step has failed on them. Verdicts come as news.

        Args:
            nodes: those of the step.
            seconds: time limit.
        """
        self._verdicts.checks_run = False
        self.send(EvidenceRequest(nodes, seconds))

    @property
    def checks_run(self) -> bool:
        """The nodes that were asked check themselves now."""
        return self._verdicts.checks_run

    def doubts(self, nodes: tuple[str, ...]) -> dict[str, str]:
        """Return those nodes, of the attempt or not, on which nothing should be started now.

        Returns:
            sresctld's reason for each. If it is away, or silent for a second, its last words hold.
        """
        if not self.connected.is_set():
            return self._last_words(nodes)
        answers: queue.Queue[Evidence] = queue.Queue()
        self._answers = answers
        self.ask(nodes)
        end = SYSTEM_CLOCK.monotonic() + DOUBT_SECONDS
        try:
            while (left := end - SYSTEM_CLOCK.monotonic()) > 0:
                told = {v.node: v for v in answers.get(timeout=left).verdicts}
                if set(nodes) <= set(told):
                    return {n: told[n].reason for n in nodes if told[n].verdict in DOUBTFUL}
        except queue.Empty:
            pass
        finally:
            self._answers = None
        return self._last_words(nodes)

    def _last_words(self, nodes: tuple[str, ...]) -> dict[str, str]:
        with self._lock:
            told = self._verdicts.last_words.on(nodes)
        return {name: f"{why}, when sresctld last told of it" for name, why in told.items()}

    def history(self) -> list[dict[str, Any]]:
        """Return the journal's newest events, newest first, over a connection of its own.

        Raises:
            SresError: sresctld does not answer.
        """
        from slurm_resilience.wire.client import Connection  # late, as below

        with Connection.open(
            *self._addresses.present,
            "query",
            munge_socket=self._identity.munge_socket,
            trusted_uids=self._identity.trusted_uids,
            timeout=CONNECT_SECONDS,
        ) as connection:
            answer = connection.ask(StatusRequest("history", "", MOST_EVENTS))
        return list(answer.data["events"]) if isinstance(answer, Status) else []

    def faulty(self) -> dict[str, NodeVerdict]:
        """Return the verdicts on nodes that must be left."""
        with self._lock:
            return dict(self._verdicts.faulty)

    def take_suspects(self) -> tuple[NodeVerdict, ...]:
        """Return what was told since the last call of nodes that have fallen silent."""
        with self._lock:
            suspects = tuple(self._verdicts.suspects.values())
            self._verdicts.suspects.clear()
            return suspects

    def _run(self) -> None:
        # Late: these modules are loaded while the step is prepared.
        from slurm_resilience.wire.client import Connection

        pause = FIRST_RETRY_SECONDS
        while not self._stop.is_set():
            try:
                with Connection.open(
                    *self._addresses.present,
                    "job",
                    str(self._job),
                    munge_socket=self._identity.munge_socket,
                    trusted_uids=self._identity.trusted_uids,
                    timeout=CONNECT_SECONDS,
                ) as connection:
                    _keep_alive(connection.fileno())
                    self.connected.set()
                    pause = FIRST_RETRY_SECONDS
                    self._talk(connection)
            except SresError:
                # Tried again soon: Slurm's own node states are seen meanwhile. With two hosts the
                # other one may be active now.
                self._addresses.turn()
            finally:
                self.connected.clear()
            self._stop.wait(pause)
            pause = min(LAST_RETRY_SECONDS, pause * 2)

    def _ring(self) -> None:
        # Full: the thread has not listened for long, and finds all when it does.
        with contextlib.suppress(OSError):
            self._bell[0].send(b".")

    def _talk(self, connection: Connection) -> None:
        announced: AttemptStarted | None = None
        # Not select(), which knows no number above 1023: the user may have left us many open files.
        watched = select.poll()
        watched.register(connection, select.POLLIN)
        watched.register(self._bell[1], select.POLLIN)
        while True:
            # Before a look at what is to be done: what comes later rings again.
            with contextlib.suppress(OSError):
                self._bell[1].recv(_BELL_BYTES)
            ending = self._stop.is_set()  # before the queue is emptied for the last time
            with self._lock:
                current = self._current
            if current is not None and current is not announced:
                connection.send(current)
                connection.send(EvidenceRequest(current.nodes))
                announced = current
            with contextlib.suppress(queue.Empty):
                while True:
                    connection.send(self._outbox.get_nowait())
            if ending:
                return
            watched.poll(POLL_SECONDS * 1000)
            while (message := connection.receive(0.0)) is not None:
                self._hear(message)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Evidence):
            answers = self._answers
            if answers is not None and message.asked:
                answers.put(message)
            self._note(message)
            if message.checks:
                self._note_checks(message)
        elif isinstance(message, Refused):
            self.refusal = message.reason
        elif isinstance(message, NodeRequest):
            self.send(self._answer(message))

    def _answer(self, request: NodeRequest) -> NodeAnswer:
        if request.kind != RESIZE or self._resize is None:
            return NodeAnswer(request.id, refused=f"a supervisor does not know {request.kind!r}")
        try:
            taken = self._resize(msgspec.msgpack.decode(request.body, type=ResizeOrder))
        except (SresError, msgspec.DecodeError) as error:
            return NodeAnswer(request.id, refused=str(error))
        return NodeAnswer(request.id, msgspec.Raw(msgspec.msgpack.encode(taken)))

    def _note_checks(self, evidence: Evidence) -> None:
        self._verdicts.checks_run = evidence.checks == "running"
        if evidence.text:
            report.say(evidence.text)
        self.news.set()

    def _note(self, evidence: Evidence) -> None:
        with self._lock:
            self._verdicts.remember(evidence.verdicts)
            own_nodes = set(self._current.nodes) if self._current else set()
            is_news = self._verdicts.note(v for v in evidence.verdicts if v.node in own_nodes)
        if is_news:
            self.news.set()
