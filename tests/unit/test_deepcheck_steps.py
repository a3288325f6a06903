"""A step's messages survive srun's cutting and mixing; steps end with their follower."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.deepcheck.deep_results import (
    DEEP_TRANSITIONS,
    DeepOutcome,
    DeepResult,
    DeepState,
    NodeDeepCheck,
    advanced,
    end_of,
)
from slurm_resilience.deepcheck.node_choice import (
    DeepReadiness,
    by_gpus,
    choose_node,
    gpus_of,
    kept_nodes,
)
from slurm_resilience.deepcheck.step_follower import StepFollower
from slurm_resilience.deepcheck.step_lines import (
    CheckEnded,
    ChecksDone,
    LineAssembler,
    StepMessage,
    as_lines,
)
from slurm_resilience.deepcheck.tool_call import END_SIGNAL
from slurm_resilience.errors import IllegalTransition, MissingTool
from slurm_resilience.model import Node, Severity
from slurm_resilience.slurm.maintenance import MaintenanceClient, StepOrder, step_words
from slurm_resilience.slurm.reservations import Reservation, read_reservations

texts = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=3000)


@given(st.lists(texts, min_size=1, max_size=4), st.integers())
def test_messages_come_through_in_any_mixture(said: list[str], seed: int) -> None:
    sent: dict[str, StepMessage] = {
        f"n{number}": CheckEnded(f"n{number}", DeepResult("disk", DeepOutcome.PASSED, text))
        for number, text in enumerate(said)
    }
    waiting = {node: list(as_lines(node, message)) for node, message in sent.items()}
    assert all(len(line.encode()) < 1000 for lines in waiting.values() for line in lines)
    assembler, mixed, heard = LineAssembler(), random.Random(seed), []
    while waiting:
        node = mixed.choice(sorted(waiting))
        heard.append(assembler.feed(waiting[node].pop(0) + "\n"))
        assert assembler.feed("[W socket.cpp:752] a library's warning\n") is None
        if not waiting[node]:
            del waiting[node]
    assert sorted(map(repr, filter(None, heard))) == sorted(map(repr, sent.values()))


def test_a_line_that_was_torn_is_no_message() -> None:
    (line,) = as_lines("n1", ChecksDone("n1"))
    assert LineAssembler().feed(line[:-3]) is None
    assert LineAssembler().feed(line) == ChecksDone("n1")


# --- states -----------------------------------------------------------------------------------


def result(outcome: DeepOutcome, action: Severity = Severity.NONE) -> DeepResult:
    return DeepResult("disk", outcome, "why", action)


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ("passed absent", DeepState.PASSED),
        ("passed unjudged", DeepState.UNJUDGED),
        ("unjudged failed passed", DeepState.FAILED),
        ("absent", DeepState.UNJUDGED),
        ("", DeepState.UNJUDGED),
    ],
)
def test_only_what_was_looked_at_passes(outcomes: str, state: DeepState) -> None:
    assert end_of([result(DeepOutcome(word)) for word in outcomes.split()])[0] is state


def test_a_state_follows_the_table_alone() -> None:
    node = advanced(NodeDeepCheck("n1"), DeepState.IN_PROGRESS)
    assert advanced(node, DeepState.FAILED, "broken").reason == "broken"
    with pytest.raises(IllegalTransition):
        advanced(advanced(node, DeepState.FAILED), DeepState.PASSED)
    with pytest.raises(IllegalTransition):
        advanced(NodeDeepCheck("n1"), DeepState.PASSED)
    assert set(DEEP_TRANSITIONS) == set(DeepState)
    drawn = Path(__file__).parents[2].joinpath("docs", "deep-checks.md").read_text()
    for state, following in DEEP_TRANSITIONS.items():
        if following:
            names = " | ".join(one.value for one in DeepState if one in following)
            assert f" {state} ─► {names}\n" in drawn


def test_the_gravest_failure_is_the_nodes_action() -> None:
    grave = result(DeepOutcome.FAILED, Severity.REPLACE)
    mild = result(DeepOutcome.FAILED, Severity.REBOOT)
    remark = DeepResult("x", DeepOutcome.PASSED, "", Severity.REPLACE)
    assert NodeDeepCheck("n1", results=(mild, grave, remark)).action is Severity.REPLACE
    assert NodeDeepCheck("n1", results=(mild, remark)).action is Severity.REBOOT


# --- nodes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "flags", "readiness"),
    [
        ("IDLE", "", DeepReadiness.READY),
        ("MIXED", "", DeepReadiness.BUSY),
        ("ALLOCATED", "", DeepReadiness.BUSY),
        ("IDLE", "COMPLETING", DeepReadiness.BUSY),
        ("ALLOCATED", "FAIL", DeepReadiness.AWAY),
        ("IDLE", "DRAIN", DeepReadiness.AWAY),
        ("IDLE", "FAIL", DeepReadiness.AWAY),
        ("DOWN", "", DeepReadiness.AWAY),
        ("IDLE", "NOT_RESPONDING", DeepReadiness.AWAY),
        ("IDLE", "POWERED_DOWN", DeepReadiness.AWAY),
        ("UNKNOWN", "", DeepReadiness.AWAY),
    ],
)
def test_only_an_idle_node_is_loaded(base: str, flags: str, readiness: DeepReadiness) -> None:
    assert choose_node(Node("n1", base, frozenset(flags.split())), {}).readiness is readiness


def test_a_node_that_is_kept_for_others_is_left_alone() -> None:
    reservations = [
        Reservation("upgrade", ("n1",), 500.0),
        Reservation("later", ("n2",), 5000.0),
    ]
    kept = kept_nodes(reservations, until=1000.0)
    assert choose_node(Node("n1", "IDLE"), kept) == (
        "n1",
        DeepReadiness.AWAY,
        "kept by reservation upgrade",
    )
    assert choose_node(Node("n2", "IDLE"), kept).readiness is DeepReadiness.READY
    assert choose_node(Node("n1", "IDLE"), kept, own="upgrade").readiness is DeepReadiness.READY


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("", 0),
        ("gpu:8", 8),
        ("gpu:a100:8(S:0-1),shard:64", 8),
        ("lustre:1", 0),
        ("(null)", 0),
        ("gpu:Trainium:16", 0),
        ("gpu:a100:4,gpu:b:2", 6),
    ],
)
def test_gpus_in_a_nodes_gres(gres: str, count: int) -> None:
    assert gpus_of(gres) == count


def test_nodes_are_grouped_by_their_gpus() -> None:
    nodes = [Node("a", "IDLE", gres="gpu:8"), Node("b", "IDLE"), Node("c", "IDLE", gres="gpu:h:8")]
    assert by_gpus(nodes) == {"gpu:8": ("a", "c"), "": ("b",)}


def test_reservations_are_read() -> None:
    text = (
        "ReservationName=upgrade StartTime=2026-11-22T20:00:00 EndTime=2026-11-22T21:00:00 "
        "Duration=01:00:00 Nodes=n[1-2] NodeCnt=2 CoreCnt=8 Features=(null) State=ACTIVE\n"
        "ReservationName=floating StartTime=2026-11-22T20:00:00 Nodes= NodeCnt=0\n"
    )
    first, second = read_reservations(text)
    assert first.nodes == ("n1", "n2") and first.starts_at > 1.7e9
    assert second.nodes == ()
    assert read_reservations("No reservations in the system\n") == ()
    assert read_reservations("ReservationName=r StartTime=odd Nodes=n1") == (
        Reservation("r", ("n1",), 0.0, "StartTime=odd"),
    )


def test_a_step_asks_for_the_whole_node_and_outlives_one() -> None:
    words = step_words(StepOrder("r", ("n1", "n2"), ("prog", "{}"), 5, gres="gpu:8"))
    assert words[-2:] == ["prog", "{}"]
    assert {"--reservation=r", "--nodelist=n[1-2]", "--nodes=2", "--no-kill", "--gres=gpu:8"} <= {
        *words
    }


def test_a_secret_of_a_step_is_in_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$SRES_TOLD" "$@"\n')
    srun.chmod(0o755)
    order = StepOrder("r", ("n1",), ("prog",), 5, secrets=(("SRES_TOLD", "hush"),))
    assert "hush" not in " ".join(step_words(order))
    said = MaintenanceClient(str(tmp_path)).start_step(order).communicate()[0]
    assert said.startswith("hush ") and "--export=ALL" in said


# --- following --------------------------------------------------------------------------------


class Programs:
    """Starts Python programs in place of jobs."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start_step(self, order: StepOrder) -> subprocess.Popen[str]:
        step = subprocess.Popen(
            [sys.executable, "-c", order.program[0]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(step)
        return step


@pytest.fixture
def programs() -> Iterator[Programs]:
    made = Programs()
    yield made
    for step in made.started:
        step.kill()
        step.wait()


def order(program: str) -> StepOrder:
    return StepOrder("r", ("n1",), (program,), 1)


def test_messages_are_heard_and_the_rest_is_kept(programs: Programs) -> None:
    (line,) = as_lines("n1", ChecksDone("n1"))
    # srun of a cluster without a task plugin, on --cpu-bind=none.
    no_news = "print('srun: cluster configuration lacks support for cpu binding\\nx')"
    heard: list[StepMessage] = []
    with StepFollower(programs, SYSTEM_CLOCK) as follower:
        ends = follower.follow(
            [order(f"print({line!r}); print('oops'); raise SystemExit(3)"), order(no_news)],
            60,
            heard.append,
        )
    assert heard == [ChecksDone("n1")]
    assert ends == [(3, "oops"), (0, "x")]


def test_a_step_past_its_limit_is_ended(programs: Programs) -> None:
    with StepFollower(programs, SYSTEM_CLOCK) as follower:
        (end,) = follower.follow([order("import time; time.sleep(600)")], 0.2, lambda _: None)
    assert end.code == -END_SIGNAL


def test_an_interrupt_leaves_no_step_behind(programs: Programs) -> None:
    (line,) = as_lines("n1", ChecksDone("n1"))

    def interrupt(_: StepMessage) -> None:
        raise KeyboardInterrupt

    program = f"import time; print({line!r}, flush=True); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt), StepFollower(programs, SYSTEM_CLOCK) as follower:
        follower.follow([order(program), order("import time; time.sleep(600)")], 60, interrupt)
    assert [step.poll() for step in programs.started] == [-END_SIGNAL] * 2
    assert threading.current_thread() is threading.main_thread()


def test_a_step_that_cannot_be_started_leaves_none_behind(programs: Programs) -> None:
    start = programs.start_step

    def second_fails(order: StepOrder) -> subprocess.Popen[str]:
        if programs.started:
            raise MissingTool("srun is not on PATH")
        return start(order)

    programs.start_step = second_fails  # type: ignore[method-assign]
    with pytest.raises(MissingTool), StepFollower(programs, SYSTEM_CLOCK) as follower:
        follower.follow([order("import time; time.sleep(600)")] * 2, 60, lambda _: None)
    assert [step.poll() for step in programs.started] == [-END_SIGNAL]
