"""Keep Slurm's settings fresh: `scontrol reconfigure` changes them while sresctld runs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from slurm_resilience.clock import Clock
from slurm_resilience.errors import SresError
from slurm_resilience.slurm.client import ClusterInfo, SlurmClient

READ_AGAIN_SECONDS = 30.0


class SlurmSettings:
    """Slurm's settings, read again from time to time."""

    def __init__(self, client: SlurmClient, info: ClusterInfo, clock: Clock) -> None:
        self._client = client
        self._info = info
        self._clock = clock
        self._read = clock.monotonic()
        self._domains: Mapping[str, str] | None = None

    @property
    def last(self) -> ClusterInfo:
        """The settings as they were read last; Slurm is not asked."""
        return self._info

    def now(self) -> ClusterInfo:
        """Return the settings, at most `READ_AGAIN_SECONDS` old while Slurm answers."""
        moment = self._clock.monotonic()
        if moment - self._read >= READ_AGAIN_SECONDS:
            self._read = moment
            with contextlib.suppress(SresError):  # what was read before still holds
                self._info = self._client.info()
                self._domains = self._client.domains()
        return self._info

    def domains(self) -> Mapping[str, str]:
        """Return the leaf switch or block of each node, as old as the settings; empty: none is
        known."""
        if self._domains is None:
            self._domains = {}
            with contextlib.suppress(SresError):
                self._domains = self._client.domains()
        return self._domains
