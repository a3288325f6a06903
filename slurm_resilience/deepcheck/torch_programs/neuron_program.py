"""Train a small model on the Neuron core that this process sees, and compare it with the processor.

It is trained by the signs of its gradients, from whole numbers: weights stay whole numbers, and all
sums are smaller than 2^24, up to which float32 holds them exactly, in whatever order they are added
up. So each weight has to be equal to the bit. They would not fit into bfloat16.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.deepcheck.step_lines import GroupTrouble, NeuronTrained, as_lines
from slurm_resilience.deepcheck.step_requests import NeuronRequest
from slurm_resilience.deepcheck.torch_programs.rank_device import DeviceMissing, open_neuron_core

if TYPE_CHECKING:
    import torch

SAMPLES, WIDTH, STEPS = 32, 64, 8
"""A step changes each weight by one at most: sums stay below 2 x 32 x (64 x 8 + 64), for rounds of
so many steps."""


def _print(message: NeuronTrained | GroupTrouble) -> None:
    for line in as_lines(f"neuron{os.environ.get('NEURON_RT_VISIBLE_CORES', '')}", message):
        print(line, flush=True)


def run(request: NeuronRequest) -> int:
    """Train round after round; print what came of it."""
    try:
        core = open_neuron_core()
    except DeviceMissing as reason:
        _print(GroupTrouble(0, "", str(reason), missing=True))
        return 0
    import torch

    right = _trained(torch.device("cpu"), lambda: None)
    wrong = rounds = 0
    begun = SYSTEM_CLOCK.monotonic()
    while True:
        wrong += int((_trained(core.device, core.step_done).cpu() != right).sum())
        rounds += 1
        if SYSTEM_CLOCK.monotonic() - begun >= request.seconds:
            break
    _print(NeuronTrained(rounds * STEPS, wrong))
    return 0


def _trained(device: torch.device, step_done: Callable[[], object]) -> torch.Tensor:
    """Return the weights after some steps of training on a device."""
    import torch

    source = torch.Generator().manual_seed(1)

    def whole_numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=source).float().to(device)

    samples = whole_numbers(SAMPLES, WIDTH)
    targets = samples @ whole_numbers(WIDTH, WIDTH)
    weights = torch.zeros(WIDTH, WIDTH, device=device, requires_grad=True)
    for _ in range(STEPS):
        loss = (samples @ weights - targets).square().sum()
        (gradient,) = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            weights -= gradient.sign()
        step_done()
    return weights.detach()


def main() -> int:
    """Run the entry of the process."""
    return run(msgspec.json.decode(sys.argv[1], type=NeuronRequest))


if __name__ == "__main__":
    sys.exit(main())
