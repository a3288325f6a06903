"""`DirStore`: a `torch.distributed.Store` over a shared directory. No root, no server.

Each change is one record, appended to one file with a single write; reading is applying what was
appended since (`records`). The order in the file is the order of the changes, so every call is
linearizable, `add` and `compare_set` too, and there is no lock that a stopped process could keep.

That needs appends which do not overwrite each other. Every local file system has them, NFS has not:
there, and on whatever else machines may share, a file lock goes around each append.
Who waits is woken by inotify; where other machines write, it looks by itself, at growing intervals.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from slurm_resilience.training.process_group import records
from slurm_resilience.training.process_group.logfile import LogFile
from slurm_resilience.training.process_group.records import Answer, Op, Record

_Value = str | bytes
_T = TypeVar("_T")

_open: set[DirStore] = set()
"""What keeps a store alive until `close`: torch holds the C++ half of it only, and a group whose
store has lost its Python half fails when a subgroup is made."""


class DirStore(dist.Store):  # type: ignore[name-defined, misc]
    """A store that all processes which name the same directory share.

    Args:
        path: the directory; made with mode 0700 where it is missing. A new one for each process
            group: nothing in it is ever removed.
        timeout: how long a call waits for a key, unless `wait` is told otherwise.

    Raises:
        OSError: the directory cannot be made or written.

    It stays open until `close`, whether or not somebody still holds it.

    Every method raises `torch.distributed.DistStoreError` when its time is over, after `cancel`,
    and when the file system refuses a write.
    """

    def __init__(
        self, path: str | os.PathLike[str], timeout: timedelta = timedelta(minutes=5)
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._log = LogFile(Path(path))
        self._values: dict[str, bytes] = {}
        self._end = 0
        self._half: tuple[int, float] | None = None
        self._writer = secrets.token_bytes(8)
        self._numbers = itertools.count()
        self._answers: dict[int, Answer | records.BadNumber] = {}
        self._awaited: set[int] = set()
        self._lock = threading.Lock()
        _open.add(self)

    # --- what torch calls -----------------------------------------------------------------------

    def set(self, key: str, value: _Value) -> None:
        self._change(Op("set", key, _bytes(value)))

    def add(self, key: str, value: int) -> int:
        answer = self._change(Op("add", key, amount=int(value)))
        assert isinstance(answer, int)
        return answer

    def compare_set(self, key: str, expected_value: _Value, desired_value: _Value) -> bytes:
        answer = self._change(Op("swap", key, _bytes(desired_value), _bytes(expected_value)))
        assert isinstance(answer, bytes)
        return answer

    def append(self, key: str, value: _Value) -> None:
        self._change(Op("append", key, _bytes(value)))

    def delete_key(self, key: str) -> bool:
        return bool(self._change(Op("delete", key)))

    def multi_set(self, keys: Sequence[str], values: Sequence[_Value]) -> None:
        ops = (Op("set", key, _bytes(value)) for key, value in zip(keys, values, strict=True))
        self._change(*ops)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        # The keys and their values at one and the same moment.
        return self._until(
            lambda: [self._values[k] for k in keys] if self._has(keys) else None,
            self.timeout.total_seconds(),
            keys,
        )

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if self._has(keys):
            return
        limit = self.timeout if timeout is None else timeout
        self._until(lambda: self._has(keys) or None, limit.total_seconds(), keys)

    def check(self, keys: Sequence[str]) -> bool:
        self._look()
        return self._has(keys)

    def num_keys(self) -> int:
        self._look()
        return len(self._values)

    def list_keys(self) -> list[str]:
        self._look()
        return list(self._values)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> DirStore:
        return self

    # --- ours -------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Make every call on this object raise at once, those that wait now and all later ones."""
        self._log.cancel()

    def close(self) -> None:
        """Cancel, and let go of the file as soon as no call uses it. The directory stays."""
        self.cancel()
        _open.discard(self)

    def _go_on(self) -> None:
        if self._log.cancelled:
            raise dist.DistStoreError(f"{self._log.path}: cancelled")

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _change(self, *ops: Op) -> Answer:
        """Append one record, and return the last operation's answer."""
        self._go_on()
        number = next(self._numbers)
        wants = ops[-1].kind in ("add", "swap", "delete") if ops else False
        if wants:
            self._awaited.add(number)
        limit = self.timeout.total_seconds()
        try:
            self._log.append(records.encode(Record(self._writer, number, ops)), limit)
            if not wants:
                return None
            self._until(lambda: True if number in self._answers else None, limit, ())
            answer = self._answers[number]
        except OSError as error:
            raise dist.DistStoreError(f"{self._log.path}: {error.strerror}") from error
        finally:
            self._awaited.discard(number)
            self._answers.pop(number, None)
        if isinstance(answer, records.BadNumber):
            raise dist.DistStoreError(f"add to key {ops[-1].key!r}, which holds no number")
        return answer

    def _until(self, ready: Callable[[], _T | None], limit: float, keys: Sequence[str]) -> _T:
        """Apply what comes in until ``ready`` has an answer."""
        began = time.monotonic()
        while True:
            found = self._look(ready)
            if found is not None:
                return found
            waited = time.monotonic() - began
            if waited >= limit:
                missing = [key for key in keys if key not in self._values]
                raise dist.DistStoreError(
                    f"{self._log.path}: waited {limit:g} s for {len(missing)} of {len(keys)} "
                    f"keys, the first of them {missing[:1]}"
                )
            self._log.pause(waited, limit - waited)

    def _look(self, ready: Callable[[], _T | None] = lambda: None) -> _T | None:
        """Apply what was appended since the last look; then ask."""
        self._go_on()
        with self._lock:
            data = self._log.read(self._end)
            while data:
                found, used = records.decode(data)
                for record in found:
                    self._apply(record)
                self._end += used
                data = data[used:]
                beyond = records.skip(data, 0) if data else -1
                if beyond < 0 or not self._left_behind():
                    break
                self._end += beyond
                data = data[beyond:]
            return ready()

    def _apply(self, record: Record) -> None:
        answer: Answer | records.BadNumber = None
        for op in record.ops:
            try:
                answer = records.apply(self._values, op)
            except records.BadNumber as error:
                answer = error
        if record.writer == self._writer and record.number in self._awaited:
            self._answers[record.number] = answer

    def _left_behind(self) -> bool:
        """Whether the half record at the end of what was applied will never be whole.

        Bytes of a file may come into sight a little later than its length; not that much later.
        """
        if self._half is None or self._half[0] != self._end:
            self._half = (self._end, time.monotonic())
        return time.monotonic() - self._half[1] >= self._log.settle


def _bytes(value: _Value) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
