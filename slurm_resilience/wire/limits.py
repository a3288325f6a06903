"""Limits of what one user may take of sresctld: counts and rates. Pure.

Nodes, root and SlurmUser are not counted: users can never take from them what they need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from slurm_resilience.errors import WireError
from slurm_resilience.wire.messages import Role

MAX_QUERIES_OF_USER = 256
"""Connections of `sres` and the like."""
MAX_CONNECTIONS_OF_JOB = 16
"""A job may have several supervised sruns at once."""
MAX_SHARE_OF_USER, MAX_SHARE_OF_USERS = 1 / 16, 1 / 2
"""Parts of this process's file descriptors that one user's, and that all users' connections may
take."""
MAX_UNFINISHED_OF_USER_BYTES = 4 << 20
"""Bytes of messages that have begun and not ended, over all connections of one user."""
MAX_UNREAD_OF_USER_BYTES = 8 << 20
"""Bytes of answers that a user's programs have not read, over all his connections."""
PAUSE_FACTOR, MIN_PAUSE_SECONDS = 10.0, 0.002
"""After a user's message, the next one of any of his connections is taken only after a pause: so
many times as long as handling it took, and at least so long. No user keeps the nodes' beats
waiting."""
MAX_KEYS = 10_000
"""Keys that `Rate` remembers; with more, those that are idle are forgotten."""


class Rate:
    """A rate for each key: this many events a second, and a few more at once after a quiet time."""

    def __init__(self, per_second: float, at_once: float) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._left: dict[Hashable, tuple[float, float]] = {}

    def take(self, key: Hashable, now: float) -> bool:
        """Count one more event; False: it is one too many."""
        if key not in self._left and len(self._left) >= MAX_KEYS:
            idle = now - self._at_once / self._per_second
            self._left = {k: seen for k, seen in self._left.items() if seen[1] > idle}
            if len(self._left) >= MAX_KEYS:
                return False
        left, at = self._left.get(key, (self._at_once, now))
        left = min(self._at_once, left + (now - at) * self._per_second)
        self._left[key] = (max(left - 1, left if left < 1 else 0.0), now)
        return left >= 1


class Sender(NamedTuple):
    """The side that a connection speaks for."""

    role: Role
    subject: str
    uid: int


class UserLimits:
    """Counts what each user has."""

    def __init__(self, files: int) -> None:
        """
        Args:
            files: file descriptors that this process may have.
        """
        self.most_of_user = max(8, int(files * MAX_SHARE_OF_USER))
        self.most_of_users = max(8, int(files * MAX_SHARE_OF_USERS))
        self._all = 0
        self._of_user: Counter[int] = Counter()
        self._of_subject: Counter[Sender] = Counter()
        self._unfinished: Counter[int] = Counter()
        self._next_turn: dict[int, float] = {}

    def enter(self, sender: Sender) -> None:
        """Count a new connection.

        Raises:
            WireError: it is one too many.
        """
        most = MAX_CONNECTIONS_OF_JOB if sender.role == "job" else MAX_QUERIES_OF_USER
        if self._of_user[sender.uid] >= self.most_of_user:
            raise WireError(f"uid {sender.uid} has {self.most_of_user} connections, no more")
        if self._of_subject[sender] >= most:
            of = f"job {sender.subject}" if sender.role == "job" else f"uid {sender.uid}"
            raise WireError(f"{of} has {most} connections, no more")
        if self._all >= self.most_of_users:
            raise WireError(f"users have {self.most_of_users} connections, no more")
        self._all += 1
        self._of_user[sender.uid] += 1
        self._of_subject[sender] += 1

    def leave(self, sender: Sender) -> None:
        """Count a connection that has ended."""
        self._all -= 1
        _decrease(self._of_user, sender.uid, 1)
        _decrease(self._of_subject, sender, 1)
        if sender.uid not in self._of_user:
            self._next_turn.pop(sender.uid, None)

    def begin(self, uid: int, size: int) -> None:
        """Count a message that has begun.

        Raises:
            WireError: this user has begun too many.
        """
        if self._unfinished[uid] + size > MAX_UNFINISHED_OF_USER_BYTES:
            raise WireError(
                f"uid {uid} has begun messages of {self._unfinished[uid]} bytes, no more"
            )
        self._unfinished[uid] += size

    def end(self, uid: int, size: int) -> None:
        """Count a message that is there, or that will never be."""
        _decrease(self._unfinished, uid, size)

    def pause(self, uid: int, took: float, now: float) -> float:
        """Return the seconds until a connection may send again.

        Args:
            uid: its user.
            took: seconds that its last message took.
            now: a moment of the monotonic clock.
        """
        turn = max(now, self._next_turn.get(uid, now)) + max(MIN_PAUSE_SECONDS, PAUSE_FACTOR * took)
        self._next_turn[uid] = turn
        return turn - now


def _decrease(counts: Counter[int] | Counter[Sender], key: int | Sender, by: int) -> None:
    """Count down, and keep no key without a count."""
    found: Counter[int | Sender] = counts  # type: ignore[assignment]  # one of the two, as given
    found[key] -= by
    if found[key] <= 0:
        del found[key]
