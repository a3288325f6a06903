"""See changes of the state outside of updates while they happen, not at the next fault."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from slurm_resilience.training.compat import is_gradient_scaler
from slurm_resilience.training.content_digest import content_digest
from slurm_resilience.training.data.loader import ReplayLoader
from slurm_resilience.training.garbage import let_go_of_older_objects
from slurm_resilience.training.guards.code import kept_globals
from slurm_resilience.training.guards.late_additions import LateAdditions, warn_of_untracked
from slurm_resilience.training.guards.optimizer_watch import OptimizerWatch
from slurm_resilience.training.guards.rate_watch import COUNTS, LOOKS
from slurm_resilience.training.guards.untracked_parts import ends_no_training
from slurm_resilience.training.state import Tracked
from slurm_resilience.training.state.adapters import has_own_state
from slurm_resilience.training.state.generators import is_generator
from slurm_resilience.training.update_count import COUNT_BY_SESSION

log = logging.getLogger("sres.training")

CLOSELY = 2
"""Updates of each world, after the first, before which everything is looked at. Later it is the
steps of schedulers, and pieces of some parameters, of others each time."""
STEP_OUTSIDE = (
    "an optimizer steps outside of s.update(), and such a step is not kept: a fault undoes it, or "
    "loses the state. Put it inside: `with s.update(): opt.step()`"
)


class StateWatch:
    """Watches what is tracked, in each world from its healing on. Each warning comes once."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._optimizing = OptimizerWatch(lambda: self._warn(STEP_OUTSIDE))
        self._late = LateAdditions()
        self.enter(None, {}, tell=False, step=-1)

    def enter(
        self,
        tracked: Tracked | None,
        objects: dict[str, Any],
        *,
        tell: bool,
        leads: bool = False,
        step: int,
    ) -> None:
        """Begin a new world.

        Args:
            tracked: the state, just marked.
            objects: name → what the training tracks.
            tell: this rank warns, for all.
            leads: it is the first of those whose state is their own, and knows what the step that
                is repeated now did before the fault.
            step: committed steps; -1: the last world ended in an update.
        """
        self._tracked = tracked
        self._tell = tell
        self._updates = 0
        self._has_committed = False
        self._optimizing.parts.kept.begin(objects.values())
        self._optimizing.parts.gradient_hooks.enter(is_trained=step > 0)
        self.is_done = False
        """True where nothing more is looked for in this world: on a rank that tells nothing, after
        the first updates. (In those, all ranks ask the training's own objects for their state,
        which may take a collective.)"""
        self._schedules = {
            name: one for name, one in objects.items() if isinstance(_steps(one), int)
        }
        self._optimizers = {
            name: one for name, one in objects.items() if isinstance(one, torch.optim.Optimizer)
        }
        self._others = {
            name: one
            for name, one in objects.items()
            if not isinstance(one, torch.Tensor | nn.Module | torch.optim.Optimizer)
            and name not in self._schedules
            and not is_generator(one)
        }
        modules = {name: one for name, one in objects.items() if isinstance(one, nn.Module)}
        listen = tracked is not None and tell
        frozen = tracked.frozen() if tracked is not None and tell else {}
        self._late.enter(self._optimizers, modules, frozen, listen=listen)
        self._optimizing.enter(
            self._optimizers, list(modules.values()), listen=listen, leads=leads, step=step
        )
        if listen:
            self._optimizing.parts.attributes.begin(modules, self._optimizers)
            self._optimizing.parts.begin(
                self._optimizing.modules, objects.values(), is_trained=step != 0
            )
        elif tracked is not None:
            let_go_of_older_objects()  # another rank looks through its own
        # The objects themselves, so that no other one gets their id.
        self._states = {name: one.state for name, one in self._optimizers.items()}
        self._counts: dict[str, Any] = {}
        self._contents: dict[str, int] = {}
        self._collectives = 0
        """Those that were begun before the update."""
        self.commit()

    def begin(self, *, asked_step: bool, loaders: Mapping[str, ReplayLoader]) -> None:
        """Look for changes since the last update, or since the healing; warn of them.

        Args:
            asked_step: the program has asked for its step.
            loaders: those that it has opened.
        """
        turn = self._updates
        self._updates += 1
        self.is_done = not self._tell and self._updates > CLOSELY + 1
        if self._tracked is None or self.is_done:
            return
        for line in (*self._found_rates(), *self._late.found()):
            self._warn(line)
        if turn == 0:
            self._look_for_copies()  # first: one cause is told in one line
        if not self._optimizing.parts.is_over:
            self._warn_of_parts(asked_step=asked_step)
            self._optimizing.parts.looked_at(but_locals=self._may_count)
        if turn == LOOKS - 1 and not asked_step and self._rates_seem_counted():
            self._warn(COUNTS)
        if turn <= CLOSELY:
            self._look_closely(turn, self._tracked, asked_step=asked_step, loaders=loaders)
            return
        if self._tell and not turn & (turn - 1) and not self._may_count:
            # Each time after twice as many: there may be many objects to look at.
            self._optimizing.parts.look_again(self._optimizing.modules)
        if not self._optimizing.steps_outside and (changed := self._tracked.written()):
            self._warn_changed(changed)

    def watch_kept(self, source: Callable[[], Iterable[Any]]) -> None:
        """Name what gives the objects that are kept from world to world."""
        self._optimizing.parts.kept.source = source

    def step_is_asked(self) -> None:
        """Note that the program asks for its step for the first time."""
        self._optimizing.parts.locals.loops.asked()

    def watch_hooks(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Look at the hooks for gradients that a wrapper of this world is given."""
        self._optimizing.parts.gradient_hooks.watch(wrapper)

    def warn_of_untracked(self, module: nn.Module, names: Sequence[str]) -> None:
        """Warn, once, of a module that is wrapped to be trained and is not tracked.

        Args:
            module: the module.
            names: those of its parameters that are not.
        """
        warn_of_untracked(module, names)
        self._optimizing.parts.kept.pass_over({id(one) for one in module.parameters()})

    def _warn_of_kept(self) -> None:
        """Warn of what `s.once` keeps, changes, and is not tracked."""
        with ends_no_training():
            parts = self._optimizing.parts
            parts.kept.pass_over(parts.copies.tensors() | parts.copies.told)
            if changing := parts.kept.changing():
                self._warn(
                    f"{_some(changing)}, kept by s.once, changes in each step and is not tracked: "
                    "a step that is repeated after a fault changes it twice, and a replaced rank "
                    "begins anew. That is harmless where only a log reads it; if the result "
                    "depends on it, track it, s.track(model=…, opt=…, kept=…): a tensor, or an "
                    "object with state_dict and load_state_dict; and change it in s.update()"
                )

    def _look_closely(
        self, turn: int, tracked: Tracked, *, asked_step: bool, loaders: Mapping[str, ReplayLoader]
    ) -> None:
        """Look at everything, in the first updates of a world.

        Args:
            turn: the update's number, from 0.
            tracked: the state.
            asked_step: as in `begin`.
            loaders: the same.
        """
        if self._optimizing.were_kept():
            self._warn(
                "no optimizer stepped in this s.update(), and its gradients were kept for the next "
                "one: a fault between the two drops them. Make one update for all batches whose "
                "gradients are added up (`if last: with s.update(): opt.step()`)"
            )
        if turn == CLOSELY:
            self._optimizing.stop()
        changed = tracked.changed()
        if turn == 0:
            self._optimizing.parts.gradient_hooks.look()
            if self._tell and (line := self._late.hooks.grown(self._optimizing.modules)):
                self._warn(line)
            changed += tuple(n for n, one in self._optimizers.items() if self._replaced(n, one))
        if turn == 1:
            self._look_for_gradient_hooks()
            self._look_for_hidden_state()
            self._look_for_untracked()
            self._look_for_kept_groups()
            if not asked_step and not self._may_count:
                self._warn_of_counts(loaders)
            elif (
                not loaders
                and not self._may_count
                and self._optimizing.parts.locals.loops.went_on()
            ):
                self._warn(
                    "this loop takes its batches from a DataLoader of its own, and has asked "
                    "s.step only when it had the first one: after a fault the function begins "
                    "anew, and so does the DataLoader, with its first batch. Give its dataset to "
                    "s.loader, or begin at the batch that s.step says"
                )
        if self._optimizing.steps_outside:
            changed = ()  # told, in better words
        changed += tuple(
            name for name, one in self._others.items() if self._contents[name] != _content(one)
        )
        if changed and turn == 0:
            self._warn(
                f"{_some(changed)} changed between s.track and the first s.update(). That is done "
                "again after each fault, and undoes the training: load weights, and set them, "
                "before s.track (in what s.once builds)"
            )
        elif changed:
            self._warn_changed(changed)

    @property
    def looks_closely(self) -> bool:
        """True in the first updates of a world, from their begin on."""
        return self._updates <= CLOSELY

    @property
    def _may_count(self) -> bool:
        """An object of the training's own may hold its position."""
        return any(not is_gradient_scaler(one) for one in self._others.values())

    def entered(self, collectives: int) -> None:
        """Note that an update is entered.

        Args:
            collectives: those that this process has begun.
        """
        self._collectives = collectives
        self._optimizing.entered()

    def left(self, collectives: int) -> None:
        """Warn of collectives between the begin of an update and its end.

        Args:
            collectives: as in `entered`.
        """
        self._optimizing.left()
        if collectives == self._collectives:
            return
        self._warn(
            "collectives inside of s.update(): a rank that dies in one makes the state of every "
            "rank void. Do before it what communicates (clipping sharded gradients, a step that "
            "computes gradients anew)"
        )

    def batch_given(self) -> None:
        """Warn, at the first batch after an update, of buffers that something has written to since:
        no forward of a step did."""
        if not self._has_committed or not self._tell or self._tracked is None:
            return
        self._has_committed = False
        changed = self._tracked.changed_buffers()
        # Where a module's parameters changed as well, these are told of: by the next update.
        written = {name.partition(".")[0] for name in self._tracked.changed()} if changed else ()
        if changed := tuple(name for name in changed if name.partition(".")[0] not in written):
            self._warn(
                f"{_some(changed)}, a buffer, changed between s.update() and the next batch, or in "
                "a way that torch does not count (through .data): a fault in the next step puts it "
                "back. Change it inside of `with s.update():`, or before it, as forward does "
                "(running averages: a forward after the update is in eval mode)"
            )

    def commit(self) -> None:
        """Note what an update has left."""
        self._optimizing.rates.commit()
        if self.is_done:
            return
        self._has_committed = self._updates > 0
        for name, one in self._schedules.items():
            self._counts[name] = _steps(one)
        if self._tell and not self._optimizing.parts.kept.is_over:
            self._warn_of_kept()
        if self._updates <= CLOSELY:
            self._contents = {name: _content(one) for name, one in self._others.items()}

    def _found_rates(self) -> list[str]:
        """Return in lines which learning rates were set since the last update."""
        lines = [
            f"{name} steps outside of s.update(): after a fault ranks go on with different "
            f"learning rates. Put {name}.step() inside of a batch's `with s.update():`"
            for name, count in self._counts.items()
            if _steps(self._schedules[name]) != count
        ]
        if self._updates == 1 and (line := self._optimizing.rates.repeated()):
            log.warning("%s", line)  # no matter which rank tells of other things
        if self._tell and (line := self._optimizing.rates.found()) and not lines:
            lines.append(line)
        return lines

    def _rates_seem_counted(self) -> bool:
        """Tell whether learning rates follow from a count that is not tracked."""
        known = self._may_count or self._schedules or self._optimizing.parts.has_schedule
        return not known and self._optimizing.rates.seems_counted()

    def _warn_of_counts(self, loaders: Mapping[str, ReplayLoader]) -> None:
        """Warn of a loop that must count its steps by itself, for all that is known of it."""
        if not loaders:
            self._warn(
                "this loop takes its batches neither from s.loader nor by s.step: after a "
                "fault the function begins anew, and so would the loop, with its first batch. "
                "Begin it with s.step, or with what s.track returns"
            )
        elif all(one.kind == "map" and one.end is None for one in loaders.values()):
            self._warn(
                "s.loader has no end here, and the loop has not asked s.step: if a count of its "
                "own ends it (range, enumerate, islice), it begins anew after each fault, and "
                f"makes more steps. {COUNT_BY_SESSION}"
            )

    def _warn_of_parts(self, *, asked_step: bool) -> None:
        """Warn of what goes with the modules and optimizers that are tracked, and is not."""
        if used := self._optimizing.parts.used():
            self._warn(
                f"{_some(used)} belongs to the training and is not tracked: a replaced rank begins "
                "with a new one, with other learning rates, scales or averages, and so does one "
                "that the function makes, after each fault. Make it where the model is "
                "built, even if it is used later: s.track(model=…, opt=…, schedule=…)"
            )
        if not self._may_count:
            self._optimizing.parts.look_at_copied(self._optimizing.modules)
        if kept := self._averages():
            self._warn(
                f"averages of the weights ({_some(kept)}) are not tracked: after a fault they "
                "begin anew, on all ranks or on a replaced one. Track them: s.track(model=…, "
                "opt=…, average=…), a module (torch.optim.swa_utils.AveragedModel), a tensor, or "
                "an object with state_dict and load_state_dict; and update them in s.update()"
            )
        if copied := self._optimizing.parts.copies.written():
            self._warn(
                f"a {_some(copied)} with the parameters' shapes and nearly their values is written "
                "to and not tracked: if these are averages of the weights, a replaced rank begins "
                "with new ones. Track them: s.track(model=…, opt=…, average=…), a module, or an "
                "object with state_dict and load_state_dict; and update them in s.update()"
            )
        if copied := self._optimizing.parts.copies.living_on():
            self._warn_of_copy(copied)
        if drawn := self._optimizing.parts.generators.drawn():
            self._warn(
                f"a generator of random numbers ({_some(drawn)}) is drawn from and not tracked: "
                "after a fault it goes on where it is, and a replaced rank begins anew. Track it, "
                "s.track(model=…, opt=…, noise=generator); one that a dataset draws from is seeded "
                "by the sample's index instead"
            )
        found = self._optimizing.parts.attributes.counted(asked_step=asked_step)
        by_optimizers = tuple(n for n in found if n.partition(".")[0] in self._optimizers)
        if by_optimizers:
            self._warn(
                f"{_some(by_optimizers)} counts in each step, and no peer finds it: a replaced "
                "rank begins anew. Keep it in `param_groups` or `state`, or give the optimizer a "
                "state_dict and load_state_dict of its own"
            )
        if counted := tuple(name for name in found if name not in by_optimizers):
            self._warn(
                f"{_some(counted)} counts in each step and is no buffer: a step that is repeated "
                "after a fault counts twice, and a replaced rank begins anew. That is harmless "
                "where only a log reads it; if the result depends on it: register_buffer, or "
                "get_extra_state and set_extra_state, or set it from s.step"
            )
        if counted := self._counting_locals(asked_step=asked_step):
            self._warn(
                f"{_some(counted)} counts in each step, and something is computed from it: after a "
                "fault it begins anew, or counts the repeated step twice. That is harmless where "
                "only a log reads it; if the result depends on it: compute it from s.step, or keep "
                "it in an object with state_dict and load_state_dict, and track that"
            )
        if changing := self._optimizing.parts.buffers.changed():
            self._warn(
                f"{_some(changing)} changes in each step, and its module is not tracked: a step "
                "that is repeated after a fault changes it twice, and a replaced rank begins anew. "
                "That is harmless where only a log reads it; if the result depends on it: "
                "s.track(model=…, opt=…, criterion=…)"
            )

    def _counting_locals(self, *, asked_step: bool) -> tuple[str, ...]:
        if not self._tell or self._may_count:
            return ()
        try:
            parts = self._optimizing.parts
            kept = {
                id(one)
                for thing in parts.kept.source()
                for one in (thing if isinstance(thing, list | tuple) else (thing,))
            }
            return parts.locals.counted(asked_step=asked_step, kept=kept)
        except Exception as error:
            # What it reads is the code of others, maybe of a newer Python: it ends no training.
            log.debug("the function's own counts are not looked at: %r", error)
            return ()

    def _averages(self) -> tuple[str, ...]:
        parts, found = self._optimizing.parts, tuple[str, ...]()
        if self._tell and not self._may_count:
            with ends_no_training():
                kept = list(parts.kept.source()) if parts.kept.has_told else []
                known = parts.copies.known() | parts.copies.tensors()
                found = parts.averages.found(self._optimizing.modules, kept, known)
        return found

    def _look_for_hidden_state(self) -> None:
        for name, one in self._optimizers.items():
            if hidden := hidden_state(one):
                self._warn(
                    f"{name} keeps state where no peer finds it ({_some(hidden)}), so a replaced "
                    "rank begins without it. Keep it in its `state`, or give the optimizer a "
                    "state_dict and load_state_dict of its own"
                )

    def _look_for_gradient_hooks(self) -> None:
        parts = self._optimizing.parts
        for line in parts.gradient_hooks.changed(self._others.values(), parts.kept.source()):
            self._warn(line)

    def _look_for_kept_groups(self) -> None:
        if not self._tell:
            return
        with ends_no_training():
            if kept := kept_globals.kept(inspect.currentframe()):
                self._warn(
                    f"{_some(kept)} belongs to this world, and is made once, or cached: after a "
                    "fault it is of no use, and a replaced rank waits alone where it makes another "
                    f"one. {kept_globals.INSTEAD}"
                )

    def _look_for_copies(self) -> None:
        """Warn of copies that the function has made of the weights, before they change."""
        may_look = self._tell and not self._may_count
        if may_look and (made := self._optimizing.parts.copies_made(self._optimizing.modules)):
            self._warn_of_copy(made)

    def _warn_of_copy(self, made: tuple[str, ...]) -> None:
        self._warn(
            f"a copy of the weights ({_some(made)}) is made in the training function: after a "
            "fault it is made anew, of the weights as they are then. If the result depends on "
            "it (a reference, a teacher, averages), make it where the model is built, before "
            "s.track, track it, s.track(model=…, opt=…, reference=…), and change it in s.update()"
        )

    def _look_for_untracked(self) -> None:
        found = self._optimizing.untracked()
        if self._tell and not self._may_count:
            modules = self._optimizing.modules
            tracked = (modules, self._schedules.values(), self._optimizers.values())
            generators = self._tracked.generators() if self._tracked is not None else []
            more = (self._others.values(), generators)
            self._optimizing.parts.look(chain(*tracked, *more), modules)
        if found and not self._may_count:
            self._warn(
                f"the model is trained by an optimizer that is not tracked ({_some(found)}): a "
                "replaced rank begins with a new one, and its replica differs from then on. "
                "s.track(model=…, opt=…)"
            )

    def _replaced(self, name: str, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether a load_state_dict gave an optimizer another state. (That of its own is what
        accelerate gives it when it wraps it: torch puts the same tensors into a new dict.)"""
        before, now = _leaves(self._states[name]), _leaves(optimizer.state)
        return bool(now) and (len(before) != len(now) or not all(map(_is_that, before, now)))

    def _warn_changed(self, changed: tuple[str, ...]) -> None:
        self._warn(
            f"{_some(changed)} changed between two updates: a fault meanwhile takes that for the "
            "state, or loses it. Change it inside of `with s.update():`; for a validation with "
            "other weights use a module of its own"
        )

    def _warn(self, line: str) -> None:
        key = line.partition(":")[0].partition(" changed ")[2] or line
        if self._tell and key not in self._told:
            self._told.add(key)
            log.warning("%s", line)


def hidden_state(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the attributes of an optimizer that hold state beside `state` and `param_groups`. One
    with a state_dict of its own is trusted. Pure."""
    if type(optimizer).__module__.startswith("torch.") or has_own_state(optimizer):
        return ()
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return tuple(
        name
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups", "defaults")
        and any(_holds_state(one, optimizer, known) for one in _items(value))
    )


def _holds_state(thing: Any, optimizer: torch.optim.Optimizer, known: set[int]) -> bool:
    if isinstance(thing, torch.optim.Optimizer):
        return thing.state is not optimizer.state
    return isinstance(thing, torch.Tensor) and id(thing) not in known


def _leaves(value: Any) -> list[Any]:
    """Return what containers within containers hold."""
    if not isinstance(value, Mapping | list | tuple):
        return [value]
    return [leaf for item in _items(value) for leaf in _leaves(item)]


def _is_that(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and bool(one == other))


def _items(value: Any) -> list[Any]:
    """Return a value, or what a container holds."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


def _steps(thing: Any) -> Any:
    """Return how often a scheduler has stepped; None: it is none."""
    return getattr(thing, "last_epoch", None)


def _content(thing: Any) -> int:
    return content_digest(thing.state_dict())


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
