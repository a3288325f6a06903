"""Classify and plan: why a step ended, and the cheapest way on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.config import ResumeSettings
from slurm_resilience.model import Job
from slurm_resilience.resume.decide.classify import Cause, Ending, classify, describe
from slurm_resilience.resume.decide.plan import Plan, PlanFacts, after_task, plan
from slurm_resilience.resume.decide.signatures import Category, Explanation, explain
from slurm_resilience.resume.decide.task_ends import TaskEnd

LIMITS = ResumeSettings()
LONG = LIMITS.progress_after + 1
NODES = ("n1", "n2", "n3")
ENDED = Ending(code=1, ran_for=60.0, progressed=False, job_state="RUNNING")
FACTS = PlanFacts(NODES, 3, False, True, True, True)
NODE = Cause("node", "n2: dead", ("n2",))


def ending(**more: Any) -> Ending:
    return msgspec.structs.replace(ENDED, **more)


def facts(**more: Any) -> PlanFacts:
    return msgspec.structs.replace(FACTS, **more)


# -- classify ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"code": 0}, "done"),
        ({"code": 0, "stopped_by_us": True, "faulty": {"n2": "dead"}}, "node"),
        ({"job_state": "COMPLETING"}, "job_over"),
        ({"job_state": ""}, "job_over"),
        ({"interrupted": "SIGTERM"}, "user"),
        ({"cancelled": True}, "user"),
        ({"cancelled": True, "stopped_by_us": True, "faulty": {"n2": "dead"}}, "user"),
        ({"cancelled": True, "faulty": {"n2": "dead"}}, "user"),
        ({"faulty": {"n2": "dead"}}, "node"),
        ({"faulty": {"n2": "dead"}, "interrupted": "SIGTERM"}, "user"),
        ({"faulty": {"n2": "dead"}, "job_state": ""}, "job_over"),
        ({}, "program"),
        ({"code": 137}, "program"),
        ({"job_state": "SUSPENDED"}, "program"),
    ],
)
def test_why_it_ended(changes: dict[str, Any], kind: str) -> None:
    assert classify(ending(**changes)).kind == kind


@given(st.integers(1, 255))
def test_the_exit_code_alone_never_blames_a_node(code: int) -> None:
    assert classify(ending(code=code)).kind == "program"
    assert classify(ending(code=code, faulty={"n2": "dead"})).nodes == ("n2",)


def test_what_failed_after_a_training_that_ended_well_is_not_trained_again() -> None:
    cause = classify(ending(code=3, trained=True))
    assert cause.kind == "done" and "what came after it: exit code 3" in cause.reason
    assert classify(ending(code=3, trained=True, faulty={"n2": "no beat"})).kind == "node"
    assert classify(ending(code=143, trained=True, cancelled=True)).kind == "user"


HUNG = Ending(
    code=143,
    ran_for=900.0,
    progressed=False,
    job_state="RUNNING",
    stopped_by_us=True,
    first_failed="n2",
    nodes=("n1", "n2"),
    hang="it hung: no step for 612 s after step 118; rank 3 hangs in the kernel (n2)",
)


def test_a_hang_is_a_fault_that_may_pass_and_its_node_is_remembered() -> None:
    cause = classify(HUNG)
    assert (cause.kind, cause.category) == ("program", Category.TRANSIENT)
    assert "rank 3 hangs in the kernel (n2)" in cause.reason
    # A node's fault, a person's word and Slurm's end of the job say more.
    assert classify(msgspec.structs.replace(HUNG, faulty={"n2": "Xid 79"})).kind == "node"
    assert classify(msgspec.structs.replace(HUNG, cancelled=True)).kind == "user"
    assert classify(msgspec.structs.replace(HUNG, job_state="COMPLETING")).kind == "job_over"


def test_hangs_on_one_node_leave_it_and_hangs_for_ever_end() -> None:
    limits, times = ResumeSettings(), 3
    seen = facts(job_nodes=("n1", "n2", "n3"), step_size=2, own_nodes=("n1", "n2"))
    after = plan(classify(HUNG), seen, (HUNG,) * times, limits)
    assert after.kind == "relaunch" and set(after.nodes) == {"n1", "n3"}, after
    nowhere = msgspec.structs.replace(HUNG, first_failed="")
    over = plan(classify(nowhere), seen, (nowhere,) * 4, limits)
    assert over.kind == "stop" and "a hang" in over.reason, over


def test_all_faulty_nodes_are_named_with_their_reasons() -> None:
    cause = classify(ending(faulty={"n3": "Xid 79", "n1": "no beat"}))
    assert (cause.nodes, cause.reason) == (("n1", "n3"), "n1: no beat; n3: Xid 79")


def test_exit_codes_in_words() -> None:
    assert describe(137) == "exit code 137 (SIGKILL)"
    assert describe(129) == "exit code 129 (signal 1)"
    assert describe(3) == "exit code 3"


# -- plan: a node is at fault -----------------------------------------------------------------


def node_plan(cause: Cause = NODE, **more: Any) -> Plan:
    return plan(cause, facts(**more), (ending(faulty={"n2": "dead"}),), LIMITS)


def test_a_spare_in_the_allocation_is_the_cheapest() -> None:
    chosen = node_plan(step_size=2)
    assert (chosen.kind, chosen.nodes, chosen.leave) == ("relaunch", ("n1", "n3"), ("n2",))


def test_else_the_node_is_swapped() -> None:
    chosen = node_plan()
    assert (chosen.kind, chosen.leave, chosen.take) == ("swap", ("n2",), 1)


def test_a_node_that_left_the_job_already_is_replaced_too() -> None:
    chosen = node_plan(job_nodes=("n1", "n3"))
    assert (chosen.kind, chosen.leave, chosen.take) == ("swap", (), 1)


@pytest.mark.parametrize(
    "obstacle",
    [
        {"has_gres": True},
        {"permits_expansion": False},
        {"swap_failed": "no idle node within 3600 s"},
        {"job_nodes": ("n2",), "step_size": 1},
    ],
)
def test_where_no_swap_can_be_the_job_is_requeued(obstacle: dict[str, Any]) -> None:
    assert node_plan(**obstacle).kind == "requeue"
    assert node_plan(**obstacle, requeue=False).kind == "stop"
    assert node_plan(**obstacle, is_batch=False).kind == "stop"


def test_the_last_attempt_is_the_last() -> None:
    history = (ending(faulty={"n2": "dead"}),) * 4
    limits = msgspec.structs.replace(LIMITS, max_attempts=4)
    assert plan(NODE, FACTS, history, limits).kind == "stop"


@pytest.mark.parametrize("kind", ["done", "user", "job_over"])
def test_nothing_is_resumed_after(kind: Any) -> None:
    assert plan(Cause(kind, "why"), FACTS, (ENDED,), LIMITS) == Plan("stop", "why")


def test_without_its_input_only_the_whole_job_can_run_again() -> None:
    lost = {"input_lost": "its standard input is too long"}
    assert node_plan(**lost).kind == node_plan(**lost, step_size=2).kind == "requeue"
    assert node_plan(**lost, requeue=False).kind == "stop"
    assert node_plan(**lost, is_batch=False).kind == "stop"
    assert plan(PROGRAM, facts(**lost), (ending(code=137),), LIMITS).kind == "stop"
    assert node_plan(**lost, **LIVING).kind == "join"


def test_nothing_is_started_again_shortly_before_the_time_limit() -> None:
    """A program that ends by itself after --signal=USR1@50 has no fault."""
    near = {"seconds_left": LIMITS.time_margin - 1}
    assert plan(PROGRAM, facts(**near), (ending(code=137),), LIMITS).kind == "stop"
    assert node_plan(**near).kind == node_plan(**near, step_size=2).kind == "stop"
    assert node_plan(**near, has_gres=True).kind == "requeue"
    assert node_plan(seconds_left=LIMITS.time_margin + 1).kind == "swap"


@pytest.mark.parametrize(
    ("shown", "seconds"),
    [
        ("34", 34),
        ("2:34", 154),
        ("1:02:03", 3723),
        ("2-00:00:10", 172810),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_the_time_that_squeue_shows(shown: str, seconds: float | None) -> None:
    assert Job(1, 0, "RUNNING", time_left=shown).seconds_left == seconds


# -- plan: the step lives on ------------------------------------------------------------------

LIVING = {"living_nodes": ("n1", "n3"), "job_nodes": ("n1", "n3")}


def test_a_living_step_takes_in_another_node() -> None:
    chosen = node_plan(**LIVING)
    assert (chosen.kind, chosen.take, chosen.nodes, chosen.leave) == ("join", 1, (), ())


def test_a_spare_in_the_allocation_joins_also_with_gres() -> None:
    chosen = node_plan(living_nodes=("n1", "n3"), job_nodes=("n1", "n2", "n3", "n4"), has_gres=True)
    assert (chosen.kind, chosen.take, chosen.nodes) == ("join", 0, ("n4",))
    assert chosen.leave == ("n2",)


def test_of_two_lost_nodes_one_may_be_inside() -> None:
    cause = Cause("node", "n1, n2: dead", ("n1", "n2"))
    chosen = node_plan(cause, living_nodes=("n3",), job_nodes=("n3", "n4"))
    assert (chosen.kind, chosen.take, chosen.nodes) == ("join", 1, ("n4",))


@pytest.mark.parametrize(
    ("obstacle", "kind"),
    [
        ({"has_gres": True}, "requeue"),
        ({"permits_expansion": False}, "requeue"),
        ({"swap_failed": "no idle node"}, "requeue"),
        ({"has_gres": True, "requeue": False}, "stop"),
        ({"job_nodes": ("n1", "n2", "n3"), "batch_host": "n2"}, "requeue"),
        ({"job_nodes": ("n1", "n2", "n3", "n4"), "batch_host": "n2"}, "relaunch"),
    ],
)
def test_where_nobody_can_join_it_is_as_ever(obstacle: dict[str, Any], kind: str) -> None:
    assert node_plan(**(LIVING | obstacle)).kind == kind


def test_a_task_that_dies_again_and_again_is_left_alone() -> None:
    kinds = [after_task(deaths, LIMITS).kind for deaths in range(1, 6)]
    assert kinds == ["join"] * LIMITS.max_relaunches + ["stop"] * (5 - LIMITS.max_relaunches)


# -- plan: no node is at fault ----------------------------------------------------------------

PROGRAM = Cause("program", "it ended")


def program_plan(*history: Ending) -> Plan:
    return plan(PROGRAM, FACTS, history, LIMITS)


def test_a_failed_program_runs_on_other_nodes_where_it_has_some_no_more() -> None:
    """A companion whose part fails long before the others ends itself."""
    had = {"own_nodes": (*NODES[:2], "n9"), "has_gres": True}
    seen = facts(**had, companion_obstacle="")
    chosen = plan(PROGRAM, seen, (ending(progressed=True),), LIMITS)
    assert (chosen.kind, chosen.nodes) == ("relaunch", NODES[:3])
    fewer = msgspec.structs.replace(seen, job_nodes=NODES[:2])
    chosen = plan(PROGRAM, fewer, (ending(progressed=True),), LIMITS)
    assert (chosen.kind, chosen.take, chosen.leave) == ("companion", 1, ())
    assert "n9 no more" in chosen.reason
    held = msgspec.structs.replace(fewer, companions=(("n9",),))
    assert plan(PROGRAM, held, (ending(progressed=True),), LIMITS).kind == "relaunch"
    stuck = (ending(faulty={}), ending(), ending(), ending())
    assert plan(PROGRAM, fewer, stuck, LIMITS).kind == "stop"


def test_no_node_is_got_for_one_that_a_person_took_out_of_the_job() -> None:
    cause = classify(ending(code=137, taken=("n3",)))
    assert (cause.kind, cause.category) == ("program", Category.USER)
    seen = facts(own_nodes=NODES, job_nodes=NODES[:2], taken_nodes=("n3",))
    history = (ending(progressed=True, taken=("n3",)),)
    chosen = plan(cause, seen, history, LIMITS)
    assert chosen.kind == "stop" and "a person took out" in chosen.reason
    fewer = msgspec.structs.replace(seen, min_nodes=2)
    assert plan(cause, fewer, history, LIMITS).nodes == NODES[:2]
    spare = msgspec.structs.replace(seen, job_nodes=("n1", "n2", "n4"))
    assert plan(cause, spare, history, LIMITS).nodes == ("n1", "n2", "n4")


def test_a_step_that_slurm_refused_for_a_node_that_a_person_took_has_no_bug() -> None:
    refused = ending(ran_for=0.2, taken=("n3",), refused="Requested nodes are not in this job")
    spare = facts(own_nodes=NODES, job_nodes=("n1", "n2", "n4"), taken_nodes=("n3",))
    assert plan(classify(refused), spare, (refused,), LIMITS).nodes == ("n1", "n2", "n4")
    trained = msgspec.structs.replace(refused, refused="", trained=True)
    assert classify(trained).kind == "done", "another attempt would train once more"


def test_no_more_nodes_are_taken_in_than_are_known_to_be_lost() -> None:
    seen = facts(own_nodes=NODES, job_nodes=NODES[:1], living_nodes=("n1", "n3"))
    chosen = plan(NODE, seen, (), LIMITS)
    assert (chosen.kind, chosen.take) == ("join", 1)


@pytest.mark.parametrize(
    ("history", "kind"),
    [
        ((ending(ran_for=2.0),), "stop"),
        ((ending(ran_for=2.0, progressed=True),), "relaunch"),
        ((ending(ran_for=2.0, code=137),), "relaunch"),
        ((ending(),), "relaunch"),
        ((ending(), ending()), "stop"),
        ((ending(), ending(code=2)), "relaunch"),
        ((ending(), ending(progressed=True)), "relaunch"),
        ((ending(), ending(ran_for=LONG)), "relaunch"),
        ((ending(), ending(progressed=True), ending()), "relaunch"),
        ((ending(code=137),) * 3, "relaunch"),
        ((ending(code=137),) * 4, "stop"),
    ],
)
def test_a_program_that_fails(history: tuple[Ending, ...], kind: str) -> None:
    assert program_plan(*history).kind == kind


@given(
    code=st.integers(1, 255),
    ran_for=st.floats(0, LIMITS.progress_after - 1),
    same=st.booleans(),
    data=st.data(),
)
def test_a_program_that_makes_no_progress_is_stopped_soon(
    code: int, ran_for: float, same: bool, data: st.DataObject
) -> None:
    history: list[Ending] = []
    while True:
        now = code if same else data.draw(st.integers(1, 255))
        history.append(ending(code=now, ran_for=ran_for))
        if program_plan(*history).kind == "stop":
            return
        assert len(history) <= LIMITS.max_relaunches


ENDINGS = st.builds(
    Ending,
    code=st.integers(0, 255),
    ran_for=st.floats(0, 1e5),
    progressed=st.booleans(),
    job_state=st.sampled_from(("RUNNING", "COMPLETING", "")),
    faulty=st.dictionaries(st.sampled_from(NODES), st.just("dead"), max_size=3),
    interrupted=st.sampled_from(("", "SIGTERM")),
    cancelled=st.booleans(),
    stopped_by_us=st.booleans(),
)
ALL_FACTS = st.builds(
    PlanFacts,
    job_nodes=st.lists(st.sampled_from((*NODES, "n4")), min_size=1, unique=True).map(tuple),
    step_size=st.integers(1, 3),
    has_gres=st.booleans(),
    permits_expansion=st.booleans(),
    is_batch=st.booleans(),
    requeue=st.booleans(),
    swap_failed=st.sampled_from(("", "no idle node")),
    living_nodes=st.lists(st.sampled_from(NODES), unique=True).map(tuple),
)


@given(history=st.lists(ENDINGS, min_size=1, max_size=6), seen=ALL_FACTS)
def test_what_may_never_be_planned(history: list[Ending], seen: PlanFacts) -> None:
    cause = classify(history[-1])
    chosen = plan(cause, seen, tuple(history), LIMITS)
    assert chosen.reason
    assert chosen == plan(cause, seen, tuple(history), LIMITS)
    if chosen.kind == "swap":
        assert not seen.has_gres and seen.permits_expansion and not seen.swap_failed
        assert chosen.take > 0 and set(seen.job_nodes) - set(chosen.leave)
    if chosen.kind == "join":
        assert seen.living_nodes and not set(chosen.nodes) & {*cause.nodes, *seen.living_nodes}
        assert not chosen.take or not (seen.has_gres or seen.swap_failed)
    if chosen.kind == "requeue":
        assert seen.is_batch and seen.requeue
    if chosen.kind == "relaunch" and chosen.nodes:
        assert len(chosen.nodes) == seen.step_size
        assert not set(chosen.nodes) & set(cause.nodes)
    if cause.kind in ("done", "user", "job_over"):
        assert chosen.kind == "stop"


# -- the kind of cause ------------------------------------------------------------------------


def task_end(code: int, *, by_signal: bool = False, out_of_memory: bool = False) -> TaskEnd:
    return TaskEnd(0, 1, 3, code, by_signal, out_of_memory, 0.0, "n2")


def log_of(*lines: str) -> Explanation:
    (failure,) = explain(lines)
    return failure


OOM_LINE = "[rank3]: torch.OutOfMemoryError: CUDA out of memory."
CASCADE_LINE = "[rank0]: NCCL error in: x, ncclRemoteError"


@pytest.mark.parametrize(
    ("changes", "category"),
    [
        ({"code": 0}, Category.NONE),
        ({"interrupted": "SIGTERM"}, Category.USER),
        ({"interrupted": "SIGTERM", "timed_out": True}, Category.TIME_LIMIT),
        ({"interrupted": "SIGHUP", "timed_out": True}, Category.TIME_LIMIT),
        ({"interrupted": "SIGINT twice", "timed_out": True}, Category.USER),
        ({"cancelled": True}, Category.USER),
        ({"cancelled": True, "timed_out": True}, Category.TIME_LIMIT),
        ({"job_state": "TIMEOUT"}, Category.TIME_LIMIT),
        ({"job_state": "COMPLETING", "timed_out": True}, Category.TIME_LIMIT),
        ({"job_state": "CANCELLED"}, Category.USER),
        ({"job_state": ""}, Category.UNKNOWN),
        ({"faulty": {"n2": "dead"}, "log": log_of(OOM_LINE)}, Category.HARDWARE),
        ({}, Category.UNKNOWN),
        ({"log": log_of(OOM_LINE)}, Category.OUT_OF_MEMORY),
        ({"log": log_of(CASCADE_LINE)}, Category.TRANSIENT),
        ({"ends": (task_end(137, by_signal=True),)}, Category.UNKNOWN),
        ({"ends": (task_end(139, by_signal=True),)}, Category.BUG),
        ({"ends": (task_end(135, by_signal=True),)}, Category.HARDWARE),
        ({"ends": (task_end(139, by_signal=True),), "log": log_of(CASCADE_LINE)}, Category.BUG),
        (
            {"ends": (task_end(137, by_signal=True, out_of_memory=True),)},
            Category.OUT_OF_MEMORY,
        ),
        (
            {"ends": (task_end(134, by_signal=True),), "log": log_of(CASCADE_LINE)},
            Category.TRANSIENT,
        ),
        (
            {"ends": (task_end(1),), "log": log_of(CASCADE_LINE, OOM_LINE)},
            Category.OUT_OF_MEMORY,
        ),
    ],
)
def test_the_kind_of_cause(changes: dict[str, Any], category: Category) -> None:
    assert classify(ending(**changes)).category is category


def test_the_reason_names_task_node_kind_and_rank() -> None:
    cause = classify(ending(code=143, ends=(task_end(1),), log=log_of(OOM_LINE)))
    assert cause.reason == (
        "task 3 on n2 ended with exit code 1 after 60 s (out-of-memory: a GPU has too little "
        "memory for the model, the batch or the sequence, rank 3)"
    )


def test_the_log_decides_nothing() -> None:
    """A program may print anything: of what it prints, only the words for people depend on it."""
    quiet = ending(code=1, ends=(task_end(1),), ran_for=1.0)
    for line in (OOM_LINE, "*** STEP 1.0 ON n1 CANCELLED AT 1 DUE TO TIME LIMIT ***"):
        loud = msgspec.structs.replace(quiet, log=log_of(line))
        assert classify(loud).kind == classify(quiet).kind
        chosen = plan(classify(loud), FACTS, (loud,), LIMITS)
        assert chosen == plan(classify(quiet), FACTS, (quiet,), LIMITS)


# -- the end of the task that failed first ----------------------------------------------------


def test_the_programs_own_code_counts_and_not_the_one_that_srun_prints() -> None:
    """srun ended the others by SIGTERM, whose code is the higher one."""
    others = task_end(143, by_signal=True)
    last = ending(code=143, ran_for=3.0, ends=(task_end(5), others))
    chosen = plan(classify(last), FACTS, (last,), LIMITS)
    assert (chosen.kind, "exit code 5 after 3.0 s" in chosen.reason) == ("stop", True)


# -- other steps of the job -------------------------------------------------------------------


def test_nodes_of_other_steps_are_no_spares() -> None:
    own = {"job_nodes": ("n1", "n2", "n3", "n4"), "step_size": 2, "own_nodes": ("n3", "n4")}
    four = Cause("node", "n4: dead", ("n4",))
    history = (ending(faulty={"n4": "dead"}),)
    chosen = plan(four, facts(**own, busy_nodes=("n1", "n2")), history, LIMITS)
    assert (chosen.kind, chosen.leave, chosen.take) == ("swap", ("n4",), 1)
    chosen = plan(four, facts(**own, busy_nodes=("n1",)), history, LIMITS)
    assert (chosen.kind, chosen.nodes) == ("relaunch", ("n3", "n2"))


def test_a_spare_of_the_lost_nodes_switch_comes_first() -> None:
    own = {"job_nodes": ("n1", "n2", "n3", "n4"), "step_size": 2, "own_nodes": ("n1", "n2")}
    switches = {"n1": "a", "n2": "b", "n3": "a", "n4": "b"}
    history = (ending(faulty={"n2": "dead"}),)
    for domains, spare in ((switches, "n4"), ({}, "n3"), (switches | {"n4": "a"}, "n3")):
        chosen = plan(NODE, facts(**own, domains=domains), history, LIMITS)
        assert chosen.nodes == ("n1", spare)


def test_a_node_that_was_left_is_no_spare() -> None:
    """The batch host stays in the job, as does a node of which Slurm refuses to take it back."""
    own = {"job_nodes": ("n1", "n2", "n3", "n4"), "step_size": 2, "own_nodes": ("n2", "n3")}
    dead = Cause("node", "n3: dead", ("n3",))
    chosen = plan(dead, facts(**own, left_nodes=("n1",)), (ending(faulty={"n3": "x"}),), LIMITS)
    assert (chosen.kind, chosen.nodes) == ("relaunch", ("n2", "n4"))
    assert chosen.reason == (
        "n4 takes the place of n3; 2 good nodes are in the allocation, 0 to spare"
    )
    left = facts(**own, left_nodes=("n1", "n4"))
    assert plan(dead, left, (ending(faulty={"n3": "x"}),), LIMITS).kind == "swap"


@pytest.mark.parametrize(
    ("more", "kind", "nodes"),
    [
        ({"min_nodes": 2}, "relaunch", ("n1", "n3")),
        ({"min_nodes": 2, "has_gres": True, "requeue": False}, "relaunch", ("n1", "n3")),
        ({"min_nodes": 1, "job_nodes": ("n1", "n2", "n3", "n4")}, "relaunch", ("n1", "n3", "n4")),
        ({"min_nodes": 3}, "swap", ()),
        ({"min_nodes": 3, "has_gres": True}, "requeue", ()),
        # A step that lives on waits for no node anyway.
        ({"min_nodes": 2, "living_nodes": ("n1", "n3")}, "join", ()),
    ],
)
def test_fewer_nodes_come_before_an_exchange_and_a_requeue(
    more: dict[str, Any], kind: str, nodes: tuple[str, ...]
) -> None:
    chosen = node_plan(**more)
    assert (chosen.kind, chosen.nodes) == (kind, nodes)
    assert kind != "relaunch" or len(nodes) == 3 or "2 of 3 nodes are left" in chosen.reason


def test_what_is_left_of_a_step_is_not_moved() -> None:
    own = {"job_nodes": ("n1", "n2", "n3", "n4"), "step_size": 2, "own_nodes": ("n3", "n4")}
    four = Cause("node", "n4: dead", ("n4",))
    chosen = plan(four, facts(**own), (ending(faulty={"n4": "dead"}),), LIMITS)
    assert chosen.nodes == ("n3", "n1")
