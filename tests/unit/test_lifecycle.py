"""The lifecycle runner: order, failures, limits, and what it writes down."""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slurm_resilience.errors import UsageError
from slurm_resilience.lifecycle import LifecycleError, Result, run, scripts


def write(directory: Path, name: str, body: str, mode: int = 0o755) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{body}\n")
    (directory / name).chmod(mode)


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "d").mkdir()
    return tmp_path / "d", tmp_path / "log" / "lifecycle.log"


def test_scripts_run_in_order_with_the_node_name(place):
    directory, log = place
    for name in ("20-b.sh", "10-a.sh", "90-z"):
        write(directory, name, f"echo {name} $1; echo to stderr >&2")
    results = run(directory, log, "n1")
    assert [(r.name, r.rc) for r in results] == [("10-a.sh", 0), ("20-b.sh", 0), ("90-z", 0)]
    text = log.read_text()
    assert text.index("10-a.sh n1\n") < text.index("20-b.sh n1\n") < text.index("90-z n1\n")
    assert text.count("to stderr") == 3


def test_a_failure_ends_the_run_and_says_so(place):
    directory, log = place
    write(directory, "10-a", "exit 0")
    write(directory, "20-b", "exit 3")
    write(directory, "30-c", "exit 0")
    with pytest.raises(
        LifecycleError, match=r"^20-b failed \(exit code 3\): n1 must not join; see"
    ):
        run(directory, log, "n1")
    lines = [json.loads(line) for line in Path(f"{log}.jsonl").read_text().splitlines()]
    assert [(line["name"], line["rc"]) for line in lines] == [("10-a", 0), ("20-b", 3)]


def test_a_script_over_its_limit_ends_with_all_it_started(place):
    directory, log = place
    write(directory, "10-slow", "sleep 1000 & echo $! > $0.child; wait")
    with pytest.raises(LifecycleError, match=r"10-slow took more than 2 s \(exit code 124\)"):
        run(directory, log, "n1", timeout=2)
    child = int((directory / "10-slow.child").read_text())
    # Killed, but not necessarily gone in the same instant.
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(child)
        gone, alive = psutil.wait_procs([process], timeout=10)
        assert gone or alive[0].status() == psutil.STATUS_ZOMBIE


def test_one_ended_by_a_signal_and_one_that_cannot_run(place):
    directory, log = place
    write(directory, "10-killed", "kill -TERM $$")
    with pytest.raises(LifecycleError, match="exit code 143"):
        run(directory, log, "n1")
    (directory / "10-killed").write_text("#!/nowhere/interpreter\n")
    with pytest.raises(LifecycleError, match="exit code 126"):
        run(directory, log, "n1")


def test_what_is_not_a_script_is_left_alone_and_what_cannot_be_executed_is_shown(place):
    directory, log = place
    for name in ("README", "5-five", "10-a.sh~", "10-a.dpkg-old", "x10-a"):
        write(directory, name, "exit 9")
    write(directory, "10-off", "exit 9", mode=0o644)
    (directory / "10-directory").mkdir()
    assert [script.name for script in scripts(directory)] == ["10-off"]
    assert run(directory, log, "n1") == [Result("10-off", None, 0.0, skipped="not executable")]
    assert "10-off: skipped" in log.read_text()


def test_two_runs_never_overlap(place):
    directory, log = place
    write(directory, "10-a", "exit 0")
    run(directory, log, "n1")
    with Path(f"{log}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LifecycleError, match="another run holds"):
            run(directory, log, "n1")
    assert len(run(directory, log, "n1")) == 1


def test_the_command_line(place):
    directory, log = place
    write(directory, "10-a", "exit 0")
    command = [sys.executable, "-m", "slurm_resilience.lifecycle"]

    def call(*words: str) -> tuple[int, str]:
        done = subprocess.run([*command, *words], capture_output=True, text=True)
        return done.returncode, (done.stdout + done.stderr).strip()

    words = ("--dir", str(directory), "--log", str(log))
    assert call(*words, "n1") == (0, "lifecycle: 1 of 1 scripts ran well on n1")
    assert call(*words, "n1; reboot") == (2, "lifecycle: error: 'n1; reboot' is not a node name")
    assert call(*words, "--timeout", "0", "n1")[0] == 2
    assert "No such file" in call("--dir", "/nowhere", "--log", str(log), "n1")[1]
    write(directory, "20-b", "exit 1")
    assert call(*words, "n1")[0] == 1


def test_a_directory_that_is_not_there():
    with pytest.raises(UsageError, match="name a directory of scripts"):
        scripts(Path("/nowhere"))


def test_the_example_set_passes_shellcheck():
    directory = Path(__file__).resolve().parents[2] / "lifecycle"
    found = scripts(directory)
    assert len(found) >= 3
    shellcheck = Path(sys.prefix) / "bin" / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, *found], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
