"""Tell whether a repaired node was looked at: by its health checks, and by the site's validation.
Pure.
"""

from __future__ import annotations

import enum

from slurm_resilience.config import Config
from slurm_resilience.controller.journal.records import Incident
from slurm_resilience.controller.observe import ClusterSnapshot

VALIDATION = "validation"
"""The check by which a node's sresd tells how it went."""


class ValidationProgress(enum.Enum):
    """The progress of the look at a node; a fault that was found is a finding like any other."""

    UNCHECKED = "a health check has not run since its sresd started"
    OVER = "all checks have run, and the validation has passed, or none is needed"
    AWAITED = "its sresd has not said yet how it went"
    NOT_RUN = "its sresd has not run it yet, or runs it"
    IMPOSSIBLE = "its sresd does not know of recovery.validate"


def validation_progress(
    snapshot: ClusterSnapshot, config: Config, incident: Incident
) -> ValidationProgress:
    """Return the progress on the node of an incident."""
    progress = _of_the_site(snapshot, config, incident)
    agent = snapshot.agents.get(incident.node)
    is_unchecked = agent is not None and agent.is_heard and not agent.vouches
    return (
        ValidationProgress.UNCHECKED
        if progress is ValidationProgress.OVER and is_unchecked
        else progress
    )


def _of_the_site(
    snapshot: ClusterSnapshot, config: Config, incident: Incident
) -> ValidationProgress:
    """Return the progress of recovery.validate."""
    if not config.recovery.validate:
        return ValidationProgress.OVER
    agent = snapshot.agents.get(incident.node)
    if agent is None:
        return _without_the_check(incident)
    # The verdicts of before count until this connection's have come, and its sresd runs this check
    # before any other.
    verdicts = (*agent.judged, *agent.unjudged)
    if not (agent.is_connected and agent.reported and verdicts):
        return ValidationProgress.AWAITED
    if VALIDATION in agent.unjudged:
        return ValidationProgress.NOT_RUN
    if VALIDATION in agent.judged:
        return ValidationProgress.OVER
    return _without_the_check(incident)


def _without_the_check(incident: Incident) -> ValidationProgress:
    """Tell what holds where no sresd knows of it: a node that came back by itself was not repaired,
    and its sresd may be of before the setting."""
    return ValidationProgress.OVER if incident.is_flap else ValidationProgress.IMPOSSIBLE


def return_seconds(config: Config) -> float:
    """Return the seconds that a repaired node has until it must be back."""
    recovery = config.recovery
    more = recovery.validate_timeout if recovery.validate else 0.0
    return config.replace.return_timeout + more
