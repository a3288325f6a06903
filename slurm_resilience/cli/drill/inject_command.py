"""`sres inject`: bring a fault about, to see it found, marked and repaired."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import click

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.drill.drill_commands import ask_drill
from slurm_resilience.cli.shared_options import config_option, yes_option
from slurm_resilience.cli.tables import heading, table
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import NotPermitted, SresError, UsageError
from slurm_resilience.inject.dcgm_injection import DcgmGpu, dcgm_gpu, tell_dcgm
from slurm_resilience.inject.fault_catalogue import (
    CATALOGUE,
    GPU,
    InjectedFault,
    find_fault,
    lines_of,
)
from slurm_resilience.inject.machine_faults import (
    crash,
    end_in_lab,
    happen_in_lab,
    lab_of,
    write_lines,
)
from slurm_resilience.wire.messages import ChangeDrill

REPORT_SECONDS = 2.0
"""Until an announced fault happens: sresd reports the line that announces it at once."""


def _list_faults(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        rows = [(one.name, one.calls_for, one.meaning) for one in CATALOGUE]
        click.echo(table(("FAULT", "CALLS FOR", "TEXT"), rows))
        ctx.exit()


@click.command("inject")
@click.argument("node")
@click.argument("fault")
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_faults,
    help="List the faults.",
)
@click.option(
    "--gpu",
    metavar="ADDRESS",
    help=f"GPU to be named.  [default: the first that DCGM shows, else {GPU}]",
)
@click.option(
    "--lab",
    "lab_name",
    envvar="SRES_LAB",
    metavar="NAME",
    help="A node of this lab: its name or directory.  [default: the lab in which this runs]",
)
@click.option("--undo", is_flag=True, help="Let a fault of a lab's node that lasts end again.")
@yes_option("NODE is a real one, and this is its drill.")
@config_option
@pass_cluster
def inject(
    cluster: ClusterView,
    /,
    node: str,
    fault: str,
    gpu: str | None,
    lab_name: str | None,
    undo: bool,
    yes: bool,
) -> None:
    """Let FAULT happen to NODE, to see it found, marked and repaired.

    On a real node it runs as root on that node itself, with a drill open there (sres drill open
    NODE). Where DCGM runs, it is told of faults of GPUs as well. All that follows is marked as
    injected. In a lab a cut cable and a changed sysfs last until --undo, or until the node boots.
    """
    chosen = find_fault(fault)
    lines = lines_of(chosen, gpu or GPU)
    if os.geteuid() != 0:
        raise NotPermitted("only root may inject a fault")
    if undo:
        if lab_name is None:
            raise UsageError("--undo is for a lab's node (--lab NAME)")
        end_in_lab(chosen, lab_of(lab_name), node)
        click.echo(heading(f"{node}: {chosen.name} is over"))
        return
    if lab_name is not None:
        _into_lab(lab_name, node, chosen, lines)
    else:
        _into_this_node(cluster, node, chosen, gpu, yes)
    click.echo(
        heading(
            f"{node}: {chosen.name} injected ({chosen.meaning}); it calls for: {chosen.calls_for}; "
            f"follow it: sres node watch {node}"
        )
    )


def _into_lab(name: str, node: str, chosen: InjectedFault, lines: tuple[str, ...]) -> None:
    lab = lab_of(name)
    for line in lines:
        lab.kmsg(node, line)
    if chosen.way != "kernel-log":
        SYSTEM_CLOCK.wait(threading.Event(), REPORT_SECONDS)
        happen_in_lab(chosen, lab, node)


def _into_this_node(
    cluster: ClusterView, node: str, chosen: InjectedFault, gpu: str | None, yes: bool
) -> None:
    """Inject a fault into the machine on which this runs, if that is what is wanted."""
    if chosen.way == "cable":
        raise UsageError(f"{chosen.name} is for a lab: a node that is cut off cannot be mended")
    if chosen.way == "sysfs":
        raise UsageError(
            f"{chosen.name} is for a lab: a changed /sys would hide {node}'s hardware from its jobs"
        )
    if node not in (here := _names_of_this_machine()):
        raise UsageError(
            f"this is {here[0]}, not {node}: a fault is injected on the node itself "
            f"(ssh {node} sres inject {node} {chosen.name} --yes), or in a lab (--lab NAME)"
        )
    if not yes:
        raise UsageError(
            f"{node} is a real node, and will be treated as one with {chosen.name} "
            f"(it calls for: {chosen.calls_for}); add --yes if that is wanted"
        )
    told = ask_drill(cluster, node, ChangeDrill())
    if not (told.is_always or told.seconds_left > REPORT_SECONDS):
        raise UsageError(
            f"no drill is open on {node}, so nothing would come of it: sres drill open {node}"
        )
    # Without an open drill nothing would mark what DCGM tells as injected.
    is_for_dcgm = bool(chosen.dcgm) and told.seconds_left > REPORT_SECONDS
    known = _gpu_of_dcgm(gpu) if is_for_dcgm else None
    address = gpu or (known.address if known else GPU)
    write_lines(Path(cluster.config.agent.kernel_log), lines_of(chosen, address))
    if known is not None:
        _into_dcgm(known, chosen)
    if chosen.way != "kernel-log":
        SYSTEM_CLOCK.wait(threading.Event(), REPORT_SECONDS)
        crash()


def _gpu_of_dcgm(address: str | None) -> DcgmGpu | None:
    try:
        return dcgm_gpu(address)
    except SresError as error:
        click.echo(f"DCGM is not told: {error}", err=True)
        return None


def _into_dcgm(gpu: DcgmGpu, chosen: InjectedFault) -> None:
    try:
        tell_dcgm(gpu, chosen.dcgm)
    except SresError as error:
        click.echo(f"DCGM is not told of all: {error}", err=True)
        return
    told = f"DCGM was told of it too (its GPU {gpu.number}); its watches show an Xid until its host"
    click.echo(heading(f"{told} engine is restarted (systemctl restart nvidia-dcgm)"))


def _names_of_this_machine() -> tuple[str, ...]:
    given = os.environ.get("SLURMD_NODENAME", "")
    name = socket.gethostname()
    return tuple(dict.fromkeys(one for one in (given, name.partition(".")[0], name) if one))
