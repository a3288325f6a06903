"""List the executables of a directory in a child: it may be on a file server that is dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys

LIST_SECONDS = 5.0
KILL_SECONDS = 0.5


class NoListing(Exception):
    """Raised where a directory cannot be listed, with the reason."""


class ProgramLister:
    """Starts the children; at most one that hangs in the kernel is left behind."""

    def __init__(self, directory: str, seconds: float = LIST_SECONDS) -> None:
        """
        Args:
            directory: an absolute path.
            seconds: time limit of a listing.
        """
        self._directory = directory
        self._seconds = seconds
        self._left: subprocess.Popen[bytes] | None = None

    def names(self) -> tuple[str, ...]:
        """Return the names of the directory's executables, in order.

        Raises:
            NoListing: it cannot be read, or does not answer in time.
        """
        if self._left is not None and self._left.poll() is None:
            raise NoListing(f"process {self._left.pid}, which reads it, hangs in the kernel")
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, self._directory],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            raise NoListing(f"no process can be started to read it: {error.strerror}") from None
        try:
            said, _ = child.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired:
            # Late: the child runs this file with the standard library alone.
            from slurm_resilience.child_group import end_group

            if not end_group(child, KILL_SECONDS):
                self._left = child
            raise NoListing(f"it does not answer within {self._seconds:g} s") from None
        try:
            answer = json.loads(said)
        except ValueError:
            raise NoListing(f"its reader ended with {child.returncode}") from None
        if "error" in answer:
            raise NoListing(f"it cannot be read: {answer['error']}")
        return tuple(answer["names"])


def main(directory: str) -> None:
    """Print the listing: the child."""
    try:
        with os.scandir(directory) as entries:
            names = [
                entry.name
                for entry in entries
                if not entry.name.startswith(".")
                and entry.is_file()
                and os.access(entry.path, os.X_OK)
            ]
        answer: dict[str, object] = {"names": sorted(names)}
    except OSError as error:
        answer = {"error": error.strerror or str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
