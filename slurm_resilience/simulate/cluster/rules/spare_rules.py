"""Rules of a simulated cluster for spare nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from slurm_resilience.config import Config
from slurm_resilience.controller.spares.gift_plan import (
    GIFT_PREFIX,
    REPAIR_GIFT_SECONDS,
    REQUEUE_GIFT_SECONDS,
)
from slurm_resilience.controller.spares.pool_plan import PREFIX, size_of
from slurm_resilience.simulate.cluster.rules.rule_memory import PeoplesWords
from slurm_resilience.simulate.cluster.rules.rule_names import ClusterRule
from slurm_resilience.simulate.cluster.sim_machine import SimMachine
from slurm_resilience.simulate.cluster.sim_reservations import SimReservations
from slurm_resilience.simulate.cluster.sim_slurm import SRESCTLD, SimSlurm
from slurm_resilience.slurm.reservations import Reservation

FULL_SECONDS = 120.0
"""A pool is full again within this time, if nodes are idle and sound and nothing is in the way."""
GIFT_ENDS_SECONDS = 2.0 * REQUEUE_GIFT_SECONDS
"""A gift is over within this time, if nothing is in the way."""
KEPT_SECONDS = REPAIR_GIFT_SECONDS + REQUEUE_GIFT_SECONDS
"""The same of one without a spare: its job waits until its lost node is back."""
GIVEN_UP_SECONDS = 60.0
"""Nodes kept for a job are given up within this time once the job runs again, or is gone."""
SOUND_SECONDS = 30.0
"""A node that has been idle and sound for so long may become a spare."""


@dataclass
class _Given:
    """A reservation that brings a job nodes."""

    job: int
    has_spare: bool
    """Else it keeps what the job has left."""
    made: float
    since: float
    """From then on it ages: nothing was in its way."""
    unneeded: float = 0.0
    """Seconds since its job runs again, or is gone."""


class SpareRules:
    """Looks at each change of a reservation, and at what must come about."""

    def __init__(
        self,
        config: Config,
        slurm: SimSlurm,
        reservations: SimReservations,
        machines: dict[str, SimMachine],
        people: PeoplesWords,
        now: Callable[[], float],
        started: Callable[[int], float],
        note: Callable[[str], None],
        break_rule: Callable[[ClusterRule, str], None],
    ) -> None:
        self._config = config
        self._slurm = slurm
        self._reservations = reservations
        self._machines = machines
        self._people = people
        self._now = now
        self._started = started
        self._note = note
        self._break = break_rule
        self._own: dict[str, bool] = {}
        """Names of the reservations that sresctld has made; and whether it knows so: Slurm has said
        it, or has shown the reservation."""
        self._read_at = 0.0
        self._changed: dict[str, float] = {}
        """Reservations that a person has changed or deleted, and when; until a person's word."""
        self._gifts: dict[str, _Given] = {}
        """Reservations of gifts."""
        self._idle_for: dict[str, float] = {}
        self._short_for: dict[str, float] = {}

    def reservations_read(self) -> None:
        self._read_at = self._now()

    def reservations_known(self, names: Collection[str]) -> None:
        self._own.update({name: True for name in names if name in self._own})

    def reservations_forgotten(self, names: Collection[str]) -> None:
        """Take in that sresctld has ended, and cannot know that Slurm has made these."""
        self._own.update({name: False for name in names if name in self._own})

    def reservation_set(
        self, name: str, before: Reservation | None, after: Reservation | None, author: str
    ) -> None:
        nodes = " ".join(after.nodes) if after else "gone"
        self._note(f"{author} sets the reservation {name}: {nodes}")
        if author != SRESCTLD:
            if before != after:  # a person may write what is there already
                self._changed[name] = self._now()
            return
        if before is None and not self._own.setdefault(name, False):
            # That it was made once, and deleted by a person, no look could have shown.
            self._changed.pop(name, None)
        if name not in self._own:
            self._break(ClusterRule.OTHERS_RESERVATION, f"{name} is not sresctld's")
        if self._changed.get(name, 1e18) < self._read_at:
            text = f"{name} was changed by a person"
            self._break(ClusterRule.OTHERS_RESERVATION, text)
        if name.startswith(GIFT_PREFIX):
            self._judge_gift(before, after)
        elif after is not None:
            self._judge_nodes(after, set(after.nodes) - set(before.nodes if before else ()))

    def job_put_in(self, job_id: int, name: str) -> None:
        self._note(f"job {job_id} is to start in the reservation {name or 'none'}")
        if not name or any(
            # It is there already, and may have started since sresctld saw it wait: no change.
            job.id == job_id and job.reservation == name
            for job in self._slurm.every_job()
        ):
            return
        lacking = self._reservations.requests.get(job_id, job_id)
        has_just_started = self._started(lacking) >= self._reservations.jobs_read_at
        if name not in self._own or not (has_just_started or self._slurm.lacks_nodes(lacking)):
            text = f"job {lacking} is put into {name}, and lacks no node"
            self._break(ClusterRule.GIVEN_ONCE, text)

    def _judge_gift(self, before: Reservation | None, after: Reservation | None) -> None:
        """Check that a spare is given to one job at a time, and takes no other job's node."""
        if after is None:
            self._gifts.pop(before.name if before else "", None)
            return
        pools = [one for one in self._reservations.shown.values() if one.name.startswith(PREFIX)]
        has_spare = any(set(one.nodes) & set(after.nodes) for one in pools)
        job_id = int(after.name.removeprefix(GIFT_PREFIX).partition("-")[0])
        self._gifts[after.name] = _Given(job_id, has_spare, self._now(), self._now())
        for other in self._reservations.shown.values():
            both = set(other.nodes) & set(after.nodes)
            if both and other.name in self._own and other.name != after.name:
                if other.name.startswith(GIFT_PREFIX):
                    text = f"{' '.join(sorted(both))} in {after.name} and in {other.name}"
                    self._break(ClusterRule.GIVEN_ONCE, text)
            elif both and other.name not in self._own:
                text = f"{after.name} has {' '.join(sorted(both))} of {other.name}"
                self._break(ClusterRule.OTHERS_RESERVATION, text)
        for name in after.nodes:
            others = {job.id for job in self._slurm.jobs_on(name)} - {job_id}
            started = [self._started(number) for number in others]
            if any(at < self._slurm.listed_at for at in started):
                text = f"{after.name} has {name}, on which job {min(others)} runs"
                self._break(ClusterRule.GIVEN_ONCE, text)

    def resumed(self) -> None:
        # A gift that a person has changed is that person's for good: the word is of pools.
        self._changed = {
            name: at for name, at in self._changed.items() if name.startswith(GIFT_PREFIX)
        }

    def _judge_nodes(self, after: Reservation, added: set[str]) -> None:
        partition = after.name.removeprefix(PREFIX).rpartition("-")[0]
        size = self.size(partition)
        if len(after.nodes) > size:
            text = f"{len(after.nodes)} nodes for partition {partition}, which is to have {size}"
            self._break(ClusterRule.POOL_SIZE, text)
        for name in sorted(added):
            hold = self._people.hold(name)
            if hold is not None and hold.since < self._slurm.listed_at:
                text = f"{name} becomes a spare; a person holds it: {hold.reason!r}"
                self._break(ClusterRule.PERSONS_NODE, text)

    def size(self, partition: str) -> int:
        """Return the size that a partition's pool is to have."""
        settings = self._config.spares.get(partition)
        return size_of(settings, len(self._slurm.nodes_of(partition))) if settings else 0

    def look(self, is_able: bool, seconds: float) -> None:
        """Check what must come about in time.

        Args:
            is_able: sresctld runs, sees Slurm and may act.
            seconds: since the last look.
        """
        kept = self._reservations.nodes()
        for name in self._machines:
            passed = self._idle_for.get(name, 0.0) + seconds
            self._idle_for[name] = passed if self._is_free(name) and name not in kept else 0.0
        is_free_to_act = is_able and not self._reservations.refuses
        for name, given in self._gifts.items():
            if not is_free_to_act or name in self._changed:
                given.since, given.unneeded = self._now(), 0.0
            else:
                self._judge_age(name, given, seconds)
        for partition in self._config.spares:
            own = [
                one
                for one in self._reservations.shown.values()
                if one.name in self._own and one.name.startswith(f"{PREFIX}{partition}-")
            ]
            untouched = [one for one in own if one.name not in self._changed]
            if len(untouched) > 1:
                names = " ".join(one.name for one in untouched)
                self._break(ClusterRule.POOL_SIZE, f"one pool has the reservations {names}")
            self._judge_fullness(partition, own, is_able, seconds)

    def _judge_age(self, name: str, given: _Given, seconds: float) -> None:
        age = self._now() - given.since
        if given.has_spare:
            if age > GIFT_ENDS_SECONDS:
                self._break(ClusterRule.GIVEN_ONCE, f"{name} is there for {age:.0f} s")
            return
        if age > KEPT_SECONDS:
            self._break(ClusterRule.KEPT, f"{name} keeps nodes for {age:.0f} s")
        job = self._slurm.find_job(given.job)
        runs_again = job is not None and self._started(job.id) > given.made
        given.unneeded = given.unneeded + seconds if job is None or runs_again else 0.0
        if given.unneeded > GIVEN_UP_SECONDS:
            why = "runs again" if runs_again else "is gone"
            text = f"{name} is there for {given.unneeded:.0f} s after its job {why}"
            self._break(ClusterRule.KEPT, text)

    def _judge_fullness(
        self, partition: str, own: list[Reservation], is_able: bool, seconds: float
    ) -> None:
        there = self._slurm.nodes_of(partition)
        idle = [name for name in there if self._idle_for[name] >= SOUND_SECONDS]
        kept = [name for one in own for name in one.nodes]
        is_in_the_way = not is_able or bool(self._changed) or self._reservations.refuses
        is_short = bool(idle) and len(kept) < self.size(partition)
        if is_in_the_way or not is_short:
            self._short_for[partition] = 0.0
            return
        passed = self._short_for.get(partition, 0.0) + seconds
        self._short_for[partition] = passed
        if passed > FULL_SECONDS:
            text = f"partition {partition} has {len(kept)} spares for {passed:.0f} s, {idle} idle"
            self._break(ClusterRule.POOL_FULL, text)

    def _is_free(self, name: str) -> bool:
        node, machine = self._slurm.entries[name], self._machines[name]
        is_sound = machine.lives and machine.fault is None and machine.agent.speaks
        is_idle = node.base == "IDLE" and node.is_available and not node.has_work
        return is_sound and is_idle and self._people.hold(name) is None
