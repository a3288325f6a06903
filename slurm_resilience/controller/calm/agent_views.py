"""Each node's sresd at one moment, as the registry knows it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator, KeysView, Mapping

import msgspec

from slurm_resilience.controller.journal.records import FindingOfBoot
from slurm_resilience.model import FAULTY, Finding


class AgentPresence(enum.Enum):
    """The presence of a node's sresd."""

    EXPECTED = "known from the journal, not heard since our start"
    CONNECTED = "connected"
    LOST = "heard, and not connected any more"
    STOPPED = "it said goodbye: its silence is no sign"


class AgentView(msgspec.Struct, frozen=True, gc=False):
    """One node's sresd at one moment."""

    # gc=False: it refers to nothing that refers back, and a round may make thousands of them.

    node: str
    presence: AgentPresence
    silence: float
    """Seconds since it was last heard (since our start, if never)."""
    heard_at: float
    """The same as a moment of the monotonic clock."""
    boot_id: str = ""
    instance: str = ""
    findings: tuple[Finding, ...] = ()
    unjudged: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    """The checks that have passed or failed: what such a one does not find any more is over."""
    steady: float = 0.0
    """Seconds since its present connection, or the last gap between its messages."""
    reported: bool = False
    """It has said on this connection which findings hold: until then, none is no news."""
    checked: bool = False
    """It has said on this connection that each of its checks has run since it started."""
    drivers: tuple[str, ...] = ()
    """Each with its version."""

    def faults_of_boot(self) -> dict[FindingOfBoot, float]:
        """Return what takes the node out of service, with its boot, and when it was found: seconds
        of that boot where they are known, else of the node's date."""
        faults = [found for found in self.findings if found.severity in FAULTY]
        return {(self.boot_id, *found.key): found.uptime or found.at for found in faults}

    @property
    def vouches(self) -> bool:
        """It was heard, and has looked: a fault that it does not report was not there."""
        return self.is_heard and self.reported and self.checked

    @property
    def is_connected(self) -> bool:
        return self.presence is AgentPresence.CONNECTED

    @property
    def was_stopped(self) -> bool:
        """Stopped on purpose."""
        return self.presence is AgentPresence.STOPPED

    @property
    def is_heard(self) -> bool:
        """It has spoken since our start, and was not stopped since."""
        return self.presence in (AgentPresence.CONNECTED, AgentPresence.LOST)


class AgentFacts(msgspec.Struct, frozen=True, gc=False):
    """All that is known of a node's sresd, but its last sign of life: it changes seldom.

    `AgentView` explains the fields.
    """

    steady_since: float
    """Its present connection, or the last gap between its messages (monotonic)."""
    presence: AgentPresence = AgentPresence.EXPECTED
    boot_id: str = ""
    instance: str = ""
    findings: tuple[Finding, ...] = ()
    unjudged: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    reported: bool = False
    checked: bool = False
    drivers: tuple[str, ...] = ()


def view_of(node: str, facts: AgentFacts, heard_at: float, moment: float) -> AgentView:
    """Return a node's sresd at a moment (monotonic).

    Args:
        node: its name.
        facts: what is known of its sresd.
        heard_at: its last sign of life.
        moment: of the view.
    """
    return AgentView(
        node=node,
        presence=facts.presence,
        silence=moment - heard_at,
        heard_at=heard_at,
        boot_id=facts.boot_id,
        instance=facts.instance,
        findings=facts.findings,
        unjudged=facts.unjudged,
        judged=facts.judged,
        steady=moment - facts.steady_since,
        reported=facts.reported,
        checked=facts.checked,
        drivers=facts.drivers,
    )


class AgentViews(Mapping[str, AgentView]):
    """The view of each agent at one moment, made when it is asked for: a round asks for few."""

    def __init__(
        self, facts: dict[str, AgentFacts], heard_at: dict[str, float], moment: float
    ) -> None:
        """
        Args:
            facts: of each node's agent; not changed any more.
            heard_at: the last sign of life of each of them.
            moment: of all views (monotonic).
        """
        self.facts = facts
        self.heard_at = heard_at
        self.moment = moment

    def __getitem__(self, node: str) -> AgentView:
        return view_of(node, self.facts[node], self.heard_at[node], self.moment)

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)

    def __contains__(self, node: object) -> bool:
        return node in self.facts

    def keys(self) -> KeysView[str]:
        """Return the nodes' names."""
        return self.facts.keys()
