"""All checks: ours, and those that a site's packages bring."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from slurm_resilience.config import CheckSettings
from slurm_resilience.errors import ConfigError
from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.health.checks.accelerator import amd_gpus, neuron_devices
from slurm_resilience.health.checks.gpu import (
    dcgm_health,
    gpu_count,
    gpu_health,
    gpu_libraries,
    gpu_processes,
    mig_devices,
)
from slurm_resilience.health.checks.host import (
    clock_sync,
    cpu_frequency,
    edac_counters,
    ipmi_events,
    memory,
    nhc_config,
    open_files,
    pcie_errors,
    process_ids,
    services,
    software,
    stuck_processes,
    zombies,
)
from slurm_resilience.health.checks.network import efa_devices, infiniband_ports
from slurm_resilience.health.checks.storage import (
    disk,
    filesystem_readonly,
    inodes,
    lustre_imports,
    nvme_disks,
    shared_mounts,
)
from slurm_resilience.health.programs.program_checks import DIRECTORY, program_checks

log = logging.getLogger("sresd.checks")

GROUP = "slurm_resilience.checks"
PACELESS_SOURCES = frozenset({"gpu_events", "dcgm_policies"})
"""Parts of sresd that are no checks, and that checks.disabled switches off as well."""
CONFIGURED = frozenset({"planned_loss", "lifecycle", "profile", DIRECTORY})
"""Checks that are there only where another table of the configuration asks for them."""
BUILT_IN: tuple[Check, ...] = (
    filesystem_readonly.CHECK,
    disk.CHECK,
    inodes.CHECK,
    memory.CHECK,
    gpu_count.CHECK,
    edac_counters.CHECK,
    pcie_errors.CHECK,
    infiniband_ports.CHECK,
    efa_devices.CHECK,
    neuron_devices.CHECK,
    open_files.CHECK,
    process_ids.CHECK,
    stuck_processes.CHECK,
    zombies.CHECK,
    shared_mounts.CHECK,
    lustre_imports.CHECK,
    gpu_health.CHECK,
    gpu_processes.CHECK,
    dcgm_health.CHECK,
    mig_devices.CHECK,
    gpu_libraries.CHECK,
    amd_gpus.CHECK,
    nvme_disks.CHECK,
    ipmi_events.CHECK,
    clock_sync.CHECK,
    cpu_frequency.CHECK,
    services.CHECK,
    software.CHECK,
    nhc_config.CHECK,
)


def checks(disabled: tuple[str, ...] = ()) -> tuple[Check, ...]:
    """Return the checks that are not switched off; a site's replaces ours of the same name."""
    checks_by_name = {check.name: check for check in BUILT_IN}
    for point in entry_points(group=GROUP):
        check = _load(point)
        checks_by_name[check.name] = check
    return tuple(check for name, check in checks_by_name.items() if name not in disabled)


def refuse_unknown_names(settings: CheckSettings, programs: Iterable[str] | None = None) -> None:
    """Refuse a name in checks.disabled or checks.periods that is that of no check.

    A site's own checks may be on some of its nodes alone. So where there are such, a name that this
    machine does not know is only told.

    Args:
        settings: of the checks.
        programs: the names in checks.directory; None: it is read here.

    Raises:
        ConfigError: there is no such check.
    """
    if not (settings.periods or settings.disabled):
        return
    own = {point.name for point in entry_points(group=GROUP)}
    if programs is None:
        programs = (check.name for check in program_checks(settings.directory))
    own |= set(programs)
    known = {check.name for check in BUILT_IN} | CONFIGURED | own
    named = [("periods", name, known) for name in settings.periods]
    named += [("disabled", name, known | PACELESS_SOURCES) for name in settings.disabled]
    for key, name, names in named:
        if name in names:
            continue
        near = difflib.get_close_matches(name, sorted(names), n=1)
        hint = f"did you mean '{near[0]}'?" if near else "`sres check list` shows them"
        text = f"checks.{key}: there is no check '{name}'; {hint}"
        if not (own or settings.directory):
            raise ConfigError(text)
        log.warning("%s", text)


def _load(point: EntryPoint) -> Check:
    """Load a site's check; one that cannot be loaded stays visible as unjudged."""
    try:
        check = point.load()
    except Exception as error:
        return _broken(point.name, f"{point.value} cannot be loaded: {error}")
    if not isinstance(check, Check):
        return _broken(point.name, f"{point.value} is a {type(check).__name__}, not a Check")
    return check


def _broken(name: str, reason: str) -> Check:
    def probe(context: CheckContext) -> Any:
        raise Unjudged(reason)

    def judge(seen: Any, context: CheckContext) -> Judgement:
        raise Unjudged(reason)

    return Check(name, probe, judge)
