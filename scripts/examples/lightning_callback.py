"""A Lightning-style module and trainer: the hooks around the optimizer mark the commit point.

    python -m slurm_resilience.launcher --nproc 2 scripts/examples/lightning_callback.py

`ResilientCallback` is what you take over; `lightning_trainer.py` has it in the real Trainer. The
`Trainer` below stands in for that: the same hooks, in the same order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from slurm_resilience.training import Session, resilient


class ResilientCallback:
    """Opens the update when the gradients are there, and commits at the batch's end."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._update: Any = None

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """After backward; not called for batches that only accumulate gradients. Once for each
        optimizer of a batch: do all its backwards first, and then step them all."""
        if self._update is None:
            self._update = self._session.update()
            self._update.__enter__()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Commit. A fault before never gets here: this rank's state counts as void then."""
        update, self._update = self._update, None
        if update is not None:
            update.__exit__(None, None, None)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """All other hooks: nothing."""
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None


class Module(nn.Module):
    """A LightningModule's shape: the model, its loss and its optimizer in one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Run the training step: batch (n, 4) to a scalar loss."""
        wanted = batch.prod(dim=1, keepdim=True)
        return nn.functional.mse_loss(self.net(batch), wanted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Trainer:
    """Stands in for `lightning.Trainer` (automatic optimization, no accumulation)."""

    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks

    def hook(self, name: str, *words: Any) -> None:
        """Call every callback."""
        for callback in self.callbacks:
            getattr(callback, name)(self, *words)

    def fit(self, module: nn.Module, opt: torch.optim.Optimizer, data: Iterable[Any]) -> None:
        """Run the loop of the library."""
        self.hook("on_train_start", module)
        for index, batch in enumerate(data):
            self.hook("on_train_batch_start", module, batch, index)
            opt.zero_grad()
            loss = module(batch)
            loss.backward()
            self.hook("on_before_optimizer_step", module, opt)
            opt.step()
            self.hook("on_train_batch_end", module, loss.detach(), batch, index)
        self.hook("on_train_end", module)


class Printer(ResilientCallback):
    """An ordinary callback of the user's; comes after the commit."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Nothing."""

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Once a step."""
        print(f"step {self._session.step} loss {outputs.item():.5f}", flush=True)


class Points(torch.utils.data.Dataset[torch.Tensor]):
    """Random points."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4, generator=torch.Generator().manual_seed(index))


def build() -> tuple[Module, torch.optim.Optimizer]:
    """Build the same on every rank."""
    module = Module()
    return module, module.configure_optimizers()


@resilient()
def train(s: Session, steps: int) -> None:
    """Run the block: a Trainer for each world."""
    module, opt = s.once(build)
    s.track(module=module, opt=opt)
    callbacks: list[Any] = [ResilientCallback(s)]
    if s.rank == 0:
        callbacks.append(Printer(s))
    data = s.loader(Points(), global_batch=32, steps=steps, epochs=None)
    Trainer(callbacks).fit(s.ddp(module), opt, data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    train(parser.parse_args().steps)
