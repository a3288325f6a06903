"""Keys of the store, as one member holds them, and the order of their changes. Pure."""

from __future__ import annotations

import zlib

from slurm_resilience.mesh.messages import KeyChange, KeyPut
from slurm_resilience.mesh.model import View


def home_of(key: str, view: View) -> str:
    """Id of the one member that orders all changes of a key."""
    return view.members[zlib.crc32(key.encode()) % view.size].peer.id


def changed_value(old: bytes | None, change: KeyChange) -> bytes | None:
    """Return the value that a change makes; None: it adds to something that is no number."""
    if change.desired is not None:
        free = old is None and not change.expected
        return change.desired if free or old == change.expected else old or b""
    if change.append is not None:
        return (old or b"") + change.append
    try:
        return str(int(old or b"0") + change.add).encode()
    except ValueError:
        return None


class KeyTable:
    """Every key of every generation that is still of use."""

    def __init__(self) -> None:
        self._keys: dict[int, dict[str, bytes]] = {}
        self._own: dict[str, KeyPut] = {}
        """Keys that this process set in the newest generation, for members reached later."""

    def of(self, generation: int) -> dict[str, bytes]:
        """Return the keys of a generation that are here now."""
        return self._keys.setdefault(generation, {})

    def known(self, generation: int) -> dict[str, bytes]:
        """Return a copy of them."""
        return dict(self._keys.get(generation, {}))

    def put(self, generation: int, key: str, value: bytes) -> KeyPut:
        """Set a key here; what all other members must be sent."""
        self.of(generation)[key] = value
        put = KeyPut(generation, key, value)
        newest = next(iter(self._own.values()), put)
        if newest.generation < generation:
            self._own.clear()
        # The order of the last changes, not of the first.
        self._own.pop(key, None)
        self._own[key] = put
        return put

    def own_puts(self) -> list[KeyPut]:
        """Return the keys that this process has set in the newest generation."""
        return list(self._own.values())

    def drop_before(self, generation: int) -> None:
        """Forget older generations' keys."""
        for old in [number for number in self._keys if number < generation]:
            del self._keys[old]
