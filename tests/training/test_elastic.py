"""Trainings by microbatches, in processes: the same result on any number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.training
torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from state_ranks import run  # noqa: E402
from torch import nn  # noqa: E402
from warm_machine import WarmMachine  # noqa: E402

from slurm_resilience.training.data import ReplayLoader  # noqa: E402
from slurm_resilience.training.elastic.microbatches import MicrobatchSteps  # noqa: E402

STEPS, SIZE, COUNT = 10, 4, 8


class Told(NamedTuple):
    """The log of a whole run."""

    events: list[list[Any]]
    stderr: str

    def of(self, name: str) -> list[list[Any]]:
        return [details for _, event, *details in self.events if event == name]

    @property
    def digest(self) -> str:
        digests = {digest for _, digest in self.of("end")}
        assert len(digests) == 1, digests
        return str(digests.pop())

    def every_sample_once(self, steps: int = STEPS) -> None:
        """Assert it, of the batches that each step's last world was given."""
        committed = {step - 1: generation for step, generation, _ in self.of("step")}
        assert sorted(committed) == list(range(steps))
        seen = [
            index
            for step, generation, indices in self.of("batch")
            if committed[step] == generation
            for index in indices
        ]
        assert sorted(seen) == list(range(steps * SIZE * COUNT))


Launch = Callable[..., Told]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory, warm_machine: WarmMachine) -> Launch:
    """Runs the program."""

    def go(ranks: int, *words: str, inject: str = "") -> Told:
        path = tmp_path_factory.mktemp("run")
        (logs := path / "logs").mkdir()
        more = {"OMP_NUM_THREADS": "1", "TMPDIR": str(path), "SRES_INJECT": inject}
        program = Path(__file__).parent / "programs" / "elastic.py"
        argv = (f"--nproc-per-node={ranks}", "--standby=0", str(program), "--log", str(logs))
        done = warm_machine.run((*argv, *words), more, path)
        assert done.returncode == 0, done.stderr[-6000:]
        lines = [line for file in logs.glob("*.jsonl") for line in file.read_text().splitlines()]
        return Told(sorted(json.loads(line) for line in lines if line.endswith("]")), done.stderr)

    return go


@pytest.fixture(scope="module")
def two_ranks(launch: Launch) -> Told:
    told = launch(2, f"--steps={STEPS}")
    told.every_sample_once()
    return told


MORE = [3, 4, 8] if "SRES_TEST_SEEDS" in os.environ else [3, 4]


@pytest.mark.parametrize("ranks", MORE)
def test_the_result_has_the_same_bits_on_any_number_of_ranks(
    two_ranks: Told, launch: Launch, ranks: int
) -> None:
    told = launch(ranks, f"--steps={STEPS}")
    told.every_sample_once()
    assert told.digest == two_ranks.digest


def test_the_result_has_the_same_bits_when_a_rank_dies_and_comes_back(
    two_ranks: Told, launch: Launch
) -> None:
    inject = "kill:seat=1,step=2,phase=backward"
    told = launch(3, f"--steps={STEPS}", "--late", inject=inject)
    worlds = [world for step, _, world in sorted(told.of("step"))]
    assert worlds[0] == worlds[-1] == 3, told.stderr[-4000:]
    assert 2 in worlds, told.stderr[-4000:]
    told.every_sample_once()
    assert told.digest == two_ranks.digest


# --- gradients under each wrapper -----------------------------------------------------------


class Points(torch.utils.data.Dataset[Any]):
    """Sample i: six numbers drawn from i, and their sine."""

    fingerprint = "points"

    def __len__(self) -> int:
        return SIZE * COUNT

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin().view(1), index


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def wrap(kind: str, world: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = build()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if "fsdp" in kind or kind == "hsdp":
        shape = (1, world) if kind == "fsdp" else (world // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        mesh = mesh if kind == "hsdp" else mesh["shard"]
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net


def gradients(
    rank: int, _: Any, kind: str, world: int, tokens: bool, size: int = SIZE
) -> list[Any]:
    net = wrap(kind, world)
    count, together = SIZE * COUNT // size, 2 if kind == "fsdp, same bits" else 1
    loader = ReplayLoader(
        Points(),
        global_batch=size,
        rank=rank,
        world=world,
        microbatches=count,
        together=together,
        cache=False,
    )
    groups = [dist.new_group(list(range(n, world, together))) for n in range(together)]
    steps = MicrobatchSteps(
        [net],
        loader,
        size=size,
        length=count,
        full=count,
        same_bits="same bits" in kind,
        together=together,
        group=groups[rank % together],
        rate="constant",
        device=torch.device("cpu"),
        waits=lambda: None,
    )
    step = steps.step(0, next(iter(loader)))
    for x, y, index in step:
        losses = (net(x) - y).square().view(-1)
        if tokens:
            step.backward((losses * (index % 3)).sum(), tokens=int((index % 3).sum()))
        else:
            step.backward(losses.mean())
    loader.close()
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in
             net.parameters()]  # fmt: skip
    return [gradient.tolist() for gradient in whole]


def whole_batch(tokens: bool) -> list[torch.Tensor]:
    """Return the gradients of all samples, computed at once."""
    columns = zip(*(Points()[number] for number in range(SIZE * COUNT)), strict=True)
    x, y, index = (torch.stack([torch.as_tensor(one) for one in column]) for column in columns)
    net = build()
    losses = (net(x) - y).square().view(-1)
    weights = index % 3 if tokens else torch.ones_like(index)
    ((losses * weights).sum() / weights.sum()).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def equal(told: list[list[Any]], gradients: list[torch.Tensor]) -> None:
    """Assert it, for what each rank told, up to rounding."""
    for of in told:
        for found, gradient in zip(of, gradients, strict=True):
            torch.testing.assert_close(torch.tensor(found), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("ddp", 3),
        ("fsdp", 2),
        ("fsdp", 3),
        ("hsdp", 4),
        ("plain", 3),
        ("same bits", 3),
        ("fsdp, same bits", 4),
    ],
)
def test_gradients_are_those_of_the_whole_batch(
    tmp_path: Path, kind: str, world: int, tokens: bool
) -> None:
    equal(run(gradients, world, tmp_path, kind, world, tokens), whole_batch(tokens))


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "plain", "same bits"])
def test_a_rank_without_a_microbatch_takes_part(tmp_path: Path, kind: str) -> None:
    """Three ranks share two microbatches."""
    size = SIZE * COUNT // 2
    equal(run(gradients, 3, tmp_path, kind, 3, False, size), whole_batch(False))


def test_replicas_that_are_sharded_give_the_same_bits(tmp_path: Path) -> None:
    """One, two and three copies, each over two ranks, of five microbatches: a round is short."""
    told = [
        run(gradients, world, tmp_path / str(world), "fsdp, same bits", world, False, 6)
        for world in (2, 4, 6)
    ]
    assert all(of == told[0][0] for answers in told for of in answers)
