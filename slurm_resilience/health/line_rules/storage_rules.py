"""Kernel lines about disks, arrays and file systems on them. Pure."""

from __future__ import annotations

from slurm_resilience.health.line_rules.line_rule import LineRule, rule
from slurm_resilience.model import Severity

_LOCAL = r"^(?:EXT\d-fs|JBD2?|XFS|BTRFS|F2FS-fs|JFS|GFS2|OCFS2|NILFS2?|REISERFS|FAT-fs|UDF-fs)"
"""A file system on a disk of the node."""

STORAGE_RULES: tuple[LineRule, ...] = (
    rule(
        "nvme",
        "timeout_reset",
        "timeout, reset controller",
        r"^nvme (?P<subject>nvme\d+): I/O .*timeout, reset controller",
        Severity.REBOOT,
        "an NVMe disk did not answer and had to be reset",
        "gpud too reboots first; a bare abort of one request is only watched",
    ),
    rule(
        "nvme",
        "controller_down",
        "controller is down",
        r"^nvme (?P<subject>nvme\d+): controller is down; will reset",
        Severity.REBOOT,
        "an NVMe disk's controller is down",
        "a reboot first, a replacement when it comes back",
    ),
    rule(
        "nvme",
        "disabled",
        "nvme ",
        r"^nvme (?P<subject>nvme\d+): (?:Disabling device after reset failure"
        r"|Removing after probe failure|Device not ready; aborting (?:reset|initiali[sz]ation))",
        Severity.REBOOT,
        "an NVMe disk is gone: its reset failed",
        "a reboot first, a replacement when it comes back",
    ),
    rule(
        "nvme",
        "timeout_abort",
        "timeout, aborting",
        r"nvme (?P<subject>nvme\d+): I/O .*timeout, aborting",
        Severity.MONITOR,
        "an NVMe disk was slow to answer",
        "the request is tried again",
    ),
    rule(
        "nvme",
        "no_path",
        "no available path",
        r"block (?P<subject>nvme\w+): no available path",
        Severity.MONITOR,
        "no way leads to an NVMe disk",
        "a disk behind a network: not this node's fault",
    ),
    rule(
        "raid",
        "failed",
        "Disk failure on",
        r"^md/raid[^:]*: ?Disk failure on (?P<subject>\w+) detected, failing array",
        Severity.REPLACE,
        "a disk failed and took its array with it",
        "an array without redundancy has lost its data",
    ),
    rule(
        "raid",
        "degraded",
        "Disk failure on",
        r"Disk failure on (?P<subject>\w+), disabling device",
        Severity.MONITOR,
        "a disk of an array failed; the array goes on without it",
        "the array still holds all data",
    ),
    rule(
        "filesystem_log",
        "read_only",
        "emounting filesystem read-only",
        _LOCAL
        + r"\b(?:.*?\((?:device )?(?P<subject>[^)]+)\))?.*[Rr]emounting filesystem read-only",
        Severity.REBOOT,
        "a file system turned read-only after an error",
        "a reboot checks and often heals it",
    ),
    rule(
        "filesystem_log",
        "shut_down",
        "hutting down filesystem",
        r"^XFS \((?P<subject>[^)]+)\): .*[Ss]hutting down filesystem",
        Severity.REBOOT,
        "a file system was shut down after an error",
        "a reboot checks and often heals it",
    ),
    rule(
        "filesystem_log",
        "forced_readonly",
        "forced readonly",
        r"^BTRFS.*\(device (?P<subject>[^):]+)[^)]*\).*forced readonly",
        Severity.REBOOT,
        "a file system turned read-only after an error",
        "a reboot checks and often heals it",
    ),
    rule(
        "filesystem_log",
        "error",
        "EXT4-fs error",
        r"EXT4-fs error \(device (?P<subject>[^)]+)\)",
        Severity.MONITOR,
        "a file system met an error",
        "it turns read-only if it cannot go on",
    ),
    rule(
        "filesystem_log",
        "superblock",
        "while writing superblock",
        r"\((?P<subject>[^)]+)\): I/O error while writing superblock",
        Severity.MONITOR,
        "a file system could not write its superblock",
        "it turns read-only if it cannot go on",
    ),
    rule(
        "block_io",
        "error",
        "error",
        r"(?:blk_update_request: )?(?:critical (?:medium|target)|I/O) error, dev (?P<subject>\w+),"
        r"|Buffer I/O error on dev(?:ice)? (?P<part>[\w-]+),",
        Severity.MONITOR,
        "a disk could not be read or written at one place",
        "one bad place; the disk's own counters tell more",
    ),
    rule(
        "block_io",
        "beyond_end",
        "beyond end of device",
        r"attempt to access beyond end of device",
        Severity.MONITOR,
        "something was read beyond the end of a disk",
        "a damaged file system or a program's mistake",
    ),
)
