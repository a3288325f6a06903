"""The outcome of judging one document. Pure."""

from __future__ import annotations

from typing import NamedTuple

from slurm_resilience.model import Finding, Severity

MAX_EVIDENCE_CHARACTERS = 400


class DocumentReading(NamedTuple):
    """Findings, what could not be judged, and what is worth a remark but asks for nothing."""

    findings: tuple[Finding, ...] = ()
    unjudged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def plus(self, other: DocumentReading) -> DocumentReading:
        """Return both readings as one."""
        return DocumentReading(
            self.findings + other.findings,
            self.unjudged + other.unjudged,
            self.notes + other.notes,
        )


def document_finding(
    check: str, severity: Severity, text: str, subject: str = "", code: str = "", evidence: str = ""
) -> Finding:
    """Return a finding of a document, which bears no time."""
    return Finding(
        check,
        severity,
        text,
        0.0,
        subject=subject,
        code=code,
        evidence=evidence.strip()[:MAX_EVIDENCE_CHARACTERS],
    )
