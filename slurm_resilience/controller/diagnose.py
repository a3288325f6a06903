"""Diagnose each node's trouble, if it has one. Pure: a snapshot in, diagnoses out.

`RULES` is the whole judgement, in order: the first rule that answers decides. A rule is a small
function of one node's `NodeCase`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import msgspec

from slurm_resilience.config import Config, DetectSettings
from slurm_resilience.controller.calm.agent_views import AgentView
from slurm_resilience.controller.calm.notable import MostlyCalm, has_calm, notable
from slurm_resilience.controller.journal.records import FindingOfBoot
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.controller.probe import ProbeResult
from slurm_resilience.model import (
    ACTIONS,
    FAULTY,
    INJECTED,
    INJECTED_MARK,
    REBOOT,
    REPLACE,
    RESET,
    SEVERITIES,
    Finding,
    Node,
    Severity,
)

Kind = Literal[
    "healthy",
    "unknown",  # no sresd reports for it, and nothing says that it is ill
    "suspect",  # silent; being probed
    "dead",  # silent to sresd's connection and to probes
    "sick",  # it answers, and a finding says that it must go
    "requested",  # its reason is Action:Replace, Action:Reboot or Action:Reset
    "held",  # an administrator (or power saving) keeps it out: sresctld leaves it alone
    "down",  # Slurm says so, for a reason that is not sresctld's to judge
]


class NodeDiagnosis(msgspec.Struct, frozen=True, gc=False):
    """One node's diagnosis, with its reason in words."""

    # gc=False: it refers to nothing that refers back, and a round makes thousands of them.

    node: str
    kind: Kind
    reason: str
    action: str = ""
    """Action:Replace or Action:Reboot, where one is called for."""
    probe: bool = False
    """A probe would tell more."""
    silence: float = 0.0
    """Seconds without a sign of life, where that is the trouble."""
    cause: str = ""
    """The health check behind it, with its code: the same on every node that it was found on."""


SLURM_USERS = frozenset({"root", "slurm"})
"""Users that Slurm's daemons run as, besides the SlurmUser of this site."""
NOT_RESPONDING = "Not responding"
"""Slurm's own reason for a node that it has set DOWN because it heard nothing of it."""
REBOOTED = "Node unexpectedly rebooted"
"""The reason that 26.05 writes over that one when the node registers again."""
# The reasons that slurmctld and slurmd write themselves, whole, as 22.05 to 26.05 have them. Every
# other one was written by a person (or another program), and stays.
_OWN = "|".join(
    (
        NOT_RESPONDING,
        REBOOTED,
        r"Kill task failed",
        r"Prolog error",
        r"Epilog error",
        r"batch job complete failure",
        r"Duplicate jobid",
        r"ResumeTimeout reached",
        r"Invalid slurmd version",
        r"Powered down(?: after (?:SuspendTimeout|resume))?",
        r"reboot (?:requested|issued|complete|timed out)",
        r"Low socket\*core\*thread count",
        r"Low (?:CPUs|TmpDisk)",
        r"Low RealMemory(?: \(reported:\d+ < \d+(?:\.\d+)?% of configured:\d+\))?",
        r"gres/[\w:.-]+ count (?:reported lower than configured|too low) \(\d+ < \d+\)",
    )
)
_SLURMS_OWN = re.compile(rf"(?:{_OWN})(?:(?:, | : )(?:{_OWN}))*")
_ADDED_BY_SLURM = re.compile(rf"(?: : (?:{_OWN}))*")
_POWER_FLAGS = frozenset(
    {"POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "POWERING_UP", "POWER_UP", "PLANNED_DOWN"}
)
_IN_SERVICE = frozenset({"IDLE", "ALLOCATED", "MIXED"})
_OUT_OF_SERVICE = frozenset({"FAIL", "DRAIN"})
_NOT_ANSWERING = frozenset({"NOT_RESPONDING"})
MIN_SILENT_PROBES = 2
MIN_TOGETHER = 2
"""A single node that falls silent as the last one is no sign that this machine is cut off."""
RECURS_AFTER_SECONDS = 60.0
"""A line of the kernel log that is this much younger than the answered one is a new fault. Lines
that are closer belong together."""
ANNOUNCED_SECONDS = 30.0
"""A silence that begins this close to the announcement of an injected fault is that fault's."""
NEVER_HEARD_SECONDS = 600.0
"""The silence of a node that no sresd reports for, and that does not answer Slurm either."""


class NodeCase(msgspec.Struct, frozen=True, gc=False):
    """One node, and all that its diagnosis may rest on."""

    node: Node
    agent: AgentView | None
    life: NodeDiagnosis
    """The diagnosis from its beats and probes alone."""
    findings: tuple[Finding, ...] = ()
    """Those that no person has answered yet."""
    slurm_users: Collection[str] = SLURM_USERS
    can_reset: bool = False
    """GPUs are reset here; else a reboot does it as well."""
    was_kept: bool = False
    """A person kept it out of service when it was last looked at."""

    @property
    def is_occupied(self) -> bool:
        """Jobs on it would be freed by setting it DOWN."""
        return self.node.has_work and not self.node.is_down

    @property
    def has_died_with_jobs(self) -> bool:
        return self.life.kind == "dead" and self.is_occupied

    def is_(self, kind: Kind, reason: str, action: str = "", probe: bool = False) -> NodeDiagnosis:
        return NodeDiagnosis(self.node.name, kind, reason, action, probe)


def diagnose(snapshot: ClusterSnapshot, config: Config) -> Mapping[str, NodeDiagnosis]:
    """Return a diagnosis for every node.

    Args:
        snapshot: one observation.
        config: thresholds (`[detect]`).
    """
    diagnoses = {}
    is_deaf = hears_none(snapshot, config.detect)
    for name, node in notable(snapshot.nodes).items():
        agent = snapshot.agents.get(name)
        life = life_of(snapshot, config.detect, node, is_deaf)
        if life.kind in ("dead", "suspect") and _is_announced(snapshot, agent):
            life = msgspec.structs.replace(life, reason=f"{life.reason} {INJECTED_MARK}")
        has_findings = agent is not None and agent.findings
        found, site = open_findings(snapshot, name) if has_findings else (), snapshot.site
        if is_plain(node) and not found:
            # Nearly every node of a large cluster, in every round: only the last rules answer.
            diagnoses[name] = life
            continue
        was_kept = name in snapshot.memory.kept
        case = NodeCase(node, agent, life, found, site.slurm_users, site.can_reset, was_kept)
        diagnoses[name] = next(answer for rule in RULES if (answer := rule(case)) is not None)
    if not has_calm(snapshot.nodes):
        return diagnoses
    return MostlyCalm(snapshot.nodes, diagnoses, lambda name: _beats(snapshot.nodes[name]))


def _beats(node: Node) -> NodeDiagnosis:
    if node.is_responding:
        return NodeDiagnosis(node.name, "healthy", "sresd beats")
    # slurmd is gone or hung; the machine is not. Slurm will say DOWN if it stays so.
    return NodeDiagnosis(node.name, "unknown", "sresd beats, slurmd does not answer Slurm")


def is_plain(node: Node) -> bool:
    """Tell whether Slurm shows a node as in service, and nothing else of it but whether its slurmd
    answers."""
    return node.base in _IN_SERVICE and node.flags <= _NOT_ANSWERING and not node.reason_unclear


# -- the rules --------------------------------------------------------------------------------


def _powered_off(case: NodeCase) -> NodeDiagnosis | None:
    node = case.node
    if not node.is_powered_off_on_purpose:
        return None
    if node.flags & _POWER_FLAGS == {"POWERED_DOWN"} and _is_requested(node):
        return None  # Slurm wakes no node that is out of service: the request would wait for ever
    return case.is_("held", f"{node.state}: powered off by Slurm")


def _expected_to_be_away(case: NodeCase) -> NodeDiagnosis | None:
    """Recognise a node that is not there yet, or goes down and up by Slurm's own order."""
    if case.node.base == "FUTURE" or "REBOOT_ISSUED" in case.node.flags:
        return case.is_("held", f"{case.node.state}: silence is expected")
    return None


def _unclear_reason(case: NodeCase) -> NodeDiagnosis | None:
    if case.node.reason_unclear:
        return case.is_(
            "held", f"its reason cannot be read for certain, so nothing is done: {case.node.reason}"
        )
    return None


def _requested(case: NodeCase) -> NodeDiagnosis | None:
    node = case.node
    if not _is_requested(node):
        return None
    if case.has_died_with_jobs:
        # It was to be left gracefully, and died meanwhile: its jobs must be freed now.
        return msgspec.structs.replace(case.life, action=node.requested_action)
    by = f" by {node.reason_by}" if node.reason_by else ""
    probe = case.life.probe and case.is_occupied
    return case.is_("requested", f"{node.reason}{by}", node.requested_action, probe)


def _kept_by_a_person(case: NodeCase) -> NodeDiagnosis | None:
    node = case.node
    is_persons = is_out_of_service(node) and is_a_persons(node, case.slurm_users)
    if not (is_persons or (case.was_kept and has_lost_reason(node))):
        return None
    if case.has_died_with_jobs:
        # Its jobs must be freed, its reason stays: no action, so it is not replaced. Without jobs
        # there is nothing to do: people power off what they have drained.
        text = f"{case.life.reason}; {_held(node)}"
        return msgspec.structs.replace(case.life, action="", reason=text)
    return case.is_("held", _held(node), probe=case.life.probe and case.is_occupied)


def _maintenance(case: NodeCase) -> NodeDiagnosis | None:
    if "MAINTENANCE" not in case.node.flags or case.has_died_with_jobs:
        return None
    probe = case.life.probe and case.is_occupied
    return case.is_("held", f"{case.node.state}: in a maintenance reservation", probe=probe)


def _silent(case: NodeCase) -> NodeDiagnosis | None:
    return case.life if case.life.kind in ("dead", "suspect") else None


def _sick(case: NodeCase) -> NodeDiagnosis | None:
    if not case.findings:
        return None
    worst = max(case.findings, key=_gravity)
    actions = {Severity.REPLACE: REPLACE, Severity.RESET: RESET if case.can_reset else REBOOT}
    action = actions.get(worst.severity, REBOOT)
    sick = case.is_("sick", f"{worst.check}: {worst.text}", action)
    return msgspec.structs.replace(sick, cause=f"{worst.check} {worst.code}".strip())


def _out_of_service(case: NodeCase) -> NodeDiagnosis | None:
    if not is_out_of_service(case.node):
        return None
    reason = case.node.reason or "no reason given"
    return case.is_("down", f"{case.node.state}: {reason}", probe=case.life.probe)


def _as_it_lives(case: NodeCase) -> NodeDiagnosis | None:
    return case.life


RULES: Sequence[Callable[[NodeCase], NodeDiagnosis | None]] = (
    _powered_off,
    _expected_to_be_away,
    _unclear_reason,
    _requested,
    _kept_by_a_person,
    _maintenance,
    _silent,
    _sick,
    _out_of_service,
    _as_it_lives,
)
"""In this order; the first answer counts. The last one always answers."""


def _is_announced(snapshot: ClusterSnapshot, agent: AgentView | None) -> bool:
    """Tell whether a silent node's last words were that a person injects a fault."""
    if agent is None:
        return False
    fell_silent = snapshot.now - agent.silence
    return any(
        one.check == INJECTED and one.injected and abs(fell_silent - one.at) <= ANNOUNCED_SECONDS
        for one in agent.findings
    )


def is_out_of_service(node: Node) -> bool:
    """Slurm starts no job on it because it is DOWN, draining or failing."""
    return node.base == "DOWN" or not node.flags.isdisjoint(_OUT_OF_SERVICE)


def _is_requested(node: Node) -> bool:
    return bool(node.requested_action) and is_out_of_service(node)


def is_speaking(snapshot: ClusterSnapshot, detect: DetectSettings, name: str) -> bool:
    """Tell whether a node's sresd beats at this moment."""
    agent = snapshot.agents.get(name)
    return agent is not None and agent.is_connected and agent.silence <= detect.silent_after


def open_findings(snapshot: ClusterSnapshot, name: str) -> tuple[Finding, ...]:
    """Return the faults of a node's present boot that no person has answered.

    The kernel log keeps its lines: an administrator who resumed the node has answered them, until
    the kernel writes such a line once more.
    """
    agent = snapshot.agents.get(name)
    if agent is None or not agent.findings:
        return ()
    answered = snapshot.memory.acknowledged.get(name, {})
    return tuple(
        found
        for found in agent.findings
        if found.severity in FAULTY and not _is_answered(agent, found, answered)
    )


def _is_answered(agent: AgentView, found: Finding, answered: Mapping[FindingOfBoot, float]) -> bool:
    at = answered.get((agent.boot_id, *found.key))
    if at is None:
        return False
    # A check finds the same trouble in each round, and its answer ends when it finds it no more.
    is_of_a_check = found.check in agent.judged or found.check in agent.unjudged
    if is_of_a_check:
        return True
    is_date = at > found.at / 2
    if not is_date and not found.uptime:
        return True  # seconds of the boot, and sresd is of another release now
    return (found.at if is_date else found.uptime) - at <= RECURS_AFTER_SECONDS


def current_reason(node: Node) -> str:
    """Return a node's reason without what was over before Slurm set the node DOWN: it writes its
    own behind an earlier one, which may be blank (`  : Not responding`)."""
    stale, reason = node.stale_reason, node.reason
    # A person who keeps a node that has died meanwhile has left a flag on it.
    is_slurms_alone = node.is_down and not (node.is_drain or node.is_fail)
    if stale and is_slurms_alone and reason.startswith(f"{stale} :"):
        reason = reason[len(stale) :]
    return reason.lstrip(" :")


def is_a_persons(node: Node, slurm_users: Collection[str] = SLURM_USERS) -> bool:
    """Tell whether the reason is neither empty nor one of Slurm's own, set by Slurm's own user."""
    reason = current_reason(node)
    is_slurms = bool(_SLURMS_OWN.fullmatch(reason)) and node.reason_by in slurm_users
    return bool(reason) and not is_slurms


def persons_reason(node: Node, slurm_users: Collection[str] = SLURM_USERS) -> str:
    """Return a node's reason as sresctld may write it once more: a person's stays a person's, also
    where the text is one of Slurm's own and its author was all that told them apart."""
    rewritten = msgspec.structs.replace(node, reason_by="root")
    if is_a_persons(node, slurm_users) and not is_a_persons(rewritten, slurm_users):
        return f"{node.reason} (by {node.reason_by or 'an unknown user'})"
    return node.reason


def is_kept_by_a_person(node: Node, slurm_users: Collection[str] = SLURM_USERS) -> bool:
    """Tell whether a person keeps the node out of service, for a reason that asks nothing of
    sresctld."""
    if node.reason_unclear:
        return True
    is_persons = is_a_persons(node, slurm_users)
    return is_out_of_service(node) and is_persons and not node.requested_action


def has_lost_reason(node: Node) -> bool:
    """Tell whether a node is drained or failing for no reason: Slurm takes the Reason away as it
    powers the node up, and a person who answers would resume it."""
    return (node.is_drain or node.is_fail) and not node.reason


def is_kept_instead(node: Node, action: str, slurm_users: Collection[str] = SLURM_USERS) -> bool:
    """Tell whether a person put a reason in the place of this request.

    A reboot by Slurm only adds to the request: `Action:Reboot : reboot issued`. While it reboots a
    node for sresctld, it adds to another one that a person has written meanwhile, too.
    """
    if not is_kept_by_a_person(node, slurm_users):
        return False
    if node.reason_unclear:
        return True
    requests = ACTIONS if action == REBOOT else (action,)
    return not any(
        node.reason.startswith(request) and _ADDED_BY_SLURM.fullmatch(node.reason[len(request) :])
        for request in requests
    )


def _held(node: Node) -> str:
    if node.near_miss:
        return (
            f"reason {node.reason!r} is not {node.near_miss!r}, so nothing is done; write exactly "
            f"{node.near_miss}"
        )
    if not node.reason:
        return "kept out by a person, whose reason Slurm has taken away as it powered the node up"
    return f"kept out by {node.reason_by or 'an administrator'}: {node.reason}"


def _gravity(finding: Finding) -> tuple[int, float]:
    return (SEVERITIES.index(finding.severity), -finding.at)


# -- is it alive? -----------------------------------------------------------------------------


def hears_none(snapshot: ClusterSnapshot, detect: DetectSettings) -> bool:
    """Tell whether all nodes that were heard fell silent together, and nothing answers any more:
    then this machine is more likely cut off than they are dead, and nothing proves their death."""
    if has_calm(snapshot.nodes):
        return False  # those are heard
    heard = [agent.heard_at for agent in snapshot.agents.values() if not agent.was_stopped]
    last = max(heard, default=snapshot.moment)
    if snapshot.moment - last <= detect.silent_after:
        return False
    if sum(last - at <= detect.dead_after for at in heard) < MIN_TOGETHER:
        return False
    return not any(
        probe.started > last and probe.answer != "silent"
        for probes in snapshot.probes.values()
        for probe in probes
    )


def life_of(
    snapshot: ClusterSnapshot, detect: DetectSettings, node: Node, is_deaf: bool | None = None
) -> NodeDiagnosis:
    """Judge by beats; where they are missing, by probes. Silence alone is never death.

    Args:
        snapshot: one observation.
        detect: thresholds.
        node: the node.
        is_deaf: what `hears_none` says of the snapshot; None: not asked yet.
    """
    agent = snapshot.agents.get(node.name)
    if agent is not None and not agent.was_stopped:
        if not agent.is_heard and snapshot.site.uptime < detect.start_grace:
            return NodeDiagnosis(
                node.name, "unknown", "sresctld has just started; waiting for its sresd"
            )
        if agent.silence <= detect.silent_after:
            return _beats(node)
        heard_at, silence = agent.heard_at, agent.silence
        sign = f"no beat for {silence:.1f} s"
    elif agent is not None:
        # On purpose, and often before a reboot by hand: Slurm alone judges the node now.
        return NodeDiagnosis(node.name, "unknown", "sresd was stopped")
    elif node.is_responding:
        return NodeDiagnosis(node.name, "unknown", "no sresd has reported for it")
    else:
        return life_without_sresd(snapshot, detect, node, is_deaf)
    probes = _telling_probes(snapshot, detect, node.name, heard_at, is_deaf)
    # When sresctld hears again, all nodes get the time to be heard.
    heard_for = snapshot.moment - snapshot.heard.since
    counted = min(silence, heard_for)
    judged = _judge_probes(snapshot.moment, detect, node, probes, counted, sign)
    answered = [p for p in probes if p.answer == "answered"]
    if answered:
        # What cannot be undone waits from here on: it lived, however long its sresd is missing.
        silence = snapshot.moment - answered[-1].started
    return msgspec.structs.replace(judged, silence=silence)


def life_without_sresd(
    snapshot: ClusterSnapshot, detect: DetectSettings, node: Node, is_deaf: bool | None = None
) -> NodeDiagnosis:
    """Judge a node for which no sresd beats, and from which Slurm itself gets no answer."""
    heard_at = snapshot.moment - NEVER_HEARD_SECONDS
    probes = _telling_probes(snapshot, detect, node.name, heard_at, is_deaf)
    judged = _judge_probes(
        snapshot.moment, detect, node, probes, NEVER_HEARD_SECONDS, "Slurm gets no answer"
    )
    # All that is known of its silence are the probes.
    silence = _unanswered_for(snapshot.moment, probes)
    return msgspec.structs.replace(judged, silence=silence)


def _telling_probes(
    snapshot: ClusterSnapshot,
    detect: DetectSettings,
    name: str,
    heard_at: float,
    is_deaf: bool | None,
) -> list[ProbeResult]:
    """Return the probes of a node since it was heard, without those that no machine could have
    answered: sresctld itself was cut off then, for all that is known."""
    probes = [p for p in snapshot.probes.get(name, ()) if p.started > heard_at]
    if not any(p.answer == "silent" for p in probes):
        return probes
    if hears_none(snapshot, detect) if is_deaf is None else is_deaf:
        return [p for p in probes if p.answer != "silent"]
    since = snapshot.heard.since
    return [p for p in probes if p.answer != "silent" or p.started > since]


def _unanswered_for(moment: float, probes: Sequence[ProbeResult]) -> float:
    """Return for how many seconds no probe was answered."""
    answered = [index for index, p in enumerate(probes) if p.answer == "answered"]
    later = probes[answered[-1] + 1 :] if answered else probes
    return moment - later[0].started if later else 0.0


def _judge_probes(
    moment: float,
    detect: DetectSettings,
    node: Node,
    probes: Sequence[ProbeResult],
    silence: float,
    sign: str,
) -> NodeDiagnosis:
    """Judge a silent node by the probes since its last beat.

    Args:
        moment: now, of the monotonic clock.
        detect: thresholds.
        node: the silent node.
        probes: oldest first.
        silence: seconds without a beat.
        sign: the silence in words.
    """
    answered = [index for index, p in enumerate(probes) if p.answer == "answered"]
    if answered:
        later = probes[answered[-1] + 1 :]
        if len(later) < MIN_SILENT_PROBES or silence <= detect.dead_after:
            text = f"{sign}, but slurmd's port answers: sresd is missing"
            return NodeDiagnosis(node.name, "unknown", text, probe=True)
        probes = later
    refused = [p for p in probes if p.answer == "refused"]
    if refused:
        refused_for = moment - refused[0].started
        if refused_for > detect.refused_after and len(probes) >= MIN_SILENT_PROBES:
            text = f"{sign}; the machine has refused slurmd's port for {refused_for:.0f} s"
            return NodeDiagnosis(node.name, "dead", text, REPLACE)
        text = f"{sign}; the machine answers, slurmd does not run ({refused_for:.0f} s)"
        return NodeDiagnosis(node.name, "suspect", text, probe=True)
    if silence > detect.dead_after and len(probes) >= MIN_SILENT_PROBES:
        text = f"{sign}, {len(probes)} probes of slurmd's port unanswered"
        return NodeDiagnosis(node.name, "dead", text, REPLACE)
    return NodeDiagnosis(node.name, "suspect", f"{sign}; probing", probe=True)
