"""Supervisors announce, Slurm shows: what any user's program says counts as far as Slurm agrees."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_slurm import FakeSlurm
from worlds import NOW, FakeClock, agent, decision, incident, job, node, probes, world

from slurm_resilience.controller.act.jobs import REQUEST_TRIES, JobActs
from slurm_resilience.controller.actions import (
    KeepPendingRequeue,
    NoteJob,
    RaiseAlarm,
    RaisePriority,
    ReturnNode,
)
from slurm_resilience.controller.decide.intake import (
    LEAST_UNSEEN,
    MOST_NAMED_NODES,
    NAMED_AGAIN_SECONDS,
    take_in,
)
from slurm_resilience.controller.decide.jobs import priorities
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.heard import Heard, InboxMessage
from slurm_resilience.controller.journal.records import (
    EATS_ATTEMPTS,
    LEFT_OUT,
    WRONG_RESULTS,
    JournalMemory,
    Supervised,
    UsersWord,
)
from slurm_resilience.controller.observe import ClusterSnapshot, SiteFacts
from slurm_resilience.model import Job
from slurm_resilience.slurm import parse
from slurm_resilience.slurm.companion_job import with_companions
from slurm_resilience.wire.messages import AttemptStarted, LeftNode, RequeueRequest, WrongResults

FOUR = ("n1", "n2", "n3", "n4")
STEP = AttemptStarted(1, FOUR)


def cluster(
    the_job: Job, *messages: Any, known: Supervised | None = None, **more: Any
) -> ClusterSnapshot:
    """Six nodes in use; the messages come from the job's supervisor."""
    nodes = [node(f"n{i}", "ALLOCATED") for i in range(1, 7)]
    changed = {one.name: one for one in more.pop("changed", ())}
    peer: Any = SimpleNamespace(uid=the_job.uid)
    snapshot = world(*(changed.get(one.name, one) for one in nodes), jobs=(the_job,), **more)
    return msgspec.structs.replace(
        snapshot,
        supervised={} if known is None else {the_job.id: known},
        site=SiteFacts(uptime=100.0, permits_expansion=True),
        heard=Heard(tuple(InboxMessage(peer, the_job.id, message) for message in messages)),
    )


def entry(snapshot: ClusterSnapshot) -> Supervised:
    return take_in(snapshot)[0].supervised[7]


def lifted(snapshot: ClusterSnapshot) -> list[RaisePriority]:
    return list(priorities(take_in(snapshot)[0]))


def begun(nodes: tuple[str, ...] = FOUR) -> Supervised:
    """The knowledge of a job that was announced while it held these nodes."""
    return entry(cluster(job(nodes=nodes), AttemptStarted(1, nodes)))


DEAD = node("n4", "DOWN", reason="Action:Replace")


def test_one_node_named_a_hundred_times_is_one_node() -> None:
    known = entry(cluster(job(nodes=("n1",)), AttemptStarted(1, ("n1",) * 100)))
    assert (known.nodes, known.size, known.unseen) == (("n1",), 1, ())
    assert lifted(cluster(job(nodes=("n1",)), AttemptStarted(1, ("n1",) * 100))) == []


def test_nodes_that_are_not_the_jobs_count_for_nothing() -> None:
    known = entry(cluster(job(nodes=("n1",)), STEP))
    assert (known.nodes, known.size, known.unseen) == (("n1",), 1, ("n2", "n3", "n4"))
    again = cluster(job(nodes=("n1",)), known=known, changed=(DEAD,))
    assert entry(again).lost == () and lifted(again) == []


def test_two_supervisors_that_announce_themselves_in_one_cycle_are_both_heard() -> None:
    """The second one hid the nodes of the first, which was never told that one of them had died:
    its step hung without end."""
    first, second = AttemptStarted(1, ("n1", "n3")), AttemptStarted(1, ("n2", "n4"))
    known = entry(cluster(job(nodes=FOUR), first, second))
    assert (set(known.nodes), known.size) == (set(FOUR), 4)


def test_a_node_that_slurm_shows_later_counts_from_then_on() -> None:
    """The message may be newer than Slurm's picture."""
    known = entry(cluster(job(nodes=FOUR[:3]), STEP))
    assert (known.nodes, known.size) == (FOUR[:3], 3)
    known = entry(cluster(job(nodes=FOUR), known=known))
    assert (known.nodes, known.size, known.unseen) == (FOUR, 4, ())


def test_a_node_that_a_listing_lacks_by_chance_is_of_the_step_all_the_same() -> None:
    """Else the step would seem to need fewer nodes, and a job with GRES would be made smaller."""
    seen = cluster(job(nodes=FOUR), STEP)
    listed = {name: known for name, known in seen.nodes.items() if name != "n4"}
    known = entry(msgspec.structs.replace(seen, nodes=listed))
    assert (known.nodes, known.size) == (FOUR, 4)


def test_as_many_nodes_as_were_lost_to_a_fault_come_before_the_queue() -> None:
    less = job(nodes=FOUR[:3])
    assert lifted(cluster(less, known=begun(), changed=(DEAD,))) == [RaisePriority(7, 1)]
    set_aside = cluster(less, known=begun(), incidents=(incident("n4"),))
    assert lifted(set_aside) == [RaisePriority(7, 1)]


def test_nodes_that_a_user_gave_back_are_not_given_back_before_the_queue() -> None:
    assert lifted(cluster(job(nodes=FOUR[:1]), known=begun())) == []
    # Not more than the fault took either.
    both = cluster(job(nodes=FOUR[:1]), known=begun(), changed=(DEAD,))
    assert lifted(both) == [RaisePriority(7, 1)]


def test_a_loss_is_made_good_once() -> None:
    """The supervisor's program may go on naming the lost node."""
    known = entry(cluster(job(nodes=FOUR[:3]), known=begun(), changed=(DEAD,)))
    assert known.lost == ("n4",)
    whole = job(nodes=("n1", "n2", "n3", "n5"))
    said = AttemptStarted(1, (*FOUR, "n5"))
    assert lifted(cluster(whole, said, known=known, changed=(DEAD,))) == []
    known = entry(cluster(whole, said, known=known, changed=(DEAD,)))
    assert lifted(cluster(whole, known=known, changed=(DEAD,))) == []
    # And a second node, given back by the user, is not added to the first one.
    assert lifted(cluster(job(nodes=("n1", "n2", "n5")), known=known, changed=(DEAD,))) == [
        RaisePriority(7, 1)
    ]


def test_a_second_loss_is_still_known_after_the_first_was_filled() -> None:
    dead = (node("n3", "DOWN", reason="Action:Replace"), DEAD)
    known = entry(cluster(job(nodes=FOUR[:2]), known=begun(), changed=dead))
    assert known.lost == ("n3", "n4")
    half = job(nodes=("n1", "n2", "n5"))
    said = AttemptStarted(1, ("n1", "n2", "n5", "n4"))
    assert lifted(cluster(half, said, known=known, changed=dead)) == [RaisePriority(7, 1)]


def test_a_request_by_which_an_elastic_step_grows_does_not_stand_in_for_a_loss() -> None:
    """It would go before the jobs of others, and the nodes that were lost would wait."""
    short = job(nodes=FOUR[:3])
    shown = take_in(cluster(short, known=begun(), changed=(DEAD,)))[0]
    beside = {8: False, 9: True}
    for number, lent in beside.items():
        other = Job(number, short.uid, "PENDING", num_nodes=1, companion_of=(7, 0), is_lent=lent)
        shown = msgspec.structs.replace(shown, jobs={**shown.jobs, number: other})
    assert list(priorities(shown)) == [RaisePriority(7, 1, (8,))]


def test_another_run_of_the_job_begins_anew() -> None:
    known = entry(cluster(job(nodes=FOUR[:3]), known=begun(), changed=(DEAD,)))
    run_again = job(nodes=FOUR[:3], restarts=1)
    assert lifted(cluster(run_again, known=known, changed=(DEAD,))) == []
    assert lifted(cluster(run_again, STEP, known=known, changed=(DEAD,))) == []


def test_a_list_of_the_whole_cluster_is_not_kept() -> None:
    names = tuple(f"m{i}" for i in range(1000))
    snapshot = cluster(job(nodes=("n1",)), AttemptStarted(1, names))
    nodes = dict(snapshot.nodes) | {name: node(name, "ALLOCATED") for name in names}
    snapshot = msgspec.structs.replace(snapshot, nodes=nodes)
    assert len(entry(snapshot).unseen) == LEAST_UNSEEN


@pytest.mark.parametrize("the_job", [job(requeue=False), job(is_batch=False, requeue=False)])
def test_a_job_that_slurm_will_not_requeue_is_not_followed(the_job: Job) -> None:
    _, notes = take_in(cluster(the_job, RequeueRequest("please")))
    assert not [note for note in notes if isinstance(note, KeepPendingRequeue)]
    assert [note.kind for note in notes if isinstance(note, NoteJob)] == ["requeue-refused"]


@pytest.mark.parametrize(
    ("shown", "raised"),
    [
        ("21 1 PENDING 29:00", (21,)),
        ("21 1 PENDING 30:00", (21,)),
        ("21 1 PENDING 30:01", ()),
        ("21 1 PENDING 1-00:00:00", ()),
        ("21 1 PENDING UNLIMITED", ()),
        ("21 3 PENDING 29:00", ()),
        ("22 1 PENDING 29:00\n21 1 PENDING 29:00\n23 2 PENDING 29:00", (21, 22)),
        ("20 1 RUNNING 1:00\n21 1 PENDING 29:00\n22 1 PENDING 29:00", (21,)),
        ("20 2 RUNNING UNLIMITED\n21 1 PENDING 29:00", ()),
        ("21 1 PENDING 29:00 Priority\n22 1 PENDING 29:00 (null)", (21, 22)),
        ("21 1 PENDING 29:00 ReqNodeNotAvail, UnavailableNodes:n2", (21,)),
        ("21 1 PENDING 29:00 JobHeldAdmin\n22 1 PENDING 29:00 JobHeldUser", ()),
        ("", ()),
    ],
)
def test_no_more_nodes_than_were_lost_and_for_no_longer(
    shown: str, raised: tuple[int, ...]
) -> None:
    assert tuple(parse.node_requests(shown, "30:00\n", 2).raised) == raised


def test_without_a_limit_any_limit_is_short_enough() -> None:
    shown = "20 1 RUNNING UNLIMITED\n21 1 PENDING UNLIMITED\n22 1 PENDING 1-00:00:00"
    assert parse.node_requests(shown, "UNLIMITED", 3) == ({21: 1, 22: 1}, {20: 1})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1:02", 62), ("1:00:01", 3601), ("2-01:00:00", 176400), ("UNLIMITED", math.inf)],
)
def test_a_time_limit_is_read(text: str, seconds: float) -> None:
    assert parse.limit_seconds(text) == seconds


def test_a_request_that_is_not_merged_is_no_ticket_past_the_queue() -> None:
    """A user runs one job of that name after the other, while his job waits for its node."""
    slurm, clock = FakeSlurm(4), FakeClock()
    any_: Any = None
    acts = JobActs(slurm, any_, any_, any_, clock)  # type: ignore[arg-type]
    short = cluster(job(nodes=FOUR[:3]), known=begun(), changed=(DEAD,))
    for number in range(20):
        slurm.exchanges = {100 + number: 1}
        clock.pass_time(60.0)
        acts.raise_priority(short, RaisePriority(7, 1))
    assert len(slurm.calls) == REQUEST_TRIES
    other = cluster(job(nodes=("n1", "n2", "n5")), known=begun(), changed=(DEAD,))
    clock.pass_time(60.0)
    acts.raise_priority(other, RaisePriority(7, 1))
    assert len(slurm.calls) == REQUEST_TRIES + 1, "after a merge it is another loss"


def test_the_job_that_lost_a_node_is_first_in_the_queue_before_the_node_returns() -> None:
    """Between two looks Slurm would start another job on it."""
    back = incident("n4", NodeState.VALIDATING, run_ended=NOW - 10, boot_before="boot-0")
    less = cluster(
        job(nodes=FOUR[:3]),
        known=begun(),
        changed=(DEAD,),
        incidents=(back,),
        agents=(agent("n4"),),
        probes={"n4": probes("answered")},
        others=0,
    )
    kinds = [type(action) for action in decision(less).actions]
    assert kinds.index(RaisePriority) < kinds.index(ReturnNode)


def beside(number: int = 9, uid: int = 1000, **more: Any) -> Job:
    """Return a job that calls itself a companion of job 7, as `with_companions` leaves it."""
    asked = {"state": "PENDING", "nodes": (), "num_nodes": 1, "companion_of": (7, 0), **more}
    return job(number, uid=uid, **asked)


def waits(*others: Job, known: Supervised, **more: Any) -> list[RaisePriority]:
    """Return what is put before the queue for job 7, which has GRES, beside such jobs."""
    seen = cluster(job(nodes=FOUR[:3], gres="gpu:8", **more), known=known, changed=(DEAD,))
    return lifted(
        msgspec.structs.replace(seen, jobs=with_companions({**seen.jobs, **by_id(others)}))
    )


def by_id(jobs: tuple[Job, ...]) -> dict[int, Job]:
    return {one.id: one for one in jobs}


def test_a_companion_of_a_job_that_lost_a_node_comes_before_the_queue() -> None:
    known = begun()
    assert waits(known=known) == []
    assert waits(beside(), known=known) == [RaisePriority(7, 1, (9,))]
    # It has its node: nothing is missing any more.
    assert waits(beside(state="RUNNING", nodes=("n5",)), known=known) == []


@pytest.mark.parametrize(
    "forged",
    [
        beside(uid=1001),
        beside(companion_of=(7, 1)),
        beside(companion_of=(8, 0)),
        beside(companion_of=None),
        beside(num_nodes=2),
        beside(num_nodes=0),
        beside(state="COMPLETING"),
    ],
)
def test_no_other_job_comes_before_the_queue(forged: Job) -> None:
    """Another user's, another run's, another job's, and one for more nodes than were lost."""
    assert waits(forged, known=begun()) == []


def test_a_companion_of_a_job_that_lost_nothing_waits_in_the_queue() -> None:
    whole = cluster(job(nodes=FOUR, gres="gpu:8"), known=begun())
    jobs = with_companions({**whole.jobs, 9: beside()})
    assert lifted(msgspec.structs.replace(whole, jobs=jobs)) == []
    # Nor one of a job that gave a node back.
    given = cluster(job(nodes=FOUR[:3], gres="gpu:8"), known=begun())
    assert lifted(msgspec.structs.replace(given, jobs=jobs | given.jobs)) == []


def test_companions_are_no_ticket_past_the_queue() -> None:
    """A user submits one after the other, while his job waits for its node."""
    slurm, clock = FakeSlurm(4), FakeClock()
    any_: Any = None
    acts = JobActs(slurm, any_, any_, any_, clock)  # type: ignore[arg-type]
    short = cluster(job(nodes=FOUR[:3], gres="gpu:8"), known=begun(), changed=(DEAD,))

    def preferred(first: int, *lost: str) -> list[int]:
        """Return those of ten companions, one after the other, for which Slurm is asked."""
        known = msgspec.structs.replace(begun(), lost=lost)
        seen = msgspec.structs.replace(short, supervised={7: known})
        slurm.calls.clear()
        for number in range(first, first + 10):
            for _ in range(2):  # for one that was preferred it is not asked again
                clock.pass_time(60.0)
                acts.raise_priority(seen, RaisePriority(7, 1, (number,)))
        return [call[-1] for call in slurm.calls if isinstance(call[-1], int)]

    assert preferred(100, "n3", "n4") == [100, 101]
    # A user's program may name its nodes in another order: it is the same loss.
    assert preferred(200, "n4", "n3") == []
    assert preferred(300, "n5") == [300, 301]


# -- what a training says of its nodes' results -----------------------------------------------


def told(*notes: tuple[str, int, float], kind: str = WRONG_RESULTS) -> JournalMemory:
    """The words about nodes that the journal knows: of which node, by which job, how long ago."""
    found: dict[str, tuple[UsersWord, ...]] = {}
    for name, of_job, ago in notes:
        word = UsersWord(kind, of_job, 1000 + of_job, NOW - ago)
        found[name] = (*found.get(name, ()), word)
    return JournalMemory(users_words=found)


def noted(node_name: str, memory: JournalMemory, nodes: tuple[str, ...] = FOUR) -> list[NoteJob]:
    snapshot = cluster(job(nodes=nodes), WrongResults(node_name, "step 7:\n it differs"))
    snapshot = msgspec.structs.replace(snapshot, memory=memory)
    return [note for note in take_in(snapshot)[1] if isinstance(note, NoteJob)]


def test_a_training_names_a_node_of_its_own_once_an_hour() -> None:
    (note,) = noted("n4", told())
    assert (note.kind, note.node, note.job) == (WRONG_RESULTS, "n4", 7)
    assert note.text == "step 7: it differs" and note.uid == job().uid
    assert noted("n5", told()) == [], "another job's, or no one's"
    assert noted("n4", told(("n4", 7, NAMED_AGAIN_SECONDS - 1))) == []
    assert noted("n4", told(("n4", 7, NAMED_AGAIN_SECONDS)))
    assert noted("n4", told(("n4", 8, 1.0))), "that was another job"


def test_a_training_that_names_many_nodes_is_itself_at_fault() -> None:
    known = told(*((f"n{i}", 7, 1e5) for i in range(1, MOST_NAMED_NODES + 1)))
    assert noted("n4", known) == []
    assert noted("n1", known), "one of those that it named"
    assert noted("n4", told(*((f"n{i}", 8, 1e5) for i in range(1, 4))))


def test_words_of_trainings_are_an_alarm_and_no_more() -> None:
    def acts(memory: JournalMemory) -> list[Any]:
        snapshot = msgspec.structs.replace(cluster(job(nodes=FOUR)), memory=memory)
        return [a for a in decision(snapshot).actions if getattr(a, "node", "") == "n4"]

    assert acts(told(("n4", 7, 5.0))) == []
    (alarm,) = acts(told(("n4", 7, 1e4), ("n4", 7, 5.0), ("n4", 8, 5.0)))
    assert isinstance(alarm, RaiseAlarm)
    assert "wrong 3 times within a week, by 2 job(s) of 2 user(s)" in alarm.text
    assert acts(told(*(("n4", number, 5.0) for number in range(100)))) != [], "never more than that"
    assert all(
        isinstance(one, RaiseAlarm) for one in acts(told(*(("n4", n, 5.0) for n in range(100))))
    )


# -- nodes on which a job's attempts ended ----------------------------------------------------


def named(
    message: LeftNode, memory: JournalMemory, nodes: tuple[str, ...] = FOUR, announced: str = ""
) -> list[NoteJob]:
    snapshot = msgspec.structs.replace(cluster(job(nodes=nodes), message), memory=memory)
    if announced:
        known = begun((*nodes, announced))
        snapshot = msgspec.structs.replace(snapshot, supervised={7: known})
    return [note for note in take_in(snapshot)[1] if isinstance(note, NoteJob)]


def test_a_job_names_a_node_that_it_leaves_and_again_when_it_goes_on_without_it() -> None:
    left, goes_on = LeftNode("n4", "3 attempts ended on it"), LeftNode("n4", "on", goes_on=True)
    (note,) = named(left, told())
    assert (note.kind, note.node, note.job, note.uid) == (LEFT_OUT, "n4", 7, job().uid)
    assert named(left, told(), ("n1", "n2")) == [], "it never had that node"
    assert named(left, told(), ("n1", "n2"), announced="n4"), "it has left it in this moment"
    assert named(goes_on, told()) == [], "it has not left it"
    before = told(("n4", 7, 9.0), kind=LEFT_OUT)
    (after,) = named(goes_on, before, ("n1", "n2"))
    assert after.kind == EATS_ATTEMPTS
    assert named(goes_on, told(("n4", 8, 9.0), kind=LEFT_OUT)) == [], "that was another job"
    assert named(left, before) == [], "once an hour"
    many = told(*((f"n{i}", 7, 1e5) for i in (1, 2, 3, 5)), kind=LEFT_OUT)
    assert named(left, many) == [], "a job that leaves many nodes is itself at fault"


def test_a_node_that_eats_attempts_is_an_alarm_unless_it_is_out_of_service() -> None:
    def acts(memory: JournalMemory, state: str = "ALLOCATED") -> list[Any]:
        changed = (node("n4", state),)
        snapshot = cluster(job(nodes=FOUR), changed=changed)
        snapshot = msgspec.structs.replace(snapshot, memory=memory)
        return [a for a in decision(snapshot).actions if isinstance(a, RaiseAlarm)]

    assert acts(told(("n4", 7, 5.0), kind=LEFT_OUT)) == []
    known = told(("n4", 7, 5.0), ("n4", 8, 5.0), kind=EATS_ATTEMPTS)
    (alarm,) = acts(known)
    assert alarm.node == "n4" and "attempts of 2 job(s) ended on it" in alarm.text
    assert acts(known, "DOWN") == []
