"""One rank's collectives, out of what PyTorch's Flight Recorder wrote: a pickle or JSON. Pure.

The files come from a job, so a user may have written anything. Nothing but the fields that are
named here is looked at, and each is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard

import msgspec

from slurm_resilience.flight.plain_pickle import NotPlain, load_plain

MAX_CALLS = 20_000
"""Calls of one rank that are looked at, the newest; the recorder keeps 2,000 by default."""
MAX_RANKS = 1_000_000
MAX_MEMBERS = 8 * MAX_RANKS
"""Members of all groups of one dump together; of a text its characters."""
MAX_TEXT_CHARACTERS = 200
MAX_TENSORS, MAX_DIMENSIONS = 32, 16
MAX_GROUPS = 10_000

Progress = Literal["scheduled", "started", "completed"]
_PEERS = re.compile(r"(?P<own>\d{1,7})(?P<way>->|<-)(?P<other>\d{1,7})")
_OF_TORCH = re.compile(r"(?:^|/)torch/|^<|site-packages/")


class GroupKey(msgspec.Struct, frozen=True):
    """A process group. Two groups may have the same name, on different ranks."""

    name: str
    ranks: tuple[int, ...] = ()
    """In the order of the group; empty where the dump does not tell."""
    description: str = ""

    @property
    def title(self) -> str:
        """The group in words."""
        named = f"group {self.name or '0'}"
        return f"{named} ({self.description})" if self.description else named


class CollectiveCall(msgspec.Struct, frozen=True):
    """One call of a collective, or of a send or receive."""

    number: int
    """Counted by each group: all its ranks must call the same one as number N."""
    operation: str
    progress: Progress
    sizes: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Sizes of the inputs, and of the outputs."""
    types: tuple[str, ...] = ()
    peer: int = -1
    """The other rank of a send or receive, by its number in the group; -1: a collective."""
    place: str = ""
    """The line of the program that called it."""


class RankDump(msgspec.Struct, frozen=True):
    """The dump of one rank."""

    rank: int
    node: str = ""
    calls: Mapping[GroupKey, tuple[CollectiveCall, ...]] = {}
    """Its calls in each group, oldest first."""
    entered: Mapping[GroupKey, int] = {}
    """Number of the last collective that this rank called in each group."""


class UnreadableDump(ValueError):
    """A file is no dump; the text says why."""


def read_dump(data: bytes, rank: int, node: str = "") -> RankDump:
    """Return what a file holds.

    Args:
        data: its content.
        rank: the dump does not tell it.
        node: likewise; empty where it is not known.

    Raises:
        UnreadableDump: it is no dump.
    """
    try:
        content = load_plain(data) if data[:1] == b"\x80" else json.loads(data)
    except NotPlain as error:
        raise UnreadableDump(f"no dump of the Flight Recorder: it {_as_verb(str(error))}") from None
    except (ValueError, RecursionError):
        raise UnreadableDump("no dump of the Flight Recorder: neither pickle nor JSON") from None
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list | tuple):
        raise UnreadableDump("no dump of the Flight Recorder: it has no list of entries")
    return _dump(content, rank, node)


def _as_verb(text: str) -> str:
    return text if text.startswith(("asks", "is", "has")) else f"is {text}"


def _dump(content: dict[Any, Any], rank: int, node: str) -> RankDump:
    members = _members(content.get("pg_config"))
    calls: dict[tuple[str, str], list[CollectiveCall]] = {}
    for entry in content["entries"][-MAX_CALLS:]:
        if not isinstance(entry, dict):
            raise UnreadableDump("no dump of the Flight Recorder: an entry is no table")
        named, call = _group_of(entry), _call(entry)
        if call is not None and (named in calls or len(calls) < MAX_GROUPS):
            calls.setdefault(named, []).append(call)
    # The recorder's ring may be written out from its middle.
    ordered = {
        GroupKey(name, members.get(name, ()), description): tuple(
            sorted(made, key=lambda call: call.number)
        )
        for (name, description), made in calls.items()
    }
    return RankDump(rank, node, ordered, _entered(content.get("pg_status"), ordered))


def _members(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group by its name."""
    if not isinstance(config, dict):
        return {}
    members = {}
    left = MAX_MEMBERS
    for key, group in list(config.items())[:MAX_GROUPS]:
        if isinstance(group, dict):
            told = group.get("ranks")
            # A pickle may name one long list in each of its groups.
            left -= len(told) if isinstance(told, str | list | tuple) else 0
            ranks = _ranks(told) if left >= 0 else ()
            for name in {_text(key), _text(group.get("name"))}:
                members[name] = ranks
    if "" in members:
        members.setdefault("0", members[""])  # gloo's default group has its name in the calls only
    return members


def _ranks(value: Any) -> tuple[int, ...]:
    """Read `[0, 1, 2]`, as a list or as a text."""
    if isinstance(value, str):
        value = [int(digits) for digits in re.findall(r"[0-9]{1,7}", value)]
    if not isinstance(value, list | tuple):
        return ()
    ranks = tuple(one for one in value if _is_count(one) and one < MAX_RANKS)
    return ranks if len(set(ranks)) == len(ranks) else ()


def _group_of(entry: Mapping[Any, Any]) -> tuple[str, str]:
    named = entry.get("process_group")
    if isinstance(named, list | tuple) and len(named) == 2:
        description = _text(named[1])
        return _text(named[0]), "" if description == "undefined" else description
    return _text(entry.get("pg_name", entry.get("pg_id", ""))), ""


def _call(entry: Mapping[Any, Any]) -> CollectiveCall | None:
    """Return one entry; None where it has no number."""
    name = _text(entry.get("profiling_name")).rpartition(":")[2]
    operation, _, peers = name.partition(" ")
    is_message = entry.get("is_p2p") is True or operation in ("send", "recv")
    number = entry.get("p2p_seq_id" if is_message else "collective_seq_id")
    if not _is_count(number):
        return None
    match = _PEERS.fullmatch(peers)
    return CollectiveCall(
        number,
        operation or "unnamed",
        _progress(entry),
        (_sizes(entry.get("input_sizes")), _sizes(entry.get("output_sizes"))),
        _types(entry.get("input_dtypes")),
        int(match["other"]) if is_message and match else (MAX_RANKS if is_message else -1),
        _place(entry.get("frames")),
    )


def _progress(entry: Mapping[Any, Any]) -> Progress:
    # gloo leaves each call "scheduled", and says only by this that it is done.
    if entry.get("state") == "completed" or entry.get("retired") is True:
        return "completed"
    return "started" if entry.get("state") == "started" else "scheduled"


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    tensors = value[:MAX_TENSORS] if isinstance(value, list | tuple) else ()
    return tuple(
        tuple(size for size in tensor[:MAX_DIMENSIONS] if isinstance(size, int))
        for tensor in tensors
        if isinstance(tensor, list | tuple)
    )


def _types(value: Any) -> tuple[str, ...]:
    named = value[:MAX_TENSORS] if isinstance(value, list | tuple) else ()
    return tuple(_text(one) for one in named)


def _place(frames: Any) -> str:
    """Return the innermost line that is neither torch's nor another library's."""
    for frame in frames[:100] if isinstance(frames, list | tuple) else ():
        if isinstance(frame, dict) and not _OF_TORCH.search(_text(frame.get("filename"), True)):
            where = f"{_text(frame.get('filename'))}:{_text(frame.get('line'))}"
            return f"{_text(frame.get('name'))} at {where}" if frame.get("filename") else ""
    return ""


def _entered(
    status: Any, calls: Mapping[GroupKey, tuple[CollectiveCall, ...]]
) -> dict[GroupKey, int]:
    """Return the last collective that was called in each group: the ring may have lost it."""
    entered = {}
    by_name = status if isinstance(status, dict) else {}
    for key, made in calls.items():
        told = by_name.get(key.name, by_name.get(int(key.name) if key.name.isdecimal() else ""))
        number = told.get("last_enqueued_collective") if isinstance(told, dict) else None
        if isinstance(number, str) and number.isdecimal() and len(number) < 20:
            number = int(number)
        numbers = [call.number for call in made if call.peer < 0]
        entered[key] = max(numbers, default=0)
        if _is_count(number):
            entered[key] = max(entered[key], number)
    return entered


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 62


def _text(value: Any, is_whole: bool = False) -> str:
    """Return a short text; the end of a file's name says more than its beginning."""
    text = str(value) if isinstance(value, str | int) else ""
    return text if is_whole else text[-MAX_TEXT_CHARACTERS:]
