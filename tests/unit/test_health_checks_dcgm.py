"""DCGM's background watches, through a recorded dcgmi."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.clock import SystemClock
from slurm_resilience.health.check import CheckContext, Expected, Judgement
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.health.checks.gpu import dcgm_health
from slurm_resilience.health.documents.dcgm_watches import judge_dcgm_health
from slurm_resilience.model import CheckResult


def document(overall: str, system: str = "", text: str = "", health: str = "Failure") -> str:
    body: dict[str, Any] = {"Overall Health": {"value": overall}}
    if system:
        said = {"value": health, "overflow": textwrap.wrap(text, 30)}
        errors = {"Errors": {"children": {system: said}}}
        body["GPU"] = {"children": {"3": {"value": health, "children": errors}}}
    return json.dumps({"body": body, "header": ["Health Monitor Report"]})


@pytest.fixture
def dcgmi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dcgmi that prints what stands in `said`, and notes how it was called."""
    file = tmp_path / "bin" / "dcgmi"
    file.parent.mkdir()
    file.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ "$4" = -s ] || cat {tmp_path}/said\n'
    )
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:/usr/bin:/bin")
    return tmp_path / "said"


def look(tmp_path: Path, gpus: int = 8) -> CheckResult:
    context = CheckContext(tmp_path / "root", expected=Expected(None, gpus))
    return CheckRunner([dcgm_health.CHECK], context, SystemClock()).run_one(dcgm_health.CHECK)


def judged(text: str) -> Judgement:
    return dcgm_health.judge(dcgm_health.DcgmSaid(json.loads(text)), CheckContext(now=5.0))


def test_watches_that_see_nothing(dcgmi: Path, tmp_path: Path) -> None:
    dcgmi.write_text(f"a word of the host engine\n{document('Healthy')}\nanother one\n")
    result = look(tmp_path)
    assert (result.verdict, result.text) == ("pass", "DCGM's watches see no fault")
    assert (tmp_path / "asked").read_text() == "health -g 0 -c -j\n"


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("GPU 3 had memory errors and row remappings are pending", "reset"),
        ("GPU 3 had uncorrectable memory errors and row remapping failed.", "replace"),
        ("GPU 3 had uncorrectable memory errors and 2 rows were remapped", "monitor"),
        ("SRAM Threshold Count exceeded on GPU 3: 9", "replace"),
        ("Detected 2 volatile double-bit ECC error(s) in GPU 3.", "reset"),
        ("GPU 3's NvLink link 4 is currently down", "reset"),
        ("Detected nonfatal errors on NvSwitch 1 link 2", "monitor"),
        ("Detected fatal errors on NvSwitch 1 link 2", "reset"),
        ("GPU 3 has fallen off the bus", "reboot"),
        ("Detected XID 13 for GPU 3", "job"),
        ("Detected XID 79 for GPU 3", "reboot"),
        ("Detected more than 8 PCIe replays per minute for GPU 3 : 9", "monitor"),
        ("something that a new DCGM brings", "monitor"),
    ],
)
def test_an_incident_of_the_watches(text: str, severity: str) -> None:
    (one,) = judged(document("Failure", "Memory system", text)).findings
    # A reset needs the GPU's address; the document by itself asks for it.
    (alone,) = judge_dcgm_health(json.loads(document("Failure", "Memory system", text))).findings
    assert str(alone.severity) == severity
    asked = "monitor" if severity == "reset" else severity
    assert (str(one.severity), one.subject, one.check) == (asked, "gpu 3", "dcgm_health")
    assert one.text == f"GPU 3 Memory system: {text}"
    (warned,) = judged(document("Warning", "Memory system", text, "Warning")).findings
    assert str(warned.severity) == "monitor"


def test_what_the_watches_say_during_a_drill_is_marked() -> None:
    said = dcgm_health.DcgmSaid(json.loads(document("Failure", "PCIe system", "XID 79 for GPU 3")))
    (one,) = dcgm_health.judge(said, CheckContext(now=5.0, is_drill=True)).findings
    assert (str(one.severity), one.injected) == ("reboot", True)


def test_watches_that_are_off_are_switched_on(dcgmi: Path, tmp_path: Path) -> None:
    dcgmi.write_text("Error: Health watches not enabled. Please enable watches. \n")
    result = look(tmp_path)
    assert (result.verdict, result.text) == (
        "unjudged",
        "DCGM's watches were off, and are switched on now",
    )
    assert (tmp_path / "asked").read_text().splitlines()[1] == "health -g 0 -s a"


@pytest.mark.parametrize(
    "said", ["Error: unable to establish a connection to the specified host: localhost\n", "{", ""]
)
def test_a_host_engine_that_is_away_says_nothing_of_the_node(
    dcgmi: Path, tmp_path: Path, said: str
) -> None:
    dcgmi.write_text(said)
    result = look(tmp_path)
    assert result.verdict == "unjudged"
    assert result.text.startswith("dcgmi printed no document; it said: ")


def test_without_dcgm_no_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("subprocess.Popen", None)
    assert look(tmp_path).text == "DCGM is not installed (dcgmi)"
    assert look(tmp_path, gpus=0).verdict == "pass"
