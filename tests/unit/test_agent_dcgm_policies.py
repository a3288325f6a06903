"""Violations of DCGM's policies, through a recorded dcgmi; and beside the kernel log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_resilience import config
from slurm_resilience.agent.events import dcgm_policies
from slurm_resilience.agent.events.dcgm_policies import DcgmPolicies
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.agent.finding_intake import FindingIntake
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import SystemClock
from slurm_resilience.health.documents.dcgm_devices import gpu_addresses, gpus_with_xid
from slurm_resilience.health.documents.dcgm_violations import ViolationReader
from slurm_resilience.health.gpu_event import GpuEvent
from slurm_resilience.health.kernel_log import Classifier
from slurm_resilience.inject.dcgm_injection import dcgm_gpu, tell_dcgm
from slurm_resilience.inject.fault_catalogue import find_fault
from slurm_resilience.model import Finding, Node

STAMP = "Timestamp: Tue Mar 14 15:51:54 2017\n"
NO_POLICY = """\
Policy information
+-----------------------------+---------------------------------------------+
| Policy Information                                                        |
| DCGM_ALL_SUPPORTED_GPUS                                                   |
+=============================+=============================================+
| Violation conditions        | None                                        |
| Isolation mode              | Manual                                      |
+-----------------------------+---------------------------------------------+
"""
VIOLATIONS = {
    "dbe": "A double-bit ECC error has violated policy manager values.\nDBE error count: 1\n",
    "xid79": "XID error 79 detected.\n",
}


LISTED = """\
2 GPUs found.
+--------+----------------------------------------------------------------------+
| GPU ID | Device Information                                                   |
+--------+----------------------------------------------------------------------+
| 0      | Name: NVIDIA H100 80GB HBM3                                          |
|        | PCI Bus ID: 00000000:1B:00.0                                         |
|        | Device UUID: GPU-5b9bb7f1-4d0c-0c2a-6a0c-7f6e5b8f2a11                |
+--------+----------------------------------------------------------------------+
| 1      | Name: NVIDIA H100 80GB HBM3                                          |
|        | PCI Bus ID: 00000000:43:00.0                                         |
|        | Device UUID: GPU-c0a8d3c8-1f55-55e1-94f4-2f3e1f0e8c22                |
+--------+----------------------------------------------------------------------+
1 NvSwitches found.
+-----------+
| Switch ID |
+-----------+
| 1         |
+-----------+
1 CPUs found.
| 0      | Name: Grace TH500                                                    |
"""
SHOWN = """\
#Entity   XIDER
ID
GPU 0     N/A
GPU 1     {}
GPU-I 1   48
"""


def read(text: str) -> list[Finding]:
    reader = ViolationReader()
    return [one for line in text.splitlines() if (one := reader.feed(line)) is not None]


@pytest.mark.parametrize(
    ("text", "severity", "said"),
    [
        (VIOLATIONS["dbe"], "monitor", "1 double-bit errors"),
        ("A PCIe replay event has violated …\nPCIe replay count: 7\n", "monitor", "7 PCIe"),
        ("SBE page retirement count: 50\nDBE page retirement count: 9\n", "monitor", "59 retired"),
        ("SBE page retirement count: 50\nDBE page retirement count: 10\n", "replace", "60 retired"),
        ("The maximum thermal limit …\nTemperature: 96\n", "monitor", "96 °C"),
        ("The maximum power limit …\nPower: 710\n", "monitor", "710 W"),
        ("NVLink Counter 409 has violated …\nNVLink Counter value: 2\n", "monitor", "2 NVLink"),
        ("An unknown error has violated policy manager values.\n", "monitor", "An unknown error"),
        (VIOLATIONS["xid79"], "reboot", "Xid 79 on a GPU that DCGM does not name"),
        ("XID error 13 detected.\n", "job", "Xid 13"),
        ("XID error 9999 detected.\n", "monitor", "unknown code"),
    ],
)
def test_each_kind_of_violation(text: str, severity: str, said: str) -> None:
    (one,) = read("Listening for violations.\n" + STAMP + text)
    assert str(one.severity) == severity
    assert said in one.text


# --- beside the kernel log --------------------------------------------------------------------


def xid(code: int, at: float) -> Finding:
    (one,) = read(f"XID error {code} detected.\n")
    return msgspec.structs.replace(one, at=at)


@pytest.mark.parametrize("source", ["log", "event"])
def test_an_xid_that_is_known_with_its_gpu_is_one_trouble(source: str) -> None:
    intake = FindingIntake(outbox := Outbox())
    if source == "log":
        (line,) = Classifier().judge("NVRM: Xid (PCI:0000:3b:00): 79, pid=7, x", 5.0)
        intake.from_log(line)
    else:
        intake.from_driver(GpuEvent("00000000:3B:00.0", 79), 5.0)
    intake.from_dcgm(xid(79, 9.0))
    assert [one.subject for one in outbox.kernel_findings()] == ["0000:3b:00"]


def test_an_xid_that_only_dcgm_tells_counts() -> None:
    intake = FindingIntake(outbox := Outbox())
    for line in Classifier().judge("NVRM: Xid (PCI:0000:3b:00): 79, pid=7, x", 5.0, facility=1):
        intake.from_log(line)  # a program wrote it: it hides nothing
    intake.from_dcgm(xid(79, 9.0))
    assert "reboot" in [str(one.severity) for one in outbox.kernel_findings()]


@pytest.mark.parametrize(("injected", "known_injected", "count"), [(1, 1, 1), (1, 0, 1), (0, 1, 2)])
def test_what_was_injected_hides_only_what_was(
    injected: bool, known_injected: bool, count: int
) -> None:
    intake = FindingIntake(outbox := Outbox())
    text = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, x"
    facility = 1 if known_injected else 0
    (line,) = Classifier().judge(text, 5.0, facility=facility, is_drill=True)
    intake.from_log(line)
    told = msgspec.structs.replace(xid(79, 9.0), injected=bool(injected))
    assert intake.knows(told) is (count == 1)
    intake.from_dcgm(told)
    assert len(outbox.kernel_findings()) == count


def test_dcgms_numbers_and_addresses() -> None:
    assert gpu_addresses(LISTED) == {0: "0000:1b:00", 1: "0000:43:00"}
    assert gpu_addresses("Error: unable to establish a connection to the specified host") == {}
    assert gpus_with_xid(SHOWN.format(48), 48) == (1,)
    assert gpus_with_xid(SHOWN.format("N/A"), 48) == ()
    assert gpus_with_xid(SHOWN.format(94), 48) == (1,), "48 is followed by 94"
    assert gpus_with_xid(SHOWN.replace("N/A", "13").format(94), 48) == ()
    assert gpus_with_xid(SHOWN.replace("N/A", "48").format(48), 48) == (0, 1)


# --- the process ------------------------------------------------------------------------------


class Slurm:
    """Says that the node has GPUs."""

    def node(self, name: str) -> Node:
        return Node(name, "IDLE", gres="gpu:2")


class Following:
    """`DcgmPolicies` in a thread, and what it has put up."""

    def __init__(self, sysroot: Path, is_drill: bool = False) -> None:
        self.news, self.stop = threading.Event(), threading.Event()
        self.outbox = Outbox(self.news.set)
        settings = config.Config(agent=config.AgentSettings(sysroot=str(sysroot)))
        self.policies = DcgmPolicies(
            settings,
            SlurmFacts(Slurm(), "n1"),  # type: ignore[arg-type]
            self.outbox,
            FindingIntake(self.outbox),
            lambda: is_drill,
            SystemClock(),
            self.stop,
        )
        self.thread = threading.Thread(target=self.policies.run, daemon=True)
        self.thread.start()

    def wait(self, seen: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 20
        while True:
            self.news.clear()
            if found := seen():
                return found
            left = deadline - time.monotonic()
            assert left > 0, f"last seen: {self.outbox.results()} {self.outbox.kernel_findings()}"
            self.news.wait(min(left, 0.05))

    def says(self, text: str) -> None:
        self.wait(lambda: [one for one in self.outbox.results() if text in one.text])

    def end(self) -> None:
        self.stop.set()
        self.policies.wake()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def dcgmi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A dcgmi whose policy stands in files, and that follows the file `violations`."""
    for name in ("SETTLE_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(dcgm_policies, name, 0.05)
    file = tmp_path / "bin" / "dcgmi"
    file.parent.mkdir()
    file.write_text(
        f"""#!/bin/sh
echo "$@" >> {tmp_path}/asked
case $1 in
    dmon) cat {tmp_path}/shown; exit ;;
    discovery) cat {tmp_path}/listed; exit ;;
    test) if [ $6 = 230 ]; then
              printf 'ID\\nGPU %s   %s\\n' $4 $8 > {tmp_path}/shown
              echo "XID error $8 detected." >> {tmp_path}/violations
          fi
          echo 'Successfully injected field info.'; exit ;;
esac
case $4 in
    --get) cat {tmp_path}/policy ;;
    --set) echo 'Policy successfully set.' ;;
    --reg) [ -e {tmp_path}/refuses ] && {{ echo 'Error: no host engine'; exit 1; }}
           exec tail -n +1 -f {tmp_path}/violations ;;
esac
"""
    )
    file.chmod(0o755)
    (tmp_path / "policy").write_text(NO_POLICY)
    (tmp_path / "shown").write_text(SHOWN.format("N/A"))
    (tmp_path / "listed").write_text(LISTED)
    (tmp_path / "violations").write_text("Listening for violations.\n")
    monkeypatch.setenv("PATH", f"{file.parent}:/usr/bin:/bin")
    yield tmp_path


@pytest.mark.parametrize("is_drill", [False, True])
def test_a_violation_is_reported(dcgmi: Path, is_drill: bool) -> None:
    following = Following(dcgmi, is_drill)
    following.says("following DCGM's policies")
    with (dcgmi / "violations").open("a") as file:
        file.write(STAMP + VIOLATIONS["xid79"])
    (one,) = following.wait(following.outbox.kernel_findings)
    assert (str(one.severity), one.code, one.injected) == ("reboot", "79", is_drill)
    following.end()


@pytest.mark.parametrize(
    ("last", "subject", "named"),
    [("48", "0000:43:00", "on GPU 0000:43:00: "), ("0", "", "on a GPU that DCGM does not name: ")],
)
def test_a_reset_is_asked_for_with_the_gpus_address(
    dcgmi: Path, last: str, subject: str, named: str
) -> None:
    (dcgmi / "shown").write_text(SHOWN.format(last))
    following = Following(dcgmi)
    following.says("following DCGM's policies")
    with (dcgmi / "violations").open("a") as file:
        file.write(STAMP + "XID error 48 detected.\n")
    (one,) = following.wait(following.outbox.kernel_findings)
    assert (str(one.severity), one.code, one.subject) == ("reset", "48", subject)
    assert named in one.text
    following.end()


def test_what_is_injected_into_dcgm_comes_back_with_its_gpu_and_its_mark(dcgmi: Path) -> None:
    following = Following(dcgmi, is_drill=True)
    following.says("following DCGM's policies")
    gpu = dcgm_gpu("0000:43:00")
    assert gpu == (1, "0000:43:00")
    tell_dcgm(gpu, find_fault("ecc").dcgm)
    following.wait(lambda: [one for one in following.outbox.kernel_findings() if one.code == "64"])
    (one,) = following.outbox.kernel_findings()
    assert (str(one.severity), one.subject, one.injected) == ("replace", "0000:43:00", True)
    following.end()


def test_a_policy_is_set_only_where_there_is_none(dcgmi: Path) -> None:
    following = Following(dcgmi)
    following.says("following")
    following.end()
    asked = (dcgmi / "asked").read_text().splitlines()
    assert asked[:2] == ["policy -g 0 --get", "policy -g 0 --set 0,0 -x -e -p -n -M 60"]
    (dcgmi / "asked").unlink()
    (dcgmi / "policy").write_text(NO_POLICY.replace("None ", "XID e"))
    following = Following(dcgmi)
    following.says("following")
    following.end()
    assert "--set" not in (dcgmi / "asked").read_text()


def test_it_is_started_anew_since_it_does_not_see_the_host_engine_end(
    dcgmi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcgm_policies, "FOLLOW_SECONDS", 0.1)
    following = Following(dcgmi)
    asked = dcgmi / "asked"
    following.wait(lambda: asked.exists() and asked.read_text().count("--reg") > 2)
    following.end()


def test_a_host_engine_that_is_away_is_unjudged(dcgmi: Path) -> None:
    (dcgmi / "refuses").touch()
    following = Following(dcgmi)
    following.says("dcgmi has ended: Error: no host engine")
    (dcgmi / "refuses").unlink()
    following.says("following")
    following.end()
    (dcgmi / "policy").write_text("Error: Unable to connect to host engine.\n")
    following = Following(dcgmi)
    following.says("DCGM's policies cannot be followed: Error: Unable to connect")
    following.end()


def test_without_dcgm_it_is_unjudged(dcgmi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(dcgmi))
    following = Following(dcgmi)
    following.says("DCGM is not installed")
    assert following.outbox.results()[0].verdict == "unjudged"
    following.end()
