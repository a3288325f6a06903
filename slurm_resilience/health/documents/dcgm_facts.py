"""Read what a DCGM diagnostic says of itself: versions, devices, and what it calls for. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from slurm_resilience.health.documents.dcgm_diag import ROOTS
from slurm_resilience.health.documents.reading import DocumentReading
from slurm_resilience.model import Severity


class DcgmFacts(NamedTuple):
    """The summary of a diagnostic; empty texts where the document does not say."""

    level: int
    version: str = ""
    driver: str = ""
    device_ids: tuple[str, ...] = ()
    replacement_required: bool = False
    reboot_required: bool = False


def dcgm_facts(data: dict[str, Any], reading: DocumentReading, level: int) -> DcgmFacts:
    """Return the summary.

    Args:
        data: the document; version 4 has `metadata` and `entity_groups`, version 3 the same facts
            beside its tests.
        reading: the judgement of the same document.
        level: the level that was asked for.
    """
    body: dict[str, Any] = next(
        (data[root] for root in ROOTS if isinstance(data.get(root), dict)), {}
    )
    notes = {**body, **(data.get("metadata") or body.get("metadata") or {})}
    asked = {finding.severity for finding in reading.findings}
    return DcgmFacts(
        level,
        str(notes.get("version", "")),
        str(notes.get("Driver Version Detected", "")),
        tuple(dict.fromkeys(_device_ids(data, body, notes))),
        Severity.REPLACE in asked,
        # A reset is done by a reboot where the driver cannot reset one GPU alone.
        bool(asked & {Severity.REBOOT, Severity.RESET}),
    )


def _device_ids(data: dict[str, Any], body: dict[str, Any], notes: dict[str, Any]) -> Iterator[str]:
    for group in data.get("entity_groups") or body.get("entity_groups") or ():
        for entity in group.get("entities", ()) if isinstance(group, dict) else ():
            if isinstance(entity, dict) and "device_id" in entity:
                yield str(entity["device_id"])
    listed = notes.get("GPU Device IDs", notes.get("GPU Device ID", ()))
    yield from (str(one) for one in (listed if isinstance(listed, list | tuple) else [listed]))
