"""Recovery on a GPU: what the tests of faults show on processors, with tensors and NCCL there.

Ranks share one GPU: over gloo, which takes CUDA tensors too, and over NCCL where its release lets
them.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_runs import Outcome, Run
from msgspec.structs import replace

from slurm_resilience.training.inject import ONCE, parse

torch = pytest.importorskip("torch", reason="torch is not installed")

HAS_GPU = "+cpu" not in torch.__version__ and torch.cuda.is_available()

pytestmark = [
    pytest.mark.training,
    pytest.mark.gpu,
    pytest.mark.timeout(150),
    pytest.mark.skipif(not HAS_GPU, reason="no CUDA device on this machine"),
]

STEPS, BATCH = 20, 24
GLOO, EACH_GLOO, NCCL = "gloo", "cpu:gloo,cuda:gloo", "cpu:gloo,cuda:nccl"
TOGETHER = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL: several ranks may use one GPU."""
TRY_TOGETHER = Path(__file__).parent / "programs" / "nccl_one_gpu.py"
Start = Callable[..., Run]


class ThisMachine:
    """Starts launchers as a user does. Forks of a process with torch are another matter: here it
    is a GPU that they would share."""

    def launch(self, argv: list[str], env: dict[str, str], out: str) -> subprocess.Popen[bytes]:
        own = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
        command = [sys.executable, "-m", "slurm_resilience.launcher", *argv]
        with Path(out).open("ab") as file:
            return subprocess.Popen(
                command, env=own | env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )


@functools.cache
def why_no_nccl() -> str:
    """Return what keeps two ranks from one GPU over NCCL; empty: nothing does."""
    env = os.environ | {TOGETHER: "1"}
    command = [sys.executable, str(TRY_TOGETHER)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return (done.stdout.strip().splitlines() or ["NCCL says nothing"])[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*words: str, ranks: int, backend: str = GLOO, **how: Any) -> Run:
        if backend == NCCL and ranks > 1 and (why := why_no_nccl()):
            pytest.skip(f"no two ranks on one GPU over NCCL: {why}")
        env = {TOGETHER: "1", "GLOO_SOCKET_IFNAME": "lo"} | how.pop("env", {})
        patience = ("--abort-timeout", "8", "--silence", "8")
        words = ("--device", "cuda", "--backend", backend, *patience, *words)
        words = ("--steps", str(STEPS), "--batch", str(BATCH), *words)
        run = Run(
            [ThisMachine()],  # type: ignore[list-item]
            tmp_path / f"run{len(runs)}",
            *words,
            nodes=1,
            ranks=ranks,
            env=env,
            **how,
        )
        runs.append(run)
        return run

    yield begin
    for run in runs:
        run.end()


def ended(run: Run, steps: int = STEPS) -> Outcome:
    assert run.wait(100) == [0], run.tail()
    outcome = Outcome(run)
    outcome.every_sample_once(steps, BATCH)
    return outcome


def unless_refused(run: Run) -> Outcome:
    """Skip where this release of torch shards no CUDA tensors over gloo."""
    if run.wait(100) != [0]:
        found = re.search(
            "[^\n]*(unsupported|not supported|not implement)[^\n]*", run.tail(10**7), re.I
        )
        if found:
            pytest.skip(f"torch shards no CUDA tensors over gloo: {found[0].strip()[:120]}")
    return ended(run)


def processes(outcome: Outcome) -> list[int]:
    """The seat of each process that took part."""
    return sorted(event.seat for event in outcome.events if event.name == "main")


def reasons(outcome: Outcome) -> str:
    return " ".join(e.details[1]["reason"] for e in outcome.events if e.name == "healed")


def test_one_process_goes_on_after_exceptions_right_after_backward(start: Start) -> None:
    """NCCL's group is aborted, and formed anew, in the same process."""
    undisturbed = ended(start(ranks=1, backend=""))
    run = start("--fail", "0", ranks=1, backend="")
    outcome = ended(run)
    assert processes(outcome) == [0], run.tail()
    assert [event.name for event in outcome.events].count("fails") == STEPS
    outcome.equals(undisturbed)


def test_one_process_that_dies_begins_where_the_disk_has_it(start: Start, tmp_path: Path) -> None:
    def disk(name: str) -> tuple[str, ...]:
        return ("--checkpoints", str(tmp_path / name), "--every", "4")

    undisturbed = ended(start(*disk("one"), ranks=1, backend=""))
    outcome = ended(
        start(*disk("two"), ranks=1, backend="", standby=1, inject="kill:seat=0,step=9")
    )
    assert processes(outcome)[:2] == [0, 0]
    assert "disk" in outcome.kinds
    outcome.equals(undisturbed)


FAULTS = {
    # First: a limit is learnt from five steps.
    "hang": "hang:seat=1,step=8",
    "exception": "exception:seat=1,step=10",
    "exception_in_update": "exception:seat=1,step=12,phase=update",
    "kill": "kill:seat=1,step=14,phase=backward",
    "kill_in_update": "kill:seat=0,step=16,phase=update",
    "cuda": "cuda:seat=0,step=18",
}


def all_faults(kind: str) -> str:
    """Each once, in whatever process has the seat. A hang under FSDP is found late: of the ranks
    that wait in its collectives none says so."""
    chosen = [fault for name, fault in FAULTS.items() if kind == "ddp" or name != "hang"]
    rules = parse(";".join(chosen))
    return ";".join(str(replace(rule, incarnation=None)) for rule in rules)


@pytest.mark.parametrize(
    ("kind", "ranks", "backend"),
    [
        ("ddp", 2, GLOO),
        ("ddp", 4, EACH_GLOO),
        ("hsdp", 4, EACH_GLOO),
        ("ddp", 2, NCCL),
        ("ddp", 4, NCCL),
        ("hsdp", 4, NCCL),
    ],
)
def test_faults_change_nothing(
    start: Start, kind: str, ranks: int, backend: str, tmp_path: Path
) -> None:
    words = ("--kind", kind)
    undisturbed = unless_refused(start(*words, ranks=ranks, backend=backend))
    (once := tmp_path / "once").mkdir()
    run = start(
        *words,
        ranks=ranks,
        backend=backend,
        inject=all_faults(kind),
        standby=1,
        launcher=("--max-restarts", "9"),
        env={ONCE: str(once)},
    )
    outcome = ended(run)
    fired = re.findall("injected fault .*: (.*)", run.tail(10**7))
    assert sorted(fired) == sorted(map(str, parse(all_faults(kind)))), run.tail()
    outcome.equals(undisturbed)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_repeated_step_drops_the_same_units(start: Start, ranks: int) -> None:
    """The GPU's random state is that of the step's begin again."""
    backend = "" if ranks == 1 else GLOO
    undisturbed = ended(start("--dropout", "0.2", ranks=ranks, backend=backend))
    outcome = ended(start("--dropout", "0.2", "--fail", "0", ranks=ranks, backend=backend))
    assert processes(outcome) == list(range(ranks))
    outcome.equals(undisturbed)


@pytest.mark.parametrize("backend", [GLOO, NCCL], ids=["gloo", "nccl"])
def test_a_gpu_that_faults_costs_its_process_and_no_other(start: Start, backend: str) -> None:
    """An index out of range fails on the GPU, some time after the call that gave it."""
    undisturbed = ended(start(ranks=2, backend=backend))
    run = start("--out-of-range", "5:1", ranks=2, backend=backend)
    outcome = ended(run)
    assert processes(outcome) == [0, 1, 1], run.tail()
    assert "asks to be replaced" in run.tail(10**7)
    outcome.equals(undisturbed)


@pytest.mark.parametrize("backend", [GLOO, NCCL], ids=["gloo", "nccl"])
def test_a_flipped_bit_is_healed_from_the_others(start: Start, backend: str) -> None:
    words = ("--digest-every", "1")
    undisturbed = ended(start(*words, ranks=3, backend=backend))
    fault = "flip:seat=2,step=9,phase=after-update"
    run = start(*words, ranks=3, backend=backend, inject=fault)
    outcome = ended(run)
    assert processes(outcome) == [0, 1, 2]
    assert "differs from the other replicas in net.2.weight, and is healed" in run.tail()
    outcome.equals(undisturbed)


def test_two_replicas_go_back_to_copies_in_memory(start: Start) -> None:
    words = ("--digest-every", "1", "--partner-every", "3")
    undisturbed = ended(start(*words, ranks=2))
    run = start(*words, ranks=2, inject="flip:seat=1,step=10,phase=after-update")
    outcome = ended(run)
    assert "copies in memory of step" in reasons(outcome), run.tail()
    outcome.equals(undisturbed)


def test_lost_shards_come_from_the_disk_or_a_partners_memory(start: Start, tmp_path: Path) -> None:
    undisturbed = unless_refused(start("--kind", "fsdp", ranks=2, backend=EACH_GLOO))
    copies = ("--partner-every", "3", "--sleep", "0.05")
    killed = "kill:seat=1,step=8"
    outcome = ended(start("--kind", "fsdp", *copies, ranks=2, backend=EACH_GLOO, inject=killed))
    assert "memory" in outcome.kinds
    outcome.equals(undisturbed)
    disk = ("--checkpoints", str(tmp_path / "disk"), "--every", "4")
    outcome = ended(start("--kind", "fsdp", *disk, ranks=2, backend=EACH_GLOO, inject=killed))
    assert "disk" in outcome.kinds
    outcome.equals(undisturbed)


def test_an_update_does_not_wait_for_the_gpu(start: Start) -> None:
    """One that compares replicas does: here it is none of these."""
    outcome = ended(start("--forbid-sync", "--digest-every", "0", ranks=1, backend=""))
    assert "fault" not in outcome.kinds and processes(outcome) == [0]
