"""`sres deepcheck watch|request|sweep|here`: have deep checks run when they are due."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.deepcheck.deepcheck_options import (
    limit_option,
    log_options,
    only_option,
    profile_option,
    seconds_option,
    set_aside_option,
)
from slurm_resilience.cli.shared_options import (
    NumberRange,
    config_option,
    hostlist_argument,
    optional_hostlist_argument,
)
from slurm_resilience.cli.tables import tell

if TYPE_CHECKING:
    from slurm_resilience.slurm.maintenance import MaintenanceClient

LOOK_SECONDS = 10.0
"""Between two looks at the cluster: jobs that wait for a node do so for no longer."""
END_SECONDS = 60.0
"""A run that is ended gives its nodes back within this time."""
DAY_SECONDS = 86400.0


def _door(cluster: ClusterView) -> MaintenanceClient:
    from slurm_resilience.slurm.maintenance import MaintenanceClient

    return MaintenanceClient(cluster.config.slurm_bin)


@click.command("watch")
@optional_hostlist_argument
@click.option(
    "--every",
    "every_days",
    type=NumberRange(0, 3650),
    default=7,
    show_default=True,
    help="Days after which a node that has passed is checked again; 0: never.",
)
@click.option(
    "--after-jobs",
    "job_hours",
    type=NumberRange(0, 8760),
    default=0,
    show_default=True,
    help="Hours after which a node that has run a job is checked again; 0: never.",
)
@click.option(
    "--at-once",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Nodes that are checked at the same time.",
)
@only_option
@seconds_option
@limit_option(60)
@set_aside_option
@log_options
@click.option(
    "--speed-every",
    "speed_hours",
    type=NumberRange(0, 8760),
    default=0,
    show_default=True,
    help="Hours after which the speeds of all idle nodes are measured again; 0: never.",
)
@click.option("--once", is_flag=True, help="Begin what is due now, wait for its end, and exit.")
@config_option
@pass_cluster
def watch_deep_checks(
    cluster: ClusterView,
    hostlist: str | None,
    every_days: float,
    job_hours: float,
    at_once: int,
    only: tuple[str, ...],
    seconds: float,
    limit_minutes: int,
    set_aside: bool,
    log_dir: str,
    node_log: str,
    speed_hours: float,
    once: bool,
) -> None:
    """Check nodes (all) when it is due, and give way to jobs.

    Due are nodes that were asked for (`sres deepcheck request`), that have had no deep check, whose
    driver, kernel or firmware has changed, that have run jobs (--after-jobs), and those whose last
    one is long ago. Only idle nodes are taken, and none of a partition in which jobs wait; a run is
    ended when jobs come to wait.
    Reservations of killed runs are removed. It needs an operator's rights in Slurm.
    """
    from slurm_resilience.clock import SystemClock
    from slurm_resilience.deepcheck.pacing.deep_watch import DeepPace, DeepWatch

    words = [f"--seconds={seconds:g}", f"--limit={limit_minutes}"]
    words += [f"--log-dir={log_dir}", f"--node-log={node_log}"]
    words += [f"--only={','.join(only)}"] if only else []
    words += ["--set-aside"] if set_aside else []
    nodes = frozenset(cluster.named(hostlist)) if hostlist else None
    pace = DeepPace(
        DAY_SECONDS * every_days,
        at_once,
        limit_minutes,
        nodes,
        3600.0 * job_hours,
        3600.0 * speed_hours,
    )
    begin, clock = _beginner(words, cluster.config_path), SystemClock()
    watch = DeepWatch(_door(cluster), clock, pace, begin, lambda: _changed(cluster), tell)
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        while not stop.is_set():
            watch.look()
            if once and not watch.is_running:
                return
            clock.wait(stop, LOOK_SECONDS / 10 if once else LOOK_SECONDS)
    finally:
        watch.end(END_SECONDS)
        for number, handler in before.items():
            signal.signal(number, handler)


def _beginner(
    words: Sequence[str], config: str | None
) -> Callable[[str, Sequence[str]], subprocess.Popen[bytes]]:
    """Return what starts `sres deepcheck run` or `speed` over some nodes."""
    from slurm_resilience.slurm.hostlists import fold

    common = [f"--config={config}"] if config else []

    def begin(what: str, names: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "slurm_resilience.cli.main", "deepcheck", what]
        own = [*words, *common] if what == "run" else common
        # In a session of its own: Ctrl-C is for the watch, which ends the run in order.
        return subprocess.Popen(
            [*command, fold(names), *own], stdin=subprocess.DEVNULL, start_new_session=True
        )

    return begin


def _changed(cluster: ClusterView) -> frozenset[str]:
    """Return the nodes whose sresd finds other software than at their last deep check; none while
    sresctld does not answer."""
    from slurm_resilience.deepcheck.pacing.due_nodes import changed_nodes

    data, _ = cluster.try_status()
    return changed_nodes(data or {})


@click.command("request")
@hostlist_argument
@config_option
@pass_cluster
def request_deep_check(cluster: ClusterView, hostlist: str) -> None:
    """Have `sres deepcheck watch` check nodes as soon as they are idle.

    It labels them deep-check-status=Requested in their Comment, which needs an operator's rights.
    """
    from slurm_resilience.clock import SYSTEM_CLOCK
    from slurm_resilience.deepcheck.deep_marks import REQUESTED, DeepMarks
    from slurm_resilience.errors import SlurmError

    troubles: list[str] = []
    marks = DeepMarks(_door(cluster), SYSTEM_CLOCK.now, troubles.append)
    marks.mark((name, REQUESTED) for name in cluster.named(hostlist))
    if troubles:
        raise SlurmError(troubles[0])


@click.command("sweep")
@config_option
@pass_cluster
def sweep_reservations(cluster: ClusterView) -> None:
    """Remove reservations that killed runs have left behind.

    Ours are known by name and mark, and are removed when no job was in them for two minutes. It
    looks for so long.
    """
    from slurm_resilience.clock import SystemClock
    from slurm_resilience.deepcheck.pacing.deep_watch import DeepPace, DeepWatch
    from slurm_resilience.deepcheck.pacing.left_behind import UNUSED_SECONDS

    def begin(what: str, names: Sequence[str]) -> subprocess.Popen[bytes]:
        raise AssertionError(what, names)

    clock = SystemClock()
    pace = DeepPace(0.0, 0, 0, frozenset())
    sweep = DeepWatch(_door(cluster), clock, pace, begin, frozenset, click.echo)
    deadline = clock.monotonic() + UNUSED_SECONDS
    while True:
        sweep.clear_up()
        if clock.monotonic() > deadline:
            return
        clock.wait(threading.Event(), min(LOOK_SECONDS, deadline - clock.monotonic() + 0.1))


@click.command("here")
@click.argument("node", required=False)
@only_option
@seconds_option
@profile_option
@click.option(
    "--allow-unjudged", is_flag=True, help="Exit with 0 also where a check could not judge."
)
def check_here(
    node: str | None,
    only: tuple[str, ...],
    seconds: float,
    profile: str,
    allow_unjudged: bool,
) -> int:
    """Run the instance level on this machine, without Slurm.

    It is made for `recovery.validate`, which appends the node's name, and for a machine that is not
    in Slurm yet: whatever runs there is not looked at.
    """
    from slurm_resilience.deepcheck.deep_results import (
        FAILED_EXIT_CODE,
        DeepOutcome,
        DeepState,
        end_of,
    )
    from slurm_resilience.deepcheck.deep_run import UNJUDGED_EXIT_CODE
    from slurm_resilience.deepcheck.instance.this_node import check_this_node
    from slurm_resilience.deepcheck.step_lines import CheckEnded, StepMessage
    from slurm_resilience.deepcheck.step_requests import InstanceRequest
    from slurm_resilience.deepcheck.tool_call import ended_by_signals

    name = node or os.environ.get("SLURMD_NODENAME") or os.uname().nodename

    def tell(message: StepMessage) -> None:
        if isinstance(message, CheckEnded) and message.result.outcome is not DeepOutcome.ABSENT:
            click.echo(f"{message.result.check} {message.result.outcome}: {message.result.text}")

    request = InstanceRequest(only=only, seconds=seconds, profile=profile)
    with ended_by_signals():
        state, reason = end_of(check_this_node(request, name, tell))
    # The last line is kept with the node's validation.
    click.echo(f"{name}: {state}{f': {reason}' if reason else ''}")
    if state is DeepState.PASSED or (state is DeepState.UNJUDGED and allow_unjudged):
        return 0
    return FAILED_EXIT_CODE if state is DeepState.FAILED else UNJUDGED_EXIT_CODE
