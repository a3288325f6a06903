"""`sres` as a process border: one line for what goes wrong, and nothing imported needlessly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.cli import tables
from slurm_resilience.cli.controller import ClusterView
from slurm_resilience.cli.main import _COMMANDS, call, cli
from slurm_resilience.cli.orders.pause import _is_taken_up
from slurm_resilience.errors import SlurmUnreachable, SresError, WireError
from slurm_resilience.model import REPLACE, Node
from slurm_resilience.site_check import probes
from slurm_resilience.wire.messages import Status, StatusRequest


class Fake(ClusterView):
    """A cluster without processes: Slurm is the fake, sresctld's answers are given."""

    def __init__(self, slurm: FakeSlurm, status: dict[str, Any] | SresError) -> None:
        super().__init__()
        self.client = slurm
        self._status = status

    def status(self) -> dict[str, Any]:
        if isinstance(self._status, SresError):
            raise self._status
        return self._status

    def history(self, node: str = "", limit: int = 1000) -> list[dict[str, Any]]:
        return []


def status(*names: str, **more: Any) -> dict[str, Any]:
    return {
        "version": "0",
        "at": time.time(),
        "uptime": 1.0,
        "mode": "automatic",
        "paused": "",
        "can_replace": True,
        "permits_expansion": True,
        "sentence": "",
        "nodes": {n: {"verdict": "healthy", "why": "", "sresd": "connected"} for n in names},
        "jobs": {},
    } | more


def test_every_command_exists_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in _COMMANDS:
        assert call([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: sres {name}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nod"], "No such command 'nod'. Did you mean 'node'?"),
        (["status", "--format", "xml"], "'xml' is not one of"),
        (["node", "replace"], "Missing argument 'HOSTLIST'"),
        (["node", "history", "n1", "--limit", "0"], "--limit"),
        (["node", "replace", "n1", "--fast"], "No such option"),
        (["run", "--", "mpirun", "x"], "'mpirun' is not srun"),
        (["run"], "srun is missing"),
        (["node", "show", "n[1-"], "not a hostlist"),
        (["node", "show", "@all"], "not a hostlist"),
        (["job", "show", "twelve"], "not a job id"),
        (["job", "show", "12_1"], "squeue -h -r -j 12_1 -o %A shows"),
        (["job", "resize", "12_1", "3"], "squeue -h -r -j 12_1 -o %A shows"),
        (["job", "show", "0"], "not a job id"),
        (["incident", "show", "9" * 22], "'ID'"),
        (["events", "--incident", "9" * 22], "'--incident'"),
        (["events", "--job", "9" * 22], "'--job'"),
        (["node", "list", ""], "not a hostlist"),
        (["events", " "], "not a hostlist"),
        (["incident", "list", "n[1-"], "not a hostlist"),
        (["review", ""], "not a hostlist"),
        (["events", "--since", ""], "--since ''"),
        (["node", "watch", "n1", "--timeout", "nan"], "no number"),
        (["node", "watch", "n1", "--timeout", "1e999"], "no number"),
        (["drill", "open", "n1", "--minutes", "nan"], "no number"),
        (["check", "run", "n1", "--only", " ,"], "names no check"),
        (["deepcheck", "run", "n1", "--only", ""], "names no check"),
        (["deepcheck", "watch", ""], "not a hostlist"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert call(words, Fake(FakeSlurm(), status())) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("sres: error: ")
    assert err.count("\n") == 1
    assert said in err


def test_an_error_stays_one_clean_line(capsys: pytest.CaptureFixture[str]) -> None:
    slurm = FakeSlurm()
    slurm.refusals["nodes"] = SlurmUnreachable("first\nsecond \x1b[31mred")
    assert call(["status"], Fake(slurm, status())) == 4
    assert capsys.readouterr().err == "sres: error: first second ?[31mred\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(36, "File name too long", "x" * 5000), f"{'x' * 150}…"),
        (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogates not allowed"), "'\\udcff' is no"),
    ],
)
def test_what_the_machine_refuses_is_one_line_of_bounded_length(
    capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    slurm = FakeSlurm()
    slurm.refusals["nodes"] = error  # type: ignore[assignment]
    assert call(["node", "list"], Fake(slurm, status())) in (1, 2)
    err = capsys.readouterr().err
    assert err.startswith("sres: error: ") and err.count("\n") == 1
    assert said in err and len(err) < 400


def test_a_configuration_without_a_name_is_not_the_default_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As of a variable that is not set: the command would ask another cluster."""
    assert call(["--config", "", "check", "config"]) == 3
    assert "is empty" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["events", "history", "show", "incidents"])
def test_a_node_that_was_removed_from_slurm_keeps_its_history(
    capsys: pytest.CaptureFixture[str], what: str
) -> None:
    event = {"id": 1, "at": 5.0, "node": "n7", "kind": "removed", "text": "gone", "incident": 1}

    class Connected:
        def __enter__(self) -> Connected:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is open."""

        def ask(self, request: StatusRequest) -> Status:
            events = [event] if request.node == "n7" else []
            return Status({"events": events, "incidents": []})

    class Told(Fake):
        def connect(self) -> Any:
            return Connected()

        def history(self, node: str = "", limit: int = 1000) -> list[dict[str, Any]]:
            return [event]

    words = {
        "events": ["events"],
        "incidents": ["incident", "list"],
        "history": ["node", "history"],
        "show": ["node", "show"],
    }[what]
    cluster = Told(FakeSlurm(2), status("n1", "n2"))
    assert call([*words, "n7"], cluster) == 0
    out = capsys.readouterr().out
    assert "no incident" in out if what == "incidents" else "removed" in out and "gone" in out
    assert call([*words, "n[7-8]"], cluster) == 5
    assert call([*words, "n9"], cluster) == 5
    assert "Slurm knows no node n9; it has n[1-2]" in capsys.readouterr().err
    if what == "show":
        assert call([*words, "n7", "--format", "json"], cluster) == 0
        (view,) = json.loads(capsys.readouterr().out)
        assert (view["state"], view["health"]) == ("REMOVED", "removed")


@pytest.mark.parametrize("reason_at", ["t1", "t2"])
def test_a_node_that_was_given_up_before_it_is_watched_is_told(
    capsys: pytest.CaptureFixture[str], reason_at: str
) -> None:
    """A program that fails at once has done so when `sres node watch` begins."""
    states = ("set-aside", "repairing", "quarantined")
    events = [
        {"id": n, "at": n, "node": "n1", "kind": kind, "text": "", "incident": 4}
        | {"data": {"state": state}}
        for n, kind, state in zip(
            (1, 2, 3), ("requested", "replacing", "gave-up"), states, strict=True
        )
    ]
    told = {"nodes": {"n1": {"incident": None, "gave_up": {"id": 4, "reason_at": "t1"}}}}

    class Connected:
        def ask(self, request: StatusRequest) -> Status:
            return Status({"events": events[::-1]} if request.what == "history" else told)

        def receive(self, seconds: float) -> None:
            """Nothing comes."""

        def close(self) -> None:
            """Nothing is open."""

    class Watched(Fake):
        def connect(self) -> Any:
            return Connected()

    node = Node("n1", "IDLE", frozenset({"FAIL"}), reason=REPLACE, reason_at=reason_at)
    cluster = Watched(FakeSlurm([node]), status("n1"))
    assert call(["node", "watch", "n1", "--timeout", "0.01"], cluster) == 1
    out, err = capsys.readouterr()
    # Asked for once more meanwhile, its end is yet to come.
    assert ("gave-up" in out, "sresctld gave up" in err) == (reason_at == "t1",) * 2


def test_a_misspelled_label_is_no_good_news(capsys: pytest.CaptureFixture[str]) -> None:
    marked = Node("n2", "IDLE", comment="[sres health-status=pending-replacement fault-type=xid]")
    cluster = Fake(FakeSlurm([Node("n1", "IDLE"), marked]), status("n1", "n2"))
    assert call(["node", "list", "--health-status", "pending"], cluster) == 0
    out = capsys.readouterr().out
    assert (
        out == "no node has health-status 'pending'; they have pending-replacement, schedulable\n"
    )
    words = ["--health-status", "schedulable", "--fault-type", "xid"]
    assert call(["node", "list", *words], cluster) == 0
    assert capsys.readouterr().out == "no such node\n"


def test_without_sresctld_slurms_word_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Fake(FakeSlurm([Node("n1", "DOWN"), Node("n2", "IDLE")]), WireError("no answer"))
    for command in (["status"], ["node", "list"], ["node", "show", "n1"]):
        assert call(command, cluster) == 8
        out, err = capsys.readouterr()
        assert "DOWN" in out
        assert err == "sres: error: no answer\n"


def test_one_wrong_name_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    slurm = FakeSlurm(2)
    assert call(["node", "replace", "n[1-4]"], Fake(slurm, status("n1", "n2"))) == 5
    assert capsys.readouterr().err == ("sres: error: Slurm knows no node n[3-4]; it has n[1-2]\n")
    assert slurm.calls == []


def test_replace_says_what_is_done_and_what_follows(capsys: pytest.CaptureFixture[str]) -> None:
    marked = Node("n2", "IDLE", frozenset({"FAIL"}), reason=REPLACE)
    slurm = FakeSlurm([Node("n1", "IDLE"), marked])
    assert call(["node", "replace", "n[1-2]"], Fake(slurm, status("n1", "n2"))) == 0
    assert slurm.calls == [("set_node", ("n1",), "fail", REPLACE)]
    assert capsys.readouterr().out.splitlines() == [
        "n2: Action:Replace already (IDLE+FAIL); left as it is",
        "n1: fail, Action:Replace; no job runs on it",
        "replaced as soon as no job is left on it; follow it: sres node watch n[1-2]",
    ]


def test_the_picture_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    near = Node("n2", "IDLE", frozenset({"DRAIN"}), reason="action:replace", reason_by="bob")
    slurm = FakeSlurm([Node("n1", "IDLE"), near])
    number = slurm.submit(1, uid=0)
    jobs = {str(number): {"attempt": 2, "nodes": ["n1"], "since": 1.0}}
    assert call(["status", "--format", "json"], Fake(slurm, status("n1", "n2", jobs=jobs))) == 0
    picture = json.loads(capsys.readouterr().out)
    assert picture["states"] == {"ALLOCATED": ["n1"], "IDLE+DRAIN": ["n2"]}
    assert picture["controller"]["answers"] is True
    (job,) = picture["jobs"]
    assert (job["job"], job["user"], job["state"], job["attempt"]) == (number, "root", "RUNNING", 2)
    assert picture["near_misses"] == [
        {"node": "n2", "reason": "action:replace", "by": "bob", "meant": REPLACE}
    ]


def test_a_failed_replacement_and_an_alarm_stand_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest gives it to the processes that it starts with -n: long lines would be folded.
    monkeypatch.delenv("COLUMNS", raising=False)
    now = time.time()
    incident = {
        "id": 4, "node": "n1", "state": "empty", "kind": "dead", "action": REPLACE, "attempts": 1,
        "opened": now - 9, "next_try": now + 50, "reason": "no beat", "closed": 0.0,
    }  # fmt: skip
    picture = status("n1", "n2", permits_expansion=False)
    picture["nodes"]["n1"]["incident"] = incident
    picture["alarms"] = [
        {"at": now - 5, "node": "n2", "job": 0, "text": "lasting", "over": 0.0},
        {"at": now - 5, "node": "", "job": 7, "text": "ended", "over": now - 2},
    ]
    why = "the program exited 1: no spare; again in 60 s (attempt 1 failed)"

    class Told(Fake):
        def history(self, node: str = "", limit: int = 1000) -> list[dict[str, Any]]:
            assert node == "n1"
            before = {"kind": "replacement-failed", "incident": 3, "text": "an older one"}
            return [before, {"kind": "replacement-failed", "incident": 4, "text": why}]

    assert call(["status"], Told(FakeSlurm(2), picture)) == 0
    lines = capsys.readouterr().out.splitlines()
    (failed,) = [line for line in lines if line.startswith("failed")]
    assert f"attempt 1 for n1: {why}; next try in " in failed
    assert any(line.startswith("warning") and "permit_job_expansion" in line for line in lines)
    lasting, ended = lines[-2:]
    assert lasting.endswith("lasting")
    assert "ended (over since " in ended


def test_the_configuration_is_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "sres.toml"
    file.write_text("[controller]\nport = 7000\n")
    assert call(["check", "config", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"
    file.write_text("[controler]\n")
    assert call(["--config", str(file), "check", "config"]) == 3
    assert "did you mean 'controller'?" in capsys.readouterr().err
    file.write_text('[checks]\nprofile = "no-such-type"\n')
    assert call(["check", "config", str(file)]) == 3
    assert "no profile 'no-such-type'" in capsys.readouterr().err


def test_what_sresctld_would_not_start_with_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, command = tmp_path / "sres.toml", tmp_path / "page"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o777)
    state_dir = tmp_path / "state"
    file.write_text(
        f'[controller]\nstate_dir = "{state_dir}"\n[sinks.page]\ncommand = ["{command}"]\n'
    )
    monkeypatch.setattr(ClusterView, "is_privileged", True)
    for is_here, code in ((True, 3), (False, 0)):
        monkeypatch.setattr(probes, "is_this_machine", lambda _, is_here=is_here: is_here)
        assert call(["check", "config", str(file)], Fake(FakeSlurm(), status())) == code
    assert "sinks.page.command: " in capsys.readouterr().err
    monkeypatch.setattr(probes, "is_this_machine", lambda _: True)
    command.chmod(0o755)
    assert call(["check", "config", str(file)], Fake(FakeSlurm(), status())) == 0


def test_a_faulty_node_under_repair_is_not_over(capsys: pytest.CaptureFixture[str]) -> None:
    """To the breaker it is: a marked node does not fail once more."""
    faults = [{"node": n, "began": 1.0, "is_over": True, "cause": "xid 79"} for n in ("n1", "n2")]
    said = status("n1", "n2", breaker={"faults": faults})
    said["nodes"]["n1"]["incident"] = {"state": "repairing"}
    assert call(["breaker"], Fake(FakeSlurm(), said)) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert "repairing" in first and "over" in second


@pytest.mark.parametrize(
    ("told", "reason", "holds"),
    [
        ("a b", "a b", True),
        ("a" * 500, "a" * 900, True),  # sresctld keeps the beginning of a long one
        ("", "a", False),
        ("old", "new", False),
        ("a", "", False),
        ("", "", True),
    ],
)
def test_a_pause_that_is_taken_up_is_known(told: str, reason: str, holds: bool) -> None:
    assert _is_taken_up(told, reason) is holds


def test_ctrl_c_is_130() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    slurm = FakeSlurm()
    slurm.before["nodes"] = interrupt
    assert call(["status"], Fake(slurm, status())) == 130


def test_help_and_run_import_no_tables_and_no_torch() -> None:
    code = (
        "import sys; from slurm_resilience.cli.main import call\n"
        "call(['--help']); call(['run', 'nothing'])\n"
        "assert not {'rich', 'torch', 'ClusterShell', 'sqlite3'} & set(sys.modules), sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def groups(group: click.Group, path: str = "sres") -> Iterator[tuple[str, click.Group]]:
    yield path, group
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, click.Group):
                yield from groups(command, f"{path} {name}")


@pytest.mark.parametrize(("path", "group"), list(groups(cli)))
def test_no_line_of_help_is_cut(
    path: str, group: click.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([*path.split()[1:], "--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2]
    assert listed
    assert "..." not in listed
    assert "e.g." not in listed


def test_colour_is_for_terminals_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert tables.has_colour()
    red = tables.table(("NODE", "STATE"), [("n1", "DOWN"), ("n2", "IDLE")]).splitlines()
    assert "\033[1;31mDOWN" in red[1]
    assert "\033" not in red[2]
    assert tables.field("alarms", "x", alert=True).startswith("\033[31m\033[1malarms")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in tables.table(("STATE",), [("DOWN",)])
    assert tables.field("alarms", "x", alert=True) == "alarms     x"


def test_a_closed_standard_output_is_no_failure() -> None:
    """A script that calls `sres node replace n7 >&-` must not take what was done for undone."""
    done = subprocess.run(
        [sys.executable, "-m", "slurm_resilience.cli.main", "version"],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: os.close(1),
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
