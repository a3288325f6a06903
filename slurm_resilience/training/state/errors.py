"""What goes wrong with peer state."""

from __future__ import annotations

from slurm_resilience.errors import SresError


class StateError(SresError):
    """The state cannot be described, or does not fit what this process built: another model,
    another optimizer, another sharding. Trying again does not help."""


class HealFailed(StateError):
    """A transfer broke off, or what arrived is not what was sent. The receiver's state is a mix of
    old and new: the caller must report step -1, and heal again in the next generation."""
