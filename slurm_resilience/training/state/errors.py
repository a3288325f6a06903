"""Errors of peer state."""

from __future__ import annotations

from slurm_resilience.errors import SresError


class StateError(SresError):
    """The state cannot be described, or does not fit what this process built: another model,
    another optimizer, another sharding. Trying again does not help."""


class HealFailed(StateError):
    """A transfer broke off, or what arrived is not what was sent.

    A receiver's state is then a mix of old and new: the caller must report step -1 or dirty, and
    heal again in the next generation. A sender's state is as good as before.
    """
