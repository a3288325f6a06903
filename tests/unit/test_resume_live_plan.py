"""The decisions of a living step, as scripts: an event and the time in, actions out."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import pytest

from slurm_resilience.config import ResumeSettings
from slurm_resilience.errors import IllegalTransition
from slurm_resilience.mesh.model import Peer
from slurm_resilience.resume.decide.plan import Plan
from slurm_resilience.resume.decide.transitions import advance
from slurm_resilience.resume.live_step.join_step import JOIN_TRANSITIONS, JoinState
from slurm_resilience.resume.live_step.live_events import (
    Absence,
    Action,
    AskEvidence,
    AskToLeave,
    EndAttempt,
    EndJoin,
    EndManner,
    EndSteps,
    Event,
    FaultyNode,
    ForgetNode,
    FoundNodes,
    JoinFailed,
    JoinStarted,
    LeaveJudged,
    LeaveNode,
    NodesFaulty,
    NodesSuspected,
    SayEmpty,
    SayJoined,
    SayStalled,
    SayWentOn,
    SearchEnded,
    SearchKind,
    StartJoin,
    StartSearch,
    StepsEnded,
    StopSearches,
    TasksDied,
    TellSuspicion,
    TellTraining,
    Tick,
    TrainingEnded,
    TrainingSeen,
    UserEnded,
)
from slurm_resilience.resume.live_step.live_plan import (
    GONE_SECONDS,
    JOIN_SECONDS,
    LIVE_STEP_TRANSITIONS,
    LONGEST_PAUSE_SECONDS,
    LOOK_SECONDS,
    TAKEN_SECONDS,
    LivePlan,
    LiveStepState,
)
from slurm_resilience.resume.live_step.live_steps import STEP_TRANSITIONS, StepState
from slurm_resilience.resume.live_step.losses import LOST_SEAT_TRANSITIONS, LostSeatState
from slurm_resilience.resume.live_step.seats import NodeSlot, SeatMap
from slurm_resilience.resume.live_step.stall_watch import STALL_SECONDS, StallWatch
from slurm_resilience.resume.live_step.task_deaths import MOST_UNFIT_NODES

LIMITS = ResumeSettings()
NODES = ("n1", "n2", "n3", "n4")
DEAD = FaultyNode("n3", "no beat", True)
SICK = FaultyNode("n3", "Xid 64", False)
JOIN = Plan("join", "1 of 4 nodes to be exchanged")
S = LiveStepState


class Script:
    """A training of one seat a node, and the plan that is told of it."""

    def __init__(self, limits: ResumeSettings = LIMITS, *, needs_all: bool = False) -> None:
        slots = tuple(NodeSlot(rank, node, (rank,)) for rank, node in enumerate(NODES))
        self.plan = LivePlan(SeatMap(slots, len(NODES), 1, needs_all), limits)
        self.now = 100.0
        self.incarnations = dict.fromkeys(range(len(NODES)), 0)
        self.generation = 1
        self.training_step = 10
        self.see(range(4))

    def tell(self, event: Event, after: float = 0.0) -> tuple[Action, ...]:
        """Tell the plan; the lines on seats that do not step have a test of their own."""
        self.now += after
        actions = self.plan.step(event, self.now)
        return tuple(action for action in actions if not isinstance(action, SayStalled))

    def see(self, running: Iterable[int], connected: Iterable[int] = ()) -> tuple[Action, ...]:
        """The training shows these seats; ``connected`` ones do not step yet."""
        seats = tuple(running)
        peers = tuple(
            Peer(f"{seat}.{self.incarnations[seat]}", seat, self.incarnations[seat])
            for seat in {*seats, *connected}
        )
        return self.tell(TrainingSeen(self.generation, seats, self.training_step, peers))

    def lose(self, faulty: FaultyNode = DEAD) -> tuple[Action, ...]:
        told = self.tell(NodesFaulty((faulty,)))
        return told + self.tell(Tick())

    def find(self, *nodes: str, kind: SearchKind = SearchKind.NODES) -> tuple[Action, ...]:
        addresses = {node: f"192.0.2.{node[1:]}" for node in nodes}
        return self.tell(SearchEnded(kind, FoundNodes(JOIN, nodes, addresses, NODES)))

    def states(self) -> list[LostSeatState]:
        return [loss.state for loss in self.plan.record.losses]


def only(actions: tuple[Action, ...], kind: type[Any]) -> Any:
    (action,) = (action for action in actions if isinstance(action, kind))
    return action


def kinds(actions: tuple[Action, ...]) -> list[type[Any]]:
    return [type(action) for action in actions]


@pytest.fixture
def script() -> Script:
    return Script()


# -- a node is lost ---------------------------------------------------------------------------


def test_a_dead_node_from_its_loss_to_its_seat_s_return(script: Script) -> None:
    lost = script.lose()
    assert kinds(lost) == [TellTraining, LeaveNode, StartSearch]
    assert only(lost, LeaveNode).steps == (0,)
    search = only(lost, StartSearch)
    assert (search.kind, search.living_nodes) == (SearchKind.NODES, ("n1", "n2", "n4"))
    assert script.plan.state is S.WAITING
    script.generation, script.now = 2, script.now + 1.0
    went_on = only(script.see((0, 1, 3)), SayWentOn)
    assert (went_on.running, went_on.seats, went_on.seconds) == (3, 4, 1.0)
    assert script.plan.state is S.DEGRADED
    found = script.find("n7")
    assert kinds(found) == [ForgetNode, StartJoin]
    join = only(found, StartJoin)
    assert (join.step, join.slot, join.incarnation) == (1, NodeSlot(2, "n7", (2,)), 1)
    assert join.seat_map.nodes == ("n1", "n2", "n7", "n4")
    script.tell(JoinStarted(1))
    script.incarnations[2] = 1
    assert script.see((0, 1, 3), (2,)) == ()
    assert script.plan.record.joins[0].state is JoinState.CONNECTED
    script.generation = 3
    joined = script.see(range(4))
    assert kinds(joined) == [ForgetNode, SayJoined]
    assert only(joined, SayJoined).nodes == ("n1", "n2", "n7", "n4")
    assert script.plan.state is S.WHOLE
    assert script.states() == [LostSeatState.FILLED]
    assert script.plan.record.joins[0].state is JoinState.JOINED


def test_a_node_that_still_works_is_left_only_where_there_is_anywhere_to_go(
    script: Script,
) -> None:
    assert script.lose(SICK) == (AskToLeave((SICK,)),)
    assert script.tell(LeaveJudged((SICK,), False)) == ()
    assert script.lose(SICK) == (), "asked once"
    assert script.plan.state is S.WHOLE
    # It dies after all.
    assert kinds(script.lose(FaultyNode("n4", "no beat", True))) == [
        TellTraining,
        LeaveNode,
        StartSearch,
    ]


def test_a_sick_node_is_left(script: Script) -> None:
    script.lose(SICK)
    left = script.tell(LeaveJudged((SICK,), True))
    assert kinds(left) == [TellTraining, LeaveNode]
    assert script.tell(LeaveJudged((SICK,), True)) == (), "left once, however often it is judged"


def test_the_new_machine_of_the_same_name_may_be_lost_too(script: Script) -> None:
    script.lose()
    script.find("n3")
    script.tell(JoinStarted(1))
    assert kinds(script.lose()) == [TellTraining, LeaveNode, StartSearch]
    assert script.states() == [LostSeatState.LOST_AGAIN, LostSeatState.SEARCHING]
    assert script.plan.record.joins[0].state is JoinState.FAILED


def test_two_nodes_lost_while_a_search_runs_are_looked_for_afterwards(script: Script) -> None:
    script.lose()
    later = script.lose(FaultyNode("n2", "no beat", True))
    assert kinds(later) == [TellTraining, LeaveNode], "one search of a kind at a time"
    script.find("n5")
    search = only(script.tell(Tick()), StartSearch)
    assert [lost.node for lost in search.lost] == ["n2"]
    assert search.living_nodes == ("n1", "n5", "n4")


def test_a_node_that_is_lost_before_its_join_step_starts(script: Script) -> None:
    script.lose()
    script.find("n7")
    assert kinds(script.lose(FaultyNode("n7", "no beat", True)))[-1] is StartSearch
    assert script.tell(JoinStarted(1)) == ()
    assert script.plan.record.joins[0].state is JoinState.FAILED


@pytest.mark.parametrize("found", [None, FoundNodes(JOIN, ())])
def test_a_search_that_found_too_little_is_made_again(
    script: Script, found: FoundNodes | None
) -> None:
    script.lose()
    assert script.tell(SearchEnded(SearchKind.NODES, found)) == ()
    assert script.states() == [LostSeatState.LOST]
    assert kinds(script.tell(Tick())) == [StartSearch]


def test_where_no_node_is_to_be_had_the_step_ends(script: Script) -> None:
    script.lose()
    requeue = FoundNodes(Plan("requeue", "no idle node within 3600 s; the job is requeued"))
    (end,) = script.tell(SearchEnded(SearchKind.NODES, requeue))
    assert isinstance(end, EndSteps) and end.manner is EndManner.AT_ONCE
    assert "no idle node within" in end.reason
    assert script.plan.state is S.ENDING
    assert script.tell(Tick()) == script.lose(SICK) == ()
    finish = only(script.tell(StepsEnded({0: 137})), EndAttempt)
    assert finish.faulty == {"n3": "no beat"}
    assert (finish.stopped_by_us, finish.noticed, finish.code) == (True, 100.0, None)
    assert script.plan.state is S.OVER
    assert script.tell(UserEnded(0)) == ()


def test_an_answer_that_came_too_late_is_not_used(script: Script) -> None:
    script.tell(TasksDied(0, (2,), "Killed"))
    script.tell(Tick(), LIMITS.diagnosis_wait)
    assert kinds(script.lose()) == [TellTraining, LeaveNode, StartSearch]
    assert script.find("n3", kind=SearchKind.TASKS) == ()
    assert len(script.plan.steps) == 1


# -- tasks die --------------------------------------------------------------------------------


def test_a_task_on_a_healthy_node_is_started_again_there(script: Script) -> None:
    assert script.tell(TasksDied(0, (2,), "Killed")) == (AskEvidence("n3"),)
    assert script.plan.next_deadline() == script.now + LIMITS.diagnosis_wait
    assert script.tell(Tick()) == (), "its node may yet turn out to be at fault"
    script.see((0, 1, 3))
    search = only(script.tell(Tick(), LIMITS.diagnosis_wait), StartSearch)
    assert search.kind is SearchKind.TASKS and search.lost[0].node == "n3"
    join = only(script.find("n3", kind=SearchKind.TASKS), StartJoin)
    assert not join.new_machine


def test_its_node_turns_out_to_be_at_fault(script: Script) -> None:
    script.tell(TasksDied(0, (2,), "Killed"))
    script.see((0, 1, 3))
    script.tell(Tick(), LIMITS.diagnosis_wait)
    bad = FoundNodes(JOIN, bad={"n3": "Slurm shows DOWN"})
    left = script.tell(SearchEnded(SearchKind.TASKS, bad))
    assert kinds(left) == [TellTraining, LeaveNode]
    assert only(script.tell(Tick()), StartSearch).kind is SearchKind.NODES


def test_a_launcher_that_fills_the_seat_by_itself_is_left_alone(script: Script) -> None:
    script.tell(TasksDied(0, (2,), "Killed"))
    script.incarnations[2] = 1
    script.see(range(4))
    assert script.tell(Tick(), LIMITS.diagnosis_wait) == ()
    assert script.plan.state is S.WHOLE


def test_a_connection_that_closes_late_is_not_taken_for_a_living_process(script: Script) -> None:
    """The observer still sees the dead process as the diagnosis is over."""
    script.tell(TasksDied(0, (2,), "Killed"))
    script.see((0, 1, 3), (2,))
    assert script.tell(Tick(), LIMITS.diagnosis_wait) == ()
    assert script.plan.state is S.WAITING
    script.see((0, 1, 3))
    only(script.tell(Tick(), LOOK_SECONDS), StartSearch)


def test_a_process_that_lives_is_not_started_again_whatever_is_printed_of_it(
    script: Script,
) -> None:
    script.tell(TasksDied(0, (2,), "Killed"))
    script.see(range(4))
    assert script.tell(Tick(), GONE_SECONDS) == ()
    assert script.plan.state is S.WHOLE


def test_an_empty_seat_is_filled_by_a_new_process_alone() -> None:
    limits = ResumeSettings(max_relaunches=0)
    script = Script(limits)
    script.tell(TasksDied(0, (2,), "Killed"))
    script.see((0, 1, 3))
    only(script.tell(Tick(), limits.diagnosis_wait), SayEmpty)
    script.see((0, 1, 3), (2,))
    assert script.states() == [LostSeatState.EMPTY], "a late picture shows the dead process"
    script.incarnations[2] = 1
    script.see((0, 1, 3), (2,))
    assert script.states() == [LostSeatState.FILLED]


def stalls(script: Script, seconds: float) -> list[SayStalled]:
    """Return what is said of seats that do not step, by a look after some time."""
    script.now += seconds
    actions = script.plan.step(Tick(), script.now)
    return [action for action in actions if isinstance(action, SayStalled)]


def test_seats_that_do_not_step_are_told_of_each_minute(script: Script) -> None:
    """A node that died unseen looks alive to an observer: it stays in the world that is over."""
    assert stalls(script, 3600.0) == []
    script.see((1, 2, 3), (0,))
    assert stalls(script, STALL_SECONDS - 1.0) == []
    assert stalls(script, 1.0) == [SayStalled((0,), (), STALL_SECONDS)]
    assert stalls(script, STALL_SECONDS - 1.0) == []
    script.see((2,), (0, 1, 3))
    script.lose()
    assert stalls(script, 1.0) == [SayStalled((0, 1, 3), (2,), 2 * STALL_SECONDS)]
    script.generation = 2
    script.see((0, 1, 3))
    assert stalls(script, 3600.0) == []


def test_the_rest_of_a_world_that_is_over_does_not_step(script: Script) -> None:
    """All others died, and their join step still imports; the one node left died unseen."""
    assert stalls(script, 3600.0) == []
    script.tell(TasksDied(0, (0, 1, 3), "Killed"))
    script.see((2,))
    assert stalls(script, STALL_SECONDS - 1.0) == []
    assert stalls(script, 1.0) == [SayStalled((2,), (0, 1, 3), STALL_SECONDS)]
    script.training_step += 1
    script.see((2,))
    assert stalls(script, STALL_SECONDS - 1.0) == []
    script.generation = 2
    script.see((2,))
    assert stalls(script, 3600.0) == []


def test_seats_that_are_left_over_while_others_step_are_not_told_of(script: Script) -> None:
    """Whole replicas only: a seat without its replica waits."""
    assert stalls(script, 1.0) == []
    for _ in range(10):
        script.training_step += 1
        script.see((0, 1, 2), (3,))
        assert stalls(script, STALL_SECONDS - 1.0) == []


def test_tasks_that_die_again_and_again_leave_their_seat_empty(script: Script) -> None:
    step = 0
    for deaths in range(1, LIMITS.max_relaunches + 2):
        task = 2 if step == 0 else 0
        script.tell(TasksDied(step, (task,), "Killed"))
        script.see((0, 1, 3))
        actions = script.tell(Tick(), LIMITS.diagnosis_wait)
        if deaths > LIMITS.max_relaunches:
            break
        step = only(script.find("n3", kind=SearchKind.TASKS), StartJoin).step
        script.tell(JoinStarted(step))
    assert only(actions, SayEmpty).seats == (2,)
    assert script.states()[-1] is LostSeatState.EMPTY
    script.generation = 2
    script.see((0, 1, 3))
    assert script.plan.state is S.DEGRADED
    for _ in range(5):
        assert script.tell(Tick(), LIMITS.swap_wait) == (), "the others go on for good"


def without_a_launch(script: Script, times: int) -> tuple[int, StartSearch]:
    """The node that stands in for a lost one takes no task; return the last join step's number and
    the last search."""
    script.lose()
    script.generation = 2
    script.see((0, 1, 3))
    step = only(script.find("n7"), StartJoin).step
    for _ in range(times - 1):
        step = only(not_launched(script, step).find("n7", kind=SearchKind.TASKS), StartJoin).step
    script.tell(JoinStarted(step))
    script.tell(TasksDied(step, (0,), "it takes none", not_launched=True))
    due = script.plan.next_deadline()
    assert due is not None
    return step, only(script.tell(Tick(), due - script.now), StartSearch)


def not_launched(script: Script, step: int) -> Script:
    script.tell(JoinStarted(step))
    assert script.tell(TasksDied(step, (0,), "it takes none", not_launched=True)) == (
        AskEvidence("n7"),
    )
    due = script.plan.next_deadline()
    assert due is not None
    search = only(script.tell(Tick(), due - script.now), StartSearch)
    assert search.kind is SearchKind.TASKS and not search.unfit
    return script


def test_a_node_that_takes_no_task_is_left_for_another(script: Script) -> None:
    """Its date is wrong, say: Slurm's credentials are over there, and nothing else is amiss."""
    step, search = without_a_launch(script, LIMITS.max_per_node)
    unfit = FaultyNode("n7", "it takes none", False)
    assert search.kind is SearchKind.TASKS and search.unfit == (unfit,)
    bad = FoundNodes(JOIN, bad={"n7": "it takes none"})
    left = script.tell(SearchEnded(SearchKind.TASKS, bad))
    assert kinds(left) == [TellTraining, LeaveNode]
    assert only(left, LeaveNode).for_good, "Slurm would give it again"
    assert only(script.tell(Tick()), StartSearch).kind is SearchKind.NODES
    join = only(script.find("n8"), StartJoin)
    assert (join.slot.node, join.step) == ("n8", step + 1)


def test_a_node_that_takes_no_task_for_long_is_tried_until_it_does(script: Script) -> None:
    """No other node is idle, and its slurmd comes back: the program has not died meanwhile."""
    _, search = without_a_launch(script, LIMITS.max_per_node)
    waits = list[float]()
    for _ in range(3 * LIMITS.max_relaunches):
        assert [node.node for node in search.unfit] == ["n7"]
        step = only(script.find("n7", kind=SearchKind.TASKS), StartJoin).step
        script.tell(JoinStarted(step))
        script.tell(TasksDied(step, (0,), "it takes none", not_launched=True))
        due = script.plan.next_deadline()
        assert due is not None
        waits.append(due - script.now)
        search = only(script.tell(Tick(), waits[-1]), StartSearch)
    assert waits == sorted(waits) and waits[0] > LIMITS.backoff
    assert waits[-1] == LONGEST_PAUSE_SECONDS
    step = only(script.find("n7", kind=SearchKind.TASKS), StartJoin).step
    script.tell(JoinStarted(step))
    script.generation, script.incarnations[2] = 3, 1
    only(script.see(range(4)), SayJoined)
    script.tell(TasksDied(step, (0,), "it takes none", not_launched=True))
    assert script.plan.next_deadline() == script.now + LIMITS.diagnosis_wait, "counted anew"


def test_the_others_go_on_where_no_other_node_is_got_for_one_that_takes_no_task(
    script: Script,
) -> None:
    """22.05 without slurmdbd changes a job once, and no fault is known that would be escaped."""
    without_a_launch(script, LIMITS.max_per_node)
    bad = FoundNodes(JOIN, bad={"n7": "it takes none"})
    script.tell(SearchEnded(SearchKind.TASKS, bad))
    script.see((0, 1, 3))
    only(script.tell(Tick()), StartSearch)
    none = FoundNodes(Plan("requeue", "the exchange failed"))
    assert only(script.tell(SearchEnded(SearchKind.NODES, none)), SayEmpty).seats == (2,)
    assert script.tell(Tick(), LIMITS.swap_wait + 1.0) == ()
    assert script.plan.state is S.DEGRADED


def test_not_all_nodes_are_left_where_none_takes_a_task(script: Script) -> None:
    """slurmctld's date is wrong: its credentials are over on every node."""
    step, search = without_a_launch(script, LIMITS.max_per_node)
    for number in range(8, 8 + MOST_UNFIT_NODES):
        (unfit,) = search.unfit
        bad = FoundNodes(JOIN, bad={unfit.node: "it takes none"})
        script.tell(SearchEnded(SearchKind.TASKS, bad))
        script.tell(Tick())
        node = f"n{number}"
        step = only(script.find(node), StartJoin).step
        for _ in range(LIMITS.max_per_node):
            script.tell(JoinStarted(step))
            script.tell(TasksDied(step, (0,), "it takes none", not_launched=True))
            search = only(script.tell(Tick(), LONGEST_PAUSE_SECONDS), StartSearch)
            if not search.unfit:
                step = only(script.find(node, kind=SearchKind.TASKS), StartJoin).step
    assert not search.unfit, "the fourth node in a row is kept, and tried on"


def test_where_the_others_wait_for_it_a_node_is_not_tried_for_ever(script: Script) -> None:
    script.lose()
    script.see((), (0, 1, 3))
    step = only(script.find("n7"), StartJoin).step
    for _ in range(LIMITS.max_relaunches):
        script.tell(JoinStarted(step))
        script.tell(TasksDied(step, (0,), "it takes none", not_launched=True))
        only(script.tell(Tick(), LONGEST_PAUSE_SECONDS), StartSearch)
        step = only(script.find("n7", kind=SearchKind.TASKS), StartJoin).step
    script.tell(JoinStarted(step))
    script.tell(TasksDied(step, (0,), "it takes none", not_launched=True))
    only(script.tell(Tick(), LONGEST_PAUSE_SECONDS), SayEmpty)
    only(script.tell(Tick(), LIMITS.swap_wait + 1.0), EndSteps)


def test_where_no_seat_may_stay_empty_the_step_is_ended() -> None:
    """A launcher of a plain program dies again and again: its others wait for it in vain."""
    script, step = Script(needs_all=True), 0
    for _ in range(LIMITS.max_relaunches):
        script.tell(TasksDied(step, (0 if step else 2,), "Killed"))
        script.see((0, 1, 3))
        script.tell(Tick(), LIMITS.diagnosis_wait)
        step = only(script.find("n3", kind=SearchKind.TASKS), StartJoin).step
        script.tell(JoinStarted(step))
    script.tell(TasksDied(step, (0,), "Killed"))
    script.see((0, 1, 3))
    ended = only(script.tell(Tick(), LIMITS.diagnosis_wait), EndSteps)
    assert ended.manner is EndManner.WITH_GRACE
    assert "Killed" in ended.reason
    assert script.plan.state is S.ENDING
    last = only(script.tell(StepsEnded({0: 137, step: 137})), EndAttempt)
    assert last.stopped_by_us


def test_a_join_step_that_cannot_be_started_is_tried_again_a_few_times(script: Script) -> None:
    script.lose()
    script.see((0, 1, 3))
    step = only(script.find("n7"), StartJoin).step
    for _ in range(LIMITS.max_relaunches):
        script.tell(JoinFailed(step, "srun cannot be started"))
        only(script.tell(Tick(), LIMITS.diagnosis_wait), StartSearch)
        step = only(script.find("n7", kind=SearchKind.TASKS), StartJoin).step
    script.tell(JoinFailed(step, "srun cannot be started"))
    assert only(script.tell(Tick(), LIMITS.diagnosis_wait), SayEmpty).seats == (2,)


def test_a_join_step_whose_processes_are_never_seen_is_ended(script: Script) -> None:
    script.lose()
    script.generation = 2
    script.see((0, 1, 3))
    script.find("n7")
    script.tell(JoinStarted(1))
    assert script.tell(Tick(), JOIN_SECONDS - 1) == ()
    assert only(script.tell(Tick(), 1.0), EndJoin).step == 1
    assert script.plan.record.joins[0].state is JoinState.FAILED
    assert script.tell(TasksDied(1, (0,), "Killed")) == (), "its end is known already"


def test_the_supervisors_own_absence_is_no_part_of_a_limit(script: Script) -> None:
    """A process may have come meanwhile, and is seen a moment later."""
    script.lose()
    script.generation = 2
    script.see((0, 1, 3))
    script.find("n7")
    script.tell(JoinStarted(1))
    script.now += 2 * JOIN_SECONDS
    assert script.tell(Absence(2 * JOIN_SECONDS)) == ()
    assert script.tell(Tick(), JOIN_SECONDS - 1) == ()
    assert only(script.tell(Tick(), 1.0), EndJoin).step == 1
    due = script.plan.next_deadline()
    assert due is not None, "its tasks are started again after a diagnosis"
    script.tell(Absence(100.0))
    assert script.plan.next_deadline() == due + 100.0


def test_a_part_of_a_join_step_dies_on_its_way() -> None:
    """The seats that are left of it are waited for alone."""
    slots = (NodeSlot(0, "n1", (0, 1)), NodeSlot(1, "n2", (2, 3)))
    plan = LivePlan(SeatMap(slots, 4, 1), LIMITS)
    plan.step(NodesFaulty((FaultyNode("n2", "no beat", True),)), 0.0)
    plan.step(Tick(), 0.0)
    plan.step(SearchEnded(SearchKind.NODES, FoundNodes(JOIN, ("n3",))), 1.0)
    plan.step(JoinStarted(1), 1.0)
    assert plan.step(TasksDied(1, (0,), "Killed"), 2.0) == (AskEvidence("n3"),)
    first, second = plan.record.losses
    assert (first.seats, first.state) == ((3,), LostSeatState.JOINING)
    assert (second.seats, second.state) == ((2,), LostSeatState.DIAGNOSING)
    assert plan.record.joins[0].seats == (3,)


def test_a_join_step_that_is_seen_and_never_steps_is_ended(script: Script) -> None:
    script.lose()
    script.generation = 2
    script.see((0, 1, 3))
    script.find("n7")
    script.tell(JoinStarted(1))
    script.incarnations[2] = 1
    script.now += JOIN_SECONDS - 1
    script.see((0, 1, 3), (2,))
    assert script.plan.record.joins[0].state is JoinState.CONNECTED
    assert script.tell(Tick(), JOIN_SECONDS - 1) == (), "it has as long again"
    assert only(script.tell(Tick(), 1.0), EndJoin).step == 1


def test_a_join_step_that_starts_slowly_is_not_ended_by_the_wait_for_a_node() -> None:
    """A small `resume.swap_wait` says nothing of the time that a model takes to be built."""
    script = Script(ResumeSettings(swap_wait=30.0))
    script.lose()
    script.see((), (0, 1, 3))
    script.find("n7")
    script.tell(JoinStarted(1))
    assert script.plan.state is S.WAITING
    assert script.tell(Tick(), 60.0) == (), "it has a limit of its own"
    script.incarnations[2] = 1
    script.see((), range(4))
    assert script.tell(Tick(), 60.0) == (), "its state is being filled"
    script.generation = 2
    assert SayJoined in kinds(script.see(range(4)))
    assert script.plan.state is S.WHOLE


def test_a_join_step_that_dies_late_is_started_again() -> None:
    script = Script(ResumeSettings(swap_wait=30.0))
    script.lose()
    script.see((), (0, 1, 3))
    script.find("n7")
    script.tell(JoinStarted(1))
    assert script.tell(Tick(), 60.0) == ()
    script.tell(TasksDied(1, (0,), "Killed"))
    assert script.tell(Tick()) == (), "its node may yet turn out to be at fault"
    assert only(script.tell(Tick(), LIMITS.diagnosis_wait), StartSearch).kind is SearchKind.TASKS


def test_a_join_step_that_waits_for_another_seat_s_node_is_not_ended(script: Script) -> None:
    """Two nodes are lost, one after the other, and there is one idle node."""
    script.lose()
    script.find("n7")
    script.tell(JoinStarted(1))
    script.lose(FaultyNode("n4", "no beat", True))
    script.incarnations[2] = 1
    script.see((), (0, 1, 2))
    for _ in range(3):
        assert script.tell(Tick(), JOIN_SECONDS - 1) == (), "the other node is still looked for"
    script.find("n8")
    script.tell(JoinStarted(2))
    assert script.tell(Tick(), JOIN_SECONDS - 1) == ()
    script.incarnations[3] = 1
    script.see((), range(4))
    ended = script.tell(Tick(), JOIN_SECONDS)
    assert [action.step for action in ended if isinstance(action, EndJoin)] == [1, 2], "at last"


def test_a_node_that_could_not_be_left_is_left_when_it_dies(script: Script) -> None:
    script.tell(NodesFaulty((SICK,)))
    script.tell(LeaveJudged((SICK,), False))
    assert script.tell(NodesFaulty((SICK,))) == ()
    assert kinds(script.tell(NodesFaulty((DEAD,)))) == [TellTraining, LeaveNode]


def test_a_silent_node_is_told_to_the_training_alone(script: Script) -> None:
    """Nothing else is done: it may be back in a moment."""
    elsewhere = FaultyNode("n9", "no beat for 1.5 s", False)
    told = script.tell(NodesSuspected((SICK, elsewhere)))
    assert told == (TellSuspicion(SICK),)
    assert script.states() == [] and script.plan.state is S.WHOLE
    script.lose()
    assert script.tell(NodesSuspected((DEAD,))) == (), "it is left already"


# -- the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True])
def test_the_training_s_own_outcome_ends_all(script: Script, lost: bool) -> None:
    if lost:
        script.lose()
    stop, end = script.tell(TrainingEnded(3, 20, "a bug"))
    assert isinstance(stop, StopSearches)
    assert end == EndSteps(EndManner.BY_THEMSELVES, "the training ended at step 20: a bug")
    finish = only(script.tell(StepsEnded({0: 1})), EndAttempt)
    assert (finish.code, finish.reported_by_training) == (3, True)


@pytest.mark.parametrize("code", [0, 3])
def test_after_a_training_that_ended_well_the_program_s_own_code_counts(
    script: Script, code: int
) -> None:
    _, end = script.tell(TrainingEnded(0, 20, ""))
    assert end == EndSteps(EndManner.IN_THEIR_TIME, "")
    told = StepsEnded({0: code}, (0, code), {"n3": "no beat"} if code else {})
    finish = only(script.tell(told), EndAttempt)
    assert (finish.code, finish.late_code, finish.reported_by_training) == (code, code, not code)
    assert finish.faulty == told.faulty


def test_a_training_tells_who_was_there_at_its_end(script: Script) -> None:
    script.lose()
    lost = script.plan.seats_lost_at_end()
    assert lost, "no world was seen without them"
    others = frozenset(range(script.plan.seat_map.seats)) - lost
    script.tell(TrainingEnded(0, 20, "", others))
    assert script.plan.seats_left_out() == lost, "the last world was over before it was seen"
    assert script.plan.seats_lost_at_end() == set()


def test_seats_that_came_back_unseen_are_part_of_the_end(script: Script) -> None:
    script.lose()
    lost = script.plan.seats_lost_at_end()
    script.tell(TrainingEnded(0, 20, "", frozenset(range(script.plan.seat_map.seats))))
    assert script.plan.seats_left_out() == set()
    assert script.plan.seats_lost_at_end() == lost


def test_the_user_s_signal_ends_all(script: Script) -> None:
    script.lose()
    script.find("n7")
    script.tell(JoinStarted(1))
    assert script.tell(UserEnded(1)) == (StopSearches(), EndSteps(EndManner.WITH_GRACE, ""))
    assert only(script.tell(StepsEnded({0: 0, 1: 143})), EndAttempt).step == 1


@pytest.mark.parametrize(("lost", "codes", "code"), [(False, 0, 0), (True, 0, 1), (True, 9, 9)])
def test_all_sruns_end_by_themselves(script: Script, lost: bool, codes: int, code: int) -> None:
    """A step that lost seats has not ended well, whatever its srun says."""
    if lost:
        script.lose()
    assert only(script.tell(StepsEnded({0: codes})), EndAttempt).code == code


def test_a_step_in_which_no_seat_steps_ends_after_the_longest_wait(script: Script) -> None:
    """An empty seat below the least world that the training takes: without this, no end."""
    for step in range(LIMITS.max_relaunches + 1):
        script.tell(TasksDied(step, (2 if step == 0 else 0,), "Killed"))
        script.see((), (0, 1, 3))
        script.tell(Tick(), LIMITS.diagnosis_wait)
        if step < LIMITS.max_relaunches:
            script.find("n3", kind=SearchKind.TASKS)
            script.tell(JoinStarted(step + 1))
    assert script.states()[-1] is LostSeatState.EMPTY
    assert script.plan.state is S.WAITING
    script.now += 2 * LIMITS.swap_wait
    script.tell(Absence(2 * LIMITS.swap_wait))
    actions = script.tell(Tick(), LIMITS.swap_wait - 1)
    assert not any(isinstance(action, EndSteps) for action in actions), "its supervisor slept"
    (end,) = script.tell(Tick(), 2.0)
    assert isinstance(end, EndSteps) and "no seat has stepped" in end.reason


# -- the tables -------------------------------------------------------------------------------

TABLES: list[dict[Any, frozenset[Any]]] = [
    LOST_SEAT_TRANSITIONS,
    JOIN_TRANSITIONS,
    LIVE_STEP_TRANSITIONS,
    STEP_TRANSITIONS,
]


@pytest.mark.parametrize("table", TABLES)
def test_a_table_names_every_state_and_only_its_changes_can_be_made(
    table: dict[Any, frozenset[Any]],
) -> None:
    states = type(next(iter(table)))
    assert set(table) == set(states)
    for current in table:
        for following in table:
            if following in table[current]:
                assert advance(table, current, following) is following
            else:
                with pytest.raises(IllegalTransition, match=current.value):
                    advance(table, current, following)


@pytest.mark.parametrize(
    ("table", "first"),
    [
        (LOST_SEAT_TRANSITIONS, {LostSeatState.LOST, LostSeatState.DIAGNOSING}),
        (JOIN_TRANSITIONS, {JoinState.PLANNED}),
        (LIVE_STEP_TRANSITIONS, {LiveStepState.WHOLE}),
        (STEP_TRANSITIONS, {StepState.RUNNING}),
    ],
)
def test_every_state_can_be_reached_and_left_for_an_end(
    table: dict[Enum, frozenset[Enum]], first: set[Enum]
) -> None:
    reached = set(first)
    while more := {following for state in reached for following in table[state]} - reached:
        reached |= more
    assert reached == set(table)
    ends = {state for state in table if not table[state]}
    while more := {state for state in table if table[state] & ends} - ends:
        ends |= more
    assert ends == set(table)


def test_a_node_that_is_lost_again_and_again_is_left_for_good(script: Script) -> None:
    """Each time another machine of its name had come back."""
    for_good = []
    for step in (1, 2, 3):
        for_good.append(only(script.lose(), LeaveNode).for_good)
        script.find(DEAD.node)
        script.tell(JoinStarted(step))
        script.incarnations[2] += 1
        script.generation += 1
        script.see((0, 1, 2, 3))
        assert script.plan.state is S.WHOLE
    assert for_good == [False, False, True]


def test_newcomers_that_wait_for_others_are_told_of(script: Script) -> None:
    """Those others may have died unseen: an observer takes them for living ones."""
    script.see((0, 1), connected=(2, 3))
    event = TrainingSeen(script.generation, (0, 1), script.training_step, script.plan._seen.peers)
    watch = StallWatch()
    looks = [watch.look(event, frozenset(), 30.0 * n, is_over=False) for n in range(4)]
    assert looks == [None, None, (2, 3), None]


def taken_out(script: Script) -> tuple[Action, ...]:
    """A person takes n3 out of the job, whose only task Slurm kills."""
    script.tell(TasksDied(0, (2,), "Killed"))
    script.see((0, 1, 3))
    assert only(script.tell(Tick(), LIMITS.diagnosis_wait), StartSearch).kind is SearchKind.TASKS
    return script.tell(SearchEnded(SearchKind.TASKS, FoundNodes(JOIN, taken={"n3": "taken"})))


def test_a_node_that_a_person_took_out_of_the_job_gets_no_other_in_its_place(
    script: Script,
) -> None:
    empty = only(taken_out(script), SayEmpty)
    assert (empty.seats, empty.reason) == ((2,), "taken")
    script.generation = 2
    script.see((0, 1, 3))
    assert script.plan.state is S.DEGRADED
    assert script.tell(Tick(), LIMITS.swap_wait) == (), "the others go on for good"
    # What becomes of it is none of this step's business.
    assert script.lose(DEAD) == script.lose(SICK) == ()
    # For another node one is looked for, and no more.
    search = only(script.lose(FaultyNode("n2", "no beat", True)), StartSearch)
    assert (search.living_nodes, search.step_size) == (("n1", "n4"), 3)


def test_where_the_others_cannot_go_on_without_it_the_step_ends(script: Script) -> None:
    taken_out(script)
    assert script.tell(Tick(), TAKEN_SECONDS) == ()
    ended = only(script.tell(Tick(), 1.0), EndSteps)
    assert ended.reason == f"no seat has stepped for {TAKEN_SECONDS + 1:.0f} s"


def test_a_program_that_needs_all_its_nodes_ends_without_the_one_that_was_taken() -> None:
    ended = only(taken_out(Script(needs_all=True)), EndSteps)
    assert "taken" in ended.reason


def test_the_other_tasks_of_a_node_that_was_taken_out_need_no_search() -> None:
    slots = tuple(
        NodeSlot(rank, node, (2 * rank, 2 * rank + 1)) for rank, node in enumerate(("n1", "n2"))
    )
    plan = LivePlan(SeatMap(slots, 4, 1, False), LIMITS)
    plan.step(TasksDied(0, (2,), "Killed"), 0.0)
    plan.step(Tick(), LIMITS.diagnosis_wait)
    plan.step(TasksDied(0, (3,), "Killed"), 1.5)
    found = FoundNodes(JOIN, taken={"n2": "taken"})
    assert only(plan.step(SearchEnded(SearchKind.TASKS, found), 3.0), SayEmpty).seats == (2,)
    assert only(plan.step(Tick(), 5.0), SayEmpty).seats == (3,)
