"""Slurm's commands tell that slurmctld is away: a caller may ask again."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_resilience.errors import MissingTool, SlurmUnreachable
from slurm_resilience.model import Job
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.held_allocation import Answer


@pytest.mark.parametrize(
    "said",
    [
        "Unexpected message received for job 7",
        "slurm_update error: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Unexpected missing socket error",
        "slurm_load_jobs error: Transport endpoint is not connected",
        "sbatch: error: Batch job submission failed: Connection reset by peer",
    ],
)
def test_an_order_without_an_answer_may_be_given_again(tmp_path: Path, said: str) -> None:
    """The first is what `scontrol requeue` says, on 22.05 as on 26.05; the last three are told
    where slurmctld is killed meanwhile."""
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 7 7 N/A\n")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    for name in ("squeue", "scontrol"):
        (tmp_path / name).chmod(0o755)
    with pytest.raises(SlurmUnreachable):
        CliClient(str(tmp_path)).requeue(7)


def test_a_machine_without_slurm_conf_is_named_as_that(tmp_path: Path) -> None:
    """So 22.05 says it; the same machine may be one whose name server does not answer."""
    said = "resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\\n"
    said += "fetch_config: DNS SRV lookup failed\\nscontrol: fatal: Could not establish"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\nprintf '{said}' >&2\nexit 1\n")
    (tmp_path / "scontrol").chmod(0o755)
    with pytest.raises(SlurmUnreachable, match=r"show config: no slurm\.conf is on this machine"):
        CliClient(str(tmp_path)).info()


def test_a_command_that_a_signal_ended_may_be_given_again(tmp_path: Path) -> None:
    """libmunge dies of SIGPIPE where munged has too much to do: one of 100 sruns did."""
    (tmp_path / "squeue").write_text("#!/bin/sh\nkill -KILL $$\n")
    (tmp_path / "squeue").chmod(0o755)
    with pytest.raises(SlurmUnreachable, match="squeue --helpFormat was ended by signal 9"):
        CliClient(str(tmp_path)).job(7)


def test_a_command_dies_of_no_broken_pipe(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nkill -PIPE $$\necho ClusterName = here\n")
    (tmp_path / "scontrol").chmod(0o755)
    assert CliClient(str(tmp_path)).info().cluster == "here"


CALLS: dict[str, Callable[[CliClient], object]] = {
    "a question": lambda client: client.job(7),
    "an order": lambda client: client.requeue(7),
    "a request for nodes": lambda client: client._ask_salloc([], 1.0, None),
    "an allocation": lambda client: client.allocate_for(Job(7, 0, "RUNNING"), 1, 1.0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.ESTALE])
def test_a_machine_that_starts_no_process_now_may_be_asked_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    call: Callable[[CliClient], object],
) -> None:
    """A supervisor's job had failed for it: the batch host is short of memory as a step fails."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for name in ("squeue", "scontrol", "salloc"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(subprocess, "Popen", fails)
    with pytest.raises(SlurmUnreachable, match="cannot be started now"):
        call(CliClient(str(tmp_path)))


def test_what_is_no_program_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "squeue").write_bytes(b"\x7fELF, not quite")
    (tmp_path / "squeue").chmod(0o755)
    with pytest.raises(MissingTool, match="cannot be started"):
        CliClient(str(tmp_path)).job(7)


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("salloc: Pending job allocation 18\nsalloc: job 18 queued and waiting", 18),
        ("salloc: Pending job allocation 18\nsalloc: Granted job allocation 18", 18),
        ("salloc: error: job 17 cannot be expanded", 0),
        ("", 0),
    ],
)
def test_the_job_that_is_to_be_expanded_is_not_taken_for_its_helper(said: str, number: int) -> None:
    """A request that is withdrawn is cancelled by its number."""
    assert Answer(None, 1, said).job == number
