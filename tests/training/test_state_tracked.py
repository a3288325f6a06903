"""One process: what a state consists of, where a received one lands, marks, and the digest."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slurm_resilience.training.state import Capture, StateError, Tracked
from slurm_resilience.training.state.describe import decode, encode, from_bytes, to_bytes

pytestmark = pytest.mark.training


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(5, 3, 6, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def receive(capture: Capture, tracked: Tracked) -> None:
    """Do what a transfer does, without a network."""
    descriptor = from_bytes(to_bytes(capture.descriptor))
    for view, there in zip(tracked.prepare(descriptor), capture.views, strict=True):
        view.copy_(there)
    tracked.finish(descriptor)


def pair(seed: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Tracked]:
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    return model, optimizer, Tracked({"model": model, "optimizer": optimizer})


def test_a_fresh_optimizer_gets_state_without_a_step() -> None:
    model, optimizer, tracked = pair(0)
    step(model, optimizer)
    other, behind, newcomer = pair(1)
    pointers = [p.data_ptr() for p in other.parameters()]
    before = [p.clone() for p in other.parameters()]
    descriptor = tracked.capture().descriptor
    newcomer.prepare(descriptor)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    receive(tracked.capture(), newcomer)
    assert tracked.digest() == newcomer.digest()
    assert pointers == [p.data_ptr() for p in other.parameters()]
    torch.manual_seed(7)
    step(model, optimizer)
    torch.manual_seed(7)
    step(other, behind)
    assert tracked.digest() == newcomer.digest()
    assert torch.equal(model[0].weight, other[0].weight)


def test_a_parameter_that_an_optimizer_alone_holds_arrives() -> None:
    """A temperature, the weights of several losses, a prompt: a replaced rank went on with a new
    one, and no line told of it."""

    def of_two(value: float) -> tuple[torch.Tensor, nn.Module, Tracked]:
        model, scale = net(), torch.full((1,), value, requires_grad=True)
        first = torch.optim.SGD([*model.parameters(), scale], 0.1)
        second = torch.optim.SGD([scale], 0.1)
        return scale, model, Tracked({"model": model, "first": first, "second": second})

    scale, _, sender = of_two(3.0)
    there, model, newcomer = of_two(1.0)
    count = len(list(model.parameters()))
    before = newcomer.replica_words()
    receive(sender.capture(), newcomer)
    assert there == scale == 3.0
    assert newcomer.replica_words() == sender.replica_words() != before
    assert newcomer.objects.keys() - {"model", "first", "second"} == {f"first.parameter{count}"}
    named = Tracked({"scale": scale, "first": torch.optim.SGD([scale], 0.1)})
    assert named.objects.keys() == {"scale", "first"}


def test_a_newcomer_turns_on_what_is_on_at_its_peer() -> None:
    """A layer that was unfrozen, or put into train mode, in the middle of the training."""
    model, _, tracked = pair(0)
    other, _, newcomer = pair(1)
    other[3].requires_grad_(False)
    other[1].eval()
    model[0].requires_grad_(False)
    survivor = other[1].training
    receive(tracked.capture(), newcomer)
    assert [p.requires_grad for p in other.parameters()] == [False] * 2 + [True] * 4
    assert other[1].training and not survivor
    newcomer.mark()
    model.requires_grad_(False).eval()
    receive(tracked.capture(), newcomer)
    assert other[3].weight.requires_grad and other[1].training


class Positions(nn.Module):
    """Makes its table in forward, and enlarges it, as rotary embeddings do."""

    def __init__(self, *, saved: bool, **has: Any) -> None:
        super().__init__()
        self.saved = saved
        for name, value in has.items():
            self.register_buffer(name, value, persistent=saved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, "table", None) is None or len(self.table) < len(x):
            table = torch.arange(float(len(x)))
            if hasattr(self, "table"):
                self.table = table
            else:
                self.register_buffer("table", table, persistent=self.saved)
        return x + self.table[: len(x)]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("has", [{}, {"table": None}, {"table": torch.zeros(1)}])
def test_buffers_that_a_forward_makes_arrive(saved: bool, has: dict[str, Any]) -> None:
    """A replaced rank had built its model, and run no forward yet: the training ended at the first
    fault."""
    torch.manual_seed(0)
    module, other = (nn.Sequential(nn.Linear(1, 1), Positions(saved=saved, **has)) for _ in "ab")
    tracked, newcomer = Tracked({"model": module}), Tracked({"model": other})
    newcomer.mark()
    module[1](torch.zeros(5))
    receive(tracked.capture(), newcomer)
    assert torch.equal(other[1].table, torch.arange(5.0))
    assert other.state_dict().keys() == module.state_dict().keys()
    assert tracked.digest() == newcomer.digest()
    other[1](torch.zeros(7))
    receive(tracked.capture(), newcomer)
    assert len(other[1].table) == 5, "as at the peer; forward enlarges it again"


def test_a_buffer_without_a_place_is_left_to_forward() -> None:
    module, other = (Positions(saved=False) for _ in "ab")
    other.table = None
    module(torch.zeros(5))
    receive(Tracked({"model": module}).capture(), Tracked({"model": other}))
    assert other.table is None


def test_received_in_place_without_doubling() -> None:
    model, optimizer, tracked = pair(0)
    step(model, optimizer)
    other, behind, newcomer = pair(1)
    step(other, behind)
    mine = [t for s in behind.state.values() for t in s.values()]
    receive(tracked.capture(), newcomer)
    now = [t for s in behind.state.values() for t in s.values()]
    assert all(a is b for a, b in zip(mine, now, strict=True))


def test_capture_copies_nothing_and_ties_are_moved_once() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    tracked = Tracked({"model": model, "again": model[0]})
    capture = tracked.capture()
    assert [n.path for n in capture.descriptor.notes] == ["model.parameters.0.weight"]
    assert capture.views[0].data_ptr() == model[0].weight.data_ptr()
    assert capture.descriptor.total == 160


@pytest.mark.parametrize("sender_last", [True, False])
def test_memory_order_may_differ(sender_last: bool) -> None:
    one, other = net(0), net(1)
    (one if sender_last else other).to(memory_format=torch.channels_last)
    tracked, newcomer = Tracked({"m": one}), Tracked({"m": other})
    receive(tracked.capture(), newcomer)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_what_was_dropped_at_the_sender_is_dropped_here() -> None:
    _, _, tracked = pair(0)
    other, behind, newcomer = pair(1)
    step(other, behind)
    receive(tracked.capture(), newcomer)
    assert not behind.state
    assert tracked.digest() == newcomer.digest()


def test_groups_schedules_and_tensor_rates_arrive() -> None:
    model, optimizer, _ = pair(0, lr=torch.tensor(0.5))
    other, behind, _ = pair(1, lr=torch.tensor(0.1))
    plans = [
        torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
                torch.optim.lr_scheduler.MultiStepLR(o, [3, 3, 5]),
            ],
            [2],
        )
        for o in (
            torch.optim.SGD(model.parameters(), 1.0),
            torch.optim.SGD(other.parameters(), 2.0),
        )
    ]
    plans[0].step()
    here = Tracked({"o": optimizer, "s": plans[0], "base": plans[0].optimizer})
    there = Tracked({"o": behind, "s": plans[1], "base": plans[1].optimizer})
    rate = behind.param_groups[0]["lr"]
    receive(here.capture(), there)
    assert behind.param_groups[0]["lr"] is rate and rate.item() == 0.5
    assert plans[1].state_dict() == plans[0].state_dict()
    assert plans[1].get_last_lr() == plans[0].get_last_lr()
    assert isinstance(plans[1].state_dict()["_schedulers"][1]["milestones"], Counter)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda: {"model": nn.Linear(3, 4)},
            "model.weight differs between peer and here: local shape (3, 3) there, (4, 3) here; "
            "every rank must build the same model and optimizer",
        ),
        (
            lambda: {"model": nn.Linear(3, 3, bias=False)},
            "only the peer has model.bias; every rank must build the same model",
        ),
        (
            lambda: {"model": nn.Linear(3, 3, dtype=torch.float64)},
            "model.weight differs between peer and here: dtype float32 there, float64 here; "
            "every rank must build the same model and optimizer",
        ),
        (
            lambda: {"net": nn.Linear(3, 3)},
            "only the peer tracks 'model'; every rank must track the same",
        ),
    ],
)
def test_another_state_is_refused_in_one_line_and_nothing_changes(change: Any, said: str) -> None:
    capture = Tracked({"model": nn.Linear(3, 3)}).capture()
    objects = change()
    newcomer = Tracked(objects)
    before = newcomer.digest()
    with pytest.raises(StateError) as caught:
        newcomer.prepare(capture.descriptor)
    assert str(caught.value) == said
    assert newcomer.digest() == before


@pytest.mark.parametrize(
    ("objects", "said"),
    [
        ({"rng": torch.zeros(1)}, "the name 'rng' stands for the random states: choose another"),
        ({"x": 3}, "x cannot be tracked: a int has no state_dict and load_state_dict"),
    ],
)
def test_what_cannot_be_tracked_is_said_at_once(objects: dict[str, Any], said: str) -> None:
    with pytest.raises(StateError, match=said):
        Tracked(objects)


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(StateError, match="weight has no data yet"):
        Tracked({"m": nn.Linear(2, 2, device="meta")}).capture()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.booleans(), inner
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    def never(path: str, tensor: torch.Tensor) -> int:
        raise AssertionError

    descriptor = Tracked({}).capture().descriptor
    moved = from_bytes(to_bytes(type(descriptor)((), {"x": encode(value, "x", never)}))).objects[
        "x"
    ]
    back = decode(moved, never)  # type: ignore[arg-type]
    assert back == value and repr(back) == repr(value)


class Mine:
    """A user's own object."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_own_objects_with_tensors_arrays_and_what_only_pickle_knows() -> None:
    one, other = Mine(), Mine()
    one.state = {
        "mean": torch.arange(3.0),
        "list": [torch.ones(2, dtype=torch.bfloat16), (1, {2: torch.zeros(0)})],
        "array": np.arange(4, dtype=np.int16),
        "kind": torch.float16,
        "count": Counter("aab"),
        "sets": ({3, 1}, frozenset("ab")),
    }
    receive(Tracked({"x": one}).capture(), Tracked({"x": other}))
    assert torch.equal(other.state["mean"], one.state["mean"])
    assert other.state["list"][0].dtype is torch.bfloat16
    assert other.state["list"][1][1][2].shape == (0,)
    assert np.array_equal(other.state["array"], one.state["array"])
    assert other.state["kind"] is torch.float16
    assert other.state["count"] == Counter(a=2, b=1)
    assert other.state["sets"] == ({3, 1}, frozenset("ab"))
    one.state = {"f": lambda: 1}
    with pytest.raises(StateError, match=r"x\.f cannot be moved to a peer"):
        Tracked({"x": one}).capture()


def test_only_adapters_move() -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Tracked]:
        torch.manual_seed(seed)
        model = nn.ModuleDict(
            {"base": nn.Linear(100, 100), "norm": nn.BatchNorm1d(100), "lora": nn.Linear(100, 2)}
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("lora"))
        optimizer = torch.optim.AdamW(model.parameters())
        only = Tracked({"model": model, "optimizer": optimizer}, trainable_only=True)
        return model, optimizer, only

    model, optimizer, tracked = build(0)
    model["lora"](torch.ones(1, 100)).sum().backward()
    optimizer.step()
    other, _, newcomer = build(1)
    frozen = other["base"].weight.clone()
    capture = tracked.capture()
    # Weight, bias, two moments of each, and two step counts, all float32.
    assert capture.descriptor.total == 4 * (3 * (200 + 2) + 2)
    receive(capture, newcomer)
    assert torch.equal(other["lora"].weight, model["lora"].weight)
    assert torch.equal(other["base"].weight, frozen)
    assert tracked.digest() == newcomer.digest()
    named = Tracked({"model": model}, adapters_only=lambda name: name.endswith("lora.bias"))
    assert named.capture().descriptor.total == 8


def test_a_newcomer_takes_the_random_states_and_a_survivor_keeps_its_own() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    capture = Tracked({}).capture()
    expected = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(6)
    receive(capture, Tracked({}))
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    survivor = Tracked({})
    survivor.mark()
    torch.manual_seed(9)
    receive(capture, survivor)
    now = torch.rand(1).item()
    torch.manual_seed(9)
    assert now == torch.rand(1).item()


def test_rollback_undoes_forward_and_backward() -> None:
    model, optimizer, tracked = pair(0)
    scaler = torch.amp.GradScaler("cpu")
    tracked = Tracked({**tracked.objects, "scaler": scaler})
    step(model, optimizer)
    tracked.mark()
    before, draw = tracked.digest(), torch.get_rng_state()
    for _ in range(2):
        scaler.scale(model(torch.randn(5, 3, 6, 6)).sum()).backward()
        scaler.unscale_(optimizer)
        assert tracked.digest() != before, "the running statistics changed"
        assert tracked.rollback() == ()
        assert tracked.digest() == before
        assert torch.equal(torch.get_rng_state(), draw)
        assert all(p.grad is None for p in model.parameters())


def test_rollback_tells_what_changed_outside_an_update() -> None:
    model, optimizer, tracked = pair(0)
    tracked.mark()
    with torch.no_grad():
        model[3].bias.add_(1)
    assert tracked.rollback() == ("model.3.bias",)
    tracked.mark()
    assert tracked.rollback() == ()
    step(model, optimizer)
    assert len(tracked.rollback()) == len(list(model.parameters()))


def test_rollback_undoes_the_backward_of_a_layer_that_came_since_the_mark() -> None:
    """Its gradients were added to those of the step that is repeated, in a process that lived on:
    the replica differed from then on, without a word."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracked = Tracked({"m": model, "o": optimizer})
    tracked.mark()
    model[1] = nn.Linear(2, 3)
    optimizer.add_param_group({"params": [*model[1].parameters(), free := torch.ones(1)]})
    free.requires_grad_()
    (model(torch.ones(1, 2)).sum() * free).backward()
    tracked.rollback()
    assert [one.grad for one in (*model.parameters(), free)] == [None] * 5
    tracked.mark(values=True)
    with torch.no_grad():
        model[1].bias.add_(1)
    assert tracked.rollback() == ("m.1.bias",)


def test_a_buffer_that_was_replaced_comes_back() -> None:
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(3))
    first = model.mean
    tracked = Tracked({"m": model})
    tracked.mark()
    model.mean = model.mean + 1
    tracked.rollback()
    assert model.mean is first
    tracked.mark()
    model.mean += 1
    tracked.mark()
    model.mean += 1
    tracked.rollback()
    assert model.mean.tolist() == [1, 1, 1]


def test_a_buffer_that_was_given_other_memory_comes_back() -> None:
    """`buffer.data = other`: the mark and the rollback looked at the memory that it had before."""
    model = nn.Module()
    model.register_buffer("mean", torch.zeros(3))
    tracked = Tracked({"m": model})
    tracked.mark()
    for size in (3, 3, 4):
        model.mean.data = torch.ones(size) + model.mean[0]
        tracked.mark()
        kept = model.mean.tolist()
        model.mean.data = torch.full((5,), 9.0)
        tracked.rollback()
        assert model.mean.tolist() == kept


def test_a_buffer_that_forward_has_made_is_rolled_back() -> None:
    """It was none of those that were marked: a step that is repeated changed it twice."""
    model = nn.Module()
    tracked = Tracked({"m": model})
    tracked.mark()
    model.register_buffer("seen", torch.ones(1))
    tracked.rollback()
    assert not hasattr(model, "seen")
    model.register_buffer("seen", torch.ones(1))
    tracked.mark()
    model.seen += 1
    tracked.rollback()
    assert model.seen.tolist() == [1]
    del model.seen
    tracked.rollback()
    assert model.seen.tolist() == [1]
    del model.seen
    tracked.mark()
    tracked.rollback()
    assert not hasattr(model, "seen")


def test_the_buffers_of_a_layer_that_came_since_the_mark_are_marked() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    tracked = Tracked({"m": model})
    tracked.mark()
    model[0] = nn.BatchNorm1d(2)
    tracked.rollback()
    assert model(torch.ones(3, 2)).shape == (3, 2)
    tracked.mark()
    kept = model[0].running_mean.tolist()
    model(torch.ones(3, 2))
    tracked.rollback()
    assert model[0].running_mean.tolist() == kept


def test_a_buffer_that_is_none_at_the_peer_is_none_here() -> None:
    model, other = nn.Module(), nn.Module()
    for each in (model, other):
        each.register_buffer("cache", torch.ones(1))
    model.cache = None
    tracked, newcomer = Tracked({"m": model}), Tracked({"m": other})
    receive(tracked.capture(), newcomer)
    assert other.cache is None
    assert tracked.digest() == newcomer.digest()


def test_big_buffers_are_copied_only_when_they_changed() -> None:
    model = nn.Module()
    model.register_buffer("big", torch.zeros(100_000))
    tracked = Tracked({"m": model})
    for value in (1, 1, 2):
        model.big.fill_(value)
        tracked.mark()
        model.big[7] = 99
        tracked.rollback()
        assert set(model.big.tolist()) == {value}


def test_what_was_received_is_what_a_rollback_goes_back_to() -> None:
    model, _, tracked = pair(0)
    other, _, newcomer = pair(1)
    newcomer.mark()
    model[1].running_mean.fill_(4)
    receive(tracked.capture(), newcomer)
    newcomer.mark()
    other[1].running_mean.fill_(9)
    newcomer.rollback()
    assert other[1].running_mean.tolist() == [4] * 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2_500_000 * 4 - 1), st.integers(0, 7), st.booleans())
def test_the_digest_sees_every_flipped_bit(byte: int, bit: int, odd: bool) -> None:
    tensor = BIG[1:] if odd else BIG
    view = tensor.view(torch.uint8)
    byte = min(byte, view.numel() - 1)
    tracked = Tracked({"x": tensor})
    before = tracked.digest()
    view[byte] ^= 1 << bit
    changed = tracked.digest()
    view[byte] ^= 1 << bit
    assert changed != before == tracked.digest()


BIG = torch.randn(2_500_000, generator=torch.Generator().manual_seed(1))


def test_the_digest_sees_order_sign_name_shape_and_plain_values() -> None:
    base = torch.randn(1000)
    mine = Mine()
    mine.state = {"a": 1, "b": 2.0}

    def of(name: str, tensor: torch.Tensor) -> str:
        return Tracked({name: tensor, "mine": mine}).digest()

    swapped = base.clone()
    swapped[[3, 500]] = base[[500, 3]]
    signs = base.clone()
    signs[:4] *= -1
    found = [
        of("x", base),
        of("x", swapped),
        of("x", signs),
        of("x", -base),
        of("y", base),
        of("x", base.view(10, 100)),
        of("x", base.view(torch.int32)),
    ]
    mine.state = {"b": 2.0, "a": 1}
    assert of("x", base) == found[0], "the order of a dict does not matter"
    mine.state = {"a": 1, "b": 2.5}
    found.append(of("x", base))
    assert len(set(found)) == len(found)
