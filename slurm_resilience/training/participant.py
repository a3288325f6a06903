"""One process in the training's worlds: the part that the block, and what ends it, both need."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable

from torch import nn

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import GenerationEnd, PeerStatus, Phase, View
from slurm_resilience.training import inject
from slurm_resilience.training.data.gradient_weights import GradientWeights
from slurm_resilience.training.guards.code.fixed_models import fixed_models
from slurm_resilience.training.guards.replica_check import Checksums
from slurm_resilience.training.guards.rule_guards import RuleGuards
from slurm_resilience.training.guards.untracked_parts import ends_no_training
from slurm_resilience.training.guards.witness import Correction, ReplicaFault, correction_line
from slurm_resilience.training.leaving.departure import Departure
from slurm_resilience.training.leaving.last_checkpoint import LastCheckpoint
from slurm_resilience.training.leaving.last_save import LastSave
from slurm_resilience.training.leaving.planned_end import PlannedEnd
from slurm_resilience.training.loaders import Loaders
from slurm_resilience.training.module_hooks import ModuleHooks
from slurm_resilience.training.options import Options
from slurm_resilience.training.process_group import ProcessGroups
from slurm_resilience.training.rank_environment import RankEnvironment
from slurm_resilience.training.recovery.commit_gate import PEER_WORD_SECONDS, come_through
from slurm_resilience.training.recovery.exceptions import Interrupted
from slurm_resilience.training.recovery.healer import Healer
from slurm_resilience.training.update_count import UpdateCount
from slurm_resilience.training.watch import Watch

log = logging.getLogger("sres.training")

WRITING_SECONDS = 0.1
"""While the last checkpoint is written, the end of its world is looked for this often."""


class Participant:
    """It outlives every world. `Session` is what the training's code sees of it.

    Args:
        where: this process's place in the training.
        options: of `resilient`.
    """

    mesh: Mesh
    """Set once this process has joined the others."""

    def __init__(self, where: RankEnvironment, options: Options) -> None:
        self.where = where
        self.options = options
        self.healer = Healer(options, where)
        self.loaders = Loaders(self.healer.progress, cached="data" in where.parts)
        self.weights = GradientWeights()
        self.hooks = ModuleHooks(self.point)
        self.updates = UpdateCount()
        last = LastCheckpoint(
            self.healer, self.write_out, core=where.core, is_whole=options.replica_size == 1
        )
        last_save = LastSave(where.core, last.write, self._look_soon, last.may_be_by_one)
        self.planned_end = PlannedEnd(last_save, last.write_alone)
        heals = {"recovery", "state"} <= set(where.parts)
        self.guards = RuleGuards(options.digest_every, heals=heals)
        self.attempt = 0
        """Number of times that this process has entered the block."""
        self.watch: Watch | None = None
        self.last_end: GenerationEnd | None = None
        """The reason for which the block was entered again; None at first."""
        self.group_now: ProcessGroups | None = None
        """`group`; None outside of the block."""
        self._view: View | None = None
        inject.flips(self.healer.flip_bit)

    # -- the world ----------------------------------------------------------------------------

    @property
    def group(self) -> ProcessGroups:
        """The process group of the current world.

        Raises:
            UsageError: there is none outside of the block.
        """
        if self.group_now is None:
            raise UsageError("the session has no world outside of the block")
        return self.group_now

    @property
    def departure(self) -> Departure:
        """The request that this process leaves, if there was one."""
        return self.planned_end.departure

    @property
    def in_world(self) -> bool:
        """True while this process has a process group."""
        return self.group_now is not None

    @property
    def updating(self) -> bool:
        """True between the begin and the end of an update."""
        return self.updates.under_way

    @property
    def step(self) -> int:
        """Committed optimizer steps."""
        return self.healer.progress.step

    def enter(self, group: ProcessGroups) -> None:
        """Enter a new world."""
        self.group_now, self._view = group, group.view
        self.attempt += 1
        self.guards.left_out.reason = ""
        self.updates.loop_left()
        self.weights.enter()
        self.guards.replicas.enter(group.view.size)
        if self.watch is not None:
            counter = group.counter()
            me, replaced = self.mesh.me, self.where.incarnation > 0
            self.watch.enter(me.id, me.seat, counter, group.view.counter, replaced=replaced)

    def leave(self) -> None:
        """Leave the world; its group is kept until nothing of it is on its way."""
        self.updates.under_way = False
        is_whole = not self.healer.progress.dirty
        self.guards.state.enter(None, {}, tell=False, step=self.step if is_whole else -1)
        self.hooks.stop_listening()
        if self.group_now is not None:
            for thing in self.healer.released():
                self.group_now.hold(thing)
            self.group_now.leave()
        self.group_now = None
        self.weights.enter()

    def finish(self) -> None:
        """End the training: nothing of it is needed again."""
        self.loaders.close()
        self.planned_end.close(self.healer.close)

    def check(self) -> None:
        """Leave the block if its world is over.

        Raises:
            Interrupted: it is.
        """
        if self.mesh.is_left:
            end = self.mesh.end
            raise Interrupted(end.reason if end else self.mesh.evicted)

    def change_world(self, *, checks: bool = False) -> None:
        """End the world between two steps where that was planned; plan it where others wait to
        join, or this process is to leave. Without news from the mesh there is nothing to do; what
        cannot be done at once is looked at again.

        Args:
            checks: the program itself asks.
        """
        mesh, group, planned = self.mesh, self.group, self.planned_end
        # Before the look: what comes in the middle of it, in another thread, is not lost.
        planned.seen_news = mesh.news
        is_planned = planned.look(mesh, group.view.generation, self.healer.progress.step)
        # The knock stays set on all ranks but the one that lets others in.
        lets_in = mesh.knock.is_set() and group.view.lets_in(mesh.me.id)
        if planned.departure.reason or lets_in:
            self.plan_change()
        view, step = group.view, self.step
        idles = checks and planned.idles(view.generation, step)
        is_last = planned.come_to(mesh, view, step, idles=idles)
        if is_planned or is_last or planned.departure.reason or lets_in:
            planned.seen_news = -1

    def begin_steps(self) -> None:
        """Note that the state is whole, and that steps may begin.

        Raises:
            Interrupted: the world is over.
        """
        self.planned_end.enter(self.mesh, self.group.view, self.step)
        self.check()

    def plan_change(self) -> None:
        """Have the world end soon where others wait to join, or this process is to leave. From any
        thread. One rank lets others in, for all."""
        group, mesh = self.group_now, self.mesh
        self.planned_end.seen_news = -1  # this process may have been asked to leave
        if group is None or mesh.end is not None:
            return
        reason = self.departure.wish(mesh, self.step)
        if not reason and mesh.knock.is_set() and group.view.lets_in(mesh.me.id):
            reason = _joining(sorted(peer.seat for peer in mesh.newcomers()))
        if reason:
            self.planned_end.plan(mesh, group.view.generation, self.step, reason)

    def save_when_asked_to_end(self) -> None:
        """Have SIGTERM, where it comes to all ranks, end the training with a checkpoint."""

        def world() -> tuple[Mesh, View | None] | None:
            group, mesh = self.group_now, self.mesh
            if group is None or mesh.end is not None:
                return None if self.step < 0 else (mesh, None)
            has_state = any(member.status.step >= 0 for member in group.view.members)
            # One that is being healed ends with the others, which have something to save.
            return (mesh, group.view) if self.step >= 0 or has_state else None

        self.planned_end.last_save.on_term(world, lambda: self.step)

    def promise_with_others(self) -> None:
        """End with the others, on a rank that is lent, where they end with a last checkpoint. From
        any thread."""
        group, mesh = self.group_now, self.mesh
        if group is not None and mesh.end is None and self.where.core:
            self.planned_end.last_save.promise_with_others(mesh, group.view, lambda: self.step)

    def _look_soon(self) -> None:
        self.planned_end.seen_news = -1

    # -- telling the others -------------------------------------------------------------------

    def status(self, phase: Phase) -> PeerStatus:
        """Return what the others should know of this process."""
        return self.healer.status(phase, self._view)

    def say(self, phase: Phase) -> None:
        """Tell the others; outside of the block, look before for changes outside of updates."""
        if phase != "running":
            self.healer.settle()
        self.mesh.say(self.status(phase))

    def say_entering(self, view: View) -> None:
        """Tell the others that the block is about to be entered, in this world."""
        self.healer.switch_on_again(view)
        self.mesh.say(self.healer.status("running", view))

    def point(self, phase: inject.Phase) -> None:
        """Let a drill strike here."""
        if inject.is_possible:
            inject.point(phase, step=self.step, rank=self.group.rank)

    # -- the commit point: see `Update` -------------------------------------------------------

    def refuse_update(self) -> None:
        """Refuse an update that may not begin.

        Raises:
            UsageError: an update is under way, or nothing is tracked.
            RuntimeError: an earlier update was left by an exception.
        """
        if self.updates.under_way:
            raise UsageError("s.update() inside of s.update()")
        if self.step < 0:
            raise UsageError(
                "nothing is tracked: s.track(model=…, opt=…) comes before the first step"
            )
        self.refuse_void()

    def refuse_unreduced(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Refuse a step whose gradients this rank has not exchanged. torch says so when the next
        forward begins; by then each replica would have been changed by gradients of its own.

        Raises:
            UsageError: always.
        """
        if late := sorted(self.group.wrappers.late):
            more = f" and {len(late) - 3} more" if len(late) > 3 else ""
            raise UsageError(
                f"parameters were unfrozen after they were wrapped ({', '.join(late[:3])}{more}): "
                "DDP exchanges the gradients of what trained then, and each rank would train these "
                "by its own. Wrap anew where you unfreeze: net = s.ddp(model)"
            )
        without = {n: p for n, p in wrapper.module.named_parameters() if p.grad is None}
        # What was frozen after it was wrapped is waited for, too.
        unused = [n for n, p in without.items() if p.requires_grad] or list(without) or ["some"]
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        raise UsageError(
            "the gradients of this step were not exchanged between the ranks, since the loss does "
            f"not depend on all parameters that DDP waits for ({', '.join(unused[:3])}{more}): "
            "wrap with s.ddp(model, find_unused_parameters=True), or freeze what is not used "
            "before s.ddp"
        )

    def compare_ranks(self) -> None:
        """Compare this rank with the others, before an update.

        Raises:
            Interrupted: replicas differ, and what differs is healed.
        """
        if self.watch is not None:
            self.watch.waits_in_update()
        replicas, witness, view = self.guards.replicas, self.guards.witness, self.group.view
        words = self.loaders.words(view.generation)
        words = words._replace(certified=self.healer.certified_copy + 1)
        sent = self.group.wrappers.sent_buffers
        checksums = Checksums(
            self.healer.replica_words,
            lambda: self.healer.buffer_words(sent()),
            self._fixed_words,
            self.healer.modules,
        )
        uneven = self.weights.uneven
        fault = replicas.compare(self.group, self.step, words, checksums, uneven=uneven)
        if fault is not None:
            recovers = "recovery" in self.where.parts and "state" in self.where.parts
            correction = witness.judge(fault) if recovers else Correction.TELL
            if correction is not Correction.TELL:
                self._correct(fault, correction)
        elif replicas.found_equal(self.step) and view.size >= 2 * view.replica_size:
            witness.agreed(self.step)
            self.healer.certify(witness.certified, leads=self.group.rank == 0)

    def _fixed_words(self) -> dict[str, int]:
        """Return checksums by name of the program's models that do not train."""
        tracked = self.healer.tracked
        if tracked is None or tracked.may_hold_more():
            return {}
        with ends_no_training():
            return fixed_models(inspect.currentframe(), tracked.parameter_ids())
        return {}

    def _correct(self, fault: ReplicaFault, correction: Correction) -> None:
        """Leave the block so that the next world heals what differs. The gradients of this step
        were made with it, and are dropped.

        Raises:
            Interrupted: always.
        """
        group, mesh = self.group, self.mesh
        reason = correction_line(fault, correction, group.view)
        if correction is Correction.GO_BACK:
            self.healer.go_back(fault.certified, reason)
        elif group.rank in fault.ranks:
            self.healer.distrust(f"seat {self.where.seat} differs from the other replicas")
        self.healer.doubt(self.guards.witness.certified, leads=group.rank == 0)
        # The first that leaves cuts the others off: by then all of them know what differs.
        with contextlib.suppress(RuntimeError):
            group.together()
        healed = fault.ranks if correction is Correction.HEAL else ()
        nodes = dict.fromkeys(group.view.members[rank].peer.node for rank in healed)
        mesh.over(GenerationEnd(group.view.generation, reason, wrong_nodes=tuple(nodes)))
        raise Interrupted(reason)

    def leave_if_cut(self) -> None:
        """Leave the block where a collective may have failed, unless the world goes on: a loop that
        caught its error would commit a gradient that was reduced in part, and the others would be
        healed from it; a function that did would return in the middle of a training.

        Raises:
            Interrupted: the world is over.
        """
        mesh = self.mesh
        if mesh.end is None and not mesh.evicted:
            mesh.wait_for_end(PEER_WORD_SECONDS)
        end = mesh.end
        # Ranks leave for one that joins when their steps are done; this one is, if the world was
        # ended after it.
        joins = end is not None and end.kind == "join" and self.step < end.step
        if (end is None or joins) and not mesh.evicted:
            return
        reason = mesh.evicted or (end.reason if end is not None else "")
        # In most programs no error was swallowed: the end came after the last collective.
        if self.group.rank == 0:
            log.warning(
                "step %d is not committed: its world had ended before s.update() (%s)",
                self.step,
                reason,
            )
        raise Interrupted(reason)

    def come_through(self) -> None:
        """Wait until all ranks of a model in parts have their gradients."""
        if self.watch is not None:
            self.watch.waits_in_update()
        group = self.group
        try:
            come_through(
                self.mesh,
                group.view,
                self.status("running"),
                group.together,
                self.options.abort_timeout,
            )
        except BaseException:
            self.updates.under_way = False
            raise

    def refuse_void(self) -> None:
        """Refuse to go on with half an update, for a program that caught what it was left by.

        Raises:
            RuntimeError: an update was left by an exception.
        """
        if self.healer.progress.dirty:
            raise RuntimeError("an earlier s.update() was left by an exception: the state is void")

    def returned(self) -> None:
        """Warn of a function that has returned, and may have counted its steps by itself.

        Raises:
            Interrupted: the end of its world broke its step off.
        """
        loaders = self.loaders.opened.values()
        is_over = any(one.end is not None and one.next >= one.end for one in loaders)
        # A loop that was left with a batch over, by an error that the program caught around it.
        is_cut = self.group.sockets.lost() or self.mesh.is_left
        if is_cut and self.updates.is_broken_off and not is_over:
            self.leave_if_cut()
        entered = self.healer.last.get("step", 0)
        if self.group.rank == 0 and 0 < entered == self.step:
            self.loaders.warn_if_left_aside(self.group.view.generation, entered)
        if self.group.rank == 0 and not is_over:
            self.updates.warn_if_left_early(entered)

    def spent(self) -> None:
        """Note that a loader has no batch left. A checkpoint that was skipped, since the one before
        was still being written, may be the last one that is due: it is made up for here, before the
        program does anything else with its model. One that is written meanwhile holds up nothing: a
        program may open a loader for each epoch."""
        self.updates.spent()
        if self.healer.keeps_copies and self._wait_for(self.healer.save_decided):
            self.healer.save_skipped()

    def write_out(self) -> bool:
        """Wait for the checkpoint under way: it is written by the ranks of this world together.
        Return False where the world is over before."""
        return self._wait_for(self.healer.written)

    def _wait_for(self, is_so: Callable[[float], bool]) -> bool:
        """Wait for what takes up to so many seconds at a time; return False where the world is over
        before."""
        pause = self.watch.pause() if self.watch is not None else contextlib.nullcontext()
        with pause:
            while not is_so(WRITING_SECONDS):
                if self.mesh.end is not None or self.mesh.evicted:
                    return False
        return True


def _joining(seats: list[int]) -> str:
    """Return which seats join, in words; empty: none."""
    if len(seats) > 1:
        return f"seats {', '.join(map(str, seats))} join"
    return f"seat {seats[0]} joins" if seats else ""
