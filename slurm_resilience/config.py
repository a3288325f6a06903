"""The one TOML file that sresctld, sresd, the supervisor and `sres` share.

Read from ``$SRES_CONFIG``, else ``/etc/slurm-resilience/sres.toml``; without a file every default
holds. An unknown key is an error that names the nearest known one: a typo must never be a silent
default on a machine that marks nodes down.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from slurm_resilience.errors import ConfigError

DEFAULT_PATH = Path("/etc/slurm-resilience/sres.toml")
OPTION_HELP = f"Configuration file.  [default: $SRES_CONFIG, else {DEFAULT_PATH}]"
"""The help of --config in every command."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file."""


class ControllerSettings(_Section, frozen=True):
    """Address and state directory of sresctld, and the interval at which it reads Slurm."""

    host: str = ""
    """Names or addresses of sresctld, separated by commas. Empty: all of SlurmctldHost. With one
    name there is no standby."""
    port: int = 6829
    state_dir: str = "/var/lib/sresctld"
    interval: float = 2.0
    """Seconds between two reads of Slurm when nothing else wakes the cycle."""
    keep: float = 15552000.0
    """Seconds that events, incidents that have ended, and runs of the replacement program are
    kept."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names in ``host``."""
        return tuple(name for part in self.host.split(",") if (name := part.strip()))


class WireSettings(_Section, frozen=True):
    munge_socket: str = ""
    """munged's socket. Empty: munge's own default."""


class AgentSettings(_Section, frozen=True):
    """sresd, on every node."""

    beat: float = 0.75
    """Seconds between heartbeats. sresctld goes by it too: it probes a node that has missed one."""
    kernel_log: str = "/dev/kmsg"
    """A kernel log device or a FIFO; lines are read as they arrive."""
    accept_injected: bool = False
    """Take kernel log records that a user-space program wrote (facility 1) for real ones."""
    check_interval: float = 60.0
    sysroot: str = "/"
    """Directory below which the checks read /proc and /sys."""
    health_log: str = ""
    """File of the node's health log, a line of JSON for each change. Empty: health.jsonl in the
    directory that systemd gives sresd (LogsDirectory=), and none without systemd."""
    health_log_bytes: int = 10_000_000
    """Bytes of one file of the health log; four older ones are kept. 0: no health log."""
    hook_directory: str = ""
    """Directory of the state that Slurm's hooks read (packaging/slurm-hook). Empty: the one that
    systemd gives sresd (RuntimeDirectory=), and none without systemd."""
    loss_notice: str = ""
    """A file that is there while a notice stands that this node goes (a spot instance, say), or an
    executable that prints it."""
    nvidia_smi: str = "nvidia-smi"
    """The program by which GPUs are reset; an absolute path, or found on PATH."""
    bug_report: str = "nvidia-bug-report.sh"
    """NVIDIA's tool that writes a report of the node's GPUs, run with the evidence of a node; an
    absolute path, or found on PATH. Empty: never."""
    bug_report_timeout: float = 600.0
    """Seconds after which it is killed. 0: it is never run."""
    bug_report_bytes: int = 50_000_000
    """Bytes of a file that it writes; three reports are kept."""
    read_ahead: tuple[str, ...] = ()
    """Files that programs load as they start, as paths with ``*`` and ``**``: they are kept in the
    page cache while no job's tasks run on the node."""
    fence_after: float = 15.0
    """A node that reaches neither sresctld, slurmctld nor any peer for this long ends its
    auto-resume steps. 0 switches fencing off."""


class CheckSettings(_Section, frozen=True):
    disabled: tuple[str, ...] = ()
    disk_full_percent: float = 95.0
    inodes_full_percent: float = 95.0
    mounts: tuple[str, ...] = ("/", "/tmp", "/var")
    """Mount points whose space and inodes are watched."""
    memory_tolerance_percent: float = 5.0
    """Memory that may be missing from Slurm's RealMemory before it is a fault (NHC's
    check_hw_physmem: 5 %)."""
    periods: dict[str, float] = {}
    """Seconds between two runs of a check, by its name."""
    directory: str = ""
    """Each executable in it is a check of the site's own."""
    profile: str = ""
    """The hardware that a node should have: a node type that is known, or a TOML file."""
    nhc_config: str = ""
    """A configuration of LBNL Node Health Check, whose most used lines are judged."""
    nhc_asks_for: Literal["monitor", "reset", "reboot", "replace"] = "monitor"
    """The severity of a line of it that does not hold."""
    services: tuple[str, ...] = ()
    """systemd's units that must run on the node."""
    state_dir: str = "/var/lib/slurm-resilience"
    """On the node's own disk, below the sysroot: the record of the software of its last deep check,
    and of its speeds."""
    corrected_memory_errors: int = 10
    zombies: int = 20
    open_files_percent: float = 80.0


class LifecycleSettings(_Section, frozen=True):
    """Scripts that a node runs before its slurmd starts."""

    directory: str = ""
    """They lie here: `NN-name`, and HyperPod's `on_create.sh`. Empty: none are run."""
    timeout: float = 300.0
    """Seconds for one script."""
    total_timeout: float = 600.0
    """Seconds for all of them. A repaired node has `replace.return_timeout` to boot and run
    them."""
    asks_for: Literal["monitor", "reboot", "replace"] = "reboot"
    """The severity of a script that fails."""
    start_slurmd: tuple[str, ...] = ("systemctl", "start", "slurmd")
    """Run on the node after a run by request that ended well. Empty: nothing."""
    state_dir: str = "/var/lib/sres-lifecycle"
    """On the node's own disk: a replacement's empty one has no record of a run."""
    log_dir: str = "/var/log/slurm-resilience/lifecycle"
    resource_config: str = "/opt/ml/config/resource_config.json"
    """HyperPod's description of the cluster, for `on_create.sh`; made anew where it is not
    there."""


class DetectSettings(_Section, frozen=True):
    """Times after which a silent node is probed, and counts as dead."""

    silent_after: float = 1.5
    """Seconds without a beat until the node is a suspect. It is probed before that, as soon as a
    beat is missing."""
    dead_after: float = 4.0
    """Seconds without a beat and without one answered probe until the node is dead."""
    dead_after_unsupervised: float = 0.0
    """The same for a node with jobs that no supervisor keeps alive: setting it DOWN ends them. 0:
    until Slurm itself has set it DOWN (SlurmdTimeout)."""
    probe_timeout: float = 1.0
    refused_after: float = 60.0
    """Seconds during which the machine answers but refuses slurmd's port, sresd gone too, until the
    node counts as dead. Long, because it is also what a package upgrade looks like."""
    start_grace: float = 10.0
    """After a start of sresctld, seconds before a node that never spoke can be found silent."""


class BreakerSettings(_Section, frozen=True):
    """Numbers of nodes that may fail together, which do not grow with the cluster. Past them, the
    fault is more likely sresctld's own or the network's: the breaker trips. Then no node is
    replaced, and only what moves supervised jobs is marked."""

    window: float = 120.0
    """Seconds that count as one moment for the limits `…_at_once`."""
    nodes_at_once: int = 2
    nodes_per_hour: int = 8
    partition_at_once: int = 2
    partition_per_hour: int = 6
    switch_per_hour: int = 4
    """Nodes of one leaf switch or block of Slurm's topology: a bad switch, cable or power feed."""
    driver_per_hour: int = 4
    """Nodes with the same version of a driver, where most nodes have another: a bad new one."""
    check_per_hour: int = 4
    """Nodes on which one health check found the same fault: a bad driver, or a bad check."""
    quiet: float = 600.0
    """Seconds without new faults, and with no more than `nodes_at_once` nodes faulty, until a
    tripped breaker closes by itself."""


RecoveryMode = Literal["none", "observe", "automatic"]
"""``observe`` writes down what it would do; ``none`` only reports. The most careful one first."""
_MODES: tuple[RecoveryMode, ...] = get_args(RecoveryMode)


class RecoverySettings(_Section, frozen=True):
    mode: RecoveryMode = "automatic"
    """The mode of each node for which neither of the next two tables says another one."""
    partitions: dict[str, RecoveryMode] = {}
    nodes: dict[str, RecoveryMode] = {}
    """By hostlist; `decide.recovery_modes` puts each node of it in its place."""
    drain_alarm: float = 86400.0
    """Seconds a node may wait for its jobs before an alarm is raised. No job is ever killed."""
    max_flaps: int = 3
    """A node that was lost and came back by itself more often than this within ``flap_window`` is
    kept out of service until a person has looked."""
    flap_window: float = 3600.0
    recurrence_window: float = 604800.0
    """Seconds for which earlier repairs of a node count."""
    max_resets: int = 1
    """Resets of the GPUs of one machine within ``recurrence_window`` for faults that sresctld
    found; the next such fault has it rebooted. 0: none is reset."""
    max_reboots: int = 1
    """Reboots of one machine within ``recurrence_window`` for faults that sresctld found; the next
    such fault has it replaced."""
    max_replacements: int = 3
    """Replacements of one node within ``recurrence_window`` for faults that sresctld found; the
    next such fault has it kept out of service until a person has looked."""
    max_repairs: int = 3
    """The same for repairs of any kind of one machine, whatever nodes it was."""

    validate: tuple[str, ...] = ()
    """Run on a node after its repair, before it is given back, with its name behind it; it must end
    well. Empty: the health checks alone decide."""
    validate_timeout: float = 600.0

    def mode_of(self, node: str, partitions: Iterable[str] = ()) -> RecoveryMode:
        """Return a node's own mode, else the most careful one of its partitions, else the
        cluster's."""
        if not (self.nodes or self.partitions):
            return self.mode  # asked for every node of every cycle
        own = self.nodes.get(node)
        if own is not None:
            return own
        named = [self.partitions[name] for name in partitions if name in self.partitions]
        return min(named, key=_MODES.index, default=self.mode)


class ReplaceSettings(_Section, frozen=True):
    by: str = "program"
    """The thing that replaces nodes: `program`, `slurm-power` (Slurm's power saving), or a name of
    the entry point group `slurm_resilience.replacers`."""
    reboot_by: str = ""
    """The thing that reboots nodes: one of these, or `slurm-reboot` (`scontrol reboot`). Empty:
    `slurm-reboot` where Slurm has a RebootProgram and no program is configured, else as ``by``."""
    program: tuple[str, ...] = ()
    """The replacement program and its first arguments; `replace NODE` or `reboot NODE` is appended.
    Empty: nodes are marked, and wait for a person."""
    timeout: float = 3600.0
    attempts: int = 3
    backoff: float = 60.0
    """Seconds before a failed replacement is tried again; doubled each time."""
    return_timeout: float = 900.0
    """Seconds between the end of the program and the node's registration."""
    silent_for: float = 300.0
    """Seconds of silence before a node that sresctld found dead is replaced. One that lives again
    by then, after a reboot by hand for example, goes back into service."""
    evidence_timeout: float = 10.0
    """Seconds that a replacement waits for what the node's sresd can still tell. 0: it is not
    asked."""
    evidence_directory: str = ""
    """A directory that all nodes share, in which root may write: sresd copies its bug reports
    there. Empty: they lie on the node alone."""
    bug_report_wait: float = 60.0
    """Seconds that a reboot, or a replacement whose report is copied, waits for the end of a bug
    report. 0: it waits for none."""
    max_running: int = 8
    """Replacements that run at the same time."""
    max_running_partition: int = 4
    max_per_hour: int = 12
    """Replacements started within an hour for faults that sresctld found itself."""


class ResumeSettings(_Section, frozen=True):
    """Limits of the supervisor behind `srun --auto-resume=1`."""

    grace: float = 10.0
    """Seconds between SIGTERM and SIGKILL for a step that has to make room."""
    diagnosis_wait: float = 1.0
    """Seconds to wait after a failed step for a finding about its nodes."""
    check_wait: float = 5.0
    """Seconds that the nodes of a failed step have to check themselves; a node that does not answer
    is judged by Slurm and its heartbeats. 0: no checks."""
    max_relaunches: int = 3
    """Relaunches in a row without a fault of any node and without progress."""
    progress_after: float = 300.0
    """An attempt that ran this long counts as progress when the program reports none, unless the
    next ones fail after the same time."""
    max_same_failure: int = 20
    """Failures with the same code of a program that never reports progress."""
    max_per_hour: int = 10
    """Attempts within an hour that made no progress, whatever their cause."""
    max_attempts: int = 1000
    max_per_node: int = 3
    """Attempts of less than an hour without progress that may end on one node; then it is not used
    any more."""
    backoff: float = 5.0
    """Seconds to wait before a program is started again that failed twice in a row by itself;
    doubled each time."""
    swap_wait: float = 3600.0
    """Seconds to wait for an idle node before the job is requeued instead."""
    slurmctld_wait: float = 3600.0
    """Seconds for which slurmctld may be away, to be updated say, before a job is given up that
    needs it."""
    requeue_wait: float = 60.0
    """Seconds sresctld is given to requeue the job before the supervisor does it itself."""
    time_margin: float = 60.0
    """Seconds before the job's time limit in which no step is started again."""
    stdin_limit_bytes: int = 64 * 1024 * 1024
    """Bytes of standard input that are kept for later attempts, where it is a pipe."""


class ElasticSettings(_Section, frozen=True):
    """Growth and shrinking of steps that ask for it (`--auto-resume-max-nodes`)."""

    partition: str = ""
    """The partition in which such a job asks for nodes: one whose jobs Slurm may preempt. Empty:
    the job's own."""
    qos: str = ""
    """The QOS for that. Empty: the job's own."""
    snooze: float = 30.0
    """Seconds after nodes have left before any are asked for again."""
    evacuation_wait: float = 120.0
    """Seconds that a sick node which still works is kept until another one is in. 0: it is left at
    once."""
    timeout: float = 600.0
    """Seconds that lent ranks have to step with the others, at first and later, while those do;
    then their nodes are given back."""
    backoff: float = 60.0
    """Seconds before Slurm is asked again after it refused, or ranks did not come, or soon ended;
    doubled each time, up to an hour."""


class HangSettings(_Section, frozen=True):
    """When a step under `srun --auto-resume=1` hangs, and what follows: for programs that report
    their steps."""

    act: Literal["end", "tell", "off"] = "end"
    """end: the step is ended, and started again; tell: the log names the rank at fault, and the
    step runs on; off: no step is watched. `--auto-resume-hangs` chooses for one srun."""
    floor: float = 600.0
    """Seconds without a step that are never a hang."""
    steps: int = 10
    """Steps that a program must have reported since it was started, before it is watched."""
    gather: float = 30.0
    """Seconds for the nodes to tell where the processes stand."""


class SparePoolSettings(_Section, frozen=True):
    """Spare nodes of one partition, which recovering jobs get before the queue: exactly one of
    ``nodes`` and ``percent``."""

    nodes: int = 0
    percent: float = 0.0
    """A share of the partition's nodes, rounded up."""
    zone: str = ""
    """The beginning of the features that name a node's failure domain, such as `rack-`: the spares
    are spread over these. Empty: the leaf switches or blocks of Slurm's topology, if it has one."""


class SinkSettings(_Section, frozen=True):
    """A place to which sresctld sends events: exactly one of ``url``, ``command`` and ``file``."""

    url: str = ""
    token_file: str = ""
    """A file with the token that ``url`` wants (`Authorization: Bearer`); sresctld's user reads
    it."""
    command: tuple[str, ...] = ()
    file: str = ""
    kinds: tuple[str, ...] = ()
    """Kinds of events; empty: all."""
    heartbeat: float = 0.0
    """Seconds between two signs of life. 0: one, when sresctld starts."""
    timeout: float = 10.0


class Config(_Section, frozen=True):
    controller: ControllerSettings = ControllerSettings()
    wire: WireSettings = WireSettings()
    agent: AgentSettings = AgentSettings()
    checks: CheckSettings = CheckSettings()
    lifecycle: LifecycleSettings = LifecycleSettings()
    detect: DetectSettings = DetectSettings()
    breaker: BreakerSettings = BreakerSettings()
    recovery: RecoverySettings = RecoverySettings()
    replace: ReplaceSettings = ReplaceSettings()
    resume: ResumeSettings = ResumeSettings()
    elastic: ElasticSettings = ElasticSettings()
    hang: HangSettings = HangSettings()
    sinks: dict[str, SinkSettings] = {}
    """By a name of the site's choice."""
    spares: dict[str, SparePoolSettings] = {}
    """By partition."""
    slurm_bin: str = ""
    """Directory of Slurm's commands. Empty: looked up on PATH."""


def parse(text: str, where: str = "configuration") -> Config:
    """Read a configuration from TOML text.

    Raises:
        ConfigError: malformed TOML, an unknown key, a wrong type, a value out of range.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    _refuse_unknown(data, where)
    _refuse_other_modes(data.get("recovery", {}), where)
    try:
        config = msgspec.convert(data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_plain(str(error))}") from None
    _check_ranges(config, where)
    for name, sink in config.sinks.items():
        _check_sink(sink, name, f"{where}: sinks.{name}")
    for partition, pool in config.spares.items():
        _check_pool(pool, f"{where}: spares.{partition}")
    return config


def chosen_file(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the configuration file that `load` reads, which may be missing.

    Args:
        path: the file; None: ``$SRES_CONFIG``, else the default path.

    Raises:
        ConfigError: its name is empty, as of a variable that is not set.
    """
    if path is not None and not str(path).strip():
        raise ConfigError(
            "the name of the configuration file is empty; leave --config out to use "
            "$SRES_CONFIG, or the default"
        )
    return Path(path or os.environ.get("SRES_CONFIG") or DEFAULT_PATH)


def load(path: str | os.PathLike[str] | None = None) -> Config:
    """Read the configuration file.

    Args:
        path: the file; None: ``$SRES_CONFIG``, else the default path, which may be missing.

    Raises:
        ConfigError: a named file that cannot be read, or any fault that `parse` finds.
    """
    of_environment = os.environ.get("SRES_CONFIG")
    by_variable = bool(of_environment) and str(path or of_environment) == of_environment
    file = chosen_file(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if by_variable:
            raise ConfigError(
                f"{file}: no such file; write one, or unset SRES_CONFIG to use the defaults"
            ) from None
        if path:
            raise ConfigError(f"{file}: no such file") from None
        return Config()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    return parse(text, str(file))


def load_usable(path: str | os.PathLike[str] | None = None) -> tuple[Config, str]:
    """Read what can be used of the site's own file: each section for itself.

    Who has to stop sresctld while another edits that file must be able to.

    Args:
        path: as for `load`.

    Returns:
        The configuration, and what is wrong with the file; empty: nothing.

    Raises:
        ConfigError: the file was named, and cannot be used.
    """
    try:
        return load(path), ""
    except ConfigError as error:
        if path or os.environ.get("SRES_CONFIG"):
            raise
        return _usable_sections(chosen_file(path)), str(error)


def _usable_sections(file: Path) -> Config:
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Config()
    config = Config()
    for name, value in data.items():
        with contextlib.suppress(ConfigError, msgspec.ValidationError):
            _refuse_unknown({name: value}, name)
            found = msgspec.convert({name: value}, Config)
            _check_ranges(found, name)
            config = msgspec.structs.replace(config, **{name: getattr(found, name)})
    return config


def _refuse_unknown(data: dict[str, Any], where: str) -> None:
    known = {field.name: field.type for field in msgspec.structs.fields(Config)}
    for name, value in data.items():
        if name not in known:
            raise ConfigError(f"{where}: unknown key '{name}'{_nearest(name, known)}")
        section = known[name]
        if name in _NAMED_TABLES and isinstance(value, dict):
            for key, table in value.items():
                _refuse_unknown_keys(table, _NAMED_TABLES[name], f"{name}.{key}", where)
        if not (isinstance(section, type) and issubclass(section, _Section)):
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: '{name}' is a table: write [{name}]")
        _refuse_unknown_keys(value, section, name, where)


_NAMED_TABLES: dict[str, type[_Section]] = {"sinks": SinkSettings, "spares": SparePoolSettings}


def _refuse_unknown_keys(table: Any, section: type[_Section], name: str, where: str) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: '{name}' is a table: write [{name}]")
    keys = section.__struct_fields__
    for key in table:
        if key not in keys:
            raise ConfigError(f"{where}: unknown key '{name}.{key}'{_nearest(key, keys)}")


def _nearest(name: str, known: Any) -> str:
    # Late: no supervisor's step waits for what only a typo needs.
    import difflib

    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{match[0]}'?" if match else f"; known: {', '.join(sorted(known))}"


def _refuse_other_modes(recovery: dict[str, Any], where: str) -> None:
    """Name the modes that there are: a wrong one must not be taken for the default."""
    said = {"recovery.mode": recovery.get("mode", "automatic")}
    for table in ("partitions", "nodes"):
        modes = recovery.get(table, {})
        if not isinstance(modes, dict):
            key = "a partition" if table == "partitions" else "a hostlist"
            raise ConfigError(
                f"{where}: recovery.{table} is a table: write [recovery.{table}], and in it "
                f'{key} = "observe"'
            )
        said |= {f"recovery.{table}.{name}": mode for name, mode in modes.items()}
    for key, mode in said.items():
        if mode not in _MODES:
            known = ", ".join(_MODES)
            raise ConfigError(f"{where}: {key}: {mode!r} is no mode; write one of: {known}")


def _plain(message: str) -> str:
    return message.replace("`", "'").replace("$.", "")


SHORTEST_FENCE_SECONDS = 3.0
"""A pulled cable is noticed no sooner, and the hiccup of a switch lasts as long."""
_LONGEST_SECONDS = {
    "controller": {"interval": 60.0},
    "detect": {"dead_after": 3600.0, "probe_timeout": 60.0},
    "agent": {"fence_after": 3600.0, "check_interval": 4 * 3600.0},
    "resume": {"check_wait": 60.0},
    "replace": {"bug_report_wait": 590.0},
}
"""Beyond this sresctld or sresd would do nothing for so long that it was meant in milliseconds."""
_SHORTEST_SECONDS = {
    "controller": {"keep": 86400.0},
    "recovery": {"recurrence_window": 3600.0},
    "agent": {"beat": 0.05, "check_interval": 0.5},
}
"""Less was meant in days, hours or minutes: almost nothing would be remembered, beats fill the
network, or checks a processor."""
_LONGEST_PERIOD_SECONDS = 31 * 86400.0
_PERCENT = "_percent"
_WHOLE_PERCENT = 100.0
_POSITIVE = {
    "controller": ("interval", "keep"),
    "agent": ("beat", "check_interval", "bug_report_bytes"),
    "checks": ("corrected_memory_errors", "zombies"),
    "lifecycle": ("timeout", "total_timeout"),
    "detect": ("silent_after", "dead_after", "probe_timeout", "refused_after"),
    "breaker": (
        "window",
        "nodes_at_once",
        "nodes_per_hour",
        "partition_at_once",
        "partition_per_hour",
        "switch_per_hour",
        "driver_per_hour",
        "check_per_hour",
        "quiet",
    ),
    "resume": ("max_per_node",),
    "elastic": ("timeout", "backoff"),
    "hang": ("floor", "steps", "gather"),
    "recovery": (
        "validate_timeout",
        "flap_window",
        "recurrence_window",
        "max_replacements",
        "max_repairs",
    ),
    "replace": (
        "timeout",
        "attempts",
        "backoff",
        "return_timeout",
        "max_running",
        "max_running_partition",
        "max_per_hour",
    ),
}


def _check_pool(pool: SparePoolSettings, where: str) -> None:
    if pool.nodes < 0 or (pool.nodes > 0) == (pool.percent != 0):
        raise ConfigError(f"{where}: write exactly one of nodes (1 or more) and percent")
    if not (math.isfinite(pool.percent) and pool.percent >= 0):
        raise ConfigError(f"{where}.percent must be greater than 0")
    _check_percent(pool.percent, f"{where}.percent")


_HOST_NAME = re.compile(r"[A-Za-z0-9._:%-]+")
_SINK_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _check_sink(sink: SinkSettings, name: str, where: str) -> None:
    if not _SINK_NAME.fullmatch(name):
        raise ConfigError(f"{where}: a sink's name has letters, digits, - and _, 64 at most")
    if sum(map(bool, (sink.url, sink.command, sink.file))) != 1:
        raise ConfigError(f"{where}: write exactly one of url, command and file")
    if sink.url and not sink.url.startswith(("https://", "http://")):
        raise ConfigError(f"{where}.url must begin with https:// or http://")
    if sink.token_file and not sink.url.startswith("https://"):
        raise ConfigError(f"{where}.token_file: a token is sent to an https:// url only")
    paths = {"file": sink.file, "token_file": sink.token_file, "command": "".join(sink.command[:1])}
    for key, path in paths.items():
        if path and not path.startswith("/"):
            raise ConfigError(f"{where}.{key} must be an absolute path")
    if not 0 < sink.timeout <= _LONGEST_SINK_SECONDS:
        raise ConfigError(
            f"{where}.timeout must be greater than 0 and at most {_LONGEST_SINK_SECONDS:g} seconds"
        )
    if not (sink.heartbeat == 0 or 1 <= sink.heartbeat <= _LONGEST_HEARTBEAT_SECONDS):
        raise ConfigError(
            f"{where}.heartbeat must be 0, or 1 to {_LONGEST_HEARTBEAT_SECONDS:g} seconds"
        )


_LONGEST_SINK_SECONDS = 120.0
_LONGEST_HEARTBEAT_SECONDS = 86400.0


_ABSOLUTE = {
    "agent": ("kernel_log", "sysroot", "health_log", "hook_directory", "loss_notice", "read_ahead"),
    "checks": ("mounts", "directory", "nhc_config"),
    "replace": ("evidence_directory",),
}
"""Paths that a daemon would look up in whatever directory it was started in."""


def _check_ranges(config: Config, where: str) -> None:
    # Names alone: to evaluate all annotations takes milliseconds of each supervised step's start.
    for section in config.__struct_fields__:
        table = getattr(config, section)
        if not isinstance(table, _Section):
            continue
        for field in table.__struct_fields__:
            value = getattr(table, field)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            _check_number(section, field, value, where)
    _check_checks(config.checks, where)
    _check_paths(config, where)
    _check_lifecycle(config.lifecycle, where)
    if config.recovery.validate and not Path(config.recovery.validate[0]).is_absolute():
        raise ConfigError(f"{where}: recovery.validate must begin with an absolute path")
    if not Path(config.controller.state_dir).is_absolute():
        # Elsewhere it would be another directory, with a journal that knows of nothing.
        raise ConfigError(
            f"{where}: controller.state_dir must be an absolute path, such as /var/lib/sresctld"
        )
    for name in config.controller.hosts:
        if not _HOST_NAME.fullmatch(name):
            raise ConfigError(
                f"{where}: controller.host: '{name}' is no name of a machine; several are "
                'separated by commas: "ctl1,ctl2"'
            )
    if not 0 < config.controller.port < 65536:
        raise ConfigError(f"{where}: controller.port must be between 1 and 65535")
    if config.detect.silent_after < 2 * config.agent.beat:
        raise ConfigError(
            f"{where}: detect.silent_after must be at least two beats (agent.beat is "
            f"{config.agent.beat} s), or one late packet is a silence"
        )
    fence, least = config.agent.fence_after, max(SHORTEST_FENCE_SECONDS, 3 * config.agent.beat)
    if 0 < fence < least:
        raise ConfigError(
            f"{where}: agent.fence_after must be 0 (no fencing), or at least {least:g} s: a "
            "shorter cut is no reason to end steps"
        )
    if config.detect.dead_after <= config.detect.silent_after:
        raise ConfigError(f"{where}: detect.dead_after must be more than detect.silent_after")
    unsupervised = config.detect.dead_after_unsupervised
    if 0 < unsupervised < config.detect.dead_after:
        raise ConfigError(
            f"{where}: detect.dead_after_unsupervised must be 0 (Slurm's SlurmdTimeout), or at "
            f"least detect.dead_after ({config.detect.dead_after} s)"
        )


def _check_paths(config: Config, where: str) -> None:
    for section, keys in _ABSOLUTE.items():
        for key in keys:
            paths = getattr(getattr(config, section), key)
            for path in (paths,) if isinstance(paths, str) else paths:
                if path and not Path(path).is_absolute():
                    raise ConfigError(f"{where}: {section}.{key} must be an absolute path")


def _check_lifecycle(lifecycle: LifecycleSettings, where: str) -> None:
    for key in ("directory", "state_dir", "log_dir", "resource_config"):
        path = getattr(lifecycle, key)
        if path and not Path(path).is_absolute():
            raise ConfigError(f"{where}: lifecycle.{key} must be an absolute path")


def _check_number(table: str, key: str, value: float, where: str) -> None:
    name = f"{where}: {table}.{key}"
    if not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number")
    positive = key in _POSITIVE.get(table, ())
    if value < 0 or (positive and value == 0):
        raise ConfigError(f"{name} must be {'greater than 0' if positive else '0 or more'}")
    longest = _LONGEST_SECONDS.get(table, {}).get(key, math.inf)
    if value > longest:
        raise ConfigError(f"{name} is in seconds, and must be at most {longest:g}")
    shortest = _SHORTEST_SECONDS.get(table, {}).get(key, -math.inf)
    if value < shortest:
        raise ConfigError(f"{name} is in seconds, and must be at least {shortest:g}")
    if key.endswith(_PERCENT):
        _check_percent(value, name)


def _check_percent(value: float, where: str) -> None:
    """Refuse a fraction in the place of a percentage, and more than the whole."""
    if 0 < value < 1:
        raise ConfigError(
            f"{where} is in percent: {value:g} looks like a fraction; write {100 * value:g} for it"
        )
    if value > _WHOLE_PERCENT:
        raise ConfigError(f"{where} is in percent, and must be at most {_WHOLE_PERCENT:g}")


def _check_checks(checks: CheckSettings, where: str) -> None:
    if not Path(checks.state_dir).is_absolute():
        raise ConfigError(f"{where}: checks.state_dir must be an absolute path")
    for name, period in checks.periods.items():
        if not (math.isfinite(period) and period > 0):
            raise ConfigError(f"{where}: checks.periods.{name} must be greater than 0")
        shortest = _SHORTEST_SECONDS["agent"]["check_interval"]
        if not shortest <= period <= _LONGEST_PERIOD_SECONDS:
            limit = (
                f"at least {shortest:g}"
                if period < shortest
                else f"at most {_LONGEST_PERIOD_SECONDS:.0f}"
            )
            raise ConfigError(f"{where}: checks.periods.{name} is in seconds, and must be {limit}")
    for unit in checks.services:
        if not unit or unit.startswith("-") or set(unit) & set(" *?["):
            raise ConfigError(f"{where}: checks.services: '{unit}' is no name of a unit")
