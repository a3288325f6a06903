"""An allocation of salloc that lasts no longer than the process that asked for it.

salloc runs `cat` in it, whose input is a pipe of ours: when that ends, however this process does,
`cat` ends, and salloc gives the allocation back. An allocation without a program (`--no-shell`)
would keep its nodes for as long as the job that it is to expand may run.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Event
from typing import NamedTuple

from slurm_resilience.child_group import end_with_parent
from slurm_resilience.clock import SYSTEM_CLOCK

HOLDER = "cat"
LOOK_SECONDS = 0.05
RELEASE_SECONDS = 5.0
"""For salloc to give an allocation back, which is empty by then, or was cancelled."""
ENDS_SALLOC = signal.SIGHUP
"""salloc ends by this one alone, once its program runs. At SIGTERM it gives the allocation back and
waits on; if its thread for Slurm's messages has taken the program's end by then, it waits for ever,
in a loop that takes a whole core (salloc.c of 22.05; seen)."""
_GRANTED = re.compile(r"Granted job allocation (\d+)")
# Its own words alone: a complaint may name the job that is to be expanded.
_PENDING = re.compile(r"Pending job allocation (\d+)")
_READ_BYTES = 65536


class Answer(NamedTuple):
    """The outcome of a request."""

    held: HeldAllocation | None
    """None: there is no allocation."""
    code: int
    """salloc's exit code; 0 while it holds an allocation."""
    said: str
    """The words of salloc."""

    @property
    def job(self) -> int:
        """Return the job that salloc got, or waited for; 0: it named none."""
        found = _GRANTED.search(self.said) or _PENDING.search(self.said)
        return int(found[1]) if found else 0


class HeldAllocation:
    """A running salloc with an allocation."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def release(self) -> None:
        """Have salloc give the allocation back, if it is still there, and wait for that."""
        _close(self._process)
        try:
            self._process.wait(RELEASE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.send_signal(ENDS_SALLOC)


def ask(
    argv: Sequence[str],
    environment: Mapping[str, str],
    seconds: float,
    stop: Event | None,
) -> Answer:
    """Ask for an allocation, and hold it.

    Args:
        argv: salloc and its options.
        environment: of salloc.
        seconds: for an answer. The request is withdrawn then.
        stop: set when it is to be withdrawn; None: it is not.

    Raises:
        OSError: salloc cannot be started.
    """
    process = subprocess.Popen(
        [*argv, HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        preexec_fn=partial(end_with_parent, ENDS_SALLOC),
    )
    assert process.stdout is not None
    number = process.stdout.fileno()
    watched = select.poll()
    watched.register(number, select.POLLIN)
    deadline, said = SYSTEM_CLOCK.monotonic() + seconds, b""
    while True:
        if watched.poll(LOOK_SECONDS * 1000):
            more = os.read(number, _READ_BYTES)
            said += more
            if not more:
                _close(process)
                return Answer(None, process.wait(), said.decode(errors="replace"))
            text = said.decode(errors="replace")
            if _GRANTED.search(text):
                return Answer(HeldAllocation(process), 0, text)
        late = SYSTEM_CLOCK.monotonic() > deadline
        if late or (stop is not None and stop.is_set()):
            process.send_signal(signal.SIGKILL if late else signal.SIGTERM)


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
