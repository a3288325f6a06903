"""Judge one part of an installation from what a probe has seen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slurm_resilience.errors import (
    AuthError,
    ConfigError,
    MissingTool,
    SlurmError,
    SresError,
    WireError,
)
from slurm_resilience.model import Node
from slurm_resilience.resume.srun.env_option import PROTOCOL
from slurm_resilience.slurm.client import ClusterInfo
from slurm_resilience.slurm.hostlists import fold

OLDEST_SLURM = (22, 5)
NO_DATABASE = "accounting_storage/none"
SHORT_JOB_AGE_SECONDS = 30
NO_HOLD = "nohold_on_prolog_fail"
_ALLOC_FLAGS = frozenset({"alloc", "contain", "x11"})
"""By each of these the prolog runs as nodes are allocated."""
STALE_CYCLES = 5
STALE_SECONDS = 10.0


class Outcome(StrEnum):
    """The result of one check of the site."""

    OK = "ok"
    NOTE = "note"
    """It works, with a limit that the text names."""
    WRONG = "wrong"
    SKIPPED = "skipped"
    """Not looked at, for the reason in the text."""


@dataclass(frozen=True)
class SiteJudgement:
    """One line of `sres check site`."""

    outcome: Outcome
    text: str
    remedy: str = ""
    error: type[SresError] = SresError
    """Gives the exit code when this is the first thing that is wrong."""


def ok(text: str) -> SiteJudgement:
    """Say that this part is as it should be."""
    return SiteJudgement(Outcome.OK, text)


def note(text: str, remedy: str = "") -> SiteJudgement:
    """Name a limit."""
    return SiteJudgement(Outcome.NOTE, text, remedy)


def skipped(text: str) -> SiteJudgement:
    """Say why this part was not looked at."""
    return SiteJudgement(Outcome.SKIPPED, text)


def wrong(error: type[SresError], text: str, remedy: str) -> SiteJudgement:
    """Say what is wrong and what to do about it."""
    return SiteJudgement(Outcome.WRONG, text, remedy, error)


# --- Slurm ----------------------------------------------------------------------------------------


def slurm_version(info: ClusterInfo) -> tuple[int, ...]:
    """Return the version as numbers, which compare; () when it is not one."""
    words = info.version.split(".")
    return tuple(int(word) for word in words[:2]) if all(map(str.isdigit, words[:2])) else ()


def judge_slurm(info: ClusterInfo) -> SiteJudgement:
    """Check that Slurm is not too old."""
    text = f"Slurm {info.version}, cluster {info.cluster}"
    if slurm_version(info) < OLDEST_SLURM:
        return wrong(SlurmError, f"{text}: older than 22.05", "update Slurm to 22.05 or later")
    return ok(text)


def judge_expansion(info: ClusterInfo) -> SiteJudgement:
    """Check that a job without GRES may get another node in place of a lost one."""
    if info.permits_expansion:
        return ok("SchedulerParameters has permit_job_expansion")
    return note(
        "SchedulerParameters lacks permit_job_expansion: a job that loses a node is requeued",
        "add permit_job_expansion to SchedulerParameters in slurm.conf, then scontrol reconfigure",
    )


def judge_accounting(info: ClusterInfo) -> SiteJudgement:
    """Check for slurmdbd, without which 22.05 resizes a job only once."""
    if info.accounting == NO_DATABASE and slurm_version(info) < (23, 2):
        return note(
            f"{info.accounting} on Slurm {info.version}: a job gets another node once in its life; "
            "after that it is requeued",
            "run slurmdbd, or a newer Slurm",
        )
    return ok(info.accounting)


def judge_settings(info: ClusterInfo) -> SiteJudgement:
    """Look for settings of slurm.conf that work against node recovery."""
    notes: list[tuple[str, str]] = []
    if info.raw.get("ReturnToService", "").strip() == "2":
        notes.append(
            (
                "ReturnToService=2: Slurm takes a DOWN node back as soon as its slurmd registers, "
                "repaired or not",
                "set ReturnToService=1 (or 0)",
            )
        )
    words = info.raw.get("MinJobAge", "").split()
    age = int(words[0]) if words and words[0].isdigit() else 0
    if 0 < age < SHORT_JOB_AGE_SECONDS:
        notes.append(
            (
                f"MinJobAge={age}: Slurm forgets an ended job before its end can be read",
                "set MinJobAge=300, which is Slurm's default",
            )
        )
    if notes:
        return note("; ".join(text for text, _ in notes), "; ".join(what for _, what in notes))
    return ok("ReturnToService and MinJobAge")


def _has_prolog(info: ClusterInfo) -> bool:
    # Newer releases (seen on 24.11) print "Prolog[0]".
    named = [value for key, value in info.raw.items() if key.partition("[")[0] == "Prolog"]
    return any(value.strip() not in ("", "(null)") for value in named)


def judge_prolog_flags(info: ClusterInfo) -> SiteJudgement:
    """Check that the prolog of a new node runs as the job gets the node, and not as its step
    starts there."""
    flags = info.raw.get("PrologFlags", "").lower().replace(" ", "").split(",")
    if not _has_prolog(info):
        return ok("no Prolog runs on the nodes")
    if not _ALLOC_FLAGS.isdisjoint(flags):
        return ok(f"PrologFlags={info.raw['PrologFlags'].strip()}")
    return note(
        "PrologFlags lacks Alloc: a prolog that fails on a node in exchange ends the whole job",
        "set PrologFlags=Alloc in slurm.conf, then restart slurmctld and each slurmd",
    )


def judge_prolog_hold(info: ClusterInfo) -> SiteJudgement:
    """Check that a job is not held for a prolog that failed."""
    if not _has_prolog(info):
        return ok("no Prolog runs on the nodes")
    if NO_HOLD in info.scheduler_parameters.split(","):
        return ok(f"SchedulerParameters has {NO_HOLD}")
    return note(
        f"SchedulerParameters lacks {NO_HOLD}: a job whose prolog fails is requeued held, and "
        "waits for a person (scontrol release)",
        f"add {NO_HOLD} to SchedulerParameters in slurm.conf, then scontrol reconfigure",
    )


def judge_munge(came_back: bool) -> SiteJudgement:
    """Check that a credential made here can be read here."""
    if came_back:
        return ok("a credential was encoded and decoded")
    return wrong(
        AuthError, "munge decoded something else than it encoded", "restart munged on this machine"
    )


# --- the plugin -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PluginSeen:
    """The facts about sres.so on this machine, as a probe saw them."""

    plugstack: str
    """The path of plugstack.conf."""
    has_srun: bool
    listed: bool
    """`srun --help` shows --auto-resume."""
    path: str = ""
    """The plugin that plugstack.conf names; empty: it names none."""
    exists: bool = False
    supervisor: str = ""
    supervisor_fault: str = ""
    """The reason why some user cannot start the supervisor; empty: each can."""
    unknown: str = ""
    """A word behind the plugin that it does not know."""
    times: int = 1
    """So often plugstack.conf and the files that it includes load it."""
    protocol: int = PROTOCOL
    """The number of the form in which it talks with the supervisor; 0: it tells none."""


def judge_plugin(seen: PluginSeen) -> SiteJudgement:
    """Check that Slurm loads the plugin."""
    if not seen.has_srun:
        return skipped("srun is not installed on this machine")
    if not seen.path:
        return wrong(
            MissingTool,
            f"{seen.plugstack} does not name sres.so, nor does a file that it includes",
            "run `make -C spank install`, and add the line that it prints, if it prints one",
        )
    if not seen.exists:
        return wrong(
            MissingTool, f"{seen.path} does not exist", "run `make -C spank install` again"
        )
    if not seen.listed:
        return wrong(
            MissingTool,
            f"srun does not load {seen.path}: it was built for another release of Slurm",
            "run `make -C spank clean install` with this Slurm's headers",
        )
    if seen.unknown:
        return wrong(
            ConfigError,
            f"{seen.plugstack}: the plugin does not know {seen.unknown!r}, and refuses each "
            "--auto-resume",
            "write supervisor=PATH or nothing behind the plugin",
        )
    if seen.times > 1:
        return note(
            f"{seen.plugstack} loads the plugin {seen.times} times",
            "leave one of the lines, here or in a file that it includes",
        )
    if seen.protocol != PROTOCOL:
        return wrong(
            MissingTool,
            f"srun loads {seen.path}, which is of another release than this sres (protocol "
            f"{seen.protocol} and {PROTOCOL}): steps are resumed without it",
            "install the same release of both: `make -C spank clean install`",
        )
    return ok(f"srun loads {seen.path} (protocol {PROTOCOL})")


def judge_supervisor(seen: PluginSeen) -> SiteJudgement:
    """Check that the program that srun becomes can be started."""
    if not seen.has_srun:
        return skipped("srun is not installed on this machine")
    if seen.supervisor_fault:
        return wrong(
            MissingTool,
            f"the supervisor {seen.supervisor}: {seen.supervisor_fault}",
            "install slurm-resilience there with a Python that every user can start, or run "
            "`make -C spank install SUPERVISOR=PATH`",
        )
    return ok(seen.supervisor)


# --- sresctld and sresd ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramSeen:
    """The facts about the replacement program, as a probe saw them."""

    words: tuple[str, ...]
    host: str
    """The machine of sresctld."""
    is_here: bool
    """This is that machine."""
    fault: str = ""
    """The reason why the program cannot be started; empty: it can."""
    by: str = "program"
    """`replace.by`."""


def judge_program(seen: ProgramSeen) -> SiteJudgement:
    """Check that the replacement program can be started, where nodes are replaced by one."""
    if seen.by != "program":
        return ok(f"replace.by is {seen.by}")
    if not seen.words:
        return note(
            "replace.program is empty: faulty nodes are marked and wait for a person",
            "name a program in sres.toml on the machine of sresctld",
        )
    if not seen.is_here:
        return skipped(f"only {seen.host} starts {seen.words[0]}; run this there")
    if seen.fault:
        return wrong(ConfigError, f"replace.program: {seen.fault}", "correct replace.program")
    return ok(seen.words[0])


@dataclass(frozen=True)
class PortSeen:
    """The outcome of a TCP connection to sresctld."""

    host: str
    port: int
    refused: bool = False
    fault: str = ""
    """Empty: it was made."""


def judge_port(seen: PortSeen) -> SiteJudgement:
    """Check that a program listens on sresctld's port."""
    where = f"{seen.host} port {seen.port}"
    if seen.refused:
        return wrong(
            WireError,
            f"{where} refuses connections: sresctld does not run there",
            f"on {seen.host}: systemctl status sresctld",
        )
    if seen.fault:
        return wrong(
            WireError, f"{where} cannot be reached: {seen.fault}", "open the port in the firewall"
        )
    return ok(f"{where} takes connections")


def judge_controller(data: Mapping[str, Any], now: float, interval: float) -> SiteJudgement:
    """Check that sresctld reads Slurm and acts."""
    if data.get("blind"):
        # Before its first look at Slurm it says nothing else.
        return wrong(SlurmError, f"sresctld cannot read Slurm: {data['blind']}", "read its log")
    age = max(0.0, float(data.get("age", now - data["at"])))
    if age > max(STALE_SECONDS, STALE_CYCLES * interval):
        return wrong(WireError, f"sresctld's last cycle was {age:.0f} s ago", "read its log")
    if data.get("paused"):
        return note(f"sresctld is paused ({data['paused']}): it changes nothing", "sres unpause")
    if data.get("mode") == "none":
        return note("recovery.mode is none: faults are reported, nothing is changed")
    if data.get("mode") == "observe":
        return note("recovery.mode is observe: nothing is changed", "sres review")
    return ok(f"sresctld {data['version']} read Slurm {age:.0f} s ago")


def judge_nodes(nodes: tuple[Node, ...], sresd: Mapping[str, str]) -> SiteJudgement:
    """Check that each node in service has a connected sresd.

    Args:
        nodes: as Slurm shows them.
        sresd: node → ``connected``, ``silent``, ``stopped`` or ``never seen``.
    """
    expected = [
        node.name
        for node in nodes
        if not node.is_down and node.is_responding and not node.is_powered_off_on_purpose
    ]
    missing = [name for name in expected if sresd.get(name) != "connected"]
    if not expected:
        return note("Slurm shows no node in service")
    remedy = f"on {missing[0]}: systemctl status sresd" if missing else ""
    if len(missing) == len(expected):
        return wrong(WireError, "no node's sresd is connected to sresctld", remedy)
    if missing:
        return note(f"{fold(missing)}: sresd is not connected, so no fault is seen there", remedy)
    return ok(f"sresd is connected on {fold(expected)}")
