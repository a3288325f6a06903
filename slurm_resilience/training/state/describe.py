"""Describe a state: which tensors there are, in which order and layout, and every other value.

A descriptor is plain MessagePack: containers are ``[tag, ...]``, so tuples, sets, integer keys and
long integers come back as they were. A value that MessagePack cannot hold (an enum, a function of a
module) is pickled. Unpickling runs code of the sender's choice. A descriptor comes from this
process itself, or over the training's process group: that is as safe as torch's own object
collectives, which trust the network in the same way.
"""

from __future__ import annotations

import functools
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from slurm_resilience.training.state.errors import StateError

BUFFERS = "buffers"
"""Key of a module's buffers among its values."""


class ValueNote(msgspec.Struct, frozen=True, array_like=True):
    """One tensor."""

    path: str
    shape: tuple[int, ...]
    """Shape of the local shard, for a DTensor."""
    stride: tuple[int, ...]
    dtype: str
    device: str
    """Device type: ``cpu``, ``cuda``."""
    bytes: int
    whole: tuple[int, ...] | None = None
    """Shape of the whole DTensor; None: a plain tensor."""
    placements: str = ""
    """Placements of a DTensor, with the shape of its mesh."""

    @property
    def may_differ(self) -> bool:
        """True for a buffer: ranks that hold the same state may have others, since a forward makes
        and enlarges them."""
        return self.path.split(".", 2)[1:2] == [BUFFERS]


class StateDescriptor(msgspec.Struct, frozen=True):
    """Everything about a state but the bytes of its tensors."""

    notes: tuple[ValueNote, ...]
    """The tensors, in the order in which they are sent."""
    objects: dict[str, Any]
    """Tracked name → its values, encoded; tensors stand as numbers into `notes`."""
    rng: Any = None
    """Random states, encoded."""
    on: dict[str, tuple[str, ...]] | None = None
    """`requires_grad` and train mode: where they are on. None: not told."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(note.bytes for note in self.notes)

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)


def to_bytes(descriptor: StateDescriptor) -> bytes:
    """Encode a descriptor."""
    return msgspec.msgpack.encode(descriptor)


def from_bytes(data: bytes | bytearray | memoryview) -> StateDescriptor:
    """Decode a descriptor. StateError if the bytes are none."""
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
    """Return the value that `encode` was given, with what `find` gives in place of the tensors."""
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
    """Return bytes that are equal for equal values: keys sorted, without tensors (their bytes are
    summed apart) and without pickles (equal values may pickle differently)."""
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


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the storage that this process has of a tensor: a DTensor's shard, else the tensor."""
    # A Parameter's `.detach()` is a view of the same storage.
    plain = tensor.detach()
    if not isinstance(plain, DTensor):
        return plain
    with torch.no_grad():
        return plain.to_local()


def describe_tensor(path: str, tensor: torch.Tensor) -> ValueNote:
    """Describe a tensor.

    Raises:
        StateError: it has no bytes of its own (meta, sparse).
    """
    mine = local_shard(tensor)
    if mine.is_meta or mine.layout is not torch.strided:
        what = "has no data yet (meta device)" if mine.is_meta else f"is {mine.layout}"
        raise StateError(f"{path} {what}: only dense tensors with data can be tracked")
    whole, placements = _sharding(tensor)
    return ValueNote(
        path=path,
        shape=tuple(mine.shape),
        stride=_order(mine),
        dtype=_dtype_name(mine.dtype),
        device=mine.device.type,
        bytes=mine.numel() * mine.element_size(),
        whole=whole,
        placements=placements,
    )


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, uint8 of shape (bytes,): a view of dense memory, else a copy."""
    mine = local_shard(tensor)
    if not mine.numel():
        return torch.empty(0, dtype=torch.uint8, device=mine.device)
    if mine.is_contiguous() and not mine.is_conj() and not mine.is_neg():
        flat = mine.view(-1)
    elif _dense(mine):
        flat = mine.as_strided((mine.numel(),), (1,))
    else:
        flat = mine.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8)


def mismatch(tensor: torch.Tensor, there: ValueNote) -> str:
    """Say why a tensor cannot take the bytes that a note describes; empty: it can."""
    whole, placements = _sharding(tensor)
    mine = local_shard(tensor)
    pairs = (
        ("whole shape", there.whole, whole),
        ("placements", there.placements, placements),
        ("local shape", there.shape, tuple(mine.shape)),
        ("dtype", there.dtype, _dtype_name(mine.dtype)),
    )
    for label, yours, ours in pairs:
        if yours != ours:
            return f"{label} {yours} there, {ours} here"
    return ""


def same_layout(tensor: torch.Tensor, there: ValueNote) -> bool:
    """Tell whether the bytes can land in the tensor's own storage: dense, and in the same order."""
    mine = local_shard(tensor)
    return _dense(mine) and _order(mine) == there.stride


def dtype_of(there: ValueNote) -> torch.dtype:
    """Return the torch.dtype that a note names. StateError if this torch has none of that name."""
    found: Any = getattr(torch, there.dtype, None)
    if not isinstance(found, torch.dtype):
        raise StateError(f"{there.path}: this torch has no dtype {there.dtype}")
    return found


def empty_tensor(there: ValueNote, device: torch.device) -> torch.Tensor:
    """Return a tensor without content, laid out as a note says."""
    return torch.empty_strided(there.shape, there.stride, dtype=dtype_of(there), device=device)


@functools.cache
def _dtype_name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _sharding(tensor: torch.Tensor) -> tuple[tuple[int, ...] | None, str]:
    """Shape of the whole, and how it is cut up; None and empty for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return None, ""
    # How many replicas there are does not matter: a world that shrank has fewer.
    cuts = [
        f"{placement} over {size} ranks"
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        if not placement.is_replicate()
    ]
    return tuple(tensor.shape), ", ".join(cuts) or "whole"


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides as sent: a tensor with gaps is sent contiguous; sizes of 1 have no stride."""
    if _dense(tensor):
        return _settled(tensor)
    return _settled(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def _settled(tensor: torch.Tensor) -> tuple[int, ...]:
    # The stride of a dimension of size 1 means nothing, and differs between equal layouts.
    if 1 not in tensor.shape:
        return tensor.stride()
    return tuple(s if n > 1 else 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _dense(tensor: torch.Tensor) -> bool:
    """Tell whether its elements fill one stretch of memory, each once."""
    if tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Capture:
    """A description, and the live bytes that belong to it; nothing is copied."""

    descriptor: StateDescriptor
    views: tuple[torch.Tensor, ...]
    """uint8 of shape (bytes,), one for each of the descriptor's notes."""


class TensorSlot(NamedTuple):
    """Stands for a tensor in a decoded descriptor."""

    number: int


@dataclass
class Landing:
    """A place for each tensor of a descriptor, and the work that remains when all have arrived."""

    descriptor: StateDescriptor
    views: list[torch.Tensor | None] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    """Run in order when all bytes are there."""
    made: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.views = [None] * len(self.descriptor.notes)

    def into(self, slot: TensorSlot, tensor: torch.Tensor, path: str) -> torch.Tensor:
        """Let a tensor's bytes land in the one that this process uses.

        Raises:
            StateError: it has another shape, type or sharding.
        """
        note = self.descriptor.notes[slot.number]
        if trouble := mismatch(tensor, note):
            raise StateError(
                f"{path} differs between peer and here: {trouble}; "
                "every rank must build the same model and optimizer"
            )
        if self.views[slot.number] is not None:
            return tensor
        if same_layout(tensor, note):
            self.views[slot.number] = byte_view(tensor)
        else:
            # Another memory order (channels_last on one side only): lands beside, then is copied.
            beside = empty_tensor(note, local_shard(tensor).device)
            self.views[slot.number] = byte_view(beside)
            self.after.append(lambda: _copy(local_shard(tensor), beside))
        self.made[slot.number] = tensor
        return tensor

    def make(self, slot: TensorSlot, like: torch.Tensor | None, path: str) -> torch.Tensor:
        """Make a tensor that this process does not have yet, on the device of a similar one."""
        if slot.number in self.made:
            return self.made[slot.number]
        note = self.descriptor.notes[slot.number]
        device = torch.device(note.device)
        if like is not None and note.device != "cpu":
            device = local_shard(like).device
        fresh = empty_tensor(note, device)
        if note.whole is not None:
            fresh = _shard(fresh, note, like, path)
        return self.into(slot, fresh, path)

    def place(self, node: Any, mine: Any, like: torch.Tensor | None, path: str) -> Any:
        """Give every slot in a value a tensor: the one that stands at the same place in this
        process's value if it fits, else a new one.

        Args:
            node: a decoded value with slots.
            mine: this process's value at that place; None: it has none.
            like: a tensor whose device and sharding a new one takes.
            path: where, for messages.
        """
        if isinstance(node, TensorSlot):
            note = self.descriptor.notes[node.number]
            if isinstance(mine, torch.Tensor) and not mismatch(mine, note):
                return self.into(node, mine, path)
            near = mine if isinstance(mine, torch.Tensor) else like
            return self.make(node, near if like is None else like, path)
        if isinstance(node, dict):
            old = mine if isinstance(mine, dict) else {}
            new = {k: self.place(v, old.get(k), like, f"{path}.{k}") for k, v in node.items()}
            if type(node) is dict:
                return new
            for key, value in new.items():
                node[key] = value
            return node
        if type(node) in (list, tuple):
            items = list(mine) if isinstance(mine, list | tuple) else []
            items += [None] * (len(node) - len(items))
            return type(node)(
                self.place(v, items[n], like, f"{path}.{n}") for n, v in enumerate(node)
            )
        return node

    def ready(self) -> list[torch.Tensor]:
        """Return the views to receive into, in the descriptor's order."""
        missing = [
            n for n, view in zip(self.descriptor.notes, self.views, strict=True) if view is None
        ]
        if missing:
            raise StateError(f"{missing[0].path} has no place here")
        return [view for view in self.views if view is not None]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _shard(
    shard: torch.Tensor, note: ValueNote, like: torch.Tensor | None, path: str
) -> torch.Tensor:
    if not isinstance(like, DTensor):
        raise StateError(f"{path} is sharded at the peer, and its parameter is not sharded here")
    assert note.whole is not None
    whole = torch.Size(note.whole)
    stride = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=whole, stride=stride
    )
