"""End what auto-resume started on this node once the node is cut off.

Such a node goes on computing while sresctld starts the job again elsewhere: two copies would write
the same checkpoint. Nothing is ended as long as any machine answers: then the control plane is
down, or this daemon.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from slurm_resilience.agent import tcp_probe
from slurm_resilience.agent.agent_link import LinkState
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.agent.processes import steps
from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.model import Finding, Severity

log = logging.getLogger("sresd.fence")

LOOK_INTERVAL_SECONDS = 1.0
LOOK_TIMEOUT_SECONDS = 1.0
"""Seconds between two looks while disconnected, and for one look."""
LEAST_LOOKS = 3
"""Looks in a row without any answer: a machine that was frozen for a minute was not alone."""
GRACE_SECONDS = 3.0
"""Seconds between SIGTERM and SIGKILL. Short: the other copy is starting."""
ASK_AGAIN_SECONDS = 30.0
"""Seconds until Slurm is asked again where slurmctld listens."""


class LookResult(NamedTuple):
    """The result of one look."""

    control: bool
    """The machine of sresctld or slurmctld answered."""
    peers: int
    """Other nodes that were tried."""
    answered: int


class IsolationDecision(NamedTuple):
    end: bool
    reason: str


def decide(
    silence: float, looks: int, contact: LookResult, fence_after: float
) -> IsolationDecision:
    """Tell whether this node has been cut off for long enough. Pure.

    Args:
        silence: seconds since any machine was heard.
        looks: looks in a row without any answer, this one included.
        contact: what this look found.
        fence_after: seconds of silence that end steps; 0: never.
    """
    if contact.control:
        return IsolationDecision(False, "the controller's machine answers")
    if contact.answered:
        return IsolationDecision(
            False, "other nodes answer: the control plane is down, not this node"
        )
    if not contact.peers:
        return IsolationDecision(
            False, "no other node is known, so none can tell which one is cut off"
        )
    if fence_after <= 0:
        return IsolationDecision(False, "cut off; fencing is switched off (agent.fence_after)")
    if silence < fence_after or looks < LEAST_LOOKS:
        return IsolationDecision(
            False, f"no machine answers; steps are ended after {fence_after:g} s of this"
        )
    return IsolationDecision(True, f"cut off from the controller and {contact.peers} nodes")


class Isolation:
    """Looks around while the link is down; `run` is a thread's body."""

    def __init__(
        self,
        settings: Config,
        node: str,
        facts: SlurmFacts,
        link: Callable[[], LinkState],
        outbox: Outbox,
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        self._settings = settings
        self._node = node
        self._facts = facts
        self._link = link
        self._outbox = outbox
        self._clock = clock
        self._stop = stop
        self._control: frozenset[tcp_probe.ProbeAddress] = frozenset()
        self._peers: frozenset[tcp_probe.ProbeAddress] = frozenset()
        self._learned = (0, 0.0)
        self._is_resolved = False
        """Names of the last welcome could be looked up."""
        self._last_reason = ""
        self._ended: set[str] = set()
        """Steps that were ended in this solitude; one that will not die is reported once."""
        self._known: frozenset[str] = frozenset()
        """Steps that auto-resume started, as the first look of this solitude found: later their
        processes may hang, in a file server that is cut off as well."""
        self._told: set[str] = set()
        """Steps that were said to be left alone."""

    def run(self) -> None:
        heard, looks = self._clock.monotonic(), 0
        while not self._clock.wait(self._stop, LOOK_INTERVAL_SECONDS):
            state = self._link()
            # A session may have come and gone between two looks: its peers count all the same.
            if state.connected or state.sessions != self._learned[0]:
                self._learn(state)
            if state.connected:
                heard, looks, self._last_reason = self._clock.monotonic(), 0, ""
                self._ended.clear()
                self._told.clear()
                continue
            contact = self.look()
            if contact.control or contact.answered:
                heard, looks = self._clock.monotonic(), 0
            else:
                looks += 1
                if looks == 1 and contact.peers:
                    self._known = frozenset(
                        step.id for step in steps.asked_for(steps.running(self._node))
                    )
            silence = self._clock.monotonic() - heard
            decision = decide(silence, looks, contact, self._settings.agent.fence_after)
            if decision.reason != self._last_reason:
                log.warning("%s", decision.reason)
                self._last_reason = decision.reason
            if decision.end and not self._link().connected:
                self.end_steps(f"{decision.reason} for {silence:.0f} s")

    def look(self) -> LookResult:
        """Try every known address once."""
        answered = tcp_probe.reach(self._control | self._peers, LOOK_TIMEOUT_SECONDS)
        return LookResult(
            bool(answered & self._control), len(self._peers), len(answered & self._peers)
        )

    def end_steps(self, reason: str) -> None:
        """End every step that asked for auto-resume; done again as long as the node is alone."""
        found = steps.running(self._node)
        asked_for = steps.asked_for(found, self._known)
        for step in asked_for:
            if not step.members:
                continue  # ended; its slurmstepd waits for slurmctld
            log.warning("ending step %s: %s", step.id, reason)
            killed = steps.end(step, GRACE_SECONDS)
            count = f"{len(step.members)} processes, {killed} killed{_unread(step)}"
            text = f"ended step {step.id} ({count}): {reason}"
            log.warning("%s", text)
            if step.id not in self._ended:
                self._ended.add(step.id)
                self._note(step, text)
        for step in found:
            if step.unreadable and step not in asked_for and step.id not in self._told:
                self._told.add(step.id)
                why = "it cannot be told whether auto-resume started it"
                text = f"left step {step.id} alone: {why}{_unread(step)}"
                log.warning("%s", text)
                self._note(step, text)

    def _note(self, step: steps.LocalStep, text: str) -> None:
        at = self._clock.now()
        self._outbox.note(Finding("fence", Severity.MONITOR, text, at, subject=step.id))

    def _learn(self, state: LinkState) -> None:
        """Resolve the address of each peer while name servers can still be reached."""
        session, asked = self._learned
        now = self._clock.monotonic()
        is_known = self._facts.cluster is not None and self._is_resolved
        if session == state.sessions and (is_known or now - asked < ASK_AGAIN_SECONDS):
            return
        port, hosts = self._settings.controller.port, self._settings.controller.hosts
        control = [(host, port) for host in hosts]
        try:
            cluster = self._facts.ask_cluster()
        except SresError as error:
            log.debug("%s", error)
        else:
            control += [(one, cluster.slurmctld_port) for one in cluster.controllers]
            control += [] if hosts else [(one, port) for one in cluster.controllers]
        addresses = _addresses(control)
        own = tcp_probe.own_addresses()
        peers = _addresses(_well_formed(state.peers))
        # Without name servers what was known still holds, and they are asked again: a node that
        # knows no other one could never tell that it is cut off.
        self._is_resolved = bool(addresses) and bool(peers or not state.peers)
        self._control = addresses or self._control
        if peers or not state.peers:
            self._peers = frozenset(peer for peer in peers if peer.ip not in own)
        self._learned = (state.sessions, now)
        log.debug("control %s, peers %s", self._control, self._peers)


def _unread(step: steps.LocalStep) -> str:
    """Name the processes of a step that cannot be read."""
    pids = ", ".join(str(process.pid) for process in step.unreadable)
    return f"; these hang in the kernel and cannot be read: {pids}" if pids else ""


def _well_formed(peers: Iterable[str]) -> list[tuple[str, int]]:
    pairs = []
    for peer in peers:
        try:
            pairs.append(tcp_probe.split(peer))
        except UsageError as error:
            log.error("sresctld names a node to try that has no usable address: %s", error)
    return pairs


def _addresses(pairs: Iterable[tuple[str, int]]) -> frozenset[tcp_probe.ProbeAddress]:
    return frozenset(address for host, port in pairs for address in tcp_probe.resolve(host, port))
