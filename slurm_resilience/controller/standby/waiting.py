"""A standby: it follows the journal of the active sresctld until this machine's slurmctld is in
control, and no other sresctld may be active."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slurm_resilience.clock import Clock
from slurm_resilience.controller.standby.follower import JournalFile, wants_copy
from slurm_resilience.errors import NotPermitted, SresError, WireError
from slurm_resilience.slurm.controllers import ControllerHost
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import Goodbye, JournalCopy, JournalHead, Refused

log = logging.getLogger("sresctld.standby")

LISTEN_SECONDS = 0.25
LOOK_SECONDS = 1.0
"""Between two looks at who is in control."""
HEAD_SECONDS = 10.0
SILENT_SECONDS = 5.0
"""An active sresctld speaks every second: one that is silent for longer is not connected."""
UNREACHABLE_SECONDS = 3.0
"""Another sresctld does not answer if the last try was within this time."""


class StandbyBorders(NamedTuple):
    """The borders of a standby; tests have their own."""

    dial: Callable[[ControllerHost], Connection]
    check_control: Callable[[], None]
    """Raises an SresError while this machine's slurmctld is not in control."""
    clock: Clock


class Standby:
    """One role of a sresctld, from its start or its deposition until it may become active."""

    def __init__(
        self, journal: JournalFile, others: Sequence[ControllerHost], borders: StandbyBorders
    ) -> None:
        """
        Args:
            journal: our copy.
            others: the machines of the other sresctld.
            borders: of the outside.
        """
        self._journal = journal
        self._others = tuple(others)
        self._dial, self._check_control, self._clock = borders
        self._turn = 0
        self._connection: Connection | None = None
        self._head: JournalHead | None = None
        self._awaits_copy = False
        self._heard_at = 0.0
        self._refused_at: dict[str, float] = {}
        """When (monotonic) each of the others did not answer for the last time."""
        self._said = ""
        self.handed_over_by = ""
        """The machine whose sresctld does not act, and whose journal we have all of."""

    def wait(self, stop: threading.Event) -> bool:
        """Follow until this sresctld may become active; False: ``stop`` was set."""
        looked = -LOOK_SECONDS
        try:
            while not stop.is_set():
                self._follow()
                now = self._clock.monotonic()
                if now - looked >= LOOK_SECONDS:
                    looked = now
                    if self._may_become_active():
                        return True
                if self._connection is None:
                    self._clock.wait(stop, LISTEN_SECONDS)
            if self._connection is not None:
                self._connection.send(Goodbye("the standby stops"))
            return False
        except WireError:
            return False
        finally:
            self._hang_up()

    def _follow(self) -> None:
        """Listen to the active sresctld for a moment, or look for it."""
        try:
            if self._connection is None:
                self._call()
                return
            message = self._connection.receive(LISTEN_SECONDS)
            now = self._clock.monotonic()
            if message is None:
                is_active = self._head is not None and self._head.is_active
                if is_active and now - self._heard_at > SILENT_SECONDS:
                    raise WireError("the active sresctld is silent")
                return
            if isinstance(message, Refused):
                raise WireError(message.reason)
            self._heard_at = now
            answer = self._journal.take(message)
            if isinstance(message, JournalCopy) and not message.left:
                self._awaits_copy = False
            if answer is not None:
                self._connection.send(answer)
        except WireError as error:
            self._say(f"not connected: {error}")
            self._hang_up()

    def _call(self) -> None:
        host = self._others[self._turn % len(self._others)]
        self._turn += 1
        try:
            connection = self._dial(host)
            hello = self._journal.hello()
            connection.send(hello)
            head = connection.receive(HEAD_SECONDS)
            if isinstance(head, Refused) and head.code == NotPermitted.exit_code:
                # It acts, and asks no marker: beside it this one may never act.
                connection.close()
                self._refused_at.pop(host.name, None)
                self._say(
                    f"{host.name}'s sresctld acts alone and knows no standby: give both machines "
                    "the same controller.host, and restart it"
                )
                return
            if not isinstance(head, JournalHead):
                connection.close()
                raise WireError(f"{host.name} did not tell how far its journal is")
        except SresError as error:
            self._refused_at[host.name] = self._clock.monotonic()
            self._say(f"{host.name} does not answer: {error}")
            return
        self._connection, self._head = connection, head
        self._heard_at = self._clock.monotonic()
        self._awaits_copy = not head.is_active and wants_copy(hello, head)
        what = "is active" if head.is_active else "is a standby too"
        self._say(f"{head.host} {what}; its journal: {head.history}, record {head.position}")

    def _may_become_active(self) -> bool:
        try:
            self._check_control()
        except SresError as error:
            log.debug("not in control: %s", error)
            return False
        head = self._head
        if self._connection is not None and head is not None:
            if head.is_active:
                self._say(
                    f"this machine's slurmctld is in control, and {head.host} is still active"
                )
                # It sees that too, and becomes a standby: then it is called anew.
                return False
            if not self._awaits_copy:
                self.handed_over_by = head.host
            return not self._awaits_copy
        now = self._clock.monotonic()
        return all(
            now - self._refused_at.get(host.name, -UNREACHABLE_SECONDS) < UNREACHABLE_SECONDS
            for host in self._others
        )

    def _hang_up(self) -> None:
        connection, self._connection, self._head = self._connection, None, None
        self._journal.forget_part()
        self._awaits_copy = False
        if connection is not None:
            connection.close()

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            log.info("standby: %s", text)
