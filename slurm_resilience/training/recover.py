"""`resilient`: runs a training function as a block that is entered again after a fault.

meet → form → (heal, in `track`) → the function's own steps → fault → abort → finalize → meet …
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import distributed as dist

from slurm_resilience.errors import UsageError, WireError
from slurm_resilience.mesh.layout import Rules
from slurm_resilience.mesh.meeting import meeting
from slurm_resilience.mesh.mesh import Mesh, Stopped
from slurm_resilience.mesh.messages import Beat
from slurm_resilience.mesh.model import Break, Peer, View
from slurm_resilience.training import inject, ports
from slurm_resilience.training.group import Group, form
from slurm_resilience.training.group.form import form_limit, least_abort_timeout
from slurm_resilience.training.heal import Unrecoverable
from slurm_resilience.training.options import Options
from slurm_resilience.training.place import Place, place
from slurm_resilience.training.run import codes, keeper
from slurm_resilience.training.session import Session
from slurm_resilience.training.signals import Interrupted, PoisonedProcess
from slurm_resilience.training.watch import Watch

log = logging.getLogger("sres.training")
T = TypeVar("T")

PEER_WORD_SECONDS = 1.0
"""How long an error of a collective waits for the mesh to say which peer went away."""
JOIN_SECONDS = 0.1
"""When somebody joins, ranks leave by themselves after their step; who does not, is cut later."""
NUDGE_SECONDS = 0.5
"""A block that is in no collective when its world ends is interrupted after this time."""


@overload
def resilient(block: Callable[..., T]) -> Callable[..., T | None]: ...
@overload
def resilient(**options: Any) -> Callable[[Callable[..., T]], Callable[..., T | None]]: ...
def resilient(block: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a training function survive faults. It gets a `Session` as its first argument, and is
    called again, in the living process, whenever the world has changed.

    Args:
        min_world: ranks below which nobody steps; the others wait. Default: all.
        replica_size: ranks that hold one copy of the model together (FSDP/HSDP shards); 1: DDP.
        backend: torch's name; default: gloo, and NCCL where a GPU is.
        patience: seconds to wait for lost ranks before going on with at least ``min_world``.
        start_patience: the same at the very first start.
        collective_timeout: seconds of torch's own limit; faults are found long before.
        abort_timeout: seconds in which a rank must be out of its block when its world has ended;
            later its process is replaced.
        silence: seconds without a sign of life after which a rank counts as hung.
        max_faults: times that the same rank may fail in the same step before it is the program's
            own fault, and the training ends.
        checkpointer: a `Checkpointer`, the fallback when no peer has the state.
        checksum: compare replicas before and after healing.
        trainable_only: heal only parameters that train (LoRA adapters).
        partner_every: steps between in-memory copies on a partner node; 0: none.
        prepare: what the block gives to `Session.once`, built before this process joins: then the
            others never wait for a newcomer's construction.
        health_check: called with the session before the block is entered again; an exception or
            False has this process replaced.
        abort: called with the session and the `Break` when a world is left.
        finalize: called with the session and the `Break` before the next world is met.
        on_event: called with a name and a dict, for logs and metrics.
        watch: a `Watch` of one's own; False: none. It learns the hang limit from the step time.
        stacks: directory for every rank's stacks when training hangs; empty: not written.

    Returns:
        The decorated function. It returns what the block returned.

    Raises:
        UsageError: an unknown option, or an environment that makes no sense.
        SystemExit: the training gave up (code 76) or this process must be replaced (75).
    """
    if block is not None:
        return resilient()(block)
    try:
        chosen = Options(**options)
    except TypeError as error:
        raise UsageError(f"resilient: {error}") from None

    def decorate(function: Callable[..., T]) -> Callable[..., T | None]:
        @functools.wraps(function)
        def run(*args: Any, **more: Any) -> T | None:
            runner = Runner(chosen, place(os.environ))
            return runner.run(lambda session: function(session, *args, **more))

        return run

    return decorate


class Runner:
    """One process's loop around the block."""

    def __init__(self, options: Options, where: Place) -> None:
        self._options = options
        self._place = where
        self._main = threading.get_ident()
        self._groups: list[Group] = []
        self._end_seen = 0.0
        self._nudged = False
        self._finished_block = False
        self._faults: list[tuple[int, str]] = []
        rules = Rules(
            seats=where.seats,
            min_world=options.min_world or where.min_world or where.seats,
            replica_size=options.replica_size,
            patience=options.patience,
            start_patience=options.start_patience,
        )
        if not options.replica_size <= rules.min_world <= where.seats:
            raise UsageError(
                f"min_world={rules.min_world} must lie between replica_size="
                f"{options.replica_size} and the {where.seats} ranks of the full world"
            )
        me = Peer(
            id=f"{where.seat:05d}.{where.incarnation}.{uuid.uuid4().hex[:12]}",
            seat=where.seat,
            incarnation=where.incarnation,
            node=where.node,
            domain=where.domain,
            host=where.address,
            pid=os.getpid(),
        )
        self._meeting = meeting(where.meet, where.secret)
        self._session = Session(where, options)
        self._warm_up()
        if options.watch is not False:
            stacks = options.stacks or None
            self._session.watch = options.watch or Watch(silence=options.silence, stacks=stacks)
        self._mesh = Mesh(
            self._meeting,
            me,
            rules,
            abort_timeout=least_abort_timeout(where.seats, options.abort_timeout),
            silence=options.silence,
            on_end=self._cut,
            on_evict=self._evicted,
            on_tick=self._tick,
            on_given_up=self._given_up,
        )
        self._session._mesh = self._mesh
        self._mesh.start()

    def _warm_up(self) -> None:
        """What takes long and needs nobody, before the others know that this process is there."""
        importlib.import_module("torch._dynamo")  # torch.optim loads it at its first use
        names = ["torch.nn.parallel", "torch.distributed.device_mesh"]
        if self._options.replica_size > 1:
            names += ["torch.distributed.tensor", "torch.distributed.fsdp"]
        for name in names:
            importlib.import_module(name)
        importlib.import_module("slurm_resilience.training.data")
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        if os.environ.get("LOCAL_RANK") == "0" and local.isdecimal():
            said = ports.warning(int(local), ports.port_range())
            if said:
                log.warning(said)
        if self._options.prepare is not None:
            self._session.once(self._options.prepare)

    def run(self, block: Callable[[Session], T]) -> T | None:
        """Until everybody is done; what the block returned."""
        result: T | None = None
        self._say("ready")
        try:
            while True:
                try:
                    view = self._mesh.meet()
                    if view is None:
                        break
                    self._event("met", generation=view.counter, world=view.size)
                    result = self._once(view, block)
                    continue
                except Interrupted:
                    # The nudge of an earlier end, which came late.
                    continue
                except WireError as error:
                    log.error("%s", error)
                    self._leave_process(codes.POISONED)
        except Stopped as error:
            self._give_up(str(error), told=True)
        finally:
            self._mesh.close()
        self._session._finish()
        if not self._finished_block:
            log.warning("the training ended without this process, which was not needed any more")
            raise SystemExit(codes.DONE)
        if self._place.seat == self._lowest_seat():
            self._meeting.outcome(0, self._session.step, "")
        return result

    # -- one generation -----------------------------------------------------------------------

    def _once(self, view: View, block: Callable[[Session], T]) -> T | None:
        session = self._session
        self._end_seen, self._nudged, self._finished_block = 0.0, False, False
        self._mesh.say(session._healer.status("running", view))
        try:
            group = form(
                self._mesh,
                view,
                backend=self._options.chosen_backend,
                store=None if "rootless" in self._place.parts else self._rooted(view),
                timeout=self._options.collective_timeout,
                limit=form_limit(view.size, self._options.abort_timeout),
                out=self._groups,
            )
            self._mesh.worked(view)
            session._enter(group)
            inject.point("start", step=session.step, rank=session.rank)
            self._event("formed", generation=view.counter, world=view.size)
            result = block(session)
        except BaseException as error:
            self._after(view, error)
            return None
        self._finished_block = True
        self._say("done")
        # The others may still be in their last step, or need this process's state.
        self._mesh.meet()
        self._leave_world()
        return result

    def _rooted(self, view: View) -> Any:
        """Part `rootless` is off: torch's usual store, whose server lives in rank 0."""
        tcp_store: Any = vars(dist)["TCPStore"]
        mesh, rank = self._mesh, view.rank_of(self._mesh.me.id)
        host = view.members[0].peer.host
        if rank == 0:
            server: Any = tcp_store(host, 0, is_master=True, wait_for_workers=False)
            mesh.put(view.generation, "tcpstore", str(server.port).encode())
            return server
        (port,) = mesh.get(view.generation, ["tcpstore"], self._options.abort_timeout)
        return tcp_store(host, int(port), is_master=False, wait_for_workers=False)

    def _after(self, view: View, error: BaseException) -> None:
        """Out of the block, by whatever way: find out why, leave the world, be ready again."""
        end = self._why(view, error)
        session = self._session
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            self._leave_world()
            raise error
        # The traceback holds the block's frames, and they hold DDP wrappers and groups.
        if self._groups:
            self._groups[-1].hold(error.__traceback__)
        self._call(self._options.abort, session, end)
        self._leave_world()
        self._event("left", reason=end.reason, kind=end.kind, culprit=end.culprit)
        session.last_end = end
        self._call(self._options.finalize, session, end)
        if end.kind == "stop":
            self._give_up(end.reason, told=True)
        if isinstance(error, Unrecoverable):
            self._give_up(str(error))
        if end.culprit == self._mesh.me.id and end.kind == "fault":
            self._count(session.step, error)
            if _is_poisoned(error):
                log.error("this process cannot go on (%s): it asks to be replaced", error)
                self._leave_process(codes.POISONED)
        if "recovery" not in self._place.parts and end.kind != "join":
            log.error("in-process recovery is off: this process ends (%s)", end.reason)
            if isinstance(error, Exception):
                self._mesh.close()
                raise error
            self._leave_process(codes.POISONED)
        self._check_health()
        self._say("ready")

    def _why(self, view: View, error: BaseException) -> Break:
        mesh = self._mesh
        if mesh.end is None and _may_be_a_peers_fault(error):
            deadline = time.monotonic() + PEER_WORD_SECONDS
            while mesh.end is None and time.monotonic() < deadline:
                mesh.wait_for_end(deadline - time.monotonic())
        if mesh.end is None:
            text = f"seat {mesh.me.seat} ({mesh.me.node}): {type(error).__name__}: {error}"
            mesh.over(Break(view.generation, text[:2000], mesh.me.id, "fault"))
        end = mesh.end
        assert end is not None
        if isinstance(error, Exception) and not isinstance(error, Interrupted):
            log.debug("left the block by", exc_info=error)
        return end

    def _leave_world(self) -> None:
        self._session._leave()
        for group in self._groups:
            group.leave()
        self._groups.clear()

    def _count(self, step: int, error: BaseException) -> None:
        """The same fault in the same step again and again is the program's own."""
        text = "".join(traceback.format_exception(error))
        log.warning("fault in step %d of seat %d:\n%s", step, self._place.seat, text)
        self._faults = [fault for fault in self._faults if fault[0] == step]
        self._faults.append((step, type(error).__name__))
        if len(self._faults) >= self._options.max_faults:
            count = len(self._faults)
            self._give_up(f"seat {self._place.seat} failed {count} times in step {step}: {error!r}")

    def _check_health(self) -> None:
        check = self._options.health_check
        try:
            if torch.cuda._initialized:
                torch.cuda.synchronize()
            if check is not None and check(self._session) is False:
                raise PoisonedProcess("the health check said no")
        except Exception as error:
            log.error("unhealthy (%s): this process asks to be replaced", error)
            self._leave_process(codes.POISONED)

    # -- ends ---------------------------------------------------------------------------------

    def _give_up(self, reason: str, told: bool = False) -> None:
        if not told:
            view = self._mesh.current
            if view is not None:
                self._mesh.stop(Break(view.generation, reason, self._mesh.me.id, "stop"))
            self._meeting.outcome(codes.STOP, self._session.step, reason)
        print(f"sres: the training gave up: {reason}", file=sys.stderr, flush=True)
        self._leave_process(codes.STOP)

    def _leave_process(self, code: int) -> None:
        self._mesh.close()
        sys.stdout.flush()
        sys.stderr.flush()
        raise SystemExit(code)

    def _lowest_seat(self) -> int:
        view, present, _ = self._mesh.picture()
        members = [m.peer.seat for m in view.members] if view else []
        return min([*members, *(m.peer.seat for m in present)], default=self._place.seat)

    # -- called in the mesh's thread ----------------------------------------------------------

    def _cut(self, end: Break) -> None:
        now = time.monotonic()
        self._end_seen = self._end_seen or now
        if end.kind == "join" and now - self._end_seen < JOIN_SECONDS:
            return
        for group in list(self._groups):
            group.cut()
        if now - self._end_seen > NUDGE_SECONDS and not self._nudged and not self._in_update():
            self._nudged = True
            _raise_in(self._main, Interrupted)

    def _in_update(self) -> bool:
        return self._session._inside

    def _evicted(self, reason: str) -> None:
        """The others go on without this process. If it does not come out by itself, it ends."""
        if not self._mesh.wait_until_out(self._options.abort_timeout):
            log.error("the others go on without this process (%s), which hangs: it ends", reason)
            os._exit(codes.POISONED)

    def _given_up(self, peer: Peer, reason: str) -> None:
        if peer.node == self._place.node and peer.pid:
            keeper.evict(peer.pid, reason)

    def _tick(self, now: float) -> Beat | None:
        watch, mesh = self._session.watch, self._mesh
        if watch is None:
            return None
        view = mesh.current
        if view is not None and mesh.end is None and mesh.status.phase == "running":
            beats = {n: b for n, b in mesh.beats().items() if view.rank_of(n) >= 0}
            verdict = watch.stalled(now, beats)
            if verdict is not None and self._session._group is not None:
                end = Break(view.generation, verdict.reason, verdict.culprit or "", "hang")
                self._event("hang", reason=verdict.reason)
                mesh.over(end)
        return watch.beat()

    # -- small things -------------------------------------------------------------------------

    def _say(self, phase: Any) -> None:
        self._mesh.say(self._session._status(phase))

    def _event(self, name: str, **details: Any) -> None:
        if self._options.on_event is not None:
            self._options.on_event(name, {"time": time.time(), **details})

    def _call(self, hook: Callable[[Any, Any], None] | None, session: Session, end: Break) -> None:
        if hook is None:
            return
        try:
            hook(session, end)
        except Exception:
            log.exception("a hook failed; the recovery goes on")


def _may_be_a_peers_fault(error: BaseException) -> bool:
    """Does this look like what a collective raises when a peer is gone?"""
    if isinstance(error, Interrupted):
        return True
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    text = str(error).lower()
    words = ("connection", "gloo", "nccl", "socket", "peer", "store", "timed out", "timeout")
    return any(word in text for word in words)


def _is_poisoned(error: BaseException) -> bool:
    if isinstance(error, PoisonedProcess):
        return True
    accelerator = getattr(torch, "AcceleratorError", None)
    if accelerator is not None and isinstance(error, accelerator):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise in another thread, at its next bytecode."""
    call = ctypes.pythonapi.PyThreadState_SetAsyncExc
    call(ctypes.c_ulong(thread), ctypes.py_object(kind))
