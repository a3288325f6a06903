"""Add up the gradients of a step's microbatches, over this rank's and over all ranks.

Each microbatch's loss was weighed before its backward, so what is added up here is
``sum(weight * gradient)``; it is divided once, by the sum of the weights of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from slurm_resilience.errors import UsageError
from slurm_resilience.training import compat
from slurm_resilience.training.elastic.plan import MicrobatchShare, StepSpan, plan
from slurm_resilience.training.elastic.reduction_tree import TreeNode, TreeSum
from slurm_resilience.training.elastic.tree_exchange import sum_over_ranks
from slurm_resilience.training.state import adapters


class TrainedNets:
    """The nets that are trained together, and which of their parameters train in a step.

    Args:
        nets: wrapped for this world, or whole.
    """

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        self.wrapped = list(nets)
        self.parameters: list[nn.Parameter] = []
        """Those that train in this step."""
        self._others: list[tuple[str, nn.Parameter]] = []

    def wrap_anew(self, wrapper: DistributedDataParallel) -> None:
        """Take a new wrapper in the place of the one that holds the same net; no other is there."""
        for number, net in enumerate(self.wrapped):
            inside = compat.uncompiled(net)
            if isinstance(inside, DistributedDataParallel) and inside.module is wrapper.module:
                self.wrapped[number] = wrapper

    def clear(self) -> None:
        """Drop all gradients, those of parameters that were frozen meanwhile as well: an optimizer
        would apply the last one in each further step."""
        for _, parameter in _named(self.wrapped):
            parameter.grad = None

    def begin(self) -> None:
        """Note what trains, when the first microbatch of a step is about to be computed.

        Raises:
            UsageError: a gradient is there already.
        """
        self.parameters, self._others = [], []
        for name, parameter in _named(self.wrapped):
            if parameter.grad is not None:
                raise UsageError(
                    f"{name} has a gradient before the first microbatch of a step: it would count "
                    "once for each rank. Add its loss to that of each microbatch, and give the sum "
                    "to step.backward"
                )
            if parameter.requires_grad:
                self.parameters.append(parameter)
            else:
                self._others.append((name, parameter))

    def refuse_late(self) -> None:
        """Refuse gradients of parameters that did not train when the step began.

        Raises:
            UsageError: there are some.
        """
        late = [name for name, parameter in self._others if parameter.grad is not None]
        if late:
            more = f" and {len(late) - 3} more" if len(late) > 3 else ""
            raise UsageError(
                f"parameters were unfrozen within the loop over the microbatches of a step "
                f"({', '.join(late[:3])}{more}): their gradients are not those of the whole step. "
                "Unfreeze before that loop: right after `for step in s.microbatches(…):`"
            )


class GradientSums(Protocol):
    """One step's gradients, for all the nets that are trained together."""

    def begin(self, step: StepSpan) -> None:
        """Begin a step: there are no gradients, and it is noted what trains."""

    def before(self, *, last: bool) -> None:
        """Prepare for the forward of a microbatch; ``last``: this rank makes no other."""

    def after(self, call: int) -> None:
        """Take the gradient of this rank's microbatch of that number, from 0."""

    def is_touched(self) -> bool:
        """Tell whether something has changed the gradients since `after`."""

    def finish(self, divisor: float) -> None:
        """Give each parameter the gradient of the whole step."""


class _Touch:
    """Sees that something changes gradients between two microbatches: a `zero_grad`, clipping."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._noted: tuple[nn.Parameter, torch.Tensor, int] | None = None

    def note(self) -> None:
        """Note them; the first is enough, since who changes them changes all."""
        for parameter in self._parameters:
            if (gradient := parameter.grad) is not None:
                self._noted = parameter, gradient, compat.versions([gradient])[0]
                return

    def is_seen(self) -> bool:
        """Tell whether they were changed since."""
        if self._noted is None:
            return False
        parameter, gradient, version = self._noted
        return parameter.grad is not gradient or compat.versions([gradient])[0] != version


class AveragedSums:
    """Gradients of wrappers that average over the ranks themselves: DDP, FSDP, HSDP.

    DDP exchanges with the last microbatch of a step alone, FSDP with each.
    """

    def __init__(self, nets: TrainedNets, world: int) -> None:
        self._nets = nets
        self._touch = _Touch(())
        self._world = world

    def begin(self, step: StepSpan) -> None:
        # In each step anew: a program may unfreeze some in the middle.
        self._nets.begin()
        self._touch = _Touch(self._nets.parameters)

    def before(self, *, last: bool) -> None:
        _let_synchronize(self._nets.wrapped, last)

    def after(self, call: int) -> None:
        """Autograd has added the gradient, with weight 0 where it only padded."""
        self._touch.note()

    def is_touched(self) -> bool:
        return self._touch.is_seen()

    def finish(self, divisor: float) -> None:
        self._nets.refuse_late()
        for parameter in self._nets.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self._world / divisor)


class PlainSums:
    """Gradients of nets that each rank holds whole, in the order that is fastest."""

    def __init__(self, nets: TrainedNets, world: int) -> None:
        self._nets = nets
        self._layout = GradientLayout(())
        self._touch = _Touch(())
        self._world = world

    def begin(self, step: StepSpan) -> None:
        self._nets.begin()
        self._layout = GradientLayout(self._nets.parameters)
        self._touch = _Touch(self._nets.parameters)

    def before(self, *, last: bool) -> None:
        """Do nothing: no wrapper communicates."""

    def after(self, call: int) -> None:
        """Autograd has added the gradient, with weight 0 where it only padded."""
        self._touch.note()

    def is_touched(self) -> bool:
        return self._touch.is_seen()

    def finish(self, divisor: float) -> None:
        self._nets.refuse_late()
        present = self._layout.present()
        flats = self._layout.take()
        if self._world > 1:
            present = agreed(present)
            for flat in flats:
                dist.all_reduce(flat)
        self._layout.put(flats, divisor, present)


class TreeSums:
    """Gradients of nets that each rank holds whole, in an order that the world does not change.

    Ranks that hold a copy together (FSDP over its replica alone) add up their own round; the tree
    adds up the rounds, each rank for its shard. Until a step's end this keeps one sum for each
    whole node of this rank's part of the tree: for n rounds at most ``2 * log2(n) + 1`` copies of
    the gradient, as a rule one or two.

    Args:
        together: ranks that hold a copy together.
        group: the ranks that hold the same shard; None: all ranks.
    """

    def __init__(
        self,
        nets: TrainedNets,
        rank: int,
        world: int,
        together: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._nets = nets
        self._layout = GradientLayout(())
        self._rank = rank
        self._world = world
        self._together = together
        self._group = group
        self._shares: Sequence[MicrobatchShare] = ()
        self._rounds = 1
        self._present: list[int] = []
        self._sum = TreeSum[list[torch.Tensor]](1, _add)

    def begin(self, step: StepSpan) -> None:
        self._shares = plan(StepSpan(0, step.count), self._world, self._together)
        self._rounds = -(-step.count // self._together)
        self._sum = TreeSum(self._rounds, _add)
        self._nets.begin()
        self._layout = GradientLayout(self._nets.parameters)
        self._present = self._layout.present()

    def before(self, *, last: bool) -> None:
        _let_synchronize(self._nets.wrapped, False)

    def after(self, call: int) -> None:
        leaves = self._shares[self._rank].leaves
        if call < len(leaves):
            present = self._layout.present()
            self._present = [max(pair) for pair in zip(self._present, present, strict=True)]
            self._sum.put(TreeNode(0, leaves[call]), self._layout.take())
        self._layout.clear()

    def is_touched(self) -> bool:
        """They are kept in the tree, out of reach."""
        return False

    def finish(self, divisor: float) -> None:
        self._nets.refuse_late()
        peers = self._shares[self._rank % self._together :: self._together]
        leaves = [share.leaves for share in peers]
        present = agreed(self._present) if self._world > 1 else self._present
        parts = [flats for _, flats in self._sum.parts]
        self._sum = TreeSum(1, _add)
        totals = []
        for number, (size, dtype, device) in enumerate(self._layout.flats):
            own = [part[number] for part in parts]
            out = torch.empty(size, dtype=dtype, device=device)
            sum_over_ranks(own, leaves, self._rounds, out, self._group)
            totals.append(out)
        # What a wrapper is used for besides goes on as usual.
        _let_synchronize(self._nets.wrapped, True)
        # FSDP has averaged over the ranks of a copy.
        self._layout.put(totals, divisor / self._together, present)


def sums_of(
    trained: TrainedNets,
    *,
    rank: int,
    world: int,
    same_bits: bool,
    together: int = 1,
    group: dist.ProcessGroup | None = None,
) -> GradientSums:
    """Return what adds up the gradients of these nets.

    Args:
        trained: the nets.
        together: ranks that hold a copy of them together, if ``same_bits``.
        group: the ranks that hold the same shard; None: all ranks.

    Raises:
        UsageError: they cannot be added up in this way.
    """
    nets = trained.wrapped
    sharded, wrapped = is_sharded(nets), [_is_ddp(net) for net in nets]
    if any(wrapped) != all(wrapped) and not sharded:
        raise UsageError("of the nets of s.microbatches, wrap all with s.ddp, or none")
    if sharded:
        _refuse_layout(nets, together if same_bits else world, same_bits=same_bits)
    if same_bits:
        return TreeSums(trained, rank, world, together, group)
    if sharded or all(wrapped):
        return AveragedSums(trained, world)
    return PlainSums(trained, world)


def _refuse_layout(nets: Sequence[nn.Module], ranks: int, *, same_bits: bool) -> None:
    """Refuse nets that are not sharded, and averaged, over so many ranks by FSDP itself."""
    for _, parameter in _named(nets):
        if not parameter.requires_grad:
            continue
        if not isinstance(parameter, DTensor):
            if same_bits:
                raise UsageError(
                    "same_bits=True needs nets that each rank holds whole, or parameters that "
                    "fully_shard has sharded, all of them"
                )
            continue
        mesh = parameter.device_mesh
        if mesh.size() != ranks or (same_bits and mesh.ndim != 1):
            wanted = 's.mesh()["shard"]' if same_bits else "s.mesh()"
            option = "same_bits=True" if same_bits else "without same_bits"
            raise UsageError(
                f"s.microbatches {option} needs fully_shard(…, mesh={wanted}), a mesh of {ranks} "
                f"ranks; this net has one of {tuple(mesh.shape)}"
            )


def agreed(values: list[int]) -> list[int]:
    """Add up whole numbers over all ranks, exactly."""
    device = compat.wire_device(dist.group.WORLD)
    numbers = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(numbers)
    return [int(number) for number in numbers.tolist()]


class GradientLayout:
    """The gradients of parameters as flat tensors, one for each device and type, and back.

    Sums are kept in float32 at least, whatever the parameters' type is.

    Args:
        parameters: those that train.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self._parameters:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            groups.setdefault((wide, parameter.device), []).append(parameter)
        self._groups = groups

    @property
    def flats(self) -> list[tuple[int, torch.dtype, torch.device]]:
        """Elements, type and device of each flat tensor."""
        return [
            (sum(_local(parameter).numel() for parameter in group), dtype, device)
            for (dtype, device), group in self._groups.items()
        ]

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def present(self) -> list[int]:
        """Return 1 for each parameter that has a gradient, else 0."""
        return [int(parameter.grad is not None) for parameter in self._parameters]

    def take(self) -> list[torch.Tensor]:
        """Copy the gradients; one that is not there is zero."""
        found = []
        for (dtype, device), group in self._groups.items():
            pieces = [
                torch.zeros(_local(parameter).numel(), dtype=dtype, device=device)
                if parameter.grad is None
                else _local(parameter.grad).reshape(-1).to(dtype)
                for parameter in group
            ]
            found.append(torch.cat(pieces))
        return found

    def put(self, flats: list[torch.Tensor], divisor: float, present: list[int]) -> None:
        """Divide the sums, and give each parameter its own; none where no rank had one."""
        there = dict(zip(map(id, self._parameters), present, strict=True))
        for flat, group in zip(flats, self._groups.values(), strict=True):
            flat.div_(divisor)
            at = 0
            for parameter in group:
                own = _local(parameter)
                piece = flat[at : at + own.numel()].view(own.shape).to(parameter.dtype)
                at += own.numel()
                parameter.grad = _as(parameter, piece) if there[id(parameter)] else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of it that this rank holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _as(parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient in the form that the parameter's gradient has."""
    if not isinstance(parameter, DTensor):
        return piece
    return DTensor.from_local(
        piece,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _add(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    for one, two in zip(left, right, strict=True):
        one.add_(two)
    return left


def _named(nets: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter of some nets once, with its name in its net."""
    known: set[int] = set()
    for net in nets:
        for name, parameter in adapters.unwrap(net).named_parameters():
            if id(parameter) not in known:
                known.add(id(parameter))
                yield name, parameter


def _is_ddp(net: nn.Module) -> bool:
    return isinstance(compat.uncompiled(net), DistributedDataParallel)


def _let_synchronize(nets: Sequence[nn.Module], wanted: bool) -> None:
    """Say whether the backward of the next forward exchanges gradients, as `no_sync` does."""
    for net in nets:
        inside = compat.uncompiled(net)
        if isinstance(inside, DistributedDataParallel):
            inside.require_backward_grad_sync = wanted


def is_sharded(nets: Sequence[nn.Module]) -> bool:
    """Tell whether FSDP, of either generation, holds any of the parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    return any(isinstance(module, kinds) for net in nets for module in net.modules())
