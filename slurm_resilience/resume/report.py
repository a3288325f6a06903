"""Write the job's log: one block for each failure, one line for the rest.

Everything goes to standard error, prefixed like srun's own messages; standard output belongs to
the program.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience.clock import Clock, SystemClock
from slurm_resilience.resume.decide.goodput import Goodput, in_words

_CLOCK: Clock = SystemClock()
_PREFIX = "sres: "
_TITLE = "what was done "
"""The longest title of a line in a block."""
_UNLIMITED = 1_000_000


class RecoveryBlock(msgspec.Struct, frozen=True):
    """The way from one attempt to the next. Times are seconds since the epoch; 0: never."""

    what: str
    nodes: tuple[str, ...]
    done: str
    attempt: int
    step_ended: float
    nodes_ready: float
    relaunched: float
    noticed: float
    from_step: int = -1
    lost: str = ""
    """Work that is done once more, in words; empty: it is not known."""


def say(text: str) -> None:
    """Write one line, with the time of day, by which it is found in the daemons' own logs."""
    _write(f"{_time_of_day()} {text}")


def _time_of_day() -> str:
    return time.strftime("%H:%M:%S", time.localtime(_CLOCK.now()))


def _to_standard_error(text: str) -> None:
    """Write a line; a closed file is no reason to fail, as it is none for srun."""
    with contextlib.suppress(OSError):
        lines = fold_line(text, _terminal_width() - len(_PREFIX))
        whole = "".join(f"{_PREFIX}{line}\n" for line in lines)
        write_all(2, memoryview(whole.encode(errors="surrogateescape")))


def write_all(number: int, data: memoryview) -> None:
    """Write to an open file, however slowly it takes it.

    Raises:
        OSError: it is closed, or full.
    """
    while data:
        try:
            data = data[os.write(number, data) :]
        except BlockingIOError:
            # A process with the same terminal or pipe has made it non-blocking.
            poll = select.poll()
            poll.register(number, select.POLLOUT)
            poll.poll()


def _terminal_width() -> int:
    """Return the columns of standard error; a log has room for any line."""
    try:
        return os.get_terminal_size(2).columns or _UNLIMITED
    except OSError:
        return _UNLIMITED


def fold_line(text: str, width: int) -> list[str]:
    """Return the lines in which a text fits a terminal, set in below its beginning. Pure.

    Args:
        text: a line of a block, or one that begins with the time of day.
        width: columns.
    """
    indent = len("00:00:00 ") if text[:2].isdigit() else len(_TITLE)
    if len(text) <= width or width < 2 * len(_TITLE) or text.startswith("─"):
        return [text]
    # Blanks stay as they are, in the title and in what people gave a name.
    import textwrap  # late: few lines are longer than a terminal is wide

    return textwrap.wrap(
        text,
        width,
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


_write: Callable[[str], None] = _to_standard_error


@contextlib.contextmanager
def written_to(take_line: Callable[[str], None]) -> Iterator[None]:
    """Hand the lines of this process to another reader, for the simulator."""
    global _write
    before, _write = _write, take_line
    try:
        yield
    finally:
        _write = before


def block(recovery: RecoveryBlock) -> None:
    """Write the block after a failure."""
    took = recovery.relaunched - recovery.noticed
    ended = recovery.step_ended - recovery.noticed
    ready = recovery.nodes_ready - recovery.step_ended
    where = _restart_point(recovery.from_step)
    long = f"{took:.1f} s (step ended {max(0, ended):.1f} s, nodes ready {max(0, ready):.1f} s)"
    _say_block(
        f"recovered: attempt {recovery.attempt}",
        recovery.what,
        recovery.done,
        long,
        f" {where}",
        recovery.lost,
    )


def requeued(
    number: int, what: str, nodes: str, seconds: float, from_step: int, lost: str = ""
) -> None:
    """Write the block of a job that runs again after a requeue.

    Args:
        number: how often the job has been started.
        what: the fault that it was requeued for.
        nodes: the job's nodes now.
        seconds: from the requeue to now.
        from_step: the last step that the program reported; -1: none.
        lost: work that is done once more, in words; empty: it is not known.
    """
    done = f"the job was requeued; now on {nodes}"
    where = _restart_point(from_step)
    _say_block(
        f"requeued: start number {number}", what, done, f"{seconds:.1f} s", f" {where}", lost
    )


def _restart_point(step: int) -> str:
    if step >= 0:
        return f"from step {step} (the last one reported)"
    return "from the program's own last checkpoint"


def summary(goodput: Goodput, attempts: int, requeues: int) -> None:
    """Write the block at the end of a program that had faults.

    Args:
        goodput: where the time went.
        attempts: how many were made.
        requeues: of the job.
    """
    share, lost = in_words(goodput)
    what = f"{attempts} attempts" if attempts != 1 else "1 attempt"
    what += f", {requeues} requeues" if requeues > 1 else ", 1 requeue" if requeues else ""
    _write(f"──── the end: {what}, {_time_of_day()} ".ljust(72, "─"))
    _write(f"goodput       {share}")
    _write(f"time lost     {lost}")
    _write("─" * 72)


def hang(what: str, culprit: str, stacks: Sequence[str], done: str, directory: str) -> None:
    """Write the block of a hang.

    Args:
        what: since when nothing goes on.
        culprit: the rank and node at fault, in words.
        stacks: where processes stand.
        done: what is done about it.
        directory: where all of it is kept; empty: nowhere.
    """
    _write(f"──── hang: {what}, {_time_of_day()} ".ljust(72, "─"))
    _write(f"culprit       {culprit}")
    for line in stacks:
        _write(f"stands        {line}")
    if directory:
        _write(f"kept          sres explain {directory}")
    _write(f"what is done  {done}")
    _write("─" * 72)


class HealedBlock(msgspec.Struct, frozen=True):
    """Seats of a living step that were lost and filled again. Seconds since the loss."""

    what: str
    done: str
    seats: tuple[int, ...]
    went_on: float | None
    """The others stepped without these seats; None: they did not."""
    nodes_ready: float
    started: float
    joined: float
    step: int = -1
    step_before: int = -1
    """The newest step before the loss."""


def healed(block: HealedBlock) -> None:
    """Write the block after seats were filled again."""
    others = (
        "the survivors did not go on without them"
        if block.went_on is None
        else f"survivors went on after {block.went_on:.1f} s"
    )
    ready, started = max(0.0, block.nodes_ready), max(0.0, block.started)
    long = (
        f"{others}; joined after {block.joined:.1f} s "
        f"(node ready {ready:.1f} s, step started {started:.1f} s)"
    )
    seats = ",".join(map(str, block.seats))
    _say_block(f"healed: seats {seats}", block.what, block.done, long, _where(block))


def _where(block: HealedBlock) -> str:
    at = f" at step {block.step}" if block.step >= 0 else ""
    if block.step < block.step_before:
        # From the disk, or from nothing: the ranks have said which.
        return f"{at}; it had been at step {block.step_before}"
    return f"{at}, from memory" if at else ""


def _say_block(title: str, what: str, done: str, long: str, where: str, lost: str = "") -> None:
    _write(f"──── {title}, {_time_of_day()} ".ljust(72, "─"))
    _write(f"what failed   {what}")
    _write(f"what was done {done}")
    if lost:
        _write(f"what was lost {lost}")
    _write(f"how long      {long}")
    _write(f"training      goes on{where}")
    _write("─" * 72)


class EventLog:
    """The supervisor's events in `$SRES_EVENTS`, one JSON object a line (for the demo)."""

    def __init__(self, path: str, clock: Clock = _CLOCK) -> None:
        self._path = Path(path) if path else None
        self._clock = clock

    def write(self, event: str, **data: Any) -> None:
        """Append an event, with the time; once the file cannot be written, nothing any more."""
        if self._path is None:
            return
        import json  # late: few ask for events; not msgspec, which writes no blank behind a colon

        line = json.dumps({"at": self._clock.now(), "event": event} | data)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            say(f"{self._path} cannot be written: {error}")
            self._path = None
