"""`sres replay`: the verdict on a saved file."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from slurm_resilience.cli.shared_options import format_option
from slurm_resilience.cli.tables import heading, item, print_json, table
from slurm_resilience.errors import NotFound, UsageError
from slurm_resilience.health.profile_files import load_profile
from slurm_resilience.health.replay.conclusion import ReplayResult
from slurm_resilience.health.replay.recognise import replay

READ_BYTES = 256 * 1024 * 1024
"""As much of the end of a longer file."""


@click.command("replay")
@click.argument("file")
@click.option(
    "--profile",
    metavar="PROFILE",
    help="The hardware that the node should have: a node type, or a TOML file.",
)
@format_option
def replay_file(file: str, profile: str | None, form: str) -> None:
    """Judge FILE as sresd would judge the node that it came from.

    FILE is a saved log of the kernel, or the output of a tool (DCGM, nvidia-smi, Neuron, libfabric,
    InfiniBand, smartctl, ipmitool, stress-ng), which is recognised; `-` is standard input. Nothing
    but the file is read, and no daemon is needed.
    """
    expected = load_profile(profile) if profile is not None else None
    result = replay(_text(file), expected)
    if form == "json":
        print_json(msgspec.to_builtins(result))
    else:
        _print_table(result)


def _text(file: str) -> str:
    if file == "-":
        return _decoded(sys.stdin.buffer)
    path = Path(file)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{file} is no regular file")
        with path.open("rb") as opened:
            opened.seek(max(0, path.stat().st_size - READ_BYTES))
            return _decoded(opened)
    except FileNotFoundError:
        raise NotFound(f"{file} does not exist") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None


def _decoded(source: BinaryIO) -> str:
    return source.read(READ_BYTES).decode("utf-8", "replace").replace("\0", " ")


def _print_table(result: ReplayResult) -> None:
    injected = ", injected" if result.injected else ""
    click.echo(f"{result.verdict} ({result.kind}{injected})")
    rows = [
        (one.verdict, one.check, ",".join(one.codes) or "-", one.lines, one.text)
        for one in result.incidents
    ]
    if rows:
        click.echo(table(("VERDICT", "CHECK", "CODES", "LINES", "TEXT"), rows))
    elif not result.unjudged:
        click.echo(item(result.why))
    # Many incidents have the same reason, which is read once.
    reasons: dict[str, dict[str, None]] = {}
    for one in result.incidents:
        reasons.setdefault(one.why, {})[one.verdict] = None
    for why, verdicts in reasons.items():
        click.echo(heading(f"why {', '.join(verdicts)}: {why}"))
    for reason in result.unjudged:
        click.echo(heading(f"unjudged: {reason}"))
    for note in result.notes:
        click.echo(heading(f"note: {note}"))
