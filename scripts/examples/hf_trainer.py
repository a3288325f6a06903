"""A Hugging Face-style Trainer: its loop stays as it is, a callback marks the commit point.

    python -m slurm_resilience.launcher --nproc-per-node 2 scripts/examples/hf_trainer.py

`ResilientCallback` is what you take over; `transformers_trainer.py` has it in the real Trainer. The
`Trainer` below stands in for that: the same hooks, in the same order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slurm_resilience.training import Session, resilient
from slurm_resilience.training.recipes import llama
from slurm_resilience.training.recipes.train import TokenWindows


class ResilientCallback:
    """Opens the update before the optimizer's step, and commits at the step's end.

    It needs no base class: the Trainer only calls methods by their names.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._update: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the Trainer count on from the step that the healed state contains."""
        state.global_step = self._session.step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Gradients are complete, and clipped."""
        self._update = self._session.update()
        self._update.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit: the optimizer, the schedule and the gradients are done. A fault before never gets
        here: the update stays open, and this rank's state counts as void."""
        update, self._update = self._update, None
        if update is not None:
            update.__exit__(None, None, None)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """All other events: nothing."""
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None


@dataclass
class State:
    """TrainerState, as far as it goes."""

    global_step: int = 0
    log_history: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """Stands in for `transformers.Trainer`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: Iterable[torch.Tensor],
        callbacks: list[Any],
    ) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.callbacks, self.state = callbacks, State()

    def event(self, name: str) -> None:
        """Call every callback."""
        for callback in self.callbacks:
            getattr(callback, name)(None, self.state, None, model=self.model)

    def train(self) -> State:
        """Run the loop of the library."""
        self.event("on_train_begin")
        for tokens in self.batches:
            self.event("on_step_begin")
            loss = llama.loss(self.model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            self.event("on_pre_optimizer_step")
            self.optimizer.step()
            self.event("on_optimizer_step")
            self.optimizer.zero_grad()
            self.state.global_step += 1
            self.state.log_history.append({"loss": loss.item()})
            self.event("on_step_end")
        self.event("on_train_end")
        return self.state


class Printer:
    """An ordinary callback of the user's."""

    def on_step_end(self, args: Any, state: State, control: Any, **_: Any) -> None:
        """Once a step."""
        print(f"step {state.global_step} loss {state.log_history[-1]['loss']:.4f}", flush=True)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *_, **__: None


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the same on every rank."""
    model = llama.Llama(llama.LlamaShape(width=32, layers=2, context=16))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@resilient()
def train(s: Session, steps: int) -> None:
    """Run the block: a Trainer for each world."""
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    batches: Iterator[torch.Tensor] = s.loader(TokenWindows("", 16), 32, steps=steps, epochs=None)
    callbacks: list[Any] = [ResilientCallback(s)]
    if s.rank == 0:
        callbacks.append(Printer())
    Trainer(s.ddp(model), opt, batches, callbacks).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    train(parser.parse_args().steps)
