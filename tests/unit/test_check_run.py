"""`sres check run`: nodes run their checks now, and those that do not answer are named."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from slurm_resilience.cli.controller import ClusterView
from slurm_resilience.cli.main import call
from slurm_resilience.errors import NotPermitted, SresError
from slurm_resilience.model import CheckResult, Finding, Node, Severity
from slurm_resilience.wire.messages import ChecksRun, RunChecks

WELL = CheckResult("disk", "pass", "80 % free")
SICK = CheckResult(
    "gpu_count",
    "fail",
    "7 of 8 GPUs answer",
    (Finding("gpu_count", Severity.REBOOT, "7 of 8 GPUs answer", 5.0),),
)
UNJUDGED = CheckResult("dcgm_health", "unjudged", "DCGM is not installed (dcgmi)")
ANSWERS = {"n1": (WELL,), "n2": (WELL, SICK, UNJUDGED), "n4": (WELL, SICK, UNJUDGED)}


class Site(ClusterView):
    """Nodes that answer what they are told to."""

    def __init__(self, refuses: type[SresError] = SresError) -> None:
        super().__init__()
        self.refuses = refuses
        self.asked: list[tuple[str, RunChecks]] = []

    def named(self, hostlist: str) -> dict[str, Node]:
        return {name: Node(name, "IDLE") for name in hostlist.split(",")}

    def ask_node(self, node: str, kind: str, question: Any, seconds: float) -> msgspec.Raw:
        assert (kind, question.seconds < seconds) == (RunChecks.kind, True)
        self.asked.append((node, question))
        if node not in ANSWERS:
            raise self.refuses("its sresd is not connected")
        return msgspec.Raw(msgspec.msgpack.encode(ChecksRun(ANSWERS[node])))


def test_a_node_on_which_all_is_well() -> None:
    site = Site()
    assert call(["check", "run", "n1", "--only", "disk, memory"], site) == 0
    assert site.asked == [("n1", RunChecks(("disk", "memory"), 60.0))]


def test_what_does_not_pass_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert call(["check", "run", "n1,n2,n3,n4,n5"], Site()) == 1
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "n1: 1 check run, all passed",
        "n[2,4]: 3 checks run, 1 failed and 1 could not be judged",
        "n[3,5]: its sresd is not connected",
        "NODE    CHECK        RESULT    ASKS FOR  TEXT",
        "n[2,4]  gpu_count    fail      reboot    7 of 8 GPUs answer",
        "n[2,4]  dcgm_health  unjudged  -         DCGM is not installed (dcgmi)",
    ]


def test_json_has_every_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["check", "run", "n1,n3", "--format", "json"], Site()) == 1
    first, last = json.loads(capsys.readouterr().out)
    assert (first["node"], first["checks"][0]["text"], first["trouble"]) == ("n1", "80 % free", "")
    assert (last["checks"], last["trouble"]) == ([], "its sresd is not connected")


def test_who_may_not_ask_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["check", "run", "n3,n5"], Site(NotPermitted)) == 6
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
