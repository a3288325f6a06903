"""Reboot the lab node that this runs on, as Slurm's RebootProgram, and do nothing else."""

from __future__ import annotations

import sys

from slurm_resilience.lab.machines.linux import reboot_this_node


def main() -> None:
    """reboot(2), or one line that says why not."""
    try:
        reboot_this_node()
    except OSError as error:
        sys.exit(f"reboot-node: {error}")
