"""The table of auto-resume: cause × rung × (GRES, no GRES) × (sbatch, salloc), as data. Pure.

A cell says what is done to a job, how it was started, and how it has to go on. `table` has every
cell that can be reached once; `CORE` names those that run by default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

STEPS, STOP = 30, 10
"""The first attempt waits at the second one for its fault."""
SIZE = 3
"""Nodes of the step."""

BROKEN = ("power", "cut", "down")
"""Causes after which a node of the step does not work any more."""
SICK = ("xid", "admin")
"""Causes for which a node is left while it still works."""
FIRST = ("first-power", "first-admin")
"""The same of the node with rank 0, which runs the batch script where there is one."""
PASSING = ("rank", "segv", "memory", "nccl", "hang")
"""Causes for which the program is started again where it ran."""
BY_ITSELF = ("segv", "memory", "nccl", "hang", "bug", "eater")
"""Causes that are the program's own doing."""
PERSON = ("cancel", "signal")
CAUSES = (*BROKEN, *SICK, *FIRST, *PASSING, "bug", "eater", "limit", *PERSON)
OTHER_NODE = ("spare", "swap", "companion", "smaller")
RUNGS = ("stay", "relaunch", *OTHER_NODE, "requeue", "stop")
LAUNCHES = ("sbatch", "salloc")


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        cause: what happens to the job.
        rung: the way on that it has to take.
        gres: nodes have GRES, and the job asks for them.
        launch: the command that makes the allocation.
        no_kill: the job outlives a lost node in Slurm's eyes.
    """

    cause: str
    rung: str
    gres: bool
    launch: str
    no_kill: bool = False

    def __str__(self) -> str:
        kind = "gres" if self.gres else "plain"
        return f"{self.cause}-{self.rung}-{kind}-{self.launch}{'-no-kill' * self.no_kill}"

    @property
    def nodes(self) -> int:
        """Return the nodes of the allocation."""
        return SIZE + (self.rung == "spare")

    @property
    def allocation(self) -> tuple[str, ...]:
        """Return the words for sbatch or salloc."""
        words = ("--no-kill",) if self.no_kill else ()
        words += ("--gres=gpu:2",) if self.gres else ()
        if self.cause == "limit":
            words += ("--time=1",)
        if self.launch == "sbatch":
            words += ("--requeue",) if self.rung == "requeue" else ("--no-requeue",)
        return words

    @property
    def srun(self) -> tuple[str, ...]:
        """Return the words for srun."""
        words: tuple[str, ...] = ("--auto-resume=1",)
        if self.rung == "spare":
            words += ("--auto-resume-spares=1",)
        if self.rung == "smaller":
            words += (f"--auto-resume-min-nodes={SIZE - 1}",)
        # The others would wait for a rank that ends with a code of its own.
        return (*words, "--kill-on-bad-exit=1") if self.fault else words

    @property
    def fault(self) -> str:
        """Return what the program itself does; empty: nothing, it is done to it."""
        return (
            self.cause if self.cause in ("segv", "memory", "nccl", "hang", "bug", "eater") else ""
        )

    @property
    def crowded(self) -> bool:
        """Return whether other people's jobs take every other node, and more of them wait."""
        node = self.cause in (*BROKEN, *SICK)
        by_slurm = self.gres or self.cause == "down"
        slurms_own = by_slurm and not self.no_kill and self.launch == "sbatch"
        return node and self.rung in ("requeue", "stop", "stay") and not slurms_own

    @property
    def plan(self) -> str:
        """Return what the job's log has to say; ``{lost}`` is the node."""
        if (self.cause, self.rung) == ("eater", "swap"):
            # The other node comes first, and 22.05 without slurmdbd changes an allocation once: the
            # suspect stays in the job then, and the log tells of a relaunch.
            return "{lost}: 3 attempts ended on it, and the program goes on without it"
        return {
            "stay": "the step runs on",
            "relaunch": "no node is at fault: again on the same nodes",
            "spare": "takes the place of {lost}",
            "swap": "{lost} exchanged for",
            "companion": "a second allocation, job ",
            "smaller": f"{SIZE - 1} of {SIZE} nodes are left, --auto-resume-min-nodes=",
            "requeue": "requeued: start number 2",
            "stop": _STOPS.get(self.cause, ""),
        }[self.rung]

    @property
    def named(self) -> str:
        """Return the cause in the log's words, where another attempt follows."""
        if (self.cause, self.rung) == ("down", "requeue"):
            return "node {lost} went down"  # Slurm requeued the job by itself
        return _NAMES.get(self.cause, "{lost}: ")

    @property
    def result(self) -> str:
        """Return the outcome of the training, to the bit; empty: it is stopped before."""
        if self.rung == "stop":
            return ""
        return training(SIZE, SIZE - (self.rung == "smaller"))


_NAMES = {
    "rank": "(SIGKILL)",
    "eater": "(SIGKILL)",
    "segv": "(SIGSEGV)",
    "memory": "out-of-memory",
    "nccl": "transient",
    "hang": "it hung",
}
_STOPS = {
    "bug": "it is a bug",
    "limit": "time limit is",
    **dict.fromkeys((*BROKEN, *SICK), "not resumed: "),
}


def training(first: int, later: int) -> str:
    """Return the outcome of summing_task.py where nothing fails.

    Args:
        first: ranks until `STOP`.
        later: ranks after it.
    """
    state = 0.5
    for step in range(STEPS):
        parts = [math.sin(state * (rank + 1)) for rank in range(first if step < STOP else later)]
        for part in parts:
            state += part / 3
    return repr(state)


def reachable(cause: str, rung: str, gres: bool, launch: str) -> bool:
    """Return whether a job can come to this rung by this cause."""
    batch = launch == "sbatch"
    elsewhere = rung in ("spare", "smaller", "companion" if gres else "swap")
    if cause in PASSING:
        return rung == "relaunch"
    if cause in ("bug", "limit", *PERSON):
        return rung == "stop"
    if cause == "eater":
        # The program is at fault until another node shows that it was the node.
        return elsewhere and rung != "smaller"
    if cause in FIRST and batch:
        # Slurm ends the script with its node; a node that works is kept where nothing may follow.
        return rung in ("requeue", "stay" if cause == "first-admin" else "stop")
    if cause in FIRST:
        return elsewhere
    if rung == "requeue":
        # A job with GRES is not stopped for a second allocation that is not there.
        return batch and not (gres and cause in SICK)
    if rung == "stay":
        return gres and cause in SICK
    return elsewhere or (rung == "stop" and not (gres and cause in SICK))


def table() -> Iterator[Cell]:
    """Yield every cell that can be reached, once."""
    for gres, cause, rung, launch in product((False, True), CAUSES, RUNGS, LAUNCHES):
        if not reachable(cause, rung, gres, launch):
            continue
        # Without it, Slurm itself requeues a job that loses a node, before sresctld can take the
        # node out of it: for a person's DOWN, and where Slurm cannot give it another (GRES).
        no_kill = (gres or cause == "down") and not (rung == "requeue" and cause in BROKEN)
        yield Cell(cause, rung, gres, launch, no_kill)


CORE = (
    # A crowded cell waits for all nodes, so these come first.
    Cell("power", "requeue", False, "sbatch"),
    Cell("power", "swap", False, "sbatch"),
    Cell("power", "swap", False, "salloc"),
    Cell("power", "spare", False, "sbatch"),
    Cell("xid", "swap", False, "sbatch"),
    Cell("admin", "swap", False, "sbatch", no_kill=True),
    Cell("first-power", "requeue", False, "sbatch"),
    Cell("first-power", "swap", False, "salloc"),
    Cell("rank", "relaunch", False, "sbatch"),
    Cell("bug", "stop", False, "sbatch"),
    Cell("admin", "stay", True, "sbatch", no_kill=True),
    Cell("power", "stop", True, "salloc", no_kill=True),
    Cell("power", "companion", True, "sbatch", no_kill=True),
    Cell("power", "companion", True, "salloc", no_kill=True),
    Cell("power", "requeue", True, "sbatch"),
    Cell("power", "smaller", True, "sbatch", no_kill=True),
    Cell("xid", "companion", True, "sbatch"),
    Cell("admin", "spare", True, "sbatch"),
    Cell("first-power", "requeue", True, "sbatch", no_kill=True),
    Cell("rank", "relaunch", True, "salloc", no_kill=True),
)
"""Those that run by default: each rung with and without GRES, under sbatch and under salloc."""
NEWEST = (
    Cell("power", "swap", False, "sbatch"),
    Cell("xid", "swap", False, "sbatch"),
    Cell("first-power", "requeue", False, "sbatch"),
    Cell("rank", "relaunch", False, "sbatch"),
)
"""Those that run by default on the newest Slurm, too."""
