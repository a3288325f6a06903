"""Checks on trees below a sysroot: sick and healthy; and probes in processes that can be killed."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience import config
from slurm_resilience.clock import SystemClock
from slurm_resilience.health import check_child
from slurm_resilience.health.check import Check, CheckContext, Expected, Judgement, Unjudged
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.health.checks.accelerator import neuron_devices
from slurm_resilience.health.checks.gpu import gpu_health
from slurm_resilience.health.checks.host import (
    edac_counters,
    open_files,
    pcie_errors,
    process_ids,
    software,
    stuck_processes,
    zombies,
)
from slurm_resilience.health.checks.network import efa_devices, infiniband_ports
from slurm_resilience.health.checks.storage import lustre_imports, shared_mounts
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import Severity


def tree(root: Path, files: dict[str, object]) -> CheckContext:
    """Lay out files below a sysroot."""
    for name, value in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n", encoding="utf-8")
    return CheckContext(sysroot=root, now=5.0)


def judged(check: Check, context: CheckContext, **more: Any) -> Judgement:
    context = dataclasses.replace(context, **more)
    return check.judge(check.probe(context), context)


def severities(judgement: Judgement) -> list[str]:
    return [str(finding.severity) for finding in judgement.findings]


EDAC = "/sys/devices/system/edac/mc/mc0/dimm0"


def test_memory_errors(tmp_path: Path) -> None:
    check = edac_counters.CHECK
    assert judged(check, tree(tmp_path, {})).findings == ()
    counters = {f"{EDAC}/dimm_label": "A1", f"{EDAC}/dimm_ue_count": 0, f"{EDAC}/dimm_ce_count": 40}
    context = tree(tmp_path, counters)
    first = check.probe(context)
    assert edac_counters.judge(first, context).findings == (), "40 are history"
    more = tree(tmp_path, {f"{EDAC}/dimm_ce_count": 49})
    assert judged(check, more, first=first).findings == ()
    many = tree(tmp_path, {f"{EDAC}/dimm_ce_count": 50})
    (one,) = judged(check, many, first=first).findings
    assert (one.severity, one.subject) == (Severity.MONITOR, "mc0 A1")
    lost = tree(tmp_path, {f"{EDAC}/dimm_ue_count": 1})
    assert severities(judged(check, lost, first=first)) == ["replace"]


def test_a_controller_without_modules(tmp_path: Path) -> None:
    context = tree(tmp_path, {"/sys/devices/system/edac/mc/mc1/ue_count": 2})
    (one,) = judged(edac_counters.CHECK, context).findings
    assert one.subject == "mc1"


AER = "/sys/bus/pci/devices/0000:3b:00.0"


def aer(root: Path, fatal: int = 0, nonfatal: int = 0, corrected: int = 0) -> CheckContext:
    return tree(
        root,
        {
            f"{AER}/aer_dev_fatal": f"DLP 0\nTOTAL_ERR_FATAL {fatal}",
            f"{AER}/aer_dev_nonfatal": f"DLP 0\nTOTAL_ERR_NONFATAL {nonfatal}",
            f"{AER}/aer_dev_correctable": f"RxErr 0\nTOTAL_ERR_COR {corrected}",
            "/sys/bus/pci/devices/0000:00:01.0/vendor": "0x8086",
        },
    )


def test_pcie_errors(tmp_path: Path) -> None:
    check = pcie_errors.CHECK
    context = aer(tmp_path, 1, 2, 3000)
    first = check.probe(context)
    assert len(first) == 1
    assert pcie_errors.judge(first, context).findings == (), "counters are history"
    for counts, expected in (
        ((2, 9, 9000), ["reboot"]),
        ((1, 3, 3000), ["monitor"]),
        ((1, 2, 3999), []),
        ((1, 2, 4000), ["monitor"]),
    ):
        assert severities(judged(check, aer(tmp_path, *counts), first=first)) == expected


def process(root: Path, pid: int, state: str, name: str = "python3", started: int = 7) -> None:
    fields = " ".join(["1"] * 18)
    tree(root, {f"/proc/{pid}/stat": f"{pid} ({name}) {state} {fields} {started} 0 0"})


def test_stuck_processes(tmp_path: Path) -> None:
    check = stuck_processes.CHECK
    process(tmp_path, 10, "D", "a) b")
    process(tmp_path, 11, "S")
    context = CheckContext(sysroot=tmp_path)
    reading = check.probe(context)
    assert [(one.pid, one.name) for one in reading] == [(10, "a) b")]
    assert stuck_processes.judge(reading, context).findings == ()
    for_long = dataclasses.replace(context, earlier=(reading,) * 4)
    assert severities(stuck_processes.judge(reading, for_long)) == ["monitor"]
    other = tuple(one._replace(started=8) for one in reading)
    changed = dataclasses.replace(context, earlier=(other, *(reading,) * 3))
    assert stuck_processes.judge(reading, changed).findings == (), "its pid was used again"


def test_zombies(tmp_path: Path) -> None:
    for pid in range(30):
        process(tmp_path, 100 + pid, "Z")
    context = CheckContext(sysroot=tmp_path)
    assert zombies.CHECK.probe(context) == 30
    assert zombies.judge(30, context).findings == ()
    assert zombies.judge(30, dataclasses.replace(context, earlier=(30, 30, 3, 30))).findings == ()
    for_long = dataclasses.replace(context, earlier=(30, 30, 30, 30))
    assert severities(zombies.judge(30, for_long)) == ["monitor"]


def test_open_files(tmp_path: Path) -> None:
    name = "/proc/sys/fs/file-nr"
    assert judged(open_files.CHECK, tree(tmp_path, {name: "800 0 1000"})).findings == ()
    assert severities(judged(open_files.CHECK, tree(tmp_path, {name: "801 0 1000"}))) == ["monitor"]
    assert open_files.judge(open_files.OpenFiles(1, 0), CheckContext()).findings == ()
    with pytest.raises(Unjudged):
        judged(open_files.CHECK, tree(tmp_path, {name: "many"}))


def test_process_numbers(tmp_path: Path) -> None:
    def seen(threads: str) -> CheckContext:
        kernel = "/proc/sys/kernel"
        limits = {f"{kernel}/pid_max": 4000, f"{kernel}/threads-max": 1000}
        return tree(tmp_path, limits | {"/proc/loadavg": f"0.1 0.2 0.3 {threads} 77"})

    assert judged(process_ids.CHECK, seen("2/800")).findings == ()
    many = judged(process_ids.CHECK, seen("2/801"))
    assert severities(many) == ["monitor"]
    assert many.text == "801 of 1000 process numbers are taken (limit 80 %)"
    assert process_ids.judge(process_ids.ProcessIds(1, 0), CheckContext()).findings == ()
    with pytest.raises(Unjudged):
        judged(process_ids.CHECK, seen("many"))


@pytest.mark.parametrize("root", lustre_imports.ROOTS)
def test_lustre_imports(tmp_path: Path, root: str) -> None:
    assert lustre_imports.absent(CheckContext(tmp_path)) == "no Lustre client"

    def seen(**states: str) -> CheckContext:
        text = "import:\n    name: {}\n    state: {}\n    state_history:\n"
        files = {f"{root}/osc/{n}/import": text.format(n, state) for n, state in states.items()}
        return tree(tmp_path, files)

    sound = seen(OST0="FULL", OST1="IDLE")
    assert lustre_imports.absent(sound) == ""
    assert judged(lustre_imports.CHECK, sound).text == "2 connections to Lustre's servers stand"
    away = judged(lustre_imports.CHECK, seen(OST1="DISCONN"))
    assert severities(away) == ["monitor"]
    assert away.text == "OST1 is not connected: DISCONN"
    assert lustre_imports.CHECK.asks_for == (Severity.MONITOR,)
    assert lustre_imports.judge((), sound).findings == ()


PORT = "/sys/class/infiniband/mlx5_0/ports/1"


def port(root: Path, state: str = "4: ACTIVE", rate: int = 400, **counters: int) -> CheckContext:
    physical = "5: LinkUp" if "ACTIVE" in state else "2: Polling"
    return tree(
        root,
        {
            f"{PORT}/state": state,
            f"{PORT}/phys_state": physical,
            f"{PORT}/rate": f"{rate} Gb/sec (4X NDR)",
            f"{PORT}/counters/link_downed": counters.get("link_downed", 5),
            f"{PORT}/counters/symbol_error": counters.get("symbol_error", 9999),
        },
    )


def test_infiniband_ports(tmp_path: Path) -> None:
    check = infiniband_ports.CHECK
    context = port(tmp_path)
    first = check.probe(context)
    assert infiniband_ports.judge(first, context).findings == ()
    down = judged(check, port(tmp_path, "1: DOWN"), first=first)
    assert severities(down) == ["monitor"]
    assert "it is down" in down.text
    assert severities(judged(check, port(tmp_path, rate=200), first=first)) == ["monitor"]
    assert severities(judged(check, port(tmp_path, link_downed=8), first=first)) == ["monitor"]
    assert judged(check, port(tmp_path, link_downed=7), first=first).findings == ()


@pytest.mark.parametrize(
    ("counter", "grown", "found"),
    [
        ("rnr_nak_retry_err", 0, False),
        ("rnr_nak_retry_err", 1, True),
        ("roce_slow_restart", 600, False),
        ("roce_slow_restart", 601, True),
    ],
)
def test_a_counter_of_a_port_that_grows_fast(
    tmp_path: Path, counter: str, grown: int, found: bool
) -> None:
    check, file = infiniband_ports.CHECK, f"{PORT}/hw_counters/{counter}"
    port(tmp_path)
    before = check.probe(tree(tmp_path, {file: 7000}))
    later = dataclasses.replace(tree(tmp_path, {file: 7000 + grown}), now=65.0)
    judgement = judged(check, later, first=before, earlier=(before,))
    assert severities(judgement) == ["monitor"] * found
    assert (f"{grown} {counter} in 60 s" in judgement.text) is found


def test_a_port_that_never_was_up_is_not_used(tmp_path: Path) -> None:
    assert judged(infiniband_ports.CHECK, port(tmp_path, "1: DOWN")).findings == ()


def test_a_port_below_the_rate_of_the_profile(tmp_path: Path) -> None:
    expected = Expected(profile=NodeProfile(infiniband_rate="400 Gb/sec"))
    assert judged(infiniband_ports.CHECK, port(tmp_path), expected=expected).findings == ()
    slow = judged(infiniband_ports.CHECK, port(tmp_path, rate=200), expected=expected)
    assert severities(slow) == ["monitor"]


def test_efa_devices(tmp_path: Path) -> None:
    root = "/sys/class/infiniband"
    context = tree(
        tmp_path,
        {
            f"{root}/efa_0/device/vendor": "0x1d0f",
            f"{root}/efa_0/device/device": "0xefa2",
            f"{root}/mlx5_0/device/vendor": "0x15b3",
            f"{root}/mlx5_0/device/device": "0x1021",
        },
    )
    seen = efa_devices.EfaSeen(1, at=5.0)
    assert efa_devices.CHECK.probe(context) == seen
    assert efa_devices.judge(seen, context).findings == ()
    wants = dataclasses.replace(context, expected=Expected(profile=NodeProfile(efa_devices=4)))
    assert severities(efa_devices.judge(seen, wants)) == ["reboot"]
    assert efa_devices.judge(efa_devices.EfaSeen(4), wants).findings == ()


def test_an_efa_port_that_was_active_and_is_down(tmp_path: Path) -> None:
    root = "/sys/class/infiniband/efa_0"
    files = {f"{root}/device/vendor": "0x1d0f", f"{root}/device/device": "0xefa2"}
    states = ("4: ACTIVE", "1: DOWN")
    up, down = (tree(tmp_path / s[0], files | {f"{root}/ports/1/state": s}) for s in states)
    first = efa_devices.probe(up)
    assert first == efa_devices.EfaSeen(1, at=5.0)
    assert judged(efa_devices.CHECK, up, first=first).findings == ()
    lost = judged(efa_devices.CHECK, down, first=first)
    assert severities(lost) == ["reboot"]
    assert lost.text == "EFA ports that were active are down: efa_0/1 (1: DOWN)"
    assert judged(efa_devices.CHECK, down).findings == (), "it never was active"
    again = dataclasses.replace(down, first=efa_devices.probe(down))
    assert judged(efa_devices.CHECK, again).findings == ()


def efa(root: Path, now: float, **files: object) -> CheckContext:
    base = "/sys/class/infiniband/efa_0"
    own = {f"{base}/device/vendor": "0x1d0f", f"{base}/device/device": "0xefa2"}
    own |= {f"{base}/{name.replace('__', '/')}": value for name, value in files.items()}
    return dataclasses.replace(tree(root / str(now), own), now=now)


def efa_judged(*contexts: CheckContext) -> Judgement:
    """Judge the last of some looks at the same device."""
    *before, last = contexts
    seen = [efa_devices.probe(one) for one in before]
    more = {"first": seen[0], "earlier": (seen[-1],)} if seen else {}
    return judged(efa_devices.CHECK, last, **more)


def test_an_efa_device_whose_interface_has_lost_its_carrier(tmp_path: Path) -> None:
    up, down = (efa(tmp_path, at, device__net__eth0__carrier=1 - at) for at in (0, 1))
    assert efa_judged(up).findings == ()
    assert efa_judged(down).findings == (), "it never had one"
    lost = efa_judged(up, down)
    assert severities(lost) == ["reboot"]
    assert "efa_0/eth0 (no carrier)" in lost.text


@pytest.mark.parametrize(
    ("counter", "growth", "asked"),
    [
        ("ports__1__hw_counters__rx_drops", 6100, []),
        ("ports__1__hw_counters__rx_drops", 6101, ["monitor"]),
        ("ports__1__hw_counters__retrans_bytes", 1_600_000, []),
        ("ports__1__hw_counters__retrans_bytes", 1_600_001, ["monitor"]),
        ("hw_counters__cmds_err", 20, []),
        ("hw_counters__cmds_err", 21, ["monitor"]),
        ("hw_counters__no_completion_cmds", 1, ["replace"]),
        ("hw_counters__no_completion_cmds", 0, []),
        ("hw_counters__no_completion_cmds", -5, []),  # the driver was loaded anew
    ],
)
def test_counters_of_an_efa_device(
    tmp_path: Path, counter: str, growth: int, asked: list[str]
) -> None:
    looks = [efa(tmp_path, at, **{counter: n}) for at, n in ((0.0, 90), (60.0, 90 + growth))]
    result = efa_judged(*looks)
    assert severities(result) == asked
    assert {one.subject for one in result.findings} <= {"efa_0"}
    assert efa_judged(looks[1]).findings == (), "history is not judged"


def test_a_command_without_an_answer_holds_and_a_rate_ends(tmp_path: Path) -> None:
    counters = ((0.0, 0), (60.0, 500), (120.0, 500))
    looks = [
        efa(tmp_path, at, hw_counters__no_completion_cmds=n, hw_counters__cmds_err=n)
        for at, n in counters
    ]
    assert severities(efa_judged(*looks[:2])) == ["replace", "monitor"]
    assert severities(efa_judged(*looks)) == ["replace"]


@pytest.mark.parametrize(
    "leaf", ["stats/hardware/mem_ecc_uncorrected/total", "mem_ecc_uncorrected"]
)
def test_neuron_devices(tmp_path: Path, leaf: str) -> None:
    name = f"/sys/devices/virtual/neuron_device/neuron0/{leaf}"
    check = neuron_devices.CHECK
    assert judged(check, tree(tmp_path, {})).findings == ()
    assert judged(check, tree(tmp_path, {name: 0})).findings == ()
    assert severities(judged(check, tree(tmp_path, {name: 2}))) == ["replace"]
    wants = Expected(profile=NodeProfile(neuron_devices=16))
    fewer = judged(check, tree(tmp_path, {name: 0}), expected=wants)
    assert severities(fewer) == ["reboot"]
    assert neuron_devices.judge((), CheckContext()).findings == ()


def test_shared_mounts(tmp_path: Path) -> None:
    mounts = (
        "10.0.0.7:/home /home nfs4 rw 0 0\n/dev/sda1 / ext4 rw 0 0\n10.0.0.7:/x /gone nfs rw 0 0"
    )
    (tmp_path / "home").mkdir()
    context = tree(tmp_path, {"/proc/self/mounts": mounts})
    (one,) = judged(shared_mounts.CHECK, context).findings
    assert (one.severity, one.subject) == (Severity.MONITOR, "/gone")
    assert shared_mounts.judge((), context).findings == ()


def health(**facts: str) -> gpu_health.GpusHealth:
    return gpu_health.GpusHealth(({"id": "0000:1b:00.0", **facts},), ((18, 18),))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"remapped_rows_failure": "No", "gpu_recovery_action": "none"}, []),
        ({"gpu_recovery_action": "gpu reset"}, ["reset"]),
        ({"gpu_recovery_action": "node reboot"}, ["reboot"]),
        ({"gpu_recovery_action": "drain p2p"}, ["reset"]),
        ({"remapped_rows_failure": "Yes"}, ["replace"]),
        ({"remapped_rows_pending": "Yes"}, ["reset"]),
        ({"sram_threshold_exceeded": "Yes"}, ["replace"]),
        ({"ecc_errors_uncorrected_volatile_total": "3"}, ["reset"]),
        ({"clocks_event_reasons/hw_slowdown": "Active"}, ["monitor"]),
        ({"current_link_width": "8", "max_link_width": "16"}, ["reboot"]),
        ({"error": "GPU is lost"}, ["reboot"]),
    ],
)
def test_the_health_of_a_gpu(facts: dict[str, str], expected: list[str]) -> None:
    judgement = gpu_health.judge(health(**facts), CheckContext(now=5.0))
    assert severities(judgement) == expected
    assert {one.check for one in judgement.findings} <= {"gpu_health"}


@pytest.mark.parametrize(
    ("links", "wanted", "expected"),
    [
        ((18, 18), None, []),
        ((17, 18), None, ["reset"]),
        ((0, 12), None, []),
        ((0, 12), 12, ["reset"]),
        ((8, 12), 8, []),
    ],
)
def test_nvlinks(links: tuple[int, int], wanted: int | None, expected: list[str]) -> None:
    seen = health()._replace(links=(links,))
    context = CheckContext(expected=Expected(profile=NodeProfile(nvlinks=wanted)))
    assert severities(gpu_health.judge(seen, context)) == expected


def test_a_node_without_gpus_needs_no_library() -> None:
    nothing = gpu_health.GpusHealth(error="NVML Shared Library Not Found", library=False)
    assert gpu_health.judge(nothing, CheckContext(expected=Expected(gpus=0))).findings == ()
    with pytest.raises(Unjudged, match="NVML does not answer"):
        gpu_health.judge(nothing, CheckContext(expected=Expected(gpus=8)))


# --- probes in a process of their own ---------------------------------------------------------


def run_one(check: Check, context: CheckContext) -> Any:
    return CheckRunner([check], context, SystemClock()).run_one(check)


def test_a_probe_in_a_child_gives_its_reading(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    context = tree(tmp_path, {"/proc/self/mounts": "10.0.0.7:/home /home nfs4 rw 0 0"})
    result = run_one(shared_mounts.CHECK, context)
    assert (result.verdict, result.text) == ("pass", "1 shared file systems answer")


def test_a_probe_in_a_child_that_cannot_tell_is_unjudged(tmp_path: Path) -> None:
    result = run_one(shared_mounts.CHECK, CheckContext(sysroot=tmp_path))
    assert (result.verdict, result.text) == ("unjudged", "/proc/self/mounts cannot be read")


def test_a_child_loads_the_module_of_its_check_alone(tmp_path: Path) -> None:
    assert check_child._module_of(shared_mounts.CHECK) == shared_mounts.__name__
    changed = dataclasses.replace(shared_mounts.CHECK, timeout=7.0)
    assert check_child._module_of(changed) == "", "the module's is another one"
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mounts").write_text("")
    for check in (shared_mounts.CHECK, changed):
        assert run_one(check, CheckContext(sysroot=tmp_path)).verdict == "pass"


def test_a_child_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is a FIFO that has no writer: to open it takes forever."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    os.mkfifo(tmp_path / "proc" / "self" / "mounts")
    check = dataclasses.replace(shared_mounts.CHECK, timeout=1.0)
    children: list[Any] = []
    start = check_child.subprocess.Popen

    def remember(*words: Any, **more: Any) -> Any:
        children.append(start(*words, **more))
        return children[-1]

    monkeypatch.setattr(check_child.subprocess, "Popen", remember)
    result = run_one(check, CheckContext(sysroot=tmp_path))
    assert result.verdict == "unjudged"
    assert "was killed" in result.text
    (child,) = children
    assert child.returncode == -9


def test_a_child_that_cannot_be_killed_is_not_started_twice(tmp_path: Path) -> None:
    class Stuck:
        pid = 77

        def poll(self) -> None:
            return None

    children = check_child.ChildProbes()
    children._stuck["shared_mounts"] = Stuck()  # type: ignore[assignment]
    with pytest.raises(Unjudged, match="process 77 of an earlier run still hangs"):
        children.probe(shared_mounts.CHECK, CheckContext(sysroot=tmp_path))


def test_a_child_takes_no_module_from_where_root_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sresd --once` in /tmp, where any user has left a msgspec.py."""
    (tmp_path / "msgspec.py").write_text("open('taken', 'w')")
    monkeypatch.chdir(tmp_path)
    result = run_one(shared_mounts.CHECK, CheckContext())
    assert "without an answer" not in result.text
    assert not (tmp_path / "taken").exists()


def test_a_child_that_dies_is_unjudged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_child.sys, "executable", "/bin/false")
    result = run_one(shared_mounts.CHECK, CheckContext())
    assert result.verdict == "unjudged"
    assert "without an answer" in result.text
    assert sys.executable == "/bin/false"


def test_the_runner_keeps_earlier_readings() -> None:
    numbers = iter(range(9))
    check = Check(
        "n", lambda context: next(numbers), lambda seen, c: Judgement(str(c.earlier)), remembers=2
    )
    runner = CheckRunner([check], CheckContext(), SystemClock())
    texts = [runner.run_one(check).text for _ in range(4)]
    assert texts == ["()", "(0,)", "(0, 1)", "(1, 2)"]


def test_a_period_that_is_none_is_refused() -> None:
    from slurm_resilience.errors import ConfigError

    with pytest.raises(ConfigError, match=r"checks\.periods\.disk must be greater than 0"):
        config.parse("[checks.periods]\ndisk = 0\n")
    assert config.parse("[checks.periods]\ndisk = 5\n").checks.periods == {"disk": 5.0}


def test_drivers_are_named_with_their_versions(tmp_path: Path) -> None:
    context = CheckContext(sysroot=tmp_path)
    assert software.drivers(context) == ()
    for name, text in {
        "proc/driver/nvidia/version": (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build\n"
            "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
        ),
        "sys/module/efa/version": "2.8.0g\n",
        "sys/module/neuron/version": "\n",
        "proc/sys/kernel/osrelease": "6.1.0-13\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert software.drivers(context) == ("NVIDIA driver 550.54.14", "EFA driver 2.8.0g")


def test_software_is_compared_with_that_of_the_last_deep_check(tmp_path: Path) -> None:
    context = CheckContext(sysroot=tmp_path, now=5.0)
    release = tmp_path / "proc" / "sys" / "kernel" / "osrelease"
    release.parent.mkdir(parents=True)
    release.write_text("6.1.0-13\n")
    assert software.judge(software.probe(context), context).findings == ()
    software.remember(context)
    assert software.judge(software.probe(context), context).findings == ()
    driver = tmp_path / "proc" / "driver" / "nvidia" / "version"
    driver.parent.mkdir(parents=True)
    driver.write_text("NVRM version: 560.35\nGCC version: 12\n")
    release.write_text("6.1.0-14\n")
    (finding,) = software.judge(software.probe(context), context).findings
    assert finding.severity == "monitor"
    assert finding.text == (
        "since its last deep check: NVIDIA driver none → NVRM version: 560.35; "
        "kernel 6.1.0-13 → 6.1.0-14"
    )
    software.remember(context)
    assert software.judge(software.probe(context), context).findings == ()
    (tmp_path / "var" / "lib" / "slurm-resilience" / "software.json").write_text("{")
    assert software.judge(software.probe(context), context).findings == ()
    elsewhere = config.CheckSettings(state_dir="/disk/of/this/node")
    software.remember(CheckContext(sysroot=tmp_path, settings=elsewhere))
    assert (tmp_path / "disk" / "of" / "this" / "node" / "software.json").is_file()
