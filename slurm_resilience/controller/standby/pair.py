"""Two controllers: one sresctld acts, and the other one follows it, in turns."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.sinks.outflow import place_sinks
from slurm_resilience.controller.standby import waiting
from slurm_resilience.controller.standby.act_gate import PairGate
from slurm_resilience.controller.standby.desks import (
    ActiveDesk,
    StandbyDesk,
    StandbyPermit,
    addresses_of,
    is_this_machine,
)
from slurm_resilience.controller.standby.follower import JournalFile
from slurm_resilience.controller.standby.inheritance import (
    hold_possibly_begun,
    skip_numbers,
    skipped_numbers,
    take_over_runs,
)
from slurm_resilience.controller.standby.pair_states import Takeover, judge_takeover, next_history
from slurm_resilience.controller.standby.primacy import Primacy
from slurm_resilience.controller.standby.recorded_connection import (
    RecordedConnection,
    begin_history,
    history_of,
    open_recorded,
    position_of,
)
from slurm_resilience.controller.standby.shipper import Shipper
from slurm_resilience.errors import SresError
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.client import ClusterInfo
from slurm_resilience.slurm.controllers import (
    ControllerHost,
    controller_hosts,
    own_host,
    renumbered,
    write_conf_of_one,
)
from slurm_resilience.slurm.hostlists import fold
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.server import Handler, Server

log = logging.getLogger("sresctld.standby")

CONNECT_SECONDS = 2.0
MACHINES = 2
"""A pair has so many."""
DEFAULT_CONF = "/etc/slurm/slurm.conf"


class Terms(NamedTuple):
    """The means with which the active sresctld of a pair works."""

    gate: PairGate
    shipper: Shipper
    connect: Callable[[Path | str], sqlite3.Connection]
    """Opens the journal's database, whose writes can be told."""
    begin_recording: Callable[[], None]
    """Called before the first round, when the journal is open."""
    numbers_after: int
    """No new incident gets this id or a lower one."""
    desk: Callable[[Handler], Handler]
    """Puts the standby's messages before the handler of all others."""


class Pair:
    """This machine's place in the pair."""

    def __init__(
        self, config: Config, info: ClusterInfo, host: ControllerHost, clock: Clock
    ) -> None:
        """
        Args:
            config: sres.toml.
            info: Slurm's settings.
            host: this machine.
            clock: the machine's.
        """
        self._config = config
        self._info = info
        self._host = host
        self._clock = clock
        both = controller_hosts(info)[:MACHINES]
        self._others = tuple(one for one in both if one.name != host.name)
        self._state_dir = Path(config.controller.state_dir)
        self._journal = self._state_dir / "journal.db"
        self._primacy = Primacy(host, info, clock)
        self._trusted_uids = frozenset({0, info.slurm_user_uid})
        self._munge_socket = config.wire.munge_socket or info.munge_socket
        self._permit = StandbyPermit(self._others, self._trusted_uids)
        self._client = CliClient(config.slurm_bin)
        self._handed_over_by = ""
        named = os.environ.get("SLURM_CONF") or info.raw.get("SLURM_CONF")
        self._slurm_conf = Path(named or DEFAULT_CONF)

    def _ask_own_slurmctld_alone(self) -> None:
        """Have every command of this process, and of its children, ask this machine's slurmctld.

        One in standby refuses them: so no act of a sresctld that has lost its place reaches Slurm.
        """
        target = self._state_dir / "slurm.conf"
        write_conf_of_one(self._slurm_conf, self._info.cluster, self._host, target)
        os.environ["SLURM_CONF"] = str(target)

    def check_control(self) -> None:
        """Check that this machine's slurmctld is in control.

        Raises:
            SresError: it is not, or that cannot be told.
        """
        self._primacy.host = renumbered(self._primacy.host, self._slurm_conf)
        self._primacy.check_control()
        self._client.info()

    def stand_by(self, stop: threading.Event) -> bool:
        """Follow the active sresctld until this one may take its place; False: ``stop`` was set."""
        self._ask_own_slurmctld_alone()
        journal = JournalFile(self._journal)
        desk = StandbyDesk(self._host.name, self._journal, self._permit)
        server = Server(
            desk,
            self._config.controller.port,
            munge_socket=self._munge_socket,
            trusted_uids=self._trusted_uids,
        )
        server.start()
        log.info("sresctld on %s is a standby", self._host.name)
        borders = waiting.StandbyBorders(self._dial, self.check_control, self._clock)
        standby = waiting.Standby(journal, self._others, borders)
        try:
            return standby.wait(stop)
        finally:
            self._handed_over_by = standby.handed_over_by
            server.stop()
            journal.close()

    def take_over(self) -> Terms:
        """Become the active sresctld.

        Raises:
            SresError: it cannot be; nothing was changed that matters to another one.
        """
        marker = self._primacy.read_marker()
        nodes = self._client.nodes()
        now = self._clock.now()
        opened = list[sqlite3.Connection]()

        def connect(path: Path | str) -> sqlite3.Connection:
            opened.append(open_recorded(path))
            return opened[-1]

        with contextlib.closing(Journal(self._journal, connect)) as journal:
            db = opened[-1]
            known = history_of(db)
            takeover = judge_takeover(self._host.name, known, marker, self._handed_over_by)
            doubt = ""
            if marker is not None and marker.host != self._host.name:
                place_sinks(self._state_dir, self._config.sinks, journal.newest_event())
            take_over_runs(journal, self._state_dir, self._host.name, marker)
            if not takeover.is_whole:
                held = hold_possibly_begun(journal, nodes, takeover, now)
                skip_numbers(journal, db)
                doubt = _doubt(takeover, held)
            text = doubt or takeover.text
            journal.event(now, "takeover", f"sresctld on {self._host.name} is active: {text}")
            history = next_history(self._host.name, known, marker.history if marker else "")
            # From here on every other sresctld sees that it is not the active one.
            self._primacy.write_marker(history, "")
            begin_history(db, history)
            position, numbers_after = position_of(db), skipped_numbers(db)
        log.warning("sresctld on %s is active now: %s", self._host.name, text)
        shipper = Shipper(
            self._host.name,
            history,
            self._journal,
            position,
            self._primacy.write_marker,
            self._clock,
        )
        gate = PairGate(self._primacy, history, shipper, doubt)

        def begin_recording() -> None:
            db = opened[-1]
            assert isinstance(db, RecordedConnection)
            db.begin_with(shipper.committed)

        return Terms(
            gate,
            shipper,
            connect,
            begin_recording,
            numbers_after,
            lambda inbox: ActiveDesk(inbox, shipper, self._permit),
        )

    def _dial(self, host: ControllerHost) -> Connection:
        return Connection.open(
            host.address,
            self._config.controller.port,
            "standby",
            self._host.name,
            munge_socket=self._munge_socket,
            trusted_uids=self._trusted_uids,
            timeout=CONNECT_SECONDS,
        )


def find_pair(config: Config, info: ClusterInfo, clock: Clock) -> Pair | None:
    """Return this machine's place among several controllers; None: sresctld has no standby here,
    since Slurm has no backup, or the configuration names one machine for sresctld.

    Raises:
        SresError: this is a third controller.
    """
    hosts = controller_hosts(info)
    own = own_host(hosts)
    if len(hosts) < MACHINES or own is None or len(config.controller.hosts) == 1:
        return None
    if own.number >= MACHINES:
        raise SresError(
            f"sresctld runs on the first two SlurmctldHosts ({hosts[0].name}, {hosts[1].name}), "
            f"not on {own.name}; or name its one machine in controller.host"
        )
    return Pair(config, info, own, clock)


def begin_alone(config: Config, info: ClusterInfo, clock: Clock) -> None:
    """Begin to act without a partner. What is done so is in no record: where the journal was ever
    shared, each other copy of it is out of date from now on, and the marker says so.

    Args:
        config: sres.toml.
        info: Slurm's settings.
        clock: the machine's.

    Raises:
        SresError: another sresctld acts, or the marker cannot be written.
    """
    check_alone(config, info)
    db = sqlite3.connect(Path(config.controller.state_dir) / "journal.db", isolation_level=None)
    with contextlib.closing(db):
        known = history_of(db)
        if not known:
            return
        host = own_host(controller_hosts(info)) or ControllerHost(-1, socket.gethostname(), "")
        primacy = Primacy(host, info, clock)
        marker = primacy.read_marker()
        history = next_history(host.name, known, marker.history if marker else "")
        primacy.write_marker(history, "")
        begin_history(db, history)


def check_alone(config: Config, info: ClusterInfo) -> None:
    """Check, for a sresctld without a partner, that it is the only one: two of them would each have
    the same nodes replaced.

    Args:
        config: sres.toml.
        info: Slurm's settings.

    Raises:
        SresError: it is to run on another machine, or runs there too.
    """
    hosts = controller_hosts(info)
    own = own_host(hosts)
    others = tuple(host for host in hosts if host != own)
    named = config.controller.hosts
    is_ours = bool(named) and own is not None and own_host((own,), named[0]) is not None
    other = _meant(named[0], others) if len(named) == 1 and not is_ours else None
    if len(hosts) >= MACHINES and other is not None:
        raise SresError(
            f"controller.host names {other.name} alone, and this machine is "
            f"{own.name if own is not None else socket.gethostname()}: sresctld runs there; for "
            "a standby name both machines, the same in both files"
        )
    # Where nodes and people look for sresctld, and where else it may run.
    places = {name: name for name in named} or {host.address: host.name for host in hosts}
    own_address = own.address if own is not None else ""
    others_at = {host.address: host.name for host in others} | {
        address: name
        for address, name in places.items()
        if address != own_address and not is_this_machine(address)
    }
    for address, name in others_at.items():
        if _is_served(address, config, info):
            raise SresError(
                f"sresctld on {name} acts already: of two that know nothing of each other "
                "each would have the same nodes replaced; give both machines the same "
                "controller.host"
            )
    if places and own is None and places.keys() <= others_at.keys():
        raise SresError(
            f"nodes and people look for sresctld on {', '.join(places.values())}, and this machine "
            f"is {socket.gethostname()}: start it there, or name this machine in controller.host, "
            "the same in every sres.toml (to try it here: --dry-run)"
        )


def _meant(name: str, hosts: Collection[ControllerHost]) -> ControllerHost | None:
    """Return the machine that a name or an address stands for; None: none of them."""
    short = name.partition(".")[0]
    by_name = (host for host in hosts if short == host.name.partition(".")[0])
    by_address = (host for host in hosts if addresses_of(name) & addresses_of(host.address))
    return next(by_name, None) or next(by_address, None)


def _is_served(address: str, config: Config, info: ClusterInfo) -> bool:
    """Tell whether the sresctld of another machine answers nodes and people."""
    try:
        Connection.open(
            address,
            config.controller.port,
            "query",
            munge_socket=config.wire.munge_socket or info.munge_socket,
            trusted_uids=frozenset({0, info.slurm_user_uid}),
            timeout=CONNECT_SECONDS,
        ).close()
    except SresError:
        return False
    return True


def check_once(pair: Pair) -> None:
    """Check that one round may be done by hand on this machine.

    Raises:
        SresError: it may not.
    """
    try:
        pair.check_control()
    except SresError as error:
        raise SresError(f"one round is done where slurmctld is in control: {error}") from None


def _doubt(takeover: Takeover, held: tuple[str, ...]) -> str:
    names = f"left to a person: {fold(held)}" if held else "no node is out of service by request"
    return (
        f"taken over with a journal that may lack something ({takeover.text}); replacements may "
        f"have been begun of which it does not know; {names}"
    )
