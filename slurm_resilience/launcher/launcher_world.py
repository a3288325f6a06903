"""The launchers of a program's nodes as one world of the mesh: a generation is one attempt.

torch's process groups span the nodes, so when one node has to start its ranks again, all have to,
and none before the last rank of the old attempt has ended everywhere: else new ranks would meet old
ones. That is what a generation of the mesh is. It ends for all when one says so or is lost, and the
next one is formed when every launcher is there and ready, a new one on an exchanged node too.

The mesh is used from a thread of its own; news come back into the launcher's event loop.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NamedTuple

from slurm_resilience.errors import SresError, WireError
from slurm_resilience.mesh.mesh import Mesh, Stopped
from slurm_resilience.mesh.model import GenerationEnd, Peer, PeerStatus, View
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import Rendezvous

MEET_SECONDS = 600.0
"""Seconds to wait for the other nodes, as torchrun does."""
DONE_SECONDS = 300.0
"""The same for nodes whose ranks are not done yet when ours are: torchrun's exit barrier."""
_SPARE_SECONDS = 60.0
"""Added to the time in which a node has to end its ranks."""
_TOLD_SECONDS = 10.0
"""In which each launcher of a new world has told how many ranks its node has."""
_FAILS = "fails."
"""Begins the name of a key by which a launcher warns the others."""
_SILENCE_SECONDS = 30.0
"""Without a word after which a node is taken for lost. A closed connection is known at once."""


class WorldNews(NamedTuple):
    """Functions that are called in the event loop."""

    on_begin: Callable[[bool], None]
    """Every launcher is there. True: for the first time, whatever ranks run; else none has a rank
    of an earlier attempt."""
    on_over: Callable[[GenerationEnd], None]
    """The attempt is over by another node's word: end the ranks, and say `ready`."""
    on_done: Callable[[], None]
    """The ranks of all nodes are done."""
    on_failed: Callable[[str, bool], None]
    """There will be no more attempts. True: here; the other nodes go on, or wait for another
    launcher."""


class _Order(NamedTuple):
    phase: Literal["ready", "done"]
    generation: int
    """The one that it is said about; 0: none has begun yet."""


class LauncherWorld:
    """This launcher among the others.

    Args:
        loop: the launcher's event loop.
        rendezvous: the place where the launchers find each other, and only they.
        me: this launcher; its seat is the node rank.
        ranks: on this node.
        grace: seconds that a node needs to end its ranks.
        news: the answers to what happens.

    Raises:
        SresError: the rendezvous cannot be used.
        OSError: no port can be listened on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rendezvous: Rendezvous,
        me: Peer,
        ranks: int,
        grace: float,
        news: WorldNews,
    ) -> None:
        self._loop = loop
        self._news = news
        self._rendezvous = rendezvous
        self._me = me
        self._ranks = ranks
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._view: View | None = None
        self._told = 0
        """The generation whose end was told."""
        self._mesh = Mesh(
            rendezvous,
            me,
            WorldRules(me.seats, me.seats, start_patience=MEET_SECONDS),
            abort_timeout=grace + _SPARE_SECONDS,
            silence=_SILENCE_SECONDS,
            on_end=self._ended,
        )
        self._thread = threading.Thread(target=self._run, name="launchers", daemon=True)

    @property
    def has_met(self) -> bool:
        """True: all launchers were there once."""
        return self._view is not None

    @property
    def moved_master(self) -> str:
        """Address of node rank 0, if a later launcher took the place of the first; else empty."""
        members = () if self._view is None else self._view.members
        first = [member.peer for member in members if member.peer.seat == 0]
        return first[0].host if first and first[0].incarnation else ""

    def start(self) -> None:
        """Meet the others."""
        self._mesh.start()
        self._thread.start()

    def over(self, reason: str) -> None:
        """End the attempt on all nodes. Nothing to end: the next one has not begun."""
        view = self._view
        if view is not None:
            self._mesh.over(GenerationEnd(view.generation, reason, self._me.id))

    def warn(self, reason: str) -> None:
        """Tell the other launchers that a rank here says that it fails: what fails on their nodes
        from now on may follow it."""
        view = self._view
        if view is not None:
            self._mesh.put(view.generation, f"{_FAILS}{self._me.seat}", reason.encode())

    @property
    def is_warned(self) -> bool:
        """True: a rank of another node has said in this attempt that it fails."""
        known = () if self._view is None else self._mesh.known(self._view.generation)
        others = {key for key in known if key.startswith(_FAILS)} - {f"{_FAILS}{self._me.seat}"}
        return bool(others)

    def ready(self) -> None:
        """Say that no rank of the old attempt lives here."""
        self._orders.put(_Order("ready", self._generation))

    def done(self) -> None:
        """Say that all ranks here are done."""
        self._orders.put(_Order("done", self._generation))

    def stop(self, reason: str, code: int) -> None:
        """End the program on all nodes; the supervisor is told, so that it brings none back."""
        self._rendezvous.outcome(code, -1, reason)
        self._mesh.stop(GenerationEnd(self._generation, reason, self._me.id, "stop"))

    def close(self) -> None:
        """Leave the others."""
        self._mesh.close()

    @property
    def _generation(self) -> int:
        return 0 if self._view is None else self._view.generation

    def _next_order(self) -> Literal["ready", "done"]:
        """Wait for an order of the present attempt, or one from before the first."""
        while True:
            order = self._orders.get()
            if order.generation in (0, self._generation):
                return order.phase

    def _tell(self, function: Callable[..., None], *given: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the launcher has ended
            self._loop.call_soon_threadsafe(function, *given)

    def _ended(self, end: GenerationEnd) -> None:
        if self._told == end.generation:
            return
        self._told = end.generation
        if (end.culprit, end.kind) != (self._me.id, "fault"):  # said here, by `over`
            self._tell(self._news.on_over, end)

    def _unlike(self, view: View) -> str:
        """Say which nodes have another number of ranks than this one; empty: none has, or it is not
        known of all."""
        number = view.generation
        self._mesh.put(number, f"ranks.{self._me.seat}", str(self._ranks).encode())
        peers = [member.peer for member in view.members]
        keys = [f"ranks.{peer.seat}" for peer in peers]
        try:
            told = [int(value) for value in self._mesh.get(number, keys, _TOLD_SECONDS)]
        except (TimeoutError, WireError):
            return ""
        others = [
            f"{peer.node} {ranks}"
            for peer, ranks in zip(peers, told, strict=True)
            if ranks != self._ranks
        ]
        if not others:
            return ""
        return (
            f"{self._me.node} was started for {self._ranks} rank(s), {', '.join(others)}: start "
            "all nodes with the same --nproc-per-node"
        )

    def _who_is_missing(self) -> str:
        _, present, _ = self._mesh.picture()
        ranks = set(range(self._me.seats)) - {member.peer.seat for member in present}
        missing = ", ".join(map(str, sorted(ranks))) or "none"
        return (
            f"not all of the {self._me.seats} nodes came within {MEET_SECONDS:g} s (missing node "
            f"ranks: {missing}): start sres-run on each, with the same program"
        )

    def _run(self) -> None:
        phase: Literal["ready", "done"] = "ready"
        try:
            while True:
                self._mesh.say(PeerStatus(phase, self._generation))
                view = self._mesh.meet(MEET_SECONDS if phase == "ready" else DONE_SECONDS)
                if view is None:
                    self._rendezvous.outcome(0, -1, "")
                    self._tell(self._news.on_done)
                    return
                is_first, self._view = self._view is None, view
                self._mesh.say(PeerStatus("running", view.generation))
                self._mesh.worked(view)
                unlike = self._unlike(view)
                if unlike and is_first:
                    self._tell(self._news.on_failed, unlike, False)
                    return
                if unlike:  # one came later: it leaves again
                    phase = "ready"
                    continue
                self._tell(self._news.on_begin, is_first)
                phase = self._next_order()
        except TimeoutError:
            if phase == "done":
                self._tell(self._news.on_done)
            else:
                self._tell(self._news.on_failed, self._who_is_missing(), False)
        except (Stopped, WireError, SresError) as error:
            self._tell(self._news.on_failed, str(error), bool(self._mesh.evicted))
