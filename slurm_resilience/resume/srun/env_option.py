"""Encode the supervisor's variables as one option value that the SPANK plugin decodes. Pure.

The protocol's number, ``;``, and ``NAME=VALUE`` pairs joined by ``;``. Names and values are
percent-encoded: everything but ``A-Za-z0-9_.-`` is ``%XX``. The decoder that
counts is ``spank/env_option.c``; ``decode`` here accepts and refuses the same pairs.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

from slurm_resilience.errors import UsageError

OPTION = "--sres-env"
PROTOCOL = 5
"""It changes with the form of anything that plugin and supervisor tell each other.
`spank/common.h` has the same number."""

# Values that the plugin replaces in each task by the task's own.
NODEID = "@NODEID"
PROCID = "@PROCID"
LOCALID = "@LOCALID"
# Values that it replaces by what the step itself says, whichever nodes Slurm chose for it.
NODELIST = "@NODELIST"
NNODES = "@NNODES"
MASTER_NODE = "@MASTER_NODE"
MASTER_ADDR = "@MASTER_ADDR"
PORT = "@PORT."
"""The job's own number follows."""
ADDRESS = "@"
"""Before the name of a node: the value is its address, and no variable of a task."""

_PLAIN = frozenset((string.ascii_letters + string.digits + "_.-").encode())
_WORD = r"(?:[A-Za-z0-9_.-]|%[0-9A-F]{2})"
_PAIR = re.compile(rf"({_WORD}+)=({_WORD}*)")


def option_value(pairs: Mapping[str, str]) -> str:
    """Return the option's whole value: a plugin that does not know the protocol refuses it."""
    return f"{PROTOCOL};{encode(pairs)}"


def read_option_value(text: str) -> dict[str, str]:
    """Return the pairs of an option's whole value.

    Raises:
        UsageError: it is malformed, or of another protocol.
    """
    number, semicolon, pairs = text.partition(";")
    if not semicolon or number != str(PROTOCOL):
        raise UsageError(f"malformed {OPTION}: {text[:20]!r} is not of protocol {PROTOCOL}")
    return decode(pairs)


def encode(pairs: Mapping[str, str]) -> str:
    """Return ``pairs`` as the option has them; an empty mapping is the empty text."""
    for name, value in pairs.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise UsageError(f"no environment can hold the variable {name!r} with value {value!r}")
    return ";".join(f"{_quote(name)}={_quote(value)}" for name, value in pairs.items())


def decode(text: str) -> dict[str, str]:
    """Return the pairs of a text.

    The last one wins where a name stands twice, as in a task.

    Raises:
        UsageError: it is malformed.
    """
    pairs: dict[str, str] = {}
    for pair in text.split(";") if text else ():
        match = _PAIR.fullmatch(pair)
        if match is None:
            raise UsageError(f"malformed {OPTION}: {pair!r} is not an encoded NAME=VALUE")
        name, value = (_unquote(word) for word in match.groups())
        if "=" in name or "\0" in name or "\0" in value:
            raise UsageError(f"malformed {OPTION}: no environment can hold {pair!r}")
        pairs[name] = value
    return pairs


# An environment is bytes; Python shows those that are no text as surrogates, and back.
def _quote(text: str) -> str:
    data = text.encode("utf-8", "surrogateescape")
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in data)


def _unquote(text: str) -> str:
    data = re.sub(rb"%(..)", lambda match: bytes.fromhex(match[1].decode()), text.encode())
    return data.decode("utf-8", "surrogateescape")
