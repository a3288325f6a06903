"""The lent nodes of a simulated elastic training: they come when they are free, and Slurm takes
them back within a GraceTime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

import msgspec

from slurm_resilience.mesh.model import View
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.simulate.elastic_rules import ElasticRules
from slurm_resilience.simulate.invariants import TrainingEnd
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.simulate.sim_process import SimProcess

LOAN_SECONDS = (0.5, 4.0)
"""A node is free, or lent, for so long."""
GRACE_SECONDS = (1.5, 3.0, 6.0)
IMPORT_SECONDS = 0.8
"""The ranks of a group come within this time of each other."""
SIGNAL_SECONDS = 0.05
"""Within which all of them get SIGTERM."""
CALM_SHARE = 0.6
"""Runs in which nothing but the size changes."""
ALL_AT_ONCE_SHARE = 0.3
"""Preemptions that take all that is lent."""
NAMED_SHARE = 0.3
"""Runs in which only some sizes are allowed. Drawn apart from all else, so that the other runs stay
the same as before."""
CHANGE_SHARE, CHANGE_SECONDS = 0.3, 0.5
"""Runs in which lent nodes are also taken back in the middle of a change of size, most of them with
sizes that are allowed; and how soon after the change has begun. Drawn apart, too."""
CHANGE_NAMED_SHARE = 0.7
CHANGE_GRACE_SECONDS = (0.2, *GRACE_SECONDS)
"""The first one is shorter than a change takes."""
HARD_TIMES_SHARE, HARD_TIMES_SECONDS = 0.5, 1.0
"""Losses of the job's own ranks that such a preemption follows, and how soon."""


class ElasticTraining(Protocol):
    """A training, as its loans see it."""

    schedule: Schedule
    processes: dict[str, SimProcess]
    end: TrainingEnd

    def spawn(self, seat: int, incarnation: int, node: str = "") -> None:
        """Start a process."""
        ...

    def living(self) -> list[SimProcess]:
        """All processes that run or are stopped."""
        ...

    def slept(self, process: SimProcess) -> bool:
        """Tell whether nothing was wrong with a process but that it stood still for a moment."""
        ...

    def may_go_on(self, process: SimProcess) -> bool:
        """Tell whether a process may step again."""
        ...

    def kill(self, process: SimProcess, power: bool = False, replace: bool = True) -> None:
        """End a process."""
        ...


class Loans:
    """The groups of ranks on lent nodes.

    Args:
        training: has them.
        rules: of a training that keeps its size.
        seed: of the run.
    """

    def __init__(self, training: ElasticTraining, rules: WorldRules, seed: int) -> None:
        self._training = training
        self._random = random = Random(f"loans {seed}")
        self.is_calm = random.random() < CALM_SHARE
        self._changes = Random(f"changes of size, 12 {seed}")
        self._hits_changes = self._changes.random() < CHANGE_SHARE
        self._size = 0
        """Ranks of the newest world."""
        fits = [size for size in (1, 2, 4) if not rules.seats % size and rules.seats > size]
        size = random.choice(fits)
        core = size * random.choice((1, random.randint(1, rules.seats // size - 1)))
        least = random.choice((size, size, core))
        self.rules = msgspec.structs.replace(
            rules,
            replica_size=size,
            core=core,
            min_world=least,
            patience=0.0,
            sizes=_named_sizes(
                seed,
                range(core, rules.seats + 1, size),
                CHANGE_NAMED_SHARE if self._hits_changes else NAMED_SHARE,
            ),
        )
        step = size * random.choice((1, 1, 2))
        self.check = ElasticRules(
            self.rules,
            lambda: training.schedule.now,
            training.living,
            training.slept,
            training.may_go_on,
            calm=self.is_calm,
        )
        first = range(core, rules.seats, step)
        self._groups = [range(seat, min(seat + step, rules.seats)) for seat in first]
        self._here: set[int] = set()
        """Numbers of the groups that are lent."""
        self._kept_until = 0.0
        """Until then Slurm takes none back."""
        self._is_over = False

    def begin(self) -> None:
        """Have each group come for the first time."""
        for number in range(len(self._groups)):
            self._later(self._come, number)

    def end(self) -> None:
        """Lend all groups for good."""
        self._is_over = True
        for number in range(len(self._groups)):
            self._come(number)
            for seat in self._groups[number]:
                if self._newest(seat) is None:  # it is importing still
                    self._training.spawn(seat, 0)

    def keep(self, seconds: float) -> None:
        """Have Slurm take no lent node back for so long, nor end what it has asked to leave."""
        self._kept_until = self._training.schedule.now + seconds

    def lose(self, process: SimProcess, *, is_seen: bool) -> None:
        """Note the loss of a process that did not leave by itself.

        Args:
            process: that is lost.
            is_seen: the others see its connections close.
        """
        self.check.die(process, is_seen=is_seen)
        if process.peer.seat < self.rules.core and self._random.random() < HARD_TIMES_SHARE:
            # Those that are lent may have the only copy of what it held.
            soon = self._random.random() * HARD_TIMES_SECONDS
            self._training.schedule.after(soon, self._preempt_all)

    def has(self, seat: int) -> bool:
        """Tell whether a seat is on a node of the training now."""
        return seat < self.rules.core or any(seat in self._groups[n] for n in self._here)

    def advance(self, members: Sequence[SimProcess], view: View, turn: int) -> int:
        """Let a world heal its members, or do a step; return its step then.

        Args:
            members: all of the world's.
            view: the world.
            turn: 0 heals.
        """
        if self._training.end.begun:
            # Processes that come later find that out.
            return max(process.program.step for process in members) + (turn > 0)
        if turn == 0:
            step = self.check.heal(members)
            if view.size != self._size:
                self._hit_change()
            self._size = view.size
        else:
            step = members[0].program.step + 1
            self.check.step(view, step)
        for process in members:
            # A step whose gradients all ranks have is finished by all of them.
            process.program.step = step
            if turn == 0:
                process.hold(view)
        return step

    def _later(self, call: Callable[[int], None], number: int) -> None:
        self._training.schedule.after(self._random.uniform(*LOAN_SECONDS), call, number)

    def _newest(self, seat: int) -> SimProcess | None:
        taken = [p for p in self._training.processes.values() if p.peer.seat == seat]
        return max(taken, key=lambda process: process.peer.incarnation, default=None)

    def _come(self, number: int) -> None:
        if number in self._here:
            return
        self._here.add(number)
        for seat in self._groups[number]:
            newest = self._newest(seat)
            if newest is not None and newest.alive:
                # Its node is given back only when its processes have ended.
                self._training.kill(newest, replace=False)
            incarnation = 0 if newest is None else newest.peer.incarnation + 1
            node = f"lent{number}.{incarnation}.{seat}"
            if self._is_over:
                self._training.spawn(seat, incarnation, node)
                continue
            late = self._random.random() * IMPORT_SECONDS
            self._training.schedule.after(late, self._training.spawn, seat, incarnation, node)
        if not self._is_over:
            self._later(self._preempt, number)
            self._hit_change()

    def _hit_change(self) -> None:
        """Have nodes taken back while the world changes its size, now and then."""
        if self._hits_changes and self._changes.random() < 0.5:
            soon = self._changes.random() * CHANGE_SECONDS
            self._training.schedule.after(soon, self._preempt_some)

    def _preempt_some(self) -> None:
        if self._is_over or self._training.schedule.now < self._kept_until:
            return
        grace = self._changes.choice(CHANGE_GRACE_SECONDS)
        for number in sorted(self._here):
            if self._changes.random() < 0.5:
                self._take_back(number, grace)

    def _preempt(self, number: int) -> None:
        if self._training.schedule.now < self._kept_until:
            self._training.schedule.at(self._kept_until, self._later, self._preempt, number)
        elif self._random.random() < ALL_AT_ONCE_SHARE:
            self._preempt_all()
        elif number in self._here and not self._is_over:
            self._take_back(number, self._random.choice(GRACE_SECONDS))

    def _preempt_all(self) -> None:
        if self._training.schedule.now < self._kept_until:
            return
        grace = self._random.choice(GRACE_SECONDS)
        for number in sorted(self._here) if not self._is_over else ():
            self._take_back(number, grace)

    def _take_back(self, number: int, grace: float) -> None:
        self._here.discard(number)
        for seat in self._groups[number]:
            process = self._newest(seat)
            if process is not None and process.alive:
                soon = self._random.random() * SIGNAL_SECONDS
                self._training.schedule.after(soon, process.ask_to_leave)
                self._training.schedule.after(grace, self._kill, process)
        self._training.schedule.after(grace + self._random.random(), self._free, number)

    def _kill(self, process: SimProcess) -> None:
        if self._training.schedule.now < self._kept_until:
            self._training.schedule.at(self._kept_until, self._kill, process)
        elif process.alive:
            self._training.kill(process, replace=False)

    def _free(self, number: int) -> None:
        if not self._is_over:
            self._later(self._come, number)


def _named_sizes(seed: int, possible: range, share: float) -> tuple[int, ...]:
    """Return the sizes that a world may have, those of the core and of the whole among them; empty:
    any."""
    random = Random(f"allowed sizes {seed}")
    if random.random() >= share:
        return ()
    between = [size for size in possible[1:-1] if random.random() < 0.5]
    return possible[0], *between, possible[-1]
