"""The ceilings of a simulated cluster's marks, judged apart from sresctld's own breaker."""

from __future__ import annotations

from collections.abc import Callable

from slurm_resilience.config import BreakerSettings
from slurm_resilience.controller.journal.records import HOUR_SECONDS
from slurm_resilience.simulate.cluster.rules.rule_memory import BreakerView, PeoplesWords
from slurm_resilience.simulate.cluster.rules.rule_names import ClusterRule
from slurm_resilience.simulate.cluster.sim_machine import NEW_DRIVER, SimMachine
from slurm_resilience.simulate.cluster.sim_slurm import SimSlurm

STALE_SECONDS = 1.0
"""An act may rest on a look that is so old."""


class MarkCeilings:
    """Compares the marks of a window and of an hour with the limits of `[breaker]`."""

    def __init__(
        self,
        limits: BreakerSettings,
        slurm: SimSlurm,
        machines: dict[str, SimMachine],
        people: PeoplesWords,
        breaker: BreakerView,
        break_rule: Callable[[ClusterRule, str], None],
    ) -> None:
        self._limits = limits
        self._slurm = slurm
        self._machines = machines
        self._people = people
        self._breaker = breaker
        self._break_rule = break_rule

    def judge_hour(self, name: str, at: float) -> None:
        """Compare the marks of an hour with the ceilings of the node's switch and of its driver.

        Args:
            name: the node that was marked now.
            at: when its fault began.
        """
        of_hour, domains = self._breaker.of_hour, self._slurm.domains()
        of_hour.append((at, name))
        begins = max(at - HOUR_SECONDS + STALE_SECONDS, self._people.reset_at)
        marked = {node for when, node in of_hour if when >= begins}
        there = {node for node in marked if domains.get(node) == domains.get(name)}
        if domains.get(name) and len(there) > self._limits.switch_per_hour:
            text = f"{len(there)} nodes of {domains[name]} within an hour: {sorted(there)}"
            self._break_rule(ClusterRule.MOST_MARKS, text)
        same = {node for node in marked if self._has_new_driver(node)}
        if self._has_new_driver(name) and len(same) > self._limits.driver_per_hour:
            text = f"{len(same)} nodes with the new driver within an hour: {sorted(same)}"
            self._break_rule(ClusterRule.MOST_MARKS, text)

    def _has_new_driver(self, name: str) -> bool:
        machine = self._machines.get(name)
        return machine is not None and machine.agent.drivers == (NEW_DRIVER,)

    def excess(self, name: str, marked: set[str], is_apart: bool) -> str:
        """Compare the marks within the window with the ceilings of the cluster and of partitions.

        Args:
            name: the node that was marked now.
            marked: all of the window.
            is_apart: Slurm had had them DOWN before: they have one ceiling, that of the cluster.

        Returns:
            Which ceiling is passed, in words; empty: none.
        """
        limits = self._limits
        within = f"within {limits.window:.0f} s: {' '.join(sorted(marked))}"
        if len(marked) > limits.nodes_at_once:
            return f"{len(marked)} of {len(self._machines)} nodes {within}"
        for partition in () if is_apart else self._slurm.entries[name].partitions:
            there = [n for n in marked if partition in self._slurm.entries[n].partitions]
            if len(there) > limits.partition_at_once:
                return f"{len(there)} nodes of partition {partition} {within}"
        return ""
