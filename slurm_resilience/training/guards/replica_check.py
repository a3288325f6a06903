"""Compare the ranks with each other: replicas that should be equal, and what the loaders give.

Ranks that hold the same part of the model exchange one checksum of its parameters, of the options
of its optimizers and of its schedulers: when the second update of each world begins, one step after
a healing, and again every so many steps. An optimizer's own tensors are not summed up: where they
differ, the parameters do one step later. All of it is one small collective before an update, so it
is left like any other when a rank dies.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slurm_resilience.clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import UsageError
from slurm_resilience.training.content_digest import content_digest
from slurm_resilience.training.guards.witness import SHOWN, ReplicaFault, is_outvoted
from slurm_resilience.training.process_group import ProcessGroups
from slurm_resilience.training.state import rng

log = logging.getLogger("sres.training")

EVERY_STEPS = 100
"""Steps between two comparisons, at least, where the training names no number."""
SHARE_OF_TIME = 0.01
"""The part of a training's time for comparisons, at most, where it names no number."""
FIRST_UPDATES = 2
"""Updates of each world before which ranks are compared: at the first one what the loaders gave, at
the second the replicas too."""


class RankWords(NamedTuple):
    """A rank's numbers, as they are exchanged; 0: nothing to compare."""

    every: int = 1
    """Steps after which this rank would compare again."""
    state: int = 0
    """Checksum of what is equal on all replicas."""
    stream_at: int = 0
    """The first batch that this process read of a stream, counted from 1."""
    stream: int = 0
    """Checksum of the first samples there, before they are shared out."""
    length: int = 0
    """Checksum of the lengths of datasets."""
    content: int = 0
    """Checksum of what datasets in memory hold."""
    batch: int = 0
    """Checksum of a batch whose source splits by rank itself."""
    certified: int = 0
    """One more than the newest certified step that this rank has a copy of."""
    random: int = 0
    """Checksum of the state of torch's random numbers; 0: this process has drawn none since
    `s.track`. (Processes that nothing has seeded differ in it from the start.)"""
    were_apart: int = 0
    """1: this process saw, in an earlier world, that each rank drew random numbers of its own."""
    buffers: int = 0
    """Checksum of the buffers that the last update has left."""
    fixed: int = 0
    """Checksum of the models of the program that do not train."""


class Checksums(NamedTuple):
    """A rank's checksums by name, each made when it is asked for."""

    state: Callable[[], Mapping[str, int]]
    """Checksums of what is equal on all replicas."""
    buffers: Callable[[], Mapping[str, int]]
    """Checksums of buffers, but for those that ranks may have of their own."""
    fixed: Callable[[], Mapping[str, int]] = dict
    """Checksums of models that do not train, and are not tracked."""
    modules: Collection[str] = ()
    """Names under which modules are tracked: theirs begin with one, and a dot."""


class RankDifference(NamedTuple):
    """Something about the ranks that should be otherwise."""

    what: str
    """A field of `RankWords`."""
    ranks: tuple[int, ...]
    """Those that differ from most others; of equal batches: those that have the same one."""


def differences(rows: Sequence[RankWords], replica_size: int) -> list[RankDifference]:
    """Find what the ranks should have in common and have not, or the other way round. Pure.

    Args:
        rows: of each rank.
        replica_size: ranks that hold one copy of the model together.
    """
    found = []
    parts = [range(part, len(rows), replica_size) for part in range(replica_size)]
    for field in ("state", "buffers", "fixed"):
        if odd := [rank for part in parts for rank in _odd(rows, part, field)]:
            found.append(RankDifference(field, tuple(sorted(odd))))
    everyone = range(len(rows))
    for field in ("length", "content"):
        # One of another length holds other samples as well: that is told once.
        if odd := _odd(rows, everyone, field):
            found.append(RankDifference(field, tuple(odd)))
            break
    by_number = defaultdict(list)
    for rank in everyone:
        by_number[rows[rank].stream_at].append(rank)
    if odd := [rank for ranks in by_number.values() for rank in _odd(rows, ranks, "stream")]:
        found.append(RankDifference("stream", tuple(sorted(odd))))
    for part in parts:
        # Ranks of one replica may share a batch, as tensor-parallel ones do.
        many = Counter(rows[rank].batch for rank in part if rows[rank].batch)
        same = [rank for rank in part if many[rows[rank].batch] > 1]
        if same:
            found.append(RankDifference("batch", tuple(same)))
            break
    return found


def same_random_numbers(rows: Sequence[RankWords], replica_size: int) -> tuple[int, ...]:
    """Return the ranks of a part, the first that has some, that draw the same as another. Pure.

    Args:
        rows: of each rank.
        replica_size: ranks that hold one copy of the model together. They may draw the same.
    """
    for part in range(replica_size):
        ranks = range(part, len(rows), replica_size)
        many = Counter(rows[rank].random for rank in ranks if rows[rank].random)
        if same := [rank for rank in ranks if many[rows[rank].random] > 1]:
            return tuple(same)
    return ()


def drew_apart(rows: Sequence[RankWords], replica_size: int) -> bool:
    """Tell whether ranks with the same part each draw random numbers of their own. One replica
    alone does not say. Pure.

    Args:
        rows: of each rank.
        replica_size: ranks that hold one copy of the model together.
    """
    own = len(rows) > replica_size and all(row.random for row in rows)
    return own and not same_random_numbers(rows, replica_size)


def _odd(rows: Sequence[RankWords], ranks: Iterable[int], field: str) -> list[int]:
    """Return the ranks that differ from most; of equally many, the lowest rank is right."""
    words = {rank: getattr(rows[rank], field) for rank in ranks}
    many = Counter(word for word in words.values() if word)
    if len(many) < 2:
        return []
    usual = max(many, key=lambda word: many[word])  # the first one of the greatest
    return [rank for rank, word in words.items() if word and word != usual]


def steps_between(seconds: float, each: float) -> int:
    """Return the steps between two comparisons that keep them below `SHARE_OF_TIME`. Pure.

    Args:
        seconds: of one comparison.
        each: seconds of a step.
    """
    return max(EVERY_STEPS, math.ceil(seconds / (SHARE_OF_TIME * max(each, 1e-6))))


class ReplicaCheck:
    """The comparisons of one process.

    Args:
        every: steps between two; None: `EVERY_STEPS`, or more where they would take more than
            `SHARE_OF_TIME`; 0: never.
        clock: tells the time.
    """

    def __init__(self, every: int | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._every = every
        self._clock = clock
        self._updates = 0
        """Updates of this world for which it was asked, or was to be asked."""
        self._alone = True
        self._before = (0, 0.0)
        """Step and end of the comparison before."""
        self.due_at = math.inf
        """The step before which the ranks are compared next."""
        self._told: set[str] = set()
        self._worlds = 0
        self._apart_in = math.inf
        """The first of them in which each rank drew random numbers of its own."""
        self._random = 0
        """Checksum of the state of torch's, as `s.track` has left it in this world."""
        self.last: dict[str, Any] = {}
        """Result of the last comparison of replicas: ``step``, ``equal``, ``seconds`` that it took,
        and ``every`` (steps until the next one)."""

    def enter(self, size: int) -> None:
        """Begin a new world of so many ranks."""
        self._updates = 0
        self._worlds += 1
        self._alone = size == 1
        self.due_at = math.inf if self._every == 0 or self._alone else 0

    def healed(self) -> None:
        """Note the random numbers that the healing has left."""
        self._random = _random_numbers()

    @property
    def looks_at_batches(self) -> bool:
        """True while the next comparison is one of what the loaders give."""
        return self._updates < FIRST_UPDATES and self._every != 0 and not self._alone

    def due(self, step: int, *, certify: bool = False) -> bool:
        """Tell whether the ranks are compared before an update that begins; count it. It need not
        be called at a step before `due_at`, where nothing waits for a comparison.

        Args:
            step: committed steps, the same on every rank.
            certify: a copy of the state waits for it, on every rank.
        """
        if self.due_at == math.inf:
            return False
        self._updates += 1
        return certify or step >= self.due_at

    def compare(
        self,
        group: ProcessGroups,
        step: int,
        given: RankWords,
        checksums: Checksums,
        *,
        uneven: bool = False,
    ) -> ReplicaFault | None:
        """Compare all ranks; every rank of the world comes here before the same update.

        Args:
            group: the world.
            step: committed steps.
            given: what the loaders gave.
            checksums: of this rank.
            uneven: ranks are given unequal shares, and so may draw other amounts of the same
                random numbers.

        Returns:
            What differs between replicas; None: nothing, or it was not looked at yet.

        Raises:
            RuntimeError: a rank went away meanwhile.
        """
        began = self._clock.monotonic()
        first = self._updates == 1
        names = {} if first else checksums.state()
        buffers = {} if first else checksums.buffers()
        fixed = checksums.fixed() if first else {}
        every = self._wanted(step, began, self._clock.monotonic() - began)
        words = given._replace(
            state=_sum(names),
            buffers=_sum(buffers),
            fixed=_sum(fixed),
            every=every,
            random=0 if (drawn := _random_numbers()) == self._random else drawn,
            were_apart=int(self._apart_in < self._worlds),
        )
        rows = _exchange(group, words)
        size = group.view.replica_size
        found = differences(rows, size)
        fault = None
        for one in found:
            if one.what == "state":
                differ = self._tell_state(group, step, names, one.ranks)
                fault = ReplicaFault(
                    step,
                    one.ranks,
                    tuple(differ),
                    is_outvoted([row.state for row in rows], size),
                    all(_is_parameter(name, checksums.modules) for name in differ),
                    min(row.certified for row in rows) - 1,
                )
            elif one.what == "buffers":
                self._tell_buffers(group, step, buffers, one.ranks)
            elif one.what == "fixed":
                self._tell_fixed(group, fixed, one.ranks)
            else:
                self._tell(group, _LINES[one.what].format(ranks=_ranks(one.ranks)))
        self._compare_random_numbers(group, rows, uneven=uneven)
        every = max(row.every for row in rows)  # the same on every rank
        if self._updates >= FIRST_UPDATES:
            self.due_at = step + every
        now = self._clock.monotonic()
        self._before = (step, now)
        if not first:
            equal = fault is None
            self.last = {"step": step, "equal": equal, "seconds": now - began, "every": every}
        return fault

    def found_equal(self, step: int) -> bool:
        """Tell whether replicas were compared after so many steps, and none differed."""
        return self.last.get("step") == step and self.last["equal"] is True

    def _wanted(self, step: int, now: float, seconds: float) -> int:
        """Return the steps until the next comparison, as this rank sees it."""
        if self._every:
            return self._every
        before, then = self._before
        if self._updates == 1 or step <= before:
            return EVERY_STEPS
        return steps_between(seconds, (now - then) / (step - before))

    def _tell_state(
        self, group: ProcessGroups, step: int, names: Mapping[str, int], odd: tuple[int, ...]
    ) -> list[str]:
        usual, differ = _names_that_differ(group, names, odd)
        self._tell(
            group,
            f"step {step}: replicas differ: {_ranks(odd)} from rank {usual} in {_some(differ)}. "
            "Something changes it there alone, or belongs to the state and is not tracked "
            "(schedule, scaler, averages, an optimizer's own attributes)",
        )
        return differ

    def _tell_buffers(
        self, group: ProcessGroups, step: int, names: Mapping[str, int], odd: tuple[int, ...]
    ) -> None:
        usual, differ = _names_that_differ(group, names, odd)
        self._tell(
            group,
            f"step {step}: buffers differ: {_ranks(odd)} from rank {usual} in {_some(differ)}. If "
            "forward, or an update, computes with them, ranks train different models, and a "
            "replaced one takes those of a peer: make them equal before each s.update() "
            "(all_reduce), or wrap by s.ddp, whose forward sends those of rank 0",
        )

    def _tell_fixed(
        self, group: ProcessGroups, names: Mapping[str, int], odd: tuple[int, ...]
    ) -> None:
        # One rank may have a model for itself, to evaluate with.
        usual, differ = _names_that_differ(group, names, odd, in_both=True)
        if not differ:
            return
        self._tell(
            group,
            f"models that do not train differ: {_ranks(odd)} from rank {usual} in {_some(differ)}. "
            "If the loss depends on them, ranks train towards different things, and a replaced one "
            "builds yet another: load their weights, or seed before they are built; or build them "
            "in s.once and track them",
        )

    def _compare_random_numbers(
        self, group: ProcessGroups, rows: Sequence[RankWords], *, uneven: bool
    ) -> None:
        """Tell of ranks that draw the same since a fault, for all that each drew its own before. A
        rank that was replaced does not know."""
        same = same_random_numbers(rows, group.view.replica_size)
        knows = next((rank for rank, row in enumerate(rows) if row.were_apart), -1)
        if same and knows >= 0:
            self._tell(group, SAME_NUMBERS.format(ranks=_ranks(same)), by=knows)
        if not uneven and drew_apart(rows, group.view.replica_size):
            self._apart_in = min(self._apart_in, self._worlds)

    def _tell(self, group: ProcessGroups, line: str, by: int = 0) -> None:
        key = line.partition(":")[2]
        if group.rank == by and key not in self._told:
            self._told.add(key)
            log.error("%s", line)


def refuse_other_frozen(group: ProcessGroups, names: Mapping[str, int]) -> None:
    """Refuse a training whose ranks have different frozen parameters, which are never sent.

    Args:
        group: the world; all ranks come here.
        names: checksums by name of this rank's frozen parameters.

    Raises:
        UsageError: on every rank; says which ranks differ, and in what.
        RuntimeError: a rank went away meanwhile.
    """
    rows = _exchange(group, RankWords(state=_sum(names)))
    for one in differences(rows, group.view.replica_size):
        usual, differ = _names_that_differ(group, names, one.ranks)
        raise UsageError(
            f"frozen parameters differ: {_ranks(one.ranks)} from rank {usual} in {_some(differ)}. "
            "With trainable_only they are never sent: seed before you build, or load them"
        )


def refuse_other_gradients(group: ProcessGroups, module: nn.Module) -> None:
    """Refuse to exchange gradients where a parameter has one on some ranks only: gloo ends the
    processes where they meet another number of them than they await.

    Args:
        group: the world; all ranks come here.
        module: what is about to be wrapped.

    Raises:
        UsageError: on every rank; says which ranks differ, and in what.
        RuntimeError: a rank went away meanwhile.
    """
    names = {name: 1 + one.requires_grad for name, one in module.named_parameters()}
    rows = _exchange(group, RankWords(state=_sum(names)))
    for one in differences(rows, 1):
        usual, differ = _names_that_differ(group, names, one.ranks)
        raise UsageError(
            f"s.ddp: requires_grad differs: {_ranks(one.ranks)} from rank {usual} in "
            f"{_some(differ)}. Freeze and unfreeze on all ranks alike: by s.step, with >=, between "
            "s.track and s.ddp"
        )


def _names_that_differ(
    group: ProcessGroups, names: Mapping[str, int], odd: tuple[int, ...], *, in_both: bool = False
) -> tuple[int, list[str]]:
    """Return a rank that has what the first odd rank should have, and what any odd rank has
    otherwise; the first one's come first.

    Args:
        group: the world; all ranks come here.
        names: checksums by name of this rank.
        odd: ranks that differ.
        in_both: leave out what one of the two does not have.
    """
    by_rank: list[Any] = [None] * group.view.size
    dist.all_gather_object(by_rank, dict(names))
    size = group.view.replica_size
    differ: dict[str, None] = {}
    for rank in reversed(odd):
        usual = next(r for r in range(rank % size, len(by_rank), size) if r not in odd)
        theirs, others = by_rank[rank], by_rank[usual]
        shared = theirs.keys() & others.keys() if in_both else theirs.keys()
        mine = [name for name in theirs if name in shared and theirs[name] != others.get(name)]
        differ = dict.fromkeys(mine) | differ
    return usual, list(differ)


def _random_numbers() -> int:
    """Return a checksum of the state of torch's, the GPU's too: dropout draws from that alone."""
    return content_digest(rng.read(but=("random", "numpy")))


def _is_parameter(name: str, modules: Collection[str]) -> bool:
    module, dot, _ = name.partition(".")
    return bool(dot) and module in modules


SAME_NUMBERS = (
    "{ranks} draw the same random numbers, and drew others before the fault: a replaced rank goes "
    "on with those of the rank that healed it, and what both draw (batches by torch.randint, "
    "noise) comes twice from now on. Seed in the loop by rank and step: "
    "torch.manual_seed(1000 * s.step + s.rank)"
)
_LINES = {
    "stream": (
        "s.loader: {ranks} read other samples from this stream than the others: it is split by "
        "rank already, or shuffled anew on each rank. s.loader splits it once more, so samples "
        "never come: give every rank the same stream"
    ),
    "length": (
        "s.loader: on {ranks} the dataset has another length than elsewhere: it is split by rank "
        "already. s.loader splits it once more, so samples never come: give the whole dataset"
    ),
    "content": (
        "s.loader: on {ranks} the dataset holds other samples than elsewhere, or in another order, "
        "or has other weights: some come twice, and others never. Seed what splits or shuffles it "
        "(random_split(…, generator=torch.Generator().manual_seed(0))), and sort lists of files"
    ),
    "batch": (
        "s.loader: {ranks} were given the same batch: this source does not split by rank, and "
        "global_batch has no effect on it. Give its dataset"
    ),
}


def _exchange(group: ProcessGroups, mine: RankWords) -> list[RankWords]:
    device = "cuda" if group.backend == "nccl" else "cpu"
    words = torch.tensor(mine, dtype=torch.int64, device=device)
    rows = [torch.empty_like(words) for _ in range(group.view.size)]
    dist.all_gather(rows, words)
    return [RankWords(*row.tolist()) for row in rows]


def _sum(names: Mapping[str, int]) -> int:
    """One number for all of them; 0: there are none."""
    if not names:
        return 0
    total = hashlib.blake2b(repr(sorted(names.items())).encode(), digest_size=8)
    return int.from_bytes(total.digest(), "little") >> 1 | 1


def _ranks(ranks: Sequence[int]) -> str:
    words = _some([str(rank) for rank in ranks])
    return f"rank {words}" if len(ranks) == 1 else f"ranks {words}"


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
