"""Learn the profile of a node type from a node that is well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from slurm_resilience.health.check import CheckContext, Unjudged
from slurm_resilience.health.check_child import ChildProbes
from slurm_resilience.health.checks.accelerator import neuron_devices
from slurm_resilience.health.checks.gpu import gpu_health, mig_devices
from slurm_resilience.health.checks.gpu.gpu_health import GpusHealth
from slurm_resilience.health.checks.host import cpu_frequency
from slurm_resilience.health.checks.network import efa_devices, infiniband_ports
from slurm_resilience.health.checks.pci_bus import nvidia_gpus
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import Finding, Severity


def learn(context: CheckContext) -> tuple[NodeProfile, tuple[Finding, ...]]:
    """Return the hardware of this node, and what is wrong with it.

    Args:
        context: its sysroot is looked at; NVML is asked in a process that can be killed.
    """
    findings: list[Finding] = []
    neuron = neuron_devices.probe(context)
    findings += neuron_devices.judge(neuron, context).findings
    ports = infiniband_ports.probe(context)
    rates = {port.rate.partition(" (")[0] for port in ports if port.is_up}
    efa = efa_devices.probe(context).devices
    gpus = _gpus(context)
    findings += gpu_health.judge(gpus, context).findings if not gpus.error else ()
    findings += _missing(gpus, context)
    # Ports at different rates: which one a port should have is not to be told.
    rate = rates.pop() if len(rates) == 1 and not efa else ""
    governors = {policy.governor for policy in cpu_frequency.probe(context)}
    profile = NodeProfile(
        gpus=len(gpus.gpus) or None,
        nvlinks=_same(up for up, _ in gpus.links),
        pcie_width=_same(int(gpu.get("current_link_width") or 0) for gpu in gpus.gpus) or None,
        efa_devices=efa or None,
        neuron_devices=len(neuron) or None,
        infiniband_rate=rate,
        mig_devices=_mig_devices(context) if gpus.gpus else None,
        cpu_governor=governors.pop() if len(governors) == 1 else "",
    )
    return profile, tuple(findings)


def _missing(gpus: GpusHealth, context: CheckContext) -> list[Finding]:
    """Return a finding where the driver shows fewer GPUs than there are on the PCI bus."""
    on_bus = nvidia_gpus(context)
    if len(on_bus) <= len(gpus.gpus):
        return []
    said = f" ({gpus.error})" if gpus.error else ""
    text = f"{len(gpus.gpus)} of {len(on_bus)} GPUs on the PCI bus are shown by the driver{said}"
    return [Finding("gpu_count", Severity.MONITOR, text, context.now)]


def _gpus(context: CheckContext) -> GpusHealth:
    try:
        gpus = ChildProbes().probe(gpu_health.CHECK, context)
    except Unjudged as reason:
        return GpusHealth(error=str(reason))
    assert isinstance(gpus, GpusHealth)
    return gpus


def _mig_devices(context: CheckContext) -> dict[str, int] | None:
    """Return the parts of the GPUs by their kind; None where none is divided, or none answers."""
    try:
        layouts = ChildProbes().probe(mig_devices.CHECK, context)
    except Unjudged:
        return None
    return dict(Counter(part for one in layouts for part in one.parts)) or None


def _same(numbers: Iterable[int]) -> int | None:
    """Return the number that all have; None when they differ, or there is none."""
    found = set(numbers)
    return found.pop() if len(found) == 1 else None


def as_toml(profile: NodeProfile) -> str:
    """Return a profile as the text of its file."""
    lines = []
    for name in NodeProfile.__struct_fields__:
        value = getattr(profile, name)
        if name == "name" or value in (None, ""):
            continue
        lines.append(f"{name} = {_as_toml_value(value)}")
    return "\n".join(lines)


def _as_toml_value(value: str | int | dict[str, int]) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{key}" = {count}' for key, count in value.items()) + " }"
    return f'"{value}"' if isinstance(value, str) else str(value)
