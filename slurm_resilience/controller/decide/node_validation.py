"""Tell how the site's validation of a repaired node stands. Pure."""

from __future__ import annotations

import enum

from slurm_resilience.config import Config
from slurm_resilience.controller.journal.records import Incident
from slurm_resilience.controller.observe import ClusterSnapshot

VALIDATION = "validation"
"""The check by which a node's sresd tells how it went."""


class ValidationProgress(enum.Enum):
    """The progress of a node's validation; a fault that it found is a finding like any other."""

    OVER = "it has passed, or none is needed"
    AWAITED = "it is waited for"
    IMPOSSIBLE = "its sresd does not know of recovery.validate"


def validation_progress(
    snapshot: ClusterSnapshot, config: Config, incident: Incident
) -> ValidationProgress:
    """Return the progress on the node of an incident."""
    if not config.recovery.validate:
        return ValidationProgress.OVER
    agent = snapshot.agents.get(incident.node)
    if agent is None:
        return _without_the_check(incident)
    # The verdicts of before count until this connection's have come, and its sresd runs this check
    # before any other.
    verdicts = (*agent.judged, *agent.unjudged)
    if not (agent.is_connected and agent.reported and verdicts) or VALIDATION in agent.unjudged:
        return ValidationProgress.AWAITED
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
