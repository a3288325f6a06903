"""Find the cause of a failure among the lines of a job's log. Pure.

A failing rank drags the others along, and each of them prints an error. So every known line has a
role: a **root** names a cause, a **cascade** follows from another rank's failure, and a
**confirmation** says that something ended and not why. The earliest root names the cause and the
rank.

This explains, and decides nothing: a program may print anything.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from functools import cache

import msgspec

LINE_LIMIT_CHARACTERS = 4096
SHOWN_CHARACTERS = 200
MOST_SHOWN = 20
"""Cascades and confirmations that are kept of one failure; the others are counted."""


class Category(enum.StrEnum):
    """The kinds of causes."""

    NONE = "none"
    """The program ended well."""
    HARDWARE = "hardware"
    TRANSIENT = "transient"
    """Network, storage, preemption: the same again may well work."""
    OUT_OF_MEMORY = "out-of-memory"
    BUG = "bug"
    """The application's own."""
    USER = "user"
    TIME_LIMIT = "time-limit"
    UNKNOWN = "unknown"


class Role(enum.StrEnum):
    """The place of a line in the story of a failure."""

    ROOT = "root"
    CASCADE = "cascade"
    CONFIRMATION = "confirmation"


class Signature(msgspec.Struct, frozen=True):
    """One kind of line."""

    name: str
    category: Category
    role: Role
    pattern: str
    meaning: str
    """For people."""


_C, _R = Category, Role
SIGNATURES: tuple[Signature, ...] = (
    # Cascades first: their lines often quote the name of an error that would be a root.
    Signature(
        "nccl-watchdog",
        _C.TRANSIENT,
        _R.CASCADE,
        r"Watchdog caught collective operation timeout|NCCL watchdog thread terminated",
        "a collective was waited for too long: another rank hung, died or was late",
    ),
    Signature(
        "nccl-remote-error",
        _C.TRANSIENT,
        _R.CASCADE,
        r"ncclRemoteError|NCCL WARN .*(?:Connection closed by remote peer|Connection reset by peer)"
        r"|NCCL communicator was aborted",
        "NCCL lost another rank",
    ),
    Signature(
        "peer-closed",
        _C.TRANSIENT,
        _R.CASCADE,
        r"Connection closed by peer|Connection reset by peer|recvValue failed|sendBytes failed"
        r"|Broken pipe|failed to recv, got 0 bytes",
        "another process closed the connection",
    ),
    Signature(
        "launcher-summary",
        _C.UNKNOWN,
        _R.CONFIRMATION,
        r"ChildFailedError|Root Cause \(first observed failure\)|exitcode\s*: -?\d+ \(local_rank"
        r"|Signal \d+ \(SIG[A-Z]+\) received by PID|Sending process \d+ closing signal",
        "torchrun says which process it saw end",
    ),
    Signature(
        "srun-out-of-memory",
        _C.OUT_OF_MEMORY,
        _R.ROOT,
        r"srun: error: \S+: tasks? [\d,-]+: Out Of Memory|Detected \d+ oom[-_]kill event",
        "Slurm saw the kernel kill a task for want of memory",
    ),
    Signature(
        "srun-task-ended",
        _C.UNKNOWN,
        _R.CONFIRMATION,
        r"srun: error: \S+: tasks? [\d,-]+: |srun: (?:Job step aborted|Terminating StepId)"
        r"|srun: launch/slurm: _step_signal",
        "srun says how a task ended",
    ),
    Signature(
        "time-limit",
        _C.TIME_LIMIT,
        _R.ROOT,
        r"CANCELLED AT \S+ DUE TO TIME LIMIT",
        "Slurm ended it at its time limit",
    ),
    Signature(
        "node-failure",
        _C.HARDWARE,
        _R.ROOT,
        r"srun: error: Node failure on|CANCELLED AT \S+ DUE TO NODE FAILURE",
        "Slurm lost a node",
    ),
    Signature(
        "preemption",
        _C.TRANSIENT,
        _R.ROOT,
        r"CANCELLED AT \S+ DUE TO PREEMPTION",
        "Slurm took the nodes for another job",
    ),
    Signature(
        "cancelled",
        _C.USER,
        _R.CONFIRMATION,
        r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT ",
        "Slurm ended the tasks: for a person, or because one of them failed",
    ),
    Signature(
        "gpu-memory-error",
        _C.HARDWARE,
        _R.ROOT,
        r"uncorrectable ECC error|double[- ]bit ECC|row remap(?:ping)? fail",
        "a GPU's memory is broken (ECC)",
    ),
    Signature(
        "gpu-lost",
        _C.HARDWARE,
        _R.ROOT,
        r"GPU has fallen off the bus|NVRM: Xid \(|GPU is lost"
        r"|Unable to determine the device handle",
        "a GPU reported an error of its own (Xid), or is gone",
    ),
    Signature(
        "shared-memory-full",
        _C.OUT_OF_MEMORY,
        _R.ROOT,
        r"insufficient shared memory|unable to (?:open|write to|resize) shared memory",
        "/dev/shm is full, often by a DataLoader's workers",
    ),
    Signature(
        "bus-error",
        _C.HARDWARE,
        _R.ROOT,
        r"\bBus error\b|\bSIGBUS\b",
        "memory or a mapped file could not be read (also: /dev/shm is full)",
    ),
    Signature(
        "fabric-error",
        _C.TRANSIENT,
        _R.ROOT,
        r"IBV_WC_\w*ERR|Got completion (?:from peer .*)?with (?:error|status)[ =]\d+|ibv_\w+ failed"
        r"|NET/OFI .*(?:error|failed)|transport retry counter exceeded",
        "the InfiniBand or EFA network lost a packet or a link",
    ),
    Signature(
        "nccl-error",
        _C.TRANSIENT,
        _R.ROOT,
        r"ncclSystemError|ncclInternalError|NCCL error in|NCCL WARN (?!.*(?:deprecated|not set))",
        "NCCL failed by itself",
    ),
    Signature(
        "cuda-out-of-memory",
        _C.OUT_OF_MEMORY,
        _R.ROOT,
        r"CUDA out of memory|cuda\.OutOfMemoryError|torch\.OutOfMemoryError"
        r"|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "a GPU has too little memory for the model, the batch or the sequence",
    ),
    Signature(
        "host-out-of-memory",
        _C.OUT_OF_MEMORY,
        _R.ROOT,
        r"Out of memory: Killed process|oom-kill:|DefaultCPUAllocator: can't allocate memory"
        r"|\bMemoryError\b|Cannot allocate memory",
        "a node has too little memory",
    ),
    Signature(
        "cuda-program-error",
        _C.BUG,
        _R.ROOT,
        r"device-side assert triggered|illegal memory access|CUDA error: invalid",
        "a kernel got wrong indices or shapes",
    ),
    Signature(
        "not-a-number",
        _C.BUG,
        _R.ROOT,
        r"(?i:\bloss\b\W{0,5}(?:is|=|:)?\W{0,3}nan\b)|FloatingPointError"
        r"|Function '\w+' returned nan values|(?i:non-finite (?:loss|grad))",
        "the loss or a gradient is not a number any more",
    ),
    Signature(
        "missing-file",
        _C.BUG,
        _R.ROOT,
        r"FileNotFoundError|No such file or directory",
        "a file or program is not where it is looked for, on this node",
    ),
    Signature(
        "not-launched",
        _C.TRANSIENT,
        _R.ROOT,
        r"^srun: error: (?:task \d+ launch failed: |Task launch for StepId=\S+ failed on node )",
        "Slurm could not start a task: see slurmd's log, and whether its output's folder is there",
    ),
    Signature(
        "slurm-away",
        _C.TRANSIENT,
        _R.ROOT,
        r"^srun: error: Unable to (?:confirm allocation|create step) for job \d+: "
        r"(?:Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted"
        r"|Slurm backup controller in standby|Unexpected missing socket|Connection reset by peer)",
        "slurmctld did not answer srun, so that no task was started",
    ),
    Signature(
        "storage",
        _C.TRANSIENT,
        _R.ROOT,
        r"No space left on device|Disk quota exceeded|Stale file handle|Input/output error"
        r"|Transport endpoint is not connected",
        "a file system is full or does not answer",
    ),
    Signature(
        "import",
        _C.BUG,
        _R.ROOT,
        r"ModuleNotFoundError|ImportError|error while loading shared libraries",
        "a library is missing in this environment",
    ),
    Signature(
        "assertion",
        _C.BUG,
        _R.ROOT,
        r"AssertionError|Assertion [`'].*['`]? failed",
        "the program found its own state wrong",
    ),
    Signature(
        "segmentation-fault",
        _C.BUG,
        _R.ROOT,
        r"\bSegmentation fault\b|Caught signal 11\b",
        "a program read memory that is not its own",
    ),
    Signature(
        "interrupted",
        _C.USER,
        _R.CONFIRMATION,
        r"KeyboardInterrupt|(?:[Rr]eceived|[Gg]ot) (?:signal )?SIGTERM",
        "a process was asked to end",
    ),
    Signature(
        "python-error",
        _C.BUG,
        _R.ROOT,
        r"^(?:\[?(?:rank|Rank|default)?\s?\d+\]?:\s*)*(?:\w+\.)*[A-Z]\w*(?:Error|Exception): ",
        "an exception that the program did not catch",
    ),
)


@cache
def _any() -> re.Pattern[str]:
    """Return what every signature fits: made when a log is read, which few sruns need."""
    return re.compile("|".join(f"(?:{signature.pattern})" for signature in SIGNATURES))


@cache
def _compiled() -> tuple[tuple[Signature, re.Pattern[str]], ...]:
    return tuple((signature, re.compile(signature.pattern)) for signature in SIGNATURES)


_RANK = (
    r"^\s*\[?(?:rank|Rank|default)\s?(?P<named>\d+)\]?:|^\s*(?P<label>\d+): |"
    r"\[[Rr]ank (?P<quoted>\d+)\]"
)
_NEXT_ATTEMPT = (
    r"^sres: (?:\S+ starting attempt|attempt(?= \d+ starts on )|─+ requeued: start number) \d+"
)
"""The lines that come before an attempt: the block of its recovery may follow its first errors."""


class LogLine(msgspec.Struct, frozen=True):
    """A line of the log that a signature knows."""

    number: int
    """From 1."""
    signature: str
    category: Category
    role: Role
    text: str
    rank: int | None = None


class Explanation(msgspec.Struct, frozen=True):
    """One failure."""

    category: Category
    reason: str
    rank: int | None = None
    """The one of the earliest root; None: its line does not say."""
    root: LogLine | None = None
    others: tuple[LogLine, ...] = ()
    """Further lines about it, in the order of the log."""
    lines: int = 0
    """All of them, those that are not kept included."""


def recognize(line: str, number: int = 0) -> LogLine | None:
    """Return what a line says; None: no signature knows it.

    Args:
        line: one line of a log.
        number: of the line.
    """
    line = line[:LINE_LIMIT_CHARACTERS]
    # Our own lines quote what others said, Slurm's and sresctld's reasons among it.
    if line.startswith("sres: ") or not _any().search(line):
        return None
    signature = next(known for known, pattern in _compiled() if pattern.search(line))
    rank = re.search(_RANK, line)
    shown = "".join(char if char.isprintable() else " " for char in line).strip()
    return LogLine(
        number=number,
        signature=signature.name,
        category=signature.category,
        role=signature.role,
        text=shown[:SHOWN_CHARACTERS],
        rank=int(next(filter(None, rank.groups()))) if rank else None,
    )


def explain(lines: Iterable[str]) -> Iterator[Explanation]:
    """Yield an explanation for each failure in a log: attempts are told apart by our own lines.

    Args:
        lines: of the log, in its order.
    """
    kept: list[LogLine] = []
    root: LogLine | None = None
    count = 0
    for number, line in enumerate(lines, 1):
        if re.match(_NEXT_ATTEMPT, line):
            if count:
                yield conclude(root, kept, count)
            kept, root, count = [], None, 0
            continue
        seen = recognize(line, number)
        if seen is None:
            continue
        count += 1
        if seen.role is Role.ROOT and root is None:
            root = seen
        elif len(kept) < MOST_SHOWN:
            kept.append(seen)
    if count:
        yield conclude(root, kept, count)


def conclude(root: LogLine | None, others: Iterable[LogLine], count: int) -> Explanation:
    """Return what lines about one failure say together.

    Args:
        root: the earliest root; None: there is none.
        others: further lines.
        count: all of them.
    """
    others = tuple(others)
    if root is not None:
        meaning = next(known.meaning for known in SIGNATURES if known.name == root.signature)
        return Explanation(root.category, meaning, root.rank, root, others, count)
    cascade = next((line for line in others if line.role is Role.CASCADE), None)
    if cascade is not None:
        reason = "ranks lost others, and none of them says why: look at the one that is silent"
        return Explanation(Category.TRANSIENT, reason, None, None, others, count)
    return Explanation(
        Category.UNKNOWN, "it says that it ended, not why", None, None, others, count
    )
