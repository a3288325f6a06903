"""The programs that load a node through torch find a wrong value, and measure without one."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from slurm_resilience.deepcheck.collective_math import Collective, best_bus_bandwidth
from slurm_resilience.deepcheck.deep_results import DeepOutcome
from slurm_resilience.deepcheck.instance.instance_check import InstanceContext
from slurm_resilience.deepcheck.instance.instance_checks import chosen
from slurm_resilience.deepcheck.instance.this_node import run_check
from slurm_resilience.deepcheck.step_lines import (
    Burned,
    GroupSwept,
    GroupTrouble,
    LineAssembler,
    NeuronTrained,
    StepMessage,
)
from slurm_resilience.deepcheck.step_requests import (
    BurnRequest,
    CollectiveRequest,
    NeuronRequest,
    RankGroup,
    RankHardware,
)
from slurm_resilience.deepcheck.torch_programs import (
    burn_program,
    collective_program,
    neuron_program,
    rank_device,
)
from slurm_resilience.health.check import CheckContext
from slurm_resilience.launcher.group_restart import free_port

pytestmark = pytest.mark.training


@pytest.fixture(autouse=True)
def environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that runs in this process sets it, and all tests after would inherit it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NEURON_CC_FLAGS", "")


def heard(text: str) -> list[StepMessage]:
    assembler = LineAssembler()
    return [one for line in text.splitlines() if (one := assembler.feed(line)) is not None]


def test_a_load_without_a_fault_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    burn_program.run(BurnRequest(gpus=False, seconds=0.1, memory_share=0.0))
    (burned,) = heard(capsys.readouterr().out)
    assert isinstance(burned, Burned)
    assert (burned.wrong, burned.memory_wrong) == (0, 0)
    assert burned.multiplications >= 1 and burned.memory_bytes >= 1 << 20


def test_one_wrong_bit_of_a_product_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = torch.Tensor.__matmul__

    def faulty(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = exact(left, right)
        if product.dtype is torch.float32:
            product[3, 5] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", faulty)
    burn_program.run(BurnRequest(gpus=False, seconds=0.0, memory_share=0.0))
    (burned,) = heard(capsys.readouterr().out)
    assert isinstance(burned, Burned)
    assert burned.wrong == burned.multiplications == 1


def test_without_a_gpu_the_load_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    burn_program.run(BurnRequest(gpus=True, seconds=0.0, memory_share=0.0))
    assert heard(capsys.readouterr().out) == [
        GroupTrouble(0, "", "torch sees no GPU", missing=True)
    ]


NEURON_LS = """\
#!/bin/sh
echo '[{"nc_count": 1}]'
"""
CORE_MODEL = """\
import torch
def xla_device(): return torch.device("cpu")
def mark_step(): pass
def wait_device_ops(): pass
"""
XLA_BACKEND = """\
import torch.distributed as dist
from torch.distributed.rendezvous import _env_rendezvous_handler

if "xla" not in dist.Backend.backend_list:
    dist.Backend.register_backend("xla", dist.ProcessGroupGloo, devices=["cpu"])
    dist.register_rendezvous_handler("xla", _env_rendezvous_handler)
"""


@pytest.fixture
def neuron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A node with a Neuron core, played by the processor; return its libraries."""
    libraries = tmp_path / "libraries"
    for name, text in {
        "torch_neuronx/__init__.py": "",
        "torch_xla/__init__.py": "",
        "torch_xla/core/__init__.py": "",
        "torch_xla/core/xla_model.py": CORE_MODEL,
        "torch_xla/distributed/__init__.py": "",
        "torch_xla/distributed/xla_backend.py": XLA_BACKEND,
    }.items():
        (libraries / name).parent.mkdir(parents=True, exist_ok=True)
        (libraries / name).write_text(text)
    (tmp_path / "root/sys/devices/virtual/neuron_device/neuron0").mkdir(parents=True)
    tool = tmp_path / "bin" / "neuron-ls"
    tool.parent.mkdir()
    tool.write_text(NEURON_LS)
    tool.chmod(0o755)
    settings = tmp_path / "sres.toml"
    settings.write_text(f'[agent]\nsysroot = "{tmp_path}/root"\n')
    monkeypatch.setenv("SRES_CONFIG", str(settings))
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--model-type=transformer")
    monkeypatch.syspath_prepend(str(libraries))
    yield libraries
    for name in [name for name in sys.modules if name.startswith(("torch_neuronx", "torch_xla"))]:
        del sys.modules[name]


@pytest.mark.usefixtures("neuron")
def test_a_neuron_core_that_trains_right(capsys: pytest.CaptureFixture[str]) -> None:
    neuron_program.run(NeuronRequest(seconds=0.0))
    assert heard(capsys.readouterr().out) == [NeuronTrained(neuron_program.STEPS, 0)]
    assert os.environ["NEURON_CC_FLAGS"] == "--model-type=transformer --auto-cast=none"
    weights = neuron_program._trained(torch.device("cpu"), lambda: None)
    assert weights.abs().max() > 1, "it has learned something"
    assert torch.equal(weights, weights.round())


@pytest.mark.usefixtures("neuron")
def test_one_wrong_gradient_of_a_neuron_core_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, calls = torch.Tensor.sign, []

    def faulty(gradient: torch.Tensor) -> torch.Tensor:
        sign = exact(gradient)
        calls.append(1)
        if len(calls) == 2 * neuron_program.STEPS:  # the last step of the core
            sign[3, 5] = 2.0
        return sign

    monkeypatch.setattr(torch.Tensor, "sign", faulty)
    neuron_program.run(NeuronRequest(seconds=0.0))
    (trained,) = heard(capsys.readouterr().out)
    assert isinstance(trained, NeuronTrained)
    assert trained.wrong == 1


def test_without_torch_neuronx_the_training_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    neuron_program.run(NeuronRequest(seconds=0.0))
    text = "torch_neuronx is not installed"
    assert heard(capsys.readouterr().out) == [GroupTrouble(0, "", text, missing=True)]


def over_nodes(port: int, hardware: RankHardware, nodes: str = "n[1-2]") -> CollectiveRequest:
    return CollectiveRequest(
        (RankGroup(nodes, "127.0.0.1", port),),
        largest_bytes=4096,
        hardware=hardware,
        limit_seconds=60,
    )


def test_neuron_cores_of_two_nodes_measure_both_collectives(neuron: Path, tmp_path: Path) -> None:
    request = over_nodes(free_port(), RankHardware.NEURON)
    words = [sys.executable, "-m", collective_program.__name__, msgspec.json.encode(request)]
    ranks = {"RANKS": str(tmp_path / "ranks"), "PYTHONPATH": str(neuron)}
    note = (
        f"open({str(tmp_path)!r} + '/rank' + os.environ['RANK'], 'w').write(repr(dict(os.environ)))"
    )
    (neuron / "torch_neuronx" / "__init__.py").write_text(f"import os\n{note}\n")
    tasks = [
        subprocess.Popen(
            words,
            env={**os.environ, **ranks, "SLURMD_NODENAME": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("n1", "n2")
    ]
    try:
        told = [task.communicate(timeout=120) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    messages = [message for out, _ in told for message in heard(out)]
    sweeps = [one.sweep for one in messages if isinstance(one, GroupSwept)]
    assert [sweep.collective for sweep in sweeps] == list(Collective), (messages, told)
    assert {sweep.ranks for sweep in sweeps} == {2}
    assert {row.wrong for sweep in sweeps for row in sweep.rows} == {0}
    environment = ast.literal_eval((tmp_path / "rank1").read_text())
    port = request.groups[0].port
    assert environment["NEURON_RT_ROOT_COMM_ID"] == f"127.0.0.1:{port + 2}"
    assert environment["CCOM_SOCKET_IFNAME"] == "lo"
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["NEURON_CC_FLAGS"].endswith(rank_device.COMPILER)
    assert (environment["GROUP_RANK"], environment["LOCAL_RANK"]) == ("1", "0")


def trouble_of(capsys: pytest.CaptureFixture[str]) -> GroupTrouble:
    (trouble,) = heard(capsys.readouterr().out)
    assert isinstance(trouble, GroupTrouble) and trouble.missing
    return trouble


def test_what_a_neuron_node_lacks_leaves_it_unjudged_by_name(
    neuron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The hosts' network alone is never measured in place of that of the devices.
    collective_program.run(over_nodes(1, RankHardware.CPU), "n1")
    assert trouble_of(capsys).text.startswith("the collective of its Neuron devices was not run")

    asked = over_nodes(1, RankHardware.NEURON)
    (tmp_path / "bin" / "neuron-ls").write_text("#!/bin/sh\necho '[]'\n")
    collective_program.run(asked, "n2")
    assert trouble_of(capsys) == GroupTrouble(0, "n2", "neuron-ls shows no cores", missing=True)
    shutil.rmtree(neuron / "torch_neuronx")
    importlib.invalidate_caches()
    collective_program.run(asked, "n2")
    assert trouble_of(capsys).text == "torch_neuronx is not installed"
    shutil.rmtree(tmp_path / "root" / "sys")
    collective_program.run(asked, "n2")
    assert trouble_of(capsys).text == "the node shows no Neuron device, and its type has some"


def test_a_native_neuron_device_needs_no_torch_xla(
    neuron: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(neuron / "torch_xla")
    importlib.invalidate_caches()
    with pytest.raises(rank_device.DeviceMissing, match="torch_xla is not installed"):
        rank_device.open_neuron_core()
    native = types.SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch, "neuron", native, raising=False)
    monkeypatch.setattr(torch, "device", lambda name: name)
    core = rank_device.open_neuron_core()
    assert (core.device, core.backend, core.init_method) == ("neuron", "neuron", "env://")


def single(port: int) -> CollectiveRequest:
    return CollectiveRequest(
        (RankGroup("n9", "127.0.0.1", 1), RankGroup("n1", "127.0.0.1", port)),
        largest_bytes=4096,
        limit_seconds=30,
    )


@pytest.mark.parametrize("collective", list(Collective))
def test_one_wrong_element_of_a_collective_is_found(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    collective: Collective,
) -> None:
    name = "all_reduce" if collective is Collective.ALL_REDUCE else "all_gather"
    exact = getattr(dist, name)

    def faulty(*words: object, **more: object) -> object:
        done = exact(*words, **more)
        result = words[0][0] if isinstance(words[0], list) else words[0]
        assert isinstance(result, torch.Tensor)
        if result.dtype is torch.float32 and result.numel() == 1024:
            result[7] += 1
        return done

    monkeypatch.setattr(dist, name, faulty)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    assert collective_program.run(single(free_port()), "n1") == 0
    sweeps = {
        one.sweep.collective: one
        for one in heard(capsys.readouterr().out)
        if isinstance(one, GroupSwept)
    }
    assert {one.group for one in sweeps.values()} == {1}
    other = next(one for one in Collective if one is not collective)
    # Before and after the load.
    assert [row.wrong for row in sweeps[collective].sweep.rows][-1] == 2
    assert {row.wrong for row in sweeps[other].sweep.rows} == {0}


def test_a_rank_that_finds_no_other_says_so(tmp_path: Path) -> None:
    request = CollectiveRequest(
        (RankGroup("n[1-2]", "127.0.0.1", free_port()),), largest_bytes=64, limit_seconds=1
    )
    done = subprocess.run(
        [sys.executable, "-m", collective_program.__name__, msgspec.json.encode(request).decode()],
        env={"SLURMD_NODENAME": "n1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    (trouble,) = heard(done.stdout)
    assert isinstance(trouble, GroupTrouble) and not trouble.missing
    assert (trouble.group, trouble.node) == (0, "n1")


def test_two_ranks_of_a_node_measure_both_collectives(tmp_path: Path) -> None:
    (check,) = chosen(("collectives",))
    result = run_check(check, InstanceContext("n1", CheckContext(tmp_path), 5.0, tmp_path))
    assert result.outcome is DeepOutcome.PASSED, (result.text, result.output)
    assert result.text == "2 ranks on processors"
    assert result.block.count("# Out of bounds values : 0 OK") == 2
    sweeps = [one.sweep for one in heard(result.output) if isinstance(one, GroupSwept)]
    assert [sweep.ranks for sweep in sweeps] == [2, 2]
    assert all(best_bus_bandwidth(sweep) > 0 for sweep in sweeps)
