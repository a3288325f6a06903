"""`sres replay`: every kind of file is recognised, judged, and the verdict is explained."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.cli.main import call
from slurm_resilience.health import xid
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.health.profile_files import load_profile, shipped_profiles
from slurm_resilience.health.replay.recognise import TEXT_KINDS, replay
from slurm_resilience.health.verdict import VERDICTS, HealthVerdict

TESTS = Path(__file__).resolve().parent.parent
SAMPLES = TESTS.parent.parent / "shared" / "reference" / "samples"
CASES = tomllib.loads((TESTS / "data" / "replay_cases.toml").read_text(encoding="utf-8"))["case"]
LABELS = {"none": "healthy", "job": "restart-job", "test-only": "monitor"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_each_of_our_own_files(case: dict[str, Any]) -> None:
    profile = msgspec.convert(tomllib.loads(case.get("profile", "")), NodeProfile)
    result = replay(case["text"], profile)
    assert result.verdict == case["expected"], result
    assert result.injected == case.get("injected", False)
    assert result.why


def test_our_own_files_are_of_every_kind() -> None:
    kinds = {replay(case["text"]).kind for case in CASES}
    assert {kind.name for kind in TEXT_KINDS} - kinds == set()
    assert kinds >= {"log", "dcgmi diag", "Neuron tools", "NVMe health log", "unknown"}
    assert {case["expected"] for case in CASES} == set(VERDICTS)


def sample_rows() -> list[dict[str, str]]:
    if not SAMPLES.is_dir():
        return []
    return list(csv.DictReader((SAMPLES / "index.csv").open(encoding="utf-8")))


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the recorded samples are not beside this tree")
@pytest.mark.parametrize("row", sample_rows(), ids=lambda row: row["file"])
def test_each_recorded_sample(row: dict[str, str]) -> None:
    text = (SAMPLES / row["file"]).read_text(encoding="utf-8").split("# ---\n", 1)[1]
    result = replay(text)
    label = row["expected_class"]
    assert result.verdict == LABELS.get(label, label), result
    assert result.injected == (label == "test-only")
    if row["anchors_disagree"] == "yes":
        reasons = [result.why, *(one.why for one in result.incidents)]
        assert all(len(reason) > 20 for reason in reasons)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"a":' * 100_000 + "\n" * 9])
def test_a_document_without_an_end_is_unjudged(text: str) -> None:
    assert replay(text).verdict == "unjudged"


@pytest.mark.parametrize(
    "text",
    [
        "==============NVSMI LOG==============\nAttached GPUs : {}\nGPU 00000000:04:00.0\n",
        "index, uuid, ecc.errors.uncorrected.volatile.total\n0, GPU-1, {}\n",
        "kernel: EDAC MC0: {} CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1)\n",
    ],
)
def test_a_number_too_long_for_python_is_a_number(text: str) -> None:
    assert replay(text.format("9" * 6000)).verdict in VERDICTS


def test_one_trouble_is_one_incident() -> None:
    lines = "".join(
        f"[ 10.{at:03d}] NVRM: Xid (PCI:0000:52:00): {code}, pid=1, name=a, text\n"
        for at, code in enumerate((48, 63, 94))
    )
    (one,) = replay(lines).incidents
    assert (one.codes, one.verdict, one.lines) == (("48", "63", "94"), "reset", 3)
    switches = "".join(
        f"[ 1{n}.0] nvidia-nvswitch{n}: SXid (PCI:0000:0{n}:00.0): 20034, Fatal, Link 48\n"
        for n in (1, 2, 3)
    )
    lost = "[ 10.0] NVRM: Xid (PCI:0000:91:00): 79, pid=1, name=a, GPU has fallen off the bus.\n"
    (one,) = replay(lost + switches).incidents
    assert one.codes == ("79", "20034")
    assert "alone, a lost GPU asks for a reboot" in one.why


def test_a_disputed_choice_names_the_other_agents() -> None:
    result = replay("NVRM: Xid (PCI:0000:04:00): 64, Failed to persist row remap table\n")
    assert "RMA criterion" in result.why
    assert "gpud" in result.why


def test_the_prefix_does_not_change_the_verdict() -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=a, GPU has fallen off the bus."
    prefixes = (
        "",
        "[ 12.5] ",
        "[12345.678901] [ T1946] ",
        "[Fri Aug 30 11:43:09 2024] ",
        "<4>[ 12.5] ",
        "kern  :warn  : [ 12.5] ",
        "kern  :warn  : 2025-01-21T04:41:44,283302+00:00 ",
        "2025-01-21T04:41:44,283302+00:00 ",
        "2025-01-21T04:41:44+0000 gpu1 kernel: ",
        "Tue 2025-01-21 04:41:44 UTC gpu1 kernel: ",
        "Tue Jan 21 04:41:44 UTC 2025 gpu1 kernel: ",
        "Dec  2 11:38:47 worker4 kernel: [  219.470994] ",
        "Dec  2 11:38:47 worker4 kernel: ",
        "kernel: ",
        "4,349,872934736,-;",
        "4,349,872934736;",
        "[  +6.010643] ",
        "[Nov23 08:45] ",
        "[2023-06-22 21:55:31.352446][5975153.878190] ",
        "[2023-06-22 21:55:31] ",
    )
    assert {replay(prefix + line + "\n").verdict for prefix in prefixes} == {HealthVerdict.REBOOT}


def test_a_large_log_is_one_answer() -> None:
    line = "[ {}.0] pcieport 0000:{:02x}:00.0: AER: Corrected error received: 0000:{:02x}:00.0"
    log = "\n".join(line.format(at * 100, at % 200, at % 200) for at in range(2000))
    result = replay(log)
    assert result.verdict == "monitor"
    assert len(result.incidents) == 200
    assert sum(one.lines for one in result.incidents) == 2000


@pytest.mark.skipif(shutil.which("dmesg") is None, reason="dmesg is not installed")
def test_this_machines_own_boot_is_at_most_worth_watching() -> None:
    log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=60, check=False)
    boot = re.sub(r".*(?:NVRM: Xid|SXid|oom|Killed process|Out of memory).*\n", "", log.stdout)
    result = replay(boot or "kernel: nothing\n")
    assert result.verdict in ("healthy", "monitor"), result


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = call(["replay", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_prints_one_json_document(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "log"
    file.write_text("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
    code, out, _ = run(capsys, str(file), "--format", "json")
    data = json.loads(out)
    assert (code, data["verdict"]) == (0, "reboot")
    (one,) = data["incidents"]
    assert (one["check"], one["codes"], one["verdict"]) == ("xid", ["79"], "reboot")
    code, out, _ = run(capsys, str(file))
    first, _, row, *why = out.splitlines()
    assert (code, first) == (0, "reboot (log)")
    assert row.split()[:4] == ["reboot", "xid", "79", "1"]
    assert row.endswith("Xid 79 on GPU 0000:3b:00: GPU has fallen off the bus")
    assert len(why) == 1 and why[0].startswith("why reboot: NVIDIA Xid catalogue ")


def test_the_table_says_each_reason_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "log"
    lines = [
        f"NVRM: Xid (PCI:0000:{gpu}:00): 79, GPU has fallen off the bus." for gpu in ["3a", "3b"]
    ]
    file.write_text("\n".join(lines))
    _, out, _ = run(capsys, str(file))
    assert out.count("fallen off the bus") == 2
    assert out.count("RESTART_BM") == 1


@pytest.mark.parametrize(
    ("text", "severity", "named"),
    [
        ("to 0x2 (Node Reboot Required)", "reboot", " to 'Node Reboot Required'"),
        ("to 0x0 (None)", "none", " to 'None'"),
        ("to something", "monitor", ""),
    ],
)
def test_the_recovery_that_the_driver_names_is_told(text: str, severity: str, named: str) -> None:
    row = xid.judge(154, f"GPU recovery action changed from 0x1 (x) {text}")
    assert (str(row.action), row.meaning) == (
        severity,
        f"the driver's recommended recovery changed{named}",
    )


def test_the_command_takes_a_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "list"
    file.write_text("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n")
    code, out, _ = run(capsys, str(file), "--profile", "p5.48xlarge", "--format", "json")
    assert (code, json.loads(out)["verdict"]) == (0, "reboot")


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("gpus = 'eight'", "gpus"),
        ("lamps = 1", "lamps"),
        ("gpus = ", "profile"),
        ("", "expects nothing; `sres check profile --learn` writes one"),
    ],
)
def test_a_bad_profile_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, profile: str, said: str
) -> None:
    file = tmp_path / "node.toml"
    file.write_text(profile)
    code, out, err = run(capsys, str(file), "--profile", str(file))
    assert (code, out, len(err.splitlines())) == (3, "", 1)
    assert said in err


def test_a_file_or_profile_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words, code in (
        (["no-such-file"], 5),
        ([str(tmp_path)], 2),
        ([__file__, "--profile", "no-such-type"], 3),
    ):
        got, out, err = run(capsys, *words)
        assert (got, out, len(err.splitlines())) == (code, "", 1)
    assert "p5.48xlarge" in err


def test_the_profiles_that_are_shipped_can_be_read() -> None:
    profiles = [load_profile(name) for name in shipped_profiles()]
    assert len(profiles) >= 9
    assert all(profile.gpus or profile.neuron_devices for profile in profiles)


PIECES = st.sampled_from(
    [
        '{"DCGM Diagnostic": ',
        '{"test_categories": [',
        "}",
        "]",
        "<nvidia_smi_log>",
        "<gpu>",
        "NVSMI LOG\nGPU 00000000:1B:00.0\n",
        "    Pending : Yes\n",
        "gpuId 0:\n U D\n",
        "NVRM: Xid (PCI:0000:3b:00): 79,",
        "EDAC MC0: 99999999999999999999 CE x on d",
        "[99999999999999999999.5] ",
        "<999>",
        "Feb 31 25:61:61 host kernel: ",
        "2025-99-99T99:99:99+99:99 a b: ",
        "index, pci.bus_id\n",
        '{"MESSAGE": "x"}\n',
        "bytes #sent #ack\n",
        "\n",
        "0x8",
    ]
)


@given(st.lists(st.one_of(st.text(max_size=30), PIECES), max_size=10).map("".join))
def test_no_file_whatsoever_crashes(text: str) -> None:
    assert replay(text).verdict in VERDICTS
