"""The loaders of one process. They outlive the block; their positions travel with the state."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from torch.utils.data import DataLoader

from slurm_resilience.errors import UsageError
from slurm_resilience.training.content_digest import content_digest
from slurm_resilience.training.data.cache.fingerprint import fingerprint
from slurm_resilience.training.data.loader import ReplayLoader
from slurm_resilience.training.guards import split_sources
from slurm_resilience.training.guards.replica_check import RankWords
from slurm_resilience.training.guards.source_contents import contents_word
from slurm_resilience.training.process_group import ProcessGroups
from slurm_resilience.training.recovery.healer import HealProgress

log = logging.getLogger("sres.training")


SESSIONS_OWN = {"source", "global_batch", "rank", "world", "steps", "name"}
"""Arguments of `ReplayLoader` that the session gives."""
UPDATES_LOOKED_AT = 2
"""A world's first updates tell whether the program reads ahead."""


class Loaders:
    """By name.

    Args:
        progress: where their committed positions are kept.
        cached: keep batches where they outlive the process.
    """

    def __init__(self, progress: HealProgress, *, cached: bool) -> None:
        self._progress = progress
        self._cached = cached
        self.opened: dict[str, ReplayLoader] = {}
        """By name; empty for a program that reads its data otherwise."""
        self._asked: dict[str, tuple[int, object]] = {}
        self._sources: dict[str, object] = {}
        self._contents: dict[str, int] = {}
        """By name, as they were when the source was given first: its loader keeps that one, and a
        dataset may fill itself later."""
        self._newest = self._newest_before = (0, "")
        """World and name of the one that was asked for last; the same of the last world in which
        one was."""
        self._told: set[str] = set()
        self._taken: dict[str, list[int]] = {}
        """The next batch of each loader when this world began, and after its first updates; only as
        long as these are looked at."""
        self._batch_word = 0

    def open(
        self,
        name: str,
        source: Any,
        global_batch: int,
        steps: int | None,
        group: ProcessGroups,
        loader_kwargs: dict[str, Any],
    ) -> ReplayLoader:
        """Return the loader of this name, at the first batch that is not committed. It is made the
        first time; later only its share changes.

        Args:
            name: tells several apart.
            source: a Dataset, a DataLoader, or an iterable.
            global_batch: samples of one step over all ranks.
            steps: batches in all; None: as the source says.
            group: the world that shares the batches.
            loader_kwargs: further arguments of `ReplayLoader`.

        Raises:
            UsageError: the name belongs to another loader, or the source is split by rank already,
                or by nothing; or there is no such argument.
        """
        _refuse_arguments(loader_kwargs)
        if not (loader_kwargs.get("microbatches") and isinstance(source, DataLoader)):
            # No DataLoader gives samples, whatever splits it: `ReplayLoader` says so.
            split_sources.refuse(source, group.view, group.rank)
        weights = loader_kwargs.get("weights")
        asked = (
            type(source),
            _length(source),
            global_batch,
            steps,
            content_digest(weights),
            repr(sorted((key, one) for key, one in loader_kwargs.items() if key != "weights")),
        )
        before = self._asked.get(name)
        again = before is not None and before[0] == group.view.generation
        if before is not None and again and (before[1] != asked or self._is_other(name, source)):
            raise UsageError(f"there is another loader with name={name!r}: give each its own name")
        self._asked[name] = group.view.generation, asked
        if self._newest[0] != group.view.generation:
            self._newest_before = self._newest
        self._newest = group.view.generation, name
        is_new = self._sources.get(name) is not source
        self._sources[name] = source
        rank, world = group.rank, group.view.size
        loader = self.opened.get(name)
        kept = self._kept_batch(name, global_batch, group)
        if loader is None:
            self._contents[name] = contents_word(source, weights)
            loader_kwargs = (
                {"autocommit": False} | ({} if self._cached else {"cache": False}) | loader_kwargs
            )
            loader = ReplayLoader(
                source,
                global_batch=kept,
                rank=rank,
                world=world,
                steps=steps,
                name=name,
                **loader_kwargs,
            )
            self.opened[name] = loader
        else:
            looks = not again and (is_new or weights is not None)
            if looks and contents_word(source, weights) != self._contents[name]:
                self._tell_other_contents(name, group)
            loader.rewind()
            loader.reshare(rank, world, microbatches=loader_kwargs.get("microbatches", 0))
        self._place(name, loader)
        self._taken[name] = [loader.next]
        if again and rank == 0:
            self._tell_over(name, loader)
        return loader

    def _is_other(self, name: str, source: object) -> bool:
        """Tell whether a source is not the one that the loader of this name was asked for last, as
        far as can be seen. Its batches would be taken for those of the first."""
        before = self._sources[name]
        return source is not before and fingerprint(source) != fingerprint(before)

    def _tell_over(self, name: str, loader: ReplayLoader) -> None:
        """Warn of a spent loader that is asked again in one world, as by a loop over epochs."""
        if loader.end is not None and loader.next >= loader.end and name not in self._told:
            self._told.add(name)
            log.warning(
                "loader %r: its %d batches come once in a training, and none is left. Give it "
                "epochs=, instead of a loop around s.loader; for an evaluation, take a DataLoader "
                "of your own",
                name,
                loader.end,
            )

    def _tell_other_contents(self, name: str, group: ProcessGroups) -> None:
        """Warn of a dataset that is another one after a fault; the first rank does that was in the
        last world."""
        old = [rank for rank, one in enumerate(group.view.members) if one.status.generation]
        if old and group.rank == old[0] and f"{name} is other" not in self._told:
            self._told.add(f"{name} is other")
            log.warning(
                "loader %r: the function has made another dataset than when it was entered first, "
                "with other samples or weights, or in another order; this one is not used, but a "
                "validation part that was split off with it may hold samples that were trained on. "
                "Seed what splits or shuffles it, or make it by s.once",
                name,
            )

    def _kept_batch(self, name: str, asked: int, group: ProcessGroups) -> int:
        """Return the samples of a step with which the loader of this name began, in a training that
        goes on; warn where the function asks for others now.

        Args:
            name: of the loader.
            asked: samples of a step, as the function says.
            group: the world.
        """
        kept = (self._progress.positions.get(name) or {}).get("global_batch", asked)
        if kept == asked:
            return asked
        old = [rank for rank, one in enumerate(group.view.members) if one.status.generation]
        if not old:  # of a checkpoint, which another program may have written: it is refused
            return asked
        if group.rank == old[0] and f"{name} of others" not in self._told:
            self._told.add(f"{name} of others")
            log.warning(
                "loader %r: global_batch is %d in this world, and was %d when the training began: "
                "%d is kept, so that no sample is lost. Give a number that does not follow from "
                "s.world, or let the batch change: s.microbatches(…, per_rank=…)",
                name,
                asked,
                kept,
                kept,
            )
        return int(kept)

    def look(self, loader: ReplayLoader, batch: Any) -> None:
        """Note what a batch holds whose source splits by rank itself."""
        if loader.kind == "batches":
            self._batch_word = content_digest(batch)

    def words(self, generation: Any) -> RankWords:
        """Return what is compared between the ranks: a replaced one has none of the loaders that
        were not asked for since.

        Args:
            generation: the world.
        """
        asked = {n: one for n, one in self.opened.items() if self._asked[n][0] == generation}
        at, stream = max((one.first_read for one in asked.values()), default=(0, 0))
        maps = {name: one for name, one in asked.items() if one.kind == "map"}
        lengths = [(name, one.order.length) for name, one in maps.items()]
        length = content_digest(sorted(lengths)) if lengths else 0
        held: list[Any] = [self._contents[name] for name in sorted(maps)]
        held += [maps[name].drawn_by for name in sorted(maps)]
        content = content_digest(held) if any(held) else 0
        return RankWords(
            stream_at=at, stream=stream, length=length, content=content, batch=self._batch_word
        )

    def healed(self) -> None:
        """Go to the position that came with a new state."""
        for name, loader in self.opened.items():
            loader.rewind()
            # Made before the healing, it does not know yet what came from a peer.
            self._place(name, loader)
            self._taken[name] = [loader.next]

    def commit(self) -> None:
        """Count the batches given so far to the step that is committed."""
        for name, loader in self.opened.items():
            loader.commit()
            if name in self._taken:
                self._note_taken(name, loader)
            self._progress.positions[name] = loader.state_dict()

    def _note_taken(self, name: str, loader: ReplayLoader) -> None:
        """Warn, after two updates of a world, of a program that reads ahead: its batches are
        counted to an update before their own, so that a fault leaves them out."""
        taken = self._taken[name]
        taken.append(loader.next)
        if len(taken) <= UPDATES_LOOKED_AT:
            return
        del self._taken[name]
        is_over = loader.end is not None and loader.next >= loader.end
        if is_over or "ahead" in self._told:
            return
        first, second = taken[1] - taken[0], taken[2] - taken[1]
        # By one; or by more, where each update takes one batch. Others may grow on purpose.
        if first == second + 1 > 1 or first > second == 1:
            self._told.add("ahead")
            log.warning(
                "loader %r: the first update took %d batches, the second %d: something reads "
                "ahead, and after a fault what it has read is left out. Take each batch in its own "
                "step; Lightning does where the loader has a length (__len__)",
                name,
                first,
                second,
            )

    def read_elsewhere(self, *, tell: bool) -> None:
        """Warn of a program whose own thread reads a loader: it reads ahead.

        Args:
            tell: this rank warns, for all.
        """
        if "thread" in self._told or not tell:
            return
        self._told |= {"thread", "ahead"}
        log.warning(
            "s.loader is read in a thread of the program's own, ahead of its steps: after a fault "
            "what it has read is left out. Read it in the loop itself; it keeps batches ready"
        )

    def warn_if_left_aside(self, generation: int, step: int) -> None:
        """Warn, at the end of a function that has made no step since a fault, if it has not come
        back to the loader in which it was then, and which has batches left.

        Args:
            generation: the world in which it ends.
            step: at which it was entered, and has ended.
        """
        _, name = self._newest_before if self._newest[0] == generation else self._newest
        loader = self.opened.get(name)
        if loader is None or self._asked[name][0] == generation or loader.end is None:
            return
        if 0 < loader.position < loader.end:
            log.warning(
                "the function was entered at step %d, and has ended without a step, and without "
                "loader %r, of which %d of %d batches were done: if a count of its own ended it (a "
                "patience, epochs), that has begun anew. Keep it in an object that is tracked, or "
                "end by s.step",
                step,
                name,
                loader.position,
                loader.end,
            )

    def close(self) -> None:
        """End all loaders: the training is over."""
        for loader in self.opened.values():
            loader.close()

    def _place(self, name: str, loader: ReplayLoader) -> None:
        position = self._progress.positions.get(name)
        if position is not None:
            loader.load_state_dict(position)


def _refuse_arguments(loader_kwargs: dict[str, Any]) -> None:
    """Refuse arguments that `ReplayLoader` has not got.

    Raises:
        UsageError: there are some.
    """
    known = inspect.signature(ReplayLoader).parameters.keys() - SESSIONS_OWN
    if unknown := sorted(loader_kwargs.keys() - known):
        raise UsageError(
            f"s.loader takes no {', '.join(unknown)}: it shares batches out by itself, and "
            "fetches them ahead in a thread of its own (threads= reads several samples at a time). "
            f"It takes {', '.join(sorted(known - {'microbatches', 'together'}))}"
        )


def _length(source: Any) -> int:
    """Return the number of items; -1: unknown. A DataLoader over a stream has a `__len__` that
    raises."""
    try:
        return len(source)
    except TypeError:
        return -1
