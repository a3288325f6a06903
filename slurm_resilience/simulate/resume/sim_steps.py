"""The steps that a simulated program reports, its hangs, and the rule on both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.config import HangSettings
from slurm_resilience.resume.progress.hang_evidence import NodeSigns, ProcessSign
from slurm_resilience.resume.progress.hang_rule import learn_limit
from slurm_resilience.resume.progress.stack_gathering import AskedNodes
from slurm_resilience.resume.progress.step_listener import StepListener
from slurm_resilience.resume.progress.step_report import StepLine
from slurm_resilience.simulate.resume.resume_rules import ResumeRule
from slurm_resilience.simulate.resume.sim_nodes import NodeContact, SimStep

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.resume_world import ResumeWorld

SETTINGS = HangSettings(floor=120.0, steps=5, gather=30.0)
LOST_SHARE = 0.05
"""Lines of which the network loses so many; those of a step are lost together."""
LONG_EVERY_STEPS = 12
"""Each so many steps one takes longer: an evaluation, a checkpoint."""
LONGER_FACTOR = 3.0
"""A long step takes up to so many times as long as the first of them."""
UNTOLD_FACTOR = 2.0
"""A wait may be heard as long as two: the line between was lost."""
SLACK_SECONDS = 120.0
"""For the supervisor's looks, its questions to nodes, and a node's answer that was lost."""
LOOK_SECONDS = 5.0
ENDS = "what is done  the step is ended"


class StepHabits(msgspec.Struct, frozen=True):
    """The way in which a program reports its steps."""

    seconds: float
    """Between two steps."""
    long_seconds: float
    """The first long step."""
    hangs_after: int | None = None
    """Steps of the first attempt after which a rank stops; None: none does."""


def draw_habits(random: Random) -> StepHabits | None:
    """Return how a program reports its steps; None: it reports none."""
    if random.random() < 0.5:
        return None
    hangs = random.randint(2 * SETTINGS.steps, 40) if random.random() < 0.5 else None
    long_seconds = random.uniform(1.0, SETTINGS.floor / UNTOLD_FACTOR)
    return StepHabits(random.uniform(3.0, 20.0), long_seconds, hangs)


class SimStepListener(StepListener):
    """Hears without a socket."""

    def __init__(self, steps: SimSteps) -> None:
        super().__init__()
        self._steps = steps

    def expect(self, node_address: str, take: Callable[[StepLine], None]) -> str:
        """Hand an attempt's lines on from now on."""
        self._steps.take = take
        return "simulated 1 token"


class SimSteps:
    """The steps of the present attempt's program."""

    def __init__(self, habits: StepHabits | None, random: Random) -> None:
        self._habits = habits
        self._random = random
        self.take: Callable[[StepLine], None] = lambda _: None
        self._count = 0
        """Steps of this attempt."""
        self._base = self._kept = 0
        """Steps behind the checkpoint from which it went on, and behind the newest one."""
        self._hung: SimStep | None = None
        self._told = 0
        self._longest = 0.0
        self._still_seconds = 0.0
        """Since when the hung step stands, as long as all works that is needed to see it."""
        self._hung_once = False
        self._unanswered: SimStep | None = None
        """A step of which no node told once: it is asked again only after another limit."""

    def is_hung(self, step: SimStep) -> bool:
        """Return whether a program does nothing any more."""
        return self._hung is not None and self._hung.srun.token == step.srun.token

    def begin(self, world: ResumeWorld, step: SimStep) -> None:
        """Begin an attempt's steps."""
        self._count = self._told = 0
        self._base = self._kept
        self._longest = self._still_seconds = 0.0
        self._hung = None
        if self._habits is not None:
            world.schedule.after(self._next_seconds(), self._step, world, step)

    def checkpoint(self) -> None:
        """Keep the work so far."""
        self._kept = self._base + self._count

    def _next_seconds(self) -> float:
        habits = self._habits
        assert habits is not None
        if (self._count + 1) % LONG_EVERY_STEPS:
            return habits.seconds * self._random.uniform(0.9, 1.1)
        first = self._count < LONG_EVERY_STEPS
        return habits.long_seconds * (1.0 if first else self._random.uniform(1.0, LONGER_FACTOR))

    def _step(self, world: ResumeWorld, step: SimStep) -> None:
        habits = self._habits
        assert habits is not None
        if not world.program.is_at_work(step) or self.is_hung(step):
            return
        if habits.hangs_after == self._count and not self._hung_once:
            self._hung, self._hung_once = step, True
            world.seen.budget.disturb()
            world.note(f"FAULT: the tasks of step {step.name} make no more progress")
            world.schedule.after(LOOK_SECONDS, self._look, world, step)
            return
        self._count += 1
        told = self._random.random() >= LOST_SHARE
        self._told += told
        number = self._base + self._count
        for task in step.living() if told else ():
            self.take(StepLine(task.number, number))
        if told:
            world.seen.budget.furthest.told(number, world.schedule.now)
        wait = self._next_seconds()
        self._longest = max(self._longest, wait)
        world.schedule.after(wait, self._step, world, step)

    # -- the rule -----------------------------------------------------------------------------

    def heard_line(self, world: ResumeWorld, text: str) -> None:
        """Check a line of the log: no step is ended for a hang that makes progress."""
        if not text.startswith(ENDS):
            return
        for step in world.steps.values():
            if world.program.is_at_work(step) and not self.is_hung(step):
                world.broken(ResumeRule.HANG, f"step {step.name} makes progress, and is ended")

    def _look(self, world: ResumeWorld, step: SimStep) -> None:
        """Check from time to time that a hang is ended within the bound."""
        if not self.is_hung(step) or not step.srun.running or step.killed_at is not None:
            return
        if not world.program.is_at_work(step):
            return  # another fault ends it
        # What was asked in vain is asked again after another limit.
        self._still_seconds = self._still_seconds + LOOK_SECONDS if world.is_clear else 0.0
        longest = UNTOLD_FACTOR * self._longest
        # Once more, where no node answered the first time.
        bound = 3 * learn_limit(longest, SETTINGS.floor) + SLACK_SECONDS
        if self._told >= SETTINGS.steps and self._still_seconds > bound:
            world.broken(ResumeRule.HANG, f"step {step.name} hangs for {bound:.0f} s")
        world.schedule.after(LOOK_SECONDS, self._look, world, step)

    def node_signs(
        self, world: ResumeWorld, asked: Sequence[AskedNodes], token: str
    ) -> tuple[NodeSigns, ...]:
        """Return what the nodes tell of an attempt's processes."""
        names = [name for part in asked for name in part.nodes]
        steps = [step for step in world.steps.values() if step.srun.token == token]
        first = steps[0] if steps else None
        if first is not self._unanswered and self._random.random() < 0.1:
            self._unanswered = first
            return ()
        return tuple(
            NodeSigns(
                name,
                tuple(
                    ProcessSign(1000 + task.number, task.number, "S")
                    for step in steps
                    for task in step.living()
                    if task.node == name
                ),
            )
            for name in names
            if world.nodes[name].contact is NodeContact.FINE
        )
