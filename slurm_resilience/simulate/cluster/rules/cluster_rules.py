"""Rules that must hold at every moment of a simulated cluster, whatever happens to it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slurm_resilience.config import Config
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.journal.records import HOUR_SECONDS, Incident
from slurm_resilience.model import Job, Node
from slurm_resilience.simulate.cluster.rules.mark_ceilings import STALE_SECONDS, MarkCeilings
from slurm_resilience.simulate.cluster.rules.rule_memory import (
    BreakerView,
    JobLosses,
    PeoplesWords,
    WellKnown,
    WrittenEvents,
)
from slurm_resilience.simulate.cluster.rules.rule_names import Broken, ClusterRule
from slurm_resilience.simulate.cluster.sim_host import SimHost, SimRun
from slurm_resilience.simulate.cluster.sim_machine import Path, Power, SimMachine
from slurm_resilience.simulate.cluster.sim_slurm import (
    NOT_RESPONDING,
    SLURM,
    SRESCTLD,
    SimSlurm,
)
from slurm_resilience.simulate.cluster.sim_supervisor import SimSupervisors
from slurm_resilience.simulate.schedule import Schedule

SEEN_SECONDS = 2.5
"""A node that has lived, beaten and been healthy for so long is known to."""
ANSWERS_SECONDS = 10.0
"""A node that has answered probes for so long is known to live."""
NOTICED_SECONDS = 60.0
"""A dead or sick node is noticed within this time, if nothing keeps sresctld from it."""
LONGEST_ACT_SECONDS = 40.0
"""An act may end that was begun before sresctld was told to halt: some calls of a slow Slurm."""
LOST_SECONDS = 20.0
"""A repair whose end is unknown is not done once more this soon, unless its node has been heard
since: it may be on its way back. (sresctld waits longer, by a clock that may be stepped.)"""
SIGTERM = "SIGTERM"
ALARMS_SECONDS, MOST_ALARMS = 600.0, 5
"""Alarms of one node, or of none, within so many seconds."""
_DURATION = re.compile(r"back in service after (-?[\d.]+) s")


class DaemonView(Protocol):
    """The state of sresctld, as its world sees it."""

    def able_since(self) -> float:
        """Since when it runs, sees Slurm and may act; infinite: it does not."""
        ...

    def open_incidents(self) -> list[Incident]:
        """Return the journal's."""
        ...

    def is_tripped(self) -> bool:
        """Tell whether the breaker holds everything."""
        ...

    def expects(self, name: str) -> bool:
        """Tell whether sresctld waits for a node's sresd to speak."""
        ...

    def supervised(self) -> set[int]:
        """Return the jobs that sresctld takes for supervised."""
        ...


class ClusterRules:
    """Looks at everything that changes, and writes down each broken rule."""

    def __init__(
        self,
        schedule: Schedule,
        config: Config,
        slurm: SimSlurm,
        machines: dict[str, SimMachine],
        host: SimHost,
        supervisors: SimSupervisors,
        note: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._config = config
        self._slurm = slurm
        self._machines = machines
        self._host = host
        self._supervisors = supervisors
        self._note = note
        self.broken: list[Broken] = []
        self.people = PeoplesWords()
        self.breaker = BreakerView()
        self._ceilings = MarkCeilings(
            config.breaker, slurm, machines, self.people, self.breaker, self.break_rule
        )
        self._intents: set[str] = set()
        self._written = WrittenEvents()
        self._bad_since = WellKnown()
        self._jobs = JobLosses()

    # -- what changes in Slurm ------------------------------------------------------------------

    def node_set(self, before: Node, after: Node, author: str) -> None:
        self._node_set(before, after, author)
        if not after.reason_unclear:
            self.people.unclear.end(after.name, self._schedule.now)
        if not after.is_available:
            self._jobs.trouble(after.name)

    def _node_set(self, before: Node, after: Node, author: str) -> None:
        now, name = self._schedule.now, after.name
        if before.state != after.state or before.reason != after.reason:
            self._note(f"{author} sets {name}: {after.state} {after.reason!r}")
        if author == SLURM:
            # As it powers a node up it takes the reason away; what a person said of it stands.
            if not after.reason and not (after.is_down or after.is_drain or after.is_fail):
                self.people.forget(name)
                self.people.end_request(name, 0.0)
            hold = self.people.hold(name)
            is_noted = after.reason != before.reason and after.reason.startswith(NOT_RESPONDING)
            if is_noted and hold is not None and hold.reason == NOT_RESPONDING:
                # Slurm's very words, and Slurm's name under them now: nothing tells them from its
                # own. It was a person who had the node rebooted, to have it back.
                self.people.forget(name)
            goes_down = after.reason == NOT_RESPONDING and after.is_down and not before.is_down
            if goes_down and name in self._bad_since.dead and self.breaker.knows(name):
                self._bad_since.seen_to_die.add(name)
            return
        if author != SRESCTLD:
            self.people.say(name, after, now)
            for run in self._host.runs.values():
                if run.lives and run.node == name:
                    self.people.serve(name, run.verb)
            if after.reason and before.reason.startswith(after.reason):
                # In our own words, to which Slurm may have added: it is being done, or has been.
                self.people.end_request(name, now)
            return
        self._acts(name)
        if "POWER_UP" in after.flags - before.flags:
            self.people.serve(name, "replace")  # it is powered down, and so half replaced already
        self._touches(before, after)
        is_mark = after.reason.startswith("Action:") and not self.people.asks(name)
        if is_mark and after.is_down and not before.is_down:
            self._sets_down(name)
        # One in FAIL was marked before: Slurm took the Reason away, or wrote its own over it.
        if is_mark and not before.is_fail and not before.reason.startswith("Action:"):
            self._count_mark(before)
            self._overrules(before)
        if not after.reason:
            self._gives_back(name)
            if not after.is_available:
                # Slurm alone may have taken it out: to keep it out then is no mark.
                self.breaker.out.add(name)

    def reboot_asked(self, name: str, then: str) -> None:
        """Take in that a person has Slurm reboot a node."""
        self._note(f"a person has {name} rebooted by Slurm, nextstate={then or 'as before'}")
        self.people.last_word[name] = self.people.slurm_reboots[name] = self._schedule.now

    def reboot_over(self, name: str, is_taken_back: bool) -> None:
        """Take in that such a reboot is over."""
        self.people.slurm_reboots.pop(name, None)
        if is_taken_back:
            text = f"the reboot of {name} is taken back; a person asked for it"
            self.break_rule(ClusterRule.PERSONS_NODE, text)

    def rebooted(self, name: str) -> None:
        """Take in that Slurm has rebooted a node: a person's request for that is served."""
        self.people.serve(name, "reboot")

    def _judge_reboot(self, name: str, act: str) -> None:
        """Check that a node is not taken away while Slurm reboots it by the word of a person."""
        if self.people.slurm_reboots.get(name, 1e18) < self._looked_at(name):
            text = f"{name} is {act} while Slurm reboots it by the word of a person"
            self.break_rule(ClusterRule.PERSONS_NODE, text)

    def job_lost(self, job: Job, node: str, author: str) -> None:
        if author != SRESCTLD or job.state != "RUNNING" or job.is_zombie:
            return
        if not node:
            self._acts(f"job {job.id}")
        if self._is_supervised(job):
            self._bad_since.emptied[node] = self._schedule.now
            return
        since = self._slurm.silent.get(node)
        waited = self._schedule.now - since if since is not None else 0.0
        own = self._config.detect.dead_after_unsupervised or 1e9
        bound = min(own, self._slurm.settings.slurmd_timeout)
        if waited < bound - STALE_SECONDS:
            self.break_rule(
                ClusterRule.UNSUPERVISED_JOB,
                f"job {job.id} lost {node or 'its run'} after {waited:.1f} s of silence; Slurm "
                f"waits {self._slurm.settings.slurmd_timeout:.0f} s",
            )

    def _is_supervised(self, job: Job) -> bool:
        """Tell whether a job, or one of the same user whose companion it is, has a supervisor."""
        announced = self._supervisors.announced
        if job.companion_of is None or job.id in announced:
            return job.id in announced
        main = self._slurm.find_job(job.companion_of[0])
        beside = main is not None and (main.uid, main.restarts) == (job.uid, job.companion_of[1])
        return beside and job.companion_of[0] in announced

    def job_ended(self, job: Job, has_steps: bool) -> None:
        self._acts(f"job {job.id}")
        supervised = job.id in self._supervisors.announced
        runs = has_steps or job.id in self._supervisors.living
        if not (supervised and job.is_stranded) or runs:
            why = "has a step" if has_steps else "could go on"
            self.break_rule(ClusterRule.ENDED_JOB, f"job {job.id} {why}")

    def job_left(self, job: Job, nodes: Sequence[str]) -> None:
        self._jobs.left(job, nodes)
        self._jobs.lost(job, self._is_in_trouble)
        if job.id in self._supervisors.announced:
            for name in nodes:
                self._bad_since.emptied[name] = self._schedule.now

    def job_started(self, job: Job) -> None:
        self._jobs.started(job)
        self._supervisors.job_started(job)

    def job_shrunk(self, job: Job) -> None:
        # One that its owner's program calls larger than its step has spares inside.
        if self._slurm.has_gres(job) and job.id not in self._jobs.described:
            self.break_rule(ClusterRule.GRES, f"job {job.id} is made smaller")

    def job_preferred(self, job: Job, nodes: int) -> None:
        lost = self._jobs.lost(job, self._is_in_trouble)
        if nodes > len(lost):
            text = f"job {job.id}, for {nodes} nodes; it lost {', '.join(sorted(lost)) or 'none'}"
            self.break_rule(ClusterRule.QUEUE_JUMP, text)

    def companion_preferred(self, job: Job, companion: Job) -> None:
        is_its_own = companion.uid == job.uid and companion.companion_of == (job.id, job.restarts)
        if not is_its_own:
            text = f"job {companion.id} of uid {companion.uid}, as a companion of job {job.id}"
            self.break_rule(ClusterRule.QUEUE_JUMP, text)

    def _is_in_trouble(self, name: str) -> bool:
        node = self._slurm.entries[name]
        is_seen = not node.is_available or self.breaker.knows(name)
        return is_seen or not self._machines[name].lives

    def announced(self, job_id: int) -> None:
        """Take in that a user's program says that it keeps its own job alive."""
        self._supervisors.announced.add(job_id)
        self._jobs.described.add(job_id)

    def listing(self) -> None:
        """Take in that sresctld looks at all nodes: its next acts rest on what it sees."""
        self._jobs.is_any_recovering = self._is_any_recovering()

    def node_serves(self, name: str) -> None:
        self.breaker.out.discard(name)
        self.people.forget(name)

    def let_through(self, text: str) -> None:
        """Take in that a user's claim was believed which is not its own."""
        self.break_rule(ClusterRule.NOT_ITS_OWN, text)

    def gpus_reset(self, name: str, order: str) -> None:
        """Take in that a node's sresd begins to reset its GPUs."""
        self._note(f"RESET of the GPUs of {name} for {order}")
        self._acts(name)
        intent = f"{name} {order}"
        if intent in self._intents:
            self.break_rule(ClusterRule.RESET, f"{intent} is carried out a second time")
        self._intents.add(intent)
        before, started = self._schedule.now - 3 * STALE_SECONDS, self._supervisors.started_at
        jobs = [job.id for job in self._slurm.jobs_on(name) if started[job.id] < before]
        if not self.people.asks(name):
            self._judge_reboot(name, "given to a reset of its GPUs")
        if jobs:
            self.break_rule(ClusterRule.RESET, f"{name} has job {jobs[0]}")

    # -- what is done with programs -------------------------------------------------------------

    def run_started(self, run: SimRun) -> None:
        self._note(f"PROGRAM {run.verb} {run.node} starts for {run.intent}: {run.manner.value}")
        machine, name = self._machines[run.node], run.node
        self._acts(name)
        run.looked_at = self._looked_at(name)
        self.people.serve(name, run.verb)
        resumed = self.people.resumed_at.get(name, 1e18)
        is_soon = self._schedule.now - resumed < self._config.replace.silent_for
        if resumed < run.looked_at and is_soon and not self._unanswered(name):
            self.break_rule(
                ClusterRule.PERSONS_NODE, f"{name} is replaced; a person has resumed it"
            )
        if run.intent in self._intents:
            self.break_rule(ClusterRule.ONCE, f"{run.intent} is started a second time")
        self._intents.add(run.intent)
        running = [other for other in self._host.runs.values() if other.lives]
        if any(other.node == name and other is not run for other in running):
            self.break_rule(
                ClusterRule.ONCE, f"{run.intent} starts while another program works on {name}"
            )
        if len(running) > self._config.replace.max_running:
            self.break_rule(ClusterRule.MOST_PROGRAMS, f"{len(running)} programs run")
        for partition in self._slurm.entries[name].partitions:
            there = [
                run.node for run in running if partition in self._slurm.entries[run.node].partitions
            ]
            if len(there) > self._config.replace.max_running_partition:
                text = f"{len(there)} programs run in partition {partition}: {' '.join(there)}"
                self.break_rule(ClusterRule.MOST_PROGRAMS, text)
        if self.people.asks(name):
            return
        incident = run.intent.partition("-")[0]
        for other in self._host.runs.values():
            is_same = other.intent.partition("-")[0] == incident and other is not run
            ago = self._schedule.now - other.ended_unseen
            is_unseen = machine.seen_at <= other.ended_unseen
            if is_same and is_unseen and ago < LOST_SECONDS:
                text = f"{run.intent} starts {ago:.0f} s after the unknown end of {other.intent}"
                self.break_rule(ClusterRule.ONCE, text)
        self._judge_reboot(name, f"given to the program ({run.verb})")
        hold = self.people.hold(name)
        if hold is not None and hold.since < self._looked_at(name):
            self.break_rule(
                ClusterRule.PERSONS_NODE, f"{name} is replaced; a person holds it: {hold.reason}"
            )
        if self.people.reserved.get(name, 1e18) < self._schedule.now - 3 * STALE_SECONDS:
            self.break_rule(
                ClusterRule.PERSONS_NODE, f"{name} is replaced in a maintenance reservation"
            )
        healthy = self._healthy_for(machine)
        if healthy >= SEEN_SECONDS:
            self.break_rule(
                ClusterRule.LIVING_NODE, f"{name} has lived and been healthy for {healthy:.1f} s"
            )
        silence = self._schedule.now - machine.seen_at
        is_rebooted = machine.power is Power.BOOTING and name in self.people.rebooting
        # Between two beats a node that is sick cannot be known to have gone down.
        is_silent = silence > self._config.detect.silent_after
        if is_rebooted and is_silent and silence < self._config.replace.silent_for:
            text = f"{name} has been silent for {silence:.0f} s"
            self.break_rule(ClusterRule.REBOOTING_NODE, text)

    def run_terminated(self, run: SimRun) -> None:
        self._note(f"PROGRAM {run.intent} is ended by sresctld")
        self._acts(run.node)
        unclear = self.people.unclear.seen.get(run.node, -1.0)
        if max(self.people.last_word.get(run.node, -1.0), unclear) < run.looked_at:
            self.break_rule(
                ClusterRule.PROGRAM_ENDED, f"{run.intent} on {run.node}; no person said a word"
            )

    # -- what the journal gets ------------------------------------------------------------------

    def event_written(self, row: Any) -> None:
        _, kind, node, job, incident, text, _ = row
        if kind in ("alarm", "failed", "pause"):
            self._note(f"journal: {kind} {node} {text[:140]}")
        elif incident or kind == "requeue":
            self._note(f"journal: {kind} {node}{f' job {job}' if job else ''} {text[:100]}")
        if incident:
            of = incident, node
            if kind in (NodeEvent.DETECTED, NodeEvent.REQUESTED):
                # Anew, where a kill has undone the last one with the same number.
                self._written.opened[of] = self._schedule.now
            opened = self._written.opened.setdefault(of, self._schedule.now)
            self._judge_duration(text, opened)
        if kind == NodeEvent.REQUESTED:
            self._written.requested.add(incident)
        if kind == NodeEvent.REPLACING:
            self._written.starts.append(self._schedule.now)
            self._count_repair(node, incident)
            # A slow Slurm may take seconds between the listing and the look at the disk.
            if self._host.was_full_at(self._slurm.listed_at):
                self.break_rule(ClusterRule.SHORT_DISK, f"incident {incident} of {node}: {text}")
        if kind != "alarm":
            return
        # Each alarm about spares follows from a person's act of its own.
        other = "spares" if text.startswith("the spares of") else ""
        subject = node or (f"job {job}" if job else other)
        times = self._written.alarms.setdefault(subject, deque())
        times.append(self._schedule.now)
        while times[0] < self._schedule.now - ALARMS_SECONDS:
            times.popleft()
        if len(times) > MOST_ALARMS:
            about = f"of {node}" if node else "of the whole cluster"
            self.break_rule(ClusterRule.ALARMS, f"{len(times)} alarms {about}: {text[:80]}")

    def rows_dropped(self, rows: int) -> None:
        """Take in that the journal forgets: no run is as long as the time that it keeps."""
        self.break_rule(ClusterRule.YOUNG_ROWS, f"{rows} rows, after {self._schedule.now:.0f} s")

    def _count_repair(self, node: str, incident: int) -> None:
        if incident in self._written.requested:
            return
        machine = self._machines[node].instance
        repaired = self._written.repaired.setdefault(machine, set())
        repaired.add(incident)
        if len(repaired) > self._config.recovery.max_repairs:
            self.break_rule(
                ClusterRule.LEMON, f"{machine} is repaired in {len(repaired)} incidents"
            )

    def _judge_duration(self, text: str, opened: float) -> None:
        written = _DURATION.search(text)
        if written is None:
            return
        # It is counted up to the look that the cycle began with: a slow Slurm takes seconds since.
        least, most = self._slurm.listed_at - opened, self._schedule.now - opened
        if not least - STALE_SECONDS < float(written[1]) < most + STALE_SECONDS:
            self.break_rule(ClusterRule.DURATIONS, f"{text}; in truth after {most:.1f} s")

    # -- what must come about -------------------------------------------------------------------

    def look(self, standing: DaemonView, seconds: float) -> None:
        """Check what must come about in time.

        Args:
            standing: sresctld's.
            seconds: since the last look.
        """
        now = self._schedule.now
        incidents = standing.open_incidents()
        able_since = standing.able_since()
        self._bad_since.look(self._machines, now)
        if standing.is_tripped():
            self.breaker.tripped_at = now
        if self._hears_none():
            self.breaker.deaf_at = now
        if max(able_since, self.breaker.tripped_at, self.breaker.deaf_at) + NOTICED_SECONDS <= now:
            held = {incident.node for incident in incidents}
            for name in self._machines:
                if name in held:
                    # One that a person put back in mid-repair is judged when its time to return
                    # is over, and its incident with it.
                    self._bad_since.kept[name] = now
                elif self.people.hold(name) is None:
                    self._look_at_node(name, standing)
        self._look_at_intents(standing, incidents, seconds)

    def _hears_none(self) -> bool:
        """Tell whether all nodes fell silent together: sresctld may be what is cut off."""
        machines = self._machines.values()
        if any(machine.agent.speaks or machine.reaches(Path.PROBES) for machine in machines):
            return False
        last = max(machine.seen_at for machine in machines)
        together = self._config.detect.dead_after
        # One alone is no such sign.
        return sum(last - machine.seen_at <= together for machine in machines) > 1

    def _look_at_node(self, name: str, standing: DaemonView) -> None:
        now, machine, node = self._schedule.now, self._machines[name], self._slurm.entries[name]
        if node.is_down or node.is_fail or node.is_drain:
            return
        if node.is_powered_off_on_purpose or node.flags & {"POWER_UP", "POWER_DOWN"}:
            self._bad_since.kept[name] = now
            return
        if name in self.people.reserved:
            self._bad_since.kept[name] = self._bad_since.reserved[name] = now
            return
        since = self._bad_since.dead.get(name)
        supervised = standing.supervised()
        if not all(job.id in supervised for job in self._slurm.jobs_on(name)):
            self._bad_since.kept[name] = now
        if since is not None:
            kept = self._bad_since.kept.get(name, 0.0)
            kept = max(kept, self.people.unclear.seen.get(name, 0.0))
            since = max(since, kept, self.people.last_word.get(name, 0.0))
        # A node whose sresd was stopped on purpose is left to Slurm.
        slurms = self._slurm.settings.slurmd_timeout
        bound = NOTICED_SECONDS + (0.0 if standing.expects(name) else slurms)
        if since is not None and now - since > bound:
            self.break_rule(
                ClusterRule.DEAD_UNNOTICED, f"{name} has been dead for {now - since:.0f} s"
            )
        told = self._unanswered(name) if machine.agent.speaks else []
        kept = self._bad_since.reserved.get(name, 0.0)
        if machine.fault is not None and any(now - max(at, kept) > NOTICED_SECONDS for at in told):
            self.break_rule(
                ClusterRule.SICK_IN_SERVICE, f"{name} has had {machine.fault} for {now:.0f} s"
            )

    def _look_at_intents(
        self, standing: DaemonView, incidents: list[Incident], seconds: float
    ) -> None:
        bound, able_since = self._bound(), standing.able_since()
        hour = self._schedule.now - HOUR_SECONDS
        begun = sum(at > hour for at in self._written.starts)
        is_full = begun >= self._config.replace.max_per_hour
        for incident in incidents:
            if is_full and incident.state.waits_for_repair:
                continue  # an alarm says so
            node = self._slurm.entries.get(incident.node)
            is_held = standing.is_tripped() or node is None or node.has_work
            if able_since == float("inf") or is_held:
                continue
            passed = self._written.open_for.get(incident.id, 0.0) + seconds
            self._written.open_for[incident.id] = passed
            if passed > bound:
                text = f"incident {incident.id} of {incident.node} is {incident.state}"
                self.break_rule(
                    ClusterRule.INTENT_ENDS, f"{text} after {passed:.0f} s with nothing in its way"
                )

    def _bound(self) -> float:
        replace, nodes = self._config.replace, len(self._machines)
        turns = 1 + nodes / min(replace.max_running, replace.max_running_partition)
        one = replace.timeout + replace.return_timeout + 2 * replace.backoff * 2.0**replace.attempts
        return 1.5 * turns * replace.attempts * one

    def at_the_end(self, incidents: list[Incident], last: dict[str, str]) -> None:
        """Check the cluster's state after it had the time to settle.

        Args:
            incidents: those that are open still.
            last: the state of each node that has had an incident.
        """
        now, replace = self._schedule.now, self._config.replace
        # What the hour has kept waiting may have begun a moment ago.
        lately = [at for at in self._written.starts if now - at < HOUR_SECONDS + self._bound()]
        waiting = set()
        for incident in incidents:
            if now - self._written.opened.get((incident.id, incident.node), 0.0) < NOTICED_SECONDS:
                continue  # the breaker has only just let it through
            # For the hour's end, or until this machine is known not to be what is cut off.
            if len(lately) >= replace.max_per_hour or self._hears_none():
                waiting.add(incident.node)
                continue
            self.break_rule(
                ClusterRule.AS_IT_SHOULD_BE,
                f"incident {incident.id} of {incident.node} is {incident.state} at the end",
            )
        in_service = []
        for name, machine in self._machines.items():
            node = self._slurm.entries[name]
            is_left = self.people.hold(name) or last.get(name) == NodeState.QUARANTINED
            if is_left or name in waiting:
                continue
            if machine.lives and machine.fault is None:
                # What Slurm or a reservation keeps out is not sresctld's to give back, but for a
                # node that died before its eyes.
                was_away = name in self._bad_since.seen_to_die and machine.agent.speaks
                was_away = was_away and node.reason == NOT_RESPONDING and node.base == "DOWN"
                # In mid-reboot Slurm adds to our Reason: one that could not be read for certain in
                # those seconds holds the node for a person.
                was_unclear = name in self.people.unclear.seen and last.get(name) == NodeState.HELD
                is_added_to = node.reason.startswith("Action:") and not was_unclear
                is_ours = bool(node.requested_action) or is_added_to or was_away
                if not node.is_available and is_ours:
                    text = f"{name} is well, and {node.state} {node.reason!r}"
                    self.break_rule(ClusterRule.AS_IT_SHOULD_BE, text)
            elif node.is_available and (not machine.lives or self._unanswered(name)):
                in_service.append(f"{name} is dead or sick, and {node.state}")
        # So many at once are left to a person, who has reset the breaker long ago.
        if in_service and not self.breaker.is_tripped() and not self._hears_none():
            self.break_rule(ClusterRule.AS_IT_SHOULD_BE, in_service[0])

    def daemon_ended(self, text: str) -> None:
        """Take in that sresctld ended by an error."""
        self.break_rule(ClusterRule.DAEMON_LIVES, text)

    def daemon_down(self, is_paused: bool) -> None:
        """Take in that sresctld has ended: SIGTERM is done, a pause stands.

        Args:
            is_paused: the journal says so. A pause of a moment before is not in it, and `sres
                pause` has told of the lost connection instead.
        """
        halt = self.people.halt
        if halt is not None and (halt.by == SIGTERM or not is_paused):
            self.people.halt = None

    def second_started(self) -> None:
        """Take in that a second sresctld got the state directory of one that works."""
        self.break_rule(ClusterRule.ONE_DAEMON, "a second one has started")

    # -- judged in one place --------------------------------------------------------------------

    def _acts(self, subject: str) -> None:
        """Check that an act on a node or a job was begun before sresctld was told to halt."""
        halt = self.people.halt
        if halt is None:
            return
        halt.subjects.add(subject)
        passed = self._schedule.now - halt.since
        if len(halt.subjects) > 1 or passed > LONGEST_ACT_SECONDS:
            text = f"{subject} is acted on {passed:.1f} s after {halt.by}"
            self.break_rule(ClusterRule.HALT, text)

    def _sets_down(self, name: str) -> None:
        """Check that a node which is set DOWN was not seen to live."""
        # What it says during the calls that mark it comes too late.
        machine, now = self._machines[name], self._slurm.read_at.get(name, self._schedule.now)
        beats = now - machine.agent.connected_at if machine.agent.speaks else 0.0
        answers = now - machine.answers_since if machine.reaches(Path.PROBES) else 0.0
        if max(beats - SEEN_SECONDS, answers - ANSWERS_SECONDS) > 0.0:
            text = f"{name} beats for {beats:.1f} s, answers for {answers:.1f} s"
            self.break_rule(ClusterRule.LIVING_DOWN, text)

    def _touches(self, before: Node, after: Node) -> None:
        hold = self.people.hold(after.name)
        if hold is None:
            return
        if after.reason != before.reason and hold.since >= self._looked_at(after.name):
            # Said between the last look and the mark: Slurm has kept nothing of it.
            self.people.forget(after.name)
            return
        is_reworded = (after.reason, after.base) != (before.reason, before.base)
        if not is_reworded and after.flags | {"REBOOT_REQUESTED"} == before.flags:
            return  # its own order to Slurm, taken back for the person
        # The jobs of a node that died must be freed; its reason stays.
        is_freed = after.is_down and after.reason.startswith(before.reason)
        if not is_freed and hold.since < self._looked_at(after.name):
            self.break_rule(
                ClusterRule.PERSONS_NODE,
                f"{after.name} becomes {after.state} {after.reason!r}; a person held it: "
                f"{hold.reason!r}",
            )

    def _looked_at(self, name: str) -> float:
        """When sresctld last looked at a node, or should have."""
        looked = max(self._slurm.read_at.get(name, 0.0), self._slurm.listed_at)
        return max(looked, self._schedule.now - 20 * STALE_SECONDS)

    def _gives_back(self, name: str) -> None:
        machine, told = self._machines[name], self._unanswered(name)
        request = self.people.end_request(name, self._slurm.set_at)
        if request:
            text = f"{name} is given back; {request} was asked for, and was not done"
            self.break_rule(ClusterRule.PERSONS_NODE, text)
        if machine.lives and any(at < self._slurm.set_at for at in told):
            self.break_rule(
                ClusterRule.RESUMED_SICK, f"{name} has {machine.fault} in its present boot"
            )

        agent = machine.agent
        # One that was stopped by a person before its machine died, and has not called since, is not
        # waited for: its node may have none any more.
        is_here = agent.connection is not None and agent.connected_at < self._slurm.set_at
        if machine.lives and is_here and not agent.has_looked:
            text = f"{name} is given back, and its sresd has not looked at it"
            self.break_rule(ClusterRule.UNCHECKED, text)

    def _unanswered(self, name: str) -> list[float]:
        """Return when sresctld was told of the findings that no person has answered since."""
        answered = self.people.last_word.get(name, -1.0)
        reported = self._machines[name].agent.reported_at.values()
        return [at for at in reported if at > answered]

    def _overrules(self, before: Node) -> None:
        """Check that a mark is for news, not for findings that a person has answered."""
        name, machine = before.name, self._machines[before.name]
        resumed = self.people.resumed_at.get(name, 1e18)
        is_known = machine.lives and not machine.cut and machine.agent.reported_at
        if is_known and resumed < self._looked_at(name) and not self._unanswered(name):
            self.break_rule(
                ClusterRule.PERSONS_NODE,
                f"{name} is marked for a finding that a person answered by a resume",
            )

    def _count_mark(self, before: Node) -> None:
        """Count a mark, unless it is part of moving supervised jobs off a dead node."""
        now, name = self._schedule.now, before.name
        listed_at, started_at = self._slurm.listed_at, self._supervisors.started_at
        # Those that have come since the last listing are none of its reasons: a later look at the
        # node alone shows no job.
        jobs = [job for job in self._slurm.jobs_on(name) if started_at[job.id] < listed_at]
        is_moved = bool(jobs) or now - self._bad_since.emptied.get(name, -1e9) < 3 * STALE_SECONDS
        is_dead = not self._machines[name].agent.speaks
        lasting = [job.id for job in jobs if job.state != "COMPLETING"]
        is_supervised = all(number in self._supervisors.announced for number in lasting)
        if is_dead and is_moved and is_supervised:
            return
        is_offered = is_dead and not jobs and not before.is_down
        # At the last look at Slurm, or since: a supervisor's request is read after it.
        is_needed = self._jobs.is_any_recovering or self._is_any_recovering()
        if is_offered and self.breaker.is_tripped() and is_needed:
            return  # Slurm must not offer the dead node to a job that looks for another one
        if now - self.people.reset_at < self._config.breaker.window:
            return  # by the word of a person, all that had waited goes on
        if name in self.breaker.out:
            return  # set aside before, given back, and not in service since
        self.breaker.out.add(name)
        # Those that Slurm had DOWN before are counted by themselves.
        is_apart = before.is_down and not self.breaker.knows(name)
        # One that waited for Slurm's own DOWN was counted when it fell silent.
        waited = self.breaker.age(name) if before.is_down and not is_apart else 0.0
        marks = self.breaker.marks.setdefault(is_apart, deque())
        # Faults count from the look that found them: a slow slurmctld sets the node seconds later.
        marks.append((min(now, listed_at) - waited, name))
        window = self._config.breaker.window - STALE_SECONDS
        for mark in [mark for mark in marks if mark[0] < now - window]:
            marks.remove(mark)
        excess = self._ceilings.excess(name, {node for _, node in marks}, is_apart)
        if excess and is_offered and is_needed:
            marks.pop()  # the breaker trips in this very cycle: its notes come after its acts
            return
        if excess:
            self.break_rule(ClusterRule.MOST_MARKS, excess)
        if not is_apart:
            self._ceilings.judge_hour(name, min(now, listed_at) - waited)

    def _is_any_recovering(self) -> bool:
        """Tell whether a supervised job must leave a dead node, or waits for a run or for nodes in
        exchange because it had a faulty one."""
        for number in self._supervisors.announced:
            job = self._slurm.find_job(number)
            if job is None:
                continue
            if any(not self._machines[name].agent.speaks for name in job.nodes):
                return True
            is_moved = number in self._supervisors.asked or self._slurm.lacks_nodes(number)
            had_faulty = any(self._is_in_trouble(name) for name in job.nodes)
            if is_moved and (had_faulty or self._jobs.lost(job, self._is_in_trouble)):
                return True
        return False

    def _healthy_for(self, machine: SimMachine) -> float:
        """Seconds for which sresctld could see that a node lives and is healthy."""
        agent = machine.agent
        if machine.fault is not None or not agent.speaks:
            return 0.0
        since = max(agent.connected_at, self._bad_since.mended.get(machine.name, 0.0))
        return self._schedule.now - since

    def path_mended(self, name: str) -> None:
        """Take in that a node is reached again."""
        self._bad_since.mended[name] = self._schedule.now

    def break_rule(self, rule: ClusterRule, text: str) -> None:
        """Write down that a rule is broken; each only once."""
        if any(broken.rule is rule for broken in self.broken):
            return
        self._note(f"BROKEN: {rule}: {text}")
        self.broken.append(Broken(rule, self._schedule.now, text))
