"""GPU checks through the real pynvml, against a library of our own that a file drives."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_resilience.clock import SystemClock
from slurm_resilience.health.check import CheckContext, Expected
from slurm_resilience.health.check_runner import CheckRunner
from slurm_resilience.health.checks.gpu import gpu_health
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import CheckResult

SOURCE = Path(__file__).resolve().parents[1] / "support" / "nvml_stub.c"
Look = Callable[..., CheckResult]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the library."""
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed: the NVML stub cannot be built")
    place = tmp_path_factory.mktemp("nvml")
    words = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*words, "-o", str(place / "libnvidia-ml.so.1"), str(SOURCE)], check=True)
    return place


@pytest.fixture
def look(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Run the check in its process, as sresd does, while the library answers so."""
    state = tmp_path / "state"
    monkeypatch.setenv("NVML_STUB", str(state))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    runner = CheckRunner([gpu_health.CHECK], CheckContext(), SystemClock())

    def run(text: str, profile: NodeProfile | None = None) -> CheckResult:
        state.write_text("count=2\nlinks=18\n" + text, encoding="utf-8")
        runner._context = CheckContext(expected=Expected(None, 2, profile or NodeProfile()))
        return runner.run_one(gpu_health.CHECK)

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
        ("gpu1.sram=1", "replace", "threshold"),
        ("gpu1.clocks=8", "monitor", "hw_slowdown"),
        ("gpu1.width=8", "reboot", "8 of 16 PCIe lanes"),
        ("gpu1.links_up=17", "reset", "17 of 18 NVLinks"),
        ("gpu1.handle=15", "reboot", "the GPU is lost"),
        ("gpu1.handle=16", "reset", "requires a reset"),
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
