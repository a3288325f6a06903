"""Kernel log lines into findings. Pure: lines go in, findings come out.

Understands what dmesg, journald, syslog and /dev/kmsg make of one message: a prefix never changes
the classification. A record of /dev/kmsg also tells who wrote it: the facility is 0 for the kernel
and cannot be forged by a program, so anything else is an injected line. Such a line is only
watched, except during a drill.

The kernel quotes users in lines of its own: the name and the file of a program that crashed, the
options of a mount in a user's namespace. So a fault of the machine counts only where the line
begins with it (what a user chose stands further on), or a driver's record of several lines does;
and a line that begins with the name of a program never tells of one.
"""

from __future__ import annotations

import re

import msgspec

from slurm_resilience.health import xid
from slurm_resilience.health.line_rules.line_judge import LineJudge, RuleMatch
from slurm_resilience.health.log_frame import record, unframe
from slurm_resilience.model import INJECTED, INJECTED_MARK, Finding, Severity

MAX_EVIDENCE_CHARACTERS = 400
"""Characters of a line kept as evidence."""
INTRODUCTION_LINES = 4
"""Lines after `NVRM: The NVIDIA GPU <address>` in which its verdict may follow."""

_BDF = r"(?P<bdf>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?"
# A MIG instance may follow the address: `Xid (PCI:0000:01:00 GPU-I:05): 94`.
_XID = re.compile(rf"^NVRM: Xid \((?:PCI:)?{_BDF}[^)]*\): (?P<code>[0-9]{{1,5}})\b(?P<rest>.*)")
_SXID = re.compile(
    rf"^(?:nvidia-nvswitch\d*: )?SXid \((?:PCI:)?{_BDF}[^)]*\): "
    r"(?P<code>[0-9]{1,6})\b(?P<rest>.*)"
)
_GPU_LOST = re.compile(rf"^NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?{_BDF}.*fallen off the bus")
_DRIVER = "NVRM: "
"""Begins each line of a record of several lines."""
_GPU_NAMED = re.compile(rf"^NVRM: The NVIDIA GPU (?:PCI:)?{_BDF}\s*$")
_FATAL = re.compile(r"^,?\s*Fatal\b")
_ANNOUNCED = re.compile(r"^sres: injected fault (?P<fault>[a-z0-9-]{1,40})\b")
_OF_A_PROGRAM = re.compile(
    r".{0,15}(?:\[[0-9]+\]|\([0-9]+\)| invoked oom-killer:|: page allocation failure)",
    re.DOTALL,
)
"""Begins with the name of a program, which has at most 15 characters, line breaks among them."""


class Classifier:
    """Reads lines in their order; remembers which GPU the last lines were about, and how often the
    lines came whose number matters."""

    def __init__(self, accept_injected: bool = False) -> None:
        self._accept_injected = accept_injected
        self._named = ""
        self._lines_left = 0
        self._rules = LineJudge()

    def feed(
        self, line: str, now: float, booted: float | None = None, is_drill: bool = False
    ) -> list[Finding]:
        """Return the findings of one line (or of one /dev/kmsg record, which may hold several
        lines).

        Args:
            line: as it was read.
            now: when it was read, seconds since the epoch.
            booted: when this kernel started; records then carry their own time.
            is_drill: the line was written during a drill: a program's counts too.

        Findings that ask for nothing (Xid 45) come with severity ``none``: they still belong to an
        incident.
        """
        entry = record(line)
        if entry.uptime is None:
            frame = unframe(line)
            return self.judge(frame.text, now, frame.facility, frame.program, is_drill)
        if booted is None:
            return self.judge(entry.text, now, entry.facility, is_drill=is_drill)
        at = booted + entry.uptime
        found = self.judge(entry.text, at, entry.facility, is_drill=is_drill)
        return [msgspec.structs.replace(one, uptime=entry.uptime) for one in found]

    def judge(
        self,
        message: str,
        at: float,
        facility: int = 0,
        program: str = "",
        is_drill: bool = False,
    ) -> list[Finding]:
        """Return the findings of one message without its framing.

        Args:
            message: one or more lines.
            at: when it was written, seconds since the epoch.
            facility: 0 for the kernel; anything else is a program's.
            program: the author's name in a saved log; empty for the kernel. Its lines count like
                the kernel's where a rule names it, else as injected.
            is_drill: injected lines count.
        """
        findings = []
        lines = message.split("\n")
        if not lines[0].startswith(_DRIVER):
            del lines[1:]  # what stands there was chosen by a user, for all that can be told
        of_program = not program and _OF_A_PROGRAM.match(message) is not None
        for text in lines:
            if program and (match := self._rules.judge(text, at, program)):
                findings.append(_by_rule(match, text, at))
            elif found := self._line(text, at, of_program):
                marked = self._mark(found, facility or (1 if program else 0), is_drill)
                findings += [marked] if marked else []
        return findings

    def _line(self, text: str, at: float, of_program: bool) -> Finding | None:
        if announced := _ANNOUNCED.match(text):
            return _announced(announced, at)
        found = None if of_program else self._nvidia(text, at)
        return found or self._other(text, at, of_program)

    def _other(self, text: str, at: float, of_program: bool) -> Finding | None:
        match = self._rules.judge(text, at, of_program=of_program)
        return _by_rule(match, text, at) if match else None

    def _nvidia(self, text: str, at: float) -> Finding | None:
        self._lines_left -= 1
        if "NVRM" not in text and "SXid" not in text:
            return None
        if match := _XID.search(text):
            return _xid(match, at)
        if match := _SXID.search(text):
            return _sxid(match, at)
        if match := _GPU_LOST.search(text):
            return _lost(match["bdf"], text, at)
        if match := _GPU_NAMED.search(text):
            self._named, self._lines_left = match["bdf"], INTRODUCTION_LINES
        elif self._lines_left > 0 and "fallen off the bus" in text:
            self._lines_left = 0
            return _lost(self._named, text, at)
        return None

    def _mark(self, finding: Finding, facility: int, is_drill: bool) -> Finding | None:
        if facility == 0:
            return finding
        if self._accept_injected or is_drill:
            text = f"{finding.text} {INJECTED_MARK}"
            return msgspec.structs.replace(finding, injected=True, text=text)
        if finding.severity is Severity.NONE:
            return None  # it would only take back what the kernel itself has said
        text = (
            f"{finding.text}; a program wrote this line, so nothing is done "
            "(no drill is open, and agent.accept_injected is off)"
        )
        return msgspec.structs.replace(finding, injected=True, severity=Severity.MONITOR, text=text)


def _announced(match: re.Match[str], at: float) -> Finding:
    """Make the finding of a fault that `sres inject` is about to bring about: it is only told."""
    return Finding(
        check=INJECTED,
        severity=Severity.MONITOR,
        text=f"a person injects {match['fault']}",
        at=at,
        code=match["fault"],
        evidence=match.string[:MAX_EVIDENCE_CHARACTERS],
        injected=True,
    )


def _by_rule(match: RuleMatch, text: str, at: float) -> Finding:
    rule = match.rule
    name = f"{match.subject}: {rule.meaning}" if match.subject else rule.meaning
    return Finding(
        check=rule.check,
        severity=match.severity,
        text=f"{name} ({match.times} times)" if match.times > 1 else name,
        at=at,
        subject=match.subject,
        code=rule.code,
        evidence=text.strip()[:MAX_EVIDENCE_CHARACTERS],
    )


def _xid(match: re.Match[str], at: float) -> Finding:
    row = xid.judge(int(match["code"]), match["rest"])
    gpu = match["bdf"].lower()
    return Finding(
        check="xid",
        severity=row.action,
        text=f"Xid {row.code} on GPU {gpu}: {row.meaning}",
        at=at,
        subject=gpu,
        code=str(row.code),
        evidence=match.group(0)[:MAX_EVIDENCE_CHARACTERS],
    )


def _sxid(match: re.Match[str], at: float) -> Finding:
    """Make the finding of an NVSwitch error: the driver says whether it is fatal."""
    fatal = bool(_FATAL.match(match["rest"]))
    switch = match["bdf"].lower()
    return Finding(
        check="sxid",
        severity=Severity.RESET if fatal else Severity.MONITOR,
        text=f"SXid {int(match['code'])} on NVSwitch {switch}: {'' if fatal else 'not '}fatal",
        at=at,
        subject=switch,
        code=str(int(match["code"])),
        evidence=match.group(0)[:MAX_EVIDENCE_CHARACTERS],
    )


def _lost(bdf: str, text: str, at: float) -> Finding:
    """Return the finding of Xid 79 for a GPU that is lost without one (the driver's probe finds it
    gone)."""
    gpu = bdf.lower()
    return Finding(
        check="gpu_lost",
        severity=xid.table()[79].action,
        text=f"GPU {gpu} has fallen off the bus",
        at=at,
        subject=gpu,
        evidence=text.strip()[:MAX_EVIDENCE_CHARACTERS],
    )
