"""Run a command inside a lab's node, such that it looks like a child of the caller.

``enter SOCKET PLACE USER CWD -- COMMAND…`` asks the keeper for a handle on the place, forks, and
the child steps into the place's namespaces (a PID namespace can only be entered by forking).
Signals are passed on, the exit status is repeated, and the command never outlives this process.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import select
import signal
import sys

from slurm_resilience.errors import SresError
from slurm_resilience.lab.client import handle
from slurm_resilience.lab.machines import linux

CANNOT_RUN = 126
NOT_FOUND = 127
_ALL = linux.NEWNS | linux.NEWUTS | linux.NEWIPC | linux.NEWNET | linux.NEWPID | linux.NEWTIME


def main() -> None:
    """Enter, run, and end as the command ended."""
    path, place, user, directory, _, *command = sys.argv[1:]
    try:
        target = handle(path, place)
    except SresError as error:
        print(f"lab: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # Processes and time take effect for children only; the child does the rest itself, so that
    # this process holds nothing of the lab.
    linux.setns(target, linux.NEWPID | linux.NEWTIME)
    life, ours = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        _become(target, user, directory, command, life)
    os.close(target)
    _end_like(_relay(child))


def _become(target: int, user: str, directory: str, command: list[str], life: int) -> None:
    try:
        linux.setns(target, _ALL & ~(linux.NEWPID | linux.NEWTIME))
        os.close(target)
        if user:
            _become_user(user)
        # After the change of user, which clears it. The parent may be gone already; getppid would
        # not tell, as it is outside, but the pipe's other end does.
        linux.die_with_parent(signal.SIGKILL)
        if select.select([life], [], [], 0)[0]:
            os._exit(CANNOT_RUN)
        try:
            os.chdir(directory)
        except OSError:
            os.chdir("/")
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvp(command[0], command)
    except FileNotFoundError as error:
        print(f"lab: error: {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(NOT_FOUND)
    except (OSError, KeyError) as error:
        print(f"lab: error: cannot run {command[0]}: {error}", file=sys.stderr)
        os._exit(CANNOT_RUN)


def _become_user(user: str) -> None:
    # Looked up in here: the lab has people of its own.
    known = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    os.initgroups(known.pw_name, known.pw_gid)
    os.setresgid(known.pw_gid, known.pw_gid, known.pw_gid)
    os.setresuid(known.pw_uid, known.pw_uid, known.pw_uid)
    os.environ.update(HOME=known.pw_dir, USER=known.pw_name, LOGNAME=known.pw_name)


def _relay(child: int) -> int:
    while True:
        got = signal.sigwaitinfo(signal.valid_signals())
        if got.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                # Ctrl-Z: stop as well, so that the shell sees its job stopped.
                os.kill(os.getpid(), signal.SIGSTOP)
                os.kill(child, signal.SIGCONT)
            elif pid:
                return status
        elif got.si_code <= 0:
            # Sent by a process. What the terminal sends, it sends to the child too.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, got.si_signo)


def _end_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    # Killed: end by the same signal, without a second core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.kill(os.getpid(), -code)
    os._exit(128 - code)
