"""The job that the step runs in, as Slurm shows it now."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from slurm_resilience.errors import NotFound, SlurmUnreachable, SresError
from slurm_resilience.model import Job, Node
from slurm_resilience.resume import report
from slurm_resilience.resume.decide.plan import PlanFacts
from slurm_resilience.slurm.client import SlurmClient


class Allocation:
    """One job: read when asked, remembered as it was read last."""

    def __init__(
        self,
        client: SlurmClient,
        job: Job,
        leave: threading.Event,
        *,
        patience: float,
        permits_expansion: bool,
    ) -> None:
        """
        Args:
            job: as it was when the supervisor started.
            leave: set when a person wants to end this; nothing is waited for any more.
            patience: seconds for which slurmctld may be away.
            permits_expansion: Slurm may grow jobs without GRES.
        """
        self.client = client
        self.job = job
        self.leave = leave
        self._first_nodes = job.nodes
        self._restarts = job.restarts
        self._patience = patience
        self._permits_expansion = permits_expansion

    @property
    def id(self) -> int:
        return self.job.id

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.job.nodes

    @property
    def changed(self) -> bool:
        """The job's nodes are no longer those that it started with."""
        return set(self.job.nodes) != set(self._first_nodes)

    def refresh(self) -> str:
        """Read the job again; its state, empty when Slurm does not know it any more, or has
        requeued it: whatever runs under its number then is another supervisor's.

        slurmctld may be away for a while, e.g. to be updated.
        """
        began = time.monotonic()
        said = False
        while True:
            try:
                job = self.client.job(self.job.id)
                if job.restarts != self._restarts:
                    return ""
                self.job = job
                return job.state
            except NotFound:
                return ""
            except SlurmUnreachable as error:
                if self.leave.wait(1.0) or time.monotonic() - began > self._patience:
                    raise
                if not said:
                    report.say(f"waiting for slurmctld: {error}")
                said = True

    def addresses(self) -> dict[str, str]:
        """Where every node of the cluster is reached; empty when Slurm does not answer."""
        try:
            return {node.name: node.address or node.name for node in self.client.nodes()}
        except SresError:
            return {}

    def facts(self, step_size: int, swap_failed: str, holds: tuple[str, ...] = ()) -> PlanFacts:
        """What the job allows.

        Args:
            step_size: nodes that the step needs.
            swap_failed: why an exchange of nodes was tried in this incident and did not work.
            holds: nodes on which a living step runs.
        """
        nodes = {node.name: node for node in self.client.nodes()}
        has_gres = bool(self.job.gres) or any(
            nodes[name].gres for name in {*self.job.nodes, *self._first_nodes} if name in nodes
        )
        return PlanFacts(
            job_nodes=self.in_slurms_order(self.job.nodes),
            step_size=step_size,
            has_gres=has_gres,
            permits_expansion=self._permits_expansion,
            is_batch=self.job.is_batch,
            requeue=self.job.requeue,
            batch_host=self.job.batch_host,
            swap_failed=swap_failed,
            holds=holds,
        )

    def bad(self, names: Iterable[str]) -> dict[str, str]:
        """Those of ``names`` that Slurm itself says are no longer usable, with its words."""
        try:
            nodes = {node.name: node for node in self.client.nodes()}
            held = set(self.client.job(self.job.id).nodes)
        except SresError:
            return {}
        bad = {}
        for name in names:
            node = nodes.get(name)
            if node is None or node.is_down or node.is_fail:
                bad[name] = _slurms_word(node)
            elif name not in held:
                bad[name] = "it is no longer in the job"
        return bad

    def in_slurms_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Ranks follow Slurm's table of nodes, whatever the order of a hostlist."""
        order = {node.name: index for index, node in enumerate(self.client.nodes())}
        return tuple(sorted(names, key=lambda name: order.get(name, len(order))))


def _slurms_word(node: Node | None) -> str:
    if node is None:
        return "Slurm does not know it any more"
    return f"Slurm shows {node.state}" + (f" ({node.reason})" if node.reason else "")
