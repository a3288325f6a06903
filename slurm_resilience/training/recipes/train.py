"""Train by a recipe; no code is needed. Started by the launcher in each rank.

python -m slurm_resilience.launcher --recipe FILE.toml
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.launcher.recipe_file import Recipe, read
from slurm_resilience.training import Checkpointer, Session, resilient
from slurm_resilience.training.recipes import deepseek, gpt_oss, llama, lora, qwen

_COUNTING = 4096
"""Samples of the data that need no file."""
_BLOCKS: dict[str, Callable[[llama.LlamaShape, int], nn.Module]] = {
    "llama": llama.LlamaBlock,
    "gpt-oss": gpt_oss.GptOssBlock,
    "deepseek": deepseek.DeepSeekBlock,
    "qwen": qwen.QwenBlock,
}


class TokenWindows(torch.utils.data.Dataset[torch.Tensor]):
    """Stretches of ``context + 1`` tokens: of a file's bytes, or counting upwards by some step.

    Args:
        file: path; empty: counting.
        context: tokens that the model sees.

    Raises:
        UsageError: the file cannot be read, or is too short.
    """

    def __init__(self, file: str, context: int) -> None:
        self._length = context + 1
        self._bytes: torch.Tensor | None = None
        if not file:
            return
        try:
            size = Path(file).stat().st_size
            if not Path(file).is_file():
                raise UsageError(f"{file}: no plain file")
            if size < self._length:
                raise UsageError(f"{file}: shorter than the context")
            # Mapped: processes of a node share the pages.
            self._bytes = torch.from_file(file, shared=False, size=size, dtype=torch.uint8)
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None

    def __len__(self) -> int:
        return _COUNTING if self._bytes is None else len(self._bytes) // self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        """(context + 1,) int64."""
        if self._bytes is None:
            return (torch.arange(self._length) * (index % 7 + 1) + index) % 256
        start = index * self._length
        return self._bytes[start : start + self._length].long()


def build(recipe: Recipe) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer, the same on every rank."""
    sizes = recipe.model
    shape = llama.LlamaShape(256, sizes.width, sizes.layers, sizes.heads, sizes.context)
    model = llama.Llama(shape, recipe.train.seed, _BLOCKS[sizes.shape])
    adapters = recipe.lora
    if adapters.rank:
        lora.adapt(model, adapters.rank, adapters.alpha, adapters.layers, recipe.train.seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=recipe.train.learning_rate)


def train(s: Session, recipe: Recipe) -> None:
    """Run the block."""
    model, opt = s.once(build, recipe)
    model.to(s.device)
    s.track(model=model, opt=opt)
    # With it a healed run adds up in the order of an undisturbed one, and has its bits.
    net = s.ddp(model, find_unused_parameters=True)
    data = s.once(TokenWindows, recipe.data.file, recipe.model.context)
    how = recipe.train
    for batch in s.loader(data, how.global_batch, steps=how.steps, epochs=None, seed=how.seed):
        tokens = batch.to(s.device)
        loss = llama.loss(net(tokens[:, :-1]), tokens[:, 1:])
        torch.autograd.backward(loss)
        with s.update():
            opt.step()
            opt.zero_grad()
        if s.rank == 0 and (s.step % how.log_every == 0 or s.step == how.steps):
            print(f"step {s.step} loss {loss.item():.4f} world {s.world}", flush=True)
    if s.rank == 0:
        kept = [parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()]
        print(f"parameters {hashlib.sha256(b''.join(kept)).hexdigest()[:16]}", flush=True)


def main(path: str) -> None:
    """Train by the recipe in a file."""
    recipe = read(path)
    disk = recipe.checkpoint
    least = os.environ.get("SRES_MIN_WORLD", "")
    resilient(
        min_world=int(least) if least.isdecimal() else None,
        trainable_only=recipe.lora.rank > 0,
        checkpointer=Checkpointer(disk.directory, every=disk.every) if disk.directory else None,
    )(train)(recipe)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except SresError as error:
        print(f"recipe: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
