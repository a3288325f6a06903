"""The layout of a step: told by its nodes, else asked of Slurm; what depends on it waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from fake_slurm import FakeSlurm
from supervised_srun import supervisor_of, watch_of

from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.decide.task_ends import NodeBegan
from slurm_resilience.resume.srun.environment import Attempt
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.srun.step_set import StepSet
from slurm_resilience.resume.srun.task_reports import StepReports
from slurm_resilience.resume.step_layout import (
    OPEN_SECONDS,
    WAIT_SECONDS,
    WAITS_ON_SECONDS,
    StepLayout,
)
from slurm_resilience.resume.supervisor import Supervisor
from slurm_resilience.slurm.client import StepInfo
from slurm_resilience.wire.messages import NodeVerdict

PLANNED = Attempt(
    job=7,
    number=1,
    restarts=0,
    step_nodes=("n1", "n2"),
    job_nodes=("n1", "n2"),
    master_address="10.0.0.1",
    directory="/tmp",
)
ADDRESSES = {"n1": "10.0.0.1", "n2": "10.0.0.2"}


class Watched:
    """A step, and what Slurm is asked and shows of it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked = 0
        self.shown: list[StepInfo] = []
        self.reports = StepReports("token,1,127.0.0.1")
        self.step = SimpleNamespace(reports=self.reports, running=True, pid=42, name="")
        context = SimpleNamespace(
            clock=SimpleNamespace(monotonic=lambda: self.now),
            client=SimpleNamespace(steps=self._steps),
            allocation=SimpleNamespace(id=7),
            host="n1",
            host_calls=SimpleNamespace(lives=lambda pid: pid != 13),
        )
        self.layout = StepLayout(
            cast(SupervisorContext, context), PLANNED, cast(SrunStep, self.step), ADDRESSES
        )

    def _steps(self, _: int) -> list[StepInfo]:
        self.asked += 1
        return self.shown

    def shows(self, *nodes: str, tasks: int) -> None:
        self.shown = [StepInfo(7, "3", nodes, srun_host="n1", srun_pid=42, tasks=tasks)]


def test_what_all_nodes_have_told_is_known_at_once_and_slurm_is_not_asked() -> None:
    watched = Watched()
    watched.reports.take(NodeBegan(3, 1, "n1", 2, 8))
    assert watched.layout.look() is None
    assert watched.layout.is_open
    watched.reports.take(NodeBegan(3, 0, "n2", 2, 8))
    attempt = watched.layout.look()
    assert attempt is not None
    assert (attempt.step, attempt.step_nodes, attempt.tasks_per_node) == (3, ("n2", "n1"), 4)
    assert (attempt.master_address, watched.step.name) == ("10.0.0.2", "7.3")
    assert not watched.layout.is_open
    assert (watched.asked, watched.layout.look()) == (0, None)


def test_the_log_tells_of_a_step_that_waits_for_its_turn(
    capfd: pytest.CaptureFixture[str],
) -> None:
    watched = Watched()
    own = StepInfo(7, "TBD", ("n1", "n2"), srun_host="n1", srun_pid=42)
    watched.shown = [StepInfo(7, "0", ("n2",)), StepInfo(7, "batch", ("n1",)), own]

    def told_within(seconds: int) -> str:
        for _ in range(seconds):
            watched.now += 1.0
            assert watched.layout.look() is None
        return capfd.readouterr().err

    assert told_within(int(WAIT_SECONDS) - 1) == ""
    told = told_within(60)
    assert told.count("sres:") == 1 and "7.0 on n2 runs there" in told, told
    assert "is gone" not in told and told_within(300) == ""
    watched.shown = [StepInfo(7, "0", ("n2",), srun_host="n1.site", srun_pid=13), own]
    assert "the srun of 7.0 is gone: scancel 7.0 ends" in told_within(int(WAITS_ON_SECONDS))
    watched.shown = [own]
    assert "no other step runs on n[1-2]" in told_within(int(WAITS_ON_SECONDS))


def test_tasks_that_do_not_lie_evenly_are_no_number_for_each_node() -> None:
    watched = Watched()
    watched.reports.take(NodeBegan(3, 1, "n2", 2, 3))
    watched.reports.take(NodeBegan(3, 0, "n1", 2, 3))
    attempt = watched.layout.look()
    assert attempt is not None and attempt.tasks_per_node == 0


def test_slurm_is_asked_where_the_plugin_of_a_node_tells_no_numbers() -> None:
    watched = Watched()
    watched.shows("n1", "n2", tasks=4)
    watched.reports.take(NodeBegan(3, 1, "n1"))
    watched.reports.take(NodeBegan(3, 0, "n2"))
    watched.now += 1.0
    attempt = watched.layout.look()
    assert attempt is not None
    assert (attempt.step_nodes, attempt.tasks_per_node, watched.asked) == (("n2", "n1"), 2, 1)


def test_a_step_that_ends_before_a_node_has_told_has_the_order_that_slurm_showed() -> None:
    watched = Watched()
    watched.shows("n1", "n2", tasks=4)
    watched.reports.take(NodeBegan(3, 0, "n1", 2, 4))
    watched.now += 1.0
    assert watched.layout.look() is None
    watched.step.running = False
    attempt = watched.layout.look()
    assert attempt is not None
    assert (attempt.step_nodes, attempt.tasks_per_node) == (("n1", "n2"), 2)


def test_the_nodes_of_another_part_of_a_world_are_no_layout_of_this_one() -> None:
    main, part = StepReports(""), StepReports("")
    part.behind(main, 2, 4)
    part.take(NodeBegan(0, 0, "n3", 1, 2))
    main.take(NodeBegan(3, 0, "n1", 2, 4))
    assert main.whole_step() is None
    main.take(NodeBegan(3, 1, "n2", 2, 4))
    assert main.nodes() == ("n1", "n2", "n3")
    assert main.whole_step() is None


def test_nothing_waits_for_a_layout_for_ever() -> None:
    watched = Watched()
    watched.now += OPEN_SECONDS - 0.1
    assert watched.layout.is_open
    watched.now += 0.2
    assert not watched.layout.is_open


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    monkeypatch.chdir(tmp_path)
    slurm = FakeSlurm(2)
    slurm.submit(2)
    return supervisor_of(slurm)


@pytest.mark.parametrize("how", ["known", "given up"])
def test_a_sick_node_is_judged_when_the_layout_is_known(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It depends on the tasks of the step whether a second allocation can take its place."""
    looks: list[str] = []
    open_until = 3

    class Layout:
        settled = False

        @property
        def is_open(self) -> bool:
            return not self.settled and len(looks) < open_until

        def pause(self, longest: float) -> float:
            return 0.0

        def begun(self) -> None:
            return None

        def look(self) -> Attempt | None:
            looks.append("looked")
            self.settled = how == "known" and len(looks) == open_until
            return PLANNED if self.settled else None

    verdict = NodeVerdict("n2", "sick", "xid")
    judged: list[int] = []

    def can_leave(_: object) -> bool:
        judged.append(len(looks))
        return True

    context = supervisor._context
    monkeypatch.setattr(context.link, "faulty", lambda: {"n2": verdict})
    monkeypatch.setattr(context.clock, "wait", _news_once())
    step = SimpleNamespace(
        running=True,
        pid=1,
        name="",
        ran_for=1.0,
        reports=StepReports(""),
        told_end=SimpleNamespace(cancelled=False, aborted=False),
        job=0,
    )
    watch = watch_of(supervisor, StepSet(cast(SrunStep, step)))
    monkeypatch.setattr(watch, "_layout", Layout())
    monkeypatch.setattr(watch, "_end_early", lambda *_: None)
    monkeypatch.setattr(watch, "_can_leave", can_leave)
    monkeypatch.setattr(watch, "_stop", lambda *_: "left")
    with contextlib.ExitStack() as stack:
        end = watch._until_end(stack)
    assert (end, judged) == ("left", [open_until])


def _news_once() -> Callable[[object, float], bool]:
    """The verdict has come; nothing more is told."""
    news = iter([True])
    return lambda *_: next(news, False)
