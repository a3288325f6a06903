"""Faults of a simulated training: their kinds, their times, and the processes they excuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Protocol

from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.simulate.sim_network import SimNetwork
from slurm_resilience.simulate.sim_process import TIMING, SimProcess
from slurm_resilience.simulate.sim_process_parts import ProcessState

EXCUSED_SECONDS = 9.0
"""Time after a fault in which those that it concerned may be given up: the silence of all, and
three abort timeouts."""
FENCED_SECONDS = 0.5
"""Time until a process is ended that was said to be dead, or whose seat was given to another one:
they are started by launchers, which see to it."""
FOREVER_SECONDS = 1e6
ALONE, SUSPICION = "stuck block of the last", "suspicion"
SPEAKER_DIES, SPEAKER_STOPS = "death of a speaker", "stop of a speaker"
SPEAKER_FAULTS = {SPEAKER_DIES: 0.5, SPEAKER_STOPS: 0.3}
"""Kind → share of the runs with speakers that have such a fault more."""
APART = {ALONE: 0.05, SUSPICION: 0.1}
"""Kind → share of runs with such a fault. They are drawn apart from all others, so that the runs of
most seeds stay the same as before there were these."""
SLUGGISH, HELD = "short stops of all that hold state", "a call that holds all for a while"
CUT_OFF, CUT_OFF_SHARE = "core lost, and newcomers cut off", 0.2
"""And the share of runs with one, where it is followed who holds the state."""
REMOVED, REMOVED_SHARE = "directory of the ranks removed", 0.02
"""And the share of runs with one, in which the directory is a real one, and processes die soon
after: those that replace them make it anew, with another secret."""
KEPT_SHARE = 0.5
"""Elastic ones of these in which Slurm takes no lent node back meanwhile."""
REMOVED_SECONDS, SOON_SECONDS = 75.0, 20.0
"""The time after it in which all must have one secret again; and in which processes die."""
NEVER_MET, NEVER_MET_SHARE = "core lost, and lent ranks out of reach", 0.15
"""The same; such a run has no other fault."""
NEVER_MET_SECONDS = (3.0, 55.0)
"""For so long at least; the shorter the more often."""
STANDSTILL_SHARE = 0.3
"""Lent ranks that stand still for that time; a cut keeps the others away."""
LAST_SLEEP_SECONDS = 9.0
SLEEPS = 3
SLUGGISH_SHARE = 0.2
"""Share of runs with one of these, where it is followed who holds the state."""
HELD_SHARE = 0.4
"""Share of those with the second one."""
EMPTY, EMPTY_SHARE = "seat left empty", 0.05
"""And the share of runs with some, and single deaths beside them, where the ranks that hold state
are not followed."""
SWEEP_SECONDS = 2.0
RESPAWN_SECONDS = 2.0
"""A dead process is replaced within this time."""


class Training(Protocol):
    """A training, as its faults see it."""

    random: Random
    schedule: Schedule
    network: SimNetwork
    seats: int
    rules: WorldRules
    excuses: Excuses

    @property
    def speakers(self) -> bool:
        """Tell whether nodes have several ranks, of which one speaks for the others."""
        ...

    @property
    def keeps_state(self) -> bool:
        """Tell whether it is followed what each process holds of the model."""
        ...

    def living(self) -> list[SimProcess]:
        """All processes that run or are stopped."""
        ...

    def newest(self, seat: int) -> SimProcess:
        """Return the process that took a seat last."""
        ...

    def spawn(self, seat: int, incarnation: int, node: str = "") -> None:
        """Start a process."""
        ...

    def kill(self, process: SimProcess, power: bool = False, replace: bool = True) -> None:
        """End a process."""
        ...

    def remove_directory(self) -> None:
        """Remove the directory in which processes meet."""
        ...

    def keep_loans(self, seconds: float) -> None:
        """Have Slurm take no lent node back for so long."""
        ...

    def find(self, node: str, dead: bool) -> None:
        """Tell all that a node is lost."""
        ...

    def suspect(self, node: str) -> None:
        """Tell all that a node is not heard of."""
        ...

    def note(self, process: SimProcess, text: str) -> None:
        """For the trace."""
        ...


class Excuses:
    """Processes that may be given up although they live, and until when."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._until: dict[str, float] = {}
        self.frozen: set[str] = set()
        """Processes that are stopped for good."""
        self.slept: set[str] = set()
        """Processes that were stopped for less time than the last copy of a part is waited for."""
        self.held: set[str] = set()
        """Processes that stayed in their block for less time than that."""

    def add(self, process_id: str, seconds: float) -> None:
        """Note that a fault concerns a process for so long."""
        until = self._schedule.now + seconds + EXCUSED_SECONDS
        self._until[process_id] = max(until, self._until.get(process_id, 0.0))

    def has(self, process_id: str) -> bool:
        """Tell whether a process may be given up although it lives."""
        return self._until.get(process_id, 0.0) >= self._schedule.now


class FaultPlan:
    """The faults of one run.

    Args:
        training: gets them.
        seed: of the run.
        calm: there are none.
    """

    def __init__(self, training: Training, seed: int, calm: bool = False) -> None:
        self._training = training
        self._is_calm = calm
        self._apart = Random(seed)
        self._sluggish = Random(f"short stops {seed}")
        self._held = Random(f"one call {seed}")
        self._others = {
            CUT_OFF: Random(f"cut off {seed}"),
            NEVER_MET: Random(f"out of reach {seed}"),
            REMOVED: Random(f"removed directory {seed}"),
        }
        # Some process dies with it, and one of a calm training does not.
        self.removes_directory = self._others[REMOVED].random() < REMOVED_SHARE and not calm
        self._empty = Random(f"times of empty seats {seed}")
        random = training.random
        self.until = 1.5 + random.random() * 8.0
        """When faults are over."""
        self.done: list[str] = []
        """Names of those that happened."""
        self.empty: set[int] = set()
        """Seats that no process takes again: their launcher has given up, or no node is left."""
        empties = Random(f"empty seats {seed}").random() < EMPTY_SHARE
        self.leaves_empty = empties and not training.keeps_state
        """It has such seats, and its new processes have no state."""
        self._over = False
        self._fatal = random.random() < 0.3 and not self.leaves_empty
        """Some processes die of a message."""

    def begin(self) -> None:
        """Put faults on the schedule."""
        if self.removes_directory:
            at = self.until * self._others[REMOVED].random()
            self.until = at + REMOVED_SECONDS
            self._training.schedule.at(at, self._strike, REMOVED)
            return
        if self._is_calm:
            return
        if self._training.keeps_state and self._sluggish.random() < SLUGGISH_SHARE:
            # Nothing else: what is lost then is lost for no reason.
            kind = HELD if self._held.random() < HELD_SHARE else SLUGGISH
            for _ in range(SLEEPS):
                at = self._sluggish.random() * self.until
                self._training.schedule.at(at, self._strike, kind)
            return
        if self._training.keeps_state and self._others[NEVER_MET].random() < NEVER_MET_SHARE:
            at = self._others[NEVER_MET].random() * self.until
            shortest, longest = NEVER_MET_SECONDS
            apart = shortest * (longest / shortest) ** self._others[NEVER_MET].random()
            self.until = LAST_SLEEP_SECONDS + apart
            self._training.schedule.at(at, self._strike, NEVER_MET)
            return
        if self.leaves_empty:
            self._plan_empty_seats()
            return
        random = self._training.random
        for _ in range(random.choice([0, 1, 1, 2, 2, 3, 4])):
            self._training.schedule.at(random.random() * self.until, self._strike)
        apart = APART | (SPEAKER_FAULTS if self._training.speakers else {})
        for kind, share in apart.items():
            if self._apart.random() < share:
                self._training.schedule.at(self._apart.random() * self.until, self._strike, kind)
        if self._training.keeps_state and self._others[CUT_OFF].random() < CUT_OFF_SHARE:
            at = self._others[CUT_OFF].random() * self.until
            self._training.schedule.at(at, self._strike, CUT_OFF)

    def _plan_empty_seats(self) -> None:
        """Plan seats that are left empty, and a death beside them. No other fault: where all are
        dead, new ones wait for all seats, as at the first start."""
        rules, apart = self._training.rules, self._empty
        replicas = max(1, math.ceil(rules.min_world / rules.replica_size))
        can_be_empty = self._training.seats - replicas * rules.replica_size
        for number in range(apart.randint(0, min(can_be_empty, 3))):
            at = number + apart.random() * self.until
            self._training.schedule.at(at, self._strike, EMPTY)
        self._training.schedule.at(apart.random() * self.until, self._strike, "death")

    def leave_empty(self, process: SimProcess) -> None:
        """End a process whose seat no other one takes, once its world has stepped."""
        training = self._training
        if process.alive and process.program.step > 0 and len(training.living()) > 1:
            self.empty.add(process.peer.seat)
            training.kill(process, replace=False)

    def end(self) -> None:
        """Have all that was broken work again."""
        self._over = True
        training = self._training
        training.network.heal_all()
        for process in training.living():
            if process.id not in training.excuses.frozen:
                process.resume()
        self._sweep()
        for seat in range(training.seats):
            process = training.newest(seat)
            if not process.alive and seat not in self.empty:
                self._respawn(process)

    def spawned(self, process: SimProcess) -> None:
        """Let some processes die of a message, whichever it is."""
        random = self._training.random
        if self._fatal and not (self._over or self._is_calm) and random.random() < 0.25:
            process.dies_at = random.randint(1, 120)
            self.done.append("death at a message")

    def _sweep(self) -> None:
        """Have an administrator end processes that are stopped for good and that no other one can
        judge: no member of their world that runs is connected to them."""
        living = self._training.living()
        frozen = self._training.excuses.frozen
        sound = [one for one in living if one.id not in frozen]
        for process in living:
            number = process.membership.side.generation.number
            # One that is connected and comes from elsewhere takes its world for a living one.
            judges = [
                other
                for other in sound
                if process.id in other.membership.side.contacts
                and other.membership.side.generation.number == number
            ]
            if process not in sound and not judges:
                self._training.kill(process)
        if len(sound) < len(living):
            self._training.schedule.after(SWEEP_SECONDS, self._sweep)

    def given_up(self, process: SimProcess) -> None:
        """End, as a launcher does, a process that the others go on without."""
        if process.id in self._training.excuses.frozen:
            self._training.schedule.after(FENCED_SECONDS, self._training.kill, process)

    def died(self, process: SimProcess, power: bool) -> None:
        """Replace a process, as its launcher does; for a machine without power, another one
        does."""
        random = self._training.random
        wait = random.random() * RESPAWN_SECONDS
        if power:
            wait += 1.0
            if random.random() < 0.5:
                node = process.peer.node
                self._training.schedule.after(wait, self._training.find, node, True)
        self._training.schedule.after(wait, self._respawn, process)

    def _respawn(self, process: SimProcess) -> None:
        newest = self._training.newest(process.peer.seat)
        if newest.alive and newest is not process:
            return
        number = newest.peer.incarnation + 1
        self._training.spawn(newest.peer.seat, number, f"n{newest.peer.seat}.{number}")

    def _strike(self, name: str = "") -> None:
        living = self._training.living()
        if self._over or not living:
            return
        random = self._training.random
        name = name or random.choice([*(kind for kind in FAULTS if kind not in RARE), *OFTEN])
        self.done.append(name)
        process = random.choice(living)
        self._training.note(process, f"FAULT: {name}")
        if name == EMPTY:
            self.leave_empty(process)
            return
        FAULTS[name](self._training, process)


def _death(training: Training, process: SimProcess) -> None:
    training.kill(process)


def _power(training: Training, process: SimProcess) -> None:
    training.kill(process, power=True)


def _stop(training: Training, process: SimProcess) -> None:
    if process.state is ProcessState.STOPPED:
        return
    _sleep(training, process, training.random.random() * 5.0)


def _sleep(training: Training, process: SimProcess, seconds: float) -> None:
    if process.state is not ProcessState.RUNNING:
        return
    training.excuses.add(process.id, seconds)
    training.excuses.slept.add(process.id)
    process.stop()
    training.schedule.after(seconds, process.resume)


def _met_with_newcomer(training: Training) -> tuple[list[SimProcess], list[SimProcess]]:
    """Return all that hold a part of the model, and those that hold none and are in a new world."""
    living = training.living()
    holders = [one for one in living if one.program.step >= 0]
    joining = [
        one
        for one in living
        if one.program.step < 0 and one.membership.side.generation.holds(one.id)
    ]
    return holders, joining


def _holders_sleep(training: Training, process: SimProcess) -> None:
    """Stop all that hold a part of the model, each for a while and a little later than the one
    before, just when a world is made with one that holds none: a machine with too much to do."""
    random = training.random
    holders, joining = _met_with_newcomer(training)
    if holders and joining:
        for one in holders:
            seconds = 2.1 + random.random() * 2.0
            training.schedule.after(random.random() * 0.3, _sleep, training, one, seconds)
    elif training.schedule.now < LAST_SLEEP_SECONDS:
        training.schedule.after(0.01, _holders_sleep, training, process)


def _all_held(training: Training, process: SimProcess) -> None:
    """End a world that is made with one that holds no part of the model, and keep all of its ranks
    in one call for longer than they have to leave their block: gloo, say, which waits for a member
    that has just died."""
    random = training.random
    holders, joining = _met_with_newcomer(training)
    if holders and joining:
        for one in (*holders, *joining):
            one.program.leave_seconds = (1.1 + random.random() * 0.7) * TIMING.abort_seconds
            training.excuses.add(one.id, one.program.leave_seconds)
            training.excuses.held.add(one.id)
        training.schedule.after(random.random() * 0.2, random.choice(holders).fail)
    elif training.schedule.now < LAST_SLEEP_SECONDS:
        training.schedule.after(0.01, _all_held, training, process)


def _freeze(training: Training, process: SimProcess) -> None:
    """Freeze a process: it never runs again, and its kernel goes on to answer."""
    if process.program.inside is None:
        return  # none can judge one that was in no world
    training.excuses.add(process.id, FOREVER_SECONDS)
    training.excuses.frozen.add(process.id)
    process.stop()


def _stop_all(training: Training, process: SimProcess) -> None:
    """Stop all machines, as a cluster of virtual ones may, and let them come back bit by bit."""
    seconds = 0.5 + training.random.random() * 4.0
    if any(one.state is ProcessState.STOPPED for one in training.living()):
        return
    for one in training.living():
        late = training.random.random() * 0.3
        one.stop()
        training.schedule.after(seconds + late, one.resume)


def _partition(training: Training, process: SimProcess) -> None:
    random = training.random
    seconds = random.random() * 5.0
    living = training.living()
    islands = {one.id: random.randint(0, 1) for one in living} | {process.id: 1}
    for one in living:
        training.excuses.add(one.id, seconds)
    training.network.cut(islands)
    training.schedule.after(seconds, training.network.heal)


def _cut_pair(training: Training, process: SimProcess) -> None:
    other = training.random.choice(training.living())
    seconds = training.random.random() * 6.0
    for one in training.living():
        if one.peer.node in (process.peer.node, other.peer.node):
            training.excuses.add(one.id, seconds)
    training.network.cut_pair(process.id, other.id)
    training.schedule.after(seconds, training.network.mend_pair, process.id, other.id)


def _core_lost(training: Training, process: SimProcess) -> None:
    """Lose all of the job's own ranks, and cut those that replace them off from the lent ones."""
    living, core = training.living(), training.rules.awaited
    if any(one.peer.seat >= core and one.program.step > 0 for one in living):
        for one in living:
            if one.peer.seat < core:
                training.kill(one)
        _cut_newcomers_off(training, process)
    elif training.schedule.now < LAST_SLEEP_SECONDS:
        training.schedule.after(0.01, _core_lost, training, process)


def _remove_directory(training: Training, process: SimProcess) -> None:
    """Remove the directory in which processes meet, and let one or all of the job's own die soon
    after that, or before, so that those that replace them come when it is gone."""
    random = training.random
    wait = random.choice((0.0, random.random() * SOON_SECONDS))
    if training.keeps_state and random.random() < KEPT_SHARE:
        training.keep_loans(FOREVER_SECONDS)
    training.schedule.after(wait, training.remove_directory)
    core = [one for one in training.living() if one.peer.seat < training.rules.awaited]
    victims = core if random.random() < 0.5 else [process]
    soon = max(0.0, wait + random.choice((-0.5, -0.1, 0.0, random.random() * SOON_SECONDS)))
    for one in victims:
        training.schedule.after(soon, training.kill, one)


def _never_met(training: Training, process: SimProcess) -> None:
    """Lose all of the job's own ranks, while those that replace them cannot reach the lent ones:
    these are behind a cut, or stand still, until the faults are over."""
    random, living, core = training.random, training.living(), training.rules.awaited
    lent = [one for one in living if one.peer.seat >= core]
    if any(one.program.step > 0 for one in lent):
        training.keep_loans(FOREVER_SECONDS)
        for one in living:
            training.excuses.add(one.id, FOREVER_SECONDS)
        for one in living:
            if one.peer.seat < core:
                training.kill(one)
        if random.random() < STANDSTILL_SHARE:
            for one in lent:
                one.stop()
        else:
            training.network.cut(dict.fromkeys((one.id for one in lent), 1))
    elif training.schedule.now < LAST_SLEEP_SECONDS:
        training.schedule.after(0.01, _never_met, training, process)


def _cut_newcomers_off(training: Training, process: SimProcess) -> None:
    random, living = training.random, training.living()
    inside = [one for one in living if one.program.inside is not None]
    waiting = [
        one
        for one in living
        if one.program.step < 0
        and one.program.inside is None
        and any(other.id in one.membership.side.contacts for other in inside)
    ]
    if waiting:
        seconds = 1.0 + random.random() * 5.0
        training.network.cut({one.id: int(one.program.step < 0) for one in living})
        training.schedule.after(seconds, training.network.heal)
        for one in living:
            training.excuses.add(one.id, seconds)
    elif training.schedule.now < LAST_SLEEP_SECONDS:
        training.schedule.after(0.01, _cut_newcomers_off, training, process)


def _reset(training: Training, process: SimProcess) -> None:
    connections = list(process.connections.values())
    if not connections:
        return
    connection = training.random.choice(connections)
    for end in connection.ends:
        training.excuses.add(end.id, 0.0)
    training.network.reset(connection)


def _error(training: Training, process: SimProcess) -> None:
    process.fail()


def _stuck(training: Training, process: SimProcess) -> None:
    """Its block is not left in time when its world ends."""
    seconds = training.random.choice([0.5 + training.random.random() * 8.0, FOREVER_SECONDS])
    process.program.leave_seconds = seconds
    training.excuses.add(process.id, seconds)
    process.fail()


def _hang_alone(training: Training, process: SimProcess) -> None:
    """Have its block hang for ever, and all others of its world die: none of them is left to end
    it, and those that come after them know nothing of its world."""
    view = process.program.inside
    if view is None:
        return
    process.program.leave_seconds = FOREVER_SECONDS
    training.excuses.add(process.id, FOREVER_SECONDS)
    for other in training.living():
        if other is not process and view.rank_of(other.id) >= 0:
            training.schedule.after(training.random.random(), training.kill, other)


def _suspect(training: Training, process: SimProcess) -> None:
    """Say that a node is not heard of, be it that it was away for a moment or not at all."""
    random, wait = training.random, 0.0
    if random.random() < 0.7 and process.state is ProcessState.RUNNING:
        seconds = random.random() * 5.0
        for one in training.living():
            if one.peer.node == process.peer.node and one.state is ProcessState.RUNNING:
                training.excuses.add(one.id, seconds)
                one.stop()
                training.schedule.after(seconds, one.resume)
        wait = 1.0 + random.random()
    training.schedule.after(wait, training.suspect, process.peer.node)


def _speaker_of(training: Training, process: SimProcess) -> SimProcess:
    """Return a speaker; the process itself if there is none."""
    speakers = [one for one in training.living() if one.relay is not None and one.relay.speaks]
    return training.random.choice(speakers) if speakers else process


def _speaker_dies(training: Training, process: SimProcess) -> None:
    training.kill(_speaker_of(training, process))


def _speaker_stops(training: Training, process: SimProcess) -> None:
    _stop(training, _speaker_of(training, process))


def _find_dead(training: Training, process: SimProcess) -> None:
    fence = FENCED_SECONDS if training.network.whole else 0.0
    for one in training.living():
        if one.peer.node == process.peer.node:
            training.schedule.after(fence, training.kill, one)
    training.find(process.peer.node, True)


def _find_sick(training: Training, process: SimProcess) -> None:
    training.find(process.peer.node, False)


def _replace(training: Training, process: SimProcess) -> None:
    """Let a newer process take the seat of one that lives."""
    seat = process.peer.seat
    number = training.newest(seat).peer.incarnation + 1
    if training.network.whole:
        training.schedule.after(FENCED_SECONDS, training.kill, process, False, False)
    else:
        training.kill(process, replace=False)
    training.spawn(seat, number, f"n{seat}.{number}")


FAULTS: dict[str, Callable[[Training, SimProcess], None]] = {
    "death": _death,
    "power": _power,
    "stop": _stop,
    "stop for good": _freeze,
    "stop of all": _stop_all,
    "partition": _partition,
    "pair cut off": _cut_pair,
    "reset": _reset,
    "error": _error,
    "stuck block": _stuck,
    ALONE: _hang_alone,
    SUSPICION: _suspect,
    SLUGGISH: _holders_sleep,
    HELD: _all_held,
    CUT_OFF: _core_lost,
    NEVER_MET: _never_met,
    REMOVED: _remove_directory,
    SPEAKER_DIES: _speaker_dies,
    SPEAKER_STOPS: _speaker_stops,
    "node found dead": _find_dead,
    "node found sick": _find_sick,
    "newer process": _replace,
}
"""Every kind of fault, by its name in reports."""
RARE = APART.keys() | SPEAKER_FAULTS.keys() | {SLUGGISH, HELD, CUT_OFF, NEVER_MET, REMOVED}
CUTS = frozenset({"partition", "pair cut off", "reset", CUT_OFF, NEVER_MET})
"""Kinds after which one that lives may be lost to the others."""
OFTEN = ("partition", "partition")
"""Kinds that happen more often: the worst that a protocol can do needs a cut."""
