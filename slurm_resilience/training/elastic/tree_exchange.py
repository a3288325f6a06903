"""Exchange partial sums between the ranks, and add them up in the order of the tree.

Each rank adds up one slice of the elements: it gets that slice of all ranks' nodes, and gives all
ranks its sum. With one node a rank that moves as many bytes as an all-reduce over a ring does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from slurm_resilience.training.elastic.reduction_tree import TreeNode, TreeSum, nodes_of

PIECE_BYTES = 32 << 20
"""Gradients are exchanged in pieces of this size, so that buffers stay small."""


def sum_over_ranks(
    own: list[torch.Tensor],
    leaves: Sequence[range],
    count: int,
    out: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Add up all leaves of a step. A collective of the group.

    Args:
        own: flat sums of this rank's nodes, from left to right. They are overwritten.
        leaves: of each rank of the group, in the order of the ranks.
        count: leaves of the step.
        out: gets the total, the same on each rank.
        group: the ranks; None: all.
    """
    nodes = [nodes_of(of, count) for of in leaves]
    elements = max(PIECE_BYTES // out.element_size(), len(nodes))
    for begin in range(0, out.numel(), elements):
        piece = out[begin : begin + elements]
        _sum_piece([part[begin : begin + elements] for part in own], nodes, count, piece, group)


def _sum_piece(
    own: list[torch.Tensor],
    nodes: Sequence[list[TreeNode]],
    count: int,
    out: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> None:
    world = len(nodes)
    total = TreeSum[torch.Tensor](count, torch.Tensor.add_)
    if world == 1:
        for node, part in zip(nodes[0], own, strict=True):
            total.put(node, part)
        out.copy_(total.total())
        return
    length = -(-out.numel() // world)
    send = out.new_zeros(world, len(own), length)
    for number, part in enumerate(own):
        slices = part.new_zeros(world * length)
        slices[: part.numel()] = part
        send[:, number] = slices.view(world, length)
    rows = [len(of) for of in nodes]
    received = out.new_empty(sum(rows) * length)
    dist.all_to_all_single(
        received,
        send.view(-1),
        output_split_sizes=[many * length for many in rows],
        input_split_sizes=[len(own) * length] * world,
        group=group,
    )
    parts = iter(received.view(sum(rows), length))
    for of in nodes:
        for node in of:
            total.put(node, next(parts))
    whole = out.new_empty(world, length)
    dist.all_gather(list(whole.unbind()), total.total().contiguous(), group=group)
    out.copy_(whole.view(-1)[: out.numel()])
