"""Marks, beats and verdicts of one process, with a clock that the test owns."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.messages import Heartbeat
from slurm_resilience.mesh.model import Peer
from slurm_resilience.training.watch import HangVerdict, Watch
from slurm_resilience.training.watch.progress import Progress
from slurm_resilience.training.watch.stacks import dump


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: float) -> float:
        self.now += seconds
        return self.now


class World:
    """Some watches that hear each other."""

    def __init__(self, size: int, counted: bool = True, **how: object) -> None:
        self.time = Time()
        self.watches = [Watch(clock=self.time, **how) for _ in range(size)]  # type: ignore[arg-type]
        self.counts = [0] * size
        self.heard = [0.0] * size
        self.beats = [Heartbeat()] * size
        for seat, watch in enumerate(self.watches):
            count = (lambda seat=seat: self.counts[seat]) if counted else None
            watch.enter(f"p{seat}", seat, count)

    def verdict(self, seat: int) -> HangVerdict | None:
        for other, watch in enumerate(self.watches):
            if self.heard[other] == 0:
                self.beats[other] = watch.beat()
        beats = {
            f"p{other}": (Peer(f"p{other}", other), self.beats[other], self.heard[other])
            for other in range(len(self.watches))
            if other != seat
        }
        return self.watches[seat].stalled(self.time.now, beats)

    def steps(self, number: int, seconds: float = 1.0) -> None:
        for step in range(number):
            for watch in self.watches:
                watch.begin(step)
            self.time.go(seconds)
            for seat, watch in enumerate(self.watches):
                self.counts[seat] += 2
                watch.commit(step + 1)

    def begin(self, step: int) -> None:
        for watch in self.watches:
            watch.begin(step)


def test_the_first_steps_have_time() -> None:
    world = World(2, first=600, floor=10)
    assert world.watches[0].limit == 600
    world.steps(5)
    assert world.watches[0].limit == 600
    world.steps(3)
    assert world.watches[0].limit == 10


def later_world(world: World, step: int) -> None:
    for seat, watch in enumerate(world.watches):
        watch.enter(f"p{seat}", seat, lambda seat=seat: world.counts[seat])  # type: ignore[misc]
    world.counts = [2] * len(world.watches)
    world.begin(step)


def test_the_first_step_of_a_later_world_has_less_time() -> None:
    world = World(2, first=600, floor=10)
    world.steps(8, seconds=1)
    later_world(world, 8)
    assert world.watches[0].limit == 60
    world.watches[0].commit(9)
    assert world.watches[0].limit == 10


def test_the_first_step_of_a_later_world_has_as_much_as_such_steps_took() -> None:
    world = World(2, first=600, floor=10)
    world.begin(0)
    world.time.go(50)  # it compiles
    for watch in world.watches:
        watch.commit(1)
    world.steps(8)
    later_world(world, 9)
    assert world.watches[0].limit == 150
    assert Watch(first=100).limit == 100


def test_a_process_that_knows_no_steps_gives_the_first_one_all_its_time() -> None:
    world = World(2, first=600, floor=10)
    world.steps(3)
    later_world(world, 3)
    assert world.watches[0].limit == 600


def test_a_step_that_hung_has_all_the_time_of_a_first_one() -> None:
    world = World(2, first=600, floor=10)
    world.steps(8)
    for step, limit in ((8, 600), (9, 600), (10, 60)):
        world.begin(8)
        world.watches[0].hung()
        later_world(world, step)
        assert world.watches[0].limit == limit


def saves(world: World, step: int, seconds: float) -> list[HangVerdict | None]:
    """Seat 0 saves after a step; the others wait in the next one."""
    world.counts[1] += 1
    world.watches[1].begin(step)
    assert world.verdict(1) is None
    world.time.go(seconds)
    return [world.verdict(seat) for seat in (0, 1)]


def test_who_saves_for_minutes_is_ended_once_and_waited_for_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its process was replaced at each save, and none was ever done."""
    world = World(2, first=600, floor=10)
    world.steps(8)
    found = saves(world, 8, 11)
    assert [one and one.seat for one in found] == [0, 0], "both told, with what to do"
    assert "with s.watch.pause()" in caplog.text
    beats = {"p0": (Peer("p0", 0), world.beats[0], 0.0)}
    world.watches[1].hung("p0", beats)
    world.watches[1].hung("p0", beats)
    world.watches[0] = Watch(clock=world.time, first=600, floor=10)
    for seat, watch in enumerate(world.watches):
        watch.enter(f"p{seat}", seat, lambda seat=seat: world.counts[seat], replaced=not seat)  # type: ignore[misc]
    world.counts = [0, 0]
    world.steps(8)
    caplog.clear()
    assert saves(world, 8, 500) == [None, None]
    assert caplog.text.count("training stands still: seat 0") == 1
    world.time.go(101)
    verdict = world.verdict(1)
    assert verdict is not None
    assert verdict.seat == 0


def test_who_stands_still_in_a_step_is_not_waited_for_later() -> None:
    world = World(2, first=600, floor=10)
    world.steps(8)
    for _ in range(2):
        world.begin(8)
        world.counts[1] += 1
        assert world.verdict(1) is None
        world.time.go(11)
        assert world.verdict(1) is not None
        world.watches[1].hung("p0", {"p0": (Peer("p0", 0), world.beats[0], 0.0)})
        later_world(world, 8)
        world.steps(8)


def test_collectives_before_the_first_step_accuse_no_rank() -> None:
    """A rank that heals others makes calls that the others do not."""
    world = World(4, first=600, floor=10)
    world.counts = [9, 7, 9, 5]
    world.steps(8)
    world.begin(8)
    for seat in (0, 2, 3):
        world.watches[seat].mark("collective")
        world.counts[seat] += 1
    world.verdict(0)
    world.time.go(10.1)
    found = world.verdict(0)
    assert found is not None
    assert (found.kind, found.seat) == ("behind", 1), found.reason


def test_who_returned_while_others_wait_for_it_is_found_soon() -> None:
    world = World(4, first=600, floor=10)
    world.steps(8)
    later_world(world, 8)
    for seat in (1, 2):
        world.watches[seat].returned()
    world.counts = [3, 2, 2, 3]
    world.verdict(0)
    world.time.go(9.9)
    assert world.verdict(0) is None
    world.time.go(0.2)
    found = world.verdict(0)
    assert found is not None
    assert (found.kind, found.seat) == ("returned", 1)
    assert found.reason == (
        "seat 1 (and 1 more) returned in step 8, others are at step 8 in collective 1"
    )


def test_who_returned_in_one_of_the_first_steps_is_not_waited_for_like_a_compiler() -> None:
    world = World(2, first=600, floor=10)
    world.steps(3)
    world.begin(3)
    world.watches[0].returned()
    world.counts[1] += 1
    world.verdict(1)
    world.time.go(59)
    assert world.verdict(1) is None
    world.time.go(2)
    found = world.verdict(1)
    assert found is not None
    assert (found.kind, found.seat) == ("returned", 0)


def test_who_returned_before_a_first_step_is_not_waited_for_longer() -> None:
    """Its loop has no batch left, and it has no count; the others have one, and waited 600 s."""
    world = World(2, first=600, floor=10)
    world.watches[0].begin(3)
    world.counts[0] += 1
    world.watches[1].returned()
    world.verdict(0)
    world.time.go(59)
    assert world.verdict(0) is None
    world.time.go(2)
    found = world.verdict(0)
    assert found is not None and (found.kind, found.seat) == ("returned", 1)


def test_who_returned_is_said_so_without_counts_too() -> None:
    world = World(3, counted=False, floor=10)
    world.steps(8)
    world.begin(8)
    world.watches[1].returned()
    for seat in (0, 2):
        world.watches[seat].mark("collective")
    world.time.go(11)
    found = world.verdict(0)
    assert found is not None
    assert (found.kind, found.seat) == ("returned", 1)
    assert found.reason.startswith("seat 1 returned while the others wait for it")


def test_who_returned_and_is_waited_for_by_nobody_is_not_accused() -> None:
    world = World(3, first=600, floor=10)
    world.steps(8)
    later_world(world, 8)
    for seat in (1, 2):
        world.watches[seat].returned()
    world.time.go(500)  # seat 0 writes down how it went
    assert world.verdict(0) is None


def test_who_has_not_come_to_the_collective_is_the_culprit() -> None:
    world = World(4, floor=5)
    world.steps(20)
    world.begin(20)
    world.counts = [41, 41, 40, 41]
    assert world.verdict(0) is None
    world.time.go(4.9)
    assert world.verdict(0) is None
    world.time.go(0.2)
    for seat in range(4):
        found = world.verdict(seat)
        assert found is not None
        assert (found.kind, found.culprit, found.seat) == ("behind", "p2", 2)
        assert "has not come to collective 41 in forward of step 20" in found.reason


def test_a_slow_one_that_moves_is_not_accused() -> None:
    world = World(3, floor=5, ceiling=60)
    world.steps(20)
    world.begin(20)
    world.counts = [41, 41, 40]
    for _ in range(18):
        world.time.go(3)
        world.watches[2].mark("busy")
        assert world.verdict(0) is None
    world.time.go(7)
    found = world.verdict(0)
    assert found is not None
    assert found.culprit == "p2"


def test_a_silent_one_is_the_culprit() -> None:
    world = World(3, floor=5)
    world.steps(20)
    world.begin(20)
    world.counts = [41, 41, 40]
    world.verdict(0)
    world.heard[1] = 5.5
    world.time.go(5.5)
    found = world.verdict(0)
    assert found is not None
    assert (found.kind, found.culprit) == ("silent", "p1")


def test_when_all_wait_nobody_is_accused() -> None:
    world = World(3, floor=5, ceiling=60)
    world.steps(20)
    world.begin(20)
    world.counts = [41, 41, 41]
    world.verdict(0)
    world.time.go(59)
    assert world.verdict(0) is None
    world.time.go(2)
    found = world.verdict(0)
    assert found is not None
    assert (found.kind, found.culprit, found.seat) == ("unknown", "", -1)
    assert "all 3 ranks stand still at step 20" in found.reason


def test_without_counts_the_marks_tell() -> None:
    world = World(3, counted=False, floor=5)
    world.steps(20)
    world.begin(20)
    for seat in (0, 1):
        world.watches[seat].mark("collective")
    world.time.go(6)
    found = world.verdict(1)
    assert found is not None
    assert (found.kind, found.seat) == ("outside", 2)
    for seat in (0, 1):
        world.watches[seat].commit(21)
        world.watches[seat].begin(21)
    world.time.go(6)
    found = world.verdict(1)
    assert found is not None
    assert (found.kind, found.seat) == ("behind", 2)


def test_a_pause_may_take_as_long_as_it_likes() -> None:
    world = World(3, floor=5, ceiling=20)
    world.steps(20)
    with world.watches[0].pause():
        world.counts = [41, 42, 42]
        world.time.go(500)
        assert [world.verdict(seat) for seat in range(3)] == [None] * 3
    world.time.go(6)
    found = world.verdict(1)
    assert found is not None
    assert found.seat == 0


def test_a_stall_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[HangVerdict] = []

    def on_hang(verdict: HangVerdict) -> None:
        told.append(verdict)
        raise RuntimeError("a hook of the user")

    world = World(3, floor=5, on_hang=on_hang, stacks=tmp_path / "deep")
    world.steps(20)
    for round in range(2):
        world.begin(20 + round)
        world.counts = [41 + 2 * round, 41 + 2 * round, 40 + 2 * round]
        world.verdict(0)
        for _ in range(5):
            world.time.go(6)
            assert world.verdict(0) is not None
    assert [verdict.seat for verdict in told] == [2, 2]
    assert sum("training stands still" in r.getMessage() for r in caplog.records) == 2
    text = (tmp_path / "deep" / "stacks-seat-00000.txt").read_text()
    assert text.count("==== ") == 2
    assert "test_a_stall_is_told_once" in text
    assert "is MainThread" in text


def test_the_main_thread_is_told_among_very_many(tmp_path: Path) -> None:
    is_over, file = threading.Event(), tmp_path / "stacks.txt"
    others = [threading.Thread(target=is_over.wait, daemon=True) for _ in range(120)]
    for thread in others:
        thread.start()
    try:
        assert dump(file, "rank 0", "a test")
    finally:
        is_over.set()
        for thread in others:
            thread.join()
    text = file.read_text()
    assert text.count("thread 0x") >= len(others) + 1
    main, _, rest = text.partition("thread 0x")[2].partition("thread 0x")
    assert "is MainThread" in main
    assert "test_the_main_thread_is_told_among_very_many" in main
    assert "in wait" in rest


def test_a_hang_is_not_a_lesson() -> None:
    world = World(2, floor=5)
    world.steps(20)
    world.watches[0].begin(20)
    world.time.go(4000)
    world.watches[0].enter("p0", 0)
    world.watches[0].begin(20)
    world.time.go(1)
    world.watches[0].commit(21)
    world.watches[0].begin(21)
    world.time.go(1)
    world.watches[0].commit(22)
    assert world.watches[0].limit == 5


def test_accumulated_gradients_are_one_step() -> None:
    time = Time()
    progress = Progress(time)
    for _ in range(4):
        progress.begin(7)
        time.go(1)
        progress.mark("collective")
        time.go(2)
    progress.commit(8)
    assert progress.own_seconds == 4
    progress.commit(8)
    assert list(progress.committed) == [(8, 12, 4), (8, 0, 4)]


def test_who_is_slow() -> None:
    world = World(4)
    for step in range(20):
        world.begin(step)
        world.time.go(1)
        for watch in world.watches[:3]:
            watch.mark("collective")
        world.time.go(1)
        for watch in world.watches:
            watch.mark("collective")
        world.time.go(1)
        for watch in world.watches:
            watch.commit(step + 1)
        world.verdict(0)
    (found,) = world.watches[0].stragglers()
    assert (found.seat, found.slowdown) == (3, 2.0)
    world.watches[0].enter("p0", 0)
    assert world.watches[0].stragglers() == []


def test_a_group_that_is_gone_does_no_harm() -> None:
    def gone() -> int:
        raise RuntimeError("the group is destroyed")

    watch = Watch()
    watch.enter("p0", 0, gone)
    watch.begin(3)
    assert watch.beat().phase == "forward#-1#1.3.0"
    assert watch.beat().step == 3


def test_a_process_before_its_first_step_is_not_judged() -> None:
    world = World(3, floor=1, first=1, ceiling=1)
    world.time.go(100)
    assert world.verdict(0) is None


def test_limits_out_of_order() -> None:
    for wrong in ({"floor": 0}, {"floor": 5, "ceiling": 4}, {"first": 0}, {"silence": -1}):
        with pytest.raises(UsageError, match="floor <= ceiling"):
            Watch(**wrong)  # type: ignore[arg-type]


def test_steps_are_told_to_the_supervisor_once_a_beat_and_before_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []
    monkeypatch.setattr(
        "slurm_resilience.resume.attempt.step",
        lambda step, own_seconds, rank: told.append((step, own_seconds, rank)),
    )
    monkeypatch.setattr("slurm_resilience.resume.attempt.pause", lambda rank: told.append("pause"))
    world = World(1)
    world.steps(3, seconds=2)
    assert told == []
    world.watches[0].beat()
    world.watches[0].beat()
    # The first step of a world compiles: its time does not count.
    assert told == [(3, 2.0, 0)]
    world.begin(3)
    world.time.go(4)
    world.watches[0].commit(4)
    with world.watches[0].pause():
        world.watches[0].beat()
    assert told[1:] == [(4, 4.0, 0), "pause"]
