"""`sres evidence`: save what a node can tell, for the one who looks at its machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import msgspec

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.shared_options import config_option
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import UsageError, WireError
from slurm_resilience.wire.evidence_files import evidence_files, evidence_in_words
from slurm_resilience.wire.frames import UNREADABLE
from slurm_resilience.wire.messages import NodeEvidence, SendEvidence

ANSWER_SECONDS = 30.0
"""Four tools may hang for three seconds each."""
EVENTS = 1000


@click.command("evidence")
@click.argument("node")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A new directory.  [default: evidence-NODE-TIME]",
)
@config_option
@pass_cluster
def save_evidence(cluster: ClusterView, node: str, output: Path | None) -> None:
    """Save what NODE can tell: logs, findings, the state of its GPUs, its events.

    The node's sresd is asked. Only root and SlurmUser may.
    """
    names = list(cluster.named(node))
    if len(names) != 1:
        raise UsageError(f"'{node}' names {len(names)} nodes; ask one")
    name, now = names[0], SYSTEM_CLOCK.now()
    body = cluster.ask_node(name, SendEvidence.kind, SendEvidence(), ANSWER_SECONDS)
    try:
        evidence = msgspec.msgpack.decode(body, type=NodeEvidence)
    except UNREADABLE as error:
        raise WireError(f"sresd on {name} answered what cannot be read: {error}") from None
    files = evidence_files(evidence, {"node": name, "at": now})
    events = cluster.history(name, EVENTS)
    files["events.jsonl"] = "".join(msgspec.json.encode(one).decode() + "\n" for one in events)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.localtime(now))
    directory = output or Path(f"evidence-{name}-{stamp}")
    _write(directory, files)
    told = evidence_in_words(evidence)
    click.echo(f"{directory}: {told}, {len(events)} events")


def _write(directory: Path, files: dict[str, str]) -> None:
    """Write files that only the caller can read, into a new directory."""
    try:
        directory.mkdir(mode=0o700)
        # In a folder of another user's, he may put his own in the place of this one.
        folder = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_uid != os.geteuid():
                raise UsageError(f"{directory} was exchanged; name a directory of yours (--output)")
            for name, text in files.items():
                how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                number = os.open(name, how, 0o600, dir_fd=folder)
                with os.fdopen(number, "w", encoding="utf-8") as file:
                    file.write(text)
        finally:
            os.close(folder)
    except FileExistsError:
        raise UsageError(f"{directory} exists; name another one with --output") from None
    except OSError as error:
        raise UsageError(f"{directory} cannot be written: {error.strerror}") from None
