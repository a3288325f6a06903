"""Faults of a simulated cluster, and the acts of its people: how each one happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol

import msgspec

from slurm_resilience.model import REBOOT, REPLACE, Severity
from slurm_resilience.simulate.cluster.fault_plan import FaultKind, PlannedFault
from slurm_resilience.simulate.cluster.rules.cluster_rules import ClusterRules
from slurm_resilience.simulate.cluster.sim_clock import SimClock
from slurm_resilience.simulate.cluster.sim_database import SimDatabase
from slurm_resilience.simulate.cluster.sim_host import Manner, SimHost
from slurm_resilience.simulate.cluster.sim_liar import SimLiar
from slurm_resilience.simulate.cluster.sim_machine import ALL_PATHS, Path, SimMachine, WireEnd
from slurm_resilience.simulate.cluster.sim_reservations import SimReservations
from slurm_resilience.simulate.cluster.sim_slurm import SimSlurm
from slurm_resilience.simulate.schedule import Schedule

REMOVAL_SECONDS = 900.0
"""A person who removes the directories of runs does so while one runs, if one does by then."""
SCRIPTS_SHARE, SCRIPT_SECONDS, LOOK_OF_SCRIPT_SECONDS = 0.3, 600.0, 0.3
"""So often a script deletes reservations: for so long, with so much between two looks."""
HAND_SECONDS, LOOK_OF_HAND_SECONDS = 1200.0, 7.0
"""A person who reboots a node that sresctld works on: waits so long for one, with so much between
two looks."""
YEAR_SECONDS = 365 * 86400.0
PERSONS = ("alice", "bob", "alice@corp.example.com")
REASONS = ("RMA 4711, keep out", "vendor on site, hands off", "action:replace", "Action: fan")
LIKE_SLURMS = (
    "Low voltage on PSU 2, do not touch",
    "gres/gpu check by ops",
    "Not responding to the fan test, mine",
    "Node unexpectedly rebooted twice, I look at it",
)
"""Reasons of people that begin like those that Slurm writes itself."""


class FaultyWorld(Protocol):
    """A simulated cluster, as its faults see it."""

    schedule: Schedule
    clock: SimClock
    slurm: SimSlurm
    endpoint: WireEnd
    machines: dict[str, SimMachine]
    host: SimHost
    database: SimDatabase
    rules: ClusterRules
    slow_until: float
    reservations: SimReservations

    def resume_spares(self) -> None:
        """Let sresctld go on with the spares that people have changed."""
        ...

    def stir(self) -> None:
        """Take in that sresctld may have work now, or soon."""
        ...

    def in_hand(self) -> list[str]:
        """Nodes that sresctld has an open incident of."""
        ...

    def kill_after(self, boundaries: int) -> None:
        """Kill sresctld when it comes to one of the next boundaries."""
        ...

    def stop_after(self, boundaries: int) -> None:
        """Send sresctld SIGTERM when it comes to one of the next boundaries."""
        ...

    def start_second(self, seconds: float) -> None:
        """Start a second sresctld on the same state directory, which ends after so long."""
        ...

    def say_pause(self, reason: str) -> None:
        """Pause sresctld, or let it go on."""
        ...


def strike(world: FaultyWorld, fault: PlannedFault) -> None:
    """Have a fault happen."""
    FAULTS[fault.kind](world, Random(fault.seed))


def _any(world: FaultyWorld, random: Random, share_in_hand: float = 0.3) -> SimMachine:
    """Pick a node; the given share of times one that sresctld has in hand, if there is one."""
    names = sorted(world.machines)
    in_hand = sorted(set(world.in_hand()) & set(names))
    pick, chance = random.choice(names), random.random()
    if in_hand and chance < share_in_hand:
        pick = in_hand[int(random.random() * len(in_hand))]
    return world.machines[pick]


def _several(world: FaultyWorld, random: Random) -> list[SimMachine]:
    names = sorted(world.machines)
    count = max(3, int(len(names) * random.uniform(0.3, 1.0)))
    return [world.machines[name] for name in random.sample(names, min(count, len(names)))]


def _cut(paths: frozenset[Path], low: float, high: float) -> Callable[[FaultyWorld, Random], None]:
    def strike_one(world: FaultyWorld, random: Random) -> None:
        _cut_one(world, _any(world, random), paths, random.uniform(low, high))

    return strike_one


def _cut_one(
    world: FaultyWorld, machine: SimMachine, paths: frozenset[Path], seconds: float
) -> None:
    machine.cut_off(paths, seconds)
    world.stir()
    world.schedule.after(seconds, world.rules.path_mended, machine.name)


def _storm_of_blips(world: FaultyWorld, random: Random) -> None:
    spread = random.choice((0.1, 3.0, 15.0))
    for machine in _several(world, random):
        seconds = random.uniform(2.0, 60.0)
        world.schedule.after(random.random() * spread, _cut_one, world, machine, ALL_PATHS, seconds)


def _storm_of_deaths(world: FaultyWorld, random: Random) -> None:
    spread = random.choice((0.1, 3.0, 15.0))
    for machine in _several(world, random):
        world.schedule.after(random.random() * spread, machine.power_off)
        # The power is back some time later, for those that were not replaced.
        _power_returns(world, random, machine)


def _power_returns(world: FaultyWorld, random: Random, machine: SimMachine) -> None:
    if random.random() < 0.5:
        serial, seconds = machine.serial, random.uniform(60.0, 600.0)

        def power_on() -> None:
            if machine.serial == serial and not machine.lives:
                machine.boot(10.0)

        world.schedule.after(seconds, power_on)


def _storm_of_faults(world: FaultyWorld, random: Random) -> None:
    for machine in _several(world, random):
        severity = random.choice((Severity.REBOOT, Severity.REPLACE))
        world.schedule.after(random.random() * 5.0, machine.break_down, severity)


def _power(world: FaultyWorld, random: Random) -> None:
    machine = _any(world, random)
    machine.power_off()
    _power_returns(world, random, machine)


def _flapping(world: FaultyWorld, random: Random) -> None:
    machine, at = _any(world, random), 0.0
    for _ in range(random.randint(3, 8)):
        seconds = random.uniform(0.5, 12.0)
        world.schedule.after(at, _cut_one, world, machine, ALL_PATHS, seconds)
        at += seconds + random.uniform(1.0, 30.0)


def _sick(severity: Severity) -> Callable[[FaultyWorld, Random], None]:
    def strike_one(world: FaultyWorld, random: Random) -> None:
        _any(world, random, 0.1).break_down(severity)

    return strike_one


def _lemon(world: FaultyWorld, random: Random) -> None:
    machine, at = _any(world, random, 0.1), 0.0
    machine.is_lemon = True
    for _ in range(random.randint(3, 7)):
        severity = random.choice((Severity.REBOOT, Severity.REPLACE))
        world.schedule.after(at, machine.break_down, severity)
        at += random.uniform(60.0, 300.0)


def _agent_stops(world: FaultyWorld, random: Random) -> None:
    machine = _any(world, random)
    machine.agent.stop()
    boot_id = machine.boot_id

    def start() -> None:
        if machine.lives and machine.boot_id == boot_id:
            machine.agent.start(0.1)

    world.schedule.after(random.uniform(1.0, 60.0), start)


def _agent_dies(world: FaultyWorld, random: Random) -> None:
    machine = _any(world, random)
    if machine.lives:
        machine.agent.crash(random.uniform(0.2, 10.0))


def _program(*manners: Manner) -> Callable[[FaultyWorld, Random], None]:
    def strike_one(world: FaultyWorld, random: Random) -> None:
        world.host.manners = [*manners]
        world.schedule.after(random.uniform(60.0, 400.0), _behave, world)
        machine = _any(world, random)
        if Manner.SICK_AGAIN in manners:
            machine.break_down(Severity.REPLACE)
        else:
            machine.power_off()

    return strike_one


def _behave(world: FaultyWorld) -> None:
    world.host.manners = [Manner.GOOD]


def _kill(world: FaultyWorld, random: Random) -> None:
    world.kill_after(random.randint(1, 30))


def _stop(world: FaultyWorld, random: Random) -> None:
    world.stop_after(random.randint(1, 20))


def _second_daemon(world: FaultyWorld, random: Random) -> None:
    """Start it once or twice: by hand beside the service, or by a cluster manager."""
    for _ in range(random.randint(1, 3)):
        seconds = random.uniform(1.0, 20.0)
        world.schedule.after(random.random() * 60.0, world.start_second, seconds)


def _clock_step(world: FaultyWorld, random: Random) -> None:
    """Set the date: by the seconds of a drift, or by a slip of a year, which may be put right."""
    size = random.choice((0.5, 1.0, 2.0, 30.0, 3600.0, YEAR_SECONDS)) * random.choice((1, -1))
    world.clock.step += size
    if abs(size) == YEAR_SECONDS and random.random() < 0.7:

        def put_right() -> None:
            world.clock.step -= size

        world.schedule.after(random.uniform(5.0, 900.0), put_right)


def _slurm_away(world: FaultyWorld, random: Random) -> None:
    world.slurm.away = True
    world.schedule.after(random.uniform(2.0, 120.0), _slurm_answers, world)


def _slurm_answers(world: FaultyWorld) -> None:
    world.slurm.away = False


def _slurm_slow(world: FaultyWorld, random: Random) -> None:
    world.slow_until = world.schedule.now + random.uniform(20.0, 120.0)


def _slurm_restart(world: FaultyWorld, random: Random) -> None:
    """Restart it: nodes show no answer until they have registered again."""
    slurm = world.slurm
    slurm.away = True

    def up() -> None:
        slurm.away = False
        for name, machine in world.machines.items():
            node = slurm.entries[name]
            slurm.put(msgspec.structs.replace(node, flags=node.flags | {"NOT_RESPONDING"}))
            world.schedule.after(random.uniform(0.5, 8.0), register, machine)

    def register(machine: SimMachine) -> None:
        if machine.reaches(Path.SLURM):
            slurm.register(machine.name, rebooted=False)

    world.schedule.after(random.uniform(1.0, 10.0), up)


def _unlisted(world: FaultyWorld, random: Random) -> None:
    machine = _any(world, random)
    world.slurm.hidden.add(machine.name)
    world.schedule.after(random.choice((2.5, 10.0)), world.slurm.hidden.discard, machine.name)
    if random.random() < 0.5:
        # What dies after it was forgotten must be noticed.
        world.schedule.after(random.uniform(20.0, 200.0), machine.power_off)


def _reason_unclear(world: FaultyWorld, random: Random) -> None:
    seconds = random.uniform(5.0, 60.0)
    for name in sorted(world.machines):
        if world.slurm.entries[name].reason:
            _blur(world, name, seconds)


def _person_writes_lines(world: FaultyWorld, random: Random) -> None:
    name, state = _any(world, random, 0.5).name, random.choice(("drain", "fail"))
    reason = random.choice((REPLACE, REBOOT, "Not responding"))
    world.slurm.set_by(random.choice(PERSONS), [name], state=state, reason=reason)
    _blur(world, name, random.uniform(5.0, 120.0))


def _blur(world: FaultyWorld, name: str, seconds: float) -> None:
    """Let a reason be unclear for a time: it may be a person's."""
    node, unclear = world.slurm.entries[name], world.rules.people.unclear
    unclear.begin(name, world.schedule.now)
    world.slurm.put(msgspec.structs.replace(node, reason_unclear=True))

    def clear() -> None:
        now = world.slurm.entries[name]
        unclear.end(name, world.schedule.now)
        world.slurm.put(msgspec.structs.replace(now, reason_unclear=False))

    world.schedule.after(seconds, clear)


def _disk_journal(world: FaultyWorld, random: Random) -> None:
    world.database.full = True

    def free() -> None:
        world.database.full = False

    world.schedule.after(random.uniform(1.0, 60.0), free)


def _disk_runs(world: FaultyWorld, random: Random) -> None:
    world.host.full = True

    def free() -> None:
        world.host.full = False

    world.schedule.after(random.uniform(5.0, 90.0), free)


def _runs_removed(world: FaultyWorld, random: Random) -> None:
    """Remove the directories while a program runs, should one do so in the next minutes."""
    until, delay = world.schedule.now + REMOVAL_SECONDS, random.uniform(0.1, 5.0)

    def look() -> None:
        if world.host.is_busy:
            world.schedule.after(delay, world.host.remove_runs)
        elif world.schedule.now < until:
            world.schedule.after(1.0, look)

    look()


def _person_drains(world: FaultyWorld, random: Random) -> None:
    _drain(world, random, random.choice(REASONS))


def _person_writes_like_slurm(world: FaultyWorld, random: Random) -> None:
    reason = random.choice(LIKE_SLURMS)
    if random.random() < 0.5:
        _drain(world, random, reason)
    else:
        _reword(world, random, reason)


def _drain(world: FaultyWorld, random: Random, reason: str) -> None:
    name = _any(world, random, 0.7).name
    state = random.choice(("drain", "drain", "fail", "down"))
    if state == "down" and world.slurm.jobs_on(name):
        state = "drain"
    world.slurm.set_by(random.choice(PERSONS), [name], state=state, reason=reason)


def _person_puts_back(world: FaultyWorld, random: Random) -> None:
    name, reason = _any(world, random, 0.7).name, random.choice(REASONS)
    author = random.choice(PERSONS)
    world.slurm.set_by(author, [name], state="drain", reason=reason)
    world.schedule.after(random.uniform(20.0, 300.0), _put_back, world, name, author, reason)


def _put_back(world: FaultyWorld, name: str, author: str, reason: str) -> None:
    """Have a person resume what the person took."""
    node = world.slurm.entries[name]
    if node.reason == reason and (node.is_down or node.is_drain or node.is_fail):
        world.slurm.set_by(author, [name], state="resume")


def _person_resumes(world: FaultyWorld, random: Random) -> None:
    name = _any(world, random, 0.9).name
    node = world.slurm.entries[name]
    if node.is_down or node.is_drain or node.is_fail:
        world.slurm.set_by(random.choice(PERSONS), [name], state="resume")


def _person_rewords(world: FaultyWorld, random: Random) -> None:
    _reword(world, random, random.choice(REASONS))


def _reword(world: FaultyWorld, random: Random, reason: str) -> None:
    name = _any(world, random, 0.9).name
    world.slurm.set_by(random.choice(PERSONS), [name], reason=reason)


def _person_asks(world: FaultyWorld, random: Random) -> None:
    name, action = _any(world, random, 0.4).name, random.choice((REPLACE, REBOOT))
    world.slurm.set_by(random.choice(PERSONS), [name], state="fail", reason=action)


def _person_reserves(world: FaultyWorld, random: Random) -> None:
    name = _any(world, random, 0.4).name
    node = world.slurm.entries[name]
    world.slurm.put(msgspec.structs.replace(node, flags=node.flags | {"MAINTENANCE"}))
    world.rules.people.reserved[name] = world.schedule.now
    world.schedule.after(random.uniform(60.0, 300.0), _end_reservation, world, name)


def _end_reservation(world: FaultyWorld, name: str) -> None:
    world.rules.people.reserved.pop(name, None)
    node = world.slurm.entries[name]
    world.slurm.put(msgspec.structs.replace(node, flags=node.flags - {"MAINTENANCE"}))


def _person_reboots(world: FaultyWorld, random: Random) -> None:
    machine, rebooting = _any(world, random), world.rules.people.rebooting
    seconds = random.uniform(20.0, 240.0)
    rebooting[machine.name] = world.schedule.now

    def is_up() -> None:
        rebooting.pop(machine.name, None)

    world.schedule.after(seconds + 5.0, is_up)
    machine.boot(seconds)


def _scontrol_reboot(world: FaultyWorld, random: Random) -> None:
    """Run it on any node, or, most of the time, wait for one that sresctld gets in hand."""
    asap = random.random() < 0.5
    then = random.choice(("", "", "RESUME", "DOWN"))
    reason = random.choice(REASONS) if random.random() < 0.2 else ""
    author = random.choice(PERSONS)
    until = world.schedule.now + random.choice((0.0, HAND_SECONDS))

    def order() -> None:
        if not world.in_hand() and world.schedule.now < until:
            world.schedule.after(LOOK_OF_HAND_SECONDS, order)
            return
        name = _any(world, random, 0.8).name
        world.slurm.reboot_by(author, name, asap=asap, then=then, reason=reason)

    order()


def _user_lies(world: FaultyWorld, random: Random) -> None:
    SimLiar(world, random).begin(random.randint(5, 25))


def _own_pool(world: FaultyWorld, random: Random) -> str:
    """Pick a reservation of spares; empty: there is none."""
    own = [name for name in world.reservations.shown if name.startswith("sres-")]
    return random.choice(own) if own else ""


def _spares_edited(world: FaultyWorld, random: Random) -> None:
    name = _own_pool(world, random)
    if name:
        had = world.reservations.shown[name].nodes
        idle = [n for n in world.slurm.idle() if n not in had]
        more = random.sample(idle, min(len(idle), random.choice((0, 1, 2))))
        kept = random.sample(had, random.randint(0, len(had)))
        nodes = [*kept, *more]
        if nodes and set(nodes) != set(had):
            world.reservations.set_by("alice", name, nodes)
            _resumed_later(world, random)


def _spares_lent(world: FaultyWorld, random: Random) -> None:
    name = _own_pool(world, random)
    if name:
        one = world.reservations.shown[name]
        world.reservations.set_by("alice", name, one.nodes, f"StartTime={one.starts_at} Users=bob")
        _resumed_later(world, random)


def _spares_deleted(world: FaultyWorld, random: Random) -> None:
    """Delete it by hand; or by a script, which looks a few times a second and knows it not."""
    name = _own_pool(world, random)
    if name:
        world.reservations.delete_by("alice", name)
        _resumed_later(world, random)
        if random.random() < SCRIPTS_SHARE:
            _delete_anew(world, random, world.schedule.now + SCRIPT_SECONDS)


def _delete_anew(world: FaultyWorld, random: Random, until: float) -> None:
    """Delete the next reservation that sresctld makes, as soon as it is there."""
    name = _own_pool(world, random)
    if name:
        world.reservations.delete_by("alice", name)
        _resumed_later(world, random)
    elif world.schedule.now < until:
        world.schedule.after(LOOK_OF_SCRIPT_SECONDS, _delete_anew, world, random, until)


def _resumed_later(world: FaultyWorld, random: Random) -> None:
    world.schedule.after(random.uniform(20.0, 400.0), world.resume_spares)


def _spares_refused(world: FaultyWorld, random: Random) -> None:
    world.reservations.refuses = True

    def over() -> None:
        world.reservations.refuses = False

    world.schedule.after(random.uniform(5.0, 200.0), over)


def _spares_unanswered(world: FaultyWorld, random: Random) -> None:
    world.reservations.answers_get_lost = True

    def over() -> None:
        world.reservations.answers_get_lost = False

    world.schedule.after(random.uniform(5.0, 100.0), over)
    machine = _any(world, random)
    machine.break_down(Severity.REBOOT)


def _spares_queue(world: FaultyWorld, random: Random) -> None:
    for _ in range(2 * len(world.machines)):
        world.slurm.submit(1, uid=2000, requeue=False, seconds=random.uniform(30.0, 300.0))
    busy = [name for name in sorted(world.machines) if world.slurm.jobs_on(name)]
    if busy:
        machine = world.machines[random.choice(busy)]
        world.schedule.after(random.uniform(1.0, 40.0), machine.power_off)
        _power_returns(world, random, machine)


def _spares_reserved(world: FaultyWorld, random: Random) -> None:
    idle = world.slurm.idle()
    if idle:
        name = f"course-{world.schedule.now:.0f}"
        nodes = random.sample(idle, random.randint(1, len(idle)))
        world.reservations.set_by("alice", name, nodes, "Users=bob")
        seconds = random.uniform(60.0, 300.0)
        world.schedule.after(seconds, world.reservations.delete_by, "alice", name)


def _person_pauses(world: FaultyWorld, random: Random) -> None:
    world.say_pause("a switch is exchanged")
    world.schedule.after(random.uniform(10.0, 120.0), world.say_pause, "")


FAULTS: Mapping[FaultKind, Callable[[FaultyWorld, Random], None]] = {
    FaultKind.BLIP: _cut(ALL_PATHS, 0.5, 3.4),
    FaultKind.LONG_BLIP: _cut(ALL_PATHS, 3.5, 60.0),
    FaultKind.NO_BEATS: _cut(frozenset({Path.BEATS}), 1.0, 400.0),
    FaultKind.NO_PROBES: _cut(frozenset({Path.PROBES}), 1.0, 90.0),
    FaultKind.NO_SLURM: _cut(frozenset({Path.SLURM}), 5.0, 500.0),
    FaultKind.BEATS_AND_PROBES: _cut(frozenset({Path.BEATS, Path.PROBES}), 2.0, 600.0),
    FaultKind.STORM_OF_BLIPS: _storm_of_blips,
    FaultKind.STORM_OF_DEATHS: _storm_of_deaths,
    FaultKind.STORM_OF_FAULTS: _storm_of_faults,
    FaultKind.POWER: _power,
    FaultKind.FLAPPING: _flapping,
    FaultKind.SICK_REBOOT: _sick(Severity.REBOOT),
    FaultKind.SICK_REPLACE: _sick(Severity.REPLACE),
    FaultKind.SICK_RESET: _sick(Severity.RESET),
    FaultKind.LEMON: _lemon,
    FaultKind.AGENT_STOPS: _agent_stops,
    FaultKind.AGENT_DIES: _agent_dies,
    FaultKind.PROGRAM_FAILS: _program(Manner.FAILS, Manner.FAILS, Manner.GOOD),
    FaultKind.PROGRAM_HANGS: _program(Manner.HANGS),
    FaultKind.PROGRAM_LIES: _program(Manner.LIES),
    FaultKind.PROGRAM_HALF_DONE: _program(Manner.HALF_DONE, Manner.GOOD),
    FaultKind.PROGRAM_LOSES_NODE: _program(Manner.LOSES_NODE),
    FaultKind.PROGRAM_SLOW: _program(Manner.SLOW),
    FaultKind.PROGRAM_SICK: _program(Manner.SICK_AGAIN),
    FaultKind.KILL: _kill,
    FaultKind.STOP: _stop,
    FaultKind.SECOND_DAEMON: _second_daemon,
    FaultKind.CLOCK_STEP: _clock_step,
    FaultKind.SLURM_AWAY: _slurm_away,
    FaultKind.SLURM_SLOW: _slurm_slow,
    FaultKind.SLURM_RESTART: _slurm_restart,
    FaultKind.UNLISTED: _unlisted,
    FaultKind.REASON_UNCLEAR: _reason_unclear,
    FaultKind.PERSON_WRITES_LINES: _person_writes_lines,
    FaultKind.DISK_JOURNAL: _disk_journal,
    FaultKind.DISK_RUNS: _disk_runs,
    FaultKind.RUNS_REMOVED: _runs_removed,
    FaultKind.PERSON_DRAINS: _person_drains,
    FaultKind.PERSON_PUTS_BACK: _person_puts_back,
    FaultKind.PERSON_RESUMES: _person_resumes,
    FaultKind.PERSON_REWORDS: _person_rewords,
    FaultKind.PERSON_WRITES_LIKE_SLURM: _person_writes_like_slurm,
    FaultKind.PERSON_ASKS: _person_asks,
    FaultKind.PERSON_RESERVES: _person_reserves,
    FaultKind.PERSON_REBOOTS: _person_reboots,
    FaultKind.SCONTROL_REBOOT: _scontrol_reboot,
    FaultKind.USER_LIES: _user_lies,
    FaultKind.SPARES_EDITED: _spares_edited,
    FaultKind.SPARES_LENT: _spares_lent,
    FaultKind.SPARES_DELETED: _spares_deleted,
    FaultKind.SPARES_REFUSED: _spares_refused,
    FaultKind.SPARES_UNANSWERED: _spares_unanswered,
    FaultKind.SPARES_QUEUE: _spares_queue,
    FaultKind.SPARES_RESERVED: _spares_reserved,
    FaultKind.PERSON_PAUSES: _person_pauses,
}
