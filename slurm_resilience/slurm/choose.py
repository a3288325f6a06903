"""Choose the client: pyslurm for reading where it matches this Slurm, else Slurm's commands."""

from __future__ import annotations

from slurm_resilience.errors import SresError
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.client import ClusterInfo, SlurmClient
from slurm_resilience.slurm.pyslurm import PyslurmClient


def choose(cli: CliClient, info: ClusterInfo) -> tuple[SlurmClient, str]:
    """Return the client to use, and the reason in words.

    Args:
        cli: a client that works: it has just read ``info``.
        info: what slurmctld says about itself.
    """
    try:
        client = PyslurmClient(cli, info.version)
        client.nodes()
        client.jobs()
    except SresError as error:
        return cli, f"Slurm's commands ({error})"
    return client, "pyslurm for reading, Slurm's commands for the rest"
