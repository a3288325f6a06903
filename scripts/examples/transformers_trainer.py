"""The real Trainer of Hugging Face's `transformers`, unchanged but for two of its methods.

    pip install transformers accelerate
    python -m slurm_resilience.launcher --nproc-per-node 2 scripts/examples/transformers_trainer.py

Each rank has a Trainer of its own that knows of no other rank: what ranks have in common (batches,
averaged gradients, the state) is the session's. `ResilientTrainer` and `TrainerProgress` are what
you take over. What its arguments mean then:

- ``max_steps`` is how long it trains, in all; an "epoch" of its log is the whole training. Give
  `Session.loader` as many batches, times ``gradient_accumulation_steps``. Evaluate and save by
  steps (``eval_strategy="steps"``).
- What chooses batches (``per_device_train_batch_size``, ``group_by_length``, ``dataloader_…``)
  counts for nothing: `Session.loader` does it, and its ``collate_fn``.
- Each Trainer takes itself for the first process. So let rank 0 alone save, into a directory that
  stays: ``save_strategy="steps" if s.rank == 0 else "no"``.
- ``load_best_model_at_end`` is refused: another rank may still need the weights of the last step.
  Load the checkpoint of ``trainer.state.best_global_step`` when `train` has returned.
- ``trainer.train(resume_from_checkpoint=…)`` is refused: the session's state is newer. Load weights
  to begin with where the model is built; `resilient(checkpointer=…)` is for a whole new start.
- ``seed`` counts for nothing: seed where the model is built.
- ``bf16`` works; the gradient scaler that ``fp16`` needs is the Trainer's own, and not tracked.
- ``average_tokens_across_devices`` does not either: a rank's loss is the mean over its own tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hf_trainer import ResilientCallback
from transformers.trainer_callback import DefaultFlowCallback, ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from slurm_resilience.errors import UsageError
from slurm_resilience.training import Session, resilient

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
CONTEXT, VOCABULARY = 16, 64


class TrainerProgress:
    """All that a Trainer knows of its best step, and that its callbacks count (early stopping), as
    of the last update: it is tracked, and outlives a fault. All ranks have the same callbacks that
    count.
    """

    _BEST = ("best_metric", "best_global_step")

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {"best": {}, "callbacks": []}

    def keep(self, trainer: transformers.Trainer) -> None:
        """Note it, inside of an update."""
        counting = [one.state()["attributes"] for one in _counting(trainer)]
        best = {name: getattr(trainer.state, name) for name in self._BEST}
        self._kept = {"best": best, "callbacks": counting}

    def give(self, trainer: transformers.Trainer) -> None:
        """Set it, in a Trainer that begins."""
        for name, value in self._kept["best"].items():
            setattr(trainer.state, name, value)
        if best := self._kept["best"].get("best_global_step"):
            folder = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{best}"
            trainer.state.best_model_checkpoint = str(folder) if folder.is_dir() else None
        for callback, values in zip(_counting(trainer), self._kept["callbacks"], strict=False):
            vars(callback).update(values)

    def state_dict(self) -> dict[str, Any]:
        return self._kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = state


def _counting(trainer: transformers.Trainer) -> list[Any]:
    callbacks = trainer.callback_handler.callbacks
    return [one for one in callbacks if isinstance(one, ExportableState)]


class ResilientTrainer(transformers.Trainer):
    """Takes its batches from the session, and computes through the session's DDP wrapper.

    Args:
        session: of the block.
        batches: what `Session.loader` gave.
        net: what `Session.ddp` gave for the model.
        progress: tracked.
        trainer_kwargs: as for any Trainer; ``optimizers`` are tracked ones.

    Raises:
        UsageError: it is to load the best model, while the session may need that of the last step.
    """

    def __init__(
        self,
        session: Session,
        batches: Iterable[Any],
        net: torch.nn.Module,
        progress: TrainerProgress,
        **trainer_kwargs: Any,
    ) -> None:
        self._batches, self._net = batches, net
        if trainer_kwargs["args"].load_best_model_at_end:
            raise UsageError(
                "load_best_model_at_end=True changes the weights while another rank may still need "
                "those of the last step: load the checkpoint of trainer.state.best_global_step "
                "when the training is over"
            )
        with numbers_kept():
            super().__init__(**trainer_kwargs)
        self.add_callback(_Keeper(self, progress, session))  # before the one that commits
        self.add_callback(ResilientCallback(session))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train from the session's step on.

        Raises:
            UsageError: it is to put a checkpoint in the place of the session's state.
        """
        if resume_from_checkpoint:
            raise UsageError(
                "resume_from_checkpoint would put back an older state, after each fault once more: "
                "load weights to begin with where the model is built, before s.track"
            )
        return super().train(None, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """Return the session's batches: they go on where the last update was."""
        return self._until_stopped()

    def _until_stopped(self) -> Iterator[Any]:
        # Early stopping may have been due after the last update; a Trainer asks only after a step.
        if not self.control.should_training_stop:
            yield from self._batches

    def compute_loss(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute through the wrapper, so that gradients are averaged over the ranks."""
        return super().compute_loss(self._net, *args, **kwargs)


class _Keeper(transformers.TrainerCallback):
    def __init__(self, trainer: Any, progress: TrainerProgress, session: Session) -> None:
        self._trainer, self._progress, self._session = trainer, progress, session

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, step = self._trainer, self._session.step
        self._progress.give(trainer)
        # A logged loss is the mean over the steps since the last one; those before are not its own.
        trainer._initial_global_step = trainer._globalstep_last_logged = step
        state.global_step = step
        if not step:
            return
        # What followed the last update may have been cut off by the fault.
        due = DefaultFlowCallback().on_step_end(args, state, transformers.TrainerControl())
        if due.should_evaluate:
            is_best = trainer._determine_best_metric(trainer.evaluate(), trial=None)
            due.should_save = is_best if args.save_strategy == "best" else due.should_save
        if due.should_save:
            trainer._save_checkpoint(trainer.model, trial=None)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.epoch = state.global_step / state.max_steps
        self._progress.keep(self._trainer)


@contextlib.contextmanager
def numbers_kept() -> Iterator[None]:
    """Put the random numbers back where they were. A Trainer seeds when it is made: after each
    fault the numbers (dropout) of the first steps would come once more.
    """
    python, arrays = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=gpus):
        yield
    random.setstate(python)
    np.random.set_state(arrays)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hide the other ranks: `transformers` would wrap the model in a DDP of its own."""
    hidden = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of numbers that go up by a step of their own."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        chance = torch.Generator().manual_seed(index)
        begin, pace = torch.randint(1, 8, (2,), generator=chance).tolist()
        row = (begin + pace * torch.arange(CONTEXT)) % VOCABULARY
        return {"input_ids": row, "labels": row}


class Printer(transformers.TrainerCallback):
    """An ordinary callback of the user's."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Once a step."""
        if logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}", flush=True)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Build the same on every rank."""
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        attention_dropout=0.1,
    )
    model = transformers.LlamaForCausalLM(shape)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, opt, transformers.get_constant_schedule_with_warmup(opt, 5)


@resilient()
def train(s: Session, steps: int) -> None:
    """Run the block: a Trainer for each world."""
    model, opt, schedule = s.once(build)
    progress = s.once(TrainerProgress)
    s.track(model=model, opt=opt, schedule=schedule, progress=progress)
    with alone(), tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = ResilientTrainer(
            s,
            s.loader(Counting(), 32, steps=steps, epochs=None),
            s.ddp(model, find_unused_parameters=True),
            progress,
            model=model,
            args=args,
            optimizers=(opt, schedule),
            callbacks=[Printer()] if s.rank == 0 else [],
        )
        trainer.train()
    if s.rank == 0:
        with torch.no_grad():
            total = sum(float(p.double().abs().sum()) for p in model.parameters())
        print(f"parameters {total:.12f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    train(parser.parse_args().steps)
