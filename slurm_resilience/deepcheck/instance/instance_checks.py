"""The checks of the instance level, in the order in which they run: the quick ones first."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_resilience.deepcheck.instance.cpu_stress import CPU_STRESS
from slurm_resilience.deepcheck.instance.dcgm_levels import DCGM_R2, DCGM_R4
from slurm_resilience.deepcheck.instance.disk_speed import DISK
from slurm_resilience.deepcheck.instance.efa_loopback import EFA_LOOPBACK
from slurm_resilience.deepcheck.instance.hardware import EFA_COUNT, GPU_COUNT, NEURON
from slurm_resilience.deepcheck.instance.instance_check import InstanceCheck
from slurm_resilience.deepcheck.instance.local_collectives import COLLECTIVES
from slurm_resilience.deepcheck.instance.neuron_collectives import NEURON_COLLECTIVES
from slurm_resilience.deepcheck.instance.neuron_training import NEURON_TRAINING
from slurm_resilience.deepcheck.instance.torch_burn import CPU_BURN, GPU_BURN
from slurm_resilience.errors import UsageError

INSTANCE_CHECKS: tuple[InstanceCheck, ...] = (
    GPU_COUNT,
    EFA_COUNT,
    NEURON,
    CPU_BURN,
    CPU_STRESS,
    DISK,
    EFA_LOOPBACK,
    NEURON_TRAINING,
    NEURON_COLLECTIVES,
    COLLECTIVES,
    GPU_BURN,
    DCGM_R2,
    DCGM_R4,
)


def chosen(only: Sequence[str]) -> tuple[InstanceCheck, ...]:
    """Return the checks to run.

    Args:
        only: names; empty: all that run by default.

    Raises:
        UsageError: there is no check of that name.
    """
    known = {check.name: check for check in INSTANCE_CHECKS}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise UsageError(f"no deep check '{unknown[0]}' of a node; there are {', '.join(known)}")
    if not only:
        return tuple(check for check in INSTANCE_CHECKS if check.by_default)
    return tuple(check for name, check in known.items() if name in only)
