"""`sres` as a process border: one line for what goes wrong, and nothing imported needlessly."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.cli.controller import ClusterView
from slurm_resilience.cli.main import _COMMANDS, call
from slurm_resilience.errors import SlurmUnreachable, SresError, WireError
from slurm_resilience.model import REPLACE, Node
from slurm_resilience.slurm.fake import FakeSlurm


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
        (["nod"], "No such command"),
        (["status", "--format", "xml"], "'xml' is not one of"),
        (["node", "replace"], "Missing argument 'HOSTLIST'"),
        (["node", "history", "n1", "--limit", "0"], "--limit"),
        (["node", "replace", "n1", "--fast"], "No such option"),
        (["run", "--", "mpirun", "x"], "'mpirun' is not srun"),
        (["run"], "srun is missing"),
        (["node", "show", "n[1-"], "not a hostlist"),
        (["node", "show", "@all"], "not a hostlist"),
        (["job", "show", "twelve"], "not a job id"),
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


def test_without_sresctld_slurms_word_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Fake(FakeSlurm([Node("n1", "DOWN"), Node("n2", "IDLE")]), WireError("nobody there"))
    for command in (["status"], ["node", "list"], ["node", "show", "n1"]):
        assert call(command, cluster) == 8
        out, err = capsys.readouterr()
        assert "DOWN" in out
        assert err == "sres: error: nobody there\n"


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


def test_the_configuration_is_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "sres.toml"
    file.write_text("[controller]\nport = 7000\n")
    assert call(["check", "config", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"
    file.write_text("[controler]\n")
    assert call(["--config", str(file), "check", "config"]) == 3
    assert "did you mean 'controller'?" in capsys.readouterr().err


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
