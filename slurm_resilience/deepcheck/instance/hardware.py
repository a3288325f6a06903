"""The hardware that the node should have, by the checks that sresd runs all the time.

GPUs and NVLinks against the profile, EFA devices, Neuron devices and their error counters.
"""

from __future__ import annotations

from slurm_resilience.deepcheck.deep_results import DeepResult
from slurm_resilience.deepcheck.instance.instance_check import (
    InstanceCheck,
    InstanceContext,
    judged,
    no_gpu,
)
from slurm_resilience.health.check import Check, Unjudged
from slurm_resilience.health.check_child import ChildProbes
from slurm_resilience.health.checks.accelerator import neuron_devices
from slurm_resilience.health.checks.gpu import gpu_count, gpu_health
from slurm_resilience.health.checks.network import efa_devices
from slurm_resilience.health.documents.reading import DocumentReading


def _look(name: str, context: InstanceContext, *checks: Check) -> DeepResult:
    reading, said = DocumentReading(), []
    for check in checks:
        try:
            seen = (
                ChildProbes().probe(check, context.checks)
                if check.in_child
                else check.probe(context.checks)
            )
            judgement = check.judge(seen, context.checks)
        except Unjudged as reason:
            reading = reading.plus(DocumentReading(unjudged=(f"{check.name}: {reason}",)))
            continue
        said.append(judgement.text)
        reading = reading.plus(DocumentReading(judgement.findings))
    return judged(name, reading, "; ".join(said))


def _gpus(context: InstanceContext) -> DeepResult:
    return _look("gpu_count", context, gpu_count.CHECK, gpu_health.CHECK)


def _neuron(context: InstanceContext) -> DeepResult:
    return _look("neuron", context, neuron_devices.CHECK)


def no_neuron(context: InstanceContext) -> str:
    """Return that the node should have no Neuron device, where that is so."""
    if context.checks.expected.profile.neuron_devices or neuron_devices.probe(context.checks):
        return ""
    return "the node has no Neuron device, and the profile expects none"


def _efa(context: InstanceContext) -> DeepResult:
    return _look("efa_count", context, efa_devices.CHECK)


def _no_efa(context: InstanceContext) -> str:
    if context.checks.expected.profile.efa_devices or efa_devices.probe(context.checks).devices:
        return ""
    return "the node has no EFA device, and the profile expects none"


GPU_COUNT = InstanceCheck(
    "gpu_count", _gpus, no_gpu, about="GPUs, their NVLinks and their health (NVML)"
)
NEURON = InstanceCheck(
    "neuron", _neuron, no_neuron, about="Neuron devices and their error counters (sysfs)"
)
EFA_COUNT = InstanceCheck(
    "efa_count", _efa, _no_efa, about="EFA devices, as many as the profile has (sysfs)"
)
