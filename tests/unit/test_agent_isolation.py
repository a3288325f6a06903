"""Fencing: who is cut off, and whose steps may be ended."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_slurm import FakeSlurm

from slurm_resilience import config
from slurm_resilience.agent import tcp_probe
from slurm_resilience.agent.agent_link import LinkState
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.agent.isolation import LEAST_LOOKS, Isolation, LookResult, decide
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.agent.processes import process_reader, steps
from slurm_resilience.agent.processes.steps import LocalStep, asked_for
from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import SlurmUnreachable, UsageError

ALONE = LookResult(control=False, peers=5, answered=0)


@pytest.mark.parametrize(
    ("silence", "looks", "contact", "after", "ends", "says"),
    [
        (15.0, 9, ALONE, 15.0, True, "cut off from the controller and 5 nodes"),
        (14.9, 9, ALONE, 15.0, False, "after 15 s"),
        (900.0, LEAST_LOOKS - 1, ALONE, 15.0, False, "after 15 s"),
        (900.0, 9, LookResult(True, 5, 0), 15.0, False, "controller's machine answers"),
        (900.0, 9, LookResult(False, 5, 1), 15.0, False, "the control plane is down"),
        (900.0, 9, LookResult(False, 0, 0), 15.0, False, "no other node is known"),
        (900.0, 9, ALONE, 0.0, False, "switched off"),
    ],
)
def test_the_decision(
    silence: float, looks: int, contact: LookResult, after: float, ends: bool, says: str
) -> None:
    verdict = decide(silence, looks, contact, after)
    assert verdict.end is ends
    assert says in verdict.reason


def test_only_jobs_that_asked_are_touched() -> None:
    running = [
        LocalStep(1, "0", has_token=True),
        LocalStep(1, "1"),
        LocalStep(1, "batch"),
        LocalStep(1, "extern"),
        LocalStep(2, "0"),
        LocalStep(2, "batch"),
        LocalStep(3, "batch", has_supervisor=True),
        LocalStep(3, "0"),
    ]
    assert [step.id for step in asked_for(running)] == ["1.0", "1.batch", "3.batch"]


def test_addresses() -> None:
    assert tcp_probe.split("10.0.0.1:6818") == ("10.0.0.1", 6818)
    assert tcp_probe.split("[fd00::1]:6818") == ("fd00::1", 6818)
    for text in ("n1", "n1:", ":6818", "n1:x"):
        with pytest.raises(UsageError):
            tcp_probe.split(text)


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address that never answers: a listener whose queue is full drops what comes."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0))
        where = listener.getsockname()
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(where)
        yield where


def test_an_answer_and_a_refusal_are_contact_but_silence_is_not(silent: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        open_one = tcp_probe.resolve("127.0.0.1", listener.getsockname()[1])
        refused = tcp_probe.resolve("127.0.0.1", taken.getsockname()[1])
        began = time.monotonic()
        answered = tcp_probe.reach((*open_one, *refused, *tcp_probe.resolve(*silent)), 0.3)
        assert answered == {*open_one, *refused}
        assert time.monotonic() - began < 5


FakeStep = Callable[..., psutil.Process]


@pytest.fixture
def fake_step() -> Iterator[FakeStep]:
    """Processes that look like a slurmstepd with one task."""
    if not shutil.which("bash"):
        pytest.skip("bash is not installed")
    started: list[subprocess.Popen[bytes]] = []

    def start(step: str, task: str = "exec sleep 600", **env: str) -> psutil.Process:
        script = f'exec -a "slurmstepd: [{step}]" bash -c \'bash -c "$TASK" & wait\''
        process = subprocess.Popen(
            ["bash", "-c", script],
            env=os.environ | env | {"TASK": task},
            start_new_session=True,
        )
        started.append(process)
        wait_until(lambda: has_title(process.pid, step) and children(process.pid))
        return psutil.Process(process.pid)

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def has_title(pid: int, step: str) -> bool:
    return psutil.Process(pid).cmdline()[:1] == [f"slurmstepd: [{step}]"]


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_until(predicate: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline, tick = time.monotonic() + seconds, threading.Event()
    while not (last := predicate()):
        assert time.monotonic() < deadline, f"last seen: {last}"
        tick.wait(0.01)


RUNNING = steps.running
JOBS = 1_000_000_000 + 10 * os.getpid()
"""Numbers of jobs that no Slurm and no other run of these tests has."""


def ours(node: str) -> tuple[LocalStep, ...]:
    """This test's fake steps only: the machine may run others, and none of them is to be ended."""
    return tuple(step for step in RUNNING(node) if step.job // 10 == JOBS // 10)


def found(node: str = "n1") -> dict[str, LocalStep]:
    return {step.id: step for step in ours(node)}


def test_steps_are_found_by_their_slurmstepd(fake_step: FakeStep) -> None:
    fake_step(f"{JOBS + 1}.0", SRES_TOKEN="t", SLURMD_NODENAME="n1")
    fake_step(f"{JOBS + 1}.batch")
    fake_step(f"{JOBS + 2}.3", SLURMD_NODENAME="n1")
    fake_step(f"{JOBS + 3}.0", SRES_TOKEN="t", SLURMD_NODENAME="n2")
    seen = found()
    assert set(seen) == {f"{JOBS + 1}.0", f"{JOBS + 1}.batch", f"{JOBS + 2}.3"}
    assert seen[f"{JOBS + 1}.0"].has_token
    assert not seen[f"{JOBS + 2}.3"].has_token
    assert {step.id for step in asked_for(seen.values())} == {f"{JOBS + 1}.0", f"{JOBS + 1}.batch"}


def test_a_process_that_left_its_slurmstepd_is_found_by_its_environment(
    fake_step: FakeStep,
) -> None:
    mark = {"SRES_TOKEN": "t", "SLURM_JOB_ID": str(JOBS + 4), "SLURM_STEP_ID": "0"}
    fake_step(f"{JOBS + 4}.0", **mark)
    stray = subprocess.Popen(["sleep", "600"], env=os.environ | mark, start_new_session=True)
    try:
        # It is started a moment before the kernel shows its environment.
        wait_until(lambda: stray.pid in {p.pid for p in found()[f"{JOBS + 4}.0"].members})
    finally:
        stray.kill()
        stray.wait()


def test_where_no_process_can_be_started_the_steps_are_found_all_the_same(
    fake_step: FakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_step(f"{JOBS + 3}.0", SRES_TOKEN="t")

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(process_reader.subprocess, "Popen", refuse)
    assert found()[f"{JOBS + 3}.0"].has_token


def test_a_task_that_ignores_sigterm_is_killed(fake_step: FakeStep) -> None:
    deaf = "trap '' TERM; while :; do sleep 600; done"
    process = fake_step(f"{JOBS + 5}.0", task=deaf, SRES_TOKEN="t")
    wait_until(lambda: len(children(process.pid)) == 2)
    assert steps.end(found()[f"{JOBS + 5}.0"], 0.2) >= 1
    wait_until(lambda: not psutil.pid_exists(process.pid) or not children(process.pid))


@pytest.fixture
def hung_task(tmp_path: Path) -> Iterator[str]:
    """The command of a task that hangs in the kernel with the lock on its memory."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs FUSE: only root may mount")
    where = tmp_path / "mounted"
    where.mkdir()
    program = Path(__file__).parents[1] / "support" / "hung_memory.py"
    yield f"exec unshare -m {sys.executable} {program} {where} > {tmp_path}/said"


def hung_in(process: psutil.Process, tmp_path: Path) -> psutil.Process:
    """Wait until a task of a step hangs; return it."""
    wait_until((tmp_path / "hangs").exists)

    def hangs() -> list[psutil.Process]:
        if "went on" in (tmp_path / "said").read_text():
            pytest.skip("this kernel waits for no write under the lock on a process's memory")
        return [one for one in children(process.pid) if one.status() == psutil.STATUS_DISK_SLEEP]

    wait_until(hangs)
    return hangs()[0]


def test_a_process_that_hangs_with_its_memory_holds_up_no_other_end(
    fake_step: FakeStep, hung_task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_reader, "QUIET_SECONDS", 0.3)
    step = fake_step(f"{JOBS + 8}.0", task=f"sleep 600 & {hung_task}", SRES_TOKEN="t")
    hung = hung_in(step, tmp_path)
    seen = found()[f"{JOBS + 8}.0"]
    assert seen.has_token and seen.unreadable == (hung,)
    assert hung in seen.members
    steps.end(seen, 0.2)
    wait_until(lambda: {one.pid for one in children(step.pid)} <= {hung.pid})


def test_a_step_whose_every_task_hangs_is_known_from_an_earlier_look(
    fake_step: FakeStep, hung_task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_reader, "QUIET_SECONDS", 0.3)
    monkeypatch.setattr(steps, "running", ours)
    step = fake_step(f"{JOBS + 9}.0", task=hung_task)
    hung_in(step, tmp_path)
    name, outbox = f"{JOBS + 9}.0", Outbox()
    facts = SlurmFacts(NoSlurm(), "n1")  # type: ignore[arg-type]
    fence = Isolation(
        config.Config(), "n1", facts, LinkState, outbox, SystemClock(), threading.Event()
    )
    fence.end_steps("cut off")
    (told,) = outbox.take_all().findings
    assert told.subject == name
    assert "left step" in told.text and "cannot be read" in told.text
    assert not asked_for(ours("n1"))
    assert [one.id for one in asked_for(ours("n1"), {name})] == [name]


class NoSlurm:
    def info(self) -> object:
        raise SlurmUnreachable("no answer")


def test_names_that_cannot_be_looked_up_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that knows no other one could never tell that it is cut off."""
    is_gone, looked_up = threading.Event(), tcp_probe.resolve
    is_gone.set()

    def resolve(host: str, port: int) -> tuple[tcp_probe.ProbeAddress, ...]:
        return () if is_gone.is_set() else looked_up("192.0.2.7", port)

    monkeypatch.setattr(tcp_probe, "resolve", resolve)
    monkeypatch.setattr("slurm_resilience.agent.isolation.LOOK_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr("slurm_resilience.agent.isolation.LOOK_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr("slurm_resilience.agent.isolation.ASK_AGAIN_SECONDS", 0.05)
    stop, state = threading.Event(), LinkState(True, ("n2:6818",), 1)
    facts = SlurmFacts(FakeSlurm(2), "n1")
    fence = Isolation(config.Config(), "n1", facts, lambda: state, Outbox(), SystemClock(), stop)
    thread = threading.Thread(target=fence.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: facts.cluster)
        assert fence.look().peers == 0
        is_gone.clear()
        wait_until(lambda: fence.look().peers == 1)
        # What was known still holds in the next session.
        is_gone.set()
        state = state._replace(sessions=2)
        wait_until(lambda: fence._learned[0] == 2)
        assert fence.look().peers == 1
    finally:
        stop.set()
        thread.join(5)


def test_a_cut_off_node_ends_the_step_that_asked_and_no_other(
    fake_step: FakeStep, silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "running", ours)
    asked = fake_step(f"{JOBS + 6}.0", SRES_TOKEN="t", SLURMD_NODENAME="n1")
    theirs = fake_step(f"{JOBS + 7}.0", SLURMD_NODENAME="n1")
    host, port = silent
    state = LinkState(True, (f"{host}:{port}", "nonsense"), 1)
    outbox, stop = Outbox(), threading.Event()
    settings = config.Config(
        agent=config.AgentSettings(fence_after=0.2),
        controller=config.ControllerSettings(host=host, port=port),
    )
    monkeypatch.setattr("slurm_resilience.agent.isolation.LOOK_INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr("slurm_resilience.agent.isolation.LOOK_TIMEOUT_SECONDS", 0.05)
    facts = SlurmFacts(NoSlurm(), "n1")  # type: ignore[arg-type]
    fence = Isolation(settings, "n1", facts, lambda: state, outbox, SystemClock(), stop)
    thread = threading.Thread(target=fence.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: fence.look().peers == 1)
        assert children(asked.pid)
        state = state._replace(connected=False)
        wait_until(lambda: not psutil.pid_exists(asked.pid) or not children(asked.pid))
        report = []
        wait_until(lambda: report.extend(outbox.take_all().findings) or report)
        assert [finding.subject for finding in report] == [f"{JOBS + 6}.0"]
        assert children(theirs.pid)
    finally:
        stop.set()
        thread.join(5)
    assert not thread.is_alive()
