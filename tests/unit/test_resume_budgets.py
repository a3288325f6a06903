"""No program is started again for ever, however long its runs take."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume.decide.budgets import (
    LONGEST_PAUSE_SECONDS,
    nodes_that_eat_attempts,
    nodes_to_name,
    pause_before_next,
    spent,
)
from slurm_resilience.resume.decide.classify import Cause, Ending, ObservedSteps, classify
from slurm_resilience.resume.decide.plan import Plan, PlanFacts, after_task, plan
from slurm_resilience.resume.decide.signatures import Category, Explanation, LogLine, Role
from slurm_resilience.resume.decide.task_ends import TaskEnd
from slurm_resilience.resume.live_step.task_deaths import DeathRow, TaskDeaths

LIMITS = ResumeSettings()
LONG = LIMITS.progress_after + 1
NODES = ("n1", "n2", "n3")
ENDED = Ending(1, LONG, False, "RUNNING", nodes=NODES)
FACTS = PlanFacts((*NODES, "n4"), 3, True, False, False, False)
"""A spare inside, and no other way."""
PROGRAM = Cause("program", "it ended")


def ending(**more: Any) -> Ending:
    return msgspec.structs.replace(ENDED, **more)


def chosen(*history: Ending, facts: PlanFacts = FACTS, cause: Cause = PROGRAM) -> Plan:
    return plan(cause, facts, history, LIMITS)


@pytest.mark.parametrize("code", [1, 137])
@pytest.mark.parametrize("ran_for", [LONG, 8 * 3600.0])
def test_a_crash_loop_of_long_runs_is_a_bug(code: int, ran_for: float) -> None:
    tries = [ending(code=code, ran_for=ran_for + second) for second in range(4)]
    assert [chosen(*tries[:n]).kind for n in range(1, 5)] == ["relaunch"] * 3 + ["stop"]
    assert "it is a bug" in chosen(*tries).reason


@pytest.mark.parametrize(
    "other",
    [
        {"progressed": True},
        {"observed": ObservedSteps(100, 100, True)},
        {"ran_for": 3 * LONG},
        {"code": 2},
    ],
    ids=["progress", "observed", "elsewhere", "another"],
)
def test_failures_that_differ_are_no_loop(other: dict[str, Any]) -> None:
    assert chosen(ENDED, ENDED, ending(**other), ENDED).kind == "relaunch"


def at_step(step: int, further: bool, ran_for: float) -> Ending:
    return ending(ran_for=ran_for, observed=ObservedSteps(step, step, further))


@given(
    lives=st.lists(st.floats(LIMITS.progress_after + 1, 1e6), min_size=8, max_size=8),
    late=st.lists(st.integers(0, 1), min_size=8, max_size=8),
)
def test_a_bug_at_one_step_is_a_bug_wherever_each_attempt_begins(
    lives: list[float], late: list[int]
) -> None:
    tries = [at_step(1000 - late[n], n == 0, ran_for) for n, ran_for in enumerate(lives)]
    kinds = [chosen(*tries[:n]).kind for n in range(1, 8)]
    assert kinds.index("stop") == LIMITS.max_relaunches + 1
    assert "it is a bug" in chosen(*tries[:5]).reason


def test_a_bug_at_one_step_is_told_by_its_step() -> None:
    tries = [at_step(1000, n == 0, LONG * 2**n) for n in range(5)]
    assert "with exit code 1 4 times at step 1000" in chosen(*tries).reason


@given(lives=st.lists(st.sampled_from((61.0, 301.0, 7200.0)), min_size=2, max_size=60))
def test_a_job_that_gets_further_each_time_is_no_crash_loop(lives: list[float]) -> None:
    tries = [at_step(100 * n, True, ran_for) for n, ran_for in enumerate(lives)]
    assert chosen(*tries).kind == "relaunch"
    assert chosen(*tries).pause == 0.0


def test_a_node_s_fault_in_between_does_not_hide_a_loop() -> None:
    lost = ending(faulty={"n2": "dead"}, ran_for=50.0)
    assert chosen(ENDED, ENDED, lost, ENDED, ENDED).kind == "stop"


@given(
    runs=st.lists(st.floats(LONG, 1e6), min_size=100, max_size=100),
    code=st.sampled_from((1, 137)),
)
def test_a_program_that_never_reports_is_stopped_at_last(runs: list[float], code: int) -> None:
    history = [ending(code=code, ran_for=seconds) for seconds in runs]
    kinds = [chosen(*history[:n]).kind for n in range(1, 100)]
    assert "stop" in kinds[: LIMITS.max_same_failure + 1]


def test_an_hour_has_a_budget_whatever_the_cause() -> None:
    cause = Cause("node", "n2: dead", ("n2",))

    def lost(minutes: int, progressed: bool) -> list[Ending]:
        return [
            ending(ended_at=1e9 + 60 * minutes * n, faulty={"n2": "x"}, progressed=progressed)
            for n in range(LIMITS.max_per_hour)
        ]

    assert chosen(*lost(5, False), cause=cause).kind == "stop"
    assert chosen(*lost(5, False)[1:], cause=cause).kind == "relaunch"
    assert chosen(*lost(7, False), cause=cause).kind == "relaunch"
    assert chosen(*lost(5, True), cause=cause).kind == "relaunch"


def test_the_budget_of_an_hour_bears_a_date_that_is_set_back() -> None:
    """Each of these took two days; the last one ended on a machine a month behind."""
    days = [2 * day for day in range(LIMITS.max_per_hour - 1)]
    ends = [ending(ended_at=1e9 + 86400 * day, faulty={"n2": "x"}) for day in [*days, -30]]
    assert chosen(*ends, cause=Cause("node", "n2: dead", ("n2",))).kind == "relaunch"


TAKEN = ending(job_state="", interrupted="SIGTERM", code=143, ran_for=60.0, first_failed="n2")
"""Slurm preempted the job, or a person requeued it."""


def test_what_slurm_takes_back_uses_no_budget_up() -> None:
    """A job that lost a node once is preempted every few minutes, and started again each time."""
    ended = [1e9 + 120 * n for n in range(2 * LIMITS.max_per_hour)]
    taken = [msgspec.structs.replace(TAKEN, ended_at=at) for at in ended]
    lost = ending(faulty={"n2": "dead"}, ended_at=1e9 - 60)
    assert spent((lost, *taken), LIMITS) == ""
    crash = ending(code=137, ran_for=60.0, ended_at=ended[-1] + 60)
    assert chosen(lost, *taken, crash).kind == "relaunch"
    assert pause_before_next((lost, *taken, crash), LIMITS) == 0
    assert nodes_that_eat_attempts((lost, *taken), LIMITS) == ()


def test_what_slurm_takes_back_hides_no_crash_loop() -> None:
    crash = ending(code=1, ran_for=60.0)
    assert chosen(crash, TAKEN, crash).kind == "stop"
    killed = ending(code=137, ran_for=60.0)
    assert pause_before_next((killed, TAKEN, killed), LIMITS) > 0
    at_once = ending(code=1, ran_for=1.0)
    assert chosen(at_once).kind == "stop"
    assert chosen(TAKEN, at_once).kind == "relaunch"


def test_a_node_on_which_every_attempt_fails_first_is_left_once() -> None:
    on_n2 = ending(first_failed="n2", ran_for=60.0)
    assert chosen(on_n2).kind == "relaunch"
    left = chosen(on_n2, on_n2)
    assert (left.kind, left.nodes, left.leave) == ("relaunch", ("n1", "n3", "n4"), ("n2",))
    assert "n2 was the only one to fail" in left.reason
    elsewhere = ending(first_failed="n4", ran_for=60.0, nodes=("n1", "n3", "n4"))
    assert chosen(on_n2, on_n2, elsewhere).kind == "stop"


@pytest.mark.parametrize(
    ("endings", "facts"),
    [
        ((("n2", NODES), ("n1", NODES)), FACTS),
        ((("n2", ("n2",)), ("n2", ("n2",))), FACTS),
        ((("", NODES), ("", NODES)), FACTS),
        ((("n2", NODES), ("n2", NODES)), msgspec.structs.replace(FACTS, job_nodes=NODES)),
    ],
    ids=["several", "one node", "unknown", "no other node"],
)
def test_no_node_is_left_without_a_pattern(
    endings: tuple[tuple[str, tuple[str, ...]], ...], facts: PlanFacts
) -> None:
    history = [ending(first_failed=first, nodes=nodes, ran_for=60.0) for first, nodes in endings]
    assert chosen(*history, facts=facts).kind == "stop"


LINE = "RuntimeError: shapes do not fit"


def log(text: str, category: Category = Category.BUG, name: str = "python-error") -> Explanation:
    root = LogLine(1, name, category, Role.ROOT, text)
    return Explanation(category, "it failed", root=root)


@given(runs=st.lists(st.floats(LONG, 1e6), min_size=10, max_size=10))
def test_the_same_line_in_the_log_is_the_same_bug_however_long_a_run_takes(
    runs: list[float],
) -> None:
    times = [
        ending(ran_for=ran, log=log(f"[rank{n}]: 10:0{n}:00,123 {LINE}"))
        for n, ran in enumerate(runs)
    ]
    kinds = [chosen(*times[:n]).kind for n in range(1, 10)]
    assert kinds.index("stop") <= LIMITS.max_relaunches
    assert "it is a bug" in chosen(*times[: LIMITS.max_relaunches + 1]).reason


def test_a_line_that_names_another_step_is_another_place() -> None:
    times = [
        ending(ran_for=LONG * 2**n, log=log(f"loss is nan at step {n}", name="not-a-number"))
        for n in range(4)
    ]
    assert chosen(*times).kind == "relaunch"


def test_a_cause_that_may_pass_is_tried_more_often() -> None:
    def tries(category: Category, count: int, ran_for: float) -> str:
        same = ending(ran_for=ran_for, log=log("NCCL error", category, "nccl-error"))
        return chosen(*[same] * count).kind

    assert [tries(Category.BUG, n, 60.0) for n in (1, 2)] == ["relaunch", "stop"]
    passing = [tries(Category.TRANSIENT, n, 60.0) for n in (1, 2, 3, 4)]
    assert passing == ["relaunch"] * 3 + ["stop"]
    assert (tries(Category.BUG, 1, 2.0), tries(Category.TRANSIENT, 1, 2.0)) == ("stop", "relaunch")


ENDINGS = st.lists(
    st.builds(
        ending,
        progressed=st.booleans(),
        faulty=st.sampled_from(({}, {}, {"n1": "x"}, {"n1": "x", "n2": "y"}, {"": "lost"})),
        first_failed=st.sampled_from(("", "n1", "n2", "n3")),
        ran_for=st.sampled_from((20.0, 60.0, 7200.0)),
        code=st.sampled_from((1, 137)),
    ),
    min_size=1,
    max_size=12,
)


@given(history=ENDINGS, backoff=st.floats(0.0, 1e4))
def test_each_further_try_waits_longer_but_the_first_and_those_after_a_node_s_fault(
    history: list[Ending], backoff: float
) -> None:
    limits = msgspec.structs.replace(LIMITS, backoff=backoff)
    pauses = [pause_before_next(tuple(history[:n]), limits) for n in range(1, len(history) + 1)]
    before = 0.0
    for end, pause in zip(history, pauses, strict=True):
        assert 0.0 <= pause <= LONGEST_PAUSE_SECONDS
        if end.progressed or end.faulty:
            assert pause == 0.0
        else:
            assert pause >= before
        before = pause
    assert pauses[0] == 0.0


@given(backoff=st.floats(0.1, 1e3))
def test_a_pause_doubles(backoff: float) -> None:
    limits = msgspec.structs.replace(LIMITS, backoff=backoff)
    pauses = [pause_before_next((ENDED,) * n, limits) for n in range(1, 40)]
    assert pauses[1] == min(backoff, LONGEST_PAUSE_SECONDS)
    assert all(two == min(2 * one, LONGEST_PAUSE_SECONDS) for one, two in pairwise(pauses[1:]))


UNANSWERED = ending(ran_for=9.0, unanswered=True)
NOT_LAUNCHED = ending(ran_for=11.0, code=137, not_launched={"n2": "Connection failure"})


@pytest.mark.parametrize("never_began", [UNANSWERED, NOT_LAUNCHED])
def test_an_srun_without_an_answer_is_no_failure_of_the_program(never_began: Ending) -> None:
    """slurmctld was away for a moment, or had too much to do, or slurmd is: no task has begun."""
    plans = [chosen(*[never_began] * n) for n in range(1, LIMITS.max_per_hour)]
    assert {plan.kind for plan in plans} == {"relaunch"}
    # In the second of its start it refuses steps.
    assert plans[0].pause == LIMITS.backoff
    last = [msgspec.structs.replace(never_began, ended_at=1.0)] * LIMITS.max_per_hour
    assert "resume.max_per_hour" in chosen(*last).reason


def test_an_srun_without_an_answer_is_not_counted_among_the_program_s_failures() -> None:
    short = ending(ran_for=20.0)
    assert chosen(short, UNANSWERED).kind == "relaunch"
    assert chosen(UNANSWERED, short).kind == "relaunch"
    assert "2 times without progress" in chosen(short, UNANSWERED, short).reason
    assert "it is a bug" in chosen(UNANSWERED, ending(ran_for=1.0)).reason


def test_an_srun_that_is_not_to_wait_for_other_steps_is_not_started_again_at_once() -> None:
    """Once an attempt has run, a step may be in the way that is over soon."""
    busy = ending(ran_for=2.0, refused="Requested nodes are busy")
    cause = classify(busy)
    assert (cause.kind, cause.nodes) == ("program", ())
    assert cause.reason == "srun got no step from Slurm: Requested nodes are busy"
    assert chosen(busy).kind == chosen(busy, busy).kind == "stop"
    assert "--immediate" in chosen(busy).reason and "bug" not in chosen(busy).reason
    again = chosen(ending(ran_for=200.0), busy)
    assert (again.kind, again.pause > 0) == ("relaunch", True)
    assert "it may pass" in again.reason
    wrong = ending(ran_for=0.5, refused="More processors requested than permitted")
    assert chosen(wrong).kind == "stop"
    assert "got no step from Slurm: More processors" in classify(wrong).reason


def test_a_node_on_which_no_task_can_be_started_is_left_after_some_tries() -> None:
    failed = msgspec.structs.replace(NOT_LAUNCHED, first_failed="n2")
    crash = ending(ran_for=25.0, code=139)
    tries = [failed] * LIMITS.max_per_node
    used = msgspec.structs.replace(FACTS, own_nodes=NODES)
    before, left = chosen(crash, *tries[1:], facts=used), chosen(crash, *tries, facts=used)
    assert (before.kind, before.nodes) == ("relaunch", ())
    assert "it may pass: again on the same nodes" in before.reason
    assert (left.kind, left.nodes, left.avoid) == ("relaunch", ("n1", "n3", "n4"), ("n2",))
    assert "too many attempts ended on n2" in left.reason


SILENT = {"n2": "its slurmd takes no connection"}


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, "relaunch"),
        ({"job_nodes": NODES, "has_gres": False, "permits_expansion": True}, "swap"),
        ({"job_nodes": NODES, "has_gres": True, "companion_obstacle": ""}, "companion"),
    ],
)
def test_a_node_that_does_not_answer_is_left_after_one_try(more: dict[str, Any], kind: str) -> None:
    failed = msgspec.structs.replace(NOT_LAUNCHED, first_failed="n2", silent=SILENT)
    used = msgspec.structs.replace(FACTS, own_nodes=NODES, **more)
    left = chosen(failed, facts=used)
    assert (left.kind, left.leave, left.pause) == (kind, ("n2",), 0.0)
    assert "n2 does not answer (its slurmd takes no connection), and is left" in left.reason


@pytest.mark.parametrize(
    ("spares", "nodes", "leave"),
    [(("n4", "n5"), ("n1", "n4", "n5"), ("n2", "n3")), (("n4",), ("n1", "n2", "n4"), ("n3",))],
)
def test_a_node_that_does_not_answer_is_left_with_one_that_died(
    spares: tuple[str, ...], nodes: tuple[str, ...], leave: tuple[str, ...]
) -> None:
    """The dead one's place comes first; with a spare for both, both are left."""
    failed = msgspec.structs.replace(NOT_LAUNCHED, silent=SILENT, faulty={"n3": "no beat"})
    facts = msgspec.structs.replace(FACTS, own_nodes=NODES, job_nodes=(*NODES, *spares))
    left = chosen(failed, facts=facts, cause=Cause("node", "n3: no beat", ("n3",)))
    assert (left.kind, left.nodes, left.leave) == ("relaunch", nodes, leave)
    assert ("n2 does not answer, and is left as well" in left.reason) is ("n2" in leave)


def test_a_node_that_does_not_answer_is_tried_again_where_there_is_no_other() -> None:
    """A requeue would wait for nodes as well, and begin from the start."""
    failed = msgspec.structs.replace(NOT_LAUNCHED, first_failed="n2", silent=SILENT)
    full = msgspec.structs.replace(FACTS, own_nodes=NODES, job_nodes=NODES, swap_failed="no node")
    again = chosen(failed, facts=full)
    assert (again.kind, again.nodes, again.pause) == ("relaunch", (), LIMITS.backoff)


def test_a_pause_that_ends_beyond_the_time_limit_is_not_begun() -> None:
    short = msgspec.structs.replace(FACTS, seconds_left=LIMITS.time_margin + LIMITS.backoff - 1)
    tries = [ending(code=137)] * 2
    assert chosen(*tries).pause == LIMITS.backoff
    assert chosen(*tries, facts=short).kind == "stop"
    assert chosen(*tries[:1], facts=short).kind == "relaunch"


@given(history=ENDINGS, most=st.integers(1, 4))
def test_a_node_that_eats_attempts_is_known_by_their_number(
    history: list[Ending], most: int
) -> None:
    limits = msgspec.structs.replace(LIMITS, max_per_node=most)
    eaten: dict[str, int] = {}
    for end in history:
        if end.progressed or end.ran_for >= 3600.0:
            continue
        for name in end.faulty or (end.first_failed,):
            eaten[name] = eaten.get(name, 0) + 1
    eaten.pop("", None)
    expected = tuple(sorted(name for name, count in eaten.items() if count >= most))
    assert nodes_that_eat_attempts(tuple(history), limits) == expected


@given(
    history=ENDINGS,
    by_node=st.booleans(),
    spares=st.integers(0, 2),
    gres=st.booleans(),
    permits=st.booleans(),
)
def test_a_node_that_eats_attempts_is_left_out_where_that_costs_no_way_on(
    history: list[Ending], by_node: bool, spares: int, gres: bool, permits: bool
) -> None:
    extra = tuple(f"s{number}" for number in range(spares))
    facts = msgspec.structs.replace(
        FACTS,
        job_nodes=(*NODES, *extra),
        has_gres=gres,
        permits_expansion=permits,
        own_nodes=NODES,
    )
    limits = msgspec.structs.replace(LIMITS, max_per_node=3, max_attempts=1000)
    tolerant = msgspec.structs.replace(limits, max_per_node=1000)
    cause = Cause("node", "n3: dead", ("n3",)) if by_node else PROGRAM
    with_limit = plan(cause, facts, tuple(history), limits)
    without = plan(cause, facts, tuple(history), tolerant)
    going_on = ("relaunch", "swap")
    assert (with_limit.kind in going_on) == (without.kind in going_on)
    eaters = set(nodes_that_eat_attempts(tuple(history), limits))
    if with_limit.kind in going_on:
        assert set(with_limit.avoid) == eaters
    if "which is left out" in with_limit.reason:
        assert eaters & set(NODES) <= set(with_limit.leave)
        assert not eaters & set(with_limit.nodes)
        kept = [name for name in NODES if name not in with_limit.leave]
        assert with_limit.kind != "swap" or len(kept) + with_limit.take + spares == len(NODES)


def deaths(lives: list[float], steps: list[int]) -> list[DeathRow]:
    counted = TaskDeaths(LIMITS.progress_after)
    now, rows = 0.0, []
    for life, step in zip(lives, steps, strict=True):
        now += life
        rows.append(counted.died((0,), now, step))
        counted.joined((0,), now)
    return rows


@given(lives=st.lists(st.floats(1.0, 1e5), min_size=6, max_size=6))
def test_a_seat_that_dies_at_the_same_step_is_left_empty_however_long_it_lives(
    lives: list[float],
) -> None:
    rows = deaths(lives, [1000] * 6)
    assert [row.in_row for row in rows] == [1, 2, 3, 4, 5, 6]
    assert after_task(rows[LIMITS.max_relaunches].in_row, LIMITS).kind == "stop"


def test_a_seat_whose_training_goes_on_is_filled_again() -> None:
    long_lives = deaths([LONG] * 6, [1000 * n for n in range(6)])
    assert [row.in_row for row in long_lives] == [1] * 6
    assert after_task(1, LIMITS, long_lives[-1].in_all).kind == "join"
    assert after_task(1, LIMITS, LIMITS.max_attempts).kind == "stop"
    short_lives = deaths([60.0] * 4, [1000 * n for n in range(4)])
    assert [row.in_row for row in short_lives] == [1, 2, 3, 4]


def test_without_a_step_lives_of_the_same_length_are_a_row() -> None:
    assert [row.in_row for row in deaths([LONG] * 5, [-1] * 5)] == [1, 1, 2, 3, 4]
    assert [row.in_row for row in deaths([LONG, 2 * LONG, 4 * LONG], [-1] * 3)] == [1, 1, 1]


@given(waits=st.lists(st.floats(0.0, 1e5), min_size=4, max_size=4))
def test_a_program_lasts_until_its_first_task_fails_however_long_the_others_wait(
    waits: list[float],
) -> None:
    def failed_at(second: float, wait: float) -> Ending:
        end = TaskEnd(0, 0, 0, 1, at=1e9 + second)
        return ending(ran_for=second + wait, ended_at=1e9 + second + wait, ends=(end,))

    times = [failed_at(60.0, wait) for wait in waits]
    assert [chosen(*times[:n]).kind for n in (1, 2)] == ["relaunch", "stop"]
    assert chosen(failed_at(2.0, waits[0])).kind == "stop"


def test_a_node_that_was_left_long_ago_does_not_hurry_the_next_try() -> None:
    on_n1 = ending(faulty={"n1": "x"}, ran_for=60.0)
    again = [ending(code=code, ran_for=60.0, nodes=("n2", "n3", "n4")) for code in (137, 139)]
    left = msgspec.structs.replace(FACTS, own_nodes=("n2", "n3", "n4"))
    assert chosen(*[on_n1] * 3, *again, facts=left).pause == LIMITS.backoff


@given(
    history=ENDINGS,
    ran_for=st.sampled_from((10.0, 80.0, 100.0, 8000.0)),
    further=st.booleans(),
    nodes=st.sets(st.sampled_from(NODES), min_size=1).map(lambda names: tuple(sorted(names))),
)
def test_a_node_is_named_only_when_the_program_goes_on_without_it(
    history: list[Ending], ran_for: float, further: bool, nodes: tuple[str, ...]
) -> None:
    for name, count in nodes_to_name(tuple(history), nodes, ran_for, further).items():
        ended = [
            end
            for end in history
            if end.first_failed == name and not end.faulty and not end.made_progress
        ]
        assert name not in nodes and 2 <= count <= len(ended)
        assert further or ran_for > 50.0


def test_a_node_that_ate_attempts_is_named_once_others_live_longer() -> None:
    eaten = (ending(first_failed="n2", ran_for=60.0),) * 3
    assert nodes_to_name(eaten, ("n1", "n3"), 80.0, False) == {}
    assert nodes_to_name(eaten, ("n1", "n3"), 91.0, False) == {"n2": 3}
    assert nodes_to_name(eaten, ("n1", "n3"), 1.0, True) == {"n2": 3}
    assert nodes_to_name(eaten, NODES, 91.0, True) == {}
    known = tuple(msgspec.structs.replace(end, faulty={"n2": "dead"}) for end in eaten)
    assert nodes_to_name(known, ("n1", "n3"), 91.0, True) == {}, "sresctld knows of it"
