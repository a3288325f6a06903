"""Simulated trainings of 3 to 64 processes under faults of every kind; each a function of its seed.

`simulate` runs one and raises `InvariantBroken`, or returns what happened.
"""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import msgspec

from slurm_resilience.mesh.events import MessageReceived
from slurm_resilience.mesh.messages import NodeLost, NodeSuspected
from slurm_resilience.mesh.model import Peer, Timing, View
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import SharedDirectory
from slurm_resilience.simulate.cluster.sim_clock import SimClock
from slurm_resilience.simulate.elastic_loans import Loans
from slurm_resilience.simulate.invariants import InvariantBroken, Lineage, TrainingEnd
from slurm_resilience.simulate.mesh_faults import CUTS, Excuses, FaultPlan
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.simulate.sim_network import SimNetwork
from slurm_resilience.simulate.sim_process import LARGE_WORLD_TIMING, TIMING, SimProcess
from slurm_resilience.simulate.sim_process_parts import ProcessState
from slurm_resilience.simulate.sim_speaker_files import SimSpeakerFiles, SpeakerBook

SMALL, LARGE = (3, 8), (9, 64)
LARGE_SHARE = 0.003
"""Share of runs; their cost grows with the square of their size."""
CALM_SECONDS = 40.0
"""A world of all seats must step again within this time. Longest known: three times the abort
timeout (the last copy of a part), two worlds that fail for a peer out of reach, and a join."""
ENDLESS_STEPS = 1 << 30
SILENT, IN_ITS_BLOCK = "silent ", "it did not leave its block"
"""Begins the reason for which one is given up that says nothing."""
UNHURRIED_SHARE = 0.25
"""Share of runs in which a process looks around no more often than in a large world. Drawn apart
from all else, so that the other runs stay the same as before."""

RESEND_SHARE = 0.05
"""Share of runs in which a cut that is over still holds for a while what was said over connections
that it has not ended. Drawn apart, too."""


class SimulatedRun(msgspec.Struct, frozen=True):
    """The course of one run."""

    seed: int
    processes: int
    """Seats of the training."""
    worlds: int
    """Worlds that stepped."""
    steps: int
    faults: tuple[str, ...]
    events: int
    seconds: float
    """Simulated time."""


def choose_size(random: Random) -> int:
    """Few members mostly; up to 64 now and then."""
    low, high = LARGE if random.random() < LARGE_SHARE else SMALL
    return min(random.randint(low, high), random.randint(low, high))


def choose_rules(random: Random, seats: int) -> WorldRules:
    """When a world may be formed."""
    replica_size = random.choice([1, 1, 1, 2, 4])
    if seats % replica_size:
        replica_size = 1
    least = random.choice([1, 1, seats // 2 + 1, seats - 1, seats])
    return WorldRules(
        seats=seats,
        min_world=max(least, replica_size),
        replica_size=replica_size,
        patience=random.choice([0.0, 0.0, 1.0]),
        # A training without a world that worked must not begin on two sides of a cut: its
        # processes cannot tell those from seats that are empty.
        start_patience=600.0,
    )


def choose_timing(seed: int) -> Timing:
    """Return how often the processes of a run look around."""
    unhurried = Random(f"pace of looks {seed}").random() < UNHURRIED_SHARE
    return LARGE_WORLD_TIMING if unhurried else TIMING


def choose_resends(seed: int) -> Random | None:
    """Return what draws when a run's connections go on after a cut; None: they do so at once."""
    random = Random(f"late after a cut {seed}")
    return random if random.random() < RESEND_SHARE else None


class Nodes:
    """The nodes on which processes run."""

    def __init__(self, seed: int, speakers: bool) -> None:
        self.seed = seed
        self.speakers = speakers
        self.rendezvous: Path | None = None
        """The directory in which processes meet; None: they know each other without one."""
        self._ranks = Random(f"ranks a node {seed}").choice([1, 2, 2, 3, 4, 8]) if speakers else 0
        self.speaker_files = SimSpeakerFiles(seed)
        self._lost: dict[int, int] = {}
        """By node: machines that lost their power."""

    def of(self, seat: int, node: str) -> str:
        """Return the node of a new process.

        Args:
            seat: its seat.
            node: the name of a machine that is its own; empty: the seat's first one.
        """
        if not self._ranks:
            return node or f"n{seat}"
        number = seat // self._ranks
        machine = f"m{number}.{self._lost.get(number, 0)}"
        # One in three is started elsewhere.
        return node if node and zlib.crc32(node.encode()) % 3 == 0 else machine

    def lose(self, process: SimProcess) -> None:
        """Have the next processes of a node's seats on another machine."""
        if self._ranks and process.peer.node == self.of(process.peer.seat, ""):
            number = process.peer.seat // self._ranks
            self._lost[number] = self._lost.get(number, 0) + 1


class MeshRun:
    """One training: its processes, its network, and what goes wrong."""

    def __init__(
        self,
        seed: int,
        trace: list[str] | None = None,
        *,
        speakers: bool = False,
        elastic: bool = False,
    ) -> None:
        self.random = Random(seed)
        self.schedule = Schedule()
        self.network = SimNetwork(self.schedule, self.random)
        self.network.resends = choose_resends(seed)
        self.seats = choose_size(self.random)
        self.rules = choose_rules(self.random, self.seats)
        self._loans = Loans(self, self.rules, seed) if elastic else None
        """The ranks that come and go; None: it keeps its size."""
        if self._loans is not None:
            self.rules = self._loans.rules
        self.processes: dict[str, SimProcess] = {}
        """All that ever took part, by id."""
        self.excuses = Excuses(self.schedule)
        self.lineage = Lineage(self._lives)
        self._nodes = Nodes(seed, speakers)
        if speakers:
            self.network.place = lambda name: self.processes[name].peer.node
        self._trace = trace
        self._waiting: dict[tuple[int, int], set[str]] = {}
        """Per world and turn: those that have come to the collective."""
        self.end = TrainingEnd(self.random.choice([ENDLESS_STEPS, ENDLESS_STEPS, 20]))
        self._plan = FaultPlan(self, seed, calm=self._loans is not None and self._loans.is_calm)
        self._full_at = -1.0
        """When a world of all seats last stepped."""

    def run(self) -> SimulatedRun:
        """Let it happen; see `_run`."""
        if not self._plan.removes_directory:
            return self._run()
        with TemporaryDirectory(prefix="sres-simulated-") as place:
            self._nodes.rendezvous = Path(place) / "mesh"
            return self._run()

    def directory(self) -> SharedDirectory | None:
        """Return the directory in which processes meet; None: it is always there and known."""
        if self._nodes.rendezvous is None:
            return None
        return SharedDirectory(self._nodes.rendezvous, clock=SimClock(self.schedule))

    def remove_directory(self) -> None:
        """Remove the directory in which processes meet."""
        if self._nodes.rendezvous is not None:
            shutil.rmtree(self._nodes.rendezvous, ignore_errors=True)

    def _run(self) -> SimulatedRun:
        """Let it happen.

        Raises:
            InvariantBroken: something that must never happen.
        """
        for seat in range(self.rules.awaited):
            self.schedule.after(self.random.random() ** 3, self.spawn, seat, 0)
        if self._loans is not None:
            self._loans.begin()
        self._plan.begin()
        self.schedule.run(self._plan.until)
        if self._loans is not None:
            self._loans.end()
        self._plan.end()
        calm = self.schedule.now
        if not self.schedule.run(calm + CALM_SECONDS, lambda: self._is_whole(calm)):
            what = "not all have ended" if self.end.begun else "no world of all seats"
            raise InvariantBroken(f"{what} within {CALM_SECONDS:g} s: {self._why()}")
        return SimulatedRun(
            seed=self._nodes.seed,
            processes=self.seats,
            worlds=self.lineage.worlds,
            steps=self.lineage.steps,
            faults=tuple(self._plan.done),
            events=self.schedule.count,
            seconds=round(self.schedule.now, 3),
        )

    @property
    def speakers(self) -> bool:
        """Tell whether nodes have several ranks, of which one speaks for the others."""
        return self._nodes.speakers

    @property
    def keeps_state(self) -> bool:
        """Tell whether it is followed what each process holds of the model."""
        return self._loans is not None

    def slept(self, process: SimProcess) -> bool:
        """Tell whether nothing was wrong with a process but that it stood still for a moment."""
        return process.id in self.excuses.slept and not CUTS & set(self._plan.done)

    def may_go_on(self, process: SimProcess) -> bool:
        """Tell whether a process may step again: neither was it told to leave, nor does it stand
        still for good, nor has another one its seat."""
        stays = not process.membership.side.standing.evicted
        is_frozen = process.id in self.excuses.frozen
        return stays and not is_frozen and self.newest(process.peer.seat) is process

    def _is_in_vain(self, reason: str, process: SimProcess) -> bool:
        """Tell whether a process is given up for what would have passed by itself: the others have
        no excuse where that loses the last copy of a part."""
        if reason.startswith(IN_ITS_BLOCK):
            return process.id in self.excuses.held and not CUTS & set(self._plan.done)
        return reason.startswith(SILENT) and self.slept(process)

    def _is_whole(self, calm: float) -> bool:
        if self.end.begun:
            return not self.living()
        # With the directory, newcomers of an elastic job cannot know of lent ranks that train.
        waits_long = self._plan.empty or (self.rules.core and self._plan.removes_directory)
        if waits_long and all(process.program.step < 0 for process in self.living()):
            return True  # the state is lost: as at a start, all seats are waited for, and longer
        return self._full_at > calm

    def _most(self) -> int:
        """Return the ranks of the largest world that can be."""
        taken = self.seats - len(self._plan.empty)
        return taken - taken % self.rules.replica_size

    def _lives(self, view: View) -> bool:
        """Tell whether a world may still step: one of its processes runs, not told to leave.
        What only such a process still holds is lost with it."""
        members = (self.processes[member.peer.id] for member in view.members)
        return any(
            process.state is ProcessState.RUNNING and not process.membership.side.standing.evicted
            for process in members
        )

    def _why(self) -> str:
        living = [process for process in self.processes.values() if process.alive]
        sides = [process.membership.side for process in living[:6]]
        return "; ".join(
            f"{side.me.id} {side.status.phase} in {side.generation.stage.value}"
            + (f", waits: {side.waiting.reason}" if side.waiting.reason else "")
            for side in sides
        )

    # -- processes ----------------------------------------------------------------------------

    def spawn(self, seat: int, incarnation: int, node: str = "") -> None:
        """Start a process on a seat."""
        name = f"{seat:02d}.{incarnation}"
        if name in self.processes or (self._loans is not None and not self._loans.has(seat)):
            return
        where = self._nodes.of(seat, node)
        peer = Peer(name, seat, incarnation, where, "", "h", seat + 1, seats=self.seats)
        timing = choose_timing(self._nodes.seed)
        last_step = self.end.last_step
        process = SimProcess(peer, self.rules, self, last_step, timing, self.speakers)
        if self._loans is not None or self._plan.leaves_empty:
            process.program.step = -1
        self.processes[name] = process
        self._plan.spawned(process)
        self.note(process, "starts")
        process.start()

    def living(self) -> list[SimProcess]:
        """All processes that run or are stopped."""
        return [process for process in self.processes.values() if process.alive]

    def newest(self, seat: int) -> SimProcess:
        """Return the process that took a seat last."""
        taken = [process for process in self.processes.values() if process.peer.seat == seat]
        return max(taken, key=lambda process: process.peer.incarnation)

    def kill(self, process: SimProcess, power: bool = False, replace: bool = True) -> None:
        """End a process; its launcher starts another one, unless there is one."""
        if not process.alive:
            return
        self.note(process, "loses its machine" if power else "dies")
        if self._loans is not None:
            told = process.membership.side.standing.evicted
            if not self._is_in_vain(told, process):
                self._loans.lose(process, is_seen=not power and self.network.whole)
        process.die(power)
        if power and self.speakers:
            self._nodes.lose(process)
            for other in self.living():
                if other.peer.node == process.peer.node:
                    self.kill(other, power=True)
        self.excuses.add(process.id, 0.0)
        if replace:
            self._plan.died(process, power)

    def keep_loans(self, seconds: float) -> None:
        """Have Slurm take no lent node back for so long."""
        if self._loans is not None:
            self._loans.keep(seconds)

    def find(self, node: str, dead: bool) -> None:
        """Tell all processes, as an observer does, that a node is lost."""
        finding = NodeLost(node, "it is broken", dead)
        for process in self.living():
            if process.peer.node == node:
                self.excuses.add(process.id, 5.0)
                self._nodes.lose(process)
            event = MessageReceived(0, "observer", "observer", finding)
            self.schedule.after(self.network.delay(), process.tell, event)

    def suspect(self, node: str) -> None:
        """Tell all processes, as an observer does, that a node is not heard of."""
        for process in self.living():
            event = MessageReceived(0, "observer", "observer", NodeSuspected(node, "no beat"))
            self.schedule.after(self.network.delay(), process.tell, event)

    # -- what processes ask -------------------------------------------------------------------

    def known_peers(self) -> list[Peer]:
        """All that are in the rendezvous; some may be dead."""
        return [process.peer for process in self.processes.values()]

    def speaker_files(self) -> SpeakerBook:
        """Return which rank speaks for each node, as it is written down."""
        return self._nodes.speaker_files

    def holders(self, me: Peer) -> tuple[Peer, ...] | None:
        """Others on lent nodes that had the state and have not left, as the rendezvous tells: those
        that were killed are among them."""
        return tuple(
            process.peer
            for process in self.processes.values()
            if process.own_rendezvous.is_listed
            and process.peer.seat >= self.rules.awaited
            and process.peer != me
        )

    def process(self, peer_id: str) -> SimProcess | None:
        """Return a process by its id."""
        return self.processes.get(peer_id)

    def outcome(self) -> int | None:
        """Return how the training ended."""
        return 0 if self.end.written else None

    def ended(self, process: SimProcess, code: int) -> None:
        """Note that a process has ended by itself."""
        if not process.alive:
            return
        if code == 0:
            self.note(process, "ends as done")
            process.own_rendezvous.is_listed = False
            process.die()
            self.end.leave(process)
        else:
            self.kill(process)

    def departed(self, process: SimProcess) -> None:
        """Note that a process has left as it was asked to."""
        if process.alive:
            self.note(process, "has left")
            process.own_rendezvous.is_listed = False
            if self._loans is not None and not self.end.begun:
                self._loans.check.leave(process)
            process.die()

    def gave_up(self, process: SimProcess, peer: Peer, reason: str) -> None:
        """Check that a process which goes on without a peer has a reason."""
        self.note(process, f"gives {peer.id} up: {reason}")
        other = self.processes[peer.id]
        if self._loans is not None and not self._is_in_vain(reason, other):
            self._loans.lose(other, is_seen=self.network.whole)
        self._plan.given_up(other)
        newer = self.newest(peer.seat) is not other
        if other.alive and not newer and not self.excuses.has(peer.id):
            raise InvariantBroken(
                f"{peer.id} lives and answers, and {process.id} gave it up: {reason}"
            )

    def note(self, process: SimProcess, text: str) -> None:
        """For the trace."""
        if self._trace is not None:
            self._trace.append(f"{self.schedule.now:8.3f} {process.id} {text}")

    # -- collectives --------------------------------------------------------------------------

    def arrive(self, process: SimProcess, turn: int) -> None:
        """Let a process wait for the others of its world; the last one completes the collective."""
        view = process.program.inside
        assert view is not None
        here = self._waiting.setdefault((view.generation, turn), set())
        here.add(process.id)
        if len(here) < view.size or here != {m.peer.id for m in view.members}:
            return
        del self._waiting[view.generation, turn]
        self._complete(view, turn)

    def _complete(self, view: View, turn: int) -> None:
        members = [self.processes[member.peer.id] for member in view.members]
        network = self.network
        insides = [process.program.inside for process in members if process.alive]
        if any(inside is None or inside.generation != view.generation for inside in insides):
            return  # its collective hangs until the world ends
        if len(insides) < view.size:
            return
        if any(network.blocked(members[0].id, other.id) for other in members[1:]):
            self.schedule.after(0.1, self._complete, view, turn)
            return
        self.lineage.agree(members, view)
        if self._loans is None:
            step = max(process.program.step for process in members) + (turn > 0)
        else:
            step = self._loans.advance(members, view, turn)
        if turn > 0:
            self.lineage.step(view)
            if view.size == self._most():
                self._full_at = self.schedule.now
        for process in members:
            wait = 0.05 + self.random.random() * 0.1
            self.schedule.after(wait, process.complete, process.program.inside, step)


def elastic_has_speakers(seed: int) -> bool:
    """Tell whether nodes have speakers in an elastic run of this seed: in every other one."""
    return seed % 2 == 1


def simulate(
    seed: int,
    trace: list[str] | None = None,
    *,
    speakers: bool = False,
    elastic: bool = False,
) -> SimulatedRun:
    """Run one training.

    Args:
        seed: decides everything.
        trace: filled with one line for every thing that happened.
        speakers: nodes have several ranks, of which one speaks for the others.
        elastic: some ranks are on lent nodes, and come and go.

    Raises:
        InvariantBroken: something happened that must never happen.
    """
    return MeshRun(seed, trace, speakers=speakers, elastic=elastic).run()
