"""Tell DCGM of a fault, by its own way of injecting errors (`dcgmi test --inject`).

DCGM 3 and 4 take the same arguments and numbers of fields. What DCGM is told shows in its policies
and watches alone: NVML and the kernel log know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from slurm_resilience.errors import SresError
from slurm_resilience.health.dcgm_tool import ask_dcgmi, has_dcgmi
from slurm_resilience.health.documents.dcgm_devices import gpu_addresses
from slurm_resilience.inject.fault_catalogue import DcgmValue

DONE = "Successfully injected"
MAX_SAID_CHARACTERS = 200


class DcgmGpu(NamedTuple):
    """A GPU that DCGM knows."""

    number: int
    address: str


def dcgm_gpu(address: str | None) -> DcgmGpu | None:
    """Return a GPU of this node; None: DCGM is not installed.

    Args:
        address: its PCI address; None: the first one.

    Raises:
        SresError: DCGM's host engine is away, or has no such GPU.
    """
    if not has_dcgmi():
        return None
    said = ask_dcgmi("discovery", "-l")
    known = gpu_addresses(said)
    if not known:
        raise SresError(f"DCGM shows no GPU: {_short(said)}")
    for number, found in sorted(known.items()):
        if address is None or found == address.lower():
            return DcgmGpu(number, found)
    raise SresError(f"DCGM has no GPU {address}; it has {', '.join(known.values())}")


def tell_dcgm(gpu: DcgmGpu, values: Iterable[DcgmValue]) -> None:
    """Inject values into DCGM's fields of a GPU.

    Raises:
        SresError: DCGM did not take one; those before it stand.
    """
    for one in values:
        fault = ("--gpuid", str(gpu.number), "-f", str(one.field), "-v", str(one.value))
        said = ask_dcgmi("test", "--inject", *fault)
        if DONE not in said:
            raise SresError(f"DCGM did not take field {one.field}: {_short(said)}")


def _short(said: str) -> str:
    return " ".join(said.split())[:MAX_SAID_CHARACTERS] or "it printed nothing"
