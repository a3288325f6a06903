"""Speeds over time: who falls behind is named, all together never; the store is bounded."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_deepcheck_run import Door, StandStill, node

from slurm_resilience.deepcheck.speed import speed_probe
from slurm_resilience.deepcheck.speed.speed_judge import (
    LEAST_HISTORY,
    RECENT,
    SpeedHistory,
    SpeedKey,
    slow_devices,
)
from slurm_resilience.deepcheck.speed.speed_pairs import rounds_of_pairs
from slurm_resilience.deepcheck.speed.speed_run import SLOW, measure_speeds
from slurm_resilience.deepcheck.speed.speed_store import KEPT, SpeedStore
from slurm_resilience.deepcheck.step_lines import SpeedTold
from slurm_resilience.errors import UsageError
from slurm_resilience.slurm.maintenance import StepOrder
from slurm_resilience.slurm.node_labels import labels_of

Rounds = Sequence[Sequence[tuple[str, str]]]
USUAL = [100.0, 101.0, 99.0, 100.5, 99.5]


def history(number: int, values: list[float], peers: str = "x") -> SpeedHistory:
    return SpeedHistory(SpeedKey(f"n{number}", f"s{number}", "memory"), peers, tuple(values))


def fleet(*odd: list[float], size: int = 6) -> list[SpeedHistory]:
    series = [*odd, *([USUAL * 6] * (size - len(odd)))]
    return [history(number, values) for number, values in enumerate(series)]


def named(histories: list[SpeedHistory]) -> list[str]:
    return [one.key.node for one in slow_devices(histories)]


def test_who_falls_behind_its_own_and_its_peers_is_named() -> None:
    slower = USUAL * 6 + [88.0] * RECENT
    (found,) = slow_devices(fleet(slower))
    assert found.key.node == "n0"
    assert "12% slower than its own baseline (88 now, 100 before" in found.text
    assert "5 peers lost" in found.text
    assert named(fleet(USUAL * 6 + [97.0] * RECENT)) == [], "within what is usual"


def test_two_good_measures_of_the_recent_ones_clear_a_device() -> None:
    assert named(fleet(USUAL * 6 + [50.0] * (RECENT - 2) + [100.0] * 2)) == []
    assert named(fleet(USUAL * 6 + [50.0] * (RECENT - 1) + [100.0])) == ["n0"]


def test_what_slows_all_of_them_is_no_single_ones() -> None:
    slower = USUAL * 6 + [80.0] * RECENT
    assert named(fleet(*([slower] * 6))) == []
    # Also while the others' recent measures still lag behind.
    assert named(fleet(slower, *([USUAL * 6 + [80.0]] * 5))) == []


def test_a_slow_decline_does_not_take_its_baseline_along() -> None:
    values = [100.0 - 0.2 * at for at in range(60)]
    assert named(fleet(values)) == ["n0"]


def test_one_that_was_slow_from_the_beginning_is_named_by_its_peers() -> None:
    assert named(fleet([60.0] * RECENT)) == ["n0"]
    assert named(fleet([60.0] * RECENT, size=3)) == [], "two peers are no comparison"
    assert named(fleet([78.0] * RECENT)) == [], "GPUs of one kind differ by as much"


def test_other_hardware_is_no_peer() -> None:
    others = [history(number, USUAL * 6, "y") for number in range(1, 6)]
    assert named([history(0, [60.0] * RECENT), *others]) == []


def links(rounds: Rounds, speed: Callable[[str, str], float]) -> list[SpeedHistory]:
    """Return the histories of made-up links: both ends are told the pair's speed."""
    values: dict[str, list[float]] = {}
    partners: dict[str, list[str]] = {}
    for first, second in (pair for each in rounds for pair in each):
        told = speed(first, second)
        for name, partner in ((first, second), (second, first)):
            values.setdefault(name, []).append(told)
            partners.setdefault(name, []).append(partner)
    return [
        SpeedHistory(SpeedKey(name, name, "link"), "x", tuple(values[name]), tuple(partners[name]))
        for name in sorted(values)
    ]


@pytest.mark.parametrize("usual_with_slow", range(RECENT + 1))
def test_the_partner_of_a_slow_link_is_not_named_however_often_they_met(
    usual_with_slow: int,
) -> None:
    together = (("n1", "n2"), ("n3", "n4"))
    apart = ((("n2", "n3"), ("n1", "n4")), (("n2", "n4"), ("n1", "n3")))
    rounds = [together] * usual_with_slow
    rounds += [apart[number % 2] for number in range(RECENT - usual_with_slow)]
    told = named(links(rounds, lambda *pair: 5.0 if "n2" in pair else 1000.0))
    # Two that met each other only cannot be told apart: neither is named.
    assert told == (["n2"] if usual_with_slow < RECENT else [])


@given(st.integers(0, 10_000), st.floats(0.05, 1.0), st.integers(4, 9))
def test_noise_makes_no_second_link_slow(seed: int, sigma: float, size: int) -> None:
    rng = random.Random(seed)
    names = [f"n{number}" for number in range(1, size + 1)]
    rounds = rounds_of_pairs(rng.sample(names, size), RECENT + 2)

    def speed(*pair: str) -> float:
        return 5.0 if "n2" in pair else 1000.0 * rng.lognormvariate(0.0, sigma)

    assert set(named(links(rounds, speed))) <= {"n2"}


@given(st.integers(0, 10_000), st.integers(4, 9))
def test_a_link_with_a_tenth_of_the_speed_is_named_beside_steady_ones(seed: int, size: int) -> None:
    rng = random.Random(seed)
    names = [f"n{number}" for number in range(1, size + 1)]
    # Each cable limits its link, and the processors disturb one measure of ten.
    rounds = rounds_of_pairs(rng.sample(names, size), RECENT + 2)

    def speed(*pair: str) -> float:
        limit = 2.5 if "n2" in pair else 25.0
        return limit * (rng.uniform(0.5, 1.0) if rng.random() < 0.1 else rng.gauss(1.0, 0.02))

    assert named(links(rounds, speed)) == ["n2"]


def test_two_slow_links_of_four_are_both_named() -> None:
    rounds = rounds_of_pairs(["n1", "n2", "n3", "n4"], RECENT)
    slow = {"n1", "n2"}
    assert named(links(rounds, lambda *pair: 5.0 if slow & {*pair} else 1000.0)) == ["n1", "n2"]


@given(st.integers(2, 20), st.integers(1, 30))
def test_each_node_meets_every_other_one_in_turn(size: int, rounds: int) -> None:
    names = [f"n{number}" for number in range(size)]
    met = rounds_of_pairs(names, rounds)
    assert len(met) == rounds
    tournament = [frozenset(pair) for each in met[: size - 1 + size % 2] for pair in each]
    assert len(tournament) == len(set(tournament)), "no pair meets twice before all have met"
    for each in met:
        taken = [name for pair in each for name in pair]
        assert len(taken) == len(set(taken)) == size - size % 2


@given(st.integers(0, 10_000), st.floats(0.5, 2.0))
def test_the_unit_does_not_matter(seed: int, scale: float) -> None:
    rng = random.Random(seed)
    series = [[rng.gauss(100, 8) for _ in range(LEAST_HISTORY + RECENT)] for _ in range(5)]
    scaled = [[scale * value for value in values] for values in series]
    assert named(fleet(*series)) == [] or named(fleet(*scaled, size=5)) is not None
    plain = [history(n, values) for n, values in enumerate(series)]
    assert named(plain) == named([history(n, values) for n, values in enumerate(scaled)])


def told(name: str, value: float, kind: str = "link", device: str = "") -> SpeedTold:
    return SpeedTold(name, device or f"serial-{name}", "x", kind, value)


def test_the_store_is_bounded_and_in_order(tmp_path: Path) -> None:
    store = SpeedStore(tmp_path / "new" / "speeds.sqlite")
    assert store.histories() == ()
    for at in range(KEPT + 5):
        store.add([told("n1", float(at)), told("n2", -float(at))], 1000.0 + at)
    first, second = store.histories()
    assert first.values == tuple(float(at) for at in range(5, KEPT + 5))
    assert second.key == SpeedKey("n2", "serial-n2", "link")
    store.add([told("n1", 1.0)], 1000.0 + 100 * 86400)
    assert [one.values for one in store.histories()] == [(1.0,)], "n2 is gone"
    (tmp_path / "broken").write_text("no database")
    with pytest.raises(UsageError, match="speeds cannot be read"):
        SpeedStore(tmp_path / "broken").histories()


def test_a_run_measures_idle_nodes_and_labels_the_slow_one(tmp_path: Path) -> None:
    door = Door([node(1), node(2), node(3), node(4), node(5, "ALLOCATED")], lambda _: ())

    def answer(order: StepOrder) -> list[SpeedTold]:
        ((_, token),) = order.secrets
        assert len(token) == 32 and token not in " ".join(order.program)
        slow = door.shown["n3"].comment == ""
        return [
            told(name, 10.0 if name == "n3" and slow else 100.0)
            for name in order.nodes
            for _ in range(RECENT)
        ]

    door.answer = answer
    store, names = SpeedStore(tmp_path / "speeds.sqlite"), [*door.shown]
    report = measure_speeds(door, StandStill(), store, names, "root", 1, lambda _: None)
    assert report.measured == ("n1", "n2", "n3", "n4")
    assert "a job runs on it" in report.skipped["n5"]
    assert [one.key.node for one in report.slow] == ["n3"]
    assert labels_of(door.shown["n3"].comment) == {SLOW: "link"}
    assert door.done[-1] == "release"
    # It is well again: the label goes.
    report = measure_speeds(door, StandStill(), store, names, "root", 1, lambda _: None)
    assert report.slow == ()
    assert labels_of(door.shown["n3"].comment) == {}


def test_the_probe_measures_and_a_stranger_is_not_the_partner() -> None:
    assert speed_probe.compute_rate(1) > 0
    assert speed_probe.memory_rate(2) > 0
    rates: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = threading.Thread(target=lambda: rates.append(speed_probe.serve_link(port, b"secret")))
    server.start()
    with pytest.raises(OSError):
        speed_probe.call_link("127.0.0.1", port, b"forged")
    rates.append(speed_probe.call_link("127.0.0.1", port, b"secret"))
    server.join(30)
    assert rates[0] == rates[1] > 0
