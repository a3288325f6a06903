"""One save, from the copies in host memory to a directory with its final name.

All ranks of the group do this at the same time, each in a thread of its own::

    open    agree on the step and the directory, or that one of them could not copy in time
    write   DCP: every rank its own file, fsynced
    sum     every rank reads back what it wrote: size and CRC-32
    finish  one rank: manifest, fence, rename, fsync of the parent
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import threading
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.training.checkpoint import manifest as manifests
from slurm_resilience.training.checkpoint import names
from slurm_resilience.training.checkpoint.agreement import PartFailed, SaveAgreement
from slurm_resilience.training.checkpoint.catalog import CheckpointCatalog
from slurm_resilience.training.checkpoint.manifest import Damaged, Manifest, ManifestEntry
from slurm_resilience.training.checkpoint.staging import StagedPlanner

_METADATA = ".metadata"


class Skipped(Exception):
    """Some rank was still writing the last save; none of them does this one."""


class Fenced(Exception):
    """A later attempt has begun: this one must not write any more."""


class SaveJob(NamedTuple):
    """The work of a writing thread."""

    step: int
    planner: StagedPlanner | None
    """None: the last save was still under way, nothing was copied."""
    group: dist.ProcessGroup | None
    broken_off: threading.Event
    """Set when its ranks part."""
    decided: threading.Event
    """Set when its ranks have agreed to write it, or it has ended."""
    began: float
    """On the monotonic clock."""

    def parted(self, timeout: float) -> bool:
        """Tell whether its ranks part, within so many seconds."""
        return self.group is not None and self.broken_off.wait(timeout)


class _Opening(NamedTuple):
    step: int
    ready: bool
    name: str


def me() -> names.SaveOwner:
    """Return this process as a writer, with a new serial."""
    from slurm_resilience.resume import attempt

    return names.SaveOwner(attempt.token(), socket.gethostname(), os.getpid(), secrets.token_hex(4))


def current() -> bool:
    """Tell whether this attempt may still write."""
    from slurm_resilience.resume import attempt

    return attempt.is_current()


def refusal() -> str:
    """Return the reason for which this attempt may not write, in words."""
    from slurm_resilience.resume import attempt

    directory = os.environ.get("SRES_DIR", "")
    if (Path(directory) / attempt.FENCE).exists():
        return "a later attempt has begun"
    return f"{directory} is gone, or not to be seen, which says whether a later attempt has begun"


def report(step: int) -> None:
    """Tell the supervisor that training can go on from here."""
    from slurm_resilience.resume import attempt

    attempt.report(step)


def leads(job: SaveJob) -> bool:
    """Tell whether this rank speaks for all. A group that is gone has no ranks."""
    with contextlib.suppress(Exception):
        return SaveAgreement(job.group).leads
    return False


def write(job: SaveJob, catalog: CheckpointCatalog) -> Path:
    """Do one save; every rank of the group calls this.

    Args:
        job: its copies.
        catalog: the directory to write to.

    Returns:
        The finished directory.

    Raises:
        Skipped: a rank was not ready.
        Fenced: another attempt has taken over.
        PartFailed, CheckpointException, RuntimeError, OSError: it failed; nothing has got a final
            name.
    """
    team = SaveAgreement(job.group)
    own = names.temporary(job.step, me())
    said = team.gather(_Opening(job.step, job.planner is not None, own))
    if {one.step for one in said} != {job.step}:
        raise PartFailed(f"ranks save different steps: {sorted({one.step for one in said})}")
    if job.planner is None or not all(one.ready for one in said):
        busy = [rank for rank, one in enumerate(said) if not one.ready]
        raise Skipped(f"rank {busy[0]} was still writing the one before")
    job.decided.set()
    name = said[0].name
    catalog.in_flight.add(name)
    try:
        return _write(job, job.planner, team, catalog, catalog.path / name)
    finally:
        catalog.in_flight.discard(name)


def _write(
    job: SaveJob,
    planner: StagedPlanner,
    team: SaveAgreement,
    catalog: CheckpointCatalog,
    directory: Path,
) -> Path:
    try:
        dcp_save(
            {},
            storage_writer=FileSystemWriter(directory, sync_files=True),
            planner=planner,
            process_group=team.group,
            no_dist=team.group is None,
        )
        files = {
            name: entry
            for part in team.together(lambda: _sums(directory, team))
            for name, entry in part.items()
        }
        manifest = Manifest(job.step, team.world, files, str(torch.__version__), SYSTEM_CLOCK.now())
        finished: list[Path | None] = team.together(
            lambda: _finish(directory, manifest, catalog) if team.leads else None
        )
    except (PartFailed, CheckpointException):
        # All ranks have agreed on the failure, so no rank writes there any more.
        if team.leads:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    if finished[0] is None:
        raise Fenced
    return finished[0]


def _sums(directory: Path, team: SaveAgreement) -> dict[str, ManifestEntry]:
    own = [path.name for path in directory.glob(f"__{team.rank}_*")]
    if team.leads:
        own.append(_METADATA)
    return {name: manifests.entry(directory / name) for name in own}


def _finish(directory: Path, manifest: Manifest, catalog: CheckpointCatalog) -> Path | None:
    """Give a complete directory its name; None when this attempt may not write any more."""
    for name in manifest.files:
        if not (directory / name).exists():
            raise PartFailed(f"{directory / name} is not to be seen here; is this one shared disk?")
    manifests.write(directory, manifest)
    final = catalog.at(manifest.step)
    if not current():
        shutil.rmtree(directory, ignore_errors=True)
        return None
    if final.exists():
        with contextlib.suppress(Damaged):
            if catalog.certificates.is_doubtful(manifest.step):
                raise Damaged(f"{final}: doubtful")
            catalog.manifest(manifest.step)
            shutil.rmtree(directory, ignore_errors=True)
            return final  # the same step was saved before, by a world that came undone since
        final.rename(catalog.path / names.temporary(manifest.step, me()))
    directory.rename(final)
    manifests.sync_directory(catalog.path)
    return final
