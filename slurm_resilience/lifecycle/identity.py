"""Identify the node, its present boot and its machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from slurm_resilience.errors import ConfigError

NODE_FILES = Path("/run/sres-node")
"""A directory in which an environment whose nodes share one kernel (containers, the lab) writes the
answers of a real machine's kernel and firmware: ``boot-id`` and ``instance-id``."""

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

    On EC2's Nitro the id is the board's asset tag. Empty where nothing is known.
    """
    if given := _first_line(files / "instance-id"):
        return given
    tag = _first_line(dmi / "board_asset_tag")
    return tag if tag.startswith("i-") else _first_line(dmi / "product_uuid")


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip().split("\n", 1)[0]
    except OSError:
        return ""
