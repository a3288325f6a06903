"""A job counts as supervised while a supervisor lives, or has the time to return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from worlds import FakeClock, config

from slurm_resilience.controller.act.actor import Actor
from slurm_resilience.controller.decide.intake import REMOVED_AFTER_SECONDS
from slurm_resilience.controller.main import Controller
from slurm_resilience.controller.registry import (
    MAX_FINDINGS,
    RETURN_SECONDS,
    Registry,
    SupervisorRoll,
)
from slurm_resilience.model import Finding, Severity
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    Beat,
    Message,
    NodeHello,
    Report,
    RequeueRequest,
)

NODES = ("n1", "n2", "n3")


class Peer:
    """A supervisor's connection."""

    role, uid, address = "job", 1000, "192.0.2.1"

    def __init__(self, job: int) -> None:
        self.subject = str(job)

    def send(self, message: Message) -> None:
        pass


class Agent:
    """A node's connection."""

    role, uid, address = "node", 0, "192.0.2.1"

    def __init__(self, node: str) -> None:
        self.subject = node
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Site:
    """The controller's own cycle on a fake Slurm with one job on three nodes."""

    def __init__(self, state_dir: Path) -> None:
        self.clock, self.slurm = FakeClock(), FakeSlurm(6)
        self.job = self.slurm.submit(3)
        self.config = config(controller={"state_dir": str(state_dir)})
        self.start()

    def start(self) -> None:
        self.controller = Controller(
            self.config,
            self.slurm,
            self.slurm.info(),
            self.clock,  # type: ignore[arg-type]
        )

    def restart(self) -> None:
        self.controller.close()
        self.start()

    def cycle(self, seconds: float = 1.0) -> None:
        self.clock.pass_time(seconds)
        self.slurm.pass_time(seconds)
        self.controller.cycle()

    def supervisor(self, attempt: int = 1) -> Any:
        peer: Any = Peer(self.job)
        self.controller.inbox.opened(peer)
        self.controller.inbox.received(peer, AttemptStarted(attempt, NODES))
        return peer

    def says(self, peer: Any, outcome: str) -> None:
        self.controller.inbox.received(peer, AttemptEnded(1, 0, outcome))

    def leaves(self, peer: Any) -> None:
        self.controller.inbox.closed(peer)

    @property
    def supervised(self) -> bool:
        return self.job in self.controller.journal.supervised()


@pytest.fixture
def site(tmp_path: Path) -> Any:
    site = Site(tmp_path)
    yield site
    site.controller.close()


def test_the_last_word_ends_it_at_once(site: Site) -> None:
    peer = site.supervisor()
    site.cycle(100.0)
    site.cycle(100.0)
    assert site.supervised
    site.says(peer, "stop: the program is done")
    site.leaves(peer)
    site.cycle()
    site.cycle()
    assert not site.supervised
    assert "unsupervised" in [event["kind"] for event in site.controller.journal.events()]


def test_also_when_all_of_it_is_heard_in_one_cycle(site: Site) -> None:
    peer = site.supervisor()
    site.says(peer, "stop: the program is done")
    site.leaves(peer)
    site.cycle()
    site.cycle()
    assert not site.supervised


def test_also_when_it_was_gone_before_its_word_was_read(site: Site) -> None:
    peer = site.supervisor()
    site.cycle()
    taken = site.controller.inbox.take
    site.says(peer, "stop: the program is done")
    site.leaves(peer)
    site.controller.inbox.take = tuple  # type: ignore[method-assign, assignment]
    site.cycle()
    site.controller.inbox.take = taken  # type: ignore[method-assign]
    site.cycle()
    site.cycle()
    assert not site.supervised


@pytest.mark.parametrize("outcome", ["relaunch: again", "swap: n2", "requeue: its batch host"])
def test_any_other_word_does_not(site: Site, outcome: str) -> None:
    site.says(site.supervisor(), outcome)
    site.cycle()
    site.cycle(1000.0)
    assert site.supervised


def test_a_lost_connection_is_waited_for(site: Site) -> None:
    peer = site.supervisor()
    site.cycle()
    site.leaves(peer)
    site.cycle(100.0)
    site.cycle(RETURN_SECONDS - 1)
    assert site.supervised
    again = site.supervisor()
    site.cycle()
    site.cycle(100.0)
    assert site.supervised, "it came back"
    site.leaves(again)
    site.cycle()
    site.cycle(RETURN_SECONDS + 1)
    assert not site.supervised


def test_a_restart_of_sresctld_drops_nobody_who_returns(site: Site) -> None:
    site.supervisor()
    site.cycle()
    site.restart()
    site.cycle(100.0)
    site.cycle(RETURN_SECONDS - 1)
    assert site.supervised
    peer = site.supervisor()
    site.cycle()
    site.cycle(100.0)
    assert site.supervised
    site.restart()
    site.leaves(peer)
    site.cycle()
    site.cycle(RETURN_SECONDS + 1)
    assert not site.supervised


def test_while_slurm_cannot_be_read_nobody_is_missed(site: Site) -> None:
    site.supervisor()
    site.cycle()
    site.restart()
    site.slurm.unreachable = True
    for _ in range(10):
        site.cycle(100.0)
    site.slurm.unreachable = False
    site.cycle()
    site.cycle()
    assert site.supervised


def test_one_srun_after_the_other(site: Site) -> None:
    for _ in range(3):
        peer = site.supervisor()
        site.cycle()
        site.cycle(100.0)
        assert site.supervised
        site.says(peer, "stop: the program is done")
        site.leaves(peer)
    site.supervisor()
    site.cycle()
    site.cycle(100.0)
    assert site.supervised


def test_one_that_has_said_its_last_word_and_stays_connected_does_not_count(site: Site) -> None:
    slow = site.supervisor()
    site.cycle()
    site.says(slow, "stop: the program is done")
    site.cycle()
    site.cycle()
    second = site.supervisor()
    site.cycle()
    site.says(second, "stop: the program is done")
    site.leaves(second)
    site.cycle()
    site.cycle()
    assert not site.supervised


def test_two_sruns_at_a_time_end_with_the_second(site: Site) -> None:
    first, second = site.supervisor(), site.supervisor()
    site.cycle()
    site.says(first, "stop: the program is done")
    site.leaves(first)
    site.cycle()
    site.cycle(100.0)
    assert site.supervised
    site.says(second, "stop: the program is done")
    site.cycle()
    site.cycle()
    assert not site.supervised


def test_of_two_sruns_the_lost_one_is_waited_for(site: Site) -> None:
    lost, ended = site.supervisor(), site.supervisor()
    site.cycle()
    site.leaves(lost)
    site.cycle()
    site.says(ended, "stop: the program is done")
    site.leaves(ended)
    site.cycle()
    site.cycle()
    assert site.supervised
    site.cycle(RETURN_SECONDS + 1)
    assert not site.supervised


def test_a_job_that_does_not_run_is_kept(site: Site) -> None:
    """Its supervisor says its last word because the job was requeued."""
    peer = site.supervisor()
    site.cycle()
    site.slurm.requeue(site.job)
    site.says(peer, "stop: the job is over")
    site.leaves(peer)
    for _ in range(5):
        site.cycle(20.0)
    assert site.slurm.job(site.job).state == "PENDING"
    assert site.supervised
    site.cycle(60.0)
    assert site.slurm.job(site.job).state == "RUNNING"
    site.cycle()
    assert not site.supervised, "it runs again, and no supervisor has come"
    assert "unsupervised" not in [event["kind"] for event in site.controller.journal.events()]


@pytest.mark.parametrize("connected", [False, True])
def test_nobody_of_the_run_before_counts_in_the_next(site: Site, connected: bool) -> None:
    """A supervisor is killed with its run, or its machine died and its connection did not."""
    peer = site.supervisor()
    site.cycle()
    site.slurm.requeue(site.job)
    if not connected:
        site.leaves(peer)
    site.cycle()
    site.cycle()
    site.slurm.start_now(site.job)
    site.cycle()
    assert site.slurm.job(site.job).state == "RUNNING"
    site.cycle()
    assert not site.supervised
    site.supervisor()
    site.cycle()
    site.cycle(100.0)
    assert site.supervised


def test_a_job_that_is_gone_is_forgotten(site: Site) -> None:
    site.supervisor()
    site.cycle()
    site.slurm.finish(site.job)
    site.cycle()
    assert not site.supervised


def test_a_forced_down_is_followed_once(site: Site) -> None:
    """`sres node replace --force`: Slurm requeues the job, and would keep it for two minutes."""
    peer = site.supervisor()
    site.cycle()
    site.slurm.set_node(["n2"], state="down", reason="Action:Replace")
    site.says(peer, "stop: the job is over")
    site.leaves(peer)
    for _ in range(5):
        site.cycle()
    assert site.slurm.job(site.job).state == "RUNNING"
    site.cycle()
    assert site.controller.journal.pending_requeues() == {}
    assert [call[0] for call in site.slurm.calls].count("start_now") == 1


def test_a_supervisor_nobody_knows_of_changes_nothing() -> None:
    roll, peer = SupervisorRoll(), Peer(7)
    roll.ended(7, peer)  # type: ignore[arg-type]
    assert not roll.is_abandoned(7, 0.0)


def test_nothing_is_written_before_the_acts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Observe, diagnose and decide leave the journal alone; what was heard is in the snapshot."""
    peer = site.supervisor()
    site.controller.inbox.received(peer, RequeueRequest("its batch host is sick"))
    database = site.controller.journal._db
    before, at_acts = database.total_changes, []
    take_note = Actor.take_note

    def watched(self: Actor, *arguments: Any) -> None:
        at_acts.append(database.total_changes)
        take_note(self, *arguments)

    monkeypatch.setattr(Actor, "take_note", watched)
    site.cycle()
    assert at_acts[0] == before
    assert database.total_changes > before
    assert site.supervised
    assert site.controller.journal.pending_requeues()[site.job].wanted


def test_a_node_that_slurm_knows_again_is_watched_again(site: Site) -> None:
    """Its sresd returns on a new connection, with its boot and its findings."""
    agent: Any = Agent("n1")
    site.controller.inbox.opened(agent)
    site.controller.inbox.received(agent, NodeHello("boot-1", "machine"))
    site.cycle()
    assert site.controller.registry.agents()["n1"].boot_id == "boot-1"
    listed = site.slurm.nodes()
    site.slurm._nodes.pop("n1")
    site.cycle()
    site.cycle(REMOVED_AFTER_SECONDS + 1)
    assert "n1" not in site.controller.registry.agents() and agent.is_closed
    site.controller.registry.beaten([agent])
    assert "n1" not in site.controller.registry.agents()
    site.controller.inbox.closed(agent)
    site.slurm.put(listed[0])
    site.cycle()
    again: Any = Agent("n1")
    site.controller.inbox.opened(again)
    site.controller.inbox.received(again, NodeHello("boot-1", "machine"))
    site.cycle()
    assert site.controller.registry.agents()["n1"].is_connected
    assert "n1" in site.controller.journal.agents()


def test_no_number_of_watched_findings_keeps_a_fault_out() -> None:
    registry, peer = Registry(FakeClock()), Agent("n1")
    registry.opened(peer)  # type: ignore[arg-type]
    watched = (Finding("oom", Severity.JOB, "x", 1.0, str(pid)) for pid in range(MAX_FINDINGS + 5))
    registry.take(peer, Report(findings=tuple(watched)))  # type: ignore[arg-type]
    fault = Finding("xid", Severity.REBOOT, "GPU lost", 2.0, "0000:3b:00", "79")
    registry.take(peer, Report(findings=(fault,)))  # type: ignore[arg-type]
    seen = registry.agent("n1")
    assert seen is not None
    assert len(seen.findings) == MAX_FINDINGS
    assert [found[1] for found in seen.faults_of_boot()] == ["xid"]


def test_hearing_begins_anew_after_a_break_of_all_nodes_and_not_of_one() -> None:
    clock = FakeClock()
    registry, peers = Registry(clock, 1.5), (Agent("n1"), Agent("n2"))
    began = registry.hearing_since()
    for peer in peers:
        registry.opened(peer)
    for _ in range(4):
        clock.pass_time(1.0)
        registry.take(peers[0], Beat(1))
    registry.take(peers[1], Beat(1))
    assert registry.hearing_since() == began
    clock.pass_time(4.0)
    registry.take(peers[1], Beat(2))
    assert registry.hearing_since() == clock.monotonic()


def test_a_sresd_vouches_once_its_checks_have_run_and_anew_on_each_connection() -> None:
    registry, peer = Registry(FakeClock()), Agent("n1")

    def vouches() -> bool:
        seen = registry.agent("n1")
        return seen is not None and seen.vouches

    registry.opened(peer)  # type: ignore[arg-type]
    registry.take(peer, NodeHello("boot-1"))  # type: ignore[arg-type]
    registry.take(peer, Report(full=True))  # type: ignore[arg-type]
    assert not vouches()
    registry.take(peer, Report(checked=True))  # type: ignore[arg-type]
    assert vouches()
    registry.opened(again := Agent("n1"))  # type: ignore[arg-type]
    assert not vouches()
    registry.take(again, Report(full=True))  # type: ignore[arg-type]
    assert not vouches()  # it was started anew
    registry.take(again, Report(full=True, checked=True))  # type: ignore[arg-type]
    assert vouches()
