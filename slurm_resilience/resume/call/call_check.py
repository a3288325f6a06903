"""Check a call of the supervisor: an error is one line, and nothing has been started."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.config import Config, HangSettings
from slurm_resilience.errors import NotFound, NotPermitted, SlurmUnreachable, UsageError
from slurm_resilience.model import Job
from slurm_resilience.resume import report
from slurm_resilience.resume.allocation.slurmctld_wait import ask_patiently
from slurm_resilience.resume.call.start import job_id
from slurm_resilience.resume.elastic.elastic_size import elastic_size
from slurm_resilience.resume.progress.step_source import step_source
from slurm_resilience.resume.srun.command import BY_PLUGIN, GUARD
from slurm_resilience.resume.srun.env_option import PROTOCOL
from slurm_resilience.resume.srun.environment import without_outer_step
from slurm_resilience.resume.srun.host_calls import HostCalls
from slurm_resilience.resume.srun.job_log import job_log_path
from slurm_resilience.resume.srun.srun_options import (
    OptionTable,
    SrunCommand,
    read_table,
    split,
)
from slurm_resilience.resume.srun.step_size import (
    HANGS,
    OWN_OPTIONS,
    PROGRESS,
    fewest_nodes,
    leave_spares,
    nodes_gone,
)
from slurm_resilience.resume.supervisor import Supervisor
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.hostlists import fold

if TYPE_CHECKING:
    from slurm_resilience.resume.call.questions import Question
    from slurm_resilience.resume.call.start import AskedSlurm

_EXAMPLE = (
    "put it into a batch script (sbatch --nodes=4 --exclusive job.sh, with "
    "`srun --auto-resume=1 program` in job.sh), or write "
    "salloc --nodes=4 --exclusive srun --auto-resume=1 program"
)
_T = TypeVar("_T")
_SETTLE_SECONDS = 5.0
_NOT_A_STEP = ("help", "usage", "version", "test-only")


def make_supervisor(
    srun: str,
    args: Sequence[str],
    environment: Mapping[str, str],
    config: Config,
    asked: AskedSlurm,
) -> tuple[Supervisor, SupervisorLink]:
    """Return the supervisor of a call, and its link to sresctld, which is not connected yet.

    Does not return where the call is none that starts a step: this process becomes srun then.

    Args:
        srun: path of the real srun.
        args: its arguments as the user wrote them, --auto-resume included.
        environment: the caller's.
        config: all settings.
        asked: the questions to Slurm, answered or not yet.

    Raises:
        SresError: the call cannot be supervised.
    """
    client, table = asked.client, asked.table.answer()
    command = split(args, table)
    flag = command.value("auto-resume")
    if flag not in (None, "0", "1"):
        raise UsageError(f"--auto-resume={flag}: write 1 (on) or 0 (off)")
    bare = command.without(*OWN_OPTIONS)
    if flag == "0" or any(bare.has(name) for name in _NOT_A_STEP):
        env = dict(environment) | ({GUARD: BY_PLUGIN} if table.listed("auto-resume") else {})
        asked.early.close()
        os.execve(srun, [srun, *bare.argv], env)
    if bare.heterogeneous or environment.get("SLURM_HET_SIZE"):
        raise UsageError("--auto-resume: heterogeneous jobs and steps cannot be resumed")
    if bare.has("no-allocate"):
        raise UsageError("--auto-resume: a step without an allocation (-Z) cannot be resumed")
    if bare.has("async"):
        raise UsageError(
            "--auto-resume: srun --async returns at once, and nothing would watch the step; leave "
            "--async out, and write & behind srun to go on beside it"
        )
    # A batch script may begin while slurmctld is away, after a requeue say, and calls srun once. At
    # a terminal is a person, who may have a wrong SLURM_CONF.
    patience = config.resume.slurmctld_wait if environment.get("ENVIRONMENT") == "BATCH" else 0.0
    answers = _Answers(patience)
    job = _job(client, bare, environment, asked.job, answers)
    hangs = _hang_settings(command, config)
    here = HostCalls().working_directory()
    source = step_source(command.value(PROGRESS) or "", here, job_log_path(command, environment))
    placed, environment = leave_spares(command, job, without_outer_step(environment))
    gone, left = nodes_gone(placed, job, environment), len(job.nodes)
    if gone:
        report.say(
            f"job {job.id} has {left} of the {left + gone} nodes left that it began with: this "
            f"step runs on {fold(job.nodes)}; write -N{left + gone} where it needs all of them"
        )
    min_nodes = fewest_nodes(command, placed, job, environment)
    size = elastic_size(command, placed, job, environment, min_nodes, config.elastic)
    info = answers.of(asked.info, client.info)
    answers.settle()
    link = SupervisorLink(
        config.controller.hosts or info.controllers or ("localhost",),
        config.controller.port,
        job.id,
        config.wire.munge_socket or info.munge_socket,
        frozenset({0, info.slurm_user_uid}),
    )
    supervisor = Supervisor(
        config,
        client,
        link,
        srun,
        placed,
        job,
        has_plugin=_has_plugin(table),
        find_plugin=lambda: still_has_plugin(srun, environment),
        permits_expansion=info.can_merge,
        preempts=info.raw.get("PreemptType", "") != "preempt/none",
        environment=environment,
        ports=info.srun_ports,
        nodes=asked.nodes.answer(),
        min_nodes=min_nodes,
        size=size,
        hangs=hangs,
        source=source,
    )
    return supervisor, link


def _hang_settings(command: SrunCommand, config: Config) -> HangSettings:
    chosen = command.value(HANGS)
    if chosen is None:
        return config.hang
    if chosen not in ("end", "tell", "off"):
        raise UsageError(f"--{HANGS}={chosen}: write end, tell or off")
    return msgspec.structs.replace(config.hang, act=chosen)


def still_has_plugin(srun: str, environment: Mapping[str, str]) -> bool | None:
    """Return whether the plugin of this srun can be used now; None: its --help does not tell, as
    where slurmctld, which gives it the configuration, is away."""
    table = read_table(srun, environment)
    return _has_plugin(table) if table.listed_names else None


def _has_plugin(table: OptionTable) -> bool:
    """Return whether the plugin of this srun can be used; say so where it is of another release.

    Without it the same variables come through a shell before the program, and the step is resumed
    all the same: a job of weeks does not fail for an upgrade that is half done.
    """
    # The built-in table names the option whether this srun has it or not. The plugin's other
    # option, --sres-env, is shown by no --help: only a supervised srun registers it.
    if not table.listed("auto-resume"):
        return False
    if table.plugin_protocol == PROTOCOL:
        return True
    report.say(
        f"srun's plugin and this supervisor are of different releases (protocol "
        f"{table.plugin_protocol} and {PROTOCOL}): the step is resumed without the plugin, which "
        "tells less of its tasks; install the same release of both (make -C spank install)"
    )
    return False


class _Answers:
    """Slurm's answers to a call. Where slurmctld is away, it may be waited for."""

    def __init__(self, patience: float) -> None:
        """
        Args:
            patience: seconds for which slurmctld may be away; 0: it is not waited for.
        """
        self._patience = patience
        self._nobody = threading.Event()
        self._was_away = False

    def of(self, asked: Question[_T] | None, ask: Callable[[], _T]) -> _T:
        """Return one answer.

        Args:
            asked: the question as it was asked first; None: it was not yet.
            ask: asks it anew.

        Raises:
            SlurmUnreachable: slurmctld was away for longer than the patience.
            SresError: as asking.
        """
        first = ask if asked is None else asked.answer
        if not self._patience:
            return first()
        asks = [first]

        def next_try() -> _T:
            if asks:
                return asks.pop()()
            self._was_away = True
            return ask()

        return ask_patiently(next_try, self._patience, SYSTEM_CLOCK, self._nobody)

    def settle(self) -> None:
        """Give a slurmctld that was away a moment: a step that it refuses in its first second is
        tried again two minutes later by srun (seen on 22.05)."""
        if self._was_away:
            SYSTEM_CLOCK.wait(self._nobody, _SETTLE_SECONDS)


def _job(
    client: SlurmClient,
    command: SrunCommand,
    environment: Mapping[str, str],
    asked_job: Question[Job] | None,
    answers: _Answers,
) -> Job:
    text = command.jobid or job_id(environment)
    if not text:
        raise UsageError(
            "--auto-resume: this srun would create its own allocation, which Slurm never requeues "
            f"and which cannot outlive srun; {_EXAMPLE}"
        )
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"--auto-resume: '{text}' is not a job id")
    try:
        own = None if command.jobid else asked_job
        job = answers.of(own, lambda: client.job(int(text)))
    except NotFound:
        raise NotFound(f"--auto-resume: job {text} does not exist or has ended") from None
    except SlurmUnreachable as error:
        raise SlurmUnreachable(
            f"--auto-resume: Slurm cannot be asked about job {text}, so nothing was started; see "
            f"whether `scontrol ping` answers here ({error})"
        ) from None
    if job.uid != os.geteuid() and os.geteuid() != 0:
        raise NotPermitted(f"--auto-resume: job {job.id} is not yours")
    if job.state != "RUNNING":
        raise UsageError(f"--auto-resume: job {job.id} is {job.state}, not RUNNING")
    if not job.exclusive:
        raise UsageError(
            f"--auto-resume: job {job.id} shares its nodes with others, so none of them could be "
            "exchanged; add --exclusive to its sbatch or salloc"
        )
    return job
