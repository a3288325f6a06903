"""A small training with checkpoints, which ends only when it is asked to.

Each task writes ``steps.SEAT``: one line of JSON for each step, with the samples of its share, in
the update: it may be the last thing that the task does.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slurm_resilience.training import Checkpointer, Session, resilient

PACE = 0.1
BATCH = 4
start = f"{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
torch.set_num_threads(1)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), 0.01)


@resilient(checkpointer=Checkpointer("checkpoints", every=100_000))
def train(s: Session) -> None:
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    x = torch.arange(2.0 * 4096).view(4096, 2) / 8192
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True), torch.arange(4096))
    with Path(f"steps.{s.seat}").open("a", buffering=1) as log:
        for features, target, samples in s.loader(data, BATCH, epochs=None, shuffle=False):
            if s.seat == 0:
                time.sleep(PACE)
            loss: Any = nn.functional.mse_loss(net(features), target)
            loss.backward()
            with s.update():
                opt.step()
                opt.zero_grad()
                log.write(f"{json.dumps([start, s.step + 1, samples.tolist()])}\n")


train()
