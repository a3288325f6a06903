"""Load processors or GPUs with products and memory whose values are known beforehand.

The factors are small whole numbers, so that every sum is a whole number that float32 holds exactly,
in whatever order it is added up: each product has to be equal to the bit.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.deepcheck.step_lines import Burned, GroupTrouble, as_lines
from slurm_resilience.deepcheck.step_requests import BurnRequest

if TYPE_CHECKING:
    import torch

GPU_WIDTH, CPU_WIDTH = 4096, 512
"""Rows and columns. 7 x 7 x 4096 is far below 2^24, up to which float32 holds whole numbers."""
BLOCK_BYTES = 64 << 20
PATTERNS = (0x5555555555555555, 0x2AAAAAAAAAAAAAAA, 0)
"""Bits in turn, the others, and (0) each word its own place."""


def _print(message: Burned | GroupTrouble) -> None:
    for line in as_lines("burn", message):
        print(line, flush=True)


def run(request: BurnRequest) -> int:
    """Load all devices; print a message for each."""
    try:
        import torch
    except ImportError:
        _print(GroupTrouble(0, "", "torch is not installed", missing=True))
        return 0
    if request.gpus and not torch.cuda.is_available():
        _print(GroupTrouble(0, "", "torch sees no GPU", missing=True))
        return 0
    devices = (
        [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if request.gpus
        else [torch.device("cpu")]
    )
    width = GPU_WIDTH if request.gpus else CPU_WIDTH
    # Doubles hold these sums exactly as well, and the processor's are the reference.
    left = (torch.arange(width * width, dtype=torch.float64) % 8).reshape(width, width)
    right = (torch.arange(width * width, dtype=torch.float64) % 7).reshape(width, width)
    expected = (left @ right).float()
    factors = [(left.float().to(d), right.float().to(d), expected.to(d)) for d in devices]
    wrong = [0] * len(devices)
    rounds, begun = 0, SYSTEM_CLOCK.monotonic()
    while True:
        # All devices work at the same time: one that fails under the others' load is found too.
        products = [a @ b for a, b, _ in factors]
        for index, (product, (_, _, want)) in enumerate(zip(products, factors, strict=True)):
            wrong[index] += int((product != want).sum().item())
        rounds += 1
        took = SYSTEM_CLOCK.monotonic() - begun
        if took >= request.seconds:
            break
    rate = 2 * width**3 * rounds / took / 1e9
    for index, device in enumerate(devices):
        size, lost = _memory(device, request.memory_share)
        name = torch.cuda.get_device_name(device) if request.gpus else "processors"
        _print(Burned(f"{device} {name}", rounds, wrong[index], size, lost, rate))
    return 0


def _memory(device: torch.device, share: float) -> tuple[int, int]:
    """Write a share of the free memory, read it back; return its bytes, and the wrong words."""
    import psutil
    import torch

    free = (
        torch.cuda.mem_get_info(device)[0]
        if device.type == "cuda"
        else psutil.virtual_memory().available
    )
    words = BLOCK_BYTES // 8
    count = max(1, int(free * share) // BLOCK_BYTES)
    places = torch.arange(words, dtype=torch.int64, device=device)
    blocks = [torch.empty(words, dtype=torch.int64, device=device) for _ in range(count)]
    lost = 0
    for pattern in PATTERNS:
        for number, block in enumerate(blocks):
            block.fill_(pattern) if pattern else block.copy_(places).add_(number * words)
        for number, block in enumerate(blocks):
            want = pattern if pattern else places + number * words
            lost += int((block != want).sum().item())
    return count * BLOCK_BYTES, lost


def main() -> int:
    """Run the entry of the process."""
    return run(msgspec.json.decode(sys.argv[1], type=BurnRequest))


if __name__ == "__main__":
    sys.exit(main())
