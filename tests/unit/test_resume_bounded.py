"""An exchange of nodes that Slurm never answers ends: tried twice, then the job is requeued."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from supervised_srun import supervisor_of, watch_of

from slurm_resilience.clock import SystemClock
from slurm_resilience.config import Config
from slurm_resilience.errors import SlurmError, SlurmUnreachable, SresError
from slurm_resilience.model import Job, Node
from slurm_resilience.resume import attempt_watch, recovery
from slurm_resilience.resume import main as main_module
from slurm_resilience.resume.allocation import allocation as allocation_module
from slurm_resilience.resume.allocation import swap
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.call import start
from slurm_resilience.resume.decide.classify import Cause, Ending
from slurm_resilience.resume.first_step import plan_attempt
from slurm_resilience.resume.live_step import node_search
from slurm_resilience.resume.live_step.live_events import FaultyNode, SearchKind, StartSearch
from slurm_resilience.resume.live_step.live_steps import StepEnd
from slurm_resilience.resume.srun import signals
from slurm_resilience.resume.srun.task_reports import StepReports
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.wire.messages import AttemptStarted, Evidence, NodeVerdict

CAUSE = Cause("node", "n2 is marked", ("n2",))
KNOWN_LAYOUT = SimpleNamespace(is_open=False, look=lambda: None, pause=lambda longest: longest)


class NoSecondResize(FakeSlurm):
    """Slurm 22.05 without slurmdbd: after the first, every change of a job's size times out."""

    def shrink(self, job_id: int, keep: Sequence[str]) -> None:
        self.calls.append(("shrink", job_id, tuple(keep)))
        assert len(self.calls) < 20, "it is tried for ever"
        raise SlurmUnreachable("scontrol update gave no answer within 2 s")


@pytest.fixture
def slurm() -> NoSecondResize:
    slurm = NoSecondResize(4)
    slurm.submit(2)
    return slurm


def shrinks(slurm: FakeSlurm) -> int:
    return sum(call[0] == "shrink" for call in slurm.calls)


def test_the_supervisor_requeues_the_job(
    slurm: NoSecondResize,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    requeued: list[str] = []
    monkeypatch.setattr(recovery, "requeue", lambda *words: requeued.append(words[3]))
    supervisor = supervisor_of(slurm)
    supervisor._history.start(1, ("n1", "n2"), 0.0)
    supervisor._history.end(Ending(1, 60.0, True, "RUNNING", {"n2": "marked"}), "marked", -1)
    assert supervisor._next(CAUSE, 0.0, 1) is None
    assert shrinks(slurm) == swap.TRIES
    assert len(requeued) == 1 and "gave no answer" in requeued[0]
    assert "no exchange of nodes" in capfd.readouterr().err


def test_the_wait_for_slurms_answer_is_a_part_of_the_recovery(
    slurm: NoSecondResize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = Ending(137, 60.0, False, "RUNNING", {"n2": "dead"}, ended_at=100.0)
    step: Any = Running(0)
    watch = watch_of(supervisor_of(slurm), step)
    monkeypatch.setattr(attempt_watch, "gather_evidence", lambda *_, **__: ended)
    monkeypatch.setattr(watch, "_layout", KNOWN_LAYOUT)
    monkeypatch.setattr(watch, "_until_end", lambda _: StepEnd(137, step))
    assert watch.until_end() == (ended, 100.0)


@pytest.mark.parametrize("others_go_on", [True, False])
def test_a_search_for_nodes_ends_too(
    slurm: NoSecondResize, monkeypatch: pytest.MonkeyPatch, others_go_on: bool
) -> None:
    monkeypatch.setattr(node_search, "RETRY_SECONDS", 0.0)
    user_stop = threading.Event()
    context: Any = SimpleNamespace(
        allocation=Allocation(slurm, slurm.job(1), user_stop, patience=0.0, permits_expansion=True),
        limits=Config().resume,
        client=slurm,
        clock=SystemClock(),
    )
    lost = (FaultyNode("n2", "marked", False),)
    wanted = StartSearch(SearchKind.NODES, lost, ("n1",), 2, 0)
    found = node_search.replace_nodes(context, wanted, lambda: others_go_on, threading.Event())
    assert found is not None and found.chosen.kind == "requeue"
    assert shrinks(slurm) == swap.TRIES


class RestartedTwice(FakeSlurm):
    """slurmctld is restarted, and again, while no node is idle."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        away = SlurmUnreachable("Unable to contact slurm controller")
        none_idle = SlurmError("none is free")
        self.answers = [none_idle, away, none_idle, away, none_idle]

    def allocate_for(
        self, job: Job, nodes: int, wait: float, stop: threading.Event | None = None
    ) -> int:
        if self.answers:
            raise self.answers.pop(0)
        return super().allocate_for(job, nodes, wait, stop)


def test_a_slurmctld_that_is_restarted_does_not_end_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others may go on, and wait for an idle node, for days."""
    monkeypatch.setattr(node_search, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(swap, "SALLOC_SECONDS", 0.0)
    slurm = RestartedTwice(4)
    slurm.submit(2)
    slurm.set_node(["n2"], state="fail", reason="marked")
    context: Any = SimpleNamespace(
        allocation=Allocation(
            slurm, slurm.job(1), threading.Event(), patience=0.0, permits_expansion=True
        ),
        limits=Config().resume,
        client=slurm,
        clock=SystemClock(),
        link=SupervisorLink(("localhost",), 1, 1, "", frozenset()),
    )
    lost = (FaultyNode("n2", "marked", False),)
    wanted = StartSearch(SearchKind.NODES, lost, ("n1",), 2, 0)
    found = node_search.replace_nodes(context, wanted, lambda: True, threading.Event())
    assert found is not None
    assert (found.chosen.kind, found.nodes) == ("join", ("n3",))


def test_a_supervisor_that_gives_up_a_running_step_has_not_ended_well(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun dies with its supervisor: the job's script must not take that for a good end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signals, "receive", lambda _: None)
    supervisor = supervisor_of(slurm)

    def watch(*_: object) -> None:
        raise SlurmUnreachable("Unable to contact slurm controller")

    monkeypatch.setattr(
        supervisor, "_start", lambda _, again: (None, SimpleNamespace(running=True, code=0))
    )
    monkeypatch.setattr(supervisor, "_watch_over", watch)
    assert supervisor.run() == SlurmUnreachable.exit_code


def test_a_bug_of_the_supervisor_ends_no_step(
    slurm: FakeSlurm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signals, "receive", lambda _: None)
    supervisor = supervisor_of(slurm)
    ends = iter([False, False, True])
    step = SimpleNamespace(running=True, code=3, wait=lambda _: next(ends))

    def watch(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(supervisor, "_start", lambda _, again: (None, step))
    monkeypatch.setattr(supervisor, "_watch_over", watch)
    assert supervisor.run() == 3
    assert next(ends, None) is None, "its end was waited for"
    told = capfd.readouterr().err
    assert "the step goes on without its help" in told and "Traceback" in told


def test_a_node_that_could_not_be_left_is_left_when_it_dies(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    supervisor = supervisor_of(slurm)
    link = supervisor._context.link
    link.attempt(AttemptStarted(1, ("n1", "n2")))
    asked: list[str] = []

    def can_leave(bad: dict[str, NodeVerdict]) -> bool:
        verdict = bad["n2"].verdict
        asked.append(verdict)
        if verdict == "sick":
            link._note(Evidence((NodeVerdict("n2", "dead", "no beat"),)))
        return verdict == "dead"

    link._note(Evidence((NodeVerdict("n2", "sick", "Xid 64"),)))
    watch = watch_of(supervisor, Running(7))
    monkeypatch.setattr(watch, "_layout", KNOWN_LAYOUT)
    monkeypatch.setattr(watch, "_can_leave", can_leave)
    monkeypatch.setattr(watch, "_stop", sorted)
    with contextlib.ExitStack() as stack:
        assert watch._until_end(stack) == ["n2"]
    assert asked == ["sick", "dead"]


class Running:
    """A step that ends after so many looks."""

    code = 0
    reports = StepReports("")
    parts = ()
    main = SimpleNamespace(reports=reports)

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def lost_part(self) -> None:
        """Return none: it has one part."""

    @property
    def running(self) -> bool:
        self._looks -= 1
        return self._looks > 0


class SilentAtTimes(FakeSlurm):
    """`scontrol show node` fails for as often as it is told."""

    failures = 0

    def nodes(self) -> tuple[Node, ...]:
        if self.failures:
            self.failures -= 1
            raise SlurmError("scontrol show node: no reason given")
        return super().nodes()

    def node(self, name: str) -> Node:
        self.nodes()
        return super().node(name)


@pytest.mark.parametrize("failures", [1, 3, 1000])
def test_a_table_of_nodes_that_cannot_be_read_abandons_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(allocation_module, "REFRESH_SECONDS", 0.0)
    slurm = SilentAtTimes(4)
    slurm.submit(2)
    supervisor = supervisor_of(slurm)
    context = supervisor._context
    first = plan_attempt(context, 1, 0, ("n2", "n1"), "").attempt
    slurm.failures = failures
    supervisor._history.start(1, ("n1", "n2"), 0.0)
    supervisor._history.end(Ending(137, 60.0, False, "RUNNING"), "it ended", -1)
    following = supervisor._next(Cause("program", "it ended"), 0.0, 1)
    assert following is not None and following.nodes == ("n1", "n2")
    again = plan_attempt(context, 2, 0, following.nodes, "").attempt
    assert (again.step_nodes, again.master_address) == (first.step_nodes, first.master_address)


def test_an_attempt_needs_a_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(allocation_module, "REFRESH_SECONDS", 0.0)
    slurm = SilentAtTimes(4)
    slurm.submit(2)
    slurm.failures = allocation_module.TABLE_TRIES
    with pytest.raises(SlurmError, match="no reason given"):
        plan_attempt(supervisor_of(slurm)._context, 1, 0, ("n1", "n2"), "")


def test_limits_hold_at_the_start_after_a_requeue(
    slurm: FakeSlurm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Slurm itself starts a job again whose node failed, whatever is left of the limits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signals, "receive", lambda _: None)
    before = supervisor_of(slurm)
    for number in range(1, Config().resume.max_per_hour + 1):
        before._history.start(number, ("n1", "n2"), 0.0)
        ending = Ending(137, 60.0, False, "RUNNING", {"n2": "down"}, ended_at=1e9 + number)
        before._history.end(ending, "n2: down", -1)
    slurm.requeue(1)
    slurm.pass_time(300.0)
    slurm.start_now(1)
    slurm.pass_time(10.0)
    again = supervisor_of(slurm)
    monkeypatch.setattr(again, "_start", lambda *_, **__: pytest.fail("an attempt is started"))
    assert again.run() == 137
    assert "not started again: 10 attempts within an hour" in capfd.readouterr().err


def test_the_starts_of_a_job_have_tokens_of_their_own(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that a requeued job has submitted inherits $SLURM_RESTART_COUNT: its first start and
    the one after a requeue both find a 1 there."""
    monkeypatch.chdir(tmp_path)
    tokens = set()
    for _ in range(2):
        supervisor = supervisor_of(slurm, environment={"SLURM_RESTART_COUNT": "1"})
        fence = supervisor._fence
        tokens.add(plan_attempt(supervisor._context, 1, fence.restarts, ("n1",), "").attempt.token)
        assert fence.restarts == slurm.job(1).restarts  # else it is never mended
        slurm.requeue(1)
        slurm.pass_time(300.0)
        slurm.start_now(1)
        slurm.pass_time(10.0)
    assert tokens == {"1.0.1", "1.1.1"}


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), BlockingIOError(11, "try again")]
)
def test_a_user_without_processes_left_reads_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def supervise(*_: object) -> int:
        raise error

    monkeypatch.setattr(start, "supervise", supervise)
    assert main_module.run("/usr/bin/srun", ["true"]) == SresError.exit_code
    told = capfd.readouterr().err
    assert "ulimit -u" in told and "nothing was started" in told and told.count("\n") == 1
