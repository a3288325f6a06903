"""Simulated nodes, steps and tasks, as they are and as Slurm sees them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurm_resilience.model import Node

if TYPE_CHECKING:
    from slurm_resilience.simulate.resume.sim_srun import SimSrun


class NodeContact(enum.Enum):
    """The ways in which a node is reached."""

    FINE = "it answers"
    CUT = "its tasks live, and nothing reaches it"
    DEAD = "it has no power"


@dataclass
class SimNode:
    """One node: as it is, and as Slurm shows it."""

    shown: Node
    contact: NodeContact = NodeContact.FINE
    slurmd_away: bool = False
    """Its slurmd does not run: its tasks go on, and no others can be started."""
    eats_by: int = 0
    """A fault that no check sees: tasks end by this signal on it; 0: they do not."""
    holds_tasks: bool = False
    """Its tasks hang in the kernel, and do not die of SIGKILL for a while."""
    back_at: float = float("-inf")
    """When another machine came in its place, or it booted anew."""


class LentMark(enum.Flag):
    """The marks of a companion by which an elastic step grows."""

    ANSWERED = enum.auto()
    """Its number has come to the supervisor."""
    HELD = enum.auto()
    """It waits until a person releases it."""
    SUSPENDED = enum.auto()
    RENAMED = enum.auto()
    """A person has given it another name: it is no companion's any more."""
    PREEMPTED = enum.auto()
    """Slurm has told its tasks to end, and ends it when its GraceTime is over."""


NO_MARK = LentMark(0)


@dataclass(eq=False)
class LentState:
    """All that can become of a companion by which an elastic step grows."""

    asked: int = 0
    """Nodes that the supervisor has asked for; a person may change that in the queue."""
    given_back_at: float | None = None
    """When the supervisor first ordered its end."""
    requeues: int = 0
    """A person has requeued it so often."""
    marks: LentMark = NO_MARK
    ended_as: str = ""
    """Its last state; empty: it is not over."""
    ended_at: float = 0.0
    shown_until: float = 0.0
    """Slurm shows it as COMPLETING for so long at least."""
    starting_seconds: float = 0.0
    """For so long it has had nodes that take no part in the training."""
    unused_seconds: float = 0.0
    """For so long it has had nodes on which nothing ran, while its supervisor could see that."""


@dataclass(eq=False)
class SimCompanion:
    """A second allocation beside the job."""

    id: int
    wants: int
    excluded: tuple[str, ...]
    restarts: int
    """Requeues of the job when it was asked for."""
    supervisor: int
    no_kill: bool = False
    """It was asked for with `--no-kill`: Slurm has it go on without a node that it loses."""
    nodes: tuple[str, ...] = ()
    """None while it waits for them."""
    granted: tuple[str, ...] = ()
    """The nodes that it was given; the first one runs its batch script."""
    granted_at: float = 0.0
    used_at: float = 0.0
    """When a step was last seen to run there."""
    orphan_since: float | None = None
    """When the run of the job that asked for it was over."""
    lent: LentState | None = None
    """None: it is in place of lost nodes, and no elastic step grows by it."""


@dataclass(eq=False)
class SimTask:
    """One task of a step."""

    number: int
    node: str
    alive: bool = True
    hangs: bool = False
    """It got SIGKILL while it hung in the kernel."""
    code: int = 0
    killed_at: float | None = None
    """When Slurm sent it SIGKILL."""


@dataclass(eq=False)
class SimStep:
    """A step in Slurm's books."""

    name: str
    nodes: tuple[str, ...]
    srun: SimSrun
    tasks: list[SimTask] = field(default_factory=list)
    lost_nodes: set[str] = field(default_factory=set)
    """Nodes of whose end Slurm has told srun."""
    silent_nodes: set[str] = field(default_factory=set)
    """Nodes that were lost while tasks of it ran there."""
    killed_at: float | None = None
    ordered: str = ""
    """The supervisor has ordered its end by this signal; Slurm may not have taken the order yet."""
    end_is_told: bool = False
    """slurmstepd has said that it was cancelled, which it does once."""
    first_failure: int = 0
    """Code of the first task that failed, of those of which slurmstepd could tell; 0: none did."""
    bug_task: SimTask | None = None
    """The one that the program's bug has ended; None: it has ended none."""
    untold: set[int] = field(default_factory=set)
    """Numbers of tasks of whose end srun is about to be told."""
    tasks_per_node: int = 1

    @property
    def size(self) -> int:
        """Return how many tasks it has when all have begun."""
        return len(self.nodes) * self.tasks_per_node

    def living(self) -> list[SimTask]:
        return [task for task in self.tasks if task.alive]
