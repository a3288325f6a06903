"""Report what acts do: outcomes of nodes through the table of states, the rest as events."""

from __future__ import annotations

from typing import Any

from slurm_resilience.clock import Clock
from slurm_resilience.controller.actions import ActOutcome
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import Incident
from slurm_resilience.controller.observe import ClusterSnapshot


def user_of(snapshot: ClusterSnapshot, number: int) -> dict[str, Any]:
    """Return the part of an event that tells whose job it is about; empty: it is not known."""
    job = snapshot.jobs.get(number)
    return {} if job is None else {"uid": job.uid}


class Reporter:
    """Write what an act did into the journal's history. Each line is written before it returns."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock

    def report(self, outcome: ActOutcome) -> Incident:
        """Apply an outcome to its incident.

        Raises:
            IllegalTransition: the incident's present state does not know this event.
        """
        return self._journal.apply(
            outcome.incident, outcome.event, outcome.text, self._clock.now(), outcome.facts
        )

    def event(
        self, kind: str, text: str, *, node: str = "", job: int = 0, incident: int = 0, **data: Any
    ) -> None:
        """Write an event that changes no state."""
        self._journal.event(
            self._clock.now(), kind, text, node=node, job=job, incident=incident, **data
        )
