"""Measure idle nodes for a second, add that to their history, and name those that fall behind."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.deepcheck.instance_level import as_program
from slurm_resilience.deepcheck.kept_nodes import MaintenanceDoor, NodeKeeper
from slurm_resilience.deepcheck.node_choice import DeepReadiness, by_gpus
from slurm_resilience.deepcheck.speed.speed_judge import SlowDevice, slow_devices
from slurm_resilience.deepcheck.speed.speed_pairs import rounds_of_pairs
from slurm_resilience.deepcheck.speed.speed_store import SpeedStore
from slurm_resilience.deepcheck.step_follower import StepFollower
from slurm_resilience.deepcheck.step_lines import GroupTrouble, SpeedTold, StepMessage
from slurm_resilience.deepcheck.step_requests import SPEED_TOKEN, SpeedLink, SpeedRequest
from slurm_resilience.errors import SresError
from slurm_resilience.model import Node
from slurm_resilience.slurm.maintenance import StepOrder
from slurm_resilience.slurm.node_labels import labels_of, with_label

PROGRAM = "slurm_resilience.deepcheck.torch_programs.speed_program"
LIMIT_MINUTES = 2
SLOW = "slow"
"""The label of a node that has fallen behind: what of it."""
FIRST_PORT, PORTS = 20_000, 12_000


class SpeedReport(msgspec.Struct, frozen=True):
    """The outcome of a run."""

    measured: tuple[str, ...]
    """Nodes."""
    skipped: dict[str, str]
    """Nodes that were left alone, with the reason."""
    slow: tuple[SlowDevice, ...]


def measure_speeds(
    door: MaintenanceDoor,
    clock: Clock,
    store: SpeedStore,
    names: Sequence[str],
    user: str,
    rounds: int,
    tell: Callable[[str], None],
) -> SpeedReport:
    """Measure those of these nodes that are idle, and judge them.

    Args:
        door: Slurm.
        clock: the time.
        store: has their earlier measures.
        names: the nodes.
        user: the reservation is his.
        rounds: everything is measured so many times.
        tell: takes a line of progress.

    Raises:
        SresError: Slurm refused, and nothing was run; or the store cannot be used.
    """
    keeper = NodeKeeper(door, clock, tell)
    choices = keeper.choose(names, LIMIT_MINUTES)
    ready = [one.node for one in choices if one.readiness is DeepReadiness.READY]
    skipped = {one.node: one.reason for one in choices if one.node not in ready}
    measures: list[SpeedTold] = []

    def heard(message: StepMessage) -> None:
        if isinstance(message, SpeedTold):
            measures.append(message)
        elif isinstance(message, GroupTrouble):
            tell(f"{message.node}: {message.text}")

    if ready:
        store.histories()  # a store that cannot be used is told before any node is loaded
        shown = [node for node in door.nodes() if node.name in ready]
        with (
            keeper.kept(ready, LIMIT_MINUTES, user) as reservation,
            StepFollower(door, clock) as follower,
        ):
            follower.follow(_orders(shown, reservation, rounds), 60.0 * LIMIT_MINUTES, heard)
        store.add(measures, clock.now())
    slow = tuple(one for one in slow_devices(store.histories()) if one.key.node in names)
    _label(door, {one.node for one in measures}, slow, tell)
    measured = tuple(name for name in ready if any(one.node == name for one in measures))
    return SpeedReport(measured, skipped, slow)


def _orders(nodes: Sequence[Node], reservation: str, rounds: int) -> list[StepOrder]:
    by_name = {node.name: node for node in nodes}
    orders = []
    for gres, names in by_gpus(nodes).items():
        pairs = tuple(
            _links(each, by_name)
            for each in rounds_of_pairs(random.sample(list(names), len(names)), rounds)
        )
        request = SpeedRequest(bool(gres), pairs)
        program = as_program(PROGRAM, request)
        token = ((SPEED_TOKEN, secrets.token_hex(16)),)
        orders.append(
            StepOrder(reservation, names, program, LIMIT_MINUTES, gres=gres, secrets=token)
        )
    return orders


def _links(pairs: Iterable[tuple[str, str]], nodes: Mapping[str, Node]) -> tuple[SpeedLink, ...]:
    return tuple(
        SpeedLink(
            server, client, nodes[server].address or server, FIRST_PORT + secrets.randbelow(PORTS)
        )
        for server, client in pairs
    )


def _label(
    door: MaintenanceDoor,
    measured: set[str],
    slow: Sequence[SlowDevice],
    tell: Callable[[str], None],
) -> None:
    """Label the nodes that are slow, and take the label from those that are so no more."""
    kinds: dict[str, list[str]] = {}
    for one in slow:
        kinds.setdefault(one.key.node, []).append(one.key.kind)
    try:
        for node in door.nodes():
            wanted = "+".join(sorted(set(kinds.get(node.name, ()))))
            if node.name in measured and labels_of(node.comment).get(SLOW, "") != wanted:
                door.set_comment([node.name], with_label(node.comment, SLOW, wanted))
    except SresError as error:
        tell(f"the label {SLOW} cannot be written: {error}")
