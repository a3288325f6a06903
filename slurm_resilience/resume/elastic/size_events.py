"""The events that `size_plan` is told, and the actions that it answers with. Pure."""

from __future__ import annotations

import msgspec

from slurm_resilience.resume.live_step.live_events import (
    FaultyNode,
    NodesFaulty,
    TellTraining,
    Tick,
)
from slurm_resilience.resume.live_step.live_events import TrainingSeen as TrainingSeen
from slurm_resilience.resume.live_step.seats import NodeSlot

# -- events ---------------------------------------------------------------------------------------


class GroupAsked(msgspec.Struct, frozen=True):
    """Slurm has taken the request for a group's nodes."""

    group: int
    companion: int
    """The job that holds the request, and later the nodes."""


class CompanionSeen(msgspec.Struct, frozen=True):
    """A companion as Slurm shows it now."""

    group: int
    """It has asked for it. The number alone does not tell: a slurmctld that was killed forgets the
    jobs of its last seconds, and gives their numbers anew."""
    companion: int
    state: str
    """In which it ended, where it is over. Empty: Slurm does not know it any more."""
    nodes: tuple[str, ...]
    """Those that it had, where it is over."""
    doubt: str = ""
    """The reason, where nothing may be started on its nodes."""


class GroupStarted(msgspec.Struct, frozen=True):
    """The sruns of a group run."""

    group: int
    steps: tuple[int, ...]
    """Their numbers among the attempt's steps."""


class GroupFailed(msgspec.Struct, frozen=True):
    """Slurm has not taken the request, or its sruns cannot be started."""

    group: int
    reason: str


class GroupStepEnded(msgspec.Struct, frozen=True):
    """The srun of one node has ended."""

    step: int
    code: int
    cancelled: bool = False
    """Slurm or a person ended its tasks."""


class GroupTaskDied(msgspec.Struct, frozen=True):
    """A task has ended badly by itself, and its srun runs on with the others of its node."""

    step: int
    how: str


class GroupLeftUnasked(msgspec.Struct, frozen=True):
    """The ranks of a group have left by themselves: Slurm was not about to end its companion."""

    group: int
    companion: int
    nodes: tuple[str, ...]


class NodesSick(msgspec.Struct, frozen=True):
    """All nodes that have to be left and still work, and those left that nothing stands in for."""

    nodes: tuple[FaultyNode, ...]


class TargetSet(msgspec.Struct, frozen=True):
    """A person wants another number of nodes."""

    nodes: int
    """A size that the step has when one group after the other comes."""
    by: str


class CoreShrunk(msgspec.Struct, frozen=True):
    """A person has taken nodes of the core out of the job."""

    nodes: int
    """So many by now."""


SizeEvent = (
    GroupAsked
    | CompanionSeen
    | GroupStarted
    | GroupFailed
    | GroupStepEnded
    | GroupTaskDied
    | GroupLeftUnasked
    | TrainingSeen
    | NodesFaulty
    | NodesSick
    | TargetSet
    | CoreShrunk
    | Tick
)

# -- actions --------------------------------------------------------------------------------------


class AskForGroup(msgspec.Struct, frozen=True):
    """Queue a request for nodes."""

    group: int
    nodes: int


class StartGroup(msgspec.Struct, frozen=True):
    """Start ranks on the nodes of a companion."""

    group: int
    companion: int
    slots: tuple[NodeSlot, ...]


class AskGroupToLeave(msgspec.Struct, frozen=True):
    """Have the ranks of a group leave after their step."""

    companion: int
    steps: tuple[int, ...]


class GiveBack(msgspec.Struct, frozen=True):
    """End a companion: nothing of it is needed any more."""

    group: int
    companion: int
    steps: tuple[int, ...]
    nodes: tuple[str, ...] = ()
    """Those on which its ranks were started."""
    is_unasked: bool = False
    """Its ranks have left, and nothing has told that they were asked to: Slurm may show it."""


class SizeChange(msgspec.Struct, frozen=True):
    """A group that has come or gone."""

    companion: int
    nodes: tuple[str, ...]
    """Those of the group."""
    size: int
    """Nodes of the step now."""
    training_step: int


class SayGrew(msgspec.Struct, frozen=True):
    """Report that a group's ranks step with the others."""

    change: SizeChange
    seconds: float
    """Since its nodes were free."""


class SayShrank(msgspec.Struct, frozen=True):
    """Report that a group has gone."""

    change: SizeChange
    reason: str


class SayNotGrown(msgspec.Struct, frozen=True):
    """Report that a group could not come."""

    reason: str
    seconds: float
    """Until it is tried again."""


SizeAction = (
    AskForGroup
    | StartGroup
    | AskGroupToLeave
    | GiveBack
    | TellTraining
    | SayGrew
    | SayShrank
    | SayNotGrown
)
