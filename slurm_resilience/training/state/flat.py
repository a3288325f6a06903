"""One tensor as flat bytes in its own storage, and whether two tensors are laid out alike."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from slurm_resilience.training.state.descriptor import ValueNote
from slurm_resilience.training.state.errors import StateError


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The storage that this process has of a tensor: a DTensor's shard, else the tensor."""
    # A Parameter's `.detach()` is a view of the same storage.
    plain = tensor.detach()
    if not isinstance(plain, DTensor):
        return plain
    with torch.no_grad():
        return plain.to_local()


def note(path: str, tensor: torch.Tensor) -> ValueNote:
    """Describe a tensor.

    Raises:
        StateError: it has no bytes of its own (meta, sparse).
    """
    mine = local(tensor)
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


def view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, uint8 of shape (bytes,): a view if it is dense in memory, else a copy."""
    mine = local(tensor)
    if not mine.numel():
        return torch.empty(0, dtype=torch.uint8, device=mine.device)
    if mine.is_contiguous() and not mine.is_conj() and not mine.is_neg():
        flat = mine.view(-1)
    elif _dense(mine):
        flat = mine.as_strided((mine.numel(),), (1,))
    else:
        flat = mine.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(torch.uint8)


def fits(tensor: torch.Tensor, there: ValueNote) -> str:
    """Why a tensor cannot take the bytes that a note describes; empty: it can."""
    whole, placements = _sharding(tensor)
    mine = local(tensor)
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


def alike(tensor: torch.Tensor, there: ValueNote) -> bool:
    """Whether the bytes can land in the tensor's own storage: dense, and in the same order."""
    mine = local(tensor)
    return _dense(mine) and _order(mine) == there.stride


def dtype(there: ValueNote) -> torch.dtype:
    """The torch.dtype that a note names. StateError if this torch has none of that name."""
    found: Any = getattr(torch, there.dtype, None)
    if not isinstance(found, torch.dtype):
        raise StateError(f"{there.path}: this torch has no dtype {there.dtype}")
    return found


def empty(there: ValueNote, device: torch.device) -> torch.Tensor:
    """A tensor without content, laid out as a note says."""
    return torch.empty_strided(there.shape, there.stride, dtype=dtype(there), device=device)


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
    """Whether its elements fill one stretch of memory, each once."""
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
