"""Decide, for `[recovery]`: which node has which mode, and whether each name means a node. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec

from slurm_resilience.config import Config, RecoveryMode
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


def check_names(config: Config, nodes: Iterable[Node]) -> None:
    """Check that Slurm has each node and each partition that has a mode of its own.

    A misspelled one would have its nodes replaced that were to be left alone.

    Raises:
        ConfigError: Slurm has none of that name.
    """
    listed = {node.name: node.partitions for node in nodes}
    partitions = {name for of_node in listed.values() for name in of_node}
    for kind, known, named in (
        ("partition", partitions, config.recovery.partitions),
        ("node", set(listed), config.recovery.nodes),
    ):
        for name in named:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise ConfigError(
                    f"recovery.{kind}s: Slurm has no {kind} '{name}'{hint}; mend it in sres.toml"
                )
