"""Kernel lines about accelerators, besides Xid and SXid. Pure."""

from __future__ import annotations

from slurm_resilience.health.line_rules.line_rule import (
    BDF,
    MINUTE_SECONDS,
    LineRule,
    RepeatStep,
    rule,
)
from slurm_resilience.model import Severity

FABRIC_MANAGER = "nv-fabricmanager"
"""The program whose log names errors of NVSwitches."""
_NEURON = r"^(?:(?:neuron|nrt)\b[^'\"/\[]{0,80}\s)?"
"""Before the error's name; nothing that a user chose."""
_SWITCH = rf"(?:.*\bpci bus id (?P<subject>{BDF}))?"

_AMD = rf"^amdgpu (?P<subject>{BDF})\.[0-7]: (?:amdgpu: )?(?:\[drm\] )?"

ACCELERATOR_RULES: tuple[LineRule, ...] = (
    rule(
        "amd_gpu",
        "uncorrectable",
        "uncorrectable hardware error",
        _AMD + r"(?:socket: \d+, die: \d+,? )?[1-9]\d* (?:new )?uncorrectable hardware error",
        Severity.RESET,
        "an AMD GPU has lost data",
        "as its counters in amdsmi: a reset takes the page out of use",
    ),
    rule(
        "amd_gpu",
        "bad_pages",
        "reaches threshold value",
        _AMD + r"Saved bad pages \d+ reaches threshold value",
        Severity.REPLACE,
        "an AMD GPU has no room for more bad pages",
        "AMD's threshold for a return",
    ),
    rule(
        "amd_gpu",
        "reset_failed",
        "GPU reset(",
        _AMD + r"GPU reset\(\d+\) failed",
        Severity.REBOOT,
        "an AMD GPU could not be reset",
        "the device is unusable until the node boots",
    ),
    rule(
        "amd_gpu",
        "reset",
        "GPU reset begin",
        _AMD + r"GPU reset begin",
        Severity.MONITOR,
        "the driver resets an AMD GPU",
        "what ran there is lost; most often a program that hangs",
    ),
    rule(
        "neuron",
        "dma_error",
        "NEURON_HW_ERR=",
        _NEURON + r"NEURON_HW_ERR=DMA_ERROR\b",
        Severity.REBOOT,
        "a Neuron device's data mover failed",
        "AWS calls it fatal; a reboot first, a replacement when it comes back",
    ),
    rule(
        "neuron",
        "uncorrectable",
        "NEURON_HW_ERR=",
        _NEURON + r"NEURON_HW_ERR=(?:SRAM|NC|HBM)_UNCORRECTABLE_ERROR\b",
        Severity.REPLACE,
        "a Neuron device has lost data",
        "AWS calls it fatal and replaces the machine",
    ),
    rule(
        "neuron",
        "unknown",
        "NEURON_HW_ERR=",
        r"NEURON_HW_ERR=\w+",
        Severity.MONITOR,
        "a Neuron device reports an error that no table knows",
        "a new driver brings new names",
    ),
    rule(
        "gpu_driver",
        "reset_required",
        "NV_ERR_RESET_REQUIRED",
        rf"^NVRM:(?:.*?(?P<subject>{BDF}))?.*NV_ERR_RESET_REQUIRED",
        Severity.RESET,
        "the driver says that a GPU has to be reset",
        "the driver's own word",
    ),
    rule(
        "gpu_driver",
        "init_failed",
        "RmInitAdapter failed",
        rf"^NVRM:(?:.*?(?P<subject>{BDF}))?.*RmInitAdapter failed",
        Severity.MONITOR,
        "a GPU could not be initialised",
        "passes at times; twice within ten minutes it does not",
        repeats=(RepeatStep(2, 10 * MINUTE_SECONDS, Severity.REBOOT),),
    ),
    rule(
        "gpu_driver",
        "reboot_required",
        "requiring os reboot",
        r"^NVRM:.*global fatal error.*requiring os reboot",
        Severity.REBOOT,
        "the driver says that the node has to boot",
        "the driver's own word",
    ),
    rule(
        "gpu_driver",
        "version_mismatch",
        "API mismatch",
        r"NVRM: API mismatch",
        Severity.MONITOR,
        "the NVIDIA driver and its libraries are of different versions",
        "an update that needs a reboot: configuration, not hardware",
    ),
    rule(
        "peermem",
        "invalid_context",
        "nvidia-peermem",
        r"nvidia-peermem .*detected invalid context",
        Severity.MONITOR,
        "GPU memory was taken back while a network adapter used it",
        "a program that ended badly; the driver skips it",
    ),
    rule(
        "nccl",
        "segfault",
        "in libnccl.so",
        r"segfault at .* in libnccl\.so",
        Severity.JOB,
        "a program crashed within NCCL",
        "the program's fault, or that of a lost peer",
    ),
    rule(
        "fabric_manager",
        "nonfatal",
        "detected NVSwitch",
        r"detected NVSwitch non-fatal error \d+" + _SWITCH,
        Severity.MONITOR,
        "an NVSwitch reports an error, not fatal",
        "the line's own word: non-fatal",
        programs=frozenset({FABRIC_MANAGER}),
    ),
    rule(
        "fabric_manager",
        "fatal",
        "detected NVSwitch",
        r"^(?:\[(?:tid )?\w+\] ?)*detected NVSwitch fatal error \d+" + _SWITCH,
        Severity.RESET,
        "an NVSwitch reports a fatal error",
        "the line's own word: fatal",
        programs=frozenset({FABRIC_MANAGER}),
    ),
)
