"""A profile that is learned from a node says what the node has, and can be read again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_resilience.cli.main import call
from slurm_resilience.health import learn_profile
from slurm_resilience.health.check import CheckContext
from slurm_resilience.health.checks.gpu.gpu_health import GpusHealth
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.health.profile_files import load_profile

EFA = "sys/class/infiniband/efa_{}/device/{}"
PORT = "sys/class/infiniband/mlx5_{}/ports/1/{}"
NEURON = "sys/devices/virtual/neuron_device/neuron{}/mem_ecc_uncorrected"


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, value in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{value}\n", encoding="utf-8")
    return root


def sysroot(root: Path, uncorrected: int = 0) -> Path:
    files: dict[str, object] = {NEURON.format(at): uncorrected for at in range(2)}
    for at in range(3):
        files |= {EFA.format(at, "vendor"): "0x1d0f", EFA.format(at, "device"): "0xefa2"}
    return tree(root, files)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"id": "a", "current_link_width": "16", "max_link_width": "16"}
    seen = GpusHealth((one, one | {"id": "b"}), ((18, 18), (18, 18)))
    monkeypatch.setattr(learn_profile, "_gpus", lambda context: seen)


def test_it_says_what_the_node_has(gpus: None, tmp_path: Path) -> None:
    profile, findings = learn_profile.learn(CheckContext(sysroot(tmp_path)))
    assert findings == ()
    assert profile == NodeProfile("", 2, 18, 16, 3, 2)


def test_the_rate_of_ports_that_all_run_alike(gpus: None, tmp_path: Path) -> None:
    for at, rate in enumerate(("400 Gb/sec (4X NDR)", "400 Gb/sec (4X NDR)")):
        tree(
            tmp_path,
            {
                PORT.format(at, "state"): "4: ACTIVE",
                PORT.format(at, "phys_state"): "5: LinkUp",
                PORT.format(at, "rate"): rate,
            },
        )
    assert learn_profile.learn(CheckContext(tmp_path))[0].infiniband_rate == "400 Gb/sec"
    tree(tmp_path, {PORT.format(1, "rate"): "200 Gb/sec (4X HDR)"})
    assert learn_profile.learn(CheckContext(tmp_path))[0].infiniband_rate == ""


def test_the_governor_that_all_processors_have(gpus: None, tmp_path: Path) -> None:
    name = "sys/devices/system/cpu/cpufreq/policy{}/scaling_governor"
    tree(tmp_path, {name.format(at): "performance" for at in range(2)})
    assert learn_profile.learn(CheckContext(tmp_path))[0].cpu_governor == "performance"
    tree(tmp_path, {name.format(1): "powersave"})
    assert learn_profile.learn(CheckContext(tmp_path))[0].cpu_governor == ""


def config(tmp_path: Path) -> str:
    file = tmp_path / "sres.toml"
    file.write_text(f'[agent]\nsysroot = "{tmp_path}"\n', encoding="utf-8")
    return str(file)


def test_what_is_learned_can_be_read_again(
    gpus: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sysroot(tmp_path)
    assert call(["check", "profile", "--learn", "--config", config(tmp_path)]) == 0
    file = tmp_path / "ours.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_profile(str(file)) == NodeProfile(str(file), 2, 18, 16, 3, 2)


def test_a_sick_node_is_no_model(
    gpus: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sysroot(tmp_path, uncorrected=1)
    assert call(["check", "profile", "--learn", "--config", config(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "neuron0: 1 uncorrected memory errors" in err


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (GpusHealth(error="Driver Not Loaded"), "0 of 3 GPUs .*Driver Not Loaded"),
        (GpusHealth(({"id": "a"}, {"id": "b"}), ((0, 0), (0, 0))), "2 of 3 GPUs"),
    ],
)
def test_a_node_whose_driver_shows_too_few_gpus_is_no_model(
    seen: GpusHealth,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its profile named EFA devices and no GPU: each node that has it would have passed."""
    sysroot(tmp_path)
    for at in range(3):
        device = f"sys/bus/pci/devices/0000:0{at}:00.0"
        tree(tmp_path, {f"{device}/vendor": "0x10de", f"{device}/class": "0x030200"})
    monkeypatch.setattr(learn_profile, "_gpus", lambda context: seen)
    assert call(["check", "profile", "--learn", "--config", config(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert re.search(said, err)


def test_a_node_without_any_of_it_gives_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learn_profile, "_gpus", lambda context: GpusHealth(error="no library"))
    assert call(["check", "profile", "--learn", "--config", config(tmp_path)]) == 5
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_known_types_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["check", "profile"]) == 0
    assert "p5.48xlarge" in capsys.readouterr().out.split()
    assert call(["check", "profile", "p5.48xlarge"]) == 0
    assert "efa_devices = 32" in capsys.readouterr().out.splitlines()
    assert call(["check", "profile", "p5.48xlarge", "--learn"]) == 2
    assert call(["check", "profile", "no-such-type"]) == 3
