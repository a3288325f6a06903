"""Rounds of checks: what Slurm expects, and that an administrator's word is noticed."""

from __future__ import annotations

import threading

import pytest

from slurm_resilience import config
from slurm_resilience.agent import check_loop
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.health.check import Check, CheckContext
from slurm_resilience.health.checks.host import memory
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import Node


class Slurm:
    """Answers for one node; None: does not answer."""

    def __init__(self, *answers: Node | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    def node(self, name: str) -> Node:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise SlurmUnreachable("no answer")
        return answer


def facts(*answers: Node | None) -> tuple[SlurmFacts, Slurm]:
    slurm = Slurm(*answers)
    return SlurmFacts(slurm, "n1"), slurm  # type: ignore[arg-type]


def node(mib: int, gres: str = "") -> Node:
    return Node("n1", "IDLE", memory=mib, gres=gres)


def test_what_slurm_expects() -> None:
    known, slurm = facts(None, node(64000, "gpu:h100:8(S:0-1)"))
    assert check_loop.context(config.Config(), known).expected == check_loop.Expected(None, None)
    assert check_loop.context(config.Config(), known).expected == check_loop.Expected(64000, 8)
    check_loop.context(config.Config(), known)
    assert slurm.asked == 2


def test_slurms_default_memory_expects_nothing() -> None:
    known, _ = facts(node(1))
    assert check_loop.context(config.Config(), known).expected == check_loop.Expected(None, 0)


def test_an_old_answer_stays_when_slurm_is_silent() -> None:
    known, _ = facts(node(64000), None)
    known.ask_node()
    assert known.ask_node(again=True) == node(64000)


def test_while_something_fails_the_expectation_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def probe(context: CheckContext) -> int:
        return 48000

    def checks(disabled: tuple[str, ...]) -> tuple[Check, ...]:
        return (Check("memory", probe, memory.judge),)

    monkeypatch.setattr(check_loop.check_registry, "checks", checks)
    known, slurm = facts(node(64000), node(64000), node(48000))
    news, stop = threading.Event(), threading.Event()
    outbox = Outbox(news.set)
    settings = config.Config(agent=config.AgentSettings(check_interval=0.01))
    one = check_loop.CheckLoop(settings, known, outbox, SystemClock(), stop)
    thread = threading.Thread(target=one.run, daemon=True)
    thread.start()
    seen: list[str] = []
    try:
        while seen[-1:] != ["pass"]:
            assert news.wait(5), seen
            news.clear()
            report = outbox.take()
            seen += [r.verdict for r in report.results] if report else []
    finally:
        stop.set()
        thread.join(5)
    assert seen == ["fail", "pass"]
    assert slurm.asked == 3


def test_a_profile_says_what_slurm_does_not_know() -> None:
    known, _ = facts(node(64000))
    settings = config.Config(checks=config.CheckSettings(profile="p5.48xlarge"))
    assert check_loop.context(settings, known).expected.profile.efa_devices == 32


def test_a_profile_that_is_not_there_expects_nothing_and_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known, _ = facts(node(64000))
    settings = config.Config(checks=config.CheckSettings(profile="no-such-type"))
    for _ in range(3):
        assert check_loop.context(settings, known).expected.profile == NodeProfile()
    (said,) = (record.message for record in caplog.records)
    assert said.startswith("checks.profile: no profile 'no-such-type'")


def test_each_check_has_a_pace() -> None:
    known, _ = facts(node(64000))
    settings = config.Config(checks=config.CheckSettings(periods={"gpu_health": 900.0}))
    loop = check_loop.CheckLoop(settings, known, Outbox(), SystemClock(), threading.Event())
    paces = {check.name: loop.period(check) for check in check_loop.check_registry.BUILT_IN}
    assert (paces["disk"], paces["gpu_health"], paces["shared_mounts"]) == (60.0, 900.0, 300.0)
