"""See whether something draws from the random numbers that a whole process has."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from slurm_resilience.training.times_set import TIMES_SET

TIMES = "times set"


def read_states() -> dict[str, Any]:
    """Return the states of the libraries' own generators, to be compared; numpy's only if something
    imported it."""
    states: dict[str, Any] = {TIMES: TIMES_SET.count}
    states["torch"] = torch.get_rng_state().numpy().tobytes()
    states["random"] = random.getstate()
    if numpy := sys.modules.get("numpy"):
        _, keys, position, *_ = numpy.random.get_state()
        states["numpy"] = keys.tobytes(), position
    return states


def drawn_since(before: dict[str, Any]) -> list[str]:
    """Return the libraries whose states are not as `read_states` returned them; none where this
    library has set them meanwhile: a fault ended the world in which they were read."""
    now = read_states()
    # Last: what was set in the middle of reading counts as well.
    if TIMES_SET.count != before[TIMES]:
        return []
    return [name for name, state in before.items() if now.get(name) != state]
