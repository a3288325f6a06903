"""sresd: the health agent of one node."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import psutil

from slurm_resilience import __version__, config, daemon_log
from slurm_resilience.agent.daemon import Daemon
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.child_exits import keep_exit_codes
from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import SresError
from slurm_resilience.health.check_registry import refuse_unknown_names
from slurm_resilience.lifecycle import identity
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.trusted_paths import refuse_at_start

ROOT = 0
"""The user whose sresd others are."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "path", metavar="FILE", help=config.OPTION_HELP)
@click.option(
    "--node",
    default="",
    metavar="NAME",
    help="Slurm's name of this node.  [default: the host name]",
)
@click.option(
    "--once", is_flag=True, help="Run every check once, print the results, exit with 0, 1 or 2."
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="The results of --once, for people or for programs.",
)
@click.option(
    "--log-level",
    type=click.Choice(daemon_log.LEVELS),
    default="info",
    show_default=True,
    help="Log this, and what is graver.",
)
@click.version_option(__version__, message="sresd %(version)s")
def sresd(path: str | None, node: str, once: bool, form: str, log_level: str) -> None:
    """Watch this node's health and tell sresctld."""
    recent = daemon_log.set_up(log_level)
    settings = config.load(path)
    refuse_forgeries(settings, config.chosen_file(path))
    if not settings.checks.directory:
        # It may be on a file server that is dead: the checks' thread reads it, beside the beats.
        refuse_unknown_names(settings.checks)
    name = identity.node_name(node)
    facts = SlurmFacts(CliClient(settings.slurm_bin, timeout=5.0), name)
    if once:
        sys.exit(_once(settings, name, facts, form))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    kernel_log = Path(settings.agent.kernel_log)
    with only_reader(kernel_log):
        code = Daemon(settings, name, facts, SystemClock(), stop, recent).run(kernel_log)
    # Not sys.exit: threads that hang in the kernel or hold a lock must not hold up the end.
    logging.shutdown()
    os._exit(code)


def refuse_forgeries(settings: config.Config, file: Path) -> None:
    """Refuse to start with what a user could have forged, of what lies on the node's own disk. The
    rest may be on a file server that is dead, and is looked at when it is used.

    Args:
        settings: of this node.
        file: from which they were read.

    Raises:
        ConfigError: one line says what it is.
    """
    agent, sysroot = settings.agent, Path(settings.agent.sysroot)
    states = (
        ("lifecycle.state_dir", settings.lifecycle.state_dir),
        ("checks.state_dir", str(sysroot / settings.checks.state_dir.lstrip("/"))),
    )
    files = (
        ("the configuration", str(file.absolute())),
        ("agent.kernel_log", agent.kernel_log),
        ("agent.nvidia_smi", agent.nvidia_smi),
        ("agent.bug_report", agent.bug_report),
    )
    refuse_at_start(states, files)


@contextlib.contextmanager
def only_reader(kernel_log: Path) -> Iterator[None]:
    """Hold this node's kernel log: of two sresd on a node, each new connection would end the
    other's, for ever, and a FIFO would give each only a part of its lines.

    Raises:
        SresError: another sresd holds it.
    """
    try:
        log_fd = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield  # the reader says what is wrong with it
        return
    try:
        fcntl.flock(log_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            _refuse_second(kernel_log, _holders(log_fd))
        else:
            logging.getLogger("sresd").warning(
                "%s cannot be locked against a second sresd: %s", kernel_log, error.strerror
            )
    try:
        yield
    finally:
        os.close(log_fd)


def _refuse_second(kernel_log: Path, holders: dict[int, int]) -> None:
    """Refuse to run beside another sresd. A user can be the holder where users may read the kernel
    log: that must keep no node without its agent.

    Raises:
        SresError: the holder is root's or this user's, or cannot be seen.
    """
    ended = [pid for pid in holders if _has_ended(pid)]
    if ended:
        # A check of it hangs in the kernel, say. It reads nothing any more.
        text = "process %d has ended, but for threads that hang in the kernel; it holds %s"
        logging.getLogger("sresd").warning(text, ended[0], kernel_log)
        return
    ours = [pid for pid, uid in holders.items() if uid in (ROOT, os.geteuid())]
    if ours or not holders:
        which = f"process {ours[0]} holds" if ours else "it holds"
        raise SresError(
            f"another sresd runs on this node ({which} {kernel_log}): stop it first "
            "(`systemctl stop sresd`)"
        )
    pid, uid = next(iter(holders.items()))
    logging.getLogger("sresd").warning(
        "process %d of user %d holds %s: it is no sresd", pid, uid, kernel_log
    )


def _has_ended(pid: int) -> bool:
    """Tell whether a process has ended, and only threads of it are left."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _holders(log_fd: int) -> dict[int, int]:
    """Return the processes that hold a file by flock, with their users; -1: it has ended, and left
    the file to a child."""
    holders = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            # `1: FLOCK  ADVISORY  WRITE 1234 00:05:11 0 EOF`; of overlays the device differs.
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].endswith(f":{os.fstat(log_fd).st_ino}"):
                pid = int(fields[4])
                try:
                    holders[pid] = psutil.Process(pid).uids().real
                except psutil.Error:
                    holders[pid] = -1
    return holders


def _once(settings: config.Config, name: str, facts: SlurmFacts, form: str) -> int:
    # Only here: what prints tables stays out of the daemon's memory.
    from slurm_resilience.agent import once

    results = once.run(settings, facts, SystemClock())
    if form == "json":
        click.echo(once.as_json(name, results))
    else:
        once.print_table(name, results)
    return once.exit_code(results)


def main() -> None:
    """Console entry: expected errors become one line and an exit code."""
    keep_exit_codes()
    try:
        sresd(standalone_mode=False)
    except click.ClickException as error:
        print(f"sresd: error: {error.format_message()} (see `sresd --help`)", file=sys.stderr)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except SresError as error:
        print(f"sresd: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
