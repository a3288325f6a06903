"""Checkpoints' names and manifests: what is read, what is never read, what may go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurm_resilience.errors import CheckpointError
from slurm_resilience.training.checkpoint import manifest as manifests
from slurm_resilience.training.checkpoint.catalog import CheckpointCatalog
from slurm_resilience.training.checkpoint.directory_claim import FILE, DirectoryClaim
from slurm_resilience.training.checkpoint.manifest import Damaged, Manifest, ManifestEntry
from slurm_resilience.training.checkpoint.names import (
    ABANDONED_SECONDS,
    SaveOwner,
    Temporary,
    any_step,
    dead,
    done,
    is_temporary,
    owner_of,
    step_of,
    surplus,
    temporary,
)

# A busy machine is no failure.
calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

steps = st.integers(0, 10**8)
owners = st.builds(
    SaveOwner,
    attempt=st.sampled_from(["", "12.0.1", "12.0.2", "77_3.1.2"]),
    host=st.sampled_from(["n1", "gpu-17.cluster", "a_b"]),
    pid=st.integers(1, 99),
    serial=st.sampled_from(["00ff", "abcd"]),
)


@calm
@given(steps, owners)
def test_a_name_says_what_it_is(step: int, owner: SaveOwner) -> None:
    assert step_of(done(step)) == any_step(done(step)) == step
    assert not is_temporary(done(step))
    name = temporary(step, owner)
    assert step_of(name) == -1  # never taken for a finished one
    assert is_temporary(name)
    assert any_step(name) == step
    found = owner_of(name)
    assert found is not None
    assert (found.pid, found.serial) == (owner.pid, owner.serial)


@pytest.mark.parametrize(
    "name", ["", "step-", "step-5", "step-0000005", "step-000005x", "xstep-000005", "step-00000٥"]
)
def test_other_names_are_left_alone(name: str) -> None:
    assert step_of(name) == -1
    assert not is_temporary(name)
    assert dead([Temporary(name, 1e9)], SaveOwner("", "n1", 1, "a"), (), ()) == []


found = st.lists(
    st.builds(
        lambda step, owner, quiet: Temporary(temporary(step, owner), quiet),
        st.integers(0, 9),
        owners,
        st.floats(0, 2 * ABANDONED_SECONDS),
    ),
    max_size=8,
    unique_by=lambda one: one.name,
)


@calm
@given(found, owners, st.sets(st.integers(1, 99)), st.data())
def test_only_the_dead_are_cleared_away(
    there: list[Temporary], me: SaveOwner, alive: set[int], data: st.DataObject
) -> None:
    mine = {one.name for one in there if data.draw(st.booleans())}
    gone = dead(there, me, mine, alive)
    assert not mine & {*gone}
    for one in there:
        owner = owner_of(one.name)
        assert owner is not None
        if one.name in mine or one.quiet > ABANDONED_SECONDS:
            continue
        other_attempt = bool(me.attempt) and temporary(0, owner) != temporary(
            0, owner._replace(attempt=me.attempt)
        )
        if other_attempt and owner.attempt[:3] != me.attempt[:3]:
            assert one.name not in gone, "another job may still write it"
            continue
        here = temporary(0, owner) == temporary(0, owner._replace(host=me.host))
        ended = here and (owner.pid == me.pid or owner.pid not in alive)
        assert (one.name in gone) == (other_attempt or ended)


@calm
@given(st.sets(st.integers(0, 30)), st.data(), st.integers(1, 4), st.sets(st.integers(0, 30)))
def test_what_is_needed_stays(
    there: set[int], data: st.DataObject, keep: int, loading: set[int]
) -> None:
    good = {step for step in there if data.draw(st.booleans())}
    gone = surplus(good, there - good, keep, loading)
    kept = sorted(good)[-keep:]
    assert not {*gone} & ({*kept} | loading)
    assert not good or max(good) not in gone
    assert {*gone} >= {step for step in good if step not in kept} - loading
    if len(good) < keep:
        assert gone == []  # a damaged one may be all that is left of its time
    assert all(step < min(kept) for step in gone)


def fill(shelf: CheckpointCatalog, step: int, content: bytes = b"0123456789") -> Path:
    directory = shelf.at(step)
    directory.mkdir()
    (directory / "part").write_bytes(content)
    files = {"part": manifests.entry(directory / "part")}
    manifests.write(directory, Manifest(step, 1, files, "2.0", 0.0))
    return directory


def test_the_checksum_is_of_the_whole_file(tmp_path: Path) -> None:
    content = os.urandom((8 << 20) + 17)
    (tmp_path / "part").write_bytes(content)
    entry = manifests.entry(tmp_path / "part")
    assert entry.size == len(content)
    (tmp_path / "part").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert manifests.entry(tmp_path / "part").crc32 != entry.crc32


@calm
@given(st.integers(0, 9), st.integers(0, 7))
def test_any_flipped_bit_is_found(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    shelf = CheckpointCatalog(tmp_path_factory.mktemp("checkpoints"))
    directory = fill(shelf, 1)
    manifest, _ = shelf.manifest(1)
    content = bytearray((directory / "part").read_bytes())
    content[at] ^= 1 << bit
    (directory / "part").write_bytes(content)
    with pytest.raises(Damaged, match="part: has other content"):
        manifests.verify(directory, manifest, ["part"])


def test_a_manifest_cannot_point_outside(tmp_path: Path) -> None:
    shelf = CheckpointCatalog(tmp_path)
    directory = fill(shelf, 1)
    for name in ("../step-000001/part", "/etc/hostname", "", ".."):
        manifests.write(directory, Manifest(1, 1, {name: ManifestEntry(10, 0)}, "2.0", 0.0))
        with pytest.raises(Damaged, match="outside"):
            shelf.manifest(1)
    manifests.write(directory, Manifest(2, 1, {}, "2.0", 0.0))
    with pytest.raises(Damaged, match="is of step 2"):
        shelf.manifest(1)


def test_a_look_is_cheap_and_never_stale(tmp_path: Path) -> None:
    shelf = CheckpointCatalog(tmp_path)
    assert shelf.readable() == -1
    fill(shelf, 1)
    directory = fill(shelf, 2)
    assert shelf.readable() == 2
    _, seen = shelf.manifest(2)
    shelf.remember(2, seen, "part: has other content")
    assert shelf.readable() == 1
    (directory / "part").write_bytes(b"9876543210")  # it was written anew
    assert shelf.readable() == 2
    (directory / "part").unlink()
    assert shelf.readable() == 1


def test_a_second_training_in_the_same_directory_is_seen_by_both(tmp_path: Path) -> None:
    one = DirectoryClaim(tmp_path, {"SLURM_JOB_ID": "12", "SRES_DIR": "/p/.sres/1/job-12-7"})
    two = DirectoryClaim(tmp_path, {"SLURM_JOB_ID": "13", "SRES_DIR": "/p/.sres/1/job-13-9"})
    assert one.renew() == one.renew() == ""
    assert two.renew() == "", "the first may have ended"
    assert two.renew() == ""
    assert one.renew() == "job 13 (/p/.sres/1/job-13-9)"
    assert two.renew() == "job 12 (/p/.sres/1/job-12-7)"
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_process_that_takes_over_keeps_the_claim_of_its_training(tmp_path: Path) -> None:
    environment = {"SRES_MEET": "dir:/dev/shm/sres-run-x/mesh"}
    one, two = (DirectoryClaim(tmp_path, environment) for _ in range(2))
    assert one.renew() == two.renew() == one.renew() == ""
    assert DirectoryClaim(tmp_path, {}).renew() == ""
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    assert one.renew() == one.renew() == "", "what is in the way is told by the save"


def test_the_pruner_takes_a_name_away_before_the_content(tmp_path: Path) -> None:
    shelf = CheckpointCatalog(tmp_path)
    for step in (1, 2, 3):
        fill(shelf, step)
    me = SaveOwner("", "here", os.getpid(), "a")
    other = tmp_path / temporary(4, SaveOwner("", "elsewhere", 7, "b"))
    other.mkdir()
    assert shelf.prune(1, me, {1}) == ["step-000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["step-000001", "step-000003", other.name]
    )
    os.utime(other, (0, 0))
    assert shelf.prune(1, me, set()) == ["step-000001", other.name]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


@pytest.mark.parametrize(("incarnation", "ends"), [("", True), ("0", True), ("1", False)])
def test_a_process_that_replaces_another_starts_where_nothing_can_be_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    incarnation: str,
    ends: bool,
) -> None:
    """A disk that turns read-only under a training ended it with the next lost rank."""
    fill(CheckpointCatalog(tmp_path), 1)
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    monkeypatch.setenv("SRES_INCARNATION", incarnation or "0")
    if not incarnation:
        monkeypatch.delenv("SRES_INCARNATION")
    if ends:
        with pytest.raises(CheckpointError, match="cannot be written to"):
            CheckpointCatalog(tmp_path)
        return
    assert CheckpointCatalog(tmp_path).readable() == 1
    assert "goes on without new ones" in caplog.text
