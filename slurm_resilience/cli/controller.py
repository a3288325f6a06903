"""Give commands the configuration, Slurm, and sresctld over the wire."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import click

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import NotFound, SlurmError, SlurmUnreachable, SresError, WireError

if TYPE_CHECKING:
    from msgspec import Raw, Struct

    from slurm_resilience.config import Config
    from slurm_resilience.model import Node
    from slurm_resilience.slurm.client import ClusterInfo, SlurmClient
    from slurm_resilience.wire.client import Connection
    from slurm_resilience.wire.messages import Message, ResizeTaken, Status

OPEN_TIMEOUT_SECONDS = 3.0
"""Seconds for a connection to sresctld, at each of its possible addresses."""

REMOVED = "REMOVED"
"""The base state of a node that Slurm knows no more."""
MOST_REMOVED = 100
"""Nodes for which the journal is asked one by one: a mistyped list may have thousands."""
RESIZE_SECONDS = 8.0
"""For the answer of a job's supervisor, through sresctld."""


class ClusterView:
    """click's ``ctx.obj``: what the commands work on. Each part is made when first used."""

    def __init__(self) -> None:
        self.config_path: str | None = None

    @functools.cached_property
    def config(self) -> Config:
        from slurm_resilience.config import load

        return load(self.config_path)

    @functools.cached_property
    def usable_config(self) -> Config:
        """The usable part of the configuration: enough to ask Slurm and sresctld."""
        from slurm_resilience.cli.tables import tell
        from slurm_resilience.config import load_usable

        config, trouble = load_usable(self.config_path)
        if trouble:
            tell(f"sres: warning: {trouble}; what cannot be used of the file is left out here")
        return config

    @functools.cached_property
    def client(self) -> SlurmClient:
        from slurm_resilience.slurm.cli import CliClient

        return CliClient(self.usable_config.slurm_bin)

    @functools.cached_property
    def info(self) -> ClusterInfo:
        return self.client.info()

    @property
    def uid(self) -> int:
        """The caller's user id."""
        return os.geteuid()

    @property
    def is_privileged(self) -> bool:
        """The caller is root or SlurmUser, and sees all jobs."""
        return self.uid in (0, self.info.slurm_user_uid)

    def nodes(self) -> dict[str, Node]:
        """Return all nodes by name, as Slurm shows them now."""
        return {node.name: node for node in self.client.nodes()}

    def named(self, hostlist: str) -> dict[str, Node]:
        """Return the nodes of a hostlist, in its order.

        Raises:
            UsageError: not a hostlist.
            NotFound: some of them do not exist; all of those are named.
        """
        from slurm_resilience.slurm.hostlists import expand

        names, known = expand(hostlist), self.nodes()
        _check_known(names, known)
        return {name: known[name] for name in names}

    def named_or_removed(self, hostlist: str) -> dict[str, Node]:
        """Return the nodes of a hostlist, in its order: those too that Slurm knows no more, as far
        as the journal tells of them. Such a node's base state is REMOVED.

        Raises:
            UsageError: not a hostlist.
            NotFound: some of them are not known; all of those are named.
        """
        from slurm_resilience.model import Node
        from slurm_resilience.slurm.hostlists import expand

        names, known = expand(hostlist), self.nodes()
        unknown = [name for name in names if name not in known]
        removed = {name: Node(name, REMOVED) for name in self._in_journal(unknown)}
        _check_known(names, known | removed)
        return {name: known.get(name) or removed[name] for name in names}

    def _in_journal(self, names: list[str]) -> list[str]:
        """Return those nodes of which sresctld's journal tells."""
        from slurm_resilience.wire.messages import StatusRequest

        if not 0 < len(names) <= MOST_REMOVED:
            return []
        try:
            with self.connect() as connection:
                questions = {name: StatusRequest("history", name, 1) for name in names}
                return [name for name, one in questions.items() if ask(connection, one)["events"]]
        except SresError:
            return []  # the nodes are not known, which is then said

    def connect(self) -> Connection:
        """Open an authenticated connection to sresctld; the caller closes it.

        Raises:
            WireError: it answers at none of its addresses.
            AuthError: munge authentication failed.
        """
        from slurm_resilience.wire.client import Connection

        config, info = self.usable_config, self.settings()
        failed = WireError("sresctld does not answer: Slurm names no controller")
        # It runs where slurmctld is primary: after a take-over that is another of them.
        for host in config.controller.hosts or info.controllers:
            try:
                return Connection.open(
                    host,
                    config.controller.port,
                    "query",
                    munge_socket=config.wire.munge_socket or info.munge_socket,
                    trusted_uids=frozenset({0, info.slurm_user_uid}),
                    timeout=OPEN_TIMEOUT_SECONDS,
                )
            except WireError as error:
                failed = error
        raise failed

    def settings(self) -> ClusterInfo:
        """Return Slurm's settings, from slurm.conf on this machine while slurmctld is away: that is
        when an administrator wants to pause sresctld, or to read what it did."""
        try:
            return self.info
        except SlurmUnreachable as error:
            from slurm_resilience.slurm.conf_file import settings_of_file

            try:
                return settings_of_file()
            except SlurmUnreachable:
                raise error from None

    def ask(self, message: Message) -> dict[str, Any]:
        """Ask sresctld one thing; return the answer's data."""
        with self.connect() as connection:
            return ask(connection, message)

    def status(self) -> dict[str, Any]:
        """Return what sresctld's last cycle found.

        Raises:
            WireError: it does not answer, or has not finished a cycle yet.
        """
        with self.connect() as connection:
            data = whole_status(connection)
        if not data:
            raise WireError(
                "sresctld answers, but has not finished a cycle yet; ask again in a few seconds, "
                "and read its log if that does not help"
            )
        return data

    def try_status(self) -> tuple[dict[str, Any] | None, SresError | None]:
        """Return `status`, or the reason for its absence, for commands that work without it."""
        try:
            return self.status(), None
        except SlurmError:
            raise
        except SresError as error:
            return None, error

    def ask_node(self, node: str, kind: str, question: Struct, seconds: float) -> Raw:
        """Have sresctld ask a node's sresd; return the packed answer.

        Raises:
            SresError: there is none, and why.
        """
        import msgspec

        from slurm_resilience.wire.messages import NodeAnswer, NodeQuestion

        body = msgspec.Raw(msgspec.msgpack.encode(question))
        with self.connect() as connection:
            answer = connection.ask(
                NodeQuestion(node, kind, body, seconds), seconds + OPEN_TIMEOUT_SECONDS
            )
        if not isinstance(answer, NodeAnswer):
            raise WireError(f"sresctld answered a {type(answer).__name__}")
        if answer.refused:
            raise SresError(answer.refused)
        return answer.body

    def resize(self, job: int, nodes: int) -> ResizeTaken:
        """Have sresctld tell a job's supervisor how many nodes its step is to have.

        Raises:
            SresError: it is refused, and why.
        """
        import msgspec

        from slurm_resilience.cli.tables import plain
        from slurm_resilience.wire.messages import NodeAnswer, ResizeRequest, ResizeTaken

        with self.connect() as connection:
            answer = connection.ask(ResizeRequest(job, nodes), RESIZE_SECONDS)
        if not isinstance(answer, NodeAnswer):
            raise WireError(f"sresctld answered a {type(answer).__name__}")
        if answer.refused:
            raise SresError(f"job {job} is not resized: {plain(answer.refused)}")
        try:
            return msgspec.msgpack.decode(answer.body, type=ResizeTaken)
        except msgspec.DecodeError as error:
            # Any user's program may speak for his job.
            raise WireError(f"job {job}: no answer of a supervisor: {plain(error)}") from None

    def history(self, node: str = "", limit: int = 1000) -> list[dict[str, Any]]:
        """Return events of the journal, oldest first."""
        from slurm_resilience.wire.messages import StatusRequest

        events: list[dict[str, Any]] = self.ask(StatusRequest("history", node, limit))["events"]
        return events[::-1]


def _check_known(names: Collection[str], known: Mapping[str, Node]) -> None:
    """Raise a NotFound that names the nodes which are not known."""
    from slurm_resilience.slurm.hostlists import fold

    unknown = [name for name in names if name not in known]
    if unknown:
        has = fold(name for name, node in known.items() if node.base != REMOVED)
        raise NotFound(f"Slurm knows no node {fold(unknown)}; it has {has}")


def moment_of(status: Mapping[str, Any] | None) -> float:
    """Return the present moment (epoch) by sresctld's own clock, as its status tells it: ages and
    what comes next are timed by that. The date here may be another one, and sresctld's goes on as
    it was where its machine's date is set.

    Args:
        status: sresctld's; None: it did not answer, and the date of this machine counts.
    """
    if status is None or "at" not in status or "age" not in status:
        return SYSTEM_CLOCK.now()
    return float(status["at"]) + float(status["age"])


def whole_status(connection: Connection) -> dict[str, Any]:
    """Ask for all pages of the status, over an open connection."""
    from slurm_resilience.wire.messages import StatusRequest

    page = ask_page(connection, StatusRequest("status"))
    data = page.data
    while page.next:
        page = ask_page(connection, StatusRequest("status", after=page.next))
        for name, entries in page.data.items():
            data[name].update(entries)
    return data


def ask(connection: Connection, message: Message) -> dict[str, Any]:
    """Ask over an open connection.

    Raises:
        WireError: the answer is not a status.
        SresError: the request was refused.
    """
    return ask_page(connection, message).data


def ask_page(connection: Connection, message: Message) -> Status:
    """Ask for a page over an open connection; raises what `ask` raises."""
    from slurm_resilience.wire.messages import Status

    answer = connection.ask(message)
    if not isinstance(answer, Status):
        raise WireError(f"sresctld answered a {type(answer).__name__}; is it of the same version?")
    return answer


pass_cluster = click.make_pass_decorator(ClusterView, ensure=True)
