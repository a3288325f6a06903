"""The store: each member of a generation holds all of its keys."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable

import msgspec

from slurm_resilience.errors import WireError
from slurm_resilience.mesh.generations import Generations
from slurm_resilience.mesh.messages import KeyChange, KeyPut


class Keys(Generations):
    """A set reaches every member; what depends on the old value goes through the key's home."""

    def put(self, generation: int, key: str, value: bytes) -> None:
        """Set a key at every member of a generation."""
        with self._lock:
            self._set(generation, key, value)
            put = KeyPut(generation, key, value)
            newest = next(iter(self._own_puts.values()), put)
            if newest.generation < generation:
                self._own_puts.clear()
            self._own_puts.pop(key, None)
            self._own_puts[key] = put
            self._send_members(generation, put)

    def get(self, generation: int, keys: Iterable[str], timeout: float) -> list[bytes]:
        """Wait until all keys are there.

        Raises:
            TimeoutError: they were not within ``timeout`` seconds.
            WireError: the generation is over.
        """
        wanted = list(keys)
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                own = self._keys.setdefault(generation, {})
                missing = [key for key in wanted if key not in own]
                if not missing:
                    return [own[key] for key in wanted]
                self._still(generation)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"key {missing[0]!r} was not set within {timeout:g} s")
                awaited = set(missing)
                self._awaited.append(awaited)
                try:
                    self._changed.wait(left)
                finally:
                    self._awaited = [other for other in self._awaited if other is not awaited]

    def known(self, generation: int) -> dict[str, bytes]:
        """All keys of a generation that are here now."""
        with self._lock:
            return dict(self._keys.get(generation, {}))

    def change(self, change: KeyChange, timeout: float) -> bytes:
        """Change a key at its home; the value that came of it.

        Raises:
            TimeoutError, WireError: as in `get`.
        """
        with self._changed:
            self._numbers += 1
            number = self._numbers
            change = msgspec.structs.replace(change, number=number)
            view = self._view
            if view is None or view.generation != change.generation:
                raise WireError("the generation is over")
            home = view.members[zlib.crc32(change.key.encode()) % view.size].peer.id
            if home == self.me.id:
                return self._change(change)
            link = self._links.get(home)
            if link is None:
                raise WireError("the generation is over")
            self._send(link, change)
            deadline = time.monotonic() + timeout
            while number not in self._answers:
                self._still(change.generation)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"key {change.key!r}: no answer within {timeout:g} s")
                self._changed.wait(left)
            return self._answers.pop(number)

    def _set(self, generation: int, key: str, value: bytes) -> None:
        """Take a key in. Who waits is woken by the last key that it waits for: each of many ranks
        that form a group sets one, and waking up for each takes longer than hearing it."""
        self._keys.setdefault(generation, {})[key] = value
        for awaited in self._awaited:
            awaited.discard(key)
            if not awaited:
                self._changed.notify_all()

    def _still(self, generation: int) -> None:
        view = self._view
        if self._closing:
            raise WireError("the mesh is closed")
        if view is None or view.generation != generation or self._end is not None:
            reason = self._end.reason if self._end else "a newer one was formed"
            raise WireError(f"the generation is over: {reason}")

    def _change(self, change: KeyChange) -> bytes:
        own = self._keys.setdefault(change.generation, {})
        old = own.get(change.key)
        if change.desired is not None:
            value = old if old is not None else b""
            if (old is None and not change.expected) or old == change.expected:
                value = change.desired
        elif change.append is not None:
            value = (old or b"") + change.append
        else:
            try:
                value = str(int(old or b"0") + change.add).encode()
            except ValueError:
                return b""  # it holds no number: for the asker to say
        if value != old:
            self.put(change.generation, change.key, value)
        return value
