"""Simulated clusters around the real sresctld: no rule is broken, a broken sresctld is found."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from slurm_resilience.cli.simulate import simulate as command
from slurm_resilience.controller import authorize, diagnose, observe, registry, retention
from slurm_resilience.controller.act.actor import Actor
from slurm_resilience.controller.act.nodes import NodeActs
from slurm_resilience.controller.act.repair import RepairActs
from slurm_resilience.controller.act.spare_acts import SpareActs
from slurm_resilience.controller.actions import ActOutcome, Transition
from slurm_resilience.controller.calm import calm_nodes
from slurm_resilience.controller.calm.agent_views import AgentView
from slurm_resilience.controller.cycle import Cycle
from slurm_resilience.controller.decide import (
    breaker,
    decision,
    intake,
    jobs,
    marking,
    node_events,
    replacing,
)
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import Supervised
from slurm_resilience.controller.slurm_settings import SlurmSettings
from slurm_resilience.controller.spares import gift_plan, pool_plan
from slurm_resilience.controller.spares.pool_lifecycle import PoolEvent
from slurm_resilience.controller.spares.pool_records import MovePool, SparePool
from slurm_resilience.errors import UsageError
from slurm_resilience.model import ACTIONS, Node
from slurm_resilience.replace.replacers import Replacers
from slurm_resilience.simulate.cluster import cluster_faults
from slurm_resilience.simulate.cluster.cluster_campaign import CONTROLLER_CAMPAIGN, kinds_of
from slurm_resilience.simulate.cluster.cluster_simulation import simulate_cluster
from slurm_resilience.simulate.cluster.fault_plan import FaultKind, PlannedFault, plan
from slurm_resilience.simulate.cluster.rules.rule_names import ClusterRule
from slurm_resilience.simulate.cluster.sim_host import SimHost
from slurm_resilience.simulate.cluster.sim_slurm import SimSlurm
from slurm_resilience.slurm.reservations import Reservation

RUNS = int(os.environ.get("SRES_TEST_RUNS", "80"))
HOURS, FAULTS_AN_HOUR = 0.1, 20.0
"""Short runs, with two faults each: the campaign of `scripts/bench simulate` has the long ones."""
MOST_RUNS = 60
"""In which a broken rule must be found."""
PINNED: dict[int, str] = {
    60296: "a resume in a pause answered what was found after it",
    90857: "a resume by sresctld in a maintenance reservation was taken for a person's",
    92659: "each restart raised all alarms once more",
    100736: "a request for a node that Slurm had powered down waited for ever",
    101178: "the date was set back, and faults of the future kept the breaker tripped",
    102479: "marks that a pause had held up counted as old",
    103679: "a reboot that had waited for the hour's end had just begun at the end",
    104240: "a mark came as the window of an earlier one ended",
    105123: "a node that Slurm alone had set DOWN was kept out when its return failed",
    105737: "a request stood still whose node Slurm had not taken back",
    106600: "a job came to an empty dead node as it was kept from others",
    112240: "a reboot was asked for in the place of a replacement that had begun",
    112321: "all nodes fell silent together",
    131634: "a resume of a node that was still away was overruled",
    141883: "a resume answered nothing after a reason that could not be read",
    151597: "a resume answered nothing while sresctld was started anew",
    940228: "the date was set on, and a switch's ceiling of an hour forgot a fault",
    770029: "a request for a requeue lifted the breaker's hold of empty nodes",
    91729: "a mark that rested on a look at a job which had to move",
    90300: "a sick node was rebooted by hand between two beats",
    92296: "`sres unpause` met a sresctld that was killed",
    92394: "an order of sresctld's own was taken back for a person",
    92767: "as 92296",
    960256: "with a slow Slurm no probe was fresh by the time of the decision",
    961105: "a person deleted the spares' reservation before the look after its making",
    1000085: "Slurm took a person's reason away as it powered the node up, and not the drain",
    1005113: "three alarms of spares, each for an act of a person, counted as a flood",
    2001250: "a sresd that was stopped for an upgrade was expected on the node's next boot",
    2001502: "a job that ended for good, beside dead nodes, counted as one that begins again",
    30000044: "a program was started on a node that Slurm rebooted for a person",
    30000050: "after a person's reboot the repair that comes next was never asked for",
    30000003: "what Slurm notes of a person's reboot was taken for a request",
    30000157: "a reboot that Slurm had not begun stood on a node that it powered down",
    30000147: "the reason of a person's reboot was taken for an old one",
    8001084: "all nodes of the cluster stayed silent, and one of them was to be replaced before",
    8001207: "after minutes in which no node was heard, those that stayed dead were probed rarely",
    8400388: "a companion's node died, and the rule counted the main job's own nodes only",
    8400580: "a person asked for a replacement as a reset failed, and nothing was done any more",
    8700713: "a person resumed the spares before sresctld had seen what was changed",
    8900761: "a person resumed the spares as sresctld was killed",
    9200471: "who resumed the spares once more meant a later change by a person too",
    9300608: "an empty dead node was kept from a job that recovers as the breaker tripped",
    9600631: "a person changed a pool's users before the first look at it, which took them over",
    10500239: "a person put back at once the spares that sresctld had just exchanged",
    11000021: "a sresd that was stopped in mid-reset told of no end of the fault, and it was over",
    12000703: "a person asked for a replacement during a reboot, and the node was given back",
    14000007: "a node that was powered down was asked for, and the rule saw no program power it up",
    15000384: "a person asked for a replacement in the second of our mark, in its words",
    15001151: "a person asked for the reboot that had just been done, and the rule waited for it",
    16000311: "a person resumed a repaired node as sresctld had just started, which marked it anew",
    18100007: "a job began elsewhere between the look at it and the word of its nodes",
    18002519: "Slurm rebooted a node for one person, which another one had asked of sresctld",
    50000291: "the simulated Slurm never ended a job whose nodes were cut off as it ended",
    91000239: "a liar's own companion was as supervised as his job, and the rule knew of no job's",
    91000249: "the rule took an incident for one of its number that a kill had undone",
    90000372: "a person held a node in Slurm's own words, and then had Slurm reboot it",
    100000855: "a person drained a repaired node, which became a spare in the same cycle",
    100000943: "a node was heard after a repair whose end is unknown, and then was sick again",
    961236: "a job was given nodes, and its supervisor said nothing of them",
}
"""Hours of six faults, as a campaign has them, in which a rule was broken once, and why."""
Kind = FaultKind


def broken(
    seed: int, kinds: tuple[FaultKind, ...] = tuple(FaultKind), trace: list[str] | None = None
) -> str:
    """Return the first broken rule of a run, and its text; empty: none."""
    faults = plan(seed, HOURS, FAULTS_AN_HOUR, kinds)
    run = simulate_cluster(seed, trace, hours=HOURS, faults=faults)
    return "".join(f"{one.rule}: {one.text}" for one in run.broken)


@pytest.mark.timeout(300 + 4 * RUNS)  # a fifth of a second each, of a core that others may use
def test_no_rule_is_broken() -> None:
    for seed in range(RUNS):
        assert (seed, broken(seed)) == (seed, "")


@pytest.mark.parametrize("seed", PINNED)
def test_a_rule_that_was_broken_once_holds_now(seed: int) -> None:
    assert simulate_cluster(seed, kinds=kinds_of(seed)).broken == ()


def test_a_probe_that_must_be_as_new_as_the_decision_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its age counts up to Slurm's picture: a slow Slurm is as old by then."""
    age = observe.ClusterSnapshot.age_of_last_probe
    monkeypatch.setattr(
        observe.ClusterSnapshot,
        "age_of_last_probe",
        lambda self, node: age(self, node) + self.site.picture_age,
    )
    (broken_rule,) = simulate_cluster(960256).broken
    assert broken_rule.rule is ClusterRule.DEAD_UNNOTICED


def test_each_replacer_is_taken() -> None:
    """And each by the rules above; so they are not kept by doing nothing."""
    wanted = {
        "slurm-power replace",
        "slurm-reboot reboot",
        "replace-node replace",
        "state=power_up",
    }
    for seed in range(MOST_RUNS):
        trace: list[str] = []
        broken(seed, (Kind.PERSON_ASKS, Kind.SICK_REBOOT), trace)
        wanted -= {words for words in wanted if any(words in line for line in trace)}
        if not wanted:
            return
    assert not wanted


def test_a_seed_is_replayed_exactly() -> None:
    for seed in range(5):
        first: list[str] = []
        second: list[str] = []
        assert broken(seed, tuple(Kind), first) == broken(seed, tuple(Kind), second)
        assert first == second and first


def no_op(*_: Any, **__: Any) -> None:
    return None


def fail(*_: Any) -> None:
    raise RuntimeError("the failure cannot be noted")


def taken_over_at_once(snapshot: Any, config: Any, incident: Any, node: Any) -> Any:
    yield Transition(node.name, incident.id, NodeEvent.TAKEN_OVER, "no person has said so")


def without_turns(*arguments: Any, **_: Any) -> Any:
    """Find the progress of all, and count no program that this cycle starts."""
    snapshot, config, diagnoses, moved = arguments
    for incident in snapshot.incidents.values():
        if incident.node not in moved:
            yield from node_events.progress(
                snapshot, config, incident, diagnoses.get(incident.node)
            )


def believe_the_nodes(snapshot: Any, heard: Any, message: Any) -> Supervised:
    """Take what a supervisor says for true."""
    job = snapshot.jobs.get(heard.job)
    names = tuple(name for name in dict.fromkeys(message.nodes) if name in snapshot.nodes)
    restarts = job.restarts if job else 0
    return Supervised(heard.job, 0, 1, names, snapshot.now, len(names), restarts)


def named_like_companions(snapshot: Any, job: Any, missing: int) -> tuple[int, ...]:
    """Take each job that waits for a companion whose name says so."""
    waiting = (other for other in snapshot.jobs.values() if other.state == "PENDING")
    return tuple(o.id for o in waiting if o.companion_of and o.companion_of[0] == job.id)


def ask_for_pauses_alone(self: Cycle) -> bool:
    self.take_pauses()
    return bool(self._sources.journal.paused)


def give_back_unseen(self: Any, _: Any, action: Any) -> None:
    self._client.set_node([action.node], state="resume")
    self._reporter.report(ActOutcome(action.incident, NodeEvent.RESUMED, "state=resume"))


def lives_always(_: Any, __: Any, node: Node, ___: Any = None) -> diagnose.NodeDiagnosis:
    return diagnose.NodeDiagnosis(node.name, "healthy", "")


_nodes, _node = SimSlurm.nodes, SimSlurm.node


def nodes_as_they_begin(self: SimSlurm) -> tuple[Node, ...]:
    return tuple(msgspec.structs.replace(node, reason_unclear=False) for node in _nodes(self))


def node_as_it_begins(self: SimSlurm, name: str) -> Node:
    return msgspec.structs.replace(_node(self, name), reason_unclear=False)


_submit = SimSlurm.submit


def submit_without_requeue(self: SimSlurm, nodes: int = 2, **words: Any) -> int:
    if words.get("batch", True) and not words.get("delay"):
        words |= {"requeue": False, "no_kill": True}
    return _submit(self, nodes, **words)


_towards_repair = node_events._towards_repair


def towards_repair_under_jobs(snapshot: Any, config: Any, incident: Any, seen: Node) -> Any:
    idle = msgspec.structs.replace(seen, base="IDLE", flags=seen.flags - {"COMPLETING"})
    return _towards_repair(snapshot, config, incident, idle)


def asked_for_with_notes(node: Node) -> str:
    """Take the words before Slurm's note of a reboot for what a person asks for."""
    words, _, note = node.reason.partition(" : ")
    return words if words in ACTIONS and (not note or note.startswith("reboot")) else ""


def take_any_nodes(snapshot: Any, pool: SparePool, seen: Reservation) -> Iterator[MovePool]:
    """Go on with the nodes that Slurm shows, also where a person has put them there."""
    if set(seen.nodes) != set(pool.nodes):
        yield MovePool(pool.partition, PoolEvent.CHANGED, "as shown", seen.nodes)


_move = SpareActs._move


def move_but_made(self: SpareActs, action: Any, event: PoolEvent, *words: str) -> Any:
    return None if event is PoolEvent.MADE else _move(self, action, event, *words)


def give_to_all(snapshot: Any, *others: Any) -> Iterator[Any]:
    """Give spares that are on their way to one job to another one as well."""
    spares = snapshot.memory.spares
    hidden = msgspec.structs.replace(spares, gifts={})
    memory = msgspec.structs.replace(snapshot.memory, spares=hidden)
    for gift in gift_plan.gifts(msgspec.structs.replace(snapshot, memory=memory), *others):
        if gift.gift.job not in spares.gifts:
            yield gift


Patch = tuple[Any, str, Any]
STORIES: dict[str, tuple[PlannedFault, ...]] = {
    "a node dies": (PlannedFault(60.0, Kind.POWER, "a"),),
    "a person asks": (PlannedFault(60.0, Kind.PERSON_ASKS, "b"),),
    "a person puts a sick node back": (
        PlannedFault(60.0, Kind.PERSON_PUTS_BACK, "c"),
        PlannedFault(62.0, Kind.STORM_OF_FAULTS, "d"),
    ),
    "a spare breaks": (PlannedFault(60.0, Kind.SPARES_UNANSWERED, "i"),),
    "a job gets a spare": (
        PlannedFault(60.0, Kind.SPARES_QUEUE, "j"),
        PlannedFault(64.0, Kind.POWER, "k"),
    ),
    "a person takes a node": (
        PlannedFault(60.0, Kind.SICK_REPLACE, "g"),
        PlannedFault(64.0, Kind.PERSON_REWORDS, "h"),
    ),
}


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.STOP])
@pytest.mark.parametrize("story", STORIES)
def test_an_end_of_sresctld_anywhere_breaks_no_rule(
    story: str, kind: FaultKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each third boundary of a story, from its beginning on; all of them were tried by hand."""
    for boundary in range(1, 61, 3):

        def end(world: Any, _: Any, after: int = boundary) -> None:
            (world.kill_after if kind is Kind.KILL else world.stop_after)(after)

        monkeypatch.setitem(cluster_faults.FAULTS, kind, end)  # type: ignore[arg-type]
        trace: list[str] = []
        faults = [PlannedFault(59.9, kind, ""), *STORIES[story]]
        run = simulate_cluster(3, trace, hours=0.05, faults=faults)
        assert (boundary, run.broken) == (boundary, ())
        assert any("kill -9" in line or "SIGTERM" in line for line in trace)


def test_a_cluster_that_dies_whole_loses_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """sresctld takes itself for cut off and does nothing, and Slurm requeues the jobs.

    When the power is back, no node that boots a little later is replaced; a person resumes those
    that Slurm leaves DOWN, and the jobs run again.
    """
    requeued: set[tuple[int, int]] = set()
    again: set[tuple[int, int]] = set()
    seed = 0

    def power_fails(world: Any, random: Any) -> None:
        jobs = [job for job in world.slurm.jobs() if job.state == "RUNNING"]
        had = {job.id: job.restarts for job in jobs if job.requeue}
        for machine in world.machines.values():
            machine.power_off()
        world.schedule.after(800.0, lost, world, had)
        for machine in world.machines.values():
            world.schedule.after(900.0, machine.boot, random.uniform(30.0, 36.0))
        world.schedule.after(1000.0, resume, world)
        world.schedule.after(1500.0, runs_again, world, had)

    def lost(world: Any, had: dict[int, int]) -> None:
        assert all(node.is_down for node in world.slurm.entries.values())
        shown = {job.id: job for job in world.slurm.jobs()}
        for number in [number for number in had if number not in shown]:
            del had[number]  # its program's time was over before Slurm gave the nodes up
        for number, restarts in had.items():
            assert (shown[number].state, shown[number].restarts) == ("PENDING", restarts + 1)
            requeued.add((seed, number))

    def resume(world: Any) -> None:
        down = [name for name, node in world.slurm.entries.items() if node.is_down]
        if down:
            world.slurm.set_by("alice", down, state="resume")

    def runs_again(world: Any, had: dict[int, int]) -> None:
        waiting = {job.id for job in world.slurm.jobs() if job.state == "PENDING"}
        again.update((seed, number) for number in had if number not in waiting)

    monkeypatch.setitem(cluster_faults.FAULTS, Kind.POWER, power_fails)  # type: ignore[arg-type]
    for seed in range(12):  # the closures read it
        trace: list[str] = []
        faults = [PlannedFault(600.0, Kind.POWER, "whole")]
        run = simulate_cluster(seed, trace, hours=0.7, faults=faults)
        assert (seed, run.broken) == (seed, ())
        assert not any("PROGRAM" in line for line in trace)
    assert len(requeued) >= 3
    assert again == requeued


MUTATIONS: dict[str, tuple[ClusterRule, tuple[FaultKind, ...], tuple[Patch, ...]]] = {
    "a failed act ends it": (
        ClusterRule.DAEMON_LIVES,
        (Kind.PERSON_ASKS, Kind.DISK_RUNS, Kind.SLURM_AWAY),
        ((Actor, "_note_failure", fail),),
    ),
    "programs of this cycle are not counted": (
        ClusterRule.MOST_PROGRAMS,
        (Kind.PERSON_ASKS,),
        ((decision, "progress_of_all", without_turns),),
    ),
    "programs of a partition are not counted": (
        ClusterRule.MOST_PROGRAMS,
        (Kind.PERSON_ASKS, Kind.PROGRAM_HANGS),
        ((replacing.Ceilings, "_partitions", lambda *_: ()),),
    ),
    "a run holds no lock": (
        ClusterRule.ONCE,
        (Kind.PERSON_ASKS,),
        ((SimHost, "is_held", lambda *_: False),),
    ),
    "a run without its directory was never begun": (
        ClusterRule.ONCE,
        (Kind.DISK_RUNS, Kind.RUNS_REMOVED, Kind.POWER, Kind.PROGRAM_FAILS, Kind.PROGRAM_SLOW),
        ((Journal, "note_carried_out", no_op),),
    ),
    "a person's reason is taken for Slurm's own": (
        ClusterRule.PERSONS_NODE,
        (Kind.PERSON_DRAINS, Kind.SICK_REBOOT),
        ((diagnose, "is_a_persons", lambda *_: False),),
    ),
    "a reason that is not understood is taken for its first line": (
        ClusterRule.PERSONS_NODE,
        (Kind.PERSON_WRITES_LINES,),
        (
            (SimSlurm, "nodes", nodes_as_they_begin),
            (SimSlurm, "node", node_as_it_begins),
        ),
    ),
    "a pause is not written down": (
        ClusterRule.HALT,
        (Kind.PERSON_PAUSES, Kind.PERSON_ASKS),
        ((Journal, "pause", no_op),),
    ),
    "SIGTERM is heard after a cycle alone": (
        ClusterRule.HALT,
        (Kind.STOP, Kind.STORM_OF_DEATHS),
        ((Cycle, "is_halted", ask_for_pauses_alone),),
    ),
    "a state directory has no lock": (
        ClusterRule.ONE_DAEMON,
        (Kind.SECOND_DAEMON,),
        ((fcntl, "flock", no_op),),
    ),
    "an alarm is raised in each cycle": (
        ClusterRule.ALARMS,
        (Kind.PERSON_DRAINS,),
        (
            (
                Actor,
                "_raise_alarm",
                lambda self, _, action: self._reporter.event(
                    "alarm", action.text, node=action.node
                ),
            ),
        ),
    ),
    "a person's resume is not remembered": (
        ClusterRule.PERSONS_NODE,
        (Kind.PERSON_PUTS_BACK, Kind.STORM_OF_FAULTS),
        ((decision, "answers_of_keepers", lambda *_: iter(())),),
    ),
    "the breaker never trips": (
        ClusterRule.MOST_MARKS,
        (Kind.STORM_OF_DEATHS, Kind.STORM_OF_BLIPS),
        ((breaker, "_excess", lambda *_: ""),),
    ),
    "a node that lives again is set DOWN": (
        ClusterRule.LIVING_DOWN,
        (Kind.STORM_OF_BLIPS, Kind.SLURM_SLOW),
        ((RepairActs, "lives_again", lambda *_: ""),),
    ),
    "a job without a supervisor is not waited for": (
        ClusterRule.UNSUPERVISED_JOB,
        (Kind.POWER,),
        ((marking, "_must_wait", lambda *_: False), (NodeActs, "_has_newcomer", lambda *_: False)),
    ),
    "steps of a stranded job are passed over": (
        ClusterRule.ENDED_JOB,
        (Kind.POWER,),
        (
            (SimSlurm, "submit", submit_without_requeue),
            (registry, "RETURN_SECONDS", 1.0),
            (SimSlurm, "steps", lambda *_: ()),
        ),
    ),
    "a program starts whatever the node shows": (
        ClusterRule.LIVING_NODE,
        (Kind.LONG_BLIP,),
        (
            (replacing, "readiness", lambda *_: replacing.Readiness("start", "")),
            (RepairActs, "_sign_of_life", lambda *_: ""),
        ),
    ),
    "silence from before a reboot counts": (
        ClusterRule.REBOOTING_NODE,
        (Kind.PERSON_REBOOTS,),
        ((replacing, "_counted", lambda *_: math.inf),),
    ),
    "a program is ended for no one's word": (
        ClusterRule.PROGRAM_ENDED,
        (Kind.SICK_REPLACE,),
        ((node_events, "_from_repairing", taken_over_at_once),),
    ),
    "no finding is seen": (
        ClusterRule.SICK_IN_SERVICE,
        (Kind.SICK_REPLACE,),
        ((diagnose, "open_findings", lambda *_: ()),),
    ),
    "no silence is seen": (
        ClusterRule.DEAD_UNNOTICED,
        (Kind.POWER,),
        ((diagnose, "life_of", lives_always),),
    ),
    "a calm node with a finding is passed over": (
        ClusterRule.SICK_IN_SERVICE,
        (Kind.SICK_REPLACE,),
        ((calm_nodes, "is_calm", lambda *_: True),),
    ),
    "a node is given back with what it came back with": (
        ClusterRule.RESUMED_SICK,
        (Kind.PROGRAM_SICK,),
        (
            (node_events, "_fault_on_return", lambda *_: ""),
            (RepairActs, "give_back", give_back_unseen),
        ),
    ),
    "no program is ever started": (
        ClusterRule.INTENT_ENDS,
        (Kind.SICK_REPLACE,),
        ((replacing, "start_or_return", lambda *_: iter(())),),
    ),
    "no program is ever judged": (
        ClusterRule.AS_IT_SHOULD_BE,
        (Kind.PERSON_ASKS,),
        ((node_events, "_from_repairing", lambda *_: iter(())),),
    ),
    "a node's return is never noted": (
        ClusterRule.AS_IT_SHOULD_BE,
        (Kind.PERSON_ASKS,),
        ((node_events, "_from_returning", lambda *_: iter(())),),
    ),
    "a job with GRES is made smaller": (
        ClusterRule.GRES,
        (Kind.POWER,),
        ((marking, "can_shrink", lambda *_: True),),
    ),
    "a supervisor is believed": (
        ClusterRule.QUEUE_JUMP,
        (Kind.USER_LIES, Kind.POWER),
        ((intake, "_announced", believe_the_nodes),),
    ),
    "any job that is named like one is a companion": (
        ClusterRule.QUEUE_JUMP,
        (Kind.USER_LIES, Kind.POWER),
        (
            (observe, "with_companions", lambda jobs: jobs),
            (jobs, "_waiting_companions", named_like_companions),
        ),
    ),
    "no one looks at the disk": (
        ClusterRule.SHORT_DISK,
        (Kind.DISK_RUNS, Kind.PERSON_ASKS),
        ((Replacers, "lack_of_room", lambda *_: ""),),
    ),
    "a lemon is not known": (
        ClusterRule.LEMON,
        (Kind.LEMON,),
        ((replacing, "is_worn_out", lambda *_: ""),),
    ),
    "nodes of one switch are not counted": (
        ClusterRule.MOST_MARKS,
        (Kind.SICK_REBOOT, Kind.POWER),
        ((SlurmSettings, "domains", lambda _: {}),),
    ),
    "nodes with a new driver are not counted": (
        ClusterRule.MOST_MARKS,
        (Kind.SICK_REBOOT, Kind.POWER),
        ((breaker, "_rare_drivers", lambda _: frozenset()),),
    ),
    "any date is believed": (
        ClusterRule.YOUNG_ROWS,
        (Kind.CLOCK_STEP, Kind.PERSON_ASKS),
        ((retention, "is_proven", lambda *_: True), (retention, "LOOK_SECONDS", 10.0)),
    ),
    "a duration is that of the date, which was set back": (
        ClusterRule.DURATIONS,
        (Kind.SICK_REBOOT,),
        ((node_events, "_after", lambda *_: " after -3240.0 s"),),
    ),
    "a person's change of the spares is taken for sresctld's own": (
        ClusterRule.OTHERS_RESERVATION,
        (Kind.SPARES_EDITED, Kind.SICK_REBOOT),
        ((pool_plan, "_compare_nodes", take_any_nodes),),
    ),
    "Slurm's word that it has made a reservation is forgotten": (
        ClusterRule.OTHERS_RESERVATION,
        (Kind.SPARES_DELETED,),
        ((SpareActs, "_move", move_but_made),),
    ),
    "all that may be spares are": (
        ClusterRule.POOL_SIZE,
        (Kind.SPARES_RESERVED,),
        ((pool_plan, "choose", lambda _, members, candidates, __: (*members, *candidates)),),
    ),
    "a spare is given to each that lacks one": (
        ClusterRule.GIVEN_ONCE,
        (Kind.SPARES_QUEUE, Kind.STORM_OF_DEATHS),
        ((decision, "gifts", give_to_all),),
    ),
    "a node that answers is sound": (
        ClusterRule.UNCHECKED,
        (Kind.PERSON_ASKS,),
        ((AgentView, "vouches", True),),
    ),
    "what was kept for a job is kept though it runs": (
        ClusterRule.KEPT,
        (Kind.SPARES_QUEUE, Kind.POWER, Kind.STORM_OF_DEATHS),
        ((gift_plan, "has_taken", lambda *_: False),),
    ),
    "GPUs are reset under jobs": (
        ClusterRule.RESET,
        (Kind.SICK_RESET,),
        (
            (node_events, "_towards_repair", towards_repair_under_jobs),
            (RepairActs, "_node_to_repair", lambda self, _, name: self._client.node(name)),
        ),
    ),
    "no spare is ever kept": (
        ClusterRule.POOL_FULL,
        (Kind.SPARES_RESERVED,),
        ((decision, "pools", lambda *_: iter(())),),
    ),
    "a program starts while Slurm reboots the node": (
        ClusterRule.PERSONS_NODE,
        (Kind.SCONTROL_REBOOT, Kind.POWER),
        ((Node, "is_being_rebooted", False),),
    ),
    "what Slurm notes of a reboot is taken for a request": (
        ClusterRule.LIVING_NODE,
        (Kind.SCONTROL_REBOOT, Kind.SICK_REBOOT),
        ((Node, "requested_action", property(asked_for_with_notes)),),
    ),
    "any user speaks for any job": (
        ClusterRule.NOT_ITS_OWN,
        (Kind.USER_LIES,),
        ((authorize, "check_job", no_op),),
    ),
}


FIRST_SEEDS = {
    "programs of this cycle are not counted": 56,
    "a run without its directory was never begun": 17,
    "a person's resume is not remembered": 4,
    "a node that lives again is set DOWN": 11,
    "no program is ever started": 14,
    "a job with GRES is made smaller": 47,
    "a supervisor is believed": 12,
    "any job that is named like one is a companion": 11,
    "nodes of one switch are not counted": 14,
    "nodes with a new driver are not counted": 35,
    "any date is believed": 56,
    "a spare is given to each that lacks one": 12,
    "what was kept for a job is kept though it runs": 20,
}
"""The first run that showed a mutation, for those that few runs show, or long ones."""


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_sresctld_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, kinds, patches = MUTATIONS[name]
    for owner, attribute, mutant in patches:
        monkeypatch.setattr(owner, attribute, mutant)
    first = FIRST_SEEDS.get(name, 0)
    found = (broken(first + seed, kinds) for seed in range(MOST_RUNS))
    assert any(text.startswith(rule) for text in found)


def test_every_rule_can_be_broken() -> None:
    assert {rule for rule, _, _ in MUTATIONS.values()} == set(ClusterRule)
    assert FIRST_SEEDS.keys() <= MUTATIONS.keys()


def test_figures_go_on_where_they_stopped(tmp_path: Path) -> None:
    file, ticks = tmp_path / "figures.json", iter(range(100))
    run = CONTROLLER_CAMPAIGN.go_on
    first = run(7, 1, file=file, clock=lambda: next(ticks))
    assert first.controller_runs == 1
    both = run(7, 2, file=file, clock=lambda: next(ticks))
    at_once = run(7, 2, clock=lambda: next(ticks))
    assert both.controller_runs == 2
    assert both.controller_faults == at_once.controller_faults > first.controller_faults > 0
    assert both.controller_kinds == at_once.controller_kinds
    with pytest.raises(UsageError, match="--seed 7"):
        CONTROLLER_CAMPAIGN.load(file, 8)
    file.write_text("{")
    with pytest.raises(UsageError, match="no figures"):
        CONTROLLER_CAMPAIGN.load(file, 7)


def test_a_violation_prints_its_shortest_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimHost, "is_held", lambda *_: False)
    words = ["--only", "controller"]
    found = CliRunner().invoke(command, [*words, "--runs", "3"], standalone_mode=False)
    assert "runs broke a rule" in str(found.exception)
    seed = str(found.exception).split("--seed ")[1].split()[0]
    replayed = CliRunner().invoke(command, [*words, "--seed", seed, "--trace"])
    assert "a rule was broken" in replayed.output
    assert replayed.output.count("FAULT") <= 2
