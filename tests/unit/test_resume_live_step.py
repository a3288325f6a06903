"""A living step from the loss of a node to its end: real processes as sruns, Slurm in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.clock import SystemClock
from slurm_resilience.config import ResumeSettings
from slurm_resilience.errors import SlurmError
from slurm_resilience.mesh.model import Peer
from slurm_resilience.mesh.observer import Picture
from slurm_resilience.mesh.rendezvous import HOLD
from slurm_resilience.resume.allocation.allocation import Allocation
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.live_step import live_step, live_steps
from slurm_resilience.resume.live_step.live_plan import LiveStepState
from slurm_resilience.resume.live_step.live_step import LiveStep
from slurm_resilience.resume.live_step.live_steps import EndWord, StepEnd
from slurm_resilience.resume.live_step.seats import NodeSlot, SeatMap
from slurm_resilience.resume.progress.hang_evidence import FoundHang
from slurm_resilience.resume.report import EventLog
from slurm_resilience.resume.srun.command import AttemptCommand
from slurm_resilience.resume.srun.env_option import read_option_value
from slurm_resilience.resume.srun.environment import Attempt
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.srun.standard_input import StandardInput
from slurm_resilience.resume.srun.stderr_reader import EndedTasks
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.srun.user_signals import UserSignals
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.wire.messages import AttemptStarted, Evidence, NodeVerdict, WrongResults

LIMITS = ResumeSettings(grace=0.2, diagnosis_wait=0.05, swap_wait=60.0)
TIMED_OUT = "srun: error: Timed out waiting for job step to complete"
ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
SRUN = """#!/bin/sh
echo "$@" >> sruns
until [ -e end ]; do sleep 0.1; done
if [ "$*" = first ] && [ -e end.first ]; then exit $(cat end.first); fi
exit $(cat end)
"""


class Watched:
    """Stands for the observer: shows what the test says, keeps what it is told."""

    def __init__(self) -> None:
        self.shown = Picture()
        self.told: list[tuple[Any, ...]] = []
        self.wrong_nodes: dict[str, str] = {}

    def picture(self) -> Picture:
        return self.shown

    def take_wrong_nodes(self) -> dict[str, str]:
        found, self.wrong_nodes = self.wrong_nodes, {}
        return found

    def find(self, node: str, reason: str, dead: bool) -> None:
        self.told.append(("find", node, dead))

    def forget(self, node: str) -> None:
        self.told.append(("forget", node))


class Site:
    """One living step of three nodes, with a seat each, in a cluster of four."""

    def __init__(self, folder: Path, nodes: int = 4, *, plain_with_spare: bool = False) -> None:
        self.folder = folder
        self.slurm = FakeSlurm(nodes)
        self.job = self.slurm.submit(4 if plain_with_spare else 3, no_kill=True)
        self.watched = Watched()
        self.wake = threading.Event()
        user_stop, clock = threading.Event(), SystemClock()
        link = SupervisorLink(("localhost",), 1, self.job, "", frozenset({0}))
        link.news = self.wake
        link.attempt(AttemptStarted(1, ("n1", "n2", "n3")))
        self.link = link
        self.signals = UserSignals(self.wake, user_stop, clock)
        self.context = SupervisorContext(
            clock=clock,
            limits=LIMITS,
            client=self.slurm,
            allocation=Allocation(
                self.slurm,
                self.slurm.job(self.job),
                user_stop,
                patience=1.0,
                permits_expansion=True,
            ),
            link=link,
            launch=AttemptCommand(str(folder / "srun"), has_plugin=True),
            command=split(["-N3", "sres-run", "train.py"], BUILTIN),
            environment=dict(os.environ),
            user_signals=self.signals,
            wake=self.wake,
            events=EventLog(str(folder / "events")),
            host="localhost",
            standard_input=StandardInput(0, is_read=False),
        )
        self.context.allocation.show_to(link.see)
        self.first = SrunStep(
            [str(folder / "srun"), "first"], os.environ, self.wake.set, on_news=self.wake.set
        )
        self.signals.steps = [self.first]
        self.hang: FoundHang | None = None
        self.was_whole: list[bool] = []
        self.incarnations = [0, 0, 0]
        self.show((0, 1, 2), 1)
        slots = tuple(NodeSlot(rank, f"n{rank + 1}", (rank,)) for rank in range(3))
        attempt = Attempt(
            self.job, 1, 0, ("n1", "n2", "n3"), ("n1", "n2", "n3"), "192.0.2.1", str(folder)
        )
        observer: Any = self.watched
        self.live = LiveStep(
            self.context,
            observer,
            folder,
            SeatMap(slots, 3, 1, needs_all=plain_with_spare),
            attempt,
            self.first,
            can_leave=lambda bad: True,
            mend_fence=lambda: None,
            find_hang=self.find_hang,
            addresses={},
        )
        self.end: StepEnd | None = None
        # The parent whose death ends an srun is the thread that made it: it lives until the end.
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def find_hang(self, is_whole: bool) -> FoundHang | None:
        self.was_whole.append(is_whole)
        return self.hang if is_whole else None

    def _watch(self) -> None:
        self.end = self.live.watch()
        self.over.set()

    def show(self, running: tuple[int, ...], generation: int, step: int = 7) -> None:
        """Let the training show these seats."""
        peers = tuple(
            Peer(f"{seat}.{self.incarnations[seat]}", seat, self.incarnations[seat])
            for seat in running
        )
        inside = frozenset(peer.id for peer in peers)
        self.watched.shown = Picture(generation, running, (), step, peers, inside=inside)
        self.wake.set()

    def verdict(self, node: str, verdict: str) -> None:
        """Let sresctld mark a node, and tell the supervisor."""
        state = "down" if verdict == "dead" else "fail"
        self.slurm.set_node([node], state=state, reason="Action:Replace")
        self.link._note(Evidence((NodeVerdict(node, verdict, "no beat", incident=5),)))

    def outcome(self, code: int) -> None:
        text = msgspec.json.encode({"code": code, "step": 9, "reason": "as asked"})
        (self.folder / "outcome.new").write_bytes(text)
        (self.folder / "outcome.new").rename(self.folder / "outcome")
        self.wake.set()

    def events(self) -> list[str]:
        path = self.folder / "events"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line)["event"] for line in lines]

    def sruns(self) -> list[str]:
        path = self.folder / "sruns"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def wait(self, ready: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30
        while not ready():
            shown = SimpleNamespace(events=self.events(), sruns=self.sruns(), end=self.end)
            assert time.monotonic() < deadline, shown
            self.over.wait(0.02)


def make_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, plain_with_spare: bool
) -> Iterator[Site]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live_step, "GONE_SECONDS", LIMITS.grace)
    (tmp_path / "srun.sh").write_text(SRUN)
    # Another process writes it: a child that a thread forks meanwhile would hold our file open for
    # writing, and the kernel executes no such file.
    copy = ["install", "-m", "755", str(tmp_path / "srun.sh"), str(tmp_path / "srun")]
    subprocess.run(copy, check=True)
    site = Site(tmp_path, plain_with_spare=plain_with_spare)
    yield site
    for step in site.signals.steps:
        step.send_signal(signal.SIGKILL)
    assert site.over.wait(60)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield from make_site(tmp_path, monkeypatch, plain_with_spare=False)


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The nodes of a plain program, of which launchers tell, and a spare."""
    yield from make_site(tmp_path, monkeypatch, plain_with_spare=True)


def prepare_for(plain: Site, node: str) -> Path:
    """Let a node be suspected; return the file that the launcher on the spare waits for."""
    plain.link._note(Evidence((NodeVerdict(node, "suspect", "no beat", incident=0),)))
    plain.wake.set()
    # What the process writes may be there before the one that started it knows of it.
    plain.wait(lambda: len(plain.sruns()) == 2 and "preparing" in plain.events())
    waiting = plain.sruns()[1]
    assert "--nodelist=n4" in waiting and "--overlap" in waiting
    variables = read_option_value(waiting.split()[0].removeprefix("--sres-env="))
    assert plain.watched.told == [], "its ranks go on: it may be a false alarm"
    return Path(variables[HOLD])


def test_a_launcher_is_prepared_for_a_suspected_node_and_takes_its_part(plain: Site) -> None:
    file = prepare_for(plain, "n2")
    assert not file.exists()
    plain.verdict("n2", "dead")
    plain.wait(file.exists)
    plain.wait(lambda: "joining" in plain.events())
    assert len(plain.sruns()) == 2, "no other one is started"
    told = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    assert (told["NODE_RANK"], told["NODE_LIST"], told["SRES_STEP"]) == ("1", "n1,n4,n3", "1")
    plain.incarnations[1] = 1
    plain.show((0, 1, 2), 3)
    plain.wait(lambda: "joined" in plain.events())
    assert plain.live.nodes == ("n1", "n4", "n3")
    (plain.folder / "end").write_text("0")
    plain.wait(plain.over.is_set)
    assert plain.end is not None and plain.end.code == 0


def test_what_was_prepared_for_another_node_is_not_taken(plain: Site) -> None:
    file = prepare_for(plain, "n2")
    plain.verdict("n3", "dead")
    plain.wait(lambda: len(plain.sruns()) == 3)
    assert not file.exists()
    (plain.folder / "end").write_text("0")
    plain.wait(plain.over.is_set)


def test_what_was_prepared_in_vain_ends_with_the_step(plain: Site) -> None:
    file = prepare_for(plain, "n2")
    plain.wait(lambda: plain.live._preparation._prepared is not None)
    waiting = plain.live._preparation._prepared
    assert waiting is not None
    plain.outcome(0)
    plain.first.send_signal(signal.SIGKILL)
    plain.wait(plain.over.is_set)
    plain.wait(lambda: not waiting.step.running)
    assert not file.exists()


def test_a_hang_of_a_plain_program_ends_its_step_unless_a_launcher_is_missing(plain: Site) -> None:
    plain.wait(lambda: plain.was_whole)
    plain.verdict("n2", "dead")
    plain.wait(lambda: False in plain.was_whole)
    assert plain.end is None
    plain.hang = FoundHang("it hung: no step for 700 s after step 12", "n3")
    plain.show((0, 2), 2)
    plain.wait(lambda: len(plain.sruns()) == 2)
    assert plain.end is None, "its ranks begin anew"
    plain.incarnations[1] = 1
    plain.show((0, 1, 2), 3)
    plain.wait(plain.over.is_set)
    assert plain.end is not None
    assert (plain.end.hang, plain.end.stopped_by_us) == (plain.hang, True)
    assert not any(step.running for step in plain.signals.steps)


def test_wrong_results_of_a_node_are_told_to_sresctld(site: Site) -> None:
    site.watched.wrong_nodes = {"n2": "step 7: it differs"}
    site.wake.set()
    site.wait(lambda: not site.link._outbox.empty())
    assert site.link._outbox.get_nowait() == WrongResults("n2", "step 7: it differs")


def test_a_dead_node_is_replaced_and_the_training_s_outcome_is_the_step_s(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    site.verdict("n2", "dead")
    site.wait(lambda: ("find", "n2", True) in site.watched.told)
    site.show((0, 2), 2)
    site.wait(lambda: len(site.sruns()) == 2 and "went_on" in site.events())
    joined = site.sruns()[1]
    assert "--nodelist=n4" in joined and "--overlap" in joined and "--ntasks=1" in joined
    variables = read_option_value(joined.split()[0].removeprefix("--sres-env="))
    assert (variables["SRES_SEATS_HERE"], variables["SRES_STEP"]) == ("1", "1")
    assert variables["NODE_LIST"] == "n1,n4,n3"
    assert (site.folder / "left" / "n2").read_text() == "1\n"
    assert site.live.nodes == ("n1", "n4", "n3")
    site.incarnations[1] = 1
    site.show((0, 1, 2), 3, step=8)
    site.wait(lambda: "joined" in site.events())
    site.outcome(0)
    site.wait(site.over.is_set)
    assert site.end is not None
    assert (site.end.code, site.end.word, site.end.faulty) == (0, EndWord.TRAINING, {})
    assert sorted(site.events()) == ["joined", "joining", "nodes_ready", "noticed", "went_on"]
    assert site.events()[0] == "noticed" and site.events()[-1] == "joined"
    said = capfd.readouterr().err
    assert "node n2 must be left (no beat); the step goes on without it" in said
    assert "2 of 3 seats went on after" in said
    assert "healed: seats 1" in said
    assert "what was done n2 exchanged for n4, which joined as seats 1; now on n[1,3-4]" in said
    assert "goes on at step 8, from memory" in said


def test_a_search_without_a_node_ends_the_step(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    """No seat goes on without the lost one, and Slurm refuses to shrink the job."""
    site.slurm.refusals["allocate_for"] = SlurmError("invalid partition")
    site.slurm.refusals["shrink"] = SlurmError("job is locked")
    site.verdict("n2", "sick")
    site.wait(site.over.is_set)
    assert site.end is not None
    assert (site.end.stopped_by_us, site.end.faulty) == (True, {"n2": "no beat"})
    assert abs(site.end.noticed - time.time()) < 30
    assert "no node can join" in capfd.readouterr().err


def test_the_user_s_signal_ends_every_srun(site: Site) -> None:
    site.verdict("n2", "dead")
    site.show((0, 2), 2)
    site.wait(lambda: "joining" in site.events())
    site.signals.on_signal(signal.SIGTERM, False)
    site.wait(site.over.is_set)
    assert site.end is not None and not site.end.stopped_by_us
    assert not any(step.running for step in site.signals.steps)


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_program_does_after_its_training_is_part_of_it(
    site: Site, code: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It evaluates, saves the whole model, or goes on with the next line of a script."""
    monkeypatch.setattr(live_step, "LATE_LINE_SECONDS", LIMITS.grace)
    site.show((), 1)
    site.outcome(0)
    assert not site.over.wait(10 * LIMITS.grace) and site.first.running
    (site.folder / "end.new").write_text(f"{code}\n")
    (site.folder / "end.new").rename(site.folder / "end")
    site.wait(site.over.is_set)
    assert site.end is not None and site.end.code == code
    assert (site.end.late_code, site.end.word is EndWord.TRAINING) == (code, code == 0)
    failed = "the training had ended well; what came after it failed: exit code 3"
    told = capfd.readouterr().err
    assert "the training has ended well, and its program runs on: " in told
    assert (failed in told) == (code != 0)


def test_a_node_that_dies_after_the_training_is_not_waited_for(site: Site) -> None:
    site.show((), 1)
    site.outcome(0)
    site.wait(lambda: site.live._plan.state is LiveStepState.ENDING)
    site.verdict("n2", "dead")
    site.wait(site.over.is_set)
    assert site.end is not None
    assert (site.end.code, site.end.faulty, site.end.late_code) == (137, {"n2": "no beat"}, 137)


def test_processes_that_never_leave_their_training_are_not_waited_for(site: Site) -> None:
    site.show((1,), 1)
    site.outcome(0)
    assert not site.over.wait(10 * LIMITS.grace), "the others may have more to do"
    site.show((0, 1, 2), 1)
    site.wait(site.over.is_set)
    assert site.end is not None and (site.end.code, site.end.late_code) == (0, 0)


def test_without_its_plan_a_step_is_only_waited_for(site: Site) -> None:
    """The supervisor falls back to this after a mistake of its own."""
    site.outcome(3)
    assert site.live.let_go().code == 3


def test_without_its_plan_a_step_that_lost_seats_has_not_ended_well(site: Site) -> None:
    site.slurm.refusals["allocate_for"] = SlurmError("none is idle")
    site.show((0, 2), 2)
    site.verdict("n2", "dead")
    site.wait(lambda: "noticed" in site.events())
    (site.folder / "end").touch()
    site.wait(site.over.is_set)
    end = site.live.let_go()
    assert (end.code, end.faulty) == (1, {"n2": "no beat"})


def test_slurm_gives_up_a_node_that_could_not_be_left(site: Site) -> None:
    judged = threading.Event()

    def can_leave(bad: object) -> bool:
        judged.set()
        return False

    site.live._can_leave = can_leave
    site.verdict("n2", "sick")
    assert judged.wait(30)
    assert "noticed" not in site.events()
    site.first._stderr.failed_nodes |= {"n2"}
    site.wake.set()
    site.wait(lambda: ("find", "n2", True) in site.watched.told)
    site.outcome(0)


def ended(task: int, how: str) -> EndedTasks:
    return EndedTasks((f"n{task + 1}",), (task,), how)


def finish_srun(site: Site, code: int) -> None:
    (site.folder / "end.new").write_text(f"{code}\n")
    (site.folder / "end.new").rename(site.folder / "end")
    site.wait(site.over.is_set)


def lose_n2(site: Site) -> None:
    """n2 loses its power; n4 takes its place, and steps with the others."""
    site.verdict("n2", "dead")
    site.wait(lambda: "noticed" in site.events())
    site.show((0, 2), 2)
    site.wait(lambda: "joining" in site.events())
    site.incarnations[1] = 1
    site.show((0, 1, 2), 3)
    site.wait(lambda: "joined" in site.events())


def end_training(site: Site) -> None:
    site.slurm.start_step(site.job, "localhost", site.first.pid)
    site.show((), 3)
    site.outcome(0)
    site.wait(lambda: site.live._plan.state is LiveStepState.ENDING)


@pytest.mark.parametrize("told_by", ["sresctld", "srun", "Slurm alone"])
def test_a_second_node_that_dies_after_the_training_is_not_waited_for(
    site: Site, told_by: str
) -> None:
    lose_n2(site)
    end_training(site)
    if told_by == "sresctld":
        site.verdict("n3", "dead")
    elif told_by == "srun":
        site.first._stderr.failed_nodes |= {"n3"}
        site.wake.set()
    else:
        site.slurm.set_node(["n3"], state="down", reason="Not responding")
        site.wait(lambda: not site.first.running)
        finish_srun(site, 0)
    site.wait(site.over.is_set)
    assert site.end is not None and site.end.late_code
    assert set(site.end.faulty) == {"n3"}


@pytest.mark.parametrize("given_up", [False, True])
def test_an_srun_that_ends_by_itself_has_told_of_each_task_that_failed(
    site: Site, given_up: bool
) -> None:
    """slurmctld is away as the program ends, and slurmstepd's words on its tasks are lost."""
    lose_n2(site)
    end_training(site)
    site.slurm.unreachable = True
    if given_up:
        # In the moment in which srun ends: its task there was lost before.
        site.live._steps.work_on = lambda seats: False  # type: ignore[method-assign]
        site.first._stderr.failed_nodes |= {"n3"}
    (site.folder / "end.first").write_text("1\n")
    finish_srun(site, 0)
    assert site.end is not None and bool(site.end.code) is given_up


@pytest.mark.parametrize(("state", "is_lost"), [("fail", False), ("down", True)])
def test_a_task_of_unknown_end_is_lost_where_slurm_gave_its_node_up(
    site: Site, state: str, is_lost: bool
) -> None:
    """slurmstepd's word on it is lost, and srun has not waited for it."""
    site.show((0, 2), 1)
    site.first.ended_tasks.append(ended(1, "Exited with exit code 3"))
    site.wait(lambda: "went_on" in site.events() or (site.show((0, 2), 2), False)[1])
    site.first._stderr.read(f"{TIMED_OUT}\n".encode())
    site.slurm.set_node(["n3"], state=state, reason="Action:Replace")
    end_training(site)
    finish_srun(site, 3)
    assert site.end is not None and bool(site.end.late_code) is is_lost
    assert set(site.end.faulty) == ({"n3"} if is_lost else set())


def test_an_srun_of_a_task_that_is_cancelled_does_not_fail_what_comes_after_a_training(
    site: Site,
) -> None:
    """It was so a moment before the end; slurmstepd's word on another task is lost."""
    site.show((0, 2), 1)
    site.first.ended_tasks.append(ended(1, "Exited with exit code 3"))
    site.wait(lambda: "went_on" in site.events() or (site.show((0, 2), 2), False)[1])
    end_training(site)
    site.first._stderr.read(f"{ABORTED}\n".encode(), site.context.clock.monotonic())
    finish_srun(site, 3)
    assert site.end is not None and (site.end.code, site.end.late_code) == (0, 0)


def test_a_new_machine_of_a_lost_node_s_name_is_not_that_node(site: Site) -> None:
    site.first._stderr.failed_nodes |= {"n2"}
    lose_n2(site)
    site.slurm.set_node(["n2"], state="resume")
    site.slurm.refusals.clear()
    site.verdict("n3", "dead")
    site.wait(lambda: site.events().count("noticed") == 2)
    site.show((0, 1), 4)
    site.wait(lambda: site.events().count("joining") == 2)
    assert site.live.nodes == ("n1", "n4", "n2")
    site.incarnations[2] = 1
    site.show((0, 1, 2), 5)
    site.wait(lambda: site.events().count("joined") == 2)
    end_training(site)
    assert not site.over.wait(5 * LIMITS.grace), "the program is ended for no reason"
    finish_srun(site, 0)
    assert site.end is not None and (site.end.code, site.end.faulty) == (0, {})


@pytest.mark.parametrize("seen_first", [False, True])
def test_a_program_that_fails_at_once_after_its_training_has_failed(
    site: Site, seen_first: bool
) -> None:
    """Its end is told before the training's outcome is seen, which a file server may delay."""
    site.show((), 1)
    site.first.ended_tasks.append(ended(1, "Exited with exit code 3"))
    if seen_first:
        site.wake.set()
        site.wait(lambda: site.live._plan.record.losses)
    site.outcome(0)
    finish_srun(site, 3)
    assert site.end is not None and (site.end.code, site.end.late_code) == (3, 3)


@pytest.mark.parametrize(("late", "code"), [(None, 0), (7, 7)])
def test_a_task_that_died_in_the_training_does_not_fail_what_comes_after_it(
    site: Site, late: int | None, code: int
) -> None:
    site.show((0, 2), 1)
    site.first.ended_tasks.append(ended(1, "Exited with exit code 3"))
    site.wait(lambda: "went_on" in site.events() or (site.show((0, 2), 2), False)[1])
    end_training(site)
    if late is not None:
        site.first.ended_tasks.append(ended(2, f"Exited with exit code {late}"))
    finish_srun(site, late or 3)
    assert site.end is not None and (site.end.code, site.end.late_code) == (code, code)


def test_a_join_step_that_has_not_begun_does_not_hold_the_end_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training ended without it; it may wait for its node for ever."""
    monkeypatch.setattr(live_steps, "RELEASE_SECONDS", LIMITS.grace)
    site.verdict("n2", "dead")
    site.wait(lambda: "noticed" in site.events())
    site.show((0, 2), 2)
    site.wait(lambda: len(site.sruns()) == 2)
    end_training(site)
    site.wait(lambda: not site.signals.steps[1].running)
    assert site.first.running
    finish_srun(site, 0)
    assert site.end is not None and (site.end.code, site.end.late_code) == (0, 0)
