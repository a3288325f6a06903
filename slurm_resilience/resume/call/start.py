"""Begin to supervise: ask Slurm at once, and load the rest while it answers."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slurm_resilience.config import Config, load
from slurm_resilience.errors import ConfigError, SresError
from slurm_resilience.model import Job, Node
from slurm_resilience.resume import report
from slurm_resilience.resume.call.questions import Question, Questions
from slurm_resilience.resume.srun import signals
from slurm_resilience.resume.srun.env_option import PROTOCOL
from slurm_resilience.resume.srun.srun_options import OptionTable, read_table, table_without_help
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.client import ClusterInfo, SlurmClient
from slurm_resilience.slurm.early_questions import VARIABLE as EARLY
from slurm_resilience.slurm.early_questions import EarlyQuestions

PLUGIN = "SRES_PLUGIN"
"""The plugin that starts a supervisor leaves its protocol's number here (spank/srun.c)."""
LOAD_SECONDS = 1.0
"""From the start of a step until all is loaded that was left out for it."""
LATE = (
    "ClusterShell.NodeSet",
    "ctypes",
    "shutil",
    "statistics",
    "subprocess",
    "tempfile",
    "textwrap",
    "traceback",
    "slurm_resilience.child_group",
    "slurm_resilience.resume.allocation.silent_nodes",
    "slurm_resilience.resume.attempt_watch",
    "slurm_resilience.resume.live_step.live_step",
    "slurm_resilience.resume.observing",
    "slurm_resilience.resume.progress.stack_gathering",
    "slurm_resilience.resume.requeue_report",
    "slurm_resilience.slurm.held_allocation",
    "slurm_resilience.slurm.slurmd_port",
    "slurm_resilience.wire.client",
)
"""Modules without which a step is started, and those that they load."""


class AskedSlurm(NamedTuple):
    """All that Slurm is asked before a step is started."""

    client: SlurmClient
    table: Question[OptionTable]
    """The options that srun has."""
    job: Question[Job] | None
    """The one that this srun runs in, where the command names no other one; None: it is in none."""
    info: Question[ClusterInfo]
    nodes: Question[tuple[Node, ...]]
    """None of them where they cannot be had now: they are asked for again when they are needed."""
    early: EarlyQuestions
    """Those that the plugin has asked."""


def supervise(srun: str, args: Sequence[str], environment: Mapping[str, str]) -> int:
    """Check the call, then keep the step alive.

    Args:
        srun: path of the real srun.
        args: its arguments as the user wrote them, --auto-resume included.
        environment: the caller's.

    Returns:
        srun's exit code.

    Raises:
        SresError: the call cannot be supervised; nothing was started.
    """
    # One of another release may have asked for another form of the answers.
    is_ours = environment.get(PLUGIN) == str(PROTOCOL)
    early = EarlyQuestions(environment.get(EARLY, "") if is_ours else "")
    with contextlib.closing(early), Questions(beside=not early) as questions:
        config = read_config(environment)
        asked = _ask(questions, srun, args, environment, config, early)
        # Takes as long as Slurm's answers.
        from slurm_resilience.resume.call.call_check import make_supervisor

        own = {name: text for name, text in environment.items() if name not in (PLUGIN, EARLY)}
        supervisor, link = make_supervisor(srun, args, own, config, asked)
    # The threads that asked are gone: those that follow inherit the mask.
    signals.block()
    later = threading.Timer(LOAD_SECONDS, load_late)
    later.daemon = True
    later.start()
    return supervisor.run(link.start)


def load_late() -> None:
    """Load what only a training or a fault needs, while the step runs; a short one is over by then.

    Not when it is needed: in the weeks of a job the package may be upgraded, and the file system
    that it lies on may be what fails.
    """
    for name in LATE:
        # Who needs it says so. What cannot be read now (a file system, memory) may be later.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _ask(
    questions: Questions,
    srun: str,
    args: Sequence[str],
    environment: Mapping[str, str],
    config: Config,
    early: EarlyQuestions,
) -> AskedSlurm:
    """Ask all at once: each question costs a process."""
    client = _client(config, srun, early)
    number = job_id(environment)
    known = table_without_help(args, environment.get(PLUGIN, ""))
    return AskedSlurm(
        client,
        questions.ask(lambda: known or read_table(srun, environment)),
        questions.ask(lambda: client.job(int(number))) if number.isdecimal() else None,
        questions.ask(client.info),
        questions.ask(lambda: _nodes(client)),
        early,
    )


def _client(config: Config, srun: str, early: EarlyQuestions | None = None) -> CliClient:
    """Return the commands beside srun, where they are: srun may have been called by its path, and
    PATH may have none, or a user's own of such a name."""
    beside = Path(srun).parent
    has_all = all(os.access(beside / name, os.X_OK) for name in ("scontrol", "squeue", "scancel"))
    return CliClient(config.slurm_bin or (str(beside) if has_all else ""), early=early)


def _nodes(client: SlurmClient) -> tuple[Node, ...]:
    with contextlib.suppress(SresError):
        return client.nodes()
    return ()


def job_id(environment: Mapping[str, str]) -> str:
    """Return the number of the job that this srun was started in; empty: in none."""
    return environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID") or ""


def read_config(environment: Mapping[str, str]) -> Config:
    """Return the configuration. Where the site's own file cannot be used, the defaults hold: a job
    of weeks, requeued while an administrator edits that file, does not fail for a typo in it.

    Raises:
        ConfigError: the file that the user named cannot be used.
    """
    try:
        return load(environment.get("SRES_CONFIG") or None)
    except ConfigError as error:
        if environment.get("SRES_CONFIG"):
            raise
        report.say(
            "the site's configuration cannot be used, so the defaults hold here; tell your "
            f"administrator: {error}"
        )
        return Config()
