"""The cheap protection of every step: back to the last committed one without copies of parameters.

Forward and backward change gradients, random states and buffers, but no parameter. So a mark keeps
the random states and the buffers (big ones only if they changed since the mark before), and notes
the parameters' version counters, which tell whether anything changed a parameter after all.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
)

from slurm_resilience.training import compat
from slurm_resilience.training.state import adapters, describe, rng
from slurm_resilience.training.state.generators import TrackedGenerator

SMALL_BYTES = 1 << 16
"""Buffers up to this size are copied at every mark: batch_norm changes its running statistics
without counting it in the tensor's version, so versions can be trusted for bigger ones only."""
CLOSE_LOOKS = 3
"""Marks at which bigger ones are compared with their copies: a codebook that forward moves through
`.data` is not counted either, and is copied at every mark from then on."""


SAMPLE_BYTES = 1 << 12
"""So much of each parameter is copied where its value is kept with a mark."""

SAMPLED = 32
"""Parameters of which a piece is kept with every mark."""
PIECE_BYTES = 1 << 6
"""So many bytes of each: a line of the processor's cache, and no two halves."""


class _Buffers:
    """All buffers of some modules, and their values at the mark."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.came = False
        """A module was given one since `places` were read, as some forwards do."""
        self._find()
        note = weakref.WeakMethod(self._note)
        for register in (
            register_module_buffer_registration_hook,
            register_module_module_registration_hook,
        ):
            # What such a hook returns would take the place of what is registered.
            handle = register(lambda module, *_: (noted := note()) and noted(module))
            weakref.finalize(self, handle.remove)
        self._seen: list[torch.Tensor | None] = []
        self._small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        """In use, kept."""
        self._big: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions: list[int] = []
        self._looks = CLOSE_LOOKS
        self._uncounted: set[int] = set()
        """Numbers of big ones that are written to in a way that torch does not count."""

    @torch.no_grad()
    def mark(self) -> None:
        try:
            now = [owner[key] for owner, key in self.places] if not self.came else []
        except KeyError:  # one was deleted
            self.came = True
        if self.came:
            self._find()
            now = [owner[key] for owner, key in self.places]
        if len(now) != len(self._seen) or any(
            a is not b for a, b in zip(now, self._seen, strict=True)
        ):
            self._begin(now)
            return
        if self._small[0]:
            try:
                compat.copy_all(self._small[1], self._small[0])
            except RuntimeError:  # `buffer.data = other`, of another shape
                self._begin(now)
                return
        if self._looks:
            self._look_closely()
        for number, version in self._changed():
            used, kept = self._big[number]
            describe.local_shard(kept).copy_(describe.local_shard(used))
            self._versions[number] = version

    def rollback(self) -> None:
        places = compat.buffer_places(self._modules) if self.came else []
        known = {(id(owner), key) for owner, key in self.places}
        for owner, key in places:
            if id(owner) in self._tables and (id(owner), key) not in known:
                del owner[key]  # the step that is repeated makes it anew
        for (owner, key), seen in zip(self.places, self._seen, strict=True):
            if owner.get(key) is not seen or key not in owner:
                owner[key] = seen
        for used, kept in zip(*self._small, strict=True):
            if used.shape != kept.shape:
                used.data = kept.clone()
        if self._small[0]:
            compat.copy_all(self._small[0], self._small[1])
        if self._looks:
            self._look_closely()
        for number, _ in self._changed():
            used, kept = self._big[number]
            describe.local_shard(used).copy_(describe.local_shard(kept))
        self._versions = compat.versions([used for used, _ in self._big])

    def kept(self) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Return the buffer at each place, and its value at the mark."""
        tensors = [one for one in self._seen if one is not None]
        small = [one for one in tensors if describe.local_shard(one).nbytes <= SMALL_BYTES]
        values = {id(one): kept for one, kept in zip(small, self._small[1], strict=True)}
        values |= {id(one): kept for one, kept in self._big}
        return [(one, values.get(id(one))) for one in self._seen]

    def _find(self) -> None:
        parts = [part for module in self._modules for part in module.modules()]
        self._parts = {id(part) for part in parts}
        self._tables = {id(part._buffers) for part in parts}
        self.places, self.came = compat.buffer_places(self._modules), False

    def _note(self, module: nn.Module) -> None:
        self.came = self.came or id(module) in self._parts

    def _changed(self) -> list[tuple[int, int]]:
        """Return number and present version of each big buffer that was written to, or may be."""
        now = compat.versions([used for used, _ in self._big])
        return [
            (n, version)
            for n, version in enumerate(now)
            if version != self._versions[n] or n in self._uncounted
        ]

    def _look_closely(self) -> None:
        """Find big buffers that have changed, and whose version has not."""
        self._looks -= 1
        counted = {number for number, _ in self._changed()}
        for number, (used, kept) in enumerate(self._big):
            if number not in counted and not _is_same(used, kept):
                self._uncounted.add(number)

    def _begin(self, now: list[torch.Tensor | None]) -> None:
        """Copy everything, because a buffer is another tensor than before."""
        self._seen = now
        tensors = [one for one in now if one is not None]
        small = [_memory(one) for one in tensors]
        small = [one for one in small if one.nbytes <= SMALL_BYTES]
        self._small = (small, [one.detach().clone() for one in small])
        big = [one for one in tensors if describe.local_shard(one).nbytes > SMALL_BYTES]
        self._big = [(one, one.clone()) for one in big]
        self._versions = compat.versions(big)
        self._looks, self._uncounted = CLOSE_LOOKS, set()


def _memory(buffer: torch.Tensor) -> torch.Tensor:
    """Return what is copied of a buffer. Of a plain one no view: `buffer.data = other` would leave
    that behind."""
    return describe.local_shard(buffer) if isinstance(buffer, DTensor) else buffer


class _Window:
    """Parameters that are looked at together.

    Args:
        parameters: local ones; None in the place of one that is not looked at.
        device: theirs.
    """

    def __init__(self, parameters: Sequence[torch.Tensor | None], device: torch.device) -> None:
        self._parameters, self._device = parameters, device
        self._plain = [one for one in parameters if one is not None]
        self._join = b"".join if device.type == "cpu" else torch.cat
        self._addresses: list[int] = []
        self.pieces: list[Any] = []
        """In the parameters' own memory; empty ones for those that are not looked at."""

    def read(self) -> Any:
        """Return a copy of the pieces: bytes, or a tensor on their device."""
        # `parameter.data = other` leaves the old memory behind.
        addresses = list(map(torch.Tensor.data_ptr, self._plain))
        if addresses != self._addresses or not self.pieces:
            self._find(addresses)
        return self._join(self.pieces)

    def _find(self, addresses: list[int]) -> None:
        pieces: list[Any] = [_piece(one, self._device) for one in self._parameters]
        if self._device.type == "cpu":
            pieces = [memoryview(one.numpy()) for one in pieces]
        self._addresses, self.pieces = addresses, pieces


class ContentSample:
    """A few bytes of some parameters, to find writes that torch does not count.

    Each time the next `SAMPLED` parameters are looked at, so a write to all of them (averaged
    weights put in for a validation, clipping) is seen at once, that to one of many after some
    steps. Costs one copy of 2 KiB, and as much again where it is compared; in host memory 3 µs
    each, without any operation of torch.

    Args:
        parameters: None in the place of one that is not looked at.
    """

    def __init__(self, parameters: Sequence[torch.Tensor | None]) -> None:
        plain = [_plain(one) for one in parameters]
        devices = [one.device for one in plain if one is not None]
        self._device = devices[0] if devices else torch.device("cpu")
        kept = [one if one is not None and one.device == self._device else None for one in plain]
        self.at_hand = self._device.type == "cpu"
        """False: reading waits for a device."""
        self._windows = [
            _Window(kept[n : n + SAMPLED], self._device) for n in range(0, len(kept), SAMPLED)
        ] or [_Window([], self._device)]
        self._turn = 0
        self._kept: Any = None

    def take(self) -> None:
        """Look at the next parameters."""
        self._turn = (self._turn + 1) % len(self._windows)
        self._kept = self._windows[self._turn].read()

    def differ(self) -> set[int]:
        """Return the numbers of the parameters, of those looked at last, that have changed."""
        kept = self._kept
        if kept is None:
            return set()
        window = self._windows[self._turn]
        now = window.read()
        if now == kept if self.at_hand else torch.equal(now, kept):
            return set()
        found, start = set(), 0
        for number, piece in enumerate(window.pieces):
            end = start + len(piece)
            if not self._same(now[start:end], kept[start:end]):
                found.add(SAMPLED * self._turn + number)
            start = end
        return found

    def _same(self, one: Any, other: Any) -> bool:
        return bool(one == other) if self.at_hand else torch.equal(one, other)


class RollbackPoint:
    """The modules as they were at the last mark.

    Holds one extra copy of the buffers, none of the parameters. torch does not count every change
    (not one through `tensor.data`, nor that of a sharded parameter by an optimizer's foreach mode),
    so a few bytes of some parameters are kept as well, of others at each mark. Embeddings with
    `max_norm` are not looked at: their forward writes to them. Schedulers, gradient scalers and own
    objects are not marked: they belong inside the update.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Sequence[Any],
        generators: Sequence[TrackedGenerator],
        random: rng.MarkedStates,
    ) -> None:
        self._modules, self._optimizers = modules, optimizers
        self._scalers = scalers
        self._generators = generators
        self._drawn: list[dict[str, Any]] = []
        """Their states."""
        named = {
            id(parameter): (f"{name}.{path}", parameter)
            for name, module in modules.items()
            for path, parameter in module.named_parameters()
        }
        for optimizer in optimizers:
            for number, parameter in enumerate(
                p for group in optimizer.param_groups for p in group["params"]
            ):
                named.setdefault(id(parameter), (f"optimizer.{number}", parameter))
        self._names = [name for name, _ in named.values()]
        self._parameters = [parameter for _, parameter in named.values()]
        self._buffers = _Buffers(list(modules.values()))
        self._free = {p for module in modules.values() for p in adapters.written_by_forward(module)}
        self._contents = ContentSample(
            [None if id(one) in self._free else one for one in self._parameters]
        )
        self._versions: list[int] = []
        self._samples: list[torch.Tensor] = []
        self._rng = random

    def mark(self, values: bool = False) -> None:
        """Remember now.

        Args:
            values: keep some bytes of each parameter too, so that writing the same value again
                (DDP's broadcast when it wraps a module) is no change. Not for every step.
        """
        self._versions = list(map(compat.VERSION, self._parameters))
        self._samples = [sample(parameter) for parameter in self._parameters] if values else []
        self._contents.take()
        buffers = self._buffers
        if buffers.places or buffers.came:
            buffers.mark()
        if self._generators:
            self._drawn = [one.state_dict() for one in self._generators]
        if values:
            self._rng.begin()
        else:
            self._rng.mark()

    def rollback(self) -> tuple[str, ...]:
        """Go back to the mark. Returns the parameters that something changed since: not empty
        means that the state is dirty."""
        for module in self._modules.values():
            adapters.reshard(module)
        self._buffers.rollback()
        self._rng.rollback()
        for generator, state in zip(self._generators, self._drawn, strict=True):
            generator.load_state_dict(state)
        self.forget_gradients()
        return self.changed()

    def marked_buffers(self, but: Collection[int]) -> dict[str, torch.Tensor]:
        """Return by name the buffers as they were at the mark, but for running averages of a norm,
        which follow from each rank's own batches.

        Args:
            but: ids of those that are left out.
        """
        averages = {
            id(part._buffers)
            for module in self._modules.values()
            for part in module.modules()
            if compat.keeps_running_averages(part)
        }
        return {
            name: value
            for name, table, used, value in self._all_buffers()
            if id(used) not in but and table not in averages
        }

    def changed_buffers(self) -> tuple[str, ...]:
        """Return the names of the buffers that have another value than at the mark."""
        return tuple(
            name
            for name, _, used, value in self._all_buffers()
            if used is not value and not _is_same(used, value)
        )

    def _all_buffers(self) -> Iterator[tuple[str, int, torch.Tensor, torch.Tensor]]:
        """Yield name, id of the module's table, buffer, and value at the mark."""
        names = compat.buffer_names(self._modules)
        kept = self._buffers.kept()
        for (table, key), (_, value) in zip(self._buffers.places, kept, strict=False):
            now = table.get(key)
            if now is not None and value is not None:
                yield names[id(table), key], id(table), now, value

    def changed(self) -> tuple[str, ...]:
        """Return the parameters that something was written to since the mark. Without kept values,
        what was written and put back counts too."""
        now = compat.versions(self._parameters)
        found = {
            number
            for number, (parameter, version) in enumerate(zip(self._parameters, now, strict=True))
            if version != self._versions[number]
            and id(parameter) not in self._free
            and not self._same(number)
        }
        return tuple(self._names[number] for number in sorted(found | self._contents.differ()))

    def written(self) -> tuple[str, ...]:
        """Return the parameters whose content changed since the mark, of those that were looked at
        then. Cheap enough for every step; on a GPU it would have to be waited for, so none."""
        found = self._contents.differ() if self._contents.at_hand else None
        return tuple(self._names[number] for number in sorted(found)) if found else ()

    def _same(self, number: int) -> bool:
        if not self._samples:
            return False
        return torch.equal(sample(self._parameters[number]), self._samples[number])

    def forget_gradients(self) -> None:
        """Set all gradients to None, and let gradient scalers forget that they unscaled them."""
        # Those of now: a layer may have been put in the place of another one since the mark.
        optimizers = chain.from_iterable(map(adapters.parameters_of, self._optimizers))
        modules = chain.from_iterable(one.parameters() for one in self._modules.values())
        for parameter in chain(self._parameters, optimizers, modules):
            parameter.grad = None
        for scaler in self._scalers:
            # Otherwise the repeated step's unscale_() says it was called twice.
            compat.forget_unscaled(scaler)


def _plain(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Return what has a parameter's memory; None: it has none of its own."""
    if parameter is None or nn.parameter.is_lazy(parameter) or parameter.is_meta:
        return None
    return describe.local_shard(parameter) if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def _piece(parameter: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return some bytes from the middle of a parameter, as they lie in its memory."""
    if parameter is None:
        return torch.empty(0, dtype=torch.uint8, device=device)
    whole = describe.byte_view(parameter)
    start = max(0, whole.numel() - PIECE_BYTES) // 2 // PIECE_BYTES * PIECE_BYTES
    return whole[start : start + PIECE_BYTES]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors have the same bits."""
    here, there = describe.local_shard(one), describe.local_shard(other)
    if here.shape != there.shape or here.dtype != there.dtype or here.device != there.device:
        return False
    return torch.equal(describe.byte_view(here.detach()), describe.byte_view(there))


@torch.no_grad()
def sample(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of some of its bytes, all over it. The odd distance meets each byte of its
    numbers."""
    if nn.parameter.is_lazy(parameter):
        return torch.empty(0, device="cpu")
    whole = describe.byte_view(parameter)
    return whole[:: whole.numel() // SAMPLE_BYTES | 1].clone()
