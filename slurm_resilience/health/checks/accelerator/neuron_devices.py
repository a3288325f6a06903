"""AWS Neuron devices: their number, and errors that lost data.

The driver's counters have moved between its versions, so they are looked for by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.model import Finding, Severity

ROOT = "/sys/devices/virtual/neuron_device"
COUNTERS = ("mem_ecc_uncorrected", "sram_ecc_uncorrected", "hbm_ecc_uncorrected")


class NeuronDevice(NamedTuple):
    name: str
    uncorrected: int


def probe(context: CheckContext) -> tuple[NeuronDevice, ...]:
    return tuple(
        NeuronDevice(device.name, sum(_value(path) for path in _counters(device)))
        for device in sorted(context.path(ROOT).glob("neuron[0-9]*"))
    )


def _counters(device: Path) -> list[Path]:
    return [path for name in COUNTERS for path in device.rglob(name)]


def _value(path: Path) -> int:
    """Return a counter: a file, or a directory with the file `total`."""
    try:
        text = (path / "total" if path.is_dir() else path).read_text("utf-8").strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


def judge(seen: tuple[NeuronDevice, ...], context: CheckContext) -> Judgement:
    wanted = context.expected.profile.neuron_devices
    findings = [
        Finding(
            CHECK.name,
            Severity.REPLACE,
            f"{one.name}: {one.uncorrected} uncorrected memory errors",
            context.now,
            subject=one.name,
        )
        for one in seen
        if one.uncorrected
    ]
    if wanted is not None and len(seen) < wanted:
        text = f"{len(seen)} Neuron devices, the profile expects {wanted}"
        findings.append(Finding(CHECK.name, Severity.REBOOT, text, context.now, code="missing"))
    text = "; ".join(one.text for one in findings)
    return Judgement(text or f"{len(seen)} Neuron devices without an error", tuple(findings))


CHECK = Check(
    "neuron_devices",
    probe,
    judge,
    source=f"{ROOT}/neuron*/**/{{mem,sram,hbm}}_ecc_uncorrected",
    threshold="any uncorrected error; fewer than the profile's neuron_devices",
    asks_for=(Severity.REPLACE, Severity.REBOOT),
)
