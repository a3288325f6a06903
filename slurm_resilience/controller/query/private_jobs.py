"""Other users' jobs, left out of what a user asks for: Slurm's PrivateData=jobs. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

HIDDEN = "(hidden)"
"""Stands for the number of another user's job in a text."""
_NAMED = re.compile(r"\b[Jj]obs? \d+(?:(?:,| and|, and) \d+)*")
_NUMBER = re.compile(r"\d+")


class PrivateJobs:
    """The jobs that one user may read about, while Slurm hides the others' from that user."""

    def __init__(self, uid: int, own: Collection[int]) -> None:
        """
        Args:
            uid: the asking user.
            own: this user's jobs, as Slurm lists them now.
        """
        self._uid = uid
        self._own = own

    def shows(self, job: int) -> bool:
        """Tell whether a job is this user's. One that has ended is known by its events' `uid`."""
        return job in self._own

    def of(self, value: Any) -> Any:
        """Return plain data without others' jobs: what is about one of them, and their numbers in
        lists and texts."""
        if isinstance(value, str):
            return _NAMED.sub(self._without_numbers, value) if "ob" in value else value
        if isinstance(value, Mapping):
            return {key: self._part(key, part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(part) for part in value if not self._is_anothers(part)]
        return value

    def _part(self, key: str, part: Any) -> Any:
        if key == "jobs" and isinstance(part, list | tuple):
            return [job for job in part if self.shows(job)]
        return self.of(part)

    def _is_anothers(self, entry: Any) -> bool:
        """Tell whether an entry of a list is about another user's job."""
        job = entry.get("job") if isinstance(entry, Mapping) else None
        if not job:
            return False
        data = entry.get("data")
        uid = data.get("uid") if isinstance(data, Mapping) else None
        # Slurm gives a number to another job one day: an event remembers whose it was.
        return not self.shows(job) if uid is None else bool(uid != self._uid)

    def _without_numbers(self, named: re.Match[str]) -> str:
        return _NUMBER.sub(lambda n: n[0] if self.shows(int(n[0])) else HIDDEN, named[0])
