"""Evidence: the machine's tools are asked and never waited for long; what they say is saved."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_resilience.agent.evidence import machine_tools
from slurm_resilience.agent.evidence.machine_tools import gpu_state, machine_journal
from slurm_resilience.cli import main
from slurm_resilience.cli.controller import ClusterView
from slurm_resilience.model import CheckResult, Finding, Node, Severity
from slurm_resilience.wire.evidence_files import evidence_files, evidence_in_words
from slurm_resilience.wire.messages import NodeEvidence, SendEvidence

FOUND = NodeEvidence(
    ("a line",),
    (),
    ("started", "watches"),
    (Finding("xid", Severity.REBOOT, "lost", 5.0, injected=True),),
    (CheckResult("disk", "pass", "ok"),),
    {"nvidia-smi": "GPU 0\n", "../../etc/passwd": "x", "Big": "x", "": "x"},
)


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put an executable on an otherwise empty PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, body: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)

    return make


def test_a_machine_without_tools_has_nothing_to_tell(tool: Any) -> None:
    assert gpu_state(1000) == {}
    assert machine_journal(1000) == ()


def test_the_tools_are_asked(tool: Any) -> None:
    tool("nvidia-smi", 'echo "asked for $*"')
    tool("journalctl", "echo first; echo last; exit 1")
    assert gpu_state(1000) == {
        "nvidia-smi": "asked for -q\n",
        "nvidia-smi-nvlink": "asked for nvlink --status\n",
    }
    assert machine_journal(1000) == ("first", "last")
    assert machine_journal(5) == ("last",)


def test_each_tool_has_its_share(tool: Any) -> None:
    tool("nvidia-smi", "echo ééééééééééééééé")
    assert gpu_state(40)["nvidia-smi"] == "ééééé"


def test_a_tool_that_hangs_costs_its_own_output_alone(
    tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_tools, "TOOL_SECONDS", 0.2)
    tool("dcgmi", "echo begun; exec /bin/sleep 1000")
    tool("neuron-ls", "echo '[]'")
    assert gpu_state(1000) == {"dcgm-health": "no answer within 0.2 s", "neuron-ls": "[]\n"}


def test_a_tool_that_cannot_be_started_is_no_failure(tool: Any, tmp_path: Path) -> None:
    (tmp_path / "bin" / "dcgmi").write_bytes(b"\x7fELF")
    (tmp_path / "bin" / "dcgmi").chmod(0o755)
    assert gpu_state(1000) == {"dcgm-health": "no answer within 3 s"}


def test_a_node_names_no_file_of_its_own_choice() -> None:
    files = evidence_files(FOUND, {"node": "n2"})
    assert sorted(files) == [
        "findings.json",
        "journal.log",
        "kernel.log",
        "nvidia-smi.txt",
        "sresd.log",
    ]
    facts = json.loads(files["findings.json"])
    assert facts["node"] == "n2"
    assert facts["findings"][0]["injected"] is True
    assert evidence_in_words(FOUND).startswith("1 lines of the kernel log, 0 of the journal, 1 fi")


def test_an_older_sresd_has_no_tools() -> None:
    packed = msgspec.msgpack.encode(
        {"kernel_log": [], "journal": [], "sresd_log": [], "findings": [], "results": []}
    )
    assert msgspec.msgpack.decode(packed, type=NodeEvidence).tools == {}


class Site(ClusterView):
    """One node, whose sresd tells what it knows."""

    def named(self, hostlist: str) -> dict[str, Node]:
        return {name: Node(name, "IDLE") for name in hostlist.split(",")}

    def ask_node(self, node: str, kind: str, question: Any, seconds: float) -> msgspec.Raw:
        assert (node, kind) == ("n2", SendEvidence.kind)
        return msgspec.Raw(msgspec.msgpack.encode(FOUND))

    def history(self, node: str = "", limit: int = 1000) -> list[dict[str, Any]]:
        return [{"id": 1, "node": node, "kind": "detected"}]


def test_evidence_is_saved_for_its_caller_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.call(["evidence", "n2"], Site()) == 0
    said = capsys.readouterr().out
    (folder,) = tmp_path.glob("evidence-n2-*")
    assert said.startswith(f"{folder.name}: 1 lines of the kernel log")
    assert said.endswith(", 1 events\n")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert (folder / "kernel.log").read_text() == "a line\n"
    assert json.loads((folder / "events.jsonl").read_text())["kind"] == "detected"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["n2,n3"], "names 2 nodes"),
        (["n2", "--output", "there"], "there exists; name another one"),
        (["n2", "--output", "no/such/place"], "cannot be written: No such file"),
    ],
)
def test_what_cannot_be_saved_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main.call(["evidence", *words], Site()) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1
    assert list((tmp_path / "there").iterdir()) == []
