"""What the re-executable block is given: the world it runs in, and the doors to all parts."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slurm_resilience.errors import UsageError
from slurm_resilience.launcher import control_socket
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import GenerationEnd, PeerStatus, View
from slurm_resilience.training import compat, inject
from slurm_resilience.training.data.gradient_weights import GradientWeights
from slurm_resilience.training.loaders import Loaders
from slurm_resilience.training.once_cache import OnceCache
from slurm_resilience.training.options import Options
from slurm_resilience.training.process_group import ProcessGroups
from slurm_resilience.training.rank_environment import RankEnvironment
from slurm_resilience.training.recovery.commit_gate import come_through
from slurm_resilience.training.recovery.exceptions import Interrupted
from slurm_resilience.training.recovery.healer import Healer
from slurm_resilience.training.watch import Watch, listen
from slurm_resilience.training.watch.progress import COLLECTIVE

T = TypeVar("T")
MANY_BATCHES = 100
"""After so many without an update one was forgotten."""
END = object()
"""In the place of a batch: there is none left."""
log = logging.getLogger("sres.training")

WRITING_SECONDS = 0.1
"""While the last checkpoint is written, the end of its world is looked for this often."""


class Update:
    """The commit point. What happens inside is finished, or this rank's state is void."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session._begin_update()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._session._inside = False
        if kind is None:
            self._session._commit()


class Session:
    """One process's part in the training. It outlives the block: `once` keeps what was built."""

    _mesh: Mesh
    """Set once this process has joined the others."""

    def __init__(self, place: RankEnvironment, options: Options) -> None:
        self._place = place
        self._options = options
        self._built = OnceCache()
        self._group: ProcessGroups | None = None
        self._view: View | None = None
        self._inside = False
        self._given = 0
        self._committed = False
        self._updates: int | None = None
        """Since a loader gave a batch; None: no loop over a loader is under way."""
        self._told_two = False
        self._update = Update(self)
        self._healer = Healer(options, place)
        self._loaders = Loaders(self._healer.progress, cached="data" in place.parts)
        self._shares = GradientWeights()
        self._stop_listening: list[Callable[[], None]] = []
        self._armed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.attempt = 0
        """How often this process has entered the block."""
        self.watch: Watch | None = None
        """Progress, hang limit and stragglers; None: switched off."""
        self.last_end: GenerationEnd | None = None
        """Why the block was entered again; None at first."""

    # -- the world ----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's rank in the current world."""
        return self._now().rank

    @property
    def world(self) -> int:
        """Ranks in the current world; may change whenever the block is entered."""
        return self._now().view.size

    @property
    def seat(self) -> int:
        """This process's seat: its rank in the full world. Never changes."""
        return self._place.seat

    @property
    def seats(self) -> int:
        """Ranks of the full world."""
        return self._place.seats

    @property
    def generation(self) -> int:
        """How many worlds there were, this one included."""
        return self._now().view.counter

    @property
    def step(self) -> int:
        """Committed optimizer steps."""
        return self._healer.progress.step

    @property
    def after_update(self) -> bool:
        """Has the loop committed its batch, and not asked for the next one yet?"""
        return bool(self._updates)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if self._options.uses_cuda:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def mesh(self, replicate: int | None = None, shard: int | None = None) -> DeviceMesh:
        """The device mesh of this world, for `fully_shard`: ``(replicate, shard)``.

        Args:
            replicate: copies of the model; default: as many as fit.
            shard: ranks that share one copy; default: `replica_size` of `resilient`.

        Raises:
            UsageError: the sizes do not multiply to the world.
        """
        size = self.world
        shard = shard or self._options.replica_size
        replicate = replicate or size // shard
        if replicate * shard != size:
            raise UsageError(f"a mesh of {replicate} x {shard} does not hold {size} ranks")
        names = ("replicate", "shard")
        with self._now().more():
            return init_device_mesh(self.device.type, (replicate, shard), mesh_dim_names=names)

    def new_group(self, ranks: list[int] | None = None, **how: Any) -> dist.ProcessGroup | None:
        """`torch.distributed.new_group`, such that it is left with the others after a fault."""
        with self._now().more():
            group: dist.ProcessGroup | None = dist.new_group(ranks, **how)
        return group

    # -- what is built and healed -------------------------------------------------------------

    def once(self, build: Callable[..., T], *args: Any) -> T:
        """Call ``build`` the first time; afterwards give what it gave, also when the block is
        entered again. Not for what holds a process group (DDP, FSDP): build those anew.

        Args:
            build: known again by its place in the program. In a loop it is one function: give it
                what differs as an argument.
            args: for ``build``; with others something else is built.
        """
        found: T = self._built.once(build, *args)
        return found

    def track(self, **objects: Any) -> int:
        """Name what has to survive; it is brought to the newest step that anybody has: from a
        peer's memory, else from a copy in memory, else from the checkpoint on disk.

        Every rank must come here with the same names, before its first forward.

        Args:
            objects: modules (FSDP ones after `fully_shard`, DDP ones before wrapping), optimizers,
                schedulers, scalers, tensors, anything with `state_dict` and `load_state_dict`.

        Returns:
            Committed optimizer steps that the state contains.
        """
        group = self._now()
        self._check()
        self._point("recovery")
        self._healer.heal(objects, group, self._mesh)
        self._arm_backward(objects)
        self._say_running()
        control_socket.ready()
        self._loaders.healed()
        return self.step

    def ddp(self, module: nn.Module, **how: Any) -> nn.parallel.DistributedDataParallel:
        """Wrap a module for this world. Its weights were made equal by `track`, so nothing is sent.

        Args:
            module: a tracked module.
            how: arguments of DistributedDataParallel. ``find_unused_parameters=True`` keeps its
                buckets as they are, so that a resumed run adds up gradients in the same order and
                equals an undisturbed one to the last bit.
        """
        how.setdefault("init_sync", not self._healer.has(module))
        wrapped = nn.parallel.DistributedDataParallel(module, **how)
        self._now().hold(wrapped)
        self._shares.wrap(wrapped)
        if self.watch is not None:
            self._stop_listening.append(listen(self.watch, wrapped))
        return wrapped

    def loader(
        self,
        source: Any,
        global_batch: int,
        *,
        steps: int | None = None,
        name: str = "data",
        **how: Any,
    ) -> Iterator[Any]:
        """This rank's share of each global batch, from the first one that is not committed.

        Args:
            source: a Dataset, a DataLoader, or an iterable.
            global_batch: samples of one step over all ranks; kept when the world changes.
            steps: end after this many batches in all; default: as the source and ``epochs`` say.
            name: tells several loaders apart.
            how: further arguments of `ReplayLoader`.
        """
        loader = self._loaders.open(name, source, global_batch, steps, self._now(), how)
        self._shares.expect(loader, how.get("drop_last", True))
        return self._batches(loader)

    def _batches(self, loader: Any) -> Iterator[Any]:
        batches = iter(loader)
        try:
            while (batch := self._next(batches)) is not END:
                self._shares.given(loader)
                yield batch
        finally:
            self._updates = None

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch, or `END`."""
        self.check()
        self._refuse_void()
        batch = next(batches, END)
        if batch is END:
            self._miss_updates()
            return END
        self._given += 1
        self._updates = 0
        if self._given == MANY_BATCHES:
            self._miss_updates()
        self._check()
        if self.watch is not None:
            self.watch.begin(self.step)
        self._point("before-backward")
        return batch

    def _miss_updates(self) -> None:
        if self._given and not self._committed:
            log.warning(
                "%d batches and not one `with s.update():` around opt.step(): no step is kept",
                self._given,
            )
            self._committed = True

    def _count_update(self) -> None:
        """Say once that a batch has two updates: a fault between them would skip the second."""
        self._committed = True
        if self._updates is None:
            return
        self._updates += 1
        if self._updates == 2 and not self._told_two:
            self._told_two = True
            if self.rank == 0:
                log.warning(
                    "two `with s.update():` for one batch: a fault between them skips the second; "
                    "put all optimizers of a batch into one"
                )

    @property
    def healing(self) -> dict[str, Any]:
        """What the last `track` did: ``kind``, ``step``, ``reason``, ``bytes``, ``seconds``."""
        return dict(self._healer.last)

    # -- the commit point ---------------------------------------------------------------------

    def update(self) -> Update:
        """``with s.update(): opt.step()``: the only place where the state may change.

        A fault before it leaves the state of the last step; a fault inside makes this rank's state
        void, and it is healed from one that finished. Collectives (gradient clipping over shards)
        belong before it: a fault in them would void every rank at once.
        """
        return self._update

    def _begin_update(self) -> None:
        if self._inside:
            raise UsageError("s.update() inside of s.update()")
        if self.step < 0:
            raise UsageError(
                "nothing is tracked: s.track(model=…, opt=…) comes before the first step"
            )
        self._refuse_void()
        # Whoever is here has complete gradients, and another may have committed already: from now
        # on the step is finished even if the world ends meanwhile.
        self._inside = True
        if self._options.replica_size > 1:
            self._come_through()
        if self.watch is not None:
            self.watch.mark("update")
        self._healer.progress.dirty = True
        self._point("update")

    def _come_through(self) -> None:
        """A model in parts: all finish the step, or nobody does."""
        if self.watch is not None:
            self.watch.mark(COLLECTIVE)
        group = self._now()
        try:
            come_through(
                self._mesh,
                group.view,
                self._status("running"),
                group.together,
                self._options.abort_timeout,
            )
        except BaseException:
            self._inside = False
            raise

    def _refuse_void(self) -> None:
        """Whoever caught what an update was left by must not go on with half of it."""
        if self._healer.progress.dirty:
            raise RuntimeError("an earlier s.update() was left by an exception: the state is void")

    def _commit(self) -> None:
        progress = self._healer.progress
        self._loaders.commit()
        progress.step += 1
        self._count_update()
        progress.dirty = False
        self._healer.committed()
        self._shares.committed()
        if self.watch is not None:
            self.watch.commit(progress.step)
        self._point("after-update")
        if not self._loaders:
            self.check()

    def check(self) -> None:
        """Between two steps: leave the block here if its world is over, and let newcomers in.

        `loader` calls it before each batch, not `update` at its end: what a loop does after its
        update (a log line) is done when somebody joins, if it is short. A loop without `loader`
        is left at the end of `update`, or where it calls this itself.
        """
        if self._mesh.end is None and self.rank == 0 and self._mesh.knock.is_set():
            newcomers = self._mesh.newcomers()
            if newcomers:
                seats = ", ".join(str(peer.seat) for peer in newcomers)
                text = f"seat {seats} joins after step {self.step}"
                self._mesh.over(GenerationEnd(self._now().view.generation, text, "", "join"))
        self._check()

    def _check(self) -> None:
        """Leave the block if its world is over."""
        end = self._mesh.end
        if end is not None or self._mesh.evicted:
            raise Interrupted(end.reason if end else self._mesh.evicted)

    def _arm_backward(self, objects: dict[str, Any]) -> None:
        """For drills: the backward of a tracked module is a place for a fault, under DDP or not."""
        for module in objects.values():
            if isinstance(module, nn.Module) and module not in self._armed and inject.armed():
                module.register_full_backward_pre_hook(lambda *_: self._point("backward"))
                self._armed.add(module)

    def _point(self, phase: inject.Phase) -> None:
        if inject.possible():
            inject.point(phase, step=self.step, rank=self.rank)

    # -- used by recover ----------------------------------------------------------------------

    def _now(self) -> ProcessGroups:
        if self._group is None:
            raise UsageError("the session has no world outside of the block")
        return self._group

    def _enter(self, group: ProcessGroups) -> None:
        self._group, self._view = group, group.view
        self.attempt += 1
        self._shares.enter()
        if self.watch is not None:
            self.watch.enter(self._mesh.me.id, self._place.seat, compat.collective_counter())

    def _leave(self) -> None:
        self._inside = False
        for stop in self._stop_listening:
            stop()
        self._stop_listening = []
        if self._group is not None:
            for thing in self._healer.released():
                self._group.hold(thing)
            self._group.leave()
        self._group = None
        self._shares.enter()

    def _write_out(self) -> None:
        """Wait for the checkpoint under way: it is written by the ranks of this world together."""
        pause = self.watch.pause() if self.watch is not None else contextlib.nullcontext()
        with pause:
            while not self._healer.written(WRITING_SECONDS):
                if self._mesh.end is not None or self._mesh.evicted:
                    return

    def _status(self, phase: Any) -> PeerStatus:
        return self._healer.status(phase, self._view)

    def _say_running(self) -> None:
        self._mesh.say(self._status("running"))

    def _finish(self) -> None:
        self._loaders.close()
        self._healer.close()
