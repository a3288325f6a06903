"""Slurm's topology as text → the failure domain of each node. Pure.

The nodes of a leaf switch (topology/tree) or of a block (topology/block) are near each other, and
may be lost together.
"""

from __future__ import annotations

import re

from slurm_resilience.slurm.hostlists import expand

_LEAF = r"(?:SwitchName=(\S+) Level=0|BlockName=(\S+)) .*?\bNodes=(\S+)"
"""The same on 22.05, 24.11 and 26.05; higher switches and aggregated blocks begin otherwise."""


def domains_of(text: str) -> dict[str, str]:
    """Return each node's leaf switch or block, as `scontrol show topology` prints them; empty: the
    site has no topology that says so."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        leaf = re.match(_LEAF, line.strip())
        if leaf and leaf[3] != "(null)":
            found |= dict.fromkeys(expand(leaf[3]), leaf[1] or leaf[2])
    return found
