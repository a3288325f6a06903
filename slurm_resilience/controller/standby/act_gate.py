"""The permission to act: always there with one controller; with two, for the active one alone."""

from __future__ import annotations

from typing import Any, Protocol, cast

import msgspec

from slurm_resilience.controller.standby.pair_states import PairState
from slurm_resilience.controller.standby.primacy import NotPrimary, Primacy
from slurm_resilience.controller.standby.shipper import Shipper
from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.controllers import REFUSED_IN_STANDBY


class StandbyFacts(msgspec.Struct, frozen=True):
    """The facts about the standby, for `sres status` and for alarms."""

    active: str
    """The machine of the active sresctld."""
    standby: str
    """The machine of the standby; empty: none has connected."""
    state: PairState
    seconds: float
    """For so long it has been in this state."""
    doubt: str = ""
    """Words for the acts that the active one may lack since it took over; empty: none."""


class ActGate(Protocol):
    """Asked before a round, before each act, and once more before one that cannot be undone."""

    is_deposed: bool
    """Another sresctld acts: this one must stop."""

    def check(self) -> None:
        """Check that this sresctld may act.

        Raises:
            SresError: it may not, or it cannot be told.
        """
        ...

    def begin_act(self) -> None:
        """Check the same for an act that cannot be undone, and stands in the journal's last record.

        Raises:
            SresError: it may not be begun.
        """
        ...

    def facts(self) -> StandbyFacts | None:
        """Return the facts about the standby; None: there is one controller only."""
        ...


class OpenGate:
    """The gate of the only controller."""

    is_deposed = False

    def check(self) -> None:
        return

    def begin_act(self) -> None:
        return

    def facts(self) -> StandbyFacts | None:
        return None


class PairGate:
    """The gate of one of two controllers."""

    def __init__(self, primacy: Primacy, history: str, shipper: Shipper, doubt: str) -> None:
        """
        Args:
            primacy: looks at the evidence.
            history: of our journal.
            shipper: knows what the standby has.
            doubt: what we do not know since we took over; empty: nothing.
        """
        self._primacy = primacy
        self._history = history
        self._shipper = shipper
        self._doubt = doubt
        self.is_deposed = False

    def check(self) -> None:
        try:
            self._primacy.check_active(self._history)
        except NotPrimary:
            self.is_deposed = True
            raise

    def begin_act(self) -> None:
        # The standby's word may take seconds, in which another sresctld may have become active.
        self._shipper.begin_act()
        self.check()

    def facts(self) -> StandbyFacts | None:
        standby, state, seconds = self._shipper.facts()
        return StandbyFacts(self._primacy.host.name, standby, state, seconds, self._doubt)


OPEN_GATE: ActGate = OpenGate()


class _GatedClient:
    """Checks the evidence before each request to Slurm: a round that may not act reads nothing, and
    each act begins with a look."""

    def __init__(self, client: SlurmClient, gate: ActGate) -> None:
        self._client = client
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._client, name)

        def checked(*words: Any, **named: Any) -> Any:
            self._gate.check()
            try:
                return request(*words, **named)
            except SlurmUnreachable as error:
                # The surest sign of all: this machine's slurmctld itself says who it is.
                self._gate.is_deposed |= REFUSED_IN_STANDBY in str(error)
                raise

        return checked


def gated(client: SlurmClient, gate: ActGate) -> SlurmClient:
    """Return a client that asks the gate before each request; the open gate's is the same."""
    return client if gate is OPEN_GATE else cast(SlurmClient, _GatedClient(client, gate))
