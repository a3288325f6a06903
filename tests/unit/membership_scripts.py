"""Scripts of events for a membership, in words: read, run, and compared with what was expected.

A script is a TOML file: a title, the rules, and steps, each with a time, an event and the effects
that it must have, those of the time before it included. Seats stand for peers (`2`, or `2.1` for
the second process on seat 2), and `3/0` is the third generation, made by seat 0. Connected peers
beat, but for those that a step calls `silent`; with `held_up`, the process itself does not run
until then. Connected peers vote for each world that they are asked for, at once; a script with
`votes = "told"` tells all votes itself. News, beats, repeated cuts and votes that are not told are
not listed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    HeldUp,
    HoldersListed,
    LocalBeat,
    LocalEnd,
    LocalStatus,
    LocalStop,
    MessageReceived,
    News,
    NothingHeard,
    OutcomeFound,
    PeerAbsent,
    Reached,
    Send,
    StillWaiting,
    WorldWorked,
)
from slurm_resilience.mesh.messages import (
    Evict,
    GenerationEnded,
    Heartbeat,
    Leaving,
    Message,
    NewGeneration,
    NodeLost,
    NodeSuspected,
    Roster,
    StatusUpdate,
    Superseded,
    TrainingDone,
    Vote,
    VoteRequest,
    WorldKnown,
)
from slurm_resilience.mesh.model import (
    CloseCause,
    GenerationEnd,
    Member,
    Peer,
    PeerStatus,
    Timing,
    View,
    counter_of,
    generation_number,
)
from slurm_resilience.mesh.protocol.membership import Membership
from slurm_resilience.mesh.protocol.world_plan import WorldRules

SCRIPTS = Path(__file__).parents[1] / "data" / "membership"
_PER_SEAT = 16
_PER_COUNTER = 16 << 20
CAUSES: dict[str, CloseCause] = {"closes": "closed", "is reset": "reset", "is lost": "lost"}


def peer(name: str) -> Peer:
    """`2`, or `2.1`: the second process on seat 2."""
    seat, _, incarnation = name.partition(".")
    number = int(incarnation or 0)
    node = f"node{seat}" + (f".{number}" if number else "")
    return Peer(name, int(seat), number, node=node, host="host", port=1000 + int(seat))


def generation(text: str) -> int:
    """`3/0`: the third one, made by seat 0; `none`."""
    counter, _, lead = text.partition("/")
    return generation_number(int(counter), int(lead)) if lead else 0


def shown(number: int) -> str:
    """The same the other way round."""
    return (
        f"{counter_of(number)}/{(_PER_COUNTER - 1 - number % _PER_COUNTER) // _PER_SEAT}"
        if number
        else "none"
    )


class Script:
    """One script, and the membership that it is played to."""

    def __init__(self, path: Path) -> None:
        self.data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        rules = WorldRules(**self.data["rules"])
        timing = Timing(**self.data.get("timing", {}))
        self.membership = Membership(peer(self.data.get("me", "0")), rules, timing, 0.0)
        self._connections: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._said: dict[str, int] = {}
        self._votes_are_told = self.data.get("votes") == "told"

    def play(self) -> list[tuple[float, str, list[str]]]:
        """Play all steps; the time, the event, and the effects that it had."""
        return [(step["at"], step["event"], self._step(step)) for step in self.data["step"]]

    def _step(self, step: dict[str, Any]) -> list[str]:
        now, text = step["at"], step["event"]
        silent = step.get("silent", "").split()
        effects = [] if step.get("held_up") else self._wait(now, silent)
        if text != "time passes":
            effects += self.membership.step(self._event(text), now)
        effects += self._tick(now, silent)
        lines = [line for effect in effects if (line := self._effect(effect))]
        return [line for place, line in enumerate(lines) if line not in lines[:place]]

    def _wait(self, until: float, silent: list[str]) -> list[Effect]:
        """Let time pass: ticks when they are asked for, and beats of the others."""
        effects: list[Effect] = []
        while (wake_at := self.membership.side.wake_at) < until:
            for contact in list(self.membership.side.contacts):
                name = contact.peer.id
                if name not in silent:
                    beat = MessageReceived(contact.connection, name, name, Heartbeat())
                    effects += self.membership.step(beat, wake_at)
            effects += self._tick(wake_at, silent)
        return effects

    def _tick(self, now: float, silent: list[str]) -> list[Effect]:
        effects = self.membership.tick(now)
        if any(isinstance(effect, BeatDue) for effect in effects):
            effects += self.membership.step(LocalBeat(), now)
        return effects if self._votes_are_told else self._voted(effects, now, silent)

    def _voted(self, effects: list[Effect], now: float, silent: list[str]) -> list[Effect]:
        """Have the others vote for what they are asked; all other effects."""
        others: list[Effect] = []
        for effect in effects:
            if not isinstance(effect, Send) or not isinstance(effect.message, VoteRequest):
                others.append(effect)
                continue
            number = effect.message.view.generation
            for connection in effect.connections:
                name = self._names[connection]
                if name not in silent:
                    event = MessageReceived(connection, name, name, Vote(number, True, number))
                    others += self.membership.step(event, now)
            others += self._tick(now, silent)
        return others

    # -- words to events ----------------------------------------------------------------------

    def _event(self, text: str) -> Event:
        name, _, rest = text.partition(" ")
        if name == "me":
            return self._local(rest)
        if name == "observer":
            if rest.startswith("suspects "):
                suspicion = NodeSuspected(rest.removeprefix("suspects "), "no beat")
                return MessageReceived(0, "observer", "observer", suspicion)
            found = re.fullmatch(r"finds (\S+) (dead|sick)", rest)
            assert found, text
            finding = NodeLost(found[1], "it is broken", found[2] == "dead")
            return MessageReceived(0, "observer", "observer", finding)
        if name == "rendezvous":
            names = rest.removeprefix("names").split()
            peers = tuple(map(peer, names)) if rest.startswith("names") else None
            return HoldersListed(peers)
        if found := re.fullmatch(r"was not to be heard for (\S+) s", rest):
            return NothingHeard((name,), float(found[1]))
        if rest == "is not there":
            return PeerAbsent(name)
        if rest in CAUSES:
            cause = CAUSES[rest]
            number = self._connections[name]
            if (contact := self.membership.side.contacts.get(name)) is not None:
                number = contact.connection
            return ConnectionClosed(number, f"connection {cause}", cause)
        if rest == "has another way":
            return self._proven(name, True, "ready in none", rerouted=True)
        met = re.fullmatch(r"(connects|is reached)(?: as (.+))?", rest)
        if met:
            return self._proven(name, met[1] == "is reached", met[2] or "ready in none")
        return MessageReceived(self._connections[name], name, name, self._message(name, rest))

    def _proven(self, name: str, dialed: bool, status: str, *, rerouted: bool = False) -> Event:
        number = len(self._names) + 1
        self._names[number] = name
        self._connections[name] = number
        return ConnectionProven(number, peer(name), self._status(status), dialed, rerouted)

    def _local(self, text: str) -> Event:
        words: list[tuple[str, Callable[[re.Match[str]], Event]]] = [
            (r"says (.+)", lambda m: LocalStatus(self._status(m[1]))),
            (r"ends (\S+) \((\w+)\)", lambda m: LocalEnd(self._end(m[1], m[2], "0"))),
            (r"stops (\S+)", lambda m: LocalStop(self._end(m[1], "stop", "0"))),
            (r"worked", lambda _: WorldWorked(self._view())),
            (r"finds the outcome (\d+)", lambda m: OutcomeFound(int(m[1]))),
        ]
        for pattern, make in words:
            if found := re.fullmatch(pattern, text):
                return make(found)
        raise ValueError(text)

    def _message(self, name: str, text: str) -> Message:
        self._said[name] = self._said.get(name, 0) + 1
        number = self._said[name]
        words: list[tuple[str, Callable[[re.Match[str]], Message]]] = [
            (r"beats", lambda _: Heartbeat()),
            (r"knows that all are done", lambda _: TrainingDone()),
            (r"says (.+)", lambda m: StatusUpdate(number, self._status(m[1]))),
            (r"asks for (\S+) of (.+)", lambda m: VoteRequest(self._new_view(m[1], m[2]))),
            (r"votes for (\S+)(?:, as (.+))?", lambda m: self._vote(m[1], True, m[2])),
            (r"votes against (\S+)(?:, as (.+))?", lambda m: self._vote(m[1], False, m[2])),
            (r"forms (\S+) of (.+)", lambda m: _formed(self._new_view(m[1], m[2]))),
            (r"forms (\S+)", lambda m: NewGeneration(generation(m[1]))),
            (r"ends (\S+) \((\w+)\)", lambda m: GenerationEnded(self._end(m[1], m[2], name))),
            (r"ends (\S+) for (\S+)", lambda m: GenerationEnded(self._end(m[1], "lost", m[2]))),
            (r"tells of (\S+) of (.+)", lambda m: WorldKnown(self._new_view(m[1], m[2]))),
            (r"evicts me", lambda _: Evict("it is not needed")),
            (r"evicts me as silent", lambda _: Evict("silent for 5 s", "silent")),
            (r"leaves", lambda _: Leaving("it goes")),
            (r"counts another connection", lambda _: Superseded()),
            (r"knows (.+)", lambda m: Roster(tuple(map(peer, m[1].split())))),
        ]
        for pattern, make in words:
            if found := re.fullmatch(pattern, text):
                return make(found)
        raise ValueError(text)

    def _vote(self, number: str, granted: bool, why: str | None) -> Vote:
        """An answer, and the reason: `it voted for 2/1`, `2/1 of 1 2 may go on`, or `2/1 of 1 2
        has worked`."""
        asked = generation(number)
        found = re.fullmatch(r"it voted for (\S+)|(\S+) of (.+) (may go on|has worked)", why or "")
        if not found:
            return Vote(asked, granted, asked if granted else 0)
        if found[1]:
            return Vote(asked, granted, generation(found[1]))
        view = self._new_view(found[2], found[3])
        worked = view.generation if found[4] == "has worked" else 0
        return Vote(asked, granted, asked, worked, (view.generation,), (view,))

    def _status(self, text: str) -> PeerStatus:
        held = r"(?: holding (\d+)| without state)?"
        found = re.fullmatch(rf"(ready|running|done) in (\S+){held}( void)?", text)
        assert found, text
        position = int(found[3]) if found[3] else -1
        step = 5 if found[3] else -1 if "without state" in text else 0
        void = bool(found[4])
        return PeerStatus(found[1], generation(found[2]), step, void, position)  # type: ignore[arg-type]

    def _end(self, number: str, kind: str, culprit: str) -> GenerationEnd:
        return GenerationEnd(generation(number), "a reason", culprit, kind)  # type: ignore[arg-type]

    def _view(self) -> View:
        view = self.membership.side.generation.view
        assert view is not None
        return view

    def _new_view(self, number: str, names: str) -> View:
        members = tuple(Member(peer(name), PeerStatus()) for name in names.split())
        return View(generation(number), members, seats=self.membership.side.rules.seats)

    # -- effects to words ---------------------------------------------------------------------

    def _effect(self, effect: Effect) -> str:
        match effect:
            case News() | BeatDue() | Send(message=Heartbeat()):
                return ""
            case Send(connections=connections, message=message):
                to = " ".join(self._names[number] for number in connections)
                return f"to {to}: {self._said_as(message)}"
            case Close(connection=number):
                return f"close {self._names[number]}"
            case Finish(connection=number):
                return f"finish connection {number} to {self._names[number]}"
            case Dial(peer=other):
                return f"dial {other.id}"
            case DialKnown():
                return "dial all that are known"
            case Reached(connection=number):
                return f"give keys to {self._names[number]}"
            case Adopt(view=view):
                return f"adopt {_view(view)}"
            case EndGeneration(end=end):
                return f"end {_end(end)}"
            case CutBlock(end=end):
                return f"cut the block: {end.kind}"
            case Evicted(reason=reason):
                return f"evicted: {reason}"
            case GaveUp(peer=other, reason=reason):
                return f"give up {other.id}: {reason}"
            case StillWaiting(seconds=seconds, reason=reason):
                return f"still waiting after {seconds:g} s: {reason}"
            case HeldUp(seconds=seconds):
                return f"held up for {seconds:g} s"
        raise ValueError(effect)

    def _said_as(self, message: Message) -> str:
        match message:
            case StatusUpdate(status=status):
                return f"{status.phase} in {shown(status.generation)}"
            case WorldKnown(view=view):
                return f"a world has worked: {_view(view)}"
            case VoteRequest(view=view):
                return f"vote for {_view(view)}"
            case Vote(generation=number, granted=granted):
                return f"a vote {'for' if granted else 'against'} {shown(number)}"
            case NewGeneration(generation=number, view=view):
                return f"new generation {shown(number) if view is None else _view(view)}"
            case GenerationEnded(end=end):
                return f"over is {_end(end)}"
            case Evict(reason=reason):
                return f"evict: {reason}"
            case Leaving(reason=reason):
                return f"leaving: {reason}"
            case TrainingDone():
                return "all are done"
            case Superseded():
                return "another connection counts"
            case NodeLost(node=node, dead=dead):
                return f"{node} is {'dead' if dead else 'sick'}"
            case NodeSuspected(node=node):
                return f"{node} is suspected"
            case Roster(peers=peers):
                return f"known are {' '.join(other.id for other in peers)}"
        raise ValueError(message)


def _formed(view: View) -> NewGeneration:
    return NewGeneration(view.generation, view)


def _view(view: View) -> str:
    return f"{shown(view.generation)} of {' '.join(m.peer.id for m in view.members)}"


def _end(end: GenerationEnd) -> str:
    by = f" by {end.culprit}" if end.culprit else ""
    return f"{shown(end.generation)} ({end.kind}{by}): {end.reason}"
