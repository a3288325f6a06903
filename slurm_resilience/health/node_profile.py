"""The hardware that a node of one type should have. Pure."""

from __future__ import annotations

import msgspec


class NodeProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Expected hardware; a field that is left out expects nothing."""

    name: str = ""
    gpus: int | None = None
    nvlinks: int | None = None
    """Active links of each GPU; 0: the product has none."""
    pcie_width: int | None = None
    """Lanes of each GPU."""
    efa_devices: int | None = None
    neuron_devices: int | None = None
    infiniband_rate: str = ""
    """As the port says it, e.g. `400 Gb/sec`."""
    mig_devices: dict[str, int] | None = None
    """Parts of all GPUs by their kind, e.g. `{"1g.10gb" = 7}`; empty: no GPU is divided."""
    cpu_governor: str = ""
    """As the kernel names it, e.g. `performance`."""
