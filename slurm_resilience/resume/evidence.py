"""Gather how an attempt ended: from its step, and from what is known of its nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from slurm_resilience.resume import report
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.decide.classify import NO_STEPS, Ending, ObservedSteps, killed
from slurm_resilience.resume.decide.task_ends import TaskEnd, node_that_failed, representative
from slurm_resilience.resume.fence import Fence
from slurm_resilience.resume.live_step.live_steps import EndWord, StepEnd
from slurm_resilience.resume.live_step.living_program import can_live
from slurm_resilience.resume.srun.stderr_reader import code_of, killed_from_outside
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.slurm.hostlists import fold

LOOK_SECONDS = 0.5
"""Between two looks at the nodes of a step that has just failed."""
_PERSONS = (EndWord.PERSON, EndWord.SIGNALLED)
"""A person's words, unless Slurm preempts the job."""
NAME_SECONDS = 0.5
"""sresctld marks a node in Slurm first, and names the fault to the supervisor right after."""


def gather_evidence(
    context: SupervisorContext,
    fence: Fence,
    end: StepEnd,
    nodes: tuple[str, ...],
    progress_before: int,
    observed: ObservedSteps = NO_STEPS,
    *,
    ended_well: bool = False,
) -> Ending:
    """Return what `classify` needs; wait a moment for a diagnosis of the nodes if need be.

    Args:
        context: of the supervised srun.
        fence: knows the program's progress.
        end: of the attempt's last step.
        nodes: those of the attempt.
        progress_before: the last step that was reported before this attempt.
        observed: the steps that its tasks told.
        ended_well: each of its tasks has ended well, by slurmstepd's word.
    """
    step = end.step
    ends = step.reports.ends()
    faulty = end.faulty | _faulty(context)
    silent: dict[str, str] = {}
    taken = end.taken
    state = context.allocation.job.state
    # A program that ended well, or was ended, does not wait for Slurm's answers.
    reported = end.word is EndWord.TRAINING
    interrupted = "" if reported else context.user_ended(step, end.stopped_by_us)
    asks = end.code != 0 and not interrupted
    if end.code == 0 and not reported and step.only_signalled:
        state = context.allocation.refresh()
    if asks:
        state = context.allocation.refresh()
        # Slurm releases srun in the moment of the mark, and sresctld names the fault right after.
        faulty = faulty or _faulty(context)
    elif end.code != 0 and not interrupted.startswith("SIGINT"):
        # Slurm sends these signals too, when it ends a job: for a lost node, a requeue, the limit.
        state = context.allocation.state_now()
    # Slurm is asked about companions: it answers again by now if it was away.
    cancelled_part = _cancelled_part(context, end, ends)
    cancelled = end.word in _PERSONS or cancelled_part is not None
    only_told = end.word is EndWord.SIGNALLED or (
        end.word is not EndWord.PERSON
        and cancelled_part is not None
        and cancelled_part.only_signalled
    )
    # Where Slurm's word on it was lost, tasks that it told to end look as if they had failed.
    by_slurm = only_told or (asks and not cancelled)
    preempted = by_slurm and state == "RUNNING" and context.allocation.is_preempted()
    if only_told and state == "RUNNING" and not preempted:
        # It may have taken the nodes in between.
        state = context.allocation.refresh()
    if asks and state == "RUNNING" and not (cancelled or reported or preempted):
        if not faulty:
            # A node may be at fault, and neither Slurm nor sresctld has said so yet.
            unused = {*_give_up_unused(context, end), *taken}
            booted = context.allocation.boot_times(nodes)
            faulty = _wait_for_diagnosis(context, tuple(n for n in nodes if n not in unused))
            taken = (*taken, *_taken(context, end, booted, faulty))
            context.allocation.suspects.update(taken)
            faulty = {name: why for name, why in faulty.items() if name not in taken}
        fine = [name for name in nodes if name not in faulty]
        silent = _silent(context, [name for name in _not_launched(end) if name in fine], fine)
        state = context.allocation.refresh()
    if state not in ("RUNNING", "SUSPENDED"):
        # Slurm ended the job for them, and sresctld has not judged them.
        lost = {name for part in end.parts or (step,) for name in part.failed_nodes}
        faulty = dict.fromkeys(sorted(lost), "Slurm gave the node up") | faulty
    if end.code != 0 and faulty and ended_well:
        # srun waits for the lost node, or tells of it, and of nothing else.
        report.say(f"every task had ended well before {fold(faulty)} was lost")
        end = msgspec.structs.replace(end, code=0, stopped_by_us=False)
    return Ending(
        code=end.code,
        ran_for=step.ran_for,
        progressed=fence.progress() > progress_before,
        job_state=state,
        faulty=faulty,
        interrupted=interrupted,
        # A node may be at fault as well: the person's word counts.
        cancelled=cancelled and not reported,
        stopped_by_us=end.stopped_by_us,
        trained=end.late_code != 0,
        ends=_failed_once(context, ends),
        timed_out=(cancelled_part or step).timed_out,
        preempted=preempted,
        log=step.log.explain() if end.code != 0 and end.hang is None else None,
        ended_at=_ended_at(context, step),
        nodes=nodes,
        first_failed=_first_failed(context, end, ends),
        hang=end.hang.reason if end.hang is not None else "",
        observed=observed,
        unanswered=_is_unanswered(end),
        not_launched=_not_launched(end),
        silent=silent,
        taken=taken,
        threadless=_is_unanswered(end) and not end.step.had_threads,
        refused=end.step.refused if end.code != 0 else "",
    )


def _taken(
    context: SupervisorContext, end: StepEnd, booted: Mapping[str, str], faulty: Collection[str]
) -> tuple[str, ...]:
    """Return those of the nodes without fault that a person has taken out of the job, before its
    tasks had begun or later. Slurm has given none of them up."""
    given_up = {name for part in end.parts or (end.step,) for name in part.failed_nodes}
    suspects = [name for name in faulty if name not in given_up]
    if not suspects:
        return ()
    from slurm_resilience.resume.allocation.taken_nodes import taken_by_person  # late: as below

    return taken_by_person(context, booted, suspects, context.allocation.user_stop)


def _is_unanswered(end: StepEnd) -> bool:
    return end.code != 0 and not (end.step.was_answered and end.step.had_threads)


def _not_launched(end: StepEnd) -> dict[str, str]:
    parts = end.parts or (end.step,)
    return {n: why for part in parts for n, why in part.failed_launches.items() if end.code != 0}


def _silent(
    context: SupervisorContext, not_launched: Collection[str], nodes: Sequence[str]
) -> dict[str, str]:
    """Return the nodes on which srun could start no task, and which do not answer."""
    if not not_launched:
        return {}
    # Late: no step waits for what only a failed launch needs.
    from slurm_resilience.resume.allocation.silent_nodes import silent_nodes

    return silent_nodes(
        sorted(not_launched),
        [name for name in nodes if name not in not_launched],
        context.client,
        context.link.doubts,
        context.host_calls.look_at_ports,
    )


def _ended_at(context: SupervisorContext, step: SrunStep) -> float:
    clock = context.clock
    return clock.now() - (clock.monotonic() - step.ended_at if step.ended_at else 0.0)


def _failed_once(context: SupervisorContext, ends: tuple[TaskEnd, ...]) -> tuple[TaskEnd, ...]:
    """Return the failures that are worth keeping, without their time where the other tasks go on
    without the one that failed first."""
    kept = representative(ends)
    if not can_live(context.command, context.environment):
        return kept
    return tuple(msgspec.structs.replace(end, at=0.0) for end in kept)


def _first_failed(context: SupervisorContext, end: StepEnd, ends: tuple[TaskEnd, ...]) -> str:
    """Return the only node with tasks that failed by themselves; the others were ended for them."""
    if end.hang is not None:
        return end.hang.node
    not_launched = _not_launched(end)
    if not_launched:
        return next(iter(not_launched)) if len(not_launched) == 1 else ""
    told = ends or tuple(_in_sruns_words(end.step))
    if can_live(context.command, context.environment):
        # A task that was killed may have come back long before the others ended.
        told = tuple(one for one in told if one.failed_by_itself)
    return node_that_failed(told, end.crashed_on)


def _in_sruns_words(step: SrunStep) -> Iterator[TaskEnd]:
    """Yield the ends of tasks where slurmstepd tells of none: there is no plugin."""
    for ended in tuple(step.ended_tasks):  # a copy: it grows in another thread
        code = code_of(ended.how)
        for node in ended.nodes:
            yield TaskEnd(0, 0, ended.tasks[0], code, by_signal=killed(code), node=node)


def hear_cancels(context: SupervisorContext, parts: Sequence[SrunStep]) -> None:
    """Ask of each companion whose part Slurm ends whether it goes on, as soon as that is told.

    Slurm ends a companion's steps after the companion: a part that ends before it was cancelled by
    a person. Later on the companion may be over as well, for the node that its part has waited for.

    Args:
        context: of the supervised srun.
        parts: all sruns of the attempt.
    """
    allocation = context.allocation
    for part in parts:
        told = part.told_end
        # Words that have lapsed were another step's: a task may print what its own srun says.
        ended = told.aborted or (told.cancelled and not part.only_signalled)
        if part.job not in (0, allocation.id):
            known = ended and part.job_outlives_it
            part.job_outlives_it = known or (ended and allocation.is_running(part.job))


def _cancelled_part(
    context: SupervisorContext, end: StepEnd, ends: tuple[TaskEnd, ...]
) -> SrunStep | None:
    """Return the srun of the attempt that a person cancelled; None: none was.

    Slurm words the end of a companion as that of its step, and so it does when it begins to preempt
    one: it is a loss of its nodes, unless the step was cancelled before. It hides no word of
    another part.
    """
    allocation = context.allocation
    for part in end.parts or (end.step,):
        if not _is_cancelled(part, end, ends):
            continue
        elsewhere = part.job not in (0, allocation.id) and not part.job_outlives_it
        if not (elsewhere and (part.only_signalled or allocation.is_over(part.job))):
            return part
    return None


def _is_cancelled(step: SrunStep, end: StepEnd, ends: tuple[TaskEnd, ...]) -> bool:
    """Return whether a person cancelled the step, before the supervisor itself had it ended.

    Slurm says so among what the tasks print, so it counts only for this very step, and not where
    the first task that failed got a signal that nothing but its own fault sends: a program that is
    being ended may crash on its way out. srun's own words name no step, so they do not count either
    where that task failed with a code of its own, unless others were killed after them, or it was
    a task of another part: of a part that waits for a lost node no task is there to be killed.
    """
    first = next((one for one in ends if one.failed), None)
    by_itself = first is not None and first.failed_by_itself
    if first is not None and by_itself and first.by_signal:
        return False
    told = step.told_end
    if told.cancelled or not told.aborted:
        return told.cancelled
    return told.killed_after > 0 or not by_itself or (len(end.parts) > 1 and _no_task_failed(step))


def _no_task_failed(step: SrunStep) -> bool:
    """Return whether a part did not end well, and by its srun no task of it failed by itself."""
    ended = tuple(step.ended_tasks)  # a copy: it grows in another thread
    return step.code != 0 and all(killed_from_outside([one]) for one in ended)


def _give_up_unused(context: SupervisorContext, end: StepEnd) -> set[str]:
    """Give up the companions that have ended since their part of the attempt had: the others went
    on without it, and a companion without a step ends itself.

    Returns:
        Their nodes: none is at fault.
    """
    allocation = context.allocation
    given_up: set[str] = set()
    for part in end.parts:
        if part.job in (0, allocation.id) or not part.ended_by_itself:
            continue
        fault = part.failed_nodes or _no_task_failed(part)
        if not fault and allocation.is_over(part.job):
            held = allocation.companions.held
            given_up.update(n for one in held if one.id == part.job for n in one.nodes)
            allocation.companions.held = [one for one in held if one.id != part.job]
    return given_up


def _faulty(context: SupervisorContext) -> dict[str, str]:
    return {name: verdict.reason for name, verdict in context.link.faulty().items()}


def _wait_for_diagnosis(context: SupervisorContext, nodes: tuple[str, ...]) -> dict[str, str]:
    """Wait for a verdict: a step often ends before the node that is at fault is judged. The nodes
    are asked to check themselves meanwhile; one that does not answer is judged as ever."""
    limits, began = context.limits, context.clock.monotonic()
    unnamed_since = 0.0
    if limits.check_wait:
        context.link.ask_checks(nodes, limits.check_wait)
    else:
        context.link.ask(nodes)
    while True:
        told = _faulty(context)
        # sresctld names the fault; Slurm only shows that the node was marked for it.
        bad = context.allocation.bad(nodes) | told
        # Checks take longer than a verdict that is on its way already.
        limit = max(limits.check_wait, limits.diagnosis_wait)
        wait = limit if context.link.checks_run else limits.diagnosis_wait
        left = began + wait - context.clock.monotonic()
        if bad and not told and context.link.checks_run:
            unnamed_since = unnamed_since or context.clock.monotonic()
            left = min(left, unnamed_since + NAME_SECONDS - context.clock.monotonic())
            if left > 0 and not context.allocation.user_stop.is_set():
                bad = {}
        if bad or left <= 0 or context.allocation.user_stop.is_set():
            return bad
        context.wake.clear()
        context.clock.wait(context.wake, min(left, LOOK_SECONDS))
