"""Decide whether a node's launcher goes on, and the exit code it ends with."""

from __future__ import annotations

from slurm_resilience.launcher import exit_codes, flags
from slurm_resilience.launcher.restart_policy import RestartDecision


class LauncherEnding:
    """Events so far that end a launcher."""

    def __init__(self) -> None:
        self.stopped_by = 0
        """The signal that was sent to end the training; 0: none."""
        self.interrupts = 0
        self.decision: RestartDecision | None = None
        """The reason why the launcher itself ends it."""
        self.last_codes: list[int] = []
        """The exit codes of processes that had no successor, in the order of their ends."""

    @property
    def goes_on(self) -> bool:
        """True while nothing has ended the training."""
        return self.decision is None and not self.stopped_by

    def code(self, *, any_ended: bool) -> int:
        """Return the exit code.

        Args:
            any_ended: a rank's process has ended.
        """
        if self.interrupts > 1:
            return exit_codes.KILLED_BY_HAND
        if self.decision is not None:
            return self.decision.code
        if self.stopped_by and not any_ended:
            return 128 + self.stopped_by
        return flags.first_failure(self.last_codes)
