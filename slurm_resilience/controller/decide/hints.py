"""Decide, for what sresctld may not mend: tell people, with what to do about it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from slurm_resilience.config import DetectSettings
from slurm_resilience.controller.actions import RaiseAlarm
from slurm_resilience.controller.calm.notable import notable
from slurm_resilience.controller.decide.breaker import SHOWN_NODES
from slurm_resilience.controller.diagnose import NodeDiagnosis, hears_none
from slurm_resilience.controller.journal.records import EATS_ATTEMPTS, WRONG_RESULTS
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.standby.pair_states import PairState
from slurm_resilience.model import Node

_GRES_IN_USE = re.compile(r":[1-9]\d*(?:\(|,|$)")
"""A count above zero in GresUsed, e.g. ``gpu:h100:2(IDX:0-1)``."""

WRONG_RESULTS_FOR_ALARM = 2
"""Words of trainings about one node, of which a job gives one in an hour."""
UNPROBED_SECONDS = 60.0
"""The silence of a node that could not be probed even once, until a person is told."""

AWAY_SECONDS = 30.0
"""A standby that is restarted is back by then."""
DAY_SECONDS = 86400.0


def near_misses(snapshot: ClusterSnapshot) -> Iterator[RaiseAlarm]:
    """Raise an alarm for reasons that nearly spell a request."""
    for node in notable(snapshot.nodes).values():
        # Slurm 24.11 leaves the reason of a node that was resumed.
        if node.reason and node.near_miss and not node.is_available:
            text = (
                f"reason {node.reason!r} (set by {node.reason_by or 'an unknown user'}) is not "
                f"{node.near_miss!r}: nothing is done; write exactly {node.near_miss}"
            )
            yield RaiseAlarm(f"near-{node.name}-{node.reason_at}-{node.reason}", text, node.name)


def has_leaked_gres(node: Node) -> bool:
    """Tell whether Slurm counts GRES of a node as taken, and shows it as idle."""
    if not node.gres_used or node.base != "IDLE" or node.has_work:
        return False
    return _GRES_IN_USE.search(node.gres_used) is not None


def leaked_gres(snapshot: ClusterSnapshot) -> Iterator[RaiseAlarm]:
    """Raise an alarm for idle nodes whose GPUs Slurm counts as taken: jobs wait for them for ever.

    Slurm 22.05 leaves them so when a node goes down while a requeued job is COMPLETING.
    """
    for node in notable(snapshot.nodes).values():
        if has_leaked_gres(node):
            text = (
                f"idle, but Slurm counts {node.gres_used} as used: jobs will wait for ever; "
                "`scontrol reconfigure` heals it"
            )
            yield RaiseAlarm(f"leak-{node.name}-{node.gres_used}", text, node.name)


def wrong_results(snapshot: ClusterSnapshot) -> Iterator[RaiseAlarm]:
    """Raise an alarm for nodes whose results trainings found to be wrong again and again. They are
    users' words: a person has the node tested, and nothing is done to it."""
    for name, words in snapshot.memory.users_words.items():
        notes = [one for one in words if one.kind == WRONG_RESULTS]
        if len(notes) >= WRONG_RESULTS_FOR_ALARM and name in snapshot.nodes:
            jobs, users = {one.job for one in notes}, {one.uid for one in notes}
            text = (
                f"its results were found wrong {len(notes)} times within a week, by {len(jobs)} "
                f"job(s) of {len(users)} user(s): have it tested (`sres deepcheck run {name}`)"
            )
            yield RaiseAlarm(f"wrong-results-{name}-{len(notes)}", text, name)


def black_holes(snapshot: ClusterSnapshot) -> Iterator[RaiseAlarm]:
    """Raise an alarm for nodes in service on which a job's attempts ended again and again, until it
    went on without them. It is a user's word: a person has the node tested, and nothing is done."""
    for name, words in snapshot.memory.users_words.items():
        notes = [one for one in words if one.kind == EATS_ATTEMPTS]
        node = snapshot.nodes.get(name)
        if notes and node is not None and node.is_available and name not in snapshot.incidents:
            jobs = {one.job for one in notes}
            text = (
                f"attempts of {len(jobs)} job(s) ended on it again and again within a week, and "
                f"each job went on without it (newest: job {notes[-1].job}): have it tested "
                f"(`sres deepcheck run {name}`)"
            )
            yield RaiseAlarm(f"eats-attempts-{name}-{len(notes)}", text, name)


def failing_sinks(snapshot: ClusterSnapshot) -> Iterator[RaiseAlarm]:
    """Raise an alarm for sinks of events that people rely on in vain."""
    for name, reason in snapshot.site.failing_sinks:
        yield RaiseAlarm(f"sink-{name}", f"sink {name} {reason}; its events are kept for a day")


def no_room(snapshot: ClusterSnapshot) -> Iterator[RaiseAlarm]:
    """Raise an alarm before the disk of sresctld's own state is full: then nothing can be done."""
    if lack := snapshot.repairs.no_room:
        text = (
            f"sresctld's disk (controller.state_dir): {lack}; no replacement is begun, and when "
            "the journal cannot be written, nothing is done at all: mend that"
        )
        # Told again each day: a disk may be short once more.
        yield RaiseAlarm(f"no-room-{snapshot.now // DAY_SECONDS:.0f}", text)


def not_begun(snapshot: ClusterSnapshot) -> Iterator[RaiseAlarm]:
    """Raise one alarm for all nodes whose repair could not be begun on sresctld's machine."""
    waiting = [
        known.node
        for known in snapshot.incidents.values()
        if known.state.waits_for_repair and known.is_unbegun
    ]
    if waiting:
        names = f"{','.join(waiting[:SHOWN_NODES])}{', …' if len(waiting) > SHOWN_NODES else ''}"
        text = (
            f"the replacement program could not be started on sresctld's machine: {len(waiting)} "
            f"node(s) wait ({names}). Why: `sres node show {waiting[0]}`, as root. It is tried "
            "again by itself, and nothing of this counts as a try"
        )
        # Told again each day: it may be mended, and happen once more.
        yield RaiseAlarm(f"not-begun-{snapshot.now // DAY_SECONDS:.0f}", text)


def standby_alarms(snapshot: ClusterSnapshot) -> Iterator[RaiseAlarm]:
    """Raise an alarm while the standby is away, and for what is in doubt after a takeover."""
    facts = snapshot.site.standby
    if facts is None:
        return
    if facts.standby and facts.state is not PairState.PAIRED and facts.seconds > AWAY_SECONDS:
        text = (
            f"the standby on {facts.standby} does not have the journal: if {facts.active} fails "
            "now, nodes whose replacement may have been begun are left to a person"
        )
        yield RaiseAlarm(f"standby-{facts.standby}", text)
    if facts.doubt:
        yield RaiseAlarm("takeover", facts.doubt)


def unheard(snapshot: ClusterSnapshot, detect: DetectSettings) -> Iterator[RaiseAlarm]:
    """Raise an alarm while no node at all is heard: nothing is done for them meanwhile."""
    if not hears_none(snapshot, detect):
        return
    heard = [agent.heard_at for agent in snapshot.agents.values() if not agent.was_stopped]
    last = max(heard, default=snapshot.moment)
    if snapshot.moment - last > detect.dead_after:
        text = (
            "no node at all is heard, and no probe is answered: that looks like this machine's own "
            "network, so no node is taken for dead; mend it, or ask for each node yourself (`sres "
            "node replace`)"
        )
        yield RaiseAlarm(f"unheard-{last:.0f}", text)


def unprobed(
    snapshot: ClusterSnapshot, diagnoses: Mapping[str, NodeDiagnosis]
) -> Iterator[RaiseAlarm]:
    """Raise an alarm for silent nodes that this machine cannot even try to reach."""
    for name, diagnosis in notable(diagnoses).items():
        agent = snapshot.agents.get(name)
        if diagnosis.kind != "suspect" or agent is None or agent.silence < UNPROBED_SECONDS:
            continue
        if not any(probe.started > agent.heard_at for probe in snapshot.probes.get(name, ())):
            text = (
                f"no beat for {agent.silence:.0f} s, and it cannot be probed (can its address "
                f"{snapshot.nodes[name].address} be looked up here, and is there a route to it?): "
                "nothing is done about it"
            )
            yield RaiseAlarm(f"unprobed-{name}-{agent.heard_at:.0f}", text, name)
