"""The seats of a living training: their nodes, their steps, and what was seen of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from slurm_resilience.mesh.model import Peer


class NodeSlot(msgspec.Struct, frozen=True):
    """One node's part of the training."""

    rank: int
    """NODE_RANK: stays when another node takes the part over."""
    node: str
    seats: tuple[int, ...]


class SeatMap(msgspec.Struct, frozen=True):
    """The node of every seat."""

    slots: tuple[NodeSlot, ...]
    seats: int
    """Number of seats of the full world."""
    per_task: int
    """Seats that one task of the step fills: 1, or the ranks of a launcher."""
    needs_all: bool = False
    """No seat can step without all others: a plain program's nodes, of which launchers tell."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the training's nodes, by NODE_RANK."""
        return tuple(slot.node for slot in self.slots)

    def slot_of(self, node: str) -> NodeSlot | None:
        """Return a node's part; None: it has none."""
        return next((slot for slot in self.slots if slot.node == node), None)

    def tasks(self, slot: NodeSlot) -> int:
        """Return how many tasks of the step are on one node."""
        return max(1, len(slot.seats) // self.per_task)

    def moved(self, rank: int, node: str) -> SeatMap:
        """Return the map in which another node has taken a part over."""
        slots = list(self.slots)
        slots[rank] = msgspec.structs.replace(slots[rank], node=node)
        return msgspec.structs.replace(self, slots=tuple(slots))


def seat_map(
    nodes: Sequence[str], node_of_seat: Mapping[int, str], tasks: int, seats: int = 0
) -> SeatMap | None:
    """Return the seats by node. None: not all have been seen yet.

    Args:
        nodes: the step's, by NODE_RANK.
        node_of_seat: as the ranks tell it.
        tasks: of the step; 0: not known.
        seats: of the full world; 0: the ranks do not say.
    """
    if tasks <= 0 or not node_of_seat or not set(range(seats)) <= set(node_of_seat):
        return None
    slots = tuple(
        NodeSlot(rank, node, tuple(sorted(s for s, where in node_of_seat.items() if where == node)))
        for rank, node in enumerate(nodes)
    )
    seen = sum(len(slot.seats) for slot in slots)
    if not all(slot.seats for slot in slots) or seen < tasks or seen % tasks:
        return None
    return SeatMap(slots, max(node_of_seat) + 1, seen // tasks)


def seats_of_tasks(seats: Sequence[int], per_task: int, tasks: Sequence[int]) -> tuple[int, ...]:
    """Return the seats that some tasks of a step filled.

    Args:
        seats: all of the step, in the order of its tasks.
        per_task: seats a task.
        tasks: their numbers within the step.
    """
    return tuple(seat for task in tasks for seat in seats[task * per_task : (task + 1) * per_task])


class StepSeats:
    """The seats of each step of the attempt, by the number of the step."""

    def __init__(self, first: Sequence[int]) -> None:
        """
        Args:
            first: those of the attempt's first step, in the order of its tasks.
        """
        self._seats: list[tuple[int, ...]] = [tuple(first)]

    def __len__(self) -> int:
        return len(self._seats)

    def add(self, seats: Sequence[int]) -> int:
        """Add a step; return its number."""
        self._seats.append(tuple(seats))
        return len(self._seats) - 1

    def all_of(self, step: int) -> tuple[int, ...]:
        """Return the seats that a step was started with, in the order of its tasks."""
        return self._seats[step]

    def held_by(self, step: int) -> set[int]:
        """Return the seats of a step that no later step has taken over."""
        later = {seat for seats in self._seats[step + 1 :] for seat in seats}
        return set(self._seats[step]) - later


class SeatRecord(msgspec.Struct, frozen=True):
    """All that was known of some seats when they were lost."""

    peers: frozenset[str] = frozenset()
    """Ids of all processes that were seen on them."""
    generation: int = 0
    """The last one that they were in."""
    step: int = -1
    """The training's newest step."""


class SeatHistory(msgspec.Struct):
    """All that was seen of each seat so far."""

    _peers: dict[int, set[str]] = msgspec.field(default_factory=dict)
    _generations: dict[int, int] = msgspec.field(default_factory=dict)
    _incarnations: dict[int, int] = msgspec.field(default_factory=dict)
    _step: int = -1
    _newest: int = 0
    last_world: frozenset[int] = frozenset()
    """The seats in it, as the training told at its end; empty: it has not."""

    def note(
        self, peers: Iterable[Peer], running: Iterable[int], generation: int, step: int
    ) -> None:
        """Note what the training shows now.

        Args:
            peers: its living processes.
            running: seats that step together.
            generation: the newest one that any of them is in; ``running`` step in it.
            step: the newest one.
        """
        self._step = max(self._step, step)
        self._newest = max(self._newest, generation)
        for peer in peers:
            self._peers.setdefault(peer.seat, set()).add(peer.id)
            known = self._incarnations.get(peer.seat, 0)
            self._incarnations[peer.seat] = max(known, peer.incarnation)
        for seat in running:
            self._generations[seat] = generation

    def record(self, seats: Iterable[int]) -> SeatRecord:
        """Return what is known of some seats."""
        chosen = tuple(seats)
        return SeatRecord(
            frozenset(name for seat in chosen for name in self._peers.get(seat, ())),
            max((self._generations.get(seat, 0) for seat in chosen), default=0),
            self._step,
        )

    @property
    def newest(self) -> int:
        """Return the newest generation that was seen; 0: none was."""
        return self._newest

    def next_incarnation(self, seats: Iterable[int]) -> int:
        """Return how many processes sat on these seats before a new one."""
        return 1 + max(self._incarnations.get(seat, 0) for seat in seats)
