"""Small programs for two ranks, as a user would write them, and what is to be seen of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Program = Callable[..., "subprocess.CompletedProcess[str]"]

PROGRAM = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from slurm_resilience.training import Session, inject, resilient

torch.set_num_threads(1)


def say(*words):
    # In one piece: both ranks write to the same pipe.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def build():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def average(model, world):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world

{parts}
@resilient({options})
def train(s: Session):
{body}
    say(f"seat {{s.seat}} ends at {{s.step}}")


if __name__ == "__main__":
    train()
"""
USUAL = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = s.ddp(model)
for x, y in s.loader(DATA, global_batch=8, steps=4, epochs=None):
    nn.functional.mse_loss(net(x), y).backward()
    with s.update():
        opt.step()
        opt.zero_grad()
"""
WEIGHTS = '\nsay("weights", [round(v, 9) for v in model.weight.flatten().tolist()])\n'


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    """It ended with one line that has these words."""
    assert done.returncode == 76, done.stderr[-4000:]
    assert "ends at" not in done.stdout
    given_up = [line for line in done.stderr.splitlines() if "the training gave up:" in line]
    assert given_up and all(words in line for line in given_up), done.stderr[-4000:]


def told_nothing(done: subprocess.CompletedProcess[str]) -> None:
    """No line but the one on how the training began."""
    # A busy machine holds up processes, and they say so.
    told = [line for line in done.stderr.splitlines() if "was held up for" not in line]
    lines = [line for line in told if "sres" in line]
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(lines) == 1 and "fresh start" in lines[0], done.stderr[-4000:]


def warned(done: subprocess.CompletedProcess[str], words: str) -> None:
    """It went on to its end, and one line has these words."""
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("ends at") == 2, done.stdout
    said = [line for line in done.stderr.splitlines() if words in line]
    assert len(said) == 1, done.stderr[-4000:]
