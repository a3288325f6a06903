"""Where the wire's thread leaves what it hears, and the cycle picks it up.

The board decides nothing. Every method may be called from any thread.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.errors import NotFound, NotPermitted, SresError, UsageError
from slurm_resilience.model import Finding, Job, Node
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    Beat,
    Evidence,
    EvidenceRequest,
    Goodbye,
    Hello,
    Message,
    NodeHello,
    NodeVerdict,
    PauseRequest,
    Refused,
    Report,
    RequeueRequest,
    Status,
    StatusRequest,
)
from slurm_resilience.wire.server import Client


class AgentView(msgspec.Struct, frozen=True):
    """What is known of one node's sresd at one moment."""

    node: str
    connected: bool
    silence: float
    """Seconds since it was last heard (since our start, if never)."""
    heard_at: float
    """The same as a moment of the monotonic clock."""
    boot_id: str = ""
    instance: str = ""
    said_goodbye: bool = False
    findings: tuple[Finding, ...] = ()
    unjudged: tuple[str, ...] = ()
    spoke: bool = True
    """False: known from the journal, not heard since our start."""


class InboxMessage(msgspec.Struct, frozen=True):
    """A message of a supervisor or an administrator, for the cycle."""

    peer: Client
    job: int
    message: AttemptStarted | AttemptEnded | RequeueRequest | PauseRequest


class _Agent:
    def __init__(self, heard_at: float) -> None:
        self.peer: Client | None = None
        self.heard_at = heard_at
        self.boot_id = ""
        self.instance = ""
        self.goodbye = False
        self.spoke = False
        self.findings: dict[tuple[str, str, str], Finding] = {}
        self.verdicts: dict[str, str] = {}


MAX_WAITING = 100
"""Messages of one connection that may wait for a cycle; a flood ends the connection."""
MAX_FINDINGS = 500
"""Kept per node; a flood of different findings must not eat the controller's memory."""


class Inbox:
    """Implements the wire server's handler."""

    def __init__(
        self,
        clock: Clock,
        *,
        trusted_uids: frozenset[int],
        find_job: Callable[[int], Job],
        history: Callable[[str, int], list[dict[str, Any]]],
    ) -> None:
        """
        Args:
            trusted_uids: users who may speak for nodes and pause: root and SlurmUser.
            find_job: reads one job from Slurm (called in the wire's worker threads).
            history: events of the journal, newest first.
        """
        self._clock = clock
        self._trusted = trusted_uids
        self._find_job = find_job
        self._history = history
        self._lock = threading.Lock()
        self._agents: dict[str, _Agent] = {}
        self._supervisors: dict[int, list[Client]] = {}
        self._inbox: deque[InboxMessage] = deque(maxlen=10_000)
        self._addresses: dict[str, tuple[str, int]] = {}
        self._jobs: dict[int, Job] = {}
        self._verdicts: dict[str, NodeVerdict] = {}
        self._status: dict[str, Any] = {}
        self.wake = threading.Event()

    # -- the wire's handler -------------------------------------------------------------------

    def authorize(self, hello: Hello, uid: int, address: str) -> tuple[str, ...]:
        """Who may be whom. Returns slurmd addresses of some other nodes for a node."""
        if hello.role == "node":
            return self._authorize_node(hello.subject, uid, address)
        if hello.role == "job":
            if not (
                hello.subject.isascii() and hello.subject.isdigit() and len(hello.subject) < 11
            ):
                raise UsageError(f"'{hello.subject}' is not a job id")
            with self._lock:
                known = self._jobs.get(int(hello.subject))
            try:
                # Slurm is asked only for jobs that are younger than the last cycle: a slow
                # slurmctld must not keep nodes waiting at this door.
                job = known or self._find_job(int(hello.subject))
            except NotFound:
                raise NotPermitted(f"job {hello.subject} does not exist or has ended") from None
            if uid != job.uid and uid not in self._trusted:
                raise NotPermitted(f"job {job.id} is not yours")
        return ()

    def _authorize_node(self, name: str, uid: int, address: str) -> tuple[str, ...]:
        if uid not in self._trusted:
            raise NotPermitted(f"uid {uid} may not speak for a node; sresd runs as root")
        with self._lock:
            known = self._addresses.get(name)
            others = [pair for node, pair in self._addresses.items() if node != name]
        if known is None:
            raise NotPermitted(f"node {name} is not in Slurm's configuration")
        if not _is_address_of(address, known[0]):
            raise NotPermitted(f"{address} is not the address of node {name} ({known[0]})")
        # Spread over the cluster, so that one dead switch does not hold all of a node's peers.
        step = max(1, len(others) // 8)
        return tuple(f"{host}:{port}" for host, port in others[::step][:8])

    def opened(self, peer: Client) -> None:
        with self._lock:
            if peer.role == "node":
                agent = self._agents.setdefault(peer.subject, _Agent(self._clock.monotonic()))
                if agent.peer is not None:
                    agent.peer.close()  # a node that was cut off comes back on a new connection
                agent.peer = peer
                agent.heard_at = self._clock.monotonic()
                agent.goodbye = False
            elif peer.role == "job":
                self._supervisors.setdefault(int(peer.subject), []).append(peer)

    def received(self, peer: Client, message: Message) -> None:
        if peer.role == "node":
            self._from_node(peer, message)
        elif isinstance(message, StatusRequest):
            peer.send(self._answer(message))
        elif isinstance(message, PauseRequest):
            self._pause(peer, message)
        elif peer.role == "job" and isinstance(message, EvidenceRequest):
            peer.send(self._evidence(message))
        elif peer.role == "job" and isinstance(
            message, AttemptStarted | AttemptEnded | RequeueRequest
        ):
            self._put(InboxMessage(peer, int(peer.subject), message))
        else:
            raise NotPermitted(f"a {peer.role} may not send a {type(message).__name__}")

    def _put(self, heard: InboxMessage) -> None:
        with self._lock:
            waiting = sum(other.peer is heard.peer for other in self._inbox)
            if waiting >= MAX_WAITING:
                raise UsageError(f"{waiting} messages within one cycle are too many")
            self._inbox.append(heard)
        self.wake.set()

    def closed(self, peer: Client) -> None:
        with self._lock:
            if peer.role == "node":
                agent = self._agents.get(peer.subject)
                if agent is not None and agent.peer is peer:
                    agent.peer = None
                    if not agent.goodbye:
                        self.wake.set()
            elif peer.role == "job":
                peers = self._supervisors.get(int(peer.subject), [])
                if peer in peers:
                    peers.remove(peer)
                if not peers:
                    self._supervisors.pop(int(peer.subject), None)

    def _from_node(self, peer: Client, message: Message) -> None:
        with self._lock:
            agent = self._agents.get(peer.subject)
            if agent is None or agent.peer is not peer:
                return  # an older connection of a node that has a newer one
            agent.heard_at = self._clock.monotonic()
            agent.spoke = True
            if isinstance(message, Beat):
                return
            if isinstance(message, NodeHello):
                if (message.boot_id, message.instance) != (agent.boot_id, agent.instance):
                    agent.findings.clear()  # another boot or machine: the old trouble is gone
                agent.boot_id, agent.instance = message.boot_id, message.instance
            elif isinstance(message, Report):
                self._note(agent, message)
            elif isinstance(message, Goodbye):
                agent.goodbye = True
                return
            self.wake.set()

    @staticmethod
    def _note(agent: _Agent, report: Report) -> None:
        if report.full:
            agent.findings.clear()
            agent.verdicts.clear()
        for key in report.cleared:
            agent.findings.pop(key, None)
        for result in report.results:
            agent.verdicts[result.check] = result.verdict
            keys = {finding.key for finding in result.findings}
            if result.verdict != "unjudged":
                # What a check no longer says no longer holds; an unjudged check says nothing.
                gone = [k for k in agent.findings if k[0] == result.check and k not in keys]
                for key in gone:
                    del agent.findings[key]
        found = [f for result in report.results for f in result.findings]
        for finding in (*found, *report.findings):
            if finding.key in agent.findings or len(agent.findings) < MAX_FINDINGS:
                agent.findings[finding.key] = finding

    def _answer(self, request: StatusRequest) -> Message:
        if request.what == "history":
            return Status({"events": self._history(request.node, max(0, min(request.limit, 1000)))})
        with self._lock:
            return Status(self._status)

    def _evidence(self, request: EvidenceRequest) -> Evidence:
        with self._lock:
            unknown = [NodeVerdict(n, "unknown", "nothing is known") for n in request.nodes]
            known = [self._verdicts.get(v.node, v) for v in unknown]
        return Evidence(tuple(known), asked=True)

    def _pause(self, peer: Client, message: PauseRequest) -> None:
        if peer.uid not in self._trusted:
            refusal = NotPermitted("only root and SlurmUser may pause sresctld")
            peer.send(Refused(str(refusal), refusal.exit_code))
            return
        self._put(InboxMessage(peer, 0, message))
        peer.send(Status({"paused": message.reason}))

    # -- the cycle ----------------------------------------------------------------------------

    def remember(self, node: str, boot_id: str, instance: str) -> None:
        """A node known from the journal: it is expected to speak."""
        with self._lock:
            agent = self._agents.setdefault(node, _Agent(self._clock.monotonic()))
            agent.boot_id, agent.instance = boot_id, instance

    def forget(self, node: str) -> None:
        with self._lock:
            self._agents.pop(node, None)

    def know(self, nodes: tuple[Node, ...], jobs: dict[int, Job]) -> None:
        """Where each node may speak from, and whose each job is, for `authorize`."""
        with self._lock:
            self._addresses = {node.name: (node.address, node.port) for node in nodes}
            self._jobs = jobs

    def agents(self) -> dict[str, AgentView]:
        """Every agent, now."""
        with self._lock:
            now = self._clock.monotonic()
            return {
                name: AgentView(
                    node=name,
                    connected=agent.peer is not None,
                    silence=now - agent.heard_at,
                    heard_at=agent.heard_at,
                    boot_id=agent.boot_id,
                    instance=agent.instance,
                    said_goodbye=agent.goodbye,
                    findings=tuple(agent.findings.values()),
                    unjudged=tuple(c for c, v in agent.verdicts.items() if v == "unjudged"),
                    spoke=agent.spoke,
                )
                for name, agent in self._agents.items()
            }

    def any_silent(self, longer_than: float) -> bool:
        """Is any agent silent that has not said goodbye? Cheap; asked several times a second."""
        with self._lock:
            now = self._clock.monotonic()
            return any(
                now - agent.heard_at > longer_than and not agent.goodbye
                for agent in self._agents.values()
            )

    def take_inbox(self) -> list[InboxMessage]:
        with self._lock:
            heard = list(self._inbox)
            self._inbox.clear()
            return heard

    def take_pauses(self) -> list[InboxMessage]:
        """Only what an administrator said: that counts also while Slurm cannot be read."""
        with self._lock:
            pauses = [heard for heard in self._inbox if isinstance(heard.message, PauseRequest)]
            others = [heard for heard in self._inbox if heard not in pauses]
            self._inbox.clear()
            self._inbox.extend(others)
            return pauses

    def supervisors(self, job: int) -> list[Client]:
        with self._lock:
            return list(self._supervisors.get(job, []))

    def publish_blind(self, reason: str, since: float) -> None:
        """Slurm cannot be read: what was known stands, and nothing is done."""
        with self._lock:
            self._status = self._status | {"blind": reason, "blind_since": since}

    def publish(self, verdicts: dict[str, NodeVerdict], status: dict[str, Any]) -> None:
        """What the last cycle found, for those who ask."""
        with self._lock:
            self._verdicts = verdicts
            self._status = status


def _is_address_of(address: str, name: str) -> bool:
    """Does ``address`` belong to the node address ``name``? Loopback counts as one machine."""
    if address == name:
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError as error:
        raise SresError(f"the node address {name} cannot be resolved: {error}") from None
    return address in found or (
        address.startswith("127.") and any(ip.startswith("127.") for ip in found)
    )
