"""Judge documents about AWS Neuron devices: neuron-ls, neuron-monitor, counters of sysfs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from slurm_resilience.health.documents.reading import DocumentReading, document_finding
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import Finding, Severity

_COUNTER = re.compile(
    r"^(?P<path>[\w/.-]*(?P<name>(?:mem|sram|hbm)_ecc_uncorrected|mem_ecc_repairable\w*)[\w/.-]*)"
    r"\s*[=:]\s*(?P<value>\d+)\s*$",
    re.M,
)
_UNCORRECTED = ("mem_ecc_uncorrected", "sram_ecc_uncorrected", "hbm_ecc_uncorrected")


def recognises_neuron(data: object) -> bool:
    """Tell whether a JSON document is of neuron-ls or of neuron-monitor."""
    if isinstance(data, list):
        return bool(data) and all(isinstance(one, dict) and "neuron_device" in one for one in data)
    return isinstance(data, dict) and bool(
        {"neuron_hardware_info", "neuron_runtime_data", "neuron_hw_counters"} & set(data)
    )


def judge_neuron(data: Any, profile: NodeProfile) -> DocumentReading:
    """Judge the number of devices and their uncorrected errors."""
    if isinstance(data, list):
        return _count(len(data), profile)
    findings = [
        _uncorrected(f"neuron {device}", name, value)
        for device, name, value in _counters(data)
        if value
    ]
    hardware = data.get("neuron_hardware_info") or {}
    if error := hardware.get("error"):
        return DocumentReading(tuple(findings), (f"neuron-monitor: {error}",))
    reading = DocumentReading(tuple(findings))
    counted = hardware.get("neuron_device_count")
    return reading.plus(_count(counted, profile)) if isinstance(counted, int) else reading


def is_neuron_table(text: str) -> bool:
    """Tell whether a text is the table of neuron-ls."""
    return bool(re.search(r"^\| +NEURON +\|", text, re.M))


def judge_neuron_table(text: str, profile: NodeProfile) -> DocumentReading:
    """Judge the number of devices in the table."""
    return _count(len(re.findall(r"^\| +\d+ +\|", text, re.M)), profile)


def is_neuron_counters(text: str) -> bool:
    """Tell whether a text lists counters of sysfs, a value a line."""
    return bool(_COUNTER.search(text))


def judge_neuron_counters(text: str) -> DocumentReading:
    """Judge counters of sysfs; both layouts end in the same names."""
    return DocumentReading(
        tuple(
            _uncorrected(match["path"], match["name"], int(match["value"]))
            for match in _COUNTER.finditer(text)
            if match["name"] in _UNCORRECTED and int(match["value"])
        )
    )


def _count(counted: int, profile: NodeProfile) -> DocumentReading:
    wanted = profile.neuron_devices
    if wanted is None or counted >= wanted:
        return DocumentReading()
    text = f"{counted} Neuron devices, the profile expects {wanted}"
    return DocumentReading((document_finding("neuron", Severity.REBOOT, text, code="missing"),))


def _uncorrected(subject: str, name: str, value: int) -> Finding:
    text = f"{subject}: {name} is {value}"
    return document_finding("neuron", Severity.REPLACE, text, subject, "uncorrectable")


def _counters(data: Any, device: str = "?") -> Iterator[tuple[str, str, int]]:
    """Yield device, name and value of each counter of uncorrected errors, at any depth."""
    if isinstance(data, list):
        for one in data:
            yield from _counters(one, device)
    elif isinstance(data, dict):
        device = str(data.get("neuron_device_index", device))
        for name, value in data.items():
            if name in _UNCORRECTED and isinstance(value, int) and not isinstance(value, bool):
                yield device, name, value
            else:
                yield from _counters(value, device)
