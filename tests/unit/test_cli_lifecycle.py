"""`sres lifecycle run`: refused where a job could be hurt, and what it says of each script."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.cli.controller import ClusterView
from slurm_resilience.cli.main import call
from slurm_resilience.errors import WireError
from slurm_resilience.model import REPLACE, Node
from slurm_resilience.wire.messages import LifecycleEnd, RunLifecycle, ScriptEnd

WELL = LifecycleEnd(True, "", (ScriptEnd("10-a", 0, 1.2), ScriptEnd("20-off", None, 0.0)))
FAILED = LifecycleEnd(
    False,
    "20-b failed (exit code 1): no licence",
    (ScriptEnd("20-b", 1, 0.5),),
    ("asking", "\x1b[2J"),
)
AWAY = WireError("the sresd of n3 is not connected; see `sres node show n3`")


class Cluster(ClusterView):
    """Slurm is the fake, and each sresd's answer is given."""

    def __init__(self, ends: dict[str, LifecycleEnd | WireError], *nodes: Node) -> None:
        super().__init__()
        self.client = FakeSlurm(nodes)
        self.ends = ends
        self.asked: list[str] = []
        self.gave_up: dict[str, Any] = {}

    @property
    def uid(self) -> int:
        return self.user

    user = 0

    def status(self) -> dict[str, Any]:
        return {"nodes": {name: {"gave_up": known} for name, known in self.gave_up.items()}}

    def ask_node(self, node: str, kind: str, question: Any, seconds: float) -> msgspec.Raw:
        assert kind == RunLifecycle.kind
        self.asked.append(node)
        end = self.ends[node]
        if isinstance(end, WireError):
            raise end
        return msgspec.Raw(msgspec.msgpack.encode(end))


def out(name: str, state: str = "IDLE") -> Node:
    return Node(name, state, frozenset({"FAIL"}), REPLACE)


def test_a_run_that_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster({"n1": WELL}, out("n1"))
    assert call(["lifecycle", "run", "n1"], cluster) == 0
    assert capsys.readouterr().out.splitlines() == [
        "n1: 10-a: exit code 0, 1.2 s",
        "n1: 20-off: skipped",
        "n1: 2 scripts ran well in 1.2 s, slurmd is started",
    ]


def test_a_node_that_was_given_up_waits_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster({"n1": WELL}, out("n1"))
    cluster.gave_up = {"n1": {"id": 1}}
    assert call(["lifecycle", "run", "n1"], cluster) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "n1: it was given up, so it waits for you: sres node cancel n1"


def test_failures_are_shown_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    ends = {"n1": WELL, "n2": FAILED, "n3": AWAY}
    cluster = Cluster(ends, *(out(name) for name in ends))
    assert call(["lifecycle", "run", "n[1-3]"], cluster) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[3:] == [
        "n2: 20-b: exit code 1, 0.5 s",
        "n2: | asking",
        "n2: | ?[2J",
        "n2: 20-b failed (exit code 1): no licence",
        f"n3: {AWAY}",
    ]


def test_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster({"n1": FAILED}, out("n1"))
    assert call(["lifecycle", "run", "n1", "--format", "json"], cluster) == 1
    found = json.loads(capsys.readouterr().out)["n1"]
    assert (found["is_well"], found["scripts"][0]["rc"]) == (False, 1)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (Node("n2", "ALLOCATED"), "n2 has jobs: drain it"),
        (Node("n2", "MIXED", frozenset({"DRAIN"}), "mine"), "n2 has jobs: drain it"),
        (Node("n2", "IDLE"), "n2 is in service: drain it first"),
    ],
)
def test_nothing_runs_on_any_node_when_one_could_have_a_job(
    capsys: pytest.CaptureFixture[str], node: Node, says: str
) -> None:
    cluster = Cluster({"n1": WELL}, out("n1"), node)
    assert call(["lifecycle", "run", "n[1-2]"], cluster) == 2
    assert says in capsys.readouterr().err
    assert cluster.asked == []


@pytest.mark.parametrize(
    "node",
    [
        Node("n1", "IDLE", frozenset({"DRAIN"}), "mine"),
        Node("n1", "DOWN", frozenset({"NOT_RESPONDING"}), "Not responding"),
        Node("n1", "IDLE", frozenset({"NOT_RESPONDING"})),
    ],
)
def test_nodes_out_of_service_may_run_them(node: Node) -> None:
    cluster = Cluster({"n1": WELL}, node)
    assert call(["lifecycle", "run", "n1"], cluster) == 0


def test_a_user_may_not(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster({"n1": WELL}, out("n1"))
    cluster.user = 20001
    assert call(["lifecycle", "run", "n1"], cluster) == 6
    assert "only root and SlurmUser" in capsys.readouterr().err
    assert cluster.asked == []
