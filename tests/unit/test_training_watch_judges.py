"""The learnt limit, the judge and the stragglers: what holds for all inputs."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_resilience.resume.progress.straggler import stragglers
from slurm_resilience.training.watch.hang import RankSign, judge
from slurm_resilience.training.watch.limit import ENOUGH, learn, learn_first

# A busy machine is no failure.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

seconds = st.floats(0.001, 1000)
steps = st.lists(seconds, max_size=60)


@calm
@given(steps, st.floats(0.1, 100), st.floats(0, 1000))
def test_the_limit_stays_between_floor_and_ceiling(
    times: list[float], floor: float, more: float
) -> None:
    assert floor <= learn(times, floor, floor + more) <= floor + more


@calm
@given(steps, st.floats(1, 10))
def test_slower_steps_have_more_time(times: list[float], factor: float) -> None:
    slower = [factor * one for one in times]
    assert learn(slower, 1, 1e9) >= learn(times, 1, 1e9)


@calm
@given(
    st.floats(0.01, 100), st.lists(st.floats(1, 1.2), min_size=ENOUGH + 3, max_size=60), st.data()
)
def test_one_slow_step_does_not_double_it(
    scale: float, spread: list[float], data: st.DataObject
) -> None:
    times = [scale * one for one in spread]
    at = data.draw(st.integers(0, len(times)))
    with_one = [*times[:at], data.draw(st.floats(1, 1e6)) * scale, *times[at:]]
    assert learn(with_one, 1e-9, 1e9) < 2 * learn(times, 1e-9, 1e9)


@calm
@given(st.lists(seconds, min_size=ENOUGH, max_size=60))
def test_what_happened_twice_is_no_hang(times: list[float]) -> None:
    assert learn(times, 1e-9, 1e9) >= sorted(times)[-2]


def test_few_steps_teach_nothing() -> None:
    assert learn([0.1] * (ENOUGH - 1), floor=1, first=300) == 300
    assert learn([0.1] * ENOUGH, floor=1, first=300) == 1
    assert learn([], floor=1, first=300, ceiling=200) == 200


@calm
@given(steps, steps, st.floats(0.1, 100), st.floats(0, 1000), st.floats(0.1, 1000))
def test_a_first_step_has_no_less_than_others_and_no_more_than_first(
    times: list[float], firsts: list[float], floor: float, more: float, first: float
) -> None:
    found = learn_first(times, firsts, floor, floor + more, first)
    most = min(max(first, floor), floor + more)
    assert found <= most
    assert found >= min(learn(times, floor, floor + more, first), most)


signs = st.builds(
    RankSign,
    id=st.just(""),
    seat=st.just(0),
    step=st.integers(5, 7),
    phase=st.sampled_from(["forward", "collective", "update", "", "paused"]),
    collectives=st.integers(-1, 3),
    since=st.floats(0, 100),
    heard=st.floats(0, 10),
)
worlds = st.lists(signs, min_size=2, max_size=6).map(
    lambda found: [
        RankSign(f"p{i}", i, s.step, s.phase, s.collectives, s.since, s.heard if i else 0.0)
        for i, s in enumerate(found)
    ]
)


def test_who_never_comes_to_its_first_batch_is_found_in_the_end() -> None:
    """No rank was accused, and the same world was formed again, each half hour."""
    own = RankSign("p0", 0, 5, "forward", since=1801.0)
    stuck = RankSign("p1", 1, since=1800.0)
    assert judge(own, [stuck], 60.0, 1801.0, 5.0) is None
    found = judge(own, [stuck], 60.0, 1800.0, 5.0)
    assert found is not None
    assert (found.culprit, found.seat) == ("p1", 1)
    assert "has not come to its first batch in this world" in found.reason


@calm
@given(worlds, st.floats(1, 50), st.floats(0, 100), st.floats(0.5, 20))
def test_a_verdict_has_grounds(
    world: list[RankSign], limit: float, more: float, silence: float
) -> None:
    own, ceiling = world[0], limit + more
    found = judge(own, world[1:], limit, ceiling, silence)
    if found is None:
        return
    assert own.still > limit  # a rank that moves accuses none
    assert found.reason
    if found.kind == "unknown":
        assert own.still > ceiling
        assert (found.culprit, found.seat) == ("", -1)
        return
    culprit = world[found.seat]
    assert culprit.id == found.culprit
    assert culprit.still > limit or own.still > ceiling or culprit.heard > silence
    if found.kind != "silent":
        assert all(one.phase != "paused" for one in world)


@calm
@given(worlds)
def test_all_accuse_the_same(world: list[RankSign]) -> None:
    """All ranks that stand still long enough accuse the same one."""
    world = [RankSign(s.id, s.seat, s.step, s.phase, s.collectives, s.since) for s in world]
    found = {
        judge(own, [one for one in world if one is not own], 5, 1000, 20)
        for own in world
        if own.still > 5 and own.phase not in ("", "paused")
    }
    assert len({(verdict.kind, verdict.culprit) if verdict else None for verdict in found}) <= 1


own_times = st.lists(st.floats(0.5, 2), min_size=5, max_size=10)
seats = st.dictionaries(st.integers(0, 50), own_times, max_size=12)


@calm
@given(seats)
def test_stragglers_are_a_slow_minority(times: dict[int, list[float]]) -> None:
    found = stragglers(times)
    assert 2 * len(found) <= len(times)
    assert all(one.slowdown >= 1.3 for one in found)
    assert [one.slowdown for one in found] == sorted((o.slowdown for o in found), reverse=True)
    # A power of two scales without rounding: the unit does not matter.
    scaled = stragglers({seat: [4 * one for one in own] for seat, own in times.items()})
    assert [one.seat for one in scaled] == [one.seat for one in found]


@calm
@given(st.integers(4, 16), st.data())
def test_the_slow_one_is_found_and_no_other(number: int, data: st.DataObject) -> None:
    times = {
        seat: data.draw(st.lists(st.floats(1, 1.02), min_size=5, max_size=8))
        for seat in range(number)
    }
    assert stragglers(times) == []
    slow = data.draw(st.integers(0, number - 1))
    times[slow] = [one * data.draw(st.floats(1.5, 9)) for one in times[slow]]
    assert [one.seat for one in stragglers(times)] == [slow]


def test_nothing_is_said_of_little() -> None:
    assert stragglers({}) == []
    assert stragglers({0: [1.0] * 9, 1: [9.0] * 9}) == []
    assert stragglers({0: [1.0] * 9, 1: [1.0] * 9, 2: [9.0] * 4}) == []
    assert stragglers({seat: [0.0] * 9 for seat in range(5)}) == []
    (found,) = stragglers({0: [1.0] * 9, 1: [1.0] * 9, 2: [9.0] * 9})
    assert (found.seat, found.score) == (2, float("inf"))
