"""The real Trainer of Lightning, with its hooks around the optimizer as the commit point.

    pip install lightning
    python -m slurm_resilience.launcher --nproc-per-node 2 scripts/examples/lightning_trainer.py

Each rank has a Trainer of its own that knows of no other rank: what ranks have in common (batches,
averaged gradients, the state) is the session's. `TrainerProgress`, `Resilient`, `Batches` and the
block are what you take over. What Lightning is told then:

- The whole training is one of its epochs: schedule by steps (``interval="step"``), and validate in
  the middle (``val_check_interval``).
- Each Trainer takes itself for the first process. So let rank 0 alone have a `ModelCheckpoint`.
- With several optimizers (manual optimization): all backwards of a batch first, then all steps.
"""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning_callback import Points, ResilientCallback
from torch import nn

from slurm_resilience.errors import UsageError
from slurm_resilience.training import Session, resilient


class TrainerProgress:
    """The counts of a Trainer and of its callbacks (early stopping), as of the last update. They
    are tracked, and outlive a fault."""

    def __init__(self) -> None:
        self.batches = 0
        """Batches that were taken."""
        self._global_step = 0
        self._logger_step = 0
        self._callbacks: dict[str, Any] = {}

    def keep(self, trainer: lightning.Trainer, batches: int) -> None:
        """Note it, inside of an update."""
        self.batches, self._global_step = batches, trainer.global_step
        self._logger_step = trainer.fit_loop.epoch_loop._batches_that_stepped
        self._callbacks = {one.state_key: copy.deepcopy(one.state_dict()) for one in _all(trainer)}

    def give(self, trainer: lightning.Trainer) -> None:
        """Set it, in a Trainer that begins."""
        for one in _all(trainer):
            if kept := self._callbacks.get(one.state_key):
                one.load_state_dict(copy.deepcopy(kept))
        loop = trainer.fit_loop.epoch_loop
        automatic, manual = loop.automatic_optimization, loop.manual_optimization
        automatic.optim_progress.optimizer.step.total.completed = self._global_step
        manual.optim_step_progress.total.completed = self._global_step
        loop._batches_that_stepped = self._logger_step

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _all(trainer: lightning.Trainer) -> list[lightning.Callback]:
    return list(trainer.callbacks)


class Resilient(ResilientCallback, lightning.Callback):
    """The callback, as one of Lightning's; give it first.

    Args:
        session: of the block.
        progress: tracked.
    """

    def __init__(self, session: Session, progress: TrainerProgress) -> None:
        super().__init__(session)
        self._progress = progress
        self._trainer: Any = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Go on with what the Trainer had counted by the last update.

        Raises:
            UsageError: a schedule steps by epochs, so it would never step.
        """
        self._trainer = trainer
        if any(one.interval == "epoch" for one in trainer.lr_scheduler_configs):
            raise UsageError(
                "the training is one epoch for Lightning, and a schedule by epochs would step at "
                'its end: give it interval="step", and a frequency'
            )
        self._progress.give(trainer)
        batches, every = self._progress.batches, trainer.val_check_batch
        if batches and trainer.enable_validation and every and batches % every == 0:
            # What followed the last update may have been cut off by the fault.
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True
        trainer.fit_loop.epoch_loop._batches_that_stepped += bool(batches)

    def count_on(self) -> None:
        """Let the Trainer number its batches on, when it takes its first one."""
        counts = self._trainer.fit_loop.epoch_loop.batch_progress.current
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, self._progress.batches)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Commit."""
        if self._update is not None:
            self._progress.keep(trainer, batch_idx + 1)
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)


class Module(lightning.LightningModule):
    """An ordinary module; it computes through the session's DDP wrapper when there is one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
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
    """The session's batches, with a length: of the whole training, as Lightning's counts are. Where
    Lightning knows none, it reads one batch ahead, which the session would count to the update
    before: a fault would leave it out."""

    def __init__(self, batches: Iterator[Any], length: int, callback: Resilient) -> None:
        self._batches, self._length, self._callback = batches, length, callback

    def __iter__(self) -> Iterator[Any]:
        self._callback.count_on()
        yield from self._batches

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
    progress = s.once(TrainerProgress)
    s.track(module=module, opt=opt, progress=progress)
    module.through = [s.ddp(module.net, find_unused_parameters=True)]
    callback = Resilient(s, progress)
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        plugins=[LightningEnvironment()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, *([Printer(s)] if s.rank == 0 else [])],
    )
    batches = s.loader(data, global_batch=32, steps=steps, epochs=None)
    trainer.fit(module, Batches(batches, steps, callback))
    if s.rank == 0:
        with torch.no_grad():
            total = sum(float(p.double().abs().sum()) for p in module.parameters())
        print(f"parameters {total:.12f}", flush=True)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    train(parser.parse_args().steps)
