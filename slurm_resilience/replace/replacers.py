"""Choose what replaces and what reboots nodes, by the configuration and by what Slurm has.

`replace.by` replaces: the program, Slurm's power saving, or a name of the entry point group
`slurm_resilience.replacers`. `replace.reboot_by` reboots; by default `scontrol reboot`, where Slurm
has a RebootProgram and no program is configured. The directory of a run is named by its replacer:
so it is followed in the same way after a change of the configuration.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience.config import ReplaceSettings
from slurm_resilience.errors import ConfigError, SresError
from slurm_resilience.model import REBOOT, REPLACE, RESET, Node
from slurm_resilience.replace import program
from slurm_resilience.replace.elsewhere import ELSEWHERE, ElsewhereReplacer
from slurm_resilience.replace.program import (
    THIS_HOST,
    ProgramReplacer,
    RunHost,
)
from slurm_resilience.replace.repair_order import RepairOrder, Replacer, Run, RunExists
from slurm_resilience.replace.slurm_power import SlurmPowerReplacer
from slurm_resilience.replace.slurm_reboot import SlurmRebootReplacer
from slurm_resilience.slurm.client import ClusterInfo, SlurmClient

log = logging.getLogger("sresctld")

GROUP = "slurm_resilience.replacers"
PROGRAM, POWER, SLURM_REBOOT = "program", "slurm-power", "slurm-reboot"
"""The names in `replace.by` and `replace.reboot_by`, besides those of the group."""
GPU_RESET = "gpu-reset"
"""The one that resets GPUs. It is not chosen by name: no other can."""

MOST_TOLD = 100
"""Different failures that are remembered, so that each is told once."""


def _nothing() -> None:
    """Permit every act."""


class Replacers:
    """The replacers of this site, and which of them does what."""

    def __init__(self, known: Mapping[str, Replacer], chosen: Mapping[str, str], host: RunHost):
        """
        Args:
            known: by name.
            chosen: for each action (`Action:Replace`, …) the name of the one that does it.
            host: runs the program.
        """
        self._known = known
        self._chosen = chosen
        self._host = host
        self._told: set[str] = set()
        self.before_act: Callable[[], None] = _nothing
        """Called before each act; raises an SresError where it must not be begun."""

    def can(self, action: str) -> bool:
        """Tell whether this action can be done here at all."""
        return action in self._chosen

    def name_of(self, action: str) -> str:
        """Return the name of the replacer that does this action."""
        return self._chosen.get(action, PROGRAM)

    def lack_of_room(self, directory: Path) -> str:
        """Return what the disk of a directory lacks for a new run; empty: nothing is known."""
        return self._host.lack_of_room(directory)

    def start(self, order: RepairOrder, action: str, node: Node, now: float) -> None:
        """Begin an order with the replacer of this action.

        Raises:
            RunExists: it was begun before, by whatever replacer.
            SresError: it cannot be begun now.
        """
        if any(_named(order, name).directory.exists() for name in (PROGRAM, *self._known)):
            raise RunExists(f"{order.directory} was started before")
        name = self.name_of(action)
        self.before_act()
        with self._in_one_line(name):
            self._known[name].start(_named(order, name), node, now)

    def go_on(self, order: RepairOrder, node: Node, now: float) -> None:
        """Do the act of a begun order that is due."""
        name = self._begun_by(order)
        if name in self._known:
            self.before_act()
            with self._in_one_line(name):
                self._known[name].start(_named(order, name), node, now)

    def status(self, order: RepairOrder, node: Node | None, now: float) -> Run:
        """Return how an order stands, by the replacer that it was begun with."""
        name = self._begun_by(order)
        if name not in self._known:
            text = f"the replacer {name} is not installed any more"
            return Run("lost", output=text, ended_at=now, by=name)
        try:
            with self._in_one_line(name):
                return self._known[name].status(_named(order, name), node, now)
        except (SresError, OSError) as error:
            self._tell_once(f"the state of {order.directory.name} cannot be read: {error}")
            # Unknown, so it may run: nothing else is begun, and past its limit an alarm says why.
            return Run("running", by=f"{name}, whose state cannot be read,")

    def is_unfinished(self, order: RepairOrder, node: Node, now: float) -> bool:
        """Tell whether a run of an earlier order has not ended. Slurm's own state tells those of
        Slurm: a new order goes on where an earlier one ended."""
        name = self._begun_by(order)
        if name == PROGRAM:
            return program.is_unfinished(order.directory, self._host)
        if name in (POWER, SLURM_REBOOT, ELSEWHERE):
            return False
        return self.status(order, node, now).state == "running"

    def stop(self, order: RepairOrder) -> None:
        """Do nothing more for an order."""
        name = self._begun_by(order)
        if name in self._known:
            with self._in_one_line(name):
                self._known[name].stop(_named(order, name))

    @contextlib.contextmanager
    def _in_one_line(self, name: str) -> Iterator[None]:
        """Turn what a third party's replacer raises into an error that sresctld expects: a defect
        there must not end the daemon."""
        try:
            yield
        except (SresError, OSError):
            raise
        except Exception as error:
            # Its text may hold what is no user's to read, and an act's failure is in the history.
            self._tell_once(f"the replacer {name} failed: {error!r}")
            kind = type(error).__name__
            raise SresError(f"the replacer {name} failed: {kind}; see sresctld's log") from error

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            if len(self._told) >= MOST_TOLD:
                self._told.clear()
            self._told.add(text)
            log.error("%s", text)

    def _begun_by(self, order: RepairOrder) -> str:
        found = next(order.directory.parent.glob(f"{order.directory.name}.*"), None)
        return found.name.partition(".")[2] if found is not None else PROGRAM


def _named(order: RepairOrder, name: str) -> RepairOrder:
    """Return the order with the directory that this replacer keeps it in."""
    if name == PROGRAM:
        return order
    directory = order.directory.with_name(f"{order.directory.name}.{name}")
    return msgspec.structs.replace(order, directory=directory)


def program_only(settings: ReplaceSettings) -> Replacers:
    """Return the program alone, for both actions where there is one."""
    chosen = dict.fromkeys((REPLACE, REBOOT), PROGRAM) if settings.program else {}
    return Replacers({PROGRAM: ProgramReplacer(settings.program, THIS_HOST)}, chosen, THIS_HOST)


def choose_replacers(
    settings: ReplaceSettings,
    info: ClusterInfo,
    client: SlurmClient,
    host: RunHost = THIS_HOST,
    gpu_reset: Replacer | None = None,
) -> Replacers:
    """Return what the configuration names, checked against what Slurm has.

    Args:
        settings: `[replace]`.
        info: Slurm's settings.
        client: the door to Slurm.
        host: the machine that the program runs on.
        gpu_reset: resets GPUs; None: they are not reset.

    Raises:
        ConfigError: a name that is not known, or one that cannot work with this Slurm.
    """
    check_names_of_replacers(settings)
    known: dict[str, Replacer] = {
        PROGRAM: ProgramReplacer(settings.program, host),
        POWER: SlurmPowerReplacer(client, host),
        SLURM_REBOOT: SlurmRebootReplacer(client, host),
        ELSEWHERE: ElsewhereReplacer(),
    }
    can_reboot = bool(info.raw.get("RebootProgram"))
    chosen = {REPLACE: settings.by, REBOOT: settings.reboot_by}
    if not settings.reboot_by:
        has_own = settings.by == PROGRAM and bool(settings.program)
        chosen[REBOOT] = SLURM_REBOOT if can_reboot and not has_own else settings.by
    if not settings.program:
        chosen = {action: name for action, name in chosen.items() if name != PROGRAM}
    for name in chosen.values():
        if name == POWER:
            _check_power_saving(info)
        elif name == SLURM_REBOOT and not can_reboot:
            raise ConfigError(
                "replace.reboot_by: slurm-reboot needs a RebootProgram in slurm.conf; set it, or "
                "choose another"
            )
        elif name not in known:
            known[name] = _load(name, settings)
    if gpu_reset is not None:
        known[GPU_RESET], chosen[RESET] = gpu_reset, GPU_RESET
    return Replacers(known, chosen, host)


def check_names_of_replacers(settings: ReplaceSettings) -> None:
    """Check that the replacers of the configuration are there.

    Raises:
        ConfigError: one is not.
    """
    parties = {point.name for point in entry_points(group=GROUP)}
    for key, name, own in (
        ("by", settings.by, (PROGRAM, POWER)),
        ("reboot_by", settings.reboot_by, ("", PROGRAM, POWER, SLURM_REBOOT)),
    ):
        names = (*(word for word in own if word), *sorted(parties))
        if name in own or name in parties:
            continue
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"
        raise ConfigError(f"replace.{key}: '{name}' replaces no nodes here; {hint}")


def _check_power_saving(info: ClusterInfo) -> None:
    """Refuse a Slurm that would take POWER_DOWN_FORCE and do nothing."""
    for key in ("SuspendProgram", "ResumeProgram"):
        if not info.raw.get(key):
            raise ConfigError(
                f"replace.by: slurm-power needs a {key} in slurm.conf; set it, or choose another"
            )
    time = info.raw.get("SuspendTime", "")
    if not re.match(r"[1-9]", time):
        raise ConfigError(
            f"replace.by: slurm-power works only where SuspendTime is finite in slurm.conf (it is "
            f"{time or 'not set'}); SuspendTime=99999999 powers no node down by itself"
        )


def _load(name: str, settings: ReplaceSettings) -> Replacer:
    """Load a third party's replacer.

    Raises:
        ConfigError: it cannot be loaded.
    """
    (point,) = list(entry_points(group=GROUP, name=name))[:1]
    try:
        made: Any = point.load()(settings)
    except Exception as error:
        raise ConfigError(f"replace.by: {point.value} cannot be loaded: {error}") from None
    lacking = [verb for verb in ("start", "status", "stop") if not hasattr(made, verb)]
    if lacking:
        raise ConfigError(f"replace.by: {point.value} has no {', '.join(lacking)}")
    replacer: Replacer = made
    return replacer
