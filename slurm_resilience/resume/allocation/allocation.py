"""The job that the step runs in, as Slurm shows it now."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from slurm_resilience.clock import Clock, SystemClock
from slurm_resilience.errors import NotFound, SlurmError, SresError
from slurm_resilience.model import Job, Node
from slurm_resilience.resume.allocation.claims import NodeClaims
from slurm_resilience.resume.allocation.slurmctld_wait import ask_patiently
from slurm_resilience.resume.decide.plan import PlanFacts
from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.resume.elastic.size_target import SizeTarget
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.companion_job import is_companion

TABLE_TRIES = 5
"""Reads of Slurm's table of nodes, a second apart, before an older one has to do."""
FRESH_SECONDS = 2.0
"""An address that was read so long ago is not asked for again."""
SECOND = "the second allocation"
"""The log's words for a companion; they begin the reason of a node that is lost with it."""
PROLOG_FAULT = "the prolog failed there"
"""Begins the reason of a node that is lost with a companion for its prolog."""
PROLOG_ERROR = "Prolog error"
"""Slurm's own reason for a node that it drains because the prolog failed there."""
REFRESH_SECONDS = 1.0
"""Until Slurm is asked again for its table of nodes."""


class Companion(msgspec.Struct, frozen=True):
    """A second allocation beside the job, with nodes for its step."""

    id: int
    nodes: tuple[str, ...]


class Companions(msgspec.Struct):
    """All that is known of a job's second allocations."""

    held: list[Companion] = msgspec.field(default_factory=list)
    """Those that the supervisor has got, in the order of their nodes' numbers."""
    supervisor: int = 0
    """Process number of the supervisor: it tells its companions from another one's."""
    obstacle: str = "Slurm has not shown the step's tasks"
    """The reason for which the step cannot be spread over several allocations."""
    size: ElasticSize | None = None
    """The sizes of a living step that grows by further companions; None: it does not."""
    target: SizeTarget = msgspec.field(default_factory=SizeTarget)
    """The number of nodes that such a step is to have."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(name for companion in self.held for name in companion.nodes)


class SlurmPolicy(msgspec.Struct, frozen=True):
    """All that Slurm's configuration says of a job's nodes."""

    permits_expansion: bool
    """Jobs without GRES may grow."""
    preempts: bool
    """A job may have to leave its nodes to one of a higher priority."""


class NodeTable(msgspec.Struct):
    """Slurm's nodes as they were read last, in Slurm's order."""

    nodes: dict[str, Node]
    read_at: float
    """On the monotonic clock."""
    domains: dict[str, str] | None = None
    """Leaf switch or block of each node; None: it was not asked for yet."""
    show: Callable[[Iterable[Node]], None] = lambda _: None
    """Is shown each reading of it."""


class Allocation:
    """One job: read when asked, remembered as it was read last."""

    def __init__(
        self,
        client: SlurmClient,
        job: Job,
        user_stop: threading.Event,
        *,
        patience: float,
        permits_expansion: bool,
        preempts: bool = True,
        clock: Clock | None = None,
        nodes: Sequence[Node] = (),
    ) -> None:
        """
        Args:
            client: asks Slurm.
            job: as it was when the supervisor started.
            user_stop: set when the user ends this; nothing is waited for any more.
            patience: seconds for which slurmctld may be away.
            permits_expansion: Slurm may grow jobs without GRES.
            preempts: Slurm may preempt jobs.
            clock: the time; None: the machine's.
            nodes: Slurm's, where they were just read.
        """
        self.clock = clock or SystemClock()
        self.client = client
        self.job = job
        self.user_stop = user_stop
        self._first = job
        self.claims = NodeClaims((job.id, job.restarts), self.clock, user_stop)
        """Nodes that the job's other supervised sruns have, or may not take."""
        self.patience = patience
        """Seconds for which slurmctld may be away."""
        self._policy = SlurmPolicy(permits_expansion, preempts)
        read_at = self.clock.monotonic() if nodes else float("-inf")
        self._table = NodeTable({node.name: node for node in nodes}, read_at)
        self.own_steps: set[str] = set()
        """Slurm's numbers of the supervised srun's steps so far."""
        self.own_nodes: tuple[str, ...] = ()
        """Those of its last step."""
        self.left_nodes: set[str] = set()
        """Nodes that an attempt had to leave: a spare is used once."""
        self.suspects: set[str] = set()
        """Those that were left though nothing marks them: Slurm may give one back in exchange."""
        self.companions = Companions()
        self.excluded: tuple[str, ...] = ()
        """Nodes that an exchange may not bring: srun's own --exclude."""

    @property
    def id(self) -> int:
        return self.job.id

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.job.nodes

    @property
    def changed(self) -> bool:
        """The job's nodes are no longer those that it started with."""
        return set(self.job.nodes) != set(self._first.nodes)

    def refresh(self) -> str:
        """Read the job again; return its state.

        Empty when Slurm does not know it any more, or has requeued it: what runs under its number
        then is another supervisor's. slurmctld may be away for a while, e.g. to be updated.

        Raises:
            SlurmUnreachable: it was away for longer than the patience, or the user ended this.
        """
        try:
            job = ask_patiently(
                lambda: self.client.job(self.job.id), self.patience, self.clock, self.user_stop
            )
        except NotFound:
            return ""
        if job.restarts != self._first.restarts:
            return ""
        self.job = job
        return job.state

    def state_now(self) -> str:
        """Return the job's state by one look; the last known one where Slurm does not answer."""
        return self._look()[0]

    def look(self) -> str:
        """Return the job's state as `state_now`, and read its nodes: another srun of it may have
        changed them. Those of a job that does not run stay as they are."""
        state, job = self._look()
        if job is not None and state in ("RUNNING", "SUSPENDED"):
            self.job = job
        return state

    def _look(self) -> tuple[str, Job | None]:
        try:
            job = self.client.job(self.job.id)
        except NotFound:
            return "", None
        except SresError:
            return self.job.state, None
        return (job.state, job) if job.restarts == self._first.restarts else ("", None)

    def addresses(self) -> dict[str, str]:
        """Return the address of every node of the cluster; empty when Slurm does not answer."""
        try:
            return {node.name: node.address or node.name for node in self.client.nodes()}
        except SresError:
            return {}

    def _read_table(self) -> dict[str, Node]:
        """Return Slurm's nodes; those that were read before where Slurm does not answer.

        Raises:
            SlurmError: Slurm did not answer, and never has.
        """
        for left in reversed(range(TABLE_TRIES)):
            try:
                self._take_table(self.client.nodes())
                break
            except SlurmError:
                if not left and not self._table.nodes:
                    raise
                if not left or self.clock.wait(self.user_stop, REFRESH_SECONDS):
                    break
        return self._table.nodes

    def _take_table(self, shown: Sequence[Node]) -> dict[str, Node]:
        nodes, now = {node.name: node for node in shown}, self.clock.monotonic()
        self._table = msgspec.structs.replace(self._table, nodes=nodes, read_at=now)
        self._table.show(shown)
        return nodes

    def show_to(self, take: Callable[[Iterable[Node]], None]) -> None:
        """Show Slurm's nodes as they are known, and each time when they are read again."""
        self._table.show = take
        take(self._table.nodes.values())

    def read_addresses(self, names: Iterable[str]) -> dict[str, str]:
        """Return the addresses of nodes as they were read last, without asking Slurm again."""
        table = self._table.nodes
        nodes = [table[name] for name in dict.fromkeys(names) if name in table]
        return {node.name: node.address or node.name for node in nodes}

    def boot_times(self, names: Iterable[str]) -> dict[str, str]:
        """Return when nodes have booted, as Slurm's table showed it last, without asking again."""
        table = self._table.nodes
        return {name: table[name].boot_time for name in names if name in table}

    def address(self, name: str) -> str:
        """Return a node's address as it is now, else as it was; its name where none is known."""
        node = self._table.nodes.get(name)
        if node is None or self.clock.monotonic() - self._table.read_at > FRESH_SECONDS:
            with contextlib.suppress(SlurmError, NotFound):
                node = self.client.node(name)
        return (node.address if node is not None else "") or name

    def facts(
        self, step_size: int, swap_failed: str, living_nodes: tuple[str, ...] = ()
    ) -> PlanFacts:
        """Return what the job allows.

        Args:
            step_size: nodes that the step needs.
            swap_failed: why an exchange of nodes was tried in this incident and did not work.
            living_nodes: nodes on which a living step runs.
        """
        nodes = self._read_table()
        has_gres = bool(self.job.gres) or any(
            nodes[name].gres for name in {*self.job.nodes, *self._first.nodes} if name in nodes
        )
        return PlanFacts(
            # The user keeps the step off the others; the batch script may have one of them.
            job_nodes=self.in_slurms_order([n for n in self.job.nodes if n not in self.excluded]),
            step_size=step_size,
            has_gres=has_gres,
            permits_expansion=self._policy.permits_expansion,
            is_batch=self.job.is_batch,
            requeue=self.job.requeue,
            batch_host=self.job.batch_host,
            swap_failed=swap_failed,
            living_nodes=living_nodes,
            seconds_left=self.job.seconds_left,
            own_nodes=self.own_nodes,
            busy_nodes=tuple(sorted(self._busy_nodes(living_nodes or self.own_nodes))),
            companions=tuple(companion.nodes for companion in self.companions.held),
            companion_obstacle=self.companions.obstacle,
            domains=self._domains(),
            left_nodes=tuple(
                name
                for name in (*self.job.nodes, *self.companions.nodes)
                if name not in living_nodes and self._is_left(name, nodes.get(name))
            ),
        )

    def _domains(self) -> dict[str, str]:
        """Return the leaf switch or block of each node where the job has spares to choose among."""
        if len(set(self.job.nodes) - set(self.own_nodes)) < 2:
            return {}
        if self._table.domains is None:
            with contextlib.suppress(SresError):
                self._table.domains = dict(self.client.domains())
        return self._table.domains or {}

    def idle_count(self) -> int:
        """Return how many nodes of the job's partition are idle that it would take, as far as Slurm
        showed last."""
        partition, excluded = self.job.partition, {*self.excluded, *self.suspects}
        return sum(
            node.base == "IDLE"
            and node.is_available
            and node.name not in excluded
            and (not partition or not node.partitions or partition in node.partitions)
            for node in self._table.nodes.values()
        )

    def _is_left(self, name: str, node: Node | None) -> bool:
        bad = node is not None and (node.is_down or node.is_fail)
        return bad or name in self.left_nodes

    def used_by_others(self, names: Iterable[str]) -> set[str]:
        """Return those of ``names`` on which other steps of the job run.

        Raises:
            SlurmUnreachable: Slurm does not answer.
        """
        steps = self.client.steps(self.job.id)
        others = [s for s in steps if s.step.isdecimal() and s.step not in self.own_steps]
        return {name for step in others for name in step.nodes} & set(names)

    def _busy_nodes(self, own: tuple[str, ...]) -> set[str]:
        """Return the nodes that other steps of the job use, or other supervised sruns go on with.

        Args:
            own: nodes that our own step has, which are none of them: it shared those before.
        """
        if not self.own_nodes:
            return set()  # nothing is known of our own step yet
        shown: set[str] = set()
        free = set(self.job.nodes) - set(own)
        with contextlib.suppress(SresError):  # the others' steps would only make this one wait
            shown = self.used_by_others(free)
        # They may have lost a node at the same time: then Slurm shows no step of theirs.
        return shown | (self.claims.others() & free)

    def bad(self, names: Iterable[str]) -> dict[str, str]:
        """Return those of ``names`` that Slurm shows as no longer usable, with the reason."""
        return self._unusable(names, lambda node: node.is_down or node.is_fail)

    def given_up(self, names: Iterable[str]) -> dict[str, str]:
        """Return those of ``names`` that Slurm has given up, with the reason: it has ended what ran
        there. On a node that is only marked (FAIL) tasks run to their end."""
        return self._unusable(names, lambda node: node.is_down)

    def _unusable(self, names: Iterable[str], is_bad: Callable[[Node], bool]) -> dict[str, str]:
        try:
            nodes = self._take_table(self.client.nodes())
            job_nodes = set(self.client.job(self.job.id).nodes)
            elsewhere = self._lost_with_companions()
        except SresError:
            return {}
        bad = {}
        for name in names:
            node = nodes.get(name)
            if node is None or is_bad(node):
                bad[name] = _shown_state(node)
            elif name in elsewhere and is_drained_by_prolog(node):
                # The node's fault, and no person's word.
                bad[name] = f"{PROLOG_FAULT}, and {elsewhere[name]}"
            elif name in elsewhere:
                bad[name] = elsewhere[name]
            elif name not in job_nodes and name not in self.companions.nodes:
                bad[name] = "it is no longer in the job"
        return bad

    def _lost_with_companions(self) -> dict[str, str]:
        """Return the nodes of companions that have ended, or have lost them, with the reason.

        Raises:
            SlurmError: Slurm did not answer.
        """
        lost = {}
        for companion in self.companions.held:
            try:
                job = self._own_companion(companion.id)
                held = job.nodes if job.state in ("RUNNING", "SUSPENDED") else ()
            except NotFound:
                held = ()
            for name in companion.nodes:
                if name not in held:
                    lost[name] = f"{SECOND}, job {companion.id}, has ended"
        return lost

    def is_over(self, companion: int) -> bool:
        """Return whether Slurm shows that a companion has ended. slurmctld may be away for a while;
        for longer than the patience, or until the user ends this: not."""
        try:
            job = ask_patiently(
                lambda: self._own_companion(companion), self.patience, self.clock, self.user_stop
            )
            return job.state not in ("RUNNING", "SUSPENDED")
        except NotFound:
            return True
        except SresError:
            return False

    def is_preempted(self) -> bool:
        """Return whether Slurm shows that it has begun to preempt the job; not: that cannot be told
        either."""
        if not self._policy.preempts:
            return False
        try:
            return ask_patiently(
                lambda: self.client.is_preempted(self.id), self.patience, self.clock, self.user_stop
            )
        except SresError:
            return False

    def ends_for_good(self) -> bool:
        """Return whether a preempted job that ends within its GraceTime is over for this Slurm, or
        may be, where that cannot be told."""
        try:
            info = ask_patiently(self.client.info, self.patience, self.clock, self.user_stop)
        except SresError:
            return True
        return not info.requeues_after_grace

    def is_running(self, companion: int) -> bool:
        """Return whether Slurm shows that a companion runs; not: that cannot be told either."""
        try:
            return self._own_companion(companion).state in ("RUNNING", "SUSPENDED")
        except SresError:
            return False

    def _own_companion(self, number: int) -> Job:
        """Return a companion as Slurm shows it now.

        Raises:
            NotFound: it is over: Slurm does not know it, or the number is another job's by now.
            SlurmError: Slurm did not answer.
        """
        job = self.client.job(number)
        if not is_companion(job, self.job, self.companions.supervisor):
            raise NotFound(f"job {number} is another one now")
        return job

    def in_slurms_order(self, names: Collection[str]) -> tuple[str, ...]:
        """Sort nodes as ranks are: by Slurm's table of nodes, whatever the order of a hostlist."""
        if not self._table.nodes.keys() >= set(names):
            self._read_table()
        order = {name: index for index, name in enumerate(self._table.nodes)}
        return tuple(sorted(names, key=lambda name: order.get(name, len(order))))


def is_drained_by_prolog(node: Node) -> bool:
    """Return whether Slurm drains a node because a job's prolog failed there."""
    return node.is_drain and node.reason == PROLOG_ERROR


def _shown_state(node: Node | None) -> str:
    if node is None:
        return "Slurm does not know it any more"
    return f"Slurm shows {node.state}" + (f" ({node.reason})" if node.reason else "")
