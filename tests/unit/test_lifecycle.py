"""Lifecycle scripts: order, failures, limits, what is due, and what is written down."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slurm_resilience.errors import UsageError
from slurm_resilience.lifecycle import script_runner
from slurm_resilience.lifecycle.main import RunPlan, run
from slurm_resilience.lifecycle.run_record import (
    LifecycleError,
    RunOutcome,
    RunRecord,
    due,
    read_record,
)
from slurm_resilience.lifecycle.script_set import LifecycleScript, scripts_of

EXAMPLES = Path(__file__).resolve().parents[2] / "lifecycle"


def write(directory: Path, name: str, body: str, mode: int = 0o755) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{body}\n")
    (directory / name).chmod(mode)


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    (tmp_path / "d").mkdir()
    return RunPlan(
        tmp_path / "d", tmp_path / "state", tmp_path / "log", "n1", boot_id="b1", instance="i1"
    )


def outcomes(record: RunRecord) -> list[tuple[str, int | None]]:
    return [(result.name, result.rc) for result in record.results]


def log_of(plan: RunPlan, name: str) -> str:
    return (plan.log_dir / f"{name}.log").read_text()


def test_scripts_run_in_order_with_the_node_name_and_a_log_each(plan):
    for name in ("20-b.sh", "10-a.sh", "90-z"):
        write(plan.directory, name, f"echo {name} $1 >> $0.ran~; echo to stderr >&2; echo end $1")
    record = run(plan)
    assert outcomes(record) == [("10-a.sh", 0), ("20-b.sh", 0), ("90-z", 0)]
    assert record.outcome is RunOutcome.PASSED
    assert read_record(plan.state_dir) == record
    assert log_of(plan, "20-b.sh") == "to stderr\nend n1\n"
    lines = (plan.log_dir / "lifecycle.log").read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["10-a.sh:", "20-b.sh:", "90-z:"]
    assert all("exit code 0 after " in line for line in lines)


def test_a_failure_ends_the_run_and_says_so(plan):
    write(plan.directory, "10-a", "exit 0")
    write(plan.directory, "20-b", "echo; echo 'the disk  is broken'; exit 3")
    write(plan.directory, "30-c", "exit 0")
    with pytest.raises(
        LifecycleError,
        match=r"^20-b failed \(exit code 3\): the disk is broken; n1 must not join; see .*log$",
    ):
        run(plan)
    record = read_record(plan.state_dir)
    assert record is not None and record.outcome is RunOutcome.FAILED
    assert outcomes(record) == [("10-a", 0), ("20-b", 3)]
    assert record.failed is not None and record.failed.name == "20-b"


def test_a_script_over_its_limit_ends_with_all_it_started(plan):
    write(plan.directory, "10-slow", "sleep 1000 & echo $! > $0.child~; wait")
    with pytest.raises(LifecycleError, match=r"^10-slow took more than its time \(2 s\)"):
        run(replace(plan, timeout=2.0))
    child = int((plan.directory / "10-slow.child~").read_text())
    # Killed, but not necessarily gone in the same instant.
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(child)
        gone, alive = psutil.wait_procs([process], timeout=10)
        assert gone or alive[0].status() == psutil.STATUS_ZOMBIE


def test_all_scripts_together_have_a_limit(plan):
    write(plan.directory, "10-slow", "exec sleep 1000")
    write(plan.directory, "20-never", "echo ran > $0.ran~")
    with pytest.raises(LifecycleError, match=r"^10-slow took more than its time"):
        run(replace(plan, total_timeout=1.0))
    assert not (plan.directory / "20-never.ran~").exists()


def test_one_ended_by_a_signal_and_one_that_cannot_run(plan):
    write(plan.directory, "10-killed", "kill -TERM $$")
    with pytest.raises(LifecycleError, match="exit code 143"):
        run(plan)
    (plan.directory / "10-killed").write_text("#!/nowhere/interpreter\n")
    with pytest.raises(LifecycleError, match="exit code 126"):
        run(plan)


def test_what_is_not_a_script_is_left_alone_and_what_cannot_be_executed_is_shown(plan):
    for name in ("README", "5-five", "10-a.sh~", "10-a.dpkg-old", "x10-a"):
        write(plan.directory, name, "exit 9")
    write(plan.directory, "10-off", "exit 9", mode=0o644)
    (plan.directory / "10-directory").mkdir()
    assert [script.name for script in scripts_of(plan.directory)] == ["10-off"]
    assert outcomes(run(plan)) == [("10-off", None)]
    assert "10-off: skipped, it is not executable" in (plan.log_dir / "lifecycle.log").read_text()


def test_two_runs_never_overlap(plan):
    write(plan.directory, "10-a", "exit 0")
    run(plan)
    with (plan.state_dir / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LifecycleError, match="another run holds"):
            run(plan)
    assert len(run(plan).results) == 1


@pytest.mark.parametrize("where", ["directory", "script"])
def test_what_others_may_write_is_never_run(plan, where):
    write(plan.directory, "10-a", "echo ran > $0.ran~")
    path = plan.directory if where == "directory" else plan.directory / "10-a"
    path.chmod(path.stat().st_mode | stat.S_IWGRP)
    with pytest.raises(UsageError, match=f"^{path} may be written by others .*chmod go-w$"):
        run(plan)
    assert not (plan.directory / "10-a.ran~").exists()


def test_what_belongs_to_another_user_is_never_run(plan):
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    write(plan.directory, "10-a", "exit 0")
    os.chown(plan.directory / "10-a", 12345, 0)
    with pytest.raises(UsageError, match=r"belongs to user 12345: .*chown it to root"):
        run(plan)


def runs(plan: RunPlan, *names: str) -> list[int]:
    """The number of runs of each of the scripts."""
    logs = [plan.directory / f"{name}.ran~" for name in names]
    return [len(log.read_text().splitlines()) if log.exists() else 0 for log in logs]


def test_a_folder_on_the_way_that_others_may_write_is_refused(plan, tmp_path):
    """Its owner, or any user, could put another script in this one's place."""
    write(plan.directory, "10-a", "touch /should/not/be")
    deep = tmp_path / "open" / "scripts"
    deep.mkdir(parents=True)
    plan.directory.rename(deep / "d")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UsageError, match=r"open, in which d lies, may be written by all users"):
        run(replace(plan, directory=deep / "d"))
    plan.directory.symlink_to(deep / "d")
    with pytest.raises(UsageError, match=r"open, in which d lies, may be written by all users"):
        run(plan)
    (tmp_path / "open").chmod(0o1777)
    with contextlib.suppress(LifecycleError):
        run(plan)
    assert outcomes(read_record(plan.state_dir)) == [("10-a", 1)]


def test_a_full_disk_of_logs_fails_no_script(plan, monkeypatch):
    """It would keep the node out, though all is well with it."""
    write(plan.directory, "10-a", "set -e; echo one; for i in $(seq 3); do echo $i; done; exit 0")
    write(plan.directory, "20-b", "echo no licence; exit 3")
    plan.log_dir.mkdir()
    (plan.log_dir / "lifecycle.log").symlink_to("/dev/full")
    has_log = os.open

    def full(path, flags, *args, **more):
        if str(path).endswith("10-a.log"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return has_log(path, flags, *args, **more)

    monkeypatch.setattr(script_runner.os, "open", full)
    monkeypatch.setattr(script_runner, "ROOM_BYTES", 1 << 62)
    with pytest.raises(LifecycleError, match=r"20-b failed \(exit code 3\): no licence"):
        run(plan)
    record = read_record(plan.state_dir)
    assert record is not None and [one.text for one in record.results] == ["3", "no licence"]
    assert log_of(plan, "20-b") == "no licence\n"


def test_a_link_to_nothing_is_not_left_out(plan, tmp_path):
    """The script's file was moved away: the node must not join without it."""
    write(plan.directory, "10-a", "exit 0")
    (plan.directory / "20-b").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match="20-b is a link to nothing, so nothing was run"):
        run(plan)


def test_a_run_that_is_killed_leaves_no_script_to_the_next_one(plan, tmp_path):
    os.mkfifo(tmp_path / "pid")
    write(plan.directory, "10-a", f"echo $$ > {tmp_path}/pid; while :; do sleep 0.1; done")
    words = ["--dir", plan.directory, "--state", plan.state_dir, "--logs", plan.log_dir, "n1"]
    started = subprocess.Popen(
        [sys.executable, "-m", "slurm_resilience.lifecycle", *map(str, words)]
    )
    script = psutil.Process(int((tmp_path / "pid").read_text()))
    started.kill()
    started.wait()
    assert not psutil.wait_procs([script], timeout=30)[1]


def test_a_script_that_cannot_be_killed_holds_up_no_boot(plan, monkeypatch):
    """In the kernel, on a dead file server, say."""
    write(plan.directory, "10-a", "while :; do sleep 0.1; done")
    monkeypatch.setattr(script_runner, "KILL_SECONDS", 0.1)
    killed = []
    monkeypatch.setattr(script_runner.os, "killpg", lambda pid, _: killed.append(pid))
    with pytest.raises(LifecycleError, match=r"took more than its time .*cannot be killed"):
        run(replace(plan, timeout=0.2))
    monkeypatch.undo()
    os.killpg(killed[0], signal.SIGKILL)


def test_what_ended_well_runs_again_with_the_next_boot_on_another_machine_or_by_request(plan):
    for name in ("10-a", "20-b"):
        write(plan.directory, name, "echo >> $0.ran~")
    run(plan)
    assert run(plan).outcome is RunOutcome.PASSED
    assert runs(plan, "10-a", "20-b") == [1, 1]  # a start of slurmd in the same boot
    run(replace(plan, boot_id="b2"))
    assert runs(plan, "10-a", "20-b") == [2, 2]
    run(replace(plan, boot_id="b2", instance="i2"))
    assert runs(plan, "10-a", "20-b") == [3, 3]
    run(replace(plan, boot_id="b2", instance="i2", again=True))
    assert runs(plan, "10-a", "20-b") == [4, 4]


def test_a_changed_script_and_those_behind_it_run_again(plan):
    for name in ("10-a", "20-b", "30-c"):
        write(plan.directory, name, "echo >> $0.ran~")
    run(plan)
    write(plan.directory, "20-b", "echo changed >> $0.ran~")
    run(plan)
    assert runs(plan, "10-a", "20-b", "30-c") == [1, 2, 2]


def test_a_failed_one_runs_again_once_it_is_mended(plan):
    write(plan.directory, "10-a", "echo >> $0.ran~")
    write(plan.directory, "20-b", '[ -e "$0.mended~" ]')
    with pytest.raises(LifecycleError):
        run(plan)
    (plan.directory / "20-b.mended~").touch()
    assert run(plan).outcome is RunOutcome.PASSED
    assert runs(plan, "10-a") == [1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1}', "null"])
def test_a_record_that_cannot_be_read_counts_for_nothing(plan, text):
    plan.state_dir.mkdir()
    (plan.state_dir / "record.json").write_text(text)
    assert read_record(plan.state_dir) is None
    write(plan.directory, "10-a", "echo >> $0.ran~")
    run(plan)
    assert runs(plan, "10-a") == [1]


def test_nothing_is_due_on_what_never_ran():
    script = LifecycleScript(Path("/d/10-a"), "digest")
    assert due([script], None, "b1", "i1") == 0
    assert due([], None, "b1", "i1") == 0


def test_a_log_is_bounded_and_the_last_one_is_kept(plan, monkeypatch):
    monkeypatch.setattr(script_runner, "MAX_LOG_BYTES", 4096)
    write(plan.directory, "10-loud", "echo first; yes middle | head -n 20000; echo last")
    run(plan)
    text = log_of(plan, "10-loud")
    assert len(text) <= 4096
    assert text.startswith("first\n") and text.endswith("middle\nlast\n")
    assert "the middle of the output is left out" in text
    run(replace(plan, again=True))
    assert (plan.log_dir / "10-loud.log.1").read_text() == text


def test_the_command_line(plan):
    write(plan.directory, "10-a", "exit 0")
    command = [sys.executable, "-m", "slurm_resilience.lifecycle"]

    def call(*words: str) -> tuple[int, str]:
        done = subprocess.run([*command, *words], capture_output=True, text=True)
        return done.returncode, (done.stdout + done.stderr).strip()

    folders = ("--state", str(plan.state_dir), "--logs", str(plan.log_dir))
    words = ("--dir", str(plan.directory), *folders)
    assert call(*words, "n1") == (0, "sres-lifecycle: 1 of 1 scripts ran well on n1")
    said = "sres-lifecycle: error: 'n1; reboot' is not a node name"
    assert call(*words, "n1; reboot") == (2, said)
    assert call(*words, "--timeout", "0", "n1")[0] == 2
    assert "No such file" in call("--dir", "/nowhere", *folders, "n1")[1]
    assert "--dir needs --state and --logs" in call("--dir", str(plan.directory), "n1")[1]
    write(plan.directory, "20-b", "exit 1")
    assert call(*words, "n1")[0] == 1


def test_the_command_line_takes_the_rest_from_the_configuration(plan, tmp_path):
    write(plan.directory, "10-a", "exit 0")
    text = f"""[lifecycle]
directory = "{plan.directory}"
state_dir = "{plan.state_dir}"
log_dir = "{plan.log_dir}"
"""
    (tmp_path / "sres.toml").write_text(text)
    (tmp_path / "empty.toml").write_text("")
    command = [sys.executable, "-m", "slurm_resilience.lifecycle", "n1", "--config"]
    ends = [
        subprocess.run([*command, str(tmp_path / name)], capture_output=True, text=True).stdout
        for name in ("sres.toml", "empty.toml")
    ]
    assert ends[0] == "sres-lifecycle: 1 of 1 scripts ran well on n1\n"
    assert ends[1].startswith("sres-lifecycle: no scripts are configured")


def test_a_directory_that_is_not_there():
    with pytest.raises(UsageError, match="name a directory of scripts"):
        scripts_of(Path("/nowhere"))


def test_the_example_set_passes_shellcheck():
    found = [script.path for script in scripts_of(EXAMPLES)]
    assert len(found) >= 3
    shellcheck = Path(sys.prefix) / "bin" / "shellcheck"
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, *found], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def driver_libraries(tmp_path: Path, *, gpu: bool, size: int | None) -> tuple[int, str]:
    """Run the example that looks for the driver's library, on a machine made of files."""
    device = tmp_path / "pci" / "0000:04:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n" if gpu else "0x8086\n")
    (device / "class").write_text("0x030200\n")
    library = tmp_path / "libcuda.so.1"
    listed = f"\tlibcuda.so.1 (libc6,x86-64) => {library}\n" if size is not None else ""
    if size is not None:
        library.write_bytes(b"x" * size)
    write(tmp_path, "ldconfig", f"cat <<'END'\n1 libs found\n{listed}END")
    environment = {
        "PATH": "/usr/bin:/bin",
        "SRES_PCI_DEVICES": str(tmp_path / "pci"),
        "SRES_LDCONFIG": str(tmp_path / "ldconfig"),
        "SRES_DRIVER_LIBRARIES": "libcuda.so.1",
    }
    script = EXAMPLES / "60-driver-libraries.sh"
    done = subprocess.run([script, "n1"], env=environment, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr).strip()


def test_a_driver_library_that_is_empty_or_missing_fails_on_a_machine_with_gpus(tmp_path):
    code, said = driver_libraries(tmp_path / "empty", gpu=True, size=0)
    assert code == 1 and "libcuda.so.1 is empty or missing" in said
    code, said = driver_libraries(tmp_path / "missing", gpu=True, size=None)
    assert code == 1 and "libcuda.so.1 is not installed" in said
    assert driver_libraries(tmp_path / "well", gpu=True, size=9)[0] == 0
    assert driver_libraries(tmp_path / "other", gpu=False, size=None)[0] == 0
