"""The decision that follows from the way in which a block was left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.mesh.model import GenerationEnd
from slurm_resilience.training.recovery import fault_policy
from slurm_resilience.training.recovery.exceptions import (
    Interrupted,
    PoisonedProcess,
    Unrecoverable,
)
from slurm_resilience.training.state.errors import HealFailed, StateError

ME, OTHER = "00001.0.a", "00002.0.b"
MINE = GenerationEnd(1, "seat 1: ValueError: no", ME, "fault")


class AcceleratorError(RuntimeError):
    """Named as torch's."""


def then(
    error: BaseException, end: GenerationEnd = MINE, *, count: int = 1, recovers: bool = True
) -> str:
    verdict = fault_policy.verdict(
        error, end, seat=1, step=7, count=count, most=3, recovers=recovers
    )
    assert verdict.reason
    return verdict.then


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (Interrupted("over"), True),
        (RuntimeError("[gloo/transport] Connection closed by peer"), True),
        (ConnectionResetError("Connection reset"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("a store of values"), False),
        (HealFailed("receiving state broke off in step 3: closed"), True),
    ],
)
def test_what_a_collective_raises_may_be_a_peers_fault(error: BaseException, is_one: bool) -> None:
    assert fault_policy.may_be_a_peers(error) is is_one


def test_the_same_fault_in_the_same_step_counts() -> None:
    faults = fault_policy.Faults()
    assert [faults.add(step) for step in (5, 5, 6, 5, 5, 5)] == [1, 2, 1, 1, 2, 3]


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_what_is_told_of_a_fault_is_a_trace_once() -> None:
    faults = fault_policy.Faults()
    told = []
    for step, error in ((-1, "a"), (4, "a"), (4, "a"), (4, "b")):
        faults.add(step)
        told.append(faults.tell(raised(ValueError(error))))
    assert told[0].startswith("fault 1 in the time before the first step: Traceback")
    assert ["Traceback" in text for text in told] == [True, True, False, True]
    assert told[2].startswith("fault 2 in step 4: ValueError: a (as before)")


@pytest.mark.parametrize("error", [UsageError("no such size"), StateError("only one tracks x")])
def test_our_own_errors_are_one_line_and_are_not_tried_again(error: SresError) -> None:
    faults = fault_policy.Faults()
    faults.add(2)
    told = faults.tell(raised(error))
    assert told.startswith(f"fault 1 in step 2: {error} ({__file__}:")
    assert "\n" not in told
    assert then(error) == "give up"
    assert then(error, GenerationEnd(1, "a peer died", OTHER, "lost"), count=0) == "again"


@pytest.mark.parametrize("kind", [ValueError, UsageError, Unrecoverable, PoisonedProcess])
def test_what_is_said_of_an_error_is_one_line(kind: type[Exception]) -> None:
    error = raised(kind("my own bug\nwith  two lines\r\n" + "and many words " * 100))
    for count in (1, 3):
        verdict = fault_policy.verdict(
            error, MINE, seat=1, step=7, count=count, most=3, recovers=True
        )
        if verdict.then != "again":
            assert "my own bug with two lines and many" in verdict.reason
            assert len(verdict.reason.splitlines()) == 1
            assert len(verdict.reason) < 2 * fault_policy.SHOWN
    faults = fault_policy.Faults()
    for _ in range(2):
        faults.add(3)
        told = faults.tell(error)
    assert len(told.splitlines()) == 1


def test_a_process_that_hangs_in_one_step_again_and_again_ends_the_training() -> None:
    hangs = fault_policy.Hangs()
    first, other = (
        GenerationEnd(1, "seat 1 hangs", ME, "hang"),
        GenerationEnd(3, "x", OTHER, "hang"),
    )
    unnamed = GenerationEnd(4, "unknown", "", "hang")
    ends = [(first, 5), (first, 5), (MINE, 5), (first, 5), (other, 5), (other, 6)]
    assert hangs.add(unnamed, 5) == 0
    assert [hangs.add(end, step) for end, step in ends] == [1, 2, 0, 3, 1, 1]
    for most, count, expected in ((3, 2, "again"), (3, 3, "give up"), (1, 1, "again")):
        found = fault_policy.verdict(
            Interrupted(), first, seat=0, step=5, count=0, most=most, recovers=True, hangs=count
        )
        assert found.then == expected
    assert fault_policy.verdict(
        Interrupted(), first, seat=0, step=5, count=0, most=3, recovers=True, hangs=3
    ) == ("give up", "seat 1 hangs; 3 times in step 5")


def test_own_faults_end_the_training_when_they_are_too_many() -> None:
    assert [then(ValueError(), count=count) for count in (1, 2, 3)] == ["again", "again", "give up"]


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (OSError(24, "Too many open files"), 3),
        (RuntimeError("socket: Too many open files"), 3),
        (RuntimeError("can't start new thread"), fault_policy.THREAD_TRIES),
        (RuntimeError("Resource temporarily unavailable"), fault_policy.THREAD_TRIES),
    ],
)
def test_a_process_that_has_used_up_its_limits_is_replaced(error: Exception, tries: int) -> None:
    """It ended the training, though the others had the state, and a fresh process had room."""
    assert {then(error, count=count) for count in range(1, tries)} == {"again"}
    assert then(error, count=tries) == "replace"


@pytest.mark.parametrize(
    "error", [PoisonedProcess("x"), AcceleratorError("x"), RuntimeError("CUDA error: x")]
)
def test_a_broken_process_is_replaced_for_its_own_fault_only(error: Exception) -> None:
    assert then(error) == "replace"
    assert then(error, GenerationEnd(1, "a peer died", OTHER, "lost"), count=0) == "again"


def test_lost_state_is_no_fault_that_counts() -> None:
    lost = Unrecoverable("nothing has part 1")
    assert not fault_policy.is_own(lost, MINE, ME)
    assert then(lost, count=0) == "give up"


def test_who_gives_up_for_lost_state_says_how_it_was_lost() -> None:
    lost, mine = Unrecoverable("nothing has part 1"), "seat 1 (n1): ValueError: in the update"
    decision = fault_policy.verdict(
        lost, MINE, seat=0, step=3, count=0, most=3, recovers=True, before=mine
    )
    assert decision.reason == f"nothing has part 1 (the world before ended: {mine})"


def test_an_iterator_without_a_batch_is_said_in_words() -> None:
    assert "for batch in s.loader" in fault_policy.said(StopIteration())
    assert fault_policy.said(StopIteration(3)) == "StopIteration: 3"


def test_without_recovery_only_a_join_is_survived() -> None:
    assert (
        then(Interrupted(), GenerationEnd(1, "lost", OTHER, "lost"), count=0, recovers=False)
        == "end"
    )
    join = GenerationEnd(1, "seat 2 joins", "", "join")
    assert then(Interrupted(), join, count=0, recovers=False) == "again"


@given(
    st.sampled_from([Interrupted(), ValueError(), Unrecoverable("x"), PoisonedProcess("x")]),
    st.integers(0, 9),
    st.booleans(),
)
def test_what_all_were_told_goes_first(error: BaseException, count: int, recovers: bool) -> None:
    end = GenerationEnd(1, "seat 2 gave up", OTHER, "stop")
    assert not fault_policy.is_own(error, end, OTHER)
    assert then(error, end, count=count, recovers=recovers) == "stop"
