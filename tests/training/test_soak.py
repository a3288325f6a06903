"""Many faults in one training, at random moments. None may hang, and nothing may grow.

More of them: SRES_TEST_FAULTS=500, SRES_TEST_SEED=7; with a model in parts: SRES_TEST_KIND=hsdp.
With ranks that raise right after backward, it is always both kinds.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_runs import Event, Outcome, Run
from warm_machine import WarmMachine

pytestmark = pytest.mark.training

FAULTS = int(os.environ.get("SRES_TEST_FAULTS", "16"))
SEED = int(os.environ.get("SRES_TEST_SEED", "1"))
KIND = os.environ.get("SRES_TEST_KIND", "ddp")
STEPS_A_FAULT = 12
PATIENCE_SECONDS = 180
"""For a step: on a machine that is very busy, ranks are given up for silence as well, and each new
one imports torch."""
BATCH = 24


@pytest.fixture
def place(tmp_path: Path) -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.end()


def newest(events: list[Event]) -> int:
    return max((event.details[0] for event in events if event.name == "step"), default=0)


def world(events: list[Event]) -> int:
    """Size of the world in which the newest step was made."""
    steps = [event.details for event in events if event.name == "step"]
    return max(steps, key=lambda details: details[0])[2]


def living(events: list[Event], seat: int) -> int:
    """Process of a seat: the last that has healed."""
    return [event.pid for event in events if event.seat == seat and event.name == "healed"][-1]


def longest_lived(events: list[Event], seat: int) -> list[Event]:
    """Return the steps of the process of a seat that made the most of them: on a machine that is
    very busy, others give it up for its silence."""
    steps = [event for event in events if event.name == "step" and event.seat == seat]
    most = Counter(event.pid for event in steps).most_common(1)[0][0]
    return [event for event in steps if event.pid == most]


def least(usage: list[list[int]]) -> list[int]:
    """Return the least of threads, file descriptors and memory, each by itself."""
    return [min(column) for column in zip(*usage, strict=True)]


@pytest.mark.timeout(120 + 8 * FAULTS)
def test_many_faults_at_random_moments(
    place: list[Run], warm_machine: WarmMachine, tmp_path: Path
) -> None:
    """Nothing ends seat 0 on purpose: its threads, files and memory are compared."""
    # So many after the last fault that it never comes when the training is over: it would count.
    steps = FAULTS * STEPS_A_FAULT + 200
    # Of a model in parts, the last holder of a part may be killed before the other is back.
    disk = ("--checkpoints", str(tmp_path / "disk")) if KIND == "hsdp" else ()
    run = Run(
        [warm_machine],
        tmp_path,
        *("--steps", str(steps), "--batch", str(BATCH), "--min-world", "2", "--usage"),
        *("--max-faults", "100000", "--silence", "1.5", "--kind", KIND, *disk),
        nodes=1,
        ranks=4,
        launcher=("--max-restarts", "100000"),
    )
    place.append(run)
    chance = random.Random(SEED)
    done: list[str] = []
    for number in range(FAULTS):
        due = 10 + number * STEPS_A_FAULT + chance.randrange(STEPS_A_FAULT)
        run.until(
            lambda events, due=due: newest(events) >= due,
            PATIENCE_SECONDS,
            f"step {due} after {done}",
        )
        kind = chance.choices(["raise", "kill", "stop"], [70, 25, 5])[0]
        if kind != "raise":
            # A busy machine gives ranks up for their silence. Of two that are left both would be
            # killed, one after the other, and with them the last copy of the state.
            run.until(
                lambda events: world(events) > 2, PATIENCE_SECONDS, f"three ranks after {done}"
            )
        events = run.events()
        seat = chance.randrange(0 if kind == "raise" else 1, 4)
        number_of = {"raise": signal.SIGUSR2, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        try:
            os.kill(living(events, seat), number_of[kind])
            done.append(f"{kind} {seat}")
        except ProcessLookupError:
            done.append("(none)")  # its seat is being filled again
    assert run.wait(120) == [0], run.tail()
    seen = Outcome(run)
    seen.every_sample_once(steps, BATCH)
    assert all(len(digests) == 1 for digests in seen.digests.values()), seen.digests
    usage = [event.details[4] for event in longest_lived(seen.events, 0)]
    # Groups that died are kept for two seconds, so the least of a time counts.
    quarter = len(usage) // 4
    early, late = least(usage[quarter : 2 * quarter]), least(usage[-quarter:])
    at_most = [early[0] + 6, early[1] + 40, early[2] * 1.15 + 30_000]
    assert all(now <= limit for now, limit in zip(late, at_most, strict=True)), (early, late)


@pytest.mark.timeout(180 + 8 * FAULTS)
@pytest.mark.parametrize("seats", ["2", "1,2"])
@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_exceptions_right_after_backward_cost_no_process(
    place: list[Run], warm_machine: WarmMachine, tmp_path: Path, kind: str, seats: str
) -> None:
    """The others are in the middle of the same exchange of gradients, in every step."""
    steps = max(FAULTS // 2, 8)
    run = Run(
        [warm_machine],
        tmp_path,
        *("--steps", str(steps), "--batch", str(BATCH), "--kind", kind, "--sleep", "0"),
        *("--fail", seats, "--max-faults", "100000"),
        # So long that no rank is given up because the machine is busy.
        *("--silence", "30", "--abort-timeout", "30"),
        nodes=1,
        ranks=4,
    )
    place.append(run)
    assert run.wait(120 + 8 * FAULTS) == [0], run.tail()
    seen = Outcome(run)
    seen.every_sample_once(steps, BATCH)
    assert all(len(digests) == 1 for digests in seen.digests.values()), seen.digests
    # Of two that fail in the same step, one may be cut off before it has its own gradients.
    assert {event.details[0] for event in seen.events if event.name == "fails"} == set(range(steps))
    assert sorted(event.seat for event in seen.events if event.name == "main") == [0, 1, 2, 3]
