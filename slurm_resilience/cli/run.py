"""`sres run -- srun …`: stand in for `srun --auto-resume=1` where there is no plugin."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.errors import MissingTool, UsageError

_AS_WRITTEN = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(context_settings=_AS_WRITTEN, options_metavar="--")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="srun [OPTIONS] PROGRAM ...")
@pass_cluster
def run(cluster: ClusterView, command: tuple[str, ...]) -> int:
    """Start a step and keep it alive: after a hardware failure it is started again.

    Everything after `srun` is srun's own. Inside a batch script or salloc:

      sres run -- srun --nodes=4 train.sh
    """
    if not command or Path(command[0]).name != "srun":
        what = f"'{command[0]}' is not srun" if command else "srun is missing"
        raise UsageError(f"{what}; write: sres run -- srun [srun's options] program [arguments]")
    from slurm_resilience.resume import main as resume

    if cluster.config_path:
        os.environ["SRES_CONFIG"] = cluster.config_path
    srun = _named(command[0]) if "/" in command[0] else resume.find_srun(os.environ)
    return resume.run(srun, command[1:])


def _named(path: str) -> str:
    found = shutil.which(path)
    if found is None:
        raise MissingTool(f"{path} is not a program; write srun to have it found on PATH")
    return str(Path(found).resolve())
