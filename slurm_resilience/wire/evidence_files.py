"""The files in which a node's evidence is kept. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from slurm_resilience.wire.messages import NodeEvidence

_NAME = re.compile(r"[a-z][a-z0-9-]{0,40}")


def evidence_files(evidence: NodeEvidence, about: Mapping[str, Any]) -> dict[str, str]:
    """Return the content of each file by its name.

    Args:
        evidence: the node's answer.
        about: what else is known of it; it goes with the findings.
    """
    facts = {**about, "findings": evidence.findings, "checks": evidence.results}
    files = {
        "kernel.log": _lines(evidence.kernel_log),
        "journal.log": _lines(evidence.journal),
        "sresd.log": _lines(evidence.sresd_log),
        "findings.json": _lines([msgspec.json.encode(facts).decode()]),
    }
    # The names come from the node.
    tools = {name: text for name, text in evidence.tools.items() if _NAME.fullmatch(name)}
    if evidence.bug_report:
        tools["bug-report"] = f"{evidence.bug_report}\n"
    return files | {f"{name}.txt": text for name, text in tools.items()}


def evidence_in_words(evidence: NodeEvidence) -> str:
    """Return in one line how much there is."""
    count = len(evidence.findings) + sum(len(result.findings) for result in evidence.results)
    tools = f", {', '.join(sorted(evidence.tools))}" if evidence.tools else ""
    report = f"; bug report on the node: {evidence.bug_report}" if evidence.bug_report else ""
    return (
        f"{len(evidence.kernel_log)} lines of the kernel log, "
        f"{len(evidence.journal)} of the journal, {count} findings{tools}{report}"
    )


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
