"""The guards' findings, as pure functions of the words that ranks exchange."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from state_ranks import view_of
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.model import PeerStatus
from slurm_resilience.training.content_digest import content_digest
from slurm_resilience.training.data.data_module import is_data_module, training_part
from slurm_resilience.training.guards import split_sources
from slurm_resilience.training.guards.plain_attributes import PlainAttributes, UntrackedBuffers
from slurm_resilience.training.guards.replica_check import (
    EVERY_STEPS,
    RankDifference,
    RankWords,
    ReplicaCheck,
    differences,
    drew_apart,
    same_random_numbers,
    steps_between,
)
from slurm_resilience.training.guards.witness import (
    MOST_IN_A_ROW,
    MOST_IN_ALL,
    Correction,
    ReplicaFault,
    Witness,
    correction_line,
    is_outvoted,
)
from slurm_resilience.training.state.rollback import SAMPLED, ContentSample

pytestmark = pytest.mark.training


def found(rows: list[RankWords], replica_size: int = 1) -> list[RankDifference]:
    return differences(rows, replica_size)


def test_ranks_that_agree_are_not_told_of() -> None:
    assert not found([RankWords(state=5, stream_at=1, stream=7, length=3)] * 4)


def test_the_ranks_that_differ_from_most_are_named() -> None:
    rows = [RankWords(state=5), RankWords(state=6), RankWords(state=5)]
    assert found(rows) == [RankDifference("state", (1,))]
    # Of two, the lower rank is taken to be right.
    assert found(rows[1:]) == [RankDifference("state", (1,))]


def test_only_ranks_with_the_same_part_are_compared() -> None:
    rows = [RankWords(state=5), RankWords(state=6)] * 2
    assert not found(rows, 2)
    assert found([*rows[:3], RankWords(state=7)], 2) == [RankDifference("state", (3,))]


def test_a_stream_is_compared_where_the_same_batch_was_read() -> None:
    rows = [RankWords(stream_at=1, stream=7), RankWords(stream_at=4, stream=8), RankWords()]
    assert not found(rows)
    assert found([rows[0], RankWords(stream_at=1, stream=9)]) == [RankDifference("stream", (1,))]


def test_equal_batches_are_named_where_a_source_splits_by_itself() -> None:
    rows = [RankWords(batch=1), RankWords(batch=2), RankWords(batch=1)]
    assert found(rows) == [RankDifference("batch", (0, 2))]
    # Ranks of one replica may share a batch.
    assert not found([RankWords(batch=1), RankWords(batch=1)], 2)


def test_ranks_that_draw_the_same_random_numbers() -> None:
    rows = [RankWords(random=n) for n in (1, 2, 1, 3)]
    assert same_random_numbers(rows, 1) == (0, 2)
    assert same_random_numbers(rows, 2) == (0, 2)
    assert same_random_numbers([rows[1], rows[1], rows[0], rows[3]], 2) == ()
    assert same_random_numbers(rows[:2], 1) == ()


def test_one_replica_alone_does_not_say_that_ranks_draw_numbers_of_their_own() -> None:
    """HSDP went on with one replica, and ranks that had always drawn the same were accused."""
    rows = [RankWords(random=n) for n in (1, 1, 2, 3)]
    assert not drew_apart(rows[:2], 2)
    assert not drew_apart(rows[1:3], 2)
    assert not drew_apart(rows[:1], 1)
    assert not drew_apart(rows, 1)
    assert drew_apart(rows, 2)
    assert drew_apart(rows[1:], 1)


def test_ranks_are_compared_at_the_first_two_updates_and_then_now_and_then() -> None:
    check = ReplicaCheck(None)
    check.enter(2)
    assert [check.due(step) for step in range(2)] == [True, True]
    never, alone = ReplicaCheck(0), ReplicaCheck(None)
    never.enter(2)
    alone.enter(1)
    assert not never.due(0) and not alone.due(0)


def test_comparing_takes_a_hundredth_of_the_time_at_most() -> None:
    # A step of one second, checksums of half a second: every 50 steps would do.
    assert steps_between(seconds=0.5, each=1.0) == EVERY_STEPS
    assert steps_between(seconds=5.0, each=1.0) == 500


def test_a_copy_that_waits_for_its_certificate_has_the_ranks_compared() -> None:
    check, never = ReplicaCheck(None), ReplicaCheck(0)
    for one in (check, never):
        one.enter(2)
        for step in range(3):
            one.due(step)
    check.due_at = 100
    assert not check.due(10) and check.due(11, certify=True)
    assert not never.due(11, certify=True)


@pytest.mark.parametrize(
    ("sums", "replica_size", "outvoted"),
    [
        ([5, 6, 5], 1, True),
        ([5, 6], 1, False),
        ([5, 5, 6, 6], 1, False),
        ([5, 6, 7, 8], 1, False),
        ([5, 5, 5, 6, 7], 1, True),
        # Parts of a model: two replicas, then three.
        ([5, 6, 5, 7], 2, False),
        ([5, 6, 5, 7, 5, 6], 2, True),
    ],
)
def test_a_strict_majority_is_right(sums: list[int], replica_size: int, outvoted: bool) -> None:
    assert is_outvoted(sums, replica_size) is outvoted


def fault(step: int = 7, **given: Any) -> ReplicaFault:
    usual = {"is_outvoted": True, "only_parameters": True}
    return ReplicaFault(step, (2,), ("net.0.weight",), **usual | given)


def test_the_ranks_that_differ_are_healed_from_a_majority() -> None:
    assert Witness().judge(fault()) is Correction.HEAL
    assert Witness().judge(fault(certified=4)) is Correction.HEAL


def test_all_go_back_where_no_majority_is_right() -> None:
    assert Witness().judge(fault(is_outvoted=False, certified=4)) is Correction.GO_BACK
    # There is nothing to go back to.
    assert Witness().judge(fault(is_outvoted=False)) is Correction.TELL


def test_what_no_chip_does_is_only_told() -> None:
    assert Witness().judge(fault(only_parameters=False)) is Correction.TELL


def test_a_program_whose_replicas_differ_is_corrected_a_few_times() -> None:
    """It goes back and forth between the same steps: what it does in between proves nothing."""
    witness, corrected = Witness(), 0
    for _ in range(50):
        witness.agreed(3)
        if witness.judge(fault()) is Correction.TELL:
            break
        corrected += 1
    assert corrected == MOST_IN_A_ROW
    # It is over that step.
    witness.agreed(8)
    assert witness.judge(fault(9)) is Correction.HEAL


def test_a_chip_that_flips_bits_for_ever_is_corrected_a_few_times_more() -> None:
    witness, corrected = Witness(), 0
    for step in range(0, 1000, 10):
        witness.agreed(step + 1)
        corrected += witness.judge(fault(step + 5)) is Correction.HEAL
    assert corrected == MOST_IN_ALL


def test_what_is_done_anew_is_not_certified() -> None:
    witness = Witness()
    assert witness.certified == -1
    witness.agreed(10)
    # The optimizer's tensors of step 10 show in the parameters of step 11.
    assert witness.certified == 9
    witness.healed(4)
    assert witness.certified == 4
    witness.agreed(3)
    assert witness.certified == 4


def test_a_correction_names_the_node() -> None:
    view = view_of([PeerStatus()] * 4)
    node, seat = view.members[2].peer.node, view.members[2].peer.seat
    line = correction_line(fault(), Correction.HEAL, view)
    assert line == (
        f"step 7: seat {seat} ({node}) differs from the other replicas in net.0.weight, "
        "and is healed from them"
    )
    back = correction_line(fault(certified=4), Correction.GO_BACK, view)
    assert back.endswith("no majority says which is right: all go back to step 4")


def test_contents_are_told_apart() -> None:
    x = torch.arange(4.0)
    assert content_digest([x, {"a": 1}]) == content_digest([x.clone(), {"a": 1}])
    other = [[x + 1, {"a": 1}], [x, {"a": 2}], [x.double(), {"a": 1}], (x, {"a": 1})]
    assert len({content_digest(one) for one in other} | {content_digest([x, {"a": 1}])}) == 5
    assert content_digest(range(0, 9, 2)) != content_digest(range(1, 10, 2))


def test_a_write_that_torch_does_not_count_is_seen() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(SAMPLED + 3)]
    sample = ContentSample(parameters)
    sample.take()  # the last three: the first turn is the second window
    assert sample.differ() == set()
    parameters[SAMPLED + 1].data.add_(1)
    assert sample.differ() == {SAMPLED + 1}
    sample.take()  # the first ones
    parameters[SAMPLED].data.add_(1)
    assert sample.differ() == set()
    parameters[2].data = torch.ones(3)
    assert sample.differ() == {2}


DATA = TensorDataset(torch.arange(8.0))


class Stream(IterableDataset):  # type: ignore[type-arg]
    _distributed: Any = None

    def __iter__(self) -> Any:
        return iter(range(8))


class Own(Sampler[int]):
    """It may split by rank, or not."""


def refused(source: Any, rank: int = 1, world: int = 2) -> str:
    view = view_of([PeerStatus()] * world)
    try:
        split_sources.refuse(source, view, rank)
    except UsageError as error:
        return str(error)
    return ""


def test_sources_that_s_loader_splits_are_taken() -> None:
    for source in (DATA, Stream(), [1, 2], lambda: DATA):
        assert refused(source) == ""


def test_a_stream_that_says_it_is_split_is_refused() -> None:
    stream = Stream()
    stream._distributed = SimpleNamespace(rank=1, world_size=2)
    assert "split by rank already (rank 1 of 2)" in refused(stream)
    assert refused(DataLoader(stream)) == ""


@pytest.mark.parametrize("how", [{}, {"shuffle": True}, {"batch_size": 2, "drop_last": True}])
def test_a_dataloader_that_nothing_splits_is_refused(how: dict[str, Any]) -> None:
    assert "does not split by rank" in refused(DataLoader(DATA, **how))
    assert refused(DataLoader(DATA, **how), rank=0, world=1) == ""


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (WeightedRandomSampler([1.0] * 8, 8), "global_batch=…, weights=…), which draws by these"),
        (SubsetRandomSampler([1, 2]), "s.loader(torch.utils.data.Subset(dataset, indices), glob"),
        (RandomSampler(DATA), "s.loader(dataset, global_batch=…), which shuffles"),
        (SequentialSampler(DATA), "shuffle=False), which splits in the dataset's order"),
    ],
)
def test_what_a_sampler_does_is_not_lost_by_the_advice(sampler: Any, words: str) -> None:
    """ "Give its dataset" to one who has weights makes another training, without a word."""
    assert words in refused(DataLoader(DATA, sampler=sampler))


def test_a_dataloader_that_splits_is_taken() -> None:
    assert refused(DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 1))) == ""
    assert "rank 0 of 2, and this is rank 1 of 2" in refused(
        DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0))
    )
    # What its batches hold is compared between the ranks.
    assert refused(DataLoader(DATA, sampler=Own())) == ""
    assert refused(DataLoader(Stream())) == ""


class Module:
    """A DataModule, as far as Lightning calls it."""

    def __init__(self, **loader_kwargs: Any) -> None:
        self.called: list[str] = []
        self._loader_kwargs = loader_kwargs

    def prepare_data(self) -> None:
        self.called.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.called.append(f"setup {stage}")

    def train_dataloader(self) -> Any:
        return DataLoader(range(8), **self._loader_kwargs)  # type: ignore[arg-type]


def test_a_data_module_gives_its_training_dataset() -> None:
    module = Module(batch_size=2, shuffle=True)
    assert is_data_module(module) and not is_data_module(DataLoader([1]))
    assert training_part(module) == (range(8), None, None)
    assert module.called == ["prepare_data", "setup fit"]
    assert training_part(Module(collate_fn=list)).collate_fn is list
    module.train_dataloader = lambda: [DataLoader([1])]  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="gives a list"):
        training_part(module)


def test_a_data_modules_sampler_is_kept_or_refused() -> None:
    """Its weights, and the part of the samples that it chose, were left out without a word."""
    part = training_part(Module(sampler=WeightedRandomSampler([1.0] * 7 + [2.0], 8)))
    assert part.weights.tolist() == [1.0] * 7 + [2.0]
    part = training_part(Module(sampler=SubsetRandomSampler([1, 5])))
    assert isinstance(part.dataset, Subset) and list(part.dataset.indices) == [1, 5]
    with pytest.raises(UsageError, match=r"a sampler of its own \(Own\), which would be left out"):
        training_part(Module(sampler=Own()))
    module = Module()
    module.train_dataloader = lambda: DataLoader(Stream())  # type: ignore[method-assign, arg-type]
    assert isinstance(training_part(module).dataset, Stream)


WEIGHTED = WeightedRandomSampler([1.0] * 7 + [2.0], 8)
LEFT_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "a list of numbers": ({"sampler": [1, 5]}, "list"),
    "a subclass": ({"sampler": type("Rising", (RandomSampler,), {})(range(8))}, "Rising"),
    "batches of its own": (
        {"batch_sampler": type("Buckets", (BatchSampler,), {})(WEIGHTED, 2, drop_last=False)},
        "Buckets",
    ),
    "a list of batches": ({"batch_sampler": [[1, 5]]}, "list"),
    "put back": (
        {"sampler": RandomSampler(range(8), replacement=True)},
        "RandomSampler with replacement",
    ),
    "a longer epoch": (
        {"sampler": WeightedRandomSampler([1.0] * 8, 80)},
        "WeightedRandomSampler of 80 samples",
    ),
    "the first few": (
        {"sampler": SequentialSampler(range(3))},
        "SequentialSampler of 3 of 8 samples",
    ),
    "some of them": ({"sampler": RandomSampler(range(3))}, "RandomSampler of 3 of 8 samples"),
    "not put back": (
        {"sampler": WeightedRandomSampler([1.0] * 8, 8, replacement=False)},
        "WeightedRandomSampler without replacement",
    ),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_data_modules_other_choices_are_refused(kind: str) -> None:
    """Each was left out without a word: the training had other samples."""
    loader_kwargs, words = LEFT_OUT[kind]
    with pytest.raises(UsageError, match=re.escape(f"({words}), which would be left out")):
        training_part(Module(**loader_kwargs))


def test_a_sampler_within_batches_is_kept() -> None:
    batches = BatchSampler(WEIGHTED, 2, drop_last=False)
    weights = training_part(Module(batch_sampler=batches)).weights
    assert weights.tolist() == [1.0] * 7 + [2.0]
    assert ", weights=…" in refused(DataLoader(DATA, batch_sampler=batches))
    batches = BatchSampler(RandomSampler(DATA), 2, drop_last=False)
    assert "shuffle=False" not in refused(DataLoader(DATA, batch_sampler=batches))


def test_a_data_module_that_gives_whole_batches_is_refused() -> None:
    """Its batches were taken for samples."""
    with pytest.raises(UsageError, match="gives whole batches"):
        training_part(Module(batch_size=None))


def test_a_refusal_names_the_collate_function_that_is_needed() -> None:
    assert "collate_fn=…" not in refused(DataLoader(DATA))
    assert "collate_fn=…" in refused(DataLoader(DATA, collate_fn=list))


class Cooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.cold, self.seen, self.loss = 2.0, 0, 9.0


def told_of_cooling(
    change: Callable[[Cooling, int], None], *, asked_step: bool = False
) -> set[str]:
    model, attributes, told = Cooling(), PlainAttributes(), set[str]()
    attributes.begin({"model": model}, {})
    for number in range(4):
        told.update(attributes.counted(asked_step=asked_step))
        change(model, number)
    return told


def test_a_fraction_that_follows_from_the_one_before_is_told() -> None:
    """A temperature that cools inside of the update: a replaced rank computed with the first one,
    without a word."""

    def cool(model: Cooling, number: int) -> None:
        model.cold *= 0.9
        model.drop.p -= 0.03
        model.seen += 1
        model.loss = 1 / (number + 1)

    fractions = {"model.cold", "model.drop.p"}
    assert told_of_cooling(cool) == fractions | {"model.seen"}
    # One that follows from the step changes alike.
    assert told_of_cooling(cool, asked_step=True) == {"model.seen"}


def test_fractions_that_are_set_now_and_then_are_not_told() -> None:
    def cool(model: Cooling, number: int) -> None:
        if number == 1:
            model.cold *= 0.9

    assert told_of_cooling(cool) == set()


class Centre(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("fixed", torch.zeros(2))


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("anew", [False, True])
def test_buffers_of_a_loss_that_is_not_tracked_are_told(tracked: bool, anew: bool) -> None:
    loss, model, buffers = Centre(), nn.BatchNorm1d(2), UntrackedBuffers()
    buffers.look([loss, model, {}, 3], [model, loss] if tracked else [model])
    told: list[str] = []
    for _ in range(3):
        model(torch.randn(4, 2))
        loss.centre = loss.centre * 0.9 + 1 if anew else loss.centre.add_(1)
        told += buffers.changed()
    assert told == ([] if tracked else ["Centre.centre"])
