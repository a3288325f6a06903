"""A shared directory that hangs keeps no rank from its beats, nor from a world that is formed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mesh_peers import crew, until, world

from slurm_resilience.mesh import resolver
from slurm_resilience.mesh.directory_looks import DirectoryLooks
from slurm_resilience.mesh.model import Peer, Timing
from slurm_resilience.mesh.rendezvous import SharedDirectory, TrainingOutcome

TIMING = Timing(silence_seconds=1.5, known_again_seconds=0.2)


class HangingDirectory(SharedDirectory):
    """A directory that tells nothing more from a moment on."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.hangs = False
        self.is_asked = threading.Event()
        self.goes_on = threading.Event()

    def _hang(self) -> None:
        if self.hangs:
            self.is_asked.set()
            self.goes_on.wait(60.0)

    def peers(self, looks_at: Callable[[str], bool] | None = None) -> list[Peer]:
        self._hang()
        return super().peers(looks_at)

    def ended(self) -> TrainingOutcome | None:
        self._hang()
        return super().ended()


@pytest.mark.parametrize("speakers", [False, True])
def test_a_rank_whose_directory_hangs_keeps_its_place(tmp_path: Path, speakers: bool) -> None:
    place = tmp_path / "mesh"
    hanging = HangingDirectory(place)
    with crew(place, 3, min_world=3) as peers:
        try:
            first = peers.add(0, speakers=speakers, timing=TIMING)
            waiting = peers.add(1, meeting=hanging, speakers=speakers, timing=TIMING)
            until(lambda: len(first.beats()) == 1, "two meet, and wait for the third one")
            hanging.hangs = True
            until(hanging.is_asked.is_set, "the directory is read again")
            began = time.monotonic()
            until(lambda: time.monotonic() - began > 2 * TIMING.silence_seconds, "it hangs on")
            assert waiting.me.id in first.beats() and waiting.evicted == ""
            third = peers.add(2, speakers=speakers, timing=TIMING)
            assert world([first, waiting, third]).size == 3
        finally:
            hanging.goes_on.set()


def test_what_no_thread_could_be_had_for_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mesh failed, and with it a healthy rank; and nothing was looked for ever after."""

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    looks, looked = DirectoryLooks(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", refused)
        looks.ask(looked.set)
        with pytest.raises(resolver.NotYet):
            resolver.address("localhost", 1)
    looks.ask(looked.set)
    assert looked.wait(60.0)

    def is_found() -> bool:
        try:
            return resolver.address("localhost", 1)[1][1] == 1
        except resolver.NotYet:
            return False

    until(is_found, "the name is looked up")
