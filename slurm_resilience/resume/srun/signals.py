"""The signals sent to the supervisor, received in a thread of its own.

They are blocked everywhere else, so none interrupts a call to Slurm, and none is missed while the
supervisor waits. The commands that it starts inherit the mask: a Ctrl-C is for srun and for us.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

TAKEN = frozenset(
    {
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGALRM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    }
)
"""The signals that srun takes. Ctrl-Z stops both of us, as it stops srun."""
ENDING = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Each of these makes srun end its step."""


def block() -> None:
    """Hold the signals back until `receive` is called. Call it before any thread is started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, TAKEN)


def receive(on_signal: Callable[[signal.Signals, bool], None]) -> None:
    """Call ``on_signal`` for each one from now on.

    Args:
        on_signal: gets the signal, and whether srun got it too, from the same sender.
    """

    def run() -> None:
        while True:
            got = signal.sigwaitinfo(TAKEN)
            on_signal(signal.Signals(got.si_signo), _sent_to_all(got.si_code, got.si_pid))

    threading.Thread(target=run, name="signals", daemon=True).start()


def _sent_to_all(code: int, sender: int) -> bool:
    """Return whether a signal went to srun as well as to us.

    A terminal sends to its whole foreground group (a positive code is the kernel's own; kill(2) has
    0), Slurm to every process of the batch step (scancel --full).
    """
    if code > 0:
        return True
    # As the batch step's first process we may be the only receiver (scancel --batch).
    if sender == os.getppid():
        return False
    try:
        return Path(f"/proc/{sender}/comm").read_text().strip() == "slurmstepd"
    except OSError:
        return False


def end_by(number: int) -> None:
    """Die of this signal, so that the shell sees what it would have seen of srun."""
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    # sigwaitinfo above would take it from us while it is blocked in this thread.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.raise_signal(number)
