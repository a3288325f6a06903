"""The cause of a failure from a job's log: the earliest root, and whose it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.cli.offline import explain_command
from slurm_resilience.cli.offline.explain_command import explain_path
from slurm_resilience.errors import NotFound, SresError, UsageError
from slurm_resilience.resume.decide.signatures import (
    MOST_SHOWN,
    SIGNATURES,
    Category,
    Explanation,
    Role,
    explain,
    recognize,
)

CANCELLED = "slurmstepd: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-20T12:00:00"
EXAMPLES = {
    "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB": (
        "cuda-out-of-memory"
    ),
    "3: RuntimeError: CUDA error: device-side assert triggered": "cuda-program-error",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "gpu-memory-error",
    "NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus.": "gpu-lost",
    "[E ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: Work": (
        "nccl-watchdog"
    ),
    "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there "
    "was a network error, ncclRemoteError": "nccl-remote-error",
    "n1:12:34 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer": (
        "nccl-remote-error"
    ),
    "n1:12:34 [0] NCCL WARN Cuda failure 'out of memory'": "nccl-error",
    "RuntimeError: [../gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:29501": "peer-closed",
    "n1:12 [0] NET/IB : Got completion from peer 10.0.0.2 with error 12": "fabric-error",
    "Bus error (core dumped)": "bus-error",
    "RuntimeError: DataLoader worker is killed by signal: Bus error. It is possible that "
    "dataloader's workers are out of insufficient shared memory (shm)": "shared-memory-full",
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/x'": "missing-file",
    "srun: error: task 1 launch failed: Slurmd could not connect IO": "not-launched",
    "srun: error: Task launch for StepId=5.1 failed on node n3: Communication": "not-launched",
    "srun: error: Unable to create step for job 5: Socket timed out on": "slurm-away",
    "srun: error: Unable to confirm allocation for job 5: Unexpected missing socket": "slurm-away",
    "AssertionError: loss scale": "assertion",
    "python: x.c:3: main: Assertion `a == b' failed.": "assertion",
    "step 12 loss: nan": "not-a-number",
    "Loss is nan, stopping training": "not-a-number",
    "ModuleNotFoundError: No module named 'apex'": "import",
    "OSError: [Errno 28] No space left on device": "storage",
    "2: ValueError: too many values": "python-error",
    "srun: error: n2: task 3: Segmentation fault": "srun-task-ended",
    "srun: error: n2: task 3: Out Of Memory": "srun-out-of-memory",
    f"{CANCELLED} DUE TO TIME LIMIT ***": "time-limit",
    f"{CANCELLED} ***": "cancelled",
    "srun: error: Node failure on n2": "node-failure",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ": "launcher-summary",
}


@pytest.mark.parametrize("line", EXAMPLES)
def test_lines_as_programs_print_them(line: str) -> None:
    seen = recognize(line)
    assert seen is not None
    assert seen.signature == EXAMPLES[line]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 12 loss: 2.31",
        "loss 0.31 nanoseconds 5",
        "no errors so far",
        "[rank0]: saved a checkpoint to /data/x",
        "sres: 12:00:00 leaving node n2 (NVRM: Xid (PCI:0000:04:00): 79): ending the step",
        "Terror: no",
    ],
)
def test_lines_that_say_nothing_of_a_failure(line: str) -> None:
    assert recognize(line) is None


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[rank5]: ValueError: x", 5),
        ("3: ValueError: x", 3),
        ("[default2]:ValueError: x", 2),
        ("[Rank 7] Watchdog caught collective operation timeout", 7),
        ("ValueError: x", None),
    ],
)
def test_the_rank_that_a_line_names(line: str, rank: int | None) -> None:
    seen = recognize(line)
    assert seen is not None
    assert seen.rank == rank


def test_every_signature_is_told_of_once() -> None:
    names = [signature.name for signature in SIGNATURES]
    assert len(set(names)) == len(names)
    assert {signature.role for signature in SIGNATURES} == set(Role)


def test_the_documentation_has_every_signature() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "explain.md").read_text()
    for known in SIGNATURES:
        row = f"| `{known.name}` | {known.role} | {known.category} | {known.meaning} |"
        assert row in text, row
    assert all(f"| `{category}` |" in text for category in Category if category != Category.NONE)


LOG = """\
step 1 loss: 2.0
[rank3]: torch.OutOfMemoryError: CUDA out of memory.
[rank0]: torch.distributed.DistBackendError: NCCL error in: x, ncclRemoteError
[rank1]: [Rank 1] Watchdog caught collective operation timeout
srun: error: n2: task 3: Exited with exit code 1
"""


def test_the_earliest_root_names_the_cause_and_the_rank() -> None:
    (failure,) = explain(LOG.splitlines())
    assert (failure.category, failure.rank, failure.lines) == (Category.OUT_OF_MEMORY, 3, 4)
    assert failure.root is not None
    assert (failure.root.number, failure.root.signature) == (2, "cuda-out-of-memory")


def test_a_cascade_before_the_root_is_no_root() -> None:
    first, second, third, *rest = LOG.splitlines()
    (failure,) = explain([first, third, second, *rest])
    assert (failure.category, failure.rank) == (Category.OUT_OF_MEMORY, 3)


def test_a_cascade_alone_has_no_culprit() -> None:
    (failure,) = explain(LOG.splitlines()[2:])
    assert (failure.category, failure.rank, failure.root) == (Category.TRANSIENT, None, None)


def test_a_confirmation_alone_explains_nothing() -> None:
    (failure,) = explain(["srun: error: n2: task 3: Killed"])
    assert (failure.category, failure.root) == (Category.UNKNOWN, None)


@pytest.mark.parametrize(
    "between",
    [
        "sres: 12:00:00 starting attempt 2 on n[1-2]",
        "sres: attempt 2 starts on n[1-2]",
        "sres: ──── requeued: start number 2, 12:00:00 ────────",
    ],
)
def test_each_attempt_has_a_failure_of_its_own(between: str) -> None:
    failures = list(explain([*LOG.splitlines(), between, "0: AssertionError: x"]))
    assert [failure.category for failure in failures] == [Category.OUT_OF_MEMORY, Category.BUG]


def test_an_error_that_comes_before_its_attempt_is_told_as_recovered_is_that_attempt_s() -> None:
    failures = list(
        explain(
            [
                "srun: error: n2: task 1: Killed",
                "sres: 12:00:00 starting attempt 2 on n[1-2]",
                "slurmstepd-n2: error: execve(): /w/train: No such file or directory",
                "sres: ──── recovered: attempt 2, 12:00:00 ─────────",
                "srun: error: n2: task 1: Exited with exit code 2",
            ]
        )
    )
    assert [failure.category for failure in failures] == [Category.UNKNOWN, Category.BUG]


def test_a_flood_is_counted_and_not_kept() -> None:
    (failure,) = explain(["ValueError: x"] * 5000)
    assert (failure.lines, len(failure.others)) == (5000, MOST_SHOWN)


@given(st.lists(st.text()))
def test_any_text_can_be_explained(lines: list[str]) -> None:
    assert all(isinstance(failure, Explanation) for failure in explain(lines))


# -- the command ------------------------------------------------------------------------------


def run(*args: str) -> str:
    result = CliRunner().invoke(explain_path, args, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.output


def test_the_command_says_it_to_people(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    shown = run(str(log))
    assert "failure 1: out-of-memory: a GPU has too little memory" in shown
    assert "rank       3" in shown


def test_the_command_says_it_to_programs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(LOG.encode() + b"\xff\xfe 50%\r 60%\rAssertionError: x\n")
    data = json.loads(run(str(log), "--format", "json"))
    (failure,) = data["failures"]
    assert (failure["category"], failure["rank"], failure["lines"]) == ("out-of-memory", 3, 5)
    assert data["skipped_bytes"] == 0


def test_a_log_without_a_failure(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("all is well\n")
    assert run(str(log)) == "no line that is known to go with a failure\n"


def test_of_a_large_log_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_command, "READ_BYTES", 1000)
    log = tmp_path / "log"
    log.write_text("ValueError: early\n" + "x" * 5000 + "\n" + "\n" * 100 + "AssertionError: x\n")
    data = json.loads(run(str(log), "--format", "json"))
    assert [failure["root"]["signature"] for failure in data["failures"]] == ["assertion"]
    assert data["skipped_bytes"] > 4000


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    refused: dict[str, type[SresError]] = {"absent": NotFound, "pipe": UsageError}
    refused["empty"] = NotFound  # a directory is looked through for dumps
    for name, error in refused.items():
        with pytest.raises(error):
            run(str(tmp_path / name))
