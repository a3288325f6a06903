"""The command: --once, its exit codes and formats; a daemon that ends at once when told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from slurm_resilience import __version__
from slurm_resilience.agent import once
from slurm_resilience.agent.main import only_reader, sresd
from slurm_resilience.errors import SresError
from slurm_resilience.lifecycle import identity
from slurm_resilience.model import CheckResult, Finding, Severity

UUID = "4c4c4544-0036-4a10-8051-b7c04f4d3033"


def result(verdict: str, severity: Severity | None = None) -> CheckResult:
    findings = (Finding("c", severity, "t", 0.0),) if severity else ()
    return CheckResult("c", verdict, "t", findings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([result("pass")], 0),
        ([result("pass"), result("unjudged")], 1),
        ([result("fail", Severity.MONITOR)], 1),
        ([result("fail", Severity.JOB), result("unjudged")], 1),
        ([result("fail", Severity.RESET), result("pass")], 2),
        ([result("fail", Severity.REPLACE)], 2),
    ],
)
def test_exit_codes(results: list[CheckResult], code: int) -> None:
    assert once.exit_code(results) == code


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "kmsg")
    file = tmp_path / "sres.toml"
    file.write_text(
        f'slurm_bin = "{tmp_path}"\n[controller]\nhost = "127.0.0.2"\nport = 1\n'
        f'[agent]\nkernel_log = "{tmp_path}/kmsg"\n'
    )
    return file


def test_once_as_json_and_as_a_table(settings: Path) -> None:
    words = ["--config", str(settings), "--once", "--node", "n9"]
    done = CliRunner().invoke(sresd, [*words, "--format", "json"])
    document = json.loads(done.stdout)
    assert document["node"] == "n9"
    assert {r["check"] for r in document["results"]} >= {"kernel_log", "disk", "memory"}
    assert done.exit_code == document["exit_code"]
    table = CliRunner().invoke(sresd, words).stdout
    assert "filesystem_readonly" in table
    assert "what Slurm expects is unknown" in table


def test_a_table_holds_whatever_a_user_named_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Such a name was markup, and ended the program: a fault had the code of a warning."""
    said = "process 7 [/b] [red]\nevil fail reboot\x1b[2J of alice" + " hangs" * 60
    finding = Finding("stuck_processes", Severity.REBOOT, said, 1.0)
    once.print_table("n9", [CheckResult("stuck_processes", "fail", said, (finding,))])
    lines = capsys.readouterr().out.splitlines()
    shown = next(line for line in lines if "hangs" in line)
    assert shown.split()[:3] == ["stuck_processes", "fail", "reboot"]
    assert "[/b] [red] evil fail reboot?[2J of alice hangs" in shown
    assert not [line for line in lines if line != shown and ("fail" in line or "evil" in line)]


def test_version() -> None:
    assert CliRunner().invoke(sresd, ["--version"]).output == f"sresd {__version__}\n"


@pytest.mark.parametrize("text", ["[agent]\nbeet = 1\n", "[checks.periods]\ngpu_helth = 1\n"])
def test_a_bad_file_is_one_line_and_an_exit_code(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    argv = [str(Path(sys.executable).parent / "sresd"), "--config", str(tmp_path / "bad.toml")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 3
    assert done.stderr.startswith("sresd: error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once(settings: Path, number: int) -> None:
    argv = [str(Path(sys.executable).parent / "sresd"), "--config", str(settings)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = ""
        while "does not answer" not in seen:
            line = process.stderr.readline()
            assert line, f"sresd ended: {seen}"
            seen += line
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(10) == 0
        assert time.monotonic() - began < 5


def test_a_second_sresd_on_a_node_ends_with_one_line(settings: Path) -> None:
    """Each would end the connection of the other, for ever."""
    argv = [str(Path(sys.executable).parent / "sresd"), "--config", str(settings)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as first:
        try:
            assert first.stderr is not None
            assert "watches node" in first.stderr.readline()
            second = subprocess.run(argv, capture_output=True, text=True, timeout=30)
        finally:
            first.kill()
    assert second.returncode == 1
    assert second.stderr.startswith("sresd: error: another sresd runs on this node")
    assert second.stderr.count("\n") == 1
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as third:
        assert third.stderr is not None
        assert "watches node" in third.stderr.readline()
        third.kill()


def test_a_user_who_holds_the_kernel_log_keeps_no_sresd_away(
    settings: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each user may lock the kernel log where the site lets users read it."""
    log = settings.parent / "kmsg"
    hold = "import fcntl, os, sys\nlog = os.open(sys.argv[1], os.O_RDWR)\n"
    hold += "fcntl.flock(log, fcntl.LOCK_EX)\nprint('held', flush=True)\nsys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdin is not None and user.stdout is not None and user.stdout.readline()
        refused = pytest.raises(SresError, match=f"another sresd .*process {user.pid} ")
        with refused, only_reader(log):
            pass
        monkeypatch.setattr("slurm_resilience.agent.main.os.geteuid", lambda: 4711)
        monkeypatch.setattr("slurm_resilience.agent.main.ROOT", 4712)
        with only_reader(log):
            pass
        assert f"process {user.pid}" in caplog.text
        user.stdin.close()


HELD = """
import fcntl, os, sys, threading, time
log = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(log, fcntl.LOCK_EX)
threading.Thread(target=os.stat, args=(sys.argv[2],), daemon=True).start()
sys.stdin.readline()
os._exit(0)
"""


def test_an_ended_sresd_with_a_thread_that_hangs_keeps_no_other_away(
    settings: Path, dead_server: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = settings.parent / "kmsg"
    words = [sys.executable, "-c", HELD, str(log), str(dead_server)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as held:
        assert held.stdin is not None
        try:
            deadline = time.monotonic() + 20

            def hangs() -> bool:
                threads = Path(f"/proc/{held.pid}/task").glob("*/wchan")
                waits = {thread.read_text() for thread in threads}
                return any("fuse" in wait or "request_wait" in wait for wait in waits)

            while not hangs():
                assert time.monotonic() < deadline, [
                    thread.read_text() for thread in Path(f"/proc/{held.pid}/task").glob("*/wchan")
                ]
            with pytest.raises(SresError, match="another sresd"), only_reader(log):
                pass
            held.stdin.write(b"end\n")
            held.stdin.flush()
            while psutil.Process(held.pid).status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, "it ends"
            with only_reader(log):
                assert "threads that hang in the kernel" in caplog.text
        finally:
            (dead_server.parents[1] / "release").touch()


def test_the_node_is_named_by_option_slurmd_or_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    assert identity.node_name("n7") == "n7"
    assert identity.node_name() == "n3"
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.setattr("socket.gethostname", lambda: "gpu17.example.org")
    assert identity.node_name() == "gpu17"


@pytest.mark.parametrize(
    "uuid",
    [
        "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
        "03000200-0400-0500-0006-000700080009",
        "00020003-0004-0005-0006-000700080009",
        "12345678-1234-5678-1234-567812345678",
        "To be filled by O.E.M.",
        "Not Settable",
        "",
    ],
)
def test_a_uuid_that_other_machines_have_too_is_none(tmp_path: Path, uuid: str) -> None:
    (tmp_path / "product_uuid").write_text(f"{uuid}\n")
    assert identity.instance(tmp_path / "no", tmp_path) == ""


def test_who_the_machine_is(tmp_path: Path) -> None:
    (tmp_path / "dmi").mkdir()
    (tmp_path / "dmi/product_uuid").write_text(f"{UUID}\n")
    assert identity.instance(tmp_path, tmp_path / "dmi") == UUID
    (tmp_path / "dmi/board_asset_tag").write_text("i-0123456789abcdef0\n")
    assert identity.instance(tmp_path, tmp_path / "dmi") == "i-0123456789abcdef0"
    (tmp_path / "instance-id").write_text("lab-1\n")
    assert identity.instance(tmp_path, tmp_path / "dmi") == "lab-1"
    assert identity.instance(tmp_path / "no", tmp_path / "no") == ""
    assert identity.boot_id(tmp_path) == identity.boot_id(tmp_path) != ""
    (tmp_path / "boot-id").write_text("b1\n")
    assert identity.boot_id(tmp_path) == "b1"
