"""Many simulated runs: counted, kept in a file, and gone on with where they stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from slurm_resilience.errors import UsageError

F = TypeVar("F", bound=msgspec.Struct)


class SeedFailure(msgspec.Struct, frozen=True):
    """A run in which something happened that must never happen."""

    seed: int
    text: str


class Campaign(Generic[F]):
    """Runs of one simulation, counted.

    Args:
        figures: their type; `figures(seed)` has counted nothing yet.
        run: runs so many from a seed on, and counts them; it goes to other processes.
        together: runs in one part.
        seed: name of the field with the first run's seed.
        runs: name of the field that counts them.
        seconds: name of the field with their computing time.
    """

    def __init__(
        self,
        figures: type[F],
        run: Callable[[int, int], F],
        *,
        together: int,
        seed: str,
        runs: str,
        seconds: str,
    ) -> None:
        self._figures = figures
        self._run = run
        self._together = together
        self._seed, self._runs, self._seconds = seed, runs, seconds

    def load(self, file: Path | None, seed: int) -> F:
        """Read the figures of an earlier call.

        Raises:
            UsageError: the file holds something else, or began with another seed.
        """
        fresh = msgspec.convert({self._seed: seed}, self._figures)
        if file is None or not file.exists():
            return fresh
        try:
            known = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
            if self._seed not in known:
                return fresh
            figures = msgspec.convert(known, self._figures)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UsageError(f"{file}: no figures of a simulation: {error}") from None
        began = getattr(figures, self._seed)
        if began != seed:
            raise UsageError(f"{file}: began with seed {began}; say --seed {began}")
        return figures

    def go_on(
        self,
        seed: int,
        runs: int,
        *,
        jobs: int = 1,
        file: Path | None = None,
        clock: Callable[[], float],
        progress: Callable[[F], None] = lambda _: None,
    ) -> F:
        """Run until there are so many, and those in the file count.

        Args:
            seed: of the first one.
            runs: in all.
            jobs: processes that run them.
            file: keeps the figures between two calls.
            clock: tells seconds.
            progress: is called after each part.
        """
        figures = self.load(file, seed)
        parts = [
            (seed + begin, min(self._together, runs - begin))
            for begin in range(getattr(figures, self._runs), runs, self._together)
        ]
        begun = clock()
        for part in self._figures_of(parts, jobs):
            now = clock()
            setattr(part, self._seconds, now - begun)
            begun = now
            self._add(figures, part)
            _save_beside(file, figures)
            progress(figures)
        return figures

    def _figures_of(self, parts: list[tuple[int, int]], jobs: int) -> Iterator[F]:
        """Yield the figures of each part, in order: the file then says which seed is next."""
        if jobs == 1:
            for seed, runs in parts:
                yield self._run(seed, runs)
            return
        with ProcessPoolExecutor(jobs) as pool:
            for future in [pool.submit(self._run, seed, runs) for seed, runs in parts]:
                yield future.result()

    def _add(self, total: F, part: F) -> None:
        """Count the runs of another part in: numbers, counts by a key, and failures."""
        for name in total.__struct_fields__:
            own, more = getattr(total, name), getattr(part, name)
            if name == self._seed:
                continue
            if isinstance(own, dict):
                for key, count in more.items():
                    own[key] = own.get(key, 0) + count
            else:
                setattr(total, name, own + more)


def _save_beside(file: Path | None, figures: msgspec.Struct) -> None:
    """Write the figures, whole or not at all; those of another core stay in the file."""
    if file is None:
        return
    known = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    draft = file.with_name(f".{file.name}.new")
    merged = known | msgspec.to_builtins(figures)
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(merged)) + b"\n")
    draft.replace(file)
