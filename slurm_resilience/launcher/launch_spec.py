"""The order that a launcher was given, once every word was understood."""

from __future__ import annotations

from pathlib import Path

import msgspec

from slurm_resilience.launcher import flags
from slurm_resilience.launcher.group_restart import RestartSpec
from slurm_resilience.launcher.processes.child_environment import NodeSeats
from slurm_resilience.launcher.processes.output import Streams
from slurm_resilience.launcher.processes.warm_interpreter import WarmSpec
from slurm_resilience.launcher.rendezvous_directory import RendezvousDirectory
from slurm_resilience.launcher.restart_policy import RestartRules
from slurm_resilience.launcher.warm_policy import WarmPlan


class GracePeriods(msgspec.Struct, frozen=True):
    """Seconds in which ranks have to end."""

    ended: float
    """From SIGTERM to SIGKILL when the launcher itself ends the ranks."""
    failed: float
    """From an exception that ends a rank's program to SIGKILL, if it does not end."""
    stopped: float | None
    """The same after a SIGTERM from outside; None: as long as they take."""


class LaunchSpec(msgspec.Struct, frozen=True):
    """All that the launcher was asked to do."""

    node: NodeSeats
    rendezvous: RendezvousDirectory
    kind: str
    """script, module or program."""
    argv: tuple[str, ...]
    rules: RestartRules
    streams: tuple[Streams, ...]
    """One for each local rank."""
    log_dir: Path | None
    standbys: int
    """The number of standbys."""
    standby_modules: tuple[str, ...]
    grace: GracePeriods
    incarnation: int = 0
    """Processes that sat on these seats before this launcher came."""
    before: tuple[str, ...] = ()
    """The pre-train script and its arguments."""
    after: tuple[str, ...] = ()
    warm: WarmSpec = WarmSpec(WarmPlan(False))
    restart: RestartSpec = RestartSpec()

    @property
    def piped(self) -> bool:
        """True: the launcher shows the ranks' output with a prefix."""
        bits = (flags.STDOUT, flags.STDERR)
        return any(streams.teed(bit) for streams in self.streams for bit in bits)
