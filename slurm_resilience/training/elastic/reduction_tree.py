"""Add up a fixed number of values in one fixed order, in parts that different ranks compute. Pure.

Adding floating-point numbers gives other bits in another order. Here the order is a binary tree
over the leaves 0 … count - 1, which nothing but their number decides: node ``(level, place)`` adds
up leaves ``place * 2**level`` to ``(place + 1) * 2**level``, its left half plus its right half; a
node without a right half is its left half. A rank that has a contiguous range of the leaves adds up
the whole nodes in it, at most two on each level. A rank that gets the nodes of all ranks adds up
the rest. Each addition is that of the tree, wherever the ranges begin and end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class TreeNode(NamedTuple):
    """A node of the tree; on level 0 a leaf."""

    level: int
    place: int


class TreeSum(Generic[T]):
    """A sum under way: values of nodes come from left to right.

    Args:
        count: leaves of the tree.
        add: adds a left half and a right half; it may write into the left one.
    """

    def __init__(self, count: int, add: Callable[[T, T], T]) -> None:
        self._count = count
        self._add = add
        self._parts: list[tuple[TreeNode, T]] = []

    def put(self, node: TreeNode, value: T) -> None:
        """Take the value of the next node to the right, and add what can be added."""
        while True:
            level, place = node
            if place % 2:
                if not self._parts or self._parts[-1][0] != (level, place - 1):
                    break
                value = self._add(self._parts.pop()[1], value)
            elif (place + 1) << level < self._count or (place == 0 and 1 << level >= self._count):
                # Its right half is yet to come; or it is the root.
                break
            node = TreeNode(level + 1, place // 2)
        self._parts.append((node, value))

    @property
    def parts(self) -> list[tuple[TreeNode, T]]:
        """The nodes that are whole, from left to right, each with its sum."""
        return list(self._parts)

    def total(self) -> T:
        """Return the sum of all leaves.

        Raises:
            ValueError: some are missing.
        """
        if len(self._parts) != 1 or 1 << self._parts[0][0].level < self._count:
            raise ValueError(f"of {self._count} leaves only these are there: {self._parts}")
        return self._parts[0][1]


def nodes_of(leaves: Iterable[int], count: int) -> list[TreeNode]:
    """Return the whole nodes in a contiguous range of the leaves, from left to right."""
    found = TreeSum[None](count, lambda left, right: None)
    for leaf in leaves:
        found.put(TreeNode(0, leaf), None)
    return [node for node, _ in found.parts]
