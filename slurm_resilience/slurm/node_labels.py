"""Labels of a node, in its Comment beside a person's own text. Pure.

The form is one pair of brackets, whose last label may have blanks:

    RMA 4711 [sres health-status=pending-replacement fault-type=xid fault-reason=Xid 79 on GPU 0]

A label that another program writes there (`deep-check-status`, say) stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

HEALTH, FAULT_TYPE, FAULT_REASON = "health-status", "fault-type", "fault-reason"
OURS = (HEALTH, FAULT_TYPE, FAULT_REASON)
"""sresctld writes these."""
IN_SERVICE = "schedulable"
"""The health status of a node without this label."""
MAX_REASON = 120
"""Characters of a fault's reason."""
OLD_PREFIX = "sres: "
"""The beginning of a Comment that an earlier sresctld wrote."""
_BLOCK = re.compile(r" *\[sres((?: [a-z][a-z-]*=[^\[\]]*)?)\]")
_UNREADABLE = "\N{REPLACEMENT CHARACTER}"
_FORBIDDEN = re.compile(r"[\[\]@\n\r\t|\"']+")
"""Signs that Slurm's own output, or this form, would be misread by."""


def labels_of(comment: str) -> dict[str, str]:
    """Return the labels that a Comment has."""
    block = _BLOCK.search(comment)
    if block is None:
        return {}
    words, _, reason = block[1].partition(f" {FAULT_REASON}=")
    pairs = (word.partition("=") for word in words.split())
    labels = {key: value for key, sign, value in pairs if sign}
    return labels | ({FAULT_REASON: reason} if reason else {})


def own_text(comment: str) -> str:
    """Return what a person has written into a Comment."""
    if comment.startswith(OLD_PREFIX):
        return ""
    return _BLOCK.sub("", comment).strip()


def with_labels(comment: str, labels: Mapping[str, str]) -> str:
    """Return a Comment with these labels of sresctld's, and none else of its own.

    Args:
        comment: as it is; a person's text in it stays, and so do others' labels.
        labels: by name; empty: all of sresctld's are taken away.
    """
    if _UNREADABLE in comment:
        return comment  # not in UTF-8: written back, the person's text would be another one
    others = {key: value for key, value in labels_of(comment).items() if key not in OURS}
    return _written(comment, others | dict(labels))


def with_label(comment: str, name: str, value: str) -> str:
    """Return a Comment with one label changed; empty: without it. All else in it stays."""
    return _written(comment, labels_of(comment) | {name: value})


def _written(comment: str, labels: Mapping[str, str]) -> str:
    every = {key: _plain(value) for key, value in labels.items()}
    wanted = {key: value for key, value in every.items() if value}
    reason = wanted.pop(FAULT_REASON, "")
    words = [f"{key}={value.replace(' ', '_')}" for key, value in wanted.items()]
    words += [f"{FAULT_REASON}={reason[:MAX_REASON].rstrip()}"] if reason else []
    block = f"[{' '.join(['sres', *words])}]" if words else ""
    return " ".join(part for part in (own_text(comment), block) if part)


def _plain(value: str) -> str:
    return " ".join(_FORBIDDEN.sub(" ", value).split())
