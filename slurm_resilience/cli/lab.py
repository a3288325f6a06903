"""`sres lab`: a real Slurm cluster on this machine, whose power can be cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.lab import Lab, LabSpec, bring_up, state_file

F = TypeVar("F", bound=Callable[..., Any])

_WIDE = 200
_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def _which(command: F) -> F:
    """Add the options that say which lab is meant."""
    for option in (
        click.option("--name", default="lab", show_default=True, help="The lab's name."),
        click.option(
            "--dir",
            "directory",
            type=click.Path(path_type=Path),
            help="The lab's directory, where it is not in the usual place.",
        ),
    ):
        command = option(command)
    return command


def _open(name: str, directory: Path | None) -> Lab:
    # A slash makes it a directory for Lab.open, whatever it is called.
    return Lab.open(directory.absolute() if directory else name)


@click.group()
def lab() -> None:
    """Run a real Slurm cluster on this machine: nodes are namespaces, whose power can be cut."""


@lab.command()
@_which
@click.option("--nodes", type=int, required=True, help="How many nodes: n1, n2, …")
@click.option("--gres", help="Generic resources of each node, such as gpu:2 or gpu:h100:2.")
@click.option("--cpus", type=int, default=4, show_default=True, help="Processors per node.")
@click.option("--slurmdbd", is_flag=True, help="Run accounting too (MariaDB and slurmdbd).")
@click.option("--slurm-root", help="Run the Slurm of this root directory, not the machine's.")
@click.option("--network", is_flag=True, help="Give every node its own network and cable.")
@click.option("--backup", is_flag=True, help="Add a second controller, ctl2; needs --network.")
@click.option("--no-daemons", is_flag=True, help="Do not run sresctld and sresd.")
@click.option("--plugin", help="SPANK plugin; `none` for none.  [default: spank/sres.so if built]")
@click.option(
    "--lifecycle",
    help="Directory of the scripts that a node runs before it joins; `none` for none.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="A line of slurm.conf; repeatable.",
)
def up(
    name: str,
    directory: Path | None,
    nodes: int,
    gres: str | None,
    cpus: int,
    slurmdbd: bool,
    slurm_root: str | None,
    network: bool,
    backup: bool,
    no_daemons: bool,
    plugin: str | None,
    lifecycle: str | None,
    options: tuple[str, ...],
) -> None:
    """Build a lab and wait until its nodes are idle."""
    spec = LabSpec(
        nodes=nodes,
        gres=gres,
        slurmdbd=slurmdbd,
        slurm_root=slurm_root,
        network=network,
        backup=backup,
        daemons=not no_daemons,
        plugin=_or_auto(plugin),
        lifecycle=_or_auto(lifecycle),
        options=dict(_pair(option) for option in options),
        cpus=cpus,
    )
    began = SYSTEM_CLOCK.monotonic()
    console = Console(stderr=True)
    with console.status("building the lab") as shown:
        built = Lab.up(spec, name, directory, lambda text: shown.update(text))
    nodes_now: dict[str, dict[str, Any]] = built.status()["nodes"]
    joined = sum(node["state"] == "joined" for node in nodes_now.values())
    click.echo(
        f"lab '{name}' is up in {built.directory}: {joined} of {nodes} nodes joined "
        f"after {SYSTEM_CLOCK.monotonic() - began:.1f} s"
    )
    for node, seen in nodes_now.items():
        if seen["state"] != "joined":
            click.echo(f"{node} did not join: {seen['why']}", err=True)


@lab.command()
@_which
def down(name: str, directory: Path | None) -> None:
    """End a lab, dead or alive, and remove all of it."""
    bring_up.destroy(state_file.locate(directory.absolute() if directory else name))
    click.echo(f"lab '{directory or name}' is down")


@lab.command()
@_which
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="For people, or for programs.",
)
def status(name: str, directory: Path | None, form: str) -> None:
    """Show the state of a lab.

    Power, cables, boots and daemons of its nodes, and Slurm's node states.
    """
    here = _open(name, directory)
    seen = here.status()
    try:
        states = here.node_states()
    except (SresError, subprocess.TimeoutExpired) as error:  # slurmctld may be dead on purpose
        states = {}
        seen["slurm"] = str(error)
    for node, fields in seen["nodes"].items():
        fields["slurm"] = states.get(node, "")
    if form == "json":
        click.echo(json.dumps(seen, indent=1))
        return
    table = Table("node", "power", "slurm", "cable", "boots", "instance", "daemons", box=None)
    for place, fields in seen["controllers"].items():
        cable = fields["cable"] if seen["network"] else ""
        table.add_row(place, fields["state"], "", cable, "", "", _daemons(fields["daemons"]))
    for node, fields in seen["nodes"].items():
        power = fields["state"] + (f": {fields['why']}" if fields["why"] else "")
        cable = fields["cable"] if seen["network"] else ""
        words = [power, fields["slurm"], cable, str(fields["boots"]), fields["instance"]]
        table.add_row(node, *words, _daemons(fields["daemons"]))
    console = Console()
    # A pipe has no width; lines broken in the middle would be of no use to grep.
    Console(width=None if console.is_terminal else _WIDE).print(table)


@lab.command("list")
def list_labs() -> None:
    """List the labs in the usual place, /run/sres-lab."""
    labs = state_file.known()
    for name, directory, alive in labs:
        click.echo(f"{name}\t{'up' if alive else 'dead'}\t{directory}")
    if not labs:
        click.echo("no lab; `sres lab up` makes one", err=True)


def _node_command(verb: str, text: str, said: str) -> None:
    @lab.command(verb, help=text)
    @_which
    @click.argument("nodes")
    def command(name: str, directory: Path | None, nodes: str) -> None:
        here = _open(name, directory)
        with Console(stderr=True).status(f"{verb} {nodes}"):
            getattr(here, verb.replace("-", "_"))(nodes)
        click.echo(f"{nodes} {said}")


_node_command("power-off", "Cut the power of NODES: no goodbye on the network.", "powered off")
_node_command("power-on", "Switch NODES on again; their disks are kept.", "powered on, joined")
_node_command("reboot", "Power NODES off and, 2 s later, on again.", "rebooted, joined")
_node_command("replace", "Exchange NODES for new ones with empty disks.", "replaced, joined")
_node_command("cut", "Pull the network cables of NODES; they go on running.", "cut off")
_node_command("mend", "Put the cables of NODES back.", "connected again")


@lab.command()
@_which
@click.argument("nodes")
@click.argument("line")
def kmsg(name: str, directory: Path | None, nodes: str, line: str) -> None:
    """Write LINE to the kernel log of NODES.

    For example: sres lab kmsg n3 "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."
    """
    _open(name, directory).kmsg(nodes, line)


@lab.command("run", context_settings=_PASS_ON)
@_which
@click.option("--node", help="Run it on this node.  [default: the controller]")
@click.option("--user", help="Run it as this user; every lab knows alice and bob.  [default: root]")
@click.argument("command", nargs=-1, required=True)
def run_command(
    name: str, directory: Path | None, node: str | None, user: str | None, command: tuple[str, ...]
) -> None:
    """Run a command in a lab; exit with its code."""
    _become(_open(name, directory), command, node, user)


@lab.command()
@_which
@click.option("--user", help="Open it as this user.  [default: root]")
@click.argument("node", required=False)
def shell(name: str, directory: Path | None, user: str | None, node: str | None) -> None:
    """Open a shell on the controller, or on NODE."""
    _become(_open(name, directory), (os.environ.get("SHELL", "/bin/sh"),), node, user)


@lab.group()
def daemon() -> None:
    """Start and kill the daemons of a lab.

    On the controller slurmctld, slurmdbd and sresctld; on a node slurmd and sresd.
    """


@daemon.command("start")
@_which
@click.argument("which")
@click.argument("nodes", required=False)
def start_daemon(name: str, directory: Path | None, which: str, nodes: str | None) -> None:
    """Start a daemon that has ended."""
    _open(name, directory).start_daemon(which, nodes)
    click.echo(f"{which} started{f' on {nodes}' if nodes else ''}")


@daemon.command("kill")
@_which
@click.option("--signal", "word", default="TERM", show_default=True, help="Name or number.")
@click.argument("which")
@click.argument("nodes", required=False)
def kill_daemon(
    name: str, directory: Path | None, word: str, which: str, nodes: str | None
) -> None:
    """Send a signal to a daemon, which stays ended if that ends it."""
    _open(name, directory).kill_daemon(which, _signal(word), nodes)
    click.echo(f"{which}{f' on {nodes}' if nodes else ''}: signal {word} sent")


def _become(here: Lab, command: tuple[str, ...], node: str | None, user: str | None) -> None:
    argv = here.argv(command, user=user, node=node)
    os.execve(argv[0], argv, here.environment())


def _daemons(ends: dict[str, str]) -> str:
    known = ("slurmctld", "slurmdbd", "sresctld", "slurmd", "sresd")
    return ", ".join(
        name if end == "running" else f"{name} ({end})"
        for name, end in ends.items()
        if name in known
    )


def _or_auto(word: str | None) -> str | None:
    return "auto" if word is None else None if word == "none" else word


def _pair(option: str) -> tuple[str, str]:
    key, mark, value = option.partition("=")
    if not mark:
        raise UsageError(f"--option {option}: write KEY=VALUE")
    return key, value


def _signal(word: str) -> int:
    try:
        if word.isdigit():
            return int(signal.Signals(int(word)))
        return int(signal.Signals[f"SIG{word.upper().removeprefix('SIG')}"])
    except (KeyError, ValueError):
        raise UsageError(f"'{word}' is not a signal; write e.g. TERM, KILL or 9") from None
