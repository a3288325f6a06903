"""The program hook: started once, and never lost sight of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_resilience.errors import SresError
from slurm_resilience.replace import program, program_runner
from slurm_resilience.replace.program import Run, RunExists


def until(look: Callable[[], object], what: str) -> None:
    deadline, pause = time.monotonic() + 10, threading.Event()
    while not look():
        if time.monotonic() > deadline:
            pytest.fail(f"not within 10 s: {what}")
        pause.wait(0.02)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[[str], list[str]]]:
    """Write a shell script; its command line. What it left running is ended."""
    started = tmp_path / "pids"

    def write(text: str) -> list[str]:
        path = tmp_path / "replace-node"
        path.write_text(f"#!/bin/sh\necho $$ >> {started}\n{text}\n")
        path.chmod(0o755)
        return [str(path)]

    yield write
    for pid in started.read_text().split() if started.exists() else ():
        try:
            os.killpg(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue


def ended(directory: Path) -> Run:
    until(lambda: program.status(directory, time.time()).state != "running", "the run ends")
    return program.status(directory, time.time())


def test_a_run_that_the_machine_cannot_start_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("no directory")
    with pytest.raises(SresError, match="cannot be started"):
        program.start(tmp_path / "runs" / "1-1", ["/bin/true"], "replace", "n7", 60)


def test_it_is_called_with_action_and_node(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    directory = tmp_path / "runs" / "1-1"
    program.start(directory, [*script('echo "$@"; exit 3'), "--fast"], "replace", "n7", 60)
    run = ended(directory)
    assert (run.state, run.rc, run.output) == ("ended", 3, "--fast replace n7")
    assert run.ended_at > 0


def test_it_is_never_started_twice(tmp_path: Path, script: Callable[[str], list[str]]) -> None:
    directory = tmp_path / "1-1"
    line = script(f"echo x >> {tmp_path}/count")
    program.start(directory, line, "replace", "n7", 60)
    for _ in range(2):
        with pytest.raises(RunExists):
            program.start(directory, line, "replace", "n7", 60)
    ended(directory)
    with pytest.raises(RunExists):
        program.start(directory, line, "replace", "n7", 60)
    assert (tmp_path / "count").read_text() == "x\n"


def test_a_program_that_is_not_there_is_an_end(tmp_path: Path) -> None:
    program.start(tmp_path / "1-1", [str(tmp_path / "none")], "replace", "n7", 60)
    run = ended(tmp_path / "1-1")
    assert run.rc == 127 and "cannot be started" in run.output


def test_its_time_limit(tmp_path: Path, script: Callable[[str], list[str]]) -> None:
    program.start(tmp_path / "1-1", script("echo begun; sleep 600"), "replace", "n7", 0.3)
    run = ended(tmp_path / "1-1")
    assert run.rc == 124
    assert run.output.splitlines()[-1] == "ended: it ran longer than 0.3 s"


def test_stop_ends_the_program_and_its_children(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    child = tmp_path / "child"
    line = script(f"sleep 600 & echo $! > {child}.new; mv {child}.new {child}; wait")
    program.start(tmp_path / "1-1", line, "replace", "n7", 60)
    until(child.exists, "the program runs")
    program.stop(tmp_path / "1-1")
    run = ended(tmp_path / "1-1")
    assert run.state == "ended" and run.rc != 0
    pid = int(child.read_text())
    until(lambda: not _runs(pid), "its child is gone")


PARENT = """
import sys
from pathlib import Path
from slurm_resilience.replace import program
program.start(Path(sys.argv[1]), [sys.argv[2]], "replace", "n7", 60)
print("started", flush=True)
sys.stdin.read()
"""


def test_it_outlives_whoever_started_it(tmp_path: Path, script: Callable[[str], list[str]]) -> None:
    directory, go = tmp_path / "1-1", tmp_path / "go"
    os.mkfifo(go)
    (line,) = script(f"read answer < {go}; echo got $answer; exit 5")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(directory), line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None and parent.stdout.readline() == "started\n"
    until((directory / "program").exists, "the program runs")
    parent.kill()
    parent.wait()
    assert program.status(directory, time.time()).state == "running"
    with pytest.raises(RunExists):
        program.start(directory, [line], "replace", "n7", 60)
    go.write_text("it\n")
    run = ended(directory)
    assert (run.rc, run.output) == (5, "got it")


def test_a_run_whose_runner_was_killed_is_lost(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    directory = tmp_path / "1-1"
    program.start(directory, script("echo begun; sleep 600"), "replace", "n7", 60)
    until((directory / "program").exists, "the program runs")
    runner = int((directory / "runner").read_text().split()[0])
    os.kill(runner, signal.SIGKILL)
    until(lambda: program.status(directory, time.time()).state == "lost", "the run is lost")


def test_a_run_that_ends_while_it_is_looked_at_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "1-1"
    directory.mkdir()
    (directory / "runner").write_text("1 12345.67\n")

    def ends_now(pid: int) -> str:
        (directory / "rc").write_text("0\n")
        return "gone"

    monkeypatch.setattr(program.THIS_HOST, "started", ends_now)
    assert program.status(directory, time.time()).rc == 0


def test_the_runner_writes_down_itself_who_it_is(
    tmp_path: Path, script: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent may be killed before it could."""
    monkeypatch.setattr(program, "note_runner", lambda directory, pid, host: None)
    directory = tmp_path / "1-1"
    program.start(directory, script("sleep 600"), "replace", "n7", 60)
    until((directory / "runner").exists, "the runner's note")
    assert program.status(directory, time.time()).state == "running"


def test_another_process_with_the_runners_number_is_not_it(tmp_path: Path) -> None:
    directory = tmp_path / "1-1"
    directory.mkdir()
    (directory / "runner").write_text(f"{os.getpid()} 12345.67\n")
    assert program.status(directory, time.time()).state == "lost"
    program.stop(directory)


def test_a_run_that_was_only_just_made_is_no_loss_yet(tmp_path: Path) -> None:
    directory = tmp_path / "1-1"
    directory.mkdir()
    assert program.status(directory, time.time()).state == "running"
    os.utime(directory, (1, 1))
    assert program.status(directory, time.time()).state == "lost"
    assert program.status(tmp_path / "none", time.time()).state == "lost"


def test_output_is_cut_at_its_end(tmp_path: Path, script: Callable[[str], list[str]]) -> None:
    line = script("i=0; while [ $i -lt 500 ]; do echo line $i; i=$((i+1)); done")
    program.start(tmp_path / "1-1", line, "replace", "n7", 60)
    output = ended(tmp_path / "1-1").output
    assert output.endswith("line 499") and len(output) <= 2000


def test_an_endless_output_does_not_fill_the_disk(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_bytes(b"x" * (program_runner.MAX_OUTPUT_BYTES + 1) + b"the end\n")
    program_runner._shorten(output)
    assert output.stat().st_size < program_runner.KEPT_OUTPUT_BYTES + 100
    assert output.read_bytes().endswith(b"xxthe end\n")
    program_runner._shorten(output)
    program_runner._shorten(tmp_path / "nowhere")
    assert output.read_bytes().startswith(b"[only the end")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
