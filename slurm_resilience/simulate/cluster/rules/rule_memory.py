"""The memory that the rules of a simulated cluster go by: people, deaths, marks, losses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slurm_resilience.model import ACTIONS, REBOOT, REPLACE, Job, Node
from slurm_resilience.simulate.cluster.sim_machine import SimMachine


class PersonsHold(NamedTuple):
    """A person's word on a node."""

    since: float
    reason: str
    asks: bool
    """It is a request to sresctld; else the node is not to be touched."""


class OrderToHalt:
    """A pause, or SIGTERM: the act that is under way may end."""

    def __init__(self, by: str, since: float) -> None:
        self.by = by
        self.since = since
        self.subjects: set[str] = set()
        """Nodes and jobs that were acted on since."""


class PeoplesWords:
    """All that people said of nodes, and when."""

    def __init__(self) -> None:
        self._holds: dict[str, PersonsHold] = {}
        self._undone: dict[str, PersonsHold] = {}
        """Requests for which no program has begun."""
        self.last_word: dict[str, float] = {}
        self.resumed_at: dict[str, float] = {}
        """When a person put each node back into service, and it was not taken out since."""
        self.reset_at = -1e9
        """When a person answered the breaker's alarm."""
        self.unclear = UnclearReasons()
        self.reserved: dict[str, float] = {}
        """Nodes in a maintenance reservation, and since when."""
        self.rebooting: dict[str, float] = {}
        """Nodes that a person reboots without a word to Slurm, and since when."""
        self.slurm_reboots: dict[str, float] = {}
        """Nodes that Slurm reboots by the word of a person, and since when."""
        self.halt: OrderToHalt | None = None
        """The order to begin nothing more that stands."""

    def say(self, name: str, node: Node, now: float) -> None:
        """Take in a person's word."""
        self.last_word[name] = now
        self.resumed_at.pop(name, None)
        if not node.reason:
            self.resumed_at[name] = now
        if node.reason:
            # While it cannot be read for certain it holds the node all the same (`unclear`).
            asks = node.reason in (REPLACE, REBOOT)
            self._holds[name] = PersonsHold(now, node.reason, asks)
        else:
            self._holds.pop(name, None)
        self._undone.pop(name, None)
        if self.asks(name):
            self._undone[name] = self._holds[name]

    def serve(self, name: str, verb: str) -> None:
        """Take in that a program replaces or reboots a node."""
        asked = self._undone.get(name)
        if asked is not None and verb in ("replace", ACTIONS[asked.reason][0]):
            del self._undone[name]

    def end_request(self, name: str, before: float) -> str:
        """End a request; return it if nothing was done about it, and it is from before a time."""
        asked = self._undone.pop(name, None)
        return asked.reason if asked is not None and asked.since < before else ""

    def forget(self, name: str) -> None:
        """Take in that a node is in service again."""
        self._holds.pop(name, None)

    def asks(self, name: str) -> bool:
        """Tell whether a person's request stands."""
        hold = self._holds.get(name)
        return hold is not None and hold.asks and not self.unclear.has(name)

    def hold(self, name: str) -> PersonsHold | None:
        """Return the word by which a person keeps a node."""
        if self.unclear.has(name):
            return PersonsHold(self.unclear.since[name], "a reason that is not understood", False)
        hold = self._holds.get(name)
        return None if hold is None or hold.asks else hold


class UnclearReasons:
    """Nodes whose reason cannot be read for certain: each may be a person's."""

    def __init__(self) -> None:
        self.since: dict[str, float] = {}
        self.seen: dict[str, float] = {}
        """When each was last unclear."""

    def has(self, name: str) -> bool:
        """Tell whether the reason is unclear now."""
        return name in self.since

    def begin(self, name: str, now: float) -> None:
        """Take in that a node's reason is unclear from now on."""
        self.since[name] = self.seen[name] = now

    def end(self, name: str, now: float) -> None:
        """Take in that it is clear, or gone."""
        if self.since.pop(name, None) is not None:
            self.seen[name] = now


class WellKnown:
    """Since when machines are dead, reached again, or left by supervised jobs."""

    def __init__(self) -> None:
        self.emptied: dict[str, float] = {}
        self.dead: dict[str, float] = {}
        self.kept: dict[str, float] = {}
        """Nodes that were last seen with a job which a DOWN would end, and when."""
        self.reserved: dict[str, float] = {}
        """Nodes that were last seen in a maintenance reservation, and when."""
        self.mended: dict[str, float] = {}
        self.seen_to_die: set[str] = set()
        """Nodes that sresctld knew to be dead when Slurm set them DOWN by itself."""

    def look(self, machines: dict[str, SimMachine], now: float) -> None:
        """Take in the machines' states."""
        for name, machine in machines.items():
            if machine.lives:
                self.dead.pop(name, None)
            else:
                self.dead.setdefault(name, now)


class BreakerView:
    """The breaker, and the marks that it should count."""

    def __init__(self) -> None:
        self.tripped_at = 0.0
        """When it was last seen tripped."""
        self.deaf_at = 0.0
        """When last no node at all could be heard."""
        self.is_tripped: Callable[[], bool] = lambda: False
        self.age: Callable[[str], float] = lambda _: 0.0
        """Tells the seconds since a node's fault began, as sresctld counts it."""
        self.knows: Callable[[str], bool] = lambda _: False
        """Tells whether sresctld has seen a node's present fault begin."""
        self.out: set[str] = set()
        """Nodes that were marked, and have not been in service since."""
        self.marks: dict[bool, deque[tuple[float, str]]] = {}
        """Nodes that were marked, each with its time; those apart that Slurm had DOWN before."""
        self.of_hour: deque[tuple[float, str]] = deque()
        """The marks of an hour, without those apart."""


class JobLosses:
    """Nodes that jobs had in their present runs and do not have any more."""

    def __init__(self) -> None:
        self.described: set[int] = set()
        """Those whose own program says anything at all of its nodes."""
        self.is_any_recovering = False
        """At sresctld's last look a supervised job had to leave a dead node, or had left a faulty
        one and waited for others."""
        self._left: dict[int, set[str]] = {}
        self._lost: dict[int, set[str]] = {}
        """Those of them that were seen in trouble since."""

    def started(self, job: Job) -> None:
        """Take in that a job runs, for the first time or again."""
        self._left[job.id], self._lost[job.id] = set(), set()

    def left(self, job: Job, nodes: Sequence[str]) -> None:
        """Take in that a job does not hold these nodes any more, nor by a companion of its own."""
        number = job.companion_of[0] if job.companion_of is not None else job.id
        self._left.setdefault(number, set()).update(nodes)

    def trouble(self, name: str) -> None:
        """Take in that a node is out of service."""
        for job, left in self._left.items():
            if name in left:
                self._lost.setdefault(job, set()).add(name)

    def lost(self, job: Job, is_in_trouble: Callable[[str], bool]) -> set[str]:
        """Return the nodes that a job lost to faults in its present run."""
        lost = self._lost.setdefault(job.id, set())
        lost |= {name for name in self._left.get(job.id, ()) if is_in_trouble(name)}
        return lost - set(job.nodes)


class WrittenEvents:
    """Events and incidents that the journal got, and when."""

    def __init__(self) -> None:
        self.opened: dict[tuple[int, str], float] = {}
        """The first of each incident: a number may be given again, after a kill that undid it."""
        self.open_for: dict[int, float] = {}
        """Seconds for which an incident was open with nothing in its way."""
        self.requested: set[int] = set()
        """Incidents that people asked for."""
        self.repaired: dict[str, set[int]] = {}
        """The incidents that each machine was repaired in, for faults that sresctld found."""
        self.starts: list[float] = []
        """The starts of programs."""
        self.alarms: dict[str, deque[float]] = {}
        """By node."""
