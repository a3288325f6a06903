"""The shared directory of a supervised step: fence, token, progress."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.clock import SystemClock
from slurm_resilience.resume import attempt, fence, report
from slurm_resilience.resume.history import AttemptHistory, read
from slurm_resilience.resume.live_step.training import read_outcome
from slurm_resilience.resume.progress.hang_evidence import NAMES
from slurm_resilience.resume.progress.stack_gathering import read_kept
from slurm_resilience.resume.srun.environment import Attempt
from slurm_resilience.resume.srun.host_calls import HostCalls


@pytest.fixture(autouse=True)
def _no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SRES_TOKEN", "SRES_DIR", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


def as_task(monkeypatch: pytest.MonkeyPatch, directory: str, token: str) -> None:
    monkeypatch.setenv("SRES_DIR", directory)
    monkeypatch.setenv("SRES_TOKEN", token)


def test_without_a_supervisor_everything_is_allowed(tmp_path: Path) -> None:
    assert attempt.is_current()
    attempt.report(5)
    assert attempt.read_progress(str(tmp_path)) == -1


def test_only_the_last_attempt_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = fence.open_directory(tmp_path, 12, 99)
    fence.raise_fence(directory, "12.0.1")
    as_task(monkeypatch, directory, "12.0.1")
    assert attempt.is_current()
    fence.raise_fence(directory, "12.0.2")
    assert not attempt.is_current()
    fence.remove(directory)
    assert not attempt.is_current()
    assert list(tmp_path.iterdir()) == []


def test_all_that_a_step_left_is_removed(tmp_path: Path) -> None:
    directory = fence.open_directory(tmp_path, 12, 99)
    fence.raise_fence(directory, "12.0.1")
    fence.exclude_node(directory, "n1", 2)
    (Path(directory) / "mesh" / "peers").mkdir(parents=True)
    fence.remove(directory)
    assert list(tmp_path.iterdir()) == []


def test_what_an_earlier_attempt_wrote_is_forgotten(tmp_path: Path) -> None:
    for name in ("mesh/peers", "mesh.2", "run/a", "left", "hold-2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "left" / "n1").touch()
    for name in ("hold-1", "fence", "progress"):
        (tmp_path / name).touch()
    fence.forget_attempt(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"fence", "progress"}
    fence.forget_attempt(str(tmp_path / "gone"))
    fence.forget_attempt("")


def test_a_fence_that_was_removed_is_raised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fence.open_directory(tmp_path, 12, 99)
    assert fence.raise_fence(directory, "12.0.1") == ""
    assert fence.holds(directory, "12.0.1")
    shutil.rmtree(tmp_path / fence.FOLDER)
    as_task(monkeypatch, directory, "12.0.1")
    attempt.report(5)  # has no listener, and does not fail
    assert not fence.holds(directory, "12.0.1")
    assert fence.raise_fence(directory, "12.0.2") == ""
    assert fence.holds(directory, "12.0.2")
    assert not attempt.is_current()


def test_a_fence_that_cannot_be_raised_is_told_and_leaves_no_old_one(tmp_path: Path) -> None:
    directory = fence.open_directory(tmp_path, 12, 99)
    fence.raise_fence(directory, "12.0.1")
    (Path(directory) / "token.new").mkdir()  # as good as a full disk: it cannot be written
    assert "token.new" in fence.raise_fence(directory, "12.0.2")
    assert not (Path(directory) / attempt.FENCE).exists()
    shutil.rmtree(tmp_path / fence.FOLDER)
    (tmp_path / fence.FOLDER).symlink_to(tmp_path)
    assert "no directory of its own" in fence.raise_fence(directory, "12.0.2")


def test_progress_is_the_last_word_whoever_said_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fence.open_directory(tmp_path, 12, 99)
    as_task(monkeypatch, directory, "12.0.1")
    for step in (1, 20, 300):
        attempt.report(step, loss=0.5)
    assert attempt.read_progress(directory) == 300


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": "x"}', '{"step": null}', "7", "\xff"])
def test_nonsense_is_no_progress(tmp_path: Path, text: str) -> None:
    (tmp_path / attempt.PROGRESS).write_bytes(text.encode("latin-1"))
    assert attempt.read_progress(str(tmp_path)) == -1


@pytest.mark.parametrize("planted", [".sres", f".sres/{os.geteuid()}"])
def test_a_link_is_not_followed(tmp_path: Path, planted: str) -> None:
    elsewhere, base = tmp_path / "elsewhere", tmp_path / "base"
    elsewhere.mkdir()
    (base / planted).parent.mkdir(parents=True)
    (base / planted).symlink_to(elsewhere)
    directory = fence.open_directory(base, 12, 99)
    assert Path(directory).is_relative_to(base / f".sres-{os.geteuid()}")
    assert list(elsewhere.iterdir()) == []
    fence.remove(directory)
    assert not (base / f".sres-{os.geteuid()}").exists()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as several users")


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_the_folder_of_another_user_is_not_used(tmp_path: Path, mode: int) -> None:
    (tmp_path / fence.FOLDER).mkdir()
    other = tmp_path / fence.FOLDER / "0"
    other.mkdir()
    os.chown(other, 65534, 65534)
    other.chmod(mode)
    directory = fence.open_directory(tmp_path, 12, 99)
    assert Path(directory).is_relative_to(tmp_path / ".sres-0")
    assert list(other.iterdir()) == []


def test_a_folder_that_others_may_change_is_not_used(tmp_path: Path) -> None:
    (tmp_path / fence.FOLDER).mkdir()
    (tmp_path / fence.FOLDER).chmod(0o777)
    directory = fence.open_directory(tmp_path, 12, 99)
    assert Path(directory).is_relative_to(tmp_path / f".sres-{os.geteuid()}")


@pytest.mark.parametrize(
    ("beside", "expected"), [(0o700, 0o1700), (0o755, 0o1755), (0o2775, 0o3775), (0o1777, 0o1777)]
)
def test_who_may_write_beside_the_folder_may_write_in_it(
    tmp_path: Path, beside: int, expected: int
) -> None:
    base = tmp_path / "project"
    base.mkdir()
    base.chmod(beside)
    directory = Path(fence.open_directory(base, 12, 99))
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (base / ".sres", directory.parent)]
    assert modes == [expected, 0o700 | expected & 0o2000]


_AS_USER = """
import os, sys
os.setgid(100); os.setuid(int(sys.argv[2])); os.umask(0o027)
from pathlib import Path
from slurm_resilience.resume import fence
directory = fence.open_directory(Path(sys.argv[1]), 12, 99)
print(directory, fence.raise_fence(directory, "12.0.1"))
"""


@needs_root
def test_several_users_of_a_project_have_a_fence_each() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own is closed to others
        base = Path(name)
        os.chown(base, 1001, 100)
        base.chmod(0o2770)
        for user in ("1001", "1002"):
            words = [sys.executable, "-c", _AS_USER, name, user]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert done.stdout.strip() == f"{base}/.sres/{user}/job-12-99", done.stderr
            assert (base / ".sres" / user).stat().st_uid == int(user)


def test_a_directory_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        fence.open_directory(tmp_path / "file", 12, 99)


class Host(HostCalls):
    """A machine with a working directory that cannot be written."""

    def __init__(self, base: Path, home: Path) -> None:
        super().__init__()
        self._base, self._own_home = base, home

    def working_directory(self) -> Path:
        return self._base

    def home_directory(self) -> Path | None:
        return self._own_home


def test_the_attempts_outlive_a_requeue_where_the_directory_cannot_be_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    home = tmp_path / "home"
    home.mkdir()
    slurm = FakeSlurm(2)
    job = slurm.job(slurm.submit(2))
    lines: list[str] = []
    for restarts in range(2):
        with report.written_to(lines.append):
            own = fence.Fence(slurm, job, restarts, Host(tmp_path / "file", home))
            own.begin()
        assert own.directory == ""
        history = AttemptHistory(own.history_folder, 12, restarts, ["a"], 99 + restarts)
        history.begin(SystemClock())
        assert history.next_number == restarts + 1
        history.start(history.next_number, ("n1",), 5.0)
    assert f"the attempts are kept in {home}/.sres" in lines[1]
    history.remove()
    own.remove()
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_file_system_that_does_not_answer_at_the_start_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """The log had no line while the job hung there."""
    told, lines = threading.Event(), list[str]()

    def take(line: str) -> None:
        lines.append(line)
        told.set()

    def answer(*_: object) -> str:
        assert told.wait(30) or not is_silent
        return str(tmp_path)

    if is_silent:
        monkeypatch.setattr(fence, "SILENT_SECONDS", 0.0)
        monkeypatch.setattr(fence, "open_directory", answer)
    slurm, threads = FakeSlurm(2), threading.active_count()
    with report.written_to(take):
        own = fence.Fence(slurm, slurm.job(slurm.submit(2)), 0, Host(tmp_path, tmp_path))
    assert [f"the file system of {tmp_path} has not answered" in line for line in lines] == (
        [True] if is_silent else []
    )
    assert own.directory and threading.active_count() == threads, "none is left to take signals"


def test_a_home_of_another_user_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert HostCalls().home_directory() == tmp_path
    host = HostCalls()
    host.uid += 1
    assert host.home_directory() is None
    for nowhere in ("", "~", str(tmp_path / "missing")):
        monkeypatch.setenv("HOME", nowhere)
        assert HostCalls().home_directory() is None


def test_an_earlier_life_is_revoked_and_a_sibling_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, sibling, own = (fence.open_directory(tmp_path, 12, pid) for pid in (1, 2, 3))
    other = fence.open_directory(tmp_path, 120, 1)
    fence.raise_fence(old, "12.0.4")
    fence.raise_fence(sibling, "12.1.1")
    fence.raise_fence(other, "120.0.1")
    fence.revoke_older(tmp_path, 12, own, restarts=1)
    assert not Path(old).exists()
    assert all(Path(path).exists() for path in (sibling, other, own))
    as_task(monkeypatch, old, "12.0.4")
    assert not attempt.is_current()


def within_seconds(call: Callable[[], object]) -> object:
    """Return what a call returns; it fails where the call waits for ever, or raises."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(call)
        try:
            return asked.result(timeout=20)
        except TimeoutError:
            for path in _PIPES:
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # or the pool would wait too
            raise


_PIPES: list[Path] = []


def plant_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    _PIPES.append(path)


@pytest.mark.parametrize("planted", ["pipe", "bytes", "huge"])
@pytest.mark.parametrize("folder", [".sres", ".sres-x"])
def test_what_others_plant_holds_no_supervisor_up(
    tmp_path: Path, planted: str, folder: str
) -> None:
    """In a shared folder any user can make one that looks like ours, before the job starts."""
    own = fence.open_directory(tmp_path, 12, 3)
    directory = tmp_path / folder / str(os.geteuid()) / "job-12-1"
    directory.mkdir(parents=True)
    token = directory / attempt.FENCE
    if planted == "pipe":
        plant_pipe(token)
    elif planted == "bytes":
        token.write_bytes(b"\xff\xfe")
    else:
        with token.open("wb") as file:
            file.truncate(1 << 40)
    within_seconds(lambda: fence.revoke_older(tmp_path, 12, own, restarts=1))
    assert directory.exists()


def test_only_own_folders_are_looked_at_for_earlier_attempts(tmp_path: Path) -> None:
    own = fence.open_directory(tmp_path, 12, 3)
    other = tmp_path / ".sres-x" / str(os.geteuid()) / "job-12-1"
    other.mkdir(parents=True)
    (other / attempt.FENCE).write_text("12.0.1\n")
    fence.revoke_older(tmp_path, 12, own, restarts=1)
    assert other.exists()


def test_a_pipe_in_place_of_the_fence_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fence.open_directory(tmp_path, 12, 99)
    as_task(monkeypatch, directory, "12.0.1")
    for name in (attempt.FENCE, attempt.PROGRESS, "outcome", NAMES):
        plant_pipe(Path(directory) / name)
    assert within_seconds(lambda: read_outcome(Path(directory))) is None
    assert within_seconds(lambda: read_kept(Path(directory))) is None
    assert within_seconds(attempt.is_current) is False
    assert within_seconds(lambda: fence.holds(directory, "12.0.1")) is False
    assert within_seconds(lambda: attempt.read_progress(directory)) == -1
    assert fence.raise_fence(directory, "12.0.1") == ""
    assert attempt.is_current()


@pytest.mark.parametrize("planted", ["pipe", "link"])
def test_what_others_plant_is_neither_written_to_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """Other users can, once a project's folders are open to all: a link had the user's own file
    overwritten."""
    directory = Path(fence.open_directory(tmp_path, 12, 99))
    as_task(monkeypatch, str(directory), "12.0.1")
    folder, name = directory.parent, f"job-12-{0:08x}-99"
    drafts = [
        (directory / attempt.FENCE).with_suffix(".new"),
        directory / f"{attempt.PROGRESS}.{os.getpid()}",
        directory / attempt.LEFT / ".n1.new",
        folder / f"{name}.new",
    ]
    (directory / attempt.LEFT).mkdir()
    key = tmp_path / "key"
    key.write_text("the user's own\n")
    for path in drafts:
        if planted == "pipe":
            plant_pipe(path)
        else:
            path.symlink_to(key)
    assert within_seconds(lambda: fence.raise_fence(str(directory), "12.0.1")) == ""
    within_seconds(lambda: attempt.report(7))
    within_seconds(lambda: fence.exclude_node(str(directory), "n1", 2))
    own = AttemptHistory(folder, 12, 0, [], 99)
    within_seconds(lambda: own.start(1, ("n1",), 5.0))
    assert key.read_text() == "the user's own\n"
    assert fence.holds(str(directory), "12.0.1")
    assert attempt.read_progress(str(directory)) == 7
    assert (directory / attempt.LEFT / "n1").read_text() == "2\n"
    assert (folder / f"{name}.history").is_file()


def test_a_disk_that_was_full_costs_the_fence_of_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(2)
    job = slurm.submit(2)
    monkeypatch.chdir(tmp_path)
    own = fence.Fence(slurm, slurm.job(job), 0, HostCalls())
    made = own.directory

    def attempt_of(number: int) -> Attempt:
        own.look_again()
        return own.raise_for(Attempt(job, number, 0, ("n1",), ("n1",), "n1", own.directory))

    assert attempt_of(1).directory == made
    with monkeypatch.context() as full:
        full.setattr(fence, "raise_fence", lambda *_: "No space left on device")
        assert attempt_of(2).directory == ""
    third = attempt_of(3)
    assert third.directory == made and fence.holds(made, third.token)


@pytest.mark.parametrize("sizes", ["2:4", ""])
def test_a_step_that_cannot_grow_without_the_directory_tells_so(
    sizes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(2)
    job = slurm.submit(2)
    monkeypatch.chdir(tmp_path)
    own = fence.Fence(slurm, slurm.job(job), 0, HostCalls())
    planned = Attempt(job, 1, 0, ("n1",), ("n1",), "n1", own.directory, sizes=sizes)
    lines: list[str] = []
    with report.written_to(lines.append):
        assert own.raise_for(planned).directory
        assert lines == []
        monkeypatch.setattr(fence, "raise_fence", lambda *_: "No space left on device")
        assert own.raise_for(planned).directory == ""
    assert any(fence.NOT_GROWN in line for line in lines) == bool(sizes), lines


def test_a_directory_that_is_moved_away_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a fence the program writes no checkpoint any more: that must not go unseen."""
    slurm, project = FakeSlurm(2), tmp_path / "project"
    job = slurm.submit(2)
    project.mkdir()
    monkeypatch.chdir(project)
    own = fence.Fence(slurm, slurm.job(job), 0, HostCalls())
    started = own.raise_for(Attempt(job, 1, 0, ("n1",), ("n1",), "n1", own.directory))
    as_task(monkeypatch, started.directory, started.token)
    lines: list[str] = []
    with report.written_to(lines.append):
        own.mend()
        assert attempt.is_current() and lines == []
        project.rename(tmp_path / "moved")
        for _ in range(fence.LOOKS_BETWEEN_LINES):
            own.mend()
        assert not attempt.is_current()
        (told,) = lines
        assert "writes no checkpoint until it is back" in told and str(project) in told
        own.mend()
        assert len(lines) == 2
        (tmp_path / "moved").rename(project)
        own.mend()
        own.mend()
    assert attempt.is_current()
    assert len(lines) == 3 and "is there again" in lines[-1]


@pytest.mark.parametrize(
    "text",
    [
        *('{"step": 1e999}', '{"step": NaN}', '{"step": -7}', '{"step": null}', "[1]", "7", ""),
        *("[" * 100_000, '{"step": 1' + "0" * 4000 + "}", "\udcff"),
    ],
    ids=lambda text: text[:20],
)
def test_progress_that_makes_no_sense_is_none(tmp_path: Path, text: str) -> None:
    """The supervisor reads it at each fault, and must not fail by it."""
    (tmp_path / attempt.PROGRESS).write_bytes(text.encode(errors="surrogateescape"))
    assert attempt.read_progress(str(tmp_path)) == -1


def test_what_json_does_not_know_is_reported_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_task(monkeypatch, str(tmp_path), "12.0.1")
    attempt.report(7, loss=float("nan"), where=tmp_path)
    assert attempt.read_progress(str(tmp_path)) == 7


def test_a_job_that_a_task_has_submitted_is_no_old_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch passes the environment of the task on."""
    as_task(monkeypatch, str(tmp_path), "12.0.1")
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    assert attempt.token() == "" and attempt.is_current()
    attempt.report(5)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert attempt.token() == "12.0.1" and not attempt.is_current()
    (tmp_path / attempt.FENCE).write_bytes(b"\xff")
    assert not attempt.is_current()


def test_a_directory_in_place_of_a_file_is_none_and_keeps_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look left a file open: the supervisor of a long job had none left in the end."""
    directory = fence.open_directory(tmp_path, 12, 99)
    as_task(monkeypatch, directory, "12.0.1")
    for name in (attempt.FENCE, attempt.PROGRESS):
        (Path(directory) / name).mkdir()
    (tmp_path / "job.history").mkdir()

    def count_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count_open()
    assert not attempt.is_current()
    assert not fence.holds(directory, "12.0.1")
    assert attempt.read_progress(directory) == -1
    assert read(tmp_path / "job.history") == []
    assert count_open() == before
    assert "directory" in fence.raise_fence(directory, "12.0.1")
    assert fence.raise_fence(directory, "12.0.1") == "", "it is out of the way by now"


def test_a_fence_that_cannot_be_read_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``chown -R`` of a project takes it from the program, too, which writes no checkpoint then."""
    slurm = FakeSlurm(2)
    monkeypatch.chdir(tmp_path)
    own = fence.Fence(slurm, slurm.job(slurm.submit(2)), 0, HostCalls())
    started = own.raise_for(Attempt(12, 1, 0, ("n1",), ("n1",), "n1", own.directory))
    lines: list[str] = []

    def is_refused(_: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", own.directory)

    with report.written_to(lines.append):
        with monkeypatch.context() as owned_by_another:
            owned_by_another.setattr(attempt, "read_token", is_refused)
            for _ in range(fence.UNSEEN_LOOKS):
                own.mend()
            assert lines == []  # a shared file system may fail for a moment
            for _ in range(fence.LOOKS_BETWEEN_LINES):
                own.mend()
            (told,) = lines
            assert "cannot be read" in told and own.directory in told
        own.mend()
        own.mend()
    assert len(lines) == 2 and "is there again" in lines[-1]
    assert fence.holds(started.directory, started.token)


@pytest.mark.parametrize("planted", [".sres", f".sres/{os.geteuid()}", "job"])
def test_nothing_is_removed_through_a_link(tmp_path: Path, planted: str) -> None:
    """Another user who may write in the project's folder can put his own `.sres` in the place of
    ours while the job runs: what the user had under these names elsewhere was removed."""
    base, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    base.mkdir()
    directory = Path(fence.open_directory(base, 12, 99))
    fence.raise_fence(str(directory), "12.0.1")
    (base / ".sres").rename(tmp_path / "away")
    link = directory if planted == "job" else base / planted
    victim = elsewhere / directory.relative_to(link)
    (victim / "run").mkdir(parents=True)
    for name in ("run/checkpoint", "token", "hold-1"):
        (victim / name).write_text("precious")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere)
    fence.forget_attempt(str(directory))
    assert fence.raise_fence(str(directory), "12.0.2") != ""
    with pytest.raises(OSError, match=r"symbolic|own|directory"):
        fence.exclude_node(str(directory), "n1", 2)
    fence.remove(str(directory))
    kept = {str(path.relative_to(victim)) for path in victim.rglob("*")}
    assert kept == {"run", "run/checkpoint", "token", "hold-1"}
