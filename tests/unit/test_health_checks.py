"""The checks, on trees laid out below a sysroot; and the runner that owns their limits."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_resilience import config
from slurm_resilience.agent.facts import gpus
from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import ConfigError
from slurm_resilience.health import check_registry
from slurm_resilience.health.check import Check, CheckContext, Expected, Judgement, Unjudged
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.health.checks.gpu import gpu_count
from slurm_resilience.health.checks.host import memory
from slurm_resilience.health.checks.storage import disk, filesystem_readonly, inodes
from slurm_resilience.health.checks.storage.disk import Usage
from slurm_resilience.model import CheckResult, Severity

GOOD = """\
proc /proc proc rw,nosuid 0 0
/dev/sda1 / ext4 rw,relatime 0 0
/dev/nvme0n1 /scratch xfs rw 0 0
/dev/loop0 /snap/core squashfs ro 0 0
/dev/sr0 /media iso9660 ro 0 0
overlay /image overlay ro,lowerdir=/x 0 0
/dev/sdb1 /reference\\040data ext4 ro 0 0
"""


def machine(root: Path, mounts: str, fstab: str = "") -> CheckContext:
    for name, text in {"proc/self/mounts": mounts, "etc/fstab": fstab}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return CheckContext(sysroot=root, now=5.0)


def judge_mounts(root: Path, mounts: str, fstab: str = "", first: str = GOOD) -> Judgement:
    before = filesystem_readonly.probe(machine(root, first, fstab))
    context = dataclasses.replace(machine(root, mounts, fstab), first=before)
    return filesystem_readonly.judge(filesystem_readonly.probe(context), context)


def test_what_is_read_only_by_design_is_no_fault(tmp_path: Path) -> None:
    assert judge_mounts(tmp_path, GOOD).findings == ()


def test_a_disk_that_turns_read_only_asks_for_a_reboot(tmp_path: Path) -> None:
    bad = GOOD.replace("/scratch xfs rw", "/scratch xfs ro,noatime")
    (one,) = judge_mounts(tmp_path, bad).findings
    assert (one.severity, one.subject, one.at) == (Severity.REBOOT, "/scratch", 5.0)
    assert one.text == "/scratch (xfs on /dev/nvme0n1) has turned read-only"


def test_fstab_tells_what_should_be_writable_when_it_was_never_seen_so(tmp_path: Path) -> None:
    bad = GOOD.replace("/ ext4 rw", "/ ext4 ro")
    assert judge_mounts(tmp_path, bad, first=bad).findings == ()
    (one,) = judge_mounts(tmp_path, bad, "UUID=1 / ext4 errors=remount-ro 0 1\n", bad).findings
    assert one.subject == "/"
    own = "UUID=1 / ext4 ro 0 1\nUUID=2 /x ext4 rw,noauto 0 0\n# /scratch\n"
    assert judge_mounts(tmp_path, bad, own, bad).findings == ()


def test_an_emergency_is_one_although_the_mount_says_rw(tmp_path: Path) -> None:
    bad = GOOD.replace("rw,relatime", "rw,relatime,emergency_ro")
    (one,) = judge_mounts(tmp_path, bad, first=bad).findings
    assert one.subject == "/"


def test_the_upper_mount_counts(tmp_path: Path) -> None:
    hidden = GOOD.replace("/scratch xfs rw", "/scratch xfs ro") + "tmpfs /scratch tmpfs rw 0 0\n"
    assert judge_mounts(tmp_path, hidden).findings == ()


def test_another_disk_that_is_mounted_read_only_in_its_place_is_no_fault(tmp_path: Path) -> None:
    """A person looked at another disk, and the node was to be rebooted."""
    other = GOOD.replace("/dev/nvme0n1 /scratch xfs rw", "/dev/nvme7n1 /scratch xfs ro")
    assert other != GOOD and judge_mounts(tmp_path, other).findings == ()
    (one,) = judge_mounts(tmp_path, other, "UUID=2 /scratch xfs defaults 0 0\n").findings
    assert one.subject == "/scratch"


def test_no_list_of_mounts_is_unjudged(tmp_path: Path) -> None:
    with pytest.raises(Unjudged):
        filesystem_readonly.probe(CheckContext(sysroot=tmp_path))


def test_a_full_disk_is_watched_only() -> None:
    settings = config.CheckSettings(disk_full_percent=90.0, inodes_full_percent=50.0)
    context = CheckContext(settings=settings)
    seen = (Usage("/", 1000, 200), Usage("/tmp", 1000, 40), Usage("/dev", 0, 0))
    (full,) = disk.judge(seen, context).findings
    assert (full.severity, full.subject, full.check) == (Severity.MONITOR, "/tmp", "disk")
    assert "96.0 %" in full.text
    assert [f.check for f in inodes.judge(seen, context).findings] == ["inodes", "inodes"]
    assert disk.judge(seen[:1], context).text == "space in use: / 80 %"


def test_space_and_inodes_of_this_machine(tmp_path: Path) -> None:
    settings = config.CheckSettings(mounts=("/", "/gone"))
    context = CheckContext(sysroot=tmp_path, settings=settings)
    for check in (disk, inodes):
        (one,) = check.probe(context)
        assert 0.0 <= one.percent <= 100.0
    with pytest.raises(Unjudged):
        disk.probe(CheckContext(sysroot=tmp_path, settings=config.CheckSettings(mounts=("/gone",))))


@pytest.mark.parametrize(
    ("have", "wanted", "faulty"), [(1000, 1000, 0), (951, 1000, 0), (949, 1000, 1), (64, 1, 0)]
)
def test_missing_memory(have: int, wanted: int, faulty: int, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemFree: 1 kB\nMemTotal:  {have * 1024} kB\n")
    context = CheckContext(sysroot=tmp_path, expected=Expected(memory=wanted))
    findings = memory.judge(memory.probe(context), context).findings
    assert [f.severity for f in findings] == [Severity.REPLACE] * faulty


def test_memory_without_an_expectation_is_unjudged() -> None:
    with pytest.raises(Unjudged, match="64 MiB; what Slurm expects is unknown"):
        memory.judge(64, CheckContext())


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("", 0),
        ("gpu", 1),
        ("gpu:2", 2),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:h100:2,gpu:a100-40gb:2(S:1-2,4),lic:1,mps:200", 4),
        ("gpu:Trainium2:16(S:0-1)", 0),
    ],
)
def test_gpus_of_a_gres(gres: str, count: int) -> None:
    assert gpus(gres) == count


NVML_STUB = r"""
#include <stdlib.h>
static int number(const char *name) { const char *v = getenv(name); return v ? atoi(v) : 0; }
int nvmlInitWithFlags(unsigned flags) { return number("STUB_INIT"); }
int nvmlInit_v2(void) { return number("STUB_INIT"); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "GPU is lost"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("STUB_COUNT"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)(index + 1);
    return index < (unsigned)number("STUB_LOST") ? 15 : 0;
}
"""
PROBE = """
from slurm_resilience.health.checks.gpu.gpu_count import probe
from slurm_resilience.health.check import CheckContext
import json; print(json.dumps(probe(CheckContext())))
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a libnvidia-ml.so.1 that answers as its environment says."""
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed: the NVML stub cannot be built")
    place = tmp_path_factory.mktemp("nvml")
    (place / "stub.c").write_text(NVML_STUB, encoding="utf-8")
    library = str(place / "libnvidia-ml.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(place / "stub.c")], check=True)
    return place


def count_gpus(nvml: Path, wanted: int | None, **stub: int) -> Judgement:
    """Probe in a process of its own (the library is loaded once a process), judge here."""
    env = {f"STUB_{name.upper()}": str(value) for name, value in stub.items()}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=env | {"LD_LIBRARY_PATH": str(nvml)},
        capture_output=True,
        text=True,
        check=True,
    )
    seen = msgspec.convert(msgspec.json.decode(done.stdout), gpu_count.GpusSeen)
    return gpu_count.judge(seen, CheckContext(expected=Expected(gpus=wanted)))


def test_all_gpus_answer(nvml: Path) -> None:
    assert count_gpus(nvml, 8, count=8) == Judgement("8 GPUs, Slurm expects 8")
    assert count_gpus(nvml, 4, count=8).findings == ()


def test_a_gpu_is_missing(nvml: Path) -> None:
    (one,) = count_gpus(nvml, 8, count=7).findings
    assert (one.severity, one.text) == (Severity.REBOOT, "7 GPUs, Slurm expects 8")


def test_a_gpu_is_listed_but_lost(nvml: Path) -> None:
    (one,) = count_gpus(nvml, 8, count=8, lost=1).findings
    assert one.text == "7 GPUs (GPU 0: GPU is lost), Slurm expects 8"


def test_the_driver_is_broken(nvml: Path) -> None:
    (one,) = count_gpus(nvml, 8, init=9).findings
    assert one.severity is Severity.REBOOT
    assert "does not answer (Driver Not Loaded)" in one.text
    assert count_gpus(nvml, 0, init=9).findings == ()


def test_what_cannot_be_told_is_unjudged(nvml: Path, tmp_path: Path) -> None:
    with pytest.raises(Unjudged, match="8 GPUs; what Slurm expects is unknown"):
        count_gpus(nvml, None, count=8)
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has NVML's library")
    with pytest.raises(Unjudged, match="no NVML library"):
        count_gpus(tmp_path, 8)
    assert count_gpus(tmp_path, 0).findings == ()


def run_one(check: Check, context: CheckContext | None = None) -> CheckResult:
    return CheckRunner([check], context or CheckContext(), SystemClock()).run_one(check)


def test_a_check_that_raises_is_unjudged() -> None:
    def probe(context: CheckContext) -> Any:
        raise ZeroDivisionError("oh")

    result = run_one(Check("broken", probe, lambda seen, context: Judgement("")))
    assert (result.verdict, result.text) == ("unjudged", "ZeroDivisionError: oh")


def test_a_judge_that_raises_is_unjudged() -> None:
    result = run_one(Check("broken", lambda context: 1, lambda seen, context: seen.nothing))
    assert result.verdict == "unjudged"


def test_a_check_that_hangs_is_unjudged_and_not_started_twice() -> None:
    go, starts = threading.Event(), []

    def probe(context: CheckContext) -> int:
        starts.append(1)
        go.wait(30)
        return 1

    check = Check("slow", probe, lambda seen, context: Judgement("ok"), timeout=0.05)
    runner = CheckRunner([check], CheckContext(), SystemClock())
    assert runner.run_one(check).text == "no answer within 0.05 s"
    assert "still hangs" in runner.run_one(check).text
    assert len(starts) == 1
    go.set()
    deadline = threading.Event()
    for _ in range(200):
        result = runner.run_one(check)
        if result.verdict == "pass":
            break
        deadline.wait(0.01)
    assert result.verdict == "pass", result


def test_the_first_sight_is_kept() -> None:
    counter = iter(range(10))
    check = Check("n", lambda c: next(counter), lambda seen, c: Judgement(f"{c.first}→{seen}"))
    runner = CheckRunner([check], CheckContext(), SystemClock())
    assert [runner.run_one(check).text for _ in range(3)] == ["None→0", "0→1", "0→2"]


SITE = Check("site", lambda context: 1, lambda seen, context: Judgement("fine"))


def test_a_site_brings_its_own_check(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("site", f"{__name__}:SITE", check_registry.GROUP),
        EntryPoint("gone", "no.such.module:CHECK", check_registry.GROUP),
        EntryPoint("odd", "os:path", check_registry.GROUP),
    ]
    monkeypatch.setattr(check_registry, "entry_points", lambda group: points)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    found = {check.name: check for check in check_registry.checks(disabled=("disk",))}
    assert "disk" not in found
    assert run_one(found["site"]).verdict == "pass"
    assert run_one(found["gone"]).verdict == "unjudged"
    assert "not a Check" in run_one(found["odd"]).text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"periods": {"gpu_helth": 60.0}},
            "periods: there is no check 'gpu_helth'; did you mean 'gpu_",
        ),
        ({"periods": {"zz": 60.0}}, "there is no check 'zz'; `sres check list` shows them"),
        ({"periods": {"gpu_events": 60.0}}, "periods: there is no check 'gpu_events'"),
        (
            {"disabled": ("Disk",)},
            "checks.disabled: there is no check 'Disk'; did you mean 'disk'?",
        ),
    ],
)
def test_a_name_of_no_check_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_registry.refuse_unknown_names(config.CheckSettings(**settings))


def test_names_of_checks_are_known(tmp_path: Path) -> None:
    known = config.CheckSettings(
        disabled=("disk", "gpu_events", "lifecycle"), periods={"gpu_health": 1.0, "lifecycle": 5.0}
    )
    check_registry.refuse_unknown_names(known)
    program = tmp_path / "fans"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    own = config.CheckSettings(directory=str(tmp_path), periods={"fans": 1.0, "elsewhere": 1.0})
    check_registry.refuse_unknown_names(own)
