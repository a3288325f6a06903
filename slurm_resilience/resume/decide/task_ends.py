"""Ends of a step's tasks, as slurmstepd told them. Pure.

The SPANK plugin (`spank/task_report.c`) sends one datagram when a node's tasks begin, and one for
each task that ends::

    sres1 TOKEN began STEP NODE_ID NODE NODES TASKS
    sres1 TOKEN ended STEP NODE_ID TASK WAIT_STATUS OUT_OF_MEMORY SECONDS

An end is told again until it is answered, a few times::

    sres1 TOKEN heard STEP TASK
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

import msgspec

DATAGRAM_BYTES = 600
MOST_KEPT = 16
"""Ends of one step that outlive it."""
_VERSION = b"sres1"
_PLAIN_ENDS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL})
"""Signals by which people, Slurm and srun end tasks; a task that fails gets others."""
_KILLED = 128 + signal.SIGKILL
_CRASHES = frozenset(
    128 + number
    for number in (
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGKILL,
        signal.SIGSEGV,
        signal.SIGSYS,
    )
)
"""Exit codes by which a shell between Slurm and the program tells the signal that ended it. Not
SIGTERM's: programs that are asked to end save their state, and choose that code."""


class NodeBegan(msgspec.Struct, frozen=True):
    """A node's first task is about to become the program."""

    step: int
    node_id: int
    node: str
    nodes: int = 0
    """Number of nodes of the step; 0: an older plugin on that node does not tell."""
    tasks: int = 0
    """The same."""


class TaskEnd(msgspec.Struct, frozen=True):
    """One task has ended."""

    step: int
    node_id: int
    task: int
    """Its number among the step's tasks (SLURM_PROCID)."""
    code: int
    """As a shell shows it (128 + n for signal n)."""
    by_signal: bool = False
    out_of_memory: bool = False
    """The kernel killed a process of this step on this node for want of memory."""
    at: float = 0.0
    """By the node's clock, seconds since the epoch."""
    node: str = ""
    """Empty: the node did not say that its tasks began."""

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def crashed(self) -> bool:
        """Return whether a signal or want of memory ended it, and no exit code of its own."""
        return self.by_signal or self.out_of_memory

    @property
    def failed_by_itself(self) -> bool:
        """Return whether no person and no other program can have ended it so."""
        ended_from_outside = self.by_signal and self.code - 128 in _PLAIN_ENDS
        return self.failed and (self.out_of_memory or not ended_from_outside)


def parse(datagram: bytes) -> tuple[str, NodeBegan | TaskEnd] | None:
    """Return the token and what was told; None: it is no datagram of ours."""
    words = datagram.split(b" ")
    if len(datagram) > DATAGRAM_BYTES or len(words) < 4 or words[0] != _VERSION:
        return None
    try:
        token = words[1].decode("ascii")
        if words[2] == b"began" and len(words) in (6, 8):
            counts = [_number(word) for word in words[6:]]
            return token, NodeBegan(
                _number(words[3]), _number(words[4]), words[5].decode(), *counts
            )
        if words[2] == b"ended" and len(words) == 9:
            return token, _task_end(words[3:])
    except (ValueError, OverflowError):
        return None
    return None


def answer(token: str, end: TaskEnd) -> bytes:
    """Return what tells slurmstepd that it was heard.

    Args:
        token: as it came with the end.
        end: as it came.
    """
    return b"%s %s heard %d %d" % (_VERSION, token.encode(), end.step, end.task)


def _number(word: bytes) -> int:
    number = int(word)
    if not word.isdigit() or number >= 1 << 32:
        raise ValueError(f"{word!r} is no number of 32 bits")
    return number


def _task_end(words: list[bytes]) -> TaskEnd:
    status = _number(words[3])
    if words[4] not in (b"0", b"1"):
        raise ValueError(f"{words[4]!r} is neither 0 nor 1")
    # As wait(2) has it: the signal in the lowest seven bits, a core dump's mark, the exit code.
    number = status & 0x7F
    if status > 0xFFFF or number == 0x7F:
        raise ValueError(f"{status} is no status of a process that has ended")
    code = 128 + number if number else status >> 8
    return TaskEnd(
        step=_number(words[0]),
        node_id=_number(words[1]),
        task=_number(words[2]),
        code=code,
        by_signal=number != 0 or code in _CRASHES,
        out_of_memory=words[4] == b"1",
        at=float(words[5]),
    )


def first_failure(ends: Iterable[TaskEnd]) -> TaskEnd | None:
    """Return the task whose end comes before, and so explains, those of the others.

    Args:
        ends: in the order in which they were told.
    """
    failed = [end for end in ends if end.failed]
    by_itself = [end for end in failed if end.failed_by_itself]
    return next(iter(by_itself or failed), None)


def node_that_failed(ends: Sequence[TaskEnd], crashed_on: str = "") -> str:
    """Return the only node with tasks that failed by themselves; empty: several did, or none.

    SIGKILL tells little by itself: Slurm ends tasks by it, and so does a guard of a node's memory.
    A task that got it failed first where the others were ended by SIGTERM for it, and it may have
    where they failed after it.

    Args:
        ends: in the order in which they were told, each with its node.
        crashed_on: the node of the task for whose crash we ended the others; empty: we did not.
    """
    failed = [end for end in ends if end.failed]
    own = [end for end in failed if end.failed_by_itself]
    before_own = failed[: failed.index(own[0])] if own else failed
    killed = {end.node for end in before_own if end.code == _KILLED}
    if own:
        nodes = killed | {end.node for end in own}
    elif crashed_on in killed:
        nodes = {crashed_on}
    else:
        nodes = killed if killed != {end.node for end in failed} else set()
    return nodes.pop() if len(nodes) == 1 else ""


def representative(ends: Sequence[TaskEnd]) -> tuple[TaskEnd, ...]:
    """Return the ends that are worth keeping: those of failed tasks, the explaining one first.

    Args:
        ends: in the order in which they were told.
    """
    first = first_failure(ends)
    if first is None:
        return ()
    others = [end for end in ends if end.failed and end is not first]
    return (first, *others[: MOST_KEPT - 1])
