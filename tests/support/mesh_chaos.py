"""Ranks in real processes, whose meshes go through seeded faults; a program of its own.

    python tests/support/mesh_chaos.py --seed 1 --rounds 100 --mesh speakers

A rank is killed, stopped for less than it would be taken for hung, or loses connections; a node is
as well; parts of the directory in which they meet are removed. After each round all seats must be
in one world again, and no rank may have been given up that was not killed. The simulation has the
same rules; here the kernel, sockets, files and threads are the real ones.

With `--network` each node is a network namespace, and the directory is on a small disk: nodes are
cut off, also one way and from one another, lose packets and power, and disks are full, read-only or
away. A rank that others could not reach for too long may then be given up; and two worlds never go
on at a time.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
from mesh_network import Network, is_possible

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
SHORT_CUT_SECONDS = 1.2
"""A cut that is no longer costs no rank its place."""
EXCUSED_SECONDS = 20.0
"""So long after a fault that may cost a rank its place, it may."""
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


def serve(
    seat: int, incarnation: int, place: Path, board: Board, speakers: bool, network: Network | None
) -> None:
    """Be a rank until the process is killed, or the others go on without it."""
    gc.disable()
    pid, node = os.getpid(), seat // NODE_RANKS
    if network is not None:
        network.enter(node)
    peer = Peer(
        id=f"{seat}.{incarnation}-{pid}",
        seat=seat,
        incarnation=incarnation,
        node=f"node{node}",
        host="127.0.0.1" if network is None else network.address(node),
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
            if view.lets_in(peer.id) and mesh.knock.is_set() and mesh.newcomers():
                mesh.over(GenerationEnd(generation, "let in", "", "join", step=step))
        if mesh.evicted:
            raise RankGone(f"the others go on without it: {mesh.evicted}")


class Chaos:
    """All ranks, and what goes wrong. A context manager."""

    def __init__(
        self, place: Path, random_: random.Random, speakers: bool, network: Network | None
    ) -> None:
        self._place = place
        self._random = random_
        self._speakers = speakers
        self._network = network
        self._board = Board()
        self._pids: dict[int, int] = {}
        self._incarnations = [0] * SEATS
        self._killed: set[int] = set()
        self._may_end: dict[int, float] = {}
        """Seat → until when its rank may be given up, or fail: others could not reach it for too
        long, or the machine kept from it what it needs."""
        self._over_at = 0.0
        """When the last fault is over."""
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
        if network is not None:
            self.kinds |= {
                "stop a rank for long": self._stop_long,
                "cut a node": self._cut,
                "cut one way": self._cut_one_way,
                "cut between two": self._cut_between,
                "unplug a node": self._unplug,
                "lose packets": lambda seat: self._last(network.lose(seat // NODE_RANKS, 10), 2.0),
                "slow cable": self._slow,
                "forget connections": self._forget,
                "power off": self._power_off,
                "no file descriptors": self._no_descriptors,
                "full disk": self._fill_disk,
                "read-only disk": self._read_only,
                "directory away": self._take_away,
            }

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
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                incarnation = self._incarnations[seat]
                serve(seat, incarnation, self._place, self._board, self._speakers, self._network)
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
            if pid not in self._killed and time.monotonic() > self._may_end.get(seat, 0.0):
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
        while not self._is_whole() or time.monotonic() < self._over_at:
            self._check_worlds()
            if time.monotonic() - max(began, self._over_at) > self.limit:
                out = [seat for seat, row in enumerate(self._board.rows()) if row.size != SEATS]
                raise RankGone(f"not in a world of all within {self.limit:g} s: seats {out}")
            time.sleep(0.01)
            self._replace_ended()
        return time.monotonic() - max(began, self._over_at)

    def _check_worlds(self) -> None:
        rows = [row for row in self._board.rows() if row.size]
        inside = Counter((row.generation, row.size) for row in rows)
        going_on = [world for world, count in inside.items() if count == world[1]]
        if len(going_on) > 1:
            raise RankGone(f"two worlds go on: {going_on} of {rows}")

    def round(self) -> list[str]:
        """Have one to three things go wrong; return their names."""
        self.limit, names = WHOLE_SECONDS, []
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            name = self._random.choice(list(self.kinds))
            seat = self._random.randrange(SEATS)
            self.kinds[name](seat)
            names.append(f"{name} ({seat})")
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
        spaces = (
            [[]] if self._network is None else [["-N", self._network.name(n)] for n in range(NODES)]
        )
        ss = ["ss", *self._random.choice(spaces)]
        listed = [*ss, "-Htnp", "state", "established"]
        lines = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
        own = [f"pid={pid}," for pid in self._pids.values()]
        found = [line for line in lines.splitlines() if any(pid in line for pid in own)]
        for line in self._random.sample(found, min(len(found), self._random.choice((1, 1, 2, 5)))):
            port = line.split()[2].rpartition(":")[2]
            reset = [*ss, "-K", "sport", "=", f":{port}"]
            subprocess.run(reset, capture_output=True, check=False)

    # -- faults of the network and the machine ----------------------------------------------------

    def _last(self, mend: Callable[[], None], seconds: float) -> None:
        """Have a fault be over after so long."""
        timer = threading.Timer(seconds, mend)
        timer.daemon = True
        timer.start()
        self._over_at = max(self._over_at, time.monotonic() + seconds + 0.1)

    def _excuse(self, seats: range | list[int], seconds: float) -> None:
        until = time.monotonic() + seconds + EXCUSED_SECONDS
        for seat in seats:
            self._may_end[seat] = max(until, self._may_end.get(seat, 0.0))

    def _how_long(self, seats: range | list[int]) -> float:
        """Return for how long these are not to be reached: too long, now and then."""
        seconds = self._random.choice((0.1, 0.5, SHORT_CUT_SECONDS, 3.0, 4.5, 6.0, 12.0))
        if seconds > SHORT_CUT_SECONDS:
            self._excuse(seats, seconds)
        return seconds

    def _stop_long(self, seat: int) -> None:
        seconds = self._random.uniform(STOP_SECONDS, 8.0)
        if seat in self._pids:
            self._excuse([seat], seconds)
            os.kill(pid := self._pids[seat], signal.SIGSTOP)
            self._last(lambda: _go_on([pid]), seconds)

    def _cut(self, seat: int) -> None:
        assert self._network is not None
        node, seconds = seat // NODE_RANKS, self._how_long(self._node(seat))
        for way in ((node, None), (None, node)):
            self._last(self._network.silence(*way), seconds)

    def _cut_one_way(self, seat: int) -> None:
        assert self._network is not None
        node = seat // NODE_RANKS
        way = self._random.choice(((node, None), (None, node)))
        self._last(self._network.silence(*way), self._how_long(self._node(seat)))

    def _cut_between(self, seat: int) -> None:
        assert self._network is not None
        one = seat // NODE_RANKS
        other = self._random.choice([node for node in range(NODES) if node != one])
        seats = [*self._node(seat), *self._node(other * NODE_RANKS)]
        seconds = self._how_long(seats)
        self._last(self._network.silence(one, other), seconds)
        if self._random.random() < 0.5:
            self._last(self._network.silence(other, one), seconds)

    def _unplug(self, seat: int) -> None:
        assert self._network is not None
        seconds = self._how_long(self._node(seat))
        self._last(self._network.unplug(seat // NODE_RANKS), seconds)

    def _slow(self, seat: int) -> None:
        assert self._network is not None
        rate = self._random.choice(("128kbit", "512kbit", "2mbit"))
        self._excuse(self._node(seat), 2.0)
        self._last(self._network.slow(seat // NODE_RANKS, rate), 2.0)

    def _forget(self, seat: int) -> None:
        assert self._network is not None
        mend = self._network.forget(seat // NODE_RANKS)
        self._last(mend, self._random.choice((0.01, 0.6, 1.5)))

    def _power_off(self, seat: int) -> None:
        assert self._network is not None
        node = seat // NODE_RANKS
        mends = [self._network.silence(*way) for way in ((node, None), (None, node))]
        pids = [self._pids[one] for one in self._node(seat) if one in self._pids]
        self._each(self._kill, seat)
        for pid in pids:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._network.power_off(node)
        seconds = self._random.choice((0.0, 1.0, 4.5, 8.0))
        for mend in mends:
            self._last(mend, seconds)

    def _no_descriptors(self, seat: int) -> None:
        if seat not in self._pids:
            return
        pid, seconds = self._pids[seat], self._random.choice((0.5, 2.0, 6.0))
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            most = used + self._random.choice((-3, 0, 1))
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
            self._excuse([seat], seconds)
            self._last(lambda: _limit(pid, before), seconds)
        self._reset(seat)

    # The directory is on a small disk of its own.

    def _is_whole_place(self) -> bool:
        """Tell whether a newcomer finds the directory, or can make it anew: else it ends, as it is
        documented to, and its launcher starts it again."""
        return self._place.exists() and not (self._place.parent / "filler").exists()

    def _fill_disk(self, _: int) -> None:
        self.limit = REMOVED_SECONDS
        filler = self._place.parent / "filler"

        def empty() -> None:
            while filler.exists():
                with contextlib.suppress(OSError):  # the disk is read-only
                    filler.unlink(missing_ok=True)
                time.sleep(0.01)

        if not self._is_whole_place():
            return
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()
        self._last(empty, self._random.choice((0.5, 3.0, 8.0)))

    def _read_only(self, _: int) -> None:
        self.limit = REMOVED_SECONDS
        if not self._is_whole_place():
            return
        mount = ["mount", "-o"], str(self._place.parent)
        subprocess.run([*mount[0], "remount,ro", mount[1]], check=False, capture_output=True)
        mend = [*mount[0], "remount,rw", mount[1]]
        seconds = self._random.choice((0.5, 3.0, 8.0))
        self._last(lambda: subprocess.run(mend, check=False) and None, seconds)

    def _take_away(self, _: int) -> None:
        self.limit = REMOVED_SECONDS
        away = self._place.with_name("away")

        def bring_back() -> None:
            while away.exists():
                shutil.rmtree(self._place, ignore_errors=True)
                with contextlib.suppress(OSError):  # made anew just now, or the disk is read-only
                    away.rename(self._place)

        if not self._is_whole_place():
            return
        with contextlib.suppress(OSError):
            self._place.rename(away)
            self._last(bring_back, self._random.choice((0.5, 3.0, 8.0)))


def _limit(pid: int, limits: tuple[int, int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def _go_on(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@click.command(help=__doc__)
@click.option("--seed", default=0, show_default=True)
@click.option("--rounds", default=100, show_default=True)
@click.option("--mesh", "shape", type=click.Choice(["full", "speakers"]), default="full")
@click.option("--network", "on_network", is_flag=True, help="Each node has a network of its own.")
@click.option("--only", help="Faults whose names match this.")
def main(seed: int, rounds: int, shape: str, on_network: bool, only: str | None) -> None:
    logging.basicConfig(
        format="%(asctime)s %(process)d %(message)s", stream=sys.stdout, level=logging.INFO
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # nothing is left behind
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos")))
        network = None
        if on_network:
            if not is_possible():
                raise click.ClickException("--network needs root, ip, nft, ss and tc")
            network = stack.enter_context(Network(NODES))
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "chaos", folder], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", folder], check=False)
        speakers = shape == "speakers"
        chaos = stack.enter_context(Chaos(folder / "meet", random.Random(seed), speakers, network))
        if only:
            chaos.kinds = {n: act for n, act in chaos.kinds.items() if re.search(only, n)}
        elif "reset connections" not in chaos.kinds:
            print("no connection is reset: that needs root and ss")
        longest = chaos.wait()
        print(f"the first world after {longest:.1f} s", flush=True)
        for number in range(1, rounds + 1):
            names = chaos.round()
            logging.info("round %d: %s", number, ", ".join(names))
            longest = max(longest, seconds := chaos.wait())
            print(f"round {number}: {', '.join(names)}: {seconds:.1f} s", flush=True)
    print(f"{rounds} rounds, the longest {longest:.1f} s")


if __name__ == "__main__":
    main()
