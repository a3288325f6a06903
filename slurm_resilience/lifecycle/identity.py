"""Identify the node, its present boot and its machine."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from slurm_resilience.errors import ConfigError

NODE_FILES = Path("/run/sres-node")
"""A directory in which an environment whose nodes share one kernel (containers, the lab) writes the
answers of a real machine's kernel and firmware: ``boot-id`` and ``instance-id``."""

MIN_DIGITS = 3
"""A UUID with no more different digits than these was typed by a person."""
_BOARD_MAKERS = frozenset(
    {
        # American Megatrends' own, in both orders of the first bytes.
        "03000200040005000006000700080009",
        "00020003000400050006000700080009",
        "0123456789abcdef0123456789abcdef",
        "12345678123456781234567812345678",
        "12345678123412341234123456789abc",
    }
)
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO of the kernel's proc_ns.h: process 1 is the machine's own there."""


def node_name(given: str = "") -> str:
    """Return the Slurm node name: the given one, slurmd's own, else the short host name.

    Raises:
        ConfigError: nothing of these is set.
    """
    name = given or os.environ.get("SLURMD_NODENAME", "") or socket.gethostname().split(".")[0]
    if not name:
        raise ConfigError("this machine has no host name; say --node NAME")
    return name


def boot_id(files: Path = NODE_FILES) -> str:
    """Return a text that changes with every boot.

    In a container the kernel's own id outlives the "machine": the start of process 1 is added.
    """
    if given := _first_line(files / "boot-id"):
        return given
    kernel = _first_line(Path("/proc/sys/kernel/random/boot_id"))
    if Path("/proc/self/ns/pid").stat().st_ino == INITIAL_PID_NAMESPACE:
        return kernel
    # After the name in brackets, which may hold blanks, start time is the 20th field (proc(5)). A
    # container may count time from its own start: the offset says when that was.
    started = _first_line(Path("/proc/1/stat")).rpartition(")")[2].split()[19]
    try:
        offsets = Path("/proc/1/timens_offsets").read_text(encoding="utf-8").split()
    except OSError:
        offsets = []  # Linux before 5.6 has no time namespaces
    offset = offsets[offsets.index("boottime") + 1] if "boottime" in offsets else "0"
    return f"{kernel}/{started}/{offset}"


def instance(files: Path = NODE_FILES, dmi: Path = Path("/sys/class/dmi/id")) -> str:
    """Identify the machine: an EC2 instance id where there is one, else the firmware's UUID.

    On EC2's Nitro the id is the board's asset tag. Empty where nothing is known, or the firmware
    has a UUID that other machines have too.
    """
    if given := _first_line(files / "instance-id"):
        return given
    tag = _first_line(dmi / "board_asset_tag")
    if tag.startswith("i-"):
        return tag
    uuid = _first_line(dmi / "product_uuid")
    return uuid if _is_of_one_machine(uuid) else ""


def _is_of_one_machine(uuid: str) -> bool:
    """Tell whether a firmware's UUID was set by the machine's maker: what a board's maker left in
    it (zeros, ones, words, counted bytes) is the same on each board."""
    digits = uuid.replace("-", "").lower()
    is_uuid = re.fullmatch(r"[0-9a-f]{32}", digits) is not None
    return is_uuid and len(set(digits)) > MIN_DIGITS and digits not in _BOARD_MAKERS


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip().split("\n", 1)[0]
    except OSError:
        return ""
