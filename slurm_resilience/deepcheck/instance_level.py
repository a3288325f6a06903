"""The instance level: the program of `deepcheck/instance/` on each node, all at the same time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import msgspec

from slurm_resilience.deepcheck.deep_results import (
    DeepOutcome,
    DeepResult,
    DeepState,
    NodeDeepCheck,
    advanced,
    end_of,
)
from slurm_resilience.deepcheck.node_choice import by_gpus, gpus_of
from slurm_resilience.deepcheck.run_options import DeepRunOptions
from slurm_resilience.deepcheck.step_follower import DeepStepEnd, StepFollower
from slurm_resilience.deepcheck.step_lines import (
    CheckBegun,
    CheckEnded,
    ChecksDone,
    StepMessage,
)
from slurm_resilience.deepcheck.step_requests import InstanceRequest
from slurm_resilience.model import Node, Severity
from slurm_resilience.slurm.maintenance import StepOrder

PROGRAM = "slurm_resilience.deepcheck.instance"


def as_program(module: str, request: msgspec.Struct) -> tuple[str, ...]:
    """Return the command line of one of our programs, which is installed on every node."""
    return (sys.executable, "-P", "-m", module, msgspec.json.encode(request).decode("utf-8"))


class InstanceLevel:
    """The nodes of a run, as far as their steps have told."""

    def __init__(
        self,
        nodes: Sequence[Node],
        options: DeepRunOptions,
        tell: Callable[[str], None],
        changed: Callable[[str, CheckEnded], None],
    ) -> None:
        """
        Args:
            nodes: those that are kept for us.
            options: what to run.
            tell: takes a line of progress.
            changed: is given each result, for the node's log.
        """
        self._shown = nodes
        self._options = options
        self._tell = tell
        self._changed = changed
        self.nodes = {
            node.name: advanced(NodeDeepCheck(node.name), DeepState.IN_PROGRESS) for node in nodes
        }

    def orders(self, reservation: str) -> list[StepOrder]:
        """Return a step for each kind of node: a job asks for all GPUs of its nodes."""
        by_name = {node.name: node for node in self._shown}
        made = []
        for gres, names in by_gpus(self._shown).items():
            request = InstanceRequest(
                only=self._options.only,
                gpus=gpus_of(by_name[names[0]].gres),
                seconds=self._options.seconds,
                profile=self._options.profile,
                log=self._options.node_log,
            )
            program = as_program(PROGRAM, request)
            minutes = self._options.limit_minutes
            made.append(StepOrder(reservation, names, program, minutes, gres=gres))
        return made

    def run(
        self, reservation: str, follower: StepFollower, look: Callable[[], Iterable[Node]]
    ) -> None:
        """Run the steps to their ends.

        Args:
            reservation: the nodes are kept by it.
            follower: starts the steps.
            look: returns all nodes as Slurm shows them now: it tells a node that died under the
                load from a step that only ended.
        """
        orders = self.orders(reservation)
        limit = 60.0 * self._options.limit_minutes
        ends = follower.follow(orders, limit, self.heard)
        dead: frozenset[str] = frozenset()
        if any(node.state is DeepState.IN_PROGRESS for node in self.nodes.values()):
            dead = frozenset(one.name for one in look() if one.is_down or not one.is_responding)
        for order, end in zip(orders, ends, strict=True):
            self._end(order, end, dead)

    def heard(self, message: StepMessage) -> None:
        """Take what a step has told."""
        if not isinstance(message, CheckBegun | CheckEnded | ChecksDone):
            return
        node = self.nodes.get(message.node)
        if node is None or node.state is not DeepState.IN_PROGRESS:
            return
        if isinstance(message, CheckBegun):
            node = msgspec.structs.replace(node, running=message.check)
            self._tell(f"{node.node}: {message.check} …")
        elif isinstance(message, CheckEnded):
            results = (*node.results, message.result)
            node = msgspec.structs.replace(node, running="", results=results)
            self._changed(node.node, message)
            if message.result.outcome is not DeepOutcome.ABSENT:
                result = message.result
                self._tell(f"{node.node}: {result.check} {result.outcome}: {result.text}")
        else:
            node = advanced(node, *end_of(node.results))
            self._tell(": ".join(word for word in (node.node, node.state, node.reason) if word))
        self.nodes[node.node] = node

    def _end(self, order: StepOrder, end: DeepStepEnd, dead: frozenset[str]) -> None:
        for name in order.nodes:
            node = self.nodes[name]
            if node.state is not DeepState.IN_PROGRESS:
                continue
            state, _ = end_of(node.results)
            where = f" during {node.running}" if node.running else ""
            said = f"; srun said: {end.said}" if end.said else ""
            reason = f"its step ended{where} without a result (code {end.code}){said}"
            if name in dead:
                reason = f"it was lost to Slurm{where}"
                lost = DeepResult(
                    node.running or "step", DeepOutcome.FAILED, reason, Severity.REBOOT
                )
                node = msgspec.structs.replace(node, results=(*node.results, lost))
                state = DeepState.FAILED
            elif state is not DeepState.FAILED:
                state = DeepState.UNJUDGED
            self.nodes[name] = advanced(node, state, reason)
            self._tell(f"{name}: {state}: {reason}")
