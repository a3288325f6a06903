"""A node that falls silent: when it is probed, and when it is a suspect, in the daemon's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from worlds import FakeClock, config

from slurm_resilience.config import Config
from slurm_resilience.controller import main as daemon
from slurm_resilience.controller.main import Borders, Controller
from slurm_resilience.controller.probe import Answered
from slurm_resilience.wire.messages import NodeHello, Report

BEAT_SECONDS = config().agent.beat
STEP_SECONDS = 0.01
SILENT_AFTER_SECONDS = config().detect.silent_after


class Sresd:
    """A node's connection."""

    role, uid, address, kept = "node", 0, "127.0.0.1", None

    def __init__(self, node: str) -> None:
        self.subject = node
        self.beats_from = 0.0

    def send(self, message: object) -> None:
        return

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        return

    def close(self) -> None:
        return


class Site:
    """A daemon's loop over three nodes in steps of a hundredth of a second."""

    def __init__(self, place: Path) -> None:
        self.clock, slurm = FakeClock(), FakeSlurm(3)
        self.began = self.clock.monotonic()
        self.says: Any = "silent"
        self.probed: list[tuple[float, str]] = []
        self.rounds: list[tuple[float, str]] = []
        self.stop = threading.Event()
        self.settings: Config = config(controller={"state_dir": str(place), "interval": 1.0})
        borders = Borders(dialer=self)
        self.daemon = Controller(self.settings, slurm, slurm.info(), self, borders=borders)  # type: ignore[arg-type]
        self.daemon.inbox.know(slurm.nodes(), {})
        self.cycle = self.daemon.cycle
        self.daemon.cycle = self._cycle  # type: ignore[method-assign]
        self.sresds: list[Any] = [Sresd(f"n{number}") for number in (1, 2, 3)]
        self.is_away: Callable[[str, float], bool] = lambda node, after: False
        for sresd in self.sresds:
            sresd.beats_from = self.began + 0.1 * int(sresd.subject[1:])
            self.daemon.inbox.opened(sresd)
            self.daemon.inbox.received(sresd, NodeHello("boot", "machine"))
            self.daemon.inbox.received(sresd, Report(full=True))

    def now(self) -> float:
        return self.clock.now()

    def monotonic(self) -> float:
        return self.clock.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Let time pass, and beats come, until the event or the end of the wait."""
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until and not event.is_set():
            self.clock.pass_time(STEP_SECONDS)
            for sresd in self.sresds:
                if self.clock.monotonic() >= sresd.beats_from:
                    sresd.beats_from += BEAT_SECONDS
                    if not self.is_away(sresd.subject, self.clock.monotonic() - self.began):
                        self.daemon.registry.beaten([sresd])
        return event.is_set()

    def dial(self, address: str, port: int, done: Answered) -> None:
        self.probed.append((self.clock.monotonic(), address))
        done(self.clock.monotonic(), self.says)

    def close(self) -> None:
        return

    def run(self, seconds: float) -> None:
        self.end = self.began + seconds
        self.daemon.run(self.stop)
        self.daemon.close()

    def heard_at(self, node: str) -> float:
        agent = self.daemon.registry.agent(node)
        assert agent is not None
        return agent.heard_at

    def _cycle(self) -> str:
        sentence = self.cycle()
        verdicts = self.daemon.inbox._judged.verdicts
        self.rounds.append((self.clock.monotonic(), verdicts["n1"].verdict))
        if self.clock.monotonic() >= self.end:
            self.stop.set()
        return sentence


@pytest.mark.parametrize("phase", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
def test_a_silent_node_is_probed_and_a_suspect_within_one_and_a_half_seconds(
    tmp_path: Path, phase: float
) -> None:
    site = Site(tmp_path)
    site.is_away = lambda node, after: node == "n1" and after > 6.0 + phase
    site.run(12.0)
    last_beat = site.heard_at("n1")
    suspect_at = next(at for at, kind in site.rounds if kind == "suspect")
    assert SILENT_AFTER_SECONDS <= suspect_at - last_beat <= SILENT_AFTER_SECONDS + 0.05
    first = min(at for at, _ in site.probed)
    # One tick of the loop after the beat is late.
    assert first - last_beat <= BEAT_SECONDS + daemon.LATE_SECONDS + 0.25 + 0.05 < 1.5


def test_a_large_cluster_finds_it_soon_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of 10,000 nodes costs 0.15 s: a quiet one would come three seconds later."""
    spent = iter(range(10**6))
    monkeypatch.setattr(daemon, "_processor_seconds", lambda: 0.15 * next(spent))
    for phase in range(8):
        site = Site(tmp_path / str(phase))
        site.is_away = lambda node, after, phase=phase: node == "n1" and after > 20 + phase * 0.4  # type: ignore[misc]
        site.run(30.0)
        suspect_at = next(at for at, kind in site.rounds if kind == "suspect")
        assert suspect_at - site.heard_at("n1") <= SILENT_AFTER_SECONDS + 0.35


def test_a_loaded_node_whose_kernel_answers_is_no_suspect_and_begins_no_rounds(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path / "late")
    site.says = "answered"
    site.is_away = lambda node, after: node == "n1" and after % 6.0 > 3.5
    site.run(60.0)
    assert site.probed
    assert not {kind for _, kind in site.rounds} & {"suspect", "dead", "sick"}
    # Each silence takes some rounds; a beat that is only late takes none.
    late = Site(tmp_path / "only late")
    late.says = "answered"
    late.is_away = lambda node, after: node == "n1" and int(after / BEAT_SECONDS) % 8 == 7
    late.run(60.0)
    assert late.probed
    assert {kind for _, kind in late.rounds} == {"healthy"}
    assert len(late.rounds) <= 62


def test_nodes_that_were_stopped_are_not_missed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    silences = site.daemon.registry.silences(1.0, 1.5, 60.0)
    assert silences.late == () and silences.newest == float("inf")
    site.clock.pass_time(1.2)
    site.daemon.registry.beaten(site.sresds[2:])
    silences = site.daemon.registry.silences(1.0, 1.5, 60.0)
    assert silences.late == ("n1", "n2") and silences.next_in == pytest.approx(0.3)
    site.clock.pass_time(0.5)
    assert site.daemon.registry.silences(1.0, 1.5, 60.0).newest == pytest.approx(0.2)
    assert site.daemon.registry.silences(1.0, 1.5, 1.6).newest == float("inf")
    site.daemon.close()
