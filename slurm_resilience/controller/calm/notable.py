"""Tables by node that know which of their nodes a round must look at. Pure.

On a large cluster nearly every node is *calm*: in plain service, beating, without a finding. The
rest is *notable*. What is decided from a table's notable part is what is decided from all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

V = TypeVar("V")


class PartlyCalm(dict[str, V]):
    """A table with all its entries."""

    def __init__(self, entries: Mapping[str, V], notable: Mapping[str, V]) -> None:
        """
        Args:
            entries: of every node.
            notable: the part that must be looked at, in the same order.
        """
        super().__init__(entries)
        self.notable = notable


class MostlyCalm(Mapping[str, V]):
    """A table whose calm nodes have entries that are made when they are asked for."""

    def __init__(
        self, nodes: Collection[str], notable: Mapping[str, V], calm: Callable[[str], V]
    ) -> None:
        """
        Args:
            nodes: the names of all, in their order.
            notable: the entries of those that must be looked at, in the same order.
            calm: makes the entry of any other node.
        """
        self._nodes = nodes
        self.notable = notable
        self._calm = calm

    def __getitem__(self, node: str) -> V:
        if node in self.notable:
            return self.notable[node]
        if node not in self._nodes:
            raise KeyError(node)
        return self._calm(node)

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


def notable(table: Mapping[str, V]) -> Mapping[str, V]:
    """Return the part of a table that must be looked at; all of it, where that is not known."""
    return table.notable if isinstance(table, PartlyCalm | MostlyCalm) else table


def has_calm(table: Mapping[str, V]) -> bool:
    """Tell whether the table has a calm node."""
    return len(notable(table)) < len(table)
