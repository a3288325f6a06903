"""Decide how an elastic step grows and shrinks: events and the time in, actions out. Pure.

A group is the nodes of one companion: a job of its own, which Slurm starts when nodes are free and
preempts when others need them. Here is no scheduler: a group is asked for, taken when it is given,
and asked for again when it was taken back.

One more, the stand-in, is asked for when a node turns out to be sick that still works: that one is
left when the stand-in's ranks step with the others, and the stand-in goes when all is whole again.

All groups are wanted, unless a person has asked for fewer nodes: the youngest then leave as they do
for Slurm, but in their own time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from slurm_resilience.mesh.model import Peer
from slurm_resilience.resume.elastic import size_events as ev
from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.resume.elastic.node_group import GroupState, NodeGroup, seniority
from slurm_resilience.resume.live_step.live_events import (
    FaultyNode,
    NodesFaulty,
    TellTraining,
    Tick,
    TrainingSeen,
)
from slurm_resilience.resume.live_step.seats import NodeSlot

_S = GroupState

MOST_ASKED = 8
"""Requests for nodes that may wait in Slurm's queue at one time."""
LONGEST_BACKOFF_SECONDS = 3600.0
MOST_DOUBLINGS = 30
"""Doublings of the pause: it is at its longest by then, and 2.0 ** 1024 is no number."""
ASK_AGAIN_SECONDS = 60.0
"""After which ranks that go because a person wants fewer are asked once more: that has no deadline,
and Slurm may not have passed the first signal on."""
GONE_SECONDS = 120.0
"""For the ranks of a group that goes. Slurm ends them sooner, where it takes the nodes back."""

BEHIND_SECONDS = 60.0
"""For ranks to end whose nodes were given back. Slurm kills them after KillWait, 30 s."""

PROVEN_SECONDS = 600.0
"""Ranks that die by themselves within so long of their first step are taken for ones that did not
come: each time the world is formed anew, twice, and the next ones may die as well."""


@dataclass(frozen=True)
class LeftRanks:
    """Ranks on a node that was given back."""

    slot: NodeSlot
    reason: str
    ended_by: float
    """They have ended by then, unless Slurm knows nothing of them any more."""


@dataclass
class LostPeers:
    """Processes on dead nodes: they do not say goodbye."""

    ids: set[str] = field(default_factory=set)
    _of_node: dict[str, set[str]] = field(default_factory=dict)

    def note(self, peers: tuple[Peer, ...]) -> None:
        """Note which processes are on which node."""
        for peer in peers:
            self._of_node.setdefault(peer.node, set()).add(peer.id)

    def lose(self, node: str) -> None:
        """Note that all processes of a node are gone."""
        self.ids |= self._of_node.pop(node, set())


class SizePlan:
    """The decisions on the size of one living attempt."""

    def __init__(self, size: ElasticSize, seats_per_node: int) -> None:
        """
        Args:
            size: what srun's options ask for.
            seats_per_node: the same on every node.
        """
        self._size = size
        self._per_node = seats_per_node
        self.groups = [NodeGroup(n, size.ranks(n)) for n in range(len(size.groups))]
        last = range(size.most, size.most + size.groups[0])
        self._stand_in = NodeGroup(len(self.groups), last)
        self.groups.append(self._stand_in)
        self._behind: dict[str, LeftRanks] = {}
        """By the name of the node."""
        self._sick: dict[str, float] = {}
        """Since when each node is known to be sick that still works."""
        self.lost = LostPeers()
        self._seen = TrainingSeen(0, (), -1, ())
        self._seen_at = math.inf
        self._last_step = 0
        self._target = ev.TargetSet(size.most, "")
        self._taken = 0
        """Nodes of the core that a person has taken out of the job."""
        self._refused: NodeGroup | None = None
        """The first whose request Slurm has not taken: others' would fare no better, and are not
        made before this one is taken."""

    @property
    def slots(self) -> tuple[NodeSlot, ...]:
        """Return the nodes of all groups that have any, by node rank."""
        return tuple(
            slot for group in self.groups if group.holds_nodes for slot in self._slots(group)
        )

    def step(self, event: ev.SizeEvent, now: float) -> tuple[ev.SizeAction, ...]:
        """Take an event in; return what is to be done, in this order.

        Args:
            event: what happened.
            now: monotonic seconds.
        """
        return tuple(self._on(event, now))

    def _on(self, event: ev.SizeEvent, now: float) -> Iterator[ev.SizeAction]:
        match event:
            case TrainingSeen():
                yield from self._on_training_seen(event, now)
            case ev.CompanionSeen():
                yield from self._on_companion_seen(event, now)
            case ev.GroupAsked(group, companion):
                self.groups[group].companion = companion
                self._refused = None
            case ev.GroupFailed(group, reason):
                failed = self.groups[group]
                if failed.state is _S.ASKED and failed is not self._stand_in:
                    self._refused = self._refused or failed
                yield from self._vacate(failed, now, failed=reason)
            case ev.GroupStarted(group, steps):
                self.groups[group].steps = steps
            case ev.GroupStepEnded():
                yield from self._on_step_ended(event, now)
            case ev.GroupTaskDied():
                yield from self._on_task_died(event, now)
            case ev.GroupLeftUnasked():
                yield from self._on_left_unasked(event, now)
            case NodesFaulty():
                yield from self._on_nodes_faulty(event, now)
            case ev.NodesSick():
                yield from self._on_nodes_sick(event, now)
            case ev.CoreShrunk(nodes):
                self._taken = nodes
            case ev.TargetSet():
                self._on_target_set(event, now)
            case Tick():
                yield from self._on_tick(now)

    def _on_target_set(self, event: ev.TargetSet, now: float) -> None:
        self._target, self._refused = event, None
        for group in self.groups:
            # A person's word does not wait for the end of a pause.
            group.again_at = min(group.again_at, now)

    # -- coming -------------------------------------------------------------------------------

    def _on_companion_seen(self, seen: ev.CompanionSeen, now: float) -> Iterator[ev.SizeAction]:
        group = self.groups[seen.group]
        if group.companion != seen.companion:
            return
        waits = seen.state in ("PENDING", "CONFIGURING")
        runs = seen.state == "RUNNING"
        if group.state is _S.ASKED and runs and not self._is_next(group):
            yield from self._vacate(group, now)
        elif group.state is _S.ASKED and runs and seen.doubt:
            yield from self._vacate(group, now, failed=seen.doubt)
        elif group.state is _S.ASKED and runs and len(seen.nodes) == len(group.ranks):
            group.enter(_S.JOINING)
            group.nodes, group.since = seen.nodes, now
            group.deadline = now + self._size.settings.timeout
            yield ev.StartGroup(group.number, group.companion, self._slots(group))
        elif group.state is _S.ASKED and runs and seen.nodes:
            # A person has changed the request, and the training has ranks for as many only.
            given, wanted = len(seen.nodes), len(group.ranks)
            reason = f"job {seen.companion} has {given} node(s), and is to have {wanted}"
            yield from self._vacate(group, now, failed=reason)
        elif group.state is _S.ASKED and seen.state == "COMPLETING":
            return  # Slurm tells soon how it has ended
        elif group.state is _S.ASKED and seen.state in _TAKEN_BY_SLURM:
            # It gave it nodes and took them, between two looks: nothing has failed.
            yield from self._vacate(group, now, taken=_how_it_ended(seen))
        elif group.state is _S.ASKED and not waits and not runs:
            # A person has ended the request, most often: it is not made again at once.
            yield from self._vacate(group, now, failed=_how_it_ended(seen))
        elif group.holds_nodes and seen.state == "SUSPENDED":
            # Its ranks are stopped, and the others have given them up or soon will.
            self._begin_to_leave(group, _how_it_ended(seen), now)
            yield from self._vacate(group, now)
        elif group.state in (_S.JOINING, _S.IN) and not runs:
            self._begin_to_leave(group, _how_it_ended(seen), now)
            if not seen.state:
                # A person may have given it another name: Slurm does not end its ranks.
                yield ev.AskGroupToLeave(group.companion, group.steps)
        elif group.state is _S.LEAVING and not runs:
            group.ends.is_unasked = False
            group.deadline = min(group.deadline, now + GONE_SECONDS)

    def _slots(self, group: NodeGroup) -> tuple[NodeSlot, ...]:
        return tuple(
            NodeSlot(rank, node, self._seats(rank))
            for rank, node in zip(group.ranks, group.nodes, strict=True)
        )

    def _seats(self, rank: int) -> tuple[int, ...]:
        return tuple(range(rank * self._per_node, (rank + 1) * self._per_node))

    def _on_training_seen(self, seen: TrainingSeen, now: float) -> Iterator[ev.SizeAction]:
        passed, self._seen_at = max(0.0, now - self._seen_at), now
        self._seen = seen
        self._last_step = seen.step if seen.step >= 0 else self._last_step
        self.lost.note(seen.peers)
        for group in self.groups:
            if group.state is _S.JOINING and self._steps_with_others(group):
                group.enter(_S.IN)
                group.proven_at = now + PROVEN_SECONDS
                yield ev.SayGrew(self._change(group.companion, group.nodes), now - group.since)
            elif group.state is _S.IN:
                self._count_apart(group, passed)

    def _count_apart(self, group: NodeGroup, seconds: float) -> None:
        """Count for how long a group's nodes have been of no use: its ranks are silent, or cut off
        from the others (or from here, as their sruns are then), and neither Slurm nor sresctld
        finds a fault. Where one of them steps, the rest may wait for another size, as standbys."""
        seats = {seat for rank in group.ranks for seat in self._seats(rank)}
        if seats & set(self._seen.running):
            group.apart_seconds = 0.0
        elif self._seen.running:
            group.apart_seconds += seconds

    def _steps_with_others(self, group: NodeGroup) -> bool:
        seats = {seat for rank in group.ranks for seat in self._seats(rank)}
        here = {peer.seat for peer in self._seen.peers if peer.node in group.nodes}
        return seats <= set(self._seen.running) & here

    def _change(self, companion: int, nodes: tuple[str, ...]) -> ev.SizeChange:
        core = self._size.core - self._taken
        size = core + sum(len(g.nodes) for g in self.groups if g.state is _S.IN)
        return ev.SizeChange(companion, nodes, size, self._last_step)

    # -- going --------------------------------------------------------------------------------

    def _on_step_ended(self, event: ev.GroupStepEnded, now: float) -> Iterator[ev.SizeAction]:
        group = next((g for g in self.groups if event.step in g.steps), None)
        if group is None:
            return
        group.steps = tuple(step for step in group.steps if step != event.step)
        reason = f"its srun on {','.join(group.nodes)} ended with {event.code}"
        if group.state is _S.JOINING and event.code and event.cancelled:
            # Preempted, most often: the ranks would have come, and that is no reason for a backoff.
            taken = f"Slurm or a person ended its tasks on {','.join(group.nodes)}"
            yield from self._vacate(group, now, taken=taken)
            return
        if group.state is _S.JOINING and event.code:
            yield from self._vacate(group, now, failed=reason)
            return
        was_leaving = group.state is _S.LEAVING
        if event.cancelled:
            group.ends.is_unasked = False
        elif not (event.code or was_leaving):
            group.ends.is_unasked = group.state is _S.JOINING or now < group.proven_at
        told = f"its srun ended with {event.code}"
        if event.cancelled:
            told = "Slurm or a person ended its tasks"  # it is preempted, most often
        elif not event.code:
            told = "its ranks ended with 0" if group.ends.is_unasked else "its ranks left"
        if event.code and not (was_leaving or event.cancelled) and now < group.proven_at:
            group.ends.failed = reason
        self._begin_to_leave(group, told, now)
        if not group.steps:
            yield from self._vacate(group, now)
        elif event.code and not was_leaving:
            # Those on the group's other nodes go with it. Where ranks left well, Slurm or a person
            # has asked all of the group.
            yield ev.AskGroupToLeave(group.companion, group.steps)

    def _on_task_died(self, event: ev.GroupTaskDied, now: float) -> Iterator[ev.SizeAction]:
        """Give up a group of which a node would be used in part only, for as long as it is lent."""
        group = next((g for g in self.groups if event.step in g.steps), None)
        if group is None:
            return
        reason = f"a task on {','.join(group.nodes)} ended: {event.how}"
        if group.state is _S.JOINING:
            yield from self._vacate(group, now, failed=reason)
        elif group.state is _S.IN:
            if now < group.proven_at:
                group.ends.failed = reason
            self._begin_to_leave(group, reason, now)
            yield ev.AskGroupToLeave(group.companion, group.steps)

    def _on_nodes_faulty(self, event: NodesFaulty, now: float) -> Iterator[ev.SizeAction]:
        for faulty in event.nodes:
            group = next((g for g in self.groups if g.holds_nodes and faulty.node in g.nodes), None)
            if group is None or (group.state is _S.LEAVING and not faulty.dead):
                continue
            if faulty.dead:
                # Its peers are told at once; those on the group's other nodes go with it.
                yield TellTraining(faulty)
                self.lost.lose(faulty.node)
            self._begin_to_leave(group, f"{faulty.node}: {faulty.reason}", now)
            group.deadline = min(group.deadline, now + GONE_SECONDS)
            if faulty.dead and len(group.nodes) == 1:
                yield from self._vacate(group, now)
            else:
                yield ev.AskGroupToLeave(group.companion, group.steps)

    def _on_nodes_sick(self, event: ev.NodesSick, now: float) -> Iterator[ev.SizeAction]:
        names = {faulty.node for faulty in event.nodes}
        self._sick = {name: self._sick.get(name, now) for name in names}
        ready = tuple(faulty for faulty in event.nodes if self.may_leave(faulty.node, now))
        yield from self._on_nodes_faulty(NodesFaulty(ready), now)

    def may_leave(self, node: str, now: float) -> bool:
        """Return whether a sick node is left now: the stand-in is in, or was waited for in vain.

        Args:
            node: it still works.
            now: monotonic seconds.
        """
        waited = now - self._sick.get(node, now)
        stands_in = self._stand_in.state is _S.IN and node not in self._stand_in.nodes
        return stands_in or waited >= self._size.settings.evacuation_wait

    def _begin_to_leave(self, group: NodeGroup, reason: str, now: float) -> None:
        if group.state in (_S.JOINING, _S.IN):
            group.enter(_S.LEAVING)
            group.reason, group.deadline = reason, now + GONE_SECONDS

    def _vacate(
        self, group: NodeGroup, now: float, failed: str = "", taken: str = ""
    ) -> Iterator[ev.SizeAction]:
        """Give a group's nodes back; it is asked for again later.

        Args:
            group: one that has nodes, or a request for them.
            now: monotonic seconds.
            failed: the reason, where it could not come: the pause is longer each time.
            taken: the reason, where its nodes were taken before it was in.
        """
        settings = self._size.settings
        leaves, was_in = group.state is _S.LEAVING, group.proven_at > 0.0
        # No pause where Slurm has not taken the nodes back: a person may want them again soon.
        for_a_person = leaves and math.isinf(group.deadline)
        companion, nodes, steps = group.companion, group.nodes, group.steps
        if group.holds_nodes:
            reason, ended_by = failed or taken or group.reason, now + BEHIND_SECONDS
            left = {slot.node: LeftRanks(slot, reason, ended_by) for slot in self._slots(group)}
            self._behind.update(left)
        ends = group.ends
        failed, ends.failed = failed or ends.failed, ""
        is_unasked, ends.is_unasked = ends.is_unasked and not failed, False
        ends.failures = ends.failures + 1 if failed else 0
        ends.unasked = 0 if 0.0 < group.proven_at <= now else ends.unasked
        pause = 0.0 if for_a_person else settings.snooze
        pause = self._backoff(ends.failures) if failed else pause
        group.enter(_S.VACANT)
        group.companion, group.nodes, group.steps = 0, (), ()
        group.deadline, group.remind_at, group.proven_at = 0.0, math.inf, 0.0
        group.apart_seconds = 0.0
        group.again_at = now + pause
        if leaves and was_in:
            yield ev.SayShrank(self._change(companion, nodes), group.reason)
        elif leaves and self._is_wanted(group):
            taken = taken or group.reason  # no growth was told that could be undone
        if companion:
            yield ev.GiveBack(group.number, companion, steps, nodes, is_unasked)
        if failed or taken:
            yield ev.SayNotGrown(failed or taken, pause)

    def _backoff(self, times: int) -> float:
        """Return the pause after so many ends in a row."""
        first = self._size.settings.backoff
        longest = max(first, LONGEST_BACKOFF_SECONDS)
        return min(longest, first * 2.0 ** min(times - 1, MOST_DOUBLINGS))

    def _on_left_unasked(self, event: ev.GroupLeftUnasked, now: float) -> Iterator[ev.SizeAction]:
        group = self.groups[event.group]
        group.ends.unasked += 1
        if group.state is _S.VACANT:
            pause = self._backoff(group.ends.unasked)
            group.again_at = now + pause
            reason = (
                f"the ranks of job {event.companion} on {','.join(event.nodes)} ended with 0, and "
                "nothing had asked them to; look where the program exits on a lent node"
            )
            yield ev.SayNotGrown(reason, pause)

    # -- time ---------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> Iterator[ev.SizeAction]:
        yield from self._cut_off(now)
        for group in self.groups:
            is_due = group.state is _S.VACANT and now >= group.again_at
            if is_due and self._is_next(group) and self._may_ask_for(group):
                group.enter(_S.ASKED)
                yield ev.AskForGroup(group.number, len(group.ranks))
            elif group.state is _S.JOINING and now >= group.deadline:
                seconds = self._size.settings.timeout
                reason = f"its ranks did not step within {seconds:.0f} s (elastic.timeout)"
                yield from self._vacate(group, now, failed=reason)
            elif group.state is _S.JOINING and not self._is_wanted(group):
                # They leave as for Slurm, whether they have come meanwhile or not.
                self._begin_to_leave(group, self._resized(), now)
                yield ev.AskGroupToLeave(group.companion, group.steps)
            elif group.state is _S.IN and group.apart_seconds >= self._size.settings.timeout:
                yield from self._give_up(group, now)
            elif group.state is _S.LEAVING and now >= group.deadline:
                yield from self._vacate(group, now)
            elif group.state is _S.LEAVING and now >= group.remind_at:
                yield self._ask_to_leave(group, now)
            elif group is self._stand_in and group.state is _S.ASKED and group.companion:
                if not self._is_next(group):
                    yield from self._vacate(group, now)
            elif group.state is _S.ASKED and group.companion and not self._is_wanted(group):
                yield from self._vacate(group, now)
            elif group.state is _S.IN and not self._is_wanted(group):
                yield from self._let_go(group, now)
            elif group.state is _S.IN and not self._is_next(group):
                others = "only some sizes are allowed"
                reason = "all is whole again" if group is self._stand_in else others
                self._begin_to_leave(group, reason, now)
                yield ev.AskGroupToLeave(group.companion, group.steps)

    def _give_up(self, group: NodeGroup, now: float) -> Iterator[ev.SizeAction]:
        """Give nodes back of which the training has no use, and whose ranks would not hear an order
        to leave."""
        seconds = self._size.settings.timeout
        reason = f"the others stepped for {seconds:.0f} s, its ranks did not (elastic.timeout)"
        self._begin_to_leave(group, reason, now)
        yield from self._vacate(group, now, failed=reason)

    def _cut_off(self, now: float) -> Iterator[ev.SizeAction]:
        """Tell the training of ranks that step on nodes which were given back long ago: Slurm has
        lost them (slurmstepd was killed, or the node taken out of slurm.conf), and gives their node
        to others."""
        for node, left in tuple(self._behind.items()):
            if now < left.ended_by:
                continue
            del self._behind[node]
            here = {peer.seat for peer in self._seen.peers if peer.node == node}
            is_new = any(node in group.nodes for group in self.groups)
            if here & set(left.slot.seats) & set(self._seen.running) and not is_new:
                reason = f"given back, and its ranks step still; {left.reason}"
                yield TellTraining(FaultyNode(node, reason, True))
                self.lost.lose(node)

    def _let_go(self, group: NodeGroup, now: float) -> Iterator[ev.SizeAction]:
        """Have a group leave that a person does not want any more: between two steps, however long
        one takes, and not while a loss is mended."""
        if self._steps_with_others(group):
            self._begin_to_leave(group, self._resized(), now)
            group.deadline = math.inf
            yield self._ask_to_leave(group, now)

    def _resized(self) -> str:
        return f"resized to {self._target.nodes} nodes by {self._target.by}"

    def _ask_to_leave(self, group: NodeGroup, now: float) -> ev.SizeAction:
        group.remind_at = now + ASK_AGAIN_SECONDS
        return ev.AskGroupToLeave(group.companion, group.steps)

    def _is_wanted(self, group: NodeGroup) -> bool:
        """Return whether a person has not asked for fewer groups than there are with this one."""
        sizes = enumerate(self._size.reached)
        enough = (number for number, size in sizes if size - self._taken >= self._target.nodes)
        count = next(enough, len(self._size.groups))
        if group is self._stand_in or count == len(self._size.groups):
            return True
        others = self.groups[:-1]
        # In order each size has groups of its own; else those that have come first stay.
        ordered = others if self._size.in_order else sorted(others, key=seniority)
        return group in ordered[:count]

    def _may_ask_for(self, group: NodeGroup) -> bool:
        """Return whether few enough requests wait in Slurm's queue: each is a job in it, and is
        looked at every second. While Slurm refuses, one at a time is tried."""
        if group is self._stand_in:
            return True
        refused = self._refused
        if refused is not None and refused is not group and self._is_next(refused):
            return False
        return sum(other.state is _S.ASKED for other in self.groups) < MOST_ASKED

    def _is_next(self, group: NodeGroup) -> bool:
        """Return whether this group is wanted: those are in that have to come before it; or the
        stand-in is needed."""
        if group is self._stand_in:
            wanted = [other for other in self.groups[:-1] if self._is_wanted(other)]
            whole = all(other.state is _S.IN for other in wanted)
            return bool(self._sick) or (group.state is _S.IN and not whole)
        if not self._is_wanted(group):
            return False
        before = self.groups[: group.number] if self._size.in_order else []
        return all(other.state is _S.IN for other in before)


_TAKEN_BY_SLURM = ("PREEMPTED", "NODE_FAIL", "SUSPENDED")
"""States of a companion whose nodes Slurm gives to others, or has lost."""


def _how_it_ended(seen: ev.CompanionSeen) -> str:
    """Return in words how a companion came to have no nodes any more."""
    waited = "" if seen.nodes else " while it waited"
    how = {
        "": "is not known to Slurm any more",
        "SUSPENDED": "was suspended",
        "PREEMPTED": "was preempted",
        "NODE_FAIL": f"lost its nodes {','.join(seen.nodes)}",
        "CANCELLED": f"was cancelled{waited}",
        "COMPLETING": "was ended",
        "PENDING": "was requeued",
    }
    return f"job {seen.companion} {how.get(seen.state, f'has ended ({seen.state})')}"
