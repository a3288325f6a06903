"""Random generators of the program's own, made such that they can be tracked."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def is_generator(thing: Any) -> bool:
    """Tell whether this is one of torch, of numpy (of either kind), or of Python."""
    if isinstance(thing, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        thing, numpy.random.Generator | numpy.random.RandomState
    )


class TrackedGenerator:
    """One of them, with the methods that what is tracked has.

    Args:
        generator: it.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        one = self.generator
        if isinstance(one, torch.Generator):
            return {"state": one.get_state()}
        if isinstance(one, random.Random):
            return {"state": one.getstate()}
        if hasattr(one, "bit_generator"):
            return {"state": one.bit_generator.state}
        return {"state": one.get_state(legacy=False)}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Set its state."""
        one, state = self.generator, values["state"]
        if isinstance(one, torch.Generator):
            one.set_state(state)
        elif isinstance(one, random.Random):
            one.setstate(state)
        elif hasattr(one, "bit_generator"):
            one.bit_generator.state = state
        else:
            one.set_state(state)
