"""Let a living step grow into companions of its job, and shrink when Slurm takes them back.

It tells `size_plan` what happens, and carries its actions out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from signal import SIGTERM

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.mesh.observer import Observer
from slurm_resilience.mesh.rank_variables import LENT
from slurm_resilience.resume import report
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.elastic import size_events as ev
from slurm_resilience.resume.elastic.awake_time import AwakeTime
from slurm_resilience.resume.elastic.companion_requests import CompanionRequests
from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.resume.elastic.size_plan import SizePlan
from slurm_resilience.resume.elastic.size_target import AskedSize
from slurm_resilience.resume.fence import LeftNodes
from slurm_resilience.resume.live_step.join_step import (
    join_command,
    join_environment,
    join_numbers,
    join_variables,
)
from slurm_resilience.resume.live_step.live_events import (
    FaultyNode,
    NodesFaulty,
    TellTraining,
    Tick,
    TrainingSeen,
)
from slurm_resilience.resume.live_step.seats import NodeSlot, SeatHistory, SeatMap, StepSeats
from slurm_resilience.resume.live_step.task_deaths import FailedLaunches
from slurm_resilience.resume.srun.environment import Attempt, srun_environment, task_variables
from slurm_resilience.resume.srun.stderr_reader import code_of
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.slurm.companion_job import COMPANION_JOB
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.wire.messages import AttemptStarted, LeftNode

SHOWN_SECONDS = 3.0
"""For Slurm to show that it ends a companion whose ranks have just died: of its own words on their
end some are lost."""
TOLD_TO_END_CODE = 128 + SIGTERM
"""Slurm tells the tasks of a job to end that it is about to preempt. No fault ends a rank so."""
END_SECONDS = 10.0
"""For the ranks of companions to end, when the program on the job's own nodes has."""


class BadEnds:
    """The sruns that have ended badly, or have lost a task."""

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: launches that may fail in a row on a node.
        """
        self._since: dict[int, float] = {}
        """When that was first seen, by the srun's number."""
        self.told: set[int] = set()
        """Those of whose lost tasks the plan knows."""
        self.launches = FailedLaunches(limit)

    def are_settled(self, number: int, now: float) -> bool:
        """Return whether Slurm would have shown by now that it has ended these tasks.

        Args:
            number: of the srun.
            now: monotonic seconds.
        """
        return now - self._since.setdefault(number, now) >= SHOWN_SECONDS


class Growth:
    """The part of a living attempt that is on companions."""

    def __init__(
        self,
        context: SupervisorContext,
        observer: Observer,
        size: ElasticSize,
        attempt: Attempt,
        left: LeftNodes,
        core: SeatMap,
        steps: StepSeats,
    ) -> None:
        """
        Args:
            context: of the supervised srun.
            observer: of the running training.
            size: what srun's options ask for.
            attempt: what was started.
            left: the nodes that it has left.
            core: the seats of the job's own nodes.
            steps: the attempt's, by their number; those of companions are added.
        """
        self._context = context
        self._observer = observer
        self._attempt = attempt
        self._left = left
        self._core = core
        self._steps = steps
        self._master_address = attempt.master_address
        self._plan = SizePlan(size, len(core.slots[0].seats))
        self._time = AwakeTime()
        self._history = SeatHistory()
        self._sruns: dict[int, SrunStep] = {}
        """Those that run, by their number among the attempt's steps."""
        self._bad_ends = BadEnds(context.limits.max_per_node)
        self._answers: deque[ev.SizeEvent] = deque()
        self._target = AskedSize(size.most)
        settings = size.settings
        self._requests = CompanionRequests(
            context, settings.partition, settings.qos, lambda number: self._sruns.get(number)
        )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that companions give now."""
        return tuple(slot.node for slot in self._plan.slots)

    @property
    def lost_peers(self) -> set[str]:
        """Return the ids of processes on nodes that died."""
        return self._plan.lost.ids

    def look(self, seen: TrainingSeen, core: SeatMap, master_address: str, taken: int) -> None:
        """Tell the plan all that is new.

        Args:
            seen: the training now.
            core: the seats of the job's own nodes as they are now.
            master_address: of the node with rank 0.
            taken: nodes of the core that a person has taken out of the job.
        """
        self._tell(ev.CoreShrunk(taken))
        self._core, self._master_address = core, master_address
        self._history.note(seen.peers, seen.running, seen.generation, seen.step)
        self._look_at_target()
        self._tell(seen)
        for number, step in list(self._sruns.items()):
            failed = tuple(step.failed_nodes)  # a copy: it grows in another thread
            self.lose(FaultyNode(node, "Slurm gave it up", True) for node in failed)
            if number in self._sruns:
                self._look_at_end(number, step)
        for event in self._requests.take():
            self._tell(event)
        self._tell(Tick())

    def _look_at_end(self, number: int, step: SrunStep) -> None:
        """Tell the plan of an srun that has ended, or lost a task. Where that may be Slurm's doing,
        and nothing has told so, what Slurm shows of the companion is waited for."""
        died = tuple(step.ended_tasks)  # a copy: it grows in another thread
        if step.running and not died:
            return
        codes = {code_of(ended.how) for ended in died} or {step.code}
        taken = step.told_end.cancelled or step.preempted or codes == {TOLD_TO_END_CODE}
        now = self._now()
        is_bad = bool(died or step.code)
        if is_bad and not taken and not self._bad_ends.are_settled(number, now):
            return
        if not step.running:
            del self._sruns[number]
            self._judge_launches(self._steps.held_by(number), step)
            self._tell(ev.GroupStepEnded(number, step.code, taken))
        elif not taken and number not in self._bad_ends.told:
            self._bad_ends.told.add(number)
            self._tell(ev.GroupTaskDied(number, died[0].how))

    def _judge_launches(self, seats: set[int], step: SrunStep) -> None:
        """Take no node again that takes no task of ours, and not for a moment only: Slurm would
        give it each time, though others are free.

        Args:
            seats: of an srun that has ended.
            step: that srun.
        """
        context, launches = self._context, self._bad_ends.launches
        failed = step.failed_launches if step.code else {}
        for node in (slot.node for slot in self._plan.slots if seats & set(slot.seats)):
            if node not in failed:
                continue
            times = launches.count(node)
            if launches.blames_node(node) and node not in context.allocation.suspects:
                context.allocation.suspects.add(node)
                told = f"srun could start no task on it {times} times: {failed[node]}"
                report.say(f"{node} is not taken again (resume.max_per_node): {told}")
                context.link.send(LeftNode(node, f"left out: {told}"))

    def _look_at_target(self) -> None:
        held = self._context.allocation.companions.target
        target = held.present
        if target.by and target != self._target:
            self._target = target
            held.keep(target)
            report.say(f"resized to {target.nodes} nodes by {target.by}")
            self._context.events.write("resized", size=target.nodes, by=target.by)
            self._tell(ev.TargetSet(target.nodes, target.by))

    def tell_sick(self, nodes: Iterable[FaultyNode]) -> None:
        """Tell the plan of all nodes that must be left and still work, the core's too."""
        self._tell(ev.NodesSick(tuple(nodes)))

    def may_leave(self, node: str) -> bool:
        """Return whether a sick node of the core is left now, and not kept until another is in."""
        return self._plan.may_leave(node, self._now())

    def lose(self, faulty: Iterable[FaultyNode]) -> None:
        """Tell the plan of nodes that are gone."""
        here = tuple(node for node in faulty if node.node in self.nodes)
        if here:
            self._tell(NodesFaulty(here))

    def let_end(self, seconds: float) -> None:
        """Give all companions back as soon as their ranks have ended, which have a moment for that:
        the training has ended well, and its program may go on for long on the job's own nodes. It
        is called again and again meanwhile.

        Args:
            seconds: since the end of the training.
        """
        if seconds >= END_SECONDS or not any(step.running for step in self._sruns.values()):
            for step in self._sruns.values():
                self._kill(step)
            self._requests.begin_stop()

    def end(self, *, well: bool) -> None:
        """Give all companions back: the attempt is over.

        Args:
            well: the training ended well, and what its program does after it is waited for.
        """
        clock = self._context.clock
        deadline = clock.monotonic() + (END_SECONDS if well else 0.0)
        for step in self._sruns.values():
            step.wait(max(0.0, deadline - clock.monotonic()))
        self._requests.stop()
        for step in self._sruns.values():
            self._kill(step)

    def _tell(self, event: ev.SizeEvent) -> None:
        self._answers.append(event)
        while self._answers:
            for action in self._plan.step(self._answers.popleft(), self._now()):
                self._do(action)

    def _now(self) -> float:
        return self._time.at(self._context.clock.monotonic())

    # -- what is done -------------------------------------------------------------------------

    def _do(self, action: ev.SizeAction) -> None:
        events = self._context.events
        match action:
            case ev.AskForGroup() | ev.AskGroupToLeave():
                self._requests.order(action)
            case ev.GiveBack():
                for number in action.steps:
                    self._kill(self._sruns.pop(number))
                # A rank may live there that is cut off, and another one gets its seat. A node that
                # Slurm has given again is reached.
                for name in sorted({*action.nodes} - {*self.nodes, *self._core.nodes}):
                    self._left.add(name, len(self._steps))
                self._requests.order(action)
                self._announce()
            case ev.StartGroup():
                self._start(action)
            case TellTraining(node):
                self._observer.find(node.node, node.reason, node.dead)
                self._left.add(node.node, len(self._steps))
            case ev.SayGrew(change, seconds):
                self._bad_ends.launches.launched()
                events.write("grew", nodes=list(change.nodes), size=change.size, seconds=seconds)
                report.say(f"grew to {_where(change)}, {seconds:.1f} s")
            case ev.SayShrank(change, reason):
                events.write("shrank", nodes=list(change.nodes), size=change.size)
                report.say(f"shrank to {_where(change)}; {reason}")
            case ev.SayNotGrown(reason, seconds):
                report.say(f"not grown: {reason}; asked again in {seconds:.0f} s")

    def _kill(self, step: SrunStep) -> None:
        """End an srun whose companion is given back, which ends its tasks."""
        if step.running:
            step.ends_by_us(killed=True)
            step.kill()
            step.tasks_ended_at = step.clock.monotonic()

    def _announce(self) -> None:
        nodes = (*self._core.nodes, *self.nodes)
        self._context.link.moved(AttemptStarted(self._attempt.number, nodes))

    def _start(self, action: ev.StartGroup) -> None:
        context = self._context
        for slot in action.slots:
            # A machine of this name may have been lost before.
            context.link.forgive(slot.node)
            self._observer.forget(slot.node)
        self._announce()
        events = context.events
        events.write("growing", nodes=[slot.node for slot in action.slots])
        numbers: list[int] = []
        try:
            for slot in action.slots:
                numbers.append(self._start_on(slot, action))
        except SresError as error:
            self._answers.append(ev.GroupFailed(action.group, str(error)))
            return
        self._answers.append(ev.GroupStarted(action.group, tuple(numbers)))

    def _start_on(self, slot: NodeSlot, action: ev.StartGroup) -> int:
        """Start the srun of one node; return its number.

        Raises:
            SresError: srun cannot be started.
        """
        context, companion = self._context, action.companion
        number = self._steps.add(slot.seats)
        nodes = tuple(each.node for each in action.slots)
        own = {"SLURM_JOB_ID": str(companion), "SLURM_JOBID": str(companion)}
        whole = srun_environment(context.environment, nodes, changed=True)
        argv, environment = context.launch.line(
            join_command(context.command, companion, self._core, slot),
            self._variables(slot, number, companion),
            join_environment(whole, self._core) | own,
        )
        signals = context.user_signals
        with signals.starting:
            begin = partial(context.host_calls.start_srun, argv, environment, context.wake.set)
            step = begin(
                on_news=context.wake.set,
                clock=context.clock,
                name=f"{companion}.",
                numbers=join_numbers(context.command, context.environment, self._core, slot),
                quiet=context.quiet,
            )
            signals.add(step)
        self._sruns[number] = step
        return number

    def _variables(self, slot: NodeSlot, number: int, companion: int) -> Mapping[str, str]:
        job = self._context.allocation.id
        slots = (*self._core.slots, *self._plan.slots)
        whole = msgspec.structs.replace(self._core, slots=slots)
        variables = join_variables(
            task_variables(self._attempt),
            whole,
            slot,
            job_nodes=whole.nodes,
            master_address=self._master_address,
            incarnation=self._history.next_incarnation(slot.seats),
            step=number,
        )
        return variables | {
            "SLURM_JOB_ID": str(job),
            "SLURM_JOBID": str(job),
            COMPANION_JOB: str(companion),
            LENT: "1",
        }


def _where(change: ev.SizeChange) -> str:
    nodes = f"job {change.companion} on {fold(change.nodes)}"
    return f"{change.size} nodes after step {change.training_step}: {nodes}"
