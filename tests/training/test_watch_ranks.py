"""Real gloo ranks, one of which hangs, stops or is slow: the others name it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch import nn  # noqa: E402

from slurm_resilience.mesh.messages import Heartbeat  # noqa: E402
from slurm_resilience.mesh.model import Peer  # noqa: E402
from slurm_resilience.training import inject  # noqa: E402
from slurm_resilience.training.watch import Watch, listen  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.timeout(120)]

WORLD = 3


def network() -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))


def exchange(watch: Watch, rank: int, place: str, say: Callable[[Any], None]) -> None:
    """Do what the mesh's thread does, over files."""
    pause, began = threading.Event(), time.monotonic()
    while True:
        own = Path(place) / f"beat-{rank}"
        said = msgspec.json.encode((time.monotonic(), watch.beat()))
        own.with_suffix(".new").write_bytes(said)
        own.with_suffix(".new").rename(own)
        beats, now = {}, time.monotonic()
        for other in range(WORLD):
            file = Path(place) / f"beat-{other}"
            if other != rank:
                at, beat = began, Heartbeat()
                if file.exists():
                    at, beat = msgspec.json.decode(file.read_bytes(), type=tuple[float, Heartbeat])
                beats[f"p{other}"] = (Peer(f"p{other}", other), beat, now - at)
        verdict = watch.stalled(now, beats)
        if verdict is not None:
            say((verdict.kind, verdict.culprit, verdict.reason))
            return
        pause.wait(0.05)


def trains(rank: int, say: Callable[[Any], None], place: str, fault: Any) -> None:
    net = network()
    watch = Watch(floor=2.0, silence=3.0, stacks=place)
    watch.enter(f"p{rank}", rank, dist.group.WORLD._get_sequence_number_for_group)
    inject.at(fault, rank=1, step=10)
    threading.Thread(target=exchange, args=(watch, rank, place, say), daemon=True).start()
    for step in range(100):
        watch.begin(step)
        inject.point("before-backward", step=step, rank=rank)
        net(torch.ones(3, 4)).sum().backward()
        watch.mark("update")
        watch.commit(step + 1)


@pytest.mark.parametrize(("fault", "kinds"), [("hang", {"behind"}), ("stop", {"behind", "silent"})])
def test_who_hangs_is_named_by_the_others(tmp_path: Path, fault: str, kinds: set[str]) -> None:
    with Ranks(tmp_path, WORLD, trains, str(tmp_path), fault) as ranks:
        for rank in (0, 2):
            found, culprit, reason = ranks.result(rank)
            assert found in kinds, reason
            assert culprit == "p1", reason
            text = (tmp_path / f"stacks-seat-{rank:05d}.txt").read_text()
            assert "in backward" in text


def works(rank: int, _: Any) -> Any:
    net = network()
    watch = Watch()
    watch.enter(f"p{rank}", rank)
    listen(watch, net)
    pause = threading.Event()
    for step in range(15):
        watch.begin(step)
        if rank == 2:
            pause.wait(0.05)
        net(torch.ones(3, 4)).sum().backward()
        watch.commit(step + 1)
        said: list[Any] = [None] * WORLD
        dist.all_gather_object(said, watch.beat())
        beats = {
            f"p{other}": (Peer(f"p{other}", other), beat, 0.0)
            for other, beat in enumerate(said)
            if other != rank
        }
        watch.stalled(time.monotonic(), beats)
    return [one.seat for one in watch.stragglers()]


def test_the_slow_one_is_named_by_all(tmp_path: Path) -> None:
    with Ranks(tmp_path, WORLD, works) as ranks:
        assert ranks.results() == [[2]] * WORLD
