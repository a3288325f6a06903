"""Replay the lines of a saved log through the classifier that sresd runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_resilience.health.grouping import (
    WINDOW_SECONDS,
    FindingGroup,
    GroupingChange,
    absorb,
    heals,
)
from slurm_resilience.health.kernel_log import Classifier
from slurm_resilience.health.replay.conclusion import Grouped, ReplayIncident, incident
from slurm_resilience.health.replay.saved_log import SavedLine
from slurm_resilience.model import Finding, Severity


class LogReplay:
    """Takes the lines one after the other."""

    def __init__(self) -> None:
        self._classifier = Classifier()
        self._open: tuple[FindingGroup, ...] = ()
        self._ended: dict[tuple[str, str, str, bool], Grouped] = {}
        self._fatal_switch_at: list[float] = []
        self.lines = 0
        self.framed_lines = 0

    def feed_all(self, lines: Iterable[SavedLine]) -> None:
        """Take lines in their order."""
        for line in lines:
            self.feed(line)

    def feed(self, line: SavedLine) -> None:
        """Take one line."""
        if line.text.strip():
            self.lines += 1
            self.framed_lines += line.has_frame
        if line.is_boot:
            self._boot()
        for finding in self._classifier.judge(line.text, line.at, line.facility, line.program):
            self._absorb(finding)

    def incidents(self) -> tuple[ReplayIncident, ...]:
        """Return all incidents, those that were taken back left out."""
        self._end(self._open)
        self._open = ()
        return tuple(incident(grouped) for grouped in self._ended.values())

    def _absorb(self, finding: Finding) -> None:
        change = absorb(self._open, finding)
        if (finding.check, finding.severity) == ("sxid", Severity.RESET):
            self._fatal_switch_at.append(finding.at)
        self._end(one for one in self._open if finding.at - one.last > WINDOW_SECONDS)
        if change.report is None and (change.cleared or change.recovered):
            self._take_back(change)
        self._open = change.incidents

    def _take_back(self, change: GroupingChange) -> None:
        """Forget what had fallen silent before the line came that ends it."""
        self._ended = {
            key: one
            for key, one in self._ended.items()
            if one.group.lead.key not in change.cleared
            and not (change.recovered and heals(one.group.lead, change.recovered))
        }

    def _end(self, groups: Iterable[FindingGroup]) -> None:
        for group in groups:
            key = (*group.lead.key, group.lead.injected)
            earlier = self._ended.pop(key, None)
            merged = _merge(earlier.group, group) if earlier else group
            switches = any(group.first <= at <= group.last for at in self._fatal_switch_at)
            self._ended[key] = Grouped(merged, has_fatal_switch=switches)

    def _boot(self) -> None:
        """End what was open: the node has booted."""
        self._end(self._open)
        self._open = ()
        self._ended = {key: one._replace(has_booted_since=True) for key, one in self._ended.items()}
        self._classifier = Classifier()


def _merge(earlier: FindingGroup, later: FindingGroup) -> FindingGroup:
    """Return two incidents of the same key as one, told by the graver finding."""
    codes = dict.fromkeys((*earlier.codes, *later.codes))
    return later._replace(
        codes=tuple(codes),
        lines=earlier.lines + later.lines,
        first=min(earlier.first, later.first),
        last=max(earlier.last, later.last),
    )
