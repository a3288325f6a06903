"""Read a pickle that holds plain data, and nothing else. Pure.

A pickle is a program. Python's own reader runs it, and restricting the classes that it may look up
leaves it open to programs that fill the memory (one opcode can ask for a table of billions of
entries). This reader knows the opcodes that make plain data; each other one ends it. So nothing in
a file can call anything, and what it costs is bounded by the file's length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

MAX_OBJECTS = 20_000_000
"""Objects in one file: one of a single byte costs sixty."""
MAX_INTEGER_BYTES = 64
_SAFE_KEYS = range(-(2**60), 2**60 + 1)
"""Each of these has a hash of its own, or shares it with few."""


class NotPlain(ValueError):
    """The bytes are no pickle of plain data; the text says why."""


_MARK = object()
_CODE_OPCODES = frozenset(b"cRbio\x81\x82\x83\x84\x92\x93PQ")
"""Those that look up, make or call something."""


def load_plain(data: bytes) -> Any:
    """Return the content of a pickle: dicts, lists, tuples, texts, numbers, truth values, None.

    Raises:
        NotPlain: it holds anything else, is damaged, or too large.
    """
    try:
        return _Machine(data).run()
    except (IndexError, KeyError, struct.error, TypeError, UnicodeDecodeError):
        raise NotPlain("damaged or cut short") from None


class _Machine:
    """The stack machine of one pickle."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        made = 0
        while True:
            opcode = self._data[self._at]
            self._at += 1
            if opcode == 0x2E:  # STOP
                return self._stack.pop()
            step = _STEPS.get(opcode)
            if step is None:
                asks = "asks to run code" if opcode in _CODE_OPCODES else "is no plain pickle"
                raise NotPlain(f"{asks} (opcode 0x{opcode:02x} at byte {self._at - 1})")
            step(self)
            made += 1
            if made > MAX_OBJECTS:
                raise NotPlain(f"has more than {MAX_OBJECTS} objects")

    # -- arguments ---------------------------------------------------------------------------

    def take(self, size: int) -> bytes:
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise IndexError
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    # -- what the opcodes do -----------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def text(self, form: str) -> None:
        self.push(self.take(self.number(form)).decode("utf-8", "surrogatepass"))

    def raw(self, form: str) -> None:
        self.push(self.take(self.number(form)))

    def integer(self, form: str) -> None:
        size = self.number(form)
        if not 0 <= size <= MAX_INTEGER_BYTES:
            raise NotPlain(f"has a number of {size} bytes")
        self.push(int.from_bytes(self.take(size), "little", signed=True))

    def since_mark(self) -> list[Any]:
        stack = self._stack
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is _MARK:
                items = stack[index + 1 :]
                del stack[index:]
                return items
        raise IndexError

    def gather(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count or _MARK in items:
            raise IndexError
        self._stack[-count:] = [items]

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):
                raise NotPlain("has a key that is neither a text nor a number")
            # Others can be chosen so that a table of them takes hours.
            if isinstance(key, int) and key not in _SAFE_KEYS:
                raise NotPlain("has a number of more than 60 bits as key")
            target[key] = value

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        self.push(self._memo[index])

    def pop_last(self, count: int) -> list[Any]:
        items = [self._stack.pop() for _ in range(count)][::-1]
        if any(item is _MARK for item in items):
            raise IndexError
        return items


_STEPS: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda m: _ignore(m.take(1)),  # PROTO
    0x95: lambda m: _ignore(m.take(8)),  # FRAME
    ord("("): lambda m: m.push(_MARK),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): lambda m: m.push(m.number("<i")),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    ord("G"): lambda m: m.push(m.number(">d")),
    0x8A: lambda m: m.integer("<B"),  # LONG1
    0x8B: lambda m: m.integer("<i"),  # LONG4
    ord("X"): lambda m: m.text("<I"),
    0x8C: lambda m: m.text("<B"),
    0x8D: lambda m: m.text("<Q"),
    ord("B"): lambda m: m.raw("<I"),
    ord("C"): lambda m: m.raw("<B"),
    0x8E: lambda m: m.raw("<Q"),
    ord("]"): lambda m: m.push([]),
    ord("}"): lambda m: m.push({}),
    ord(")"): lambda m: m.push(()),
    ord("a"): lambda m: m.append(m.pop_last(1)),
    ord("e"): lambda m: m.append(m.since_mark()),
    ord("s"): lambda m: m.set_items(m.pop_last(2)),
    ord("u"): lambda m: m.set_items(m.since_mark()),
    ord("t"): lambda m: m.push(tuple(m.since_mark())),
    0x85: lambda m: m.gather(1),
    0x86: lambda m: m.gather(2),
    0x87: lambda m: m.gather(3),
    ord("q"): lambda m: m.put(m.number("<B")),
    ord("r"): lambda m: m.put(m.number("<I")),
    0x94: lambda m: m.put(len(m._memo)),  # MEMOIZE
    ord("h"): lambda m: m.get(m.number("<B")),
    ord("j"): lambda m: m.get(m.number("<I")),
}


def _ignore(_: bytes) -> None:
    """Nothing depends on the protocol's number, or on the length of a frame."""
