#!/usr/bin/env python3
"""The mesh alone: worlds of real processes without torch, over loopback, on nodes of 8 ranks.

All ranks are forked from one prepared process. For each size: the first world of all (from the
word "go", after which each rank makes its mesh), then deaths, one after the other, each of a
process that is killed; the others notice, leave their block, and form the next world.

A world's time is that of its slowest rank. On a machine with fewer cores than ranks, all ranks
wait for a core most of the time: then processor time tells more than seconds. What nothing on the
machine disturbs is told beside it: the frames that a rank reads, in a world on a simulated clock.

How long it would take if each rank had a core of its own, as in a cluster, is estimated: the same
protocol runs in one process on a simulated clock, where a turn takes what it costs. Real ranks
cost more than that (system calls, two threads, cold caches). How many times more is measured first,
with worlds of 16 real ranks. The estimate for this machine's own number of cores is told too, to be
held against the real figure: on two cores deaths are known sooner than it says.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import click
from mesh_crowd import Costs, Crowd
from rich.console import Console
from rich.table import Table

from slurm_resilience.mesh.events import (
    BeatDue,
    ConnectionProven,
    LocalBeat,
    LocalStatus,
    MessageReceived,
    Send,
)
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.messages import Message, NewGeneration, StatusUpdate, Vote, VoteRequest
from slurm_resilience.mesh.model import (
    SPEAKERS_ABOVE,
    GenerationEnd,
    Peer,
    PeerStatus,
    Timing,
)
from slurm_resilience.mesh.protocol.membership import Membership
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import SharedDirectory

NODE_RANKS = 8
CORE_MEMBERS = 16_384
DEADLINE_SECONDS = 240.0
STEADY_SECONDS = 4.0
SILENCE_SECONDS = 120.0
"""So many ranks on a few cores keep each other waiting; none shall be taken for hung, or for one
that does not leave its block."""
PATIENT = Timing(
    silence_seconds=SILENCE_SECONDS,
    reach_seconds=SILENCE_SECONDS,
    abort_seconds=SILENCE_SECONDS,
)
CALIBRATION_RANKS, CALIBRATION_WORLDS = 16, 5
FIRST_COSTS = Costs(protocol=1.0)
"""Before they are calibrated."""


# -- a rank ------------------------------------------------------------------------------------


class Rank:
    """One process of the training, which does what it is told over a pipe."""

    def __init__(self, seat: int, ranks: int, place: Path, speakers: bool) -> None:
        self._ended = threading.Event()
        self._heard_at = 0.0
        peer = Peer(
            id=f"rank-{seat}",
            seat=seat,
            node=f"node{seat // NODE_RANKS}",
            host="127.0.0.1",
            pid=os.getpid(),
            seats=ranks,
        )
        self._mesh = Mesh(
            SharedDirectory(place),
            peer,
            WorldRules(ranks, 1),
            timing=PATIENT,
            handshake_seconds=DEADLINE_SECONDS,
            on_end=self._end,
            speakers=speakers,
        ).start()

    def _end(self, _: GenerationEnd) -> None:
        if not self._ended.is_set():
            self._heard_at = time.monotonic()
            self._ended.set()

    def meet(self) -> dict[str, float]:
        """Go into the next world."""
        current = self._mesh.current
        generation = current.generation if current else 0
        self._ended.clear()
        self._mesh.say(PeerStatus("ready", generation, 0 if current else -1))
        view = self._mesh.meet(DEADLINE_SECONDS)
        assert view is not None
        met_at = time.monotonic()
        self._mesh.say(PeerStatus("running", view.generation, 0))
        self._mesh.worked(view)
        return {"met_at": met_at, "size": view.size, "cpu": time.process_time()}

    def meet_again(self) -> dict[str, float]:
        """Wait for the end of the world, and go into the next one."""
        assert self._ended.wait(DEADLINE_SECONDS), "no death was noticed"
        heard_at = self._heard_at
        return {"heard_at": heard_at, **self.meet()}

    def figures(self) -> dict[str, float]:
        """Return what this rank has used."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return {
            "cpu": time.process_time(),
            "connections": float(len(self._mesh.own_fds()) - 2),  # its own two: listener, eventfd
            "rss": pages * resource.getpagesize() / 1e6,
        }


def _serve(seat: int, ranks: int, place: Path, speakers: bool, pipe: Connection) -> None:
    gc.disable()  # a collection would copy the memory that is shared with the parent
    rank: Rank | None = None
    while True:
        order = pipe.recv()
        if order == "go":
            rank = Rank(seat, ranks, place, speakers)
            pipe.send(rank.meet())
        elif order == "again" and rank is not None:
            pipe.send(rank.meet_again())
        elif order == "figures" and rank is not None:
            pipe.send(rank.figures())
        else:
            os._exit(0)


# -- a world of them ---------------------------------------------------------------------------


class Started(NamedTuple):
    """A rank, as its parent sees it."""

    seat: int
    pid: int
    pipe: Connection


class World:
    """All ranks of one size. A context manager."""

    def __init__(self, ranks: int, place: Path, speakers: bool) -> None:
        self._living: list[Started] = []
        SharedDirectory(place).secret()
        for seat in range(ranks):
            own, theirs = multiprocessing.Pipe()
            pid = os.fork()
            if pid == 0:
                for other in self._living:
                    other.pipe.close()
                own.close()
                try:
                    _serve(seat, ranks, place, speakers, theirs)
                finally:
                    os._exit(1)
            theirs.close()
            self._living.append(Started(seat, pid, own))

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._living:
            os.kill(rank.pid, signal.SIGKILL)
        for rank in self._living:
            os.waitpid(rank.pid, 0)

    def tell(self, order: str) -> None:
        """Give all ranks an order."""
        for rank in self._living:
            rank.pipe.send(order)

    def answers(self) -> list[dict[str, float]]:
        """Return what each rank answers.

        Raises:
            TimeoutError: one does not.
        """
        found = []
        for rank in self._living:
            if not rank.pipe.poll(2 * DEADLINE_SECONDS):
                raise TimeoutError(f"the rank on seat {rank.seat} does not answer")
            found.append(rank.pipe.recv())
        return found

    def ask(self, order: str) -> list[dict[str, float]]:
        """Give an order, and return the answers."""
        self.tell(order)
        return self.answers()

    def kill(self, index: int) -> float:
        """Kill one rank; return when."""
        rank = self._living.pop(index % len(self._living))
        killed_at = time.monotonic()
        os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)
        return killed_at


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that so large a share does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]


def measure(ranks: int, deaths: int, speakers: bool) -> dict[str, float]:
    """Measure worlds that begin with so many ranks."""
    with tempfile.TemporaryDirectory(prefix="mesh") as folder:
        place = Path(folder) / "meet"
        with World(ranks, place, speakers) as world:
            begun_at = time.monotonic()
            met = world.ask("go")
            before = world.ask("figures")
            time.sleep(STEADY_SECONDS)
            after = world.ask("figures")
            heard: list[float] = []
            again: list[float] = []
            for number in range(deaths):
                world.tell("again")
                # The lead first: its death costs most.
                killed_at = world.kill(0 if number == 0 else 5 * number + ranks // 2)
                answers = world.answers()
                heard += [answer["heard_at"] - killed_at for answer in answers]
                again.append(max(answer["met_at"] for answer in answers) - killed_at)
    used = (b["cpu"] - a["cpu"] for a, b in zip(before, after, strict=True))
    return {
        "ranks": ranks,
        "speakers": speakers,
        "connections_per_rank": statistics.mean(row["connections"] for row in before),
        "connections_most": max(row["connections"] for row in before),
        "death_known_p50_s": statistics.median(heard),
        "death_known_p99_s": percentile(heard, 0.99),
        "world_formed_s": max(row["met_at"] for row in met) - begun_at,
        "formed_again_s": statistics.median(again),
        "cpu_ms_per_rank": statistics.median(row["cpu"] for row in met) * 1e3,
        "cpu_ms_most": max(row["cpu"] for row in met) * 1e3,
        "steady_cpu_ms_per_rank_and_s": statistics.median(used) * 1e3 / STEADY_SECONDS,
        "rss_mb_per_rank": statistics.median(row["rss"] for row in after),
    }


# -- the pure core -----------------------------------------------------------------------------


def core_cpu_seconds(members: int) -> float:
    """Return the processor time in which the lead's membership, alone, forms a world of so many.

    It is told of each other member (a connection, then a status), asks for all votes, is given
    them one by one, and forms the world. After each event it takes a turn, as in the mesh.
    """
    peers = [Peer(f"rank-{seat}", seat, node=f"n{seat // NODE_RANKS}") for seat in range(members)]
    statuses = PeerStatus()
    began = time.process_time()
    lead = Membership(peers[0], WorldRules(members, 1), Timing(), 0.0)
    now = 0.0
    sent: list[Message] = []

    def turn(effects: list[Any]) -> None:
        if any(isinstance(effect, BeatDue) for effect in effects):
            effects += lead.step(LocalBeat(), now)
        sent.extend(effect.message for effect in effects if isinstance(effect, Send))

    def tell(event: Any) -> None:
        nonlocal now
        now = max(now, time.process_time() - began)
        turn([*lead.step(event, now), *lead.tick(now)])

    def wait_for(kind: type) -> Any:
        nonlocal now
        while not (found := [message for message in sent if isinstance(message, kind)]):
            now = max(now, lead.side.wake_at)
            turn(lead.tick(now))
        return found[-1]

    tell(LocalStatus(statuses))
    for peer in peers[1:]:
        tell(ConnectionProven(peer.seat, peer, statuses))
        tell(_message(peer, StatusUpdate(0, statuses)))
    number = wait_for(VoteRequest).view.generation
    for peer in peers[1:]:
        tell(_message(peer, Vote(number, True, number)))
    wait_for(NewGeneration)
    seconds = time.process_time() - began
    adopted = lead.side.generation.view
    assert adopted is not None and adopted.size == members
    return seconds


def _message(peer: Peer, message: Message) -> MessageReceived:
    return MessageReceived(peer.seat, peer.id, peer.id, message)


def crowd_figures(ranks: int, speakers: bool) -> dict[str, float]:
    """Return what the first world, and one after a death, cost a rank on a simulated clock."""
    crowd = Crowd(ranks, NODE_RANKS, speakers=speakers)
    if not crowd.run(crowd.is_whole, DEADLINE_SECONDS):
        raise TimeoutError(f"no simulated world of {ranks}")
    first = crowd.frames()
    seconds = sum(process.seconds for process in crowd.living())
    crowd.kill(crowd.living()[0])
    if not crowd.run(crowd.is_whole, DEADLINE_SECONDS):
        raise TimeoutError(f"no simulated world of {ranks - 1}")
    return {
        "frames_per_rank": first / ranks,
        "frames_per_rank_of_a_death": (crowd.frames() - first) / ranks,
        "core_cpu_ms_per_rank": seconds / ranks * 1e3,
    }


def calibrated(speakers: bool) -> Costs:
    """Return what a turn costs a real rank on this machine."""
    start = statistics.median(_first_world_cpu(1, speakers) for _ in range(CALIBRATION_WORLDS))
    ranks = CALIBRATION_RANKS
    real = statistics.median(_first_world_cpu(ranks, speakers) for _ in range(CALIBRATION_WORLDS))
    crowd = _estimated(ranks, speakers, FIRST_COSTS, os.cpu_count() or 1)
    used = statistics.median(process.used for process in crowd.living())
    return FIRST_COSTS.times((real - start) / used)._replace(start=start)


def _first_world_cpu(ranks: int, speakers: bool) -> float:
    with (
        tempfile.TemporaryDirectory(prefix="mesh") as folder,
        World(ranks, Path(folder) / "meet", speakers) as world,
    ):
        return statistics.median(row["cpu"] for row in world.ask("go"))


def _estimated(ranks: int, speakers: bool, costs: Costs, cores: int) -> Crowd:
    """Return a first world of so many."""
    crowd = Crowd(ranks, NODE_RANKS, cores=cores, costs=costs, speakers=speakers, timing=PATIENT)
    if not crowd.run(crowd.is_whole, DEADLINE_SECONDS):
        raise TimeoutError(f"no simulated world of {ranks}")
    return crowd


def estimate(ranks: int, speakers: bool, costs: Costs, cores: int) -> dict[str, float] | None:
    """Return the figures of a first world, and of the death of its lead, on so many cores.

    None: the simulated ranks come to no world in time, for they wait for a core too long.
    """
    gc.collect()
    gc.disable()  # a collection would look through all processes at once
    try:
        crowd = _estimated(ranks, speakers, costs, cores)
        formed_at = crowd.now
        used = statistics.median(process.used for process in crowd.living())
        crowd.kill(crowd.living()[0])
        if not crowd.run(crowd.is_whole, DEADLINE_SECONDS):
            return None
    except TimeoutError:
        return None
    finally:
        gc.enable()
    heard = [process.ended_at - formed_at for process in crowd.living()]
    return {
        "cores": cores,
        "death_known_p50_s": statistics.median(heard),
        "death_known_p99_s": percentile(heard, 0.99),
        "world_formed_s": formed_at,
        "formed_again_s": crowd.now - formed_at,
        "cpu_ms_per_rank": used * 1e3,
    }


# -- what is shown -----------------------------------------------------------------------------

COLUMNS: dict[str, Callable[[dict[str, float]], str]] = {
    "ranks": lambda row: f"{row['ranks']}",
    "mesh": lambda row: "speakers" if row["speakers"] else "full",
    "connections\na rank (most)": lambda row: (
        f"{row['connections_per_rank']:.0f} ({row['connections_most']:.0f})"
    ),
    "death known\np50, p99": lambda row: (
        f"{row['death_known_p50_s'] * 1e3:.0f}, {row['death_known_p99_s'] * 1e3:.0f} ms"
    ),
    "first world": lambda row: f"{row['world_formed_s']:.2f} s",
    "from death to\nnext world": lambda row: f"{row['formed_again_s']:.3f} s",
    "processor time of the\nfirst world a rank (most)": lambda row: (
        f"{row['cpu_ms_per_rank']:.0f} ({row['cpu_ms_most']:.0f}) ms"
    ),
    "frames a rank:\nfirst world, a death": lambda row: (
        f"{row['frames_per_rank']:.0f}, {row['frames_per_rank_of_a_death']:.0f}"
    ),
    "at rest,\na second": lambda row: f"{row['steady_cpu_ms_per_rank_and_s']:.1f} ms",
    "memory\na rank": lambda row: f"{row['rss_mb_per_rank']:.0f} MB",
}


ESTIMATE_COLUMNS: dict[str, Callable[[dict[str, float]], str]] = {
    "cores": lambda row: f"{row['cores']}",
    "death known\np50, p99": COLUMNS["death known\np50, p99"],
    "first world": COLUMNS["first world"],
    "from death to\nnext world": COLUMNS["from death to\nnext world"],
    "processor time of the\nfirst world a rank": lambda row: f"{row['cpu_ms_per_rank']:.0f} ms",
}


def _show(rows: list[dict[str, Any]], core: float, costs: Costs, shape: str) -> None:
    console = Console(highlight=False, file=sys.stderr, width=140)
    title = f"the mesh, real processes without torch, SRES_MESH={shape}"
    table = Table(title=title, title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(cell(row) for cell in COLUMNS.values()))
    console.print(table)
    title = f"estimated: turns cost {costs.protocol:.1f} times as much as in one simulated process"
    table = Table(title=title, title_justify="left")
    for name in ("ranks", *ESTIMATE_COLUMNS):
        table.add_column(name, justify="right")
    for row in rows:
        for found in (row["estimated_here"], row["estimated_core_each"]):
            if found is None:
                table.add_row(f"{row['ranks']}", "too few")
                continue
            cells = (cell(found) for cell in ESTIMATE_COLUMNS.values())
            table.add_row(f"{row['ranks']}", *cells)
    console.print(table)
    console.print(
        f"the lead's pure core forms a world of {CORE_MEMBERS} members in {core:.1f} s of "
        f"processor time; this machine has {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )


@click.command(help=__doc__)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--ranks", default="32,128,512", show_default=True, metavar="N,…", help="Worlds.")
@click.option("--deaths", default=3, show_default=True, type=click.IntRange(1), help="A world.")
@click.option(
    "--mesh",
    "shape",
    type=click.Choice(["auto", "speakers", "full"]),
    default="auto",
    show_default=True,
    help="As SRES_MESH: every rank is connected to every other, or one rank speaks for each node.",
)
def main(json_file: Path | None, ranks: str, deaths: int, shape: str) -> None:
    try:
        sizes = [int(word) for word in ranks.split(",")]
    except ValueError:
        raise click.UsageError(f"--ranks {ranks!r}: write numbers, as 32,128") from None
    if min(sizes) < deaths + 2:
        raise click.UsageError(f"--ranks: {deaths} deaths need a world of {deaths + 2} at least")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kinds = [size > SPEAKERS_ABOVE if shape == "auto" else shape == "speakers" for size in sizes]
    rows: list[dict[str, Any]] = []
    # All that forks comes before what is simulated: a rank would begin with that memory, and copy
    # each page of it that it touches.
    for size, speakers in zip(sizes, kinds, strict=True):
        print(f"{size} ranks …", file=sys.stderr)
        rows.append(measure(size, deaths, speakers))
    print("what a turn costs …", file=sys.stderr)
    costs = calibrated(shape != "full")
    cores = os.cpu_count() or 1
    for row, size, speakers in zip(rows, sizes, kinds, strict=True):
        print(f"{size} ranks, simulated …", file=sys.stderr)
        row |= crowd_figures(size, speakers)
        row["estimated_here"] = estimate(size, speakers, costs, cores)
        row["estimated_core_each"] = estimate(size, speakers, costs, size)
    core = core_cpu_seconds(CORE_MEMBERS)
    _show(rows, core, costs, shape)
    if json_file:
        found = {"sizes": rows, "core_16384_cpu_s": core, "mesh": shape, "cores": cores}
        found |= {"costs": costs._asdict()}
        json_file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
