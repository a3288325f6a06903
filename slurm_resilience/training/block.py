"""`resilient`: runs a training function as a block that is entered again after a fault.

meet → form → (heal, in `track`) → the function's own steps → fault → abort → finalize → meet …
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import UsageError, WireError
from slurm_resilience.launcher import control_socket, exit_codes
from slurm_resilience.mesh.mesh import Mesh, Stopped
from slurm_resilience.mesh.messages import Heartbeat
from slurm_resilience.mesh.model import GenerationEnd, View
from slurm_resilience.mesh.rendezvous import next_training, note_passed, rendezvous_at
from slurm_resilience.training import inject
from slurm_resilience.training.exits import Exits, end_fork, refuse_child
from slurm_resilience.training.garbage import older_objects_left_out
from slurm_resilience.training.guards.code import block_functions
from slurm_resilience.training.guards.left_out import UpdateLeftOut
from slurm_resilience.training.interrupter import Interrupter
from slurm_resilience.training.options import Options
from slurm_resilience.training.participant import Participant
from slurm_resilience.training.process_group import ProcessGroups, form
from slurm_resilience.training.process_group.form import form_limit, least_abort_timeout
from slurm_resilience.training.process_group.tcp_store import rooted_store
from slurm_resilience.training.rank_environment import (
    RankEnvironment,
    note_step,
    read_environment,
    this_peer,
)
from slurm_resilience.training.recovery import fault_policy, log_lines, startup
from slurm_resilience.training.recovery.commit_gate import PEER_WORD_SECONDS
from slurm_resilience.training.recovery.exceptions import Interrupted, PoisonedProcess
from slurm_resilience.training.session import Session
from slurm_resilience.training.watch import Watch

log = logging.getLogger("sres.training")
SHORTAGE_LOOK_SECONDS = 3.0
"""Between two looks whether there are enough ranks for a world. Long enough for the mesh to look
meanwhile whether the training has ended (`OUTCOME_SECONDS`)."""
T = TypeVar("T")


@overload
def resilient(block: Callable[..., T]) -> Callable[..., T | None]: ...
@overload
def resilient(**options: Any) -> Callable[[Callable[..., T]], Callable[..., T | None]]: ...
def resilient(block: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a training function survive faults. It gets a `Session` as its first argument, and is
    called again, in the living process, whenever the world has changed.

    Args:
        min_world: ranks below which no rank steps; those that are there wait. Default: all.
        replica_size: ranks that hold one copy of the model together (FSDP/HSDP shards); 1: DDP.
        patience: seconds to wait for lost ranks before going on with at least ``min_world``.
        start_patience: the same at the very first start.
        shortage_patience: seconds to wait for ``min_world`` ranks; then the training ends (code
            76). Default: for ever.
        max_faults: times that the same rank may fail, or hang, in the same step before it is the
            program's own fault, and the training ends.
        backend: torch's name; default: gloo, and NCCL where a GPU is. ``gloo`` where ranks share
            a GPU, or leave it unused.
        collective_timeout: seconds of torch's own limit; faults are found long before.
        abort_timeout: seconds in which a rank must be out of its block when its world has ended;
            later its process is replaced.
        silence: seconds without a sign of life after which a rank counts as hung.
        checkpointer: a `Checkpointer`, the fallback when no peer has the state.
        partner_every: steps between in-memory copies on a partner node; 0: none.
        digest_every: steps between two comparisons of replicas, by checksums; 0: none. Default:
            100, or as many as keep it below 1 % of the time. Ranks are compared after each
            healing too.
        checksum: compare replicas before and after healing.
        trainable_only: heal only parameters that train (LoRA adapters).
        health_check: called with the session before the block is entered again; an exception or
            False has this process replaced.
        abort: called with the session and the `GenerationEnd` when a world is left.
        finalize: called with the session and the `GenerationEnd` before the next world is met.
        on_resize: called with the session, the ranks before and the ranks now, when the block is
            about to be entered in a world of another size than this process's last one; in a new
            process, than the full world. An exception counts as one of the block.
        on_event: called with a name and a dict, for logs and metrics.
        watch: a `Watch` of one's own; False: none. It learns the hang limit from the step time.
        stacks: directory for every rank's stacks when training hangs; empty: not written.

    Returns:
        The decorated function. It returns what the block returned.

    Raises:
        UsageError: an unknown option, a function that cannot be a block, an environment that makes
            no sense, or a second call in one process: it would find the place where the ranks
            meet already over. (A process that is alone may call again.)
        SystemExit: the training gave up (code 76) or this process must be replaced (75).
    """
    if block is not None:
        return resilient()(block)
    try:
        chosen = Options(**options)
    except TypeError as error:
        raise UsageError(f"resilient: {error}") from None

    def decorate(function: Callable[..., T]) -> Callable[..., T | None]:
        block_functions.refuse(function)

        @functools.wraps(function)
        def run(*args: Any, **more: Any) -> T | None:
            refuse_child()
            block_functions.refuse_call(function, args, more)
            where = read_environment(os.environ)
            _refuse_again(getattr(function, "__name__", "?"), where.meet)
            note_step(os.environ, where.meet)
            runner = BlockRunner(chosen, *_next_training(where))
            _been.add(where.meet)
            # Rank 0 tells what is not tracked, at the first start: a process that replaces another
            # one has no time for it.
            tells = where.seat == where.incarnation == 0
            with older_objects_left_out(listed=tells):
                return runner.run(lambda session: function(session, *args, **more))

        return run

    return decorate


_been: set[str] = set()
"""Rendezvous at which this process has met others."""


def _refuse_again(name: str, meet: str) -> None:
    if meet in _been and meet != "alone":
        raise UsageError(
            f"one training a process: a second call of a resilient function ({name}) cannot meet "
            "the others again; start the program once for each training"
        )


def _next_training(where: RankEnvironment) -> tuple[RankEnvironment, Path | None]:
    """Return where to meet when programs train one after the other in one step, and the file that
    is to say that this one has."""
    kind, _, path = where.meet.partition(":")
    if kind != "dir" or not where.step:
        return where, None
    found, passed = next_training(Path(path), f"{where.seat}.{where.step}")
    return where._replace(meet=f"dir:{found}"), passed


class BlockRunner:
    """One process's loop around the block."""

    def __init__(
        self, options: Options, where: RankEnvironment, passed: Path | None = None
    ) -> None:
        self._options = options
        self._where = where
        self._groups: list[ProcessGroups] = []
        self._finished_block = False
        self._result: Any = None
        """The value that the block returned, where it has finished."""
        self._last_size = where.seats
        """Ranks of the world that this process was in last; at first of the full world."""
        self._faults = fault_policy.Faults()
        self._hangs = fault_policy.Hangs()
        log_lines.speak(where.seat)
        rules, me = startup.rules(options, where), this_peer(where)
        met = rendezvous_at(where.meet, where.secret)
        self._least = rules.min_world
        self._participant = Participant(where, options)
        self._session = Session(self._participant)
        startup.warm_up(options)
        if options.watch is not False:
            stacks = options.stacks or None
            self._participant.watch = options.watch or Watch(silence=options.silence, stacks=stacks)
        self._interrupter = Interrupter(
            self._participant,
            self._groups,
            abort_timeout=options.abort_timeout,
            event=self._event_beside,
        )
        self._mesh = Mesh(
            met,
            me,
            rules,
            abort_timeout=least_abort_timeout(where.seats, options.abort_timeout),
            silence=options.silence,
            on_end=self._interrupter.cut,
            on_evict=self._interrupter.evicted,
            on_tick=self._tick,
            on_given_up=self._interrupter.given_up,
            speakers=where.speakers,
        )
        self._participant.mesh = self._mesh
        self._exits = Exits(self._mesh, met, self._participant)
        self._passed = passed
        if where.lent:
            self._participant.departure.on_term(self._leave_between_worlds)
        elif options.checkpointer is not None:
            self._participant.save_when_asked_to_end()
        # Before it begins: a process that is alone forms a world at once, by what it has said.
        self._participant.say("ready")
        self._mesh.start()

    def run(self, block: Callable[[Session], T]) -> T | None:
        """Run until all ranks are done; return what the block returned."""
        control_socket.enters()
        try:
            if reason := startup.own_group():
                raise Stopped(reason)
            while True:
                try:
                    view = self._meet()
                    if view is None:
                        break
                    self._event("met", generation=view.counter, world=view.size)
                    self._once(view, block)
                except WireError as error:
                    self._leave_if_asked()
                    log.error("%s", error)
                    if self._mesh.is_seat_taken:
                        control_socket.evict(os.getpid(), self._mesh.evicted)
                    self._exits.replaced()
        except Stopped as error:
            self._exits.stopped(str(error))
        finally:
            self._mesh.close()
            control_socket.leaves()
        self._participant.finish()
        note_passed(self._passed)
        if not self._finished_block:
            log.warning("the training ended without this process, which was not needed any more")
            if not self._where.incarnation and self._participant.attempt == 0:
                log.warning("if another training meets in the same place: --rdzv-id names each")
            raise SystemExit(exit_codes.DONE)
        self._exits.done()
        finished: T = self._result
        return finished

    def _meet(self) -> View | None:
        """Wait for the next world; give up where ranks are missing for longer than is wanted."""
        patience = self._options.shortage_patience
        if patience is None:
            return self._mesh.meet()
        since: float | None = None
        while True:
            try:
                return self._mesh.meet(min(SHORTAGE_LOOK_SECONDS, patience))
            except TimeoutError:
                now, lacking = SYSTEM_CLOCK.monotonic(), self._mesh.shortage()
            since = (since or now) if lacking else None
            if since is not None and now - since >= patience:
                self._exits.given_up(f"for {patience:g} s {lacking} (min_world)")

    # -- one generation -----------------------------------------------------------------------

    def _once(self, view: View, block: Callable[[Session], object]) -> None:
        session, participant = self._session, self._participant
        participant.say_entering(view)
        try:
            self._interrupter.enter()
            try:
                group = self._form(view)
                # Not before: a training may end with ranks that have finished, and that were about
                # to come into a world which was over before it worked.
                self._finished_block, self._result = False, None
                participant.enter(group)
                self._tell_why(view)
                inject.point("start", step=participant.step, rank=session.rank)
                self._event("formed", generation=view.counter, world=view.size)
                self._tell_resize(view.size)
                result = block(session)
                if os.getpid() != self._mesh.me.pid:
                    end_fork(None)
                participant.returned()
                participant.write_out()
            finally:
                self._interrupter.leave()
        except BaseException as error:
            if os.getpid() != self._mesh.me.pid:
                end_fork(error)
            before = self._participant.last_end
            end = self._leave_block(view, error)
            self._go_on(end, error, before.reason if before is not None else "")
            return
        self._finished_block, self._result = True, result
        if participant.watch is not None:
            participant.watch.returned()
        participant.say("done")
        # The others may still be in their last step, or need this process's state.
        if self._mesh.meet() is not None:
            seat = self._mesh.me.seat
            text = f"seat {seat} had returned, and is needed again: another one had not"
            participant.last_end = GenerationEnd(view.generation, text)
        self._leave_world()

    def _form(self, view: View) -> ProcessGroups:
        timeout = self._options.abort_timeout
        rootless = "rootless" in self._where.parts
        group = form(
            self._mesh,
            view,
            backend=self._options.chosen_backend,
            store=None if rootless else rooted_store(self._mesh, view, timeout),
            timeout=self._options.collective_timeout,
            limit=form_limit(view.size, timeout),
            out=self._groups,
        )
        self._mesh.worked(view)
        return group

    def _leave_block(self, view: View, error: BaseException) -> GenerationEnd:
        """Out of the block, by whatever way: find out why, and leave the world."""
        end = self._why(view, error)
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            self._leave_world()
            if isinstance(error, SystemExit) and not error.code and view.size <= self._least:
                # Its launcher takes it for done: no process comes in its place.
                text = f"seat {self._where.seat} left the block by sys.exit(0): return instead"
                self._mesh.stop(GenerationEnd(view.generation, text, self._mesh.me.id, "stop"))
            raise error
        # The traceback holds the block's frames, and they hold DDP wrappers and groups.
        if self._groups:
            self._groups[-1].hold(error.__traceback__)
        if end.kind == "hang" and self._participant.watch is not None:
            self._participant.watch.hung(end.culprit, self._mesh.beats())
        self._call(self._options.abort, end)
        self._leave_world()
        self._event("left", reason=end.reason, kind=end.kind, culprit=end.culprit)
        self._participant.last_end = end
        self._call(self._options.finalize, end)
        return end

    def _why(self, view: View, error: BaseException) -> GenerationEnd:
        """Return how the world ended: as the mesh knows it, else by this error; tell all."""
        mesh = self._mesh
        if mesh.end is None and fault_policy.may_be_a_peers(error):
            mesh.wait_for_end(PEER_WORD_SECONDS)
        if mesh.end is None:
            text = f"seat {mesh.me.seat} ({mesh.me.node}): {fault_policy.said(error)}"
            mesh.over(GenerationEnd(view.generation, text, mesh.me.id, "fault"))
        end = mesh.end
        assert end is not None
        if isinstance(error, Exception) and not isinstance(error, Interrupted):
            log.debug("left the block by", exc_info=error)
        return end

    def _leave_world(self) -> None:
        self._participant.leave()
        for group in self._groups:
            group.leave()
        self._groups.clear()

    def _tick(self, now: float) -> Heartbeat | None:
        self._participant.promise_with_others()
        return self._interrupter.tick(now)

    def _leave_if_asked(self) -> None:
        self._participant.planned_end.end_alone()
        departure = self._participant.departure
        is_asked = departure.reason or departure.is_over
        if is_asked and departure.may_leave(self._mesh, self._participant.step):
            self._exits.departed()

    def _leave_between_worlds(self) -> None:
        """Leave where no block is under way; else after the step that is."""
        participant, mesh = self._participant, self._mesh
        participant.plan_change()
        waits = not participant.in_world and mesh.status.phase == "ready"
        if waits and participant.departure.may_leave(mesh, participant.step):
            mesh.close("it was asked to leave")

    def _go_on(self, end: GenerationEnd, error: BaseException, before: str) -> None:
        """Be ready for the next world; or end, where there must be none with this process."""
        self._leave_if_asked()
        left_out = self._participant.guards.left_out
        if left_out.reason:
            self._participant.healer.distrust(left_out.reason)
            error, left_out.reason = UpdateLeftOut(left_out.reason), ""
        step, count = self._participant.step, 0
        if fault_policy.is_own(error, end, self._mesh.me.id):
            count = self._faults.add(step)
            log.warning("%s", self._faults.tell(error))
        then, reason = fault_policy.verdict(
            error,
            end,
            seat=self._where.seat,
            step=step,
            count=count,
            most=self._options.max_faults,
            recovers="recovery" in self._where.parts,
            hangs=self._hangs.add(end, step),
            before=before,
        )
        if then == "stop":
            self._exits.stopped(reason)
        if then == "give up":
            self._exits.given_up(reason)
        if then == "replace":
            log.error("%s", reason)
            self._exits.replaced()
        if then == "end":
            log.error("%s", reason)
            if isinstance(error, Exception):
                self._mesh.close()
                raise error
            self._exits.replaced()
        if count and fault_policy.lacks_threads(error):
            # The others take a rank for stuck that is not ready within the abort timeout.
            pause = min(fault_policy.THREAD_PAUSE_SECONDS, self._options.abort_timeout / 4)
            SYSTEM_CLOCK.wait(threading.Event(), pause)
        self._check_health()
        self._participant.say("ready")

    def _check_health(self) -> None:
        check = self._options.health_check
        try:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            if check is not None and check(self._session) is False:
                raise PoisonedProcess("the health check said no")
        except Exception as error:
            log.error("unhealthy (%s): this process asks to be replaced", error)
            self._exits.replaced()

    # -- telling ------------------------------------------------------------------------------

    def _tell_why(self, view: View) -> None:
        """Say why there is a new world, if this is the first of those who were in the last one."""
        end, session = self._participant.last_end, self._session
        old = [rank for rank, member in enumerate(view.members) if member.status.generation]
        if end is not None and old and session.rank == old[0]:
            text, number = end.reason, view.counter
            log.warning("generation %d: %d of %d ranks; %s", number, view.size, session.seats, text)

    def _tell_resize(self, size: int) -> None:
        """Call the user's hook if the world has another size than the last one it was told of. One
        that raised, or was cut off by the end of its world, has not heard of it."""
        if size != self._last_size and self._options.on_resize is not None:
            hook = self._interrupter.on_resize
            hook.begin(SYSTEM_CLOCK.monotonic())
            try:
                self._options.on_resize(self._session, self._last_size, size)
            finally:
                hook.end()
        self._last_size = size

    def _event(self, name: str, **details: Any) -> None:
        """Call the user's hook. It logs, and a log that cannot be reached ends no training."""
        if self._options.on_event is None:
            return
        try:
            self._options.on_event(name, {"time": SYSTEM_CLOCK.now(), **details})
        except Exception:
            log.exception("the hook on_event failed; the training goes on")

    def _event_beside(self, name: str, **details: Any) -> None:
        """Do so in a thread of its own: the others take a mesh that waits for a hook for dead."""
        if self._options.on_event is not None:
            beside = threading.Thread(target=self._event, args=(name,), kwargs=details, daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread to be had: the mesh must go on
                beside.start()

    def _call(self, hook: Callable[[Any, Any], None] | None, end: GenerationEnd) -> None:
        if hook is None:
            return
        try:
            hook(self._session, end)
        except Exception:
            log.exception("a hook failed; the recovery goes on")
