"""GPU checks through the real pynvml, against a library of our own that a file drives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvml_library import StubDriver, built_library, stub_driver

from slurm_resilience.clock import SystemClock
from slurm_resilience.health import learn_profile
from slurm_resilience.health.check import Check, CheckContext, Expected
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.health.checks.gpu import (
    gpu_count,
    gpu_health,
    gpu_libraries,
    gpu_processes,
    mig_devices,
)
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.health.profile_files import load_profile
from slurm_resilience.model import CheckResult

Look = Callable[..., CheckResult]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the library."""
    return built_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    return stub_driver(tmp_path, library, monkeypatch)


@pytest.fixture
def look(driver: StubDriver, tmp_path: Path) -> Look:
    """Run a check in its process, as sresd does, while the driver says so."""
    runners: dict[str, CheckRunner] = {}

    def run(
        text: str,
        profile: NodeProfile | None = None,
        check: Check = gpu_health.CHECK,
        gpus: int | None = 2,
    ) -> CheckResult:
        driver.says(text)
        runner = runners.setdefault(check.name, CheckRunner([check], CheckContext(), SystemClock()))
        expected = Expected(None, gpus, profile or NodeProfile())
        runner._context = CheckContext(tmp_path, expected=expected)
        return runner.run_one(check)

    return run


def test_sound_gpus(look: Look) -> None:
    result = look("")
    assert (result.verdict, result.text) == ("pass", "2 GPUs without a fault")


@pytest.mark.parametrize(
    ("state", "severity", "said"),
    [
        ("gpu1.recovery=1", "reset", "gpu reset"),
        ("gpu1.recovery=2", "reboot", "node reboot"),
        ("gpu1.recovery=4", "reset", "drain and reset"),
        ("gpu1.failed=1", "replace", "remapping a row failed"),
        ("gpu1.pending=1", "reset", "waits to be remapped"),
        ("gpu1.uncorrected=513", "replace", "513 rows remapped"),
        ("gpu1.ecc=3", "reset", "3 uncorrected memory errors"),
        ("gpu1.ecc_corrected=20000001", "monitor", "corrected memory errors (limit 2e+07)"),
        ("gpu1.power=-999", "reboot", "the driver cannot read it"),
        ("gpu1.sram=1", "replace", "threshold"),
        ("gpu1.clocks=8", "monitor", "hw_slowdown"),
        ("gpu1.width=8", "reboot", "8 of 16 PCIe lanes"),
        ("gpu1.links_up=17", "reset", "17 of 18 NVLinks"),
        ("gpu1.handle=15", "reboot", "the GPU is lost"),
        ("gpu1.handle=16", "reset", "requires a reset"),
        ("gpu1.failed=-3\ngpu1.retired=60", "replace", "60 retired pages"),
        ("gpu1.retired=1\ngpu1.retirement=1", "reboot", "waits to be retired"),
        ("gpu1.margin=0", "monitor", "no margin is left"),
        ("gpu1.fabric=3\ngpu1.fabric_status=3", "reboot", "could not join the NVLink fabric"),
        ("gpu1.fabric=2", "monitor", "in progress"),
        ("gpu1.fabric=3\ngpu1.fabric_mask=16", "reboot", "unhealthy route"),
        ("gpu1.fabric=3\ngpu1.fabric_mask=4", "monitor", "route recovery"),
    ],
)
def test_a_sick_gpu(look: Look, state: str, severity: str, said: str) -> None:
    result = look(state)
    assert result.verdict == "fail", result
    assert [str(one.severity) for one in result.findings] == [severity]
    assert said in result.text
    assert look("").verdict == "pass", "the file is read anew"


def test_clocks_that_idle_or_meet_their_power_cap_are_no_fault(look: Look) -> None:
    assert look("clocks=5").verdict == "pass"


def test_what_a_product_does_not_count_is_no_fault(look: Look) -> None:
    state = "ecc=-3\nsram=-3\nfailed=-3\nrecovery=-3\nclocks=-3"
    assert look(state).verdict == "pass"


def test_links_that_a_product_does_not_use_are_no_fault(look: Look) -> None:
    assert look("links_up=0").verdict == "pass"
    assert look("links_up=0", NodeProfile(nvlinks=18)).verdict == "fail"


def test_a_driver_that_does_not_answer_is_unjudged_here(look: Look) -> None:
    """`gpu_count` judges that."""
    result = look("init=9")
    assert (result.verdict, result.text) == ("unjudged", "NVML does not answer: Driver Not Loaded")


def test_a_library_that_is_empty_is_unjudged(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert look("").verdict == "unjudged"


def test_a_fabric_that_is_well(look: Look) -> None:
    """Two bits for each kind of fault: 2 says that there is none."""
    assert look("fabric=3\nfabric_mask=170").verdict == "pass"


def test_a_pcie_generation_counts_when_the_gpu_works_twice_in_a_row(look: Look) -> None:
    slow = "gpu1.generation=3\n"
    assert look(slow).verdict == "pass", "an idle GPU lowers it"
    assert look(slow + "load=90").verdict == "pass", "the load may have begun this moment"
    result = look(slow + "load=90")
    assert [str(one.severity) for one in result.findings] == ["reboot"]
    assert "PCIe generation 3 of 5 under load" in result.text
    assert look("load=90").verdict == "pass"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("replays=7", "replays=47", ""),
        ("replays=7", "replays=48", "41 pcie_replay"),
        ("replays=48", "replays=0", ""),  # the driver was loaded anew
        ("link_errors=3", "link_errors=3", ""),
        ("link_errors=3", "link_errors=4", "18 nvlink_recovery"),
        ("replays=-3\nlink_errors=-3", "replays=-3\nlink_errors=-3", ""),
    ],
)
def test_counters_that_grow_between_two_runs(
    look: Look, before: str, after: str, said: str
) -> None:
    assert look(before).verdict == "pass", "history is not judged"
    result = look(after)
    assert (said in result.text) if said else result.verdict == "pass"
    assert {str(one.severity) for one in result.findings} <= {"monitor"}
    assert look(after).verdict == "pass"


@pytest.mark.parametrize(
    ("state", "gpus", "verdict", "said"),
    [
        ("", 2, "pass", "2 GPUs, Slurm expects 2"),
        ("", 8, "fail", "2 GPUs, Slurm expects 8"),
        ("gpu0.handle=15", 2, "fail", "1 GPUs (GPU 0: GPU is lost), Slurm expects 2"),
        ("init=9", 2, "fail", "the NVIDIA driver does not answer (Driver Not Loaded)"),
        ("init=9", 0, "pass", "no GPU, and Slurm expects none"),
        ("", None, "unjudged", "what Slurm expects is unknown"),
    ],
)
def test_the_number_of_gpus(
    look: Look, state: str, gpus: int | None, verdict: str, said: str
) -> None:
    result = look(state, check=gpu_count.CHECK, gpus=gpus)
    assert result.verdict == verdict
    assert said in result.text


def on_bus(root: Path, slot: str, driver: str = "nvidia", kind: str = "0x030200") -> Path:
    """Lay out a GPU on the PCI bus; NVML's own are 0000:01:00.0 and 0000:02:00.0."""
    folder = root / "sys/bus/pci/devices" / f"0000:{slot}:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x10de\n", encoding="utf-8")
    (folder / "class").write_text(f"{kind}\n", encoding="utf-8")
    if driver:
        (folder / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
    return folder


@pytest.mark.parametrize(
    ("state", "gpus", "verdict", "said"),
    [
        (
            "",
            3,
            "reboot",
            "2 GPUs (on the PCI bus, but not shown by the driver: 0000:03:00.0), Slu",
        ),
        ("", 2, "monitor", "not shown by the driver: 0000:03:00.0), Slurm expects 2"),
        ("", None, "monitor", "not shown by the driver: 0000:03:00.0); what Slurm expects is unk"),
        ("gpu1.handle=15", 2, "reboot", "not shown by the driver: 0000:02:00.0, 0000:03:00.0)"),
        ("", 0, "", "no GPU, and Slurm expects none"),
    ],
)
def test_a_gpu_on_the_bus_that_the_driver_does_not_show(
    look: Look, tmp_path: Path, state: str, gpus: int | None, verdict: str, said: str
) -> None:
    for slot in ("01", "02"):
        on_bus(tmp_path, slot)
    on_bus(tmp_path, "03", driver="")
    result = look(state, check=gpu_count.CHECK, gpus=gpus)
    assert [str(one.severity) for one in result.findings] == ([verdict] if verdict else [])
    assert said in result.text


def test_what_is_no_gpu_of_the_driver_is_not_missed(look: Look, tmp_path: Path) -> None:
    on_bus(tmp_path, "01")
    on_bus(tmp_path, "02", kind="0x030000")
    on_bus(tmp_path, "03", driver="vfio-pci")
    on_bus(tmp_path, "04", kind="0x068000")
    (on_bus(tmp_path, "05") / "physfn").symlink_to("../0000:01:00.0")
    result = look("", check=gpu_count.CHECK)
    assert (result.verdict, result.text) == ("pass", "2 GPUs, Slurm expects 2")


# --- processes ------------------------------------------------------------------------------


def process(root: Path, pid: int, parent: int, name: str = "python3", group: str = "/") -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    zeros = " ".join("0" * 17)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} {zeros} 99 0\n", encoding="utf-8")
    (folder / "cgroup").write_text(f"0::{group}\n", encoding="utf-8")


def test_a_process_left_behind_is_named_in_the_second_round(look: Look, tmp_path: Path) -> None:
    process(tmp_path, 500, 1)
    held = "gpu1.process=500"
    assert look(held, check=gpu_processes.CHECK).verdict == "pass", "it may be ending"
    result = look(held, check=gpu_processes.CHECK)
    assert [str(one.severity) for one in result.findings] == ["monitor"]
    assert "python3 (500) uses GPU 00000000:02:00.0 outside every job" in result.text
    assert look("", check=gpu_processes.CHECK).verdict == "pass"


@pytest.mark.parametrize("how", ["group", "parent", "service", "gone"])
def test_a_process_of_a_job_or_a_service_is_no_trouble(
    look: Look, tmp_path: Path, how: str
) -> None:
    process(tmp_path, 10, 1, "slurmstepd")
    process(tmp_path, 11, 10, "bash")
    if how == "group":
        process(tmp_path, 500, 1, group="/slurm/uid_7/job_42/step_0")
    elif how == "parent":
        process(tmp_path, 500, 11)
    elif how == "service":
        process(tmp_path, 500, 1, "nvidia-cuda-mps")
    for _ in range(3):
        assert look("gpu1.process=500", check=gpu_processes.CHECK).verdict == "pass"


gpu_users = st.builds(
    gpu_processes.GpuProcess,
    st.integers(1, 5),
    st.integers(0, 2),
    st.sampled_from(["python3", "nv-hostengine"]),
    st.sampled_from(["0000:01:00.0", "0000:02:00.0"]),
    st.booleans(),
)


@given(st.frozensets(gpu_users), st.frozensets(gpu_users))
def test_only_what_stays_outside_jobs_is_named(
    before: frozenset[gpu_processes.GpuProcess], now: frozenset[gpu_processes.GpuProcess]
) -> None:
    context = CheckContext(earlier=(tuple(before),))
    judgement = gpu_processes.judge(tuple(now), context)
    stay = {one for one in before & now if not one.of_job and one.name == "python3"}
    assert len(judgement.findings) == len(stay)
    assert {str(one.severity) for one in judgement.findings} <= {"monitor"}


# --- MIG ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "wanted", "verdict", "said"),
    [
        ("", None, "pass", "none"),
        ("", {}, "pass", "none"),
        ("mig=7", None, "pass", "14 1g.10gb"),
        ("mig=7", {"1g.10gb": 14}, "pass", "14 1g.10gb"),
        ("mig=7\ngpu1.mig=0", {"1g.10gb": 14}, "fail", "7 1g.10gb; the profile expects 14"),
        ("mig=2\nslices=3", {"1g.10gb": 14}, "fail", "4 3g.30gb; the profile expects 14 1g.10gb"),
        ("mig=1", {}, "fail", "the profile expects none"),
    ],
)
def test_mig_devices(
    look: Look, state: str, wanted: dict[str, int] | None, verdict: str, said: str
) -> None:
    result = look(state, NodeProfile(mig_devices=wanted), check=mig_devices.CHECK)
    assert result.verdict == verdict
    assert said in result.text
    assert {str(one.severity) for one in result.findings} <= {"monitor"}


kinds = st.dictionaries(st.sampled_from(["1g.10gb", "2g.20gb", "7g.80gb"]), st.integers(1, 7))


@given(kinds, kinds)
def test_a_layout_is_a_fault_when_it_is_another_one(
    have: dict[str, int], wanted: dict[str, int]
) -> None:
    parts = tuple(kind for kind, count in have.items() for _ in range(count))
    context = CheckContext(expected=Expected(profile=NodeProfile(mig_devices=wanted)))
    seen = (mig_devices.MigLayout("0000:01:00.0", True, parts),)
    assert bool(mig_devices.judge(seen, context).findings) == (have != wanted)
    assert not mig_devices.judge(seen, CheckContext()).findings, "the profile names none"


# --- libraries ------------------------------------------------------------------------------


def test_an_empty_library_is_named(look: Look, driver: StubDriver) -> None:
    (driver.library / "libcuda.so.1").write_bytes(b"")
    result = look("", check=gpu_libraries.CHECK)
    (driver.library / "libcuda.so.1").unlink()
    assert [(str(one.severity), one.subject) for one in result.findings] == [
        ("monitor", "libcuda.so.1")
    ]
    assert "file too short" in result.text


@given(
    st.sampled_from([None, 0, 8]),
    st.lists(
        st.builds(
            gpu_libraries.LibraryLoad, st.sampled_from("ab"), st.sampled_from(["", "too short"])
        ),
        unique_by=lambda one: one.name,
    ),
)
def test_libraries_are_a_fault_only_where_some_are_expected(
    gpus: int | None, seen: list[gpu_libraries.LibraryLoad]
) -> None:
    findings = gpu_libraries.judge(tuple(seen), CheckContext(expected=Expected(gpus=gpus))).findings
    broken = [one for one in seen if one.error]
    if gpus is None and len(broken) == len(seen):
        broken = []  # a node without GPUs has none of them
    assert {one.subject for one in findings} == {one.name for one in broken}
    assert {str(one.severity) for one in findings} <= {"monitor"}


@pytest.mark.parametrize("check", [gpu_processes.CHECK, mig_devices.CHECK, gpu_libraries.CHECK])
def test_where_slurm_expects_no_gpu_the_library_is_not_asked(look: Look, check: Check) -> None:
    assert look("init=9", check=check, gpus=0).verdict == "pass"


@pytest.mark.parametrize("check", [gpu_processes.CHECK, mig_devices.CHECK])
def test_a_driver_that_is_away_is_unjudged(look: Look, check: Check) -> None:
    result = look("init=9", check=check)
    assert (result.verdict, result.text) == ("unjudged", "NVML does not answer: Driver Not Loaded")


def test_a_profile_is_learned_from_the_driver(driver: StubDriver, tmp_path: Path) -> None:
    driver.says("mig=7")
    profile, findings = learn_profile.learn(CheckContext(tmp_path))
    assert findings == ()
    assert (profile.gpus, profile.nvlinks, profile.pcie_width) == (2, 18, 16)
    assert profile.mig_devices == {"1g.10gb": 14}
    file = tmp_path / "ours.toml"
    file.write_text(learn_profile.as_toml(profile), encoding="utf-8")
    assert load_profile(str(file)).mig_devices == profile.mig_devices
