"""The decisions on the size of an elastic step, by stories and by chance."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_resilience.config import ElasticSettings
from slurm_resilience.mesh.model import Peer
from slurm_resilience.resume.elastic import size_events as ev
from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.resume.elastic.node_group import GroupState
from slurm_resilience.resume.elastic.size_plan import (
    BEHIND_SECONDS,
    MOST_ASKED,
    PROVEN_SECONDS,
    SizePlan,
)
from slurm_resilience.resume.live_step.live_events import (
    FaultyNode,
    NodesFaulty,
    TellTraining,
    Tick,
    TrainingSeen,
)

SETTINGS = ElasticSettings(snooze=30.0, timeout=600.0, backoff=60.0)


def size(*groups: int, in_order: bool = False) -> ElasticSize:
    sizes = tuple(accumulate((2, *groups))) if in_order else ()
    return ElasticSize(2, 2, groups, sizes, SETTINGS)


class Story:
    """A plan, with a Slurm that gives nodes and a training that takes them in."""

    def __init__(self, chosen: ElasticSize) -> None:
        self.plan = SizePlan(chosen, seats_per_node=1)
        self.now = 0.0
        self.training: dict[int, str] = {0: "n1", 1: "n2"}
        """Node of each seat that steps."""
        self.jobs: dict[int, int] = {}
        """Companions that are not given back, and their groups."""
        self.next_step, self.next_job = 1, 100
        self.refuses = False
        self.seen: list[ev.SizeAction] = []

    def tell(self, event: object) -> list[ev.SizeAction]:
        actions = list(self.plan.step(event, self.now))  # type: ignore[arg-type]
        self.seen += actions
        for action in actions:
            match action:
                case ev.AskForGroup(group, nodes):
                    assert len(self.plan.groups[group].ranks) == nodes
                    if self.refuses:
                        continue
                    self.next_job += 1
                    assert group not in self.jobs.values(), "one request for each group"
                    self.jobs[self.next_job] = group
                    self.tell(ev.GroupAsked(group, self.next_job))
                case ev.StartGroup(group, _, slots):
                    steps = tuple(range(self.next_step, self.next_step + len(slots)))
                    self.next_step += len(slots)
                    self.tell(ev.GroupStarted(group, steps))
                case ev.GiveBack(_, companion):
                    del self.jobs[companion]
        return actions

    def tick(self, seconds: float = 0.0) -> list[ev.SizeAction]:
        self.now += seconds
        return self.tell(Tick())

    def grant(self, group: int) -> tuple[str, ...]:
        """Give a group its nodes; its ranks do not step yet."""
        job = next(job for job, of in self.jobs.items() if of == group)
        nodes = tuple(f"g{rank}" for rank in self.plan.groups[group].ranks)
        self.tell(ev.CompanionSeen(group, job, "RUNNING", nodes))
        return nodes

    def step_in(self, group: int) -> list[ev.SizeAction]:
        for rank in self.plan.groups[group].ranks:
            self.training[rank] = f"g{rank}"
        return self.look()

    def look(self) -> list[ev.SizeAction]:
        peers = tuple(
            Peer(id=f"{seat}@{node}", seat=seat, node=node) for seat, node in self.training.items()
        )
        return self.tell(TrainingSeen(1, tuple(sorted(self.training)), 7, peers))

    def state(self, group: int) -> GroupState:
        return self.plan.groups[group].state


def grown(*groups: int, in_order: bool = False) -> Story:
    story = Story(size(*groups, in_order=in_order))
    for number in range(len(groups)):
        story.tick()
        story.grant(number)
        story.step_in(number)
    return story


def test_it_grows_as_nodes_become_free() -> None:
    story = Story(size(1, 1))
    assert [a.group for a in story.tick() if isinstance(a, ev.AskForGroup)] == [0, 1]
    story.grant(1)
    assert [slot.rank for slot in story.plan.slots] == [3], "a rank belongs to its group"
    story.now += 4.0
    (said,) = story.step_in(1)
    assert isinstance(said, ev.SayGrew) and (said.change.size, said.seconds) == (3, 4.0)
    story.grant(0)
    (said,) = story.step_in(0)
    assert isinstance(said, ev.SayGrew) and said.change.size == 4


def test_few_requests_wait_in_slurms_queue_at_one_time() -> None:
    story = Story(size(*[1] * 20))
    assert len([a for a in story.tick() if isinstance(a, ev.AskForGroup)]) == MOST_ASKED
    assert not story.tick(60.0)
    story.grant(0)
    assert [a.group for a in story.tick() if isinstance(a, ev.AskForGroup)] == [MOST_ASKED]
    story.tell(sick("n1"))
    assert [a.group for a in story.tick() if isinstance(a, ev.AskForGroup)] == [20], "the stand-in"


def test_nodes_that_are_taken_back_are_asked_for_again_after_a_snooze() -> None:
    story = grown(1)
    del story.training[2]
    actions = story.tell(ev.GroupStepEnded(1, 0))
    assert [type(a) for a in actions] == [ev.SayShrank, ev.GiveBack]
    assert story.tick(29.0) == []
    assert [type(a) for a in story.tick(1.0)] == [ev.AskForGroup]


def test_a_node_that_dies_is_left_at_once() -> None:
    story = grown(1)
    faulty = FaultyNode("g2", "no heartbeat", True)
    actions = story.tell(NodesFaulty((faulty,)))
    assert [type(a) for a in actions] == [TellTraining, ev.SayShrank, ev.GiveBack]
    assert story.plan.lost.ids == {"2@g2"} and story.plan.slots == ()


def test_no_size_is_given_up_that_was_never_reached() -> None:
    """A log that tells of a smaller training, and never told of a larger one, is read in vain."""
    story = Story(size(1))
    for _ in range(2):  # as well after it was in
        story.tick()
        story.grant(0)
        faulty = FaultyNode("g2", "no heartbeat", True)
        told = [a for a in story.tell(NodesFaulty((faulty,))) if not isinstance(a, TellTraining)]
        assert [type(a) for a in told] == [ev.GiveBack, ev.SayNotGrown]
        assert told[1] == ev.SayNotGrown("g2: no heartbeat", 30.0)
        story.tick(30.0)
        story.grant(0)
        story.step_in(0)
        shrank = [a for a in story.tell(NodesFaulty((faulty,))) if isinstance(a, ev.SayShrank)]
        assert [a.change.size for a in shrank] == [2]
        story.training.pop(2, None)
        story.now += 30.0


def test_ranks_go_with_those_of_their_group_whose_srun_has_ended() -> None:
    story = grown(2)
    del story.training[2]
    (action,) = story.tell(ev.GroupStepEnded(1, 1))
    assert isinstance(action, ev.AskGroupToLeave) and action.steps == (2,)
    del story.training[3]
    actions = story.tell(ev.GroupStepEnded(2, 0))
    assert [type(a) for a in actions] == [ev.SayShrank, ev.GiveBack, ev.SayNotGrown]


def sick(*names: str) -> ev.NodesSick:
    return ev.NodesSick(tuple(FaultyNode(name, "ECC", False) for name in names))


@pytest.mark.parametrize(
    ("lived", "cancelled", "pauses"),
    [(5.0, False, [60.0, 120.0, 240.0]), (5.0, True, []), (PROVEN_SECONDS, False, [])],
)
def test_ranks_that_die_soon_each_time_are_asked_for_less_and_less_often(
    lived: float, cancelled: bool, pauses: list[float]
) -> None:
    """The others form the world anew for each of them. Not so where Slurm or a person ended
    them, or after a long life."""
    story = Story(size(2))
    for _ in range(3):
        story.tick(3600.0)
        story.grant(0)
        story.step_in(0)
        story.now += lived
        first, second = story.plan.groups[0].steps
        story.tell(ev.GroupStepEnded(first, 137, cancelled))
        story.tell(ev.GroupStepEnded(second, 0))
        assert story.state(0) is GroupState.VACANT
        assert not [a for a in story.tick(29.0) if isinstance(a, ev.AskForGroup)]
    told = [action for action in story.seen if isinstance(action, ev.SayNotGrown)]
    assert [action.seconds for action in told] == pauses
    assert {action.reason for action in told} <= {"its srun on g2,g3 ended with 137"}


@pytest.mark.parametrize(
    ("lived", "asked", "pauses"),
    [
        (5.0, "", [60.0, 120.0, 240.0]),
        (None, "", [60.0, 120.0, 240.0]),
        (5.0, "in words", [30.0] * 3),
        (5.0, "as Slurm shows it", [30.0] * 3),
        (PROVEN_SECONDS, "", [30.0] * 3),
    ],
)
def test_ranks_that_end_unasked_are_asked_for_less_and_less_often(
    lived: float | None, asked: str, pauses: list[float]
) -> None:
    """As those do that Slurm preempts, they end with 0; a program that ends itself would be asked
    for again and again."""
    story = Story(size(2))
    for pause in pauses:
        assert [a for a in story.tick() if isinstance(a, ev.AskForGroup)]
        nodes, number = story.grant(0), next(iter(story.jobs))
        if lived is not None:
            story.step_in(0)
            story.now += lived
        first, second = story.plan.groups[0].steps
        story.tell(ev.GroupStepEnded(first, 0))
        if asked == "as Slurm shows it":
            story.tell(ev.CompanionSeen(0, number, "PREEMPTED", nodes))
        actions = story.tell(ev.GroupStepEnded(second, 0, asked == "in words"))
        (given_back,) = (a for a in actions if isinstance(a, ev.GiveBack))
        assert given_back.is_unasked is (pause > 30.0)
        if given_back.is_unasked:
            (told,) = story.tell(ev.GroupLeftUnasked(0, number, nodes))
            assert isinstance(told, ev.SayNotGrown) and told.seconds == pause
            assert "on g2,g3 ended with 0, and nothing had asked them to" in told.reason
        assert not [a for a in story.tick(pause - 1.0) if isinstance(a, ev.AskForGroup)]
        story.now += 1.0


def test_a_long_stay_ends_the_row_of_ranks_that_end_unasked() -> None:
    story = Story(size(1))
    for lived, pause in ((5.0, 60.0), (5.0, 120.0), (PROVEN_SECONDS, 30.0), (5.0, 60.0)):
        story.tick()
        nodes, number = story.grant(0), next(iter(story.jobs))
        story.step_in(0)
        story.now += lived
        actions = story.tell(ev.GroupStepEnded(story.plan.groups[0].steps[0], 0))
        if any(isinstance(a, ev.GiveBack) and a.is_unasked for a in actions):
            story.tell(ev.GroupLeftUnasked(0, number, nodes))
        assert not [a for a in story.tick(pause - 1.0) if isinstance(a, ev.AskForGroup)]
        story.now += 1.0


def test_nodes_that_slurm_takes_before_the_ranks_step_are_asked_for_again_soon() -> None:
    """A busy cluster preempts while ranks start: no rank has failed."""
    story = Story(size(2))
    for _ in range(5):
        story.tick()
        story.grant(0)
        first, _ = story.plan.groups[0].steps
        actions = story.tell(ev.GroupStepEnded(first, 143, cancelled=True))
        assert [type(a) for a in actions] == [ev.GiveBack, ev.SayNotGrown]
        assert actions[1] == ev.SayNotGrown("Slurm or a person ended its tasks on g2,g3", 30.0)
        story.now += 30.0


@pytest.mark.parametrize(("lived", "pause"), [(0.0, 60.0), (PROVEN_SECONDS, 30.0)])
def test_a_node_on_which_a_task_has_died_is_given_back(lived: float, pause: float) -> None:
    """Its other tasks run on, and the node would be used in part only."""
    story = grown(2)
    story.now += lived
    first, second = story.plan.groups[0].steps
    died = ev.GroupTaskDied(first, "Segmentation fault")
    assert story.tell(died) == [ev.AskGroupToLeave(101, (first, second))]
    assert not story.tell(died), "it is told once"
    story.tell(ev.GroupStepEnded(first, 139))
    story.tell(ev.GroupStepEnded(second, 0))
    assert story.state(0) is GroupState.VACANT and not story.jobs
    assert not [a for a in story.tick(pause - 1.0) if isinstance(a, ev.AskForGroup)]
    assert [a for a in story.tick(1.0) if isinstance(a, ev.AskForGroup)]


def test_a_task_that_dies_before_the_ranks_step_ends_their_start() -> None:
    story = Story(size(1))
    story.tick()
    story.grant(0)
    actions = story.tell(ev.GroupTaskDied(1, "Killed"))
    assert actions == [
        ev.GiveBack(0, 101, (1,), ("g2",)),
        ev.SayNotGrown("a task on g2 ended: Killed", 60.0),
    ]
    assert not story.tell(ev.GroupTaskDied(1, "Killed")), "it is not this plan's any more"


def test_a_companion_with_another_number_of_nodes_is_given_back() -> None:
    """A person has changed the request in the queue (scontrol update NumNodes)."""
    story = Story(size(2))
    story.tick()
    actions = story.tell(ev.CompanionSeen(0, 101, "RUNNING", ("n7",)))
    reason = "job 101 has 1 node(s), and is to have 2"
    assert actions == [ev.GiveBack(0, 101, ()), ev.SayNotGrown(reason, 60.0)]


def test_a_sick_node_of_a_companion_is_left_when_another_one_is_in() -> None:
    story = grown(1)
    assert story.tell(sick("g2")) == []
    assert [a.group for a in story.tick() if isinstance(a, ev.AskForGroup)] == [1]
    story.grant(1)
    assert story.tell(sick("g2")) == []
    story.step_in(1)
    (action,) = story.tell(sick("g2"))
    assert isinstance(action, ev.AskGroupToLeave) and action.steps == (1,)
    assert story.tell(sick("g2")) == [], "it was told"
    del story.training[2]
    assert [type(a) for a in story.tell(ev.GroupStepEnded(1, 0))] == [ev.SayShrank, ev.GiveBack]
    # The stand-in stays until the group is back.
    assert story.tell(sick()) == [] and story.tick() == []
    story.tick(SETTINGS.snooze)
    story.grant(0)
    story.step_in(0)
    (action,) = story.tick()
    assert isinstance(action, ev.AskGroupToLeave) and action.steps == (2,)


def test_a_sick_node_of_the_job_itself_is_kept_until_another_one_is_in() -> None:
    story = grown(1)
    story.tell(sick("n1"))
    story.tick()
    assert not story.plan.may_leave("n1", story.now)
    story.grant(1)
    story.step_in(1)
    assert story.plan.may_leave("n1", story.now)
    assert story.tell(sick("n1")) == [], "live_plan leaves it"
    story.tell(sick())
    (action,) = story.tick()
    assert isinstance(action, ev.AskGroupToLeave), "it was replaced"


def test_no_sick_node_is_kept_for_long() -> None:
    story = grown(1)
    story.tell(sick("g2", "n1"))
    story.tick(SETTINGS.evacuation_wait)
    assert story.plan.may_leave("n1", story.now)
    (action,) = story.tell(sick("g2", "n1"))
    assert isinstance(action, ev.AskGroupToLeave) and action.steps == (1,)
    # It got better, or was replaced by hand.
    story.tell(sick())
    assert [type(a) for a in story.tick()] == [ev.GiveBack]


def test_all_nodes_of_a_group_go_together() -> None:
    story = grown(2)
    assert not story.tell(ev.GroupStepEnded(1, 0))
    assert story.state(0) is GroupState.LEAVING
    assert [type(a) for a in story.tell(ev.GroupStepEnded(2, 0))] == [ev.SayShrank, ev.GiveBack]
    story = grown(2)
    story.tell(ev.GroupStepEnded(1, 137, cancelled=True))
    assert [type(a) for a in story.tick(120.0)] == [ev.SayShrank, ev.GiveBack], "not for ever"


def test_a_request_that_a_person_ends_is_made_again_later_and_named() -> None:
    story = Story(size(1))
    story.tick()
    (job,) = story.jobs
    _, told = story.tell(ev.CompanionSeen(0, job, "CANCELLED", ()))
    assert told == ev.SayNotGrown(f"job {job} was cancelled while it waited", 60.0)


@pytest.mark.parametrize(
    ("state", "nodes", "told", "pauses"),
    [
        ("PREEMPTED", ("g2",), "was preempted", (30.0, 30.0)),
        ("NODE_FAIL", ("g2",), "lost its nodes g2", (30.0, 30.0)),
        ("CANCELLED", ("g2",), "was cancelled", (60.0, 120.0)),
        ("FAILED", ("g2",), "has ended (FAILED)", (60.0, 120.0)),
        ("", (), "is not known to Slurm any more", (60.0, 120.0)),
    ],
)
def test_a_companion_that_came_and_went_between_two_looks_is_told_of_as_it_ended(
    state: str, nodes: tuple[str, ...], told: str, pauses: tuple[float, float]
) -> None:
    """Nothing has failed where Slurm took its nodes: the pause does not double."""
    story = Story(size(1))
    for pause in pauses:
        story.tick()
        (job,) = story.jobs
        assert not story.tell(ev.CompanionSeen(0, job, "COMPLETING", nodes)), "it says how, soon"
        _, said = story.tell(ev.CompanionSeen(0, job, state, nodes))
        assert said == ev.SayNotGrown(f"job {job} {told}", pause)
        story.now += pause


def test_a_companion_on_nodes_that_are_of_no_use_is_told_of_as_that() -> None:
    story = Story(size(1))
    story.tick()
    (job,) = story.jobs
    _, said = story.tell(ev.CompanionSeen(0, job, "RUNNING", ("g2",), "g2 is not taken: it is hot"))
    assert said == ev.SayNotGrown("g2 is not taken: it is hot", 60.0)


def test_what_goes_at_the_end_is_told_of_with_the_last_step() -> None:
    """No rank tells its step any more."""
    story = grown(1)
    story.tell(TrainingSeen(1, (), -1, ()))
    told, _ = story.tell(ev.GroupStepEnded(1, 0))
    assert isinstance(told, ev.SayShrank) and told.change.training_step == 7


def test_ranks_that_do_not_come_give_their_nodes_back() -> None:
    story = Story(size(1))
    story.tick()
    story.grant(0)
    assert story.tick(599.0) == []
    actions = story.tick(1.0)
    assert [type(a) for a in actions] == [ev.GiveBack, ev.SayNotGrown]
    assert story.tick(59.0) == []
    assert [type(a) for a in story.tick(1.0)] == [ev.AskForGroup]


def test_ranks_without_which_the_others_step_on_give_their_nodes_back() -> None:
    """They are cut off from the others, or stand still, and nothing else finds a fault."""
    story = grown(1)
    del story.training[2]
    story.look()
    for _ in range(599):
        story.now += 1.0
        assert not story.look() and not story.tick()
    story.now += 1.0
    story.look()
    shrank, given_back, told = story.tick()
    reason = "the others stepped for 600 s, its ranks did not (elastic.timeout)"
    assert isinstance(shrank, ev.SayShrank) and shrank.reason == reason
    assert isinstance(given_back, ev.GiveBack) and given_back.steps == (1,)
    assert told == ev.SayNotGrown(reason, 60.0)


@pytest.mark.parametrize("steps", [(), (2,)])
def test_ranks_are_kept_while_nothing_steps_or_some_of_their_group_do(
    steps: tuple[int, ...],
) -> None:
    """A recovery may take long; and of a group, only some may be let into the world."""
    story = grown(2)
    story.training = {seat: f"g{seat}" for seat in steps}
    for _ in range(2000):
        story.now += 1.0
        assert not story.look() and not story.tick()


def test_slurm_is_asked_less_and_less_often_when_it_refuses() -> None:
    story = Story(size(1))
    story.refuses = True
    pauses = []
    for _ in range(1100):  # a training of two months, with a partition that is not there
        story.tick()
        (said,) = story.tell(ev.GroupFailed(0, "QOSMaxNodes"))
        assert isinstance(said, ev.SayNotGrown)
        pauses.append(said.seconds)
        story.now += said.seconds
    assert pauses == [60, 120, 240, 480, 960, 1920] + 1094 * [3600]


def test_while_slurm_refuses_one_request_is_tried_at_a_time() -> None:
    """A thousand groups would else ask a thousand times, with a line in the log each."""
    story = Story(size(*[1] * 20))
    story.refuses = True
    for group in [a.group for a in story.tick() if isinstance(a, ev.AskForGroup)]:
        story.tell(ev.GroupFailed(group, "QOSMaxSubmitJobPerUserLimit"))
    for pause in (60.0, 120.0):
        assert story.tick(pause - 1.0) == []
        assert [a.group for a in story.tick(1.0) if isinstance(a, ev.AskForGroup)] == [0]
        story.tell(ev.GroupFailed(0, "QOSMaxSubmitJobPerUserLimit"))
    story.refuses = False
    assert [a.group for a in story.tick(240.0) if isinstance(a, ev.AskForGroup)] == [0]
    assert len([a for a in story.tick() if isinstance(a, ev.AskForGroup)]) == MOST_ASKED - 1


def test_a_refused_request_does_not_keep_back_the_groups_that_come_before_it() -> None:
    story = Story(size(1, 1, in_order=True))
    story.tick()
    story.grant(0)
    story.step_in(0)
    story.refuses = True
    assert [a.group for a in story.tick() if isinstance(a, ev.AskForGroup)] == [1]
    story.tell(ev.GroupFailed(1, "QOSMaxSubmitJobPerUserLimit"))
    del story.training[2]
    story.tell(ev.GroupStepEnded(1, 0))
    story.refuses = False
    assert [a.group for a in story.tick(30.0) if isinstance(a, ev.AskForGroup)] == [0]


def test_only_the_sizes_that_are_allowed() -> None:
    story = Story(size(2, 4, in_order=True))
    assert [a.group for a in story.tick() if isinstance(a, ev.AskForGroup)] == [0]
    story.grant(0)
    assert story.tick() == []
    story.step_in(0)
    assert [a.group for a in story.tick() if isinstance(a, ev.AskForGroup)] == [1]
    story.grant(1)
    story.step_in(1)
    # The first group is taken back: eight nodes less two are no size of this step.
    for rank in (2, 3):
        del story.training[rank]
    story.tell(ev.GroupStepEnded(1, 0))
    story.tell(ev.GroupStepEnded(2, 0))
    (action,) = story.tick()
    assert isinstance(action, ev.AskGroupToLeave) and action.steps == (3, 4, 5, 6)


def test_a_person_has_the_youngest_leave_and_come_back() -> None:
    story = grown(1, 1, 1)
    story.tell(ev.TargetSet(3, "alice"))
    asked = story.tick(1.0)
    assert [a.steps for a in asked if isinstance(a, ev.AskGroupToLeave)] == [(2,), (3,)]
    late = story.tick(7200.0)
    assert [type(a) for a in late] == 2 * [ev.AskGroupToLeave], "a step may take hours"
    for step, rank in ((2, 3), (3, 4)):
        del story.training[rank]
        story.look()
        (said, _) = story.tell(ev.GroupStepEnded(step, 0))
        assert isinstance(said, ev.SayShrank) and said.reason == "resized to 3 nodes by alice"
    assert story.tick(3600.0) == [], "what a person does not want is not asked for"
    story.tell(ev.TargetSet(4, "alice"))
    assert [a.group for a in story.tick() if isinstance(a, ev.AskForGroup)] == [1]


def test_a_request_that_still_waits_is_taken_back_before_ranks_leave() -> None:
    story = Story(size(1, 1))
    story.tick()
    story.grant(1)
    story.step_in(1)
    story.tell(ev.TargetSet(3, "alice"))
    assert [type(a) for a in story.tick()] == [ev.GiveBack]
    assert (story.state(0), story.state(1)) == (GroupState.VACANT, GroupState.IN)


def test_ranks_that_have_not_come_yet_leave_for_a_person_too() -> None:
    story = Story(size(1))
    story.tick()
    story.grant(0)
    story.tell(ev.TargetSet(2, "alice"))
    assert story.tick() == [ev.AskGroupToLeave(101, (1,))]
    assert not story.step_in(0), "they came just then, and go"
    del story.training[2]
    story.look()
    (given_back,) = story.tell(ev.GroupStepEnded(1, 143, cancelled=True))
    assert isinstance(given_back, ev.GiveBack)
    assert not story.tick(60.0)


def test_a_later_word_counts_while_an_earlier_one_is_carried_out() -> None:
    story = grown(1, 1)
    story.tell(ev.TargetSet(2, "alice"))
    story.tick()
    story.tell(ev.TargetSet(4, "alice"))
    story.tick()
    assert story.state(0) is GroupState.LEAVING, "its ranks were asked already"
    for step, rank in ((1, 2), (2, 3)):
        del story.training[rank]
        story.tell(ev.GroupStepEnded(step, 0))
    assert len([a for a in story.tick(30.0) if isinstance(a, ev.AskForGroup)]) == 2


def test_ranks_that_go_for_a_person_are_asked_again() -> None:
    """Slurm was away when they were asked first, and nothing else would have them go."""
    story = grown(1)
    story.tell(ev.TargetSet(2, "alice"))
    (first,) = story.tick()
    assert story.tick(59.0) == []
    assert story.tick(1.0) == [first] and story.tick(1.0) == [] and story.tick(60.0) == [first]
    del story.training[2]
    story.look()
    story.tell(ev.GroupStepEnded(1, 0))
    assert story.tick(120.0) == []


def test_a_person_who_wants_nodes_again_does_not_wait_for_a_pause() -> None:
    story = grown(1)
    story.tell(ev.TargetSet(2, "alice"))
    story.tick()
    del story.training[2]
    story.tell(ev.GroupStepEnded(1, 0))
    story.tell(ev.TargetSet(3, "alice"))
    assert [a.group for a in story.tick(0.1) if isinstance(a, ev.AskForGroup)] == [0]


def test_a_persons_word_has_a_failed_request_made_again() -> None:
    story = Story(size(1))
    story.refuses = True
    for _ in range(5):
        story.tick(3600.0)
        story.tell(ev.GroupFailed(0, "sbatch: error"))
    assert story.tick(1.0) == []
    story.refuses = False
    story.tell(ev.TargetSet(2, "alice"))
    story.tell(ev.TargetSet(3, "alice"))
    assert [a.group for a in story.tick() if isinstance(a, ev.AskForGroup)] == [0]


def test_a_resize_waits_while_a_loss_is_mended() -> None:
    story = grown(1)
    held, story.training = story.training, {}
    story.look()
    story.tell(ev.TargetSet(2, "alice"))
    assert story.tick() == []
    story.training = held
    story.look()
    assert [type(a) for a in story.tick()] == [ev.AskGroupToLeave]


def test_who_leaves_for_a_person_and_dies_is_not_waited_for() -> None:
    story = grown(2)
    story.tell(ev.TargetSet(2, "alice"))
    story.tick()
    story.tell(NodesFaulty((FaultyNode("g2", "no beat", True),)))
    assert [type(a) for a in story.tick(120.0)] == [ev.SayShrank, ev.GiveBack]


def test_named_sizes_are_reached_from_the_last_one() -> None:
    story = grown(2, 4, in_order=True)
    story.tell(ev.TargetSet(4, "alice"))
    (action,) = story.tick()
    assert isinstance(action, ev.AskGroupToLeave) and action.steps == (3, 4, 5, 6)


@pytest.mark.parametrize("state", ["PREEMPTED", "CANCELLED", ""])
def test_a_companion_that_ended_takes_its_ranks_with_it(state: str) -> None:
    story = grown(1)
    (job,) = story.jobs
    told = story.tell(ev.CompanionSeen(0, job, state, ()))
    # Of one that Slurm does not know it is not certain that its ranks are being ended.
    assert [type(action) for action in told] == ([] if state else [ev.AskGroupToLeave])
    assert story.state(0) is GroupState.LEAVING
    assert [type(a) for a in story.tick(120.0)] == [ev.SayShrank, ev.GiveBack]


def test_a_companion_that_is_suspended_is_given_back() -> None:
    """Its stopped ranks can neither step nor leave; another node may be free."""
    story = grown(1)
    (job,) = story.jobs
    shrank, given_back = story.tell(ev.CompanionSeen(0, job, "SUSPENDED", ("g2",)))
    assert isinstance(shrank, ev.SayShrank) and shrank.reason == f"job {job} was suspended"
    assert given_back == ev.GiveBack(0, job, (1,), ("g2",))
    assert [type(a) for a in story.tick(30.0)] == [ev.AskForGroup]


def test_a_companion_that_is_suspended_as_it_starts_was_ended_by_no_person() -> None:
    """Between two looks: nodes are asked for again after a snooze, however often that happens."""
    story = Story(size(1))
    for _ in range(3):
        story.tick()
        (job,) = story.jobs
        given_back, said = story.tell(ev.CompanionSeen(0, job, "SUSPENDED", ("g2",)))
        assert given_back == ev.GiveBack(0, job, ())
        assert said == ev.SayNotGrown(f"job {job} was suspended", SETTINGS.snooze)
        story.now += SETTINGS.snooze


def without_more(story: Story) -> None:
    """Have Slurm refuse further requests, and the companion's srun end; its ranks step on."""
    story.refuses = True
    story.tell(ev.GroupStepEnded(1, 137, cancelled=True))
    assert story.state(0) is GroupState.VACANT


def test_ranks_that_slurm_has_lost_do_not_step_for_ever() -> None:
    """Their slurmstepd was killed: the node is free for others, and nothing else ends them."""
    story = grown(1)
    without_more(story)
    assert not [a for a in story.tick(BEHIND_SECONDS - 1) if isinstance(a, TellTraining)]
    (told,) = [a for a in story.tick(1.0) if isinstance(a, TellTraining)]
    assert (told.node.node, told.node.dead) == ("g2", True)
    assert story.plan.lost.ids == {"2@g2"}
    assert not [a for a in story.tick(BEHIND_SECONDS) if isinstance(a, TellTraining)], "once"


@pytest.mark.parametrize("node", ["", "n1", "n7"])
def test_ranks_that_have_ended_or_moved_are_not_cut_off(node: str) -> None:
    story = grown(1)
    without_more(story)
    del story.training[2]
    if node:
        story.training[2] = node
    story.look()
    assert not [a for a in story.tick(BEHIND_SECONDS) if isinstance(a, TellTraining)]


def test_ranks_on_a_node_that_was_given_again_are_not_cut_off() -> None:
    story = grown(1)
    story.tell(ev.GroupStepEnded(1, 0))
    story.tick(SETTINGS.snooze)
    assert story.grant(0) == ("g2",)
    story.step_in(0)
    assert not [a for a in story.tick(BEHIND_SECONDS) if isinstance(a, TellTraining)]


def test_a_number_that_slurm_gives_anew_is_the_later_groups() -> None:
    """A slurmctld that was killed has forgotten the companion whose ranks step."""
    story = grown(1, 1)
    first, second = story.jobs
    for group, job in ((0, first), (1, second)):
        story.tell(ev.CompanionSeen(group, job, "", ()))
    story.tell(ev.GroupStepEnded(2, 1, cancelled=True))
    story.refuses = True
    assert [a.group for a in story.tick(30.0) if isinstance(a, ev.AskForGroup)] == [1]
    story.tell(ev.GroupAsked(1, first))
    (started,) = story.tell(ev.CompanionSeen(1, first, "RUNNING", ("g3",)))
    assert isinstance(started, ev.StartGroup) and started.group == 1
    assert story.state(0) is GroupState.LEAVING


def test_a_companion_that_got_another_name_is_left_at_once() -> None:
    """Slurm shows no companion of this number any more, and ends none of its ranks."""
    story = grown(1)
    (companion,) = story.jobs
    (asked,) = story.tell(ev.CompanionSeen(0, companion, "", ()))
    assert isinstance(asked, ev.AskGroupToLeave) and asked.steps
    assert story.state(0) is GroupState.LEAVING


def test_nodes_that_a_person_took_out_of_the_core_are_not_counted() -> None:
    story = grown(1, 1)
    story.tell(ev.CoreShrunk(1))
    story.tell(ev.TargetSet(3, "ann"))
    assert not story.tick(), "three are left of four"
    story.tell(ev.TargetSet(2, "ann"))
    (asked,) = [a for a in story.tick() if isinstance(a, ev.AskGroupToLeave)]
    (shrank,) = [
        a for a in story.tell(ev.GroupStepEnded(asked.steps[0], 0)) if isinstance(a, ev.SayShrank)
    ]
    assert shrank.change.size == 2
    story.tell(ev.TargetSet(4, "ann"))
    assert [a.group for a in story.tick() if isinstance(a, ev.AskForGroup)] == [1]


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["grant", "in", "end", "die", "sick", "gone", "resize"]),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(events=EVENTS, in_order=st.booleans(), pauses=st.lists(st.floats(0, 200), max_size=40))
def test_whatever_happens_no_companion_is_forgotten(
    events: list[tuple[int, str]], in_order: bool, pauses: list[float]
) -> None:
    """A group has one companion at most, each is given back once, and one that is given back is
    asked for again."""
    story = Story(size(1, 2, 1, in_order=in_order))
    for number, (group, what) in enumerate(events):
        story.tick(pauses[number] if number < len(pauses) else 1.0)
        _happen(story, story.plan.groups[group].number, what)
        held = {g.companion for g in story.plan.groups if g.companion}
        assert held == set(story.jobs)
        assert len({slot.rank for slot in story.plan.slots}) == len(story.plan.slots)
    wanted = story.plan._size.reached.index(story.plan._target.nodes)
    for _ in range(6):
        _settle(story)
    here = [g for g in story.plan.groups[:-1] if g.state is not GroupState.VACANT]
    assert len(here) == wanted, "no more than a person wants, and no fewer"


def _settle(story: Story) -> None:
    """Have ranks leave that were asked to, and the others step."""
    for group in story.plan.groups:
        for step in group.steps if group.state is GroupState.LEAVING else ():
            story.tell(ev.GroupStepEnded(step, 0))
        if group.state is GroupState.ASKED and group.companion:
            story.grant(group.number)
    live = [g for g in story.plan.groups if g.state in (GroupState.JOINING, GroupState.IN)]
    story.training = {0: "n1", 1: "n2"} | {r: f"g{r}" for g in live for r in g.ranks}
    story.look()
    story.tell(ev.NodesSick(()))
    story.tick(4000.0)


def _happen(story: Story, number: int, what: str) -> None:
    group = story.plan.groups[number]
    if what == "grant" and group.state is GroupState.ASKED:
        story.grant(number)
    elif what == "in" and group.state is GroupState.JOINING:
        story.step_in(number)
    elif what == "end" and group.steps:
        story.training.pop(group.ranks[0], None)
        story.tell(ev.GroupStepEnded(group.steps[0], number))
    elif what == "die" and group.nodes:
        story.tell(NodesFaulty((FaultyNode(group.nodes[-1], what, True),)))
    elif what == "sick":
        story.tell(sick(*group.nodes[-1:]))
    elif what == "resize":
        story.tell(ev.TargetSet(story.plan._size.reached[number], "alice"))
    elif what == "gone" and group.companion:
        story.tell(ev.CompanionSeen(group.number, group.companion, "", ()))
