"""Write docs/health-coverage.md: the table of checks and kernel lines, from the code."""

from __future__ import annotations

from pathlib import Path

from slurm_resilience.health.coverage import CoverageRow, coverage_rows

PAGE = Path(__file__).resolve().parent.parent / "docs" / "health-coverage.md"
HEAD = """\
# Health coverage

Written by `scripts/health-coverage` from the code; do not edit. `sres check list` prints the
same rows. [health-checks.md](health-checks.md) explains the verdicts.

| check or line | source | threshold | verdict | pace | reason | test |
|---|---|---|---|---|---|---|
"""


def row_of(row: CoverageRow) -> str:
    """Return a line of the table."""
    verdicts = ", ".join(row.verdicts)
    cells = (row.name, row.source, row.threshold, verdicts, row.pace, row.reason, row.test)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    """Return the whole page."""
    return HEAD + "\n".join(map(row_of, coverage_rows())) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
