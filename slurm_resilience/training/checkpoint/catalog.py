"""A directory of checkpoints: which are there, which are good, which may go."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from pathlib import Path

import psutil

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import CheckpointError
from slurm_resilience.training.checkpoint import manifest as manifests
from slurm_resilience.training.checkpoint import names
from slurm_resilience.training.checkpoint.certificates import Certificates
from slurm_resilience.training.checkpoint.manifest import Damaged, Manifest, Print

log = logging.getLogger(__name__)


class CheckpointCatalog:
    """Looks at checkpoints and remembers what it saw. Threads may share it."""

    def __init__(
        self, directory: str | os.PathLike[str], *, prefer_certified: bool = False
    ) -> None:
        """
        Args:
            directory: made when it is not there; every rank must see the same one.
            prefer_certified: certified checkpoints are read before newer ones that are not.

        Raises:
            CheckpointError: it is a file, or cannot be used. A process that replaces another is
                content if it can be read: its peers have the state, and may write again later.
        """
        self.path = Path(directory)
        self.certificates = Certificates(self.path, prefer=prefer_certified)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise CheckpointError(
                f"checkpoints cannot go to {directory}: a file is in the way"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot go to {directory}: {error.strerror}"
            ) from None
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            text = (
                f"checkpoints cannot go to {directory}: it cannot be written to "
                "(read-only, or another user's)"
            )
            if not _is_replacement() or not os.access(self.path, os.R_OK | os.X_OK):
                raise CheckpointError(text)
            log.error("%s; the training goes on without new ones", text)
        self._lock = threading.Lock()
        self._good: dict[int, Print] = {}
        self._bad: dict[int, tuple[Print, str]] = {}
        self._complained: set[str] = set()
        self._manifests: dict[int, tuple[Print, Manifest]] = {}
        self.in_flight: set[str] = set()
        """Names that this process is writing now: they are not pruned."""
        self.announced = -1
        """The last answer of `readable`: others may rely on it."""

    def at(self, step: int) -> Path:
        return self.path / names.done(step)

    def steps(self) -> list[int]:
        """Return steps that have a finished checkpoint, newest first, good or not.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        try:
            found = [names.step_of(path.name) for path in self.path.iterdir()]
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
        return sorted((step for step in found if step >= 0), reverse=True)

    def manifest(self, step: int) -> tuple[Manifest, Print]:
        """Return a checkpoint's manifest, after a look at its files' names and sizes.

        The manifest is read once and again only when it changed.

        Raises:
            Damaged: something is missing, or was found damaged before.
        """
        directory = self.at(step)
        path = directory / manifests.FILE
        try:
            found = path.stat()
        except OSError as error:
            raise Damaged(f"{path}: {error.strerror}") from None
        own: Print = ((manifests.FILE, found.st_size, found.st_mtime_ns, found.st_ino),)
        with self._lock:
            known = self._manifests.get(step)
        if known is None or known[0] != own:
            known = (own, manifests.read(directory, step))
            with self._lock:
                self._manifests[step] = known
        seen = own + manifests.fingerprint(directory, known[1])
        with self._lock:
            before, why = self._bad.get(step, ((), ""))
        if before == seen:
            raise Damaged(why)
        return known[1], seen

    def verified(self, step: int, seen: Print) -> bool:
        """Return True when the content was read and found good, and nothing changed since."""
        with self._lock:
            return self._good.get(step) == seen

    def remember(self, step: int, seen: Print, damage: str = "") -> None:
        """Keep a verdict on the content for as long as the files do not change.

        Args:
            step: of which checkpoint.
            seen: its files when the reading began.
            damage: what is wrong; empty: nothing.
        """
        with self._lock:
            self._good.pop(step, None)
            self._bad.pop(step, None)
            if damage:
                self._bad[step] = (seen, damage)
            else:
                self._good[step] = seen

    def readable(self) -> int:
        """Return the first step by preference whose checkpoint is complete and not known to be
        damaged; -1: none.

        Cheap: looks at names and sizes, reads no content.
        """
        self.announced = self._first_complete()
        return self.announced

    def _first_complete(self) -> int:
        try:
            steps = self.certificates.in_order(self.steps())
        except CheckpointError as error:
            self.complain(str(error))
            return -1
        for step in steps:
            try:
                self.manifest(step)
            except Damaged as damage:
                self.complain(f"checkpoint of step {step} is skipped: {damage}")
            else:
                return step
        return -1

    def complain(self, text: str) -> None:
        """Log a line once."""
        with self._lock:
            if text in self._complained:
                return
            self._complained.add(text)
        log.warning(text)

    def prune(self, keep: int, me: names.SaveOwner, loading: set[int]) -> list[str]:
        """Delete what is not needed any more; the names of what went.

        Only the valid attempt may do this. A directory is renamed before it is deleted, so that
        no reader sees half of one, and no writer can finish it.
        """
        good: list[int] = []
        bad: list[int] = []
        for step in self.steps():
            try:
                self.manifest(step)
                (bad if self.certificates.is_doubtful(step) else good).append(step)
            except Damaged:
                bad.append(step)
        gone = [names.done(step) for step in names.surplus(good, bad, keep, loading)]
        gone += names.dead(self._temporaries(), me, set(self.in_flight), set(psutil.pids()))
        return [name for name in gone if self._delete(name, me)]

    def _temporaries(self) -> list[names.Temporary]:
        now, found = SYSTEM_CLOCK.now(), []
        for path in self.path.iterdir():
            if names.is_temporary(path.name):
                found.append(names.Temporary(path.name, now - _last_change(path)))
        return found

    def _delete(self, name: str, me: names.SaveOwner) -> bool:
        trash = self.path / names.temporary(
            names.any_step(name), me._replace(serial="pruned-" + secrets.token_hex(4))
        )
        try:
            (self.path / name).rename(trash)
            shutil.rmtree(trash)
        except OSError as error:
            log.warning("%s could not be deleted: %s", self.path / name, error.strerror)
            return False
        return True


def _last_change(directory: Path) -> float:
    """Seconds since the epoch; 0 when it is gone."""
    newest = 0.0
    try:
        newest = directory.stat().st_mtime
        for entry in os.scandir(directory):
            newest = max(newest, entry.stat().st_mtime)
    except OSError:
        pass
    return newest


def _is_replacement() -> bool:
    """Tell whether this rank's seat had another process before: the training runs already."""
    return os.environ.get("SRES_INCARNATION", "0") != "0"
