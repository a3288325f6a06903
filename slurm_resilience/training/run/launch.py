"""The life of a node: fill its seats, keep them filled, and leave nothing behind.

One thread and one event loop. A dead process is known by its pidfd at once; nothing is polled.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from slurm_resilience.training.run import codes, words
from slurm_resilience.training.run.environment import Node, common, of_rank
from slurm_resilience.training.run.guard import Guard
from slurm_resilience.training.run.keeper import Ear
from slurm_resilience.training.run.meeting import Meeting, next_incarnation
from slurm_resilience.training.run.output import Sink, Streams, tail
from slurm_resilience.training.run.process import Order, Process, may_renice
from slurm_resilience.training.run.verdict import End, Rules, Verdict, judge

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_STANDBY_NICE = 10
_STANDBY_PAUSE = 5.0
"""Seconds that a new standby waits for the recovery's end where it cannot be nice."""
_STANDBY_DEATHS = 3
"""So many in a row, and there are no more standbys."""
_RETRY = 1.0
"""Seconds until the next attempt when the system refuses a process."""


class Job(msgspec.Struct, frozen=True):
    """All that the launcher was asked to do."""

    node: Node
    meeting: Meeting
    kind: str
    """script, module or program."""
    argv: tuple[str, ...]
    rules: Rules
    streams: tuple[Streams, ...]
    """One for each local rank."""
    log_dir: Path | None
    standbys: int
    standby_modules: tuple[str, ...]
    grace: float
    """Seconds from SIGTERM to SIGKILL when the launcher itself ends the ranks."""
    stop_limit: float | None
    """The same after somebody's SIGTERM; None: as long as they take."""
    before: tuple[str, ...] = ()
    """The pre-train script and its arguments."""
    after: tuple[str, ...] = ()


def say(text: str) -> None:
    """A line for people. A lost one is no reason to end a training."""
    with suppress(OSError, ValueError):
        print(f"sres-run: {text}", file=sys.stderr, flush=True)


class Seat:
    """One of the node's seats, and who sits on it."""

    def __init__(self, local: int, number: int, rules: Rules) -> None:
        self.local = local
        self.number = number
        self.process: Process | None = None
        self.incarnation = -1
        self.done = False
        self.ends: deque[End] = deque(maxlen=rules.replacements + 2)
        self.since = 0.0
        self.place = self.error = self.evicted = ""
        self.logs: Path | None = None

    def sit(self, process: Process, incarnation: int) -> None:
        self.process, self.incarnation = process, incarnation
        self.since = time.monotonic()
        self.place = self.error = self.evicted = ""

    def end(self, code: int) -> End:
        now = time.monotonic()
        lived = now - self.since
        end = End(code, now, lived, self.place, self.error, self.evicted)
        self.ends.append(end)
        self.process = None
        return end


class Launcher:
    """Runs one job on this node.

    Args:
        job: what to do.
        environment: the launcher's own.
        ear: the keeper's socket.
        guard: cleans up if this process is killed.
    """

    def __init__(self, job: Job, environment: Mapping[str, str], ear: Ear, guard: Guard) -> None:
        self._job = job
        self._own = dict(environment)
        self._born_with = self._own | common(environment, job.node)
        self._ear = ear
        self._guard = guard
        self._seats = [
            Seat(local, job.node.seat(local), job.rules) for local in range(job.node.ranks)
        ]
        self._standbys: list[Process] = []
        self._standby_deaths = 0
        self._standby_timer: asyncio.TimerHandle | None = None
        self._script: Process | None = None
        self._sinks: dict[Process, list[Sink]] = {}
        self._piped = any(s.teed(bit) for s in job.streams for bit in (1, 2))
        self._nice = _STANDBY_NICE if job.standbys and may_renice() else 0
        self._stopped_by = 0
        """The signal that somebody sent to end the training."""
        self._verdict: Verdict | None = None
        """Why the launcher itself ends it."""
        self._last_codes: list[int] = []
        """Of the processes that nobody followed, in the order of their ends."""
        self._interrupts = 0

    def run(self) -> int:
        """From the pre-train script to the post-train script; returns the exit code."""
        return asyncio.run(self._main())

    async def _main(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._loop.set_exception_handler(self._broken)
        for number in (*_STOPS, *_PASSED_ON):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_reader(self._ear.fileno(), self._listen)
        code = 1
        try:
            code = await self._train()
        finally:
            for process in self._alive():
                process.signal(signal.SIGKILL)
            self._dismiss_standbys()
        return code

    async def _train(self) -> int:
        if self._job.before:
            code = await self._run_script("pre-train", self._job.before, {})
            if code:
                say(f"error: the pre-train script ended with {codes.describe(code)}: no training")
                return code
        if not self._stopped_by:
            for seat in self._seats:
                self._fill(seat)
            self._standby_soon(first=True)
            await self._over
        code = self._code()
        if self._job.after:
            after = await self._run_script(
                "post-train", self._job.after, {"SRES_EXIT_CODE": str(code)}
            )
            if after:
                say(f"error: the post-train script ended with {codes.describe(after)}")
            code = code or after
        return code

    def _code(self) -> int:
        if self._interrupts > 1:
            return codes.KILLED_BY_HAND
        if self._verdict is not None:
            return self._verdict.code
        if self._stopped_by and not any(seat.ends for seat in self._seats):
            return 128 + self._stopped_by
        return words.first_failure(self._last_codes)

    # Processes

    def _start(self, modules: tuple[str, ...] = (), nice: int = 0, rank: bool = True) -> Process:
        process = Process(
            self._born_with if rank else self._own, modules, rank and self._piped, nice
        )
        self._guard.mind(process.pid)
        self._loop.add_reader(process.pidfd, self._ended, process)
        self._loop.add_reader(process.link.fileno(), self._heard, process)
        self._sinks[process] = [
            Sink(fd, bit) for fd, bit in zip(process.outputs, (1, 2), strict=False)
        ]
        for sink in self._sinks[process]:
            self._loop.add_reader(sink.fd, self._pump, sink)
        return process

    def _pump(self, sink: Sink) -> None:
        if not sink.pump():
            self._loop.remove_reader(sink.fd)

    def _heard(self, process: Process) -> None:
        seat = self._seat_of(process)
        messages = process.hear()
        if not messages:
            self._loop.remove_reader(process.link.fileno())
        for message in messages:
            if seat is not None and "place" in message:
                seat.place, seat.error = str(message["place"]), str(message["error"])
            if "warm" in message:
                self._standby_deaths = 0

    def _bury(self, process: Process) -> int:
        """Take leave of an ended process; returns its exit code."""
        self._loop.remove_reader(process.pidfd)
        self._heard(process)
        self._loop.remove_reader(process.link.fileno())
        self._guard.forget(process.pid)
        code = process.reap()
        for sink in self._sinks.pop(process):
            sink.pump()
            self._loop.remove_reader(sink.fd)
            sink.close()
        process.close()
        return code

    def _ended(self, process: Process) -> None:
        seat = self._seat_of(process)
        code = self._bury(process)
        if process is self._script:
            self._script = None
            self._script_end.set_result(code)
        elif seat is not None:
            self._vacated(seat, seat.end(code))
        elif process in self._standbys:
            self._standbys.remove(process)
            self._standby_deaths += 1
            if self._standby_deaths == _STANDBY_DEATHS:
                say(f"standby processes end with {codes.describe(code)}: no more of them")
            self._standby_soon()

    def _seat_of(self, process: Process) -> Seat | None:
        return next((seat for seat in self._seats if seat.process is process), None)

    def _alive(self) -> list[Process]:
        ranks = [seat.process for seat in self._seats if seat.process is not None]
        return ranks + ([self._script] if self._script is not None else [])

    # Seats

    def _fill(self, seat: Seat) -> None:
        """Let somebody sit on a seat: a standby if there is one, else a new process."""
        incarnation = next_incarnation(self._job.meeting, seat.number, seat.incarnation)
        order = self._order(seat, incarnation)
        while True:
            standby = self._standby()
            try:
                process = standby or self._start()
            except OSError as error:
                seat.since = time.monotonic()
                seat.place, seat.error = "", f"no new process: {error.strerror}"
                self._vacated(seat, seat.end(1), pause=_RETRY)
                return
            for sink, bit in zip(self._sinks[process], (1, 2), strict=False):
                sink.point(self._job.streams[seat.local], seat.logs, self._prefix(seat, bit))
            seat.sit(process, incarnation)
            try:
                process.give(order)
            except OSError:
                if standby is not None:
                    continue  # it died just now; `_ended` finds it on no seat
            break
        if seat.ends:
            who = "a new process" if standby is None else "a standby"
            who = "a warm standby" if process.warm else who
            say(f"rank {seat.number}: {who} (process {process.pid}, incarnation {incarnation})")
        if standby is not None:
            self._standby_soon()

    def _prefix(self, seat: Seat, bit: int) -> str:
        return f"[{self._job.node.role}{seat.number}]:"

    def _order(self, seat: Seat, incarnation: int) -> Order:
        streams = self._job.streams[seat.local]
        if self._job.log_dir is not None:
            seat.logs = self._job.log_dir / f"attempt_{incarnation}" / str(seat.local)
            if streams.redirect | streams.tee:
                seat.logs.mkdir(parents=True, exist_ok=True)
        files = [
            None if streams.teed(bit) else streams.file(bit, seat.logs)
            for bit in (words.STDOUT, words.STDERR)
        ]
        stdout, stderr = (None if file is None else str(file) for file in files)
        environment = of_rank(self._own, self._job.node, seat.local, incarnation)
        return Order(self._job.kind, self._job.argv, environment, stdout, stderr)

    def _vacated(self, seat: Seat, end: End, pause: float = 0.0) -> None:
        """Somebody left a seat: who comes next?"""
        verdict = judge(tuple(seat.ends), self._job.rules)
        seat.done = verdict.do == "done"
        if self._verdict is None and not self._stopped_by and not seat.done:
            if verdict.do == "end":
                self._give_up(seat, verdict)
            else:
                say(f"rank {seat.number}: {verdict.reason} after {end.lived:.1f} s")
                self._again(seat, pause)
                return
        self._last_codes.append(end.code)
        self._look_for_the_end()

    def _again(self, seat: Seat, pause: float) -> None:
        if pause:
            self._loop.call_later(pause, self._retry, seat)
        else:
            self._fill(seat)

    def _retry(self, seat: Seat) -> None:
        if self._verdict is None and not self._stopped_by:
            self._fill(seat)
        else:
            self._look_for_the_end()

    def _look_for_the_end(self) -> None:
        ending = self._verdict is not None or self._stopped_by
        empty = all(seat.process is None for seat in self._seats)
        if empty and (ending or all(seat.done for seat in self._seats)) and not self._over.done():
            self._over.set_result(None)

    def _give_up(self, seat: Seat, verdict: Verdict) -> None:
        """End everything, and say why."""
        self._verdict = verdict
        node, end = self._job.node, seat.ends[-1]
        say(
            f"error: the training ends: rank {seat.number} (node {node.name}, local rank "
            f"{seat.local}, incarnation {seat.incarnation}) after {end.lived:.1f} s: "
            f"{verdict.reason}"
        )
        if end.place and end.place not in verdict.reason:
            say(f"  {end.place}")
        file = self._job.streams[seat.local].file(words.STDERR, seat.logs)
        last = tail(file) if seat.logs is not None else []
        if last:
            say(f"  last lines of {file}:")
            for line in last:
                say(f"    {line}")
        self._send(signal.SIGTERM)
        self._dismiss_standbys()
        self._loop.call_later(self._job.grace, self._send, signal.SIGKILL)

    # Standbys

    def _standby(self) -> Process | None:
        """Take one, a warm one if there is one; a half-warm one is still ahead of a new process."""
        best = next((p for p in self._standbys if p.warm), next(iter(self._standbys), None))
        if best is not None:
            self._standbys.remove(best)
        return best

    def _standby_soon(self, first: bool = False) -> None:
        """Start the missing standbys: now if they can be nice, else when the recovery is over."""
        if self._standby_timer is None:
            pause = 0.0 if self._nice else _STANDBY_PAUSE * (2 if first else 1)
            self._standby_timer = self._loop.call_later(pause, self._start_standbys)

    def _start_standbys(self) -> None:
        if self._standby_timer is not None:
            self._standby_timer.cancel()
            self._standby_timer = None
        wanted = min(self._job.standbys, sum(not seat.done for seat in self._seats))
        if self._verdict is not None or self._stopped_by or self._standby_deaths >= _STANDBY_DEATHS:
            return
        while len(self._standbys) < wanted:
            try:
                self._standbys.append(self._start(self._job.standby_modules, self._nice))
            except OSError:
                self._standby_deaths += 1
                self._standby_soon()
                return

    def _dismiss_standbys(self) -> None:
        for process in self._standbys:
            process.signal(signal.SIGKILL)
        for process in self._standbys:
            self._bury(process)
        self._standbys.clear()

    # Words from outside

    def _send(self, number: int) -> None:
        for process in self._alive():
            process.signal(number)

    def _signalled(self, number: int) -> None:
        if number in _PASSED_ON:
            self._send(number)
            return
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self._stopped_by = number
            self._send(signal.SIGKILL)
        else:
            if not self._stopped_by and self._job.stop_limit is not None:
                self._loop.call_later(self._job.stop_limit, self._send, signal.SIGKILL)
            self._stopped_by = self._stopped_by or number
            self._send(number)
        self._dismiss_standbys()
        self._look_for_the_end()

    def _listen(self) -> None:
        for note in self._ear.hear():
            seat = next(
                (s for s in self._seats if s.process and s.process.pid in (note.evict, note.ready)),
                None,
            )
            if seat is None or seat.process is None:
                continue
            if note.evict:
                seat.evicted = note.reason or "its peers say so"
                seat.process.signal(signal.SIGKILL)
            elif self._standby_timer is not None:
                self._start_standbys()

    async def _run_script(self, name: str, argv: tuple[str, ...], more: dict[str, str]) -> int:
        node = self._job.node
        environment = more | {"SRES_NODE": node.name, "NODE_RANK": str(node.here.rank)}
        self._script_end: asyncio.Future[int] = self._loop.create_future()
        try:
            self._script = self._start(rank=False)
            self._script.give(Order("program", argv, environment))
        except OSError as error:
            say(f"error: the {name} script cannot be started: {error.strerror}")
            return 126
        return await self._script_end

    def _broken(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """A bug of the launcher: it ends, and takes the ranks with it, rather than go on blind."""
        error = context.get("exception")
        if not isinstance(error, Exception):
            error = RuntimeError(str(context.get("message")))
        if not self._over.done():
            self._over.set_exception(error)


def life(
    job: Job, environment: Mapping[str, str], private: Path, cleanup: Callable[[], None]
) -> int:
    """Guard, listen, run, clean up.

    Args:
        job: what to do; its node's keeper lies in `private`.
        environment: the launcher's.
        private: the private directory.
        cleanup: called at the end in any case.

    Returns:
        The launcher's exit code.
    """
    guard = Guard(private)
    ear = Ear(Path(job.node.keeper))
    try:
        return Launcher(
            job, {k: v for k, v in environment.items() if k != "SRES_SECRET"}, ear, guard
        ).run()
    finally:
        ear.close()
        cleanup()
        guard.close()


def host_name() -> str:
    """This node's name."""
    return os.uname().nodename
