"""Tell which checks read a tree that a person has changed for a drill (`sres inject`, in a lab)."""

from __future__ import annotations

import msgspec

from slurm_resilience.health.check import CheckContext, Judgement
from slurm_resilience.model import INJECTED_MARK

MARKER = "/sys/class/sres-injected"
"""Names the checks that see the change, one a line. Only a mount can bring a file into sysfs."""


def marked(check: str, judgement: Judgement, context: CheckContext) -> Judgement:
    """Return a judgement whose findings say that a person injected them, where that is so."""
    if not judgement.findings:
        return judgement
    try:
        names = context.path(MARKER).read_text("utf-8").split()
    except OSError:
        return judgement
    if check not in names:
        return judgement
    findings = tuple(
        msgspec.structs.replace(one, injected=True, text=f"{one.text} {INJECTED_MARK}")
        for one in judgement.findings
    )
    return Judgement(judgement.text, findings)
