"""The words with which Slurm's commands are asked. Pure."""

from __future__ import annotations

SHOW_NODES = ("scontrol", "show", "node", "-a", "-d", "-o")
SHOW_CONFIG = ("scontrol", "show", "config")
HELP_FORMAT = ("squeue", "--helpFormat")
JOB_COLUMNS = "JobID:16,Requeue:8,RestartCnt:12,BatchFlag:8"
"""squeue -O: what -o cannot print; fixed width, numbers only."""
JOB_COLUMNS_EXCLUSIVE = f"{JOB_COLUMNS},Exclusive:8"
"""The same where squeue has this field: its `%h` says NO for every job there (seen on 26.05)."""
PREEMPT_COLUMNS = "JobID:16,PreemptTime:32"
JOB_FIELDS = "AUTBDhbPaqvLNj"
"""squeue's letters: id, uid, state, batch host, nodes, sharing, GRES per node, partition, account,
quality of service, reservation, time left, node list (untruncated), name."""


def job_format(mark: str) -> str:
    """squeue -o for `parse.jobs`.

    Args:
        mark: a word that no user can foresee; it stands before each field.
    """
    return "".join(f"{mark}%{letter}" for letter in JOB_FIELDS)


def list_jobs(*which: str) -> tuple[str, ...]:
    """Return squeue with the words that choose jobs; a format follows.

    Array tasks are jobs of their own; %A is each one's real id.
    """
    return ("squeue", "-a", "-r", "-h", *which)


def one_job(job_id: int) -> tuple[str, str]:
    """Return the words that choose this job."""
    return ("-j", str(int(job_id)))
