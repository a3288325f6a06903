"""A torch store without root or server: the keys live with the members of one generation.

It needs no copies beyond that: a generation ends with its first lost member, and its keys with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from slurm_resilience.errors import WireError
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.messages import KeyChange

DEFAULT_TIMEOUT = timedelta(seconds=300)


class MeshStore(dist.Store):  # type: ignore[name-defined, misc]
    """The store of one generation. A set reaches all members at once, so a get is a look-up here;
    `add`, `compare_set` and `append` go through the key's home, which orders them."""

    def __init__(self, mesh: Mesh, generation: int, least_wait: float = 0.0) -> None:
        """
        Args:
            mesh: the process among the others.
            generation: the members' world.
            least_wait: seconds that a wait lasts at least, whatever limit its caller names.
        """
        super().__init__()
        self._least_wait = timedelta(seconds=least_wait)
        self._mesh = mesh
        self._generation = generation
        self._timeout = DEFAULT_TIMEOUT

    @property
    def timeout(self) -> timedelta:
        """The time limit of a get."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set it."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._mesh.put(self._generation, key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value, when it is there.

        Raises:
            dist.DistStoreError: it was not set within the time limit, or the generation is over.
        """
        return self._get([key], self._timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys."""
        return self._get(keys, self._timeout)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            dist.DistStoreError: as `get`.
        """
        self._get(keys, max(timeout or self._timeout, self._least_wait))

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys are set now."""
        known = self._mesh.known(self._generation)
        return all(key in known for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        value = self._change(KeyChange(self._generation, 0, key, add=amount))
        if not value:
            raise dist.DistStoreError(f"add to key {key!r}, which holds no number")
        return int(value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value (empty: if it is not set); its value after it."""
        old, new = _bytes(expected), _bytes(desired)
        return self._change(KeyChange(self._generation, 0, key, expected=old, desired=new))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a key."""
        self._change(KeyChange(self._generation, 0, key, append=_bytes(value)))

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._mesh.known(self._generation))

    def has_extended_api(self) -> bool:
        """multi_get, multi_set and append exist."""
        return True

    def _get(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        try:
            return self._mesh.get(self._generation, keys, timeout.total_seconds())
        except (TimeoutError, WireError) as error:
            raise dist.DistStoreError(str(error)) from None

    def _change(self, change: KeyChange) -> bytes:
        try:
            return self._mesh.change(change, self._timeout.total_seconds())
        except (TimeoutError, WireError) as error:
            raise dist.DistStoreError(str(error)) from None


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
