"""The supervisor's connection to sresctld, in a thread of its own.

It is a help, not a need: without sresctld the supervisor still sees node states in Slurm. So it
reconnects quietly, and says once when it cannot.
"""

from __future__ import annotations

import contextlib
import queue
import threading

from slurm_resilience.errors import SresError
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import (
    AttemptStarted,
    Evidence,
    EvidenceRequest,
    Message,
    NodeVerdict,
    Refused,
)

FAULTY = ("dead", "sick", "requested")


class SupervisorLink:
    """Sends what the supervisor does; collects what sresctld says about its nodes."""

    def __init__(
        self, host: str, port: int, job: int, munge_socket: str, trusted_uids: frozenset[int]
    ) -> None:
        self._host, self._port, self._job = host, port, job
        self._munge_socket, self._trusted = munge_socket, trusted_uids
        self._outbox: queue.Queue[Message] = queue.Queue()
        self._verdicts: dict[str, NodeVerdict] = {}
        self._done: dict[str, int] = {}
        """Incidents of nodes that were left, by node: an answer may come after its time."""
        self._current: AttemptStarted | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.tried = threading.Event()
        """Set after the first attempt to connect."""
        self.connected = threading.Event()
        self.news = threading.Event()
        """Set when a node of ours turned bad."""
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send what is queued, then end."""
        self._stop.set()
        if self._thread.is_alive():
            # Nobody waits for a controller that was not there.
            self._thread.join(timeout=2.0 if self.connected.is_set() else 0.1)

    def attempt(self, message: AttemptStarted) -> None:
        """Announce the running attempt, now and after each reconnection."""
        with self._lock:
            self._current = message
            self._verdicts.clear()

    def moved(self, message: AttemptStarted) -> None:
        """The running attempt goes on, on other nodes; what is said of those it keeps holds."""
        with self._lock:
            self._current = message
            for name in set(self._verdicts) - set(message.nodes):
                self._drop(name)

    def forgive(self, node: str) -> None:
        """The node is another machine now: what was said of the one before it is done with."""
        with self._lock:
            self._drop(node)

    def _drop(self, node: str) -> None:
        verdict = self._verdicts.pop(node, None)
        if verdict is not None:
            self._done[node] = max(self._done.get(node, 0), verdict.incident)

    def send(self, message: Message) -> None:
        self._outbox.put(message)

    def ask(self, nodes: tuple[str, ...]) -> None:
        """Ask what is known; the answer comes as news."""
        self._outbox.put(EvidenceRequest(nodes))

    def faulty(self) -> dict[str, NodeVerdict]:
        """Nodes of which sresctld says that they must be left."""
        with self._lock:
            return dict(self._verdicts)

    def _run(self) -> None:
        wait = 0.1
        while not self._stop.is_set():
            try:
                with Connection.open(
                    self._host,
                    self._port,
                    "job",
                    str(self._job),
                    munge_socket=self._munge_socket,
                    trusted_uids=self._trusted,
                    timeout=2.0,
                ) as connection:
                    self.problem = ""
                    self.connected.set()
                    self.tried.set()
                    wait = 0.1
                    self._talk(connection)
            except SresError as error:
                self.problem = str(error)
            finally:
                self.connected.clear()
                self.tried.set()
            self._stop.wait(wait)
            wait = min(2.0, wait * 2)

    def _talk(self, connection: Connection) -> None:
        announced: AttemptStarted | None = None
        while True:
            with self._lock:
                current = self._current
            if current is not None and current is not announced:
                connection.send(current)
                connection.send(EvidenceRequest(current.nodes))
                announced = current
            with contextlib.suppress(queue.Empty):
                while True:
                    connection.send(self._outbox.get_nowait())
            if self._stop.is_set():
                return
            message = connection.receive(0.05)
            if isinstance(message, Evidence):
                self._note(message)
            elif isinstance(message, Refused):
                self.problem = message.reason

    def _note(self, evidence: Evidence) -> None:
        with self._lock:
            mine = set(self._current.nodes) if self._current else set()
            bad = [
                v
                for v in evidence.verdicts
                if v.verdict in FAULTY
                and v.node in mine
                and not 0 < v.incident <= self._done.get(v.node, 0)
            ]
            for verdict in bad:
                self._verdicts[verdict.node] = verdict
        if bad:
            self.news.set()
