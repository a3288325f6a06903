"""One run of deep checks: choose nodes, keep them, run a level, write the logs, give them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from slurm_resilience.clock import Clock
from slurm_resilience.deepcheck.cluster_level import ClusterFindings, ClusterLevel
from slurm_resilience.deepcheck.collective_math import Sweep
from slurm_resilience.deepcheck.deep_logs import NodeLog, result_text, stamp
from slurm_resilience.deepcheck.deep_marks import DeepMarks
from slurm_resilience.deepcheck.deep_results import (
    FAILED_EXIT_CODE,
    DeepState,
    NodeDeepCheck,
    advanced,
)
from slurm_resilience.deepcheck.instance_level import InstanceLevel
from slurm_resilience.deepcheck.kept_nodes import MaintenanceDoor, NodeKeeper
from slurm_resilience.deepcheck.node_choice import DeepReadiness, NodeChoice
from slurm_resilience.deepcheck.pairing import PairingConclusion
from slurm_resilience.deepcheck.report_forms import (
    FaultyNodeLine,
    cluster_line,
    collective_table,
    faulty_line,
)
from slurm_resilience.deepcheck.run_options import DeepRunOptions
from slurm_resilience.deepcheck.set_aside import to_set_aside
from slurm_resilience.deepcheck.step_follower import StepFollower
from slurm_resilience.deepcheck.step_lines import CheckEnded
from slurm_resilience.errors import SresError
from slurm_resilience.model import Node

UNJUDGED_EXIT_CODE = 12
"""None has failed, but one was skipped, or could not be judged."""


class DeepReport(msgspec.Struct, frozen=True):
    """The outcome of a run."""

    level: str
    nodes: tuple[NodeDeepCheck, ...]
    sweeps: tuple[Sweep, ...] = ()
    isolation: PairingConclusion | None = None
    trouble: str = ""
    """A fault of the nodes together."""
    lines: tuple[str, ...] = ()
    """The lines of the cluster's log that name a fault."""
    logs: str = ""

    @property
    def exit_code(self) -> int:
        states = {node.state for node in self.nodes}
        if self.trouble or DeepState.FAILED in states:
            return FAILED_EXIT_CODE
        return 0 if states == {DeepState.PASSED} else UNJUDGED_EXIT_CODE


class DeepRun:
    """A run over some nodes."""

    def __init__(
        self,
        door: MaintenanceDoor,
        clock: Clock,
        options: DeepRunOptions,
        log_directory: Path,
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            door: Slurm, with an operator's rights.
            clock: the time.
            options: what to run.
            log_directory: takes a directory of this run.
            tell: takes a line of progress.
        """
        self._door = door
        self._clock = clock
        self._options = options
        self._folder = log_directory
        self._logs: dict[str, NodeLog] = {}
        self._tell = tell
        self._keeper = NodeKeeper(door, clock, tell)
        self._marks = DeepMarks(door, clock.now, tell)

    def run(self, level: str, names: Sequence[str], user: str) -> DeepReport:
        """Run one level on nodes; those that are busy or away are named and left alone.

        Raises:
            SresError: Slurm refused, and nothing was run.
        """
        options = self._options
        choices = self._keeper.wait(names, options.limit_minutes, options.wait_seconds)
        ready = [one.node for one in choices if one.readiness is DeepReadiness.READY]
        skipped = tuple(_skipped(one) for one in choices if one.node not in ready)
        for one in skipped:
            self._tell(f"{one.node}: skipped: {one.reason}")
        if not ready:
            return DeepReport(level, skipped)
        by_name = {node.name: node for node in self._door.nodes()}
        nodes = [by_name[name] for name in ready]
        cluster = ClusterLevel(nodes, options, self._tell) if level == "cluster" else None
        with (
            self._keeper.kept(ready, options.limit_minutes, user) as reservation,
            self._marked(ready) as known,
            StepFollower(self._door, self._clock) as follower,
        ):
            if cluster is None:
                instance = InstanceLevel(nodes, options, self._tell, self._log_result)
                known.append(instance.nodes)
                instance.run(reservation, follower, self._door.nodes)
                return DeepReport(
                    level, (*instance.nodes.values(), *skipped), logs=str(self._folder)
                )
            findings = cluster.run(reservation, follower)
            known.append({node.node: node for node in findings.nodes})
            return self._report(findings, skipped)

    @contextmanager
    def _marked(self, names: Sequence[str]) -> Iterator[list[Mapping[str, NodeDeepCheck]]]:
        """Label the nodes in progress, and at the end with the states in the mappings that are put
        into the list: a node without a result, since a person ended the run, say, is unjudged."""
        known: list[Mapping[str, NodeDeepCheck]] = []
        self._marks.mark((name, DeepState.IN_PROGRESS) for name in names)
        try:
            yield known
        finally:
            ended = {name: node for nodes in known for name, node in nodes.items()}
            states = dict.fromkeys(names, DeepState.UNJUDGED) | {
                name: node.state
                for name, node in ended.items()
                if node.state not in (DeepState.WAITING, DeepState.IN_PROGRESS)
            }
            self._marks.mark(states.items())
            if self._options.set_aside:
                # Before they are given back: no job may come to one of them in between.
                self._set_aside(tuple(ended.values()))

    def _set_aside(self, ended: Sequence[NodeDeepCheck]) -> None:
        chosen, left = to_set_aside(ended)
        for name, why in left.items():
            self._tell(f"{name}: it stays in service: {why}")
        shown: dict[str, Node] = {}
        with suppress(SresError):
            shown = {node.name: node for node in self._door.nodes()}
        for name, action in chosen.items():
            node = shown.get(name)
            if node is None or node.is_down or node.is_fail or node.is_drain or node.reason:
                state = f"Slurm shows it {node.state}" if node else "Slurm does not show it"
                self._tell(f"{name}: it is left as it is: {state}")
                continue
            try:
                self._door.set_node([name], state="fail", reason=action)
            except SresError as error:
                self._tell(f"{name}: {action} could not be asked for: {error}")
            else:
                self._tell(f"{name}: {action} is asked for")

    def _log_result(self, node: str, message: CheckEnded) -> None:
        log = self._logs.setdefault(node, NodeLog(str(self._folder / f"{node}.log")))
        log.add(result_text(stamp(self._clock.now()), message.result))

    def _report(self, findings: ClusterFindings, skipped: tuple[NodeDeepCheck, ...]) -> DeepReport:
        now = stamp(self._clock.now())
        tables = [collective_table(sweep) for sweep in findings.sweeps]
        lines = [
            faulty_line(
                now,
                FaultyNodeLine(
                    node,
                    self._options.region,
                    self._options.profile or "unknown",
                    round(findings.isolation.minimum or 0.0, 3),
                    round(findings.measured.get(node, 0.0), 3),
                ),
            )
            for node in findings.isolation.slow
        ]
        lines += [
            cluster_line(now, "warn", f"The path between {one} and {other} is slow")
            for one, other in findings.isolation.slow_paths
        ]
        if findings.trouble:
            lines.append(cluster_line(now, "error", findings.trouble))
        passed = [node.node for node in findings.nodes if node.state is DeepState.PASSED]
        done = cluster_line(now, "info", f"Cluster level: {len(passed)} nodes passed", nodes=passed)
        log = NodeLog(str(self._folder / "cluster.log"))
        log.add("".join(f"{text}\n" for text in (*tables, *lines, done)))
        return DeepReport(
            "cluster",
            (*findings.nodes, *skipped),
            findings.sweeps,
            findings.isolation,
            findings.trouble,
            tuple(lines),
            str(self._folder),
        )


def _skipped(choice: NodeChoice) -> NodeDeepCheck:
    return advanced(NodeDeepCheck(choice.node), DeepState.SKIPPED, choice.reason)
