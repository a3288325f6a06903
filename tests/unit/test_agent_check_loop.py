"""Rounds of checks: what Slurm expects, and that an administrator's word is noticed."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_resilience import config
from slurm_resilience.agent import check_loop
from slurm_resilience.agent.check_loop import CheckLoop
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import NotFound, SlurmUnreachable
from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.checks.host import memory
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.health.programs import program_listing
from slurm_resilience.model import Finding, Node, Severity
from slurm_resilience.wire.messages import StepChecksRun


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
    own = {one.name: one for one in check_loop.checks_of(settings)}[check_loop.PROFILE]
    context = CheckContext(settings=settings.checks)
    judgement = own.judge(own.probe(context), context)
    assert [str(one.severity) for one in judgement.findings] == ["monitor"]
    assert "no profile 'no-such-type'" in judgement.text
    sound = CheckContext(settings=config.CheckSettings(profile="p5.48xlarge"))
    assert own.judge(own.probe(sound), sound).findings == ()
    assert check_loop.PROFILE not in [one.name for one in check_loop.checks_of(config.Config())]


def test_each_check_has_a_pace() -> None:
    known, _ = facts(node(64000))
    settings = config.Config(checks=config.CheckSettings(periods={"gpu_health": 900.0}))
    loop = check_loop.CheckLoop(settings, known, Outbox(), SystemClock(), threading.Event())
    paces = {check.name: loop.period(check) for check in check_loop.check_registry.BUILT_IN}
    assert (paces["disk"], paces["gpu_health"], paces["shared_mounts"]) == (60.0, 900.0, 300.0)


def check(
    name: str, probe: Callable[[CheckContext], int], severity: Severity = Severity.REBOOT
) -> Check:
    def judge(seen: int, context: CheckContext) -> Judgement:
        findings = (Finding(name, severity, f"{seen} found", 5.0),) if seen else ()
        return Judgement(f"{seen} found", findings)

    return Check(name, probe, judge, asks_for=(severity,))


def loop_of(monkeypatch: pytest.MonkeyPatch, outbox: Outbox, *checks: Check) -> CheckLoop:
    monkeypatch.setattr(check_loop, "checks_of", lambda settings, own: checks)
    known, _ = facts(node(64000))
    return CheckLoop(config.Config(), known, outbox, SystemClock(), threading.Event())


def test_after_a_step_what_may_take_the_node_out_is_run_and_reported_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outbox = Outbox()
    watched = check("zombies", lambda context: 3, Severity.MONITOR)
    slow = dataclasses.replace(check("ipmi_events", lambda context: 1), is_slow=True)
    found, sound = check("gpu_count", lambda context: 1), check("memory", lambda context: 0)
    checks = (found, sound, watched, slow)
    loop = loop_of(monkeypatch, outbox, *checks)
    assert loop.run_after_step(30.0) == StepChecksRun(2)
    assert {result.check: result.verdict for result in outbox.results()} == {
        "gpu_count": "fail",
        "memory": "pass",
    }


def test_after_a_step_a_check_that_hangs_holds_up_no_other_and_is_reported_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    news, release = threading.Event(), threading.Event()

    def hang(context: CheckContext) -> int:
        release.wait(30)
        return 1

    def cannot_tell(context: CheckContext) -> int:
        raise Unjudged("no tool")

    outbox = Outbox(news.set)
    sound = check("memory", lambda context: 0)
    loop = loop_of(monkeypatch, outbox, check("gpu_count", hang), check("nvme", cannot_tell), sound)
    try:
        assert loop.run_after_step(3.0) == StepChecksRun(3, ("gpu_count", "nvme"))
    finally:
        news.clear()
        release.set()
    assert news.wait(30)
    late = {result.check: result.verdict for result in outbox.results()}
    assert late == {"gpu_count": "fail", "nvme": "unjudged", "memory": "pass"}


def test_after_a_step_a_check_that_runs_already_is_run_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its present run may have looked before the step failed."""
    began, release, seen = threading.Event(), threading.Event(), iter((0, 1))

    def look(context: CheckContext) -> int:
        value = next(seen)
        if not value:
            began.set()
            release.wait(30)
        return value

    outbox = Outbox()
    loop = loop_of(monkeypatch, outbox, check("gpu_count", look))
    thread = threading.Thread(target=loop.run_now, args=("gpu_count",), daemon=True)
    thread.start()
    assert began.wait(30)
    answers: list[StepChecksRun] = []
    asked = threading.Thread(target=lambda: answers.append(loop.run_after_step(30.0)), daemon=True)
    asked.start()
    release.set()
    thread.join(30)
    asked.join(30)
    assert answers == [StepChecksRun(1)]
    assert [result.verdict for result in outbox.results()] == ["fail"]


def test_a_check_that_hangs_holds_up_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_loop, "PATIENCE_SECONDS", 0.05)
    release, again = threading.Event(), threading.Event()
    hangs, seen = [0], [0]

    def hang(context: CheckContext) -> int:
        hangs[0] += 1
        release.wait(30)
        return 0

    def look(context: CheckContext) -> int:
        seen[0] += 1
        if seen[0] == 3:
            again.set()
        return 0

    checks = (check("mounts", hang), check("memory", look))
    monkeypatch.setattr(check_loop, "checks_of", lambda settings, own: checks)
    known, _ = facts(node(64000))
    stop = threading.Event()
    settings = config.Config(agent=config.AgentSettings(check_interval=0.01))
    loop = CheckLoop(settings, known, Outbox(), SystemClock(), stop)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        assert again.wait(30), "the other check has come to its turn three times"
        assert hangs == [1], "it is not started beside itself"
    finally:
        release.set()
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


def test_chosen_checks_are_run_together_and_none_is_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    slow = dataclasses.replace(check("slow", lambda context: 0), is_slow=True)

    def hang(context: CheckContext) -> int:
        release.wait(30)
        return 0

    outbox, sound = Outbox(), check("memory", lambda context: 0)
    loop = loop_of(monkeypatch, outbox, check("mounts", hang), sound, slow)
    try:
        found = loop.run_chosen((), 1.0)
    finally:
        release.set()
    assert [(one.check, one.verdict) for one in found] == [
        ("mounts", "unjudged"),
        ("memory", "pass"),
    ]
    assert found[0].text == "no result within 1 s"
    assert [one.check for one in loop.run_chosen(("slow", "slow"), 30.0)] == ["slow"]
    assert {"memory", "slow"} <= {one.check for one in outbox.results()}
    with pytest.raises(NotFound, match="no check 'fans'; it has mounts, memory, slow"):
        loop.run_chosen(("memory", "fans"), 5.0)


def wait_until(predicate: Callable[[], object], what: str) -> None:
    deadline, tick = time.monotonic() + 20, threading.Event()
    while not predicate():
        assert time.monotonic() < deadline, what
        tick.wait(0.02)


def test_a_profile_that_hangs_expects_nothing(
    dead_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_loop, "PROFILE_SECONDS", 2.0)
    loaded = check_loop._profile(str(dead_server / "node.toml"))
    assert loaded.profile == NodeProfile()
    assert loaded.fault.endswith("does not answer within 2 s")


def test_a_profile_that_a_user_could_have_written_expects_nothing(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("gpus = 8\n")
    file.chmod(0o666)
    loaded = check_loop._profile(str(file))
    assert loaded.profile == NodeProfile() and "may be written by others" in loaded.fault


def programs_of(
    directory: Path, monkeypatch: pytest.MonkeyPatch, outbox: Outbox
) -> contextlib.AbstractContextManager[CheckLoop]:
    """Run a loop of one check of ours, and of the programs in a directory."""
    ours = Check("ours", lambda context: 1, lambda seen, context: Judgement("well"))
    monkeypatch.setattr(check_loop, "checks_of", lambda settings, own: (ours,))
    settings = config.Config(
        agent=config.AgentSettings(check_interval=0.5),
        checks=config.CheckSettings(directory=str(directory)),
    )
    stop = threading.Event()
    loop = CheckLoop(settings, facts(None)[0], outbox, SystemClock(), stop)
    thread = threading.Thread(target=loop.run, daemon=True)

    @contextlib.contextmanager
    def running() -> Iterator[CheckLoop]:
        thread.start()
        try:
            yield loop
        finally:
            stop.set()
            thread.join(10)

    return running()


def verdict(outbox: Outbox, name: str) -> str:
    return next((one.verdict for one in outbox.results() if one.check == name), "")


def text(outbox: Outbox) -> str:
    return next(one.text for one in outbox.results() if one.check == "checks_directory")


def test_a_directory_of_programs_that_hangs_is_unjudged_and_holds_up_no_check(
    dead_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_listing.ProgramLister.__init__, "__defaults__", (0.5,))
    outbox = Outbox()
    with programs_of(dead_server, monkeypatch, outbox):
        wait_until(lambda: verdict(outbox, "ours") == "pass", "another check looks")
        wait_until(lambda: verdict(outbox, "checks_directory"), "the directory is judged")
        assert verdict(outbox, "checks_directory") == "unjudged"
        assert text(outbox).startswith(f"checks.directory ({dead_server}): ")
        # It is asked again, but no second process is left behind beside one that hangs.
        wait_until(lambda: "hangs in the kernel" in text(outbox), "it is asked again")


def test_programs_are_found_once_their_directory_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, outbox = tmp_path / "checks", Outbox()
    with programs_of(folder, monkeypatch, outbox) as loop:
        wait_until(lambda: verdict(outbox, "checks_directory") == "unjudged", "it is not there")
        made = tmp_path / "made"
        made.mkdir(mode=0o755)
        (made / "fans").write_text("#!/bin/sh\necho fine\n")
        (made / "fans").chmod(0o755)
        made.rename(folder)
        wait_until(lambda: verdict(outbox, "fans") == "pass", "its program is run")
        assert verdict(outbox, "checks_directory") == "pass"
        assert loop.run_now("fans").text == "fine"
