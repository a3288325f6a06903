"""The records of a DirStore's log: how they look in the file, and what each one does. Pure.

Everybody applies the same records in the same order to an empty dictionary, so everybody has the
same values and the same answers; the place in the file is what decides who came first.
"""

from __future__ import annotations

import struct
import zlib
from typing import Literal

import msgspec

Answer = bytes | int | bool | None

_MAGIC = b"\xf5SR\n"
_HEAD = struct.Struct("<4sII")
"""Magic, length of the body in bytes, CRC-32 of the body."""


class Op(msgspec.Struct, frozen=True, array_like=True):
    """One change of one key."""

    kind: Literal["set", "add", "swap", "append", "delete"]
    key: str
    value: bytes = b""
    expected: bytes = b""
    """swap: what must stand there; empty: nothing may stand there."""
    amount: int = 0


class Record(msgspec.Struct, frozen=True, array_like=True):
    """What one call changes: all of it or nothing."""

    writer: bytes
    number: int
    """Counts the writer's records, so that it finds the answer to its own."""
    ops: tuple[Op, ...]


class BadNumber(Exception):
    """`add` on a value that is no number."""


_body = msgspec.msgpack.Encoder()
_record = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    """The bytes of a record, to be appended with a single write."""
    body = _body.encode(record)
    return _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def decode(data: bytes, start: int = 0) -> tuple[list[Record], int]:
    """Every whole record from ``start`` on, up to the first that is not (or not yet) whole.

    Returns:
        the records, and the position after the last of them.
    """
    found = []
    while (one := _at(data, start)) is not None:
        found.append(one[0])
        start = one[1]
    return found, start


def skip(data: bytes, start: int) -> int:
    """Where the next whole record begins after one that was cut short; -1: there is none.

    A writer that is killed inside of its write, or finds the disk full, leaves half a record.
    """
    start = data.find(_MAGIC, start + 1)
    while start >= 0 and _at(data, start) is None:
        start = data.find(_MAGIC, start + 1)
    return start


def _at(data: bytes, start: int) -> tuple[Record, int] | None:
    if len(data) - start < _HEAD.size:
        return None
    magic, length, crc = _HEAD.unpack_from(data, start)
    body = data[start + _HEAD.size : start + _HEAD.size + length]
    if magic != _MAGIC or len(body) < length or zlib.crc32(body) != crc:
        return None
    return _record.decode(body), start + _HEAD.size + length


def apply(values: dict[str, bytes], op: Op) -> Answer:
    """Do one change.

    Returns:
        the call's answer, as `torch.distributed.TCPStore` gives it: `add` the new number, `swap`
        what stands there now (the expected value where nothing does), `delete` whether there was
        something.

    Raises:
        BadNumber: `add` to something else than a number; nothing is changed then.
    """
    now = values.get(op.key)
    if op.kind == "set":
        values[op.key] = op.value
    elif op.kind == "append":
        values[op.key] = (now or b"") + op.value
    elif op.kind == "delete":
        return values.pop(op.key, None) is not None
    elif op.kind == "add":
        try:
            total = int(b"0" if now is None else now) + op.amount
        except ValueError:
            raise BadNumber from None
        values[op.key] = b"%d" % total
        return total
    else:
        if now == op.expected or (now is None and not op.expected):
            values[op.key] = now = op.value
        return op.expected if now is None else now
    return None
