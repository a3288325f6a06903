"""`sres check site` and `sres check config`: each fault is named, and the first of them counts."""

from __future__ import annotations

import dataclasses
import json
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.cli.controller import ClusterView
from slurm_resilience.cli.main import call
from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import AuthError, SlurmUnreachable, WireError
from slurm_resilience.model import Node
from slurm_resilience.site_check import judges, probes, sequence
from slurm_resilience.site_check.judges import Outcome, PluginSeen, PortSeen, ProgramSeen
from slurm_resilience.slurm.client import ClusterInfo


def info(version: str = "24.11.5", **raw: str) -> ClusterInfo:
    return ClusterInfo(
        cluster="main",
        version=version,
        controllers=("localhost",),
        slurmctld_port=6817,
        slurm_user_uid=0,
        munge_socket="",
        scheduler_parameters=raw.pop("scheduler", "bf_interval=30,permit_job_expansion"),
        accounting=raw.pop("accounting", "accounting_storage/slurmdbd"),
        raw=raw,
    )


PROLOG = {"Prolog[0]": "/p"}
"""As 24.11 and later ones print it."""
NO_HOLD = "nohold_on_prolog_fail"


# --- the judges -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("judgement", "outcome", "said"),
    [
        (judges.judge_slurm(info()), "ok", "24.11.5"),
        (judges.judge_slurm(info("22.05.8")), "ok", "22.05.8"),
        (judges.judge_slurm(info("21.08.5")), "wrong", "older than 22.05"),
        (judges.judge_slurm(info("")), "wrong", "older"),
        (judges.judge_expansion(info()), "ok", ""),
        (judges.judge_expansion(info(scheduler="(null)")), "note", "requeued"),
        (judges.judge_accounting(info(accounting="accounting_storage/none")), "ok", ""),
        (
            judges.judge_accounting(info("22.05.8", accounting="accounting_storage/none")),
            "note",
            "once in its life",
        ),
        (judges.judge_settings(info(ReturnToService="1", MinJobAge="300 sec")), "ok", ""),
        (judges.judge_settings(info(ReturnToService="2")), "note", "ReturnToService=2"),
        (judges.judge_settings(info(MinJobAge="5 sec")), "note", "MinJobAge=5"),
        (judges.judge_prolog_flags(info()), "ok", "no Prolog"),
        (judges.judge_prolog_flags(info(Prolog="(null)")), "ok", "no Prolog"),
        (judges.judge_prolog_flags(info(Prolog="/p", PrologFlags="(null)")), "note", "lacks Alloc"),
        (judges.judge_prolog_flags(info(**PROLOG, PrologFlags="Alloc,NoHold")), "ok", "Alloc"),
        (judges.judge_prolog_hold(info()), "ok", "no Prolog"),
        (judges.judge_prolog_hold(info(**PROLOG)), "note", "requeued held"),
        (judges.judge_prolog_hold(info(**PROLOG, scheduler=NO_HOLD)), "ok", NO_HOLD),
        (judges.judge_munge(True), "ok", ""),
        (judges.judge_munge(False), "wrong", "munge"),
        (judges.judge_port(PortSeen("c", 1)), "ok", "c port 1"),
        (judges.judge_port(PortSeen("c", 1, refused=True)), "wrong", "does not run there"),
        (judges.judge_port(PortSeen("c", 1, fault="timed out")), "wrong", "timed out"),
        (judges.judge_program(ProgramSeen((), "c", True)), "note", "wait for a person"),
        (judges.judge_program(ProgramSeen(("/p",), "c", False)), "skipped", "only c"),
        (judges.judge_program(ProgramSeen(("/p",), "c", True, "/p is not")), "wrong", "/p is not"),
        (judges.judge_program(ProgramSeen(("/p",), "c", True)), "ok", "/p"),
        (judges.judge_program(ProgramSeen((), "c", True, by="slurm-power")), "ok", "slurm-power"),
    ],
)
def test_what_each_judge_says(judgement: judges.SiteJudgement, outcome: str, said: str) -> None:
    assert judgement.outcome == outcome
    assert said in judgement.text


@pytest.mark.parametrize(
    ("changes", "outcome", "said"),
    [
        ({}, "ok", "loads /p/sres.so"),
        ({"has_srun": False}, "skipped", "srun"),
        ({"path": ""}, "wrong", "does not name"),
        ({"exists": False}, "wrong", "/p/sres.so does not exist"),
        ({"listed": False}, "wrong", "another release"),
        ({"unknown": "supervisr=/x"}, "wrong", "does not know 'supervisr=/x'"),
        ({"times": 2}, "note", "loads the plugin 2 times"),
        ({"protocol": 0}, "wrong", "of another release than this sres (protocol 0 and"),
    ],
)
def test_the_plugin(changes: dict[str, Any], outcome: str, said: str) -> None:
    seen = PluginSeen("/e/plugstack.conf", True, True, "/p/sres.so", True, "/v/sres-resume")
    judgement = judges.judge_plugin(dataclasses.replace(seen, **changes))
    assert judgement.outcome == outcome
    assert said in judgement.text


def test_the_supervisor() -> None:
    seen = PluginSeen("/e", True, True, "/p/sres.so", True, "/v/sres-resume")
    assert judges.judge_supervisor(seen).outcome == "ok"
    assert (
        judges.judge_supervisor(dataclasses.replace(seen, supervisor_fault="absent")).outcome
        == "wrong"
    )


def test_what_stands_behind_the_plugin() -> None:
    assert probes.plugin_arguments(["supervisor=/x"]) == ("/x", "")
    # Where no line names one, the plugin's default must be there.
    assert probes.plugin_arguments([]) == (probes.DEFAULT_SUPERVISOR, "")
    assert probes.plugin_arguments(["supervisr=/x"]) == (probes.DEFAULT_SUPERVISOR, "supervisr=/x")
    source = Path(__file__).parents[2] / "spank" / "common.c"
    assert f'"{probes.DEFAULT_SUPERVISOR}"' in source.read_text()


@pytest.mark.parametrize(
    ("data", "outcome", "said"),
    [
        ({}, "ok", "read Slurm 1 s ago"),
        ({"at": 50.0}, "wrong", "50 s ago"),
        ({"blind": "scontrol: timed out"}, "wrong", "cannot read Slurm"),
        ({"paused": "a switch"}, "note", "a switch"),
        ({"mode": "none"}, "note", "recovery.mode"),
    ],
)
def test_sresctlds_own_word(data: dict[str, Any], outcome: str, said: str) -> None:
    told = {"version": "1", "at": 99.0, "paused": "", "mode": "automatic"} | data
    judgement = judges.judge_controller(told, 100.0, 2.0)
    assert judgement.outcome == outcome
    assert said in judgement.text


def test_an_sresctld_that_has_never_read_slurm_says_why() -> None:
    told = {"blind": "scontrol: timed out", "blind_since": 99.0}
    judgement = judges.judge_controller(told, 100.0, 2.0)
    assert judgement.outcome == "wrong"
    assert "scontrol: timed out" in judgement.text


def test_nodes_out_of_service_need_no_sresd() -> None:
    nodes = (Node("n1", "IDLE"), Node("n2", "DOWN"), Node("n3", "IDLE"))
    assert judges.judge_nodes(nodes, {"n1": "connected", "n3": "connected"}).outcome == "ok"
    one = judges.judge_nodes(nodes, {"n1": "connected", "n3": "silent"})
    assert (one.outcome, one.text.split(":")[0]) == ("note", "n3")
    assert judges.judge_nodes(nodes, {}).outcome == "wrong"


# --- the probes -----------------------------------------------------------------------------------


def test_plugstack_is_read_with_what_it_includes(tmp_path: Path) -> None:
    (tmp_path / "plugstack.conf").write_text("# none\ninclude plugstack.conf.d/*.conf\n")
    (tmp_path / "plugstack.conf.d").mkdir()
    (tmp_path / "plugstack.conf.d" / "sres.conf").write_text("optional sres.so supervisor=/x # y\n")
    (tmp_path / "plugstack.conf.d" / "loop.conf").write_text(f"include {tmp_path}/plugstack.conf\n")
    lines = list(probes.plugstack_lines(tmp_path / "plugstack.conf"))
    assert ["optional", "sres.so", "supervisor=/x"] in lines
    assert list(probes.plugstack_lines(tmp_path / "absent.conf")) == []


def test_a_supervisor_that_only_root_can_start() -> None:
    # pytest's own directories are closed to other users.
    with tempfile.TemporaryDirectory() as name:
        site = Path(name)
        site.chmod(0o755)
        home, script = site / "home", site / "sres-resume"
        home.mkdir()
        (home / "python").touch(mode=0o755)
        script.write_text(f"#!{home}/python\n")
        script.chmod(0o755)
        assert probes.supervisor_fault(script) == ""
        script.write_text(f"#!{home}/python -sP\n")
        assert probes.supervisor_fault(script) == ""
        home.chmod(0o700)
        assert probes.supervisor_fault(script) == f"other users may not execute or enter {home}"
        assert "No such file" in probes.supervisor_fault(site / "absent")


def test_a_bare_plugin_name_is_looked_up_in_every_plugin_dir(tmp_path: Path) -> None:
    (tmp_path / "sres.so").touch()
    dirs = f"/nowhere:{tmp_path}"
    assert probes.plugin_path("sres.so", dirs) == tmp_path / "sres.so"
    assert probes.plugin_path("/a/sres.so", dirs) == Path("/a/sres.so")
    assert probes.plugin_path("sres.so", "/nowhere") == Path("/nowhere/sres.so")


def test_a_port_that_listens_and_one_that_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert probes.connect("127.0.0.1", port) == PortSeen("127.0.0.1", port)
    assert probes.connect("127.0.0.1", port).refused


def test_which_machine_this_is() -> None:
    assert probes.is_this_machine("127.0.0.1")
    assert not probes.is_this_machine("192.0.2.1")  # reserved for documentation
    with pytest.raises(WireError, match="does not resolve"):
        probes.resolve("no-such-host.invalid")


def test_why_a_program_cannot_be_started(tmp_path: Path) -> None:
    program = tmp_path / "replace"
    assert "does not exist" in probes.program_fault(str(program))
    program.write_text("#!/bin/sh\n")
    assert "is not executable" in probes.program_fault(str(program))
    program.chmod(0o755)
    assert probes.program_fault(str(program)) == ""
    assert "not an absolute path" in probes.program_fault("./replace")
    assert "not on PATH" in probes.program_fault("no-such-program")
    assert probes.program_fault("sh") == ""


# --- the sequence, and the command ----------------------------------------------------------------


class Site(ClusterView):
    """A site whose Slurm and sresctld are given."""

    def __init__(self, told: ClusterInfo | Exception) -> None:
        super().__init__()
        self._told = told

    @property
    def info(self) -> ClusterInfo:  # type: ignore[override]  # a property where a cache was
        if isinstance(self._told, Exception):
            raise self._told
        return self._told

    def status(self) -> dict[str, Any]:
        raise AuthError("munge authentication failed")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No file of this machine decides: a configuration of the test's, and a munge that works."""
    config = tmp_path / "sres.toml"
    config.write_text("")
    monkeypatch.setenv("SRES_CONFIG", str(config))
    monkeypatch.setattr(probes, "munge_round_trip", lambda site: True)
    monkeypatch.setattr(
        probes, "plugin", lambda site: PluginSeen("/e", True, True, "/p", True, "/s")
    )
    return config


def outcomes(site: Site) -> dict[str, Outcome]:
    return {c.name: j.outcome for c, j in sequence.run(site, SystemClock())}


def test_what_needs_a_wrong_one_is_skipped(quiet: Path) -> None:
    seen = outcomes(Site(SlurmUnreachable("no answer")))
    assert (seen["config"], seen["munge"], seen["slurm"]) == ("ok", "ok", "wrong")
    assert {seen[name] for name in ("plugin", "host", "port", "sresctld", "sresd")} == {"skipped"}


def test_the_first_wrong_one_gives_the_exit_code(
    quiet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        quiet.write_text(f"[controller]\nhost = '127.0.0.1'\nport = {port}\n")
        code = call(["check", "site", "--format", "json"], Site(info()))
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert (code, data["exit_code"], data["first_wrong"]) == (7, 7, "sresctld")
    assert err.startswith("sres: error: sresctld: munge authentication failed")
    results = {row["check"]: row["result"] for row in data["checks"]}
    assert (results["port"], results["program"], results["sresd"]) == ("ok", "note", "skipped")


def test_a_refused_port_is_told_with_what_to_do(
    quiet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    quiet.write_text(f"[controller]\nhost = '127.0.0.1'\nport = {port}\n")
    assert call(["check", "site"], Site(info())) == 8
    out, err = capsys.readouterr()
    assert "systemctl status sresctld" in err
    assert [line.split()[:2] for line in out.splitlines()][:3] == [
        ["CHECK", "RESULT"],
        ["config", "ok"],
        ["munge", "ok"],
    ]


def test_a_configuration_that_is_wrong_comes_first(
    quiet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet.write_text("[detect]\ndead_after = nan\n")
    assert call(["check", "site"], Site(info())) == 3
    assert "config: " in capsys.readouterr().err


def test_a_probe_that_hangs_is_wrong(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "LIMIT_SECONDS", 0.05)
    monkeypatch.setattr(probes, "munge_round_trip", lambda site: threading.Event().wait())
    assert outcomes(Site(info()))["munge"] == "wrong"


def test_check_config_refuses_a_program_that_is_not_there(
    quiet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet.write_text(f"[replace]\nprogram = ['{tmp_path}/replace']\n")
    assert call(["check", "config"], Site(info())) == 3
    assert "does not exist" in capsys.readouterr().err
    # Slurm does not say where sresctld runs: perhaps here.
    assert call(["check", "config"], Site(SlurmUnreachable("no answer"))) == 3
    # sresctld's machine is another one.
    quiet.write_text(
        f"[controller]\nhost = '192.0.2.1'\n[replace]\nprogram = ['{tmp_path}/replace']\n"
    )
    assert call(["check", "config"], Site(info())) == 0
