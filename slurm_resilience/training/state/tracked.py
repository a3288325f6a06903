"""The user's tracked objects as one state that can be described, received, checked, rolled back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from slurm_resilience.training import compat
from slurm_resilience.training.content_digest import content_digest
from slurm_resilience.training.state import adapters, describe, rng
from slurm_resilience.training.state.adapters import Choice
from slurm_resilience.training.state.describe import (
    Capture,
    Landing,
    StateDescriptor,
    TensorSlot,
    ValueNote,
    decode,
    encode,
)
from slurm_resilience.training.state.digest import by_name, digest
from slurm_resilience.training.state.errors import StateError
from slurm_resilience.training.state.generators import TrackedGenerator
from slurm_resilience.training.state.rollback import RollbackPoint, sample
from slurm_resilience.training.state.switches import read_switches, write_switches


class Tracked:
    """The state of one rank.

    Random states: ranks rightfully differ in them, so a process keeps its own once it has taken
    part in a step (`mark`). A newcomer takes the sender's. After that the two draw equal numbers;
    who minds (dropout, augmentation) seeds by rank and step.

    Args:
        objects: name → module (a wrapper of DDP or torch.compile is looked through), optimizer,
            tensor, random generator, or anything with state_dict and load_state_dict.
        trainable_only: only parameters with requires_grad, and their optimizer state, are state.
            Fine-tuning with adapters: the frozen base is never moved.
        adapters_only: further filter by a parameter's (or buffer's) name inside its module.

    Raises:
        StateError: an object that cannot be tracked, or the name ``rng``, which is taken.
    """

    def __init__(
        self,
        objects: dict[str, Any],
        *,
        trainable_only: bool = False,
        adapters_only: Callable[[str], bool] | None = None,
    ) -> None:
        if "rng" in objects:
            raise StateError("the name 'rng' stands for the random states: choose another")
        self._objects = {name: adapters.unwrap(thing) for name, thing in objects.items()}
        self._loose = adapters.loose_parameters(self._objects)
        self._objects |= self._loose
        self._kinds = {name: adapters.kind_of(name, thing) for name, thing in self._objects.items()}
        self._generators = [o for o in self._objects.values() if isinstance(o, TrackedGenerator)]
        self._choice = Choice(trainable_only, adapters_only)
        self._marks: RollbackPoint | None = None
        self._random = rng.MarkedStates()
        """Outlives the marks: it knows which libraries the program draws from."""
        self._stepped = False
        self._landing: Landing | None = None
        self._options: list[tuple[torch.optim.Optimizer, list[dict[str, Any]]]] = []
        """Those of optimizers, as they were noted."""

    @property
    def objects(self) -> dict[str, Any]:
        """The tracked objects, unwrapped, and by names of their own the parameters that an
        optimizer trains and none of them holds."""
        return dict(self._objects)

    def capture(self) -> Capture:
        """Return the state as it lies in memory, without copies.

        Valid until the next update. A tensor with gaps in memory is copied (dense ones of any
        stride are not).
        """
        values = {name: self._read(name) for name in self._objects}
        on = read_switches(self._modules()) if self._choice.everything else None
        return _captured(values, rng.pack(rng.read()), on)

    def modules(self) -> tuple[str, ...]:
        """Return the names under which modules are tracked."""
        return tuple(self._modules())

    def parameter_ids(self) -> set[int]:
        """Return the ids of all parameters and tensors that are tracked."""
        modules = self._modules().values()
        held = [one for module in modules for one in module.parameters()]
        return {id(one) for one in (*held, *self._objects.values())}

    def may_hold_more(self) -> bool:
        """Tell whether an object of the training's own may hold parameters that are not known."""
        own = __name__.partition(".")[0]
        others = (thing for name, thing in self._objects.items() if self._kinds[name] == "other")
        return any(
            not isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
            and not compat.is_gradient_scaler(thing)
            and type(thing).__module__.partition(".")[0] != own
            for thing in others
        )

    def generators(self) -> list[Any]:
        """Return the random generators that are tracked."""
        return [one.generator for one in self._generators]

    def flip_bit(self) -> None:
        """Change one bit of the largest parameter, unseen by torch, as a faulty chip does."""
        shards = [
            describe.local_shard(parameter).data
            for module in self._modules().values()
            for parameter in module.parameters()
        ]
        largest = max(shards, key=lambda shard: shard.nbytes)
        # Not through a view of the parameter: its version would be counted up.
        describe.byte_view(largest)[largest.element_size() // 2] ^= 0x10

    def replica_words(self) -> dict[str, int]:
        """Return checksums by name of what is equal on all replicas after every step, whatever the
        training: parameters, options of optimizers, schedulers.

        Ranks may differ rightfully in buffers (see `buffer_words`), and in objects of the
        training's own. An optimizer's tensors are left out: where they differ, the parameters do
        one step later.
        """
        values: dict[str, Any] = {}
        for name, thing in self._objects.items():
            kind = self._kinds[name]
            if kind == "module":
                values[name] = adapters.read_replica(thing, self._choice)
            elif name in self._loose:
                values[name] = {"value": thing}  # `by_name` knows the tensors in an object
            elif kind == "optimizer":
                values[name] = adapters.options_of(thing)
            elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
                values[name] = thing.state_dict()
        return by_name(_captured(values, None))

    def buffer_words(self, but: Collection[int]) -> dict[str, int]:
        """Return checksums by name of the buffers that the last update has left. What forward has
        written since follows from each rank's own batch, until the program exchanges it.

        Args:
            but: ids of buffers that are left out, since each forward makes them equal.
        """
        if self._marks is None:
            return {}
        values: dict[str, Any] = {}
        for path, value in self._marks.marked_buffers(but).items():
            name, _, inside = path.partition(".")
            if self._choice.takes_buffer(inside):
                values.setdefault(name, {})[inside] = value
        return by_name(_captured(values, None))

    def frozen_words(self) -> dict[str, int]:
        """Return checksums by name, of a sample of their bytes, of the parameters that are not
        state, and are never sent."""
        return {path: content_digest(sample(one)) for path, one in self.frozen().items()}

    def frozen(self) -> dict[str, torch.Tensor]:
        """Return by name the parameters that are not state, and are never sent."""
        return {
            f"{name}.{path}": parameter
            for name, module in self._modules().items()
            for path, parameter in adapters.read_frozen(module, self._choice).items()
        }

    def prepare(self, descriptor: StateDescriptor) -> list[torch.Tensor]:
        """Make place for a peer's state.

        What this process has is received into, in place. What it lacks (a fresh optimizer's state)
        is made, not by a step. Nothing that is in use changes before the caller writes.

        Args:
            descriptor: the peer's description.

        Returns:
            uint8 views of shape (bytes,), in the descriptor's order, to write into.

        Raises:
            StateError: the peer's state is another one; says in one line what differs.
        """
        if odd := sorted(descriptor.objects.keys() ^ self._objects.keys()):
            side = "the peer" if odd[0] in descriptor.objects else "this process"
            raise StateError(f"only {side} tracks {odd[0]!r}; every rank must track the same")
        landing = Landing(descriptor)
        left_out = self._left_out()
        for name, thing in self._objects.items():
            there = decode(descriptor.objects[name], TensorSlot)
            kind = self._kinds[name]
            if kind == "module":
                adapters.land_module(name, thing, there, self._choice, landing)
            elif kind == "optimizer":
                adapters.land_optimizer(name, thing, there, left_out, landing)
            elif kind == "tensor":
                landing.into(there, thing, name)
            else:
                adapters.land_other(name, thing, there, landing)
        views = landing.ready()
        self._landing = landing
        return views

    def finish(self, descriptor: StateDescriptor, *, rng_too: bool | None = None) -> None:
        """Load everything that is not a tensor's bytes, after those have arrived.

        Args:
            descriptor: the one that was prepared.
            rng_too: whether to take the random states, and what is switched on; None: if this
                process has none of its own (it never marked a step).

        Raises:
            StateError: that descriptor was not prepared.
        """
        landing, self._landing = self._landing, None
        if landing is None or landing.descriptor is not descriptor:
            raise StateError("finish() needs the descriptor that prepare() was given")
        with torch.no_grad():
            for act in landing.after:
                act()
        if rng_too or (rng_too is None and not self._stepped):
            rng.write(rng.unpack(decode(descriptor.rng, TensorSlot)))
            if descriptor.on is not None and self._choice.everything:
                write_switches(self._modules(), descriptor.on)
        # Bytes that arrived do not count as changes: look at every buffer anew.
        self._marks = None

    def mark(self, *, values: bool = False) -> None:
        """Remember this step's beginning, for `rollback`. See `RollbackPoint`. Not to be
        interrupted: a later rollback would go back to random states of an earlier step.

        Args:
            values: as there, and look at what the objects hold now: a layer may have been put in
                the place of another one.
        """
        marks = self._marks
        if marks is None or values:
            marks = self._marks = self._watch()
        marks.mark(values)
        self._stepped = True

    @torch.no_grad()
    def rollback(self) -> tuple[str, ...]:
        """After a fault before the update: back to the last mark.

        Returns:
            Names of parameters that changed although no update ran: if there are any, the state
            is dirty. Without a mark only gradients are dropped.
        """
        if self._marks is None:
            self._watch().forget_gradients()
            return ()
        return self._marks.rollback()

    def changed(self) -> tuple[str, ...]:
        """Names of parameters that changed since the last mark; nothing is put back."""
        return self._marks.changed() if self._marks is not None else ()

    def written(self) -> tuple[str, ...]:
        """Names of parameters whose content is seen to have changed since the last mark, by looking
        at pieces of some; cheap enough for every step."""
        return self._marks.written() if self._marks is not None else ()

    def changed_buffers(self) -> tuple[str, ...]:
        """Names of buffers that changed since the last mark."""
        return self._marks.changed_buffers() if self._marks is not None else ()

    def digest(self) -> str:
        """Checksum of the state without the random states; equal on bit-equal replicas."""
        values = {
            name: self._read(name)
            for name, thing in self._objects.items()
            if not isinstance(thing, TrackedGenerator)
        }
        return digest(_captured(values, None))

    def note_options(self) -> None:
        """Keep the optimizers' options as they are: see `put_options_back`."""
        self._options = [
            (one, adapters.noted_options(one))
            for one in self._objects.values()
            if isinstance(one, torch.optim.Optimizer)
        ]

    def put_options_back(self) -> None:
        """Undo what was set since they were noted: a schedule that is made sets the learning rate
        with which it begins."""
        for one, options in self._options:
            adapters.put_options(one, options)
        self._options = []

    def _read(self, name: str) -> Any:
        thing, kind = self._objects[name], self._kinds[name]
        if kind == "module":
            return adapters.read_module(thing, self._choice)
        if kind == "optimizer":
            return adapters.read_optimizer(thing, self._left_out())
        return thing if kind == "tensor" else thing.state_dict()

    def _modules(self) -> dict[str, nn.Module]:
        return {n: thing for n, thing in self._objects.items() if isinstance(thing, nn.Module)}

    def _left_out(self) -> set[int]:
        """Ids of the parameters that are not state."""
        return {
            id(parameter)
            for module in self._modules().values()
            for name, parameter in module.named_parameters()
            if not self._choice.takes(name, parameter)
        }

    def _watch(self) -> RollbackPoint:
        optimizers = [o for o in self._objects.values() if isinstance(o, torch.optim.Optimizer)]
        scalers = [o for o in self._objects.values() if compat.is_gradient_scaler(o)]
        return RollbackPoint(self._modules(), optimizers, scalers, self._generators, self._random)


def _captured(
    values: dict[str, Any], states: Any, on: dict[str, tuple[str, ...]] | None = None
) -> Capture:
    """Describe values by name, and random states, as they lie in memory."""
    notes: list[ValueNote] = []
    views: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def keep(path: str, tensor: torch.Tensor) -> int:
        # The caller's `values` keep temporary tensors alive, whose ids would else be given again.
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(notes)
            notes.append(describe.describe_tensor(path, tensor))
            views.append(describe.byte_view(tensor))
        return numbers[id(tensor)]

    objects = {name: encode(value, name, keep) for name, value in values.items()}
    random = encode(states, "rng", keep)
    return Capture(StateDescriptor(tuple(notes), objects, random, on), tuple(views))
