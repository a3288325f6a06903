"""Kernel lines about network adapters and about file servers. Pure.

A file server that all nodes share is never a node's fault: its lines are watched, however often
they come.
"""

from __future__ import annotations

from slurm_resilience.health.line_rules.line_rule import (
    BDF,
    DAY_SECONDS,
    LineRule,
    RepeatStep,
    rule,
)
from slurm_resilience.model import Severity

FLAPS_A_DAY = 6
"""Lost links of one port in a day from which it is worth watching (more than 5: Azure's limit)."""

_ADAPTER = rf"^mlx5_core (?:(?P<subject>{BDF})\.[0-7])?.*"
_EFA = rf"^(?:infiniband )?efa(?:_\d+)?\b:?(?: (?P<subject>{BDF})\.[0-7])?.*"
_FLAPS = (RepeatStep(FLAPS_A_DAY, DAY_SECONDS, Severity.MONITOR),)
_NETWORK_DAEMONS = frozenset({"systemd-networkd", "NetworkManager"})
_PORT = r"(?P<subject>(?!veth|docker|br-|cali|cni|virbr|tap|tun|vnet)[a-z][\w.-]*)"

ADAPTER_RULES: tuple[LineRule, ...] = (
    rule(
        "mlx5",
        "health_compromised",
        "health compromised",
        _ADAPTER + r"device's health compromised - reached miss count",
        Severity.REPLACE,
        "a network adapter's firmware has hung",
        "NVSentinel: fatal",
    ),
    rule(
        "mlx5",
        "unrecoverable",
        "unrecoverable hardware error",
        r"^mlx5_core.*unrecoverable hardware error",
        Severity.REPLACE,
        "a network adapter reports a hardware error that it cannot recover from",
        "the adapter's own word: unrecoverable",
    ),
    rule(
        "mlx5",
        "command_leak",
        "leak of a command resource",
        _ADAPTER + r"Will cause a leak of a command resource",
        Severity.REPLACE,
        "a network adapter's firmware no longer answers commands",
        "NVSentinel: fatal",
    ),
    rule(
        "mlx5",
        "fatal_error",
        "Fatal error ",
        _ADAPTER + r"Fatal error \d+ detected",
        Severity.MONITOR,
        "a network adapter's firmware reports a fatal error",
        "the driver loads the device anew; where that fails, it says so in the lines above",
    ),
    rule(
        "mlx5",
        "power",
        "insufficient power",
        _ADAPTER + r"[Dd]etected insufficient power on the PCIe slot",
        Severity.MONITOR,
        "a network adapter's slot gives it too little power",
        "printed by many healthy machines as well",
    ),
    rule(
        "mlx5",
        "temperature",
        "High Temperature",
        _ADAPTER + r"High Temperature",
        Severity.MONITOR,
        "a network adapter's cable or module is hot",
        "cooling",
    ),
    rule(
        "mlx5",
        "register_access",
        "ACCESS_REG",
        _ADAPTER + r"ACCESS_REG\(0x[0-9a-f]+\).*failed",
        Severity.MONITOR,
        "a query of a network adapter failed",
        "a monitor that reads counters provokes it",
    ),
    rule(
        "network_port",
        "transmit_timeout",
        "NETDEV WATCHDOG",
        r"NETDEV WATCHDOG: (?P<subject>[\w.-]+).*transmit queue \d+ timed out",
        Severity.MONITOR,
        "a network port stopped sending for a while",
        "the driver resets the queue",
    ),
    rule(
        "network_port",
        "flap",
        "ink",
        rf"(?<![\w.-]){_PORT}: (?:NIC )?[Ll]ink (?:is )?[Dd]own\b",
        Severity.NONE,
        "a network port has lost its link again and again",
        "more than 5 a day: Azure's limit; once is ordinary",
        repeats=_FLAPS,
    ),
    rule(
        "network_port",
        "flap",
        "ost carrier",
        rf"(?<![\w.-]){_PORT}: [Ll]ost carrier",
        Severity.NONE,
        "a network port has lost its link again and again",
        "more than 5 a day: Azure's limit; once is ordinary",
        repeats=_FLAPS,
        programs=_NETWORK_DAEMONS,
    ),
    rule(
        "efa",
        "driver",
        "efa",
        _EFA + r"(?:didn't send any completion for admin cmd|Admin queue is closed"
        r"|Device isn't ready|Reset indication didn't turn)",
        Severity.REPLACE,
        "an EFA device no longer answers its driver",
        "NVSentinel: replace",
    ),
)

FILE_SERVER_RULES: tuple[LineRule, ...] = (
    rule(
        "nfs",
        "not_responding",
        "nfs: server",
        r"nfs: server (?P<subject>\S+) not responding",
        Severity.MONITOR,
        "a file server does not answer",
        "a shared service: never a reason to replace a node",
    ),
    rule(
        "nfs",
        "answers",
        "nfs: server",
        r"nfs: server (?P<subject>\S+) OK",
        Severity.NONE,
        "a file server answers again",
        "takes back that it did not answer",
        clears="not_responding",
    ),
    rule(
        "lustre",
        "connection_lost",
        "Lustre",
        r"Lustre: (?P<subject>\S+?): Connection to .* was lost",
        Severity.MONITOR,
        "the connection to a Lustre server was lost",
        "a shared service: never a reason to replace a node",
    ),
    rule(
        "lustre",
        "connection_restored",
        "Lustre",
        r"Lustre: (?P<subject>\S+?): Connection restored to",
        Severity.NONE,
        "the connection to a Lustre server is back",
        "takes back that it was lost",
        clears="connection_lost",
    ),
    rule(
        "lustre",
        "evicted",
        "Lustre",
        r"LustreError: (?:\S+ )?(?P<subject>[\w-]+-(?:OST|MDT|MGS)[\w-]*): .*client was evicted",
        Severity.MONITOR,
        "a Lustre server has evicted this client",
        "a shared service: never a reason to replace a node",
    ),
    rule(
        "lustre",
        "error",
        "LustreError",
        r"LustreError: (?:\S+ )?(?P<subject>[\w-]+-(?:OST|MDT|MGS)[\w-]*)?.*(?:rc = -\d+|evicted)",
        Severity.MONITOR,
        "a Lustre operation failed",
        "a shared service: never a reason to replace a node",
    ),
)
