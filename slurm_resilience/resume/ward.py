"""The fence around one supervised srun: raised for each attempt, mended when it was removed."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.model import Job
from slurm_resilience.resume import fence, report
from slurm_resilience.resume.attempt import read_progress
from slurm_resilience.resume.srun.environment import Attempt
from slurm_resilience.slurm.client import SlurmClient

NO_FENCE = "a cut-off node is ended by its sresd alone"


class Ward:
    """The shared directory of all attempts."""

    def __init__(self, client: SlurmClient, job: Job, restarts: int) -> None:
        """
        Args:
            client: asked whether the job still lives this life, before a fence is mended.
            job: the job that the steps run in.
            restarts: how often it was requeued before.
        """
        self._client = client
        self._job = job.id
        self.restarts = restarts
        self._base = _working_directory()
        self.directory = fence.open_directory(self._base, job.id, os.getpid())
        """Every node of the job sees it; empty: there is none to be had."""
        self._token = ""

    def begin(self) -> None:
        """Nobody of an earlier life of this job may write any more."""
        if self.directory:
            fence.revoke_older(self._base, self._job, self.directory)
        else:
            report.say(f"no directory to fence in: {NO_FENCE}")

    def around(self, attempt: Attempt) -> Attempt:
        """Raise the fence of an attempt; without a directory where that cannot be done."""
        self._token = attempt.token
        problem = fence.raise_fence(self.directory, attempt.token)
        if not problem:
            return attempt
        report.say(f"no fence can be raised ({problem}): {NO_FENCE}")
        self.directory = ""
        return msgspec.structs.replace(attempt, directory="")

    def mend(self) -> None:
        """Somebody removed our directory: every program would take itself for an old attempt, and
        write no checkpoint any more. After a requeue the fence was taken from us on purpose."""
        if fence.holds(self.directory, self._token):
            return
        try:
            job = self._client.job(self._job)
        except SresError:
            return  # looked at again in a while
        if job.state != "RUNNING" or job.restarts != self.restarts:
            return
        problem = fence.raise_fence(self.directory, self._token)
        if not problem:
            report.say(f"{self.directory} had been removed, and was made again; leave it alone")

    def progress(self) -> int:
        """The last step that the program reported; -1: none."""
        return read_progress(self.directory)

    def remove(self) -> None:
        """It is over."""
        fence.remove(self.directory)


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError:
        return Path("/dev/null")  # removed meanwhile: nothing can be made in there
