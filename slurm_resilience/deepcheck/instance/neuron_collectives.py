"""A collective among the Neuron cores of the node, by nccom-test."""

from __future__ import annotations

import json

from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepResult
from slurm_resilience.deepcheck.instance.hardware import no_neuron
from slurm_resilience.deepcheck.instance.instance_check import InstanceCheck, InstanceContext
from slurm_resilience.deepcheck.tool_call import run_tool
from slurm_resilience.health.check import Unjudged
from slurm_resilience.health.documents.nccom_text import nccom_bandwidth

LIST_SECONDS = 60.0
TEST_SECONDS = 900.0
"""Seconds for the test, which compiles its programs first."""


def _run(context: InstanceContext) -> DeepResult:
    cores = neuron_cores()
    if cores < 2:
        raise Unjudged(f"neuron-ls shows {cores} cores; a collective needs two")
    told = run_tool(["nccom-test", "-r", str(cores), "allr"], TEST_SECONDS)
    rate = nccom_bandwidth(told.both)
    if rate is None or told.code != 0:
        said = " ".join(told.both.split())[-200:] or "nothing"
        raise Unjudged(f"nccom-test exited {told.code} and came to no result; it said: {said}")
    text = f"{cores} cores reached {rate:.2f} GB/s on average"
    return DeepResult("neuron_collectives", DeepOutcome.PASSED, text, output=told.both)


def neuron_cores() -> int:
    """Return the Neuron cores that neuron-ls counts.

    Raises:
        Unjudged: it counts none.
    """
    told = run_tool(["neuron-ls", "-j"], LIST_SECONDS)
    try:
        devices = json.loads(told.out)
        cores = sum(int(device["nc_count"]) for device in devices)
    except (ValueError, TypeError, KeyError):
        raise Unjudged(f"neuron-ls exited {told.code} and named no cores") from None
    if cores < 1:
        raise Unjudged("neuron-ls shows no cores")
    return cores


NEURON_COLLECTIVES = InstanceCheck(
    "neuron_collectives", _run, no_neuron, about="a collective among the Neuron cores (nccom-test)"
)
