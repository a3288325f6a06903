"""Start the first step of an attempt: its nodes, variables and options."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from slurm_resilience.errors import SresError
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.live_step.living_program import living_command
from slurm_resilience.resume.srun.command import PLACEMENT
from slurm_resilience.resume.srun.environment import Attempt, srun_environment, task_variables
from slurm_resilience.resume.srun.output_files import appending, mark
from slurm_resilience.resume.srun.srun_options import SrunCommand
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.slurm.client import StepInfo
from slurm_resilience.slurm.hostlists import fold


def describe_attempt(
    context: SupervisorContext,
    number: int,
    restarts: int,
    nodes: tuple[str, ...],
    directory: str,
) -> Attempt:
    """Return the attempt that is to be started.

    Args:
        context: of the supervised srun.
        number: of the attempt, from 1.
        restarts: requeues of the job so far.
        nodes: of the step, in any order.
        directory: of the fence.
    """
    allocation = context.allocation
    step_nodes = allocation.in_slurms_order(nodes)
    return Attempt(
        job=allocation.id,
        number=number,
        restarts=restarts,
        step_nodes=step_nodes,
        job_nodes=allocation.in_slurms_order(allocation.nodes),
        master_address=allocation.address(step_nodes[0]),
        directory=directory,
    )


def start_first_step(
    context: SupervisorContext, attempt: Attempt, *, lives: bool, again: bool
) -> SrunStep:
    """Start the srun of an attempt.

    Args:
        context: of the supervised srun.
        attempt: it has its fence.
        lives: the step is to outlive a node.
        again: this supervisor has started one before.

    Raises:
        MissingTool: srun cannot be started.
    """
    command = context.command
    if lives:
        command = living_command(command)
    if again:
        overlaps = lives or _dead_step_is_in_the_way(context, attempt)
        command = _command_again(command, attempt, lives, overlaps)
    if attempt.number > 1:
        where = f"attempt {attempt.number} starts on {fold(attempt.step_nodes)}"
        mark(command, context.environment, where)
        command = appending(command, context.environment)
    argv, environment = context.launch.line(
        command,
        task_variables(attempt),
        srun_environment(context.environment, attempt.job_nodes, context.allocation.changed),
    )
    signals = context.user_signals
    with signals.starting, context.standard_input.attempt() as stdin:
        step = SrunStep(
            argv,
            environment,
            context.wake.set,
            relay_stderr=not command.has("pty"),
            on_news=context.wake.set if lives else lambda: None,
            clock=context.clock,
            stdin=stdin,
        )
        signals.steps = [step]
        if context.allocation.user_stop.is_set():
            step.send_signal(signal.SIGTERM)  # it came while this step was being prepared
    return step


def _dead_step_is_in_the_way(context: SupervisorContext, attempt: Attempt) -> bool:
    host = context.host.split(".", maxsplit=1)[0]

    def is_dead(info: StepInfo) -> bool:
        here = info.srun_host.split(".", maxsplit=1)[0] == host
        return here and not Path(f"/proc/{info.srun_pid}").exists()

    try:
        steps = context.client.steps(attempt.job)
    except SresError:
        return not (context.command.has("exclusive") or context.command.has("exact"))
    there = [info for info in steps if set(info.nodes) & set(attempt.step_nodes)]
    return waits_for_the_dead(there, [info for info in steps if is_dead(info)])


def waits_for_the_dead(steps: Sequence[StepInfo], dead: Sequence[StepInfo]) -> bool:
    """Return whether a new step would wait for dead ones alone, so that it may overlap them. Pure.

    Slurm keeps a step in its books for a minute after its tasks are gone where it waits for a lost
    node. A step that lives, or that waits for its turn, is waited for as with plain srun.

    Args:
        steps: on the nodes of the new step.
        dead: those whose srun is gone.
    """
    own = [info for info in steps if info.step not in ("batch", "extern", "interactive")]
    return bool(own) and all(info in dead for info in own)


def _command_again(
    command: SrunCommand, attempt: Attempt, lives: bool, overlaps: bool
) -> SrunCommand:
    # The user's own choice of nodes named some that are gone.
    nodes = attempt.step_nodes
    command = command.without(*PLACEMENT)
    command = command.adding(f"--nodes={len(nodes)}", f"--nodelist={fold(nodes)}")
    # Slurm may take a step that lost a node for one that still runs.
    if overlaps and not (lives and command.has("exclusive")):
        command = command.without("exclusive").adding("--overlap")
    return command
