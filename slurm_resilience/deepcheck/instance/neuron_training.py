"""A small training on every Neuron core of the node, whose result is known beforehand."""

from __future__ import annotations

from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepResult
from slurm_resilience.deepcheck.instance.hardware import no_neuron
from slurm_resilience.deepcheck.instance.instance_check import InstanceCheck, InstanceContext
from slurm_resilience.deepcheck.instance.neuron_collectives import neuron_cores
from slurm_resilience.deepcheck.step_lines import GroupTrouble, LineAssembler, NeuronTrained
from slurm_resilience.deepcheck.step_requests import NeuronRequest
from slurm_resilience.deepcheck.tool_call import RunningTool, ToolOutput, start_program
from slurm_resilience.health.check import Unjudged
from slurm_resilience.model import Severity

PROGRAM = "slurm_resilience.deepcheck.torch_programs.neuron_program"
COMPILE_SECONDS = 900.0
"""Seconds until the first step: the model is compiled, on one core while the others wait for it."""
CORE = "NEURON_RT_VISIBLE_CORES"


def _run(context: InstanceContext) -> DeepResult:
    told = _on_each_core(neuron_cores(), context.seconds)
    output = "\n".join(one.both for one in told)
    trained, failed = [], []
    for core, one in enumerate(told):
        message = _message(core, one)
        trained.append(message)
        if message.wrong:
            failed.append(f"core {core}: {message.wrong} wrong weights")
    if failed:
        return DeepResult(
            "neuron_training",
            DeepOutcome.FAILED,
            "; ".join(failed),
            Severity.REPLACE,
            output=output,
        )
    steps = sum(one.steps for one in trained)
    text = f"{len(trained)} cores were right in {steps} steps of training"
    return DeepResult("neuron_training", DeepOutcome.PASSED, text, output=output)


def _on_each_core(cores: int, seconds: float) -> list[ToolOutput]:
    """Train on all cores at the same time; each process sees one."""
    running: list[RunningTool] = []
    try:
        for core in range(cores):
            running.append(start_program(PROGRAM, NeuronRequest(seconds), {CORE: str(core)}))
        return [one.end(seconds + COMPILE_SECONDS) for one in running]
    except BaseException:
        for one in running:
            one.kill()
        raise


def _message(core: int, told: ToolOutput) -> NeuronTrained:
    assembler = LineAssembler()
    for line in told.out.splitlines():
        message = assembler.feed(line)
        if isinstance(message, GroupTrouble):
            raise Unjudged(message.text)
        if isinstance(message, NeuronTrained):
            return message
    said = " ".join(told.both.split())[-200:] or "nothing"
    raise Unjudged(f"core {core}: the training ended with code {told.code}; it said: {said}")


NEURON_TRAINING = InstanceCheck(
    "neuron_training",
    _run,
    no_neuron,
    about="a training with a known result on each core (torch-neuronx)",
)
