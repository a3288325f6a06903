"""See a schedule, a gradient scaler or averaged weights that belong to what is tracked, and are not
tracked themselves; and an optimizer that is made in the middle of a training.

torch has no hook for their use, and an optimizer does not know its schedules. So all objects of the
process are looked through, once. Those that are made later tell of it.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from slurm_resilience.training.compat import (
    is_gradient_scaler,
    is_scaler_used,
    versions,
    watch_copied_modules,
    watch_training_parts,
)
from slurm_resilience.training.garbage import (
    all_objects,
    let_go_of_older_objects,
    newer_objects,
)
from slurm_resilience.training.guards.code.kept_averages import KeptAverages
from slurm_resilience.training.guards.code.local_counts import LocalCounts
from slurm_resilience.training.guards.gradient_hooks import GradientHooks
from slurm_resilience.training.guards.kept_copies import KeptCopies
from slurm_resilience.training.guards.kept_generators import KeptGenerators
from slurm_resilience.training.guards.kept_objects import KeptObjects
from slurm_resilience.training.guards.late_optimizers import LateOptimizer, parameters_of
from slurm_resilience.training.guards.plain_attributes import PlainAttributes, UntrackedBuffers

log = logging.getLogger("sres.training")

MOST_OBJECTS = 3_000_000
"""In a process with more (a dataset of Python objects), looking through them takes seconds."""
_KINDS = (LRScheduler, AveragedModel, torch.amp.GradScaler)


@contextlib.contextmanager
def ends_no_training() -> Iterator[None]:
    """Leave a look that fails: the objects of a process may be of any kind."""
    try:
        yield
    except Exception as error:
        log.debug("some objects of the program are not looked at: %r", error)


class _Part(NamedTuple):
    thing: Any
    uses: int
    """Its uses when it was found."""


LOOKS_FOR_COPIES = 2
"""Worlds in which copies are looked for: it takes a part of the time of a recovery."""


class UntrackedParts:
    """Those of this process that were in use when it was looked, or were made later."""

    def __init__(self) -> None:
        self.is_over = False
        """No part is left that a look in this world could tell of, unless one is made yet."""
        self._tracked: list[Any] | None = None
        """Objects that are tracked in this world; None: they are not known yet."""
        self._made: list[weakref.ref[Any]] = []
        """Made since it was looked, and not judged yet; kept only by the program itself."""
        self._late: list[LateOptimizer] = []
        self._looks_for_copies = LOOKS_FOR_COPIES
        self.copies = KeptCopies()
        self.attributes = PlainAttributes()
        self.buffers = UntrackedBuffers()
        self.generators = KeptGenerators()
        self.locals = LocalCounts()
        self.kept = KeptObjects()
        self.averages = KeptAverages()
        self.gradient_hooks = GradientHooks()
        self._found: list[_Part] | None = None
        """None: they were not looked for yet."""
        self.has_schedule = False
        """A schedule was among them: a line on it says all."""

    def begin(
        self, modules: Sequence[nn.Module], tracked: Iterable[Any], *, is_trained: bool
    ) -> None:
        """Begin a world.

        Args:
            modules: those that are tracked.
            tracked: all objects that are.
            is_trained: the weights have been trained.
        """
        self.is_over = False
        self._tracked = None
        for one in self._late:
            one.stop()
        self._late = []
        # What was there before the training is older than the weights that were found now.
        with ends_no_training():
            self.copies.begin(() if is_trained else newer_objects(), modules, tracked)

    def copies_made(self, modules: Sequence[nn.Module]) -> tuple[str, ...]:
        """Return the kinds of copies that were made of the weights since a world began: at the
        first call and, of those that are made before the weights are healed, at the second."""
        if not self._looks_for_copies:
            return ()
        self._looks_for_copies -= 1
        with ends_no_training():
            everything = newer_objects()
            if len(everything) <= MOST_OBJECTS:
                return self.copies.made(everything, modules, _averaged(everything))
        return ()

    def look(self, tracked: Iterable[Any], modules: Iterable[nn.Module]) -> None:
        """Find them, the first time that this is called; from then on, see those that are made.

        Args:
            tracked: the objects that are, in this world.
            modules: those of them that are modules.
        """
        tracked = self._tracked = list(tracked)
        modules = list(modules)
        self.copies.expect(modules)
        if self._found is not None:
            return
        self._found = []
        noted = weakref.WeakMethod(self._note)
        watch_training_parts(lambda thing: (note := noted()) and note(thing))
        copied = weakref.WeakMethod(self._note_copied)
        watch_copied_modules(lambda thing: (note := copied()) and note(thing))
        everything = all_objects()
        let_go_of_older_objects()
        if len(everything) > MOST_OBJECTS:
            return
        # By type: a lazy object may do anything when it is asked for its class.
        alive = [one for one in everything if issubclass(type(one), _KINDS)]
        self._found = [_Part(one, _before(one)) for one in untracked(alive, tracked)]
        self.has_schedule = any(isinstance(part.thing, LRScheduler) for part in self._found)
        with ends_no_training():
            self.generators.look(everything, tracked)
        averages = [part for part in alive if isinstance(part, AveragedModel)]
        with ends_no_training():
            self.copies.look(everything, modules, averages)
            optimizers = [one for one in tracked if isinstance(one, torch.optim.Optimizer)]
            self.buffers.look(everything, [*modules, *averages], optimizers)

    def look_again(self, modules: Sequence[nn.Module]) -> None:
        """Find copies of the weights in plain lists and dicts, and in modules that were not copied,
        that were made in the middle of the training: nothing tells of them.

        Args:
            modules: as in `look`.
        """
        if self._tracked is None:
            return
        with ends_no_training():
            everything = newer_objects()
            if len(everything) <= MOST_OBJECTS:
                self.copies.look_again(everything, modules, _averaged(everything))
                self.is_over = self.is_over and self.copies.is_over

    def look_at_copied(self, modules: Sequence[nn.Module]) -> None:
        """Look at the modules that were copied since the last look.

        Args:
            modules: as in `look`.
        """
        parts = [part.thing for part in self._found or ()]
        averages = [part for part in parts if isinstance(part, AveragedModel)]
        with ends_no_training():
            self.copies.look_at_copied(modules, averages)

    def looked_at(self, *, but_locals: bool) -> None:
        """Note that all parts were looked at before an update: see `is_over`.

        Args:
            but_locals: only those that every program has were: an object of the training's own may
                hold what counts.
        """
        parts = (self.copies, self.generators, self.attributes, self.buffers)
        counts = self.locals.is_over and self.averages.is_over
        is_over = all(one.is_over for one in parts) and (but_locals or counts)
        waits = self._found or self._made or self._late
        self.is_over = is_over and not waits and (but_locals or self._found is not None)

    def used(self) -> tuple[str, ...]:
        """Return the kinds of those that were used since they were found; each is told once."""
        if self._made or self._late:
            return self._used_late()
        if not self._found:
            return ()
        return self._used_found()

    def _used_found(self) -> tuple[str, ...]:
        found = self._found or []
        used = [part for part in found if _uses(part.thing) != part.uses]
        self._found = [part for part in found if part not in used]
        return tuple(dict.fromkeys(type(part.thing).__name__ for part in used))

    def _note(self, thing: Any) -> None:
        self.is_over = False
        # A rank that tells nothing any more never judges them.
        self._made = [one for one in self._made if one() is not None]
        if not any(one() is thing for one in self._made):
            self._made.append(weakref.ref(thing))

    def _note_copied(self, thing: nn.Module) -> None:
        if self.copies.note(thing):
            self.is_over = False

    def _used_late(self) -> tuple[str, ...]:
        """Judge what was made since the last look, and return what of all was used."""
        judged = [one for one in self._late if one.is_judged]
        for one in judged:
            one.stop()
        self._late = [one for one in self._late if not one.is_judged]
        for one in self._late:
            one.wait_on()
        kinds = [one.kind for one in judged if one.trains_alone]
        if self._made and self._tracked is not None:
            made = [thing for noted in self._made if (thing := noted()) is not None]
            self._made = []
            more = [_Part(one, _before(one)) for one in self._belonging(made)]
            self._found = [*(self._found or ()), *more]
        return tuple(dict.fromkeys((*kinds, *self._used_found())))

    def _belonging(self, made: Sequence[Any]) -> list[Any]:
        """Begin to listen to the optimizers of what was made; return the other parts that belong to
        the training."""
        tracked = self._tracked or []
        optimizers = [one for one in made if isinstance(one, torch.optim.Optimizer)]
        known = [one for one in tracked if isinstance(one, torch.optim.Optimizer)]
        trained = {id(p) for one in tracked if isinstance(one, nn.Module) for p in one.parameters()}
        self._late += [
            LateOptimizer(one, known)
            for one in optimizers
            if parameters_of(one) & trained and not any(one is other for other in known)
        ]
        return untracked([one for one in made if isinstance(one, _KINDS)], tracked)


def untracked(alive: Sequence[Any], tracked: Sequence[Any]) -> list[Any]:
    """Return the parts that belong to something that is tracked, and are not. Pure.

    Args:
        alive: schedules, gradient scalers and averaged models.
        tracked: the objects that are.
    """
    known = {id(one) for thing in tracked for one in _inside(thing)}
    optimizers = [one for one in tracked if isinstance(one, torch.optim.Optimizer)]
    groups = {id(one.param_groups) for one in optimizers}

    def belongs(part: Any) -> bool:
        if isinstance(part, LRScheduler):
            return id(part.optimizer.param_groups) in groups
        return bool(groups)

    return [part for part in alive if id(part) not in known and belongs(part)]


def _averaged(everything: Iterable[Any]) -> list[AveragedModel]:
    return [one for one in everything if issubclass(type(one), AveragedModel)]


def _inside(thing: Any) -> Iterator[Any]:
    """Yield an object and the parts that it is made of."""
    yield thing
    if isinstance(thing, nn.Module):
        yield from thing.modules()
    for one in getattr(thing, "_schedulers", ()):  # of a SequentialLR
        yield from _inside(one)


def _before(part: Any) -> int:
    """Return the number of uses that is not told. A scaler is used in the first step, or never."""
    return 0 if is_gradient_scaler(part) else _uses(part)


def _uses(part: Any) -> int:
    """Return a number that changes when a part is used, without waiting for a GPU."""
    if isinstance(part, LRScheduler):
        return part.last_epoch
    if isinstance(part, AveragedModel):
        return versions([part.n_averaged])[0]
    return int(is_scaler_used(part))
