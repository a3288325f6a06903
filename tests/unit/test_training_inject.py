"""Faults on order: what is read, and when one fits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_resilience.errors import UsageError
from slurm_resilience.training import inject
from slurm_resilience.training.inject import Fault, Phase, Rule, fits, parse
from slurm_resilience.training.recovery.exceptions import PoisonedProcess

# A busy machine is no failure.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

some = st.none() | st.integers(0, 9999)
rules = st.builds(
    Rule,
    st.sampled_from(get_args(Fault)),
    rank=some,
    seat=some,
    step=some,
    phase=st.sampled_from(get_args(Phase)),
    incarnation=st.none() | st.integers(0, 9),
    code=st.integers(0, 255),
    seconds=st.none() | st.integers(0, 99).map(float),
)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    inject.clear()
    yield
    inject.clear()


@calm
@given(st.lists(rules, max_size=4))
def test_what_is_told_can_be_read(many: list[Rule]) -> None:
    assert parse(";".join(map(str, many))) == tuple(many)


def test_the_readmes_example() -> None:
    text = (
        "kill:rank=1,step=5,phase=update; exception:rank=0,step=7;"
        "stop:rank=2,step=9,phase=backward;exit:code=3;hang-c:seat=3,incarnation=any,seconds=0.5;"
    )
    assert parse(text) == (
        Rule("kill", rank=1, step=5, phase="update"),
        Rule("exception", rank=0, step=7),
        Rule("stop", rank=2, step=9, phase="backward"),
        Rule("exit", code=3),
        Rule("hang-c", seat=3, incarnation=None, seconds=0.5),
    )
    assert parse("") == parse(" ; ") == ()
    assert parse("kill") == parse("kill:phase=forward") == (Rule("kill"),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil:rank=1", "'kil' is no fault .*known: exception, kill"),
        ("kill:rnk=1", "'rnk=1' is not understood .*known: rank, seat"),
        ("kill:rank", "'rank' is not understood"),
        ("kill:rank=", "rank='' is not a number"),
        ("kill:rank=-1", "rank='-1' is not a number"),
        ("kill:rank=1,rank=2", "rank is given twice"),
        ("kill:phase=middle", "'middle' is no phase .*known: start"),
        ("exit:code=256", "code='256' is not a number up to 255"),
        ("hang:seconds=any", "seconds='any'"),
        ("kill:fault=stop", "'fault=stop' is not understood"),
        ("kill:step=²", "step='²' is not a number"),
    ],
)
def test_a_wrong_one_is_one_clear_line(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse(f"stop;{text}")
    assert "\n" not in str(caught.value)
    assert text in str(caught.value)


@calm
@given(rules, st.sampled_from(get_args(Phase)), *[st.integers(0, 3)] * 4)
def test_it_fits_only_where_it_says(
    rule: Rule, phase: str, step: int, rank: int, seat: int, incarnation: int
) -> None:
    if not fits(rule, phase, step, rank, seat, incarnation):
        return
    assert rule.phase == phase
    for wanted, found in [(rule.step, step), (rule.rank, rank), (rule.seat, seat)]:
        assert wanted is None or wanted == found
    assert rule.incarnation in (None, incarnation)
    others = fits(rule, phase, step, rank, seat, incarnation + 1)
    assert others == (rule.incarnation is None)


def test_it_fires_once(capfd: pytest.CaptureFixture[str]) -> None:
    inject.at("exception", rank=1, step=5, phase="update")
    for phase, step, rank in [("update", 4, 1), ("update", 5, 0), ("after-update", 5, 1)]:
        inject.point(phase, step=step, rank=rank)  # type: ignore[arg-type]
    assert len(inject.armed()) == 1
    with pytest.raises(inject.Injected, match="step=5"):
        inject.point("update", step=5, rank=1)
    assert inject.armed() == ()
    inject.point("update", step=5, rank=1)
    assert capfd.readouterr().err.count("injected fault (rank 1, step 5, update)") == 1


def test_the_next_incarnation_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRES_INCARNATION", "1")
    inject.at("exception", step=5)
    inject.point("before-backward", step=5)
    inject.at("exception", step=5, incarnation=1)
    with pytest.raises(inject.Injected):
        inject.point("before-backward", step=5)
    inject.at("exception", step=6, incarnation=None)
    with pytest.raises(inject.Injected):
        inject.point("before-backward", step=6)


def test_a_seat_is_not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRES_SEAT", "3")
    inject.at("poison", seat=3)
    inject.at("poison", seat=2)
    with pytest.raises(PoisonedProcess):
        inject.point("before-backward", step=0, rank=2)
    inject.point("before-backward", step=0, rank=2)


def test_a_hang_may_end() -> None:
    inject.at("hang", seconds=0.01)
    inject.at("hang-c", seconds=0.01)
    inject.point("before-backward")
    assert inject.armed() == ()


def test_a_wrong_at_is_an_error_at_once() -> None:
    with pytest.raises(UsageError, match="is no fault"):
        inject.at("explode")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not understood"):
        inject.at("kill", who=3)
    assert inject.armed() == ()


def run(program: str, rules: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from slurm_resilience.training import inject\n" + program],
        env={"SRES_INJECT": rules, **more},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("rule", "code"), [("kill:step=2", -9), ("exit:code=3,step=2", 3), ("exit:step=2,rank=0", 1)]
)
def test_the_environment_ends_a_process(rule: str, code: int) -> None:
    loop = "for step in range(4):\n print(step)\n inject.point('update', step=step, rank=0)"
    done = run(loop, f"{rule},phase=update")
    assert (done.returncode, done.stdout) == (code, "0\n1\n2\n")
    spared = run(loop, f"{rule},phase=update", SRES_INCARNATION="1")
    assert (spared.returncode, spared.stdout) == (0, "0\n1\n2\n3\n")


def test_an_unknown_fault_is_refused() -> None:
    wrong = run("inject.point('start')", "kil")
    assert "UsageError: SRES_INJECT" in wrong.stderr


def test_once_in_the_whole_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRES_INJECT_ONCE", str(tmp_path))
    for process, fires in ((0, True), (1, False)):
        inject.clear()
        monkeypatch.setenv("SRES_INCARNATION", str(process))
        inject.at("exception", step=2, incarnation=None)
        with pytest.raises(inject.Injected) if fires else nullcontext():
            inject.point("before-backward", step=2)


def test_where_it_cannot_be_noted_nothing_fires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRES_INJECT_ONCE", str(tmp_path / "none"))
    inject.at("kill", step=2)
    with pytest.raises(UsageError, match=r"SRES_INJECT_ONCE: .*none cannot be written to: No such"):
        inject.point("before-backward", step=2)
