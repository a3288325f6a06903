"""A simulated process: its membership, and a program that enters and leaves worlds."""

from __future__ import annotations

import contextlib
from collections import Counter
from random import Random
from typing import Any, Protocol

import msgspec

from slurm_resilience.mesh.dial_book import DialBook
from slurm_resilience.mesh.events import (
    Adopt,
    BeatDue,
    Close,
    ConnectionClosed,
    ConnectionProven,
    CutBlock,
    Dial,
    DialKnown,
    Effect,
    EndGeneration,
    Event,
    Evicted,
    Finish,
    GaveUp,
    HoldersListed,
    LocalBeat,
    LocalEnd,
    LocalStatus,
    MessageReceived,
    OutcomeFound,
    PeerAbsent,
    Send,
    WorldWorked,
)
from slurm_resilience.mesh.messages import Heartbeat, Leaving, Message, Roster
from slurm_resilience.mesh.model import (
    CloseCause,
    GenerationEnd,
    Peer,
    PeerStatus,
    Speakers,
    Timing,
    View,
)
from slurm_resilience.mesh.protocol.membership import Membership
from slurm_resilience.mesh.protocol.relay import LinkEffect, Relay, Told
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import SharedDirectory
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.simulate.sim_network import SimConnection, SimNetwork
from slurm_resilience.simulate.sim_process_parts import (
    PROCESS_MOVES,
    OwnRendezvous,
    ProcessState,
    Program,
    SimHello,
    SimWelcome,
)
from slurm_resilience.simulate.sim_speaker_files import SpeakerBook

TIMING = Timing(
    silence_seconds=2.0,
    abort_seconds=2.0,
    reach_seconds=1.5,
    known_again_seconds=1.5,
    # Cutting a simulated block once is enough.
    cut_again_seconds=0.5,
)
LARGE_WORLD_TIMING = msgspec.structs.replace(
    TIMING, look_seconds_a_peer=0.001, looks_freely_peers=2
)
"""A small world that takes its time, as a large one must."""
TELL_SECONDS = 0.05
"""After which a process that has begun to speak has written that down."""
HANDSHAKE_SECONDS = 2.0
ENTER_SECONDS = 0.05
"""In which a main thread enters the world that it was told of, at most."""
HANG_SECONDS = 4.0
"""After which a collective that does not end is taken for hung."""
OUTCOME_SECONDS = 1.0
"""After which one that waits for a world looks whether the training is over."""
LEAVE_SECONDS = 0.2
"""In which it leaves its block when its world has ended, at most."""


class Surroundings(Protocol):
    """The run, as a process sees it."""

    schedule: Schedule
    network: SimNetwork
    random: Random

    def known_peers(self) -> list[Peer]:
        """All that are in the rendezvous."""
        ...

    def directory(self) -> SharedDirectory | None:
        """Return the directory in which processes meet; None: it is always there and known."""
        ...

    def speaker_files(self) -> SpeakerBook:
        """Return which rank speaks for each node, as it is written down."""
        ...

    def holders(self, me: Peer) -> tuple[Peer, ...] | None:
        """Others on lent nodes that had the state and have not left, as the rendezvous tells."""
        ...

    def process(self, peer_id: str) -> SimProcess | None:
        """Return a process by its id."""
        ...

    def outcome(self) -> int | None:
        """Return the exit code in the rendezvous."""
        ...

    def arrive(self, process: SimProcess, turn: int) -> None:
        """Wait in the block for the others' ``turn``-th collective."""
        ...

    def gave_up(self, process: SimProcess, peer: Peer, reason: str) -> None:
        """Note that a process goes on without a peer."""
        ...

    def departed(self, process: SimProcess) -> None:
        """Note that a process has left as it was asked to."""
        ...

    def ended(self, process: SimProcess, code: int) -> None:
        """Note that a process has ended by itself."""
        ...

    def note(self, process: SimProcess, text: str) -> None:
        """For the trace."""
        ...


class SimProcess:
    """One process of the training."""

    def __init__(
        self,
        peer: Peer,
        rules: WorldRules,
        around: Surroundings,
        last_step: int,
        timing: Timing = TIMING,
        speakers: bool = False,
    ) -> None:
        self.id = peer.id
        self.peer = peer
        self.state = ProcessState.RUNNING
        self.dies_at: int | None = None
        """Number of the message that it dies of, before it is handled."""
        self.messages = 0
        self.program = Program(last_step)
        self.connections: dict[int, SimConnection] = {}
        self._around = around
        self.membership = Membership(peer, rules, timing, around.schedule.now)
        side = self.membership.side
        self.relay = (
            Relay(peer, around.schedule.now, side.speaker_patience, side.status_of)
            if speakers
            else None
        )
        self.own_rendezvous = OwnRendezvous(around.directory(), peer, rules, self._take_secret)
        self._names: Counter[str] = Counter()
        self._dials = DialBook()
        self._inbox: list[tuple[Any, ...]] = []
        """Things that arrived while it was stopped."""
        self._ticks = 0
        """Number of the newest wake-up that was asked for; older ones do nothing."""

    @property
    def alive(self) -> bool:
        """Tell whether the process runs, or is stopped."""
        return self.state in (ProcessState.RUNNING, ProcessState.STOPPED)

    @property
    def powered(self) -> bool:
        """Tell whether its machine is up."""
        return self.state is not ProcessState.UNPOWERED

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Look for the others."""
        if self.own_rendezvous.directory is not None and self.own_rendezvous.entry is not None:
            self.own_rendezvous.secrets = (self.own_rendezvous.directory.secret(),)
            self.own_rendezvous.entry.announce()
            self._around.schedule.after(self.own_rendezvous.entry.pause, self._keep_entry, True)
        speakers = self._claim() if self.peer.incarnation == 0 else None
        if self.relay is not None and speakers is not None and speakers.here is not None:
            self._do_on_links(self.relay.begin(speakers, self._around.schedule.now))
        else:
            self._carry(DialKnown())
        self._tell(LocalStatus(PeerStatus(step=self.program.step)))

    def die(self, power: bool = False) -> None:
        """End at once; with ``power``, the machine too."""
        self._move(ProcessState.UNPOWERED if power else ProcessState.DEAD)
        network = self._around.network
        end = network.close if self._around.random.random() < 0.5 else network.abort
        for connection in list(self.connections.values()):
            (network.vanish if power else end)(connection, self)
        self.connections.clear()

    def stop(self) -> None:
        """SIGSTOP: the kernel goes on to take data in."""
        if self.state is ProcessState.RUNNING:
            self._move(ProcessState.STOPPED)

    def resume(self) -> None:
        """SIGCONT."""
        if self.state is not ProcessState.STOPPED:
            return
        self._move(ProcessState.RUNNING)
        inbox, self._inbox = self._inbox, []
        for call, *arguments in inbox:
            if self.alive:
                call(*arguments)
        self._turn()

    def ask_to_leave(self) -> None:
        """SIGTERM, on a node that is lent: leave after this step, or now where none is under
        way."""
        if not self.alive:
            return
        if self.state is ProcessState.STOPPED:
            self._inbox.append((self.ask_to_leave,))
            return
        self.program.signal = "SIGTERM"
        self._around.note(self, "is asked to leave")
        if self.program.inside is None and self._may_leave():
            self._depart()

    def _may_leave(self) -> bool:
        return self.membership.side.may_leave(self._around.schedule.now, self.program.step)

    def _depart(self) -> None:
        self._say_farewell()
        self._around.departed(self)

    def _move(self, state: ProcessState) -> None:
        if state not in PROCESS_MOVES[self.state]:
            raise ValueError(f"{self.id} does not go from {self.state} to {state}")
        self.state = state

    # -- what the network calls ---------------------------------------------------------------

    def receive(self, connection: SimConnection, item: Any) -> None:
        """Something has arrived."""
        if self.state is ProcessState.STOPPED:
            self._inbox.append((self.receive, connection, item))
            return
        side = connection.side(self)
        if not connection.open[side] and connection.number not in self.connections:
            return
        self.messages += 1
        if self.dies_at is not None and self.messages >= self.dies_at:
            self._around.note(self, f"dies of {type(item).__name__}")
            self._around.ended(self, 1)
            return
        if isinstance(item, SimHello):
            if item.secret not in self.own_rendezvous.secrets:
                self._around.note(self, f"refuses {item.peer.id}, which has another secret")
                self._around.network.abort(connection, self)
                entry = self.own_rendezvous.entry
                if entry is not None and entry.look_at_refusal(self._around.schedule.now):
                    self._around.schedule.after(0.0, self._keep_entry)
                return
            self.connections[connection.number] = connection
            self._names[item.peer.id] += 1
            self._send_item(connection, SimWelcome(self.peer, self.membership.side.status))
            seated = (contact.peer for contact in self.membership.side.contacts.seated())
            is_all = self.relay is None
            known = tuple(peer for peer in seated if is_all or peer.node == self.peer.node)
            self._send_item(connection, Roster(known))
            self._prove(connection, item, dialed=False)
        elif isinstance(item, SimWelcome):
            self._prove(connection, item, dialed=True)
        else:
            self._hear(connection, item)

    def _hear(self, connection: SimConnection, message: Message) -> None:
        name = connection.other(self).id
        self._take(MessageReceived(connection.number, name, name, message))
        if not isinstance(message, Heartbeat):
            self._turn()

    def lose(self, connection: SimConnection, cause: CloseCause) -> None:
        """Note that a connection has ended."""
        if not self.alive:
            return
        if self.state is ProcessState.STOPPED:
            self._inbox.append((self.lose, connection, cause))
            return
        if self.connections.pop(connection.number, None) is None:
            return
        other = connection.other(self).id
        self._names[other] -= 1
        if connection.proven[connection.side(self)]:
            self._around.note(self, f"loses its connection to {other}: {cause}")
            self._take(ConnectionClosed(connection.number, f"connection {cause}", cause))
        elif not connection.other(self).alive and connection.other(self).powered:
            self._around.note(self, f"finds no {other}")
            self._take(PeerAbsent(other))
        elif connection.side(self) == 0 and cause != "lost":
            entry = self.own_rendezvous.entry
            if entry is not None and entry.look_at_hang_up(self._around.schedule.now):
                self._around.schedule.after(0.0, self._keep_entry)
        self._turn()

    # -- connections --------------------------------------------------------------------------

    def _dial(self, peer: Peer) -> None:
        other = self._around.process(peer.id)
        if peer.id == self.id or self._names[peer.id] > 0 or other is None:
            return
        network = self._around.network
        connection = network.connect(self, other)
        self.connections[connection.number] = connection
        self._names[peer.id] += 1
        hello = SimHello(self.peer, self.membership.side.status, self.own_rendezvous.secrets[0])
        self._send_item(connection, hello)
        self._around.schedule.after(HANDSHAKE_SECONDS, self._too_slow, connection)

    # -- the directory in which processes meet ------------------------------------------------

    def _keep_entry(self, again: bool = False) -> None:
        """Do what the entry's thread does."""
        if self.own_rendezvous.entry is None or not self.alive:
            return
        if self.state is ProcessState.STOPPED:
            self._inbox.append((self._keep_entry, again))
            return
        self.own_rendezvous.entry.write()
        if again:
            self._around.schedule.after(self.own_rendezvous.entry.pause, self._keep_entry, True)

    @property
    def _speaker_files(self) -> SpeakerBook:
        directory = self.own_rendezvous.directory
        return self._around.speaker_files() if directory is None else directory.speakers

    def _claim(self) -> Speakers | None:
        with contextlib.suppress(OSError):
            if self.relay is not None:
                self._speaker_files.claim(self.peer)
                return self._speaker_files.read(self.peer)
        return None

    def _tell_speaker(self) -> None:
        """Do what the entry's thread does in a process that has begun to speak."""
        if self.state is ProcessState.RUNNING:
            with contextlib.suppress(OSError):
                self._speaker_files.write(self.peer)
            if self.own_rendezvous.entry is not None:
                self.own_rendezvous.entry.speaks()

    def _take_secret(self, secret: bytes) -> None:
        self._around.note(self, "takes another secret beside its own")
        self.own_rendezvous.take_secret(secret)
        self._carry(DialKnown())
        self._turn()

    def _listed(self) -> tuple[list[Peer], tuple[Peer, ...] | None]:
        """Return all that the rendezvous lists, and those of them that have the state."""
        if self.own_rendezvous.directory is None:
            return self._around.known_peers(), self._around.holders(self.peer)
        return self.own_rendezvous.directory.peers(), self.own_rendezvous.directory.holders(
            self.peer
        )

    # -- more of connections ------------------------------------------------------------------

    def _too_slow(self, connection: SimConnection) -> None:
        if self.state is ProcessState.RUNNING and not connection.proven[connection.side(self)]:
            self._close(connection)

    def _prove(self, connection: SimConnection, item: SimHello | SimWelcome, dialed: bool) -> None:
        connection.proven[connection.side(self)] = True
        self._take(ConnectionProven(connection.number, item.peer, item.status, dialed))
        self._turn()

    def _close(self, connection: SimConnection) -> None:
        if self.connections.pop(connection.number, None) is not None:
            self._names[connection.other(self).id] -= 1
            network = self._around.network
            proven = connection.proven[connection.side(self)]
            (network.close if proven else network.abort)(connection, self)

    def _send_item(self, connection: SimConnection, item: Any) -> None:
        self._around.network.send(connection, self, item)

    # -- the membership -----------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Take an event from outside: a finding, or an error of the program."""
        if not self.alive:
            return
        if self.state is ProcessState.STOPPED:
            self._inbox.append((self.tell, event))
            return
        self._tell(event)

    def _tell(self, event: Event) -> None:
        self._step(event)
        self._turn()

    def _take(self, event: Event) -> None:
        """Take an event of a connection in."""
        if self.relay is None:
            self._step(event)
        else:
            self._do_on_links(self.relay.step(event, self._around.schedule.now))

    def _do_on_links(self, effects: list[LinkEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Told):
                self._step(effect.event)
            else:
                self._carry_on_links(effect)

    def _step(self, event: Event) -> None:
        self._do(self.membership.step(event, self._around.schedule.now))

    def _turn(self) -> None:
        if self.state is not ProcessState.RUNNING:
            return
        now = self._around.schedule.now
        for address in self._dials.take_due(now):
            other = self._around.process(address.peer_id)
            if other is not None:
                self._dial(other.peer)
        self._do(self.membership.tick(now))
        if self.relay is not None:
            self._do_on_links(self.relay.tick(now))
            if self.relay.speaks and not self.own_rendezvous.has_told:
                self.own_rendezvous.has_told = True
                self._around.schedule.after(TELL_SECONDS, self._tell_speaker)
        self._invite()
        if not self.alive:
            return
        self._flush()
        self._ticks += 1
        wake_at = self.membership.side.wake_at
        if self.relay is not None:
            wake_at = min(wake_at, self.relay.wake_at)
        self._around.schedule.at(wake_at, self._wake, self._ticks)

    def _flush(self) -> None:
        if self.relay is not None:
            self._do_on_links(self.relay.flush(self._around.schedule.now))

    def _wake(self, number: int) -> None:
        if number != self._ticks or not self.alive:
            return
        if self.state is ProcessState.STOPPED:
            self._inbox.append((self._wake, number))
            return
        self._turn()

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send() | Close() | Finish() | Dial() | DialKnown():
                    self._carry(effect)
                case BeatDue():
                    self._step(LocalBeat(None))
                case CutBlock(end=end):
                    self._cut(end)
                case GaveUp(peer=peer, reason=reason):
                    self._around.gave_up(self, peer, reason)
                case Evicted(reason=reason):
                    self._around.note(self, f"is evicted: {reason}")
                    if self.relay is not None:
                        self._do_on_links(self.relay.retire(self._around.schedule.now))
                    # A process that stays in its block is ended by itself.
                    wait = min(self.program.leave_seconds, TIMING.abort_seconds) + LEAVE_SECONDS
                    self._around.schedule.after(wait, self._around.ended, self, 75)
                case Adopt(view=view):
                    seats = " ".join(member.peer.id for member in view.members)
                    self._around.note(self, f"adopts {view.generation} of {seats}")
                case EndGeneration(end=end):
                    self._around.note(self, f"ends {end.generation} ({end.kind}): {end.reason}")
                    self._around.schedule.after(0.0, self._keep_entry)

    def _carry(self, effect: Send | Close | Finish | Dial | DialKnown) -> None:
        if isinstance(effect, DialKnown):
            peers, holders = self._listed()
            self._step(HoldersListed(holders))
            if self.relay is not None:
                peers = self._find_speakers(self.relay, peers)
            for peer in peers:
                if peer.id != self.id:
                    self._carry(Dial(peer))
        elif self.relay is None:
            self._carry_on_links(effect)
        else:
            self._do_on_links(self.relay.carry(effect, self._around.schedule.now))

    def _find_speakers(self, relay: Relay, peers: list[Peer]) -> list[Peer]:
        """Do what `Mesh` does; the peers that are dialed."""
        now, node = self._around.schedule.now, self.peer.node
        speakers = None
        if relay.looks_beyond:
            with contextlib.suppress(OSError):
                speakers = self._speaker_files.read(self.peer)
        self._do_on_links(relay.look_again(speakers, now))
        peers = [peer for peer in peers if relay.looks_at(peer.node)]
        return [peer for peer in peers if peer.node != node or not relay.is_starting(now)]

    def _carry_on_links(self, effect: Send | Close | Finish | Dial | DialKnown) -> None:
        match effect:
            case DialKnown():
                self._carry(effect)
            case Send(connections=numbers, message=message):
                for number in numbers:
                    if connection := self.connections.get(number):
                        self._send_item(connection, message)
            case Close(connection=number):
                if connection := self.connections.get(number):
                    self._close(connection)
            case Finish(connection=number):
                if connection := self.connections.get(number):
                    self._around.network.finish(connection, self)
            case Dial(peer=peer):
                self._dial(peer)

    # -- the program --------------------------------------------------------------------------

    def _invite(self) -> None:
        program, membership = self.program, self.membership
        if program.inside or program.invited or membership.side.standing.evicted:
            return
        view = membership.side.invitation()
        around = self._around
        if membership.side.standing.finished:
            self._say_farewell()
            around.ended(self, 0)
        elif view is not None:
            program.invited = view
            around.schedule.after(around.random.random() * ENTER_SECONDS, self._enter, view)
        elif around.outcome() == 0 and self._waits():
            self._step(OutcomeFound(0))
            self._say_farewell()
            around.ended(self, 0)

    def _waits(self) -> bool:
        """Tell whether it is long enough outside to look for the training's outcome."""
        outside_since = self.membership.side.outside_since
        return self._around.schedule.now - outside_since >= OUTCOME_SECONDS

    def _say_farewell(self) -> None:
        if self.own_rendezvous.directory is not None:
            self.own_rendezvous.directory.leave(self.peer)
        if self.relay is not None:
            self._carry(Send(self.membership.side.contacts.connections(), Leaving()))
            self._flush()
            return
        for connection in list(self.connections.values()):
            if connection.proven[connection.side(self)]:
                self._send_item(connection, Leaving())

    def _enter(self, view: View) -> None:
        if not self.alive:
            return
        if self.state is ProcessState.STOPPED:
            self._inbox.append((self._enter, view))
            return
        program = self.program
        program.invited, program.inside, program.turn = None, view, 0
        program.leaving = False
        self._around.note(self, f"enters {view.generation}")
        self._say("running", view)
        if program.inside is view and not program.leaving:
            self._come(view)

    def _say(self, phase: Any, view: View) -> None:
        program = self.program
        word = PeerStatus(phase, view.generation, program.step, position=program.position)
        self._tell(LocalStatus(word))

    def _come(self, view: View) -> None:
        """Come to the next collective, and end the world if it takes too long."""
        around, turn = self._around, self.program.turn
        around.schedule.after(HANG_SECONDS, self._hang, view, turn)
        around.arrive(self, turn)

    def _hang(self, view: View, turn: int) -> None:
        program = self.program
        if program.inside is view and program.turn == turn and not program.leaving:
            self.tell(LocalEnd(GenerationEnd(view.generation, "it hangs", "", "hang")))

    def complete(self, view: View, step: int) -> None:
        """Complete a collective of this process's world."""
        if not self.alive:
            return
        if self.state is ProcessState.STOPPED:
            self._inbox.append((self.complete, view, step))
            return
        program = self.program
        if program.inside is not view or program.leaving:
            return
        program.turn += 1
        program.step = step
        if program.turn == 1:
            program.done = False
            if self.own_rendezvous.entry is not None:
                self.own_rendezvous.entry.entered()
                self._keep_entry()
            self._tell(WorldWorked(view))
        if self._departs(view) or self._joins(view):
            return
        if program.step >= program.last_step:
            program.done = True
            self._leave(view, "done")
        elif program.inside is view and not program.leaving:
            self._come(view)

    def _joins(self, view: View) -> bool:
        """Between two steps, one rank lets newcomers in."""
        membership = self.membership
        newcomers = membership.side.newcomers() if view.lets_in(self.id) else None
        if not newcomers or membership.side.generation.end is not None:
            return False
        self._tell(LocalEnd(GenerationEnd(view.generation, "a newcomer joins", "", "join")))
        return True

    def _departs(self, view: View) -> bool:
        """Between two steps, one that was asked to leave ends the world as a newcomer does."""
        goes_on = self.membership.side.generation.end is None
        if not self.program.signal or not goes_on or not self._may_leave():
            return False
        self._tell(LocalEnd(GenerationEnd(view.generation, "a lent rank leaves", "", "join")))
        return True

    def hold(self, view: View) -> None:
        """Hold the part of the model that is this process's in a world, and say so. That its world
        worked, it has told before."""
        self.own_rendezvous.is_listed = True
        self.program.position = view.position(view.rank_of(self.id))
        self._say("running", view)

    def fail(self) -> None:
        """Raise an error in the program."""
        view = self.program.inside
        if view is None or self.program.leaving or self.state is not ProcessState.RUNNING:
            return
        end = GenerationEnd(view.generation, "a fault", self.id, "fault")
        self._tell(LocalEnd(end))

    def _cut(self, end: GenerationEnd) -> None:
        program = self.program
        if program.leaving or program.inside is None:
            return
        program.leaving = True
        around = self._around
        wait = around.random.random() * LEAVE_SECONDS + program.leave_seconds
        around.schedule.after(wait, self._leave, program.inside, "ready")

    def _leave(self, view: View, phase: Any) -> None:
        if not self.alive or self.program.inside is not view:
            return
        if self.state is ProcessState.STOPPED:
            self._inbox.append((self._leave, view, phase))
            return
        program = self.program
        program.inside, program.leaving, program.leave_seconds = None, False, 0.0
        self._around.note(self, f"leaves {view.generation} ({phase})")
        if phase == "ready" and program.signal and self._may_leave():
            self._depart()
            return
        self._say(phase, view)
