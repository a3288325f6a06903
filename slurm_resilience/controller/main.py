"""sresctld: the daemon around the cycle. Options, signals, the wire's server, and the pace."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import math
import os
import re
import resource
import signal
import socket
import sqlite3
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from slurm_resilience import __version__, daemon_log
from slurm_resilience.child_exits import keep_exit_codes
from slurm_resilience.clock import Clock, SteadyClock, SystemClock
from slurm_resilience.config import OPTION_HELP, Config, chosen_file, load
from slurm_resilience.controller.act.actor import Actor
from slurm_resilience.controller.act.reset_replacer import GpuResetReplacer
from slurm_resilience.controller.cycle import Cycle
from slurm_resilience.controller.decide.recovery_modes import check_names, with_each_node
from slurm_resilience.controller.inbox import Inbox
from slurm_resilience.controller.job_lookups import JobLookups
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.journal_file import open_database
from slurm_resilience.controller.journal.records import HOUR_SECONDS
from slurm_resilience.controller.observe import Sources, last_run
from slurm_resilience.controller.pace import TICK_SECONDS, RoundCause, pause_before
from slurm_resilience.controller.probe import Dialer, Prober, ThreadDialer
from slurm_resilience.controller.query.history_reader import HistoryReader
from slurm_resilience.controller.registry import Registry, Silences, SupervisorRoll
from slurm_resilience.controller.retention import Retention
from slurm_resilience.controller.sinks.outflow import Outflow
from slurm_resilience.controller.slurm_settings import SlurmSettings
from slurm_resilience.controller.standby.act_gate import OPEN_GATE, ActGate, gated
from slurm_resilience.controller.standby.inheritance import follow_copied_runs, hold_forgotten
from slurm_resilience.controller.standby.pair import Terms, begin_alone, check_once, find_pair
from slurm_resilience.errors import NotFound, SresError
from slurm_resilience.model import Job, Node
from slurm_resilience.replace.program import THIS_HOST, RunHost
from slurm_resilience.replace.replacers import choose_replacers
from slurm_resilience.slurm.choose import choose
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.client import ClusterInfo, SlurmClient
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.slurm.reservations import ReservationClient, ReservationCommands
from slurm_resilience.trusted_paths import refuse_forged_controller
from slurm_resilience.wire.server import Handler, Server

log = logging.getLogger("sresctld")

_NUMBER = re.compile(r"\d+\.\d+ s|\d+ s|\d+ probes")

MAX_FILES = 65536
"""File descriptors, where the hard limit allows them."""
DATE_SET_SECONDS = 1.0
"""The machine's date was set where it is so far from ours."""
NEW_SILENCE_SECONDS = 60.0
"""A node that has been silent for longer needs no more frequent rounds than any other."""
LATE_SECONDS = 0.25
"""A beat that is not there so long after its time is late: its node is probed at once, so that the
answer is there when silence would make it a suspect."""
LEAST_WAIT_SECONDS = 0.01
LATE_AT_ONCE = 64
"""Late nodes that are probed at a time: a switch that hangs must not start thousands of probes."""
NEW_OBJECTS = 50_000
"""New objects between two looks for garbage. A round over 10,000 nodes makes as many, all of which
end with the next one: by Python's own pace, each would have every object of the process looked at.
"""
MAX_SOCKET_NAME = 100
"""Characters of a name that the kernel takes for a socket."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other side of a socket."""
_ENDED = ("COMPLETED", "CANCELLED", "FAILED")


class Borders(NamedTuple):
    """The borders of sresctld besides Slurm, the clock and the wire. The simulator has its own."""

    dialer: Dialer | None = None
    """Tries connections to nodes; None: real ones."""
    host: RunHost = THIS_HOST
    """Runs the replacement program."""
    connect: Callable[[Path | str], sqlite3.Connection] = open_database
    """Opens the journal's database."""
    reservations: ReservationClient | None = None
    """Keeps spare nodes; None: there are none."""
    gate: ActGate = OPEN_GATE
    """Permits to act, where there are two controllers."""
    numbers_after: int = 0
    """No new incident gets this id or a lower one."""


REAL = Borders()


class Controller:
    """The daemon's parts, wired together. `cycle` is one round; `run` repeats it."""

    def __init__(
        self,
        config: Config,
        client: SlurmClient,
        info: ClusterInfo,
        clock: Clock,
        dry_run: bool = False,
        borders: Borders = REAL,
    ) -> None:
        self._config = config
        # What waits for a time must not end, or begin anew, because the date was set.
        clock = self._clock = SteadyClock(clock)
        state_dir = Path(config.controller.state_dir)
        reset = GpuResetReplacer(
            lambda *asked: self.inbox.node_requests.ask(*asked),
            borders.host,
            lambda: self.registry.wake.set(),
        )
        replacers = choose_replacers(config.replace, info, client, borders.host, reset)
        self.journal = Journal(state_dir / "journal.db", borders.connect)
        # What is under way is timed by the date that the last sresctld went by.
        clock.go_on_from(self.journal.newest())
        self.journal.number_after(max(last_run(state_dir), borders.numbers_after))
        self._gate = borders.gate
        client = gated(client, borders.gate)
        replacers.before_act = borders.gate.begin_act
        self._retention = Retention(self.journal, clock, config.controller, borders.host)
        self.registry = Registry(clock, config.detect.silent_after)
        for agent in self.journal.agents().values():
            self.registry.expect(agent)
        settings = SlurmSettings(client, info, clock)
        self.inbox = Inbox(
            self.registry,
            trusted_uids=frozenset({0, info.slurm_user_uid}),
            lookups=JobLookups(
                lambda job_id: find_job(client, job_id),
                clock,
                lambda: settings.last.hides_jobs,
                lambda: settings.last.hides_nodes,
            ),
            history=HistoryReader(state_dir / "journal.db").read,
            clock=clock,
        )
        seconds = config.detect.probe_timeout
        # What a node's hello has taught of its name serves its probes, too.
        dialer = borders.dialer or ThreadDialer(clock, seconds, self.inbox.addresses)
        self._prober = Prober(clock, seconds, dialer)
        self._prober.done = self.registry.wake
        actor = Actor(
            client,
            self.journal,
            self.registry,
            self._prober,
            clock,
            config,
            state_dir,
            dry_run,
            replacers,
            self.inbox.node_requests.ask,
            borders.reservations,
        )
        sources = Sources(
            client,
            self.registry,
            SupervisorRoll(),
            self.inbox,
            self._prober,
            self.journal,
            clock,
            state_dir,
            replacers,
            config.replace.timeout,
            borders.reservations,
            bool(config.spares),
            borders.gate.facts,
        )
        self._cycle = Cycle(sources, actor, config, settings)

    def cycle(self) -> str:
        """Do one round; returns its sentence."""
        return self._cycle.run_once()

    def run(self, stop: threading.Event, outflow: Outflow | None = None) -> None:
        """Repeat the cycle until ``stop``: at once when a message came, else every interval.

        Args:
            stop: ends it.
            outflow: sends events out of sresctld; None: they stay in the journal.
        """
        wake, last_gist = self.registry.wake, ""
        self._cycle.stop = stop
        if outflow is not None:
            self._cycle.failing_sinks = outflow.troubles
        while not stop.is_set() and not self._gate.is_deposed:
            wake.clear()
            began, spent = self._clock.monotonic(), _processor_seconds()
            sentence = self.cycle()
            if outflow is not None:
                outflow.cycle_ended(sentence)
            # A second more of silence is no news.
            gist = _NUMBER.sub("", sentence)
            if gist != last_gist:
                log.info("%s", sentence)
                last_gist = gist
            if self._cycle.is_quiet():
                self._adopt_the_date()
            self._retention.look()
            self._pause_between(stop, began, _processor_seconds() - spent)
        with contextlib.suppress(sqlite3.Error):
            # What an administrator said a moment before our end must hold after the next start.
            self._cycle.take_pauses()

    def _adopt_the_date(self) -> None:
        """Take over the machine's date. Where it was set, the journal follows: what lies in the
        future would count until then, and what was an hour ago all at once no more."""
        before, date = self._clock.now(), self._clock.machines()
        if abs(date - before) > DATE_SET_SECONDS:
            window = max(HOUR_SECONDS, self._config.recovery.flap_window)
            try:
                self.journal.follow_date(before, date, window)
            except sqlite3.Error:
                return  # a full disk; the next cycle says so
            way = "on" if date > before else "back"
            log.warning("the machine's date went %s by %.0f s", way, abs(date - before))
        self._clock.adopt()

    def close(self) -> None:
        self._prober.close()
        self.journal.close()

    def _pause_between(self, stop: threading.Event, began: float, cost: float) -> None:
        """Wait for a reason to look: a message, a silence, work in progress, the interval.

        Args:
            stop: ends it.
            began: when the last round began (monotonic).
            cost: processor seconds that it took.
        """
        wake, interval = self.registry.wake, self._config.controller.interval
        while not stop.is_set():
            silences = self._look_for_silence()
            cause = self._cause(silences, began)
            pause = pause_before(cause, interval, cost) - (self._clock.monotonic() - began)
            if pause <= 0:
                return
            # What has woken us is set already, and would end no wait.
            event = stop if cause is RoundCause.WOKEN else wake
            self._clock.wait(event, min(pause, TICK_SECONDS, interval, silences.next_in))

    def _look_for_silence(self) -> Silences:
        """Look for nodes that do not beat, and probe those that have only missed a beat."""
        settings = self._config.detect
        late_after = min(self._config.agent.beat + LATE_SECONDS, settings.silent_after)
        silences = self.registry.silences(late_after, settings.silent_after, NEW_SILENCE_SECONDS)
        # Those that have only missed a beat were heard since then.
        heard_at = self._clock.monotonic() - settings.silent_after
        for name in silences.late[:LATE_AT_ONCE]:
            place = self.inbox.place_of(name)
            if place is not None:
                self._prober.request_early(name, place.address, place.port, heard_at)
        return silences._replace(next_in=max(silences.next_in, LEAST_WAIT_SECONDS))

    def _cause(self, silences: Silences, began: float) -> RoundCause:
        """Return the cause that the next round would have, if it began now."""
        is_news = silences.newest < self._clock.monotonic() - began
        if self.registry.wake.is_set() or is_news:
            return RoundCause.WOKEN
        is_busy = silences.newest < math.inf or self._cycle.is_busy()
        return RoundCause.BUSY if is_busy else RoundCause.QUIET


def _processor_seconds() -> float:
    """Return the processor time of this thread, and of the commands that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_THREAD, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def find_job(client: SlurmClient, job_id: int) -> Job:
    """Read one job from Slurm.

    Raises:
        NotFound: it does not exist, or has ended.
    """
    job = client.job(job_id)
    if job.state in _ENDED:
        raise NotFound(f"job {job_id} has ended")
    return job


@contextlib.contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """Hold the state directory: of two that act, each would start what the other starts.

    Raises:
        SresError: another sresctld holds it, or it cannot be used.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        lock = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise SresError(
            f"the state directory {state_dir} cannot be used: {error.strerror or error}; run "
            "sresctld as the user to whom it belongs (SlurmUser), or name another one "
            "(controller.state_dir)"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise SresError(
            f"another sresctld works in {state_dir}: stop it first (also for --once)"
        ) from None
    finally:
        os.close(lock)


@contextlib.contextmanager
def only_one_of(cluster: str, trusted: frozenset[int]) -> Iterator[None]:
    """Hold the name of a cluster's sresctld on this machine: one with another state directory would
    have the same nodes replaced as well. The kernel gives the name back, however it ends.

    Args:
        cluster: Slurm's name of it.
        trusted: users whose process counts: any user may take a name.

    Raises:
        SresError: another one acts here.
    """
    name = f"\0sresctld/{cluster}"[:MAX_SOCKET_NAME]
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(name)
            held.listen()
        except OSError as error:
            number = _holder_of(name, trusted) if error.errno == errno.EADDRINUSE else 0
            if number:
                raise SresError(
                    f"another sresctld (process {number}) acts for cluster {cluster} on this "
                    "machine, in another state directory: each would have the same nodes replaced; "
                    "stop it first (also for --once), or try this one with --dry-run"
                ) from None
            log.warning("whether another sresctld acts on this machine cannot be told: %s", error)
        yield


def _holder_of(name: str, trusted: frozenset[int]) -> int:
    """Return the process of a trusted user that listens under a name; 0: there is none."""
    with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(OSError):
        asking.setblocking(False)  # its queue may be full
        asking.connect(name)
        found = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        number, uid, _ = _CREDENTIALS.unpack(found)
        return int(number) if uid in trusted else 0
    return 0


def serve(config: Config, *, once: bool, dry_run: bool) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    Raises:
        SresError: another sresctld works in the same state directory, or the configuration names
            what Slurm does not have.
    """
    config = with_each_node(config)
    with only_one(Path(config.controller.state_dir)):
        _serve(config, once=once, dry_run=dry_run)


def _serve(config: Config, *, once: bool, dry_run: bool) -> None:
    _allow_many_connections()
    gc.set_threshold(NEW_OBJECTS)
    info = CliClient(config.slurm_bin).info()
    with contextlib.ExitStack() as held:
        if not dry_run:  # it only looks
            trusted = frozenset({0, os.geteuid(), info.slurm_user_uid})
            held.enter_context(only_one_of(info.cluster, trusted))
        _serve_alone(config, info, once=once, dry_run=dry_run)


def _serve_alone(config: Config, info: ClusterInfo, *, once: bool, dry_run: bool) -> None:
    stop = StopSignal()
    # A dry run only looks, and takes no place.
    pair = None if dry_run else find_pair(config, info, SystemClock())
    if pair is None or once:
        if pair is not None:
            check_once(pair)
        _be_active(config, info, stop, None, once=once, dry_run=dry_run)
        return
    while not stop.event.is_set():
        if pair.stand_by(stop.event):
            try:
                _be_active(config, info, stop, pair.take_over(), once=False, dry_run=False)
            except SresError as error:
                # slurmctld may have changed its place once more: a standby again, it looks anew.
                log.error("this sresctld cannot be the active one: %s", error)


class StopSignal:
    """SIGTERM or SIGINT: they end sresctld, whatever its role is."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.wake: Callable[[], None] | None = None
        """Ends a wait of the active one."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)

    def _end(self, *_: object) -> None:
        self.event.set()
        if self.wake is not None:
            self.wake()


def _be_active(
    config: Config,
    info: ClusterInfo,
    stop: StopSignal,
    terms: Terms | None,
    *,
    once: bool,
    dry_run: bool,
) -> None:
    """Act until ``stop``, or until another sresctld does.

    Args:
        config: sres.toml.
        info: Slurm's settings.
        stop: ends it.
        terms: those of one of two controllers; None: there is only one.
        once: for one round.
        dry_run: decide, and do nothing.
    """
    clock = SystemClock()
    client, reading = choose(CliClient(config.slurm_bin), info)
    nodes = client.nodes()
    _check_journal(config, info.cluster, nodes)
    if terms is None and not dry_run:
        _doubt_journal(config, nodes, clock.now())
    log.info("Slurm is read through %s", reading)
    borders = Borders(reservations=ReservationCommands(config.slurm_bin))
    if terms is not None:
        borders = borders._replace(
            connect=terms.connect, gate=terms.gate, numbers_after=terms.numbers_after
        )
    controller = Controller(config, client, info, clock, dry_run, borders)
    is_alone = terms is None and not dry_run
    if once:
        if is_alone:
            begin_alone(config, info, clock)
        click.echo(controller.cycle())
        controller.close()
        return
    handler: Handler = controller.inbox
    if terms is not None:
        terms.begin_recording()
        handler = terms.desk(handler)
        terms.shipper.start()
    stop.wake = controller.registry.wake.set
    server = Server(
        handler,
        config.controller.port,
        munge_socket=config.wire.munge_socket or info.munge_socket,
        trusted_uids=frozenset({0, info.slurm_user_uid}),
        beats=controller.registry.beaten,
        beat_seconds=config.agent.beat,
    )
    # The nodes' addresses are needed before the first sresd says hello.
    controller.inbox.know(nodes, {})
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
    sinks = {} if dry_run else config.sinks
    outflow = Outflow(sinks, Path(config.controller.state_dir), info.cluster, clock)
    outflow.start()
    try:
        if is_alone:
            # Now that it serves: of two that start at once, at least one sees the other.
            begin_alone(config, info, clock)
        controller.run(stop.event, outflow)
    finally:
        stop.wake = None
        server.stop()
        outflow.stop()
        if terms is not None:
            terms.shipper.stop()
        controller.close()
        log.info("sresctld ends" if stop.event.is_set() else "another sresctld is to act")


def _check_journal(config: Config, cluster: str, nodes: Sequence[Node]) -> None:
    """Compare the journal with the cluster: its name, and the names in `[recovery]` with those that
    Slurm has, or had at an earlier start.

    Raises:
        ConfigError: Slurm never had one of them.
        SresError: the journal is another cluster's.
    """
    file = Path(config.controller.state_dir) / "journal.db"
    with contextlib.closing(Journal(file)) as journal:
        with contextlib.suppress(sqlite3.Error):  # a full disk; the first cycle says so
            journal.claim(cluster)
        checked = check_names(config, nodes, journal.named_modes())
        with contextlib.suppress(sqlite3.Error):
            journal.put_named_modes(checked.names)


def _doubt_journal(config: Config, nodes: Sequence[Node], now: float) -> None:
    """Begin nothing a second time where the journal was lost, or copied from another machine."""
    state_dir = Path(config.controller.state_dir)
    with contextlib.closing(Journal(state_dir / "journal.db")) as journal:
        try:
            with contextlib.suppress(sqlite3.Error):  # a full disk; the first cycle says so
                follow_copied_runs(journal, state_dir, socket.gethostname().partition(".")[0])
            held = hold_forgotten(journal, nodes, now)
        except (sqlite3.Error, OSError) as error:
            raise SresError(f"the state in {state_dir} cannot be written: {error}") from None
    if held:
        log.error(
            "the journal in %s is not the one by which these nodes were set aside: they are left "
            "to a person: %s",
            state_dir,
            fold(held),
        )


def _allow_many_connections() -> None:
    """Raise the limit of file descriptors: each node and each supervisor holds a connection, and
    systemd's default ends at 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@click.command(name="sresctld", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "config_path", metavar="FILE", help=OPTION_HELP)
@click.option("--once", is_flag=True, help="Run one cycle, say in one line what was done, exit.")
@click.option("--dry-run", is_flag=True, help="Decide, say what would be done, and do nothing.")
@click.option(
    "--log-level",
    type=click.Choice(daemon_log.LEVELS),
    default="info",
    show_default=True,
    help="Log this, and what is graver.",
)
@click.version_option(__version__, message="sresctld %(version)s")
def _command(config_path: str | None, once: bool, dry_run: bool, log_level: str) -> None:
    """Watch the cluster's nodes, mark faulty ones, have them replaced, and give them back."""
    daemon_log.set_up(log_level)
    config = load(config_path)
    # Root may look at what the daemon keeps as SlurmUser (--once --dry-run).
    slurm_user = {CliClient(config.slurm_bin).info().slurm_user_uid} if not os.geteuid() else ()
    refuse_forged_controller(config, chosen_file(config_path), frozenset(slurm_user))
    serve(config, once=once, dry_run=dry_run)


def main() -> None:
    """Run the console script."""
    keep_exit_codes()
    try:
        _command(standalone_mode=False)
    except click.ClickException as error:
        text = f"{error.format_message()} (see `sresctld --help`)"
        print(f"sresctld: error: {text}", file=sys.stderr)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except SresError as error:
        print(f"sresctld: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (sqlite3.Error, msgspec.DecodeError) as error:
        # Damaged, or written by a release that knows more.
        print(
            f"sresctld: error: the journal cannot be read: {error}; bring back a copy of "
            "journal.db, or move it away: nodes that it had in hand are then left to a person",
            file=sys.stderr,
        )
        sys.exit(SresError.exit_code)


if __name__ == "__main__":
    main()
