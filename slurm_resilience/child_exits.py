"""Keep the exit codes of child processes, whatever the caller has set."""

from __future__ import annotations

import signal


def keep_exit_codes() -> None:
    """Take SIGCHLD back from a caller that ignores it, as some daemons and shells do.

    The kernel keeps no child's exit code then, and Python takes each one for 0: a command of
    Slurm's that failed would have printed nothing and gone well.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
