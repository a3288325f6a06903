"""The fence of one supervised srun: a directory that all nodes of the job see, with a token in it.

A program may write as long as the token names its own attempt (`attempt.is_current`). Its reported
progress is in the same directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.mesh.rank_variables import HOLD_PREFIX
from slurm_resilience.model import Job
from slurm_resilience.resume import attempt, report
from slurm_resilience.resume.history import FOLDER
from slurm_resilience.resume.srun.environment import Attempt
from slurm_resilience.resume.srun.host_calls import HostCalls
from slurm_resilience.slurm.client import SlurmClient

_MAKE_TRIES = 3
"""Another supervisor may just remove the folders that it leaves empty."""
SILENT_SECONDS = 15.0
"""Before the log tells of a file system that does not answer at the start."""
LOOKS_BETWEEN_LINES = 360
"""Between two lines of a fence that cannot be raised, or seen: about an hour."""
UNSEEN_LOOKS = 6
"""In a row, before the log tells of a fence that cannot be seen: a shared file system may fail for
a moment."""
WITHOUT_FENCE = "only its own sresd ends the tasks on a node that is cut off"
NOT_GROWN = (
    "not grown: without that directory its supervisor does not see the ranks of this attempt"
)
"""The log's word for a step that was to change its size."""


class Fence:
    """The fence around all attempts of one supervised srun."""

    def __init__(self, client: SlurmClient, job: Job, restarts: int, host_calls: HostCalls) -> None:
        """
        Args:
            client: tells whether the job was requeued meanwhile, before a fence is mended.
            job: the job that the steps run in.
            restarts: how often Slurm has requeued it.
            host_calls: to the machine that this runs on.
        """
        self._client = client
        self._job = job.id
        self._host_calls = host_calls
        self.restarts = restarts
        self._base = host_calls.working_directory()
        self.directory, self._problem = "", ""
        """Every node of the job sees it; empty: there is none."""
        try:
            with host_calls.watched(SILENT_SECONDS, self._tell_silent):
                self.directory = open_directory(self._base, job.id, host_calls.pid)
        except OSError as error:
            self._problem = str(error)
        self.history_folder = Path(self.directory).parent if self.directory else None
        """For the attempts; None: there is none."""
        if self.history_folder is None:
            self._keep_history_in(host_calls.home_directory())
        self._made = self.directory
        """To be used for the next attempt, and removed at the end, also where no fence could be
        raised in it."""
        self._token = ""
        self._looks_down = 0
        """Looks in a row at which the fence was down and could not be raised."""
        self._looks_unseen = 0
        """Looks in a row at which it could not be seen."""

    def _tell_silent(self) -> None:
        report.say(
            f"no step is started yet: the file system of {self._base} has not answered for "
            f"{SILENT_SECONDS:.0f} s; where it never will, start the job in another directory"
        )

    def _keep_history_in(self, home: Path | None) -> None:
        """Make a folder for the attempts in the user's own. It holds no fence: a container that
        has the program's folder may not have that one."""
        if home is not None:
            with contextlib.suppress(OSError):
                self.history_folder = _make_folder(home)

    def begin(self) -> None:
        """Forbid the attempts before a requeue to write."""
        if self.directory:
            revoke_older(self._base, self._job, self.directory, self.restarts)
            return
        report.say(f"no directory for a fence can be made ({self._problem}): {WITHOUT_FENCE}")
        if self.history_folder is not None:
            report.say(f"the attempts are kept in {self.history_folder}, for a requeue")

    def look_again(self) -> None:
        """Use the directory again where no fence could be raised in it for the last attempt."""
        self.directory = self._made

    def raise_for(self, started: Attempt) -> Attempt:
        """Raise the fence of an attempt.

        Returns:
            The attempt; without a directory where the fence cannot be raised.
        """
        self._token = started.token
        problem = raise_fence(self.directory, started.token)
        if problem:
            report.say(f"the fence cannot be raised ({problem}): {WITHOUT_FENCE}")
            self.directory = ""
            started = msgspec.structs.replace(started, directory="")
        if started.sizes and not self.directory:
            report.say(NOT_GROWN)
        return started

    def mend(self) -> None:
        """Raise the fence again where it was removed.

        Without it every program would take itself for an old attempt, and write no checkpoint any
        more. After a requeue it stays down: the next supervisor removed it on purpose.
        """
        try:
            with self._host_calls.watched(SILENT_SECONDS, lambda: tell_held_up(self.directory)):
                stands = _stands(self.directory, self._token)
        except OSError as error:
            self._tell_unseen(error)
            return
        was_unseen, self._looks_unseen = self._looks_unseen > UNSEEN_LOOKS, 0
        if stands:
            if self._looks_down or was_unseen:
                report.say(f"{self.directory} is there again: the program may write again")
            self._looks_down = 0
            return
        try:
            job = self._client.job(self._job)
        except SresError:
            return  # the next look comes soon
        if job.state != "RUNNING" or job.restarts != self.restarts:
            return
        problem = raise_fence(self.directory, self._token)
        if not problem:
            report.say(f"{self.directory} was removed, and is made again; please leave it alone")
            self._looks_down = 0
            return
        if self._looks_down % LOOKS_BETWEEN_LINES == 0:
            report.say(
                f"{self.directory} is gone, and cannot be made again ({problem}): a program that "
                "asks attempt.is_current() writes no checkpoint until it is back; was "
                f"{self._base} moved or removed?"
            )
        self._looks_down += 1

    def _tell_unseen(self, error: OSError) -> None:
        """Tell of a fence that the program does not see either, in all likelihood (``chown -R`` of
        the project)."""
        if self._looks_unseen % LOOKS_BETWEEN_LINES == UNSEEN_LOOKS:
            report.say(
                f"the fence cannot be read ({error}): a program that asks attempt.is_current() "
                "writes no checkpoint until it can be; were its owner or its rights changed?"
            )
        self._looks_unseen += 1

    def progress(self) -> int:
        """Return the last step that the program reported; -1: none."""
        return attempt.read_progress(self.directory)

    def lost_seconds(self, began: float, now: float) -> float:
        """Return the work that is not behind a reported step.

        Args:
            began: when the attempt did, seconds since the epoch.
            now: the same.
        """
        return max(0.0, now - max(began, attempt.reported_at(self.directory)))

    def remove(self) -> None:
        """Remove the directory: the program has ended."""
        remove(self._made)
        if not self._made and self.history_folder is not None:
            _remove_empty(self.history_folder)


def open_directory(base: Path, job: int, supervisor: int) -> str:
    """Make the directory, and return its path.

    Args:
        base: the directory srun was started in (a shared file system on any cluster that trains).
        job: job id.
        supervisor: our pid: two supervised sruns of one job have a directory each.

    Raises:
        OSError: it cannot be made.
    """
    user, name = str(os.geteuid()), f"job-{job}-{supervisor}"
    try:
        _make(base / FOLDER / user / name)
        return str(base / FOLDER / user / name)
    except OSError as error:
        # Another user made it for himself alone, or holds our name in it.
        if not (base / FOLDER).is_symlink() and not (base / FOLDER).exists():
            raise
        try:
            _make(base / f"{FOLDER}-{user}" / user / name)
        except OSError:
            raise error from None
        return str(base / f"{FOLDER}-{user}" / user / name)


def _make_folder(base: Path) -> Path:
    """Make the user's own folder for what is no fence, and return its path.

    Raises:
        OSError: it cannot be made.
    """
    folder = base / FOLDER / str(os.geteuid())
    _make_shared(folder.parent)
    _make_own(folder)
    return folder


def _make(directory: Path) -> None:
    """Make a directory of the fence, and the two above it, where they are missing.

    Raises:
        OSError: that cannot be done, or another user could put his own in their place.
    """
    for left in reversed(range(_MAKE_TRIES)):
        try:
            _make_shared(directory.parent.parent)
            _make_own(directory.parent)
            _make_own(directory)
            return
        except FileNotFoundError:
            if not left:
                raise


def _make_shared(path: Path) -> None:
    """Make the folder in which each user has his own; all who may write beside it may write in it.

    Sticky, so that none can remove or rename another's.
    """
    try:
        path.mkdir(mode=0o700)
        beside = path.parent.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            mode = stat.S_IMODE(os.fstat(number).st_mode) & ~0o777  # setgid comes from the parent
            os.fchmod(number, mode | stat.S_IRWXU | beside | stat.S_ISVTX)
        finally:
            os.close(number)
    except FileExistsError:
        pass
    info = path.lstat()
    by_others = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(f"{path} is no directory of its own")
    if by_others and not info.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{path} may be changed by others: chmod +t {path}")


def _make_own(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    # Nothing is written into another user's folder, or through a link to elsewhere.
    if not _is_own(path):
        raise PermissionError(f"{path} is not ours")


def _is_own(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def open_own(directory: str) -> int:
    """Open a directory of the fence, and return its number. What is removed in it by that number is
    ours: who may write beside the shared folder can put another one in its place, with links.

    Raises:
        OSError: it is gone, leads elsewhere, or is another user's.
    """
    path = Path(directory)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(path.parent.parent, flags)
    for name in (path.parent.name, path.name):
        outer = number
        try:
            number = os.open(name, flags, dir_fd=outer)
        finally:
            os.close(outer)
        if os.fstat(number).st_uid != os.geteuid():
            os.close(number)
            raise PermissionError(errno.EPERM, "it is not ours", directory)
    return number


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int]:
    number = open_own(directory)
    try:
        yield number
    finally:
        os.close(number)


def remove_in(directory: str, is_meant: Callable[[str], bool]) -> None:
    """Remove files and folders of a directory of the fence, as far as that can be done.

    Args:
        directory: of the fence.
        is_meant: tells by the name.
    """
    with contextlib.suppress(OSError), _opened(directory) as number:
        with os.scandir(number) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in found:
            if not is_meant(name):
                continue
            if is_folder:
                import shutil  # late: no step waits for it

                shutil.rmtree(name, ignore_errors=True, dir_fd=number)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=number)


def revoke_older(base: Path, job: int, own: str, restarts: int) -> None:
    """Make the attempts of this job before a requeue stale.

    A directory whose token names the present restart stays: it is another supervised srun's.
    """
    user = str(os.geteuid())
    for folder in (base / FOLDER / user, base / f"{FOLDER}-{user}" / user):
        if not _is_own(folder):
            continue  # another user could have put anything there
        with contextlib.suppress(OSError):
            for directory in folder.glob(f"job-{job}-*"):
                token = _read(directory / attempt.FENCE).split(".")
                earlier = len(token) == 3 and token[1] != str(restarts)
                if str(directory) != own and earlier:
                    _remove_tree(directory)


def raise_fence(directory: str, token: str) -> str:
    """Allow only this attempt to write from now on.

    The directory may have been removed (``git clean``, ``rm -rf .sres``), or a quota may be used
    up: no reason to lose the job.

    Returns:
        What is wrong, when the fence could not be raised; the one before it is gone then.
    """
    if not directory:
        return ""
    path = Path(directory) / attempt.FENCE
    new = path.with_suffix(".new")
    try:
        _make(path.parent)
        attempt.write_file(new, f"{token}\n".encode())
        new.replace(path)
    except OSError as error:
        remove_in(directory, lambda name: name in (new.name, path.name))
        return str(error)
    return ""


def exclude_node(directory: str, node: str, step: int) -> None:
    """Forbid a node to write, but for steps from this one on.

    Args:
        directory: of the fence.
        node: it was left, and may only be cut off.
        step: number of the attempt's next step.

    Raises:
        OSError: that cannot be written down.
    """
    if directory:
        path = Path(directory) / attempt.LEFT / node
        os.close(open_own(directory))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        new = path.with_name(f".{node}.new")
        attempt.write_file(new, f"{step}\n".encode())
        new.replace(path)


def tell_held_up(directory: str) -> None:
    """Report that the supervisor waits for a file system in the middle of a step.

    Args:
        directory: of the fence.
    """
    report.say(
        f"the file system of {directory} has not answered for {SILENT_SECONDS:.0f} s: until it "
        "does, no lost node is replaced and no size is changed; ranks that step go on"
    )


class LeftNodes:
    """The nodes that one attempt has left, and that may not write for it any more."""

    def __init__(self, directory: str, host_calls: HostCalls) -> None:
        """
        Args:
            directory: of the fence; empty: there is none.
            host_calls: to the machine that this runs on.
        """
        self._directory = directory
        self._host_calls = host_calls
        self._unwritten: dict[str, int] = {}
        """By node, the attempt's next step: what could not be written down yet."""

    def add(self, node: str, step: int) -> None:
        """Forbid a node to write, now or as soon as that can be written down; see `exclude_node`.

        Until then the node's own sresd ends its tasks, and the other ranks refuse them.
        """
        self._unwritten[node] = step
        problem = self._write(node)
        if problem:
            report.say(
                f"{node} cannot be forbidden to write ({problem}): only its own sresd ends the "
                "tasks there until it can"
            )

    def write(self) -> None:
        """Write down what could not be written before."""
        for node in tuple(self._unwritten):
            if not self._write(node):
                report.say(f"{node} is forbidden to write now")

    def _write(self, node: str) -> str:
        """Return why it cannot be written down; empty: it is."""
        try:
            with self._host_calls.watched(SILENT_SECONDS, lambda: tell_held_up(self._directory)):
                exclude_node(self._directory, node, self._unwritten[node])
        except OSError as error:
            return error.strerror or repr(error)
        del self._unwritten[node]
        return ""


def holds(directory: str, token: str) -> bool:
    """Return whether the fence of this attempt is where its programs look for it.

    True also without a directory, and where it cannot be seen just now.
    """
    try:
        return _stands(directory, token)
    except OSError:
        return True


def _stands(directory: str, token: str) -> bool:
    """Return what `holds` does.

    Raises:
        OSError: the fence cannot be seen just now.
    """
    if not directory:
        return True
    try:
        return attempt.read_token(Path(directory) / attempt.FENCE) == token
    except OSError as error:
        # A link, a pipe, a socket or a directory in its place is no fence of ours.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return False
        raise


def remove(directory: str) -> None:
    """Forbid all tasks of the step to write, and remove what is ours."""
    if directory:
        _remove_tree(Path(directory))
        _remove_empty(Path(directory).parent)


def _remove_empty(folder: Path) -> None:
    """Remove a user's folder, and the one above it, unless anything is in them."""
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _remove_tree(directory: Path) -> None:
    remove_in(str(directory), lambda _: True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _read(path: Path) -> str:
    try:
        return attempt.read_token(path)
    except OSError:
        return ""


def forget_attempt(directory: str) -> None:
    """Remove what an earlier attempt wrote: it does not hold for the next one."""
    if directory:
        remove_in(directory, _is_of_attempt)


def _is_of_attempt(name: str) -> bool:
    return name.startswith(("mesh", HOLD_PREFIX)) or name in ("run", "left")
