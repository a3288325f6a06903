"""The launcher's command line: torchrun's flags, and a few of our own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.launcher import launch
from slurm_resilience.launcher.request import start

_UNUSED = {
    "monitor_interval": "a dead rank is known at once, without looking for it",
    "rdzv_conf": "there is no rendezvous server to configure",
    "start_method": "every rank is a process of its own",
    "event_log_handler": "what happens is written to stderr",
    "local_addr": "the mesh listens on all addresses",
    "signals_to_handle": "SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are passed on",
    "logs_specs": "there is one kind of logs",
    "numa_binding": "bind with srun --cpu-bind or --mem-bind",
    "duplicate_stdout_filters": "the files of --tee hold everything",
    "duplicate_stderr_filters": "the files of --tee hold everything",
}
"""Flags of torchrun that are accepted, and why nothing comes of them."""


def _options(command: Any) -> Any:
    """torchrun's flags that are accepted without effect."""
    for name in _UNUSED:
        command = click.option(f"--{name.replace('_', '-')}", name, hidden=True)(command)
    return click.option("--run-path", is_flag=True, hidden=True)(command)


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,
        "ignore_unknown_options": False,
        "auto_envvar_prefix": "PET",  # torchrun's
        "token_normalize_func": lambda word: word.replace("_", "-"),
        "max_content_width": 100,
    },
    epilog="Unknown here and known to torchrun: --rdzv-conf and others are accepted, with a note.",
)
@click.option("--nnodes", metavar="N|MIN:MAX", help="Nodes.  [default: the step's, else 1]")
@click.option(
    "--nproc-per-node",
    "--nproc",
    "nproc",
    # Its short name is not what click would make the variable's name of.
    envvar="PET_NPROC_PER_NODE",
    metavar="N|gpu|cpu|auto",
    help="Ranks per node.  [default: 1]",
)
@click.option("--node-rank", type=int, help="This node's.  [default: the step's]")
@click.option(
    "--rdzv-backend", metavar="dir|peers", help="Shared directory, or none. c10d: mapped."
)
@click.option("--rdzv-endpoint", metavar="DIR|HOST:PORT,…", help="The directory, or every node.")
@click.option("--rdzv-id", help="Names the run.  [default: job, restart and step]")
@click.option("--secret-file", metavar="FILE", help="Hex; common to all nodes.  [$SRES_SECRET]")
@click.option("--standalone", is_flag=True, help="One node, whatever the environment says.")
@click.option(
    "--max-restarts",
    default=10,
    show_default=True,
    type=click.IntRange(0),
    help="Replacements of a seat's process within the window, before the training ends.",
)
@click.option(
    "--restart-window",
    default=3600.0,
    show_default=True,
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="0: the whole life.",
)
@click.option(
    "--restart",
    type=click.Choice(["auto", "rank", "all"]),
    default="auto",
    show_default=True,
    help="What is started again when a rank has failed. auto: all ranks where they are "
    "in a process group of torch's, and the program does not recover by itself; else that rank.",
)
@click.option(
    "--standby",
    type=click.IntRange(0, 64),
    help="Warm processes that wait to replace a dead one; 0: none.  [default: 1]",
)
@click.option(
    "--standby-import",
    multiple=True,
    metavar="MODULE",
    help="What a standby, or the warm interpreter, imports in addition to torch; may be repeated.",
)
@click.option(
    "--warm/--no-warm",
    default=None,
    help="Start ranks again by forks of one interpreter that has imported torch.  "
    "[default: for programs that use torch and not this library]",
)
@click.option("-m", "--module", is_flag=True, help="The script is a Python module.")
@click.option("--no-python", is_flag=True, help="The script is a program of its own.")
@click.option("--recipe", metavar="FILE.toml", help="Train by a recipe; no script is needed.")
@click.option("--pre-train-script", metavar="PATH", help="Run once on each node before.")
@click.option("--pre-train-args", default="", metavar="WORDS", help="Split as a shell would.")
@click.option("--post-train-script", metavar="PATH", help="Run once after; $SRES_EXIT_CODE.")
@click.option("--post-train-args", default="", metavar="WORDS", help="Split as a shell would.")
@click.option("--log-dir", metavar="DIR", help="For -r and -t.  [default: a temporary one]")
@click.option(
    "-r",
    "--redirects",
    default="0",
    metavar="STD",
    help="Output into files only: 0 none, 1 stdout, 2 stderr, 3 both, or 0:1,1:3.",
)
@click.option(
    "-t", "--tee", default="0", metavar="STD", help="Into files, and shown with a prefix."
)
@click.option("--local-ranks-filter", metavar="0,1", help="Show only these local ranks' output.")
@click.option("--role", default="default", show_default=True, help="Prefix of --tee.")
@click.option("--master-addr", help="For scripts that make their first group themselves.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="The same.")
@click.option(
    "--shutdown-timeout",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="From SIGTERM, or from an exception that ends a rank, to SIGKILL.  "
    "[default: 15 and 60; after a SIGTERM from outside unlimited]",
)
@click.option("--virtual-local-rank", is_flag=True, help="Each rank sees one GPU, as number 0.")
@_options
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def cli(**given: Any) -> int:
    """Start the ranks of this node, and keep their seats filled.

    One launcher for each node, with torchrun's flags:

    \b
        python -m slurm_resilience.launcher --nproc-per-node 8 train.py ARGS…
        srun --ntasks-per-node=1 python -m slurm_resilience.launcher --nproc-per-node 8 train.py

    A rank that dies is replaced by a warm standby. SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 are passed
    on to the ranks; a second SIGINT kills them.
    """
    for name, why in _UNUSED.items():
        if given[name] is not None:
            launch.say(f"note: --{name.replace('_', '-')} is not used: {why}")
    return start(given, dict(os.environ))


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code. Errors are one line."""
    try:
        code = cli.main(
            None if argv is None else list(argv), prog_name="sres-run", standalone_mode=False
        )
    except SresError as error:
        launch.say(f"error: {error}")
        return error.exit_code
    except click.ClickException as error:
        launch.say(f"error: {error.format_message()}")
        return UsageError.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0
