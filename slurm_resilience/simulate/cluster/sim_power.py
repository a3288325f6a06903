"""Slurm's power saving and reboots in the simulated Slurm: what SuspendProgram, ResumeProgram and
RebootProgram do to machines, well or badly."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

import msgspec

from slurm_resilience.model import Node
from slurm_resilience.simulate.cluster.sim_host import Manner, SimHost, SimRun
from slurm_resilience.simulate.cluster.sim_machine import SimMachine
from slurm_resilience.simulate.cluster.sim_slurm import SLURM, SRESCTLD, SimSlurm
from slurm_resilience.simulate.schedule import Schedule

TURN_SECONDS = 1.0
"""Until Slurm carries an order out."""
SUSPEND_SECONDS, RESUME_SECONDS = 10.0, 40.0
"""SuspendTimeout and ResumeTimeout."""
_GOING_DOWN = frozenset({"POWER_DOWN", "POWERING_DOWN"})
_REBOOTING = frozenset({"REBOOT_REQUESTED", "REBOOT_ISSUED"})


class _PersonsReboot(NamedTuple):
    """A reboot that a person asked Slurm for."""

    author: str
    then: str
    """The state that the node is to have after it; empty: as before."""
    drains: bool = False
    """It was drained by this: ASAP."""
    reason: str = ""


class PeoplesReboots(Protocol):
    """Is told of the reboots that people ask of Slurm."""

    def reboot_asked(self, name: str, then: str) -> None:
        """Take in that Slurm is to reboot a node, and the state that it is to have then."""
        ...

    def reboot_over(self, name: str, is_taken_back: bool) -> None:
        """Take in that it is over, or that sresctld has taken it back."""
        ...

    def rebooted(self, name: str) -> None:
        """Take in that Slurm has rebooted a node."""
        ...


class SimPower:
    """Powers machines down and up, and reboots them, by Slurm's word."""

    def __init__(
        self,
        schedule: Schedule,
        slurm: SimSlurm,
        host: SimHost,
        machines: dict[str, SimMachine],
        random: Random,
    ) -> None:
        self._schedule = schedule
        self._slurm = slurm
        self._host = host
        self._machines = machines
        self._random = random
        self._turns: Counter[str] = Counter()
        """Power cycles and reboots of each node that have ended."""
        self._orders: dict[str, SimRun] = {}
        """The last order of sresctld for each node."""
        self._peoples: dict[str, _PersonsReboot] = {}
        self.people: PeoplesReboots | None = None

    # -- orders -------------------------------------------------------------------------------

    def down(self, node: Node, author: str) -> None:
        """Take POWER_DOWN_FORCE."""
        if author == SRESCTLD:
            self._tell(node.name, "replace")
        if node.flags & (_GOING_DOWN | {"POWERED_DOWN"}):
            return
        self._flags(node.name, author, plus={"POWER_DOWN"}, minus={"POWER_UP", "POWERING_UP"})
        self._schedule.after(TURN_SECONDS, self._suspend, node.name)

    def up(self, node: Node, author: str) -> None:
        """Take POWER_UP. It is lost on a node that is on, or still going down."""
        if "POWERED_DOWN" not in node.flags or node.flags & _GOING_DOWN:
            return
        self._flags(node.name, author, plus={"POWER_UP"})
        self._schedule.after(TURN_SECONDS, self._resume, node.name)

    def reboot(self, node: Node, reason: str) -> None:
        """Take `scontrol reboot nextstate=DOWN`."""
        self._tell(node.name, "reboot")
        if node.flags & _REBOOTING:
            return
        self._slurm.write(node, node.base, node.flags | {"REBOOT_REQUESTED"}, reason, SRESCTLD)
        self._schedule.after(TURN_SECONDS, self._issue_reboot, node.name)

    def reboot_by(self, author: str, node: Node, *, asap: bool, then: str, reason: str) -> None:
        """Take a person's `scontrol reboot`. Slurm passes over a node that is rebooted already, or
        powered off."""
        if node.flags & _REBOOTING or node.is_powered_off_on_purpose or "POWER_UP" in node.flags:
            return
        name, flags = node.name, node.flags | {"REBOOT_REQUESTED"}
        drains = asap and not node.is_drain
        if drains:
            flags |= {"DRAIN"}
            then = then or "RESUME"
        order = self._peoples[name] = _PersonsReboot(author, then, drains, reason)
        if self.people is not None:
            self.people.reboot_asked(name, then)
        words = reason or node.reason or ("Reboot ASAP" if drains else "reboot requested")
        is_out = node.is_down or bool(flags & {"DRAIN", "FAIL"})
        by = order.author if reason and is_out else SLURM
        self._slurm.write(node, node.base, frozenset(flags), words, by)
        self._schedule.after(TURN_SECONDS, self._issue_reboot, name)

    def cancel_reboot(self, node: Node) -> bool:
        """Take a reboot back; false: none was asked for, or it has begun."""
        is_asked = "REBOOT_REQUESTED" in node.flags
        if is_asked:
            if node.name in self._peoples:
                self._ended(node.name, is_taken_back=True)
            elif self._host.watcher is not None:
                self._host.watcher.run_terminated(self._orders[node.name])
            self._flags(node.name, SRESCTLD, minus={"REBOOT_REQUESTED"})
            self._turns[node.name] += 1
        return is_asked

    def registered(self, name: str, rebooted: bool) -> None:
        """Take in that a node's slurmd has registered."""
        node = self._slurm.entries[name]
        if rebooted:
            booted = datetime.fromtimestamp(self._schedule.now, UTC).replace(tzinfo=None)
            node = msgspec.structs.replace(node, boot_time=booted.isoformat(timespec="seconds"))
            self._slurm.keep(node)
        if "POWERING_UP" in node.flags and rebooted:
            self._flags(name, SLURM, minus={"POWERING_UP"})
            self._turns[name] += 1
        elif "REBOOT_ISSUED" in node.flags and rebooted:
            self._rebooted(node)
            self._turns[name] += 1

    def _rebooted(self, node: Node) -> None:
        """Have a node's reboot be over, as 22.05 does: what ASAP has drained is drained no more,
        and FAIL stays."""
        order = self._peoples.get(node.name, _PersonsReboot(SRESCTLD, "DOWN"))
        if self.people is not None:
            self.people.rebooted(node.name)
        flags, reason = node.flags - _REBOOTING, node.reason
        if order.drains or order.then == "RESUME":
            flags -= {"DRAIN"}
        if order.then == "DOWN":
            reason = _added_to(reason, "reboot complete")
            self._slurm.write(node, "DOWN", flags, reason, SLURM)
        elif flags & {"DRAIN", "FAIL"}:
            self._slurm.write(node, "IDLE", flags, reason, SLURM)
        else:
            # In service by the word of the person who asked.
            self._slurm.write(node, "IDLE", flags, "", order.author)
        self._ended(node.name)

    def _ended(self, name: str, is_taken_back: bool = False) -> None:
        if self._peoples.pop(name, None) is not None and self.people is not None:
            self.people.reboot_over(name, is_taken_back)

    # -- how Slurm carries them out -----------------------------------------------------------

    def _suspend(self, name: str) -> None:
        if self._waits(self._suspend, name) or "POWER_DOWN" not in self._of(name).flags:
            return
        # A reboot is over by that.
        self._flags(name, SLURM, plus={"POWERING_DOWN"}, minus={"POWER_DOWN", *_REBOOTING})
        self._ended(name)
        if self._random.choice(self._host.manners) is not Manner.FAILS:
            self._machines[name].power_off()
        self._schedule.after(SUSPEND_SECONDS, self._off, name)

    def _off(self, name: str) -> None:
        if "POWERING_DOWN" in self._of(name).flags:
            self._flags(name, SLURM, plus={"POWERED_DOWN"}, minus={"POWERING_DOWN"})

    def _resume(self, name: str) -> None:
        node = self._of(name)
        if self._waits(self._resume, name) or "POWER_UP" not in node.flags:
            return
        flags = (node.flags - {"POWER_UP", "POWERED_DOWN"}) | {"POWERING_UP", "NOT_RESPONDING"}
        # As real Slurm does: the Reason goes, FAIL stays.
        self._slurm.write(node, node.base, flags, "", SLURM)
        machine, fault = self._machines[name], self._machines[name].fault
        match self._random.choice(self._host.manners):
            case Manner.GOOD:
                machine.boot(self._random.uniform(3.0, 20.0), replaced=True)
            case Manner.SLOW:
                machine.boot(self._random.uniform(50.0, 90.0), replaced=True)
            case Manner.SICK_AGAIN:
                machine.boot(self._random.uniform(3.0, 20.0))
                machine.fault = fault
            case _:
                machine.power_off()
        self._schedule.after(RESUME_SECONDS, self._resume_is_late, name, self._turns[name])

    def _resume_is_late(self, name: str, turn: int) -> None:
        node = self._of(name)
        if "POWERING_UP" not in node.flags or self._turns[name] != turn:
            return
        self._turns[name] += 1
        flags = (node.flags - {"POWERING_UP"}) | {"POWERED_DOWN"}
        self._slurm.write(node, "DOWN", flags, "ResumeTimeout reached", SLURM)

    def _issue_reboot(self, name: str) -> None:
        node = self._of(name)
        if self._waits(self._issue_reboot, name) or "REBOOT_REQUESTED" not in node.flags:
            return
        if name in self._peoples and self._slurm.jobs_on(name):
            self._schedule.after(TURN_SECONDS, self._issue_reboot, name)
            return
        flags = (node.flags - {"REBOOT_REQUESTED"}) | {"REBOOT_ISSUED"}
        order = self._peoples.get(name)
        # Out of service from now on, for a person's reason, if one was given and stands.
        is_theirs = order is not None and order.reason != "" and order.reason == node.reason
        by = order.author if order is not None and is_theirs else SLURM
        self._slurm.write(node, "DOWN", flags, _added_to(node.reason, "reboot issued"), by)
        machine = self._machines[name]
        is_done = machine.lives and self._random.choice(self._host.manners) is not Manner.FAILS
        if is_done:
            machine.boot(self._random.uniform(3.0, 20.0))
        self._schedule.after(RESUME_SECONDS, self._reboot_is_late, name, self._turns[name])

    def _reboot_is_late(self, name: str, turn: int) -> None:
        node = self._of(name)
        if "REBOOT_ISSUED" not in node.flags or self._turns[name] != turn:
            return
        self._turns[name] += 1
        reason = _added_to(node.reason, "reboot timed out")
        self._slurm.write(node, "DOWN", node.flags - _REBOOTING, reason, SLURM)
        self._ended(name)

    def _waits(self, act: object, name: str) -> bool:
        """Tell whether slurmctld is away; then it goes on when it is back."""
        if self._slurm.away and callable(act):
            self._schedule.after(TURN_SECONDS, act, name)
        return self._slurm.away

    def _of(self, name: str) -> Node:
        return self._slurm.entries[name]

    def _flags(
        self,
        name: str,
        author: str,
        plus: frozenset[str] | set[str] = frozenset(),
        minus: frozenset[str] | set[str] = frozenset(),
    ) -> None:
        node = self._of(name)
        after = msgspec.structs.replace(node, flags=(node.flags - minus) | plus)
        self._slurm.keep(after)
        if self._slurm.watcher is not None:
            self._slurm.watcher.node_set(node, after, author)

    def _tell(self, name: str, verb: str) -> None:
        """Tell the rules that a machine is about to be taken away."""
        intent = f"slurm-{verb}-{name}-{self._turns[name]}"
        run = self._orders[name] = SimRun(Path(intent), verb, name, self._schedule.now)
        if self._host.watcher is not None:
            self._host.watcher.run_started(run)
        run.lives = False


def _added_to(reason: str, note: str) -> str:
    """Return a Reason with what Slurm adds to it."""
    return f"{reason} : {note}" if reason else note
