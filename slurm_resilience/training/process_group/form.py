"""Form torch's process groups for one generation, and leave them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import View
from slurm_resilience.training import compat
from slurm_resilience.training.process_group.abort import Graveyard
from slurm_resilience.training.process_group.ddp_wrappers import DdpWrappers
from slurm_resilience.training.process_group.device_meshes import DEVICE_MESHES
from slurm_resilience.training.process_group.gloo_interface import listen_beside_mesh
from slurm_resilience.training.process_group.group_sockets import GroupSockets
from slurm_resilience.training.process_group.mesh_store import MeshStore
from slurm_resilience.training.process_group.nccl import NcclPart

FORM_SECONDS_A_RANK = 0.05
FORM_SHARE = 0.7
"""Forming has a time limit of its own: gloo waits for a member that has just died, and nothing but
the limit ends that call. It is shorter than the abort timeout, after which the others would go on
without this process."""
GLOO_TRIES = 5
"""gloo gives a member that has just died so many times the limit that it was told (torch 2.13: 15.0
s with 3 s, 7 s with 1.4 s)."""


def form_limit(size: int, abort_timeout: float) -> float:
    """Seconds that forming may take.

    Args:
        size: ranks.
        abort_timeout: seconds in which a process must be out of a world that is over.
    """
    return max(FORM_SHARE * abort_timeout, FORM_SECONDS_A_RANK * size)


def least_abort_timeout(size: int, abort_timeout: float) -> float:
    """Return the abort timeout that leaves a world of this size the time to form."""
    return max(abort_timeout, form_limit(size, abort_timeout) / FORM_SHARE)


_graveyard = Graveyard()


class GroupUse(Enum):
    """The part of a sub-group in a training."""

    STEPS = "steps"
    """The collectives of the steps."""
    ALIKE = "alike"
    """The same, and all ranks of the world make as many calls in theirs: the copies and shards of a
    model."""
    BESIDE = "beside"
    """For other threads, beside the steps."""


class ProcessGroups:
    """The default process group of one generation."""

    def __init__(self, mesh: Mesh, view: View, rank: int, backend: str) -> None:
        self.view = view
        self.rank = rank
        self.backend = backend
        self._mesh = mesh
        # gloo, beside NCCL too, would lose a call whose writing fails.
        self.sockets = GroupSockets(both_ways=backend == "nccl")
        self.nccl = NcclPart(backend, view.size)
        self._holders: list[Any] = []
        self.wrappers = DdpWrappers()
        self._store: Any = None
        self._gone = False
        self._forming = False
        self._timeout = self._limit = 0.0
        self._uses: dict[Any, GroupUse] = {}
        """The sub-groups that were made in `more`."""

    def form(self, store: Any, timeout: float, limit: float) -> None:
        """Make it, and prove that every rank can talk to every other.

        Args:
            store: where the members exchange their addresses.
            timeout: seconds for collectives, once it is formed.
            limit: seconds for forming it.

        Raises:
            RuntimeError, dist.DistStoreError: a member is gone, or did not come.
        """
        DEVICE_MESHES.world_begins()
        self.wrappers.listen()
        # The mesh opens no socket meanwhile: what is new afterwards belongs to the group.
        # torch keeps the store for sub-groups, but not the Python half of it.
        self._store = store
        self._timeout, self._limit = timeout, limit
        self.sockets.begin()
        self._forming = True
        limit = min(limit, timeout)
        kind = self.backend
        if not dist.is_initialized():
            compat.number_groups_anew()
        dist.init_process_group(
            kind,
            store=store,
            rank=self.rank,
            world_size=self.view.size,
            timeout=timedelta(seconds=self._connect_limit(limit)),
        )
        self.adopt_sockets()
        compat.set_timeout(limit)
        self.together()
        self.adopt_sockets()
        compat.set_timeout(timeout)
        self._forming = False

    def _connect_limit(self, limit: float) -> float:
        """Return the limit to be told for what may take `limit` seconds. Other stores than the
        mesh's hold each of their waits to it, and those need all of the time."""
        tries = "gloo" in self.backend and isinstance(self._store, MeshStore)
        return limit / GLOO_TRIES if tries else limit

    def together(self) -> None:
        """Return when every rank has come here, with its GPU's work done.

        Raises:
            RuntimeError: the group was cut, or is another one than it should be.
        """
        device = "cuda" if self.backend == "nccl" else "cpu"
        # Neither device nor dtype are left to the program's defaults: ranks may differ in them.
        token = torch.ones(1, dtype=torch.int64, device=device)
        dist.all_reduce(token)
        # Reading the number waits for the GPU.
        if int(token.item()) != self.view.size:
            raise RuntimeError(f"{int(token.item())} of {self.view.size} ranks are in the group")

    def adopt_sockets(self) -> None:
        """Count sockets opened since `form` began as this group's: sub-groups made later."""
        self.sockets.end(self._mesh.own_fds())

    @contextlib.contextmanager
    def more(
        self, *, for_collectives: bool = False, use: GroupUse = GroupUse.STEPS
    ) -> Iterator[None]:
        """Make sub-groups in here, so that their sockets can be cut as well.

        Args:
            for_collectives: no rank sends another one messages over them, so that making each of
                them may have the time limit of forming: gloo waits for a member that has just died
                here as well. Messages would keep that limit.
            use: their part in the training.
        """
        self.sockets.begin()
        self._forming = True
        known = set(compat.known_groups())
        seconds = self._connect_limit(self._limit)
        limit = compat.forming_limit(seconds) if for_collectives else contextlib.nullcontext()
        try:
            with limit:
                yield
            made = set(compat.known_groups()) - known
            if for_collectives:
                for group in made:
                    compat.set_timeout(self._timeout, group)
            self._uses |= dict.fromkeys(made, use)
        finally:
            self.adopt_sockets()
            self._forming = False

    def collectives(self) -> int:
        """Return how many collectives of the steps this process has begun, in all sub-groups."""
        beside = {group for group, use in self._uses.items() if use is GroupUse.BESIDE}
        return compat.collectives_begun(set(compat.known_groups()) - beside)

    def counter(self) -> Callable[[], int] | None:
        """Return a function that says how many of the collectives this process has begun that all
        ranks make alike; from any thread. None: this release of torch does not count them."""
        default = compat.collective_counter()
        if default is None:
            return None

        def count() -> int:
            uses = tuple(self._uses.items())
            alike = [group for group, use in uses if use is GroupUse.ALIKE]
            return default() + compat.collectives_begun(alike)

        return count

    def hold(self, thing: Any) -> None:
        """Keep what refers to the group (a DDP wrapper) as long as the group itself."""
        self._holders.append(thing)

    def cut(self) -> None:
        """Make every call of this process that waits in the group raise. From any thread, and as
        often as needed."""
        if self._forming:
            self.adopt_sockets()
        self.sockets.cut()
        self.nccl.abort()

    def leave(self) -> None:
        """Forget the group. Its destructors run later, when nothing of it is on its way."""
        if self._gone:
            return
        self._gone = True
        self.sockets.cut()
        held = {id(one): one for one in (*self._holders, *self.wrappers.leave())}
        dead, wrappers = [*compat.known_groups(), self._store], list(held.values())
        self._holders = []
        for wrapper in wrappers:
            # One whose making failed has no reducer.
            if isinstance(wrapper, nn.parallel.DistributedDataParallel) and hasattr(
                wrapper, "reducer"
            ):
                compat.disarm(wrapper)
                wrapper.register_forward_pre_hook(_refuse_left)
        self.nccl.leave()
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        _graveyard.bury(dead, wrappers, self.sockets)


def _refuse_left(*_: Any) -> None:
    """Refuse a wrapper whose world was left: it exchanges no gradients, and the others wait. After
    the training, where there is no group, it is a module like another.

    Raises:
        UsageError: there is a newer world.
    """
    if dist.is_initialized():
        raise UsageError(
            "this DDP wrapper belongs to a world that has ended: call s.ddp(model) anew whenever "
            "the function is entered, not in s.once"
        )


def form(
    mesh: Mesh,
    view: View,
    *,
    backend: str = "gloo",
    store: Any | None = None,
    timeout: float = 1800.0,
    limit: float = 10.0,
    out: list[ProcessGroups] | None = None,
) -> ProcessGroups:
    """Form the process group of a generation.

    Args:
        mesh: the process among the others.
        view: the generation.
        backend: torch's name of it: ``gloo``, ``nccl``, ``cpu:gloo,cuda:nccl``.
        store: another store than the mesh's.
        timeout: seconds for collectives.
        limit: seconds for forming.
        out: gets the group before it is formed, so that another thread can cut it.

    Raises:
        RuntimeError, dist.DistStoreError: a member is gone, or did not come.
    """
    listen_beside_mesh(mesh.me.host)
    group = ProcessGroups(mesh, view, view.rank_of(mesh.me.id), backend)
    if out is not None:
        out.append(group)
    group.form(store or MeshStore(mesh, view.generation, limit), timeout, limit)
    return group
