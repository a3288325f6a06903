"""The warnings of a session about a loop that would not do what it seems to."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.errors import UsageError  # noqa: E402
from slurm_resilience.mesh.model import (  # noqa: E402
    GenerationEnd,
    Member,
    Peer,
    PeerStatus,
    View,
)
from slurm_resilience.training.guards.untracked_parts import UntrackedParts  # noqa: E402
from slurm_resilience.training.options import Options  # noqa: E402
from slurm_resilience.training.participant import Participant  # noqa: E402
from slurm_resilience.training.rank_environment import read_environment  # noqa: E402
from slurm_resilience.training.recovery.exceptions import Interrupted  # noqa: E402
from slurm_resilience.training.session import Session  # noqa: E402
from slurm_resilience.training.state.tracked import Tracked  # noqa: E402


class Batches:
    """A loader of three batches."""

    weight = 1.0
    unequal = 0

    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.fixture
def session() -> Any:
    """The session of rank 0 in a world that goes on."""
    participant: Any = Participant(read_environment({"RANK": "0", "WORLD_SIZE": "1"}), Options())
    participant.mesh = SimpleNamespace(
        end=None,
        evicted="",
        is_left=False,
        news=0,
        knock=threading.Event(),
        peek=lambda *_: None,
    )
    participant.group_now = SimpleNamespace(
        rank=0,
        sockets=SimpleNamespace(lost=lambda: False),
        nccl=SimpleNamespace(is_used=False),
        wrappers=SimpleNamespace(unreduced=lambda: None),
        collectives=int,
        view=SimpleNamespace(generation=1),
    )
    participant.healer.progress.step = 0
    return Session(participant)


def test_two_updates_for_one_batch_are_told_once(
    session: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in session._batches(Batches()):
        for _ in range(2):
            with session.update():
                pass
    assert session.step == 6
    assert [r.getMessage()[:13] for r in caplog.records] == ["two `with s.u"]


def test_one_update_for_one_batch_or_for_several_is_as_it_should_be(
    session: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for number in session._batches(Batches()):
        if number != 1:
            with session.update():
                pass
    for _ in session._batches(Batches()):
        with session.update():
            pass
        break
    for _ in range(3):  # a loop of the program's own
        with session.update():
            pass
    assert session.step == 6
    assert not caplog.records


def test_a_loop_without_updates_is_told(session: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert list(session._batches(Batches())) == [0, 1, 2]
    assert "3 batches and not one" in caplog.text


def test_a_session_knows_what_follows_an_update(session: Any) -> None:
    told = []
    for _ in session._batches(Batches()):
        told.append(session.after_update)
        with session.update():
            told.append(session.after_update)
        told.append(session.after_update)
    assert told == [False, False, True] * 3
    assert not session.after_update


@pytest.mark.parametrize(
    ("seats", "looks_often"),
    [((0, 1), True), ((1, 0), False), ((2, 1), False), ((1, 2), True)],
)
def test_only_the_rank_that_lets_others_in_looks_who_knocks(
    session: Any, seats: tuple[int, ...], looks_often: bool
) -> None:
    """The member on the lowest seat makes the next world, whatever its rank is in this one."""
    participant = session._participant
    members = tuple(Member(Peer(f"of-{seat}", seat), PeerStatus()) for seat in seats)
    participant.group_now.view = View(1, members, replica_size=2, seats=3)
    participant.mesh.me = members[0].peer
    participant.mesh.knock.set()
    participant.mesh.news += 1
    looks: list[int] = []
    participant.mesh.newcomers = lambda: looks.append(0) or ()
    for _ in range(3):
        with session.update():
            pass
    assert looks == ([0] * 3 if looks_often else [])


def test_a_step_without_news_looks_for_no_planned_end(session: Any) -> None:
    participant, looks = session._participant, list[int]()
    mesh = participant.mesh
    mesh.peek = lambda *_: looks.append(0)
    mesh.me, mesh.may_leave = Peer("here", 0), lambda _: False

    def updates() -> int:
        looks.clear()
        for _ in range(3):
            with session.update():
                pass
        return len(looks)

    assert updates() == 1, "the first step of a world looks"
    assert updates() == 0
    mesh.news += 1
    assert updates() == 1
    participant.departure.reason = "SIGTERM"
    participant.plan_change()  # in another thread
    assert updates() == 3, "it may not leave yet: each step looks again"
    participant.departure.reason = ""
    assert updates() == 1


def test_parts_that_have_nothing_left_to_tell_are_asked_no_more(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    tracked = Tracked({"model": model, "optimizer": optimizer})
    tracked.mark()
    watched, asked = session._participant.guards.state, list[int]()
    watched.enter(tracked, {"model": model, "optimizer": optimizer}, tell=True, step=0)
    used = UntrackedParts.used
    monkeypatch.setattr(UntrackedParts, "used", lambda parts: asked.append(0) or used(parts))

    def updates() -> int:
        asked.clear()
        for _ in range(10):
            with session.update():
                pass
        return len(asked)

    assert 3 <= updates() < 10
    assert updates() == 0
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert updates() == 10, "it may be used at any time"
    del schedule


def test_what_the_program_makes_and_lets_go_of_is_not_kept() -> None:
    """A function may build its model anew in each world, on a rank that tells nothing any more."""
    parts = UntrackedParts()
    parts.look((), ())
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    made = weakref.ref(optimizer)
    assert not parts.is_over
    del optimizer
    gc.collect()
    assert made() is None


@pytest.mark.parametrize(("tell", "done"), [(True, False), (False, True)])
def test_a_rank_that_tells_nothing_looks_only_at_first(
    session: Any, tell: bool, done: bool
) -> None:
    model = torch.nn.Linear(2, 2)
    tracked = Tracked({"model": model})
    tracked.mark()
    watched = session._participant.guards.state
    watched.enter(tracked, {"model": model}, tell=tell, step=0)
    seen = []
    for _ in range(5):
        with session.update():
            seen.append(watched.is_done)
    assert seen == [False] * 3 + [done] * 2
    watched.enter(tracked, {"model": model}, tell=tell, step=5)  # another world: all over again
    assert not watched.is_done


def test_an_update_counts_as_under_way_until_its_step_is_counted(session: Any) -> None:
    participant = session._participant
    seen = []

    def updated(*, tell: bool) -> None:
        seen.append((participant.updating, participant.healer.progress.dirty))

    participant.updates.updated = updated
    with session.update():
        pass
    # An interruption in between would make a whole state void.
    assert seen == [(True, True)]
    assert (participant.updating, participant.healer.progress.dirty, session.step) == (
        False,
        False,
        1,
    )


def test_an_update_counts_as_under_way_until_its_step_is_marked(session: Any) -> None:
    """An interruption in between would repeat the next step with the random numbers of this one."""
    participant = session._participant
    seen = []

    class Marked(Tracked):
        def mark(self, *, values: bool = False) -> None:
            seen.append(participant.updating)
            super().mark(values=values)

    participant.healer.tracked = Marked({"model": torch.nn.Linear(2, 2)})
    with session.update():
        pass
    assert seen == [True]


# --- microbatches -------------------------------------------------------------------------------


def points() -> Any:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


@pytest.fixture
def alone(session: Any) -> Any:
    """The session of a world of one rank, in which loaders can be opened."""
    session._participant.group_now.view = SimpleNamespace(size=1, generation=1)
    session._participant.loaders._cached = False
    return session


def train(session: Any, net: Any, **wishes: Any) -> list[tuple[int, int, float]]:
    told = []
    for step in session.microbatches(points(), net, size=4, **wishes):
        for x, y in step:
            step.backward((net(x) - y).square().mean())
        told.append((step.span.first, step.samples, step.rate_factor))
        with session.update():
            pass
    return told


def test_a_training_by_microbatches_is_an_ordinary_loop(alone: Any) -> None:
    net = torch.nn.Linear(3, 1)
    assert train(alone, net, count=6) == [(0, 24, 1.0), (6, 24, 1.0), (12, 16, 1.0)]
    assert alone.step == 3
    assert net.weight.grad is not None
    assert alone._participant.healer.progress.positions["data"]["position"] == 18
    assert len(train(alone, net, count=5, steps=2, name="other", same_bits=True)) == 2


def test_the_rate_of_a_smaller_world_follows_its_batch(alone: Any) -> None:
    alone._participant.where = alone._participant.where._replace(seats=4)
    told = train(alone, torch.nn.Linear(3, 1), per_rank=8, rate="sqrt")
    assert told == [(0, 32, 0.5), (8, 32, 0.5)]
    with pytest.raises(UsageError, match="steps= needs count="):
        train(alone, torch.nn.Linear(3, 1), per_rank=8, steps=3, name="other")


def test_an_update_before_all_backwards_is_refused(alone: Any) -> None:
    net = torch.nn.Linear(3, 1)
    for step in alone.microbatches(points(), net, size=4, count=4):
        for x, _ in step:
            step.backward(net(x).mean())
            break
        with pytest.raises(UsageError, match="was called for 1 of this rank's 4"), alone.update():
            pass
        break
    assert alone.step == 0
    with alone.update():  # after the loop, one of the program's own
        pass
    assert alone.step == 1


def test_gradients_that_are_not_on_the_gpu_yet_are_waited_for_before_an_update(
    session: Any,
) -> None:
    """NCCL's collectives return before they are done. They end too where the world does."""
    group, mesh = session._participant.group, session._participant.mesh
    waited: list[int] = []
    settle = lambda: waited.append(session.step)  # noqa: E731
    group.nccl = SimpleNamespace(is_used=True, runs_ahead=True, settle=settle)
    with session.update():
        assert waited == [0]

    def cut_off() -> None:
        mesh.is_left, mesh.end = True, GenerationEnd(1, "seat 1 is gone")

    group.nccl.settle = cut_off
    with pytest.raises(Interrupted), session.update():
        raise AssertionError("the step is made with half of the gradients")
    assert session.step == 1
    assert not session._participant.healer.progress.dirty
