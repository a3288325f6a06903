"""Entry of the supervisor: `srun --auto-resume=1 …` (the plugin), `sres run -- srun …` (without).

All is checked before anything is started: an error is one line, and nothing has changed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slurm_resilience.config import Config, HangSettings, load
from slurm_resilience.errors import (
    ConfigError,
    MissingTool,
    NotFound,
    NotPermitted,
    SlurmUnreachable,
    SresError,
    UsageError,
)
from slurm_resilience.model import Job, Node
from slurm_resilience.resume import report
from slurm_resilience.resume.elastic.elastic_size import elastic_size
from slurm_resilience.resume.own_marker import MARKER, is_called_back, own_marker
from slurm_resilience.resume.progress.step_source import step_source
from slurm_resilience.resume.srun import signals
from slurm_resilience.resume.srun.command import GUARD
from slurm_resilience.resume.srun.env_option import PROTOCOL
from slurm_resilience.resume.srun.job_log import job_log_path
from slurm_resilience.resume.srun.srun_options import (
    CALLS_BACK,
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
)
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.client import SlurmClient

if TYPE_CHECKING:
    from slurm_resilience.resume.supervisor import Supervisor

_QUESTIONS = 4
"""Programs that are asked at the same time."""
LOAD_SECONDS = 1.0
"""From the start of a step until all is loaded that was left out for it."""
LATE = (
    "statistics",
    "slurm_resilience.resume.live_step.live_step",
    "slurm_resilience.resume.observing",
    "slurm_resilience.resume.progress.stack_gathering",
    "slurm_resilience.resume.requeue_report",
)
"""Modules without which a step is started, and those that they load."""
_EXAMPLE = (
    "put it into a batch script (sbatch --nodes=4 --exclusive job.sh, with "
    "`srun --auto-resume=1 program` in job.sh), or write "
    "salloc --nodes=4 --exclusive srun --auto-resume=1 program"
)
_SET_BY_PYTHON = ("C.UTF-8", "C.utf8", "UTF-8")
"""Values of LC_CTYPE."""
_NOT_A_STEP = ("help", "usage", "version", "test-only")


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
    # Each question costs a process: they are asked at once, and while our own modules are loaded.
    with ThreadPoolExecutor(_QUESTIONS) as pool:
        supervisor, link = _prepare(srun, args, environment, pool)
    # The threads are gone: those that follow inherit the mask.
    signals.block()
    link.start()
    later = threading.Timer(LOAD_SECONDS, load_late)
    later.daemon = True
    later.start()
    return supervisor.run()


def load_late() -> None:
    """Load what only a training or a fault needs, while the step runs; a short one is over by then.

    Not when it is needed: in the weeks of a job the package may be upgraded, and the file system
    that it lies on may be what fails.
    """
    for name in LATE:
        # Who needs it says so.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _prepare(
    srun: str, args: Sequence[str], environment: Mapping[str, str], pool: ThreadPoolExecutor
) -> tuple[Supervisor, SupervisorLink]:
    asked_table = pool.submit(read_table, srun, environment)
    asked_config = pool.submit(load, environment.get("SRES_CONFIG") or None)
    asked_job = pool.submit(_job_around, asked_config, srun, environment)
    from slurm_resilience.resume.srun.host_calls import HostCalls
    from slurm_resilience.resume.supervisor import Supervisor  # takes as long as srun --help

    table = asked_table.result()
    command = split(args, table)
    flag = command.value("auto-resume")
    if flag not in (None, "0", "1"):
        raise UsageError(f"--auto-resume={flag}: write 1 (on) or 0 (off)")
    bare = command.without(*OWN_OPTIONS)
    if flag == "0" or any(bare.has(name) for name in _NOT_A_STEP):
        env = dict(environment) | ({GUARD: "1"} if table.listed("auto-resume") else {})
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
    config = _config(asked_config, environment)
    client = _client(config, srun)
    asked_info, asked_nodes = pool.submit(client.info), pool.submit(_nodes, client)
    job = _job(client, bare, environment, asked_job)
    hangs = _hang_settings(command, config)
    here = HostCalls().working_directory()
    source = step_source(command.value(PROGRESS) or "", here, job_log_path(command, environment))
    placed, environment = leave_spares(command, job, environment)
    min_nodes = fewest_nodes(command, placed, job, environment)
    size = elastic_size(command, placed, job, environment, min_nodes, config.elastic)
    info = asked_info.result()
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
        find_plugin=lambda: _has_plugin(read_table(srun, environment)),
        permits_expansion=info.can_merge,
        environment=environment,
        ports=info.srun_ports,
        nodes=asked_nodes.result(),
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


def _config(asked: Future[Config], environment: Mapping[str, str]) -> Config:
    """Return the configuration. Where the site's own file cannot be used, the defaults hold: a job
    of weeks, requeued while an administrator edits that file, does not fail for a typo in it.

    Raises:
        ConfigError: the file that the user named cannot be used.
    """
    try:
        return asked.result()
    except ConfigError as error:
        if environment.get("SRES_CONFIG"):
            raise
        report.say(
            "the site's configuration cannot be used, so the defaults hold here; tell your "
            f"administrator: {error}"
        )
        return Config()


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


def _nodes(client: SlurmClient) -> tuple[Node, ...]:
    try:
        return client.nodes()
    except SresError:
        return ()  # asked again when they are needed


def _client(config: Config, srun: str) -> CliClient:
    """Return the commands beside srun, where they are: srun may have been called by its path, and
    PATH may have none, or a user's own of such a name."""
    beside = Path(srun).parent
    has_all = all(os.access(beside / name, os.X_OK) for name in ("scontrol", "squeue", "scancel"))
    return CliClient(config.slurm_bin or (str(beside) if has_all else ""))


def _job_around(asked_config: Future[Config], srun: str, environment: Mapping[str, str]) -> Job:
    """Return the job that this srun runs in, where the command names no other one: asked while it
    is not known yet whether it does."""
    try:
        config = asked_config.result()
    except ConfigError:
        config = Config()
    return _client(config, srun).job(int(_job_id(environment)))


def _job_id(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID") or ""


def _job(
    client: SlurmClient,
    command: SrunCommand,
    environment: Mapping[str, str],
    asked_job: Future[Job],
) -> Job:
    text = command.jobid or _job_id(environment)
    if not text:
        raise UsageError(
            "--auto-resume: this srun would create its own allocation, which Slurm never requeues "
            f"and which cannot outlive srun; {_EXAMPLE}"
        )
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"--auto-resume: '{text}' is not a job id")
    try:
        job = client.job(int(text)) if command.jobid else asked_job.result()
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


def find_srun(environment: Mapping[str, str]) -> str:
    """Return the path of srun on PATH.

    Raises:
        MissingTool: there is none.
    """
    path = shutil.which("srun", path=environment.get("PATH"))
    if not path:
        raise MissingTool("srun is not on PATH; install Slurm's client commands")
    return str(Path(path).resolve())


def main() -> None:
    """Run ``sres-resume --srun PATH -- ARG...``, what the plugin executes."""
    argv = sys.argv[1:]
    if len(argv) < 3 or argv[0] != "--srun" or argv[2] != "--":
        print(
            "sres-resume: error: this is what srun --auto-resume=1 becomes; do not call it "
            "yourself, write srun --auto-resume=1 … or sres run -- srun …",
            file=sys.stderr,
        )
        sys.exit(UsageError.exit_code)
    code = run(argv[1], argv[3:])
    # Without taking the interpreter apart: nothing here needs it, and the user would wait for it.
    for stream in (sys.stdout, sys.stderr):
        # None: it was closed when Python started.
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
    os._exit(code)


def run(srun: str, args: Sequence[str]) -> int:
    """Call `supervise` at a process border: errors become a line and a code."""
    _open_standard_streams()
    try:
        if is_called_back(os.environ):
            raise UsageError(
                f"{srun} {CALLS_BACK}: name Slurm's own srun, or have that program call it by its "
                "full path, without --auto-resume and without sres run"
            )
        return supervise(srun, args, _own_environment() | {MARKER: own_marker()})
    except SresError as error:
        print(f"srun: error: sres: {error}", file=sys.stderr)
        return error.exit_code
    except (BlockingIOError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "new thread" not in str(error):
            raise
        text = "you may start no more processes here (ulimit -u), so nothing was started"
        print(f"srun: error: sres: {text}; see ps -u {os.geteuid()}", file=sys.stderr)
        return SresError.exit_code


def _own_environment() -> dict[str, str]:
    """Return the caller's environment: in the locale C, Python sets a variable of its own in it,
    which would reach the tasks."""
    environment = dict(os.environ)
    if environment.get("LC_CTYPE") in _SET_BY_PYTHON:
        with contextlib.suppress(OSError):
            began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
            del environment["LC_CTYPE"]
            for entry in began_with:
                name, _, value = entry.partition(b"=")
                if name == b"LC_CTYPE":
                    environment["LC_CTYPE"] = os.fsdecode(value)
    return environment


def _open_standard_streams() -> None:
    """Open closed ones: they would become the next file or connection that is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one


if __name__ == "__main__":
    main()
