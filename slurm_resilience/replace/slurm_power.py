"""Replace a node by Slurm's power saving: POWER_DOWN_FORCE, and POWER_UP when it is powered down.

So every cloud plug-in that is a SuspendProgram and a ResumeProgram replaces nodes. Seen on 22.05:
POWER_UP is lost on a node that is still POWERING_DOWN; as Slurm begins to power a node up it takes
the Reason away and leaves FAIL, so the Reason is written anew; past ResumeTimeout the node is DOWN
and POWERED_DOWN again.
"""

from __future__ import annotations

import enum

from slurm_resilience.errors import SresError
from slurm_resilience.model import Node
from slurm_resilience.replace.program import RunHost
from slurm_resilience.replace.repair_order import RepairOrder, Run, RunExists
from slurm_resilience.replace.repair_steps import (
    TAKEN_SECONDS,
    ReachedStep,
    begin,
    read_step,
    write_step,
)
from slurm_resilience.slurm.client import SlurmClient

TIMEOUT_RC = 124


class PowerStep(enum.StrEnum):
    """The part of a power cycle that was ordered last."""

    DOWN = "power-down"
    UP = "power-up"


class PowerAct(enum.StrEnum):
    """An act that is due."""

    UP = "state=power_up: it is powered down"
    REASON = "writes the Reason that Slurm took away as it began to power the node up"


_GOING_DOWN = frozenset({"POWER_DOWN", "POWERING_DOWN"})
_GOING_UP = frozenset({"POWER_UP", "POWERING_UP"})


class SlurmPowerReplacer:
    """Slurm's power saving. A reboot is a power cycle too."""

    def __init__(self, client: SlurmClient, host: RunHost) -> None:
        self._client = client
        self._host = host

    def start(self, order: RepairOrder, node: Node, now: float) -> None:
        due = self.status(order, node, now).next_act if order.directory.exists() else ""
        step = read_step(order.directory)
        try:
            if due == PowerAct.REASON:
                self._set_aside(order)
            elif due == PowerAct.UP and step is not None:
                self._power_up(order, step.began, now)
            else:
                begin(order.directory, self._host)
                self._begin(order, node, now)
        except FileExistsError:
            raise RunExists(f"{order.directory} was started before") from None
        except OSError as error:
            raise SresError(f"{order.directory} cannot be written: {error}") from None

    def _begin(self, order: RepairOrder, node: Node, now: float) -> None:
        """Power the node down, or go on where an earlier try ended."""
        if not node.is_fail:
            # Else the scheduler wakes it by itself as soon as a job wants it.
            self._set_aside(order)
        if node.flags & _GOING_UP:
            write_step(order.directory, ReachedStep(PowerStep.UP, now, now))
        elif _is_off(node):
            self._power_up(order, now, now)
        else:
            write_step(order.directory, ReachedStep(PowerStep.DOWN, now, now))
            if not node.flags & _GOING_DOWN:
                self._client.set_node([order.node], state="power_down_force")

    def _power_up(self, order: RepairOrder, began: float, now: float) -> None:
        write_step(order.directory, ReachedStep(PowerStep.UP, began, now))
        self._client.set_node([order.node], state="power_up")

    def _set_aside(self, order: RepairOrder) -> None:
        self._client.set_node([order.node], state="fail", reason=order.reason)

    def status(self, order: RepairOrder, node: Node | None, now: float) -> Run:
        return power_run(read_step(order.directory), node, now, order.seconds)

    def stop(self, order: RepairOrder) -> None:
        """Leave the node as it is: Slurm wakes one that is powered down for the next job, once a
        person has given it back."""


def power_run(step: ReachedStep | None, node: Node | None, now: float, seconds: float) -> Run:
    """Tell how far a power cycle has come, from Slurm's own words.

    Args:
        step: what was ordered last.
        node: as Slurm shows it.
        now: seconds since the epoch.
        seconds: the time limit.
    """

    def run(state: str, rc: int = -1, text: str = "", due: str = "") -> Run:
        return Run(
            "running" if state == "running" else "ended",
            rc,
            text,
            0.0 if state == "running" else now,
            due,
            "Slurm's power saving",
            wrote_reason=True,
        )

    if step is None:
        text = "sresctld ended before it asked Slurm for anything"
        return Run("lost", output=text, ended_at=now, by="Slurm's power saving", wrote_reason=True)
    if node is None:
        return run("running")
    is_off = _is_off(node)
    if step.name == PowerStep.UP and not node.flags & _GOING_UP and not is_off:
        if not node.reason.strip() and (node.is_fail or node.is_down):
            return run("running", due=PowerAct.REASON)
        if node.is_responding:
            return run("ended", 0, "the node was powered up and has registered")
    if now - step.began > seconds:
        half = "half done: it is powered down" if is_off else f"it is {node.state}"
        return run("ended", TIMEOUT_RC, f"not done within {seconds:g} s; {half}")
    is_new = now - step.at < TAKEN_SECONDS
    if step.name == PowerStep.DOWN:
        if is_off:
            return run("running", due=PowerAct.UP)
        if is_new or node.flags & (_GOING_DOWN | _GOING_UP):
            return run("running")
        return run("ended", 1, f"Slurm did not power it down: it is {node.state}")
    if is_off and not is_new:
        text = f"half done: it is powered down, and Slurm could not power it up ({node.reason})"
        return run("ended", 1, text)
    is_bare = not node.reason.strip() and "POWERING_UP" in node.flags
    return run("running", due=PowerAct.REASON if is_bare and node.is_fail else "")


def _is_off(node: Node) -> bool:
    return "POWERED_DOWN" in node.flags and not node.flags & (_GOING_DOWN | _GOING_UP)
