"""See a module that counts, or writes to a tensor, in an attribute that is no buffer: it is not
part of the state, so a repeated step counts twice, and a replaced rank begins anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from slurm_resilience.training.compat import versions


class _Seen(NamedTuple):
    thing: Any
    number: int
    """The number, or how often the tensor was written to."""


class PlainAttributes:
    """Those of the tracked modules of this process, in its first steps. What counts up from one
    step to the next, twice, is told; what is only set anew may be for the log."""

    def __init__(self) -> None:
        self._modules: dict[str, nn.Module] = {}
        self._seen: dict[str, _Seen] = {}
        self._rising: set[str] = set()
        self._looks = 0

    def begin(self, modules: Mapping[str, nn.Module]) -> None:
        """Begin with the modules as they are, the first time that this is called.

        Args:
            modules: name → tracked.
        """
        if self._looks:
            return
        self._looks = 1
        # A module of torch's own keeps its state in buffers, one with an extra state there.
        self._modules = {
            f"{name}.{path}" if path else name: part
            for name, module in modules.items()
            for path, part in module.named_modules()
            if not type(part).__module__.startswith("torch.")
            and type(part).get_extra_state is nn.Module.get_extra_state
        }
        self._seen = self._read()
        self._rising = set(self._seen)

    def counted(self) -> tuple[str, ...]:
        """Look a step later. Returns, at the second look, the names of those that count."""
        if not self._seen:
            return ()
        self._looks += 1
        before, self._seen = self._seen, self._read()
        self._rising = {
            name
            for name in self._rising & self._seen.keys()
            if _rises(before[name], self._seen[name])
        }
        if self._looks < 3:
            return ()
        self._seen, self._modules = {}, {}
        return tuple(sorted(self._rising))

    def _read(self) -> dict[str, _Seen]:
        found = {}
        for path, module in self._modules.items():
            for name, value in vars(module).items():
                if type(value) is int:
                    found[f"{path}.{name}"] = _Seen(None, value)
                elif type(value) is torch.Tensor and not value.is_inference():
                    found[f"{path}.{name}"] = _Seen(value, versions([value])[0])
        return found


def _rises(before: _Seen, now: _Seen) -> bool:
    return before.thing is now.thing and now.number > before.number
