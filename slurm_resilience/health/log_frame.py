"""Frames of log lines: what dmesg, journalctl, rsyslog and /dev/kmsg put around a message. Pure.

They write the same message in many ways. What they put in front is taken off, one piece after the
other.
"""

from __future__ import annotations

import calendar
import json
import re
from typing import NamedTuple

MONTHS = {name: at for at, name in enumerate(calendar.month_abbr) if name}
YEAR_OF_SYSLOG = 2000
"""Syslog writes no year; this one has a 29 February."""
KERNEL_FACILITIES = frozenset({"kern"})

_MONTH = "|".join(MONTHS)
_DAY = "Mon|Tue|Wed|Thu|Fri|Sat|Sun"
_CLOCK = r"(?P<h>\d\d):(?P<mi>\d\d):(?P<s>\d\d)(?:[.,](?P<frac>\d+))?"
_TAIL = r"(?:\s+|$)"
_RECORD = re.compile(r"([0-9]{1,6}),([0-9]{1,20}),([0-9]{1,20})(?:,[^;]*)?;(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})")
_PRIORITY = re.compile(r"<(?P<priority>\d{1,3})>")
_FACILITY = re.compile(r"(?P<facility>[a-z]+\d?) *:(?P<level>[a-z]+) *: ")
_UPTIME = re.compile(r"\[ *(?P<uptime>\d+\.\d+)\]" + _TAIL)
_THREAD = re.compile(r"\[ *[TC]\d+\]" + _TAIL)
_SINCE = re.compile(rf"\[(?: *\+\d+\.\d+|(?:{_MONTH}) *\d{{1,2}} \d\d:\d\d)\]" + _TAIL)
"""The frame of `dmesg --reltime`: the minute, or the seconds since the line before."""
_ISO = re.compile(
    rf"\[?(?:(?:{_DAY}) )?(?P<y>\d{{4}})-(?P<mo>\d\d)-(?P<d>\d\d)[T ]{_CLOCK}"
    r"(?:(?P<sign>[+-])(?P<zh>\d\d):?(?P<zm>\d\d)|Z| [A-Z]{3,4})?(?:\](?=\[)|\]?" + _TAIL + ")"
)
_SYSLOG = re.compile(rf"(?P<mon>{_MONTH}) +(?P<d>\d{{1,2}}) {_CLOCK}" + _TAIL)
_DATE = re.compile(
    rf"\[?(?:{_DAY}) (?P<mon>{_MONTH}) +(?P<d>\d{{1,2}}) {_CLOCK}(?: [AP]M)?(?: [A-Z]{{3,4}})? "
    r"(?P<y>\d{4})\]?" + _TAIL
)
_FABRIC = re.compile(rf"\[(?P<mon>{_MONTH}) +(?P<d>\d{{1,2}}) (?P<y>\d{{4}}) {_CLOCK}\]" + _TAIL)
_KERNEL_TAG = re.compile(r"(?:[\w.-]+\s+)?kernel:(?:\s+|$)")
_PROGRAM_TAG = re.compile(r"[\w.-]+ (?P<program>[\w./@()-]+?)(?:\[\d+\])?: ")
_STAMPS = (_ISO, _SYSLOG, _DATE, _FABRIC)


class KernelRecord(NamedTuple):
    """A line without what /dev/kmsg puts around it."""

    text: str
    facility: int = 0
    uptime: float | None = None
    """Seconds since boot, when the line says so."""


def record(line: str) -> KernelRecord:
    """Undo the framing of a /dev/kmsg record; any other line is taken as it is."""
    record = _RECORD.match(line)
    if not record:
        return KernelRecord(line)
    # Lines after the first are the record's dictionary (SUBSYSTEM=..., DEVICE=...).
    body = record.group(4).split("\n", 1)[0]
    text = _ESCAPE.sub(lambda escape: chr(int(escape.group(1), 16)), body)
    return KernelRecord(text, int(record.group(1)) >> 3, int(record.group(3)) / 1e6)


class LogFrame(NamedTuple):
    """A line without its frame, and what the frame said."""

    text: str
    wall: float | None = None
    uptime: float | None = None
    facility: int = 0
    program: str = ""
    pieces: int = 0


def unframe(line: str) -> LogFrame:
    """Take the frame off a line that was saved or passed on."""
    if line.startswith("{") and (frame := _journal(line)):
        return frame
    entry = record(line)
    if entry.uptime is not None:
        return LogFrame(entry.text, None, entry.uptime, entry.facility, pieces=1)
    frame = LogFrame(line.strip("\r\n"))
    for _ in range(8):
        shorter = _strip_one(frame)
        if shorter is None:
            return frame
        frame = shorter
    return frame


def _strip_one(frame: LogFrame) -> LogFrame | None:
    """Take one piece off the front of a line; None when there is none left."""
    text, pieces = frame.text.lstrip(), frame.pieces + 1
    if match := _PRIORITY.match(text):
        facility = int(match["priority"]) >> 3
        return frame._replace(text=text[match.end() :], facility=facility, pieces=pieces)
    if match := _FACILITY.match(text):
        facility = 0 if match["facility"] in KERNEL_FACILITIES else 1
        return frame._replace(text=text[match.end() :], facility=facility, pieces=pieces)
    if match := _UPTIME.match(text):
        uptime = float(match["uptime"])
        return frame._replace(text=text[match.end() :], uptime=uptime, pieces=pieces)
    if match := _THREAD.match(text) or _SINCE.match(text):
        return frame._replace(text=text[match.end() :], pieces=pieces)
    if frame.wall is None:
        for stamp in _STAMPS:
            if match := stamp.match(text):
                return _after_a_stamp(frame, match, text[match.end() :], stamp, pieces)
    if match := _KERNEL_TAG.match(text):
        return frame._replace(text=text[match.end() :], program="", pieces=pieces)
    return None


def _after_a_stamp(
    frame: LogFrame, match: re.Match[str], rest: str, stamp: re.Pattern[str], pieces: int
) -> LogFrame:
    """Return the rest of a line after its time of day, with its author."""
    frame = frame._replace(text=rest, wall=_seconds(match), pieces=pieces)
    if stamp is _FABRIC:
        return frame._replace(program="nv-fabricmanager")
    # dmesg writes such times too, in brackets or with a comma, and no author after them.
    by_dmesg = match[0].startswith("[") or "," in match[0]
    if _KERNEL_TAG.match(rest) or by_dmesg:
        return frame
    if tag := _PROGRAM_TAG.match(rest):
        return frame._replace(text=rest[tag.end() :], program=tag["program"].rpartition("/")[2])
    return frame


def _seconds(match: re.Match[str]) -> float:
    parts = match.groupdict()
    year = max(int(parts.get("y") or YEAR_OF_SYSLOG), 1)
    month = MONTHS[parts["mon"]] if parts.get("mon") else int(parts["mo"])
    clock = (int(parts["h"]), int(parts["mi"]), int(parts["s"]))
    at = float(calendar.timegm((year, min(max(month, 1), 12), int(parts["d"]), *clock)))
    if parts.get("frac"):
        at += float(f"0.{parts['frac']}")
    if parts.get("sign"):
        zone = int(parts["zh"]) * 3600 + int(parts["zm"]) * 60
        at += -zone if parts["sign"] == "+" else zone
    return at


def _journal(line: str) -> LogFrame | None:
    """Return the frame of a line of `journalctl -o json`; None when it is none."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("MESSAGE"), str):
        return None
    stamp = str(entry.get("__REALTIME_TIMESTAMP", ""))
    by_kernel = entry.get("_TRANSPORT") == "kernel"
    author = str(entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM") or "unknown")
    wall = float(stamp) / 1e6 if stamp.isdecimal() else None
    return LogFrame(entry["MESSAGE"], wall, program="" if by_kernel else author, pieces=1)
