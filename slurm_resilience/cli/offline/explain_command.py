"""`sres explain`: name the cause of a failure from a log, or the culprit of a hang from dumps."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from slurm_resilience.cli.shared_options import format_option
from slurm_resilience.cli.tables import field, heading, plain, print_json
from slurm_resilience.errors import NotFound, UsageError
from slurm_resilience.flight.culprit import HangDiagnosis, diagnose_hang
from slurm_resilience.flight.dump_files import UnreadFile, nodes_of_ranks, read_dumps
from slurm_resilience.resume.decide.signatures import (
    LINE_LIMIT_CHARACTERS,
    Explanation,
    LogLine,
    Role,
    explain,
)
from slurm_resilience.resume.progress.hang_evidence import (
    HangEvidence,
    NamedCulprit,
    culprit_in_words,
    name_culprit,
    stack_lines,
)
from slurm_resilience.resume.progress.stack_gathering import diagnose_dumps, read_kept
from slurm_resilience.slurm.hostlists import expand, fold

READ_BYTES = 256 * 1024 * 1024
"""As much of the end of a longer log."""
SHOWN_UNREAD_FILES = 5
SHOWN_STACKS = 20
_TITLES = {Role.ROOT: "root", Role.CASCADE: "cascade", Role.CONFIRMATION: "confirms"}


@click.command("explain")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--nodes",
    metavar="HOSTLIST",
    help="The nodes of the dumps' ranks, in their order, with as many ranks on each.",
)
@format_option
def explain_path(path: Path, nodes: str | None, form: str) -> None:
    """Name the cause of a failure, or the culprit of a hang.

    PATH is a job's log: the cause of each failure in it, and the rank that failed first. Or it is a
    directory with the dumps of PyTorch's Flight Recorder, one of each rank: the rank that keeps the
    others waiting; or the one in which srun --auto-resume=1 has kept what it found of a hang.
    Nothing else is read: neither Slurm nor sresctld is asked.
    """
    if path.is_dir():
        kept = read_kept(path)
        if kept is not None:
            _explain_kept(msgspec.structs.replace(kept, directory=str(path)), form)
            return
        _explain_dumps(path, nodes, form)
    elif nodes is not None:
        raise UsageError("--nodes belongs to a directory of dumps; a log names its ranks itself")
    else:
        _explain_log(path, form)


def _explain_kept(evidence: HangEvidence, form: str) -> None:
    dumps = diagnose_dumps(evidence)
    culprit = name_culprit(evidence, dumps)
    if form == "json":
        told = msgspec.to_builtins(dumps) if dumps is not None else None
        view = {"culprit": msgspec.to_builtins(culprit), "dumps": told}
        print_json({"directory": evidence.directory, **view, **msgspec.to_builtins(evidence)})
        return
    click.echo("\n".join(_kept_in_words(evidence, culprit, dumps)))


def _kept_in_words(
    evidence: HangEvidence, culprit: NamedCulprit, dumps: HangDiagnosis | None
) -> Iterator[str]:
    stall = evidence.stall
    yield f"hang: no step for {stall.seconds:.0f} s after step {stall.last_step}"
    yield field("culprit", culprit_in_words(culprit), indent=2)
    slowest = f"the longest wait before it was {stall.longest:.1f} s"
    yield field("limit", f"{stall.limit:.0f} s; {slowest}", indent=2)
    for line in stack_lines(evidence, culprit.ranks)[:SHOWN_STACKS]:
        yield field("stands", line, indent=2)
    for one in dumps.evidence if dumps is not None else ():
        yield field("evidence", one, indent=2)
    if evidence.silent_nodes:
        yield field("silent", f"{fold(evidence.silent_nodes)} did not answer", indent=2)
    for signs in evidence.signs:
        if signs.ras:
            yield field("NCCL", f"what its own service (RAS) told on {signs.node}:", indent=2)
            yield "\n".join(f"    {plain(line)}" for line in signs.ras.splitlines())
            break


def _explain_dumps(directory: Path, hostlist: str | None, form: str) -> None:
    found = read_dumps(directory)
    if not found.dumps:
        why = f": {found.unread[0].file}: {found.unread[0].reason}" if found.unread else ""
        raise NotFound(f"no dump of PyTorch's Flight Recorder in {directory}{why}")
    nodes = nodes_of_ranks(found.dumps, expand(hostlist)) if hostlist is not None else None
    diagnosis = diagnose_hang(found.dumps.values(), nodes)
    if form == "json":
        unread = [msgspec.to_builtins(one) for one in found.unread]
        print_json(
            {"directory": str(directory), **msgspec.to_builtins(diagnosis), "unread": unread}
        )
        return
    click.echo("\n".join(_hang_in_words(diagnosis, found.unread)))


def _hang_in_words(diagnosis: HangDiagnosis, unread: tuple[UnreadFile, ...]) -> Iterator[str]:
    yield heading(f"{diagnosis.kind}: {diagnosis.reason}")
    for culprit in diagnosis.culprits:
        node = f" on {culprit.node}" if culprit.node else ""
        yield field("culprit", f"rank {culprit.rank}{node}", indent=2)
    for line in diagnosis.evidence:
        yield field("evidence", line, indent=2)
    yield field("read", f"the dumps of {diagnosis.ranks} of {diagnosis.world_size} ranks", indent=2)
    for one in unread[:SHOWN_UNREAD_FILES]:
        yield field("left out", f"{one.file}: {one.reason}", indent=2)
    if len(unread) > SHOWN_UNREAD_FILES:
        yield field("left out", f"and {len(unread) - SHOWN_UNREAD_FILES} more", indent=2)


def _explain_log(logfile: Path, form: str) -> None:
    try:
        # It lies in a user's folder, who may put a pipe in its place between two looks.
        number = os.open(logfile, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise UsageError(f"{logfile} is no regular file")
            skipped = _go_to_the_end_part(file)
            failures = list(explain(_lines(file)))
    except FileNotFoundError:
        raise NotFound(f"{logfile} does not exist") from None
    except OSError as error:
        raise UsageError(f"{logfile} cannot be read: {error.strerror}") from None
    if form == "json":
        data = {
            "log": str(logfile),
            "skipped_bytes": skipped,
            "failures": [msgspec.to_builtins(failure) for failure in failures],
        }
        print_json(data)
        return
    if skipped:
        size = READ_BYTES // (1024 * 1024)
        click.echo(f"only the last {size} MiB were read; line numbers count from there")
    if not failures:
        click.echo("no line that is known to go with a failure")
    for number, failure in enumerate(failures, 1):
        click.echo("\n".join(_shown(number, failure)))


def _go_to_the_end_part(file: BinaryIO) -> int:
    """Go to the part that is read; return the number of bytes before it."""
    size = os.fstat(file.fileno()).st_size
    skipped = max(0, size - READ_BYTES)
    if skipped:
        file.seek(skipped)
        file.readline(LINE_LIMIT_CHARACTERS)
    return skipped


def _lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines, each as far as it is looked at; a carriage return ends one too."""
    left = READ_BYTES
    within = False
    while left > 0 and (data := file.readline(LINE_LIMIT_CHARACTERS)):
        left -= len(data)
        begins, within = not within, not data.endswith(b"\n")
        if begins:
            # A progress bar's last state is what a terminal would show.
            text = data.decode("utf-8", "replace").rstrip("\r\n")
            yield text.rpartition("\r")[2]


def _shown(number: int, failure: Explanation) -> Iterator[str]:
    yield heading(f"failure {number}: {failure.category}: {failure.reason}")
    if failure.root is not None:
        yield field("rank", "not named" if failure.rank is None else failure.rank, indent=2)
        yield field("root", _line(failure.root), indent=2)
    for other in failure.others[:5]:
        yield field(_TITLES[other.role], _line(other), indent=2)
    more = failure.lines - len(failure.others[:5]) - (failure.root is not None)
    if more:
        yield f"  and {more} more"


def _line(line: LogLine) -> str:
    return f"line {line.number} ({line.signature}): {line.text}"
