"""Rules on the growth of a simulated elastic step: what an administrator may count on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.simulate.resume.resume_rules import ResumeRule
from slurm_resilience.simulate.resume.sim_nodes import (
    LentMark,
    LentState,
    NodeContact,
    SimCompanion,
)

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld

UNUSED_SECONDS = 25.0
"""Nodes of a companion are given back, or used, within so long, while all that has to be asked for
that answers."""
ASKS_SECONDS, JOINS_SECONDS = 75.0, 60.0
"""A step asks for nodes that it may have after so long, where no pause holds; and that for ranks
which have been started, beside `elastic.timeout`."""
TARGET_SECONDS = 200.0
"""A step that a person has made smaller has given nodes back after so long."""
LAST_ANSWERS_SECONDS = 100.0
"""Orders may have waited in line for so long after Slurm has answered badly."""
SLACK_SECONDS = 1.0
"""The supervisor counts from when it has seen an end."""
_LATER = re.compile(r"not grown: (?P<why>.*); asked again in (?P<seconds>\d+) s")
_SIZE = re.compile(r"(?:grew|shrank) to (?P<nodes>\d+) nodes ")


class GrowthRules:
    """All that the rules remember of one run."""

    def __init__(self, world: ResumeWorld, size: ElasticSize, *, is_calm: bool) -> None:
        """
        Args:
            world: the run's.
            size: what srun's options ask for.
            is_calm: nothing happens in this run but that nodes become free, and are taken back.
        """
        self._world = world
        self.size = size
        self._is_calm = is_calm
        self.target = size.most
        """Nodes that a person wants, or all."""
        self._may_be_small = False
        """He has wanted fewer before he requeued the job, and that may hold still."""
        self._had_sick_nodes = False
        """Since then one group more may be asked for: the stand-in."""
        self._ended: list[tuple[float, float]] = []
        """When each group's nodes or request were gone, in this attempt, and the pause after it."""
        self._excused_until = 0.0
        self._vacant_seconds = self._target_seconds = 0.0
        self.grown = 0
        """So many times ranks have come."""

    # -- what happens -------------------------------------------------------------------------

    def attempt_begins(self) -> None:
        """Begin another attempt: it knows nothing of what the others had."""
        self._ended.clear()
        self._excused_until = self._vacant_seconds = self._target_seconds = 0.0

    def resized(self, nodes: int) -> None:
        """Hear a person's word for another number of nodes: no pause holds any more."""
        self.target, self._may_be_small = nodes, False
        self._ended.clear()
        self._excused_until = self._vacant_seconds = self._target_seconds = 0.0

    def requeued_by_person(self) -> None:
        """Forget a person's earlier word: the job begins anew, with all that it may have, unless
        faults before that are to be counted on."""
        self._may_be_small = self.target < self.size.most
        self.target = self.size.most

    def _living(self) -> Iterator[tuple[SimCompanion, LentState]]:
        """Yield the companions that the supervisor of this run knows, and has not given back."""
        world = self._world
        for companion in world.companions.values():
            lent = companion.lent
            if (
                lent is None
                or LentMark.ANSWERED not in lent.marks
                or lent.given_back_at is not None
            ):
                continue
            if companion.restarts == world.job.restarts and LentMark.RENAMED not in lent.marks:
                yield companion, lent

    @property
    def _groups(self) -> list[int]:
        """Return the nodes of each group that may be asked for."""
        stand_in = [self.size.groups[0]] if self._had_sick_nodes else []
        return [*self.size.groups, *stand_in]

    def asked(self, nodes: int) -> None:
        """Check a request for a companion."""
        world, now = self._world, self._world.schedule.now
        self._had_sick_nodes |= any(node.shown.is_fail for node in world.nodes.values())
        # Where no answer tells that a person took a node, it was left as a sick one is.
        is_untold = now < world.books.answers_well + LAST_ANSWERS_SECONDS
        self._had_sick_nodes |= world.books.most_nodes is not None and is_untold
        living = [companion for companion, _ in self._living()]
        free = self._groups
        for companion in living:
            self._take_from(free, companion)
        if len(living) >= len(self._groups) or nodes not in free:
            numbers = ", ".join(str(companion.id) for companion in living)
            world.broken(ResumeRule.ASKED_TWICE, f"{nodes} nodes are asked for beside {numbers}")
        waiting = [at + pause for at, pause in self._ended if now < at + pause - SLACK_SECONDS]
        answers_well = now > world.books.answers_well + LAST_ANSWERS_SECONDS
        if len(living) + len(waiting) >= len(self._groups) and answers_well:
            text = f"nodes are asked for {min(waiting) - now:.0f} s too early"
            world.broken(ResumeRule.SNOOZE, text)

    def _take_from(self, free: list[int], companion: SimCompanion) -> int:
        """Take the group of a companion from those that are free; return its nodes."""
        nodes = companion.lent.asked if companion.lent is not None else 0
        if nodes not in free:
            return 0
        free.remove(nodes)
        return nodes

    def given_back(self, number: int) -> None:
        """Note the supervisor's order to end a companion."""
        companion = self._world.companions.get(number)
        if companion is None or companion.lent is None:
            return
        if companion.lent.given_back_at is None:
            companion.lent.given_back_at = self._world.schedule.now
            self._pause_after(companion, companion.lent)

    def ended(self, companion: SimCompanion) -> None:
        """Note the end of a companion."""
        lent = companion.lent
        assert lent is not None
        if lent.given_back_at is None:
            self._pause_after(companion, lent)

    def _pause_after(self, companion: SimCompanion, lent: LentState) -> None:
        """Count the pause that follows; where a person has ended a request that waited, a longer
        one."""
        settings, world = self.size.settings, self._world
        self._vacant_seconds = 0.0
        by_person = lent.ended_as == "CANCELLED" and not companion.granted_at
        pause = settings.backoff if by_person else settings.snooze
        is_own = companion.restarts == world.job.restarts and LentMark.ANSWERED in lent.marks
        # One that was ended for a person's word, between two sizes, is asked for at once.
        if is_own and self.target >= self.size.most:
            ends = [srun.gone_at for srun in world.sruns if srun.allocation == companion.id]
            # The order may have waited for Slurm's answers to others.
            gone_at = min(world.schedule.now, max(ends, default=world.schedule.now))
            self._ended.append((gone_at, pause))

    # -- what the log tells -------------------------------------------------------------------

    def heard_line(self, text: str) -> None:
        """Check a line of the log."""
        world = self._world
        if found := _LATER.search(text):
            seconds = float(found["seconds"])
            self._excused_until = max(self._excused_until, world.schedule.now + seconds)
            is_slow = "did not step" in found["why"]  # some take long to import
            if self._is_calm and seconds > self.size.settings.snooze and not is_slow:
                world.broken(ResumeRule.GROWS, f"nothing is wrong, and {text}")
        if found := _SIZE.search(text):
            nodes, stand_in = int(found["nodes"]), self.size.groups[0]
            self.grown += found[0].startswith("grew")
            allowed = set(self.size.reached)
            if self._had_sick_nodes:
                allowed |= {size + stand_in for size in allowed}
            if nodes > max(allowed):
                world.broken(ResumeRule.MOST, text)

    # -- what is there ------------------------------------------------------------------------

    def look(self, seconds: float) -> None:
        """Look at what there is, after so many seconds."""
        world = self._world
        self._had_sick_nodes |= any(node.shown.is_fail for node in world.nodes.values())
        if world.stands and self._excused_until > world.schedule.now - seconds:
            self._excused_until += seconds  # a pause does not count an absence either
        living = list(self._living())
        # Of a request that a person has changed, more are given than were asked for.
        nodes = sum(min(len(companion.nodes), lent.asked) for companion, lent in living)
        most = sum(self._groups)
        if nodes > most:
            world.broken(ResumeRule.MOST, f"{nodes} nodes are lent, of {most}")
        for companion, lent in living:
            self._look_at(companion, lent, seconds)
        self._look_at_growth([companion for companion, _ in living], seconds)
        self._look_at_target(nodes, seconds)

    @property
    def _is_clear(self) -> bool:
        """Return whether the supervisor can see and do all that it wants."""
        return self._world.is_clear and self._world.seen.person_ended_at is None

    def _look_at(self, companion: SimCompanion, lent: LentState, seconds: float) -> None:
        """Check that nodes are used, or given back."""
        world = self._world
        used = any(srun.allocation == companion.id and srun.running for srun in world.sruns)
        if used or not companion.nodes or LentMark.SUSPENDED in lent.marks:
            lent.unused_seconds = 0.0
        elif self._is_clear:
            lent.unused_seconds += seconds
        if lent.unused_seconds > UNUSED_SECONDS:
            names = ",".join(companion.nodes)
            text = f"job {companion.id} has {names}, and nothing runs there"
            world.broken(ResumeRule.UNUSED, text)

    def _look_at_growth(self, living: list[SimCompanion], seconds: float) -> None:
        """Check that the step asks for nodes that it may have, and that those which it is given
        take part."""
        world = self._world
        training, now = world.progress.training, world.schedule.now
        if training is None or not (training.is_whole() and self._is_clear):
            self._vacant_seconds = 0.0
            return
        part = [c for c in living if c.nodes and training.steps_on(c.nodes)]
        missing = self._missing_group(living, part)
        vacant = missing and now > self._excused_until
        self._vacant_seconds = self._vacant_seconds + seconds if vacant else 0.0
        if self._vacant_seconds > ASKS_SECONDS:
            text = f"{missing} nodes are not asked for, since {self._vacant_seconds:.0f} s"
            world.broken(ResumeRule.GROWS, text)
        for companion in living:
            self._look_at_start(companion, companion in part, seconds)

    def _look_at_start(self, companion: SimCompanion, takes_part: bool, seconds: float) -> None:
        """Check that the nodes of a companion take part in the training soon, or are given back."""
        world, lent = self._world, companion.lent
        assert lent is not None
        nodes = [world.nodes[name] for name in companion.nodes]
        known = all(node.contact is NodeContact.FINE for node in nodes)
        if takes_part or not nodes or not known or LentMark.SUSPENDED in lent.marks:
            lent.starting_seconds = 0.0
        else:
            lent.starting_seconds += seconds
        if lent.starting_seconds > self.size.settings.timeout + JOINS_SECONDS:
            names = ",".join(companion.nodes)
            text = f"{names} are lent, and take no part since {lent.starting_seconds:.0f} s"
            world.broken(ResumeRule.GROWS, text)

    def _missing_group(self, living: list[SimCompanion], part: list[SimCompanion]) -> int:
        """Return the nodes of a group that is to be asked for, and is not; 0: all are.

        Args:
            living: the companions that wait or run.
            part: those whose ranks step with the others.
        """
        free = list(self.size.groups)
        reached = self.size.core
        if self._may_be_small or (self.size.in_order and len(living) > len(part)):
            return 0  # in order, one comes after the other
        known = [companion.id for companion in living]
        running = [srun for srun in self._world.sruns if srun.running and srun.is_companion]
        if any(srun.allocation not in known for srun in running):
            return 0  # its ranks have still to leave
        for companion in living:
            reached += self._take_from(free, companion)
        return free[0] if free and reached < self.target else 0

    def _look_at_target(self, nodes: int, seconds: float) -> None:
        """Check that a step gives nodes back of which a person wants fewer."""
        world = self._world
        training = world.progress.training
        is_whole = training is not None and training.is_whole()
        above = self.size.core + nodes > self.target and not self._had_sick_nodes
        if above and is_whole and self._is_clear:
            self._target_seconds += seconds
        else:
            self._target_seconds = 0.0
        if self._target_seconds > TARGET_SECONDS:
            text = f"{nodes} nodes are lent, and {self.target} are wanted in all"
            world.broken(ResumeRule.MOST, text)
