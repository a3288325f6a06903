"""Decide, for `[recovery]`: which node has which mode, and whether each name means a node. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from slurm_resilience.config import Config, RecoveryMode
from slurm_resilience.controller.journal.records import NamedModes
from slurm_resilience.errors import ConfigError, UsageError
from slurm_resilience.model import Node
from slurm_resilience.slurm.hostlists import expand


def with_each_node(config: Config) -> Config:
    """Return the configuration with each node of `recovery.nodes` by itself.

    Raises:
        ConfigError: no hostlist, or a node with two modes.
    """
    found: dict[str, RecoveryMode] = {}
    for hostlist, mode in config.recovery.nodes.items():
        try:
            names = expand(hostlist)
        except UsageError as error:
            raise ConfigError(f"recovery.nodes: {error}") from None
        for name in names:
            if found.get(name, mode) != mode:
                text = f"recovery.nodes: {name} has two modes, {found[name]} and {mode}"
                raise ConfigError(text)
            found[name] = mode
    recovery = msgspec.structs.replace(config.recovery, nodes=found)
    return msgspec.structs.replace(config, recovery=recovery)


class CheckedNames(NamedTuple):
    """The configuration as it holds, once its names were compared with Slurm's."""

    config: Config
    names: NamedModes
    """For the next start."""
    warning: str
    """One line on what Slurm does not have any more; empty: it has all."""


def check_names(config: Config, nodes: Iterable[Node], before: NamedModes) -> CheckedNames:
    """Check that Slurm has each node and each partition that has a mode of its own.

    A misspelled one would have its nodes replaced that were to be left alone. One that Slurm had at
    an earlier start is not misspelled: it was removed since. The nodes that such a partition had
    keep its mode, as long as the configuration names it.

    Args:
        config: with each node by itself (`with_each_node`).
        nodes: all of Slurm's.
        before: what Slurm had at the last start.

    Raises:
        ConfigError: Slurm has none of that name, and had none.
    """
    listed = {node.name: node.partitions for node in nodes}
    partitions = {
        name: tuple(node for node, of_node in listed.items() if name in of_node)
        for name in config.recovery.partitions
        if any(name in of_node for of_node in listed.values())
    }
    every = {name for of_node in listed.values() for name in of_node}
    gone = {
        "node": _gone("node", config.recovery.nodes, set(listed), before.nodes),
        "partition": _gone("partition", config.recovery.partitions, every, before.partitions),
    }
    kept: dict[str, RecoveryMode] = {}
    for name, of_node in listed.items():
        of_gone = [p for p in gone["partition"] if name in before.partitions[p]]
        if of_gone:
            kept[name] = config.recovery.mode_of(name, (*of_node, *of_gone))
    recovery = msgspec.structs.replace(config.recovery, nodes=kept | config.recovery.nodes)
    names = NamedModes(
        tuple(config.recovery.nodes),
        partitions | {name: before.partitions[name] for name in gone["partition"]},
    )
    shown = [f"{kind} {name}" for kind, of_kind in gone.items() for name in of_kind]
    warning = f"sres.toml names what Slurm does not have any more: {', '.join(shown)}"
    if kept:
        warning += f" (its nodes keep their modes: {', '.join(kept)})"
    return CheckedNames(
        msgspec.structs.replace(config, recovery=recovery),
        names,
        f"{warning}; take it out of [recovery]" if shown else "",
    )


def _gone(
    kind: str, named: Iterable[str], known: Collection[str], before: Collection[str]
) -> list[str]:
    """Return the names that Slurm does not have any more.

    Raises:
        ConfigError: Slurm never had one of them.
    """
    gone = [name for name in named if name not in known]
    for name in gone:
        if name not in before:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(
                f"recovery.{kind}s: Slurm has no {kind} '{name}'{hint}; mend it in sres.toml"
            )
    return gone
