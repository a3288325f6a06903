"""Read command lines and environments of processes: the child that `process_reader` starts.

Each process is read in a thread of its own, and told on stdout as soon as it has been read: one
that hangs holds up no other. It imports the standard library alone, so that it starts quickly.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Collection

STACK_BYTES = 1 << 18
"""The stack of one thread: a node has thousands of processes."""
WORDS = 3
"""Words of a command line that are told."""


def read_all(
    pids: Collection[int], names: Collection[str], tell: Callable[[bytes], object]
) -> dict[int, threading.Thread]:
    """Begin to read all processes, and return the threads that do it, by the processes' numbers.

    Args:
        pids: of the processes.
        names: of the variables that are told.
        tell: takes a line of JSON for each process; it is called by one thread at a time.
    """
    lock = threading.Lock()

    def read(pid: int) -> None:
        answer = {"pid": pid, "words": _words(pid), "variables": _variables(pid, names)}
        line = json.dumps(answer).encode() + b"\n"
        with lock:
            tell(line)

    # Daemon threads: one that hangs in the kernel must not keep the process from ending.
    threads = {pid: threading.Thread(target=read, args=(pid,), daemon=True) for pid in pids}
    for thread in threads.values():
        thread.start()
    return threads


def _words(pid: int) -> list[str]:
    return [os.fsdecode(word) for word in _read(pid, "cmdline").split(b"\0")[:WORDS]]


def _variables(pid: int, names: Collection[str]) -> dict[str, str]:
    pairs = (pair.partition(b"=") for pair in _read(pid, "environ").split(b"\0"))
    found = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    return {name: found[name] for name in names if name in found}


def _read(pid: int, file: str) -> bytes:
    """Return a file of a process; empty: it has ended, or may not be read."""
    try:
        # Without pathlib the child starts in half the time.
        with open(f"/proc/{pid}/{file}", "rb") as opened:  # noqa: PTH123
            return opened.read()
    except OSError:
        return b""


def main() -> None:
    """Read the processes that stdin names."""
    asked = json.load(sys.stdin)

    def tell(line: bytes) -> None:
        while line:
            line = line[os.write(sys.stdout.fileno(), line) :]

    threading.stack_size(STACK_BYTES)
    for thread in read_all(asked["pids"], asked["names"], tell).values():
        thread.join()


if __name__ == "__main__":
    main()
