"""A recipe: a training described in a TOML file.

This module loads no torch, because the launcher reads recipes too.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from slurm_resilience.errors import UsageError

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
"""Finite: TOML knows `inf`."""
Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""As torch takes it."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class RecipeNodes(_Section, frozen=True):
    """The nodes and processes of the training. Flags of the launcher come first."""

    min_nodes: Positive = 1
    """With fewer, training waits."""
    max_nodes: Count = 0
    """0: as many as the step has."""
    ranks_per_node: Positive | str = 1
    """A number, gpu, cpu or auto."""
    standby: Count = 1
    """Warm processes on each node."""


class RecipeModel(_Section, frozen=True):
    """A small language model; see `llama.LlamaShape`."""

    shape: Literal["llama", "gpt-oss", "deepseek", "qwen"] = "llama"
    """Its layers: plain ones (llama), with experts (gpt-oss, deepseek), with norms on queries and
    keys (qwen)."""
    width: Positive = 96
    layers: Positive = 3
    heads: Positive = 4
    context: Positive = 32


class RecipeData(_Section, frozen=True):
    """The data that the model learns from."""

    file: str = ""
    """Any file: it learns the next byte. Empty: numbers that count upwards."""


class RecipeTraining(_Section, frozen=True):
    """The settings of the training itself."""

    steps: Positive = 100
    global_batch: Positive = 32
    """Samples of all ranks; stays when the world changes."""
    learning_rate: Rate = 3e-3
    seed: Seed = 0
    log_every: Positive = 10


class RecipeCheckpoint(_Section, frozen=True):
    """The fallback when no peer has the state."""

    directory: str = ""
    """Shared by all nodes; empty: there is none."""
    every: Count = 50
    """Steps."""


class RecipeLora(_Section, frozen=True):
    """Adapters instead of the whole model."""

    rank: Count = 0
    """0: the whole model trains."""
    alpha: Rate = 16.0
    layers: tuple[str, ...] = ("query", "value")


class Recipe(_Section, frozen=True):
    """The whole file."""

    nodes: RecipeNodes = RecipeNodes()
    model: RecipeModel = RecipeModel()
    data: RecipeData = RecipeData()
    train: RecipeTraining = RecipeTraining()
    checkpoint: RecipeCheckpoint = RecipeCheckpoint()
    lora: RecipeLora = RecipeLora()


def read(path: str) -> Recipe:
    """Read a recipe.

    Raises:
        UsageError: it is not there, not TOML, or has a wrong key or value; the line names it.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        recipe = msgspec.convert(values, Recipe)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: {error}") from None
    if 0 < recipe.nodes.max_nodes < recipe.nodes.min_nodes:
        raise UsageError(f"{path}: max_nodes is less than min_nodes")
    if recipe.model.width % (2 * recipe.model.heads):
        raise UsageError(f"{path}: width must be a multiple of 2 * heads")
    if recipe.lora.rank > recipe.model.width:
        raise UsageError(f"{path}: the rank of an adapter (lora) is more than the model's width")
    return recipe
