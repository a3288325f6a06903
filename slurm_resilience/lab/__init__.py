"""A real Slurm cluster on one machine: its nodes are namespaces, and their power can be cut.

    with Lab.up(LabSpec(nodes=3, network=True)) as lab:
        lab.power_off("n2")

The names are loaded when first used: a node's init and the programs that enter a node live in this
package too, and start in milliseconds because they load nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurm_resilience.lab.api import Lab
    from slurm_resilience.lab.spec import LabSpec

__all__ = ["Lab", "LabSpec"]


def __getattr__(name: str) -> Any:
    if name == "Lab":
        from slurm_resilience.lab.api import Lab

        return Lab
    if name == "LabSpec":
        from slurm_resilience.lab.spec import LabSpec

        return LabSpec
    raise AttributeError(name)
