"""Ranks that end with a last checkpoint: fake worlds, real seconds cut short."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.mesh.model import GenerationEnd
from slurm_resilience.training.leaving import last_save, term_signal
from slurm_resilience.training.leaving.last_checkpoint import LastCheckpoint
from slurm_resilience.training.leaving.last_save import LastSave

DEADLINE = 30.0
"""By then a process has long been ended."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_save, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(last_save, "ALL_ASKED_SECONDS", 0.2)
    monkeypatch.setattr(last_save, "BETWEEN_SECONDS", 0.2)


class FakeWorld:
    """A rank's mesh, and the world that it is in."""

    def __init__(self, seat: int, seats: list[int], generation: int = 1) -> None:
        self.me = SimpleNamespace(seat=seat)
        self.keys: dict[tuple[int, str], bytes] = {}
        self.is_left = False
        self.ends: list[GenerationEnd] = []
        self.closed = ""
        members = [SimpleNamespace(peer=SimpleNamespace(seat=one)) for one in seats]
        self.view: Any = SimpleNamespace(generation=generation, members=members)

    def put(self, generation: int, key: str, value: bytes) -> None:
        self.keys[generation, key] = value

    def peek(self, generation: int, key: str) -> bytes | None:
        return self.keys.get((generation, key))

    def over(self, end: GenerationEnd) -> None:
        self.ends.append(end)

    def close(self, reason: str) -> None:
        self.closed = reason

    def promises(self, *steps: int) -> None:
        """Each seat promises its last step."""
        for seat, step in enumerate(steps):
            self.put(self.view.generation, f"{last_save.PROMISE}{seat}", str(step).encode())

    def promised(self, seat: int) -> bytes | None:
        return self.peek(self.view.generation, f"{last_save.PROMISE}{seat}")

    def __call__(self) -> Any:
        return self, self.view


def of(seat: int, seats: list[int], generation: int = 1) -> Any:
    """The world of a rank."""
    return FakeWorld(seat, seats, generation)


def comes(save: LastSave, world: Any, step: int = 3) -> bool:
    """Ask a rank; its training is over as soon as it has told people of its end."""
    tell = save._tell

    def told(*where: Any) -> None:
        tell(*where)
        save._closing.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "_tell", told)
        return save._comes_to_end(world, lambda: step)


def inside(world: Any, step: int = 3, **how: Any) -> LastSave:
    """A rank in a world, whose state is whole."""
    save = LastSave(**how)
    assert not save.enter(world, world.view, step)
    return save


def test_a_rank_promises_the_step_that_it_may_be_in(caplog: pytest.LogCaptureFixture) -> None:
    first = of(0, [0, 1])
    save = inside(first)
    first.put(1, f"{last_save.PROMISE}1", b"3")
    assert comes(save, first)
    assert first.promised(0) == b"4" and save.has_promised(first.view)
    assert caplog.text.count("all ranks were asked to end") == 1


def test_the_highest_promise_is_the_last_step() -> None:
    """A rank that has begun another step meanwhile waits in it for the others."""
    saved: list[int] = []
    world = of(0, [0, 1])
    save = inside(world, save=lambda *_: saved.append(1))
    save._promise(world, world.view, lambda: 3, begun=1)
    world.promises(4, 5)
    assert not save.come_to(world, world.view, 3)
    assert not save.come_to(world, world.view, 4) and not saved
    world.put(1, f"{last_save.SAVED}1", b"1")
    assert save.come_to(world, world.view, 5) and saved == [1]
    assert world.peek(1, f"{last_save.SAVED}0") == b"1"


def test_a_rank_waits_after_its_promise_for_the_others() -> None:
    world = of(0, [0, 1])
    save = inside(world)
    save._promise(world, world.view, lambda: 3, begun=1)
    asked, peek = list[str](), world.peek

    def later(generation: int, key: str) -> bytes | None:
        asked.append(key)
        if len(asked) > 20:
            world.promises(4, 5)
        found: bytes | None = peek(generation, key)
        return found

    world.peek = later
    assert not save.come_to(world, world.view, 4) and len(asked) > 20
    asked.clear()
    world.is_left, world.keys = True, {}
    assert not save.come_to(world, world.view, 4), "its world has ended meanwhile"


def test_no_rank_promises_before_its_state_is_whole() -> None:
    world = of(0, [0, 1])
    world.promises(4, 4)
    save = LastSave()
    assert not save._promise(world, world.view, lambda: 3, begun=1)
    assert not save.come_to(world, world.view, 9)


def test_a_world_that_begins_after_the_request_makes_no_further_step() -> None:
    saved: list[int] = []
    world = of(0, [0, 1], 2)
    world.put(2, f"{last_save.PROMISE}1", b"3")
    world.put(2, f"{last_save.SAVED}1", b"1")
    save = LastSave(core=1, save=lambda *_: saved.append(1))
    save.is_asked = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(term_signal, "end", lambda: saved.append(2))
        save.enter(world, world.view, 3)
    assert saved == [1, 2] and world.promised(0) == b"3"


def test_a_loop_that_makes_no_step_ends_the_world() -> None:
    world = of(0, [0, 1])
    save = inside(world)
    save._promise(world, world.view, lambda: 3, begun=1)
    assert not save.come_to(world, world.view, 3, idles=True) and not world.ends
    world.promises(4, 4)
    assert not save.come_to(world, world.view, 3) and not world.ends
    assert not save.come_to(world, world.view, 3, idles=True)
    assert [(end.kind, end.step) for end in world.ends] == [("join", 3)]


def test_a_lent_rank_promises_when_all_others_have() -> None:
    lent = of(1, [0, 1])
    save = inside(lent, core=1)
    save.promise_with_others(lent, lent.view, lambda: 3)
    assert lent.promised(1) is None
    lent.put(1, f"{last_save.PROMISE}0", b"4")
    save.promise_with_others(lent, lent.view, lambda: 3)
    assert lent.promised(1) == b"4"
    own = of(0, [0, 1])
    save = inside(own, core=1)
    own.promises(4, 4)
    save.promise_with_others(own, own.view, lambda: 3)
    assert not save.has_promised(own.view), "it is asked itself"


def test_a_rank_that_is_asked_alone_ends(caplog: pytest.LogCaptureFixture) -> None:
    world = of(0, [0, 1])
    assert not comes(inside(world), world)
    assert "SIGTERM came to this rank, and not to seat 1" in caplog.text


def test_lent_ranks_alone_go_on_with_the_training() -> None:
    """All ranks of the job itself are replaced at once, or stopped: no rank was asked."""
    world = of(2, [2])
    save = inside(world, core=2)
    assert not save.enter(world, world.view, 3)
    save.promise_with_others(world, world.view, lambda: 3)
    assert world.promised(2) is None


def test_a_lent_rank_need_not_be_asked() -> None:
    world = of(0, [0, 1])
    assert comes(inside(world, core=1), world)


def test_a_rank_without_state_ends() -> None:
    assert not comes(LastSave(), lambda: None)


def test_a_rank_that_no_world_takes_in_ends() -> None:
    lonely = of(0, [0])
    assert not comes(LastSave(), lambda: (lonely, None))


def test_a_rank_that_saves_alone_is_given_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lonely, asked = of(0, [0]), list[int]()

    def alone(_: Any) -> bool:
        asked.append(1)
        save._closing.set()
        return True

    save = LastSave(alone=alone)
    assert save._comes_to_end(lambda: (lonely, None), lambda: 3) and asked == [1]
    assert save.is_alone and lonely.closed


def test_a_checkpoint_takes_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_save, "STEP_SECONDS", 0.1)
    world, looks = of(0, [0]), list[int]()
    save = inside(world)
    save._saves.set()

    def wait(seconds: float) -> bool:
        looks.append(1)
        time.sleep(0.01)
        if len(looks) == 30:
            save._saves.clear()
        return False

    monkeypatch.setattr(save._closing, "wait", wait)
    assert not save._comes_to_end(world, lambda: 3)
    assert len(looks) > 30, "the step after it has its own time"


def test_a_request_between_two_worlds_is_kept_for_the_next_one() -> None:
    old, new = of(0, [0, 1], 1), of(0, [0], 2)
    save = inside(old)
    now: list[Any] = [(old, old.view), (old, None), (new, new.view)]
    looks: Iterator[Any] = iter(now)

    def world() -> Any:
        found = next(looks, now[-1])
        if found[0] is new and save._entered != 2:
            save.enter(new, new.view, 3)
        return found

    assert comes(save, world)
    assert new.promised(0) and old.promised(0)


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def listening(world: Callable[[], Any] = lambda: None) -> LastSave:
    save = LastSave()
    save.on_term(world, lambda: 3)
    return save


def in_child(act: Callable[[Callable[[str], Any]], None]) -> tuple[int, str]:
    """Act in a process of its own, that SIGTERM may end; return its exit code, negative: of a
    signal, and what it told."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            act(lambda text: os.write(writer, f"{text}\n".encode()))
            os._exit(0)
        os._exit(9)
    os.close(writer)
    with os.fdopen(reader) as told:
        text = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def test_an_error_in_the_middle_of_a_request_leaves_no_process_deaf() -> None:
    def act(tell: Callable[[str], Any]) -> None:
        def world() -> None:
            tell("looked")
            raise KeyError("world")

        listening(world)
        ask()
        time.sleep(DEADLINE)

    assert in_child(act) == (-signal.SIGTERM, "looked\n")


def test_a_request_at_the_end_waits_for_what_is_being_written() -> None:
    def act(tell: Callable[[str], Any]) -> None:
        save = listening()

        def write_out() -> None:
            ask()
            while not save.is_asked:
                time.sleep(0.001)
            tell("written")

        save.close(write_out)
        tell("over")

    assert in_child(act) == (-signal.SIGTERM, "written\n")


def test_sigterm_ends_a_process_after_its_training() -> None:
    def act(tell: Callable[[str], Any]) -> None:
        listening().close(lambda: tell("written"))
        ask()
        time.sleep(DEADLINE)

    assert in_child(act) == (-signal.SIGTERM, "written\n")


def test_a_handler_that_the_program_has_set_meanwhile_stays() -> None:
    def act(tell: Callable[[str], Any]) -> None:
        save = listening()
        signal.signal(signal.SIGTERM, lambda *_: tell("mine"))
        ask()
        save.close(lambda: tell("written"))
        ask()

    assert in_child(act) == (0, "mine\nwritten\nmine\n")


def present(seat: int, step: int, *, dirty: bool = False) -> Any:
    peer, status = (
        SimpleNamespace(id=f"p{seat}", seat=seat),
        SimpleNamespace(step=step, dirty=dirty),
    )
    return SimpleNamespace(peer=peer, status=status)


def one_saves(
    here: int, *ranks: Any, core: int = 0, is_whole: bool = True, evicted: str = ""
) -> bool:
    """Ask the rank in a seat where no world comes any more."""
    mesh: Any = SimpleNamespace(
        me=SimpleNamespace(id=f"p{here}", seat=here),
        evicted=evicted,
        picture=lambda: ((), list(ranks), ()),
    )
    healer: Any = SimpleNamespace()
    checkpoint = LastCheckpoint(healer, lambda: True, core=core, is_whole=is_whole)
    return checkpoint.may_be_by_one(mesh)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 5), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 6),
)
def test_one_rank_saves_alone_and_none_has_more(ranks: list[tuple[int, bool]], core: int) -> None:
    all_of_them = [present(seat, step, dirty=dirty) for seat, (step, dirty) in enumerate(ranks)]
    savers = [seat for seat in range(len(ranks)) if one_saves(seat, *all_of_them, core=core)]
    asked = all_of_them[: core or None]
    whole = [one.status.step for one in asked if one.status.step >= 0 and not one.status.dirty]
    assert len(savers) == bool(whole)
    assert [all_of_them[seat].status.step for seat in savers] == ([max(whole)] if whole else [])


def test_no_rank_saves_a_part_of_a_model_or_what_others_went_on_from(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert one_saves(1, present(1, 3))
    assert not one_saves(1, present(1, 3), evicted="it was silent")
    assert not caplog.text
    assert not one_saves(1, present(1, 3), is_whole=False)
    assert caplog.text.count("without a checkpoint: ranks are missing") == 1
