"""The world of a plain program's launchers, and what the supervisor sees of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slurm_resilience.launcher import launcher_world
from slurm_resilience.launcher.launcher_world import LauncherWorld, WorldNews
from slurm_resilience.mesh.model import GenerationEnd, Peer
from slurm_resilience.mesh.observer import Observer, Picture
from slurm_resilience.mesh.protocol import membership
from slurm_resilience.mesh.rendezvous import SharedDirectory
from slurm_resilience.resume.crash_watch import GatheringStage
from slurm_resilience.resume.live_step import training
from slurm_resilience.resume.live_step.training import TrainingWatch, find_rendezvous, stage_of

LIMIT_SECONDS = 30.0


class Launchers:
    """Launchers of one program in this process, each with what it was told."""

    def __init__(self, place: Path, seats: int) -> None:
        self.place, self.seats = place, seats
        self.told: dict[int, list[str]] = {}
        self.reasons: dict[int, str] = {}
        self.worlds: dict[int, LauncherWorld] = {}
        self.news = asyncio.Event()

    def start(
        self, seat: int, incarnation: int = 0, *, ranks: int = 1, seats: int = 0
    ) -> LauncherWorld:
        told = self.told[seat] = []

        def note(text: str) -> Callable[..., None]:
            def write(*_: object) -> None:
                told.append(text)
                self.news.set()

            return write

        # An address of its own for each, as on machines of their own.
        host = f"127.0.0.{10 + seat + 10 * incarnation}"
        me = Peer(
            *(f"{seat}.{incarnation}", seat, incarnation, f"n{seat}"),
            host=host,
            seats=seats or self.seats,
        )

        def failed(reason: str, is_left: bool) -> None:
            self.reasons[seat] = reason
            note("left" if is_left else "failed")()

        news = WorldNews(note("begun"), note("over"), note("done"), failed)
        loop = asyncio.get_running_loop()
        world = LauncherWorld(loop, SharedDirectory(self.place), me, ranks, 1.0, news)
        self.worlds[seat] = world
        world.start()
        return world

    async def wait(self, ready: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while not ready():
                self.news.clear()
                await self.news.wait()

    async def all_told(self, text: str, times: int = 1) -> None:
        await self.wait(lambda: all(told.count(text) == times for told in self.told.values()))

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()


def run(story: Callable[[Launchers], Any], place: Path, seats: int) -> None:
    async def tell() -> None:
        launchers = Launchers(place, seats)
        try:
            await story(launchers)
        finally:
            launchers.close()

    asyncio.run(tell())


def outcome(place: Path) -> int | None:
    found = SharedDirectory(place).ended()
    return None if found is None else found.code


def test_the_end_of_a_program_is_written_down(tmp_path: Path) -> None:
    async def story(launchers: Launchers) -> None:
        for seat in (0, 1):
            launchers.start(seat)
        await launchers.all_told("begun")
        assert outcome(tmp_path) is None
        for world in launchers.worlds.values():
            assert world.moved_master == "", "node rank 0 is where it was"
            world.done()
        await launchers.all_told("done")
        assert outcome(tmp_path) == 0

    run(story, tmp_path, 2)


def test_a_program_that_is_given_up_is_not_brought_back(tmp_path: Path) -> None:
    async def story(launchers: Launchers) -> None:
        launchers.start(0).stop("rank 0: twice in a row at the same place", 3)
        assert outcome(tmp_path) == 3

    run(story, tmp_path, 1)


def test_all_are_told_where_the_first_node_s_rank_is_now(tmp_path: Path) -> None:
    async def story(launchers: Launchers) -> None:
        for seat in (0, 1):
            launchers.start(seat)
        await launchers.all_told("begun")
        launchers.worlds.pop(0).close()
        await launchers.wait(lambda: "over" in launchers.told[1])
        launchers.worlds[1].ready()
        launchers.start(0, incarnation=1)
        await launchers.wait(lambda: launchers.told[1].count("begun") == 2)
        assert launchers.worlds[1].moved_master == "127.0.0.20"

    run(story, tmp_path, 2)


def announce(directory: Path, where: str) -> Path:
    place = directory / where
    (place / "peers").mkdir(parents=True)
    (place / "peers" / "one.json").touch()
    return place


def test_the_world_of_the_ranks_comes_before_that_of_their_launchers(tmp_path: Path) -> None:
    launchers = announce(tmp_path, "run/7.1/launchers")
    assert find_rendezvous(str(tmp_path)) == launchers
    watch = watching(tmp_path)
    assert not watch.has_moved(launchers)
    ranks = announce(tmp_path, "run/7.1/mesh")
    assert find_rendezvous(str(tmp_path)) == ranks
    assert watch.has_moved(launchers)
    assert not watch.has_moved(ranks)


def test_launchers_tell_nothing_of_their_ranks(tmp_path: Path) -> None:
    """Their step is ended like any other, as long as it is not known to live."""
    observer = cast(Observer, SimpleNamespace(picture=lambda: Picture(1, (0,))))
    assert stage_of((tmp_path / "mesh", observer)) is GatheringStage.STEPS
    assert stage_of((tmp_path / "launchers", observer)) is GatheringStage.UNKNOWN


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (None, SimpleNamespace(tasks=2)),
        ((("n1", "n2"), 2), None),  # slurmctld is away
    ],
    ids=["slurmctld tells the tasks", "the nodes tell them"],
)
def test_a_program_of_launchers_is_taken_for_a_plain_one_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: object, shown: object
) -> None:
    peers = tuple(Peer(f"{seat}", seat, node=f"n{seat + 1}", seats=2) for seat in (0, 1))
    observer = cast(Observer, SimpleNamespace(picture=lambda: Picture(1, (0, 1), (), -1, peers)))
    watch = watching(tmp_path, observer)
    monkeypatch.setattr(training, "find_step", lambda *_: shown)
    announce(tmp_path, "run/7.1/launchers")
    with contextlib.ExitStack() as stack:
        watched = watch.connect(stack)
        assert watched is not None
        step: Any = SimpleNamespace(reports=SimpleNamespace(whole_step=lambda: told))
        assert watch.seat_map(step, ("n1", "n2"), watched) is None
        watch._context.clock.now_is += training.SETTLE_SECONDS  # type: ignore[attr-defined]
        found = watch.seat_map(step, ("n1", "n2"), watched)
        assert found is not None
        assert (found.nodes, found.seats, found.per_task) == (("n1", "n2"), 2, 1)
        assert found.needs_all


class Now(SimpleNamespace):
    now_is = 100.0

    def monotonic(self) -> float:
        return self.now_is


def watching(directory: Path, observer: Observer | None = None) -> TrainingWatch:
    context: Any = SimpleNamespace(
        clock=Now(),
        wake=SimpleNamespace(set=lambda: None),
        host_calls=SimpleNamespace(observe=lambda *_: contextlib.nullcontext(observer)),
        client=None,
        allocation=SimpleNamespace(id=7, companions=SimpleNamespace(size=None)),
        host="n1",
    )
    fence: Any = SimpleNamespace(directory=str(directory))
    return TrainingWatch(context, fence, lives=False)


def test_a_world_that_is_over_elsewhere_is_told_once(tmp_path: Path) -> None:
    async def story(launchers: Launchers) -> None:
        for seat in (0, 1):
            launchers.start(seat)
        await launchers.all_told("begun")
        view = launchers.worlds[0]._view
        assert view is not None
        launchers.worlds[1].over("rank 1: SIGKILL")
        await launchers.wait(lambda: "over" in launchers.told[0])
        launchers.worlds[1]._ended(GenerationEnd(view.generation, "again"))
        for world in launchers.worlds.values():
            world.ready()
        await launchers.all_told("begun", 2)
        assert launchers.told[0].count("over") == 1

    run(story, tmp_path, 2)


def test_launchers_outlast_a_cut_of_some_seconds(tmp_path: Path) -> None:
    """It ended the attempt after 4 s, whose ranks had outlasted it."""

    async def story(launchers: Launchers) -> None:
        for seat in (0, 1):
            launchers.start(seat)
        await launchers.all_told("begun")
        for world in launchers.worlds.values():
            limits = [
                connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                for connection in world._mesh._transport.connections.values()
            ]
            assert limits == [29_000]

    run(story, tmp_path, 2)


def test_a_launcher_that_is_left_knows_that_the_others_go_on(tmp_path: Path) -> None:
    async def story(launchers: Launchers) -> None:
        for seat in (0, 1):
            launchers.start(seat)
        await launchers.all_told("begun")
        left, told = launchers.worlds[1], launchers.told[1]
        launchers.start(1, incarnation=1)
        left.ready()
        await launchers.wait(lambda: told[-1] in ("left", "failed"))
        assert told[-1] == "left"
        left.close()

    run(story, tmp_path, 2)


@pytest.mark.parametrize(
    ("numbers", "reasons"),
    [
        (
            {"ranks": 1},
            ["n0 was started for 2 rank(s), n1 1:", "n1 was started for 1 rank(s), n0 2:"],
        ),
        ({"ranks": 2, "seats": 3}, ["n0 was started for a world of 2, n1 for one of 3:"]),
    ],
    ids=["ranks", "nodes"],
)
def test_nodes_that_were_started_with_other_numbers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: dict[str, int], reasons: list[str]
) -> None:
    """Their ranks waited for each other for ever."""
    monkeypatch.setattr(membership, "MISFIT_SECONDS", 1.0)

    async def story(launchers: Launchers) -> None:
        launchers.start(0, ranks=2)
        launchers.start(1, **numbers)
        await launchers.all_told("failed")
        told = list(launchers.reasons.values())
        assert all(any(reason in text for text in told) for reason in reasons), told
        assert outcome(tmp_path) is None

    run(story, tmp_path, 2)


def test_a_node_that_does_not_come_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told of as a rank, by its seat."""
    monkeypatch.setattr(launcher_world, "MEET_SECONDS", 0.5)

    async def story(launchers: Launchers) -> None:
        for seat in (0, 2):
            launchers.start(seat)
        await launchers.all_told("failed")
        assert all("missing node ranks: 1, 3)" in text for text in launchers.reasons.values())

    run(story, tmp_path, 4)


def test_one_that_comes_later_with_another_number_of_ranks_ends_alone(tmp_path: Path) -> None:
    async def story(launchers: Launchers) -> None:
        for seat in (0, 1):
            launchers.start(seat)
        await launchers.all_told("begun")
        launchers.worlds.pop(1).close()
        await launchers.wait(lambda: "over" in launchers.told[0])
        launchers.worlds[0].ready()
        launchers.start(1, 1, ranks=2)
        await launchers.wait(lambda: "failed" in launchers.told[1])
        launchers.worlds.pop(1).close()
        launchers.start(1, 2)
        await launchers.wait(lambda: launchers.told[0].count("begun") == 2)
        assert "failed" not in launchers.told[0]

    run(story, tmp_path, 2)
