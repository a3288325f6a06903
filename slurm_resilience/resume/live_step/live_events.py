"""The events that `live_plan` is told, and the actions that it answers with. Pure."""

from __future__ import annotations

from enum import Enum

import msgspec

from slurm_resilience.mesh.model import Peer
from slurm_resilience.resume.decide.plan import Plan
from slurm_resilience.resume.live_step.losses import LostSeats
from slurm_resilience.resume.live_step.seats import NodeSlot, SeatMap


class SearchKind(Enum):
    """The aim of a search. There is at most one of each kind at a time."""

    NODES = "nodes"
    """Other nodes, in place of lost ones."""
    TASKS = "tasks"
    """The same nodes, if nothing is wrong with them: only tasks died there."""


class FaultyNode(msgspec.Struct, frozen=True):
    """A node of the step that must be left."""

    node: str
    reason: str
    dead: bool
    """Nothing on it works any more."""


class FoundNodes(msgspec.Struct, frozen=True):
    """The result of a search."""

    chosen: Plan
    """join; or what has to be done instead."""
    nodes: tuple[str, ...] = ()
    """One for each that was lost."""
    addresses: dict[str, str] = {}
    """Address of each node."""
    job_nodes: tuple[str, ...] = ()
    bad: dict[str, str] = {}
    """Nodes that turned out to be at fault, with the reason."""
    taken: dict[str, str] = {}
    """Nodes that a person has taken out of the job, with the words on that."""


# -- events ---------------------------------------------------------------------------------------


class TrainingSeen(msgspec.Struct, frozen=True):
    """The training as its processes show it now."""

    generation: int
    """The newest one that any process is in."""
    running: tuple[int, ...]
    """Seats that step in it."""
    step: int
    peers: tuple[Peer, ...]
    """Processes that are connected."""


class NodesFaulty(msgspec.Struct, frozen=True):
    """All nodes of the step that must be left, as far as is known now."""

    nodes: tuple[FaultyNode, ...]


class NodesSuspected(msgspec.Struct, frozen=True):
    """Nodes of the step that sresctld does not hear of any more."""

    nodes: tuple[FaultyNode, ...]


class LeaveJudged(msgspec.Struct, frozen=True):
    """The answer to `AskToLeave`."""

    nodes: tuple[FaultyNode, ...]
    allowed: bool


class TasksDied(msgspec.Struct, frozen=True):
    """Tasks of a step ended badly."""

    step: int
    tasks: tuple[int, ...]
    """Their numbers within the step."""
    reason: str
    not_launched: bool = False
    """srun could start no task on their node."""


class SearchEnded(msgspec.Struct, frozen=True):
    """A search is over."""

    kind: SearchKind
    found: FoundNodes | None
    """None: it was stopped."""


class JoinStarted(msgspec.Struct, frozen=True):
    """The srun of a join step runs."""

    step: int


class JoinFailed(msgspec.Struct, frozen=True):
    """The srun of a join step cannot be started."""

    step: int
    reason: str


class UserEnded(msgspec.Struct, frozen=True):
    """The user ended a step: then all of them end."""

    step: int


class TrainingEnded(msgspec.Struct, frozen=True):
    """The training itself says that it is over."""

    code: int
    training_step: int
    reason: str
    seats: frozenset[int] = frozenset()
    """Those of the last world, where it ended well; empty: not told."""


class StepsEnded(msgspec.Struct, frozen=True):
    """No srun of the attempt runs any more."""

    codes: dict[int, int]
    """Exit codes, by the number of the step."""
    failed: tuple[int, int] = (0, 0)
    """The step and exit code of what failed after the training had ended well; code 0: nothing."""
    faulty: dict[str, str] = {}
    """Nodes that were lost after that, with the reason."""


class Absence(msgspec.Struct, frozen=True):
    """The supervisor was away: it was stopped, or its machine slept."""

    seconds: float


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event = (
    TrainingSeen
    | NodesFaulty
    | NodesSuspected
    | LeaveJudged
    | TasksDied
    | SearchEnded
    | JoinStarted
    | JoinFailed
    | UserEnded
    | TrainingEnded
    | StepsEnded
    | Absence
    | Tick
)

# -- actions --------------------------------------------------------------------------------------


class AskToLeave(msgspec.Struct, frozen=True):
    """Find out whether there is anywhere to go from nodes that still work."""

    nodes: tuple[FaultyNode, ...]


class TellTraining(msgspec.Struct, frozen=True):
    """Tell every process that a node must be left."""

    node: FaultyNode


class TellSuspicion(msgspec.Struct, frozen=True):
    """Tell every process that a node may be gone: they go on without it if they find so too."""

    node: FaultyNode


class ForgetNode(msgspec.Struct, frozen=True):
    """Do not tell new processes any more that this node must be left."""

    node: str


class LeaveNode(msgspec.Struct, frozen=True):
    """Fence a node off, and let the other nodes' sruns go on without it."""

    node: FaultyNode
    slot: NodeSlot
    steps: tuple[int, ...]
    """Numbers of the steps that have seats on it."""
    next_step: int
    """Number of the first step that may write on a node of this name again."""
    for_good: bool = False
    """It was lost too often: no node of this name is taken in again."""
    unfit: bool = False
    """It takes no task, and no fault of it is known."""


class AskEvidence(msgspec.Struct, frozen=True):
    """Ask sresctld about a node on which tasks died."""

    node: str


class StartSearch(msgspec.Struct, frozen=True):
    """Look for nodes."""

    kind: SearchKind
    lost: tuple[FaultyNode, ...]
    """One for each loss, with the reason."""
    living_nodes: tuple[str, ...]
    """Nodes of the step that are not lost."""
    step_size: int
    since: int
    """The others go on when they step in a later generation than this."""
    unfit: tuple[FaultyNode, ...] = ()
    """Nodes on which srun could start no task, again and again: another one is better, if there is
    one."""


class StopSearches(msgspec.Struct, frozen=True):
    """Withdraw all requests for nodes."""


class StartJoin(msgspec.Struct, frozen=True):
    """Start the step that fills lost seats."""

    step: int
    """Its number."""
    slot: NodeSlot
    """With its new node, and the seats to be filled."""
    seat_map: SeatMap
    """As it is now."""
    found: FoundNodes
    incarnation: int
    new_machine: bool
    """The node stands in for one at fault: earlier verdicts on its name do not count."""


class EndJoin(msgspec.Struct, frozen=True):
    """End one join step that has failed."""

    step: int


class SayWentOn(msgspec.Struct, frozen=True):
    """Report that the others step without the lost seats."""

    running: int
    seats: int
    seconds: float
    """Since the loss was noticed."""


class SayJoined(msgspec.Struct, frozen=True):
    """Report that lost seats are filled again."""

    loss: LostSeats
    nodes: tuple[str, ...]
    """The training's nodes now, by NODE_RANK."""
    training_step: int


class SayStalled(msgspec.Struct, frozen=True):
    """Report that no seat goes on."""

    waiting: tuple[int, ...]
    """Seats that stepped, and wait for others now; empty: none is left."""
    lost: tuple[int, ...]
    """Seats that are known to be lost."""
    seconds: float
    """Since the last sign of a step."""


class SayEmpty(msgspec.Struct, frozen=True):
    """Report that seats stay empty."""

    seats: tuple[int, ...]
    reason: str


class SayJoinFailed(msgspec.Struct, frozen=True):
    """Report that a join step has failed."""

    seats: tuple[int, ...]
    node: str
    reason: str


class EndManner(Enum):
    """The manner in which the steps end."""

    IN_THEIR_TIME = "in their time"
    """The training ended well: the program may have more to do (evaluate, save the model)."""
    BY_THEMSELVES = "by themselves"
    """The training gave up: its tasks end, or are ended after a grace."""
    WITH_GRACE = "with grace"
    AT_ONCE = "at once"


class EndSteps(msgspec.Struct, frozen=True):
    """End all steps; `StepsEnded` follows."""

    manner: EndManner
    reason: str
    """For the job's log; empty: nothing is to be said."""


class EndAttempt(msgspec.Struct, frozen=True):
    """The attempt is over."""

    step: int
    """Number of the step whose end it was."""
    code: int | None
    """The exit code; None: that step's own."""
    faulty: dict[str, str]
    """Nodes that were lost and not replaced, with the reason."""
    stopped_by_us: bool = False
    noticed: float | None = None
    """Monotonic: when the trouble began that ended it."""
    reported_by_training: bool = False
    late_code: int = 0
    """The exit code of what failed after the training had ended well; 0: nothing did."""


Action = (
    AskToLeave
    | TellTraining
    | TellSuspicion
    | ForgetNode
    | LeaveNode
    | AskEvidence
    | StartSearch
    | StopSearches
    | StartJoin
    | EndJoin
    | SayWentOn
    | SayJoined
    | SayStalled
    | SayEmpty
    | SayJoinFailed
    | EndSteps
    | EndAttempt
)
