"""Measure collectives among the ranks of a group, and compare every element with its value.

A step starts it once for each GPU, or once for each node without one, which on a node with Neuron
devices starts it once for each core. Each process finds the group that its node is in; the groups
measure at the same time, and know nothing of each other.
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
from slurm_resilience.deepcheck.step_requests import CollectiveRequest, RankGroup, RankHardware
from slurm_resilience.deepcheck.torch_programs.neuron_launch import (
    LAUNCHED,
    has_neuron_devices,
    launch_on_cores,
)
from slurm_resilience.deepcheck.torch_programs.rank_device import (
    DeviceMissing,
    RankDevice,
    control_group,
    open_device,
)
from slurm_resilience.slurm.hostlists import expand

if TYPE_CHECKING:
    import torch

MOST_REPEATS = 20
SIZE_SECONDS = 0.5
"""Seconds for the repeats of one size."""
NAME_TYPE = "name the node's type (--profile, checks.profile)"


class _Rank:
    """This process within its group."""

    def __init__(self, request: CollectiveRequest, node: str) -> None:
        for number, group in enumerate(request.groups):
            members = expand(group.nodes)
            if node in members:
                self.group, self.own_group, self.nodes = number, group, len(members)
                break
        else:
            raise LookupError(f"no group has node {node}")
        is_neuron = request.hardware is RankHardware.NEURON
        self.is_launcher = is_neuron and LAUNCHED not in os.environ
        if is_neuron and not self.is_launcher:
            names = ("LOCAL_RANK", "RANK", "WORLD_SIZE")
            self.local, self.rank, self.world = (int(os.environ[name]) for name in names)
            return
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
        each = max(1, tasks // nodes)
        self.local = int(os.environ.get("SLURM_LOCALID", "0"))
        self.rank = members.index(node) * each + self.local
        self.world = len(members) * each


class _Bench:
    """The device of this rank, and the group in which the ranks agree on numbers."""

    def __init__(self, device: RankDevice, rank: _Rank, limit: timedelta) -> None:
        """Meet the other ranks."""
        import torch
        import torch.distributed as dist

        self.device, self.rank = device, rank
        if device.init_method:
            dist.init_process_group(device.backend, init_method=device.init_method, timeout=limit)
        else:
            group = rank.own_group
            # torch offers it there, without naming it in __all__.
            store = vars(dist)["TCPStore"](
                group.address, group.port, rank.world, is_master=rank.rank == 0, timeout=limit
            )
            dist.init_process_group(
                device.backend, store=store, rank=rank.rank, world_size=rank.world, timeout=limit
            )
        self.control = control_group(device, limit)
        self._numbers_on = torch.device("cpu") if self.control else device.device
        self.values_on = device.device if device.makes_values else torch.device("cpu")

    def agreed(self, value: int) -> int:
        """Return the first rank's value, on all ranks."""
        import torch
        import torch.distributed as dist

        shared = torch.tensor([value], dtype=torch.int64, device=self._numbers_on)
        dist.broadcast(shared, 0, group=self.control)
        return int(shared.item())

    def slowest(self, seconds: float) -> float:
        """Return the longest time of all ranks."""
        import torch
        import torch.distributed as dist

        shared = torch.tensor([seconds], dtype=torch.float64, device=self._numbers_on)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.control)
        return float(shared.item())

    def total(self, count: int) -> int:
        """Return the sum of all ranks' counts."""
        import torch
        import torch.distributed as dist

        shared = torch.tensor([count], dtype=torch.int64, device=self._numbers_on)
        dist.all_reduce(shared, group=self.control)
        return int(shared.item())


def run(request: CollectiveRequest, node: str) -> int:
    """Measure; the group's first rank prints what came of it."""
    rank = _Rank(request, node)
    sender = f"{node}.{rank.local}"
    interface = _interface_to(rank.own_group)
    try:
        if rank.is_launcher:
            program = (__spec__.name, msgspec.json.encode(request).decode())
            launch_on_cores(rank.own_group, node, interface, request.limit_seconds, program)
        if request.hardware is RankHardware.CPU and rank.nodes > 1 and has_neuron_devices():
            # The hosts' network alone would pass for that of the devices.
            raise DeviceMissing(f"the collective of its Neuron devices was not run: {NAME_TYPE}")
        device = open_device(request.hardware, rank.local)
    except DeviceMissing as reason:
        _print(sender, GroupTrouble(rank.group, node, str(reason), missing=True))
        return 0
    # gloo would use the interface of this host's name.
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    import torch.distributed as dist

    try:
        bench = _Bench(device, rank, timedelta(seconds=request.limit_seconds))
        for collective in request.collectives:
            rows = _sweep(request, collective, bench)
            if rank.rank == 0:
                _print(sender, GroupSwept(rank.group, Sweep(collective, rank.world, rows)))
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        text = " ".join(str(error).split())[:300]
        _print(sender, GroupTrouble(rank.group, node, f"{type(error).__name__}: {text}"))
        # The threads of a broken group may hang: they end with the process.
        os._exit(0)
    return 0


def _interface_to(group: RankGroup) -> str:
    """Return the interface that leads to the others; empty where that cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((group.address, group.port))
            own = probe.getsockname()[0]
        except OSError:
            return ""
    addresses = psutil.net_if_addrs()
    having = (name for name, ones in addresses.items() if any(one.address == own for one in ones))
    return next(having, "")


def _print(sender: str, message: GroupSwept | GroupTrouble) -> None:
    for line in as_lines(sender, message):
        print(line, flush=True)


def _sweep(
    request: CollectiveRequest, collective: Collective, bench: _Bench
) -> tuple[SweepRow, ...]:
    sizes = sweep_sizes(request.smallest_bytes, request.largest_bytes, request.factor)
    begun = SYSTEM_CLOCK.monotonic()
    rows: list[SweepRow] = []
    for size in sizes * request.passes:
        rows.append(_measure(collective, size, bench))
        over = SYSTEM_CLOCK.monotonic() - begun > request.budget_seconds
        if bench.agreed(int(over)):
            break
    return tuple(rows)


def _measure(collective: Collective, size: int, bench: _Bench) -> SweepRow:
    import torch.distributed as dist

    call = _Call(collective, size, bench)
    wrong = call.run_checked()
    begun = SYSTEM_CLOCK.monotonic()
    call.run()
    bench.device.settle()
    once = max(SYSTEM_CLOCK.monotonic() - begun, 1e-6)
    repeats = bench.agreed(max(1, min(MOST_REPEATS, int(SIZE_SECONDS / once))))
    dist.barrier(group=bench.control)
    begun = SYSTEM_CLOCK.monotonic()
    for _ in range(repeats):
        call.run()
    bench.device.settle()
    took = (SYSTEM_CLOCK.monotonic() - begun) / repeats
    # Once more after the load: a link that drops bits when it is busy is found here.
    wrong += call.run_checked()
    return SweepRow(call.size_bytes, call.elements, bench.slowest(took), bench.total(wrong))


class _Call:
    """One collective of one size, with the values that it should bring.

    Each rank gives whole numbers that float32 holds exactly, sums included, so that every element
    of the result is known to the bit.
    """

    def __init__(self, collective: Collective, size: int, bench: _Bench) -> None:
        import torch

        self._collective, self._bench, self._rank = collective, bench, bench.rank
        total = max(1, size // 4)
        if collective is Collective.ALL_GATHER:
            total = max(1, total // self._rank.world)
        self.elements = total
        self._base = (torch.arange(total, device=bench.values_on) % 17 + 1).float()
        device = bench.device.device
        self._given = torch.zeros(total, device=device)
        self._gathered = (
            [torch.zeros(total, device=device) for _ in range(self._rank.world)]
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
        self._bench.device.step_done()

    def run_checked(self) -> int:
        """Run once with known values; return the elements that came out as something else."""
        self._given.copy_(self._base * self._weight(self._rank.rank))
        self._bench.device.step_done()
        self.run()
        self._bench.device.settle()
        if self._collective is Collective.ALL_REDUCE:
            weights = sum(self._weight(rank) for rank in range(self._rank.world))
            return self._unlike(self._given, weights)
        return sum(
            self._unlike(part, self._weight(rank)) for rank, part in enumerate(self._gathered)
        )

    def _unlike(self, result: torch.Tensor, weight: int) -> int:
        wanted = self._base * weight
        return int((result.to(wanted.device) != wanted).sum().item())


def main() -> int:
    """Run the entry of the process."""
    request = msgspec.json.decode(sys.argv[1], type=CollectiveRequest)
    return run(request, os.environ.get("SLURMD_NODENAME") or os.uname().nodename)


if __name__ == "__main__":
    sys.exit(main())
