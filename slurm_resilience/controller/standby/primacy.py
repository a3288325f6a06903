"""The evidence that this machine's sresctld may act: it is looked at before each act.

Three facts must hold, and what cannot be read does not hold:
- Slurm's heartbeat in StateSaveLocation names this machine, and is younger than half of the time
  after which Slurm's backup takes over;
- the marker beside it names this sresctld and its history;
- every command goes to this machine's slurmctld alone, which refuses when it is in standby.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.controller.standby.pair_states import Marker
from slurm_resilience.errors import SlurmUnreachable, SresError
from slurm_resilience.slurm.client import ClusterInfo
from slurm_resilience.slurm.controllers import ControllerHost, read_beat

MARKER_FILE = "sresctld.active"
DEFAULT_TIMEOUT_SECONDS = 120.0
AHEAD_SECONDS = 5.0
"""A beat may be so much later than our clock: it has whole seconds, and a date may be adjusted."""


ROUNDED_SECONDS = 1.0
"""A beat's time has no fraction."""


class NotPrimary(SresError):
    """This machine's slurmctld, or its sresctld, is not the one in control."""


class Primacy:
    """Looks at the evidence, and keeps the marker."""

    def __init__(self, host: ControllerHost, info: ClusterInfo, clock: Clock) -> None:
        """
        Args:
            host: this machine.
            info: Slurm's settings.
            clock: its date is compared with the heartbeat's, which this machine wrote too.
        """
        self.host = host
        self._state_save = Path(info.raw.get("StateSaveLocation", ""))
        seconds = re.match(r"\d+", info.raw.get("SlurmctldTimeout", ""))
        self._timeout = float(seconds[0]) if seconds else DEFAULT_TIMEOUT_SECONDS
        self._clock = clock

    def check_control(self) -> None:
        """Check that this machine's slurmctld is in control, as far as files can tell.

        Raises:
            NotPrimary: another one is.
            SlurmUnreachable: it cannot be told.
        """
        beat = read_beat(self._state_save)
        if beat.number != self.host.number:
            raise NotPrimary(
                f"slurmctld number {beat.number} is in control, not {self.host.name}'s"
            )
        age = self._clock.now() - beat.at
        if not -AHEAD_SECONDS <= age <= self._timeout / 2 + ROUNDED_SECONDS:
            raise SlurmUnreachable(
                f"{self.host.name}'s slurmctld has left no sign of control for {age:.0f} s"
            )

    def check_active(self, history: str) -> None:
        """Check that this sresctld may act.

        Raises:
            NotPrimary: another one does, or another slurmctld is in control.
            SlurmUnreachable: it cannot be told.
        """
        self.check_control()
        marker = self.read_marker()
        if marker is None or (marker.host, marker.history) != (self.host.name, history):
            other = marker.host if marker is not None else "none"
            raise NotPrimary(f"the active sresctld is {other}'s, not this one")

    def read_marker(self) -> Marker | None:
        """Return the marker; None: there is none.

        Raises:
            SlurmUnreachable: it cannot be read.
        """
        try:
            data = (self._state_save / MARKER_FILE).read_bytes()
            return msgspec.json.decode(data, type=Marker)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise SlurmUnreachable(f"{self._state_save / MARKER_FILE}: {error}") from None

    def write_marker(self, history: str, standby: str) -> None:
        """Name this sresctld as the active one.

        Args:
            history: of its journal.
            standby: the one that has every record before its act is begun; empty: none.

        Raises:
            SlurmUnreachable: it cannot be written, and the old one stands.
        """
        marker = Marker(self.host.name, history, standby, self._clock.now())
        path = self._state_save / MARKER_FILE
        fresh = self._state_save / f"{MARKER_FILE}.{self.host.name}"
        try:
            file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                os.write(file, msgspec.json.encode(marker))
                os.fsync(file)
            finally:
                os.close(file)
            fresh.replace(path)
            directory = os.open(self._state_save, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise SlurmUnreachable(
                f"{path} cannot be written ({error.strerror}): with a backup controller, sresctld "
                "needs it to know who is active"
            ) from None
