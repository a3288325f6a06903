"""Bring every member's state to one step, and keep what the next fault will need."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import PeerStatus, Phase, View
from slurm_resilience.training import state
from slurm_resilience.training.guards.replica_check import refuse_other_frozen
from slurm_resilience.training.options import Options
from slurm_resilience.training.process_group import ProcessGroups
from slurm_resilience.training.process_group.form import GroupUse
from slurm_resilience.training.rank_environment import RankEnvironment
from slurm_resilience.training.recovery.checkpoint_look import CheckpointLook
from slurm_resilience.training.recovery.exceptions import Unrecoverable
from slurm_resilience.training.state import HealFailed, parts, rng
from slurm_resilience.training.state.switches import Switches

log = logging.getLogger("sres.training")

CERTIFIED_FROM_STEPS = 10
"""Steps between copies in memory from which on each is certified, by a comparison of its own."""
LOADED = (
    ", in the function, before s.track (weights that it loads whenever it is called? Load them in "
    "what s.once builds)"
)
"""Added where the state was changed since the function was called again."""
OWN = "sres"
"""The name under which the step and the data's position are tracked beside the user's objects."""


class HealProgress:
    """The committed step and the position in the data: they travel with the state."""

    def __init__(self) -> None:
        self.step = -1
        """Committed optimizer steps; -1: no state yet."""
        self.positions: dict[str, dict[str, Any]] = {}
        """State of each loader at that step."""
        self.dirty = False

    def state_dict(self) -> dict[str, Any]:
        """Return what travels."""
        return {"step": self.step, "positions": dict(self.positions)}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Take what came."""
        self.step = int(values["step"])
        self.positions = dict(values["positions"])


class Healer:
    """The state of one process, over all generations."""

    def __init__(self, options: Options, where: RankEnvironment) -> None:
        self._options = options
        self._where = where
        self.tracked: state.Tracked | None = None
        """The state as one; None: nothing is tracked yet."""
        self._names: dict[str, Any] = {}
        self._released: list[Any] = []
        self._left_rng: dict[str, Any] | None = None
        self._disk_group: dist.ProcessGroup | None = None
        self._partner: Any = None
        self._position = -1
        self._healed = -1
        """The generation whose members were healed last."""
        self._switches: Switches | None = None
        self._digest = ""
        """Checksum of the state as it was told last; empty: not asked for."""
        self._outside = ""
        """Changes outside of an update since the last healing; empty: none."""
        self.progress = HealProgress()
        self.last: dict[str, Any] = {}
        """Result of the last healing, for the log and the bench."""

    @functools.cached_property
    def _checkpoint_look(self) -> CheckpointLook | None:
        keeper = self._options.checkpointer
        return CheckpointLook(keeper, self._options.abort_timeout) if keeper is not None else None

    @property
    def keeps_copies(self) -> bool:
        """Tell whether some steps are copied, to memory or to a disk."""
        return self._options.checkpointer is not None or self._options.partner_every > 0

    def has(self, module: torch.nn.Module) -> bool:
        """Tell whether this module is tracked (so that its replicas are equal)."""
        return any(thing is module for thing in self._names.values())

    def lacks(self, module: torch.nn.Module) -> tuple[str, ...]:
        """Return the names of the parameters of a module that train, and are not state; none before
        the state is known."""
        if self.tracked is None or self.tracked.may_hold_more():
            return ()
        known = self.tracked.parameter_ids()
        named = module.named_parameters()
        return tuple(name for name, one in named if one.requires_grad and id(one) not in known)

    def settle(self) -> None:
        """Look for changes outside of updates, and sum up the state where that is asked for.

        The plan is made from what is said next: a change that is found later comes too late.
        """
        progress, self._digest = self.progress, ""
        if self._partner is not None:
            self._partner.freeze()
        if self.tracked is None or progress.step < 0:
            return
        self.tracked.note_options()
        self._note_changes(self.tracked.changed())
        if self._options.checksum and not progress.dirty:
            self.tracked.rollback()
            self._digest = self.tracked.digest()

    def switch_on_again(self, view: View) -> None:
        """Turn on what a fault left off, so that the block finds its modules as at first."""
        if view.generation != self._healed and self._switches is not None:
            self._switches.on_again()

    def status(self, phase: Phase, view: View | None) -> PeerStatus:
        """Return what the others should know of this process's state."""
        progress = self.progress
        look, has_state = self._checkpoint_look, progress.step >= 0
        return PeerStatus(
            phase=phase,
            generation=view.generation if view else 0,
            step=progress.step,
            dirty=progress.dirty,
            position=self._position,
            digest=self._digest if phase != "running" else "",
            snapshot=self._partner.step if self._partner else -1,
            keeps=self._partner.keeps if self._partner else (),
            disk=-1 if look is None or phase == "running" else look.newest(has_state=has_state),
        )

    def heal(self, objects: dict[str, Any], group: ProcessGroups, mesh: Mesh) -> int:
        """Make every member's state equal; all members call this with the same names.

        Returns:
            The lowest rank that was not healed by others; -1: all were.

        Raises:
            UsageError: it was called in this world already, or the objects are sharded in another
                way than `replica_size` says, or frozen parameters differ between the ranks.
            Unrecoverable: state was lost and nothing has it.
            HealFailed: this rank's state changed after it was told to the others.
            RuntimeError: a member went away meanwhile.
        """
        view, rank = group.view, group.rank
        if view.generation == self._healed:
            raise UsageError("s.track is called once in a block, with everything that is tracked")
        self._healed = view.generation
        parts.check(objects, self._options.replica_size)
        own, left_rng = self.progress.step, self._left_rng
        told = self._outside
        self._tell_thawed(view, rank)
        tracked = self._adopt(objects, view, rank)
        if self._outside:
            log.warning("%s: this rank is healed anew", self._outside)
        self._open(group)
        found = state.plan(view, checksum=self._options.checksum)
        if "state" not in self._where.parts and found.kind == "peers":
            found = self._without_peers(found)
        if found.kind in ("disk", "impossible") and self._options.checkpointer is not None:
            found = self._ask_disk(found)
        if rank == 0 and found.kind != "nothing":
            log.warning("generation %d: %s", view.counter, found.reason)
            if found.kind == "fresh" and any(m.peer.incarnation for m in view.members):
                advice = " (give `resilient` a Checkpointer)" * (self._options.checkpointer is None)
                log.error(
                    "every process that had state is gone and there is no checkpoint: "
                    "training begins from scratch%s",
                    advice,
                )
        report = None
        if found.kind == "impossible":
            trouble, lost, rest = found.reason.partition(", ")
            why = f" ({self._outside})" if self._outside else ""
            raise Unrecoverable(trouble + why + lost + rest)
        late = self._outside != told
        if late and found.kind in ("nothing", "peers") and not found.incoming(rank):
            # The others take its state for that of the step; its next status says the truth.
            raise HealFailed(f"{self._outside}: plan again")
        if found.kind in ("peers", "fresh", "memory"):
            memory = found.kind == "memory"
            receives = bool(found.incoming(rank))
            if receives and not memory:
                self._say_void(view, mesh)
            self.progress.dirty = self.progress.dirty or memory or receives
            report = state.transfer(
                found,
                view,
                rank,
                tracked,
                dist.group.WORLD,
                verify=self._options.checksum and not memory,
                partner=self._partner,
            )
        elif found.kind == "disk":
            self.progress.dirty = True
            values = self._on_disk(tracked)
            self._options.checkpointer.load(found.step, values, self._disk_group)
        repeats_nothing = found.step == own + 1 and own >= 0
        if repeats_nothing and found.kind != "disk" and left_rng is not None:
            # The step that was lost is not repeated: what it drew stays drawn.
            rng.write(left_rng)
        self.progress.step = found.step
        self.progress.dirty = False
        self._outside = ""
        self._position = view.position(rank)
        self._begin_at(found.step)
        # A DDP of the user's own sends the parameters around when it is made, now.
        tracked.mark(values=True)
        self._switches = Switches(tracked.objects)
        if self._options.trainable_only:
            refuse_other_frozen(group, tracked.frozen_words())
        self.last = {"kind": found.kind, "step": found.step, "reason": found.reason}
        if report is not None:
            self.last |= {"bytes": report.received, "seconds": report.seconds}
        self._save_anew(view, rank, tracked)
        return found.first_whole(view.size)

    def _say_void(self, view: View, mesh: Mesh) -> None:
        """Tell the others that this rank's older state is about to be written over: the one that it
        comes from may hold the last copy now, and is waited for longer."""
        progress = self.progress
        if progress.dirty or progress.step < 0 or self._position < 0:
            return  # it does not count as a holder
        progress.dirty = True
        mesh.say(self.status("running", view))

    def _ask_disk(self, found: state.HealPlan) -> state.HealPlan:
        """Look together for the newest checkpoint: members' statuses may be older. (All have the
        same plan, so all come here.)"""
        step = self._options.checkpointer.latest(self._disk_group)
        if step < 0 or (found.kind == "disk" and step == found.step):
            return found
        trouble = found.reason.partition(":")[0]
        reason = f"{trouble}: all read the checkpoint of step {step}"
        return state.HealPlan("disk", step, reason)

    def _without_peers(self, found: state.HealPlan) -> state.HealPlan:
        """Part `state` is off: what no peer may give comes from the disk."""
        keeper = self._options.checkpointer
        step = keeper.latest(self._disk_group) if keeper is not None else -1
        if step < 0:
            return found  # nothing else has it
        return state.HealPlan("disk", step, f"peer state is off: the checkpoint of step {step}")

    def _adopt(self, objects: dict[str, Any], view: View, rank: int) -> state.Tracked:
        """Track these objects; what the block built anew gets the old ones' state."""
        # A rank that now holds another part of the model has nothing that the new objects need.
        if view.replica_size > 1 and self._position not in (-1, view.position(rank)):
            self.progress.dirty = True
        names = {**objects, OWN: self.progress}
        old = self.tracked
        same = old is not None and self._names.keys() == names.keys()
        if same and all(self._names[name] is names[name] for name in names):
            assert old is not None
            # Void state too: its gradients would be added to the next step's.
            self._note_changes(old.rollback(), LOADED)
            return old
        if old is not None and _has_other_schedule(names, self._names):
            old.put_options_back()
        new = state.Tracked(names, trainable_only=self._options.trainable_only)
        if old is not None and self.progress.step >= 0 and not self.progress.dirty:
            self._note_changes(old.rollback(), LOADED)
            if not self.progress.dirty:
                _copy(old, new)
        if old is not None:
            # FSDP modules hold the groups of the world that they were built in.
            self._released.append(old)
        self.tracked, self._names, self._switches = new, names, None
        return new

    def _tell_thawed(self, view: View, rank: int) -> None:
        """Say what takes gradients again: the first rank does that was in the last world."""
        thawed = self._switches.thawed if self._switches is not None else ()
        old = [number for number, member in enumerate(view.members) if member.status.generation]
        if thawed and old and rank == old[0]:
            log.warning(
                "%s: requires_grad is True again, as at s.track (who freezes later: by s.step)",
                _named(thawed),
            )

    def _note_changes(self, changed: tuple[str, ...], where: str = "") -> None:
        if changed and not self.progress.dirty:
            self._outside = f"{_named(changed)} changed outside of s.update(){where}"
            self.progress.dirty = True

    def _open(self, group: ProcessGroups) -> None:
        """Make groups of their own for what goes on beside the steps."""
        if self._options.checkpointer is not None:
            with group.more(for_collectives=True, use=GroupUse.BESIDE):
                self._disk_group = dist.new_group(backend="gloo")
        if self._options.partner_every:
            with group.more(use=GroupUse.BESIDE):
                beside = dist.new_group(backend="gloo")
            if self._partner is None:
                self._partner = state.Partner(
                    self._options.partner_every, certified=self._certifies_copies
                )
            self._partner.open(group.view, group.rank, beside)

    def committed(self) -> None:
        """After a step that is marked: keep a copy where one is due. Not without `keeps_copies`."""
        tracked, step = self.tracked, self.progress.step
        if tracked is None:
            return
        self._save(tracked)
        if self._partner is not None and self._partner.due(step):
            self._partner.snapshot(step, tracked)

    def save_last(self) -> None:
        """Begin a checkpoint of the state as it is: the training ends."""
        if self._options.checkpointer is not None and self.tracked is not None:
            objects = self._on_disk(self.tracked)
            self._options.checkpointer.save(self.progress.step, objects, self._disk_group)

    def save_alone(self) -> None:
        """Write a checkpoint of the state without the other ranks, all of which have it too.
        Outside of the block: what a broken step has left is put back."""
        if self.tracked is None:
            return
        self._note_changes(self.tracked.rollback())
        if self.progress.dirty:
            log.warning("%s: it is not saved", self._outside or "half an update")
            return
        keeper = self._options.checkpointer
        keeper.save(self.progress.step, self._on_disk(self.tracked), None)
        keeper.wait()

    def has_saved(self, step: int) -> bool:
        """Tell whether this process knows that the checkpoint of a step is there.

        Args:
            step: of the state.
        """
        counts = getattr(self._options.checkpointer, "counts", None)  # another one may not tell
        return counts is not None and counts.last == step and not counts.in_a_row

    def lacks_copy(self, step: int) -> bool:
        """Tell whether this process knows that the checkpoint of a step could not be written.

        Args:
            step: of the state.
        """
        return hasattr(self._options.checkpointer, "counts") and not self.has_saved(step)

    def _save_anew(self, view: View, rank: int, tracked: state.Tracked) -> None:
        """Begin a checkpoint at this world's first step, if one was due since the last that is
        there: the end of the world before broke it off. All members decide alike, by what all have
        said."""
        keeper, step = self._options.checkpointer, self.progress.step
        if keeper is None:
            return
        due = keeper.missing(step, max(member.status.disk for member in view.members))
        if due >= 0:
            if rank == 0 and due < step:
                log.info("a checkpoint of step %d is made: that of step %d is not there", step, due)
            keeper.save(step, self._on_disk(tracked), self._disk_group)

    def _save(self, tracked: state.Tracked) -> None:
        """Begin a checkpoint, if one is due."""
        keeper, step = self._options.checkpointer, self.progress.step
        if keeper is not None and keeper.due(step):
            keeper.save(step, self._on_disk(tracked), self._disk_group)

    def save_skipped(self) -> None:
        """Begin a checkpoint of the present step where the newest one was skipped in this world."""
        # Another one may not tell.
        counts = getattr(self._options.checkpointer, "counts", None)
        skipped_in = getattr(counts, "skipped_in", None)
        if skipped_in is not None and skipped_in is self._disk_group and not self.progress.dirty:
            self.save_last()

    def _on_disk(self, tracked: state.Tracked) -> dict[str, Any]:
        """Return what a checkpoint has: with each rank's random states, as every copy of the state,
        or the numbers of the first steps would come once more."""
        objects: dict[str, Any] = {**tracked.objects}
        if hasattr(self._options.checkpointer, "per_rank"):  # another one may not tell ranks apart
            objects["random states"] = rng.RandomStates()
        return objects

    # -- certified states ---------------------------------------------------------------------

    @property
    def _certifies_copies(self) -> bool:
        every, compared = self._options.partner_every, self._options.digest_every
        return compared != 0 and (every >= CERTIFIED_FROM_STEPS or (compared == 1 and every > 1))

    @functools.cached_property
    def certifies(self) -> bool:
        """Tell whether any copies are certified at all."""
        return self._certifies_copies or self._certifying_keeper is not None

    @property
    def _certifying_keeper(self) -> Any:
        """The checkpointer, if it is one that takes certificates."""
        keeper = self._options.checkpointer
        return keeper if hasattr(keeper, "certify") else None

    def is_certificate_due(self, step: int) -> bool:
        """Tell whether a copy was made one step ago, which a comparison after this one certifies.

        Args:
            step: committed steps, the same on every rank.
        """
        keeper, copied = self._certifying_keeper, step - 1
        if copied < 1:
            return False
        in_memory = self._certifies_copies and copied % self._options.partner_every == 0
        return in_memory or (keeper is not None and bool(keeper.due(copied)))

    def certify(self, until: int, *, leads: bool) -> None:
        """Take all copies up to a step for good: all replicas were equal later.

        Args:
            until: the step.
            leads: this rank writes it down for all.
        """
        if self._partner is not None:
            self._partner.certify(until)
        if self._certifying_keeper is not None:
            self._certifying_keeper.certify(until, leads=leads)

    @property
    def certified_copy(self) -> int:
        """The newest certified step that this rank has a copy of; -1: none."""
        in_memory = self._partner.certified if self._partner is not None else -1
        keeper = self._certifying_keeper
        return max(in_memory, keeper.certified if keeper is not None else -1)

    def _begin_at(self, step: int) -> None:
        if self._partner is not None:
            self._partner.begin_at(step)
        if self._certifying_keeper is not None:
            self._certifying_keeper.begin_at(step)

    def distrust(self, reason: str) -> None:
        """Have this rank healed from others: its state is whole, and wrong."""
        self._outside, self.progress.dirty = reason, True

    def go_back(self, step: int, reason: str) -> None:
        """Have this rank, like all others, go back to a certified step."""
        self.distrust(reason)
        if self._partner is not None:
            self._partner.drop_after(step)

    def doubt(self, after: int, *, leads: bool) -> None:
        """Use checkpoints that are newer than a step only where there is nothing else."""
        if self._certifying_keeper is not None:
            self._certifying_keeper.doubt(after, leads=leads)

    def flip_bit(self) -> None:
        """Do as a faulty chip does, for a drill."""
        if self.tracked is not None:
            self.tracked.flip_bit()

    @property
    def modules(self) -> tuple[str, ...]:
        """Names under which modules are tracked."""
        return self.tracked.modules() if self.tracked is not None else ()

    def replica_words(self) -> dict[str, int]:
        """Return checksums by name of what is equal on all replicas."""
        return self.tracked.replica_words() if self.tracked is not None else {}

    def buffer_words(self, but: Collection[int]) -> dict[str, int]:
        """Return checksums by name of buffers, but for those with these ids."""
        return self.tracked.buffer_words(but) if self.tracked is not None else {}

    def written(self, timeout: float) -> bool:
        """Tell whether no checkpoint is under way any more, after so many seconds at most."""
        keeper = self._options.checkpointer
        return keeper is None or keeper.wait(timeout)

    def save_decided(self, timeout: float) -> bool:
        """Tell whether all ranks know, after so many seconds at most, which checkpoints are written
        and which are skipped."""
        keeper = self._options.checkpointer
        return keeper is None or keeper.decided(timeout)

    def released(self) -> list[Any]:
        """Return what refers to the group that is being left, and must not be let go of at once."""
        self._left_rng = None
        with contextlib.suppress(RuntimeError):  # of a GPU that is gone
            self._left_rng = rng.read()
        gone, self._released = self._released, []
        if self._disk_group is not None:
            self._options.checkpointer.break_off()
            gone.append(self._disk_group)
            self._disk_group = None
        return gone

    def close(self) -> None:
        """Close what is open: the training is over."""
        if self._options.checkpointer is not None:
            self._options.checkpointer.close()


def _named(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _has_other_schedule(names: dict[str, Any], before: dict[str, Any]) -> bool:
    """Tell whether a schedule is tracked that was not before."""
    known = {id(one) for one in before.values()}
    kind = torch.optim.lr_scheduler.LRScheduler
    return any(isinstance(one, kind) and id(one) not in known for one in names.values())


def _copy(old: state.Tracked, new: state.Tracked) -> None:
    """From the objects of the last time to those that the block built now."""
    capture = old.capture()
    views = new.prepare(capture.descriptor)
    with torch.no_grad():
        for target, source in zip(views, capture.views, strict=True):
            target.copy_(source)
    new.finish(capture.descriptor, rng_too=False)
