"""sresctld: observe → diagnose → decide → act → record, once a cycle."""

from __future__ import annotations

import logging
import re
import resource
import signal
import sqlite3
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import click
import msgspec

from slurm_resilience import __version__, daemon_log
from slurm_resilience.clock import Clock, SystemClock
from slurm_resilience.config import OPTION_HELP, Config, load
from slurm_resilience.controller.act.actor import Actor, find_job
from slurm_resilience.controller.actions import RaiseAlarm
from slurm_resilience.controller.alarms import FollowedAlarm, follow
from slurm_resilience.controller.decide.marking import Decision, decide
from slurm_resilience.controller.diagnose import NodeDiagnosis, diagnose
from slurm_resilience.controller.inbox import Inbox, InboxMessage
from slurm_resilience.controller.journal import (
    Journal,
    KnownAgent,
    PendingRequeue,
    Supervised,
)
from slurm_resilience.controller.observe import Blind, ClusterSnapshot, last_run, observe
from slurm_resilience.controller.probe import Prober
from slurm_resilience.controller.slurm_settings import SlurmSettings
from slurm_resilience.controller.status import for_supervisors, status
from slurm_resilience.controller.supervisors import Supervisors, is_last_word
from slurm_resilience.errors import SresError
from slurm_resilience.slurm.choose import choose
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.client import ClusterInfo, SlurmClient
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    PauseRequest,
    RequeueRequest,
)
from slurm_resilience.wire.server import Server

log = logging.getLogger("sresctld")

_NUMBER = re.compile(r"\d+\.\d+ s|\d+ s|\d+ probes")

KEEP_EVENTS = 180 * 86400.0
"""Seconds: older events are dropped at a start. Incidents are kept."""
MAX_FILES = 65536
"""File descriptors, where the hard limit allows them."""
NOTES, NOTES_SECONDS = 20, 60.0
"""What one job says is journaled this often in so many seconds; a user must not fill the disk."""
TICK = 0.25
"""Seconds: how soon a silence is noticed, and how often a requeued job is pushed."""


class Controller:
    """The daemon's parts, wired together. `cycle` is one round; `run` repeats it."""

    def __init__(
        self,
        config: Config,
        client: SlurmClient,
        info: ClusterInfo,
        clock: Clock,
        dry_run: bool = False,
    ) -> None:
        self._config = config
        self._client = client
        self._settings = SlurmSettings(client, info, clock)
        self._clock = clock
        self._state_dir = Path(config.controller.state_dir)
        self.journal = Journal(self._state_dir / "journal.db")
        self.journal.number_after(last_run(self._state_dir))
        # The wire's thread reads with a connection of its own (SQLite's rule).
        history = threading.local()

        def read_history(node: str, limit: int) -> list[dict[str, Any]]:
            try:
                if not hasattr(history, "journal"):
                    history.journal = Journal(self._state_dir / "journal.db")
                journal: Journal = history.journal
                return journal.events(node, limit)
            except sqlite3.Error as error:
                raise SresError(f"the journal cannot be read: {error}") from None

        self.board = Inbox(
            clock,
            trusted_uids=frozenset({0, info.slurm_user_uid}),
            find_job=lambda job_id: find_job(client, job_id),
            history=read_history,
        )
        self._prober = Prober(clock, config.detect.probe_timeout)
        self._prober.done = self.board.wake
        self._actor = Actor(
            client,
            self.journal,
            self.board,
            self._prober,
            clock,
            config,
            self._state_dir,
            dry_run,
        )
        self.journal.prune(clock.now() - KEEP_EVENTS)
        for agent in self.journal.agents().values():
            self.board.remember(agent.node, agent.boot_id, agent.instance)
        self._known_agents = self.journal.agents()
        self._started = clock.monotonic()
        self._alarms: dict[str, FollowedAlarm] = {}
        self._noted: dict[int, deque[float]] = {}
        self._supervisors = Supervisors()
        self._blind_since = 0.0

    def cycle(self) -> str:
        """One round; returns its sentence."""
        try:
            return self._cycle()
        except sqlite3.Error as error:
            # A full disk. Each decision is written down before it is done: so nothing is done, and
            # those who ask are told.
            return self._blind(f"the journal in {self._state_dir} cannot be written: {error}")

    def _blind(self, reason: str) -> str:
        self._blind_since = self._blind_since or self._clock.now()
        self.board.publish_blind(reason, self._blind_since)
        return f"blind, nothing is done: {reason}"

    def _cycle(self) -> str:
        world = observe(
            self._client,
            self.board,
            self._prober,
            self.journal,
            self._clock,
            started=self._started,
            state_dir=self._state_dir,
            can_replace=bool(self._config.replace.program),
            permits_expansion=self._settings.now().permits_expansion,
        )
        if isinstance(world, Blind):
            for heard in self.board.take_pauses():
                self._note_pause(heard)
            return self._blind(world.reason)
        self.board.know(tuple(world.nodes.values()), world.jobs)
        if self._take_notes(world):
            world = msgspec.structs.replace(
                world,
                supervised=self.journal.supervised(),
                chases=self.journal.chases(),
                paused=self.journal.paused,
            )
        verdicts = diagnose(world, self._config)
        decision = decide(world, verdicts, self._config)
        self._actor.act(world, decision.actions)
        raised = [a for a in decision.actions if isinstance(a, RaiseAlarm)]
        self._alarms = follow(self._alarms, raised, world.now)
        self._publish(world, verdicts, decision)
        self._blind_since = 0.0
        return decision.sentence

    def run(self, stop: threading.Event) -> None:
        """Cycles until ``stop``: at once when something was heard, else every interval."""
        last_gist = ""
        while not stop.is_set():
            self.board.wake.clear()
            began = self._clock.monotonic()
            sentence = self.cycle()
            # A second more of silence is no news.
            gist = _NUMBER.sub("", sentence)
            if gist != last_gist:
                log.info("%s", sentence)
                last_gist = gist
            self._pause_between(stop, began)

    def close(self) -> None:
        self._prober.close()
        self.journal.close()

    def _pause_between(self, stop: threading.Event, began: float) -> None:
        """Wait for a reason to look: a message, a silence, work in progress, the interval."""
        interval = self._config.controller.interval
        silent_after = self._config.detect.silent_after
        while not stop.is_set():
            if self.board.wake.is_set():
                return
            elapsed = self._clock.monotonic() - began
            busy = self._busy() or self.board.any_silent(silent_after)
            if elapsed >= (TICK if busy else interval):
                return
            self._clock.wait(self.board.wake, min(TICK, interval))

    def _busy(self) -> bool:
        return bool(self.journal.chases()) or any(
            incident.state in ("replacing", "returning", "resumed")
            or (incident.state == "marked" and self._clock.now() - incident.marked < 60)
            for incident in self.journal.incidents()
        )

    def _take_notes(self, world: ClusterSnapshot) -> bool:
        """Messages of supervisors and administrators, and jobs that are gone, into the journal."""
        # First: the picture of Slurm is older than what waits in the inbox. A supervisor also says
        # its last word when its job is requeued, which the next picture shows.
        changed = self._review_supervised(world)
        heard = self.board.take_inbox()
        for entry in heard:
            self._note(world, entry)
        changed = changed or bool(heard)
        for name, agent in world.agents.items():
            known = self._known_agents.get(name)
            entry_now = KnownAgent(name, agent.boot_id, agent.instance)
            if name not in world.nodes:
                self.board.forget(name)
                self.journal.drop_agent(name)
                self._known_agents.pop(name, None)
            elif agent.spoke and agent.said_goodbye and known is not None:
                # Stopped on purpose: after a restart of ours its silence is still expected.
                self.journal.drop_agent(name)
                self._known_agents.pop(name, None)
            elif agent.spoke and not agent.said_goodbye and known != entry_now:
                self.journal.put_agent(entry_now)
                self._known_agents[name] = entry_now
        return changed

    def _review_supervised(self, world: ClusterSnapshot) -> bool:
        """Drop the jobs that are gone, or run on without a supervisor: they are left to Slurm like
        any other job. One that does not run is kept: it may come back."""
        changed = False
        for gone in [job for job in self._noted if job not in world.jobs]:
            del self._noted[gone]
        self._supervisors.keep(world.jobs)
        for entry in world.supervised.values():
            job = world.jobs.get(entry.job)
            if job is None:
                self.journal.drop_supervised(entry.job)
                changed = True
                continue
            connected = self.board.supervisors(job.id)
            if job.state in ("COMPLETING", "PENDING"):
                self._supervisors.run_is_over(job.id, connected)
            else:
                self._supervisors.look(job.id, connected, world.moment)
            requeued = job.restarts > entry.restarts
            if job.state == "RUNNING" and self._supervisors.are_over(job.id, world.moment):
                if not requeued and job.id not in world.chases:
                    # Else it has only just begun again, and its next supervisor is not there yet.
                    text = "no supervisor lives: its nodes are left to Slurm"
                    self._event_of_job(world.now, "unsupervised", text, job.id)
                self.journal.drop_supervised(job.id)
                changed = True
            elif requeued and job.id in world.chases:
                # This requeue is followed; it needs to be only once.
                followed = msgspec.structs.replace(entry, restarts=job.restarts)
                self.journal.put_supervised(followed)
                changed = True
        return changed

    def _note(self, world: ClusterSnapshot, heard: InboxMessage) -> None:
        now = self._clock.now()
        message = heard.message
        if isinstance(message, AttemptStarted):
            job = world.jobs.get(heard.job)
            uid = job.uid if job else heard.peer.uid
            # A user's word about other people's nodes counts for nothing.
            nodes = tuple(name for name in message.nodes if name in world.nodes)
            size = sum(name in job.nodes for name in nodes) if job else 0
            restarts = job.restarts if job else 0
            self.journal.put_supervised(
                Supervised(heard.job, uid, message.attempt, nodes, now, size, restarts)
            )
            self._supervisors.began(heard.job, heard.peer)
            text = f"attempt {message.attempt} on {len(message.nodes)} nodes"
            self._event_of_job(now, "attempt-started", text, heard.job)
        elif isinstance(message, AttemptEnded):
            outcome = _one_line(message.outcome)
            text = f"attempt {message.attempt} ended ({message.exit_code}): {outcome}"
            self._event_of_job(now, "attempt-ended", text, heard.job)
            if is_last_word(message):
                self._supervisors.ended(heard.job, heard.peer)
        elif isinstance(message, RequeueRequest):
            job = world.jobs.get(heard.job)
            if job is not None:
                reason = _one_line(message.reason)
                self.journal.put_chase(PendingRequeue(job.id, reason, True, job.restarts, now))
                self._event_of_job(now, "requeue-asked", reason, job.id)
        else:
            self._note_pause(heard)

    def _event_of_job(self, now: float, kind: str, text: str, job: int) -> None:
        """What a job's supervisor says. Anybody with a job can say it, as often as he likes."""
        times = self._noted.setdefault(job, deque(maxlen=NOTES))
        if len(times) == NOTES and now - times[0] < NOTES_SECONDS:
            return
        times.append(now)
        self.journal.event(now, kind, text, job=job)

    def _note_pause(self, heard: InboxMessage) -> None:
        assert isinstance(heard.message, PauseRequest)
        reason = _one_line(heard.message.reason)
        self.journal.pause(reason)
        word = f"paused: {reason}" if reason else "goes on"
        self.journal.event(self._clock.now(), "pause", f"{word} (uid {heard.peer.uid})")

    def _publish(
        self, world: ClusterSnapshot, verdicts: dict[str, NodeDiagnosis], decision: Decision
    ) -> None:
        incidents = {i.node: i for i in self.journal.incidents()}
        self.board.publish(
            {
                name: for_supervisors(v, world.nodes[name], incidents.get(name))
                for name, v in verdicts.items()
            },
            status(world, verdicts, decision, self._config, incidents, self._alarms),
        )


def _one_line(text: str) -> str:
    """A user's words for the journal: one line, of bounded length."""
    return " ".join(text.split())[:500]


def serve(config: Config, *, once: bool, dry_run: bool) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    _allow_many_connections()
    clock = SystemClock()
    commands = CliClient(config.slurm_bin)
    info = commands.info()
    client, reading = choose(commands, info)
    log.info("Slurm is read through %s", reading)
    controller = Controller(config, client, info, clock, dry_run)
    if once:
        click.echo(controller.cycle())
        controller.close()
        return
    stop = threading.Event()

    def end(*_: object) -> None:
        stop.set()
        controller.board.wake.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    server = Server(
        controller.board,
        config.controller.port,
        munge_socket=config.wire.munge_socket or info.munge_socket,
    )
    # The nodes' addresses are needed before the first sresd says hello.
    controller.board.know(client.nodes(), {})
    server.start()
    log.info(
        "sresctld %s: cluster %s, Slurm %s, port %d, recovery %s%s",
        __version__,
        info.cluster,
        info.version,
        server.port,
        config.recovery.mode,
        ", dry run" if dry_run else "",
    )
    try:
        controller.run(stop)
    finally:
        server.stop()
        controller.close()
        log.info("sresctld ends")


def _allow_many_connections() -> None:
    """Each node and each supervisor holds one; what systemd gives by default ends at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@click.command(name="sresctld", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_path", metavar="FILE", help=OPTION_HELP)
@click.option("--once", is_flag=True, help="Run one cycle, print its sentence, exit.")
@click.option("--dry-run", is_flag=True, help="Decide and say what would be done; do nothing.")
@click.option(
    "--log-level", default="info", type=click.Choice(daemon_log.LEVELS), show_default=True
)
@click.version_option(__version__, prog_name="sresctld")
def _command(config_path: str | None, once: bool, dry_run: bool, log_level: str) -> None:
    """Watch the cluster's nodes, mark faulty ones, and have them replaced until they are idle."""
    daemon_log.set_up(log_level)
    serve(load(config_path), once=once, dry_run=dry_run)


def main() -> None:
    """The console entry."""
    try:
        _command(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except SresError as error:
        print(f"sresctld: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
