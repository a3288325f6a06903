"""A training by microbatches: the same gradients in every world, to the last bit if so wished."""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from rank_threads import in_threads  # noqa: E402
from torch import nn  # noqa: E402

from slurm_resilience.errors import UsageError  # noqa: E402
from slurm_resilience.training.data import ReplayLoader  # noqa: E402
from slurm_resilience.training.elastic import same_numerics, tree_exchange  # noqa: E402
from slurm_resilience.training.elastic.microbatch_step import NO_TOKENS  # noqa: E402
from slurm_resilience.training.elastic.microbatches import (  # noqa: E402
    MicrobatchSteps,
    step_length,
)
from slurm_resilience.training.elastic.same_numerics import (  # noqa: E402
    compare_ranks,
    numerics,
    refuse_differences,
)

SIZE, COUNT = 4, 8
CPU = torch.device("cpu")


class Points(torch.utils.data.Dataset[Any]):
    """Sample i: six numbers drawn from i, their sine, and i."""

    fingerprint = "points"

    def __init__(self, length: int = 200) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin().view(1), index


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 33), nn.GELU(), nn.Dropout(0.3), nn.Linear(33, 1))


def optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 1e-2)


class Rank:
    """One rank's net, and its loader, through worlds of several sizes."""

    def __init__(self, **loader_kwargs: Any) -> None:
        self.net = build()
        self.opt = optimizer(self.net)
        self.position = 0
        self.seen: list[int] = []
        self.kwargs = {"source": Points(), "global_batch": SIZE} | loader_kwargs

    def enter(self, rank: int, world: int, same_bits: bool, length: int = COUNT) -> Any:
        """Yield the steps of a world of this size."""
        loader = ReplayLoader(
            rank=rank, world=world, microbatches=length, cache=False, **self.kwargs
        )
        loader.seek(self.position)
        steps = MicrobatchSteps(
            [self.net],
            loader,
            size=SIZE,
            length=length,
            full=length,
            same_bits=same_bits,
            rate="constant",
            device=CPU,
            waits=lambda: None,
        )
        while True:
            first = loader.next
            batches = next(iter(loader), None)
            if batches is None:
                break
            self.position = loader.next
            yield steps.step(first, batches)
        loader.close()

    def train(self, rank: int, world: int, steps: int, same_bits: bool = True) -> bytes:
        """Train this rank; return its parameters."""
        for number, step in enumerate(self.enter(rank, world, same_bits), 1):
            for x, y, index in step:
                step.backward(nn.functional.mse_loss(self.net(x), y))
                if step.number in step._share.own and len(index):
                    self.seen += index.tolist() if step._calls[step._at][1] else []
            self.opt.step()
            if number == steps:
                break
        return b"".join(p.detach().numpy().tobytes() for p in self.net.parameters())


def one_net_for_all(ranks: list[Rank]) -> None:
    """Let ranks that join have the state of rank 0."""
    for rank in ranks[1:]:
        rank.net.load_state_dict(ranks[0].net.state_dict())
        rank.opt.load_state_dict(deepcopy(ranks[0].opt.state_dict()))
        rank.position = ranks[0].position


def trained(
    monkeypatch: pytest.MonkeyPatch, worlds: list[int], steps: int, same_bits: bool = True
) -> tuple[bytes, list[int]]:
    """Train through worlds of these sizes; return the parameters, and all samples in order."""
    ranks, seen, found = [Rank()], [], b""
    for world in worlds:
        ranks = (ranks + [Rank() for _ in range(world)])[:world]
        one_net_for_all(ranks)

        def body(rank: int, ranks: list[Rank] = ranks) -> bytes:
            return ranks[rank].train(rank, len(ranks), steps, same_bits)

        told, _ = in_threads(monkeypatch, world, body)
        assert len(set(told)) == 1, "replicas are equal"
        found = told[0]
        for rank in ranks:
            seen += rank.seen
            rank.seen = []
    return found, seen


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_the_result_has_the_same_bits_in_each_world(
    monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setattr(tree_exchange, "PIECE_BYTES", 400)  # several pieces, one of them short
    alone, samples = trained(monkeypatch, [1], 6)
    found, others = trained(monkeypatch, [world], 6)
    assert found == alone
    assert sorted(others) == sorted(samples)
    assert len(set(samples)) == 6 * SIZE * COUNT


def test_the_result_has_the_same_bits_through_changes_of_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, samples = trained(monkeypatch, [1], 6)
    found, others = trained(monkeypatch, [2, 4, 3, 8, 1, 11], 1)
    assert found == alone
    assert sorted(others) == sorted(samples)


def test_without_the_option_results_are_equal_up_to_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact, _ = trained(monkeypatch, [1], 6)
    worlds = [trained(monkeypatch, [world], 6, same_bits=False)[0] for world in (1, 3, 4)]
    assert len({exact, *worlds}) > 1, "the order of additions matters"
    for found in worlds:
        one, two = (torch.frombuffer(bytearray(b), dtype=torch.float32) for b in (found, exact))
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def gradients(rank: Rank) -> list[torch.Tensor]:
    return [p.grad.clone() for p in rank.net.parameters() if p.grad is not None]


@pytest.mark.parametrize("same_bits", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_are_those_of_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch, world: int, same_bits: bool
) -> None:
    """There are 43 samples: the last microbatch has 3 of 4, and the last step 3 of 8."""
    ranks = [Rank(source=Points(43), drop_last=False) for _ in range(world)]

    def body(rank: int) -> list[tuple[int, list[int], list[torch.Tensor]]]:
        ranks[rank].net.eval()  # no dropout: compared with the batch as a whole
        told = []
        for step in ranks[rank].enter(rank, world, same_bits):
            for x, y, _ in step:
                step.backward(nn.functional.mse_loss(ranks[rank].net(x), y))
            told.append((step.samples, step.consumed, gradients(ranks[rank])))
        return told

    told, _ = in_threads(monkeypatch, world, body)
    assert [(samples, before) for samples, before, _ in told[0]] == [(32, 0), (11, 32)]
    loader = ReplayLoader(Points(43), global_batch=32, drop_last=False, cache=False)
    whole = Rank()
    whole.net.eval()
    for (x, y, _), (_, _, found) in zip(loader, told[-1], strict=True):
        whole.net.zero_grad()
        nn.functional.mse_loss(whole.net(x), y).backward()
        for one, two in zip(found, gradients(whole), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    loader.close()


@pytest.mark.parametrize("same_bits", [False, True])
def test_tokens_weigh_more_where_there_are_more(
    monkeypatch: pytest.MonkeyPatch, same_bits: bool
) -> None:
    """Sample i has i % 5 tokens; some microbatches may have none."""

    def body(rank: int) -> list[torch.Tensor]:
        own = ranks[rank]
        own.net.eval()
        step = next(own.enter(rank, 3, same_bits))
        for x, y, index in step:
            tokens = index % 5
            losses = (own.net(x) - y).square() * tokens.view(-1, 1)
            step.backward(losses.sum(), tokens=int(tokens.sum()))
        return gradients(own)

    ranks = [Rank() for _ in range(3)]
    told, _ = in_threads(monkeypatch, 3, body)
    loader = ReplayLoader(Points(), global_batch=SIZE * COUNT, cache=False)
    x, y, index = next(iter(loader))
    loader.close()
    whole = Rank()
    whole.net.eval()
    tokens = index % 5
    losses = (whole.net(x) - y).square() * tokens.view(-1, 1)
    (losses.sum() / tokens.sum()).backward()
    for found in told:
        for one, two in zip(found, gradients(whole), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_all_ranks_make_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than microbatches among them: the spare ones compute for nothing."""
    for world in (3, 5, 11):
        ranks = [Rank() for _ in range(world)]
        forwards = [0] * world

        def body(rank: int, ranks: list[Rank] = ranks, forwards: list[int] = forwards) -> None:
            def count(*_: Any) -> None:
                forwards[rank] += 1

            ranks[rank].net.register_forward_hook(count)
            ranks[rank].train(rank, len(ranks), 2)

        _, threads = in_threads(monkeypatch, world, body)
        assert len(set(forwards)) == 1
        assert forwards[0] == 2 * -(-COUNT // world)
        assert all(calls == threads.calls[0] for calls in threads.calls)


def test_a_parameter_without_a_gradient_anywhere_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that only rank 1's microbatches use gets its gradient everywhere."""

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.never = nn.Linear(6, 1), nn.Linear(6, 1)
            self.seldom = nn.Linear(6, 1)

        def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
            out: torch.Tensor = self.always(x)
            return out + self.seldom(x) if seldom else out

    for same_bits in (False, True):
        ranks = [Rank(), Rank()]
        for own in ranks:
            own.net = Some()

        def body(rank: int, ranks: list[Rank] = ranks, same_bits: bool = same_bits) -> list[bool]:
            step = next(ranks[rank].enter(rank, 2, same_bits))
            for x, _, _ in step:
                step.backward(ranks[rank].net(x, step.number == COUNT - 1).mean())
            return [p.grad is None for p in ranks[rank].net.parameters()]

        told, _ = in_threads(monkeypatch, 2, body)
        assert told == [[False, False, True, True, False, False]] * 2


# --- mistakes -------------------------------------------------------------------------------


def alone(same_bits: bool = True, **kwargs: Any) -> Any:
    rank = Rank(**kwargs)
    return rank, next(rank.enter(0, 1, same_bits))


def test_a_microbatch_without_its_backward_is_refused() -> None:
    rank, step = alone()
    with pytest.raises(UsageError, match="was called for 1 of this rank's 8"):
        for number, (x, _, _) in enumerate(step):
            if number != 1:
                step.backward(rank.net(x).mean())
    _, step = alone()
    with pytest.raises(UsageError, match="was called for 0 of this rank's 8"):
        step.refuse_unfinished()
    _, step = alone()
    with pytest.raises(UsageError, match="in the loop that takes them"):
        list(step)


def test_a_second_backward_or_a_second_loop_is_refused() -> None:
    rank, step = alone()
    for x, _, _ in step:
        step.backward(rank.net(x).mean())
    step.refuse_unfinished()
    with pytest.raises(UsageError, match="comes once"):
        step.backward(torch.zeros(()))
    with pytest.raises(UsageError, match="come once"):
        next(iter(step))


def test_tokens_for_some_microbatches_only_are_refused() -> None:
    rank, step = alone()
    with pytest.raises(UsageError, match="for each microbatch, or for none"):
        for number, (x, _, _) in enumerate(step):
            step.backward(rank.net(x).sum(), tokens=3 if number else None)


@pytest.mark.parametrize("same_bits", [False, True])
def test_a_step_without_tokens_has_a_gradient_of_zero(
    caplog: pytest.LogCaptureFixture, same_bits: bool
) -> None:
    """All labels were masked by chance. It ended the training, each time that it came there."""
    rank = Rank()
    steps = rank.enter(0, 1, same_bits)
    for _ in range(2):
        step = next(steps)
        for x, _, _ in step:
            step.backward(rank.net(x).sum() * 0.0, tokens=0)
        step.refuse_unfinished()
        assert all(not p.grad.any() for p in rank.net.parameters())
    assert [one.getMessage() for one in caplog.records] == [NO_TOKENS]


@pytest.mark.parametrize("tokens", [2.5, -1, float("nan"), torch.tensor(0.25)])
def test_tokens_that_are_no_whole_number_are_refused(tokens: Any) -> None:
    """Weights of 2.5 were counted as 2: each gradient was larger, and nothing said so."""
    rank, step = alone()
    x, _, _ = next(iter(step))
    with pytest.raises(UsageError, match=r"tokens=.* must be a whole number"):
        step.backward(rank.net(x).sum(), tokens=tokens)


@pytest.mark.parametrize("tokens", [3, 3.0, torch.tensor(3), torch.tensor(3.0)])
def test_tokens_may_come_from_a_mask(tokens: Any) -> None:
    rank, step = alone()
    for x, _, _ in step:
        step.backward(rank.net(x).sum(), tokens=tokens)


def test_running_averages_are_refused_before_the_first_update() -> None:
    rank = Rank()
    rank.net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    step = next(rank.enter(0, 1, True))
    with pytest.raises(UsageError, match=r"forward changes the buffer 1\.running_mean"):
        for x, _, _ in step:
            step.backward(rank.net(x).mean())
    rank.net.eval()
    for step in rank.enter(0, 1, True):
        for x, _, _ in step:
            step.backward(rank.net(x).mean())
        break


def test_running_averages_that_begin_later_are_refused() -> None:
    """A frozen norm, as in fine-tuning; `net.train()` after a validation turns it on."""
    rank = Rank()
    rank.net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    rank.net[1].eval()
    made = 0
    with pytest.raises(UsageError, match=r"forward changes the buffer 1\.running_mean"):
        for step in rank.enter(0, 1, True):
            for x, _, _ in step:
                step.backward(rank.net(x).mean())
            made += 1
            if made == 3:
                rank.net.train()
    assert made == 4


def test_buffers_that_change_between_steps_or_by_the_same_value_are_taken() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 1)
            self.register_buffer("mask", torch.ones(6))
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.mask.fill_(1.0)
            return self.linear(x * self.mask)

    rank, made = Rank(), 0
    rank.net = Masked()
    for step in rank.enter(0, 1, True):
        for x, _, _ in step:
            step.backward(rank.net(x).mean())
        rank.net.seen += 1
        made += 1
    assert made == 7


def test_ranks_that_compute_differently_are_named() -> None:
    own = numerics(CPU)
    refuse_differences([own, own])
    threads = next(name for name in own if name.startswith("threads"))
    with pytest.raises(UsageError, match=r"rank 1 has another threads .*'77'"):
        refuse_differences([own, own | {threads: "77"}])
    with pytest.raises(UsageError, match="use_deterministic_algorithms"):
        refuse_differences([own | {"deterministic algorithms": "False"}] * 2)


def test_ranks_that_compute_alike_exchange_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ranks = in_threads(monkeypatch, 3, lambda _: compare_ranks(CPU, 3))
    assert ranks.calls == [["all_gather"]] * 3
    alike = {"device": "cpu"}
    monkeypatch.setattr(
        same_numerics, "numerics", lambda _: alike | {"torch": threading.current_thread().name}
    )
    with pytest.raises(UsageError, match="another torch than rank 0"):
        in_threads(monkeypatch, 3, lambda _: compare_ranks(CPU, 3))


def test_a_source_of_whole_batches_is_refused() -> None:
    source = torch.utils.data.DataLoader(Points(), 4)
    with pytest.raises(UsageError, match="give the dataset itself"):
        ReplayLoader(source, global_batch=4, microbatches=2, cache=False)


def test_arguments_that_contradict_each_other_are_refused() -> None:
    good: dict[str, Any] = {
        "size": 4, "count": 8, "per_rank": 0, "world": 3, "same_bits": False, "rate": "constant"
    }  # fmt: skip
    assert step_length(**good) == 8
    assert step_length(**good | {"count": 0, "per_rank": 2, "rate": "linear"}) == 6
    for wrong, text in [
        ({"per_rank": 2}, "either count="),
        ({"count": 0}, "either count="),
        ({"size": 0}, "needs size="),
        ({"count": 2.5}, r"count=2\.5 must be a whole number"),
        ({"count": 0, "per_rank": 2, "same_bits": True}, "needs count="),
        ({"rate": "sqrt"}, "rate= is for per_rank="),
    ]:
        with pytest.raises(UsageError, match=text):
            step_length(**good | wrong)


# --- streams --------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[Any]):
    """The first 43 points, in their order."""

    fingerprint = "stream"

    def __iter__(self) -> Any:
        return iter([Points()[number] for number in range(43)])


def test_a_stream_is_shared_out_by_microbatches() -> None:
    for world in (1, 2, 3, 12):
        seen: list[int] = []
        for rank in range(world):
            own = Rank(source=Stream(), drop_last=False)
            for step in own.enter(rank, world, same_bits=False):
                assert step.samples in (32, 11)
                for _, _, index in step:
                    seen += index.tolist() if step._calls[step._at][1] else []
                    step._turn = type(step._turn).WAITING
        assert sorted(seen) == list(range(43))


def test_a_loader_goes_on_in_the_middle_of_a_run_with_another_world() -> None:
    """Also where the batch changes: positions count microbatches."""
    seen: list[int] = []
    position = 0
    for world, length, steps in [(2, 8, 2), (3, 8, 1), (3, 5, 3), (1, 4, 99)]:
        for rank in range(world):
            own = Rank()
            own.position = position
            for number, step in enumerate(own.enter(rank, world, False, length), 1):
                for _, _, index in step:
                    seen += index.tolist() if step._calls[step._at][1] else []
                    step._turn = type(step._turn).WAITING
                if number == steps:
                    break
        position = own.position
    assert sorted(seen) == list(range(200))
