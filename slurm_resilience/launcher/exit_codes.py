"""Exit codes by which a training process tells its launcher what should happen. Without torch.

Any other code that is not 0, and any signal: replace the process on its seat, unless it ended twice
in a row at the same place within a short life (an application's bug).
"""

from __future__ import annotations

import signal

DONE = 0
"""The seat's work is done; no other process takes it."""

POISONED = 75
"""Replace me: this process cannot go on (a broken CUDA context, say), but a fresh one can."""

STOP = 76
"""Do not replace me, and end the training: it gave up, and has said why."""

KILLED_BY_HAND = 130
"""The launcher's own code after a second Ctrl-C."""


def of_status(status: int) -> int:
    """Return the code that a shell shows for what `subprocess` calls a return code (128+N: signal
    N)."""
    return status if status >= 0 else 128 - status


def is_signal(code: int) -> bool:
    """Tell whether an exit code is that of a process that a signal ended."""
    return 128 < code <= 128 + signal.SIGRTMAX


def describe(code: int, exited: bool = False) -> str:
    """Name an exit code in words.

    Args:
        code: as a shell shows it.
        exited: the process ended by itself, as a shell does whose command was killed.
    """
    if code == POISONED:
        return f"exit code {code} (asks to be replaced)"
    if code == STOP:
        return f"exit code {code} (the training gave up)"
    if is_signal(code):
        try:
            name = signal.Signals(code - 128).name
        except ValueError:
            name = f"signal {code - 128}"
        return f"exit code {code} (as after {name})" if exited else name
    return f"exit code {code}"
