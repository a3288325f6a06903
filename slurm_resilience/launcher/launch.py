"""The life of a node: fill its seats, keep them filled, and leave nothing behind.

One thread and one event loop. A dead process is known by its pidfd at once, and not polled.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import SresError
from slurm_resilience.launcher import batch_directory, exit_codes, flags
from slurm_resilience.launcher.control_socket import ControlSocket
from slurm_resilience.launcher.group_restart import AttemptStage, GroupRestart, ProgramKind
from slurm_resilience.launcher.launch_spec import LaunchSpec
from slurm_resilience.launcher.launcher_ending import LauncherEnding
from slurm_resilience.launcher.launcher_world import LauncherWorld, WorldNews
from slurm_resilience.launcher.processes.child_environment import common, of_rank
from slurm_resilience.launcher.processes.children import Children
from slurm_resilience.launcher.processes.output import tail
from slurm_resilience.launcher.processes.process import Process, ProcessOrigin, ProcessSpec
from slurm_resilience.launcher.processes.reaper import Reaper
from slurm_resilience.launcher.processes.seat import Seat, TrainingStage
from slurm_resilience.launcher.processes.standbys import IMPORT_SECONDS, Standbys
from slurm_resilience.launcher.processes.warm_interpreter import WarmInterpreter
from slurm_resilience.launcher.rendezvous_directory import is_complete, next_incarnation
from slurm_resilience.launcher.restart_policy import ProcessEnd, RestartDecision, judge
from slurm_resilience.mesh.model import SEAT_TAKEN, GenerationEnd, Peer
from slurm_resilience.mesh.rendezvous import HOLD, SharedDirectory

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_BITS = (flags.STDOUT, flags.STDERR)
_RETRY_SECONDS = 1.0
"""Seconds until the next attempt when the system refuses a process."""
_REFUSED_SECONDS = 60.0
"""It may do so for so long before that counts as one replacement."""
_KILLED_SECONDS = 10.0
"""A process that was killed, and has not ended by then, waits in the kernel: it is told."""
_FAILING_SECONDS = 1.0
"""After a rank has said that it fails, until the other nodes are told, unless it has ended. Where
one of theirs was killed, that is known sooner, and is the cause."""
_FOLLOWED_SECONDS = 2 * _FAILING_SECONDS
"""For the word of another node that a rank which ended here has followed one there."""
_LOOK_SECONDS, _MAX_LOOK_SECONDS = 1.0, 30.0
"""Between two looks whether the ranks are in a process group, twice as long each time."""
_ABORTED = 128 + signal.SIGABRT
_FOLLOWS_SECONDS = 0.5
"""A process that aborts so long after another rank has told of its failure follows it."""
_NOT_FOR_RANKS = ("SRES_SECRET", "SRES_SEATS_HERE", HOLD)
"""Meant for the launcher; ranks get their own."""


def say(text: str) -> None:
    """Print a line for people. A lost one is no reason to end a training."""
    # Without an open stderr there is no stream.
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"sres-run: {text}\n")
        sys.stderr.flush()


def _moment(end: ProcessEnd) -> float:
    return end.at


class Launcher:
    """Runs one job on this node.

    Args:
        job: what to do.
        environment: the launcher's own.
        ear: the keeper's socket.
        guard: cleans up if this process is killed.
    """

    def __init__(
        self, job: LaunchSpec, environment: Mapping[str, str], ear: ControlSocket, guard: Reaper
    ) -> None:
        self._job = job
        self._own = {k: v for k, v in environment.items() if k not in _NOT_FOR_RANKS}
        self._born_with = self._own | common(self._own, job.node)
        self._ear = ear
        self._guard = guard
        self._seats = [
            Seat(local, job.node.seat(local), job.rules, job.incarnation)
            for local in range(job.node.ranks)
        ]
        self._script: Process | None = None
        self._ending = LauncherEnding()
        self._group = GroupRestart(job.restart)

    def run(self) -> int:
        """From the pre-train script to the post-train script; returns the exit code."""
        return asyncio.run(self._main())

    async def _main(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._broken)
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._children = Children(self._loop, self._guard, self._told, self._ended)
        self._standbys = Standbys(
            self._loop, self._children, self._start_standby, self._job.standbys
        )
        self._warm = WarmInterpreter(
            self._loop, self._children, self._born_with, self._job.warm, say
        )
        for number in (*_STOPS, *_PASSED_ON):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                self._loop.add_signal_handler(number, self._signalled, number)
        self._loop.add_reader(self._ear.fileno(), self._listen)
        try:
            return await self._train()
        finally:
            self._send(signal.SIGKILL)
            self._dismiss_reserves()

    async def _train(self) -> int:
        if not await self._warm.wait_until_needed(lambda: self._ending.goes_on):
            return 0
        if self._job.before:
            code = await self._run_script("pre-train", self._job.before)
            if code:
                say(
                    f"error: the pre-train script ended with {exit_codes.describe(code)}; "
                    "the training is not started"
                )
                return code
        if not self._ending.stopped_by:
            self._meet_launchers()
            if self._group.came_later:
                say("waits for the other nodes: all ranks are started together")
            else:
                for seat in self._seats:
                    self._fill(seat)
            self._standbys.soon(first=True)
            self._warm.soon(first=True)
            await self._over
            self._leave_launchers()
        code = self._ending.code(any_ended=any(seat.ends for seat in self._seats))
        if self._job.after:
            after = await self._run_script("post-train", self._job.after, SRES_EXIT_CODE=str(code))
            if after:
                say(f"error: the post-train script ended with {exit_codes.describe(after)}")
            code = code or after
        return code

    # -- processes ----------------------------------------------------------------------------

    def _start_rank(self) -> Process:
        return self._children.start(self._born_with, piped=self._job.piped)

    def _start_standby(self, nice: int) -> Process:
        modules = self._job.standby_modules
        return self._children.start(self._born_with, modules, self._job.piped, nice)

    def _dismiss_reserves(self) -> None:
        self._standbys.dismiss()
        self._warm.dismiss()

    def _told(self, process: Process, word: dict[str, Any]) -> None:
        if self._warm.told(process, word):
            return
        seat = self._seat_of(process)
        if seat is not None and "place" in word:
            seat.fails(str(word["place"]), str(word["error"]))
            if word.get("group"):
                self._group.grouped()
            seat.follows = self._group.warn(f"rank {seat.number}: {seat.error or seat.place}")
            self._loop.call_later(_FAILING_SECONDS, self._fails_slowly, seat, process)
            # Its exit may wait for a thread that never ends; its seat must not.
            self._loop.call_later(self._job.grace.failed, self._end_stuck, seat, process)
        if "warm" in word:
            self._standbys.warm()

    def _fails_slowly(self, seat: Seat, process: Process) -> None:
        if seat.process is process and self._ending.goes_on:
            self._group.fails(f"rank {seat.number}: {seat.error or seat.place}")

    def _end_stuck(self, seat: Seat, process: Process) -> None:
        if seat.process is process:
            say(f"rank {seat.number}: failed {self._job.grace.failed:g} s ago, and does not end")
            self._kill(seat, process)

    def _kill(self, seat: Seat, process: Process) -> None:
        process.signal(signal.SIGKILL)
        self._loop.call_later(_KILLED_SECONDS, self._say_stuck, seat, process)

    def _say_stuck(self, seat: Seat, process: Process) -> None:
        if seat.process is process:
            say(
                f"rank {seat.number}: process {process.pid} does not end, though it was killed: it "
                "waits for a disk or a device of this node. A new one comes when it has ended"
            )

    def _ended(self, process: Process, code: int) -> None:
        seat = self._seat_of(process)
        if process is self._script:
            self._script = None
            self._script_end.set_result(code)
        elif seat is not None:
            self._listen(reaped=process)  # its last words
            if self._group.is_ending:
                self._left(seat, code)
            elif process.origin is ProcessOrigin.STANDBY and self._ending.goes_on:
                self._died_importing(seat, code)
            else:
                complete = code != exit_codes.DONE and is_complete(self._job.rendezvous.meet)
                self._vacated(seat, seat.end(code, is_complete=complete))
        elif not self._warm.died(process) and self._standbys.died(process):
            self._say_no_standbys(code)

    def _died_importing(self, seat: Seat, code: int) -> None:
        """Fill a seat again whose standby never came to the program: that says nothing of it."""
        say(f"rank {seat.number}: the standby ended in its imports: {exit_codes.describe(code)}")
        seat.leave()
        if self._standbys.died_on_seat():
            self._say_no_standbys(code)
        self._fill(seat)

    def _say_no_standbys(self, code: int) -> None:
        say(f"standby processes end with {exit_codes.describe(code)}: no more of them")

    def _end_importing(self, seat: Seat, process: Process) -> None:
        if seat.process is process and process.origin is ProcessOrigin.STANDBY:
            process.signal(signal.SIGKILL)

    def _seat_of(self, process: Process) -> Seat | None:
        return next((seat for seat in self._seats if seat.process is process), None)

    def _send(self, number: int) -> None:
        for process in [self._script, *(seat.process for seat in self._seats)]:
            if process is not None:
                process.signal(number)

    async def _run_script(self, name: str, argv: tuple[str, ...], **more: str) -> int:
        node = self._job.node
        more |= {"SRES_NODE": node.name, "NODE_RANK": str(node.here.rank)}
        self._script_end: asyncio.Future[int] = self._loop.create_future()
        try:
            self._script = self._children.start(self._own)
        except OSError as error:
            say(f"error: the {name} script cannot be started: {error.strerror}")
            return 126
        with suppress(OSError):  # killed just now: its end says so
            self._script.give(ProcessSpec("program", argv, more))
        return await self._script_end

    # -- seats --------------------------------------------------------------------------------

    def _fill(self, seat: Seat) -> None:
        """Fill a seat: with a standby if there is one, else with a new process."""
        incarnation = next_incarnation(self._job.rendezvous, seat.number, seat.incarnation)
        again = not seat.is_first
        order = self._order(seat, incarnation)
        while True:
            standby = self._standbys.take() or self._fork(order, again)
            try:
                process = standby or self._start_rank()
            except OSError as error:
                self._refused(seat, f"no new process: {error.strerror}")
                return
            origin = process.origin
            for sink in self._children.sinks(process):
                name = f"[{self._job.node.role}{seat.number}]:"
                sink.point(self._job.streams[seat.local], seat.logs, name)
            seat.sit(process, incarnation)
            try:
                process.give(order)
            except OSError:
                if standby is not None:
                    continue  # it died just now; its end finds it on no seat
            break
        if again:
            how = f"(process {process.pid}, incarnation {incarnation})"
            say(f"rank {seat.number}: {origin.value} {how}")
        if standby is not None:
            if origin is ProcessOrigin.STANDBY:
                self._loop.call_later(IMPORT_SECONDS, self._end_importing, seat, process)
            self._standbys.soon()

    def _refused(self, seat: Seat, error: str) -> None:
        """Try again soon: that the system refuses a process says nothing of the program."""
        if seat.refused_since is None:
            say(f"rank {seat.number}: {error}; it is tried again every {_RETRY_SECONDS:g} s")
        if seat.refused(error) < _REFUSED_SECONDS:
            self._loop.call_later(_RETRY_SECONDS, self._retry, seat)
        else:
            self._vacated(seat, seat.end(1), pause=_RETRY_SECONDS)

    def _fork(self, order: ProcessSpec, again: bool) -> Process | None:
        # A first process comes out of it only where it was loaded before it was needed.
        may = again or self._job.warm.hold is not None
        return self._warm.fork(order, self._job.piped) if may else None

    def _order(self, seat: Seat, incarnation: int) -> ProcessSpec:
        streams = self._job.streams[seat.local]
        if self._job.log_dir is not None:
            seat.logs = self._job.log_dir / f"attempt_{incarnation}" / str(seat.local)
            if streams.redirect | streams.tee:
                with suppress(OSError):  # without logs it still trains
                    seat.logs.mkdir(parents=True, exist_ok=True)
        files = [None if streams.teed(bit) else streams.file(bit, seat.logs) for bit in _BITS]
        stdout, stderr = (None if file is None else str(file) for file in files)
        seats_own = of_rank(self._own, self._job.node, seat.local, incarnation)
        environment = self._warm.changed | seats_own
        if self._group.port:
            environment["MASTER_PORT"] = str(self._group.port)
        if self._group.world is not None and self._group.world.moved_master:
            environment["MASTER_ADDR"] = self._group.world.moved_master
        return ProcessSpec(self._job.kind, self._job.argv, environment, stdout, stderr)

    def _vacated(
        self, seat: Seat, end: ProcessEnd, pause: float = 0.0, *, has_waited: bool = False
    ) -> None:
        """Decide what follows when a process left a seat.

        Args:
            seat: now empty.
            end: of the process.
            pause: seconds until the next try, where the system refused a process.
            has_waited: no other node has ended the attempt meanwhile.
        """
        failed = end.code != exit_codes.DONE and not pause
        as_group = failed and self._group.is_lost(self._sitting())
        cause = self._first_to_fail(seat) if as_group else seat
        if as_group and cause.follows and self._ending.goes_on and not has_waited:
            # The other node tells soon: it waits for its rank's end, and for no longer than here.
            seat.ends.pop()
            self._loop.call_later(_FOLLOWED_SECONDS, self._followed_none, seat, end)
            return
        if cause is not seat:
            end = seat.blame(cause)
        decision = judge(self._ends_of_all() if as_group else tuple(seat.ends), self._job.rules)
        if as_group:
            reason = decision.reason + self._ended_before()
            decision = msgspec.structs.replace(decision, reason=reason)
        if decision.do in ("done", "failed"):
            if decision.do == "failed":
                say(f"error: rank {seat.number}: {decision.reason}: it is not started again")
            seat.done = True
            self._standbys.at_most(sum(not seat.done for seat in self._seats))
        elif self._ending.goes_on:
            if decision.do == "replace":
                say(f"rank {cause.number}: {decision.reason} after {end.lived:.1f} s")
                if pause:
                    self._loop.call_later(pause, self._retry, seat)
                elif as_group:
                    self._end_all(f"rank {cause.number}: {decision.reason}")
                else:
                    if not self._sitting():
                        self._group.new_port()
                    self._fill(seat)
                return
            self._give_up(cause, end, decision)
        self._ending.last_codes.append(end.code)
        self._look_for_the_end()

    def _followed_none(self, seat: Seat, end: ProcessEnd) -> None:
        """Judge an end for which no other node has ended the attempt, as it was about to."""
        if self._group.stage is AttemptStage.RUNNING and seat.process is None:
            seat.ends.append(end)
            self._vacated(seat, end, has_waited=True)

    def _first_to_fail(self, seat: Seat) -> Seat:
        """Return the seat whose failure the others followed: its process may take longer to end.

        Args:
            seat: that of a process that has ended.
        """
        alive = [one for one in self._seats if one.process is not None]
        first = min([seat, *alive], key=lambda one: one.told_at)
        if math.isinf(seat.told_at):
            end = seat.ends[-1]
            late = end.at - first.told_at >= _FOLLOWS_SECONDS
            # From outside: the others' errors come from that. NCCL ends a process itself, when
            # another one's connections close.
            return first if late and end.code == _ABORTED else seat
        return first

    def _ended_before(self) -> str:
        """Tell of ranks that were done when another one failed: it may have waited for them."""
        done = ", ".join(str(seat.number) for seat in self._seats if seat.done)
        return f" (after rank {done} had ended with exit code 0)" if done else ""

    def _sitting(self) -> list[int]:
        """Return the process ids of the ranks."""
        return [seat.process.pid for seat in self._seats if seat.process is not None]

    def _ends_of_all(self) -> tuple[ProcessEnd, ...]:
        """Return the ends that made all start again: whichever rank it was, it is one program."""
        return tuple(sorted((end for seat in self._seats for end in seat.ends), key=_moment))

    def _end_all(self, reason: str) -> None:
        """End the ranks that are left, to start all again."""
        say("all ranks are started again: their process group has ended")
        self._group.end(reason)
        self._end_left()

    def _end_left(self) -> None:
        left = [seat.process for seat in self._seats if seat.process is not None]
        for process in left:
            process.signal(signal.SIGTERM)
            self._loop.call_later(self._job.grace.ended, self._kill_left, process)
        self._start_all_again()

    def _kill_left(self, process: Process) -> None:
        if self._seat_of(process) is not None:
            process.signal(signal.SIGKILL)

    def _left(self, seat: Seat, code: int) -> None:
        """Take a process that was ended with the others off its seat."""
        seat.leave()
        if not self._ending.goes_on:
            self._ending.last_codes.append(code)
            self._look_for_the_end()
        else:
            self._start_all_again()

    def _start_all_again(self) -> None:
        """Start them when none of the old ones is left, here and on the other nodes."""
        if any(seat.process is not None for seat in self._seats):
            return
        if self._group.is_left():
            try:
                self._meet_launchers()
            except (OSError, SresError) as error:
                self._no_more(f"the other nodes cannot be met again: {error}")
        elif self._group.is_next():
            self._begin_again()

    def _begin_again(self) -> None:
        self._group.begin_again()
        for seat in self._seats:
            seat.done = False
            self._fill(seat)
        self._warm.soon()

    def _retry(self, seat: Seat) -> None:
        if self._ending.goes_on:
            self._fill(seat)
        else:
            self._look_for_the_end()

    def _look_for_the_end(self) -> None:
        empty = all(seat.process is None for seat in self._seats)
        done = all(seat.done for seat in self._seats)
        if empty and (not self._ending.goes_on or (done and self._group.is_done())):
            self._finish()

    def _finish(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _give_up(self, seat: Seat, end: ProcessEnd, decision: RestartDecision) -> None:
        """End everything, and say why."""
        self._ending.decision = decision
        # Of several nodes the others may go on, and the supervisor may start this one again.
        alone = (
            self._job.node.here.alone
            or decision.code == exit_codes.STOP
            or self._group.world is not None
        )
        what = "the training ends" if alone else "this node's launcher ends"
        say(
            f"error: {what}: rank {seat.number} (node {self._job.node.name}, local rank "
            f"{seat.local}, incarnation {seat.incarnation}) after {end.lived:.1f} s: "
            f"{decision.reason}"
        )
        if end.code != exit_codes.STOP and end.place and end.place not in decision.reason:
            say(f"  {end.place}")
        file = self._job.streams[seat.local].file(flags.STDERR, seat.logs)
        last = tail(file) if seat.logs is not None else []
        if last:
            say("\nsres-run:     ".join([f"  last lines of {file}:", *last]))
        if self._group.world is not None:
            reason = f"rank {seat.number}: {decision.reason}"
            self._group.world.stop(reason, decision.code or 1)
        self._end_ranks()

    def _end_ranks(self) -> None:
        self._send(signal.SIGTERM)
        self._dismiss_reserves()
        self._loop.call_later(self._job.grace.ended, self._send, signal.SIGKILL)

    # -- the launchers of other nodes ---------------------------------------------------------

    def _meet_launchers(self) -> None:
        spec, node = self._job.restart, self._job.node
        if spec.meet is None:
            return
        # Counted beside the seats: the next launcher on this node rank has a higher number.
        last, seat = self._group.number, node.seats + node.here.rank
        self._group.number = number = next_incarnation(self._job.rendezvous, seat, last)
        me = Peer(
            id=f"{node.here.rank:05d}.{number}.{uuid.uuid4().hex[:12]}",
            seat=node.here.rank,
            incarnation=number,
            node=node.name,
            host=spec.host,
            pid=os.getpid(),
            seats=node.all_nodes,
        )
        news = WorldNews(self._begun, self._over_elsewhere, self._finish, self._no_more)
        place = SharedDirectory(spec.meet, self._job.rendezvous.secret)
        world = LauncherWorld(self._loop, place, me, node.ranks, self._job.grace.ended, news)
        self._group.world = world
        self._group.came_later = self._group.came_later or number > 0
        world.start()
        self._loop.call_later(_LOOK_SECONDS, self._look_for_a_group, _LOOK_SECONDS)

    def _look_for_a_group(self, pause: float) -> None:
        if not self._group.shows_itself(self._sitting()):
            pause = min(2 * pause, _MAX_LOOK_SECONDS)
            self._loop.call_later(pause, self._look_for_a_group, pause)

    def _leave_launchers(self) -> None:
        if self._group.world is not None:
            self._group.world.close()

    def _begun(self, is_first: bool) -> None:
        if self._ending.goes_on and self._group.has_begun(is_first):
            self._begin_again()

    def _over_elsewhere(self, end: GenerationEnd) -> None:
        if end.kind == "stop":
            self._no_more(end.reason)
        elif self._ending.goes_on and self._group.ends_with(end, self._sitting()):
            say(f"on another node: {end.reason}")
            self._end_all(end.reason)

    def _no_more(self, reason: str, is_left: bool = False) -> None:
        if self._ending.goes_on and self._group.kind is not ProgramKind.RECOVERS:
            if is_left and self._may_come_back(reason):
                say(f"{reason}; this node starts again with them")
                self._group.leave()
                self._end_left()
                return
            what = "this node's launcher ends" if is_left else "the training ends"
            say(f"error: {what}: {reason}")
            self._ending.decision = RestartDecision("end", reason, 1)
            self._end_ranks()
            self._look_for_the_end()

    def _may_come_back(self, reason: str) -> bool:
        """Tell whether this launcher meets the others again, which wait for one on its node rank. A
        newer one may be there, or a supervisor starts it; and each time counts as an end of the
        ranks, so that a node with a bad way does not end all attempts for ever."""
        if not self._job.restart.comes_back or SEAT_TAKEN in reason:
            return False
        now = SYSTEM_CLOCK.monotonic()
        self._seats[0].ends.append(ProcessEnd(exit_codes.POISONED, now, 0.0, evicted=reason))
        return judge(self._ends_of_all(), self._job.rules).do == "replace"

    # -- words from outside -------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        if number in _PASSED_ON:
            self._send(number)
            return
        self._ending.interrupts += number == signal.SIGINT
        if self._ending.interrupts > 1:
            self._ending.stopped_by = number
            self._send(signal.SIGKILL)
        else:
            if not self._ending.stopped_by and self._job.grace.stopped is not None:
                self._loop.call_later(self._job.grace.stopped, self._send, signal.SIGKILL)
            self._ending.stopped_by = self._ending.stopped_by or number
            self._send(number)
        self._dismiss_reserves()
        self._look_for_the_end()

    def _listen(self, reaped: Process | None = None) -> None:
        for note in self._ear.hear():
            for seat in self._seats:
                process = seat.process
                if process is None:
                    continue
                if process.pid == note.evict:
                    seat.evicted = note.reason or "its peers say so"
                    if process is not reaped:
                        self._kill(seat, process)
                elif process.pid == note.ready:
                    self._standbys.now()
                elif process.pid in (note.enters, note.leaves):
                    inside = process.pid == note.enters
                    seat.stage = TrainingStage.INSIDE if inside else TrainingStage.LEFT
                    self._group.recovers()

    def _broken(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """End for a bug of the launcher, and take the ranks along, rather than go on blind."""
        error = context.get("exception")
        if not isinstance(error, Exception):
            error = RuntimeError(str(context.get("message")))
        if not self._over.done():
            self._over.set_exception(error)


def life(job: LaunchSpec, environment: Mapping[str, str], guard: Reaper) -> int:
    """Listen and run.

    Args:
        job: what to do.
        environment: the launcher's.
        guard: cleans up if this process is killed.

    Returns:
        The launcher's exit code.
    """
    ear = ControlSocket(Path(job.node.keeper))
    try:
        return Launcher(job, environment, ear, guard).run()
    finally:
        ear.close()
        # Batches of ranks that were killed; where a job or a shared directory gives the place its
        # name, other steps may read there: those go with the job, or with the next start.
        batch_directory.clean(batch_directory.place_of(os.getpid()))
