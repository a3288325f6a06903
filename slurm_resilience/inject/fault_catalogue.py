"""The faults that can be injected, each with what it should lead to. Pure.

Most are lines in the node's kernel log, which sresd reads there as it reads the kernel's own. The
others happen: the machine stops, its cable is cut, or a file of its sysfs changes. A line announces
them; what follows from a crash or a cut is known for a drill by it.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from slurm_resilience.errors import UsageError
from slurm_resilience.health import xid
from slurm_resilience.health.verdict import verdict_of
from slurm_resilience.model import Severity

Way = Literal["kernel-log", "crash", "cable", "sysfs"]

USER_PRIORITY = "<12>"
"""Facility 1 (a program's), level 4. The kernel lets no program write facility 0."""
GPU = "0000:04:00"
"""The GPU that the lines name where none is given."""

_GPU = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}")
DCGM_XID = 230
"""DCGM's field of a GPU's last Xid."""
DCGM_DOUBLE_BIT = 319
"""DCGM's field of the double-bit errors in a GPU's memory since the driver was loaded."""
DCGM_NVLINK_CRC = 409
"""DCGM's field of the CRC errors on all NVLinks of a GPU."""

_XID = re.compile(r"xid(?P<code>[0-9]{1,3})")


class DcgmValue(NamedTuple):
    """A value of one of DCGM's fields."""

    field: int
    value: int


class InjectedFault(NamedTuple):
    """One fault that can be injected."""

    name: str
    meaning: str
    asks_for: Severity
    """The action that sresd's finding calls for; of a node that falls silent, sresctld's."""
    lines: tuple[str, ...] = ()
    """Lines of the kernel log; `{gpu}` is the GPU's address."""
    way: Way = "kernel-log"
    dcgm: tuple[DcgmValue, ...] = ()
    """The same for DCGM, where it runs."""
    check: str = ""
    """The check that finds it, where that is no line."""

    @property
    def calls_for(self) -> str:
        """The verdict on it, in the word of `sres replay`."""
        return "nothing" if self.asks_for is Severity.NONE else verdict_of(self.asks_for)


CATALOGUE: tuple[InjectedFault, ...] = (
    InjectedFault(
        "xid79",
        "a GPU has fallen off the bus",
        Severity.REBOOT,
        ("NVRM: Xid (PCI:{gpu}): 79, pid=0, name=sres, GPU has fallen off the bus.",),
        dcgm=(DcgmValue(DCGM_XID, 79),),
    ),
    InjectedFault(
        "xid94",
        "a contained memory error: one program is hit",
        Severity.JOB,
        ("NVRM: Xid (PCI:{gpu}): 94, pid=0, name=sres, Contained memory error",),
        dcgm=(DcgmValue(DCGM_XID, 94),),
    ),
    InjectedFault(
        "ecc",
        "a GPU's memory has lost data, and has no spare rows left (Xid 48, then 64)",
        Severity.REPLACE,
        (
            "NVRM: Xid (PCI:{gpu}): 48, pid=0, name=sres, An uncorrectable double bit error",
            "NVRM: Xid (PCI:{gpu}): 64, pid=0, name=sres, Row remapping failure",
        ),
        dcgm=(DcgmValue(DCGM_DOUBLE_BIT, 1), DcgmValue(DCGM_XID, 48), DcgmValue(DCGM_XID, 64)),
    ),
    InjectedFault(
        "nvlink-down",
        "a GPU's NVLink fails (Xid 74)",
        Severity.RESET,
        ("NVRM: Xid (PCI:{gpu}): 74, pid=0, name=sres, NVLink: fatal error on link 3",),
        dcgm=(DcgmValue(DCGM_NVLINK_CRC, 1), DcgmValue(DCGM_XID, 74)),
    ),
    InjectedFault(
        "efa-down",
        "an EFA device no longer answers its driver",
        Severity.REPLACE,
        ("efa 0000:00:1d.0: Admin queue is closed",),
    ),
    InjectedFault(
        "fs-readonly",
        "a file system turns read-only",
        Severity.REBOOT,
        ("EXT4-fs (nvme1n1p1): Remounting filesystem read-only",),
    ),
    InjectedFault(
        "disk-lost",
        "an NVMe disk is gone",
        Severity.REBOOT,
        ("nvme nvme1: Disabling device after reset failure: -19",),
    ),
    InjectedFault(
        "memory",
        "a memory module has lost data",
        Severity.REPLACE,
        ("EDAC MC0: 1 UE on mc#0csrow#0channel#0 (csrow:0 channel:0 page:0x79d6c8)",),
    ),
    InjectedFault(
        "neuron",
        "a Neuron device has lost data",
        Severity.REPLACE,
        ("NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR affecting neuron devices",),
    ),
    InjectedFault(
        "hang",
        "a processor has hung with interrupts off",
        Severity.REBOOT,
        ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 3",),
    ),
    InjectedFault(
        "efa-port-down",
        "an EFA port that was active is down (in a lab)",
        Severity.REBOOT,
        way="sysfs",
        check="efa_devices",
    ),
    InjectedFault(
        "ib-port-down",
        "an InfiniBand or RoCE port is down (in a lab)",
        Severity.MONITOR,
        way="sysfs",
        check="infiniband_ports",
    ),
    InjectedFault(
        "memory-count",
        "a memory module counts lost data (in a lab)",
        Severity.REPLACE,
        way="sysfs",
        check="edac_counters",
    ),
    InjectedFault(
        "neuron-count",
        "a Neuron device counts lost data (in a lab)",
        Severity.REPLACE,
        way="sysfs",
        check="neuron_devices",
    ),
    InjectedFault("node-crash", "the machine stops at once", Severity.REPLACE, way="crash"),
    InjectedFault("cable-cut", "the node is cut off (in a lab)", Severity.REPLACE, way="cable"),
)


def find_fault(name: str) -> InjectedFault:
    """Return the fault of a name: one of the catalogue, or `xidN`.

    Raises:
        UsageError: there is none.
    """
    for fault in CATALOGUE:
        if fault.name == name:
            return fault
    match = _XID.fullmatch(name)
    row = xid.table().get(int(match["code"])) if match else None
    if row is None:
        known = ", ".join(fault.name for fault in CATALOGUE)
        shown = "".join(char if char.isprintable() else "?" for char in name[:40])
        raise UsageError(f"'{shown}' is no fault; there are {known}, and xidN for a known Xid")
    line = f"NVRM: Xid (PCI:{{gpu}}): {row.code}, pid=0, name=sres, injected"
    told = DcgmValue(DCGM_XID, row.code)
    return InjectedFault(name, f"Xid {row.code}: {row.meaning}", row.action, (line,), dcgm=(told,))


def lines_of(fault: InjectedFault, gpu: str = GPU) -> tuple[str, ...]:
    """Return the lines to write into the kernel log, as a program must write them.

    Args:
        fault: which one.
        gpu: the address of the GPU that they name.

    Raises:
        UsageError: no address.
    """
    if not _GPU.fullmatch(gpu.lower()):
        raise UsageError(f"'{gpu[:40]}' is no PCI address; write one such as {GPU}")
    if fault.way != "kernel-log":
        return (f"{USER_PRIORITY}sres: injected fault {fault.name}",)
    return tuple(USER_PRIORITY + line.format(gpu=gpu.lower()) for line in fault.lines)
