"""Nodes on which srun could start no task: which of them do not answer."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import closing

import msgspec
import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.model import Node
from slurm_resilience.resume.allocation.silent_nodes import silent_nodes
from slurm_resilience.slurm.slurmd_port import PortsSeen, look_at_ports

NO_CONNECTION = "its slurmd takes no connection"


class Shown(FakeSlurm):
    """Four nodes; some do not respond, by Slurm's word."""

    def __init__(self, silent: Iterable[str] = (), away: bool = False) -> None:
        super().__init__(4)
        self._silent, self._away = set(silent), away

    def nodes(self) -> tuple[Node, ...]:
        if self._away:
            raise SlurmUnreachable("Unable to contact slurm controller")
        flags = frozenset({"NOT_RESPONDING"})
        return tuple(
            msgspec.structs.replace(node, flags=flags) if node.name in self._silent else node
            for node in super().nodes()
        )


def found(
    slurm: FakeSlurm, seen: PortsSeen, doubted: dict[str, str] | None = None
) -> dict[str, str]:
    def doubts(names: tuple[str, ...]) -> dict[str, str]:
        return {name: why for name, why in (doubted or {}).items() if name in names}

    return silent_nodes(["n2", "n3"], ["n1"], slurm, doubts, lambda _: seen)


def seen(answering: str, silent: str) -> PortsSeen:
    return PortsSeen(frozenset(answering.split()), frozenset(silent.split()))


def test_slurms_word_counts_then_sresctlds_then_a_connection() -> None:
    assert found(Shown(["n2"]), seen("", "")) == {"n2": "Slurm shows IDLE+NOT_RESPONDING"}
    assert found(Shown(), seen("", ""), {"n3": "no beat"}) == {"n3": "no beat"}
    assert found(Shown(), seen("n1 n2", "n3")) == {"n3": NO_CONNECTION}
    assert found(Shown(["n2"]), seen("n1", "n3")).keys() == {"n2", "n3"}


@pytest.mark.parametrize("others", ["", "n2"])
def test_a_machine_that_reaches_no_other_node_judges_none(others: str) -> None:
    assert found(Shown(), seen(others, "n1 n3")) == {}


def test_without_slurms_answer_nothing_is_known() -> None:
    assert found(Shown(away=True), seen("n1", "n2 n3")) == {}


def test_a_port_that_takes_a_connection_and_one_that_does_not() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as slurmd:
        port = slurmd.getsockname()[1]
        with closing(socket.socket()) as reserved:
            reserved.bind(("127.0.0.1", 0))
            closed = reserved.getsockname()[1]
            nodes = [
                Node("n1", "IDLE", address="127.0.0.1", port=port),
                Node("n2", "IDLE", address="127.0.0.1", port=closed),
                Node("n3", "IDLE", address="no-such-host.invalid", port=port),
            ]
            assert look_at_ports(nodes) == seen("n1", "n2")
