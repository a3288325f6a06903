"""Measure collectives among the ranks of a group, and compare every element with its value.

A step starts it once for each GPU, or once for each node without one. Each process finds the group
that its node is in; the groups measure at the same time, and know nothing of each other.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import psutil

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.deepcheck.collective_math import Collective, Sweep, SweepRow, sweep_sizes
from slurm_resilience.deepcheck.step_lines import GroupSwept, GroupTrouble, as_lines
from slurm_resilience.deepcheck.step_requests import CollectiveRequest, RankGroup
from slurm_resilience.slurm.hostlists import expand

if TYPE_CHECKING:
    import torch

MOST_REPEATS = 20
SIZE_SECONDS = 0.5
"""Seconds for the repeats of one size."""


class _Rank:
    """This process within its group."""

    def __init__(self, request: CollectiveRequest, node: str) -> None:
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
        self.local = int(os.environ.get("SLURM_LOCALID", "0"))
        each = max(1, tasks // nodes)
        for number, group in enumerate(request.groups):
            members = expand(group.nodes)
            if node in members:
                self.group, self.own_group = number, group
                self.rank = members.index(node) * each + self.local
                self.world = len(members) * each
                return
        raise LookupError(f"no group has node {node}")


def run(request: CollectiveRequest, node: str) -> int:
    """Measure; the group's first rank prints what came of it."""
    rank = _Rank(request, node)
    sender = f"{node}.{rank.local}"
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        _print(sender, GroupTrouble(rank.group, node, "torch is not installed", missing=True))
        return 0
    if request.gpus and not torch.cuda.is_available():
        _print(sender, GroupTrouble(rank.group, node, "torch sees no GPU", missing=True))
        return 0
    device = torch.device("cuda", rank.local) if request.gpus else torch.device("cpu")
    if request.gpus:
        torch.cuda.set_device(device)
    _choose_interface(rank.own_group)
    limit = timedelta(seconds=request.limit_seconds)
    try:
        # torch offers it there, without naming it in __all__.
        store = vars(dist)["TCPStore"](
            rank.own_group.address,
            rank.own_group.port,
            rank.world,
            is_master=rank.rank == 0,
            timeout=limit,
        )
        dist.init_process_group(
            "nccl" if request.gpus else "gloo",
            store=store,
            rank=rank.rank,
            world_size=rank.world,
            timeout=limit,
        )
        for collective in request.collectives:
            rows = _sweep(request, collective, rank, device)
            if rank.rank == 0:
                _print(sender, GroupSwept(rank.group, Sweep(collective, rank.world, rows)))
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        text = " ".join(str(error).split())[:300]
        _print(sender, GroupTrouble(rank.group, node, f"{type(error).__name__}: {text}"))
        # The threads of a broken group may hang: they end with the process.
        os._exit(0)
    return 0


def _choose_interface(group: RankGroup) -> None:
    """Have gloo use the interface that leads to the others, not that of this host's name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((group.address, group.port))
            own = probe.getsockname()[0]
        except OSError:
            return
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == own for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _print(sender: str, message: GroupSwept | GroupTrouble) -> None:
    for line in as_lines(sender, message):
        print(line, flush=True)


def _sweep(
    request: CollectiveRequest, collective: Collective, rank: _Rank, device: torch.device
) -> tuple[SweepRow, ...]:
    sizes = sweep_sizes(request.smallest_bytes, request.largest_bytes, request.factor)
    begun = SYSTEM_CLOCK.monotonic()
    rows: list[SweepRow] = []
    for size in sizes * request.passes:
        rows.append(_measure(collective, size, rank, device))
        over = SYSTEM_CLOCK.monotonic() - begun > request.budget_seconds
        if _agreed(int(over), device):
            break
    return tuple(rows)


def _agreed(value: int, device: torch.device) -> int:
    """Return the first rank's value, on all ranks."""
    import torch
    import torch.distributed as dist

    shared = torch.tensor([value], dtype=torch.int64, device=device)
    dist.broadcast(shared, 0)
    return int(shared.item())


def _measure(collective: Collective, size: int, rank: _Rank, device: torch.device) -> SweepRow:
    import torch
    import torch.distributed as dist

    call = _Call(collective, size, rank, device)
    wrong = call.run_checked()
    begun = SYSTEM_CLOCK.monotonic()
    call.run()
    call.settle()
    once = max(SYSTEM_CLOCK.monotonic() - begun, 1e-6)
    repeats = _agreed(max(1, min(MOST_REPEATS, int(SIZE_SECONDS / once))), device)
    dist.barrier()
    begun = SYSTEM_CLOCK.monotonic()
    for _ in range(repeats):
        call.run()
    call.settle()
    took = (SYSTEM_CLOCK.monotonic() - begun) / repeats
    # Once more after the load: a link that drops bits when it is busy is found here.
    wrong += call.run_checked()
    slowest = torch.tensor([took], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    all_wrong = torch.tensor([wrong], dtype=torch.int64, device=device)
    dist.all_reduce(all_wrong)
    return SweepRow(call.size_bytes, call.elements, float(slowest.item()), int(all_wrong.item()))


class _Call:
    """One collective of one size, with the values that it should bring.

    Each rank gives whole numbers that float32 holds exactly, sums included, so that every element
    of the result is known to the bit.
    """

    def __init__(
        self, collective: Collective, size: int, rank: _Rank, device: torch.device
    ) -> None:
        import torch

        self._collective, self._rank, self._device = collective, rank, device
        total = max(1, size // 4)
        if collective is Collective.ALL_GATHER:
            total = max(1, total // rank.world)
        self.elements = total
        self._base = (torch.arange(total, device=device) % 17 + 1).float()
        self._given = self._base.clone()
        self._gathered = (
            [torch.empty_like(self._base) for _ in range(rank.world)]
            if collective is Collective.ALL_GATHER
            else []
        )
        self.size_bytes = 4 * total * max(1, len(self._gathered))

    @staticmethod
    def _weight(rank: int) -> int:
        return rank % 8 + 1

    def run(self) -> None:
        import torch.distributed as dist

        if self._collective is Collective.ALL_REDUCE:
            dist.all_reduce(self._given)
        else:
            dist.all_gather(self._gathered, self._given)

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def run_checked(self) -> int:
        """Run once with known values; return the elements that came out as something else."""
        self._given.copy_(self._base).mul_(self._weight(self._rank.rank))
        self.run()
        self.settle()
        if self._collective is Collective.ALL_REDUCE:
            weights = sum(self._weight(rank) for rank in range(self._rank.world))
            return int((self._given != self._base * weights).sum().item())
        return sum(
            int((part != self._base * self._weight(rank)).sum().item())
            for rank, part in enumerate(self._gathered)
        )


def main() -> int:
    """Run the entry of the process."""
    request = msgspec.json.decode(sys.argv[1], type=CollectiveRequest)
    return run(request, os.environ.get("SLURMD_NODENAME") or os.uname().nodename)


if __name__ == "__main__":
    sys.exit(main())
