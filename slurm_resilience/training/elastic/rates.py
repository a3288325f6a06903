"""Fit the learning rate to a batch that changed with the world. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

from slurm_resilience.errors import UsageError

NamedPolicy = Literal["constant", "linear", "sqrt"]
RatePolicy = NamedPolicy | Callable[[int, int], float]
"""constant: the rate stays; linear: it grows with the batch; sqrt: with the square root of the
batch; a function of one's own is called with the samples of this step and of a full world's."""


def check_policy(policy: object) -> None:
    """Refuse what is no policy.

    Raises:
        UsageError: it is none.
    """
    if not callable(policy) and policy not in get_args(NamedPolicy):
        raise UsageError(
            f"rate={policy!r}: write one of {', '.join(get_args(NamedPolicy))}, or a function of "
            "(samples of this step, samples of a full world's step)"
        )


def rate_factor(policy: RatePolicy, samples: int, full: int) -> float:
    """Return what to multiply the learning rate with.

    Args:
        samples: of a step in this world.
        full: of a step in the full world, for which the learning rate was chosen.

    Raises:
        UsageError: a function of the user's own gave no positive number.
    """
    if not callable(policy):
        ratio = samples / full
        return {"constant": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[policy]
    factor = float(policy(samples, full))
    if not (math.isfinite(factor) and factor > 0):
        raise UsageError(f"the learning-rate policy gave {factor}: it must be a positive number")
    return factor
