"""Listings of all nodes, one after the other: only what has changed is read anew. Pure."""

from __future__ import annotations

from slurm_resilience.model import Node
from slurm_resilience.slurm import parse


class NodeListing:
    """Reads a listing, and remembers it. A node whose record is that of the listing before is the
    very same object."""

    def __init__(self) -> None:
        self._text = ""
        self._records: list[str] = []
        self._nodes: tuple[Node, ...] = ()

    def read(self, text: str) -> tuple[Node, ...]:
        """Return the nodes of `scontrol show node -a -d -o`.

        Raises:
            SlurmError: as in `parse.nodes`.
        """
        if text == self._text:
            return self._nodes
        records = parse.node_records(text)
        if len(records) == len(self._records):
            before = zip(self._records, self._nodes, strict=True)
            nodes = [
                known if record == last else parse.node(record)
                for record, (last, known) in zip(records, before, strict=True)
            ]
        else:
            by_record = dict(zip(self._records, self._nodes, strict=True))
            nodes = [by_record.get(record) or parse.node(record) for record in records]
        self._text, self._records, self._nodes = text, records, tuple(nodes)
        return self._nodes
