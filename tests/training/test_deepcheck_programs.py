"""The programs that load a node through torch find a wrong value, and measure without one."""

from __future__ import annotations

import os
import subprocess
import sys
import types
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
)
from slurm_resilience.deepcheck.torch_programs import (
    burn_program,
    collective_program,
    neuron_program,
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


@pytest.fixture
def neuron(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Neuron core, played by the processor."""
    xla = types.ModuleType("torch_xla.core.xla_model")
    xla.xla_device = lambda: torch.device("cpu")  # type: ignore[attr-defined]
    xla.mark_step = lambda: None  # type: ignore[attr-defined]
    core = types.ModuleType("torch_xla.core")
    core.xla_model = xla  # type: ignore[attr-defined]
    for module in (types.ModuleType("torch_neuronx"), types.ModuleType("torch_xla"), core, xla):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("NEURON_CC_FLAGS", "--model-type=transformer")


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
