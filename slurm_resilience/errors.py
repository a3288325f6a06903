"""Every error this project raises on purpose, and the exit code each one becomes.

They are caught at process borders only (the command line, a daemon's main, the supervisor), which
print one line, ``<program>: error: <message>``. A message says what is wrong and what to do.
"""

from __future__ import annotations


class SresError(Exception):
    """Base of all expected errors. ``exit_code`` is what a command exits with."""

    exit_code = 1


class UsageError(SresError):
    """The words of a call are wrong: an option's value, a hostlist, a missing argument."""

    exit_code = 2


class ConfigError(SresError):
    """The configuration file has an unknown key, a wrong type or a value out of range."""

    exit_code = 3


class SlurmError(SresError):
    """Slurm could not be reached, or refused what was asked."""

    exit_code = 4


class SlurmUnreachable(SlurmError):
    """slurmctld does not answer. What was not read leads to no action."""


class NotFound(SresError):
    """A node, job or incident that does not exist."""

    exit_code = 5


class NotPermitted(SresError):
    """The caller may not do this: a job of another user, a node without Slurm's operator rights."""

    exit_code = 6


class AuthError(SresError):
    """munge did not vouch for the other side: no key, no munged, a stale or foreign credential."""

    exit_code = 7


class WireError(SresError):
    """sresctld or sresd could not be reached, or spoke nonsense."""

    exit_code = 8


class LabError(SresError):
    """The lab could not be built, or a lab command was refused."""

    exit_code = 9


class MissingTool(SresError):
    """A program or library this step needs is not installed."""

    exit_code = 10


class CheckpointError(SresError):
    """A checkpoint's directory cannot be used, or a checkpoint is damaged or does not fit."""


class IllegalTransition(SresError):
    """A state of a lifecycle does not know this event: the present state stays as it is."""
