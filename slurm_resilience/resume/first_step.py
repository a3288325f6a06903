"""Start the first step of an attempt: its nodes, variables and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from slurm_resilience.errors import SlurmUnreachable, SresError
from slurm_resilience.resume.allocation.companion_world import (
    WorldPart,
    companion_variables,
    part_command,
    part_environment,
    part_numbers,
    world_parts,
    world_variables,
)
from slurm_resilience.resume.allocation.slurmctld_wait import ask_patiently
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.live_step.living_program import living_command
from slurm_resilience.resume.progress.step_report import VARIABLE as STEPS_VARIABLE
from slurm_resilience.resume.srun.command import PLACEMENT, tasks_by_node
from slurm_resilience.resume.srun.environment import Attempt, srun_environment, step_variables
from slurm_resilience.resume.srun.output_files import appending, mark
from slurm_resilience.resume.srun.srun_options import SrunCommand
from slurm_resilience.resume.srun.srun_process import NO_INPUT
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.srun.task_reports import StepReports
from slurm_resilience.slurm.client import StepInfo
from slurm_resilience.slurm.hostlists import fold


class PlannedAttempt(msgspec.Struct, frozen=True):
    """An attempt before its step is started."""

    attempt: Attempt
    addresses: dict[str, str]
    """Addresses of the job's nodes, as Slurm has them."""
    parts: tuple[WorldPart, ...] = ()
    """The allocations that it is spread over, the job's own first; none: that one only."""
    steps_to: str = ""
    """The address to which its tasks report their steps: `$SRES_PROGRESS`; empty: none."""


def plan_attempt(
    context: SupervisorContext,
    number: int,
    restarts: int,
    nodes: tuple[str, ...],
    directory: str,
    tasks_per_node: int = 0,
) -> PlannedAttempt:
    """Return the attempt that is to be started.

    Args:
        context: of the supervised srun.
        number: of the attempt, from 1.
        restarts: requeues of the job so far.
        nodes: of the step, in any order.
        directory: of the fence.
        tasks_per_node: the same on every node; 0: it is not known.

    Raises:
        SlurmError: slurmctld did not answer, and never has.
    """
    allocation = context.allocation
    step_nodes = allocation.in_slurms_order(nodes)
    held = [(c.id, c.nodes) for c in allocation.companions.held]
    parts = world_parts(allocation.id, step_nodes, held)
    if parts:
        step_nodes = tuple(name for part in parts for name in part.nodes)
    size = allocation.companions.size
    attempt = Attempt(
        job=allocation.id,
        number=number,
        restarts=restarts,
        step_nodes=step_nodes,
        job_nodes=allocation.in_slurms_order(allocation.nodes),
        master_address=allocation.address(step_nodes[0]),
        directory=directory,
        tasks_per_node=tasks_per_node,
        sizes=f"{min(size.least, len(step_nodes))}:{size.most}" if size is not None else "",
        named_sizes=size.sizes if size is not None else (),
    )
    addresses = allocation.read_addresses((*nodes, *allocation.nodes))
    return PlannedAttempt(attempt, addresses | {step_nodes[0]: attempt.master_address}, parts)


def start_first_step(
    context: SupervisorContext,
    planned: PlannedAttempt,
    *,
    lives: bool,
    again: bool,
) -> SrunStep | None:
    """Start the srun of an attempt; None: the user ended this while it was prepared.

    Args:
        context: of the supervised srun.
        planned: the attempt; it has its fence.
        lives: the step is to outlive a node.
        again: this supervisor has started one before.

    Raises:
        SlurmUnreachable: srun could not be started for `resume.slurmctld_wait` seconds.
        MissingTool: it cannot be started at all.
    """
    attempt, addresses, parts = planned.attempt, planned.addresses, planned.parts
    command, own = context.command, dict(context.environment)
    variables = step_variables(attempt, addresses)
    if planned.steps_to:
        variables[STEPS_VARIABLE] = planned.steps_to
    if lives:
        command = living_command(command)
    if again:
        overlaps = lives or _dead_step_is_in_the_way(context, attempt)
        if not parts:
            command = placed(command, attempt.step_nodes, context.environment)
        command, own = context.launch.on_fewer(command, own, len(attempt.step_nodes))
        if not parts:
            command = with_as_many_tasks(command, own, attempt)
        else:
            command = part_command(command, attempt, parts[0])
            own = part_environment(own, attempt, parts[0])
            variables |= world_variables(attempt, parts)
        if overlaps and not (lives and command.has("exclusive")):
            # Slurm may take a step that lost a node for one that still runs.
            command = command.without("exclusive").adding("--overlap")
    if attempt.number > 1:
        where = f"attempt {attempt.number} starts on {fold(attempt.step_nodes)}"
        mark(command, context.environment, where)
        command = appending(command, context.environment)
    reports = _expect_reports(context, attempt, addresses)
    argv, environment = context.launch.line(
        command,
        variables,
        srun_environment(own, attempt.job_nodes, context.allocation.changed),
        reports.target,
    )
    signals = context.user_signals

    def start() -> SrunStep | None:
        with signals.starting, context.standard_input.attempt() as stdin:
            if context.allocation.user_stop.is_set():
                return None
            step = context.host_calls.start_srun(
                argv,
                environment,
                context.wake.set,
                has_terminal=command.has("pty"),
                on_news=context.wake.set if lives else lambda: None,
                clock=context.clock,
                stdin=stdin,
                name=f"{attempt.job}.",
                reports=reports,
                quiet=context.quiet,
            )
            signals.steps = [step]
        return step

    return _start_patiently(context, start)


def _start_patiently(
    context: SupervisorContext, start: Callable[[], SrunStep | None]
) -> SrunStep | None:
    """Start an srun as soon as this machine starts programs again; None: the user ended this.

    Memory or the user's processes may be used up for a moment, as what the last attempt left on
    this node is still being ended.

    Raises:
        SlurmUnreachable: it did not for `resume.slurmctld_wait` seconds.
        MissingTool: srun cannot be started at all.
    """
    allocation = context.allocation
    stop = allocation.user_stop
    try:
        return ask_patiently(start, allocation.patience, context.clock, stop, "waiting for srun")
    except SlurmUnreachable:
        if stop.is_set():
            return None
        raise


def start_companion_step(
    context: SupervisorContext, planned: PlannedAttempt, part: WorldPart, main: SrunStep
) -> SrunStep | None:
    """Start the srun of an attempt's part in a companion; None: the attempt ends already.

    Args:
        context: of the supervised srun.
        planned: the attempt, with the main job's step as Slurm shows it.
        part: of its world.
        main: the srun in the job itself.

    Raises:
        SlurmUnreachable: srun could not be started for `resume.slurmctld_wait` seconds.
        MissingTool: it cannot be started at all.
    """
    attempt = planned.attempt
    command, own = context.launch.on_fewer(
        context.command, context.environment, len(attempt.step_nodes)
    )
    reports = StepReports("")
    if context.launch.has_plugin:
        address = planned.addresses.get(part.nodes[0], part.nodes[0])
        reports = context.reports.expect(address, context.wake.set)
    reports.behind(main.reports, part.first_node, part.first_node * attempt.tasks_per_node)
    variables = companion_variables(attempt, planned.parts, part)
    if planned.steps_to:
        variables[STEPS_VARIABLE] = planned.steps_to
    argv, environment = context.launch.line(
        part_command(command, attempt, part),
        variables,
        part_environment(own, attempt, part),
        reports.target,
    )
    signals = context.user_signals

    def start() -> SrunStep | None:
        with signals.starting:
            if context.allocation.user_stop.is_set() or not main.running:
                return None
            step = context.host_calls.start_srun(
                argv,
                environment,
                context.wake.set,
                on_news=context.wake.set,
                clock=context.clock,
                # The main job's srun reads what there is to be read.
                stdin=NO_INPUT,
                name=f"{part.job}.",
                reports=reports,
                numbers=part_numbers(context.command, context.environment, attempt, part),
                quiet=context.quiet,
            )
            signals.steps.append(step)
        return step

    return _start_patiently(context, start)


def _expect_reports(
    context: SupervisorContext, attempt: Attempt, addresses: Mapping[str, str]
) -> StepReports:
    if not context.launch.has_plugin:
        return StepReports("")
    return context.reports.expect(other_address(context, attempt, addresses), context.wake.set)


def other_address(
    context: SupervisorContext, attempt: Attempt, addresses: Mapping[str, str]
) -> str:
    """Return the address of a node of the step, best of another machine than this one."""
    here = context.host.split(".", maxsplit=1)[0]
    # The address by which others reach this machine is not always the one by which it does itself.
    others = [name for name in attempt.step_nodes if name != here]
    node = (*others, *attempt.step_nodes)[0]
    return addresses.get(node, node)


def _dead_step_is_in_the_way(context: SupervisorContext, attempt: Attempt) -> bool:
    host = context.host.split(".", maxsplit=1)[0]

    def is_dead(info: StepInfo) -> bool:
        here = info.srun_host.split(".", maxsplit=1)[0] == host
        return here and not context.host_calls.lives(info.srun_pid)

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


def with_as_many_tasks(
    command: SrunCommand, environment: Mapping[str, str], attempt: Attempt
) -> SrunCommand:
    """Return the command for as many tasks on each node as the step had before. Pure.

    Outside of a batch script, srun starts one task for each node of the job in spite of
    --ntasks-per-node; with --nodes, which a further attempt adds, that many on each.
    """
    per_node = command.has("ntasks-per-node") or "SLURM_NTASKS_PER_NODE" in environment
    counted = command.has("ntasks") or bool(environment.keys() & {"SLURM_NTASKS", "SLURM_NPROCS"})
    if not per_node or counted or not attempt.tasks_per_node:
        return command
    return command.adding(f"--ntasks={attempt.tasks_per_node * len(attempt.step_nodes)}")


def placed(
    command: SrunCommand, nodes: Sequence[str], environment: Mapping[str, str]
) -> SrunCommand:
    """Return the command for these nodes: the user's own choice named some that are gone. Pure.

    With an arbitrary distribution, -w has a word for each task. Each lost node's words become
    those of one that is new; newer releases of Slurm refuse --nodes beside it.
    """
    words = tasks_by_node(command, environment)
    if not words:
        command = command.without(*PLACEMENT)
        return command.adding(f"--nodes={len(nodes)}", f"--nodelist={fold(nodes)}")
    fresh = [name for name in nodes if name not in words]
    lost = [name for name in dict.fromkeys(words) if name not in nodes]
    instead = dict(zip(lost, fresh, strict=False))
    listed = ",".join(instead.get(name, name) for name in words)
    return command.without(*PLACEMENT).adding(f"--nodelist={listed}")
