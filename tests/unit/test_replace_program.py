"""The program hook: started once, and never lost sight of."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_resilience.errors import SresError
from slurm_resilience.replace import disk_room, program, program_runner
from slurm_resilience.replace.repair_order import Run, RunExists


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
    assert run.rc == 127 and "cannot be started" in run.output and run.state == "unbegun"


def test_a_program_whose_interpreter_is_missing_is_told_as_that(tmp_path: Path) -> None:
    line = tmp_path / "replace-node"
    line.write_text("#!/nonexistent/python3\n")
    line.chmod(0o755)
    program.start(tmp_path / "1-1", [str(line)], "replace", "n7", 60)
    run = ended(tmp_path / "1-1")
    assert run.state == "unbegun" and "names an interpreter that is not" in run.output


def test_a_program_that_says_127_itself_has_begun(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    program.start(tmp_path / "1-1", script("exit 127"), "replace", "n7", 60)
    run = ended(tmp_path / "1-1")
    assert (run.state, run.rc) == ("ended", 127)


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


STUBBORN = """
import os, sys
from pathlib import Path
from slurm_resilience.replace import program_runner
program_runner.STOP_SECONDS = 0.2
print(program_runner.run(Path(sys.argv[1]), 60, sys.argv[2:], os.open("/dev/null", os.O_RDONLY)))
"""


def test_a_stopped_program_that_goes_on_after_sigterm_is_killed(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    begun = tmp_path / "begun"
    line = script(f"trap '' TERM; touch {begun}; while :; do sleep 0.1; done")
    command = [sys.executable, "-c", STUBBORN, str(tmp_path), *line]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as runner:
        until(begun.exists, "the program runs")
        runner.terminate()
        assert runner.communicate(timeout=30)[0] == f"{-signal.SIGKILL}\n"
    last = (tmp_path / "output").read_text().splitlines()[-1]
    assert last == "killed: it was stopped, and went on after SIGTERM"


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
    runner_of(directory)
    parent.kill()
    parent.wait()
    assert program.status(directory, time.time()).state == "running"
    with pytest.raises(RunExists):
        program.start(directory, [line], "replace", "n7", 60)
    go.write_text("it\n")
    run = ended(directory)
    assert (run.rc, run.output) == (5, "got it")


def runner_of(directory: Path) -> int:
    until(lambda: (directory / "runner").read_text().strip(), "the runner's process id")
    return int((directory / "runner").read_text())


def test_a_run_without_its_runner_goes_on_until_the_program_ends(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    """To start another one beside it would replace the node twice at once."""
    directory, go = tmp_path / "1-1", tmp_path / "go"
    os.mkfifo(go)
    program.start(directory, script(f"echo begun; read word < {go}"), "replace", "n7", 60)
    until(lambda: "begun" in (directory / "output").read_text(), "the program runs")
    os.kill(runner_of(directory), signal.SIGKILL)
    until(lambda: not _runs(runner_of(directory)), "the runner is gone")
    assert program.status(directory, time.time()).state == "running"
    go.write_text("end\n")
    until(lambda: program.status(directory, time.time()).state == "lost", "the run is lost")


def test_a_runner_that_does_not_start_has_begun_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its interpreter or its package is missing, as in the middle of an upgrade."""
    directory = tmp_path / "1-1"
    monkeypatch.setattr(program.sys, "executable", "/bin/false")
    program.start(directory, ["/bin/true"], "replace", "n7", 60)
    until(lambda: program.status(directory, time.time()).state == "unbegun", "it is over")


def test_neither_the_clock_nor_the_boot_time_tells_that_a_run_is_lost(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    directory = tmp_path / "1-1"
    program.start(directory, script("sleep 600"), "replace", "n7", 60)
    runner_of(directory)
    for name in ("lock", "rc", "runner", "output"):
        os.utime(directory / name, (1, 1))
    for now in (0.0, time.time() + 1e9):
        assert program.status(directory, now).state == "running"
    program.stop(directory)
    assert ended(directory).rc != 0


def test_another_process_with_the_runners_number_is_not_it(tmp_path: Path) -> None:
    directory = tmp_path / "1-1"
    directory.mkdir()
    (directory / "runner").write_text(f"{os.getpid()}")
    assert program.status(directory, time.time()).state == "lost"
    program.stop(directory)


def test_a_full_disk_at_the_start_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(program, "write_in_place", is_full)
        with pytest.raises(SresError, match=r"cannot be started.*No space"):
            program.start(tmp_path / "1-1", ["/bin/true"], "replace", "n7", 60)
    assert program.status(tmp_path / "1-1", time.time()).state == "unbegun"
    program.start(tmp_path / "1-2", ["/bin/true"], "replace", "n7", 60)
    assert ended(tmp_path / "1-2").rc == 0


def test_a_disk_that_is_full_at_the_end_keeps_the_exit_code(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    """A limit on the size of files stands in for the disk: nothing may grow, or be made anew."""
    directory, go = tmp_path / "1-1", tmp_path / "go"
    os.mkfifo(go)
    program.start(directory, script(f"read word < {go}; exit 7"), "replace", "n7", 60)
    resource.prlimit(runner_of(directory), resource.RLIMIT_FSIZE, (32, 32))
    directory.chmod(0o500)
    go.write_text("end\n")
    assert ended(directory).rc == 7


def test_an_exit_code_waits_for_a_disk_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that turned read-only is mended after a night: the node was replaced by then."""
    tries: list[int] = []

    def is_read_only(path: Path, text: str) -> None:
        tries.append(1)
        if len(tries) < 5000:
            raise OSError(errno.EROFS, "Read-only file system")
        program.write_in_place(path, text)

    monkeypatch.setattr(program_runner, "RESULT_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(program_runner, "write_in_place", is_read_only)
    program_runner._leave_result(tmp_path / "rc", 7)
    assert (tmp_path / "rc").read_text().strip() == "7"
    # Where the file system is gone no later look would find it.
    monkeypatch.setattr(program_runner, "write_in_place", program.write_in_place)
    (tmp_path / "mount-point").mkdir()
    program_runner._leave_result(tmp_path / "mount-point" / "runs" / "1-1" / "rc", 7)
    assert not list((tmp_path / "mount-point").iterdir())
    # The directory of all runs was removed, and what is beside it was not.
    program_runner._leave_result(tmp_path / "runs" / "1-1" / "rc", 7)
    assert (tmp_path / "runs" / "1-1" / "rc").read_text().strip() == "7"


@pytest.mark.parametrize("end", ["by itself", "stopped"])
def test_a_run_whose_directory_a_person_removes_is_under_way_until_its_end(
    tmp_path: Path, script: Callable[[str], list[str]], end: str
) -> None:
    directory, go, runs = tmp_path / "link" / "1-1", tmp_path / "go", tmp_path / "runs"
    runs.mkdir()
    (tmp_path / "link").symlink_to(runs)
    line = script(f"while [ ! -e {go} ]; do sleep 0.05; done; exit 3")
    program.start(directory, line, "replace", "n7", 60)
    until((tmp_path / "pids").exists, "the program runs")
    shutil.rmtree(directory)
    assert program.status(directory, time.time(), was_begun=True).state == "running"
    assert program.is_unfinished(directory)
    assert not program.is_unfinished(tmp_path / "link" / "1-2")
    if end == "stopped":
        program.stop(directory)
    else:
        go.touch()
    run = ended(directory)
    assert (run.state, run.rc) == ("ended", 3 if end == "by itself" else 143)


@pytest.mark.parametrize("way", ["renamed", "other disk", "other state_dir"])
def test_a_run_whose_directory_a_person_moves_is_under_way_until_its_end(
    tmp_path: Path, script: Callable[[str], list[str]], way: str
) -> None:
    """To clear runs away, or because the disk of the state directory is too small."""
    directory, go, moved = tmp_path / "state" / "1-1", tmp_path / "go", tmp_path / "moved"
    line = script(f"while [ ! -e {go} ]; do sleep 0.05; done; exit 3")
    program.start(directory, line, "replace", "n7", 60)
    until((tmp_path / "pids").exists, "the program runs")
    if way == "renamed":
        directory.parent.rename(moved)
    else:
        # As from disk to disk: the copy of the lock is another file.
        shutil.copytree(directory.parent, moved)
        shutil.rmtree(directory.parent)
        directory.parent.symlink_to(moved)
    shown = moved / "1-1" if way == "other state_dir" else directory
    assert program.status(shown, time.time(), was_begun=True).state == "running"
    assert program.is_unfinished(shown)
    go.touch()
    run = ended(shown)
    assert (run.state, run.rc) == ("ended", 3)
    assert not program.is_unfinished(shown)


def test_a_run_that_was_begun_and_left_nothing_is_lost(tmp_path: Path) -> None:
    """A person removed its directory, and the machine was rebooted, say."""
    assert program.status(tmp_path / "1-1", 5.0).state == "unbegun"
    run = program.status(tmp_path / "1-1", 5.0, was_begun=True)
    assert (run.state, run.output) == ("lost", f"{tmp_path / '1-1'} was removed")


def test_a_runner_that_cannot_say_that_it_runs_starts_nothing(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    """Its run counts as one that has begun nothing, and is begun again."""
    directory = tmp_path / "1-1"
    program.THIS_HOST.make(directory)
    (directory / "runner").unlink()
    (directory / "runner").mkdir()
    runner = [sys.executable, "-m", "slurm_resilience.replace.program_runner"]
    line = [*script(f"touch {tmp_path}/began"), "replace", "n7"]
    program.THIS_HOST.spawn(directory, [*runner, str(directory), "60", "--", *line])
    until(lambda: program.status(directory, time.time()).state != "running", "the run ends")
    assert program.status(directory, time.time()).state == "unbegun"
    assert not (tmp_path / "began").exists()


_ON_A_FULL_DISK = """\
import os, pathlib, sys, time
from slurm_resilience.replace import program
disk = pathlib.Path(sys.argv[1])
os.mkfifo(disk / "go")
program.start(disk / "1-1", ["sh", "-ec", "read word < $0; echo replaced", str(disk / "go")],
              "replace", "n7", 60)
with (disk / "fill").open("wb", buffering=0) as fill:
    try:
        while True:
            fill.write(b"x" * 1024)
    except OSError:
        pass
(disk / "go").write_text("end\\n")
deadline = time.monotonic() + 20
while program.status(disk / "1-1", 0.0).state == "running" and time.monotonic() < deadline:
    time.sleep(0.02)
print(program.status(disk / "1-1", 0.0))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it mounts a small disk")
def test_a_program_that_prints_on_a_full_disk_does_not_fail(tmp_path: Path) -> None:
    """It would be started again, when the machine is replaced already."""
    mount = f"mount -t tmpfs -o size=1M none {tmp_path} && exec {sys.executable} - {tmp_path}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount],
        input=_ON_A_FULL_DISK,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "state='ended', rc=0, output='replaced'" in done.stdout, done


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


def test_a_program_takes_no_memory_or_processes_from_its_neighbours(
    tmp_path: Path, script: Callable[[str], list[str]]
) -> None:
    directory = tmp_path / "1-1"
    look = "cat /proc/self/oom_score_adj; grep 'Max processes' /proc/self/limits"
    program.start(directory, script(look), "replace", "n7", 60)
    score, limit = ended(directory).output.splitlines()
    assert score == "500"
    assert int(limit.split()[2]) < 100_000
    # The kernel holds a user to it: here with room for five, since hundreds would cost seconds.
    runaway = """
import contextlib, os, signal
from slurm_resilience.replace import program_runner
program_runner.MAX_MORE_TASKS = 5
if os.getuid() == 0:
    os.setuid(65534)
program_runner._bound()
children = []
with contextlib.suppress(BlockingIOError):
    while len(children) < 50:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
print(len(children))
for child in children:
    os.kill(child, signal.SIGKILL)
"""
    said = subprocess.run(
        [sys.executable, "-c", runaway], capture_output=True, text=True, check=True, timeout=30
    )
    assert int(said.stdout) <= 5


@pytest.mark.parametrize(
    ("blocks", "free", "files", "free_files", "flags", "lack"),
    [
        (2000, 1024, 1000, 1000, 0, ""),
        (1000, 999, 1000, 1000, 0, "3996 KiB are free, 4096 KiB are needed"),
        (2000, 2000, 1000, 49, 0, "49 files can be made, 50 are needed"),
        (2000, 2000, 1000, 1000, os.ST_RDONLY, "it is mounted read-only"),
        (0, 0, 0, 0, 0, ""),
        (2000, 2000, 0, 0, 0, ""),
    ],
)
def test_a_lack_of_room_is_told(
    blocks: int, free: int, files: int, free_files: int, flags: int, lack: str
) -> None:
    """A file system without bounds tells 0 of 0."""
    block = 4096
    found = os.statvfs_result(
        (block, block, blocks, free, free, files, free_files, free_files, flags, 255)
    )
    assert disk_room.lack_of(found) == lack


def test_room_that_cannot_be_told_is_no_lack(tmp_path: Path) -> None:
    assert disk_room.lack_of_room(tmp_path / "gone") == ""
