"""Ranks in real processes, whose meshes go through seeded faults; a program of its own.

    python tests/support/mesh_chaos.py --seed 1 --rounds 100 --mesh speakers

A rank is killed, stopped for less than it would be taken for hung, or loses connections; a node is
as well; parts of the directory in which they meet are removed. After each round all seats must be
in one world again, and no rank may have been given up that was not killed. The simulation has the
same rules; here the kernel, sockets, files and threads are the real ones.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click

from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import GenerationEnd, Peer, PeerStatus
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import SharedDirectory

NODES, NODE_RANKS = 4, 3
SEATS = NODES * NODE_RANKS
STOP_SECONDS = 2.0
"""A rank is stopped for so long at most: less than half of the silence that is too long."""
WHOLE_SECONDS = 40.0
"""Within which all seats are in one world again."""
REMOVED_SECONDS = 90.0
"""The same where the directory was removed: ranks look once a minute if their entry is there."""
ROW = struct.Struct("qqq")


class Row(NamedTuple):
    """A rank's word on itself."""

    pid: int
    generation: int
    size: int
    """Ranks of the world that it is in; 0: of none."""


class Board:
    """Memory in which each rank writes where it is."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SEATS * ROW.size)

    def write(self, seat: int, row: Row) -> None:
        """Write a rank's row."""
        ROW.pack_into(self._memory, seat * ROW.size, *row)

    def rows(self) -> list[Row]:
        """Return all rows, by seat."""
        return [Row(*row) for row in ROW.iter_unpack(self._memory)]


class RankGone(Exception):
    """A rank has ended by itself, or a world was not formed."""


def serve(seat: int, incarnation: int, place: Path, board: Board, speakers: bool) -> None:
    """Be a rank until the process is killed, or the others go on without it."""
    gc.disable()
    pid = os.getpid()
    peer = Peer(
        id=f"{seat}.{incarnation}-{pid}",
        seat=seat,
        incarnation=incarnation,
        node=f"node{seat // NODE_RANKS}",
        host="127.0.0.1",
        pid=pid,
        seats=SEATS,
    )
    rules = WorldRules(SEATS, SEATS // 2)
    mesh = Mesh(SharedDirectory(place), peer, rules, speakers=speakers).start()
    generation, step = 0, -1 if incarnation else 0
    while True:
        board.write(seat, Row(pid, generation, 0))
        mesh.say(PeerStatus("ready", generation, step))
        view = mesh.meet(None)
        if view is None:
            raise RankGone(f"it finds no world: {mesh.evicted}")
        generation, step = view.generation, max(step, 0) + 1
        mesh.say(PeerStatus("running", generation, step))
        mesh.worked(view)
        board.write(seat, Row(pid, generation, view.size))
        while not mesh.is_left:
            time.sleep(0.02)
            if view.rank_of(peer.id) == 0 and mesh.knock.is_set() and mesh.newcomers():
                mesh.over(GenerationEnd(generation, "let in", "", "join", step=step))
        if mesh.evicted:
            raise RankGone(f"the others go on without it: {mesh.evicted}")


class Chaos:
    """All ranks, and what goes wrong. A context manager."""

    def __init__(self, place: Path, random_: random.Random, speakers: bool) -> None:
        self._place = place
        self._random = random_
        self._speakers = speakers
        self._board = Board()
        self._pids: dict[int, int] = {}
        self._incarnations = [0] * SEATS
        self._killed: set[int] = set()
        self.limit = WHOLE_SECONDS
        self.kinds: dict[str, Callable[[int], None]] = {
            "kill a rank": self._kill,
            "stop a rank": lambda seat: self._stop([seat]),
            "kill a node": lambda seat: self._each(self._kill, seat),
            "stop a node": lambda seat: self._stop(self._node(seat)),
            "kill one, stop another": self._kill_and_stop,
            "remove files": self._remove,
        }
        if os.geteuid() == 0 and shutil.which("ss"):
            self.kinds["reset connections"] = self._reset

    def __enter__(self) -> Chaos:
        SharedDirectory(self._place).secret()
        for seat in self._random.sample(range(SEATS), SEATS):
            self._start(seat)
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _start(self, seat: int) -> None:
        self._board.write(seat, Row(0, 0, 0))
        pid = os.fork()
        if pid == 0:
            try:
                incarnation = self._incarnations[seat]
                serve(seat, incarnation, self._place, self._board, self._speakers)
            except BaseException as error:
                logging.error("seat %d ends: %s", seat, error)
            finally:
                os._exit(1)
        self._pids[seat] = pid

    def _replace_ended(self) -> None:
        for seat, pid in list(self._pids.items()):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                continue
            del self._pids[seat]
            if pid not in self._killed:
                raise RankGone(f"the rank on seat {seat} was given up, or failed; it lived")
            self._incarnations[seat] += 1
            self._start(seat)

    def _is_whole(self) -> bool:
        rows = self._board.rows()
        here = all(row.pid == self._pids.get(seat) for seat, row in enumerate(rows))
        return here and {row.size for row in rows} == {SEATS} and len({r[1] for r in rows}) == 1

    def wait(self) -> float:
        """Wait until all seats are in one world; return for how long.

        Raises:
            RankGone: they are not within the limit, or one that lives was given up.
        """
        began = time.monotonic()
        self._replace_ended()
        while not self._is_whole():
            if time.monotonic() - began > self.limit:
                out = [seat for seat, row in enumerate(self._board.rows()) if row.size != SEATS]
                raise RankGone(f"not in a world of all within {self.limit:g} s: seats {out}")
            time.sleep(0.01)
            self._replace_ended()
        return time.monotonic() - began

    def round(self) -> list[str]:
        """Have one to three things go wrong; return their names."""
        self.limit, names = WHOLE_SECONDS, []
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            name = self._random.choice(list(self.kinds))
            self.kinds[name](self._random.randrange(SEATS))
            names.append(name)
            time.sleep(self._random.choice((0.0, 0.0, 0.02, 0.3)))
        for pid in self._killed & set(self._pids.values()):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        time.sleep(0.1)  # the others may not have noticed a reset yet: no state tells that
        return names

    # -- faults -----------------------------------------------------------------------------------

    @staticmethod
    def _node(seat: int) -> range:
        first = seat - seat % NODE_RANKS
        return range(first, first + NODE_RANKS)

    def _each(self, fault: Callable[[int], None], seat: int) -> None:
        for one in self._node(seat):
            fault(one)

    def _kill(self, seat: int) -> None:
        if seat in self._pids:
            self._killed.add(self._pids[seat])
            os.kill(self._pids[seat], signal.SIGKILL)

    def _stop(self, seats: range | list[int]) -> None:
        pids = [self._pids[seat] for seat in seats if seat in self._pids]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        wait = self._random.uniform(0.1, STOP_SECONDS)
        threading.Timer(wait, _go_on, [pids]).start()

    def _kill_and_stop(self, seat: int) -> None:
        self._stop([(seat + 1) % SEATS])
        self._kill(seat)

    def _remove(self, _: int) -> None:
        self.limit = REMOVED_SECONDS
        shutil.rmtree(self._place / self._random.choice(("speakers", "peers")), ignore_errors=True)

    def _reset(self, _: int) -> None:
        """Have the kernel reset connections of ranks, as a firewall may."""
        listed = ["ss", "-Htnp", "state", "established"]
        lines = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
        own = [f"pid={pid}," for pid in self._pids.values()]
        found = [line for line in lines.splitlines() if any(pid in line for pid in own)]
        for line in self._random.sample(found, min(len(found), self._random.choice((1, 1, 2, 5)))):
            port = line.split()[2].rpartition(":")[2]
            reset = ["ss", "-K", "sport", "=", f":{port}"]
            subprocess.run(reset, capture_output=True, check=False)


def _go_on(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@click.command(help=__doc__)
@click.option("--seed", default=0, show_default=True)
@click.option("--rounds", default=100, show_default=True)
@click.option("--mesh", "shape", type=click.Choice(["full", "speakers"]), default="full")
def main(seed: int, rounds: int, shape: str) -> None:
    logging.basicConfig(format="%(asctime)s %(process)d %(message)s", stream=sys.stdout)
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        place = Path(folder) / "meet"
        with Chaos(place, random.Random(seed), shape == "speakers") as chaos:
            if "reset connections" not in chaos.kinds:
                print("no connection is reset: that needs root and ss")
            longest = chaos.wait()
            print(f"the first world after {longest:.1f} s", flush=True)
            for number in range(1, rounds + 1):
                names = chaos.round()
                longest = max(longest, seconds := chaos.wait())
                print(f"round {number}: {', '.join(names)}: {seconds:.1f} s", flush=True)
    print(f"{rounds} rounds, the longest {longest:.1f} s")


if __name__ == "__main__":
    main()
