"""Take SIGTERM as a request, in a thread of its own: the main one may wait in a collective."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

log = logging.getLogger("sres.training")


class TermSignal:
    """This process's SIGTERM, once `listen` was called."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def listen(self, asked: Callable[[], None]) -> None:
        """Have each SIGTERM call a function, in a thread of its own. From the main thread.

        Args:
            asked: is called again only when it has returned.
        """
        # Python's handler runs when the main thread comes back to Python; the number of the signal
        # is written at once, unless an event loop of the program takes its place.
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        signal.signal(signal.SIGTERM, self._note)
        _listening.append(self)
        threading.Thread(target=self._wait, args=(asked,), name="sres-term", daemon=True).start()

    def stop(self) -> None:
        """Let SIGTERM end this process again; what came before still calls. From the main thread,
        once."""
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(before)
        _listening.remove(self)
        self._writer.close()

    @property
    def _is_the_programs(self) -> bool:
        """True where a handler of the program's own has taken its place."""
        return signal.getsignal(signal.SIGTERM) not in (self._note, signal.SIG_DFL)

    def _note(self, number: int, _: object) -> None:
        with contextlib.suppress(OSError):
            self._writer.send(bytes([number]))

    def _wait(self, asked: Callable[[], None]) -> None:
        while numbers := self._reader.recv(64):
            if signal.SIGTERM in numbers and not self._is_the_programs:
                asked()
        self._reader.close()


_listening: list[TermSignal] = []


def end() -> None:
    """End this process as SIGTERM would have. From any thread."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)


def _forked() -> None:
    """Leave a child of this process to SIGTERM: it ends where its parent ends it."""
    if _listening:
        _listening.clear()
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forked)
