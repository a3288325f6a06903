"""Checks of what a node needs beside its hardware: disks' own logs, clock, services, AMD's GPUs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience import config
from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import ConfigError
from slurm_resilience.health.check import Check, CheckContext, Expected, Unjudged
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.health.checks.accelerator import amd_gpus
from slurm_resilience.health.checks.host import clock_sync, cpu_frequency, ipmi_events, services
from slurm_resilience.health.checks.storage import nvme_disks
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import CheckResult


def lay_out(root: Path, files: dict[str, object]) -> CheckContext:
    for name, value in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n", encoding="utf-8")
    return CheckContext(sysroot=root, now=5.0)


def run(check: Check, context: CheckContext) -> CheckResult:
    return CheckRunner([check], context, SystemClock()).run_one(check)


def asked_for(result: Any) -> list[str]:
    return [str(one.severity) for one in result.findings]


def tool(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program of this name print the text, and be the only one that is found."""
    folder.mkdir(exist_ok=True)
    (folder / "said").write_text(text, encoding="utf-8")
    file = folder / name
    file.write_text(
        f'#!/bin/sh\necho "$@" > {folder}/asked\n/bin/cat {folder}/said\nexit 4\n', encoding="utf-8"
    )
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


# --- NVMe -------------------------------------------------------------------------------------

NVME = "/sys/class/nvme/nvme0"
SMARTCTL = {
    "device": {"name": "/dev/nvme0"},
    "smart_status": {"passed": True},
    "nvme_smart_health_information_log": {
        "critical_warning": 0,
        "available_spare": 100,
        "available_spare_threshold": 10,
        "percentage_used": 3,
    },
}
NVME_CLI = {"critical_warning": 0, "avail_spare": 100, "spare_thresh": 10, "percent_used": 3}


@pytest.fixture
def disk(tmp_path: Path) -> CheckContext:
    return lay_out(tmp_path / "root", {f"{NVME}/state": "live", f"{NVME}/transport": "pcie"})


@pytest.mark.parametrize(("name", "log"), [("smartctl", SMARTCTL), ("nvme", NVME_CLI)])
def test_a_disk_that_is_well(
    disk: CheckContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, log: Any
) -> None:
    tool(tmp_path / "bin", name, json.dumps(log), monkeypatch)
    result = run(nvme_disks.CHECK, disk)
    assert (result.verdict, result.text) == ("pass", "1 NVMe disks without a fault")
    assert "/dev/nvme0" in (tmp_path / "bin" / "asked").read_text()


@pytest.mark.parametrize(
    ("change", "severity", "said"),
    [
        ({"avail_spare": 4}, "replace", "nvme0: 4 % of its spare blocks"),
        ({"critical_warning": 4}, "replace", "nvme0: it reports a critical warning"),
        ({"critical_warning": 2}, "monitor", "nvme0: it is too hot"),
        ({"percent_used": 90}, "monitor", "nvme0: 90 % of its rated life"),
        ({"percent_used": 101}, "replace", "nvme0: 101 % of its rated life"),
    ],
)
def test_a_disk_that_wears_out(
    disk: CheckContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, int],
    severity: str,
    said: str,
) -> None:
    tool(tmp_path / "bin", "nvme", json.dumps(NVME_CLI | change), monkeypatch)
    result = run(nvme_disks.CHECK, disk)
    assert asked_for(result) == [severity]
    assert result.text.startswith(said)
    assert result.findings[0].subject == "nvme0"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("other", "", "nvme0: neither smartctl nor nvme is installed"),
        ("nvme", "Permission denied", "nvme0: nvme printed no log"),
        ("nvme", "[1]", "nvme0: nvme printed another document"),
        ("smartctl", '{"smartctl": {"exit_status": 2}}', "nvme0: the disk: its health log"),
    ],
)
def test_without_a_log_a_disk_is_unjudged(
    disk: CheckContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    text: str,
    why: str,
) -> None:
    tool(tmp_path / "bin", name, text, monkeypatch)
    result = run(nvme_disks.CHECK, disk)
    assert result.verdict == "unjudged"
    assert result.text.startswith(why)


def test_a_disk_that_is_gone(tmp_path: Path) -> None:
    context = lay_out(tmp_path, {f"{NVME}/state": "dead"})
    result = run(nvme_disks.CHECK, context)
    assert (asked_for(result), result.text) == (["reboot"], "nvme0 is gone: its state is dead")


def test_disks_behind_a_network_are_not_this_nodes(tmp_path: Path) -> None:
    context = lay_out(tmp_path, {f"{NVME}/state": "dead", f"{NVME}/transport": "tcp"})
    assert run(nvme_disks.CHECK, context).text == "no NVMe disk"
    assert run(nvme_disks.CHECK, CheckContext(tmp_path / "none")).verdict == "pass"


words = st.text("abc", max_size=3)
disk_logs = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"critical_warning": st.integers(0, 63), "avail_spare": st.integers(0, 100)},
        optional={"spare_thresh": st.integers(0, 100), "percent_used": st.integers(0, 255)},
    ),
    st.dictionaries(words, st.one_of(words, st.integers(), st.booleans())),
)
disks = st.builds(nvme_disks.NvmeDisk, words, st.sampled_from(["live", "dead"]), disk_logs, words)


@given(st.lists(disks, max_size=4))
def test_a_disk_is_judged_by_what_it_says_or_not_at_all(seen: list[nvme_disks.NvmeDisk]) -> None:
    context = CheckContext(now=5.0)
    try:
        judgement = nvme_disks.judge(tuple(seen), context)
    except Unjudged:
        assert any(one.state == "live" for one in seen)
        return
    gone = [one for one in seen if one.state == "dead"]
    assert asked_for(judgement).count("reboot") == len(gone)
    if not judgement.findings:
        assert all(one.log is not None for one in seen)


# --- clock ------------------------------------------------------------------------------------


def test_this_machines_clock_is_read(tmp_path: Path) -> None:
    context = lay_out(tmp_path, {"/proc/cpuinfo": "flags\t\t: fpu hypervisor sse"})
    try:
        assert clock_sync.CHECK.probe(context).virtual
    except Unjudged as reason:
        assert "adjtimex" in str(reason), "a container that may not ask"


@given(st.booleans(), st.booleans(), st.none() | st.booleans())
def test_a_clock_that_was_in_step_or_is_a_machines_own(
    in_step: bool, virtual: bool, was_in_step: bool | None
) -> None:
    first = None if was_in_step is None else clock_sync.ClockState(was_in_step, virtual)
    context = CheckContext(first=first)
    seen = clock_sync.ClockState(in_step, virtual)
    if in_step:
        assert clock_sync.judge(seen, context).findings == ()
    elif virtual and not was_in_step:
        with pytest.raises(Unjudged):
            clock_sync.judge(seen, context)
    else:
        assert asked_for(clock_sync.judge(seen, context)) == ["monitor"]


# --- frequency --------------------------------------------------------------------------------

POLICY = "/sys/devices/system/cpu/cpufreq/policy{}"


def policies(root: Path, governor: str, *allowed: int) -> CheckContext:
    files: dict[str, object] = {}
    for number, khz in enumerate(allowed):
        folder = POLICY.format(number)
        files |= {f"{folder}/scaling_governor": governor, f"{folder}/scaling_max_freq": khz}
        files |= {f"{folder}/cpuinfo_max_freq": 3_500_000}
    return lay_out(root, files)


def test_a_cap_on_the_processors_is_named(tmp_path: Path) -> None:
    check = cpu_frequency.CHECK
    assert run(check, policies(tmp_path, "schedutil", 3_500_000, 3_500_000)).verdict == "pass"
    result = run(check, policies(tmp_path, "schedutil", 3_500_000, 1_200_000))
    assert result.text == "1 of 2 processors are capped: policy1 at 1200 of 3500 MHz"
    assert run(check, CheckContext(tmp_path / "none")).text == "the kernel sets no frequency"


def test_a_governor_counts_where_the_profile_names_one(tmp_path: Path) -> None:
    context = policies(tmp_path, "powersave", 3_500_000)
    wants = dataclasses.replace(
        context, expected=Expected(profile=NodeProfile(cpu_governor="performance"))
    )
    result = run(cpu_frequency.CHECK, wants)
    assert result.text == (
        "1 of 1 processors have the governor powersave, the profile expects performance"
    )


cpu_policies = st.builds(
    cpu_frequency.CpuPolicy,
    words,
    st.sampled_from(["", "performance", "powersave"]),
    st.integers(0, 9),
    st.integers(0, 9),
)


@given(st.lists(cpu_policies), st.sampled_from(["", "performance"]))
def test_a_frequency_is_only_ever_watched(seen: list[cpu_frequency.CpuPolicy], wanted: str) -> None:
    context = CheckContext(expected=Expected(profile=NodeProfile(cpu_governor=wanted)))
    findings = cpu_frequency.judge(tuple(seen), context).findings
    assert {str(one.severity) for one in findings} <= {"monitor"}
    assert ("capped" in {one.code for one in findings}) == any(
        0 < one.allowed < one.highest for one in seen
    )
    assert ("governor" in {one.code for one in findings}) == any(
        wanted and one.governor == "powersave" for one in seen
    )


# --- services ---------------------------------------------------------------------------------

SHOWN = "Id={0}.service\nLoadState={1}\nActiveState={2}\nSubState={3}"


@pytest.fixture
def wants(tmp_path: Path) -> CheckContext:
    (tmp_path / "root" / "run" / "systemd" / "system").mkdir(parents=True)
    settings = config.CheckSettings(services=("munge", "nvidia-fabricmanager"))
    return CheckContext(tmp_path / "root", settings)


def test_services_of_a_site(
    wants: CheckContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    munge = SHOWN.format("munge", "loaded", "active", "running")
    down = SHOWN.format("nvidia-fabricmanager", "loaded", "failed", "failed")
    tool(tmp_path / "bin", "systemctl", f"{munge}\n\n{down}\n", monkeypatch)
    result = run(services.CHECK, wants)
    assert asked_for(result) == ["monitor"]
    assert result.text == "service nvidia-fabricmanager does not run: failed (failed)"
    asked = (tmp_path / "bin" / "asked").read_text().split()
    assert asked[-3:] == ["--", "munge", "nvidia-fabricmanager"]


@pytest.mark.parametrize("text", ["", SHOWN, "no such thing"])
def test_an_answer_that_is_not_complete_is_unjudged(
    wants: CheckContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    tool(tmp_path / "bin", "systemctl", text, monkeypatch)
    assert run(services.CHECK, wants).verdict == "unjudged"


def test_without_systemd_services_are_unjudged(wants: CheckContext, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(wants, sysroot=tmp_path / "none")
    assert run(services.CHECK, elsewhere).text == "systemd does not run this machine"
    assert run(services.CHECK, elsewhere).verdict == "unjudged"
    assert run(services.CHECK, CheckContext(tmp_path)).text == "checks.services names none"


states = st.builds(
    services.ServiceState,
    words,
    st.sampled_from(["loaded", "not-found", "masked", ""]),
    st.sampled_from(["active", "activating", "reloading", "inactive", "failed", ""]),
    words,
)


@given(st.lists(states, unique_by=lambda one: one.name))
def test_a_service_is_only_ever_watched(seen: list[services.ServiceState]) -> None:
    findings = services.judge(tuple(seen), CheckContext()).findings
    assert {str(one.severity) for one in findings} <= {"monitor"}
    assert {one.subject for one in findings} == {
        one.name for one in seen if one.active in ("inactive", "failed", "")
    }


@pytest.mark.parametrize("name", ["", "--now", "a b", "nvidia-*"])
def test_what_is_no_unit_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"checks\.services"):
        config.parse(f'[checks]\nservices = ["{name}"]\n')
    assert config.parse('[checks]\nservices = ["munge"]\n').checks.services == ("munge",)


# --- AMD --------------------------------------------------------------------------------------

AMD = "/sys/bus/pci/devices/0000:83:00.0"
AMDSMI = """
import enum, json, os
class AmdSmiException(Exception): pass
# As amdsmi 7.0.2 has it; its record of a page has the number alone.
class AmdSmiMemoryPageStatus(enum.IntEnum): RESERVED = 0; PENDING = 1; UNRESERVABLE = 2
def said(handle, name):
    value = json.load(open(os.environ["AMDSMI"]))[handle].get(name)
    if value is None:
        raise AmdSmiException("not supported")
    return value
def amdsmi_init():
    if os.environ["AMDSMI"] == "none":
        raise AmdSmiException("driver not loaded")
def amdsmi_shut_down(): pass
def amdsmi_get_processor_handles(): return range(len(json.load(open(os.environ["AMDSMI"]))))
def amdsmi_get_gpu_device_bdf(handle): return said(handle, "bdf")
def amdsmi_get_gpu_total_ecc_count(handle): return said(handle, "ecc")
def amdsmi_get_gpu_bad_page_info(handle): return said(handle, "pages")
"""


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckContext:
    (tmp_path / "amdsmi.py").write_text(AMDSMI, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("AMDSMI", str(tmp_path / "gpus"))
    context = lay_out(tmp_path / "root", {f"{AMD}/vendor": "0x1002", f"{AMD}/class": "0x120000"})
    return dataclasses.replace(context, expected=Expected(gpus=1))


SOUND = {"bdf": "0000:83:00.0", "ecc": {"uncorrectable_count": 0}, "pages": []}


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([SOUND], []),
        ([{"bdf": "0000:83:00.0"}], []),
        ([SOUND | {"pages": "No bad pages found."}], []),
        ([SOUND | {"ecc": {"uncorrectable_count": 3}}], ["reset"]),
        ([SOUND | {"pages": [{"status": 1}, {"status": 0}]}], ["reset"]),
        ([SOUND | {"pages": [{"status": 0}, {"status": 2}]}], []),
        ([], ["reboot"]),
        ([{}], ["reboot"]),
    ],
)
def test_amd_gpus(
    amd: CheckContext, tmp_path: Path, gpus: list[dict[str, Any]], expected: list[str]
) -> None:
    (tmp_path / "gpus").write_text(json.dumps(gpus), encoding="utf-8")
    result = run(amd_gpus.CHECK, amd)
    assert result.verdict == ("fail" if expected else "pass"), result.text
    assert asked_for(result) == expected


def test_amd_gpus_without_their_library_are_unjudged(
    amd: CheckContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMDSMI", "none")
    assert run(amd_gpus.CHECK, amd).text == "amdsmi does not answer: driver not loaded"
    (tmp_path / "amdsmi.py").write_text("raise OSError('libamd_smi.so is missing')")
    result = run(amd_gpus.CHECK, amd)
    assert result.verdict == "unjudged"
    assert "libamd_smi.so is missing" in result.text


def test_a_node_without_amd_gpus_needs_no_library(tmp_path: Path) -> None:
    integrated = lay_out(tmp_path, {f"{AMD}/vendor": "0x1002", f"{AMD}/class": "0x030000"})
    assert run(amd_gpus.CHECK, integrated).text == "no AMD GPU for computing"
    assert "amdsmi" not in sys.modules


amd_gpus_seen = st.builds(
    amd_gpus.AmdGpu,
    words,
    st.none() | st.integers(0, 3),
    st.none() | st.integers(0, 3),
    st.sampled_from(["", "not supported"]),
)


@given(st.lists(amd_gpus_seen, max_size=8), st.none() | st.integers(0, 8))
def test_what_amd_does_not_count_is_no_fault(
    seen: list[amd_gpus.AmdGpu], wanted: int | None
) -> None:
    context = CheckContext(expected=Expected(gpus=wanted))
    findings = asked_for(amd_gpus.judge(tuple(seen), context))
    answering = [one for one in seen if not one.error]
    assert ("reboot" in findings) == (wanted is not None and len(answering) < wanted)
    counts = [n for one in answering for n in (one.uncorrected, one.pending_pages)]
    assert findings.count("reset") == sum(1 for count in counts if count)


# --- the management controller ----------------------------------------------------------------

BOOTED = 1_700_000_000  # 2023-11-14 22:13:20 UTC
EVENTS = """\
   1 | Pre-Init  |0000000012| Memory #0x53 | Uncorrectable ECC | Asserted
   2 | 11/14/2023 | 22:10:00 | Critical Interrupt #0x90 | Bus Fatal Error | Asserted
   3 | 11/14/2023 | 22:20:00 | Power Unit #0x01 | Power off/down | Asserted
"""
OLD = "11/14/2023 23:13:20"
"""The clock of a controller that runs right, an hour after the boot."""


def controller(
    root: Path, monkeypatch: pytest.MonkeyPatch, events: str, clock: str = OLD, code: int = 0
) -> CheckContext:
    """Lay out a node with a management controller, and an ipmitool that prints this."""
    (root / "bin").mkdir()
    (root / "bin" / "events").write_text(events, encoding="utf-8")
    file = root / "bin" / "ipmitool"
    file.write_text(
        f'#!/bin/sh\n[ "$*" = "sel time get" ] && echo "{clock}" && exit {code}\n'
        f'[ "$*" = "sel elist" ] || exit 9\n/bin/cat {root}/bin/events\n'
        f'[ {code} = 0 ] || echo "no such device" >&2\nexit {code}\n',
        encoding="utf-8",
    )
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(root / "bin"))
    return lay_out(root, {"/dev/ipmi0": "", "/proc/stat": f"cpu 1 2\nbtime {BOOTED}"})


def ipmi(context: CheckContext) -> Any:
    """Look an hour after the boot."""
    context = dataclasses.replace(context, now=BOOTED + 3600.0)
    return ipmi_events.judge(ipmi_events.probe(context), context)


def test_events_before_the_boot_are_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgement = ipmi(controller(tmp_path, monkeypatch, EVENTS))
    assert judgement == ("1 events since the node booted, none a fault", ())


@pytest.mark.parametrize(
    ("sensor", "event", "severity"),
    [
        ("Critical Interrupt #0x90", "Bus Fatal Error", "reboot"),
        ("Memory #0x53", "Uncorrectable ECC", "replace"),
        ("Power Supply PS1", "Power Supply AC lost", "monitor"),
    ],
)
@pytest.mark.parametrize("stamp", ["11/14/2023 | 22:30:00", "11/14/23 | 22:30:00 UTC"])
def test_an_event_since_the_boot(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stamp: str,
    sensor: str,
    event: str,
    severity: str,
) -> None:
    line = f" 4 | {stamp} | {sensor} | {event} | Asserted\n"
    judgement = ipmi(controller(tmp_path, monkeypatch, EVENTS + line + line))
    assert asked_for(judgement) == [severity], "told twice, found once"
    assert judgement.findings[0].check == "ipmi_events"
    assert judgement.text == f"{sensor}: {event}"


@pytest.mark.parametrize(
    ("clock", "logged", "severities"),
    [
        ("11/14/2023 21:13:20", "20:14:00", ["reboot"]),
        ("11/14/2023 21:13:20", "20:13:00", []),
        ("11/15/23 01:13:20 UTC", "23:00:00", []),
    ],
    ids=["behind", "behind, before the boot", "ahead, before the boot"],
)
def test_the_clock_of_the_controller_may_differ(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: str,
    logged: str,
    severities: list[str],
) -> None:
    line = f" 2 | 11/14/2023 | {logged} | Critical Interrupt #0x90 | Bus Fatal Error | Asserted\n"
    assert asked_for(ipmi(controller(tmp_path, monkeypatch, line, clock))) == severities


@pytest.mark.parametrize(
    ("events", "clock", "code", "why"),
    [
        (EVENTS, "Unspecified", 0, "the management controller does not tell its time"),
        ("", OLD, 1, "ipmitool: no such device"),
    ],
)
def test_a_controller_that_does_not_answer_is_unjudged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    events: str,
    clock: str,
    code: int,
    why: str,
) -> None:
    with pytest.raises(Unjudged, match=why):
        ipmi(controller(tmp_path, monkeypatch, events, clock, code))


def test_a_node_without_ipmitool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = controller(tmp_path, monkeypatch, "")
    assert ipmi_events.absent(CheckContext(tmp_path / "bin")).startswith("no management controller")
    assert run(ipmi_events.CHECK, CheckContext(tmp_path / "bin")).verdict == "pass"
    (tmp_path / "bin" / "ipmitool").unlink()
    result = run(ipmi_events.CHECK, context)
    assert (result.verdict, result.text) == ("unjudged", "ipmitool is not installed")
