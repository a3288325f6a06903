"""The session: what the block that `resilient` enters again is given."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slurm_resilience.errors import UsageError
from slurm_resilience.launcher import control_socket
from slurm_resilience.mesh.model import GenerationEnd
from slurm_resilience.training.data.data_module import is_data_module, training_part
from slurm_resilience.training.elastic.gradient_sums import is_sharded
from slurm_resilience.training.elastic.microbatch_step import MicrobatchStep
from slurm_resilience.training.elastic.microbatches import MicrobatchSteps, step_length
from slurm_resilience.training.elastic.rates import RatePolicy
from slurm_resilience.training.guards.code.calling_code import is_result_used
from slurm_resilience.training.guards.code.made_before import MadeBefore
from slurm_resilience.training.guards.replica_check import refuse_other_gradients
from slurm_resilience.training.once_cache import OnceCache
from slurm_resilience.training.participant import Participant
from slurm_resilience.training.process_group import kept_groups
from slurm_resilience.training.process_group.form import GroupUse
from slurm_resilience.training.recovery.commit_point import Update
from slurm_resilience.training.watch import Watch
from slurm_resilience.training.watch.progress import COLLECTIVE

T = TypeVar("T")
END = object()
"""In the place of a batch: there is none left."""


class Session:
    """One process's part in the training. It outlives the block: `once` keeps what was built."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._built = OnceCache(
            lambda: participant.attempt,
            kept_groups.refuse,
            lambda: participant.group.collectives(),
        )
        participant.guards.state.watch_kept(self._built.values)
        self._update = Update(participant)
        self._thread = threading.get_ident()
        self._is_up = False
        """The launcher was told that this process is."""
        self._made_before = MadeBefore()
        self._microbatches: weakref.WeakSet[MicrobatchSteps] = weakref.WeakSet()
        """Loops over microbatches that are under way."""

    # -- the world ----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank in the current world."""
        return self._participant.group.rank

    @property
    def world(self) -> int:
        """Ranks in the current world; may change whenever the block is entered."""
        return self._participant.group.view.size

    @property
    def seat(self) -> int:
        """This process's seat: its rank in the full world. Never changes."""
        return self._participant.where.seat

    @property
    def seats(self) -> int:
        """Ranks of the full world."""
        return self._participant.where.seats

    @property
    def generation(self) -> int:
        """Number of worlds so far, this one included."""
        return self._participant.group.view.counter

    @property
    def step(self) -> int:
        """Committed optimizer steps."""
        updates = self._participant.updates
        if not updates.asked_step and not self._participant.loaders.opened:
            self._participant.guards.state.step_is_asked()
        updates.ask()
        return self._participant.step

    @property
    def attempt(self) -> int:
        """Number of times that this process has entered the block."""
        return self._participant.attempt

    @property
    def last_end(self) -> GenerationEnd | None:
        """The reason for which the block was entered again; None at first."""
        return self._participant.last_end

    @property
    def watch(self) -> Watch | None:
        """Progress, hang limit and stragglers; None: switched off."""
        return self._participant.watch

    @property
    def after_update(self) -> bool:
        """True when the loop has committed its batch, and not asked for the next one yet."""
        return self._participant.updates.after_update

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if self._participant.options.uses_cuda:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def mesh(self, replicate: int | None = None, shard: int | None = None) -> DeviceMesh:
        """Make the device mesh of this world, for `fully_shard`: ``(replicate, shard)``.

        Args:
            replicate: copies of the model; default: as many as fit.
            shard: ranks that share one copy; default: `replica_size` of `resilient`.

        Raises:
            UsageError: the sizes do not multiply to the world.
        """
        size = self.world
        shard = shard or self._participant.options.replica_size
        replicate = replicate or size // shard
        if replicate * shard != size:
            raise UsageError(f"a mesh of {replicate} x {shard} does not hold {size} ranks")
        names = ("replicate", "shard")
        with self._participant.group.more(for_collectives=True, use=GroupUse.ALIKE):
            return init_device_mesh(self.device.type, (replicate, shard), mesh_dim_names=names)

    def new_group(
        self, ranks: list[int] | None = None, **group_kwargs: Any
    ) -> dist.ProcessGroup | None:
        """Make a `torch.distributed.new_group` that is left with the others after a fault."""
        with self._participant.group.more():
            group: dist.ProcessGroup | None = dist.new_group(ranks, **group_kwargs)
        return group

    # -- what is built and healed -------------------------------------------------------------

    def once(self, build: Callable[..., T], *args: Any) -> T:
        """Call ``build`` the first time; afterwards return what it returned, also when the block
        is entered again. Not for what holds a process group (DDP, FSDP): build those anew. Nor for
        what makes collectives: a replaced rank builds alone.

        Args:
            build: known again by its place in the program. In a loop it is one function: give it
                what differs as an argument.
            args: for ``build``; with others something else is built.

        Raises:
            UsageError: it holds a process group, or has made collectives.
        """
        found: T = self._built.once(build, *args)
        return found

    def track(self, **objects: Any) -> int:
        """Name what has to survive, and bring it to the newest step that any rank has: from a
        peer's memory, else from a copy in memory, else from the checkpoint on disk.

        Every rank must come here with the same names, before its first forward.

        Args:
            objects: modules (FSDP ones after `fully_shard`, DDP ones before wrapping), optimizers,
                schedulers, scalers, tensors, random generators, anything with `state_dict` and
                `load_state_dict`.

        Returns:
            Committed optimizer steps that the state contains.
        """
        participant = self._participant
        group = participant.group
        participant.check()
        participant.point("recovery")
        self._passes("track")
        self._made_before.tracks(group)
        first_whole = participant.healer.heal(objects, group, participant.mesh)
        participant.guards.witness.healed(participant.step)
        participant.guards.state.enter(
            participant.healer.tracked,
            objects,
            tell=group.rank == 0,
            leads=group.rank == first_whole,
            step=participant.step,
        )
        participant.hooks.arm_backward(objects.values())
        participant.say("running")
        if not self._is_up:
            # Once: a launcher that is held up has room for few messages, and the last one counts.
            self._is_up = True
            control_socket.ready()
        participant.loaders.healed()
        participant.guards.seeds.note()
        participant.guards.replicas.healed()
        if is_result_used(inspect.currentframe()):
            participant.updates.ask()
        participant.begin_steps()
        return participant.step

    def _passes(self, place: str) -> None:
        """Look at what the program has made before it came to a place in the function."""
        self._made_before.passed(place, self._participant.group, inspect.currentframe())

    def ddp(self, module: nn.Module, **ddp_kwargs: Any) -> nn.parallel.DistributedDataParallel:
        """Wrap a module for this world. Its weights were made equal by `track`, so nothing is sent.

        Args:
            module: a tracked module.
            ddp_kwargs: arguments of DistributedDataParallel. ``find_unused_parameters=True`` keeps
                its buckets as they are, so that a resumed run adds up gradients in the same order
                and equals an undisturbed one to the last bit.

        Raises:
            UsageError: the ranks train different parameters of it.
        """
        participant = self._participant
        self._passes("ddp")
        if not {"process_group", "device_mesh"} & ddp_kwargs.keys():
            refuse_other_gradients(participant.group, module)
        if self.attempt == 1 and self.rank == 0 and (names := participant.healer.lacks(module)):
            participant.guards.state.warn_of_untracked(module, names)
        participant.hooks.arm_backward([module])
        ddp_kwargs.setdefault("init_sync", not participant.healer.has(module))
        wrapped = nn.parallel.DistributedDataParallel(module, **ddp_kwargs)
        participant.group.hold(wrapped)
        participant.weights.wrap(wrapped)
        participant.guards.state.watch_hooks(wrapped)
        for steps in self._microbatches:
            steps.wrap_anew(wrapped)
        if participant.watch is not None:
            participant.hooks.listen(participant.watch, wrapped)
        return wrapped

    def loader(
        self,
        source: Any,
        global_batch: int,
        *,
        steps: int | None = None,
        name: str = "data",
        **loader_kwargs: Any,
    ) -> Iterator[Any]:
        """Yield this rank's share of each global batch, from the first one that is not committed.

        Args:
            source: a Dataset, a DataLoader, an iterable, or a Lightning DataModule, whose training
                dataset is taken.
            global_batch: samples of one step over all ranks; kept when the world changes.
            steps: end after this many batches in all; default: as the source and ``epochs`` say.
            name: tells several loaders apart.
            loader_kwargs: further arguments of `ReplayLoader`.
        """
        participant = self._participant
        self._passes("data")
        if is_data_module(source):
            source, collate_fn, weights = self.once(training_part, source)
            loader_kwargs = {"collate_fn": collate_fn, "weights": weights, **loader_kwargs}
        loader = participant.loaders.open(
            name, source, global_batch, steps, participant.group, loader_kwargs
        )
        participant.weights.expect(loader, loader_kwargs.get("drop_last", True))
        return self._batches(loader)

    def _batches(self, loader: Any) -> Iterator[Any]:
        batches, attempt = iter(loader), self.attempt
        participant = self._participant
        participant.updates.loop_begun()
        participant.guards.seeds.look(tell=self.rank == 0 and not participant.updates.asked_step)
        try:
            while (batch := self._next(batches)) is not END:
                participant.weights.given(loader)
                if participant.guards.replicas.looks_at_batches:
                    participant.guards.state.batch_given()
                    participant.loaders.look(loader, batch)
                yield batch
        finally:
            self._loop_left(attempt)

    def _loop_left(self, attempt: int) -> None:
        """Note the end of a loop. A traceback may hold one of an earlier world for a while."""
        if attempt == self.attempt:
            self._participant.updates.loop_left()

    def microbatches(
        self,
        source: Any,
        net: nn.Module | Sequence[nn.Module],
        *,
        size: int,
        count: int = 0,
        per_rank: int = 0,
        same_bits: bool = False,
        rate: RatePolicy = "constant",
        steps: int | None = None,
        name: str = "data",
        **loader_kwargs: Any,
    ) -> Iterator[MicrobatchStep]:
        """Yield steps, each made of microbatches that are numbered over the whole training. A step
        is the same whatever the number of ranks is; only who computes which microbatch changes::

            for step in s.microbatches(dataset, net, size=8, count=16):
                for x, y in step:
                    step.backward(loss(net(x), y))
                with s.update():
                    opt.step()

        Gradients begin at zero with each step, and are those of all ranks after its last microbatch
        (so no `zero_grad`, and no `no_sync`). Random numbers begin anew with each microbatch, from
        its number.

        Args:
            source: a Dataset.
            net: what is trained: as `ddp` wrapped it, or sharded by `fully_shard`, or a module that
                each rank holds whole; or a sequence of such.
            size: samples of a microbatch.
            count: microbatches of a step, all ranks together.
            per_rank: or those of each rank: then the batch changes with the world.
            same_bits: add up gradients in an order that does not depend on the number of ranks, so
                that the result is the same to the last bit.
            rate: for ``per_rank``: ``constant``, ``linear``, ``sqrt``, or a function of the samples
                of this world's step and of a full world's. It gives `MicrobatchStep.rate_factor`.
            steps: end after this many steps in all; with ``count`` only.
            name: tells several loaders apart.
            loader_kwargs: further arguments of `ReplayLoader`.

        Raises:
            UsageError: arguments that contradict each other, a source of whole batches; with
                ``same_bits``: a net that is sharded, ranks that compute in different ways.
        """
        participant = self._participant
        length = step_length(
            size=size,
            count=count,
            per_rank=per_rank,
            world=self.world,
            same_bits=same_bits,
            rate=rate,
        )
        self._passes("data")
        if steps is not None and not count:
            raise UsageError("steps= needs count=; with per_rank= say how long by epochs=")
        many = None if steps is None else steps * length
        nets = [net] if isinstance(net, nn.Module) else list(net)
        sharded = same_bits and is_sharded(nets)
        together = participant.options.replica_size if sharded else 1
        more = loader_kwargs | {"microbatches": length, "together": together}
        loader = participant.loaders.open(name, source, size, many, participant.group, more)
        found = MicrobatchSteps(
            nets,
            loader,
            size=size,
            length=length,
            full=count or per_rank * self.seats,
            same_bits=same_bits,
            rate=rate,
            device=self.device,
            together=together,
            group=self._same_shard(together),
            waits=self._waits_for_gradients,
            check=participant.check,
            asks=participant.updates.ask,
        )
        self._microbatches.add(found)
        return self._steps(loader, found)

    def _same_shard(self, together: int) -> dist.ProcessGroup | None:
        """Make the group of the ranks that hold the same shard as this one; None: all ranks."""
        if together == 1:
            return None
        found: dist.ProcessGroup | None = None
        with self._participant.group.more(for_collectives=True):
            for shard in range(together):
                ranks = list(range(shard, self.world, together))
                group = dist.new_group(ranks)
                found = group if self.rank in ranks else found
        return found

    def _waits_for_gradients(self) -> None:
        if self._participant.watch is not None:
            self._participant.watch.mark(COLLECTIVE)

    def _steps(self, loader: Any, found: MicrobatchSteps) -> Iterator[MicrobatchStep]:
        updates, batches, attempt = self._participant.updates, iter(loader), self.attempt
        updates.loop_begun()
        try:
            while True:
                first = loader.next
                given = self._next(batches)
                if given is END:
                    return
                updates.microbatch_step = found.step(first, given)
                yield updates.microbatch_step
        finally:
            self._loop_left(attempt)

    def _next(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, or `END`."""
        participant = self._participant
        if participant.mesh.news != participant.planned_end.seen_news:
            participant.change_world()
            participant.check()
        participant.refuse_void()
        if threading.get_ident() != self._thread:
            participant.loaders.read_elsewhere(tell=participant.group.rank == 0)
        batch = next(batches, END)
        if batch is END:
            participant.spent()
            return END
        participant.updates.batch_given()
        if participant.mesh.is_left:
            participant.check()
        if participant.watch is not None:
            participant.watch.begin(participant.step)
        participant.point("before-backward")
        return batch

    @property
    def healing(self) -> dict[str, Any]:
        """Result of the last `track`: ``kind``, ``step``, ``reason``, ``bytes``, ``seconds``."""
        return dict(self._participant.healer.last)

    @property
    def compared(self) -> dict[str, Any]:
        """Result of the last comparison of replicas: ``step``, ``equal``, ``seconds`` that it took,
        and ``every`` (steps until the next); empty before the first one."""
        return dict(self._participant.guards.replicas.last)

    # -- the commit point ---------------------------------------------------------------------

    def update(self) -> Update:
        """``with s.update(): opt.step()``: the only place where the state may change.

        A fault before it leaves the state of the last step; a fault inside makes this rank's state
        void, and it is healed from one that finished. Collectives (gradient clipping over shards)
        belong before it: a fault in them would void every rank at once.
        """
        return self._update

    def check(self) -> None:
        """Leave the block here, between two steps, if its world is over; let newcomers in, and go
        if this process was asked to.

        `loader` calls it before each batch, not `update` at its end: what a loop does after its
        update (a log line) is done when another rank joins, if it is short. A loop without
        `loader` is left at the end of `update`, or where it calls this itself.
        """
        participant = self._participant
        if participant.mesh.news != participant.planned_end.seen_news:
            participant.change_world(checks=True)
        participant.check()
