"""Runs of programs/toy.py with faults, on the nodes of a networked lab, and what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from warm_machine import QUIET, Forked, WarmMachine

from slurm_resilience.lab import Lab

TOY = Path(__file__).parent / "programs" / "toy.py"
MESH = os.environ.get("SRES_TEST_MESH", "full")
"""As `SRES_MESH`."""


class Event(NamedTuple):
    at: float
    seat: int
    pid: int
    name: str
    details: list[Any]


class Node(WarmMachine):
    """A node of a lab, and the process there that launchers are forked from."""

    def __init__(self, lab: Lab, name: str, folder: Path) -> None:
        self.lab, self.name = lab, name
        # The address by which the others' route is found.
        self.first = lab.node_fields()[lab.nodes[0]]["NodeAddr"]
        super().__init__(folder, name)

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        return self.lab.popen(command, node=self.name, env=QUIET)

    def _environment(self, env: dict[str, str]) -> dict[str, str]:
        return self.lab.environment({"MASTER_ADDR": self.first, "SRES_NODE": self.name, **env})


class Run:
    """One training: a launcher on each machine."""

    def __init__(
        self,
        machines: Sequence[WarmMachine],
        logs: Path,
        *words: str,
        inject: str = "",
        nodes: int = 2,
        ranks: int = 2,
        standby: int = 0,
        launcher: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.logs = logs / "log"
        self.logs.mkdir(parents=True)
        self.out = logs / "out"
        self.ranks = nodes * ranks
        self.launchers: list[Forked] = []
        self._told: list[Event] = []
        self._read: dict[Path, int] = {}
        more = {"SRES_INJECT": inject, "SRES_MESH": MESH, **QUIET}
        more |= env or {}
        self.out.touch()
        for number in range(nodes):
            argv = [
                "--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--node-rank", str(number),
                "--rdzv-backend", "dir", "--rdzv-endpoint", str(logs / "meet"),
                "--rdzv-id", "t", "--standby", str(standby), *launcher,
                str(TOY), "--log", str(self.logs), *words,
            ]  # fmt: skip
            self.launchers.append(machines[number].launch(argv, more, out=str(self.out)))

    def wait(self, seconds: float = 0) -> list[int]:
        """Exit codes of the launchers; a training that hangs fails with every rank's stacks."""
        seconds = seconds or 80 + 5 * self.ranks  # importing torch takes each of them its time
        deadline = time.monotonic() + seconds
        for process in self.launchers:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.dump()
                self.end()
                raise AssertionError(f"hangs after {seconds:g} s:\n{self.tail()}") from None
        return [process.returncode for process in self.launchers]

    def dump(self) -> None:
        """Have every rank write its stacks."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGUSR1)
            except ProcessLookupError:
                continue
        time.sleep(1.0)

    def pids(self) -> list[int]:
        """Ranks that live, by the log that they hold open (as this machine numbers them)."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if any(file.readlink().parent == self.logs for file in process.glob("fd/*")):
                    found.append(int(process.name))
        return found

    def kill_stopped(self, ranks: int, seconds: float = 60) -> None:
        """Kill so many ranks in one moment, once all of them have stopped (the fault ``stop``).

        Ranks that kill themselves do it one after the other: one that gets there last may have
        left its block for the others' deaths before, and lives.
        """
        deadline = time.monotonic() + seconds
        while len(stopped := [pid for pid in self.pids() if _stopped(pid)]) < ranks:
            assert time.monotonic() < deadline, f"{len(stopped)} of {ranks} stopped:\n{self.tail()}"
            time.sleep(0.02)
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Stop whatever still runs."""
        for process in self.launchers:
            if process.poll() is None:
                process.kill()
                process.wait(10)

    def tail(self, size: int = 6000) -> str:
        lines = self.out.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "reducer.cpp" not in line)[-size:]

    def events(self) -> list[Event]:
        """Everything that the ranks told, in order.

        Only what is new is read: this is asked twenty times a second, of runs that last an hour.
        """
        for path in self.logs.glob("*.jsonl"):
            seat, pid, _ = path.name.split(".")
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines, end, _ = file.read().rpartition(b"\n")
            # A line without its end is still being written, or its rank was killed meanwhile.
            self._read[path] = self._read.get(path, 0) + len(lines) + len(end)
            for line in lines.splitlines():
                at, name, *details = json.loads(line)
                self._told.append(Event(at, int(seat), int(pid), name, details))
        self._told.sort()
        return list(self._told)

    def until(self, holds: Callable[[list[Event]], bool], seconds: float, what: str) -> None:
        """Wait for a state of the events."""
        deadline = time.monotonic() + seconds
        while not holds(self.events()):
            if time.monotonic() > deadline or all(p.poll() is not None for p in self.launchers):
                self.dump()
                raise AssertionError(f"not within {seconds:g} s: {what}\n{self.tail()}")
            time.sleep(0.05)


def _stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


class Outcome:
    """The result of a whole run."""

    def __init__(self, run: Run) -> None:
        self.events = run.events()
        self.committed: dict[int, int] = {}
        """Step (from 0) → the generation in which it was committed last."""
        losses: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        for event in self.events:
            if event.name == "step":
                step, generation, _, loss, *_ = event.details
                self.committed[step - 1] = generation
                losses[(step - 1, generation)][event.seat] = loss
        self.shares = {
            step: losses[step, generation] for step, generation in self.committed.items()
        }
        """Step → seat → the loss that it told."""
        self.samples: dict[int, dict[int, list[int]]] = defaultdict(dict)
        """Step → seat → the samples that its gradient was made of."""
        for event in self.events:
            if event.name == "batch":
                step, generation, indices = event.details
                if self.committed.get(step) == generation:
                    # The last one counts: a world in which no rank is left counts from 1 again.
                    self.samples[step][event.seat] = indices
        self.losses = {step: self._mean(step) for step in self.shares}
        """Step → mean over the samples of the ranks that told it."""
        self.digests: dict[int, set[str]] = defaultdict(set)
        """Part → digests of the final parameters."""
        for event in self.events:
            if event.name == "end":
                self.digests[event.details[1]].add(event.details[0])
        self.kinds = [e.details[1]["kind"] for e in self.events if e.name == "healed"]

    def _mean(self, step: int) -> float:
        many = {seat: len(self.samples[step][seat]) for seat in self.shares[step]}
        total = sum(loss * many[seat] for seat, loss in self.shares[step].items())
        return total / sum(many.values())

    def equals(self, undisturbed: Outcome) -> None:
        """Assert: to the last bit, every loss that was told, and the parameters at the end."""
        for step, shares in sorted(undisturbed.shares.items()):
            told = self.shares[step]
            # Who died after it committed may not have told it.
            assert told and told.items() <= shares.items(), (step, told, shares)
        assert self.digests == undisturbed.digests
        assert all(len(digests) == 1 for digests in self.digests.values()), self.digests

    def every_sample_once(self, steps: int, batch: int) -> None:
        """Assert it."""
        assert sorted(self.committed) == list(range(steps))
        odd = {}
        for step, seats in sorted(self.samples.items()):
            counts = Counter(index for share in seats.values() for index in share)
            if len(counts) != batch or max(counts.values()) > 1:
                shares = {seat: len(share) for seat, share in seats.items()}
                odd[step] = (self.committed[step], shares, max(counts.values()))
        assert not odd, odd
        seen = [
            index for seats in self.samples.values() for share in seats.values() for index in share
        ]
        assert sorted(seen) == list(range(steps * batch))
