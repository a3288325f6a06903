"""State without its tensors' bytes: what there is, in which order, and every other value.

Values become plain MessagePack: containers are ``[tag, ...]``, so tuples, sets, integer keys and
long integers come back as they were. What MessagePack cannot say (an enum, a function of a module)
is pickled. Unpickling runs code of the sender's choice. A skeleton comes from this process itself,
or over the training's process group: that is as safe as torch's own object collectives, which trust
the network in the same way.
"""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from slurm_resilience.training.state.errors import StateError


class ValueNote(msgspec.Struct, frozen=True, array_like=True):
    """One tensor."""

    path: str
    shape: tuple[int, ...]
    """Of the local shard, for a DTensor."""
    stride: tuple[int, ...]
    dtype: str
    device: str
    """Device type: ``cpu``, ``cuda``."""
    bytes: int
    whole: tuple[int, ...] | None = None
    """Shape of the whole DTensor; None: a plain tensor."""
    placements: str = ""
    """Of a DTensor, with the shape of its mesh."""


class StateDescriptor(msgspec.Struct, frozen=True):
    """Everything about a state but the bytes of its tensors."""

    notes: tuple[ValueNote, ...]
    """The tensors, in the order in which they are sent."""
    objects: dict[str, Any]
    """Tracked name → its values, encoded; tensors stand as numbers into `notes`."""
    rng: Any = None
    """Random states, encoded."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(note.bytes for note in self.notes)

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)


def pack(skeleton: StateDescriptor) -> bytes:
    """As bytes."""
    return msgspec.msgpack.encode(skeleton)


def unpack(data: bytes | bytearray | memoryview) -> StateDescriptor:
    """From bytes. StateError if they are not a skeleton."""
    try:
        return msgspec.msgpack.decode(data, type=StateDescriptor)
    except msgspec.MsgspecError as error:
        raise StateError(f"a peer's description of its state is not readable: {error}") from None


Keep = Callable[[str, torch.Tensor], int]
"""Takes in a tensor under its path, and gives its number."""


def encode(value: Any, path: str, keep: Keep) -> Any:
    """Turn a value into what MessagePack can say.

    Args:
        value: anything that a state_dict may contain.
        path: where it stands, for messages.
        keep: what to do with a tensor.

    Raises:
        StateError: it contains something that cannot be pickled.
    """
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else ["i", str(value)]
    if kind in _SEQUENCES:
        items = [encode(item, f"{path}.{n}", keep) for n, item in enumerate(value)]
        return [_SEQUENCES[kind], items]
    if kind in _MAPPINGS:
        pairs = [
            (encode(key, path, keep), encode(item, f"{path}.{key}", keep))
            for key, item in value.items()
        ]
        return [_MAPPINGS[kind], pairs]
    if isinstance(value, torch.Tensor):
        return ["T", keep(path, value)]
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return ["n", value.dtype.str, list(value.shape), value.tobytes()]
    try:
        return ["p", pickle.dumps(value)]
    except Exception as error:
        raise StateError(
            f"{path} cannot be moved to a peer: a {kind.__name__} that cannot be pickled ({error})"
        ) from None


def decode(node: Any, find: Callable[[int], Any]) -> Any:
    """The value that `encode` was given, with what `find` gives in place of the tensors."""
    if not isinstance(node, list | tuple):
        return node
    tag, *rest = node
    if tag == "i":
        return int(rest[0])
    if tag in _FROM_SEQUENCE:
        return _FROM_SEQUENCE[tag](decode(item, find) for item in rest[0])
    if tag in _FROM_MAPPING:
        pairs = [(decode(key, find), decode(item, find)) for key, item in rest[0]]
        made = _FROM_MAPPING[tag]()
        # Counter's constructor would count the pairs.
        made.update(dict(pairs))
        return made
    if tag == "T":
        return find(rest[0])
    if tag == "n":
        return np.frombuffer(rest[2], dtype=rest[0]).reshape(rest[1]).copy()
    if tag == "p":
        return pickle.loads(rest[0])
    raise StateError(f"a peer's description of its state has an unknown tag {tag!r}")


def plain(node: Any) -> bytes:
    """Bytes that are equal for equal values: keys sorted, without tensors (their bytes are summed
    apart) and without pickles (equal values may pickle differently)."""
    return msgspec.msgpack.encode(_sorted(node))


def _sorted(node: Any) -> Any:
    if not isinstance(node, list | tuple):
        return node
    tag = node[0]
    if tag in ("T", "p"):
        return [tag]
    if tag in _FROM_SEQUENCE:
        items = [_sorted(item) for item in node[1]]
        return [tag, sorted(items, key=msgspec.msgpack.encode) if tag in ("s", "f") else items]
    if tag in _FROM_MAPPING:
        pairs = [(_sorted(key), _sorted(item)) for key, item in node[1]]
        return [tag, sorted(pairs, key=lambda pair: msgspec.msgpack.encode(pair[0]))]
    return node


_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "f", torch.Size: "z"}
_MAPPINGS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "c"}
_FROM_SEQUENCE: dict[str, Callable[..., Any]] = {
    **{tag: kind for kind, tag in _SEQUENCES.items()},
    "z": lambda items: torch.Size(list(items)),
}
_FROM_MAPPING: dict[str, Callable[[], Any]] = {tag: kind for kind, tag in _MAPPINGS.items()}
