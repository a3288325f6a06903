"""Rules that must hold after every event of a simulated training. Pure.

1. Two worlds never both go on.
2. All members of a world that steps agree on it.
3. A member that lives and answers is never given up.
4. With faults over, a world forms within a bound of beats.
5. A training ends with a process that has done its last step; once one has ended so, all do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from slurm_resilience.mesh.model import View
from slurm_resilience.simulate.sim_process import SimProcess


class InvariantBroken(Exception):
    """Something happened that must never happen."""


class Lineage:
    """The worlds that stepped, in the order of their steps.

    Args:
        lives: does any member of a world live? After the death of all, the numbers of generations
            begin again.
    """

    def __init__(self, lives: Callable[[View], bool]) -> None:
        self._lives = lives
        self._newest = 0
        self._views: dict[int, View] = {}
        self.worlds = 0
        self.steps = 0

    def agree(self, members: Iterable[SimProcess], view: View) -> None:
        """All members of a world are about to work together: check that they mean the same one."""
        known = self._views.get(view.generation)
        if known is None or not self._lives(known):
            known = self._views[view.generation] = view
        for process in members:
            if process.program.inside != known:
                raise InvariantBroken(
                    f"{process.id} is in another world {view.counter} than "
                    f"{view.members[0].peer.id}"
                )

    def _must_be_known(self, newest: View) -> bool:
        """Tell whether a world lives, of which the others must know: where only newcomers live in
        it, they cannot, once they are told of the deaths of all its older members."""
        before = (v for v in self._views.values() if v.generation < newest.generation)
        known = {member.peer.id for view in before for member in view.members}
        older = tuple(member for member in newest.members if member.peer.id in known)
        return self._lives(msgspec.structs.replace(newest, members=older) if older else newest)

    def step(self, view: View) -> None:
        """Check, when a world has committed a step, that no newer one has done so before."""
        self.steps += 1
        if view.generation < self._newest and self._must_be_known(self._views[self._newest]):
            raise InvariantBroken(
                f"world {view.counter} ({_seats(view)}) steps, although a newer one "
                f"({_seats(self._views[self._newest])}) has stepped"
            )
        if view.generation != self._newest:
            self.worlds += 1
            self._newest = view.generation


class TrainingEnd:
    """The processes that ended because the training was over.

    Args:
        last_step: the training's.
    """

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step
        self.begun = False
        """One has ended so."""
        self.written = False
        """One that had done the last step has, and wrote it down in the rendezvous."""

    def leave(self, process: SimProcess) -> None:
        """Check, when a process has ended as done, that there is a result."""
        done = process.program.done
        if not self.begun and not done:
            raise InvariantBroken(
                f"{process.id} ends as done at step {process.program.step}, and no process has "
                f"done the last one"
            )
        self.begun = True
        self.written = self.written or done


def _seats(view: View) -> str:
    return "seats " + ", ".join(str(member.peer.seat) for member in view.members)
