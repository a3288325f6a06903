"""Act on spare nodes: make, change and delete the reservations that keep them."""

from __future__ import annotations

import logging

from slurm_resilience.clock import Clock
from slurm_resilience.controller.actions import AskForGift, AskForPool
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.spares.gift_lifecycle import GiftEvent, GiftState
from slurm_resilience.controller.spares.pool_lifecycle import PoolEvent
from slurm_resilience.controller.spares.pool_records import Gift, MoveGift, MovePool, SparePool
from slurm_resilience.errors import NotPermitted, SlurmError, SlurmUnreachable, SresError
from slurm_resilience.slurm.reservations import Reservation, ReservationClient

log = logging.getLogger("sresctld")

USER = "root"
"""The user of a pool's reservation: no user's job can start on a spare."""
LOOK_AGAIN_SECONDS = 0.4
"""Until a job's request for nodes is looked for once more."""
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
        self._looked_at: dict[int, float] = {}

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
        if action.event is PoolEvent.MAKE:
            # If the next look does not show it, a person has deleted it.
            text = f"{','.join(action.nodes)} are kept in {action.name}"
            self._move(action, PoolEvent.MADE, text, _terms_of(self._client, action.name))
        elif action.event is PoolEvent.CHANGE:
            # If the next look shows those that it had before, a person has put them back.
            self._move(action, PoolEvent.CHANGED, f"{','.join(action.nodes)} are kept")

    def ask_for_gift(self, snapshot: ClusterSnapshot, action: AskForGift) -> None:
        """Make a gift and offer it, or end it, unless its reservation has changed meanwhile."""
        client, gift = self._client, action.gift
        if client is None:
            return
        before = _find(snapshot.site.reservations or (), gift.name)
        if _find(client.reservations(), gift.name) != before:
            log.info("reservation %s has changed meanwhile: left alone", gift.name)
            return
        match action.event:
            case GiftEvent.MAKE:
                if not (action.is_begun or gift.is_requeue or self._is_asked_for(client, gift)):
                    return  # the pending job that seemed to ask is another one
                self._make(client, action)
                if not gift.is_requeue:
                    self._offer(client, gift)  # at once: the job waits
            case GiftEvent.OFFERED:
                self._offer(client, gift)
            case _:
                self._end(client, action)

    def _is_asked_for(self, client: ReservationClient, gift: Gift) -> bool:
        """Tell whether a job has a request for nodes in the queue; looked for at times only."""
        moment = self._clock.monotonic()
        if moment - self._looked_at.get(gift.job, -LOOK_AGAIN_SECONDS) < LOOK_AGAIN_SECONDS:
            return False
        self._looked_at[gift.job] = moment
        job = next((one for one in client.jobs() if one.id == gift.job), None)
        return job is not None and bool(client.exchange_requests(job, len(gift.spares)))

    def _make(self, client: ReservationClient, action: AskForGift) -> None:
        gift = action.gift
        if not action.is_begun:
            self._move_gift(action, GiftEvent.MAKE, action.text)
        try:
            client.give_nodes(gift.name, gift.nodes, str(gift.uid))
        except SlurmUnreachable:
            raise
        except (SlurmError, NotPermitted) as error:
            self._move_gift(action, GiftEvent.END, str(error))
            raise
        # As with a pool: if the next look does not show it, a person has deleted it.
        terms = _terms_of(client, gift.name)
        self._move_gift(action, GiftEvent.MADE, f"{gift.name} is there", terms)

    def _offer(self, client: ReservationClient, gift: Gift) -> None:
        """Tell one job of the reservation: no other asks for it by its name."""
        known = self._journal.spares().gifts.get(gift.job)
        job = next((one for one in client.jobs() if one.id == gift.job), None)
        if known is None or known.state is not GiftState.READY or job is None:
            return
        requests: tuple[int, ...] = (
            (job.id,) if job.waits_for_nodes and job.restarts > gift.restarts else ()
        )
        if not gift.is_requeue:
            requests = client.exchange_requests(job, len(gift.spares))
        for number in requests[:1]:
            client.put_job_in(number, gift.name)
            move = MoveGift(known, GiftEvent.OFFERED, f"job {number} is to start in {gift.name}")
            self._journal.move_gift(move, self._clock.now())

    def _end(self, client: ReservationClient, action: AskForGift) -> None:
        if not action.is_begun:
            self._move_gift(action, GiftEvent.END, action.text)
        for job in client.jobs():
            # Slurm deletes no reservation that a job still names.
            if job.reservation == action.gift.name:
                client.put_job_in(job.id, "")
        client.delete_reservation(action.gift.name)

    def _move_gift(self, action: AskForGift, event: GiftEvent, text: str, terms: str = "") -> None:
        move = MoveGift(action.gift, event, text, terms, action.is_taken)
        self._journal.move_gift(move, self._clock.now())

    def _order(self, client: ReservationClient, action: AskForPool) -> None:
        match action.event:
            case PoolEvent.MAKE:
                client.keep_nodes(action.name, action.nodes, USER)
            case PoolEvent.CHANGE:
                client.change_nodes(action.name, action.nodes)
            case _:
                client.delete_reservation(action.name)

    def _move(self, action: AskForPool, event: PoolEvent, text: str, terms: str = "") -> SparePool:
        move = MovePool(action.partition, event, text, action.nodes, terms, action.name)
        return self._journal.move_pool(move, self._clock.now())


def _terms_of(client: ReservationClient, name: str) -> str:
    """Return the terms of a reservation that was just made; empty: Slurm does not show them, and
    the next cycle sees why."""
    try:
        made = _find(client.reservations(), name)
    except SresError:
        return ""
    return made.terms if made is not None else ""


def _find(shown: tuple[Reservation, ...], name: str) -> Reservation | None:
    return next((one for one in shown if one.name == name), None)
