"""Reboot a node by Slurm: `scontrol reboot` has slurmd run RebootProgram on it.

With nextstate=DOWN Slurm puts the node out of service until it is resumed, and adds what it does to
the Reason (`Action:Reboot : reboot issued : reboot complete`), which is written anew at the end. A
node is back when Slurm knows of another boot.
"""

from __future__ import annotations

import contextlib
from datetime import datetime

import msgspec

from slurm_resilience.errors import NotFound, SlurmError, SresError
from slurm_resilience.model import ACTIONS, Node
from slurm_resilience.replace.program import RunHost
from slurm_resilience.replace.repair_order import RepairOrder, Run, RunExists
from slurm_resilience.replace.repair_steps import (
    TAKEN_SECONDS,
    ReachedStep,
    begin,
    read_step,
    write_step,
)
from slurm_resilience.replace.slurm_power import TIMEOUT_RC
from slurm_resilience.slurm.client import SlurmClient

BY = "scontrol reboot"
SAME_BOOT_SECONDS = 1.0
"""Slurm reckons a boot's time from the uptime, so that it differs by a second now and then."""
REASON_ACT = "takes away what Slurm has added to the Reason"


class SlurmRebootReplacer:
    """`scontrol reboot`. It cannot replace a node, and reboots none that slurmd does not serve."""

    def __init__(self, client: SlurmClient, host: RunHost) -> None:
        self._client = client
        self._host = host

    def start(self, order: RepairOrder, node: Node, now: float) -> None:
        if order.directory.exists() and self.status(order, node, now).next_act:
            request = _request_in(node, order)
            self._client.set_node([order.node], state="fail", reason=request)
            return
        try:
            begin(order.directory, self._host)
            # The boot before it: so a reboot that Slurm has done is known from one that it lost.
            write_step(order.directory, ReachedStep("reboot", now, now, node.boot_time))
        except FileExistsError:
            raise RunExists(f"{order.directory} was started before") from None
        except OSError as error:
            raise SresError(f"{order.directory} cannot be written: {error}") from None
        if not node.is_being_rebooted:
            self._client.reboot(order.node, order.reason)

    def status(self, order: RepairOrder, node: Node | None, now: float) -> Run:
        return reboot_run(read_step(order.directory), node, now, order)

    def stop(self, order: RepairOrder) -> None:
        """Take it back, as long as Slurm has not begun it."""
        with contextlib.suppress(SlurmError, NotFound):
            self._client.cancel_reboot(order.node)


def reboot_run(step: ReachedStep | None, node: Node | None, now: float, order: RepairOrder) -> Run:
    """Tell how far a reboot by Slurm has come.

    Args:
        step: what was ordered.
        node: as Slurm shows it.
        now: seconds since the epoch.
        order: with the time limit, and the Reason that the node had.
    """
    if step is None:
        text = "sresctld ended before it asked Slurm for anything"
        return Run("lost", output=text, ended_at=now, by=BY, wrote_reason=True)
    waiting = Run("running", by=BY, wrote_reason=True)
    if node is None:
        return waiting
    is_under_way = node.is_being_rebooted
    if not is_under_way and _request_in(node, order):
        # Else it would read like a person's, whatever comes next.
        return msgspec.structs.replace(waiting, next_act=REASON_ACT)
    if not is_under_way and _is_another_boot(node.boot_time, step.mark):
        return Run("ended", 0, "the node has booted", now, by=BY, wrote_reason=True)
    if now - step.began > order.seconds:
        text = f"not done within {order.seconds:g} s: it is {node.state}"
        return Run("ended", TIMEOUT_RC, text, now, by=BY, wrote_reason=True)
    if is_under_way or now - step.at < TAKEN_SECONDS:
        return waiting
    text = f"Slurm did not reboot it: it is {node.state} ({node.reason})"
    return Run("ended", 1, text, now, by=BY, wrote_reason=True)


def _request_in(node: Node, order: RepairOrder) -> str:
    """Return the request to which Slurm has added; empty: it has not.

    A person may have asked for something else while the node booted: that is left to stand.
    """
    request, added, _ = node.reason.partition(" : ")
    return request if added and request in (order.reason, *ACTIONS) else ""


def _is_another_boot(shown: str, before: str) -> bool:
    """Tell whether Slurm shows a later boot than before the order."""
    try:
        passed = datetime.fromisoformat(shown) - datetime.fromisoformat(before)
    except ValueError:
        return bool(shown) and shown != before  # it had never booted, as far as Slurm knew
    return passed.total_seconds() > SAME_BOOT_SECONDS
