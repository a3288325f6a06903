"""Kernel lines about memory, processors, PCIe and the kernel itself. Pure."""

from __future__ import annotations

from slurm_resilience.health.line_rules.line_rule import (
    BDF,
    DAY_SECONDS,
    MINUTE_SECONDS,
    LineRule,
    RepeatStep,
    rule,
)
from slurm_resilience.model import Severity

_ON = r"(?:.*?\bon (?P<part>[^\s(]+))?"

MEMORY_RULES: tuple[LineRule, ...] = (
    rule(
        "edac",
        "corrected_burst",
        "EDAC MC",
        r"^EDAC (?P<subject>MC\d+): (?P<amount>\d{3,}) CE\b" + _ON + r".*\bOVERFLOW\b",
        Severity.REPLACE,
        "so many corrected memory errors that the counter overran",
        "chosen: a module that overruns its counter with hundreds at once is about to fail",
    ),
    rule(
        "edac",
        "corrected",
        "EDAC MC",
        r"^EDAC (?P<subject>MC\d+): (?P<amount>\d+) CE\b" + _ON,
        Severity.MONITOR,
        "corrected memory error",
        "mcelog warns at 10 a day; chosen: a thousand a day on one module replaces",
        repeats=(RepeatStep(1000, DAY_SECONDS, Severity.REPLACE),),
    ),
    rule(
        "edac",
        "uncorrected",
        "EDAC MC",
        r"^EDAC (?P<subject>MC\d+): (?P<amount>\d+) UE\b" + _ON,
        Severity.REPLACE,
        "uncorrected memory error",
        "data was lost: the module has to go",
    ),
    rule(
        "edac",
        "machine_check_uncorrected",
        "Hardware Error",
        r"^(?:mce: |\{\d+\})?\[Hardware Error\]: (?:Uncorrected\b|.*\bMachine Check Exception\b)",
        Severity.REPLACE,
        "uncorrected machine check",
        "the processor's own word: uncorrected",
    ),
    rule(
        "edac",
        "memory_poisoned",
        "Uncorrected hardware memory error",
        r"^mce: Uncorrected hardware memory error",
        Severity.REPLACE,
        "a program met memory that is broken",
        "the kernel's own word: uncorrected",
    ),
    rule(
        "edac",
        "memory_failure",
        "Memory failure: 0x",
        r"^Memory failure: 0x[0-9a-f]+: ",
        Severity.REPLACE,
        "the kernel took a broken page of memory out of use",
        "follows an uncorrected memory error only",
    ),
    rule(
        "edac",
        "firmware_fatal",
        "event severity: fatal",
        r"^(?:mce: |\{\d+\})?\[Hardware Error\]: +event severity: fatal",
        Severity.REPLACE,
        "the firmware reports a fatal hardware error",
        "the firmware's own word: fatal",
    ),
    rule(
        "edac",
        "machine_check",
        "Hardware Error",
        r"\[Hardware Error\]: (?:Corrected error|Deferred error|Machine check events logged"
        r"| *event severity: (?:corrected|recoverable|info))",
        Severity.MONITOR,
        "machine check, corrected",
        "corrected by the hardware; its rate matters",
    ),
)

_BUS_ERROR = rf"(?P<subject>{BDF})\.[0-7]: (?:AER: )?PCIe Bus Error: severity="
"""Before the severity: Corrected and Uncorrected, and since Linux 6.10 Correctable and so on."""

PCIE_RULES: tuple[LineRule, ...] = (
    rule(
        "pcie_aer",
        "fatal",
        "PCIe Bus Error",
        rf"^(?:[\w-]+ )?{_BUS_ERROR}Uncorrect(?:ed|able) \(Fatal\)",
        Severity.REBOOT,
        "fatal PCIe error",
        "the link to the device is lost until it is trained anew",
    ),
    rule(
        "pcie_aer",
        "nonfatal",
        "PCIe Bus Error",
        rf"{_BUS_ERROR}Uncorrect",
        Severity.MONITOR,
        "uncorrected PCIe error, not fatal",
        "nonfatal is not fatal: the driver recovers the device",
    ),
    rule(
        "pcie_aer",
        "corrected",
        "PCIe Bus Error",
        rf"{_BUS_ERROR}Correct",
        Severity.MONITOR,
        "corrected PCIe error",
        "corrected by the hardware; its rate matters",
    ),
    rule(
        "pcie_aer",
        "recovery_failed",
        "device recovery failed",
        rf"^(?:[\w-]+ )?(?P<subject>{BDF})\.[0-7]: AER: device recovery failed",
        Severity.REBOOT,
        "a PCIe device could not be recovered from its error",
        "the device is unusable until the node boots",
    ),
    rule(
        "pcie_aer",
        "received",
        "AER: ",
        rf"AER: (?:Multiple )?(?:Correct|Uncorrect)(?:ed|able)[^:]*error "
        rf"(?:message )?received(?: from)?:? ?(?P<subject>{BDF})?",
        Severity.MONITOR,
        "PCIe error reported by a port",
        "the line of the device itself names the severity",
    ),
    rule(
        "pcie_aer",
        "contained",
        "DPC: containment",
        rf"(?P<subject>{BDF})\.[0-7]: DPC: containment event",
        Severity.MONITOR,
        "a PCIe port has cut a device off",
        "the port tries to bring the device back",
    ),
)

KERNEL_RULES: tuple[LineRule, ...] = (
    rule(
        "panic",
        "panic",
        "Kernel panic",
        r"^Kernel panic - not syncing",
        Severity.REBOOT,
        "the kernel has stopped",
        "nothing runs until the node boots",
    ),
    rule(
        "lockup",
        "hard",
        "hard LOCKUP",
        r"^(?:(?:NMI )?watchdog: )?(?:Watchdog detected|NMI watchdog:.*) hard LOCKUP on cpu "
        r"(?P<subject>\d+)",
        Severity.REBOOT,
        "a processor has hung with interrupts off",
        "it does not come back by itself",
    ),
    rule(
        "lockup",
        "soft",
        "soft lockup",
        r"^(?:(?:NMI )?watchdog: )?BUG: soft lockup - CPU#(?P<subject>\d+) stuck",
        Severity.MONITOR,
        "a processor hung in the kernel for a while",
        "passes under heavy load; repeated, the kernel is stuck",
        repeats=(RepeatStep(10, 10 * MINUTE_SECONDS, Severity.REBOOT),),
    ),
    rule(
        "lockup",
        "hung_task",
        "blocked for more than",
        r"INFO: task (?P<subject>.+?):\d+ blocked for more than \d+ seconds",
        Severity.MONITOR,
        "a process waits in the kernel",
        "most often for storage that all nodes share",
    ),
    rule(
        "lockup",
        "rcu_stall",
        "rcu",
        r"rcu\w*: INFO: \w+ (?:self-detected stall|detected stalls|detected expedited stalls)"
        r"|INFO: rcu_\w+ (?:self-detected stall|detected stalls)",
        Severity.MONITOR,
        "a processor did not report to the kernel in time",
        "passes under heavy load and in virtual machines",
    ),
    rule(
        "kernel_fault",
        "oops",
        "kernel",
        r"BUG: (?:unable to handle kernel|kernel NULL pointer)|kernel BUG at ",
        Severity.MONITOR,
        "a fault in the kernel's own code",
        "the process at fault ends; the kernel goes on",
    ),
    rule(
        "oom",
        "killed",
        "ut of memory: Kill",
        r"[Oo]ut of memory: Kill(?:ed)? process \d+",
        Severity.JOB,
        "the kernel ended a process because memory ran out",
        "the program asked for too much, not the machine",
    ),
    rule(
        "open_files",
        "limit",
        "file-max limit",
        r"VFS: file-max limit \d+ reached",
        Severity.MONITOR,
        "no more files can be opened on this node",
        "a program holds them",
    ),
    rule(
        "cpu_thermal",
        "throttled",
        "temperature above threshold",
        r"CPU(?P<subject>\d+): (?:Core|Package) temperature above threshold",
        Severity.MONITOR,
        "a processor is slowed down because it is hot",
        "cooling, most often of the room",
    ),
)
