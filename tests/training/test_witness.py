"""A bit of one rank's parameters flips, unseen: it is named, and nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_runs import Outcome, Run
from warm_machine import WarmMachine

from slurm_resilience.training.checkpoint.certificates import CERTIFIED

pytestmark = [pytest.mark.training, pytest.mark.timeout(180)]

STEPS, BATCH, RANKS = 20, 24, 4
Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path, warm_machine: WarmMachine) -> Iterator[Start]:
    runs: list[Run] = []

    def go(*words: str, inject: str = "") -> Run:
        more = ("--steps", str(STEPS), "--batch", str(BATCH), "--digest-every", "1")
        # So long that no rank is given up because the machine is busy.
        more += ("--silence", "30", "--abort-timeout", "30")
        logs = tmp_path / f"run{len(runs)}"
        runs.append(Run([warm_machine], logs, *more, *words, inject=inject, nodes=1, ranks=RANKS))
        return runs[-1]

    yield go
    for run in runs:
        run.end()


def ended(run: Run) -> Outcome:
    assert run.wait(120) == [0], run.tail()
    outcome = Outcome(run)
    outcome.every_sample_once(STEPS, BATCH)
    # All processes are those that began.
    assert sorted(e.seat for e in outcome.events if e.name == "main") == list(range(RANKS))
    return outcome


def reasons(outcome: Outcome) -> str:
    return " ".join(e.details[1]["reason"] for e in outcome.events if e.name == "healed")


def test_the_rank_that_differs_is_healed_from_the_others(start: Start) -> None:
    undisturbed = ended(start())
    run = start(inject="flip:seat=2,step=9,phase=after-update")
    outcome = ended(run)
    assert "step 9: replicas differ: rank 2 from rank 0 in net.2.weight" in run.tail()
    assert "differs from the other replicas in net.2.weight, and is healed from them" in run.tail()
    assert "rank 2 healed to step 9 from peers" in reasons(outcome)
    outcome.equals(undisturbed)


def test_two_replicas_go_back_to_a_certified_checkpoint(start: Start, tmp_path: Path) -> None:
    words = ("--kind", "hsdp", "--every", "4")
    undisturbed = ended(start(*words, "--checkpoints", str(tmp_path / "one")))
    disk = tmp_path / "other"
    # The checkpoint of step 12 is written with the flipped bit.
    fault = "flip:seat=2,step=12,phase=update"
    run = start(*words, "--checkpoints", str(disk), inject=fault)
    outcome = ended(run)
    assert "no majority says which is right: all go back to step 8" in run.tail()
    assert "all read the checkpoint of step 8" in reasons(outcome)
    assert not list(disk.glob("*/doubtful")), "it was written anew"
    assert list(disk.glob(f"*/{CERTIFIED}"))
    outcome.equals(undisturbed)


def test_two_replicas_go_back_to_certified_copies_in_memory(start: Start) -> None:
    words = ("--kind", "hsdp", "--partner-every", "4")
    undisturbed = ended(start(*words))
    run = start(*words, inject="flip:seat=3,step=14,phase=after-update")
    outcome = ended(run)
    assert "no majority says which is right: all go back to step 12" in run.tail()
    assert "copies in memory of step 12" in reasons(outcome)
    outcome.equals(undisturbed)
