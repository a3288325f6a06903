"""Keep nodes for a run of deep checks, and give them back however it ends."""

from __future__ import annotations

import secrets
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from slurm_resilience.deepcheck.node_choice import (
    DeepReadiness,
    NodeChoice,
    choose_node,
    kept_nodes,
)
from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError
from slurm_resilience.slurm.hostlists import fold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slurm_resilience.clock import Clock
    from slurm_resilience.model import Node
    from slurm_resilience.slurm.maintenance import StepOrder
    from slurm_resilience.slurm.reservations import Reservation

LOOK_SECONDS = 5.0
"""Seconds between two looks at nodes that are waited for."""
RELEASE_TRIES = 60
RELEASE_SECONDS = 0.5
"""Seconds between two tries to remove the reservation, while the last job ends in it."""


class MaintenanceDoor(Protocol):
    """The requests to Slurm that a run of deep checks makes."""

    def nodes(self) -> tuple[Node, ...]: ...

    def reservations(self) -> tuple[Reservation, ...]: ...

    def set_comment(self, names: Sequence[str], comment: str) -> None: ...

    def set_node(self, names: Sequence[str], *, state: str = "", reason: str = "") -> None: ...

    def reserve(self, name: str, nodes: Sequence[str], minutes: int, user: str) -> None: ...

    def release(self, name: str) -> None: ...

    def cancel_jobs_in(self, reservation: str) -> None: ...

    def start_step(self, order: StepOrder) -> subprocess.Popen[str]: ...


class NodeKeeper:
    """Chooses nodes, reserves them, and removes the reservation."""

    def __init__(self, door: MaintenanceDoor, clock: Clock, tell: Callable[[str], None]) -> None:
        """
        Args:
            door: Slurm.
            clock: the time.
            tell: takes a line of progress.
        """
        self._door = door
        self._clock = clock
        self._tell = tell

    def choose(self, names: Sequence[str], minutes: int) -> tuple[NodeChoice, ...]:
        """Judge nodes as they are now."""
        shown = {node.name: node for node in self._door.nodes()}
        until = self._clock.now() + 60.0 * minutes
        kept = kept_nodes(self._door.reservations(), until)
        return tuple(
            choose_node(shown[name], kept)
            if name in shown
            else NodeChoice(name, DeepReadiness.AWAY, "Slurm does not know it any more")
            for name in names
        )

    def wait(self, names: Sequence[str], minutes: int, seconds: float) -> tuple[NodeChoice, ...]:
        """Judge nodes, and wait some time for the jobs of those that are busy."""
        deadline = self._clock.monotonic() + seconds
        told = ""
        while True:
            left = deadline - self._clock.monotonic()
            try:
                choices = self.choose(names, minutes)
            except SlurmUnreachable as error:
                if left <= 0:
                    raise
                news = f"waiting for Slurm: {error}"  # hours of waiting are not lost by a restart
            else:
                busy = [one.node for one in choices if one.readiness is DeepReadiness.BUSY]
                if not busy or left <= 0:
                    return choices
                news = f"waiting for the jobs on {fold(busy)}"
            if news != told:
                told = news
                self._tell(news)
            # Nothing tells when a job has ended but looking.
            self._clock.wait(threading.Event(), min(LOOK_SECONDS, left))

    @contextmanager
    def kept(self, names: Sequence[str], minutes: int, user: str) -> Iterator[str]:
        """Keep nodes within a `with`; gives the reservation's name.

        Raises:
            SresError: Slurm refuses, or another one keeps them meanwhile, and nothing is kept.
        """
        name = f"sres-deepcheck-{secrets.token_hex(4)}"
        is_refused = False
        try:
            try:
                self._door.reserve(name, names, minutes, user)
            except SresError as error:
                is_refused = not isinstance(error, SlurmUnreachable)
                raise
            self._refuse_shared(name, names, minutes)
            yield name
        finally:
            # Also where the answer was not waited for, or did not come: it may have been made.
            if not is_refused:
                try:
                    self._release(name)
                except KeyboardInterrupt:
                    self._release(name)
                    raise

    def _refuse_shared(self, name: str, names: Sequence[str], minutes: int) -> None:
        """Refuse nodes that another run began to keep at the same time: maintenance reservations
        may overlap, and two loads on one node tell nothing of it.

        Raises:
            SlurmError: there are some.
        """
        until = self._clock.now() + 60.0 * minutes
        for other in self._door.reservations():
            shared = set(names) & set(other.nodes)
            if shared and other.name != name and other.starts_at < until:
                raise SlurmError(
                    f"{fold(sorted(shared))}: kept by reservation {other.name} since a moment ago, "
                    "so nothing was run; try again when it has gone"
                )

    def _release(self, name: str) -> None:
        with suppress(SresError):
            self._door.cancel_jobs_in(name)
        trouble = ""
        for _ in range(RELEASE_TRIES):
            try:
                self._door.release(name)
                return
            except NotFound:
                return
            except SlurmError as error:
                if "invalid" in str(error).lower():
                    return  # there is none of that name
                trouble = str(error)
            except SresError as error:
                trouble = str(error)
                break
            self._clock.wait(threading.Event(), RELEASE_SECONDS)
        self._tell(
            f"reservation {name} could not be removed ({trouble}); "
            f"`scontrol delete reservationname={name}` does it, or Slurm at its end"
        )
