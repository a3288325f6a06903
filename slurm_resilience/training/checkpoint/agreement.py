"""The ranks that save or load together, and how they agree whether a part went well."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slurm_resilience.errors import SresError
from slurm_resilience.training.checkpoint.manifest import Damaged

T = TypeVar("T")
_HALF_WRITTEN = "inline_container.cc"
"""torch's writer of files, which counts its bytes when it closes one. What the disk said is lost
then ("unexpected pos 704 vs 598")."""

_GROUP_IS_GONE = re.compile(
    r"is not registered, please create group|in the world group map|Invalid process group"
    r"|Default process group has not been initialized"
)
"""Words of torch about a process group that was left meanwhile."""

# DCP warns of every save and load of a single process; here that is what was asked for.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unini")


class PartFailed(Exception):
    """Some rank could not do its part. Every rank of the team raises this, with the same text."""


class BrokenOff(Exception):
    """The ranks that save together part: what this one still writes is of no use."""


class SaveAgreement:
    """A process group, or this process alone.

    A part that fails on one rank fails on all of them, so that no rank waits for one that gave up.
    A group that breaks in the middle (a rank died, the group was cut) raises what torch raises.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """
        Args:
            group: of CPU tensors (gloo), used by nothing else while a save or load is under way.
                Its timeout must be longer than the slowest rank writes.
        """
        self.group = group
        self.world = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    @property
    def leads(self) -> bool:
        """True on the rank that names, finishes and deletes directories."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return what every rank says, in the order of ranks."""
        if self.group is None:
            return [value]
        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, value, group=self.group)
        return said

    def together(self, part: Callable[[], T]) -> list[T]:
        """Let every rank do a part; what each of them returned, in the order of ranks.

        Raises:
            PartFailed: it failed on one rank or more.
        """
        failure = ""
        value: T | None = None
        try:
            value = part()
        except (Exception, CheckpointException) as error:
            failure = one_line(error)
        said = self.gather((failure, value))
        if failures := {rank: text for rank, (text, _) in enumerate(said) if text}:
            raise PartFailed(summary(failures, self.world))
        return [value for _, value in said]  # type: ignore[misc]


def summary(failures: dict[int, str], world: int) -> str:
    """Sum up the errors of some ranks in one line; an error that all have alike is named once."""
    rank, text = min(failures.items())
    if len(failures) == world and len({*failures.values()}) == 1:
        return text
    return f"rank {rank}: {text}" + _more(len(failures) - 1)


def one_line(error: BaseException) -> str:
    """Return an error in one line: of many ranks' failures the first, of a system error no
    number."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {one_line(first)}" + _more(len(error.failures) - 1)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    text = str(error).strip().split("\n", 1)[0]
    if _HALF_WRITTEN in text:
        return f"a file was not written whole; is the disk full, or a quota used up? ({text})"
    if _GROUP_IS_GONE.search(text):
        return "its world ended before it was written whole"
    plain = text and isinstance(error, RuntimeError | ValueError | PartFailed | Damaged | SresError)
    return text if plain else f"{type(error).__name__}: {text}"


def _more(ranks: int) -> str:
    return f" (and {ranks} more ranks)" if ranks else ""
