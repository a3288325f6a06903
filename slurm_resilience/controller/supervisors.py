"""Which jobs have a supervisor that lives: from who is connected, and from who said its last word.

A job may have several, one after the other or at the same time. Nothing tells a supervisor that
comes back on a new connection from another one of the same job, so they are counted.
"""

from __future__ import annotations

from collections.abc import Collection

from slurm_resilience.wire.messages import AttemptEnded
from slurm_resilience.wire.server import Client

RETURN_SECONDS = 30.0
"""How long a supervisor may be without a connection, also after a start of sresctld. It tries again
after at most 2 s, and each try takes at most 2 s: that is seven tries, for a slow munged or many
that return at once. Longer would only be longer for a supervisor that was killed: a node that dies
is then taken out of a job in which nobody goes on without it."""


def is_last_word(message: AttemptEnded) -> bool:
    """Does the supervisor end with this attempt? (A requeue ends it as well, but the job comes
    back with a supervisor.)"""
    return message.outcome.startswith("stop:")


class _Job:
    def __init__(self) -> None:
        self.living: set[Client] = set()
        self.ended: set[Client] = set()
        """Nobody to count on: they said their last word, or their run of the job is over. Connected
        still."""
        self.missing: dict[object, float] = {}
        """Lost without a last word, oldest first, and when that was seen."""

    def came(self, peer: Client) -> None:
        if peer not in self.living:
            self.living.add(peer)
            if self.missing:
                del self.missing[next(iter(self.missing))]


class Supervisors:
    """Each supervised job's supervisors, as far as this sresctld has seen them. Moments are of the
    monotonic clock."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}

    def began(self, job: int, peer: Client) -> None:
        """A supervisor has announced an attempt."""
        known = self._jobs.setdefault(job, _Job())
        known.ended.discard(peer)
        known.came(peer)

    def ended(self, job: int, peer: Client) -> None:
        """A supervisor has said its last word."""
        known = self._jobs.get(job)
        if known is not None:
            known.living.discard(peer)
            known.missing.pop(peer, None)  # it was gone before its word was read
            known.ended.add(peer)

    def look(self, job: int, connected: Collection[Client], moment: float) -> None:
        """Take in who is connected now.

        Args:
            job: a job that the journal has as supervised.
            connected: its supervisors' connections.
            moment: now.
        """
        known = self._jobs.get(job)
        if known is None:
            # We were started again: whoever supervised it must have the time to return.
            known = self._jobs[job] = _Job()
            if not connected:
                known.missing[object()] = moment
        here = set(connected)
        for peer in known.living - here:
            known.missing[peer] = moment
        known.living &= here
        known.ended &= here
        for peer in here - known.ended:
            known.came(peer)

    def run_is_over(self, job: int, connected: Collection[Client]) -> None:
        """The job ends, or waits for its next run: whoever supervises that one will say so.

        Args:
            job: a job that the journal has as supervised.
            connected: its supervisors' connections.
        """
        known = self._jobs.setdefault(job, _Job())
        known.living.clear()
        known.missing.clear()
        known.ended = set(connected)

    def are_over(self, job: int, moment: float) -> bool:
        """Does none of them live, and is none to be waited for?"""
        known = self._jobs.get(job)
        return known is not None and not (
            known.living
            or any(moment - since <= RETURN_SECONDS for since in known.missing.values())
        )

    def keep(self, jobs: Collection[int]) -> None:
        """Forget all jobs but these. A job keeps what is known of it between two of its sruns."""
        for gone in [job for job in self._jobs if job not in jobs]:
            del self._jobs[gone]
