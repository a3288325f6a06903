"""The state for Slurm's hooks, and the program that reads it."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from worlds import FakeClock

from slurm_resilience import config
from slurm_resilience.agent.hook_state import (
    CHECK_PAUSE_SECONDS,
    WRITE_SECONDS,
    HookState,
    hook_directory,
)
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.model import CheckResult, Finding, Severity

HOOK = Path(__file__).resolve().parents[2] / "packaging" / "slurm-hook"


class Desk:
    """One sresd's state, its outbox, and the checks that hooks asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.uptime = folder / "uptime"
        self.boot(1000)
        self.outbox, self.clock = Outbox(), FakeClock()
        self.checked: list[float] = []
        self.ran = threading.Event()
        self.state = HookState(
            self.folder, self.outbox, self._check, self.clock, threading.Event(), self.uptime
        )

    def _check(self, seconds: float) -> None:
        self.checked.append(seconds)
        self.ran.set()

    def boot(self, seconds: int) -> None:
        self.uptime.write_text(f"{seconds}.25 77.0\n")

    def finds(self, *severities: Severity) -> None:
        found = tuple(Finding("gpu", one, f"GPU 0:\n{one}", 5.0, code=one) for one in severities)
        self.outbox.result(CheckResult("gpu", "fail" if found else "pass", "", found))

    def read(self) -> list[str]:
        self.state.look()
        return (self.folder / "state").read_text().splitlines()


def test_the_gravest_finding_is_the_state(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.read() == ["verdict unjudged", "text ", "uptime 1000"]
    desk.finds()
    assert desk.read()[0] == "verdict healthy"
    desk.finds(Severity.MONITOR, Severity.REPLACE, Severity.RESET)
    assert desk.read() == ["verdict replace", "text GPU 0: replace", "uptime 1000"]
    desk.finds(Severity.MONITOR)
    assert desk.read()[0] == "verdict monitor"


def test_an_unchanged_state_is_written_again_before_it_is_old(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.read()[2] == "uptime 1000"
    desk.boot(1003)
    desk.clock.pass_time(WRITE_SECONDS / 2)
    assert desk.read()[2] == "uptime 1000"
    desk.clock.pass_time(WRITE_SECONDS)
    assert desk.read()[2] == "uptime 1003"


def test_a_full_disk_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    desk.read()
    desk.finds(Severity.REBOOT)
    (desk.folder / "state.new").mkdir()  # cannot be written, as on a full disk
    for _ in range(5):
        desk.clock.pass_time(WRITE_SECONDS)
        assert desk.read()[0] == "verdict unjudged"
    assert len(caplog.records) == 1
    (desk.folder / "state.new").rmdir()
    assert desk.read()[0] == "verdict reboot"


def test_nothing_is_written_where_users_may_put_a_link(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """agent.hook_directory = "/tmp": root would write into whatever a user's link leads to."""
    desk, precious = Desk(tmp_path), tmp_path / "precious"
    precious.write_text("a file of root's")
    desk.folder.mkdir()
    desk.folder.chmod(0o1777)
    (desk.folder / "state.new").symlink_to(precious)
    for _ in range(3):
        desk.clock.pass_time(WRITE_SECONDS)
        desk.state.look()
    assert precious.read_text() == "a file of root's"
    assert len(caplog.records) == 1
    assert f"{desk.folder} may be written by all users" in caplog.text
    desk.folder.chmod(0o755)
    (desk.folder / "state.new").unlink(missing_ok=True)
    assert desk.read()[0] == "verdict unjudged"


def test_hooks_that_ask_again_and_again_have_the_checks_run_once_in_a_while(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    desk.read()
    assert desk.checked == []
    for number in range(1, 100):
        (desk.folder / "wanted").write_text("\n")
        os.utime(desk.folder / "wanted", ns=(number, number))
        desk.state.look()
    assert desk.ran.wait(30)
    assert len(desk.checked) == 1
    # The last one came after these checks had begun.
    desk.ran.clear()
    desk.clock.pass_time(CHECK_PAUSE_SECONDS)
    desk.state.look()
    assert desk.ran.wait(30)
    desk.clock.pass_time(CHECK_PAUSE_SECONDS)
    desk.state.look()
    assert len(desk.checked) == 2


def test_where_the_state_lies() -> None:
    agent = config.AgentSettings()
    assert hook_directory(agent, {}) is None
    assert hook_directory(agent, {"RUNTIME_DIRECTORY": "/run/sresd:/run/b"}) == Path("/run/sresd")
    own = config.AgentSettings(hook_directory="/run/mine")
    assert hook_directory(own, {}) == Path("/run/mine")


class Site:
    """A node with the hook as an administrator installs it."""

    def __init__(self, folder: Path) -> None:
        self.conf, self.folder = folder / "hooks.conf", folder / "run"
        self.hook = folder / "slurm-hook"
        text = HOOK.read_text().replace("/etc/slurm-resilience/hooks.conf", str(self.conf))
        self.hook.write_text(text)
        self.hook.chmod(0o755)
        self.configure()

    def configure(self, *lines: str) -> None:
        self.conf.write_text("\n".join((f"directory={self.folder}", *lines, "")))

    def write(self, verdict: str, age: int = 0) -> None:
        self.folder.mkdir(exist_ok=True)
        now = int(Path("/proc/uptime").read_text().partition(".")[0])
        text = f"verdict {verdict}\ntext GPU 0 is $(lost) `id`\nuptime {now - age}\n"
        (self.folder / "state").write_text(text)

    def call(self, context: str = "") -> tuple[int, str]:
        """As slurmd does: without a PATH."""
        env = {"SLURM_SCRIPT_CONTEXT": context} if context else {}
        done = subprocess.run([str(self.hook)], env=env, capture_output=True, text=True, timeout=30)
        assert done.stdout == ""
        return done.returncode, done.stderr.strip()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("healthy", 0), ("monitor", 0), ("restart-job", 0), ("reset", 1), ("reboot", 1)],
)
def test_a_job_starts_on_a_node_without_a_fault(site: Site, verdict: str, code: int) -> None:
    site.write(verdict)
    said = f"sresd: {verdict}: GPU 0 is $(lost) `id`" if code else ""
    assert site.call("prolog_slurmd") == site.call() == (code, said)
    assert site.call("epilog_slurmd") == (0, ""), "a job that has ended is no reason to drain"


def test_nothing_in_a_directory_of_users_is_read_or_written(site: Site) -> None:
    """Root would empty what a link leads to, and wait for ever at a pipe."""
    precious = site.conf.with_name("precious")
    precious.write_text("precious")
    site.write("replace")
    site.folder.chmod(0o1777)
    (site.folder / "wanted").symlink_to(precious)
    for context in ("prolog_slurmd", "epilog_slurmd", ""):
        code, said = site.call(context)
        assert code == 0 and "not root's alone" in said
    assert precious.read_text() == "precious"
    site.configure("unknown=closed")
    assert site.call("prolog_slurmd")[0] == 1


def test_a_pipe_in_place_of_the_state_holds_no_job_up(site: Site) -> None:
    site.folder.mkdir()
    os.mkfifo(site.folder / "state")
    assert site.call("prolog_slurmd") == (0, "")


@pytest.mark.parametrize("age", [None, 40, -1000])
def test_an_unknown_state_is_what_the_site_chose(site: Site, age: int | None) -> None:
    """sresd was never started, hangs, or the state is of another boot."""
    if age is not None:
        site.write("replace" if age > 0 else "healthy", age)
    assert site.call("prolog_slurmd") == (0, "")
    site.configure("unknown=closed")
    code, said = site.call("prolog_slurmd")
    assert code == 1 and said.startswith("sresd: unknown: sresd has written no state")
    assert site.call("epilog_slurmd") == (0, "")
    if age == 40:
        site.configure("oldest=2000")
        assert site.call("prolog_slurmd")[0] == 1, "it is old enough, and says replace"


@pytest.mark.parametrize("line", ["oldest=30s", "oldest=0.5m", "oldest=", f"oldest={10**25}"])
def test_a_length_that_is_no_number_is_told_and_the_default_counts(site: Site, line: str) -> None:
    """No state was ever too old: a sresd that had ended vouched for its node for ever."""
    site.write("replace", age=40)
    site.configure(line)
    code, said = site.call("prolog_slurmd")
    assert code == 0 and said.startswith(f"sresd: {site.conf}: oldest=") and "\n" not in said
    site.write("replace")
    assert site.call("prolog_slurmd")[0] == 1


@pytest.mark.parametrize("line", ["unknown=close", "unknown=Closed", "unknown="])
def test_a_word_that_is_none_is_told_and_the_default_counts(site: Site, line: str) -> None:
    site.configure(line)
    code, said = site.call("prolog_slurmd")
    assert code == 0 and said.startswith(f"sresd: {site.conf}: unknown=") and "\n" not in said


@pytest.mark.parametrize("line", ["unknown=(", "if", "exit 1", "oldest=$x", 'a="', "oldst=60"])
def test_a_line_that_is_none_is_told_and_drains_no_node(site: Site, line: str) -> None:
    """Slurm drains the node whose prolog fails: such a line would have taken the whole cluster."""
    site.write("healthy")
    site.configure(line)
    code, said = site.call("prolog_slurmd")
    assert code == 0 and said.startswith(f"sresd: {site.conf}: ") and "\n" not in said
    site.write("replace")
    assert site.call("prolog_slurmd")[0] == 1
    assert site.call("epilog_slurmd")[0] == 0


def test_lines_may_have_blanks_and_comments(site: Site) -> None:
    """And the line ends of another system."""
    site.configure("", "# longer", "  # and", "unknown = closed\r", " oldest= 60 ", "\r")
    assert site.call("epilog_slurmd") == (0, "")
    assert site.call("prolog_slurmd")[0] == 1


@pytest.mark.parametrize("text", ["", "uptime\n", "verdict healthy\nuptime 12x\n", "\0\xff"])
def test_a_state_that_cannot_be_read_is_unknown(site: Site, text: str) -> None:
    site.folder.mkdir()
    (site.folder / "state").write_text(text)
    assert site.call("prolog_slurmd") == (0, "")
    site.configure("unknown=closed")
    assert site.call("prolog_slurmd")[0] == 1


def test_an_epilog_and_a_health_check_ask_for_checks_and_a_prolog_does_not(site: Site) -> None:
    site.write("healthy")
    wanted = site.folder / "wanted"
    site.call("prolog_slurmd")
    assert not wanted.exists()
    site.call("epilog_slurmd")
    os.utime(wanted, ns=(1, 1))
    site.call()
    assert wanted.stat().st_mtime_ns > 1
    wanted.unlink()
    wanted.mkdir()  # cannot be written, as on a full disk
    assert site.call("epilog_slurmd") == site.call() == (0, "")
