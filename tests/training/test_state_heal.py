"""A rank that lost its state gets it back from its peers, over real process groups."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_ranks import run, view_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from slurm_resilience.mesh.model import PeerStatus, View
from slurm_resilience.training import state
from slurm_resilience.training.interrupter import _raise_in
from slurm_resilience.training.process_group.group_sockets import open_sockets
from slurm_resilience.training.state import HealFailed, StateError, Tracked
from slurm_resilience.training.state.transfer import (
    Payload,
    SendQueue,
    receive_bytes,
    send_bytes,
)

pytestmark = pytest.mark.training

HELD = PeerStatus(generation=1, step=3, position=0)
LOST = PeerStatus()


def build(seed: int, width: int = 64) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 3)
    )
    model[3].weight = nn.Parameter(model[3].weight.to(memory_format=torch.contiguous_format))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


def steps(objects: dict[str, Any], count: int, width: int = 64) -> None:
    for _ in range(count):
        loss = objects["model"](torch.randn(8, width)).square().mean()
        objects["scaler"].scale(loss).backward()
        objects["scaler"].step(objects["optimizer"])
        objects["scaler"].update()
        objects["scheduler"].step()
        objects["optimizer"].zero_grad()


def replicas(rank: int, group: Any, statuses: list[PeerStatus], bucket: int) -> dict[str, Any]:
    healthy = statuses[rank].healthy
    objects = build(0 if healthy else rank + 1)
    if healthy:
        steps(objects, 3)
    tracked = Tracked(objects)
    pointers = [p.data_ptr() for p in objects["model"].parameters()]
    view = view_of(statuses)
    plan = state.plan(view)
    report = state.transfer(plan, view, rank, tracked, group, bucket_bytes=bucket, verify=True)
    after = tracked.digest()
    assert pointers == [p.data_ptr() for p in objects["model"].parameters()]
    draw = (torch.rand(1).item(), random.random())
    steps(objects, 2)
    return {
        "plan": plan.kind,
        "digest": after,
        "next": tracked.digest(),
        "report": report,
        "draw": draw,
        "scheduler": objects["scheduler"].state_dict(),
        "scaler": objects["scaler"].state_dict(),
    }


@pytest.mark.parametrize(
    ("statuses", "bucket"),
    [([HELD, LOST], 32 << 20), ([HELD, LOST, HELD, HELD], 10_000), ([LOST, LOST, HELD], 7_777)],
    ids=["one to one", "three share", "relayed"],
)
def test_replicas_are_equal_after_healing_and_stay_so(
    tmp_path: Path, statuses: list[PeerStatus], bucket: int
) -> None:
    found = run(replicas, len(statuses), tmp_path, statuses, bucket)
    for key in ("digest", "next", "draw", "scheduler", "scaler"):
        assert all(one[key] == found[0][key] for one in found), key
    total = max(one["report"].received for one in found)
    for rank, one in enumerate(found):
        assert one["plan"] == "peers"
        assert one["report"].received == (0 if statuses[rank].healthy else total)


def disagree(rank: int, group: Any) -> str:
    """Two sources of one target whose tensors are not the same."""
    held = PeerStatus(generation=1, step=3)
    view = view_of([LOST, held, held])
    tracked = Tracked({"x": torch.zeros(1000 if rank < 2 else 1001)})
    if rank == 0:
        with pytest.raises(StateError) as caught:
            state.transfer(state.plan(view), view, rank, tracked, group)
        dist.barrier()
        return str(caught.value)
    sending = threading.Thread(
        target=state.transfer, args=(state.plan(view), view, rank, tracked, group), daemon=True
    )
    sending.start()
    dist.barrier()
    return ""


def test_sources_with_other_tensors_are_refused(tmp_path: Path) -> None:
    found = run(disagree, 3, tmp_path)
    assert found[0] == "ranks [1, 2] hold the same part with different tensors"


def grown(rank: int, group: Any) -> Any:
    """A forward of one source alone, in a validation, has enlarged a buffer."""
    torch.manual_seed(rank)
    held = PeerStatus(generation=1, step=3)
    view = view_of([LOST, held, held])
    model = nn.BatchNorm1d(400, affine=False)
    model.register_buffer("table", torch.full((5 if rank == 1 else 3,), float(rank)))
    weights = nn.Linear(100, 100)
    if rank:
        nn.init.constant_(weights.weight, 7.0)
    tracked = Tracked({"norm": model, "net": weights})
    state.transfer(state.plan(view), view, rank, tracked, group, verify=True)
    dist.barrier()
    return model.table.tolist(), bool((weights.weight == 7.0).all())


def test_sources_may_differ_in_what_forward_has_made(tmp_path: Path) -> None:
    found = run(grown, 3, tmp_path)
    assert found[0] == found[1] == ([1.0] * 5, True)
    assert found[2] == ([2.0] * 3, True)


def corrupted(rank: int, group: Any) -> str:
    """One bit changes on the way."""
    view = view_of([LOST, HELD])
    tracked = Tracked({"x": torch.zeros(100_000)})
    if rank == 1:
        state.transfer(state.plan(view), view, rank, tracked, group, verify=True)
        return ""
    empty = Payload.empty

    def flip(payload: Payload) -> None:
        payload.bytes[77] ^= 16
        empty(payload)

    Payload.empty = flip  # type: ignore[method-assign]
    with pytest.raises(HealFailed) as caught:
        state.transfer(state.plan(view), view, rank, tracked, group, verify=True)
    return str(caught.value)


def test_a_bit_that_changed_on_the_way_is_found(tmp_path: Path) -> None:
    found = run(corrupted, 2, tmp_path)
    assert re.match(r"what arrived from rank 1 has checksum \w{32}, there it is \w{32}", found[0])


def bereft(rank: int, group: Any, relays: bool) -> Any:
    """The source is killed after its fifth message."""
    view = view_of([LOST, LOST, HELD] if relays else [LOST, HELD])
    source = view.size - 1
    tracked = Tracked({"x": torch.full((2_000_000,), float(rank))})
    if rank == source:
        put, count = SendQueue.put, iter(range(100))

        def kill(outbox: SendQueue, payload: Payload, tag: int) -> None:
            if next(count) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            put(outbox, payload, tag)

        SendQueue.put = kill  # type: ignore[method-assign]
    begin = time.monotonic()
    with pytest.raises(HealFailed) as caught:
        state.transfer(state.plan(view), view, rank, tracked, group, bucket_bytes=1 << 18)
    if rank == 0:
        # What the session does when it leaves a generation: shut the group's sockets.
        os._exit(7) if relays else None
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize("relays", [False, True])
def test_a_source_that_dies_breaks_the_transfer_at_once(tmp_path: Path, relays: bool) -> None:
    found = run(bereft, 3 if relays else 2, tmp_path, relays)
    assert found[-1] == -signal.SIGKILL
    said, took = found[-2]
    assert said.startswith("receiving state broke off in step 3: ")
    assert took < 15, "well before the group's own timeout of 30 s"


SO_MAX_PACING_RATE = 47


class WorldOver(BaseException):
    """As the interrupter raises it."""


def half_received(rank: int, group: Any) -> bool:
    """The source is killed in the middle of a message: gloo loses the call that receives it. The
    interrupter raises in the block."""
    size = 1 << 25
    whole = torch.full((size,), rank, dtype=torch.uint8)
    tracked, view, source = Tracked({"x": whole}), view_of([LOST, HELD]), torch.zeros(1)
    if rank == 1:
        source.fill_(os.getpid())
    dist.broadcast(source, 1)
    if rank == 1:
        for descriptor in open_sockets():  # the message takes half a minute
            with socket.socket(fileno=os.dup(descriptor)) as own, suppress(OSError):
                own.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 1 << 20)
    main = threading.get_ident()

    def interrupt() -> None:
        while not whole[0]:
            time.sleep(0.001)
        os.kill(int(source), signal.SIGKILL)
        while not _raise_in(main, WorldOver):
            time.sleep(0.001)

    if rank == 0:
        threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(WorldOver):
        state.transfer(state.plan(view), view, rank, tracked, group, bucket_bytes=size)
    # Else the call was not lost, and this proves nothing.
    assert not whole[-1]
    return "sres-landing" in {thread.name for thread in threading.enumerate()}


def test_a_source_that_dies_in_a_message_keeps_its_target_in_no_call(tmp_path: Path) -> None:
    found = run(half_received, 2, tmp_path)
    assert found == [True, -signal.SIGKILL], "no thread is left behind in the lost call"


def lean(rank: int, group: Any, bucket: int) -> tuple[int, int]:
    """Growth of a receiver's peak memory, and the bytes that it did not have before."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    # Too small to be sent alone: these go packed.
    model.extend(nn.Linear(200, 200) for _ in range(200))
    optimizer = torch.optim.Adam(model.parameters())
    if rank == 1:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    tracked = Tracked({"model": model, "optimizer": optimizer})
    view = view_of([LOST, HELD])
    # What is imported at the first use is no part of the state.
    few = Tracked({"model": nn.Linear(2, 2)})
    state.transfer(state.plan(view), view, rank, few, group, bucket_bytes=bucket)
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    state.transfer(state.plan(view), view, rank, tracked, group, bucket_bytes=bucket)
    grown = _peak() - before
    new = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    return grown, new if rank == 0 else 0


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10


def test_memory_grows_by_what_was_missing_and_a_few_buckets(tmp_path: Path) -> None:
    bucket = 2 << 20
    (received, new), (sent, _) = run(lean, 2, tmp_path, bucket)
    assert new > 120e6
    slack = 2 * bucket + (12 << 20)
    assert received < new + slack
    assert sent < slack


def sharded(rank: int, group: Any) -> dict[str, Any]:
    """HSDP, 2 replicas of 2 shards: rank 1's process is new, rank 2 stuck in an update."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    # The last layer is the root's own: that keeps its parameters whole from forward to backward.
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tracked = Tracked({"model": model, "optimizer": optimizer})

    def go(count: int) -> None:
        for number in range(count):
            generator = torch.Generator().manual_seed(number)
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def heal(view: View) -> Any:
        return state.transfer(state.plan(view), view, rank, tracked, group, verify=True)

    first = heal(view_of([PeerStatus(step=0)] * 4, replica_size=2, generation=1))
    go(3)
    whole = [p.full_tensor().detach().clone() for p in model.parameters()]
    before = tracked.digest()
    if rank == 1:
        # A new process: weights of its own, and no optimizer state.
        optimizer.state.clear()
    if rank in (1, 2):
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().normal_()
    statuses = [PeerStatus(generation=1, step=3, position=r % 2) for r in range(4)]
    statuses[1] = PeerStatus()
    statuses[2] = PeerStatus(generation=1, step=2, dirty=True, position=0)
    second = heal(view_of(statuses, replica_size=2))
    same = all(
        torch.equal(p.full_tensor(), w) for p, w in zip(model.parameters(), whole, strict=True)
    )
    after = tracked.digest()
    go(1)
    tracked.mark()
    clean = tracked.digest()

    def boom(*_: Any) -> None:
        raise ValueError

    hook = model[2].register_forward_pre_hook(boom)
    with pytest.raises(ValueError):
        model(torch.ones(4, 6))
    hook.remove()
    assert not isinstance(model[2].weight, DTensor), "the fault left a gathered parameter"
    assert tracked.rollback() == ()
    assert isinstance(model[2].weight, DTensor)
    go(1)
    return {
        "kinds": (first.kind, second.kind),
        "same": same,
        "healed": after == before,
        "sources": second.sources,
        "clean": clean,
        "next": tracked.digest(),
    }


def test_hsdp_shards_are_healed_from_the_same_shard_of_the_other_replica(tmp_path: Path) -> None:
    found = run(sharded, 4, tmp_path)
    assert {one["kinds"] for one in found} == {("fresh", "peers")}
    assert all(one["same"] and one["healed"] for one in found)
    assert [one["sources"] for one in found] == [(), (3,), (0,), ()]
    for key in ("clean", "next"):
        assert found[0][key] == found[2][key] != found[1][key] == found[3][key]


def late(rank: int, group: Any, path: str) -> str:
    dist.destroy_process_group()
    short, long = timedelta(seconds=0.5), timedelta(seconds=30)
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=short)
    dist.distributed_c10d._set_pg_timeout(long, dist.group.WORLD)
    if rank == 0:
        send_bytes(dist.group.WORLD, b"state", [1], 1)
        return "sent"
    threading.Event().wait(3 * short.total_seconds())
    return receive_bytes(dist.group.WORLD, 5, 0, 1).decode()


def test_who_sends_waits_longer_for_a_late_rank_than_forming_may_take(tmp_path: Path) -> None:
    assert run(late, 2, tmp_path, str(tmp_path / "second")) == ["sent", "state"]
