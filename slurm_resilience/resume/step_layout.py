"""Learn which nodes a step really got, and in which order.

What was planned is a guess: `-r`, `-F`, other steps of the job and the site's topology choose too.
As soon as each node's slurmstepd has told of the step, it is known; slurmctld is asked where one
has not told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.resume import report
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.srun.environment import Attempt
from slurm_resilience.resume.srun.step import SrunStep, find_step
from slurm_resilience.slurm.client import StepInfo
from slurm_resilience.slurm.hostlists import fold

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 0.25, 10.0
"""Between two questions to Slurm: a step may wait for its nodes for a long time."""
ORDER_SECONDS = 5.0
"""For the last node to say its place in the step; Slurm's order of nodes counts after that."""
WAIT_SECONDS, WAITS_ON_SECONDS = 20.0, 600.0
"""From the start of an srun until the log tells that Slurm has its step wait, and between two such
lines."""
MOST_NAMED = 8
"""Other steps that such a line names."""
OPEN_SECONDS = 10.0
"""A node that is only sick is not judged by the plan's guess before that, while the step begins."""


class StepLayout:
    """The layout of one step: looked for until it is known."""

    def __init__(
        self,
        context: SupervisorContext,
        planned: Attempt,
        step: SrunStep,
        addresses: Mapping[str, str],
    ) -> None:
        """
        Args:
            context: of the supervised srun.
            planned: the attempt, as it was planned.
            step: its srun.
            addresses: of the job's nodes.
        """
        self._context = context
        self._planned = planned
        self._step = step
        self._addresses = addresses
        self._settled = False
        self._shown: StepInfo | None = None
        self._shown_at = 0.0
        self._interval = FIRST_LOOK_SECONDS
        # Slurm cannot show it yet. Where slurmstepd tells of the tasks, its word has us look.
        wait = FIRST_LOOK_SECONDS if step.reports.target else 0.0
        now = context.clock.monotonic()
        self._first_look = self._next_look = now + wait
        self._open_until = now + OPEN_SECONDS
        self._began, self._tell_at = now, now + WAIT_SECONDS
        self._was_told = False

    @property
    def is_open(self) -> bool:
        """Return whether the layout is worth waiting for before something is decided by it."""
        return not self._settled and self._context.clock.monotonic() < self._open_until

    def pause(self, longest: float) -> float:
        """Return how long the caller may wait for news."""
        if self._settled:
            return longest
        if self._shown is not None:
            return min(longest, FIRST_LOOK_SECONDS)
        left = self._next_look - self._context.clock.monotonic()
        return min(longest, max(0.0, left))

    def look(self) -> Attempt | None:
        """Return the attempt as it really is, the first time that this is known; else None."""
        if self._settled:
            return None
        told, number = self._step.reports.whole_step(), self._step.reports.step
        if told is not None and number is not None:
            nodes, tasks = told
            return self._settle(number, nodes, tasks)
        now = self._context.clock.monotonic()
        if self._step.running:
            self._ask(now)
        if self._shown is None:
            return None
        nodes = self._in_order(self._shown.nodes, now)
        return self._settle(int(self._shown.step), nodes, self._shown.tasks) if nodes else None

    def _settle(self, step: int, nodes: tuple[str, ...], tasks: int) -> Attempt:
        self._settled = True
        self._step.name = f"{self._planned.job}.{step}"
        return self._attempt(step, nodes, tasks)

    def begun(self) -> Attempt | None:
        """Return the attempt as the other parts of its world have to know it: with its step and its
        first node, whatever the order of the others; None: these are not known yet."""
        first, shown = self._step.reports.first_node(), self._shown
        if shown is None or first not in shown.nodes:
            return None
        others = (name for name in shown.nodes if name != first)
        return self._attempt(int(shown.step), (first, *others), shown.tasks)

    def _attempt(self, step: int, nodes: tuple[str, ...], tasks: int) -> Attempt:
        return msgspec.structs.replace(
            self._planned,
            step_nodes=nodes,
            master_address=self._addresses.get(nodes[0], nodes[0]),
            step=step,
            # 0: they are not told, or not the same everywhere.
            tasks_per_node=tasks // len(nodes) if tasks % len(nodes) == 0 else 0,
        )

    def _ask(self, now: float) -> None:
        # The first word from a task comes when Slurm shows the step for certain. In its first
        # moment a first attempt has the time: a short step is over before anything is asked.
        told = bool(self._step.reports.nodes())
        is_early = self._planned.number == 1 and now < self._first_look
        is_news = told != self._was_told and not is_early
        if self._shown is not None or (now < self._next_look and not is_news):
            return
        self._was_told = told
        context = self._context
        info = find_step(self._step, context.client, context.allocation.id, context.host)
        self._next_look = now + self._interval
        self._interval = min(2 * self._interval, LONGEST_LOOK_SECONDS)
        if info is not None and info.nodes and info.step.isdecimal():
            self._shown, self._shown_at = info, now
        elif info is not None and now >= self._tell_at:
            self._tell_at = now + WAITS_ON_SECONDS
            self._tell_of_wait(info, now - self._began)

    def _tell_of_wait(self, waiting: StepInfo, seconds: float) -> None:
        """Tell of a step that waits for its turn: srun says nothing as long as it waits."""
        context = self._context
        try:
            steps = context.client.steps(waiting.job)
        except SresError:
            return
        host = context.host.split(".", maxsplit=1)[0]
        gone = [
            one.step
            for one in steps
            if one.srun_host.split(".", maxsplit=1)[0] == host
            and not context.host_calls.lives(one.srun_pid)
        ]
        before = steps_before(waiting, steps, gone)
        report.say(f"Slurm has had the step wait for {seconds:.0f} s: {before}")

    def _in_order(self, nodes: tuple[str, ...], now: float) -> tuple[str, ...]:
        """Return the nodes by node id; none while a node may still say its own."""
        # Those of other parts of its world come behind them.
        told = self._step.reports.nodes()[: len(nodes)]
        if set(told) == set(nodes):
            return told
        waits = self._step.running and now - self._shown_at < ORDER_SECONDS
        if self._step.reports.target and waits:
            return ()
        return nodes


def steps_before(waiting: StepInfo, steps: Sequence[StepInfo], gone: Collection[str] = ()) -> str:
    """Return in words which steps of the job are there before one that waits. Pure.

    Args:
        waiting: the step, which Slurm has given no number yet.
        steps: all of its job.
        gone: those whose srun is gone. Slurm keeps one in its books whose srun could not open its
            files (seen on 22.05), until the job ends.
    """
    running = [one for one in steps if one.step.isdecimal()]
    there = [one for one in running if set(one.nodes) & set(waiting.nodes)]
    if not there:
        return f"no other step runs on {fold(waiting.nodes)}; it may ask for more than they have"
    named = [f"{one.job}.{one.step} on {fold(one.nodes)}" for one in there[:MOST_NAMED]]
    named += ["…"] if len(there) > MOST_NAMED else []
    text = (
        f"{', '.join(named)} runs there; it starts when that ends, or beside it where its srun has "
        "--overlap (no node is at fault)"
    )
    left = [f"{one.job}.{one.step}" for one in there[:MOST_NAMED] if one.step in gone]
    if left:
        text += f"; the srun of {', '.join(left)} is gone: scancel {' '.join(left)} ends its rest"
    return text
