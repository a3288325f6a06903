"""A batch as bytes, and back: tensors and arrays lie raw, so that they can be read where they lie.

A packed batch is a preamble (magic, checksums, lengths), a header (what it is, as msgpack) and the
raw bytes of each tensor, aligned to 64. The checksum covers everything: crc32 reads some GB/s, far
more than a dataset delivers, and it also finds what a length cannot (a file whose pages never
reached the disk before a power loss). Tensors and plain values never go through pickle; only
objects of other kinds do, and only in files that no other user could have written.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

MAGIC = b"SRESB001"
_PREAMBLE = struct.Struct("<8sIIQQ")
_ALIGN = 64
_SCALARS = (type(None), bool, int, float, str)

Scalar = None | bool | int | float | str


class Raw(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """A tensor or an array of ``dtype`` and ``shape``, ``order`` being its dimensions in memory."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    at: int
    numpy: bool


class Plain(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    value: Scalar


class Flat(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """A list or tuple of plain values alone."""

    values: tuple[Scalar, ...]
    as_tuple: bool


class Many(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    items: tuple[Node, ...]
    as_tuple: bool


class Named(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    keys: tuple[Scalar, ...]
    values: tuple[Node, ...]


class Foreign(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """Something else, pickled."""

    at: int
    size: int


Node = Raw | Plain | Flat | Many | Named | Foreign


class Header(msgspec.Struct, frozen=True):
    key: str
    kind: str
    note: dict[str, Any]
    tree: Node


class Packed(NamedTuple):
    """The parts of a file, in order; ``size`` is their length in bytes."""

    parts: list[bytes | memoryview]
    size: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


class _Parts:
    """Collects raw bytes, each from an aligned offset on."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self.size = 0

    def add(self, part: bytes | memoryview) -> int:
        if gap := -self.size % _ALIGN:
            self.parts.append(bytes(gap))
            self.size += gap
        at = self.size
        self.parts.append(part)
        self.size += len(part)
        return at


def pack(key: str, kind: str, note: dict[str, Any], batch: Any) -> Packed:
    """Lay out a batch.

    Args:
        key: what the batch is; ``unpack`` refuses a file of another key.
        note: plain values that go with it.

    Raises:
        Exception: something in the batch cannot be pickled.
    """
    raw = _Parts()
    tree = _node(batch, raw)
    try:
        header = _encoder.encode(Header(key, kind, note, tree))
    except (OverflowError, UnicodeEncodeError):  # an int beyond 64 bits, half a surrogate pair
        raw = _Parts()
        tree = _pickled(batch, raw)
        header = _encoder.encode(Header(key, kind, note, tree))
    gap = bytes(-(_PREAMBLE.size + len(header)) % _ALIGN)
    size = _PREAMBLE.size + len(header) + len(gap) + raw.size
    body = 0
    for part in raw.parts:
        body = zlib.crc32(part, body)
    head = zlib.crc32(header, zlib.crc32(struct.pack("<IQQ", body, len(header), size)))
    preamble = _PREAMBLE.pack(MAGIC, head, body, len(header), size)
    return Packed([preamble, header, gap, *raw.parts], size)


def _node(value: Any, raw: _Parts) -> Node:
    kind = type(value)
    if kind in _SCALARS:
        return Plain(value)
    if kind is list or kind is tuple:
        if all(type(item) in _SCALARS for item in value):
            return Flat(tuple(value), kind is tuple)
        return Many(tuple(_node(item, raw) for item in value), kind is tuple)
    if kind is dict and all(type(name) in _SCALARS for name in value):
        return Named(tuple(value), tuple(_node(item, raw) for item in value.values()))
    if kind is torch.Tensor and _lies_plain(value):
        return _tensor(value, raw)
    if kind is np.ndarray and _is_plain(value.dtype):
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return Raw(value.dtype.str, value.shape, (), raw.add(flat.data), True)
    return _pickled(value, raw)


def _pickled(value: Any, raw: _Parts) -> Foreign:
    data = pickle.dumps(value, protocol=5)
    return Foreign(raw.add(data), len(data))


def _lies_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return not dtype.hasobject and dtype.itemsize > 0 and np.dtype(dtype.str) == dtype


def _tensor(tensor: torch.Tensor, raw: _Parts) -> Raw:
    """Keep the order of dimensions in memory, so that channels-last images stay channels-last."""
    dims = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if tensor.is_contiguous() or not tensor.permute(dims).is_contiguous():
        dims = ()
    laid = tensor.permute(dims) if dims else tensor.contiguous()
    data = laid.reshape(-1).view(torch.uint8).numpy().data
    return Raw(str(tensor.dtype)[6:], tuple(tensor.shape), dims, raw.add(data), False)


class Unpacked(NamedTuple):
    kind: str
    note: dict[str, Any]
    batch: Any


def unpack(key: str, data: Any, *, verify: bool = True) -> Unpacked | None:
    """Read a batch where it lies: tensors and arrays are views on ``data``.

    Args:
        key: what must be in it.
        data: a writable buffer (a private mapping, a bytearray), 64-aligned for speed.
        verify: check the checksum of the raw bytes too, not of the header alone.

    Returns:
        None: this is not a whole batch of that key.
    """
    view = memoryview(data)
    if len(view) < _PREAMBLE.size:
        return None
    magic, head, body, length, size = _PREAMBLE.unpack_from(view)
    if magic != MAGIC or size != len(view) or length > size - _PREAMBLE.size:
        return None
    end = _PREAMBLE.size + length
    header = view[_PREAMBLE.size : end]
    if zlib.crc32(header, zlib.crc32(struct.pack("<IQQ", body, length, size))) != head:
        return None
    start = end + -end % _ALIGN
    if verify and zlib.crc32(view[start:]) != body:
        return None
    read = _decoder.decode(header)
    if read.key != key:
        return None
    return Unpacked(read.kind, read.note, _value(read.tree, data, start))


def _value(node: Node, data: Any, start: int) -> Any:
    match node:
        case Plain(value):
            return value
        case Flat(values, as_tuple):
            return values if as_tuple else list(values)
        case Many(items, as_tuple):
            as_type: Callable[[Any], Any] = tuple if as_tuple else list
            return as_type(_value(item, data, start) for item in items)
        case Named(keys, nodes):
            return dict(zip(keys, (_value(item, data, start) for item in nodes), strict=True))
        case Foreign(at, size):
            return pickle.loads(memoryview(data)[start + at : start + at + size])
        case Raw():
            return _array(node, data, start) if node.numpy else _view(node, data, start)


def _array(node: Raw, data: Any, start: int) -> Any:
    dtype, count = np.dtype(node.dtype), prod(node.shape)
    if not count:
        return np.empty(node.shape, dtype)
    return np.frombuffer(data, dtype, count, start + node.at).reshape(node.shape)


def _view(node: Raw, data: Any, start: int) -> torch.Tensor:
    dtype, count = getattr(torch, node.dtype), prod(node.shape)
    shape = [node.shape[dim] for dim in node.order] or node.shape
    if not count:
        return torch.empty(node.shape, dtype=dtype, device="cpu")
    laid = torch.frombuffer(data, dtype=dtype, count=count, offset=start + node.at).reshape(shape)
    if not node.order:
        return laid
    back = sorted(range(len(node.order)), key=lambda dim: node.order[dim])
    return laid.permute(back)
