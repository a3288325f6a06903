"""Measure a node's processors, memory, GPUs and one link, each for a fraction of a second.

torch is asked about GPUs alone: a node without one needs none, and is measured in a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.deepcheck.speed.speed_probe import (
    call_link,
    compute_rate,
    machine_serial,
    memory_rate,
    processor_model,
    serve_link,
)
from slurm_resilience.deepcheck.step_lines import GroupTrouble, SpeedTold, as_lines
from slurm_resilience.deepcheck.step_requests import SPEED_TOKEN, SpeedLink, SpeedRequest

if TYPE_CHECKING:
    import torch

GPU_SECONDS = 0.1
"""The time for one measure of a GPU, after one that warms it up."""
GPU_WIDTH = 4096
GPU_COPY_BYTES = 256 << 20
GPU_REDUCE_BYTES = 64 << 20


def run(request: SpeedRequest, token: bytes, node: str) -> int:
    """Measure; print each figure as it comes."""
    serial, model = machine_serial() or node, processor_model()
    threads = len(os.sched_getaffinity(0))
    for links in request.rounds:
        _tell(SpeedTold(node, serial, model, "compute", compute_rate(threads)))
        _tell(SpeedTold(node, serial, model, "memory", memory_rate(threads)))
        if request.gpus:
            for told in _gpus(node, serial):
                _tell(told)
        _link(links, node, serial, model, token)
    return 0


def _link(links: Sequence[SpeedLink], node: str, serial: str, model: str, token: bytes) -> None:
    for link in links:
        if node not in (link.server, link.client):
            continue
        try:
            if node == link.server:
                rate = serve_link(link.port, token)
            else:
                rate = call_link(link.address, link.port, token)
        except OSError as error:
            _tell(GroupTrouble(0, node, f"link of {link.server} and {link.client}: {error}"))
        else:
            partner = link.client if node == link.server else link.server
            _tell(SpeedTold(node, serial, model, "link", rate, partner))


def _tell(message: SpeedTold | GroupTrouble) -> None:
    for line in as_lines(message.node, message):
        print(line, flush=True)


def _gpus(node: str, serial: str) -> Iterator[SpeedTold | GroupTrouble]:
    try:
        import torch
    except ImportError:
        yield GroupTrouble(0, node, "torch is not installed: GPUs are not measured", missing=True)
        return
    if not torch.cuda.is_available():
        yield GroupTrouble(0, node, "torch sees no GPU", missing=True)
        return
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        uuid, name = str(getattr(properties, "uuid", f"{serial}-{index}")), properties.name
        yield SpeedTold(node, uuid, name, "compute", _product_rate(torch.device("cuda", index)))
        yield SpeedTold(node, uuid, name, "memory", _copy_rate(torch.device("cuda", index)))
    if count > 1:
        rate = _reduce_rate(count)
        name = f"{count} x {torch.cuda.get_device_name(0)}"
        yield SpeedTold(node, serial, name, "collective", rate)


def _product_rate(device: torch.device) -> float:
    """Return TFLOP/s of products of matrices."""
    import torch

    left = torch.ones(GPU_WIDTH, GPU_WIDTH, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(left)
    return 2 * GPU_WIDTH**3 * _repeats(lambda: torch.mm(left, left, out=out), [device]) / 1e12


def _copy_rate(device: torch.device) -> float:
    """Return GB/s of copies within a GPU's memory."""
    import torch

    source = torch.zeros(GPU_COPY_BYTES, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    return GPU_COPY_BYTES * _repeats(lambda: to.copy_(source), [device]) / 1e9


def _reduce_rate(count: int) -> float:
    """Return GB/s of an all-reduce among the node's GPUs, by the size that each gives."""
    import torch
    from torch.cuda import nccl

    devices = [torch.device("cuda", index) for index in range(count)]
    parts = [torch.zeros(GPU_REDUCE_BYTES // 4, device=device) for device in devices]
    # Without annotations in torch.
    reduce: Callable[[list[torch.Tensor]], object] = nccl.all_reduce
    return GPU_REDUCE_BYTES * _repeats(lambda: reduce(parts), devices) / 1e9


def _repeats(load: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """Return how often a load runs in a second."""
    import torch

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    load()
    wait()
    count, begun = 0, SYSTEM_CLOCK.monotonic()
    while (took := SYSTEM_CLOCK.monotonic() - begun) < GPU_SECONDS:
        load()
        wait()
        count += 1
    return count / took


def main() -> int:
    """Run the entry of the process."""
    request = msgspec.json.decode(sys.argv[1], type=SpeedRequest)
    token = os.environ[SPEED_TOKEN].encode("utf-8")
    return run(request, token, os.environ.get("SLURMD_NODENAME") or os.uname().nodename)


if __name__ == "__main__":
    sys.exit(main())
