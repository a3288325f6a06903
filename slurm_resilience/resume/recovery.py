"""Get from the end of one attempt to the start of the next: plan, and carry the plan out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation import companion, swap
from slurm_resilience.resume.allocation.requeue import requeue
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.decide.budgets import (
    ENDS_FOR_NAME,
    ends_without_cause,
    nodes_to_name,
)
from slurm_resilience.resume.decide.classify import Cause, Ending
from slurm_resilience.resume.decide.plan import NO_WAY_ON, Plan, PlanFacts, plan
from slurm_resilience.slurm.companion_job import per_node_words
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.wire.messages import AttemptEnded, LeftNode, NodeVerdict

SUSPECT_SECONDS = 10.0
"""For a node in place of one that is only suspected; without one the program is given up."""

SUSPENDED_LOOK_SECONDS = 5.0
"""Between two looks whether a suspended job runs again."""
ASKED_SECONDS = 3.0
"""Slurm was asked for so long after a step's end whether it preempts the job."""
PREEMPTED_LOOK_SECONDS, PREEMPTED_SAY_SECONDS = 2.0, 60.0
"""Between two looks whether Slurm has taken a job that it preempts, and two lines that tell so."""


class NextAttempt(msgspec.Struct, frozen=True):
    """All is ready for another attempt."""

    nodes: tuple[str, ...]
    """The step's nodes."""
    block: report.RecoveryBlock
    """For the job's log, once the step has been started."""


class Recovery:
    """The ways on for one supervised srun."""

    def __init__(
        self,
        context: SupervisorContext,
        step_size: int,
        min_nodes: int = 0,
    ) -> None:
        """
        Args:
            context: of the supervised srun.
            step_size: nodes that the step needs.
            min_nodes: it may go on with so few; 0: with no fewer.
        """
        self._min_nodes = min_nodes
        self._context = context
        self.step_size = step_size
        self.tasks_per_node = 0
        """As Slurm showed it of the last step; 0: it is not known, or not the same everywhere."""
        self.requeued = False
        """The job was given back to Slurm, to run again."""
        self._job_over = False
        """Slurm had ended the job, or requeued it, before the next attempt was ready."""
        self._left: dict[str, bool] = {}
        """Nodes that were left for attempts that ended there; True: sresctld knows that the program
        went on without it."""

    def can_leave(self, bad: Mapping[str, NodeVerdict], history: tuple[Ending, ...]) -> bool:
        """Return whether there is anywhere to go from nodes that must be left.

        If not, a step on nodes that still work runs on: their replacement waits for the jobs on
        them.
        """
        if any(verdict.verdict == "dead" for verdict in bad.values()):
            return True
        context = self._context
        context.allocation.refresh()
        cause = Cause("node", "", tuple(sorted(bad)))
        facts = self._facts("")
        chosen = plan(cause, facts, history, context.limits)
        if chosen.kind == "companion" and context.allocation.idle_count() < chosen.take:
            # While it still works, a step is not ended for a second allocation that is not there.
            chosen = Plan("stop", "no node is idle for a second allocation")
        if chosen.kind != "stop":
            return True
        names = fold(bad)
        reasons = "; ".join(f"{name}: {verdict.reason}" for name, verdict in bad.items())
        report.say(f"{names} should be left ({reasons}), but {chosen.reason}: the step runs on")
        return False

    def is_taken_back(self) -> bool:
        """Return whether the job was requeued, or Slurm has ended it while the next attempt was
        prepared, and may start it again."""
        allocation = self._context.allocation
        if self.requeued or not (allocation.job.is_batch and allocation.job.requeue):
            return self.requeued
        if self._job_over or not allocation.user_stop.is_set():
            return self._job_over
        # SIGTERM is how a person ends it, and how Slurm ends the script of a job that it requeues.
        return allocation.state_now() not in ("RUNNING", "SUSPENDED")

    def next_way(self, nodes: tuple[str, ...], history: tuple[Ending, ...], *, lives: bool) -> str:
        """Return in words what would follow if a node of the step failed now.

        Args:
            nodes: of the step.
            history: all endings so far.
            lives: the step is to go on without a node.
        """
        host = self._context.allocation.job.batch_host
        lost = [name for name in nodes if name != host][-1:] or list(nodes)
        facts = self._context.allocation.facts(self.step_size, "", nodes if lives else ())
        facts = msgspec.structs.replace(facts, min_nodes=self._min_nodes)
        chosen = plan(Cause("node", "", tuple(lost)), facts, history, self._context.limits)
        return f"{chosen.kind}: {chosen.reason}"

    def prepare(
        self,
        cause: Cause,
        history: tuple[Ending, ...],
        nodes: tuple[str, ...],
        *,
        attempt: int,
        noticed: float,
    ) -> NextAttempt | None:
        """Do what the plan says; None: no attempt follows.

        Args:
            cause: why the last attempt ended.
            history: all endings so far.
            nodes: of the last attempt's step.
            attempt: its number.
            noticed: when the trouble was noticed, seconds since the epoch.
        """
        context = self._context
        if cause.kind in NO_WAY_ON:
            context.link.send(AttemptEnded(attempt, history[-1].code, f"stop: {cause.reason}"))
            self._wait_to_be_taken(history[-1])
            return None
        step_ended = history[-1].ended_at or context.clock.now()
        swap_failed, unanswered = "", 0
        doubtful: set[str] = set()
        while True:
            if self._ends_while_suspended() or self._is_preempted(attempt, history):
                return None
            chosen = self._choose(cause, history, swap_failed, doubtful)
            if self._adds_doubts(chosen, nodes, doubtful):
                continue
            told = f"{chosen.kind}: {chosen.reason}"
            context.link.send(AttemptEnded(attempt, history[-1].code, told))
            if self._pauses_in_vain(chosen):
                return None
            if chosen.kind == "stop":
                if cause.kind in ("node", "program"):
                    report.say(f"not resumed: {cause.reason}; {chosen.reason}")
                return None
            if chosen.kind == "requeue":
                self._requeue(f"{cause.reason}; {chosen.reason}", chosen)
                return None
            left_before = set(context.allocation.left_nodes)
            try:
                obtained = self._obtain(cause, chosen, nodes)
            except (SlurmError, NotFound) as error:
                if self._is_over(error):
                    return None
                if context.allocation.job.state == "SUSPENDED":
                    continue  # Slurm refuses all that changes such a job, until it runs again
                unanswered += isinstance(error, SlurmUnreachable)
                if isinstance(error, SlurmUnreachable) and unanswered < swap.TRIES:
                    # It was away, and is back: the same again, from what it says now.
                    continue
                other = chosen.kind == "companion"
                what = "second allocation" if other else "exchange of nodes"
                report.say(f"no {what}: {error}")
                if _is_suspected(cause, chosen):
                    # The job has the nodes still, and the step may run there again.
                    context.allocation.left_nodes.intersection_update(left_before)
                swap_failed = f"the {what} failed ({error})"
                continue
            # It may have waited for nodes.
            if obtained is None or self._is_preempted(attempt, history):
                return None
            self._name_left(chosen, history)
            new_nodes, done = obtained
            context.events.write("nodes_ready", nodes=list(new_nodes))
            block = report.RecoveryBlock(
                what=cause.reason,
                nodes=cause.nodes,
                done=done,
                attempt=attempt + 1,
                noticed=noticed,
                step_ended=step_ended,
                nodes_ready=context.clock.now(),
                relaunched=0.0,
            )
            return NextAttempt(new_nodes, block)

    def _name_left(self, chosen: Plan, history: tuple[Ending, ...]) -> None:
        """Name the nodes to sresctld that are left for what has ended there."""
        ended = ends_without_cause(history)
        for name in chosen.leave:
            count = len(ended.get(name, ()))
            if count >= ENDS_FOR_NAME and name not in self._left:
                self._left[name] = False
                text = f"left out: {count} attempts ended on it without progress"
                self._context.link.send(LeftNode(name, text))

    def look_back(
        self, history: tuple[Ending, ...], nodes: tuple[str, ...], ran_for: float, further: bool
    ) -> None:
        """Tell sresctld of nodes that were left, and without which the program goes on.

        Args:
            history: all endings so far.
            nodes: of the running attempt's step.
            ran_for: seconds since it began.
            further: it got further than the attempts before.
        """
        if all(self._left.values()):
            return
        for name, count in nodes_to_name(history, nodes, ran_for, further).items():
            if self._left.get(name) is False:
                self._left[name] = True
                text = f"{count} attempts ended on it, and the program goes on without it"
                report.say(f"{name}: {text}; no fault of it is known")
                self._context.link.send(LeftNode(name, text, goes_on=True))

    def _pauses_in_vain(self, chosen: Plan) -> bool:
        """Wait before the plan is carried out; return whether the job was over by then."""
        allocation = self._context.allocation
        allocation.suspects.update(chosen.avoid)
        if not chosen.pause:
            return False
        report.say(f"waiting for {chosen.pause:.0f} s before the next attempt")
        if self._context.clock.wait(allocation.user_stop, chosen.pause):
            return True
        return self._has_ended()

    def _ends_while_suspended(self) -> bool:
        """Wait while the job is suspended; return whether it was over by then.

        Slurm lets nothing of it run, may give its nodes to others, and refuses to change it. (In a
        batch job this process is stopped as well.)
        """
        allocation = self._context.allocation
        if allocation.job.state != "SUSPENDED":
            return False
        report.say(f"job {allocation.id} is suspended: the next attempt waits until it runs again")
        while allocation.state_now() == "SUSPENDED":
            if self._context.clock.wait(allocation.user_stop, SUSPENDED_LOOK_SECONDS):
                return True
        return self._has_ended()

    def _is_preempted(self, attempt: int, history: tuple[Ending, ...]) -> bool:
        """Return whether Slurm is about to take the job's nodes: what began there now would be
        killed. Stay until it does, where the job would be over else.

        Args:
            attempt: number of the last one.
            history: all endings so far.
        """
        context = self._context
        ending = history[-1] if history else None
        just_asked = ending is not None and context.clock.now() - ending.ended_at < ASKED_SECONDS
        if ending is None or just_asked or not context.allocation.is_preempted():
            return False
        report.say("not resumed here: Slurm preempts the job, and takes its nodes")
        context.link.send(AttemptEnded(attempt, ending.code, "stop: Slurm preempts the job"))
        self._job_over = True
        self._wait_to_be_taken(msgspec.structs.replace(ending, preempted=True))
        return True

    def _wait_to_be_taken(self, ending: Ending) -> None:
        """Wait until Slurm takes a job that it has begun to preempt, where one that ends within its
        GraceTime is over, and not requeued, whatever its PreemptMode."""
        allocation, clock = self._context.allocation, self._context.clock
        if not (ending.preempted and allocation.job.may_be_requeued and allocation.ends_for_good()):
            return
        report.say(
            "Slurm preempts the job: srun stays until it takes the nodes (GraceTime), since this "
            "release starts no job again that ends before, even with PreemptMode=REQUEUE"
        )
        companion.release_all(allocation)
        began = told = clock.monotonic()
        while allocation.state_now() in ("RUNNING", "SUSPENDED"):
            if clock.wait(allocation.user_stop, PREEMPTED_LOOK_SECONDS):
                return
            now = clock.monotonic()
            if now - told > PREEMPTED_SAY_SECONDS:
                told = now
                report.say(f"Slurm has not taken the nodes yet: {now - began:.0f} s")
        self._job_over = True

    def _has_ended(self) -> bool:
        """Return whether Slurm has ended the job, and say so."""
        if self._context.allocation.refresh() in ("RUNNING", "SUSPENDED"):
            return False
        report.say("not resumed: the job is over")
        self._job_over = True
        return True

    def _choose(
        self, cause: Cause, history: tuple[Ending, ...], swap_failed: str, doubtful: set[str]
    ) -> Plan:
        """Choose the way on, and claim its nodes: two supervised sruns of the job that lose nodes
        in one moment would both take the same spare."""
        context, allocation = self._context, self._context.allocation
        own, taken = allocation.own_nodes, history[-1].taken if history else ()

        def decide() -> tuple[Plan, tuple[str, ...]]:
            if allocation.claims.are_shared:
                allocation.look()
            facts = self._facts(swap_failed, doubtful)
            if taken:
                facts = msgspec.structs.replace(facts, taken_nodes=taken)
            chosen = plan(cause, facts, history, context.limits)
            if chosen.kind in ("requeue", "stop"):
                return chosen, ()
            left = {*cause.nodes, *chosen.leave}
            return chosen, chosen.nodes or tuple(name for name in own if name not in left)

        chosen = allocation.claims.choose(decide, own)
        if taken and chosen.kind == "relaunch" and chosen.nodes:
            # No later exchange may undo what the person did.
            self.step_size = min(self.step_size, len(chosen.nodes))
        return chosen

    def _facts(self, swap_failed: str, doubtful: Iterable[str] = ()) -> PlanFacts:
        facts = self._context.allocation.facts(self.step_size, swap_failed)
        return msgspec.structs.replace(
            facts,
            input_lost=self._context.standard_input.lost,
            min_nodes=self._min_nodes,
            left_nodes=(*facts.left_nodes, *doubtful),
        )

    def _adds_doubts(self, chosen: Plan, nodes: tuple[str, ...], doubtful: set[str]) -> bool:
        """Ask about spares before they are used: they may have died with the node that was lost.

        Args:
            chosen: the plan.
            nodes: of the last attempt's step.
            doubtful: spares that were asked about in vain; more are added.
        """
        fresh = tuple(name for name in chosen.nodes if name not in nodes)
        doubts = self._context.link.doubts(fresh) if fresh else {}
        for name, why in sorted(doubts.items()):
            report.say(f"{name} is not used: {why}")
        doubtful.update(doubts)
        return bool(doubts)

    def _is_over(self, error: SlurmError | NotFound) -> bool:
        """Return whether the user or Slurm has ended the job, so that no other way is tried."""
        allocation = self._context.allocation
        if allocation.user_stop.is_set():
            return True
        if allocation.refresh() not in ("RUNNING", "SUSPENDED"):
            report.say(f"not resumed: {error}")
            self._job_over = True
            return True
        return False

    def _obtain(
        self, cause: Cause, chosen: Plan, nodes: tuple[str, ...]
    ) -> tuple[tuple[str, ...], str] | None:
        """Get the nodes for the next attempt.

        Returns:
            The nodes, and what was done, in words. None: the user ended it.
        """
        allocation = self._context.allocation
        allocation.left_nodes.update(chosen.leave)
        suspected = _is_suspected(cause, chosen)
        if suspected:
            allocation.suspects.update(chosen.leave)
        if chosen.kind == "relaunch":
            where = chosen.nodes or nodes
            companion.release_unused(allocation, where)
            self._give_back(chosen.leave)
            return where, f"the step runs again on {fold(where)} ({chosen.reason})"
        if chosen.kind == "companion":
            return self._with_companion(cause, chosen)
        # Slurm would give a node that only this step suspects back at once.
        if not suspected:
            swap.shrink(allocation, chosen.leave)
        patience = SUSPECT_SECONDS if suspected else self._context.limits.swap_wait
        added = swap.grow(
            allocation,
            chosen.take,
            patience,
            allocation.user_stop,
            doubts=self._context.link.doubts,
        )
        if added is None:
            return None
        allocation.left_nodes.difference_update(added)  # a new machine of that name
        allocation.refresh()
        if suspected:
            swap.shrink(allocation, chosen.leave)
            allocation.refresh()
        left = {*cause.nodes, *chosen.leave}
        where = (*[name for name in nodes if name not in left], *added)
        return where, f"{fold(left)} exchanged for {fold(added)}; now on {fold(where)}"

    def _with_companion(self, cause: Cause, chosen: Plan) -> tuple[tuple[str, ...], str] | None:
        """Get nodes in a second allocation beside the job.

        Returns:
            As `_obtain`.
        """
        context, allocation = self._context, self._context.allocation
        suspected = _is_suspected(cause, chosen)
        if not suspected:
            self._leave_for(chosen, chosen.nodes)
        got = companion.obtain(
            allocation,
            chosen.take,
            SUSPECT_SECONDS if suspected else context.limits.swap_wait,
            per_node_words(context.environment, allocation.job),
            doubts=context.link.doubts,
        )
        if got is None:
            return None
        allocation.left_nodes.difference_update(got.nodes)  # a new machine of that name
        allocation.refresh()
        where = (*chosen.nodes, *got.nodes)
        if suspected:
            # Not before: where Slurm gives none, the step runs on these nodes again.
            self._leave_for(chosen, where)
        name = fold(got.nodes)
        return where, f"a second allocation, job {got.id}, gives {name}; now on {fold(where)}"

    def _leave_for(self, chosen: Plan, where: tuple[str, ...]) -> None:
        """Give back what the next attempt does not use, of the job and of its companions."""
        companion.release_unused(self._context.allocation, where)
        self._give_back(chosen.leave)

    def _give_back(self, leave: tuple[str, ...]) -> None:
        """Give nodes back that are left: their replacement waits for the jobs on them.

        The relaunch does not depend on it: where Slurm refuses, the job keeps them.
        """
        allocation = self._context.allocation
        # The batch host cannot be given back, and no other step of the job loses its tasks by us.
        # sresctld, or Slurm itself, may have taken a node out of the job already.
        held = set(allocation.nodes) - {allocation.job.batch_host}
        free = [name for name in leave if name in held]
        if not free:
            return
        try:
            used = allocation.used_by_others(free)
            swap.shrink(allocation, [name for name in free if name not in used])
        except (SlurmError, NotFound) as error:
            report.say(f"{fold(free)} cannot be given back: {error}")
        allocation.refresh()

    def _requeue(self, reason: str, chosen: Plan) -> None:
        context = self._context
        report.say(reason)
        self.requeued = True
        context.events.write("requeue", reason=chosen.reason)
        companion.release_all(context.allocation)
        requeue(context.allocation, context.link, context.wake, reason, context.limits.requeue_wait)


def _is_suspected(cause: Cause, chosen: Plan) -> bool:
    """Return whether nodes are left on which the program failed, though nothing marks them."""
    return cause.kind == "program" and bool(chosen.leave)
