"""A plugin of pytest for scripts/test: the order in which test files are begun.

Of each folder the longest begin first, or one that begins last would keep the run waiting for it.
The folders take turns: trainings compute and clusters mostly wait, so that some of each keep the
machine busy and no more than that. `file_seconds.csv` says how long a file took; it need not be
exact. SRES_TEST_SECONDS=FILE has such a file written at the end of a run.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

KNOWN = Path(__file__).with_name("file_seconds.csv")
USUAL_SECONDS = 20.0
"""A file that is not known is taken for so long: not last, should it be long."""
_spent: defaultdict[str, float] = defaultdict(float)
"""Seconds by file, in this run."""


def in_order(files: Collection[str], seconds: Mapping[str, float]) -> list[str]:
    """Return test files in the order in which they should begin. Pure.

    Args:
        files: paths below the repository; the folder of a file is a kind of its own.
        seconds: what is known of them.
    """
    kinds: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for file in files:
        kinds[file.rpartition("/")[0]].append((-seconds.get(file, USUAL_SECONDS), file))
    due = []
    for of_kind in kinds.values():
        before, total = 0.0, sum(took for took, _ in of_kind)
        for took, file in sorted(of_kind):
            due.append((before / total, file))
            before += took
    return [file for _, file in sorted(due)]


def known() -> dict[str, float]:
    """Return seconds by file."""
    with KNOWN.open() as lines:
        return {file: float(seconds) for seconds, file in csv.reader(lines)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the files in order; the tests of a file keep theirs."""
    by_file: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_file[item.nodeid.partition("::")[0]].append(item)
    items[:] = [item for file in in_order(by_file, known()) for item in by_file[file]]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long it took."""
    _spent[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was noted, where that is wanted; not in xdist's workers."""
    wanted = os.environ.get("SRES_TEST_SECONDS")
    if wanted and not hasattr(session.config, "workerinput"):
        rows = sorted(((round(took), file) for file, took in _spent.items()), reverse=True)
        with Path(wanted).open("w") as lines:
            csv.writer(lines, lineterminator="\n").writerows(row for row in rows if row[0] > 1)
