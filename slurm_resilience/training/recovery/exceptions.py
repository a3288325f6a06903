"""Exceptions by which a block is left from inside."""

from __future__ import annotations


class Interrupted(BaseException):
    """The current world is over: leave the block, it will be entered again. Not an Exception, so
    that a training loop's own `except Exception` lets it pass."""


class PoisonedProcess(Exception):
    """This process cannot go on (its CUDA context is broken); a fresh one can take its seat."""


class Unrecoverable(Exception):
    """State was lost and nothing has it: the training must not begin anew as if nothing were."""
