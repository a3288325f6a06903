"""The store: each member of a generation holds all of its keys.

A set reaches every member; a change that depends on the old value goes through the key's home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import WireError
from slurm_resilience.mesh.messages import KeyChange, KeyChanged, KeyPut, Message
from slurm_resilience.mesh.protocol.key_table import KeyTable, changed_value, home_of
from slurm_resilience.mesh.protocol.membership import Membership
from slurm_resilience.mesh.wakeups import Wakeups

ANSWERS_KEPT = 64
"""For each member: more changes than it has under way at once, one for each thread that waits."""


class KeyStore:
    """The keys of one process. Its public methods may be called from any thread."""

    def __init__(
        self,
        membership: Membership,
        send: Callable[[Iterable[int], Message], None],
        changed: Wakeups,
        on_key: Callable[[], None],
    ) -> None:
        """
        Args:
            membership: knows the generation and its members.
            send: sends a message on connections to them.
            changed: tells when the generation ends; its lock guards the keys too.
            on_key: called when a key was set here, or a generation has begun, which begins with
                keys of its own.
        """
        self._membership = membership
        self._send = send
        self._changed = changed
        self._on_key = on_key
        self._table = KeyTable()
        self._awaited: list[set[str]] = []
        """For each call of `get` that waits: the keys that are still missing."""
        self._asked: dict[int, KeyChange] = {}
        """Changes that were asked for at another member, by number, and not answered."""
        self._answers: dict[int, bytes] = {}
        self._given: dict[str, dict[int, KeyChanged]] = {}
        """By member and number: its last answers of this generation. A change that is asked for
        again, since the first request or its answer may have been lost, is not made again."""
        self._numbers = 0
        self._closed = False

    def put(self, generation: int, key: str, value: bytes) -> None:
        """Set a key at every member of a generation."""
        with self._changed:
            put = self._table.put(generation, key, value)
            self._wake(key)
            self._send_members(put)

    def get(self, generation: int, keys: Iterable[str], timeout: float) -> list[bytes]:
        """Wait until all keys are there.

        Raises:
            TimeoutError: they were not within ``timeout`` seconds.
            WireError: the generation is over.
        """
        wanted = list(keys)
        deadline = SYSTEM_CLOCK.monotonic() + timeout
        with self._changed:
            while True:
                own = self._table.of(generation)
                missing = [key for key in wanted if key not in own]
                if not missing:
                    return [own[key] for key in wanted]
                self._still(generation)
                left = deadline - SYSTEM_CLOCK.monotonic()
                if left <= 0:
                    raise TimeoutError(f"key {missing[0]!r} was not set within {timeout:g} s")
                awaited = set(missing)
                self._awaited.append(awaited)
                try:
                    self._changed.wait(lambda: self._is_over(generation), left)
                finally:
                    self._awaited = [other for other in self._awaited if other is not awaited]

    def peek(self, generation: int, key: str) -> bytes | None:
        """Return the value of a key; None: it is not here now."""
        with self._changed:
            return self._table.of(generation).get(key)

    def known(self, generation: int) -> dict[str, bytes]:
        """All keys of a generation that are here now."""
        with self._changed:
            return self._table.known(generation)

    def change(self, change: KeyChange, timeout: float) -> bytes:
        """Change a key at its home; the value that came of it.

        Raises:
            TimeoutError, WireError: as in `get`.
        """
        with self._changed:
            self._numbers += 1
            number = self._numbers
            change = msgspec.structs.replace(change, number=number)
            view = self._membership.side.generation.view
            if view is None or view.generation != change.generation:
                raise WireError("the generation is over")
            home = home_of(change.key, view)
            if home == self._membership.side.me.id:
                return self._change(change)
            contact = self._membership.side.contacts.get(home)
            if contact is None:
                raise WireError("the generation is over")
            self._asked[number] = change
            try:
                self._send((contact.connection,), change)
                return self._answer(change, timeout)
            finally:
                del self._asked[number]

    def _answer(self, change: KeyChange, timeout: float) -> bytes:
        deadline = SYSTEM_CLOCK.monotonic() + timeout
        while change.number not in self._answers:
            self._still(change.generation)
            left = deadline - SYSTEM_CLOCK.monotonic()
            if left <= 0:
                raise TimeoutError(f"key {change.key!r}: no answer within {timeout:g} s")
            self._changed.wait(lambda: self._is_over(change.generation), left)
        return self._answers.pop(change.number)

    # -- for the mesh, with the lock ----------------------------------------------------------

    def hear(self, connection: int, member: str, message: Message) -> bool:
        """Take a message of a member in; False when it is none of the store's."""
        match message:
            case KeyPut(generation=generation, key=key, value=value):
                if generation >= self._membership.side.generation.number:
                    self._table.of(generation)[key] = value
                    self._wake(key)
            case KeyChange():
                given = self._given.setdefault(member, {})
                answer = given.get(message.number)
                if answer is None:
                    answer = KeyChanged(message.generation, message.number, self._change(message))
                    given[message.number] = answer
                    if len(given) > ANSWERS_KEPT:
                        del given[next(iter(given))]
                self._send((connection,), answer)
            case KeyChanged(number=number, value=value) if number in self._asked:
                self._answers[number] = value
                self._changed.wake()
            case KeyChanged():
                pass  # an answer that came twice
            case _:
                return False
        return True

    def reach(self, connection: int) -> None:
        """Send what was set before to a member of the current generation that is connected now,
        and ask it again for what it has not answered."""
        for put in self._table.own_puts():
            if put.generation == self._membership.side.generation.number:
                self._send((connection,), put)
        view = self._membership.side.generation.view
        owner = self._membership.side.contacts.owner(connection)
        for change in self._asked.values():
            if (
                owner is not None
                and view is not None
                and home_of(change.key, view) == owner.peer.id
            ):
                self._send((connection,), change)

    def adopt(self, generation: int) -> None:
        """Begin a new generation: older keys go. A member may have changed a key here before
        this process knew of it: that is sent now."""
        self._table.drop_before(generation)
        self._given = {
            member: {n: answer for n, answer in given.items() if answer.generation >= generation}
            for member, given in self._given.items()
        }
        for put in self._table.own_puts():
            self._send_members(put)
        self._on_key()

    def close(self) -> None:
        """Have all calls that wait end."""
        self._closed = True
        self._changed.wake()

    def _wake(self, key: str) -> None:
        """Threads are woken by the last key that they wait for: each of many ranks that form a
        group sets one, and waking up for each takes longer than hearing it."""
        self._on_key()
        for awaited in self._awaited:
            awaited.discard(key)
            if not awaited:
                self._changed.wake()

    def _still(self, generation: int) -> None:
        state = self._membership.side.generation
        if self._closed:
            raise WireError("the mesh is closed")
        if self._is_over(generation):
            reason = state.end.reason if state.end else "a newer one was formed"
            raise WireError(f"the generation is over: {reason}")

    def _is_over(self, generation: int) -> bool:
        state = self._membership.side.generation
        return state.number != generation or state.end is not None

    def _change(self, change: KeyChange) -> bytes:
        old = self._table.of(change.generation).get(change.key)
        value = changed_value(old, change)
        if value is None:
            return b""  # the asker says that it holds no number
        if value != old:
            self.put(change.generation, change.key, value)
        return value

    def _send_members(self, put: KeyPut) -> None:
        view = self._membership.side.generation.view
        if view is None or view.generation != put.generation:
            return
        contacts = (self._membership.side.contacts.get(member.peer.id) for member in view.members)
        self._send([c.connection for c in contacts if c is not None], put)
