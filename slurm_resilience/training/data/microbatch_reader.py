"""Read one rank's microbatches of a step."""

from __future__ import annotations

from typing import Any

from slurm_resilience.training.data.order import SampleOrder
from slurm_resilience.training.data.source import Before, MapReader, Reader, SourceSample
from slurm_resilience.training.elastic.plan import StepSpan, plan


class MicrobatchReader:
    """A source of samples, asked for steps by the number of their first microbatch.

    Args:
        reader: of whole microbatches.
        order: of a map-style dataset.
        stride: microbatches of a full step.
        end: the first microbatch that the run does not have; None: the source says.
        together: ranks that hold a model together, see `plan`.
    """

    def __init__(
        self, reader: Reader, order: SampleOrder, stride: int, end: int | None, together: int
    ) -> None:
        self._reader = reader
        self._order = order
        self._stride = stride
        self._end = end
        self._together = together

    def read(self, number: int, rank: int, world: int, before: Before) -> SourceSample:
        """Fetch the microbatches of a rank, of the step that begins at ``number``.

        A rank without one gets one of another's, to compute with weight 0.
        """
        if isinstance(self._reader, MapReader):
            return self._by_index(number, rank, world)
        return self._in_order(number, rank, world, before)

    def _by_index(self, first: int, rank: int, world: int) -> SourceSample:
        count = self._stride if self._end is None else min(self._stride, self._end - first)
        share = plan(StepSpan(first, count), world, self._together)[rank]
        wanted = share.own or [share.first]
        batches = [self._reader.read(number, 0, 1, _unknown).batch for number in wanted]
        sizes = [self._order.size(number) for number in range(first, first + count)]
        return SourceSample("batch", batches, {"sizes": sizes})

    def _in_order(self, first: int, rank: int, world: int, before: Before) -> SourceSample:
        """All ranks read the whole step: only so they know where the stream ends."""
        found: list[SourceSample] = []
        stop = first + self._stride if self._end is None else min(first + self._stride, self._end)
        for number in range(first, stop):
            read = self._reader.read(number, 0, 1, before if number == first else _unknown)
            if read.kind == "end":
                break
            found.append(read)
        if not found:
            return SourceSample("end")
        share = plan(StepSpan(0, len(found)), world, self._together)[rank]
        batches = [found[number].batch for number in share.own or [share.first]]
        last = found[-1]
        note: dict[str, Any] = {**last.note, "sizes": [one.note["size"] for one in found]}
        return SourceSample("batch", batches, note, last.state)

    def close(self) -> None:
        """Let go of threads and iterators."""
        self._reader.close()


def _unknown() -> SourceSample | None:
    return None
