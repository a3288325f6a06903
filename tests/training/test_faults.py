"""The fault matrix: every fault, under DDP and under HSDP, on two nodes of a networked lab.

More seeds, and each fault in a training of its own: SRES_TEST_SEEDS=5. Without it all of `CASES`
come in one training, one after the other. More ranks: SRES_TEST_RANKS=8.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_runs import Node, Outcome, Run
from msgspec.structs import replace

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.training.inject import ONCE, parse

pytestmark = [pytest.mark.training, pytest.mark.cluster]

STEPS, BATCH = 16, 24
ALL = "SRES_TEST_SEEDS" in os.environ
SEEDS = range(int(os.environ.get("SRES_TEST_SEEDS", "1")))
RANKS = int(os.environ.get("SRES_TEST_RANKS", "4"))
"""Half of them on each node; under HSDP, two hold one copy together."""
SPEC = LabSpec(nodes=2, network=True, daemons=False)

Start = Callable[..., Run]
each_seed = pytest.mark.parametrize("seed", SEEDS)

CASES: dict[str, str] = {
    "exception": "exception:seat=1,step=5",
    "sigkill": "kill:seat=2,step=5,phase=backward",
    "sigstop": "stop:seat=2,step=5",
    "kill_in_update": "kill:seat=1,step=5,phase=update",
    "exception_in_update": "exception:seat=3,step=5,phase=update",
    "rank_0": "kill:seat=0,step=5",
    "two_at_once": "kill:seat=1,step=5;exception:seat=2,step=5",
    # The same seat: on a busy machine another one may not have committed step 4 by then.
    "during_recovery": "exception:seat=1,step=5;kill:seat=1,step=5,phase=recovery",
    "at_step_0": "kill:seat=1,step=0",
    "after_the_last_step": f"kill:seat=1,step={STEPS},phase=after-update",
}


ONE_AFTER_THE_OTHER = "one_after_the_other"
MATRIX = [
    (kind, case)
    for kind in ("ddp", "hsdp")
    for case in (*CASES, ONE_AFTER_THE_OTHER)
    if ALL or case == ONE_AFTER_THE_OTHER
]


def one_after_the_other(seed: int) -> str:
    """All of `CASES`, two steps apart, in an order of the seed's; but for the one of the last step,
    which would come right behind another."""
    middle = [case for case in CASES.values() if ",step=5" in case]
    random.Random(seed).shuffle(middle)
    assert 2 * len(middle) <= STEPS
    moved = [
        case.replace(",step=5", f",step={1 + 2 * number}") for number, case in enumerate(middle)
    ]
    # Each once, in whatever process has the seat: a busy machine has others replaced as well.
    rules = parse(";".join([CASES["at_step_0"], *moved]))
    return ";".join(str(replace(rule, incarnation=None)) for rule in rules)


@pytest.fixture(scope="module")
def nodes(shared_lab: Callable[[LabSpec], Lab]) -> Iterator[list[Node]]:
    lab = shared_lab(SPEC)
    with tempfile.TemporaryDirectory() as folder:
        found = [Node(lab, name, Path(folder)) for name in lab.nodes]
        yield found
        for node in found:
            node.end()


@pytest.fixture
def start(nodes: list[Node], tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*words: str, inject: str = "", **how: Any) -> Run:
        place = tmp_path / f"run{len(runs)}"
        place.mkdir()
        how = {"ranks": RANKS // 2} | how
        runs.append(Run(nodes, place, "--batch", str(BATCH), *words, inject=inject, **how))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


_undisturbed: dict[tuple[str, int], Outcome] = {}


def undisturbed(start: Start, kind: str, seed: int) -> Outcome:
    """The same training without a fault."""
    if (kind, seed) not in _undisturbed:
        run = start("--kind", kind, "--seed", str(seed), "--steps", str(STEPS))
        assert run.wait() == [0, 0], run.tail()
        _undisturbed[kind, seed] = Outcome(run)
        _undisturbed[kind, seed].every_sample_once(STEPS, BATCH)
    return _undisturbed[kind, seed]


@each_seed
@pytest.mark.parametrize(("kind", "case"), MATRIX)
def test_a_fault_changes_nothing(
    start: Start, case: str, kind: str, seed: int, tmp_path: Path
) -> None:
    """All seats are filled again, so that the sums are the same to the last bit."""
    words = ("--kind", kind, "--seed", str(seed), "--steps", str(STEPS))
    inject = one_after_the_other(seed) if case == ONE_AFTER_THE_OTHER else CASES[case]
    # After so many faults others may be slow: two that hold the same part are not lost at once.
    patience = ("--abort-timeout", "8", "--silence", "5") if case == ONE_AFTER_THE_OTHER else ()
    (once := tmp_path / "once").mkdir()
    run = start(
        *words,
        *patience,
        inject=inject,
        launcher=("--max-restarts", "9"),
        env={ONCE: str(once)},
    )
    # Less than pytest's own limit, which shows nothing of what hangs.
    assert run.wait(min(240, 30 * len(parse(inject)) + 20 * RANKS)) == [0, 0], run.tail()
    fired = re.findall("injected fault .*: (.*)", run.tail(10**7))
    assert sorted(fired) == sorted(map(str, parse(inject))), run.tail()
    seen, before = Outcome(run), undisturbed(start, kind, seed)
    seen.every_sample_once(STEPS, BATCH)
    seen.equals(before)
    assert seen.kinds.count("fresh") <= RANKS or "step=0" in inject


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_a_rank_that_hangs_is_named_and_replaced(start: Start, kind: str) -> None:
    """Under HSDP the others wait in collectives of sub-groups, in which the default group counts
    none."""
    run = start("--kind", kind, "--steps", str(STEPS), inject="hang:seat=1,step=10")
    assert run.wait(150) == [0, 0], run.tail()
    named = "seat 1 (has not come to collective|is in forward)"
    assert re.search(f"training stands still: {named}", run.tail(10**7)), run.tail()
    seen, before = Outcome(run), undisturbed(start, kind, 0)
    seen.every_sample_once(STEPS, BATCH)
    seen.equals(before)


ONE, ALL_BUT_0 = "1", ",".join(map(str, range(1, RANKS)))
ONE_PART = ",".join(map(str, range(1, RANKS, 2)))
BEHIND = [("ddp", ONE), ("hsdp", ONE_PART)]
BEHIND += [("ddp", ALL_BUT_0), ("hsdp", ONE), ("hsdp", ALL_BUT_0)] if ALL else []


@each_seed
@pytest.mark.parametrize(("kind", "seats"), BEHIND)
def test_ranks_that_disagree_about_the_step(start: Start, kind: str, seats: str, seed: int) -> None:
    """Some have committed it, and some have not. Who has the whole model behind is healed; who is
    at the gate of a model in parts finishes the step as well."""
    words = ("--kind", kind, "--seed", str(seed), "--steps", str(STEPS))
    run = start(*words, "--behind", f"5:{seats}")
    assert run.wait() == [0, 0], run.tail()
    seen = Outcome(run)
    healed = {(e.details[0], e.details[1]["kind"]) for e in seen.events if e.name == "healed"}
    assert [e.name for e in seen.events].count("cut off") == len(seats.split(","))
    after = "nothing" if kind == "hsdp" else "peers"
    assert healed == {(0, "fresh"), (6, after)}, seen.events
    seen.every_sample_once(STEPS, BATCH)
    seen.equals(undisturbed(start, kind, seed))


@each_seed
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_the_survivors_go_on_and_the_lost_one_rejoins(start: Start, kind: str, seed: int) -> None:
    steps = 100
    words = ("--kind", kind, "--seed", str(seed), "--steps", str(steps), "--min-world", "2")
    words = (*words, "--sleep", "0.02")
    run = start(*words, "--late", inject="kill:seat=1,step=5")
    assert run.wait(120) == [0, 0], run.tail()
    seen = Outcome(run)
    seen.every_sample_once(steps, BATCH)
    worlds = [event.details[2] for event in seen.events if event.name == "step"]
    assert set(worlds) == {RANKS - (1 if kind == "ddp" else 2), RANKS}
    assert worlds[-1] == RANKS
    assert all(len(digests) == 1 for digests in seen.digests.values()), seen.digests
    assert "peers" in seen.kinds
    before = start(*words, "--sleep", "0")
    assert before.wait(120) == [0, 0], before.tail()
    # A rank that was given up after it committed may not have told its share of the loss.
    told = [step for step, seats in seen.samples.items() if set(seats) == set(seen.shares[step])]
    assert len(told) > steps * 0.8
    losses = Outcome(before).losses
    for step in told:
        assert abs(losses[step] - seen.losses[step]) < 1e-4


ALL_SEATS, ONE_PARTS_SEATS = range(RANKS), range(1, RANKS, 2)
LOST = [("ddp", ALL_SEATS), ("hsdp", ALL_SEATS), ("hsdp", ONE_PARTS_SEATS), ("fsdp", ALL_SEATS)]
NO_HASTE = ("--silence", "20")
"""A rank that is stopped waits for the last one to be killed with it."""


def stop(seats: Iterable[int], step: int) -> str:
    return ";".join(f"stop:seat={seat},step={step}" for seat in seats)


@each_seed
@pytest.mark.parametrize(("kind", "seats"), LOST)
def test_lost_state_comes_from_the_disk(
    start: Start, kind: str, seats: range, seed: int, tmp_path: Path
) -> None:
    disk = ("--checkpoints", str(tmp_path / "disk"), "--every", "4")
    words = ("--kind", kind, "--seed", str(seed), "--steps", str(STEPS), *disk, *NO_HASTE)
    run = start(*words, inject=stop(seats, step=9))
    run.kill_stopped(len(seats))
    assert run.wait() == [0, 0], run.tail()
    seen = Outcome(run)
    assert "disk" in seen.kinds
    assert (tmp_path / f"disk/step-{STEPS:06}/manifest.json").exists(), "the last one is written"
    seen.every_sample_once(STEPS, BATCH)
    seen.equals(undisturbed(start, kind, seed))


def test_a_rank_that_hangs_when_all_others_are_dead_ends_itself(
    start: Start, tmp_path: Path
) -> None:
    """The new ranks wait for it: it was in the last world, and none of them was."""
    disk = ("--checkpoints", str(tmp_path / "disk"), "--every", "4")
    words = ("--steps", str(STEPS), *disk, "--abort-timeout", "1", *NO_HASTE)
    others = [seat for seat in range(RANKS) if seat != 1]
    run = start(*words, inject=f"hang-c:seat=1,step=9;{stop(others, step=9)}")
    run.kill_stopped(len(others))
    assert run.wait() == [0, 0], run.tail()
    assert "it did not leave its block within 10 s" in run.tail(10**7)
    seen = Outcome(run)
    assert "disk" in seen.kinds
    seen.every_sample_once(STEPS, BATCH)
    seen.equals(undisturbed(start, "ddp", 0))


@each_seed
def test_a_lost_shard_comes_from_its_partners_memory(start: Start, seed: int) -> None:
    words = ("--kind", "fsdp", "--seed", str(seed), "--steps", str(STEPS))
    words = (*words, "--partner-every", "3", "--sleep", "0.05")
    run = start(*words, inject="kill:seat=1,step=8")
    assert run.wait() == [0, 0], run.tail()
    seen = Outcome(run)
    assert "memory" in seen.kinds
    seen.every_sample_once(STEPS, BATCH)
    seen.equals(undisturbed(start, "fsdp", seed))


PARTS = ["recovery", "state", "data", "rootless"]


@each_seed
@pytest.mark.parametrize("part", PARTS)
def test_each_part_alone(start: Start, part: str, seed: int, tmp_path: Path) -> None:
    """The other three are off; a fault still loses nothing."""
    disk = ("--checkpoints", str(tmp_path / "disk"), "--every", "2")
    words = ("--seed", str(seed), "--steps", str(STEPS), *disk)
    run = start(*words, inject="kill:seat=1,step=9", env={"SRES_PARTS": part})
    assert run.wait() == [0, 0], run.tail()
    seen = Outcome(run)
    seen.every_sample_once(STEPS, BATCH)
    seen.equals(undisturbed(start, "ddp", seed))
    entered = [event for event in seen.events if event.name == "main"]
    # Without recovery in the process, every rank is replaced.
    assert len(entered) == (RANKS + 1 if part == "recovery" else 2 * RANKS)
    assert "disk" in seen.kinds


@each_seed
@pytest.mark.parametrize("kind", ["ddp", "hsdp"] if ALL else ["ddp"])
def test_replicas_that_differ_go_back_to_the_disk(
    start: Start, kind: str, seed: int, tmp_path: Path
) -> None:
    disk = ("--checkpoints", str(tmp_path / "disk"), "--every", "4")
    words = ("--kind", kind, "--seed", str(seed), "--steps", str(STEPS), *disk)
    words = (*words, "--checksum", "--poke", "6:2")
    # In place of a process that was slow, a new one comes, whose state does not differ.
    words = (*words, "--abort-timeout", "20", "--silence", "20")
    # In backward: each part of the model has committed the step before.
    run = start(*words, inject="exception:seat=1,step=7,phase=backward")
    assert run.wait() == [0, 0], run.tail()
    seen = Outcome(run)
    assert "disk" in seen.kinds
    reasons = " ".join(e.details[1]["reason"] for e in seen.events if e.name == "healed")
    assert "digest" in reasons or "checksum" in reasons
    seen.every_sample_once(STEPS, BATCH)
    seen.equals(undisturbed(start, kind, seed))


def test_a_training_that_lost_everybody_says_that_it_begins_from_scratch(start: Start) -> None:
    run = start("--steps", str(STEPS), *NO_HASTE, inject="stop:step=5")
    run.kill_stopped(RANKS)
    assert run.wait() == [0, 0], run.tail()
    assert "begins from scratch" in run.tail()


def test_half_of_a_model_without_any_copy_of_the_rest_ends_the_training(start: Start) -> None:
    words = ("--kind", "hsdp", "--steps", str(STEPS), *NO_HASTE)
    run = start(*words, inject=stop(ONE_PARTS_SEATS, step=9))
    run.kill_stopped(len(ONE_PARTS_SEATS))
    assert set(run.wait()) != {0}
    assert "will not start from scratch" in run.tail()


def test_a_fault_that_comes_back_is_the_programs_own(start: Start) -> None:
    run = start("--steps", str(STEPS), inject=";".join(["exception:seat=1,step=5"] * 5))
    assert set(run.wait()) != {0}
    assert "failed 3 times in step 5" in run.tail()
