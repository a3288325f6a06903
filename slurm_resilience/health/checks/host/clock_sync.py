"""The node's clock: kept in step by a time service, as the kernel knows.

Watched, never acted on: it is configuration. In a virtual machine the host may keep the clock, and
the kernel then never hears of a time source; so there only a clock that was in step is judged.
"""

from __future__ import annotations

import ctypes
import re
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.model import Finding, Severity

UNSYNCHRONISED = 0x40
"""STA_UNSYNC of adjtimex(2)."""
BUFFER_BYTES = 512
"""More than any kernel's struct timex."""


class ClockState(NamedTuple):
    in_step: bool
    virtual: bool
    """The machine is a virtual one."""


class _Timex(ctypes.Structure):
    """The first fields of struct timex, and room for the others."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("others", ctypes.c_char * BUFFER_BYTES),
    )


def probe(context: CheckContext) -> ClockState:
    asked = _Timex()  # modes 0: nothing is changed
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(asked)) < 0:
        raise Unjudged(f"the kernel does not tell (adjtimex: error {ctypes.get_errno()})")
    flags = re.search(r"^flags\s*:.*", context.path("/proc/cpuinfo").read_text("utf-8"), re.M)
    virtual = flags is not None and "hypervisor" in flags[0].split()
    return ClockState(not asked.status & UNSYNCHRONISED, virtual)


def judge(seen: ClockState, context: CheckContext) -> Judgement:
    if seen.in_step:
        return Judgement("the clock is in step with its time source")
    first: ClockState = context.first or seen
    if seen.virtual and not first.in_step:
        raise Unjudged(
            "no time source is known to the kernel; this virtual machine's host may be it"
        )
    text = "the clock is in step with no time source: look at chronyd or ntpd"
    return Judgement(text, (Finding(CHECK.name, Severity.MONITOR, text, context.now),))


CHECK = Check(
    "clock_sync",
    probe,
    judge,
    period=600.0,
    source="adjtimex(2)",
    threshold="STA_UNSYNC; in a virtual machine, after it was in step",
    asks_for=(Severity.MONITOR,),
)
