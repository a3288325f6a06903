"""Asynchronous, atomic, verified checkpoints: the fallback when no peer has the state."""

from slurm_resilience.training.checkpoint.checkpointer import Checkpointer, Counts

__all__ = ["Checkpointer", "Counts"]
