"""Rules that must hold in a simulated training that grows and shrinks. Pure.

1. Each step is done once: its samples count once, and none is left out.
2. A world has at least the ranks that the program asked for, whole replicas, and each seat once.
3. A rank that leaves as it was asked to takes no part of the newest state with it.
   Nor does it go with those that stood still for a moment, be they all that hold it.
4. A world has one of the sizes that are allowed, or is smaller than the smallest of them: then the
   job's own ranks were lost.
5. No training begins anew while a rank that has the state of the present one lives.
6. Where nothing but the size changes, no step takes longer than a bound for each new world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slurm_resilience.mesh.model import View
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.simulate.invariants import InvariantBroken
from slurm_resilience.simulate.sim_process import SimProcess

STANDSTILL_SECONDS = 1.0
"""For a step, of 0.05 to 0.15 s, and again for each world that was made since the last one: ranks
leave their block within 0.2 s, and several that come or go one after the other end a world each."""
UNKNOWN_SECONDS, KNOWN_SECONDS = 9.0, 0.5
"""So long after the death of another holder a rank may believe that it still lives: its machine has
no power, or a network is cut; else."""


class ElasticRules:
    """All that the rules remember.

    Args:
        rules: of the training.
        now: tells the simulated time.
        living: returns all processes that run or are stopped.
        slept: tells whether a process only stood still for a moment.
        may_go_on: tells whether a process may step again.
        calm: nothing but the size changes.
    """

    def __init__(
        self,
        rules: WorldRules,
        now: Callable[[], float],
        living: Callable[[], list[SimProcess]],
        slept: Callable[[SimProcess], bool],
        may_go_on: Callable[[SimProcess], bool],
        *,
        calm: bool,
    ) -> None:
        self._rules = rules
        self._now = now
        self._living = living
        self._slept = slept
        self._may_go_on = may_go_on
        self._done: list[int] = []
        """The generation that has done each step."""
        self._last: tuple[View, float] | None = None
        """The world of the newest step, and when that was done."""
        self._has_faults = self._is_disturbed = not calm
        """The second one: time is no measure any more."""
        self._excused_until = float("-inf")
        self._died_with = -1
        """The newest step of any process that was lost to a fault."""

    def die(self, process: SimProcess, *, is_seen: bool) -> None:
        """Note the loss of a process that did not leave by itself.

        Args:
            process: that is lost.
            is_seen: the others see its connections close.
        """
        self._is_disturbed = True
        until = self._now() + (KNOWN_SECONDS if is_seen else UNKNOWN_SECONDS)
        self._excused_until = max(self._excused_until, until)
        self._died_with = max(self._died_with, process.program.step)

    def heal(self, members: Sequence[SimProcess]) -> int:
        """Return the step of which a new world has a whole state: the newest there is.

        Raises:
            InvariantBroken: it is older than one that was done, and no fault explains that.
        """
        if all(process.program.step < 0 for process in members):
            holders = [one for one in self._living() if one.program.step > 0]
            beside = [one.id for one in holders if self._may_go_on(one)]
            if beside:
                raise InvariantBroken(f"a world begins anew, and {beside[0]} lives with the state")
        steps = sorted({process.program.step for process in members}, reverse=True)
        step = max(0, next((step for step in steps if self._is_whole(members, step)), 0))
        newest = len(self._done)
        others = [one for one in self._living() if one not in members and not self._slept(one)]
        away = [one for one in others if one.program.step > step]
        # Behind a cut, or stopped: it is lost to these.
        explained = self._died_with > step or (self._has_faults and away)
        if step < newest and not explained:
            raise InvariantBroken(
                f"of step {newest} no whole state is left, and a world goes on from step {step}"
            )
        del self._done[step:]
        return step

    def step(self, view: View, step: int) -> None:
        """Check a world that has done its next step.

        Raises:
            InvariantBroken: it must not have.
        """
        rules, now = self._rules, self._now()
        if step != len(self._done) + 1:
            raise InvariantBroken(f"step {step} is done after step {len(self._done)}")
        self._done.append(view.generation)
        seats = {member.peer.seat for member in view.members}
        parts, left_over = divmod(view.size, rules.replica_size)
        if view.size < rules.min_world or left_over or not parts or len(seats) < view.size:
            raise InvariantBroken(f"a world of {view.size} ranks on seats {sorted(seats)} steps")
        smallest = min(rules.sizes, default=0)
        too_few = view.size < smallest and self._has_faults
        if rules.sizes and view.size not in rules.sizes and not too_few:
            raise InvariantBroken(f"{view.size} ranks step, which is none of {rules.sizes}")
        before, at = self._last or (view, now)
        self._last = view, now
        worlds = view.counter - before.counter
        if now - at > STANDSTILL_SECONDS * (1 + worlds) and not self._is_disturbed:
            took = f"{now - at:.2f} s and {worlds} worlds"
            raise InvariantBroken(f"step {step} took {took}, and only the size has changed")

    def leave(self, process: SimProcess) -> None:
        """Check that a process may go that was asked to: what it holds is held by others.

        Raises:
            InvariantBroken: it is the last that holds a part of the newest state.
        """
        others = [other for other in self._living() if other is not process]
        newest = process.program.step
        lost = self._is_whole([process, *others], newest) and not self._is_whole(others, newest)
        newer = any(other.program.step > newest for other in others)
        if lost and not newer and self._now() > self._excused_until:
            raise InvariantBroken(
                f"{process.id} leaves with a part of step {newest} that is its own"
            )

    def _is_whole(self, processes: Iterable[SimProcess], step: int) -> bool:
        if step <= 0:
            return True  # all can make the first state
        parts = {one.program.position for one in processes if one.program.step == step}
        return parts >= set(range(self._rules.replica_size))
