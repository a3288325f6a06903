"""Decide, for a node that is empty: whether its replacement may begin, or it lives again. Pure.

A replacement cannot be undone. So it rests on what is seen in this very moment, never on what the
incident began with; `act` looks once more before it starts the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from math import inf
from typing import Literal, NamedTuple

from slurm_resilience.config import Config
from slurm_resilience.controller.actions import (
    Action,
    ProbeNode,
    RaiseAlarm,
    StartReplacement,
    Transition,
)
from slurm_resilience.controller.decide.breaker import SHOWN_NODES
from slurm_resilience.controller.decide.escalation import is_worn_out
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.decide.node_validation import return_seconds
from slurm_resilience.controller.diagnose import (
    is_speaking,
    life_of,
    life_without_sresd,
    open_findings,
)
from slurm_resilience.controller.journal.records import HOUR_SECONDS, Incident
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import REPLACE, Node

FRESH_SECONDS = 2.0
"""An answer to a probe says what is true now for this long."""
STEADY_SECONDS = 3.0
"""A node that lives again has beaten for this long, and could report what is wrong."""
WAITING_ALARM_SECONDS = 600.0
"""A replacement that waits for something other than its turn for this long raises an alarm."""


class Readiness(NamedTuple):
    """The judgement on the start of a replacement, with its reason."""

    kind: Literal["start", "wait", "lives"]
    text: str
    probe: bool = False


def readiness(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Readiness:
    """Judge whether the fault of an incident still stands, and no repair has the node in hand."""
    ready = _fault_stands(snapshot, config, incident, node)
    if ready.kind == "start" and node.name in snapshot.repairs.stopped:
        return Readiness("wait", "an earlier repair of it, which a person stopped, has not ended")
    return ready


def _fault_stands(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Readiness:
    if is_still_asked_for(snapshot, config, incident):
        return Readiness("start", "a person asked for it")
    if "MAINTENANCE" in node.flags:
        return Readiness("wait", "it is in a maintenance reservation")
    if node.is_being_rebooted:
        return Readiness("wait", f"{node.state}: Slurm reboots it")
    agent = snapshot.agents.get(node.name)
    if agent is not None and is_speaking(snapshot, config.detect, node.name):
        if not agent.reported or agent.steady < STEADY_SECONDS:
            return Readiness("wait", "its sresd beats again; its findings are waited for")
        found = open_findings(snapshot, node.name)
        if found:
            return Readiness("start", f"{found[0].check}: {found[0].text}")
        return Readiness("lives", "its sresd beats, and nothing is found on it")
    newest = next(iter(reversed(snapshot.probes.get(node.name, ()))), None)
    age = snapshot.age_of_last_probe(node.name)
    if newest is None or age > FRESH_SECONDS:
        return Readiness("wait", "it is being probed", probe=True)
    # Not with every cycle: each answer wakes the next one.
    is_aging = age > FRESH_SECONDS / 2
    if newest.answer == "answered" and agent is None and node.is_responding:
        return Readiness("lives", "slurmd answers, and no sresd runs there")
    life = life_of(snapshot, config.detect, node)
    if agent is not None and agent.was_stopped and not node.is_responding:
        # Its sresd has said goodbye, and then the machine was lost: Slurm gets no answer either.
        life = life_without_sresd(snapshot, config.detect, node)
    if life.kind != "dead":
        return Readiness("wait", life.reason, is_aging)
    if _counted(snapshot, node.name, life.silence) < config.replace.silent_for:
        text = f"{life.reason}; it is given {config.replace.silent_for:.0f} s to come back"
        return Readiness("wait", text, is_aging)
    seconds = return_seconds(config)
    if incident.is_end_unknown and snapshot.now - incident.times.run_lost < seconds:
        text = f"how its last repair ended is not known: it is given {seconds:.0f} s to come back"
        return Readiness("wait", text, is_aging)
    return Readiness("start", life.reason)


def is_still_asked_for(snapshot: ClusterSnapshot, config: Config, incident: Incident) -> bool:
    """Tell whether a person's request stands by itself, whatever the node shows.

    Once a repair has ended well, or its end is not known, and another machine is there or none can
    be looked at, the node is judged as after a fault: who asked for one machine must not get a
    second one for that.
    """
    if incident.kind != "requested" or _is_another_machine(snapshot, incident):
        return False
    times = incident.times
    has_ended_well = 0.0 < times.run_started <= times.run_ended
    may_be_repaired = has_ended_well or incident.is_end_unknown
    return not may_be_repaired or is_speaking(snapshot, config.detect, incident.node)


def _is_another_machine(snapshot: ClusterSnapshot, incident: Incident) -> bool:
    """Tell whether a replacement that has failed brought another machine all the same: what kept
    that one out may be mended by now, and then there is nothing left to ask for. After a repair
    whose end is not known another boot tells so much, too."""
    agent, before = snapshot.agents.get(incident.node), incident.before
    if agent is None:
        return False
    if incident.is_end_unknown and before.boot_id not in ("", agent.boot_id):
        return True
    is_tried = bool(incident.tries) and incident.action == REPLACE
    return is_tried and before.instance not in ("", agent.instance)


def _is_due(snapshot: ClusterSnapshot, config: Config, incident: Incident) -> bool:
    """Tell whether only a fresh look is missing for the start of a replacement."""
    agent = snapshot.agents.get(incident.node)
    silence = agent.silence if agent is not None else inf
    silence = _counted(snapshot, incident.node, silence)
    return snapshot.now >= incident.next_try and silence >= config.replace.silent_for


def _counted(snapshot: ClusterSnapshot, name: str, silence: float) -> float:
    """Return the silence that counts: only what is later than a person's resume of the node, which
    may still boot, and than a time in which no node at all was heard. When the power of the hall is
    back, some boot later than others."""
    heard_for = snapshot.moment - snapshot.heard.since
    return min(silence, heard_for, snapshot.now - snapshot.memory.released.get(name, -inf))


def start_or_return(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, node: Node
) -> Iterator[Action]:
    """Find what comes next for a node without jobs: its replacement, or its return."""
    ready = readiness(snapshot, config, incident, node)
    if ready.probe:
        yield ProbeNode(node.name, is_urgent=_is_due(snapshot, config, incident))
    if ready.kind == "lives":
        if incident.state is NodeState.EMPTY:
            yield from _back(snapshot, config, incident, ready.text)
    elif ready.kind == "start":
        if snapshot.now >= incident.next_try:
            yield from _start_or_give_up(snapshot, config, incident, ready.text)
    elif _waits_for(snapshot, incident) > WAITING_ALARM_SECONDS:
        text = f"its replacement waits, and a person may have to look: {ready.text}"
        yield RaiseAlarm(f"waits-{incident.id}", text, node.name, incident=incident.id)


def _waits_for(snapshot: ClusterSnapshot, incident: Incident) -> float:
    """Return the seconds for which a replacement has waited and sresctld could see Slurm."""
    waited = snapshot.now - max(incident.times.marked, incident.next_try)
    return min(waited, snapshot.moment - snapshot.heard.sighted_since)


def is_about_waiting(action: Action) -> bool:
    """Tell whether it is the alarm of a replacement that waits for something but its turn."""
    return isinstance(action, RaiseAlarm) and action.key.startswith("waits-")


def _start_or_give_up(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, text: str
) -> Iterator[Action]:
    """Start it, unless that did not help often enough already, in earlier incidents too."""
    key, too_often = _too_often(snapshot, config, incident)
    if not too_often:
        yield StartReplacement(incident.node, incident.id)
    elif incident.state is NodeState.EMPTY:
        # Else in the next cycle: its last job has left it in this very one.
        text = f"{text}; {too_often}"
        yield RaiseAlarm(f"{key}-{incident.id}", text, incident.node, incident=incident.id)
        yield Transition(incident.node, incident.id, NodeEvent.GAVE_UP, text)


def _too_often(snapshot: ClusterSnapshot, config: Config, incident: Incident) -> tuple[str, str]:
    """Return why a person must look first, with the name of the limit; empty: nothing does."""
    before = sum(name == incident.node for _, name in snapshot.memory.starts)
    if incident.kind != "requested" and before >= config.replace.attempts:
        return "again", f"replaced {before} times within an hour already, a person must look"
    return "worn", is_worn_out(snapshot, config, incident)


def _back(
    snapshot: ClusterSnapshot, config: Config, incident: Incident, text: str
) -> Iterator[Action]:
    flaps, limit = snapshot.memory.flaps.get(incident.node, 0), config.recovery.max_flaps
    if flaps >= limit and not snapshot.memory.breaker.is_tripped:
        minutes = config.recovery.flap_window / 60
        text = (
            f"{text}; but it came and went {flaps + 1} times within {minutes:.0f} min: it is kept "
            "out of service, a person must look"
        )
        yield RaiseAlarm(f"flaps-{incident.id}", text, incident.node, incident=incident.id)
        yield Transition(incident.node, incident.id, NodeEvent.GAVE_UP, text)
        return
    yield Transition(incident.node, incident.id, NodeEvent.CAME_BACK, text)


class Ceilings:
    """The numbers of replacements that may run and begin, those of this cycle included."""

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        config: Config,
        incidents: Iterable[Incident],
    ) -> None:
        self._snapshot = snapshot
        self._limits = config.replace
        running = [known.node for known in incidents if known.state.is_running_program]
        # A program that was told to stop takes its time.
        running += snapshot.repairs.stopped
        self._running = len(running)
        self._by_partition = Counter(p for name in running for p in self._partitions(name))
        self._within_hour = len(snapshot.memory.starts)

    def take(self, incident: Incident) -> bool:
        """Tell whether one more may begin, and count it."""
        if self._snapshot.repairs.no_room:
            return False  # its program would not be started, and the try would count
        is_asked = incident.kind == "requested"
        if not is_asked and self._snapshot.memory.breaker.is_tripped:
            return False
        if not is_asked and self._within_hour >= self._limits.max_per_hour:
            return False
        if self.awaited_end(incident.node):
            return False
        self._running += 1
        self._within_hour += 1
        self._by_partition.update(self._partitions(incident.node))
        return True

    def awaited_end(self, name: str) -> str:
        """Return what must end before one more may run, in words; empty: nothing."""
        if self._running >= self._limits.max_running:
            return f"the end of {_one_of(self._running)} (replace.max_running)"
        for partition in self._partitions(name):
            running = self._by_partition[partition]
            if running >= self._limits.max_running_partition:
                return (
                    f"the end of {_one_of(running)} in partition {partition} "
                    "(replace.max_running_partition)"
                )
        return ""

    def alarm(self, refused: Collection[str]) -> Iterator[RaiseAlarm]:
        """Tell of the nodes that may wait for most of an hour.

        Args:
            refused: nodes that were not let through.
        """
        is_full = self._within_hour >= self._limits.max_per_hour
        no_room = self._snapshot.repairs.no_room
        if not refused or no_room or not is_full or self._snapshot.memory.breaker.is_tripped:
            return
        shown = ",".join(list(refused)[:SHOWN_NODES])
        text = (
            f"{len(refused)} nodes wait for their replacement ({shown}"
            f"{', …' if len(refused) > SHOWN_NODES else ''}): {self._within_hour} began within an "
            "hour, as many as replace.max_per_hour allows. A request of yours does not wait "
            "(`sres node replace`)"
        )
        yield RaiseAlarm(f"per-hour-{self._snapshot.now // HOUR_SECONDS:.0f}", text)

    def _partitions(self, name: str) -> Collection[str]:
        node = self._snapshot.nodes.get(name)
        return node.partitions if node is not None else ()


def _one_of(running: int) -> str:
    return "the only replacement" if running == 1 else f"one of {running} replacements"
