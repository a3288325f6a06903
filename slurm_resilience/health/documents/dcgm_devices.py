"""Tell DCGM's numbers of GPUs from their addresses. Pure.

Violations of its policies name no GPU, and its watches a number, which is DCGM's own. A GPU is
reset by its address.
"""

from __future__ import annotations

import re

from slurm_resilience.health.gpu_event import kernel_address

XID_FIELD = 230
"""DCGM's field of a GPU's last Xid."""
_NUMBER = re.compile(r"^\|\s*(\d+)\s*\|")
_ADDRESS = re.compile(r"PCI Bus ID:\s*([0-9A-Fa-f:.]+)")
_SHOWN = re.compile(r"^GPU (\d+)\s+(\d+)\s*$", re.M)


def gpu_addresses(listed: str) -> dict[int, str]:
    """Return the address of each GPU by DCGM's number, as the kernel log writes it.

    Args:
        listed: the table of `dcgmi discovery -l`: GPUs first, then switches and others, each kind
            with numbers of its own.
    """
    found: dict[int, str] = {}
    number = None
    for line in listed.splitlines():
        if match := _NUMBER.match(line):
            number = int(match[1])
        if number is not None and (match := _ADDRESS.search(line)):
            found.setdefault(number, kernel_address(match[1]))
    return found


def gpus_with_xid(shown: str, code: int) -> tuple[int, ...]:
    """Return DCGM's numbers of the GPUs that have had an Xid.

    Args:
        shown: one look of `dcgmi dmon -e 230`, which has each GPU's last Xid; `N/A` or 0 for none.
        code: the Xid. Where another one has followed it, the only GPU with an Xid is returned.
    """
    last = {int(number): int(xid) for number, xid in _SHOWN.findall(shown) if int(xid)}
    same = tuple(number for number, xid in last.items() if xid == code)
    return same or (tuple(last) if len(last) == 1 else ())
