"""The arguments of `resilient`, checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slurm_resilience.errors import UsageError
from slurm_resilience.training.watch import Watch

WHOLE = {"min_world": 1, "replica_size": 1, "max_faults": 1, "partner_every": 0, "digest_every": 0}
"""Options that are whole numbers, and the least of each."""
SECONDS = (
    "patience",
    "start_patience",
    "shortage_patience",
    "collective_timeout",
    "abort_timeout",
    "silence",
)
OPTIONAL = ("min_world", "digest_every", "shortage_patience")
"""Options that may be None."""
KEEPER_WORDS = (
    *("due", "missing", "save", "decided", "wait", "break_off", "close"),
    *("latest", "readable", "load"),
)
"""Names that a checkpointer has."""
CALLED = ("health_check", "abort", "finalize", "on_resize", "on_event")


def _cuda() -> bool:
    return torch.cuda.is_available()


@dataclass(frozen=True)
class Options:
    """Arguments of `resilient`, with their defaults."""

    # The world.
    min_world: int | None = None
    replica_size: int = 1
    patience: float = 0.0
    start_patience: float = 600.0
    shortage_patience: float | None = None
    max_faults: int = 3
    backend: str = ""

    # Time limits.
    collective_timeout: float = 1800.0
    abort_timeout: float = 5.0
    silence: float = 5.0

    # The state.
    checkpointer: Any = None
    partner_every: int = 0
    digest_every: int | None = None
    checksum: bool = False
    trainable_only: bool = False

    # Functions that are called.
    health_check: Callable[[Any], bool | None] | None = None
    abort: Callable[[Any, Any], None] | None = None
    finalize: Callable[[Any, Any], None] | None = None
    on_resize: Callable[[Any, int, int], None] | None = None
    on_event: Callable[[str, dict[str, Any]], None] | None = None

    # The watch.
    watch: Any = None
    stacks: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        """Refuse a value that makes no sense, by a `UsageError`, before anything is started with
        it."""
        for name, least in WHOLE.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _wrong(name, value, f"a whole number from {least} on")
        for name in SECONDS:
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            # No world forms in no time, but patience may be none.
            shortest = 0.0 if "patience" in name else 0.1
            if not isinstance(value, (int, float)) or not value >= shortest:
                raise _wrong(name, value, f"seconds, from {shortest:g} on")
        for name in CALLED:
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise _wrong(name, value, "a function")
        if not isinstance(self.backend, str):
            raise _wrong("backend", self.backend, "torch's name of one, or empty")
        if not isinstance(self.stacks, (str, os.PathLike)):
            raise _wrong("stacks", self.stacks, "a directory, or empty")
        keeper = self.checkpointer
        if keeper is not None and not all(hasattr(keeper, word) for word in KEEPER_WORDS):
            raise _wrong(
                "checkpointer", keeper, "a Checkpointer (as Checkpointer(directory, every=100))"
            )
        if self.watch is not None and self.watch is not False and not isinstance(self.watch, Watch):
            raise _wrong("watch", self.watch, "a Watch, None for one with default limits, or False")

    @property
    def uses_cuda(self) -> bool:
        return "nccl" in self.chosen_backend or "cuda" in self.chosen_backend

    @property
    def chosen_backend(self) -> str:
        return self.backend or ("cpu:gloo,cuda:nccl" if _cuda() else "gloo")


def _wrong(name: str, value: Any, right: str) -> UsageError:
    return UsageError(f"resilient: {name}={value!r} is not {right}")
