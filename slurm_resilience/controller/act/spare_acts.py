"""Act on spare nodes: make, change and delete the reservations that keep them."""

from __future__ import annotations

import logging

from slurm_resilience.clock import Clock
from slurm_resilience.controller.actions import AskForPool
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.spares.pool_lifecycle import PoolEvent
from slurm_resilience.controller.spares.pool_records import MovePool, SparePool
from slurm_resilience.errors import NotPermitted, SlurmError, SlurmUnreachable
from slurm_resilience.slurm.reservations import Reservation, ReservationClient

log = logging.getLogger("sresctld")

USER = "root"
"""The user of a pool's reservation: no user's job can start on a spare."""
_REFUSED = {
    PoolEvent.MAKE: PoolEvent.UNMADE,
    PoolEvent.CHANGE: PoolEvent.UNCHANGED,
    PoolEvent.REMOVE: PoolEvent.UNREMOVED,
}


class SpareActs:
    """The acts on reservations. What has become of one is seen in the next cycle."""

    def __init__(self, client: ReservationClient | None, journal: Journal, clock: Clock) -> None:
        self._client = client
        self._journal = journal
        self._clock = clock

    def ask(self, snapshot: ClusterSnapshot, action: AskForPool) -> None:
        """Ask Slurm for a change of a pool, unless its reservation has changed meanwhile."""
        if self._client is None:
            return
        before = _find(snapshot.site.reservations or (), action.name)
        if _find(self._client.reservations(), action.name) != before:
            log.info("reservation %s has changed meanwhile: left alone", action.name)
            return
        if not action.is_begun:
            self._move(action, action.event, f"{','.join(action.nodes) or action.name}")
        try:
            self._order(self._client, action)
        except SlurmUnreachable:
            raise  # it may have been done: what Slurm shows next tells
        except (SlurmError, NotPermitted) as error:
            is_there = _find(self._client.reservations(), action.name) is not None
            if action.event is not PoolEvent.MAKE or not is_there:
                self._move(action, _REFUSED[action.event], str(error))
            raise

    def _order(self, client: ReservationClient, action: AskForPool) -> None:
        match action.event:
            case PoolEvent.MAKE:
                client.keep_nodes(action.name, action.nodes, USER)
            case PoolEvent.CHANGE:
                client.change_nodes(action.name, action.nodes)
            case _:
                client.delete_reservation(action.name)

    def _move(self, action: AskForPool, event: PoolEvent, text: str) -> SparePool:
        move = MovePool(action.partition, event, text, action.nodes, name=action.name)
        return self._journal.move_pool(move, self._clock.now())


def _find(shown: tuple[Reservation, ...], name: str) -> Reservation | None:
    return next((one for one in shown if one.name == name), None)
