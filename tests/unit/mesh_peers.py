"""Several meshes in one process, over loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience.mesh.connection import PeerConnection
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import Peer, PeerStatus, View
from slurm_resilience.mesh.protocol.contacts import ConnectionState
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import Rendezvous, SharedDirectory

LIMIT = 20.0
"""Seconds in which everything here must happen, on a busy machine too."""


def until(true: Callable[[], Any], what: str) -> None:
    """Wait for a state, with a deadline."""
    deadline = time.monotonic() + LIMIT
    tick = threading.Event()
    while not true():
        assert time.monotonic() < deadline, f"not within {LIMIT:g} s: {what}"
        tick.wait(0.005)


def unsettled(mesh: Mesh) -> list[PeerConnection]:
    """Connections that have not proven themselves, or do not count any more."""
    with mesh._lock:
        state = mesh._membership.side.contacts.state
        return [
            connection
            for connection in mesh._transport.connections.values()
            if state(connection.number) is not ConnectionState.CURRENT
        ]


def retime(mesh: Mesh, **seconds: float) -> None:
    """Change times of the protocol for a mesh that runs."""
    with mesh._lock:
        membership = mesh._membership
        membership.side.timing = msgspec.structs.replace(membership.side.timing, **seconds)
    mesh._transport.ring()


class Crew:
    """Meshes that belong to one training."""

    def __init__(self, place: Path, rules: WorldRules) -> None:
        self.place = place
        self.rules = rules
        self.all: list[Mesh] = []

    def add(
        self,
        seat: int,
        incarnation: int = 0,
        meeting: Rendezvous | None = None,
        host: str = "127.0.0.1",
        **more: Any,
    ) -> Mesh:
        peer = Peer(
            id=f"peer-{seat}.{incarnation}",
            seat=seat,
            incarnation=incarnation,
            node=f"node{seat}",
            host=host,
        )
        mesh = Mesh(meeting or SharedDirectory(self.place), peer, self.rules, **more)
        self.all.append(mesh)
        mesh.start()
        mesh.say(PeerStatus())
        return mesh

    def several(self, count: int) -> list[Mesh]:
        return [self.add(seat) for seat in range(count)]


@contextmanager
def crew(place: Path, seats: int, min_world: int = 1, **rules: Any) -> Iterator[Crew]:
    made = Crew(place, WorldRules(seats, min_world, **rules))
    try:
        yield made
    finally:
        for mesh in made.all:
            mesh.close()


def meet(meshes: list[Mesh]) -> list[View | None]:
    """All wait at once; what each got."""
    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(lambda mesh: mesh.meet(LIMIT), meshes))


def world(meshes: list[Mesh], size: int | None = None) -> View:
    """All meet, and go into their block."""
    views = meet(meshes)
    assert len(set(views)) == 1, views
    view = views[0]
    assert view is not None
    assert view.size == (len(meshes) if size is None else size)
    for mesh in meshes:
        mesh.say(PeerStatus("running", view.generation, 0))
        mesh.worked(view)
    everybody_reached(meshes, view)
    return view


def everybody_reached(meshes: list[Mesh], view: View) -> None:
    """Links of a new generation may still be shaking hands."""
    members = [mesh for mesh in meshes if view.rank_of(mesh.me.id) >= 0]
    until(
        lambda: all(
            {m.me.id for m in members} - {mesh.me.id} <= set(mesh.beats()) for mesh in members
        ),
        "every member has reached every other",
    )


def leave(meshes: list[Mesh], view: View, phase: Any = "ready", step: int = 1) -> None:
    for mesh in meshes:
        mesh.say(PeerStatus(phase, view.generation, step))
