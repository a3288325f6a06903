"""Inbox: answer what the last cycle knows, and keep the rest for the next one.

`authorize` says what is permitted, the registry knows what is connected; the inbox keeps what the
cycle must read, and answers from what the last cycle published. It decides nothing. Every method
may be called from any thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.controller import authorize
from slurm_resilience.controller.authorize import NodePlace
from slurm_resilience.controller.checking.step_checks import StepChecks, verdicts_on
from slurm_resilience.controller.heard import InboxMessage, OfJob, without_ballast
from slurm_resilience.controller.job_lookups import JobLookups
from slurm_resilience.controller.node_requests import NodeRequests
from slurm_resilience.controller.pages import StatusPages, public_event
from slurm_resilience.controller.probe import AddressBook
from slurm_resilience.controller.query.private_jobs import PrivateJobs
from slurm_resilience.controller.registry import Registry
from slurm_resilience.errors import NotPermitted, SresError, UsageError
from slurm_resilience.model import Job, Node
from slurm_resilience.wire.limits import Rate
from slurm_resilience.wire.messages import (
    RESIZE,
    BreakerReset,
    Evidence,
    EvidenceRequest,
    Hello,
    Message,
    NodeAnswer,
    NodeQuestion,
    NodeVerdict,
    PauseRequest,
    Refused,
    RequeueRequest,
    ResizeOrder,
    ResizeRequest,
    SparesResume,
    Status,
    StatusRequest,
)
from slurm_resilience.wire.server import Client, NotKnownYet

MAX_WAITING = 100
"""Messages of one connection that may wait for a cycle; a flood ends the connection."""
MAX_WAITING_OF_USER, MAX_QUEUED = 1000, 10_000
"""Messages of one user, and of all, that may wait; past it a connection is ended. Administrators'
always find a place."""
WAKES_A_SECOND_OF_USER, WAKES_AT_ONCE_OF_USER = 1.0, 5.0
WAKES_A_SECOND, WAKES_AT_ONCE = 4.0, 20.0
"""Rounds that users' messages begin at once, of one user and of all. The others wait for the next
round: each one reads Slurm."""


class _UsersWakes:
    """Counts the rounds that users' messages begin."""

    def __init__(self) -> None:
        self._of_user = Rate(WAKES_A_SECOND_OF_USER, WAKES_AT_ONCE_OF_USER)
        self._of_all = Rate(WAKES_A_SECOND, WAKES_AT_ONCE)

    def take(self, uid: int, now: float) -> bool:
        """Count one more; False: the message waits for the next round."""
        return self._of_user.take(uid, now) and self._of_all.take("", now)


class _Listing(NamedTuple):
    """Slurm's nodes, as the last cycle saw them."""

    nodes: tuple[Node, ...]
    places: authorize.Addresses
    names: Mapping[str, str]
    """Each by itself."""


class _Judged(NamedTuple):
    """The last round's verdicts, and the jobs that it saw."""

    verdicts: Mapping[str, NodeVerdict]
    jobs: Mapping[int, Job]


class Inbox:
    """Implements the wire server's handler."""

    def __init__(
        self,
        registry: Registry,
        *,
        trusted_uids: frozenset[int],
        lookups: JobLookups,
        history: Callable[[StatusRequest], tuple[dict[str, Any], str]],
        clock: Clock,
    ) -> None:
        """
        Args:
            registry: where the connections are kept.
            trusted_uids: users who may speak for nodes and pause: root and SlurmUser.
            lookups: asks Slurm about jobs (called in a thread of the wire's).
            history: answers a question about the past, and says what to ask the next page with.
            clock: its monotonic time counts.
        """
        self._registry = registry
        self._trusted_uids = trusted_uids
        self._lookups = lookups
        self._history = history
        self.node_requests = NodeRequests(registry)
        self._step_checks = StepChecks(self.node_requests.ask, self._begin_round, clock)
        self._clock = clock
        self._wakes = _UsersWakes()
        self.addresses = AddressBook(clock)
        self._lock = threading.Lock()
        self._waiting: deque[InboxMessage] = deque()
        self._listing = _Listing((), {}, {})
        self._jobs: Mapping[int, Job] = {}
        self._judged = _Judged({}, {})
        self._status = StatusPages({})

    # -- the wire's handler -------------------------------------------------------------------

    def authorize(self, hello: Hello, uid: int, address: str) -> tuple[str, ...]:
        """Let a connection speak for its subject; a node is told of some other nodes.

        Raises:
            SresError: it may not.
        """
        if hello.role == "node":
            with self._lock:
                addresses = self._listing.places
            authorize.check_node(hello.subject, uid, self._trusted_uids, addresses)
            place = addresses[hello.subject]
            is_its_own = address == place.address
            resolved = {address} if is_its_own else self._resolve(place)
            authorize.check_address(hello.subject, address, place, resolved)
            return authorize.neighbours_of(hello.subject, addresses)
        if hello.role == "job":
            authorize.check_job(self._job_for(hello.subject, uid), uid, self._trusted_uids)
        return ()

    def _resolve(self, place: NodePlace) -> set[str]:
        """Return the addresses of a node's names, of both families.

        Raises:
            SresError: none of its names can be resolved.
        """
        names = dict.fromkeys(name for name in (place.address, place.hostname) if name)
        found = {one.partition("%")[0] for name in names for one in self.addresses.look_up(name)}
        if not found and names:
            raise SresError(f"the node address {place.address} cannot be resolved")
        return found

    def look_up(self, hello: Hello, uid: int) -> None:
        """Ask Slurm about the job of a hello.

        Raises:
            SresError: it cannot be asked, or not now.
        """
        self._lookups.ask(authorize.job_of(hello.subject), uid)

    def _job_for(self, subject: str, uid: int) -> Job:
        """Find a job. Slurm is asked only for one that is younger than the last cycle, and for
        another user's where users' jobs are hidden: it is answered as one that does not exist, on
        the same way."""
        job_id, is_hiding = authorize.job_of(subject), self._hides_jobs_from(uid)
        with self._lock:
            known = self._jobs.get(job_id)
        if known is None or (is_hiding and known.uid != uid):
            known = self._lookups.known(job_id)
        if known is None:
            raise NotKnownYet(f"job {job_id}")
        if is_hiding and known.uid != uid:
            raise authorize.no_such_job(job_id)
        return known

    def _hides_jobs_from(self, uid: int) -> bool:
        return uid not in self._trusted_uids and self._lookups.hides_jobs()

    def opened(self, client: Client) -> None:
        self._registry.opened(client)

    def closed(self, client: Client) -> None:
        self._registry.closed(client)
        if client.role == "node":
            self.node_requests.closed(client)
        elif client.role == "job":
            self._step_checks.closed(client)
            self.node_requests.closed(client)

    def received(self, client: Client, message: Message) -> None:
        """Answer a message, or keep it for the cycle."""
        if client.role == "node":
            self._registry.take(client, message)
            if isinstance(message, NodeAnswer):
                self.node_requests.answered(client, message)
            return
        authorize.check_message(client.role, message)
        if isinstance(message, StatusRequest):
            client.send(self._answer(message, client.uid))
        elif isinstance(message, PauseRequest | BreakerReset | SparesResume):
            self._order(client, message)
        elif isinstance(message, NodeQuestion):
            self._ask_node(client, message)
        elif isinstance(message, ResizeRequest):
            self._resize(client, message)
        elif isinstance(message, NodeAnswer):
            self.node_requests.answered(client, message)
        elif isinstance(message, EvidenceRequest):
            client.send(self._evidence(client, message))
        elif isinstance(message, OfJob):
            if isinstance(message, RequeueRequest) and not self._may_requeue(client):
                return
            kept = without_ballast(message, self._listing.names)
            self._put(InboxMessage(client, int(client.subject), kept))

    def _put(self, heard: InboxMessage) -> None:
        uid = heard.connection.uid
        is_trusted = uid in self._trusted_uids
        with self._lock:
            of_connection = sum(other.connection is heard.connection for other in self._waiting)
            of_user = sum(other.connection.uid == uid for other in self._waiting)
            if of_connection >= MAX_WAITING or (not is_trusted and of_user >= MAX_WAITING_OF_USER):
                raise UsageError(
                    f"{max(of_connection, of_user)} messages within one cycle are too many"
                )
            if not is_trusted and len(self._waiting) >= MAX_QUEUED:
                raise UsageError("users have sent too many messages within one cycle")
            self._waiting.append(heard)
        self._begin_round(uid)

    def _begin_round(self, uid: int) -> None:
        """Have a round begin at once for what a user has brought about; too many wait for the
        next one."""
        with self._lock:
            begins = uid in self._trusted_uids or self._wakes.take(uid, self._clock.monotonic())
        if begins:
            self._registry.wake.set()

    def _answer(self, request: StatusRequest, uid: int) -> Message:
        private = self._private_jobs(uid)
        if uid not in self._trusted_uids and self._lookups.hides_nodes():
            return self._answer_without_nodes(request, uid)
        if request.what not in ("status", "summary"):
            data, following = self._history(request)
            if uid not in self._trusted_uids and "events" in data:
                data["events"] = [public_event(event) for event in data["events"]]
            return Status(data if private is None else private.of(data), following)
        with self._lock:
            pages = self._status
        data, following = pages.summary_for(private), ""
        if request.what == "status":
            data, following = pages.page(request.after, private)
        return Status(pages.with_age(data, self._clock.monotonic()), following)

    def _answer_without_nodes(self, request: StatusRequest, uid: int) -> Message:
        """Tell a user from whom Slurm hides nodes of the user's own jobs alone."""
        with self._lock:
            pages, jobs = self._status, self._jobs
        own = {job.id for job in jobs.values() if job.uid == uid}
        if request.what in ("status", "summary"):
            data = pages.of_jobs(own)
            return Status(pages.with_age(data, self._clock.monotonic()))
        if request.what not in ("history", "events"):
            refusal = NotPermitted("Slurm hides nodes from users here (PrivateData=nodes)")
            return Refused(str(refusal), refusal.exit_code)
        data, following = self._history(request)
        private = PrivateJobs(uid, own)
        events = [public_event(event) for event in data["events"] if event["job"]]
        return Status(private.of({"events": events}), following)

    def _private_jobs(self, uid: int) -> PrivateJobs | None:
        """Return the jobs that a user may read about; None: all."""
        if not self._hides_jobs_from(uid):
            return None
        with self._lock:
            jobs = self._jobs
        return PrivateJobs(uid, {job.id for job in jobs.values() if job.uid == uid})

    def _may_requeue(self, client: Client) -> bool:
        with self._lock:
            job = self._jobs.get(int(client.subject))
        try:
            if job is not None:
                authorize.check_requeue(job)
        except NotPermitted as refusal:
            client.send(Refused(str(refusal), refusal.exit_code))
            return False
        return True

    def _evidence(self, client: Client, request: EvidenceRequest) -> Evidence:
        names = authorize.asked_nodes(request.nodes)
        with self._lock:
            # Slurm gave a newer job its nodes since: what was true of them before is over.
            judged = self._judged.jobs.get(int(client.subject))
            known = verdicts_on(names, self._judged.verdicts if judged and judged.nodes else {})
            job = self._jobs.get(int(client.subject))
        job = job or self._lookups.known(int(client.subject))
        own = frozenset(job.all_nodes if job is not None else ())
        begun = self._step_checks.begin(client, names, own, request.check_seconds)
        return Evidence(known, asked=True, checks="running" if begun else "")

    def _ask_node(self, client: Client, question: NodeQuestion) -> None:
        """Have a node's sresd answer an administrator."""
        try:
            authorize.check_administrator(client.uid, self._trusted_uids, "ask nodes")
            self.node_requests.ask(
                question.node, question.kind, question.body, question.seconds, client.send
            )
        except SresError as refusal:
            client.send(Refused(str(refusal), refusal.exit_code))

    def _resize(self, client: Client, request: ResizeRequest) -> None:
        """Have a job's supervisor take another target, for its owner, root or SlurmUser."""

        def done(answer: NodeAnswer) -> None:
            client.send(answer)
            if not answer.refused:
                # It holds, whether or not there is room for a note of it.
                with contextlib.suppress(UsageError):
                    self._put(InboxMessage(client, request.job, request))

        with self._lock:
            job = self._jobs.get(request.job)
        try:
            if job is None or (self._hides_jobs_from(client.uid) and job.uid != client.uid):
                raise authorize.no_such_job(request.job)
            authorize.check_job(job, client.uid, self._trusted_uids)
            body = msgspec.Raw(msgspec.msgpack.encode(ResizeOrder(request.nodes, client.uid)))
            self.node_requests.ask_supervisor(job.id, RESIZE, body, done)
        except SresError as refusal:
            client.send(Refused(str(refusal), refusal.exit_code))

    def _order(self, client: Client, message: PauseRequest | BreakerReset | SparesResume) -> None:
        try:
            what = "pause sresctld, reset its breaker or resume its spares"
            authorize.check_administrator(client.uid, self._trusted_uids, what)
        except NotPermitted as refusal:
            client.send(Refused(str(refusal), refusal.exit_code))
            return
        self._put(InboxMessage(client, 0, message))
        client.send(Status({"paused": message.reason} if isinstance(message, PauseRequest) else {}))

    # -- the cycle ----------------------------------------------------------------------------

    def know(self, nodes: Iterable[Node], jobs: Mapping[int, Job]) -> None:
        """Learn each node's address and each job's owner, for `authorize`."""
        listed = tuple(nodes)
        with self._lock:
            self._jobs = jobs
            # Of 10,000 nodes few have changed, and their addresses seldom: the others are the very
            # same objects.
            if _are_at_their_places(listed, self._listing.nodes):
                self._listing = self._listing._replace(nodes=listed)
            else:
                places = {node.name: _place(node) for node in listed}
                self._listing = _Listing(listed, places, {name: name for name in places})

    def place_of(self, node: str) -> NodePlace | None:
        """Return where a node's slurmd listens; None: the last cycle did not see the node."""
        with self._lock:
            return self._listing.places.get(node)

    def take(self) -> tuple[InboxMessage, ...]:
        """Take out everything that waits, oldest first: a round looks from now on."""
        self._step_checks.round_began()
        with self._lock:
            waiting = tuple(self._waiting)
            self._waiting.clear()
            return waiting

    def take_pauses(self) -> tuple[InboxMessage, ...]:
        """Take out only what an administrator said: that counts also while Slurm cannot be read."""
        with self._lock:
            pauses = [heard for heard in self._waiting if isinstance(heard.message, PauseRequest)]
            others = [heard for heard in self._waiting if heard not in pauses]
            self._waiting.clear()
            self._waiting.extend(others)
            return tuple(pauses)

    def publish_blind(self, reason: str, since: float, paused: str | None) -> None:
        """Tell that Slurm cannot be read: what was known stands, and nothing is done.

        Args:
            reason: why, in words.
            since: when that began (epoch).
            paused: the reason of the pause; None: it cannot be read either.
        """
        news: dict[str, Any] = {"blind": reason, "blind_since": since}
        with self._lock:
            self._status = self._status.with_news(
                news if paused is None else news | {"paused": paused}
            )

    def publish(self, verdicts: Mapping[str, NodeVerdict], status: dict[str, Any]) -> None:
        """Keep what the last cycle found, for those who ask."""
        pages = StatusPages(status, self._clock.monotonic())
        with self._lock:
            self._judged = _Judged(verdicts, self._jobs)
            self._status = pages
        self._step_checks.round_ended(verdicts)


def _are_at_their_places(nodes: Sequence[Node], before: Sequence[Node]) -> bool:
    """Tell whether these are the nodes of the listing before, with the same addresses."""
    return len(nodes) == len(before) and all(
        node is last or (node.name, _place(node)) == (last.name, _place(last))
        for node, last in zip(nodes, before, strict=True)
    )


def _place(node: Node) -> NodePlace:
    return NodePlace(node.address, node.port, node.hostname)
