"""Decide whether the end of one rank is the end of all, and remember that they are being ended.

torch's process groups do not outlive a member. A program that makes one, and does not recover by
itself, has to be started again as a whole, as torchrun does. Which kind a program is shows itself:
the library's programs say so (control_socket.py), and ranks in a group hold a connection to its
store (store_sockets.py).
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Literal

import msgspec

from slurm_resilience.launcher.launcher_world import LauncherWorld
from slurm_resilience.launcher.processes.store_sockets import is_on_port
from slurm_resilience.mesh.model import GenerationEnd

RestartScope = Literal["auto", "rank", "all"]
"""--restart: decide by what the ranks do, or always the one that ended, or always all."""


PORTS = range(10_000, 20_000)
"""MASTER_PORT is one of these: below those of supervised steps, and below the kernel's ephemeral
ports (from 32768). Any connection may take one of the latter as its near end before a rank listens
on it, which is a second later, or many where torch is imported first."""
_TRIES = 100


def free_port() -> int:
    """Return a port of this machine that is free now; one that the kernel gives to no connection,
    unless many of those are in use."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in random.sample(PORTS, _TRIES):
        with suppress(OSError):
            socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
            return port
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class RestartSpec(msgspec.Struct, frozen=True):
    """The wishes of the user, and what follows from them."""

    scope: RestartScope = "auto"
    port: int = 0
    """MASTER_PORT; 0: unknown."""
    own_port: bool = False
    """The launcher has chosen it."""
    meet: Path | None = None
    """The directory in which the launchers of several nodes meet; None: each is for itself."""
    host: str = ""
    """Address of this node, for the other launchers."""
    comes_back: bool = False
    """No supervisor starts another launcher in the place of one that the others went on without."""


class ProgramKind(Enum):
    """UNKNOWN → RECOVERS or GROUP, as it shows itself."""

    UNKNOWN = "it has shown nothing yet"
    RECOVERS = "it recovers in its processes"
    GROUP = "its ranks depend on each other"


class AttemptStage(Enum):
    """RUNNING → ENDING → WAITING → RUNNING, for all ranks of this node together; RUNNING → DONE,
    and back when another node has to start again; any → LEFT → WAITING."""

    RUNNING = "each rank for itself"
    ENDING = "the ranks are being ended, to be started again together"
    WAITING = "none is left, and the other nodes are waited for"
    DONE = "all are done, and the other nodes may not be"
    LEFT = "the other nodes went on without this one, whose ranks are being ended"


class GroupRestart:
    """The knowledge of one launcher.

    Args:
        spec: what the user wants.
    """

    def __init__(self, spec: RestartSpec) -> None:
        fixed = {"rank": ProgramKind.RECOVERS, "all": ProgramKind.GROUP}
        self.kind = fixed.get(spec.scope, ProgramKind.UNKNOWN)
        self.stage = AttemptStage.RUNNING
        self.port = spec.port
        self._own_port = spec.own_port
        self._was_grouped = False
        self.number = -1
        """Launchers that sat on this node rank before; -1: they were not counted yet."""
        self.came_later = False
        """Another launcher sat here before: ranks are not started before all nodes are there."""
        self.world: LauncherWorld | None = None
        """The launchers of the other nodes, which start their ranks again with these; None: there
        are none."""

    @property
    def is_ending(self) -> bool:
        return self.stage in (AttemptStage.ENDING, AttemptStage.LEFT)

    def end(self, reason: str) -> None:
        """Note that all ranks are ended, here and on the other nodes."""
        self.stage = AttemptStage.ENDING
        if self.world is not None:
            self.world.over(reason)

    def leave(self) -> None:
        """Note that the other launchers have gone on without this one: its ranks are ended, and it
        meets the others anew."""
        self.stage = AttemptStage.LEFT
        if self.world is not None:
            self.world.close()
        self.world = None

    def is_left(self) -> bool:
        """Note that no rank is left here. Returns whether the other launchers are to be met anew,
        before the next attempt."""
        if self.stage is not AttemptStage.LEFT:
            return False
        self.stage, self.came_later = AttemptStage.WAITING, True
        return True

    def fails(self, reason: str) -> None:
        """Note that a rank here says that it fails, and takes long to end. The other nodes are told
        before: the errors of their ranks come from that, and these may end sooner."""
        if self.world is not None and self.stage is AttemptStage.RUNNING and self.is_lost(()):
            self.world.over(reason)

    def warn(self, reason: str) -> bool:
        """Note that a rank here says that it fails, and tell the other nodes.

        Returns:
            Whether a rank of another node had said so before: this one follows it, perhaps.
        """
        if self.world is None or self.stage is not AttemptStage.RUNNING:
            return False
        follows = self.world.is_warned
        if not follows:
            self.world.warn(reason)
        return follows

    def is_next(self) -> bool:
        """Note that no rank is left here. Returns whether the next attempt may begin at once."""
        if self.world is None:
            return True
        if self.stage is AttemptStage.ENDING:
            self.stage = AttemptStage.WAITING
            if self.world.has_met:
                self.world.ready()
        return False

    def is_done(self) -> bool:
        """Note that all ranks here are done. Returns whether those of all nodes are."""
        if self.world is None or self.kind is ProgramKind.RECOVERS:
            return True
        if self.stage is not AttemptStage.DONE:
            self.stage = AttemptStage.DONE
            self.world.done()
        return False

    def has_begun(self, is_first: bool) -> bool:
        """Note that all launchers are there. Returns whether the ranks are started again.

        Args:
            is_first: they were never together before.
        """
        if not is_first:
            return self.stage in (AttemptStage.WAITING, AttemptStage.DONE)
        if self.came_later or self.world is None:
            return True
        if self.stage in (AttemptStage.ENDING, AttemptStage.WAITING):
            # The other nodes' ranks are of the attempt that has failed here already.
            self.world.over("a rank failed before the nodes had met")
        if self.stage is AttemptStage.WAITING:
            self.world.ready()
        return False

    def ends_with(self, end: GenerationEnd, survivors: Iterable[int]) -> bool:
        """Tell whether the ranks here have to end because the attempt is over on another node.

        Args:
            end: of the launchers' world.
            survivors: process ids of the ranks here.
        """
        if self.stage is not AttemptStage.RUNNING:
            return False
        if end.kind == "fault":  # a rank there was in a process group
            self.grouped()
        if self.is_lost(survivors):
            return True
        # No rank here depends on the others, as far as is seen: they go on.
        if self.world is not None and self.world.has_met:
            self.world.ready()
        return False

    def begin_again(self) -> None:
        """Note that all ranks are started again."""
        self.stage = AttemptStage.RUNNING
        self.new_port()

    def new_port(self) -> None:
        """Choose another port for ranks that are started while no other is left.

        A process that a rank left behind may still listen on the old one, or it was in use already.
        """
        if self._own_port:
            self.port = free_port()

    def recovers(self) -> None:
        """Note that the library runs in a rank."""
        if self.kind is ProgramKind.UNKNOWN:
            self.kind = ProgramKind.RECOVERS

    def grouped(self) -> None:
        """Note that a rank was in a process group."""
        if self.kind is ProgramKind.UNKNOWN:
            self.kind = ProgramKind.GROUP

    def shows_itself(self, ranks: Iterable[int]) -> bool:
        """Look whether a rank is in a process group. A rank that is alone on its node leaves
        no other there that would show it when it has ended.

        Args:
            ranks: process ids of those that live.

        Returns:
            Whether it is known by now what kind the program is.
        """
        if self.port and any(is_on_port(pid, self.port) for pid in ranks):
            self._was_grouped = True
        return self._was_grouped or self.kind is not ProgramKind.UNKNOWN

    def is_lost(self, survivors: Iterable[int]) -> bool:
        """Tell whether all ranks have to be started again after one has ended.

        Args:
            survivors: process ids of the others.
        """
        self.shows_itself(survivors)
        if self._was_grouped:
            self.grouped()
        return self.kind is ProgramKind.GROUP
