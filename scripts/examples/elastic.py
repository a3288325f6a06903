"""Any number of ranks, the same result: to the last bit with `--same-bits`.

    python -m slurm_resilience.launcher --nproc-per-node 3 scripts/examples/elastic.py --same-bits

Try it with 1, 2, 3, 4 or 8 ranks, or kill one in the middle (min_world=1: the others go on at once,
and it is let in again): the checksum of the parameters at the end is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from torch import nn

from slurm_resilience.training import Session, resilient


class Waves(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sixteen numbers, and the sine of their sum."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin().view(1)


def build(hidden: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Everything that has to survive."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, hidden),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(hidden, hidden),
        nn.GELU(),
        nn.Linear(hidden, 1),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@resilient(min_world=1)
def train(
    s: Session, given: argparse.Namespace, model: nn.Module, opt: torch.optim.Optimizer
) -> None:
    """Run the block."""
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    began, first = time.perf_counter(), s.step
    for step in s.microbatches(
        Waves(), net, size=8, count=16, steps=given.steps, same_bits=given.same_bits
    ):
        for x, y in step:
            loss = nn.functional.mse_loss(net(x), y)
            step.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with s.update():
            opt.step()
        if s.rank == 0:
            print(f"step {s.step} loss {loss.item():.4f} world {s.world}", flush=True)
        if s.step == given.steps // 5:  # the first ones are slower
            began, first = time.perf_counter(), s.step
    if s.rank == 0:
        parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"parameters {hashlib.sha256(parameters).hexdigest()[:16]}")
        print(f"seconds a step {(time.perf_counter() - began) / max(s.step - first, 1):.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--same-bits", action="store_true")
    given = parser.parse_args()
    # Here and not by s.once: a rank that joins builds before the others let it in.
    train(given, *build(given.hidden))
