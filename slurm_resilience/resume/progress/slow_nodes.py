"""Name the nodes whose ranks are slow, from the times of their own work that ranks tell. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from slurm_resilience.resume.progress.step_report import StepLine
from slurm_resilience.resume.progress.straggler import WINDOW, Straggler, stragglers

ENOUGH_STEPS = 25
"""Steps of a rank before it is judged: half of what is remembered. With few steps ordinary jitter
makes one rank the slowest."""


class SlowNodes:
    """The own times of all ranks of one attempt, and the ranks that were named."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._steps: dict[int, int] = {}
        self._named: dict[int, Straggler] = {}

    def hear(self, line: StepLine) -> None:
        """Count a line. It tells the mean of all steps since the line before it."""
        if line.step is None or line.own_seconds <= 0:
            return
        before = self._steps.get(line.rank)
        self._steps[line.rank] = line.step
        count = 1 if before is None else min(WINDOW, max(1, line.step - before))
        self._times[line.rank].extend([line.own_seconds] * count)

    def slow(self) -> list[Straggler]:
        """Return the slow ranks, the slowest first."""
        known = {rank: tuple(t) for rank, t in self._times.items() if len(t) >= ENOUGH_STEPS}
        return stragglers(known)

    def news(self, nodes: Mapping[int, str]) -> list[str]:
        """Return a line for each node that has become slow, or is slow no more.

        Args:
            nodes: the node of each rank, as far as it is known.
        """
        found = {one.seat: one for one in self.slow()}
        fresh = _by_node([rank for rank in found if rank not in self._named], nodes)
        gone = _by_node([rank for rank in self._named if rank not in found], nodes)
        lines = []
        for node, ranks in fresh.items():
            worst = max((found[rank] for rank in ranks), key=lambda one: one.slowdown)
            usual = worst.seconds / worst.slowdown
            lines.append(
                f"{_who(node, ranks)} holds up the others: {worst.seconds:.3g} s of its own work "
                f"a step, {worst.slowdown:.1f} times as much as usual ({usual:.3g} s)"
            )
        for node, ranks in gone.items():
            lines.append(f"{_who(node, ranks)} is as fast as the others again")
        self._named = found
        return lines


def _by_node(ranks: list[int], nodes: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        found[nodes.get(rank, "")].append(rank)
    return found


def _who(node: str, ranks: list[int]) -> str:
    # Late: no step waits for what only a slow node needs.
    from slurm_resilience.flight.culprit import ranks_in_words

    return f"{node} ({ranks_in_words(ranks)})" if node else ranks_in_words(ranks)
