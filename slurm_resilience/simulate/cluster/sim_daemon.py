"""sresctld's life in a simulated cluster: the real daemon, its probes, its ends and starts."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from pathlib import Path as Directory
from typing import Protocol

import msgspec

from slurm_resilience.config import Config
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.journal.records import Incident
from slurm_resilience.controller.main import Borders, Controller, only_one
from slurm_resilience.controller.probe import Answered
from slurm_resilience.controller.spares.pool_lifecycle import PoolState
from slurm_resilience.controller.spares.pool_records import SparePool
from slurm_resilience.errors import SresError
from slurm_resilience.simulate.cluster.rules.cluster_rules import SIGTERM, ClusterRules
from slurm_resilience.simulate.cluster.rules.rule_memory import OrderToHalt
from slurm_resilience.simulate.cluster.sim_clock import SimClock
from slurm_resilience.simulate.cluster.sim_database import SimDatabase
from slurm_resilience.simulate.cluster.sim_host import SimHost
from slurm_resilience.simulate.cluster.sim_machine import Path, SimClient, SimMachine, WireEnd
from slurm_resilience.simulate.cluster.sim_reservations import SimReservations
from slurm_resilience.simulate.cluster.sim_slurm import SimSlurm
from slurm_resilience.simulate.cluster.sim_supervisor import SimSupervisors
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.wire.messages import BreakerReset, Message, PauseRequest, SparesResume

LONGEST_JUMP_SECONDS = 30.0
"""sresctld's cycles are left out for so long where nothing can happen."""
LONGEST_WAIT_SECONDS = 8.0
"""Between two cycles in which sresctld has work, once nothing has happened for minutes."""
UNDER_WAY = "SELECT body FROM incidents WHERE state IN ({}) ORDER BY id".format(
    ", ".join(f"'{state.value}'" for state in NodeState if state.is_under_way)
)
IN_THE_MAKING = " UNION ".join(
    f"SELECT json_extract(body, '$.name') FROM {table} "
    "WHERE json_extract(body, '$.state') = 'making'"
    for table in ("spare_pools", "spare_gifts")
)
CALM_SECONDS = 60.0
"""After the last fault, until a person answers the breaker's alarm."""
CALL_SECONDS = 0.02
PROBE_SECONDS = 1.0
SAY_AGAIN_SECONDS = 10.0
"""Until a person looks whether `sres unpause` was heard."""


class DaemonsWorld(Protocol):
    """The cluster around sresctld, as its daemon needs it."""

    schedule: Schedule
    clock: SimClock
    config: Config
    slurm: SimSlurm
    machines: dict[str, SimMachine]
    endpoint: WireEnd
    host: SimHost
    database: SimDatabase
    reservations: SimReservations
    rules: ClusterRules

    def beat(self) -> None:
        """Let the nodes' heartbeats come in."""
        ...

    def note(self, text: str) -> None:
        """Write a line for the trace."""
        ...


class Killed(BaseException):
    """kill -9 of sresctld."""


class WatchedController(Controller):
    """The real daemon; the world goes on around each of its cycles."""

    before: Callable[[], None]
    after: Callable[[str], None]

    @property
    def date(self) -> float:
        """The date that it goes by (epoch)."""
        return self._clock.now()

    def cycle(self) -> str:
        self.before()
        sentence = super().cycle()
        self.after(sentence)
        return sentence


class SimDialer:
    """Probes of slurmds on the simulated network."""

    def __init__(self, world: DaemonsWorld) -> None:
        self._world = world
        self._at_address = {
            node.address: world.machines[name] for name, node in world.slurm.entries.items()
        }

    def dial(self, address: str, port: int, done: Answered) -> None:
        schedule, clock = self._world.schedule, self._world.clock
        started = clock.monotonic()
        machine = self._at_address[address]
        if machine.reaches(Path.PROBES):
            machine.seen_at = schedule.now
            schedule.after(CALL_SECONDS, done, started, "answered")
        else:
            schedule.after(PROBE_SECONDS, done, started, "silent")

    def close(self) -> None:
        return


class SimDaemon:
    """sresctld's life: started, killed at a boundary, started again on the same journal."""

    def __init__(self, world: DaemonsWorld, supervisors: SimSupervisors, pace: float) -> None:
        self._world = world
        self._supervisors = supervisors
        self._pace = pace
        self._controller: WatchedController | None = None
        self._stop = threading.Event()
        self.kill_in = self.stop_in = 0
        """Boundaries until sresctld is killed, or gets SIGTERM; 0: it does not."""
        self._second = contextlib.ExitStack()
        """The lock of a second sresctld, if it got it."""
        self._is_to_pause = False
        """The last word of a person on it."""
        self.cycles = 0
        self.settled_at = 0.0
        """When last nothing was under way."""
        self._able_since = math.inf
        self._busy = True
        self.active_until = 0.0
        """Something has happened lately, and more may follow."""
        self._is_over: Callable[[], bool] = lambda: False

    def live_until(self, is_over: Callable[[], bool]) -> None:
        """Run sresctld, as systemd does, until the run is over."""
        self._is_over = is_over
        schedule = self._world.schedule
        with self._second:
            while not is_over():
                self._live_once()
                self._down()
                schedule.run(schedule.now + self._world.host.restart_seconds())

    def _live_once(self) -> None:
        """Run sresctld until it ends, is killed, or the run is over."""
        world = self._world
        try:
            with only_one(self._state_dir):
                controller = self._start()
                controller.run(self._stop)
                controller.close()
                world.note("sresctld ends")
        except Killed:
            world.note("sresctld is killed")
        except SresError as error:
            world.note(f"sresctld does not start: {self._without_path(error)}")
        except Exception as error:
            world.rules.daemon_ended(f"{type(error).__name__}: {error}")

    @property
    def _state_dir(self) -> Directory:
        return Directory(self._world.config.controller.state_dir)

    def _without_path(self, error: SresError) -> str:
        """Return its text with a name for the state directory that each replay shares."""
        return str(error).replace(str(self._state_dir), "the state directory")

    def start_second(self, seconds: float) -> None:
        """Start a second sresctld on the same state directory, which ends after so long."""
        world = self._world
        try:
            self._second.enter_context(only_one(self._state_dir))
        except SresError as error:
            world.note(f"a second sresctld does not start: {self._without_path(error)}")
            return
        if self._controller is not None:
            world.rules.second_started()
        world.note("another sresctld has the state directory")
        world.schedule.after(seconds, self._second.close)

    def _start(self) -> WatchedController:
        world = self._world
        self._stop.clear()
        controller = WatchedController(
            world.config,
            world.slurm,
            world.slurm.info(),
            world.clock,
            False,
            Borders(SimDialer(world), world.host, world.database.connect, world.reservations),
        )
        controller.before, controller.after = self._before, self._after
        controller.inbox.know(world.slurm.nodes(), {})
        self._controller = controller
        endpoint, inbox = world.endpoint, controller.inbox
        endpoint.opened, endpoint.received = inbox.opened, inbox.received
        endpoint.closed, endpoint.authorize = inbox.closed, inbox.authorize
        endpoint.generation += 1
        endpoint.serves = True
        world.note("sresctld starts")
        for machine in world.machines.values():
            machine.agent.sresctld_started()
        self._supervisors.sresctld_started()
        return controller

    def _down(self) -> None:
        self._controller, self._able_since = None, math.inf
        self.kill_in = self.stop_in = 0
        self._world.endpoint.serves = False
        self._world.rules.daemon_down(self._is_paused())
        self._world.reservations.watcher.reservations_forgotten(self._in_the_making())

    def _before(self) -> None:
        self._world.beat()

    def _after(self, sentence: str) -> None:
        self.cycles += 1
        now = self._world.schedule.now
        if sentence.startswith(("blind", "paused")):
            self._able_since = math.inf
        elif self._able_since == math.inf:
            self._able_since = now
        self._busy = not sentence.endswith("nothing to do") or "," in sentence
        if self._is_over():
            self._stop.set()

    def stride(self) -> float:
        """Return how long sresctld's next wait takes: where nothing can happen, until the next
        event of the world."""
        schedule = self._world.schedule
        if self._busy:
            passed = schedule.now - self.active_until
            slower = 1.0 if passed < 0.0 else 5.0 if passed < CALM_SECONDS else 20.0
            return min(slower * self._pace, max(5.0 * self._pace, LONGEST_WAIT_SECONDS))
        if schedule.now > self.active_until + CALM_SECONDS:
            return LONGEST_JUMP_SECONDS
        return min(schedule.next_at - schedule.now + 0.01, LONGEST_JUMP_SECONDS)

    def boundary(self, name: str) -> None:
        """Get a signal here, where that was asked for."""
        if self._controller is None:
            return
        if self.stop_in and "a call" not in name:
            # Not where it reads: between two acts is where it matters.
            self.stop_in -= 1
            if not self.stop_in:
                self._world.note(f"SIGTERM {name}")
                people = self._world.rules.people
                people.halt = people.halt or OrderToHalt(SIGTERM, self._world.schedule.now)
                self._stop.set()
                self._controller.registry.wake.set()
        if self.kill_in:
            self.kill_in -= 1
            if not self.kill_in:
                self._world.note(f"kill -9 {name}")
                raise Killed

    def pause(self, reason: str) -> None:
        """Take an administrator's pause, or its end."""
        world = self._world
        if not reason:
            # `sres unpause` tells of a connection that is refused or lost: it is said once more.
            self._is_to_pause = False
            world.schedule.after(SAY_AGAIN_SECONDS, self._unpause_again)
        if self._controller is None:
            return
        self._is_to_pause = bool(reason)
        self._say(PauseRequest(reason))
        order = OrderToHalt("a pause", world.schedule.now) if reason else None
        world.rules.people.halt = order

    def resume_spares(self) -> bool:
        """Take an administrator's `sres spares resume`; false: sresctld does not run."""
        self._say(SparesResume())
        return self._controller is not None

    def holds_spares(self) -> bool:
        """Tell whether a pool is held for a person, as the journal has it."""
        rows = self._world.database.execute("SELECT body FROM spare_pools").fetchall()
        pools = [msgspec.json.decode(row[0], type=SparePool) for row in rows]
        return any(pool.state is PoolState.HELD for pool in pools)

    def _unpause_again(self) -> None:
        if self._is_paused() and not self._is_to_pause:
            self.pause("")

    def _is_paused(self) -> bool:
        query = "SELECT value FROM settings WHERE name = 'paused' AND value != ''"
        return self._world.database.execute(query).fetchone() is not None

    def _in_the_making(self) -> list[str]:
        """Return the reservations of which the journal says that Slurm is asked for them."""
        rows = self._world.database.execute(IN_THE_MAKING).fetchall()
        return [str(row[0]) for row in rows]

    def _say(self, message: Message) -> None:
        """Hand an administrator's message to sresctld, if it runs."""
        if self._controller is not None:
            generation = self._world.endpoint.generation
            client = SimClient("query", "", 0, generation, lambda _: None)
            self._controller.inbox.received(client, message)

    # -- as the rules see it ------------------------------------------------------------------

    def able_since(self) -> float:
        """Since when it runs, sees Slurm and may act; infinite: it does not."""
        return self._able_since

    def open_incidents(self) -> list[Incident]:
        """Return the journal's open incidents, also while sresctld is down."""
        rows = self._world.database.execute(UNDER_WAY).fetchall()
        return [msgspec.json.decode(row[0], type=Incident) for row in rows]

    def is_tripped(self) -> bool:
        """Tell whether the breaker holds everything."""
        return self._controller is not None and self._controller.journal.breaker().is_tripped

    def expects(self, name: str) -> bool:
        """Tell whether sresctld waits for a node's sresd to speak."""
        rows = self._world.database.execute("SELECT 1 FROM agents WHERE node = ?", (name,))
        return rows.fetchone() is not None

    def age_of_fault(self, name: str) -> float:
        """Return the seconds since a node's fault began, as the journal has it."""
        controller = self._controller
        fault = controller.journal.faults().get(name) if controller else None
        return controller.date - fault.began if controller and fault is not None else 0.0

    def knows(self, name: str) -> bool:
        """Tell whether sresctld has seen a node's present fault begin."""
        fault = self._controller.journal.faults().get(name) if self._controller else None
        return fault is not None and not fault.is_over

    def supervised(self) -> set[int]:
        """Return the jobs that sresctld takes for supervised."""
        rows = self._world.database.execute("SELECT job FROM supervised").fetchall()
        return {int(row[0]) for row in rows}

    def reset_breaker(self) -> None:
        """Reset the breaker, as `sres breaker reset` does."""
        self._say(BreakerReset())

    def last_states(self) -> dict[str, str]:
        """Return the state of each node's last incident."""
        rows = self._world.database.execute("SELECT node, state FROM incidents ORDER BY id")
        return {str(node): str(state) for node, state in rows.fetchall()}
