"""The attempts of one srun outlive the requeues of its job."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from slurm_resilience.cli.job_commands import _attempt_view, _attempts_table, _outlook
from slurm_resilience.clock import SYSTEM_CLOCK, SystemClock
from slurm_resilience.config import ResumeSettings
from slurm_resilience.resume.attempt import PROGRESS
from slurm_resilience.resume.decide.classify import Cause, Ending
from slurm_resilience.resume.decide.plan import PlanFacts, plan
from slurm_resilience.resume.elastic.size_target import AskedSize
from slurm_resilience.resume.fence import Fence
from slurm_resilience.resume.history import (
    FOLDER,
    AttemptHistory,
    goodput_of,
    read,
    read_all,
)

WORDS = ("-N2", "python", "train.py")
LOST_NODE = Ending(137, 60.0, False, "RUNNING", {"n2": "dead"}, ended_at=100.0, nodes=("n1", "n2"))
CLOCK = SystemClock()


class OtherYear(SystemClock):
    """A clock of another year."""

    year = 0.0

    def now(self) -> float:
        return super().now() + self.year


def history(folder: Path | None, restarts: int, words: tuple[str, ...] = WORDS) -> AttemptHistory:
    new = AttemptHistory(folder, 12, restarts, words)
    new.begin(CLOCK)
    return new


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.history"))


def test_it_goes_on_after_a_requeue(tmp_path: Path) -> None:
    first = history(tmp_path, 0)
    assert first.next_number == 1
    first.start(1, ("n1", "n2"), 40.0)
    first.end(LOST_NODE, "n2: dead", 300)
    second = history(tmp_path, 1)
    assert (second.endings, second.next_number, second.last_step) == ((LOST_NODE,), 2, 300)
    assert second.cause_of_requeue is not None and second.cause_of_requeue.cause == "n2: dead"
    assert second.last_ending is None, "the code of an earlier start is not this one's"
    second.start(2, ("n1", "n3"), 200.0)
    assert [past.number for past in read(files(tmp_path)[0])] == [1, 2]
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_whose_supervisor_died_counts_and_tells_no_cause(tmp_path: Path) -> None:
    history(tmp_path, 0).start(1, ("n1", "n2"), CLOCK.now() - 60)
    second = history(tmp_path, 1)
    assert second.next_number == 2 and second.cause_of_requeue is None
    (lost,) = second.endings
    assert lost.faulty and not lost.progressed


def test_what_a_start_without_an_end_did_counts_as_lost_at_most(tmp_path: Path) -> None:
    now = CLOCK.now()
    history(tmp_path, 0).start(1, ("n1", "n2"), now - 300)
    second = history(tmp_path, 1)
    second.start(2, ("n1", "n3"), now)
    second.end(Ending(0, 100.0, False, "RUNNING", ended_at=now + 100), "it ended well", -1, 0.0)
    told = second.goodput()
    assert told is not None and not told.is_exact
    assert round(told.seconds) == 400 and {round(n) for n in told.lost.values()} == {300}
    assert second.attempts[0].lost == "", "what it had reported is not known"


def test_budgets_hold_over_requeues(tmp_path: Path) -> None:
    limits = ResumeSettings(max_attempts=3)
    facts = PlanFacts(("n1", "n2"), 2, True, False, True, True)
    kinds = []
    for restarts in range(3):
        one = history(tmp_path, restarts)
        one.start(one.next_number, ("n1", "n2"), 40.0)
        one.end(LOST_NODE, "n2: dead", -1)
        cause = Cause("node", "n2: dead", ("n2",))
        kinds.append(plan(cause, facts, one.endings, limits).kind)
    assert kinds == ["requeue", "requeue", "stop"]


def test_another_srun_of_the_job_has_its_own(tmp_path: Path) -> None:
    history(tmp_path, 0).start(1, ("n1",), 40.0)
    assert history(tmp_path, 1, ("-N2", "python", "test.py")).next_number == 1
    assert history(tmp_path, 0).next_number == 1, "the same words, beside it in the same start"
    assert history(tmp_path, 1).next_number == 2


def test_the_file_of_a_job_that_never_came_back_is_removed(tmp_path: Path) -> None:
    old = tmp_path / "job-9-0123456789ab-77.history"
    old.write_text("[]")
    os.utime(old, (0, 0))
    history(tmp_path, 0)
    assert not old.exists()


def test_a_wrong_date_removes_no_file(tmp_path: Path) -> None:
    """The batch host has booted a year ahead: the histories of other jobs, and this one's, stay."""
    other = tmp_path / "job-9-0123456789ab-77.history"
    other.write_text("[]")
    first = history(tmp_path, 0)
    first.start(1, ("n1", "n2"), 40.0)
    first.end(LOST_NODE, "n2: dead", 300)
    clock = OtherYear()
    clock.year = 365 * 86400.0
    second = AttemptHistory(tmp_path, 12, 1, WORDS)
    second.begin(clock)
    assert second.last_step == 300
    assert other.exists()


def test_a_long_wait_in_the_queue_forgets_nothing(tmp_path: Path) -> None:
    first = history(tmp_path, 0)
    first.start(1, ("n1", "n2"), 40.0)
    first.end(LOST_NODE, "n2: dead", 300)
    os.utime(files(tmp_path)[0], (0, 0))
    assert history(tmp_path, 1).last_step == 300


@pytest.mark.parametrize(
    "changes",
    [
        {"started": 1e300},
        {"started": -1e300},
        {"nodes": ["n1\x1b[2J"]},
        {"nodes": ["n[1-"]},
        {"lost_seconds": 1e308},
        {"stopped": {"network": 1e308}},
        {"phases": {"running": -1e308}},
    ],
)
def test_what_no_supervisor_wrote_is_none(tmp_path: Path, changes: dict[str, object]) -> None:
    """An administrator looks at what any user may have put there."""
    entry = {"number": 1, "restarts": 0, "nodes": ["n1"], "started": 5.0}
    path = tmp_path / "job-12-a.history"
    path.write_bytes(msgspec.json.encode([entry]))
    assert len(read(path)) == 1
    path.write_bytes(msgspec.json.encode([entry | changes]))
    assert read(path) == []


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_a_file_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    one = history(tmp_path, 0)
    one.start(1, ("n1",), 40.0)
    files(tmp_path)[0].write_bytes(text.encode("latin-1"))
    assert history(tmp_path, 1).next_number == 1


def test_a_disk_that_is_full_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one = history(tmp_path / "missing", 0)
    one.start(1, ("n1",), 40.0)
    one.end(LOST_NODE, "n2: dead", 5)
    assert capfd.readouterr().err.count("not kept for a requeue") == 1
    assert (one.endings, one.last_step) == ((LOST_NODE,), 5)
    one.remove()


def test_a_stale_folder_ends_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def is_stale(_: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "is_dir", is_stale)
    assert history(tmp_path, 1).next_number == 1
    assert "cannot be read: [Errno 116] Stale file handle" in capfd.readouterr().err


def test_what_a_full_disk_did_not_take_is_written_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """So is it where a person has removed the folder, which the fence makes again."""
    folder = tmp_path / "folder"
    one = history(folder, 0)
    one.start(1, ("n1", "n2"), 40.0)
    folder.mkdir()
    one.end(LOST_NODE, "n2: dead", 5)
    assert "the attempts are kept again" in capfd.readouterr().err
    assert history(folder, 1).endings == (LOST_NODE,)


def test_without_a_folder_it_lives_as_long_as_its_supervisor() -> None:
    one = history(None, 0)
    one.start(1, ("n1",), 40.0)
    one.end(LOST_NODE, "n2: dead", 5)
    one.remove()
    assert one.last_ending == LOST_NODE


def test_the_attempts_of_a_job_are_found_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER / "1000"
    folder.mkdir(parents=True)
    one = history(folder, 0)
    one.start(1, ("n1", "n2"), 40.0)
    one.end(LOST_NODE, "n2: dead", 5)
    one.start(2, ("n1", "n3"), 90.0)
    (folder / "job-120-a-1.history").write_bytes(files(folder)[0].read_bytes())
    (folder / "job-12-broken-1.history").write_text("{")
    (folder / "job-12-link-1.history").symlink_to(files(folder)[0])
    os.mkfifo(folder / "job-12-pipe-1.history")
    ((first, second),) = read_all(tmp_path, 12)
    assert (first.cause, first.step, second.ending) == ("n2: dead", 5, None)
    assert read_all(tmp_path, 1) == []


def test_what_an_end_cost(tmp_path: Path) -> None:
    history = AttemptHistory(tmp_path, 7, 0, ("train",))
    assert history.lost == ""
    history.start(1, ("n1",), 100.0)
    assert history.lost == ""
    failed = Ending(1, 60.0, False, "RUNNING", ended_at=160.0)
    history.end(failed, "n1: dead", -1, 60.0)
    assert history.lost == "60 s of work at most: attempt 1 reported no checkpoint"
    history.start(2, ("n2",), 161.0)
    history.end(msgspec.structs.replace(failed, progressed=True), "n2: dead", 40, 12.4)
    history.start(3, ("n3",), 230.0)
    assert history.lost == "12 s of work, since step 40 was reported"
    # It is still known after a requeue.
    again = AttemptHistory(tmp_path, 7, 1, ("train",), supervisor=1)
    again.attempts = read(next(tmp_path.glob("*.history")))[:2]
    assert again.lost == history.lost


def test_work_since_the_last_reported_step_is_lost(tmp_path: Path) -> None:
    fence = Fence.__new__(Fence)
    fence.directory = str(tmp_path)
    assert fence.lost_seconds(100.0, 160.0) == 60.0
    (tmp_path / PROGRESS).write_text("{}")
    os.utime(tmp_path / PROGRESS, (150.0, 150.0))
    assert fence.lost_seconds(100.0, 160.0) == 10.0
    # Reported by an attempt before.
    assert fence.lost_seconds(155.0, 160.0) == 5.0


def test_what_sres_job_show_tells_is_kept(tmp_path: Path) -> None:
    first = history(tmp_path, 0)
    first.start(1, ("n1", "n2"), 40.0)
    first.end(LOST_NODE, "n2: dead", 300, 20.0)
    first.start(2, ("n1", "n3"), 110.0)
    first.came_back({"step ended": 0.5, "nodes ready": 1.0, "running": 9.5})
    first.goes_on_by("swap: 1 of 2 nodes to be exchanged")
    past = read(files(tmp_path)[0])
    assert past[1].phases["running"] == 9.5 and past[1].next_way.startswith("swap")
    running = goodput_of(past, now=140.0)
    assert running is not None and running.seconds == 100.0
    assert running.lost == {"hardware": 30.0}, "20 s done again, and 10 s until it ran"
    told = "\n".join(_outlook(past, 140.0))
    assert "70 % of 1 min 40 s" in told and "if a node fails: swap: 1 of 2" in told
    rows = [_attempt_view(one) for one in past]
    # Lines are broken where the terminal ends.
    assert "9.5 s" in _attempts_table(rows, 140.0)


def test_an_undisturbed_run_has_lost_nothing(tmp_path: Path) -> None:
    first = history(tmp_path, 0)
    first.start(1, ("n1", "n2"), 40.0)
    past = read(files(tmp_path)[0])
    assert goodput_of(past) is None
    assert goodput_of(past, now=100.0) is None


def test_the_size_that_a_person_asked_for_outlives_a_requeue(tmp_path: Path) -> None:
    history = AttemptHistory(tmp_path, 7, 0, ("train",))
    history.start(1, ("n1",), 10.0)
    history.aims_at(AskedSize(4))
    assert history.target == AskedSize(), "it follows from srun's options"
    history.aims_at(AskedSize(3, "alice"))
    again = AttemptHistory(tmp_path, 7, 1, ("train",), supervisor=1)
    again.begin(SYSTEM_CLOCK)
    again.start(2, ("n1",), 20.0)
    assert again.target == AskedSize(3, "alice")
