"""Every use of what torch keeps to itself, tried on the release of torch that is installed.

A failure names the use and the release. With another release than those of `compat.USES`: try, and
add the release to `seen(...)`.
"""

from __future__ import annotations

import copy
import gc
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from slurm_resilience.training import compat  # noqa: E402
from slurm_resilience.training.process_group.group_sockets import GroupSockets  # noqa: E402

pytestmark = pytest.mark.training
TRIED: dict[str, Callable[..., None]] = {}


def tries(use: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark the function that tries a use."""

    def note(function: Callable[..., None]) -> Callable[..., None]:
        TRIED[use] = function
        return function

    return note


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a gloo group of one rank."""
    # For this test alone: other tests start processes on networks of their own.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20)
    )
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def linear() -> nn.Linear:
    return nn.Linear(2, 1)


@tries("number_groups_anew")
def _() -> None:
    dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 5
    compat.number_groups_anew()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD.group_name == "0"


@tries("known_groups")
def _() -> None:
    more = dist.new_group([0])
    assert {dist.group.WORLD, more} <= set(compat.known_groups())


@tries("set_timeout")
def _() -> None:
    compat.set_timeout(7)
    assert compat.gloo_timeout(dist.group.WORLD) == timedelta(seconds=7)

    more = dist.new_group([0])
    compat.set_timeout(8, more)
    assert compat.gloo_timeout(more) == timedelta(seconds=8)


@tries("forming_limit")
def _() -> None:
    with compat.forming_limit(6):
        limited = dist.new_group([0])
    assert compat.gloo_timeout(limited) == timedelta(seconds=6)
    assert compat.gloo_timeout(dist.new_group([0])) == timedelta(minutes=30)


@tries("gloo_timeout")
def _() -> None:
    assert compat.gloo_timeout(dist.group.WORLD) == timedelta(seconds=20)


@tries("abort_nccl")
def _() -> None:
    # NCCL needs a GPU (test_gpu.py): here, that it can be called, and leaves others' groups alone.
    compat.abort_nccl()
    dist.all_reduce(torch.ones(1))


@tries("collectives_begun")
def _() -> None:
    before = compat.collectives_begun(compat.known_groups())
    dist.all_reduce(torch.ones(1))
    assert compat.collectives_begun(compat.known_groups()) == before + 1


@tries("collective_counter")
def _() -> None:
    count = compat.collective_counter()
    assert count is not None
    before = count()
    dist.all_reduce(torch.ones(1))
    assert count() == before + 1


@tries("wire_device")
def _() -> None:
    assert compat.wire_device(dist.group.WORLD) == torch.device("cpu")


@tries("GroupSockets.cut")
def _() -> None:
    sockets = GroupSockets()
    sockets.begin()
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _address = listener.accept()
    sockets.end({other.fileno()})
    deadline = time.monotonic() + 10
    while sockets.cut() < 1:
        assert time.monotonic() < deadline
    assert len(sockets) == 2 and one.recv(1) == b""
    # A listener is left alone: gloo's ends the process.
    socket.create_connection(listener.getsockname()).close()
    sockets.close()
    for each in (one, other, listener):
        each.close()


@tries("disarm")
def _() -> None:
    wrapper = nn.parallel.DistributedDataParallel(linear())
    reduced = []
    wrapper.register_comm_hook(None, lambda _, bucket: reduced.append(1) or _done(bucket))
    wrapper(torch.ones(1, 2)).sum().backward()
    assert reduced
    reduced.clear()
    compat.disarm(wrapper)
    wrapper.module(torch.ones(1, 2)).sum().backward()
    assert not reduced


def _done(bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@tries("let_reducer_go")
def _() -> None:
    wrapper = nn.parallel.DistributedDataParallel(linear())
    compat.let_reducer_go(wrapper)
    assert wrapper.reducer is None and wrapper.logger is None
    compat.let_reducer_go(linear())
    gc.collect()


@tries("reduction_check")
def _() -> None:
    used, unused = linear(), linear()
    wrapper = nn.parallel.DistributedDataParallel(nn.ModuleDict({"used": used, "unused": unused}))
    wrapper.module.forward = lambda x: used(x)  # type: ignore[method-assign]
    with wrapper.no_sync():
        wrapper(torch.ones(1, 2)).sum().backward()
    check = compat.reduction_check(wrapper)
    check()
    wrapper(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError):
        check()


@tries("sends_buffers")
def _() -> None:
    kind, late = nn.parallel.DistributedDataParallel, linear()
    assert compat.sends_buffers(kind(nn.BatchNorm1d(2)))
    assert not compat.sends_buffers(kind(nn.BatchNorm1d(2), broadcast_buffers=False))
    wrapper = kind(late)
    late.register_buffer("made_later", torch.ones(1))
    wrapper(torch.ones(1, 2)).sum().backward()
    assert not compat.sends_buffers(wrapper)


@tries("hook_states")
def _() -> None:
    wrapper, state = nn.parallel.DistributedDataParallel(linear()), object()
    assert compat.hook_states(wrapper) == []
    wrapper.register_comm_hook(state, default_hooks.allreduce_hook)
    assert compat.hook_states(wrapper) == [state]


@tries("watch_frozen")
def _() -> None:
    module, came = linear().requires_grad_(False), list[int]()
    unwatch = compat.watch_frozen(module.weight, lambda: came.append(1))
    assert not module.weight.requires_grad
    module.bias.requires_grad_(True)
    module(torch.ones(1, 2)).sum().backward()
    assert came == []
    module.weight.requires_grad_(True)
    module(torch.ones(1, 2)).sum().backward()
    assert came == [1]
    assert compat.hooks_on(module) == 0
    unwatch()
    module(torch.ones(1, 2)).sum().backward()
    assert came == [1]


@tries("noted_hooks")
def _() -> None:
    wrapper = nn.parallel.DistributedDataParallel(linear())
    assert compat.noted_hooks(wrapper) == []
    wrapper.register_comm_hook(None, lambda _, bucket: _done(bucket))
    assert len(compat.noted_hooks(wrapper)) == 1


@tries("uncompiled")
def _() -> None:
    module = linear()
    assert compat.uncompiled(torch.compile(module)) is module
    assert compat.uncompiled(module) is module


@tries("forget_layouts")
def _() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    for _ in range(2):
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.ones(2), mesh, [Replicate()])
        assert (tensor + tensor).device_mesh is mesh
        compat.forget_layouts()


@tries("watch_training_parts")
def _() -> None:
    from torch.optim import lr_scheduler as schedules

    kinds = (torch.optim.Optimizer, schedules.LRScheduler, torch.amp.GradScaler)
    kinds += (torch.optim.swa_utils.AveragedModel, schedules.SequentialLR)
    kinds += (schedules.ChainedScheduler, schedules.ReduceLROnPlateau)
    before, seen = [kind.__init__ for kind in kinds], list[Any]()
    try:
        compat.watch_training_parts(seen.append)
        opt = torch.optim.SGD(linear().parameters(), 0.1)
        steps = schedules.StepLR(opt, 2)
        made = [
            opt,
            steps,
            schedules.SequentialLR(opt, [steps, schedules.ConstantLR(opt)], [1]),
            schedules.ChainedScheduler([steps]),
            schedules.ReduceLROnPlateau(opt),
            torch.amp.GradScaler("cpu"),
            torch.optim.swa_utils.AveragedModel(linear()),
        ]
        assert {id(one) for one in made} <= {id(one) for one in seen}
    finally:
        for kind, make in zip(kinds, before, strict=True):
            kind.__init__ = make


@tries("watch_copied_modules")
def _() -> None:
    before, seen = nn.Module.__setstate__, list[Any]()
    try:
        compat.watch_copied_modules(seen.append)
        copied = copy.deepcopy(nn.Sequential(linear()))
        assert [one for one in seen if one is copied]
        assert copied(torch.ones(1, 2)).shape == (1, 1)
    finally:
        nn.Module.__setstate__ = before  # type: ignore[method-assign]


@tries("tells_of_steps")
def _() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inside: Any) -> None:
            self.inside = inside

    opt = torch.optim.SGD(linear().parameters(), 0.1)
    assert compat.tells_of_steps(opt)
    assert not compat.tells_of_steps(Wrapper(opt))


@tries("watch_device_meshes")
def _() -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    seen: list[object] = []
    make = DeviceMesh.__init__
    try:
        compat.watch_device_meshes(seen.append)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        assert mesh["shard"].get_group() is mesh.get_group("shard")
        assert seen == [mesh]
        # It has a group of its own.
        flat = mesh._flatten("all")
        assert seen == [mesh, flat]
    finally:
        DeviceMesh.__init__ = make


@tries("mesh_place")
def _() -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    first, second = (init_device_mesh("cpu", (1,)) for _ in range(2))
    assert first == second
    # The default group has both.
    assert compat.mesh_place(first) == compat.mesh_place(second) is not None
    third = DeviceMesh.from_group(dist.new_group([0]), "cpu")
    assert first == third
    assert compat.mesh_place(third) not in (compat.mesh_place(first), None)
    bare = DeviceMesh("cpu", [0], _init_backend=False)
    assert compat.mesh_place(bare) is None


@tries("take_groups")
def _() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    old, new = (init_device_mesh("cpu", (1,)) for _ in range(2))
    compat.take_groups(old, new)
    assert old._pg_registry is new._pg_registry


@tries("versions")
def _() -> None:
    tensor = torch.zeros(2)
    (before,) = compat.versions([tensor])
    tensor.add_(1)
    assert compat.versions([tensor]) == [before + 1]


@tries("copy_all")
def _() -> None:
    targets = [torch.zeros(2), torch.zeros(3)]
    compat.copy_all(targets, [torch.ones(2), torch.ones(3)])
    assert all(bool((one == 1).all()) for one in targets)


@tries("buffer_places")
def _() -> None:
    module = nn.BatchNorm1d(2)
    places = {key: owner for owner, key in compat.buffer_places([module])}
    places["running_mean"]["running_mean"] = torch.ones(2)
    assert bool((module.running_mean == 1).all())


@tries("buffer_names")
def _() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    names = compat.buffer_names({"model": module})
    places = [(id(owner), key) for owner, key in compat.buffer_places([module])]
    assert "model.0.running_var" in {names[place] for place in places}


@tries("keeps_running_averages")
def _() -> None:
    kinds = nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True), nn.SyncBatchNorm(2)
    assert all(map(compat.keeps_running_averages, kinds))
    assert not compat.keeps_running_averages(nn.LayerNorm(2))


@tries("has_memory")
def _() -> None:
    inside = []
    torch.func.grad(lambda one: (inside.append(one), one.sum())[1])(torch.ones(2))
    with FakeTensorMode():
        inside.append(torch.ones(2))
    assert not any(map(compat.has_memory, (*inside, torch.ones(2).to_sparse())))
    assert compat.has_memory(torch.ones(2)) and compat.has_memory(linear().weight)


@tries("is_gradient_scaler")
def _() -> None:
    assert compat.is_gradient_scaler(torch.amp.GradScaler("cpu"))
    assert not compat.is_gradient_scaler(torch.optim.SGD(linear().parameters(), 0.1))


@tries("batches_of_iterators")
def _() -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3])
    one, other = iter(loader), iter(loader)
    next(one)
    assert compat.batches_of_iterators([loader, one, other]) == [(one, 1), (other, 0)]


@tries("unsaved_buffers")
def _() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    module[0].register_buffer("table", torch.ones(1), persistent=False)
    assert compat.unsaved_buffers(module) == {"0.table"}


@tries("put_buffer")
def _() -> None:
    module = nn.Module()
    for number in (1, 2):
        compat.put_buffer(module, "table", torch.ones(number), persistent=True)
    assert len(module.state_dict()["table"]) == 2


@tries("to_shards")
def _() -> None:
    module = linear()
    fully_shard(module)
    module.forward = lambda x: x.no_such_thing
    with pytest.raises(AttributeError):
        module(torch.ones(1, 2))
    assert not isinstance(module.weight, DTensor)
    compat.to_shards(module)
    assert isinstance(module.weight, DTensor)


@tries("hooks_on")
def _() -> None:
    module = nn.Sequential(linear())
    before = compat.hooks_on(module)
    module[0].register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    module[0].bias.register_hook(lambda grad: grad)
    module[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    assert (before, compat.hooks_on(module)) == (0, 6)


@tries("holder_of")
def _() -> None:
    tensor = torch.zeros(1, requires_grad=True)
    assert dict(compat.holder_of({"scale": tensor}).named_parameters())["scale"] is tensor


@tries("is_scaler_used")
def _() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert not compat.is_scaler_used(scaler)
    scaler.scale(torch.ones(1))
    assert compat.is_scaler_used(scaler)


@tries("forget_unscaled")
def _() -> None:
    module, scaler = linear(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scaler.scale(module(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    compat.forget_unscaled(scaler)
    scaler.unscale_(optimizer)


@tries("forget_workers")
def _() -> None:
    loader = torch.utils.data.DataLoader([1, 2], num_workers=1, persistent_workers=True)
    before = iter(loader)
    assert iter(loader) is before
    compat.forget_workers(loader)
    assert iter(loader) is not before


@tries("load_compiler")
def _() -> None:
    compat.load_compiler()


@pytest.mark.parametrize("use", sorted(compat.USES))
def test_it_holds_for_the_release_that_is_installed(use: str, group: Any) -> None:
    where = f"compat.{use} with torch {compat.release()} (seen with {', '.join(compat.USES[use])})"
    assert use in TRIED, f"{where}: no test tries it"
    try:
        TRIED[use]()
    except Exception as error:
        pytest.fail(f"{where} does not hold: {type(error).__name__}: {error}")


def test_each_release_was_seen() -> None:
    unseen = [use for use, releases in compat.USES.items() if compat.release() not in releases]
    assert not unseen, f"torch {compat.release()} is new to: {', '.join(unseen)}"
