"""What `resilient` was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def _cuda() -> bool:
    return torch.cuda.is_available()


@dataclass(frozen=True)
class Options:
    """Arguments of `resilient`, with their defaults."""

    min_world: int | None = None
    replica_size: int = 1
    backend: str = ""
    patience: float = 0.0
    start_patience: float = 600.0
    collective_timeout: float = 1800.0
    abort_timeout: float = 5.0
    silence: float = 5.0
    max_faults: int = 3
    checkpointer: Any = None
    checksum: bool = False
    trainable_only: bool = False
    partner_every: int = 0
    prepare: Callable[[], Any] | None = None
    health_check: Callable[[Any], bool | None] | None = None
    abort: Callable[[Any, Any], None] | None = None
    finalize: Callable[[Any, Any], None] | None = None
    on_event: Callable[[str, dict[str, Any]], None] | None = None
    watch: Any = None
    stacks: str = ""

    @property
    def uses_cuda(self) -> bool:
        return "nccl" in self.chosen_backend

    @property
    def chosen_backend(self) -> str:
        return self.backend or ("cpu:gloo,cuda:nccl" if _cuda() else "gloo")
