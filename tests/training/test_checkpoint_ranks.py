"""Checkpoints of several gloo ranks: DDP, FSDP2, HSDP, other world sizes, ranks that die."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from ranks import DEADLINE, Ranks  # noqa: E402
from state_ranks import Life  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from slurm_resilience.errors import CheckpointError  # noqa: E402
from slurm_resilience.training.checkpoint import Checkpointer, checkpointer, writing  # noqa: E402
from slurm_resilience.training.checkpoint.agreement import (  # noqa: E402
    SaveAgreement,
    one_line,
)
from slurm_resilience.training.checkpoint.staging import StagedPlanner  # noqa: E402

pytestmark = [
    pytest.mark.training,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@contextlib.contextmanager
def ranks(tmp_path: Path, world: int, target: Callable[..., Any], *args: Any) -> Iterator[Ranks]:
    """``target(rank, world, group, *args)`` on each."""
    with Ranks(tmp_path, world, _with_group, world, target, *args) as run:
        yield run


def _with_group(rank: int, _: Any, world: int, target: Callable[..., Any], *args: Any) -> Any:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=DEADLINE / 2))
    return target(rank, world, group, *args)


def build(kind: str, world: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """The model, what its forward is called on, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    net: nn.Module = model
    if kind == "ddp":
        net = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        net = fully_shard(model)
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        net = fully_shard(model, mesh=mesh)
    return model, net, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(100 + step)
    optimizer.zero_grad()
    net(torch.randn(4, 6)).pow(2).sum().backward()
    optimizer.step()


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def picture(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Every number of the state, as plain lists."""
    seen = {}
    for name, parameter in model.named_parameters():
        kept = optimizer.state.get(parameter, {})
        tensors = [parameter, *(kept[key] for key in sorted(kept))]
        seen[name.removeprefix("module.")] = [whole(tensor).tolist() for tensor in tensors]
    return seen


def saves(rank: int, world: int, group: Any, directory: str, kind: str) -> Any:
    """Save after step 2 and, with the copies' memory used again, after step 4."""
    model, net, optimizer = build(kind, world)
    checkpointer = Checkpointer(directory, per_rank=["own"])
    for step in range(1, 5):
        train(net, optimizer, step)
        if step % 2 == 0:
            pictured = picture(model, optimizer)
            state = {"model": net, "optimizer": optimizer, "own": {"rank": rank}, "step": step}
            checkpointer.save(step, state, group)
            with torch.no_grad():  # what happens now must not reach the disk
                for parameter in model.parameters():
                    parameter.add_(0 if step < 4 else 1000)
            assert checkpointer.wait(DEADLINE)
            assert checkpointer.counts.saved == step // 2, checkpointer.counts
    return pictured, checkpointer.latest(group)


def loads(rank: int, world: int, group: Any, directory: str, kind: str) -> Any:
    model, net, optimizer = build(kind, world)
    if rank == 0:  # gradients and optimizer state of another life must not disturb
        net.zero_grad()
    checkpointer = Checkpointer(directory, per_rank=["own"])
    step = checkpointer.latest(group)
    state = {"model": net, "optimizer": optimizer, "own": {"rank": -1}, "step": 0}
    checkpointer.load(step, state, group)
    assert state["step"] == step
    return picture(model, optimizer), state["own"]["rank"]


@pytest.mark.parametrize(
    ("before", "old_world", "after", "new_world"),
    [("ddp", 4, "fsdp", 2), ("fsdp", 4, "fsdp", 2), ("hsdp", 4, "ddp", 2), ("fsdp", 2, "hsdp", 4)],
)
def test_what_one_world_saves_another_loads(
    tmp_path: Path, before: str, old_world: int, after: str, new_world: int
) -> None:
    directory = str(tmp_path / "checkpoints")
    with ranks(tmp_path, old_world, saves, directory, before) as run:
        saved = run.results()
    assert [latest for _, latest in saved] == [4] * old_world
    assert all(pictured == saved[0][0] for pictured, _ in saved)
    with ranks(tmp_path, new_world, loads, directory, after) as run:
        loaded = run.results()
    for rank, (pictured, own) in enumerate(loaded):
        assert pictured == saved[0][0]
        assert own == (rank if rank < old_world else -1)


def saves_until_killed(rank: int, world: int, group: Any, directory: str) -> Any:
    value = {"weights": torch.zeros(6_000_000), "own": torch.zeros(6_000_000)}
    checkpointer = Checkpointer(directory, keep=100, per_rank=["own"])
    step = 0
    while not checkpointer.counts.failed and step < 2000:
        step += 1
        value["weights"].fill_(step)
        value["own"].fill_(-step)
        checkpointer.save(step, value, group, blocking=True)
    return step, checkpointer.counts.error


def test_a_rank_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    for attempt in range(3):
        directory = tmp_path / f"checkpoints-{attempt}"
        with ranks(tmp_path, 3, saves_until_killed, str(directory)) as run:
            # Two good ones, then the moment in which rank 1 writes its part.
            assert _until((directory / "step-000002").exists)
            assert _until(lambda place: any(place.glob("*.tmp-*/__1_0.distcp")), directory)
            os.kill(run.processes[1].pid or 0, signal.SIGKILL)
            results = run.results()
        assert results[1] is None
        (stopped, error), (other, _) = results[0], results[2]
        assert stopped == other
        assert error
        if left := [*directory.glob("*.tmp-*")]:
            break
    else:
        pytest.fail("three times the kill came between two saves")
    assert not (directory / f"step-{stopped:06d}").exists()
    checkpointer = Checkpointer(directory)
    assert checkpointer.latest() == checkpointer.readable() == stopped - 1
    value = {"weights": torch.zeros(6_000_000)}
    checkpointer.load(stopped - 1, value)
    assert bool((value["weights"] == stopped - 1).all())
    # All writers are dead: what they left goes, and all but the newest two good ones.
    gone = checkpointer.prune()
    assert {path.name for path in left} <= {*gone}
    kept = [f"step-{stopped - 2:06d}", f"step-{stopped - 1:06d}"]
    assert sorted(path.name for path in directory.iterdir()) == kept


def _until(condition: Callable[..., bool], *args: Any) -> bool:
    end, tick = time.monotonic() + DEADLINE, threading.Event()
    while not (reached := condition(*args)) and time.monotonic() < end:
        tick.wait(0.002)
    return reached


def disk_full(rank: int, world: int, group: Any, directory: str) -> Any:
    _, net, optimizer = build("ddp", world)
    train(net, optimizer, 1)
    state = {"model": net, "optimizer": optimizer, "ballast": torch.ones(100_000)}
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state, group, blocking=True)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
    checkpointer.save(2, state, group, blocking=True)
    train(net, optimizer, 2)  # training goes on
    error, failed = checkpointer.counts.error, checkpointer.counts.failed
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    left = sorted(path.name for path in Path(directory).iterdir())
    dist.barrier()
    checkpointer.save(3, state, group, blocking=True)
    return error, failed, left, checkpointer.latest(group), checkpointer.counts.saved


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, disk_full, str(tmp_path / "checkpoints")) as run:
        results = run.results()
    for error, failed, left, latest, saved in results:
        assert error == "rank 1: File too large"
        assert (failed, latest, saved) == (1, 3, 2)
        assert left == ["step-000001"]


def hurries(rank: int, world: int, group: Any, directory: str) -> Any:
    checkpointer = Checkpointer(directory, keep=50)
    value = {"weights": torch.full((500_000,), 1.0)}
    for step in range(1, 21):
        value["weights"].fill_(step)
        checkpointer.save(step, value, group)
        if rank == 0 or step % 7 == 0:
            checkpointer.wait(DEADLINE)
    assert checkpointer.close(DEADLINE)
    counts = checkpointer.counts
    return counts.saved, counts.skipped, counts.failed, counts.last


def test_what_one_rank_must_skip_all_skip(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    with ranks(tmp_path, 2, hurries, str(directory)) as run:
        first, second = run.results()
    assert first == second
    saved, skipped, failed, _ = first
    assert (saved + skipped, failed) == (20, 0)
    assert saved >= 3
    checkpointer = Checkpointer(directory)
    value = {"weights": torch.zeros(500_000)}
    for path in directory.iterdir():
        step = int(path.name.removeprefix("step-"))
        checkpointer.load(step, value)
        assert bool((value["weights"] == step).all())


def damaged(rank: int, world: int, group: Any, directory: str) -> Any:
    checkpointer = Checkpointer(directory)
    value = {"weights": torch.zeros(1000)}
    latest = checkpointer.latest(group)
    readable = checkpointer.readable()
    error = ""
    try:
        checkpointer.load(2, value, group)
    except CheckpointError as refused:
        error = str(refused)
    checkpointer.load(latest, value, group)
    return latest, readable, error, value["weights"][0].item()


def test_all_ranks_skip_what_one_of_them_finds_damaged(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    checkpointer = Checkpointer(directory)
    for step in (1, 2):
        checkpointer.save(step, {"weights": torch.full((1000,), float(step))}, blocking=True)
    part = directory / "step-000002" / "__0_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert checkpointer.readable() == 2  # no rank has read the content yet
    with ranks(tmp_path, 2, damaged, str(directory)) as run:
        results = run.results()
    assert results[0] == results[1]
    latest, readable, error, weight = results[0]
    assert (latest, readable, weight) == (1, 1, 1.0)
    assert "step 2" in error
    assert "__0_0.distcp" in error


def loads_without_the_last(rank: int, world: int, group: Any, directory: str) -> Any:
    checkpointer = Checkpointer(directory)
    # Its end must not meet the other's start.
    dist.barrier(group)
    if rank == 1:
        os._exit(0)
    try:
        checkpointer.load(1, {"weights": torch.zeros(1000)}, group)
    except BaseException as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return []


def test_a_dead_peer_is_not_the_checkpoints_fault(tmp_path: Path) -> None:
    """A rank that loads must not give up a good checkpoint because another rank died meanwhile."""
    Checkpointer(tmp_path / "c").save(1, {"weights": torch.ones(1000)}, blocking=True)
    with ranks(tmp_path, 2, loads_without_the_last, str(tmp_path / "c")) as run:
        assert "RuntimeError" in run.result(0)


def draws_on(rank: int, _: int, group: Any, directory: str) -> list[float]:
    """As `resilient` does: seed by rank, save at step 3 (or go on from there), and draw."""
    torch.manual_seed(100 + rank)
    random.seed(rank)
    life = Life(rank, checkpointer=Checkpointer(directory, every=3))
    life.meet()
    kind = life.track(model=torch.nn.Linear(2, 2))
    assert kind == ("disk" if Path(directory).joinpath("step-000003").exists() else "fresh")
    drawn = []
    while life.healer.progress.step < 5:
        drawn.append(torch.rand(1).item() + random.random())
        life.commit()
    life.healer.close()
    return drawn


@pytest.mark.parametrize("world", [2, 3])
def test_random_numbers_go_on_from_a_checkpoint(tmp_path: Path, world: int) -> None:
    """Each rank's own; the numbers of the first steps came once more."""
    place = str(tmp_path / "checkpoints")
    with ranks(tmp_path, 2, draws_on, place) as run:
        first = run.results()
    with ranks(tmp_path, world, draws_on, place) as run:
        again = run.results()
    assert again[:2] == [drawn[-2:] for drawn in first]
    # One more rank than saved it goes on like the first, as one that a peer heals.
    assert again[2:] == again[:1] * (world - 2)


def fails_once(rank: int, _: int, group: Any, directory: str, later: int) -> int:
    """A checkpoint is broken off, and the next world begins so many steps later."""
    keeper = Checkpointer(directory, every=2)
    life = Life(rank, checkpointer=keeper)
    model = torch.nn.Linear(2, 2)
    life.meet()
    life.track(model=model)
    write = writing.write
    writing.write = broken_off  # type: ignore[assignment]
    for _step in range(2 + later):
        life.commit()
    keeper.break_off()
    assert keeper.wait(DEADLINE)
    assert keeper.counts.failed == 1
    writing.write = write
    for _world in range(2):  # and once is enough
        life.meet()
        life.track(model=model)
        assert keeper.wait(DEADLINE)
    life.healer.close()
    assert keeper.counts.saved == 1, keeper.counts
    return keeper.latest(group)


def broken_off(*_: object) -> None:
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("later", [0, 1])
def test_a_checkpoint_that_a_fault_broke_off_is_made_in_the_next_world(
    tmp_path: Path, later: int
) -> None:
    """The last one of a training was missing; and where each takes minutes to write, and a world
    does not last much longer, there was never a new one."""
    with ranks(tmp_path, 2, fails_once, str(tmp_path / "checkpoints"), later) as run:
        assert run.results() == [2 + later] * 2


def saves_while_one_still_writes(rank: int, world: int, group: Any, directory: str) -> Any:
    """The last rank is in the middle of its file when the world ends, and another world begins."""
    keeper = Checkpointer(directory)
    written, state = threading.Event(), {"model": torch.nn.Linear(2, 2)}
    resolve = StagedPlanner.resolve_data

    def slowly(planner: StagedPlanner, item: Any) -> Any:
        assert written.wait(DEADLINE)
        return resolve(planner, item)

    if rank == world - 1:
        StagedPlanner.resolve_data = slowly  # type: ignore[method-assign]
    keeper.save(1, state, group)
    keeper.break_off()
    keeper.save(2, state, dist.new_group(backend="gloo"))
    written.set()
    assert keeper.wait(DEADLINE)
    counts = keeper.counts
    return counts.saved, counts.skipped, counts.failed, counts.last


def test_a_save_does_not_wait_for_one_of_a_world_that_is_over(tmp_path: Path) -> None:
    """All ranks skipped it, as one of them was still writing what was of no use."""
    place = tmp_path / "checkpoints"
    with ranks(tmp_path, 2, saves_while_one_still_writes, str(place)) as run:
        assert run.results() == [(1, 0, 1, 2)] * 2
    assert [path.name for path in place.glob("*step*")] == ["step-000002"]


def saves_into_a_group_that_is_gone(_: int, __: int, group: Any) -> list[str]:
    asks: list[Callable[[], Any]] = [
        lambda: dist.get_group_rank(group, 0),
        lambda: dist.get_backend(group),
        lambda: SaveAgreement(group),
    ]
    said = []
    for gone in (group, None):
        dist.destroy_process_group(gone)
        for ask in asks:
            try:
                ask()
            except Exception as error:
                said.append(one_line(error))
    return said


def test_a_world_that_ended_before_a_checkpoint_was_written_is_named(tmp_path: Path) -> None:
    """The line had torch's words: a group at some address is not registered, please create it."""
    with ranks(tmp_path, 1, saves_into_a_group_that_is_gone) as run:
        said = run.result(0)
    assert len(said) >= 4
    assert set(said) == {"its world ended before it was written whole"}


def fails_and_parts_later(rank: int, _: int, group: Any, directory: str) -> tuple[int, list[str]]:
    """The connections of a save break before this rank hears that its world has ended."""
    told: list[str] = []
    keeper, write = Checkpointer(directory), writing.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer.log, "error", lambda text, *more: told.append(text % more))
        patch.setattr(writing, "write", broken_off)
        keeper.save(1, {"model": torch.nn.Linear(2, 2)}, group)
        assert keeper.wait(DEADLINE)
        patch.setattr(writing, "write", write)
        keeper.break_off()
        keeper.save(2, {"model": torch.nn.Linear(2, 2)}, dist.new_group(backend="gloo"))
        assert keeper.wait(DEADLINE)
    return keeper.counts.in_a_row, told


def test_a_save_that_the_end_of_its_world_broke_off_is_no_failure(tmp_path: Path) -> None:
    """Each fault had such a line, and the next save waited for it."""
    with ranks(tmp_path, 2, fails_and_parts_later, str(tmp_path / "checkpoints")) as run:
        assert run.results() == [(0, [])] * 2
