"""Slurm through its own commands: argument lists, time limits, never a shell."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from slurm_resilience.child_exits import PASSING_ERRORS
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import (
    MissingTool,
    NotFound,
    NotPermitted,
    SlurmError,
    SlurmUnreachable,
)
from slurm_resilience.model import Job, Node
from slurm_resilience.slurm import command_words, parse
from slurm_resilience.slurm.client import SLURMS_REASON, ClusterInfo, StepInfo
from slurm_resilience.slurm.companion_job import (
    CompanionRequest,
    FoundCompanion,
    companion_script,
    companion_words,
    needs_a_person,
)
from slurm_resilience.slurm.early_questions import EarlyQuestions, Printed, Unanswered
from slurm_resilience.slurm.hostlists import LastNodeLists, expand, fold
from slurm_resilience.slurm.node_listing import NodeListing
from slurm_resilience.slurm.topology import domains_of

if TYPE_CHECKING:
    import subprocess

    from slurm_resilience.slurm.held_allocation import Answer, HeldAllocation

# The patterns are compiled when a command fails: no supervised step waits for it.
_KINDS: tuple[tuple[type[SlurmError | NotFound | NotPermitted], str], ...] = (
    (
        SlurmUnreachable,
        r"Unable to contact slurm controller|Connection refused|Socket timed out|"
        r"Could not establish a configuration|Unable to establish|Zero Bytes|"
        r"Protocol authentication error|Invalid authentication credential|"
        # slurmctld was killed while it was asked.
        r"missing socket error|Connection reset by peer|Transport endpoint is not connected|"
        # What requeue and update of a job say where slurmctld is away, or does not answer.
        r"authentication plugin|in standby mode|Unexpected message received",
    ),
    (
        NotPermitted,
        r"Invalid user id|Access/permission denied|access denied|Permission denied",
    ),
    (
        NotFound,
        r"Invalid node name|Node \S+ not found|Invalid job id|Job/step already compl|"
        r"Job step \S+ not found",
    ),
)
# What Slurm's commands say on a machine without slurm.conf, whose DNS names no slurmctld.
_NO_CONFIGURATION = "DNS SRV lookup failed"

MOST_NAMES = 10_000
"""Jobs whose names are remembered."""
TOP_PRIORITY = 4294967200
"""Above every job of priority/basic, which counts down from 4294901759 (seen on 22.05)."""


class CliClient:
    """`SlurmClient` over scontrol, squeue, scancel and salloc."""

    def __init__(
        self, slurm_bin: str = "", timeout: float = 20.0, early: EarlyQuestions | None = None
    ) -> None:
        """
        Args:
            slurm_bin: directory of Slurm's commands; empty: looked up on PATH.
            timeout: seconds one command may take.
            early: commands that run already; each is used once.
        """
        self._bin = slurm_bin
        self._timeout = timeout
        self._early = early
        self._columns = ""
        self._names: dict[int, str] = {}
        self._held: dict[int, HeldAllocation] = {}
        """Helpers, which last as long as this process or until they are merged."""
        self._listing = NodeListing()
        self._node_lists = LastNodeLists()

    def nodes(self) -> tuple[Node, ...]:
        return self._listing.read(self._run(*command_words.SHOW_NODES))

    def node(self, name: str) -> Node:
        found = parse.nodes(self._run(*command_words.SHOW_NODES, fold([name])))
        if not found:
            raise NotFound(f"node {name} does not exist")
        return found[0]

    def jobs(self) -> tuple[Job, ...]:
        self._node_lists.begin()
        return self._squeue(expanded=self._node_lists.expand)

    def job(self, job_id: int) -> Job:
        return self._job(job_id)

    def ended_job(self, job_id: int) -> Job:
        return self._job(job_id, "-t", "all")

    def is_preempted(self, job_id: int) -> bool:
        words = command_words.list_jobs(*command_words.one_job(job_id))
        text = self._run(*words, "-O", command_words.PREEMPT_COLUMNS)
        return parse.preempt_time(text, job_id) != ""

    def _job(self, job_id: int, *words: str) -> Job:
        try:
            found = self._squeue(*words, *command_words.one_job(job_id))
        except NotFound:
            found = ()
        # Asked for an array's own number, Slurm shows every element of it.
        for job in found:
            if job.id == job_id:
                return job
        raise NotFound(f"job {job_id} does not exist or has ended")

    def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        try:
            name = self._own_name(job_id)
            text = self._run("scontrol", "show", "step", name, "-o")
        except NotFound:
            return ()
        return parse.steps(text, int(job_id), name)

    def _own_name(self, job_id: int) -> str:
        """Return the name by which Slurm knows this job and no other.

        One element of an array has the array's own number, which Slurm takes for all of them.

        Raises:
            NotFound: there is no such job.
        """
        known = self._names.get(job_id)
        if known is not None:
            return known
        shown = self._run("squeue", "-a", "-r", "-h", "-j", str(int(job_id)), "-o", "%A %F %K")
        name = parse.own_name(shown, int(job_id))
        if not name:
            raise NotFound(f"job {job_id} does not exist or has ended")
        if len(self._names) >= MOST_NAMES:
            self._names.clear()
        # A job keeps its name for its life.
        self._names[job_id] = name
        return name

    def info(self) -> ClusterInfo:
        return parse.config(self._run(*command_words.SHOW_CONFIG))

    def domains(self) -> Mapping[str, str]:
        return domains_of(self._run("scontrol", "show", "topology"))

    def set_node(self, names: Sequence[str], *, state: str = "", reason: str = "") -> None:
        words = [f"nodename={fold(names)}"]
        words += [f"state={state}"] if state else []
        words += [f"reason={reason}"] if reason else []
        self._run("scontrol", "update", *words)
        if state == "resume":
            self._blank_reasons(names)

    def _blank_reasons(self, names: Sequence[str]) -> None:
        """Take the reasons of nodes in service away, which Slurm does by itself, but for 24.11.

        There the reason would stand before the next one ("Action:Replace : Not responding").
        """
        shown = parse.nodes(self._run(*command_words.SHOW_NODES, fold(names)))
        left = [n.name for n in shown if n.reason and not (n.is_down or n.is_fail or n.is_drain)]
        if left:
            # It takes no empty one.
            self._run("scontrol", "update", f"nodename={fold(left)}", "reason= ")

    def set_comment(self, names: Sequence[str], comment: str) -> None:
        self._run("scontrol", "update", f"nodename={fold(names)}", f"comment={comment}")

    def reboot(self, name: str, reason: str) -> None:
        self._run("scontrol", "reboot", "nextstate=DOWN", f"reason={reason}", fold([name]))

    def cancel_reboot(self, name: str) -> None:
        self._run("scontrol", "cancel_reboot", fold([name]))

    def shrink(self, job_id: int, keep: Sequence[str]) -> None:
        # Where Slurm will not do it (22.05 without slurmdbd, the second time) it blocks for 5 s.
        words = (f"jobid={self._own_name(job_id)}", f"nodelist={fold(keep)}")
        self._run("scontrol", "update", *words, timeout=2.0)

    def requeue(self, job_id: int) -> None:
        self._run("scontrol", "requeue", self._own_name(job_id))

    def start_now(self, job_id: int) -> None:
        self._run("scontrol", "update", f"jobid={self._own_name(job_id)}", "starttime=now")

    def cancel_step(self, job_id: int, step: str, signal: str = "") -> None:
        words = [f"--signal={signal}"] if signal else []
        # One that is gone already needs no end.
        with contextlib.suppress(NotFound):
            self._run("scancel", *words, f"{self._own_name(job_id)}.{step}")

    def cancel_job(self, job_id: int, name: str = "") -> None:
        words = [f"--name={name}"] if name else []
        try:
            with contextlib.suppress(NotFound):
                self._run("scancel", *words, self._own_name(job_id))
        finally:
            self._release(job_id)

    def allocate_for(self, job: Job, nodes: int, wait: float, stop: Event | None = None) -> int:
        words = [f"--nodes={nodes}", "--exclusive", f"--dependency=expand:{job.id}"]
        words += [f"--job-name=sres-{job.id}", "--no-bell", f"--immediate={max(1, round(wait))}"]
        words += [f"--partition={job.partition}"] if job.partition else []
        words += [f"--account={job.account}"] if job.account else []
        words += [f"--qos={job.qos}"] if job.qos else []
        words += [f"--reservation={job.reservation}"] if job.reservation else []
        placement = self._placement(job.id)
        excluded = dict.fromkeys((*placement.excluded, *job.excluded_nodes))
        words += [f"--exclude={fold(excluded)}"] if excluded else []
        words += [f"--constraint={placement.features}"] if placement.features else []
        answer = self._ask_salloc(words, wait + 20, stop)
        helper = answer.job
        if answer.held is not None:
            self._held[helper] = answer.held
        if stop is not None and stop.is_set():
            if helper:
                self.cancel_job(helper)
            else:
                # It may have got one without having said so.
                self._run("scancel", f"--name=sres-{job.id}", f"--user={job.uid}")
            raise SlurmError("salloc was stopped")
        if answer.held is None:
            raise _error("salloc", words, f"{answer.said} {self._waited_for(helper)}")
        # If salloc is killed together with us, no process is left to give it back. Slurm takes no
        # limit of its own for such a job from salloc.
        with contextlib.suppress(SlurmError, NotPermitted, NotFound):
            self._run("scontrol", "update", f"jobid={helper}", "timelimit=1", timeout=2.0)
        return helper

    def _waited_for(self, job: int) -> str:
        """Return what a withdrawn request waited for that only a person changes; empty: nothing."""
        reason = ""
        if job:
            words = ("-a", "-h", "-t", "all", "-j", str(int(job)), "-o", "%r")
            with contextlib.suppress(SlurmError, NotFound, NotPermitted):
                reason = self._run("squeue", *words, timeout=2.0).strip()
        return f"({SLURMS_REASON}{reason})" if needs_a_person(reason) else ""

    def ask_companion(self, request: CompanionRequest) -> int:
        job = request.job
        placement = self._placement(job.id)
        words = companion_words(request)
        excluded = dict.fromkeys((*placement.excluded, *job.excluded_nodes))
        words += [f"--exclude={fold(excluded)}"] if excluded else []
        words += [f"--constraint={placement.features}"] if placement.features else []
        commands = str(Path(self._path("squeue")).absolute().parent)
        script = companion_script(job.id, job.restarts, commands, lent=request.lent)
        text = self._run("sbatch", *words, stdin=script)
        number = text.strip().partition(";")[0]
        if not number.isdecimal():
            raise _error("sbatch", words, text)
        return int(number)

    def companions(self, job: Job) -> tuple[FoundCompanion, ...]:
        words = ("-a", "-h", f"--user={job.uid}", "-o", parse.COMPANION_FORMAT)
        return parse.companions(self._run("squeue", *words), job.id)

    def _placement(self, job_id: int) -> parse.Placement:
        """Return what the job itself says of the nodes that it may get."""
        mark = f"<{os.urandom(8).hex()}>"
        words = ("-a", "-r", "-h", "-j", str(job_id), "-o", parse.placement_format(mark))
        return parse.placement(self._run("squeue", *words), mark, job_id)

    def _ask_salloc(self, words: Sequence[str], seconds: float, stop: Event | None) -> Answer:
        # Late: only a fault needs it.
        from slurm_resilience.slurm import held_allocation

        path = self._path("salloc")
        try:
            return held_allocation.ask([path, *words], environment(), seconds, stop)
        except OSError as error:
            raise _not_started(path, error) from None

    def _release(self, helper: int) -> None:
        held = self._held.pop(helper, None)
        if held is not None:
            held.release()

    def prefer_requests(
        self, job: Job, nodes: int, companions: Sequence[int] = ()
    ) -> dict[int, int]:
        squeue = ("squeue", "-a", "-h", f"--user={job.uid}", "-o", parse.REQUEST_FORMAT)
        shown = self._run(*squeue, f"--name=sres-{job.id}") if not job.gres else ""
        if companions:
            numbers = ",".join(str(int(number)) for number in companions)
            shown += self._run(*squeue, f"--jobs={numbers}")
        if not shown.strip():
            return {}
        limit = self._run("squeue", "-a", "-h", "-j", str(int(job.id)), "-o", "%l")
        found = parse.node_requests(shown, limit, nodes)
        for number in found.raised:
            self._run("scontrol", "update", f"jobid={number}", f"priority={TOP_PRIORITY}")
        preferred = found.raised.keys() & set(companions)
        return found.holding | {number: found.raised[number] for number in preferred}

    def merge(self, helper: int, job_id: int, timeout: float = 15.0) -> tuple[str, ...]:
        """Two updates. On 22.05 without slurmdbd the second one takes effect at once and then
        blocks for 5 s before it complains ("the DB index is being set"), so it is watched from
        the side and ended once the nodes are in."""
        new = set(self.job(helper).nodes)
        self._run("scontrol", "update", f"jobid={int(helper)}", "numnodes=0")
        argv = [self._path("scontrol"), "update", f"jobid={self._own_name(job_id)}", "numnodes=ALL"]
        try:
            update = _start(argv)
        except OSError as error:
            raise _not_started(argv[0], error) from None
        deadline = SYSTEM_CLOCK.monotonic() + timeout
        try:
            while True:
                ended = update.poll() is not None
                have = self.job(job_id).nodes
                if new <= set(have):
                    return have
                if ended or SYSTEM_CLOCK.monotonic() > deadline:
                    said = (update.communicate()[0] if ended else "no answer").strip()
                    raise SlurmError(
                        f"nodes {fold(new)} of job {helper} did not move into job {job_id}: {said}"
                    )
                # Nothing tells when an allocation has changed but looking.
                _wait_for_exit(update, 0.05)
        finally:
            if update.poll() is None:
                update.kill()
            update.wait()
            self._release(helper)

    def _job_columns(self) -> str:
        """squeue's columns for `parse.jobs`; the commands do not change while a program runs."""
        if not self._columns:
            try:
                known = self._run(*command_words.HELP_FORMAT)
            except SlurmUnreachable:
                raise
            except SlurmError:
                known = ""  # 22.05 does not know the option, nor the field
            has = parse.has_exclusive_column(known)
            more, fewer = command_words.JOB_COLUMNS_EXCLUSIVE, command_words.JOB_COLUMNS
            self._columns = more if has else fewer
        return self._columns

    def _squeue(self, *which: str, expanded: parse.Expand = expand) -> tuple[Job, ...]:
        base = command_words.list_jobs(*which)
        early = self._early.mark((*base[1:], "-o")) if self._early is not None else ""
        mark = early or f"<{os.urandom(8).hex()}>"
        columns = self._run(*base, "-O", self._job_columns())
        text = self._run(*base, "-o", command_words.job_format(mark))
        return parse.jobs(text, mark, columns, expanded)

    def _path(self, program: str) -> str:
        if self._bin:
            path = Path(self._bin) / program
            if os.access(path, os.X_OK):
                return str(path)
            raise MissingTool(f"{path} is not there (slurm_bin in the configuration)")
        # Not shutil.which: with its module it takes longer than most commands of Slurm.
        places = (Path(folder, program) for folder in os.get_exec_path())
        found = next((place for place in places if os.access(place, os.X_OK)), None)
        if found is None:
            raise MissingTool(f"{program} is not on PATH; install Slurm's client commands")
        return str(found)

    def _run(
        self,
        program: str,
        *words: str,
        timeout: float | None = None,
        stdin: str | None = None,
    ) -> str:
        argv = [self._path(program), *words]
        try:
            early = self._early and self._early.answer(argv, timeout or self._timeout)
            if early and early.code < 0:
                early = None  # a signal ended it: it has said nothing of what was asked
            done = early or _run(argv, stdin, timeout or self._timeout)
        except Unanswered:
            raise SlurmUnreachable(
                f"{program} {words[0] if words else ''} gave no answer within "
                f"{timeout or self._timeout:g} s"
            ) from None
        except OSError as error:
            raise _not_started(argv[0], error) from None
        printed, errors = _lines(done.output), _lines(done.errors)
        _note(argv, done.code)
        if done.code < 0:
            raise SlurmUnreachable(
                f"{program} {words[0] if words else ''} was ended by signal {-done.code}"
            )
        if done.code != 0 or _complained(program, errors):
            raise _error(program, words, errors or printed)
        if printed and not printed.endswith("\n"):
            # Memory was full, say, which Slurm's commands do not check. The rest of a state may be
            # what says that a node is out of service.
            raise SlurmError(f"{program} {words[0] if words else ''} printed half an answer")
        return printed


def _run(argv: Sequence[str], stdin: str | None, timeout: float) -> Printed:
    """Run a command to its end.

    Raises:
        OSError: it cannot be started.
        Unanswered: it took longer.
    """
    # Late: the plugin has started all commands that a step's start needs.
    import resource
    import subprocess

    # Into a file of memory: through a pipe, each of the 2,000 pieces in which scontrol prints
    # 10,000 nodes would wake us.
    # But where `ulimit -f` counts for that file as for any.
    limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    with os.fdopen(os.memfd_create("output"), "w+b") as output:
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL if stdin is None else None,
                input=stdin.encode() if stdin is not None else None,
                stdout=subprocess.PIPE if limited else output,
                stderr=subprocess.PIPE,
                timeout=timeout,
                env=environment(),
                # Python ignores SIGPIPE, and so shall they: libmunge dies of it where munged, which
                # has too much to do, closes the connection, and tries again where it does not.
                restore_signals=False,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Unanswered from None
        if not limited:
            output.seek(0)
            done.stdout = output.read()
    return Printed(done.returncode, done.stdout, done.stderr)


def _start(argv: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command that is watched from the side; its two outputs are one."""
    import subprocess  # late: as above

    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


def _wait_for_exit(process: subprocess.Popen[str], seconds: float) -> None:
    import subprocess  # late: as above

    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=seconds)


def _not_started(path: str, error: OSError) -> SlurmUnreachable | MissingTool:
    if error.errno in PASSING_ERRORS:
        return SlurmUnreachable(f"{path} cannot be started now: {error}")
    return MissingTool(f"{path} cannot be started: {error}")


def _note(argv: Sequence[str], code: int) -> None:
    """Log a command where a log is kept: a supervisor has none, and does not load the module."""
    if "logging" in sys.modules:
        # Imported all the same: another thread may be about to load it, and is waited for.
        import logging

        logging.getLogger("sres.slurm").debug("%s -> %d", " ".join(argv), code)


def _lines(printed: bytes) -> str:
    """Return what a command has printed, as text with plain line ends."""
    text = printed.decode(errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def environment() -> dict[str, str]:
    """Return this process's environment without the job's own SLURM_* and squeue's format
    variables: they would change what the commands do and print. Times are in UTC (`clock`)."""
    kept = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS"}
    prefixes = ("SLURM_", "SQUEUE_", "SALLOC_", "SCANCEL_", "SBATCH_", "SINFO_", "SLURMD_")
    env = {
        name: value
        for name, value in os.environ.items()
        if name in kept or not name.startswith(prefixes)
    }
    return env | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard", "TZ": "UTC0"}


def _complained(program: str, stderr: str) -> bool:
    """scancel exits 0 for some refusals; what it says then is an error all the same."""
    return program == "scancel" and "error:" in stderr and "already compl" not in stderr


def _error(program: str, words: Sequence[str], said: str) -> SlurmError | NotFound | NotPermitted:
    line = " ".join(said.split()) or "no reason given"
    line = re.sub(rf"{program}: error: ", "", line)
    what = " ".join([program, *words[:3]])
    if re.search(_NO_CONFIGURATION, line):
        return SlurmUnreachable(
            f"{what}: no slurm.conf is on this machine, and DNS names no slurmctld; run it on a "
            "machine of the cluster"
        )
    for kind, pattern in _KINDS:
        if re.search(pattern, line, re.IGNORECASE):
            return kind(f"{what}: {line[:300]}")
    return SlurmError(f"{what}: {line[:300]}")
