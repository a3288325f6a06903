"""The results of deep checks, and the life of a node's deep check. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from slurm_resilience.errors import IllegalTransition
from slurm_resilience.model import SEVERITIES, Severity

FAILED_EXIT_CODE = 11
"""A node has failed, or the nodes together."""


class DeepOutcome(enum.StrEnum):
    """The outcome of one deep check on one node."""

    PASSED = "passed"
    FAILED = "failed"
    UNJUDGED = "unjudged"
    """A tool is missing, or it came to no result: neither a pass nor a fault."""
    ABSENT = "absent"
    """The node has no such hardware, and should have none."""


class DeepResult(msgspec.Struct, frozen=True):
    """The result of one deep check on one node."""

    check: str
    outcome: DeepOutcome
    text: str
    """One line for people."""
    action: Severity = Severity.NONE
    """The action that a failure calls for."""
    seconds: float = 0.0
    block: str = ""
    """The result in the form that log parsers read; several lines."""
    output: str = ""
    """The end of what the tool printed, for the node's log."""


class DeepState(enum.StrEnum):
    """A node in a run of deep checks."""

    WAITING = "Waiting"
    SKIPPED = "Skipped"
    IN_PROGRESS = "InProgress"
    PASSED = "Passed"
    FAILED = "Failed"
    UNJUDGED = "Unjudged"


DEEP_TRANSITIONS: dict[DeepState, frozenset[DeepState]] = {
    DeepState.WAITING: frozenset({DeepState.IN_PROGRESS, DeepState.SKIPPED}),
    DeepState.IN_PROGRESS: frozenset({DeepState.PASSED, DeepState.FAILED, DeepState.UNJUDGED}),
    DeepState.SKIPPED: frozenset(),
    DeepState.PASSED: frozenset(),
    DeepState.FAILED: frozenset(),
    DeepState.UNJUDGED: frozenset(),
}
"""The states that may follow each state."""


class NodeDeepCheck(msgspec.Struct, frozen=True):
    """The deep check of one node, as far as it has come."""

    node: str
    state: DeepState = DeepState.WAITING
    results: tuple[DeepResult, ...] = ()
    running: str = ""
    """The check that has begun and not ended."""
    reason: str = ""
    """The reason for being skipped, failed or unjudged, besides the results."""

    @property
    def action(self) -> Severity:
        """The gravest action that its failures call for."""
        failed = (one.action for one in self.results if one.outcome is DeepOutcome.FAILED)
        return max(failed, key=SEVERITIES.index, default=Severity.NONE)


def advanced(node: NodeDeepCheck, state: DeepState, reason: str = "") -> NodeDeepCheck:
    """Return the node in another state.

    Raises:
        IllegalTransition: the table does not have that change.
    """
    if state not in DEEP_TRANSITIONS[node.state]:
        raise IllegalTransition(f"a deep check that is {node.state} cannot become {state}")
    return msgspec.structs.replace(node, state=state, reason=reason or node.reason)


def end_of(results: Iterable[DeepResult]) -> tuple[DeepState, str]:
    """Return the state that follows from all results of a node, and the reason.

    A node has passed only when something was looked at, and nothing that should have been looked at
    was left out.
    """
    failed, unjudged, passed = [], [], 0
    for result in results:
        if result.outcome is DeepOutcome.FAILED:
            failed.append(f"{result.check}: {result.text}")
        elif result.outcome is DeepOutcome.UNJUDGED:
            unjudged.append(f"{result.check}: {result.text}")
        passed += result.outcome is DeepOutcome.PASSED
    if failed:
        return DeepState.FAILED, "; ".join(failed)
    if unjudged:
        return DeepState.UNJUDGED, "; ".join(unjudged)
    if not passed:
        return DeepState.UNJUDGED, "no check had anything to look at"
    return DeepState.PASSED, ""
