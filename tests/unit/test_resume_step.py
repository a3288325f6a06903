"""One srun as the supervisor sees it: here a shell that says what srun would say."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import MissingTool, SlurmUnreachable
from slurm_resilience.resume.attempt_watch import AttemptWatch
from slurm_resilience.resume.decide.classify import Cause
from slurm_resilience.resume.decide.task_ends import NodeBegan, TaskEnd
from slurm_resilience.resume.srun.stderr_reader import SLACK_SECONDS, StderrReader
from slurm_resilience.resume.srun.step import SrunStep, end_step
from slurm_resilience.resume.srun.step_set import StepSet
from slurm_resilience.resume.srun.task_reports import StepReports
from slurm_resilience.resume.supervisor import Supervisor
from slurm_resilience.resume.task_labels import TaskNumbers
from slurm_resilience.slurm.client import StepInfo

ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
KILLED = "srun: error: n[1-2]: tasks 0-1: Killed"
LOST_TOUCH = "Aborting, io error and missing step on node 2"
RESET = "step_launch_notify_io_failure: aborting, io error with slurmstepd on node 1"
NO_ANSWER = "Cannot communicate with node 2.  Aborting job."
CANCELLED = "slurmstepd-n1: error: *** STEP 8.0 ON n1 CANCELLED AT 2026-11-20T12:00:00"
NEWER = "[2026-11-20T12:00:00.175] error: *** STEP 8.0"
AWAY = "Unable to contact slurm controller (connect failure)"
TIMED_OUT = "Socket timed out on send/recv operation"
KILLED_MEANWHILE = "Unexpected missing socket error"
FAILED_LAUNCH = "srun: error: Task launch for StepId=8.0 failed on node n2: Connection failure"
NOT_LAUNCHED = "srun: error: task 1 launch failed: Slurmd could not connect IO"

JUNK = [
    "srun: error: unpackmem_xmalloc: Buffer to be unpacked is too large (2792580451 > 1073741824)",
    "srun: error: unpacking header",
    "srun: error: destroy_forward: no init",
    "srun: error: slurm_unpack_received_msg: [[n5]:43956] Message receive failure",
    "srun: error: eio_message_socket_accept: slurm_receive_msg[10.77.0.6:52340]: Cannot allocate",
    "srun: error: io_init_msg_read_from_fd: reading slurm_io_init_msg failed: No error",
    "srun: error: io_init_msg_unpack: unpack error",
    "srun: error: failed reading io init message",
]
"""Lines that srun prints when another user sends bytes to its ports."""


def run(
    *lines: str, program: str = 'printf "%s\\n" "$@" >&2', reports: StepReports | None = None
) -> SrunStep:
    ended = threading.Event()
    argv = ["sh", "-c", program, "sh", *lines]
    step = SrunStep(argv, os.environ, ended.set, reports=reports)
    assert ended.wait(30)
    return step


@pytest.mark.parametrize(
    ("lines", "cancelled", "aborted"),
    [
        ([KILLED, "srun: Force Terminated StepId=8.0"], False, False),
        ([f"{CANCELLED} ***", KILLED], True, False),
        ([f"0: {CANCELLED} ***", KILLED], True, False),
        ([f"{CANCELLED} DUE TO TIME LIMIT ***", KILLED], True, False),
        ([f"{CANCELLED} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"], False, False),
        ([f"{NEWER} ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE to SIGNAL Killed ***"], True, False),
        ([f"a program quotes {CANCELLED} ***"], False, False),
        ([ABORTED, KILLED], False, True),
        (["srun: error: Node failure on n2", ABORTED, KILLED], False, False),
        ([ABORTED, KILLED, "srun: error: Node failure on n2"], False, True),
        ([*JUNK, ABORTED, KILLED], False, True),
        ([*JUNK, "srun: error: Node failure on n2", ABORTED, KILLED], False, False),
        (["srun: error: Application launch failed: x", ABORTED, KILLED], False, False),
        ([FAILED_LAUNCH, ABORTED, f"{CANCELLED} ***", KILLED], False, False),
        # A person did not wait for it.
        ([f"{CANCELLED} ***", ABORTED, FAILED_LAUNCH, KILLED], True, True),
        ([FAILED_LAUNCH.replace("8.0", "9.0"), f"{CANCELLED} ***", KILLED], True, False),
        (["srun: First task exited 1s ago", "srun: Terminating StepId=8.0", ABORTED], False, False),
        (["srun: Terminating StepId=8.0", f"{CANCELLED} ***", KILLED], False, False),
        ([f"srun: error: {LOST_TOUCH}", ABORTED, f"{CANCELLED} ***", KILLED], False, False),
        ([f"srun: error: {RESET}", ABORTED, f"{CANCELLED} ***", KILLED], False, False),
        ([f"srun: error: {NO_ANSWER}", ABORTED, f"{CANCELLED} ***", KILLED], False, False),
    ],
)
def test_who_ended_it(
    lines: list[str], cancelled: bool, aborted: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    step = run(*lines)
    assert (step.cancelled, step.aborted, step.forced) == (cancelled, aborted, False)
    assert capfd.readouterr().err.splitlines() == lines


@pytest.mark.parametrize(
    ("name", "cancelled"), [("8.0", True), ("8.", True), ("8.1", False), ("77.", False)]
)
def test_another_steps_end_is_not_this_ones(
    name: str, cancelled: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    step = run(f"{CANCELLED} ***")
    step.name = name
    assert step.cancelled is cancelled
    assert not step.timed_out


@pytest.mark.parametrize("line", [ABORTED, f"{CANCELLED} ***"])
def test_what_our_own_order_brings_about_is_no_persons_word(
    line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = run(line)
    before.ends_by_us(killed=True)
    assert any(before.told_end)
    ended = threading.Event()
    source, sink = os.pipe()
    program = 'read go; printf "%s\n" "$1" >&2'
    after = SrunStep(["sh", "-c", program, "sh", line], os.environ, ended.set, stdin=source)
    after.ends_by_us(killed=True)
    os.write(sink, b"go\n")
    assert ended.wait(30)
    assert after.cancelled or after.aborted
    assert not any(after.told_end)
    os.close(source)
    os.close(sink)


class AskedTwice:
    """Slurm with one step; a person's or the supervisor's order makes srun say so.

    Args:
        step: the srun.
        tell: has srun say it, and end.
        at: "steps": as Slurm is asked for the second time; "cancel_step": by our order.
    """

    def __init__(self, step: SrunStep, tell: Callable[[], object], at: str) -> None:
        self._step, self._tell, self._at = step, tell, at
        self._asked = 0

    def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        self._asked += 1
        if self._asked == 2 and self._at == "steps":
            self._tell()
        return (StepInfo(job_id, "0", ("n1",), srun_host="n1", srun_pid=self._step.pid, tasks=1),)

    def cancel_step(self, job_id: int, step: str, signal: str = "") -> None:
        if self._at == "cancel_step":
            self._tell()


@pytest.mark.parametrize(("at", "cancelled"), [("steps", True), ("cancel_step", False)])
def test_a_person_who_cancels_before_our_order_is_taken_wins(
    at: str, cancelled: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    source, sink = os.pipe()
    program = 'read go; printf "%s\n" "$1" >&2'
    words = ["sh", "-c", program, "sh", f"{CANCELLED} ***"]
    step = SrunStep(words, os.environ, ended.set, stdin=source)

    def tell() -> None:
        os.write(sink, b"go\n")
        assert ended.wait(30)

    client: Any = AskedTwice(step, tell, at)
    end_step(step, client, 8, "n1", grace=0.0, at_once=True)
    assert step.told_end.cancelled is cancelled
    os.close(source)
    os.close(sink)


def test_after_our_sigterm_a_person_may_still_cancel(capfd: pytest.CaptureFixture[str]) -> None:
    step = run(ABORTED)
    step.ends_by_us(killed=False)
    assert step.told_end[:2] == (False, True)


def test_a_steps_time_limit(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(f"{CANCELLED} DUE TO TIME LIMIT ***").timed_out


class HandClock(SystemClock):
    """Goes on when it is told to."""

    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.mark.parametrize("waits", [32, 302], ids=["KillWait=30", "KillWait=300"])
def test_an_srun_that_goes_on_after_its_word_on_the_end_told_of_another_step(
    waits: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A task may run an srun of its own, and print what that says."""
    clock, ended, told = HandClock(), threading.Event(), threading.Event()
    source, sink = os.pipe()
    program = 'read go; printf "%s\n" "$1" >&2; read go; printf "%s\n" "$2" >&2'
    words = ["sh", "-c", program, "sh", ABORTED.replace("32", str(waits)), f"{CANCELLED} ***"]
    step = SrunStep(words, os.environ, ended.set, on_news=told.set, clock=clock, stdin=source)
    assert not step.may_be_ending
    os.write(sink, b"go\n")
    assert told.wait(30)
    clock.seconds += waits + 1.0
    assert step.aborted and step.told_end.aborted and step.may_be_ending
    clock.seconds += SLACK_SECONDS
    assert not (step.aborted or step.told_end.aborted or step.may_be_ending)
    step.ends_by_us(killed=False)
    os.write(sink, b"go\n")
    assert ended.wait(30)
    assert not any(step.told_end), "our own SIGTERM makes the old word no newer"
    os.close(source)
    os.close(sink)


def test_words_that_come_in_pieces(capfd: pytest.CaptureFixture[str]) -> None:
    step = run(
        program=f"printf 'srun: error: n1: ta' >&2; sleep 0.2; echo 'sk 0: x\n{ABORTED}' >&2"
    )
    assert step.aborted
    assert capfd.readouterr().err == f"srun: error: n1: task 0: x\n{ABORTED}\n"


@pytest.mark.parametrize(
    ("lines", "killed"),
    [
        (("E 0 Exited with exit code 3", "A", "E 1 Killed"), True),
        (("E 0 Killed", "A"), False),
        (("A", "E 1 Exited with exit code 1"), False),
        # A program's own words; then srun ends the others for a task that failed.
        (("A", "E 0 Exited with exit code 3", "T", "E 1 Killed"), False),
        (("E 1 Killed",), False),
    ],
)
def test_tasks_that_are_killed_after_srun_s_word(lines: tuple[str, ...], killed: bool) -> None:
    words = {"A": "srun: Job step aborted: Waiting", "T": "srun: Terminating StepId=7.0"}
    text = []
    for line in lines:
        _, _, end = line.partition(" ")
        number, _, how = end.partition(" ")
        text.append(words.get(line, f"srun: error: n{number}: task {number}: {how}"))
    assert run(*text).told_end.killed_after == killed


@pytest.mark.parametrize(("name", "failed"), [("8.0", {"n2"}), ("8.", {"n2"}), ("8.1", set())])
def test_a_node_on_which_srun_could_start_no_task(name: str, failed: set[str]) -> None:
    step = run(FAILED_LAUNCH)
    step.name = name
    assert step.failed_launches == dict.fromkeys(failed, "Connection failure")


def test_srun_said_that_a_signal_ends_it() -> None:
    assert run("srun: forcing job termination").forced


@pytest.mark.parametrize(
    ("line", "by_itself"),
    [
        ("srun: error: n1: task 0: Exited with exit code 3", True),
        ("srun: error: Node failure on n3", True),
        ("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.", False),
        ("srun: forcing job termination", False),
        ("srun: Terminating StepId=7.0", False),
        (
            "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T10:00:00 DUE TO NODE "
            "FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
            False,
        ),
    ],
)
def test_whether_only_its_tasks_ends_ended_it(line: str, by_itself: bool) -> None:
    assert run(line).ended_by_itself is by_itself


@pytest.mark.parametrize(
    ("line", "heard"),
    [
        (KILLED, True),
        (ABORTED, True),
        (f"{CANCELLED} ***".replace("8.0", "9.0"), True),
        (f"{CANCELLED} ***", False),
        (f"{CANCELLED} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", False),
        ("srun: error: Timed out waiting for job step to complete", False),
        ("srun: forcing job termination", False),
    ],
)
def test_whether_srun_has_heard_of_the_end_of_each_task(line: str, heard: bool) -> None:
    step = run(line)
    step.name = "8.0"
    assert step.heard_all is heard


@pytest.mark.parametrize(
    ("program", "code", "killed_by"), [("exit 255", 255, 0), ("kill -TERM $$", 143, signal.SIGTERM)]
)
def test_codes(program: str, code: int, killed_by: int) -> None:
    step = run(program=program)
    assert (step.code, step.killed_by, step.running) == (code, killed_by, False)


@pytest.mark.parametrize(
    ("line", "ended", "code"),
    [
        (NOT_LAUNCHED, (), 1),
        (NOT_LAUNCHED, (0,), 1),
        (NOT_LAUNCHED, (0, 1), 0),
        (f"a program quotes {NOT_LAUNCHED}", (0,), 0),
    ],
    ids=["none has begun", "one has not begun", "of an srun in a task", "quoted"],
)
def test_an_srun_whose_tasks_never_began_has_not_ended_well(
    line: str, ended: tuple[int, ...], code: int
) -> None:
    """srun itself ends with 0."""
    reports = StepReports("")
    if ended:
        reports.take(NodeBegan(8, 0, "n1", 2, 2))
    for task in ended:
        reports.take(TaskEnd(8, 0, task, 0))
    assert run(line, reports=reports).code == code


@pytest.mark.parametrize(
    ("line", "answered"),
    [
        ("srun: error: Unable to confirm allocation for job 5: " + AWAY, False),
        ("srun: error: Unable to create step for job 5: " + TIMED_OUT, False),
        ("srun: error: Unable to confirm allocation for job 5: " + KILLED_MEANWHILE, False),
        ("srun: error: Unable to create step for job 5: More processors requested", True),
        (f"a program quotes srun: error: Unable to create step for job 5: {AWAY}", True),
    ],
)
def test_an_srun_that_slurmctld_does_not_answer(line: str, answered: bool) -> None:
    step = run(line, program='printf "%s\\n" "$@" >&2; exit 1')
    assert (step.was_answered, step.code) == (answered, 1)


@pytest.mark.parametrize("more", [[], [KILLED]])
def test_an_srun_that_gets_no_step(more: list[str]) -> None:
    """With tasks that have ended, the words are those of an srun in one of them."""
    line = "srun: error: Unable to create step for job 5: Requested nodes are busy"
    step = run(line, *more)
    assert step.was_answered
    assert step.refused == ("" if more else "Requested nodes are busy")


@pytest.mark.parametrize("more", [[KILLED], []])
def test_an_srun_in_a_task_may_not_be_answered_either(more: list[str]) -> None:
    reports = StepReports("")
    if not more:
        reports.take(NodeBegan(8, 0, "n1", 2, 2))
    line = f"srun: error: Unable to create step for job 5: {AWAY}"
    assert run(line, *more, reports=reports).was_answered


def test_a_child_that_holds_the_pipe_is_not_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    step = run(program="sleep 60 & echo $! >&2; exit 3")
    os.kill(int(capfd.readouterr().err), signal.SIGKILL)
    assert step.code == 3
    assert step.ran_for < 50


def test_what_srun_says_of_nodes_and_tasks() -> None:
    step = run(
        "srun: error: Node failure on n3",
        "srun: error: n[1-2]: tasks 0,2-3: Killed",
        "srun: error: n5: task 7: Exited with exit code 75",
        "x srun: error: n6: task 8: Killed",
    )
    assert step.failed_nodes == {"n3"}
    assert [(e.nodes, e.tasks, e.how) for e in step.ended_tasks] == [
        (("n1", "n2"), (0, 2, 3), "Killed"),
        (("n5",), (7,), "Exited with exit code 75"),
    ]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("Terminated", 143),
        ("Killed", 137),
        ("Exited with exit code 3", 3),
        ("Segmentation fault (core dumped)", 139),
        ("something new", 1),
    ],
)
def test_an_srun_that_waits_for_a_lost_node_ends_with_its_tasks_code(how: str, code: int) -> None:
    """As far as the job's owner is concerned, no user killed it by a signal."""
    news = threading.Event()
    line = f"srun: error: n1: task 0: {how}"
    program = f"echo '{line}' >&2; exec sleep 60"
    step = SrunStep(["sh", "-c", program], os.environ, lambda: None, on_news=news.set)
    assert news.wait(30)
    step.kill()
    assert step.wait(30)
    assert (step.code, step.killed_by) == (code, 0)


@pytest.mark.parametrize(
    "line",
    [
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T10:00:00 ***",
    ],
)
def test_the_end_by_slurm_is_news_while_srun_waits_for_a_lost_node(line: str) -> None:
    """Nothing else may be told of it for minutes."""
    news = threading.Event()
    program = f"echo '{line}' >&2; exec sleep 60"
    step = SrunStep(["sh", "-c", program], os.environ, lambda: None, on_news=news.set)
    assert news.wait(30)
    step.kill()
    assert step.wait(30)


def test_an_srun_has_the_terminal_and_is_read_all_the_same() -> None:
    """A person's cancel of a step with --pty is in srun's standard error alone."""
    source, terminal = pty.openpty()
    ended, saved = threading.Event(), [os.dup(number) for number in (1, 2)]
    program = "test -t 1 && echo 'srun: Job step aborted: Waiting' >&2; exit 4"
    try:
        for number in (1, 2):
            os.dup2(terminal, number)
        step = SrunStep(["sh", "-c", program], os.environ, ended.set, has_terminal=True)
        assert ended.wait(30)
    finally:
        for number, own in zip((1, 2), saved, strict=True):
            os.dup2(own, number)
            os.close(own)
        os.close(terminal)
    assert os.read(source, 1000).decode() == "srun: Job step aborted: Waiting\r\n"
    os.close(source)
    assert step.code == 4
    assert step.aborted


def test_labels_of_a_part_count_on(capfd: pytest.CaptureFixture[str]) -> None:
    ended = threading.Event()
    program = (
        "printf '0: a\\n1: 0: b\\nsrun: error: n2: task 1: Killed\\n0: c' >&2; sleep 0.2; "
        "printf 'd\\n7: of another\\n1: no end' >&2; printf '1: out\\n'"
    )
    numbers = TaskNumbers((3, 11), 12)
    step = SrunStep(["sh", "-c", program], os.environ, ended.set, numbers=numbers)
    assert ended.wait(30)
    told = capfd.readouterr()
    assert told.out == "11: out\n"
    assert told.err.splitlines() == [
        *(" 3: a", "11: 0: b", "srun: error: n2: task 1: Killed", " 3: cd"),
        *("7: of another", "11: no end"),
    ]
    assert [end.tasks for end in step.ended_tasks] == [(1,)], "of its own step, as srun tells it"


def test_the_users_open_files_are_handed_on() -> None:
    """`srun -o >(gzip >log.gz)` names one of them."""
    source, sink = os.pipe()
    os.set_inheritable(sink, True)
    assert run(program=f"echo x >/dev/fd/{sink}").code == 0
    assert os.read(source, 10) == b"x\n"
    os.close(source)
    os.close(sink)


def test_what_was_told_can_be_gone_through_while_more_is_told() -> None:
    """The supervisor looks as soon as it hears of something, and the next lines come meanwhile."""
    reader = StderrReader()
    reader.read(f"{CANCELLED} DUE TO TIME LIMIT ***\nsrun: error: Node failure on n1\n".encode())
    names = ("cancelled_steps", "timed_out_steps", "failed_nodes")
    looks = [iter(getattr(reader, name)) for name in names]
    other = CANCELLED.replace("8.0", "8.1")
    reader.read(f"{other} DUE TO TIME LIMIT ***\nsrun: error: Node failure on n2\n".encode())
    assert [list(look) for look in looks] == [["8.0"], ["8.0"], ["n1"]]
    assert [len(getattr(reader, name)) for name in names] == [2, 2, 2]


EXITED = "srun: error: n4: task 0: Exited with exit code 143"
PREEMPTED = f"{NEWER} ON n4 CANCELLED AT 2026-11-20T12:00:00 DUE TO PREEMPTION ***"


@pytest.mark.parametrize(
    ("lines", "code", "is_lost"),
    [
        ([EXITED], 143, False),
        ([ABORTED, PREEMPTED, EXITED], 143, True),
        ([ABORTED, PREEMPTED], 0, True),
        ([], 0, False),
    ],
    ids=["its own end", "ended by Slurm", "ended well for Slurm", "ended well"],
)
def test_the_others_of_a_part_that_slurm_ended_are_not_left_waiting(
    lines: list[str], code: int, is_lost: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A companion was preempted: its tasks save their work at SIGTERM, and end with their own code,
    while those of the job itself wait for them without end."""
    ended = threading.Event()
    source, sink = os.pipe()
    main = SrunStep(["sh", "-c", "read go"], os.environ, ended.set, stdin=source)
    part = run(*lines, program=f'for line; do echo "$line" >&2; done; exit {code}')
    parts = StepSet(main, expected=2)
    parts.parts.append(part)
    assert parts.lost_part() is (part if is_lost else None)
    os.close(sink)
    assert ended.wait(30)
    assert parts.lost_part() is None, "none is left that could wait"
    os.close(source)


@pytest.mark.parametrize(
    ("lines", "only_signalled"),
    [
        ([f"{CANCELLED} ***", EXITED], True),
        ([f"{NEWER} ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE to SIGNAL Terminated ***"], True),
        ([f"{CANCELLED} ***", ABORTED], False),
        ([f"{CANCELLED} ***", FAILED_LAUNCH, ABORTED], True),
        ([f"{CANCELLED} ***", ABORTED, FAILED_LAUNCH], False),
        (["srun: error: Node failure on n2", ABORTED, f"{CANCELLED} ***"], False),
        ([ABORTED, PREEMPTED], False),
        ([EXITED], False),
    ],
)
def test_a_step_whose_tasks_are_only_told_to_end(
    lines: list[str], only_signalled: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*lines).only_signalled is only_signalled


@pytest.mark.parametrize(
    ("lines", "is_preempted"),
    [
        ([ABORTED, PREEMPTED, EXITED], True),
        ([ABORTED, PREEMPTED.replace("PREEMPTION", "JOB REQUEUE")], True),
        ([ABORTED, f"a program quotes {PREEMPTED}"], False),
        ([ABORTED, f"{CANCELLED} ***", EXITED], False),
        ([ABORTED, PREEMPTED.replace("PREEMPTION", "NODE n4 FAILURE")], False),
    ],
)
def test_a_step_that_slurm_preempts_without_a_grace_time(
    lines: list[str], is_preempted: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    step = run(*lines)
    assert step.preempted is is_preempted
    assert not (is_preempted and step.cancelled), "no person ended it"


def test_our_own_order_to_end_is_no_preemption() -> None:
    ended = threading.Event()
    source, sink = os.pipe()
    program = f'read go; echo "{CANCELLED} ***" >&2'
    step = SrunStep(["sh", "-c", program], os.environ, ended.set, stdin=source)
    step.ends_by_us(killed=False)
    os.close(sink)
    assert ended.wait(30)
    os.close(source)
    assert step.cancelled and not step.only_signalled


def test_our_own_order_hides_no_preemption() -> None:
    """A step is ended for a node that fell sick within the GraceTime."""
    ended = threading.Event()
    source, sink = os.pipe()
    program = f'echo "{CANCELLED} ***" >&2; read go; echo "{ABORTED}" >&2'
    told = threading.Event()
    step = SrunStep(["sh", "-c", program], os.environ, ended.set, stdin=source, on_news=told.set)
    assert told.wait(30)
    step.ends_by_us(killed=True)
    os.close(sink)
    assert ended.wait(30)
    os.close(source)
    assert step.only_signalled


def test_a_task_s_own_srun_hides_no_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was aborted long before."""
    step = run(ABORTED, f"{CANCELLED} ***")
    monkeypatch.setattr(step._stderr, "aborted_at", step.ended_at - 900.0)
    assert step.only_signalled


@pytest.mark.parametrize(
    ("number", "error", "said"),
    [
        (errno.EAGAIN, SlurmUnreachable, "sh cannot be started now: "),
        (errno.ENOMEM, SlurmUnreachable, "sh cannot be started now: "),
        (errno.ESTALE, SlurmUnreachable, "sh cannot be started now: "),
        (errno.ENOENT, MissingTool, "sh cannot be started: "),
        (errno.EACCES, MissingTool, "sh cannot be started: "),
    ],
)
def test_a_machine_that_starts_no_srun_now_may_start_it_later(
    monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], said: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", fails)
    with pytest.raises(error, match=said):
        SrunStep(["sh"], os.environ, lambda: None)


def test_an_srun_is_ended_whose_end_no_thread_would_see(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def starts(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*words, **options))
        return started[-1]

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(subprocess, "Popen", starts)
    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(SlurmUnreachable, match="cannot be started now: can't start new thread"):
        SrunStep(["sh", "-c", "exec sleep 600"], os.environ, lambda: None)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


PROLOG = "srun: error: Task launch for StepId=8.1 failed on node n4: Job prolog failed"


def test_a_node_whose_prolog_fails_is_given_up_and_the_step_does_not_run() -> None:
    """Slurm shows that step for a while, and its srun has connections: it was told as recovered."""
    step = run(PROLOG, "srun: error: Application launch failed: Job prolog failed")
    assert step.failed_nodes == step.prolog_nodes == {"n4"}
    assert StepSet(step).ends_from_outside
    assert not step.ended_by_itself
    other = run(PROLOG.replace("Job prolog failed", "Communication connection failure"))
    assert (other.failed_nodes, other.ends_from_outside) == (frozenset(), True)
    assert not run("train: error: Application launch failed").ends_from_outside


@pytest.mark.parametrize(
    ("requeue", "kind", "said"),
    [
        (
            True,
            "job_over",
            "the job's prolog failed on n4, so Slurm drains it and ends the job; it",
        ),
        (True, "job_over", "`scontrol release 7` has it start again"),
        (False, "job_over", "failed on n4, so Slurm drains it and ends the job\n"),
        (True, "node", ""),
    ],
)
def test_a_job_that_slurm_holds_for_a_prolog_is_told_of(
    requeue: bool, kind: Any, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    job = SimpleNamespace(id=7, is_batch=True, requeue=requeue)
    supervisor: Any = SimpleNamespace(_allocation=SimpleNamespace(job=job))
    step = run(PROLOG)
    capfd.readouterr()
    Supervisor._say_held(supervisor, Cause(kind, "over"), StepSet(step))
    told = capfd.readouterr().err
    assert said in told
    assert bool(said) == bool(told)


@pytest.mark.parametrize("ends", [False, True])
def test_a_step_that_ends_while_slurm_is_asked_for_it_is_not_told_as_recovered(ends: bool) -> None:
    part: Any = SimpleNamespace(job=7, pid=100, ends_from_outside=False, reports=StepReports(""))

    def steps(job: int) -> tuple[StepInfo, ...]:
        part.ends_from_outside = ends
        return (StepInfo(job, "1", ("n1", "n2"), "n1", 100, 2),)

    said: list[str] = []
    watch: Any = SimpleNamespace(
        _starting="attempt 2",
        _step=StepSet(part),
        _context=SimpleNamespace(
            client=SimpleNamespace(steps=steps),
            host="n1",
            clock=SystemClock(),
            host_calls=SimpleNamespace(connections=lambda _: 2),
        ),
        _allocation=SimpleNamespace(id=7),
        _shown_since=0.0,
        _say_recovered=said.append,
    )
    AttemptWatch._report_recovered(watch)
    assert said == ([] if ends else ["attempt 2"])


@pytest.mark.parametrize(
    ("target", "begun", "connections", "seconds", "told"),
    [
        ("", (), 1, 4.0, False),
        ("", (), 1, 6.0, True),
        ("", (), 2, 0.0, True),
        # Its node may run a prolog, and connects to tell that it failed.
        ("0a,1,::1", (), 1, 59.0, False),
        ("0a,1,::1", (0,), 1, 59.0, False),
        ("0a,1,::1", (0,), 2, 4.0, False),
        ("0a,1,::1", (0,), 2, 6.0, True),
        ("0a,1,::1", (0, 1), 1, 0.0, True),
        ("0a,1,::1", (), 1, 61.0, True),
    ],
)
def test_a_step_runs_when_each_of_its_nodes_has_begun(
    target: str, begun: tuple[int, ...], connections: int, seconds: float, told: bool
) -> None:
    reports = StepReports(target)
    for node in begun:
        reports.take(NodeBegan(1, node, f"n{node}", nodes=2, tasks=2))
    part: Any = SimpleNamespace(job=7, pid=100, ends_from_outside=False, reports=reports)
    info = StepInfo(7, "1", ("n0", "n1"), "n0", 100, 2)
    clock = SimpleNamespace(monotonic=lambda: 1000.0 + seconds)
    said: list[str] = []
    watch: Any = SimpleNamespace(
        _starting="attempt 2",
        _step=StepSet(part),
        _context=SimpleNamespace(
            client=SimpleNamespace(steps=lambda _: (info,)),
            host="n0",
            clock=clock,
            host_calls=SimpleNamespace(connections=lambda _: connections),
        ),
        _allocation=SimpleNamespace(id=7),
        _shown_since=1000.0,
        _say_recovered=said.append,
    )
    AttemptWatch._report_recovered(watch)
    assert bool(said) == told


NO_THREAD = "pthread_create error Resource temporarily unavailable"


def test_an_srun_that_gets_no_thread() -> None:
    line = f"srun: fatal: _msg_thr_create: {NO_THREAD}"
    assert not run(line).had_threads
    assert run(f"train: fatal: x: {NO_THREAD}").had_threads
    reports = StepReports("")
    reports.take(NodeBegan(0, 0, "n1"))
    assert run(line, reports=reports).had_threads, "a task's own srun got none"
