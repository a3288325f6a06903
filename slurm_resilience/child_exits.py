"""Keep the exit codes of child processes, whatever the caller has set; errors that pass."""

from __future__ import annotations

import errno
import signal

PASSING_ERRORS = (
    errno.EAGAIN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ESTALE,
    errno.EIO,
    errno.ETIMEDOUT,
)
"""No program can be started now: memory or processes are used up, say, as those of a dead step are
still being ended, or the file system that it lies on fails for a moment."""


def keep_exit_codes() -> None:
    """Take SIGCHLD back from a caller that ignores it, as some daemons and shells do.

    The kernel keeps no child's exit code then, and Python takes each one for 0: a command of
    Slurm's that failed would have printed nothing and gone well.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
