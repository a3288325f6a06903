"""Keep the state of a node's deep check in its Comment, where people and `sres` read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from slurm_resilience.clock import seconds_of
from slurm_resilience.deepcheck.deep_results import DeepState
from slurm_resilience.errors import SresError
from slurm_resilience.model import Node
from slurm_resilience.slurm.node_labels import labels_of, with_label

STATUS, AT = "deep-check-status", "deep-check-at"
"""The labels: the state, and when it was reached."""
REQUESTED = "Requested"
"""An administrator asks for a deep check."""
SHOWN = (DeepState.IN_PROGRESS, DeepState.PASSED, DeepState.FAILED, DeepState.UNJUDGED)
"""The states that are kept: a node that was skipped, or waits, keeps what it had."""
_FORM = "%Y-%m-%dT%H:%M:%SZ"


class CommentDoor(Protocol):
    """The requests to Slurm that a label needs."""

    def nodes(self) -> tuple[Node, ...]: ...

    def set_comment(self, names: Sequence[str], comment: str) -> None: ...


class DeepMarks:
    """Writes the labels. A run goes on where Slurm does not take one: it is told once."""

    def __init__(
        self, door: CommentDoor, now: Callable[[], float], tell: Callable[[str], None]
    ) -> None:
        """
        Args:
            door: Slurm.
            now: seconds since the epoch.
            tell: takes a line of progress.
        """
        self._door = door
        self._now = now
        self._tell = tell
        self._told_trouble = ""

    def mark(self, states: Iterable[tuple[str, str]]) -> None:
        """Write the state of each of these nodes beside whatever else is in its Comment.

        Args:
            states: names of nodes, each with its state.
        """
        wanted = {node: state for node, state in states if state in (*SHOWN, REQUESTED)}
        if not wanted:
            return
        at = datetime.fromtimestamp(self._now(), UTC).strftime(_FORM)
        try:
            # Another program may have written there since the run began.
            shown = {node.name: node.comment for node in self._door.nodes() if node.name in wanted}
            by_comment: dict[str, list[str]] = {}
            for name, comment in shown.items():
                marked = with_label(with_label(comment, STATUS, wanted[name]), AT, at)
                by_comment.setdefault(marked, []).append(name)
            for comment, names in by_comment.items():
                self._door.set_comment(names, comment)
        except SresError as error:
            if str(error) != self._told_trouble:
                self._tell(f"the label {STATUS} cannot be written: {error}")
            self._told_trouble = str(error)


def status_of(node: Node) -> str:
    """Return the state that a node's label says; empty: none."""
    return labels_of(node.comment).get(STATUS, "")


def marked_at(node: Node) -> float:
    """Return when a node's label was written, in seconds since the epoch; 0: not known."""
    text = labels_of(node.comment).get(AT, "")
    try:
        return datetime.strptime(text, _FORM).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def booted_at(node: Node) -> float:
    """Return when a node has booted, as Slurm knows it; 0: not known."""
    try:
        return seconds_of(node.boot_time)
    except ValueError:
        return 0.0
