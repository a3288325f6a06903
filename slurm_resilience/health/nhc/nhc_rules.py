"""Judge the most used checks of NHC by facts of the node. Pure.

Actions that a line asks for (to mount, to restart, to kill) are never taken: only its test counts.
"""

from __future__ import annotations

import getopt
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slurm_resilience.health.nhc.nhc_facts import NhcFacts, NhcMount, NhcProcess, NhcSpace
from slurm_resilience.health.nhc.nhc_lines import NhcLine, matches

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtpe]?)(?:i?b)?", re.IGNORECASE)
_FACTORS = {letter: 1024**power for power, letter in enumerate("bkmgtpe")}
_ONLY_TELLS = re.compile(r"-[A-Za-z]*0[A-Za-z]*")
MAX_TEXT_CHARACTERS = 200


class NotJudged(Exception):
    """A line that is not understood, or asks for what is not looked at."""


class NhcOutcome(NamedTuple):
    """The outcome of one line: nothing, a trouble, or why it was not judged."""

    number: int
    line: str
    trouble: str = ""
    not_judged: str = ""
    fatal: bool = True
    """False with NHC's -0: the line only tells."""


def judge_line(line: NhcLine, facts: NhcFacts) -> NhcOutcome:
    """Return what one line says of a node."""
    text = " ".join(line.words)[:MAX_TEXT_CHARACTERS]
    if line.problem:
        return NhcOutcome(line.number, text, not_judged=line.problem)
    name, *arguments = line.words
    rule = _RULES.get(name)
    if rule is None:
        return NhcOutcome(line.number, text, not_judged=f"{name} is not known here")
    try:
        trouble = rule(arguments, facts)
    except (NotJudged, getopt.GetoptError, re.error) as reason:
        return NhcOutcome(line.number, text, not_judged=str(reason))
    fatal = not any(_ONLY_TELLS.fullmatch(word) for word in arguments)
    return NhcOutcome(line.number, text, trouble[:MAX_TEXT_CHARACTERS], fatal=fatal)


def size_bytes(text: str, default: str = "k") -> int:
    """Return a size as NHC writes it: `1TB`, `512m`, `1024` (kB, unless ``default`` says other).

    Raises:
        NotJudged: it is none.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise NotJudged(f"'{text}' is no size")
    is_bytes = not match[2] and text.lower().endswith("b")
    factor = _FACTORS["b" if is_bytes else (match[2].lower() or default)]
    return int(float(match[1]) * factor)


def _word(arguments: Sequence[str], index: int, what: str) -> str:
    if index >= len(arguments):
        raise NotJudged(f"it names no {what}")
    return arguments[index]


# --- file systems -----------------------------------------------------------------------------


def _mount(arguments: Sequence[str], facts: NhcFacts, options: str = "") -> str:
    found, rest = getopt.gnu_getopt(list(arguments), "0rt:s:o:O:e:E:fF")
    given = dict(found)
    points = rest
    if not ({"-f", "-F"} & set(given)):
        # The old form: MOUNTPOINT [SOURCE] [TYPE] [OPTIONS].
        points = [_word(rest, 0, "mount point")]
        for flag, value in zip(("-s", "-t", "-o"), rest[1:], strict=False):
            given.setdefault(flag, value)
    if not points:
        raise NotJudged("it names no mount point")
    wants = [(given.get("-s"), 0, "source"), (given.get("-t"), 2, "type")]
    wants += [(given.get("-o"), 3, "options"), (options or None, 3, "options")]
    troubles = [_one_mount(point, facts.mounts, wants) for point in points]
    return "; ".join(filter(None, troubles))


def _one_mount(
    point: str, mounts: Sequence[NhcMount], wants: Sequence[tuple[str | None, int, str]]
) -> str:
    here = [one for one in mounts if one.point == (point.rstrip("/") or "/")]
    if not here:
        return f"{point} is not mounted"
    top = here[-1]  # what programs see
    for pattern, field, name in wants:
        if pattern is not None and not matches(pattern, top[field]):
            return f"{point}: its {name} {top[field]} is not {pattern}"
    return ""


def _space(arguments: Sequence[str], facts: NhcFacts) -> tuple[str, NhcSpace]:
    asked = _word(arguments, 0, "mount point")
    point = next((one.point for one in facts.mounts if asked in (one.source, one.point)), asked)
    space = facts.space.get(point)
    if space is None:
        raise NotJudged(f"{asked} is no mount point that can be looked at")
    return asked, space


def _free(arguments: Sequence[str], facts: NhcFacts) -> str:
    point, space = _space(arguments, facts)
    least = _word(arguments, 1, "least space")
    if least.endswith("%"):
        whole = space.used + space.free
        percent = 100 * space.free / whole if whole else 100.0
        is_low = percent < _percent(least)
        return f"{point} has {percent:.1f} % free, less than {least}" if is_low else ""
    if space.free >= size_bytes(least):
        return ""
    return f"{point} has {space.free >> 10} kB free, less than {least}"


def _used(arguments: Sequence[str], facts: NhcFacts) -> str:
    point, space = _space(arguments, facts)
    most = _word(arguments, 1, "limit")
    if most.endswith("%"):
        whole = space.used + space.free
        percent = 100 * space.used / whole if whole else 0.0
        is_full = percent >= _percent(most)
        return f"{point} has {percent:.1f} % in use, limit {most}" if is_full else ""
    if space.used < size_bytes(most):
        return ""
    return f"{point} has {space.used >> 10} kB in use, limit {most}"


def _percent(text: str) -> float:
    try:
        return float(text[:-1])
    except ValueError:
        raise NotJudged(f"'{text}' is no percentage") from None


def _fs_size(arguments: Sequence[str], facts: NhcFacts) -> str:
    point, space = _space(arguments, facts)
    return _between(f"{point}: its size", space.total, arguments[1:])


def _inodes(arguments: Sequence[str], facts: NhcFacts) -> str:
    point, space = _space(arguments, facts)
    return _between(f"{point}: its inodes", space.inodes, arguments[1:], "b", "")


def _inodes_free(arguments: Sequence[str], facts: NhcFacts) -> str:
    point, space = _space(arguments, facts)
    least = size_bytes(_word(arguments, 1, "least number"), "b")
    return "" if space.inodes_free >= least else f"{point} has {space.inodes_free} inodes free"


def _inodes_used(arguments: Sequence[str], facts: NhcFacts) -> str:
    point, space = _space(arguments, facts)
    used = space.inodes - space.inodes_free
    most = size_bytes(_word(arguments, 1, "limit"), "b")
    return "" if used <= most else f"{point} has {used} inodes in use"


def _between(
    what: str, have: int, limits: Sequence[str], default: str = "k", unit: str = " bytes"
) -> str:
    """Compare a number with a least and a most, of which each may be left out, and a tolerance."""
    least, most, fudge = (*limits, "", "", "")[:3]
    if fudge.endswith("%"):
        tolerance = int(have * _percent(fudge) / 100)
    else:
        tolerance = size_bytes(fudge, default) if fudge else 0
    if least and have + tolerance < size_bytes(least, default):
        return f"{what}, {have}{unit}, is less than {least}"
    if most and have - tolerance > size_bytes(most, default):
        return f"{what}, {have}{unit}, is more than {most}"
    return ""


# --- hardware ---------------------------------------------------------------------------------


def _processors(arguments: Sequence[str], facts: NhcFacts) -> str:
    have = (facts.sockets, facts.cores, facts.threads)
    if not facts.threads:
        raise NotJudged("/proc/cpuinfo is not understood")
    for name, number, wanted in zip(("sockets", "cores", "threads"), have, arguments, strict=False):
        if wanted and not wanted.isdecimal():
            raise NotJudged(f"'{wanted}' is no number")
        if wanted and number != int(wanted):
            return f"{number} {name}, not {wanted}"
    return ""


def _memory(facts: NhcFacts, *names: str) -> int:
    if "MemTotal" not in facts.memory:
        raise NotJudged("/proc/meminfo is not understood")
    return sum(facts.memory.get(name, 0) for name in names)


def _amount(what: str, *names: str) -> Callable[[Sequence[str], NhcFacts], str]:
    """Return a rule on a sum of what /proc/meminfo says."""

    def rule(arguments: Sequence[str], facts: NhcFacts) -> str:
        return _between(what, _memory(facts, *names), arguments)

    return rule


def _ethernet(arguments: Sequence[str], facts: NhcFacts) -> str:
    device = _word(arguments, 0, "device")
    return "" if device in facts.net_devices else f"network device {device} is missing"


def _infiniband(arguments: Sequence[str], facts: NhcFacts) -> str:
    rate = _word(arguments, 0, "rate")
    if not rate.isdecimal():
        raise NotJudged(f"'{rate}' is no rate")
    device, _, number = (arguments[1] if len(arguments) > 1 else "").partition(":")
    for port in facts.ports:
        if (
            port.active
            and port.rate == int(rate)
            and device in ("", port.device)
            and number in ("", port.number)
        ):
            return ""
    return f"no active InfiniBand port{f' of {device}' if device else ''} with {rate} Gb/s"


# --- processes and files ----------------------------------------------------------------------


def _service(arguments: Sequence[str], facts: NhcFacts) -> str:
    found, rest = getopt.gnu_getopt(list(arguments), "0SrcskfKad:m:u:e:E:")
    given = dict(found)
    service = _word(rest, 0, "service")
    pattern = given.get("-m") or given.get("-d") or service
    is_there = any(
        matches(pattern, one.command if "-f" in given else one.name)
        and _of_user(one, given.get("-u", ""))
        for one in facts.processes
    )
    return "" if is_there else _missing(service, given.get("-u", ""))


def _daemon(arguments: Sequence[str], facts: NhcFacts) -> str:
    name, owner = _word(arguments, 0, "command"), (*arguments, "")[1]
    if len(arguments) > 2:
        raise NotJudged("the words of a process are not looked at; use check_ps_service -f -m")
    for one in facts.processes:
        if one.name == name and _of_user(one, owner):
            return ""
    return _missing(name, owner)


def _missing(service: str, user: str) -> str:
    return f"no process of {service}{f' owned by {user}' if user else ''}"


def _of_user(process: NhcProcess, user: str) -> bool:
    return not user or matches(user, process.user)


def _load(arguments: Sequence[str], facts: NhcFacts) -> str:
    if len(facts.load) != 3:
        raise NotJudged("/proc/loadavg is not understood")
    for minutes, have, limit in zip((1, 5, 15), facts.load, arguments, strict=False):
        try:
            is_high = bool(limit) and have > float(limit)
        except ValueError:
            raise NotJudged(f"'{limit}' is no number") from None
        if is_high:
            return f"load {have:g} over {minutes} min, limit {limit}"
    return ""


def _files(arguments: Sequence[str], facts: NhcFacts) -> str:
    found, rest = getopt.gnu_getopt(list(arguments), "aefdbcpShLrwxsugkO")
    _word(rest, 0, "file")
    seen = {one.path: one.holds for one in facts.files}
    for path in rest:
        for flag, _ in found:
            if flag[1:] not in seen.get(path, ""):
                return f"{path}: test {flag} does not hold"
    return ""


def _mount_rw(arguments: Sequence[str], facts: NhcFacts) -> str:
    return _mount(arguments, facts, "/(^|,)rw($|,)/")


def _mount_ro(arguments: Sequence[str], facts: NhcFacts) -> str:
    return _mount(arguments, facts, "/(^|,)ro($|,)/")


_FREE = ("MemFree", "Buffers", "Cached")
_RULES: dict[str, Callable[[Sequence[str], NhcFacts], str]] = {
    "check_fs_mount": _mount,
    "check_fs_mount_rw": _mount_rw,
    "check_fs_mount_ro": _mount_ro,
    "check_fs_free": _free,
    "check_fs_used": _used,
    "check_fs_size": _fs_size,
    "check_fs_inodes": _inodes,
    "check_fs_ifree": _inodes_free,
    "check_fs_iused": _inodes_used,
    "check_hw_cpuinfo": _processors,
    "check_hw_eth": _ethernet,
    "check_hw_ib": _infiniband,
    "check_hw_mem": _amount("memory and swap", "MemTotal", "SwapTotal"),
    "check_hw_mem_free": _amount(
        "free memory and swap", "MemFree", "Buffers", "Cached", "SwapFree"
    ),
    "check_hw_physmem": _amount("memory", "MemTotal"),
    "check_hw_physmem_free": _amount("free memory", *_FREE),
    "check_hw_swap": _amount("swap", "SwapTotal"),
    "check_hw_swap_free": _amount("free swap", "SwapFree"),
    "check_ps_service": _service,
    "check_ps_daemon": _daemon,
    "check_ps_loadavg": _load,
    "check_file_test": _files,
}
KNOWN_CHECKS: tuple[str, ...] = tuple(_RULES)
