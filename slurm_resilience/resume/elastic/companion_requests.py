"""Ask Slurm for the companions of an elastic step, watch them, and give them back.

In a thread of its own: Slurm may take minutes to answer, and the step is watched meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import queue
from collections.abc import Callable
from threading import Event

import msgspec

from slurm_resilience.errors import NotFound, SresError
from slurm_resilience.model import Job
from slurm_resilience.resume import report
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.elastic import size_events as ev
from slurm_resilience.resume.srun.step import SrunStep, find_step
from slurm_resilience.slurm.companion_job import (
    CompanionRequest,
    companion_name,
    is_companion,
    per_node_words,
)

LOOK_SECONDS = 1.0
"""Between two looks at the companions."""
WAIT_SECONDS, WAITS_ON_SECONDS = 20.0, 600.0
"""From a request until it is asked why it still waits, and between two such questions."""
STOP_SECONDS = 20.0
"""For the thread to give all companions back."""

Order = ev.AskForGroup | ev.AskGroupToLeave | ev.GiveBack


_HINTS = {
    "PartitionTimeLimit": "this job may run for longer than that partition allows; give the job a "
    "shorter --time, or srun another --auto-resume-partition",
    "JobHeld": "a person holds it, until scontrol release",
    "job requeued in held state": "a person holds it, until scontrol release",
    "Partition": "an administrator has closed that partition; wait, or srun another "
    "--auto-resume-partition",
    "InvalidQOS": "an administrator has removed that QOS; srun another --auto-resume-qos",
    "QOS": "a limit of its QOS; an administrator can raise it, and it may pass as other jobs end",
    "Assoc": "a limit of your account; an administrator can raise it, and it may pass as other "
    "jobs end",
}
"""By the beginning of Slurm's word for what a companion waits for."""
_BY_PERSON = {
    "CANCELLED": "was cancelled by a person",
    "TIMEOUT": "had reached its time limit, which is shorter than this job's",
}
"""By the state of a companion that this srun has not ended: what else ends one, Slurm's turn or its
nodes' faults, is told in other ways."""
_ENDING = ("COMPLETING", *_BY_PERSON)


def hint(reason: str) -> str:
    """Return what a person can do about a companion that waits for this. Pure."""
    found = next((text for word, text in _HINTS.items() if reason.startswith(word)), "")
    return f": {found}" if found else " (squeue shows it)"


class CompanionRequests:
    """The orders to Slurm, and what came of them."""

    def __init__(
        self,
        context: SupervisorContext,
        partition: str,
        qos: str,
        step_of: Callable[[int], SrunStep | None],
    ) -> None:
        """
        Args:
            context: of the supervised srun.
            partition: of the companions; empty: the job's.
            qos: the same.
            step_of: finds an srun by its number among the attempt's steps.
        """
        self._context = context
        self._queue = (partition, qos)
        self._step_of = step_of
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[ev.SizeEvent] = queue.SimpleQueue()
        self._shown: dict[int, ev.CompanionSeen] = {}
        """The companion of each group that has one, as Slurm showed it last."""
        self._granted: dict[int, int] = {}
        """Companions that have had nodes, and are not given back: their requeues before that."""
        self._requeued: dict[int, int] = {}
        """By group, a companion that was to be given back, and that a person has requeued."""
        self._ending: set[int] = set()
        """Companions that Slurm was ending when they were given back, until it shows why."""
        self._is_unsure = False
        """A request has failed: Slurm may have taken it all the same, if only a little later."""
        self._ask_why_at = math.inf
        self._told: set[str] = set()
        """Reasons for which companions wait, and which were reported."""
        self._stop = Event()
        self._ordered = Event()
        self._thread = context.host_calls.start_thread(self._run, "companions")

    def order(self, order: Order) -> None:
        """Have something done."""
        self._orders.put(order)
        self._ordered.set()

    def take(self) -> list[ev.SizeEvent]:
        """Return what is new."""
        taken = []
        while not self._events.empty():
            taken.append(self._events.get())
        return taken

    def begin_stop(self) -> None:
        """Have all companions given back, and wait for nothing."""
        self._stop.set()
        self._ordered.set()

    def stop(self) -> None:
        """Give all companions back, and end."""
        self.begin_stop()
        self._thread.join(timeout=STOP_SECONDS)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._context.clock.wait(self._ordered, LOOK_SECONDS)
                self._ordered.clear()
                while not self._orders.empty():
                    self._carry_out(self._orders.get())
                for group in tuple(self._shown):
                    self._look_at(group)
                for group in tuple(self._requeued):
                    self._look_at_requeued(group)
                for number in tuple(self._ending):
                    self._tell_why_it_ended(number)
                self._tell_why_they_wait()
        finally:
            while not self._orders.empty():
                order = self._orders.get()
                if isinstance(order, ev.GiveBack):
                    self._give_back(order.group, order.companion)
            for seen in self._shown.values():
                self._end_companion(seen.companion)
            for number in self._requeued.values():
                self._end_companion(number)
            if self._is_unsure:
                self._end_unknown()

    def _carry_out(self, order: Order) -> None:
        match order:
            case ev.AskForGroup():
                self._ask(order)
            case ev.AskGroupToLeave(companion, steps):
                for number in steps:
                    self._signal(companion, number)
            case ev.GiveBack(group, companion):
                if order.is_unasked and self._runs_on(companion):
                    self._tell(ev.GroupLeftUnasked(group, companion, order.nodes))
                self._give_back(group, companion)

    def _tell(self, event: ev.SizeEvent) -> None:
        self._events.put(event)
        self._context.wake.set()

    def _ask(self, order: ev.AskForGroup) -> None:
        context, allocation = self._context, self._context.allocation
        try:
            kept = self._requeued.get(order.group, 0)
            if kept and self._is_own(kept):
                self._note_asked(order.group, self._requeued.pop(order.group))
                return
            self._requeued.pop(order.group, None)
            if self._is_unsure:
                self._end_unknown()
            job = context.client.job(allocation.id)
            if job.state != "RUNNING" or job.restarts != allocation.job.restarts:
                raise NotFound(f"job {job.id} is {job.state}")
            excluded = (*allocation.excluded, *sorted(allocation.suspects))
            partition, qos = self._queue
            wanted = msgspec.structs.replace(
                job,
                excluded_nodes=excluded,
                partition=partition or job.partition,
                qos=qos or job.qos,
            )
            per_node = per_node_words(context.environment, job)
            supervisor = allocation.companions.supervisor
            number = context.client.ask_companion(
                CompanionRequest(wanted, order.nodes, supervisor, per_node, lent=True)
            )
        except SresError as error:
            # Slurm may have taken the request all the same, and its answer was lost.
            self._end_unknown()
            self._is_unsure = True
            self._tell(ev.GroupFailed(order.group, str(error)))
            return
        for group in [g for g, seen in self._shown.items() if seen.companion == number]:
            # Slurm has forgotten that one, and given its number to the new one.
            del self._shown[group]
            self._tell(ev.CompanionSeen(group, number, "", ()))
        self._note_asked(order.group, number)

    def _note_asked(self, group: int, number: int) -> None:
        self._shown[group] = ev.CompanionSeen(group, number, "PENDING", ())
        self._ask_why_at = self._context.clock.monotonic() + WAIT_SECONDS
        self._tell(ev.GroupAsked(group, number))

    def _end_unknown(self) -> None:
        """End companions of this supervisor that it knows nothing of, as far as Slurm answers."""
        allocation, client = self._context.allocation, self._context.client
        own = (allocation.job.restarts, allocation.companions.supervisor)
        known = {seen.companion for seen in self._shown.values()} | {*self._requeued.values()}
        with contextlib.suppress(SresError):
            for found in client.companions(allocation.job):
                if found.id not in known and (found.restarts, found.supervisor) == own:
                    client.cancel_job(found.id)
            self._is_unsure = False

    def _look_at(self, group: int) -> None:
        allocation, before = self._context.allocation, self._shown[group]
        number = before.companion
        try:
            job = self._read(number)
            if not is_companion(job, allocation.job, allocation.companions.supervisor):
                raise NotFound(f"job {number} is another one now")
            seen = ev.CompanionSeen(group, number, job.state, self._in_order(job.nodes))
            is_new = seen.state == "RUNNING" and bool(seen.nodes) and not before.nodes
            doubts = self._doubts(seen.nodes) if is_new else {}
        except NotFound:
            seen, is_new, doubts = ev.CompanionSeen(group, number, "", ()), False, {}
        except SresError:
            return  # nothing is known
        if is_new:
            told = (f"{name} is not taken: {why}" for name, why in sorted(doubts.items()))
            seen = msgspec.structs.replace(seen, doubt="; ".join(told))
            self._granted[number] = job.restarts
            self._told.clear()
        if seen != before:
            self._shown[group] = seen
            self._tell(seen)

    def _doubts(self, nodes: tuple[str, ...]) -> dict[str, str]:
        """Return those nodes on which no ranks are started, and why.

        Raises:
            SresError: Slurm did not answer.
        """
        # While a job is suspended Slurm gives its nodes to others, its own companions too.
        job = self._context.client.job(self._context.allocation.id)
        own = {name: f"job {job.id} has it itself" for name in nodes if name in job.nodes}
        return own | self._context.link.doubts(nodes)

    def _read(self, number: int) -> Job:
        """Return a companion as Slurm shows it; where it is over, how it ended.

        Raises:
            NotFound: Slurm does not know it any more.
            SresError: Slurm did not answer.
        """
        client = self._context.client
        try:
            return client.job(number)
        except NotFound:
            return client.ended_job(number)

    def _tell_why_it_ended(self, number: int) -> None:
        """Report what has ended a companion, once Slurm shows it, where that was a person."""
        state = self._state_now(number)
        if state == "COMPLETING" or state is None:
            return
        self._ending.discard(number)
        if state in _BY_PERSON:
            report.say(f"job {number} {_BY_PERSON[state]}")

    def _state_now(self, number: int) -> str | None:
        """Return the state of a companion, over or not; empty: Slurm does not know it any more;
        None: that cannot be told."""
        allocation = self._context.allocation
        try:
            job = self._read(number)
        except NotFound:
            return ""
        except SresError:
            return None
        own = is_companion(job, allocation.job, allocation.companions.supervisor)
        return job.state if own else ""

    def _tell_why_they_wait(self) -> None:
        """Report what companions wait for that a person may have to change: each reason once."""
        now = self._context.clock.monotonic()
        waiting = [seen.companion for seen in self._shown.values() if seen.state == "PENDING"]
        if now < self._ask_why_at or not waiting:
            return
        self._ask_why_at = now + WAITS_ON_SECONDS
        with contextlib.suppress(SresError):
            for found in self._context.client.companions(self._context.allocation.job):
                # What follows names nodes, and changes.
                reason = found.waits_for.partition(",")[0].strip()
                if found.id in waiting and found.needs_a_person and reason not in self._told:
                    self._told.add(reason)
                    report.say(f"not grown: job {found.id} waits, for {reason}{hint(reason)}")

    def _in_order(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        return self._context.allocation.in_slurms_order(nodes) if nodes else ()

    def _signal(self, companion: int, number: int) -> None:
        """Tell the ranks of one srun that they should leave."""
        context, step = self._context, self._step_of(number)
        if step is None or not step.running:
            return
        info = find_step(step, context.client, companion, context.host)
        # Where that fails it is over, or it goes when its companion is given back.
        with contextlib.suppress(SresError):
            if info is not None:
                context.client.cancel_step(companion, info.step, "TERM")

    def _give_back(self, group: int, number: int) -> None:
        if group in self._shown and self._shown[group].companion == number:
            del self._shown[group]
        if any(seen.companion == number for seen in self._shown.values()):
            return  # the number is another group's by now
        restarts = self._granted.pop(number, None)
        job = self._own(number) if restarts is not None else None
        if restarts is not None and self._state_now(number) in _ENDING:
            self._ending.add(number)
        # Slurm shows it as COMPLETING first. A companion is submitted with --no-requeue.
        if job is not None and job.restarts != restarts and job.state in ("PENDING", "COMPLETING"):
            report.say(f"job {number} was requeued by a person, and keeps its place in the queue")
            self._requeued[group] = number
        else:
            self._end_companion(number)

    def _runs_on(self, number: int) -> bool:
        """Return whether Slurm is known not to end a companion, nor to be about to preempt it."""
        with contextlib.suppress(SresError):
            return self._state_now(number) == "RUNNING" and not self._context.client.is_preempted(
                number
            )
        return False

    def _is_own(self, number: int) -> bool:
        """Return whether this is a companion of this supervisor that is not over.

        Raises:
            SresError: Slurm did not answer.
        """
        allocation = self._context.allocation
        try:
            job = self._context.client.job(number)
        except NotFound:
            return False
        return is_companion(job, allocation.job, allocation.companions.supervisor)

    def _look_at_requeued(self, group: int) -> None:
        """Give a requeued companion back that gets nodes while its group is not asked for."""
        job = self._own(self._requeued[group])
        if job is not None and job.state == "RUNNING":
            del self._requeued[group]
            self._end_companion(job.id)

    def _own(self, number: int) -> Job | None:
        """Return a companion of this supervisor that is not over; None: it is, or that cannot be
        told."""
        allocation = self._context.allocation
        with contextlib.suppress(SresError):
            job = self._context.client.job(number)
            if is_companion(job, allocation.job, allocation.companions.supervisor):
                return job
        return None

    def _end_companion(self, number: int) -> None:
        allocation = self._context.allocation
        restarts, supervisor = allocation.job.restarts, allocation.companions.supervisor
        name = companion_name(allocation.id, restarts, supervisor, lent=True)
        try:
            self._context.client.cancel_job(number, name)
        except NotFound:
            pass
        except SresError as error:
            report.say(f"job {number} is left to end itself: {error}")
