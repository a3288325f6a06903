"""Run sresd's threads: the link that beats, the kernel log, the checks, the isolation watch.

They share one outbox and one stop event. A thread that ends by an exception ends the daemon, and
systemd starts it again: half an agent would beat on without watching anything.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from slurm_resilience import __version__
from slurm_resilience.agent import kernel_log_reader
from slurm_resilience.agent.agent_link import AgentLink, Wakeup
from slurm_resilience.agent.check_loop import CheckLoop
from slurm_resilience.agent.drill_window import DrillWindow, drill_file
from slurm_resilience.agent.events import gpu_events
from slurm_resilience.agent.events.app_xid_memory import AppXidMemory
from slurm_resilience.agent.events.dcgm_policies import DcgmPolicies
from slurm_resilience.agent.events.gpu_events import GpuEvents
from slurm_resilience.agent.evidence.bug_report import BugReports, ReportProgress, ReportState
from slurm_resilience.agent.evidence.machine_tools import gpu_state, machine_journal
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.agent.finding_intake import FindingIntake
from slurm_resilience.agent.health_log import HealthLog, log_path
from slurm_resilience.agent.hook_state import HookState, hook_directory
from slurm_resilience.agent.isolation import Isolation
from slurm_resilience.agent.joining import lifecycle_check
from slurm_resilience.agent.joining.lifecycle_check import awaits_scripts
from slurm_resilience.agent.joining.lifecycle_rerun import LifecycleRerun
from slurm_resilience.agent.joining.validation import Validation
from slurm_resilience.agent.kernel_log_reader import KernelLogReader
from slurm_resilience.agent.orders.gpu_reset import GpuReset
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.agent.processes import steps
from slurm_resilience.agent.processes.left_over import end_left_over
from slurm_resilience.agent.read_ahead import ReadAhead
from slurm_resilience.agent.responder import Answerer
from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.daemon_log import KEPT_LINES, RecentLines
from slurm_resilience.errors import AuthError, SresError, WireError
from slurm_resilience.health.check import CheckContext
from slurm_resilience.health.checks.host.software import drivers
from slurm_resilience.health.documents import dcgm_violations
from slurm_resilience.lifecycle import identity
from slurm_resilience.model import CheckResult
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import (
    AwaitBugReport,
    BugReportTold,
    ChangeDrill,
    ChecksRun,
    EndLeftOver,
    GpusReset,
    LogTail,
    NodeEvidence,
    NodeHello,
    ResetGpus,
    RunCheck,
    RunChecks,
    RunLifecycle,
    RunStepChecks,
    SendEvidence,
    SendLog,
)

log = logging.getLogger("sresd")

LISTEN_INTERVAL_SECONDS = 1.0
"""Seconds after which a signal that another thread received is acted upon at the latest."""
MAX_TAIL_BYTES = 256 << 10
"""Bytes of the log in one answer."""
GOODBYE_SECONDS = 1.0
"""Seconds that a stopping sresd waits for its goodbye to leave."""


class Daemon:
    """Everything of one sresd process but its command line."""

    def __init__(
        self,
        settings: Config,
        node: str,
        facts: SlurmFacts,
        clock: Clock,
        stop: threading.Event,
        recent: RecentLines,
    ) -> None:
        self._settings = settings
        self._node = node
        self._facts = facts
        self._stop = stop
        self._failed = False
        self._clock = clock
        self._turn = itertools.count()
        self._wakeup = Wakeup()
        self._health_log = self._open_health_log()
        self.outbox = Outbox(self._wakeup.ring, self._health_log)
        versions = drivers(CheckContext(Path(settings.agent.sysroot)))
        hello = NodeHello(identity.boot_id(), identity.instance(), __version__, versions)
        beat = settings.agent.beat
        self._drill = DrillWindow(
            drill_file(), identity.boot_id(), settings.agent.accept_injected, clock
        )
        self._checks = CheckLoop(settings, facts, self.outbox, clock, stop, self._drill.covers)
        rerun = LifecycleRerun(
            settings.lifecycle, node, lambda: self._checks.run_now(lifecycle_check.NAME)
        )
        self._recent = recent
        self._kernel_log: KernelLogReader | None = None
        reports = BugReports(settings, node, clock)
        answerers = {
            ChangeDrill.kind: Answerer(ChangeDrill, self._drill.change),
            SendLog.kind: Answerer(SendLog, self._log_tail),
            SendEvidence.kind: Answerer(
                SendEvidence, lambda asked: self._evidence(asked, reports.begin())
            ),
            AwaitBugReport.kind: Answerer(
                AwaitBugReport, lambda asked: BugReportTold(reports.wait(asked.seconds).text)
            ),
            EndLeftOver.kind: Answerer(
                EndLeftOver, lambda asked: end_left_over(self._node, asked.jobs)
            ),
            RunLifecycle.kind: Answerer(RunLifecycle, rerun.answer),
            ResetGpus.kind: Answerer(ResetGpus, self._reset_gpus),
            RunCheck.kind: Answerer(RunCheck, lambda asked: self._checks.run_now(asked.check)),
            RunChecks.kind: Answerer(RunChecks, self._run_checks),
            RunStepChecks.kind: Answerer(
                RunStepChecks, lambda asked: self._checks.run_after_step(asked.seconds)
            ),
        }
        self.link = AgentLink(
            self.dial, hello, self.outbox, self._wakeup, beat, clock, stop, answerers
        )

    def _open_health_log(self) -> HealthLog | None:
        agent = self._settings.agent
        path = log_path(agent, dict(os.environ))
        if path is None:
            return None
        boot_id = identity.boot_id()
        return HealthLog(path, agent.health_log_bytes, self._node, boot_id, self._clock)

    def run(self, kernel_log: Path) -> int:
        """Run until `stop` is set; return the exit code."""
        intake = FindingIntake(self.outbox, self._app_xids().note)
        reader = KernelLogReader(
            kernel_log, self._drill, self.outbox, intake, self._clock, self._stop
        )
        events = GpuEvents(
            self._settings, self._facts, self.outbox, intake, self._clock, self._stop
        )
        policies = DcgmPolicies(
            self._settings,
            self._facts,
            self.outbox,
            intake,
            self._drill.covers,
            self._clock,
            self._stop,
        )
        self._kernel_log = reader
        log.info("sresd %s watches node %s", __version__, self._node)
        link = self._start("link", self.link.run)
        health_log = self._health_log
        writer = self._start("health_log", health_log.run) if health_log else None
        self._start("kernel_log", reader.run)
        validation = self._validation()
        if validation is not None:
            self._checks.add(validation.check())
            self._start("validation", validation.run)
        self._start("checks", self._checks.run)
        hooks = hook_directory(self._settings.agent, dict(os.environ))
        if hooks is not None:
            check = self._checks.run_after_step
            state = HookState(hooks, self.outbox, check, self._clock, self._stop)
            self._start("hooks", state.run)
        if gpu_events.NAME not in self._settings.checks.disabled:
            self._start(gpu_events.NAME, events.run)
        if dcgm_violations.CHECK_NAME not in self._settings.checks.disabled:
            self._start(dcgm_violations.CHECK_NAME, policies.run)
        patterns = self._settings.agent.read_ahead
        if patterns:
            ahead = ReadAhead(patterns, self._has_tasks, self._clock, self._stop)
            self._start("read_ahead", ahead.run)
        isolation = Isolation(
            self._settings,
            self._node,
            self._facts,
            lambda: self.link.state,
            self.outbox,
            self._clock,
            self._stop,
        )
        self._start("isolation", isolation.run)
        # Not one endless wait: where the kernel hands the signal to another thread, this one would
        # sleep on and its handler would never run.
        while not self._stop.wait(LISTEN_INTERVAL_SECONDS):
            pass
        reader.wake()
        events.wake()
        policies.wake()
        self._wakeup.ring()
        link.join(GOODBYE_SECONDS)
        if health_log and writer:
            health_log.close()
            writer.join(GOODBYE_SECONDS)
        return 1 if self._failed else 0

    def _has_tasks(self) -> bool:
        # A job holds its spare with a step of its own that runs no task.
        return any(step.step != "extern" for step in steps.running(self._node))

    def _app_xids(self) -> AppXidMemory:
        agent, state_dir = self._settings.agent, Path(self._settings.lifecycle.state_dir)
        return AppXidMemory(
            state_dir, Path(agent.sysroot), lambda: steps.running(self._node), self._clock
        )

    def _validation(self) -> Validation | None:
        """Return what validates this node before it returns; None: nothing is configured."""
        recovery, lifecycle = self._settings.recovery, self._settings.lifecycle
        if not recovery.validate:
            return None
        state_dir = Path(lifecycle.state_dir)

        def is_busy() -> bool:
            return bool(steps.running(self._node)) or awaits_scripts(lifecycle, state_dir)

        return Validation(
            recovery.validate,
            recovery.validate_timeout,
            self._node,
            identity.boot_id(),
            state_dir,
            lambda: self._facts.ask_node(again=True),
            is_busy,
            self._clock,
            self._stop,
        )

    def dial(self) -> Connection:
        """Try once to reach sresctld; several SlurmctldHosts take turns.

        Raises:
            SresError: no answer, or Slurm does not say where sresctld would be.
        """
        settings = self._settings
        hosts = settings.controller.hosts or self._facts.ask_cluster().controllers
        if not hosts:
            raise WireError("the host of sresctld is not known; set controller.host")
        host = hosts[next(self._turn) % len(hosts)]
        try:
            return self._open(host)
        except AuthError:
            # SlurmUser and munge's socket are Slurm's to say. It is not asked before, because
            # sresctld must be found while slurmctld is down.
            if self._facts.cluster is not None:
                raise
            self._facts.ask_cluster()
            return self._open(host)

    def _log_tail(self, asked: SendLog) -> LogTail:
        lines = self._recent.tail(asked.lines, min(asked.max_bytes, MAX_TAIL_BYTES))
        return LogTail(lines, self.outbox.kernel_findings())

    def _reset_gpus(self, asked: ResetGpus) -> GpusReset:
        if self._kernel_log is None:
            raise SresError("sresd has just started")
        return GpuReset(
            self._settings.agent.nvidia_smi,
            Path(self._settings.lifecycle.state_dir),
            self.outbox,
            self._kernel_log.intake,
            lambda: bool(steps.running(self._node)),
            self._checks.run_after_step,
            self._clock,
            self._stop,
        ).answer(asked)

    def _run_checks(self, asked: RunChecks) -> ChecksRun:
        results = self._checks.run_chosen(asked.only, asked.seconds)
        if asked.only:
            return ChecksRun(results)
        logged = [one for one in self.outbox.results() if one.check == kernel_log_reader.NAME]
        findings = self.outbox.kernel_findings()
        if findings:
            text = "; ".join(one.text for one in findings)
            logged = [CheckResult(kernel_log_reader.NAME, "fail", text, findings)]
        return ChecksRun((*logged, *results))

    def _evidence(self, asked: SendEvidence, report: ReportProgress) -> NodeEvidence:
        most = min(asked.max_bytes, MAX_TAIL_BYTES)
        return NodeEvidence(
            self._kernel_log.tail(most) if self._kernel_log else (),
            machine_journal(most),
            self._recent.tail(KEPT_LINES, most),
            self.outbox.kernel_findings(),
            self.outbox.results(),
            gpu_state(most // 2),
            report.text,
            report.state is ReportState.RUNNING,
        )

    def _open(self, host: str) -> Connection:
        wire, cluster = self._settings.wire, self._facts.cluster
        return Connection.open(
            host,
            self._settings.controller.port,
            "node",
            self._node,
            munge_socket=wire.munge_socket or (cluster.munge_socket if cluster else ""),
            trusted_uids=frozenset({0} if cluster is None else {0, cluster.slurm_user_uid}),
        )

    def _start(self, name: str, body: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                body()
            except Exception:
                log.exception("%s failed; sresd ends", name)
                self._failed = True
                self._stop.set()

        # Daemon threads: a check that hangs in the kernel must not keep sresd from ending.
        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread
