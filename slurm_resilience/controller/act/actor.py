"""Act: do what was decided, one action at a time, journaled before and after.

Every act that changes Slurm looks at the node or job once more first; if the world has moved on, it
does nothing and says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.controller import actions
from slurm_resilience.controller.inbox import Inbox
from slurm_resilience.controller.journal import Incident, Journal, PendingRequeue
from slurm_resilience.controller.observe import ClusterSnapshot, run_directory
from slurm_resilience.controller.probe import Prober
from slurm_resilience.errors import NotFound, SresError
from slurm_resilience.model import Node
from slurm_resilience.replace import program
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.wire.messages import Evidence, NodeVerdict
from slurm_resilience.wire.server import Client

log = logging.getLogger("sresctld")

COMMENT = "sres: "
"""How our own node comments begin."""

VerdictKind = Literal["dead", "sick", "requested"]

PREFER_AGAIN = 1.0
"""Seconds between two looks for a job's request for nodes in exchange."""
SAY_AGAIN = 60.0
"""Seconds until the same failure is said again."""
START_AGAIN = 5.0
"""Seconds until a job that was told to start, and is PENDING still, is told again."""


class Actor:
    """Executes decisions. ``dry_run``: says what it would do, and does nothing."""

    def __init__(
        self,
        client: SlurmClient,
        journal: Journal,
        board: Inbox,
        prober: Prober,
        clock: Clock,
        config: Config,
        state_dir: Path,
        dry_run: bool = False,
    ) -> None:
        self._client = client
        self._journal = journal
        self._board = board
        self._prober = prober
        self._clock = clock
        self._config = config
        self._state_dir = state_dir
        self._dry_run = dry_run
        # By the peer itself: an id() comes again when a peer is gone.
        self._told: WeakKeyDictionary[Client, set[tuple[str, int, str]]] = WeakKeyDictionary()
        self._alarms: set[str] = set()
        self._failures: dict[str, float] = {}
        self._preferred: dict[int, float] = {}
        self._started: dict[int, list[float]] = {}
        self._handlers: dict[type, Callable[[ClusterSnapshot, Any], None]] = {
            actions.ProbeNode: self._probe,
            actions.MarkNode: self._mark,
            actions.OpenRequested: self._adopt,
            actions.NotifySupervisor: self._tell,
            actions.StartReplacement: self._start_replacement,
            actions.Transition: self._advance,
            actions.ReturnNode: self._return,
            actions.RaiseAlarm: self._alarm,
            actions.RequeueJob: self._requeue,
            actions.RaisePriority: self._prefer,
            actions.StartPendingJob: self._start_now,
            actions.KeepPendingRequeue: self._keep_chasing,
            actions.EndPendingRequeue: self._end_chase,
        }

    def act(self, world: ClusterSnapshot, wanted: tuple[actions.Action, ...]) -> None:
        """Do all of them; one that fails is journaled and does not stop the others."""
        for action in wanted:
            if self._dry_run and not isinstance(action, actions.ProbeNode):
                log.info("dry run, not done: %s", action)
                continue
            try:
                self._handlers[type(action)](world, action)
            except SresError as error:
                self._failed(action, error)

    def _failed(self, action: actions.Action, error: SresError) -> None:
        """Say so, but not four times a second while the same thing goes on failing."""
        name, node = type(action).__name__, getattr(action, "node", "")
        key, now = f"{name} {node} {error}", self._clock.monotonic()
        if now - self._failures.get(key, -SAY_AGAIN) < SAY_AGAIN:
            return
        self._failures[key] = now
        log.error("%s failed: %s", name, error)
        self._event("failed", f"{name}: {error}", node=node)

    # -- nodes --------------------------------------------------------------------------------

    def _probe(self, world: ClusterSnapshot, action: actions.ProbeNode) -> None:
        node = world.nodes[action.node]
        self._prober.request(node.name, node.address, node.port)

    def _mark(self, world: ClusterSnapshot, action: actions.MarkNode) -> None:
        node = self._client.node(action.node)
        seen = world.nodes[action.node]
        if (node.reason, node.base, node.flags) != (seen.reason, seen.base, seen.flags):
            log.info(
                "%s changed to %s (%s) meanwhile: not marked",
                node.name,
                node.state,
                node.reason or "no reason",
            )
            return
        incident = self._incident_for(world, action) if action.action else None
        number = incident.id if incident else 0
        for chased in action.chase:
            restarts = world.jobs[chased].restarts
            self._journal.put_chase(
                PendingRequeue(chased, f"node {node.name} died", False, restarts, self._clock.now())
            )
            self._event(
                "requeue",
                f"{node.name}: {action.reason}",
                node=node.name,
                job=chased,
                incident=number,
            )
        for out in action.take_out:
            self._take_out(out, node.name, number)
        # What was found stands in "detected", where this incident begins with it.
        is_new = incident is not None and action.node not in world.incidents
        cause = "" if is_new else f": {action.reason}"
        reason = action.action or node.reason
        text = f"state={action.state} reason={reason}{cause}"
        self._event("marking", text, node=node.name, incident=number)
        self._client.set_node([node.name], state=action.state, reason=reason)
        text = f"Slurm has taken it; the node was {node.state}"
        self._event("marked", text, node=node.name, incident=number, action=action.action)
        if incident is None:
            return
        self._save(incident, state="marked", marked=self._clock.now())
        # At once, not with the next cycle: each second here is a second of every survivor.
        for job, entry in world.supervised.items():
            if node.name in entry.nodes:
                kind: VerdictKind = "dead" if action.state == "down" else "sick"
                self._send(
                    job, NodeVerdict(node.name, kind, action.reason, action.action, incident.id)
                )
        self._comment(node, f"{COMMENT}{action.reason} (incident {incident.id})")

    def _comment(self, node: Node, text: str) -> None:
        """The detail, where `scontrol show node` shows it. A person's own comment stays."""
        if node.comment and not node.comment.startswith(COMMENT):
            return
        try:
            self._client.set_comment([node.name], text)
        except SresError as error:
            log.warning("%s: its comment could not be set: %s", node.name, error)

    def _incident_for(self, world: ClusterSnapshot, action: actions.MarkNode) -> Incident:
        known = world.incidents.get(action.node)
        if known is not None:
            return known
        agent = world.agents.get(action.node)
        incident = self._journal.open_incident(
            action.node,
            action.kind,
            action.action,
            action.reason,
            self._clock.now(),
            boot_before=agent.boot_id if agent else "",
            instance_before=agent.instance if agent else "",
        )
        self._event(
            "detected", f"{action.kind}: {action.reason}", node=action.node, incident=incident.id
        )
        return incident

    def _take_out(self, out: actions.ShrinkJob, node: str, incident: int) -> None:
        text = f"node {node} taken out of job {out.job}"
        job = self._client.job(out.job)
        if job.state != "RUNNING" or not set(out.keep) < set(job.nodes):
            # Shrinking a job that is PENDING again would tell it which nodes to wait for.
            log.info("job %d is %s on other nodes now: not shrunk", job.id, job.state)
            return
        try:
            self._client.shrink(out.job, out.keep)
            self._event("taken-out", text, node=node, job=out.job, incident=incident)
        except SresError as error:
            # Then Slurm's own rule decides: the job shrinks (--no-kill) or is requeued.
            log.warning("%s: not possible: %s", text, error)
            self._event("failed", f"{text}: {error}", node=node, job=out.job, incident=incident)
            if job.is_batch and job.requeue:
                self._journal.put_chase(
                    PendingRequeue(
                        job.id, f"node {node} died", False, job.restarts, self._clock.now()
                    )
                )

    def _adopt(self, world: ClusterSnapshot, action: actions.OpenRequested) -> None:
        agent = world.agents.get(action.node)
        now = self._clock.now()
        incident = self._journal.open_incident(
            action.node,
            "requested",
            action.action,
            action.reason,
            now,
            boot_before=agent.boot_id if agent else "",
            instance_before=agent.instance if agent else "",
        )
        self._save(incident, state="marked", marked=now)
        self._event("detected", action.reason, node=action.node, incident=incident.id)
        for job, entry in world.supervised.items():
            if action.node in entry.nodes:
                kind: VerdictKind = "dead" if world.nodes[action.node].is_down else "requested"
                self._send(
                    job,
                    NodeVerdict(action.node, kind, action.reason, action.action, incident.id),
                )

    def _tell(self, world: ClusterSnapshot, action: actions.NotifySupervisor) -> None:
        self._send(
            action.job,
            NodeVerdict(action.node, action.kind, action.reason, action.action, action.incident),
        )

    def _send(self, job: int, verdict: NodeVerdict) -> None:
        for peer in self._board.supervisors(job):
            told = self._told.setdefault(peer, set())
            key = (verdict.node, verdict.incident, verdict.verdict)
            if key not in told:
                told.add(key)
                peer.send(Evidence((verdict,)))

    def _start_replacement(self, world: ClusterSnapshot, action: actions.StartReplacement) -> None:
        incident = world.incidents[action.node]
        node = self._client.node(action.node)
        if node.has_work or not node.requested_action:
            log.info("%s is %s now: its replacement waits", node.name, node.state)
            return
        agent = world.agents.get(action.node)
        attempt = incident.attempts + 1
        incident = msgspec.structs.replace(
            incident,
            state="replacing",
            attempts=attempt,
            run_started=self._clock.now(),
            boot_before=agent.boot_id if agent else incident.boot_before,
            instance_before=agent.instance if agent else incident.instance_before,
        )
        verb = "reboot" if incident.action.endswith("Reboot") else "replace"
        command = " ".join([*self._config.replace.program, verb, node.name])
        # The journal first: a run that exists is found again by its directory.
        self._journal.save(incident)
        self._event("replacing", command, node=node.name, incident=incident.id, attempt=attempt)
        try:
            program.start(
                run_directory(self._state_dir, incident),
                self._config.replace.program,
                verb,
                node.name,
                self._config.replace.timeout,
            )
        except program.RunExists:
            log.info("the run of incident %d, attempt %d was started before", incident.id, attempt)

    def _advance(self, world: ClusterSnapshot, action: actions.Transition) -> None:
        incident = world.incidents[action.node]
        now = self._clock.now()
        changes: dict[str, Any] = {"state": action.state}
        if action.state == "returning":
            run = world.runs.get(incident.id)
            changes["run_ended"] = run.ended_at if run and run.ended_at else now
            self._prober.forget(action.node)
        elif action.state == "marked":
            changes["next_try"] = action.next_try
            changes["marked"] = incident.marked or now
        elif action.state in ("closed", "cancelled", "gave_up"):
            changes["closed"] = now
            node = world.nodes.get(action.node)
            changes["reason_at"] = node.reason_at if node else ""
            if node and action.state != "gave_up" and node.comment.startswith(COMMENT):
                self._comment(node, "")
        if action.stop_run:
            program.stop(run_directory(self._state_dir, incident))
        run = world.runs.get(incident.id)
        output = run.output if run and run.state != "running" else ""
        self._save(incident, **changes)
        level = logging.ERROR if action.state == "gave_up" else logging.INFO
        log.log(
            level, "%s: incident %d %s: %s", action.node, incident.id, action.state, action.reason
        )
        self._event(
            action.state, action.reason, node=action.node, incident=incident.id, output=output
        )

    def _return(self, world: ClusterSnapshot, action: actions.ReturnNode) -> None:
        node = self._client.node(action.node)
        if not node.is_available:
            self._event("resuming", "state=resume", node=node.name, incident=action.incident)
            self._client.set_node([node.name], state="resume")
        self._save(
            world.incidents[action.node],
            state="resumed",
            resumed=self._clock.now(),
            reason_at=node.reason_at,
        )

    # -- jobs ---------------------------------------------------------------------------------

    def _requeue(self, world: ClusterSnapshot, action: actions.RequeueJob) -> None:
        job = self._client.job(action.job)
        if job.state != "RUNNING" or job.restarts != world.jobs[action.job].restarts:
            return
        self._event("requeue", action.reason, job=action.job)
        self._client.requeue(action.job)

    def _prefer(self, world: ClusterSnapshot, action: actions.RaisePriority) -> None:
        now = self._clock.monotonic()
        if now - self._preferred.get(action.job, -PREFER_AGAIN) >= PREFER_AGAIN:
            self._preferred[action.job] = now
            self._client.prefer_exchange(world.jobs[action.job], action.nodes)

    def _start_now(self, world: ClusterSnapshot, action: actions.StartPendingJob) -> None:
        given = self._started.setdefault(action.job, [])
        now = self._clock.monotonic()
        if len(given) >= 3 and now - given[-1] < START_AGAIN:
            return
        given.append(now)
        self._client.start_now(action.job)

    def _keep_chasing(self, world: ClusterSnapshot, action: actions.KeepPendingRequeue) -> None:
        self._journal.put_chase(action.chase)
        if action.chase.job not in world.chases and not action.chase.wanted:
            self._event(
                "requeue", f"Slurm requeued it: {action.chase.reason}", job=action.chase.job
            )

    def _end_chase(self, world: ClusterSnapshot, action: actions.EndPendingRequeue) -> None:
        self._journal.drop_chase(action.job)
        self._started.pop(action.job, None)
        self._event("requeued", action.reason, job=action.job)

    # -- words --------------------------------------------------------------------------------

    def _alarm(self, world: ClusterSnapshot, action: actions.RaiseAlarm) -> None:
        if action.key in self._alarms:
            return
        self._alarms.add(action.key)
        known = world.incidents.get(action.node)
        if action.key.startswith("drain-") and known is not None and known.alarmed:
            return  # raised before a restart of sresctld
        log.warning("%s%s", f"{action.node}: " if action.node else "", action.text)
        self._event(
            "alarm", action.text, node=action.node, job=action.job, incident=action.incident
        )
        if action.key.startswith("drain-"):
            self._save(world.incidents[action.node], alarmed=True)

    def _save(self, incident: Incident, **changes: Any) -> None:
        self._journal.save(msgspec.structs.replace(incident, **changes))

    def _event(
        self, kind: str, text: str, *, node: str = "", job: int = 0, incident: int = 0, **data: Any
    ) -> None:
        self._journal.event(
            self._clock.now(), kind, text, node=node, job=job, incident=incident, **data
        )


def find_job(client: SlurmClient, job_id: int) -> Any:
    """One job, for the board (raises NotFound)."""
    job = client.job(job_id)
    if job.state in ("COMPLETED", "CANCELLED", "FAILED"):
        raise NotFound(f"job {job_id} has ended")
    return job
