"""The real Trainer of Lightning, with its hooks around the optimizer as the commit point.

    pip install lightning
    python -m slurm_resilience.launcher --nproc-per-node 2 scripts/examples/lightning_trainer.py

Each rank has a Trainer of its own that knows of no other rank: what ranks have in common (batches,
averaged gradients, the state) is the session's. `Resilient`, `Batches` and the block are what you
take over.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning_callback import Points, ResilientCallback
from torch import nn

from slurm_resilience.training import Session, resilient


class Resilient(ResilientCallback, lightning.Callback):
    """The callback, as one of Lightning's."""


class Module(lightning.LightningModule):
    """An ordinary module; it computes through the session's DDP wrapper when there is one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
        self.through: list[nn.Module] = []

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        """Batch (n, 4) to a scalar loss."""
        net = self.through[0] if self.through else self.net
        return nn.functional.mse_loss(net(batch), batch.prod(dim=1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Data(lightning.LightningDataModule):
    """An ordinary data module."""

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Points(), batch_size=8, shuffle=True)


class Batches:
    """The session's batches, with a length. Where Lightning knows none, it reads one batch ahead,
    which the session would count to the update before: a fault would leave it out."""

    def __init__(self, batches: Iterator[Any], length: int) -> None:
        self._batches, self._length = batches, length

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __len__(self) -> int:
        return self._length


class Printer(lightning.Callback):
    """An ordinary callback of the user's; comes after the commit."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Once a step."""
        print(f"step {self._session.step} loss {float(outputs['loss']):.5f}", flush=True)


def build() -> tuple[Module, torch.optim.Optimizer, Data]:
    """Build the same on every rank."""
    module = Module()
    opt = module.configure_optimizers()
    module.configure_optimizers = lambda: opt  # Lightning is to use the one that is tracked
    return module, opt, Data()


@resilient()
def train(s: Session, steps: int) -> None:
    """Run the block: a Trainer for each world."""
    module, opt, data = s.once(build)
    s.track(module=module, opt=opt)
    module.through = [s.ddp(module.net, find_unused_parameters=True)]
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        plugins=[LightningEnvironment()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Resilient(s), *([Printer(s)] if s.rank == 0 else [])],
    )
    batches = s.loader(data, global_batch=32, steps=steps, epochs=None)
    trainer.fit(module, Batches(batches, steps - s.step))
    if s.rank == 0:
        with torch.no_grad():
            total = sum(float(p.double().abs().sum()) for p in module.parameters())
        print(f"parameters {total:.12f}", flush=True)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    train(parser.parse_args().steps)
