"""Tell whether torch may go on with the layouts that it worked out in the worlds before.

torch keeps what each operation on DTensors gives, by the layouts of what goes in, and to work that
out anew takes seconds with a large model: 2.5 s for one AdamW step over 288 parameters. A device
mesh of a new world counts as equal to one of the world before if it lists the same ranks, so what
was kept would go on with the old one: with its place of this process, and its groups, by their
names. That is right where the new one has the very same. So the meshes of a world are compared with
those of the world before, in the order in which the program makes them; at the first that differs
torch forgets all.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from slurm_resilience.training import compat


class MadeMesh(NamedTuple):
    """A device mesh that torch may have kept."""

    world: int
    mesh: weakref.ref[Any]


class DeviceMeshes:
    """The device meshes of this process's worlds, in the order in which a world makes them."""

    def __init__(self) -> None:
        self._world = 0
        self._places: list[compat.MeshPlace] = []
        """Made since torch forgot, by this world or by those before."""
        self._next = 0
        """The number of those that this world has made."""
        self._made: dict[compat.MeshPlace, list[MadeMesh]] = {}
        """By place."""
        self._is_doubtful = False
        """This world has made one that cannot be compared, or several that torch takes for one."""
        self._watched = False

    def watch(self) -> None:
        """See each device mesh that this process makes from now on."""
        if not self._watched:
            compat.watch_device_meshes(self.made)
            self._watched = True

    def world_begins(self) -> None:
        """Note that what is made from now on belongs to another world."""
        if self._is_doubtful:
            self._forget()
        lives = {
            place: [one for one in made if one.mesh() is not None]
            for place, made in self._made.items()
        }
        self._made = {place: made for place, made in lives.items() if made}
        self._world += 1
        self._next, self._is_doubtful = 0, False

    def made(self, mesh: Any) -> None:
        """Note that this process has made a device mesh, before it is used."""
        place = compat.mesh_place(mesh)
        if place is None:
            self._forget()
            self._is_doubtful = True
            return
        if self._next < len(self._places) and place != self._places[self._next]:
            self._forget()
        if self._next == len(self._places):
            self._places.append(place)
        if any(other.key == place.key and other != place for other in self._places):
            self._is_doubtful = True
        self._next += 1
        self._take_over(mesh, place)

    def _forget(self) -> None:
        """Have torch work out all anew. What this world has made so far stays in use."""
        compat.forget_layouts()
        del self._places[self._next :]

    def _take_over(self, mesh: Any, place: compat.MeshPlace) -> None:
        """Give those that torch may have kept the groups of the new one: theirs are dead."""
        for one in self._made.get(place, ()):
            old = one.mesh()
            if old is not None and one.world != self._world:
                compat.take_groups(old, mesh)
        self._made.setdefault(place, []).append(MadeMesh(self._world, weakref.ref(mesh)))


DEVICE_MESHES = DeviceMeshes()
"""The ones that this process makes."""
