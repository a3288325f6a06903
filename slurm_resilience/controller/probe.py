"""Probe: a TCP connection to a node's slurmd, tried from threads."""

from __future__ import annotations

import errno
import functools
import ipaddress
import logging
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, Protocol

from slurm_resilience.clock import Clock

log = logging.getLogger("sresctld")

MAX_ANSWERS = 128
"""Kept of each node. At `GROWTH` they reach back for more than a day."""
MIN_PAUSE_SECONDS, GROWTH = 0.25, 0.1
"""Between two probes of a node: at least so long, and this share of its series' age."""
SERIES_END_SECONDS = 60.0
"""Without a probe for this long, the next one begins a new series. A beat ends one as well, and
a time in which no node was heard."""
PROBES_AT_ONCE = 256
"""Each may wait for `detect.probe_timeout`. 500 nodes that fall silent together are then probed
twice within seconds, so that supervised jobs leave them about as soon as a single one."""
LOOK_UP_SECONDS = 1.0
"""A name server that does not answer is waited for so long: less than a node waits for its
welcome."""
LOOK_UPS_AT_ONCE = 256

Answer = Literal["answered", "refused", "silent"]


class ProbeResult(NamedTuple):
    """One try. Times are of the monotonic clock."""

    started: float
    ended: float
    answer: Answer


_ERRORS_OF_THIS_MACHINE = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EADDRNOTAVAIL,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        # Its own routes (blackhole, prohibit) and its own firewall.
        errno.EINVAL,
        errno.EACCES,
        errno.EPERM,
    }
)


class _LookUp(NamedTuple):
    ended: threading.Event
    started: float
    """Monotonic."""


class AddressBook:
    """Keeps what each name stood for when it was last looked up: a name that is gone from DNS or
    from /etc/hosts says nothing about its machine. A name server that does not answer keeps
    none waiting for long: what was known stands meanwhile. May be used from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, ...]] = {}
        self._warned: set[str] = set()
        self._running: dict[str, _LookUp] = {}

    def look_up(self, name: str) -> tuple[str, ...]:
        """Return the addresses of a name, else its last known ones, if there are any."""
        if _is_number(name):
            return (name,)
        now = self._clock.monotonic()
        with self._lock:
            known, running = self._known.get(name, ()), self._running.get(name)
            hangs = any(now - one.started > LOOK_UP_SECONDS for one in self._running.values())
            if running is None and len(self._running) < LOOK_UPS_AT_ONCE:
                running = self._running[name] = _LookUp(threading.Event(), now)
                # A daemon: one that hangs must not keep sresctld from its end.
                threading.Thread(
                    target=self._ask, args=(name,), name="look-up", daemon=True
                ).start()
        if running is None or (known and hangs):
            return known
        self._clock.wait(running.ended, LOOK_UP_SECONDS)
        with self._lock:
            return self._known.get(name, ())

    def _ask(self, name: str) -> None:
        failure, found = "", []
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter: no name could be written so
            failure = str(error)
        with self._lock:
            if not failure:
                self._warned.discard(name)
                self._known[name] = tuple(dict.fromkeys(str(one[4][0]) for one in found))
            is_news, known = failure and name not in self._warned, self._known.get(name, ())
            self._warned |= {name} if failure else set()
            self._running.pop(name).ended.set()
        if is_news:
            then = f"it counts as {', '.join(known)}" if known else "its node is not probed"
            log.warning("the node address %s cannot be looked up: %s; %s", name, failure, then)


def _is_number(name: str) -> bool:
    """Tell whether an address needs no look-up."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def probe(addresses: Sequence[str], port: int, timeout: float) -> Answer | None:
    """Connect to the first of a machine's addresses that takes it. The kernel answers for slurmd
    however busy the node is, so load is no silence; ``refused`` is a living machine without slurmd;
    None says nothing about it: this machine could not even ask."""
    says: Answer | None = None
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=timeout):
                return "answered"
        except ConnectionRefusedError:
            says = "refused"
        except OSError as error:
            if error.errno not in _ERRORS_OF_THIS_MACHINE:
                says = says or "silent"
    return says


Answered = Callable[[float, Answer | None], None]
"""Takes the beginning of a try (of the monotonic clock) and its answer."""


class Dialer(Protocol):
    """Tries connections beside the cycle. The simulator has one of its own."""

    def dial(self, address: str, port: int, done: Answered) -> None:
        """Begin to connect; ``done`` is called in any thread."""
        ...

    def close(self) -> None: ...


class ThreadDialer:
    """Tries connections from threads, which it starts as they are needed."""

    def __init__(self, clock: Clock, timeout: float, addresses: AddressBook) -> None:
        self._clock = clock
        self._timeout = timeout
        self._addresses = addresses
        self._pool = ThreadPoolExecutor(PROBES_AT_ONCE, thread_name_prefix="probe")

    def dial(self, address: str, port: int, done: Answered) -> None:
        self._pool.submit(self._work, address, port, done)

    def _work(self, address: str, port: int, done: Answered) -> None:
        addresses = self._addresses.look_up(address)
        started = self._clock.monotonic()
        done(started, probe(addresses, port, self._timeout))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Prober:
    """Has nodes probed beside the cycle and keeps each node's last answers."""

    def __init__(self, clock: Clock, timeout: float, dialer: Dialer | None = None) -> None:
        self._clock = clock
        self._timeout = timeout
        self._dialer = dialer or ThreadDialer(clock, timeout, AddressBook(clock))
        self._lock = threading.Lock()
        self._flying: set[str] = set()
        self._results: dict[str, deque[ProbeResult]] = defaultdict(
            lambda: deque(maxlen=MAX_ANSWERS)
        )
        self._answers: dict[str, ProbeResult] = {}
        """The last sign of life of each node, which outlives its series."""
        self._shown: dict[str, tuple[ProbeResult, ...]] = {}
        """Each series, behind the last answer that an earlier one has got. A round asks for all of
        them, and few have changed."""
        self.done = threading.Event()

    def request_early(self, node: str, address: str, port: int, since: float) -> None:
        """Probe a node that has only missed a beat: whatever the answer, no round is begun by
        it."""
        self._request(node, address, port, since, False, True)

    def request(
        self, node: str, address: str, port: int, since: float, is_urgent: bool = False
    ) -> None:
        """Probe a node, unless that is under way or was done just now.

        A refusal comes back in microseconds. The longer a node has been probed, the less often it
        is: the answers kept then reach back far enough for ``detect.refused_after``. An urgent one
        waits for nothing.

        Args:
            node: its name.
            address: where its slurmd listens.
            port: slurmd's.
            since: when its sresd was heard last, or all of them again after a time in which none
                was (monotonic): what was answered before belongs to another silence, and slows
                this one's probes no more.
            is_urgent: now, however often it was probed.
        """
        self._request(node, address, port, since, is_urgent, False)

    def _request(
        self,
        node: str,
        address: str,
        port: int,
        since: float,
        is_urgent: bool,
        is_early: bool,
    ) -> None:
        with self._lock:
            known, now = self._results[node], self._clock.monotonic()
            is_over = known and now - known[-1].ended > SERIES_END_SECONDS
            if is_over or (known and known[-1].started < since):
                known.clear()
                self._show(node)
            elif known and not is_urgent:
                pause = max(MIN_PAUSE_SECONDS, GROWTH * (now - known[0].started))
                if now - known[-1].ended < pause:
                    return
            if node in self._flying:
                return
            self._flying.add(node)
        self._dialer.dial(address, port, functools.partial(self._answered, node, is_early))

    def look(self, node: str, address: str, port: int) -> Answer | None:
        """Probe a node now, and wait for the answer; None says nothing about the node."""
        answered, answers = threading.Event(), list[Answer | None]()

        def take(started: float, answer: Answer | None) -> None:
            self._answered(node, False, started, answer)
            answers.append(answer)
            answered.set()

        self._dialer.dial(address, port, take)
        self._clock.wait(answered, self._timeout + MIN_PAUSE_SECONDS)
        return answers[0] if answers else None

    def results(self) -> dict[str, tuple[ProbeResult, ...]]:
        """Each node's last probes, oldest first."""
        with self._lock:
            return self._shown.copy()

    def _show(self, node: str) -> None:
        probes, answer = self._results[node], self._answers.get(node)
        is_earlier = answer is not None and (not probes or answer.started < probes[0].started)
        earlier = (answer,) if answer is not None and is_earlier else ()
        self._shown[node] = (*earlier, *probes)

    def forget(self, node: str) -> None:
        with self._lock:
            self._results.pop(node, None)
            self._answers.pop(node, None)
            self._shown.pop(node, None)

    def close(self) -> None:
        self._dialer.close()

    def _answered(self, node: str, is_early: bool, started: float, answer: Answer | None) -> None:
        with self._lock:
            if answer is not None:
                result = ProbeResult(started, self._clock.monotonic(), answer)
                self._results[node].append(result)
                if answer == "answered":
                    self._answers[node] = result
                self._show(node)
            self._flying.discard(node)
        if not is_early:
            self.done.set()
