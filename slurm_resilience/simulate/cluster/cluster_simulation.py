"""One simulated cluster under faults, with the real sresctld in its middle.

A run is a function of its seed: the plan of faults, the jobs, the nodes and the programs have a
stream of random numbers each, so that a run without one of its faults is the same in all else.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Collection
from pathlib import Path as Directory
from random import Random
from typing import NamedTuple

import msgspec

from slurm_resilience.config import (
    BreakerSettings,
    Config,
    ControllerSettings,
    RecoverySettings,
    ReplaceSettings,
    SparePoolSettings,
)
from slurm_resilience.errors import SresError
from slurm_resilience.simulate.cluster.cluster_faults import strike
from slurm_resilience.simulate.cluster.fault_plan import (
    KINDS_WITHOUT_SPARES,
    SPARE_KINDS,
    FaultKind,
    PlannedFault,
    plan,
)
from slurm_resilience.simulate.cluster.rules.cluster_rules import ClusterRules
from slurm_resilience.simulate.cluster.rules.rule_names import Broken
from slurm_resilience.simulate.cluster.rules.spare_rules import SpareRules
from slurm_resilience.simulate.cluster.sim_clock import SimClock
from slurm_resilience.simulate.cluster.sim_daemon import (
    CALL_SECONDS,
    CALM_SECONDS,
    SAY_AGAIN_SECONDS,
    SimDaemon,
)
from slurm_resilience.simulate.cluster.sim_database import SimDatabase
from slurm_resilience.simulate.cluster.sim_host import Manner, SimHost
from slurm_resilience.simulate.cluster.sim_machine import (
    NEW_DRIVER,
    OLD_DRIVER,
    SimMachine,
    WireEnd,
)
from slurm_resilience.simulate.cluster.sim_power import SimPower
from slurm_resilience.simulate.cluster.sim_reservations import SimReservations
from slurm_resilience.simulate.cluster.sim_slurm import Settings, SimSlurm
from slurm_resilience.simulate.cluster.sim_supervisor import SimSupervisors
from slurm_resilience.simulate.schedule import Schedule

LOOK_SECONDS = 15.0
"""Between two looks at what must come about."""
FAULTS_AN_HOUR = 6
SETTLE_SECONDS = 900.0
"""Time that the cluster has after the last fault."""
BEAT_SECONDS = 0.75
ACTIVE_SECONDS = 20.0
"""After the last thing that happened: sresctld's cycles become less frequent."""
USER = 1000
"""The first user of jobs, by uid."""


class ClusterRun(NamedTuple):
    """The outcome of one run."""

    nodes: int
    hours: float
    cycles: int
    events: int
    faults: tuple[FaultKind, ...]
    broken: tuple[Broken, ...]


class SimCluster:
    """A cluster, its faults, and sresctld."""

    def __init__(
        self, seed: int, directory: Directory, trace: list[str] | None, has_spares: bool
    ) -> None:
        self.schedule = Schedule()
        self.clock = SimClock(self.schedule)
        self._trace = trace
        random, topology = Random(f"{seed}/shape"), Random(f"{seed}/topology")
        self._random = random
        count = random.choice((4, 6, 6, 8, 8, 10, 12, 20))
        settings = Settings(
            return_to_service=random.choice((0, 0, 1, 2)),
            permits_expansion=random.random() < 0.7,
            slurmd_timeout=random.choice((300.0, 300.0, 120.0)),
            partitions=random.choice((("main",), ("main", "a"), ("main", "a", "b"))),
            gres=random.choice(("", "", "gpu:2")),
            of_switch=topology.choice((0, 2, 4)),
        )
        self.slurm = SimSlurm(count, self.schedule, settings)
        self.endpoint = WireEnd()
        machines = Random(f"{seed}/machines")
        self.machines = {
            name: SimMachine(
                name,
                self.schedule,
                self.endpoint,
                machines,
                self._contact,
                self.slurm.register,
            )
            for name in self.slurm.entries
        }
        drivers = Random(f"{seed}/drivers")
        for number, machine in enumerate(self.machines.values()):
            machine.agent.drivers = (NEW_DRIVER if 2 * number + 2 < count else OLD_DRIVER,)
        self.host = SimHost(self.schedule, Random(f"{seed}/programs"), self.machines)
        kinds = Random(f"{seed}/replacers")
        if kinds.random() < 0.4:
            self.slurm.power = SimPower(self.schedule, self.slurm, self.host, self.machines, kinds)
        by = kinds.choice(("slurm-power", "program")) if self.slurm.power else "program"
        self.database = SimDatabase.make()
        self.config = Config(
            controller=ControllerSettings(state_dir=str(directory)),
            replace=ReplaceSettings(
                by=by,
                reboot_by="slurm-reboot" if self.slurm.power else "",
                program=("replace-node",),
                timeout=60.0,
                attempts=random.choice((2, 3)),
                backoff=random.choice((1.0, 5.0, 20.0)),
                return_timeout=60.0,
                max_running=random.choice((1, 2, 8)),
                max_running_partition=random.choice((1, 4)),
                silent_for=random.choice((10.0, 20.0, 60.0)),
            ),
            # Less than what one hour allows a node: else no run is long enough to find a lemon.
            recovery=RecoverySettings(max_repairs=2),
            breaker=BreakerSettings(
                nodes_at_once=random.choice((2, 2, 3)),
                partition_at_once=random.choice((1, 2, 3)),
                switch_per_hour=topology.choice((1, 2, 4)),
                driver_per_hour=drivers.choice((1, 1, 2, 4)),
                quiet=random.choice((60.0, 300.0)),
            ),
        )
        if has_spares:
            pools = _draw_pools(Random(f"{seed}/pools"), settings.partitions)
            self.config = msgspec.structs.replace(self.config, spares=pools)
        self.reservations = SimReservations(self.slurm, self.schedule)
        supervisors = SimSupervisors(
            self.schedule,
            self.slurm,
            self.endpoint,
            Random(f"{seed}/supervisors"),
            lambda name: self.machines[name].lives,
        )
        supervisors.ask_for_node = self.reservations.ask_for_node
        self.reservations.merged = supervisors.has_grown
        self.rules = ClusterRules(
            self.schedule,
            self.config,
            self.slurm,
            self.machines,
            self.host,
            supervisors,
            self.note,
        )
        self.reservations.watcher = SpareRules(
            self.config,
            self.slurm,
            self.reservations,
            self.machines,
            self.rules.people,
            lambda: self.schedule.now,
            lambda number: supervisors.started_at.get(number, 0.0),
            self.note,
            self.rules.break_rule,
        )
        if isinstance(self.slurm.power, SimPower):
            self.slurm.power.people = self.rules
        self.slow_until = self.beaten_at = 0.0
        workload = Workload(self.schedule, self.slurm, supervisors, Random(f"{seed}/jobs"))
        workload.may_requeue = Random(f"{seed}/requeue").random() > 0.1
        workload.begin(count)
        self.daemon = SimDaemon(self, supervisors, random.choice((0.25, 1.0, 1.0, 2.0)))

    # -- as faults see it ---------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Take in that something happened, with a line of the trace."""
        self.stir()
        if self._trace is not None:
            self._trace.append(f"{self.schedule.now:9.2f}  {text}")

    def stir(self) -> None:
        """Take in that sresctld may have work now, or soon."""
        self.daemon.active_until = self.schedule.now + ACTIVE_SECONDS
        self.clock.stirred += 1

    def in_hand(self) -> list[str]:
        """Return the nodes that sresctld has an open incident of."""
        return [incident.node for incident in self.daemon.open_incidents()]

    def kill_after(self, boundaries: int) -> None:
        """Kill sresctld when it comes to one of the next boundaries."""
        self.daemon.kill_in = boundaries

    def stop_after(self, boundaries: int) -> None:
        """Send sresctld SIGTERM when it comes to one of the next boundaries that change a thing."""
        self.daemon.stop_in = boundaries

    def start_second(self, seconds: float) -> None:
        """Start a second sresctld on the same state directory, which ends after so long."""
        self.daemon.start_second(seconds)

    def resume_spares(self) -> None:
        """Let sresctld go on with the spares that people have changed, as `sres spares resume`
        does; once more where it does not run."""
        if not self.daemon.resume_spares():
            self.schedule.after(SAY_AGAIN_SECONDS, self.resume_spares)
            return
        self.note("a person resumes the spares")
        self.reservations.watcher.resumed()
        # Who looks at `sres status` says it once more where sresctld was killed in between, or has
        # seen only then what was changed.
        for seconds in (SAY_AGAIN_SECONDS, 6.0 * SAY_AGAIN_SECONDS):
            self.schedule.after(seconds, self._resume_held_spares)

    def _resume_held_spares(self) -> None:
        if self.daemon.holds_spares():
            self.resume_spares()

    def say_pause(self, reason: str) -> None:
        """Pause sresctld, or let it go on, as `sres pause` does."""
        self.daemon.pause(reason)

    # -- the run ------------------------------------------------------------------------------

    def run(self, faults: Collection[PlannedFault], hours: float) -> None:
        """Live through the faults, and through the time that the cluster needs to settle."""
        schedule, rules = self.schedule, self.rules
        self.slurm.watcher = rules
        self.slurm.take_time = self._take_time
        self.host.watcher = rules
        self.host.boundary = self.daemon.boundary
        self.database.boundary = self.daemon.boundary
        self.database.written, self.database.dropped = rules.event_written, rules.rows_dropped
        rules.breaker.age = self.daemon.age_of_fault
        rules.breaker.is_tripped, rules.breaker.knows = self.daemon.is_tripped, self.daemon.knows
        self.clock.stride, self.clock.waited = self.daemon.stride, self.beat
        for machine in self.machines.values():
            machine.agent.on_reset = rules.gpus_reset
            machine.agent.start(self._random.uniform(0.1, 4.0))
        for fault in sorted(faults):
            schedule.at(fault.at, self._strike, fault)
        last = max((fault.at for fault in faults), default=0.0)
        end = max(hours * 3600.0, last + 250.0)
        schedule.at(end, self._calm)
        schedule.after(LOOK_SECONDS, self._look)

        def is_over() -> bool:
            has_settled = self.daemon.settled_at > end + 2 * CALM_SECONDS
            is_late = schedule.now >= end + SETTLE_SECONDS
            return is_late or has_settled or bool(rules.broken)

        self.daemon.live_until(is_over)
        if not rules.broken:
            rules.at_the_end(self.daemon.open_incidents(), self.daemon.last_states())

    def _strike(self, fault: PlannedFault) -> None:
        self.note(f"FAULT: {fault.kind}")
        try:
            strike(self, fault)
        except SresError as error:
            self.note(f"  Slurm refuses: {error}")

    def _calm(self) -> None:
        """Have all that was broken work again."""
        self.note("faults are over")
        self.host.manners, self.host.full = [Manner.GOOD], False
        self.database.full, self.slurm.away, self.slow_until = False, False, 0.0
        self.slurm.hidden.clear()
        self.daemon.kill_in = self.daemon.stop_in = 0
        self.schedule.after(CALM_SECONDS, self._answer_breaker)

    def _answer_breaker(self) -> None:
        """Have a person look at a storm's alarm, and reset the breaker."""
        if self.daemon.is_tripped():
            self.note("a person resets the breaker")
            self.rules.people.reset_at = self.schedule.now
            self.daemon.reset_breaker()

    def _look(self) -> None:
        self.rules.look(self.daemon, LOOK_SECONDS)
        self.reservations.watcher.look(self.daemon.able_since() != math.inf, LOOK_SECONDS)
        if not self.daemon.open_incidents() and not self.daemon.is_tripped():
            self.daemon.settled_at = self.schedule.now
        self.schedule.after(LOOK_SECONDS, self._look)

    def _contact(self, name: str, reached: bool) -> None:
        self.stir()
        if reached:
            self.slurm.regain_contact(name)
        else:
            self.slurm.lose_contact(name)

    def _take_time(self) -> None:
        """Let the time of a call to Slurm pass."""
        slow = self.schedule.now < self.slow_until
        seconds = 0.5 + self._random.random() * 4.0 if slow else CALL_SECONDS
        self.daemon.boundary("before a call to Slurm")
        until = self.schedule.now + seconds
        while self.schedule.now < until:
            self.schedule.run(min(until, self.schedule.now + BEAT_SECONDS))
            self.beat()

    def beat(self) -> None:
        """Have all beats arrive that were sent since the last time."""
        now = self.schedule.now
        if now - self.beaten_at < 0.8 * BEAT_SECONDS:
            return
        agents = [machine.agent for machine in self.machines.values()]
        heard = next((one for one in agents if one.has_spoken_since(self.beaten_at)), None)
        if heard is not None:
            # One is enough to tell sresctld that it was not cut off in between.
            since = now - self.beaten_at
            for beats in range(1, int(since / BEAT_SECONDS)):
                self.clock.behind = since - beats * BEAT_SECONDS
                heard.beat()
            self.clock.behind = 0.0
        self.beaten_at = now
        for machine in self.machines.values():
            machine.agent.beat()


def _draw_pools(random: Random, partitions: tuple[str, ...]) -> dict[str, SparePoolSettings]:
    """Give one or two partitions a pool each, by a count or a percentage."""
    named = random.sample(partitions, min(len(partitions), random.choice((1, 2))))
    sizes = [
        SparePoolSettings(nodes=1),
        SparePoolSettings(nodes=2),
        SparePoolSettings(percent=25.0),
    ]
    return {name: random.choice(sizes) for name in named}


class Workload:
    """Jobs of users: some supervised, some not."""

    def __init__(
        self, schedule: Schedule, slurm: SimSlurm, supervisors: SimSupervisors, random: Random
    ) -> None:
        self._schedule = schedule
        self._slurm = slurm
        self._supervisors = supervisors
        self._random = random
        self.may_requeue = True
        """False: all supervised jobs say --no-requeue."""

    def begin(self, nodes: int) -> None:
        """Keep about two thirds of the nodes busy."""
        for _ in range(max(1, nodes // 3)):
            self._schedule.after(self._random.uniform(5.0, 30.0), self._submit)

    def _submit(self) -> None:
        random = self._random
        supervised, size = random.random() < 0.6, random.choice((1, 1, 2, 2, 3))
        seconds = random.uniform(60.0, 500.0)
        partition = random.choice(self._slurm.settings.partitions)
        size = min(size, len(self._slurm.nodes_of(partition)))
        shared = size == 1 and random.random() < 0.4
        number = self._slurm.next_job
        if supervised:
            self._supervisors.jobs.add(number)
        self._slurm.submit(
            size,
            uid=USER + number % 3,
            partition=partition,
            requeue=self.may_requeue if supervised else random.random() < 0.5,
            no_kill=supervised and random.random() < 0.7,
            exclusive=not shared,
            seconds=seconds,
            step=False,
        )
        self._schedule.after(seconds + random.uniform(1.0, 120.0), self._submit)


def simulate_cluster(
    seed: int,
    trace: list[str] | None = None,
    *,
    hours: float = 1.0,
    kinds: Collection[FaultKind] = KINDS_WITHOUT_SPARES,
    faults: Collection[PlannedFault] | None = None,
) -> ClusterRun:
    """Run sresctld through the faults of a seed.

    Args:
        seed: of all that is random.
        trace: gets a line for each event.
        hours: simulated hours in which faults happen.
        kinds: faults that may happen.
        faults: these, in place of those that the seed gives.
    """
    if faults is None:
        faults = plan(seed, hours, FAULTS_AN_HOUR, kinds)
    log = logging.getLogger("sresctld")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with tempfile.TemporaryDirectory(prefix="sres-sim-", dir=_fast_directory()) as directory:
            has_spares = any(fault.kind in SPARE_KINDS for fault in faults)
            world = SimCluster(seed, Directory(directory), trace, has_spares)
            world.run(faults, hours)
    finally:
        log.setLevel(level)
    happened = [fault.kind for fault in faults if fault.at <= world.schedule.now]
    return ClusterRun(
        len(world.machines),
        world.schedule.now / 3600.0,
        world.daemon.cycles,
        world.schedule.count,
        tuple(happened),
        tuple(world.rules.broken),
    )


def _fast_directory() -> str | None:
    """Return a directory in memory, where there is one."""
    return "/dev/shm" if Directory("/dev/shm").is_dir() else None
