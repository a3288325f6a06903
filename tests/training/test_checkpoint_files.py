"""Checkpoints of one process: what is on the disk, and what becomes of it when it is damaged."""

from __future__ import annotations

import errno
import io
import json
import logging
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from slurm_resilience.errors import CheckpointError, UsageError  # noqa: E402
from slurm_resilience.resume import attempt  # noqa: E402
from slurm_resilience.training.checkpoint import Checkpointer, writing  # noqa: E402
from slurm_resilience.training.checkpoint.agreement import one_line  # noqa: E402
from slurm_resilience.training.state import Tracked  # noqa: E402

pytestmark = [
    pytest.mark.training,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

PART = "__0_0.distcp"


def filled(directory: Path, *steps: int, keep: int = 10) -> Checkpointer:
    checkpointer = Checkpointer(directory, keep=keep)
    for step in steps:
        checkpointer.save(step, {"weights": torch.full((1000,), float(step))}, blocking=True)
    assert checkpointer.counts.last == steps[-1], checkpointer.counts
    return checkpointer


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what this project logged at warning or above."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("slurm_resilience") and record.levelno >= logging.WARNING
    ]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip, PART),
        (flip, ".metadata"),
        (cut, PART),
        (cut, "manifest.json"),
        (Path.unlink, PART),
        (Path.unlink, ".metadata"),
        (Path.unlink, "manifest.json"),
        (lambda path: path.write_bytes(b""), "manifest.json"),
        (lambda path: path.write_text('{"step": 2}'), "manifest.json"),
    ],
)
def test_a_damaged_one_is_skipped_with_one_line_that_names_the_file(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], object],
    name: str,
) -> None:
    filled(tmp_path, 1, 2)
    damage(tmp_path / "step-000002" / name)
    checkpointer = Checkpointer(tmp_path)
    assert [checkpointer.latest() for _ in range(3)] == [1, 1, 1]
    assert checkpointer.readable() == 1
    (line,) = lines(caplog)
    assert f"step-000002/{name}" in line
    with pytest.raises(CheckpointError, match=r"step 2 .*" + name.replace(".", r"\.")):
        checkpointer.load(2, {"weights": torch.zeros(1000)})
    state = {"weights": torch.zeros(1000)}
    checkpointer.load(1, state)
    assert state["weights"].eq(1).all()


def test_damage_after_a_good_look_is_seen(tmp_path: Path) -> None:
    checkpointer = filled(tmp_path, 1, 2)
    assert checkpointer.latest() == 2
    flip(tmp_path / "step-000002" / PART)
    assert checkpointer.latest() == 1


def test_a_damaged_step_can_be_saved_again(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    cut(tmp_path / "step-000002" / PART)
    checkpointer = filled(tmp_path, 2)
    assert checkpointer.latest() == 2


def test_a_good_step_is_not_written_over(tmp_path: Path) -> None:
    checkpointer = filled(tmp_path, 1)
    checkpointer.save(1, {"weights": torch.zeros(1000)}, blocking=True)
    state = {"weights": torch.ones(1000)}
    checkpointer.load(1, state)
    assert state["weights"].eq(1).all()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_nothing_there(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "new" / "deep")
    assert checkpointer.latest() == checkpointer.readable() == -1
    with pytest.raises(CheckpointError, match="step 5"):
        checkpointer.load(5, {})


def test_half_written_ones_are_never_looked_at(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    (tmp_path / "step-000002").rename(tmp_path / "step-000002.tmp-12.0.1_n3_77_ab")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "notes").touch()
    assert Checkpointer(tmp_path).latest() == 1


def test_the_copies_are_of_the_moment_of_the_save(tmp_path: Path) -> None:
    model = nn.Linear(400, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen = {"batches": [1, 2]}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": seen}
    model(torch.ones(1, 400)).sum().backward()
    optimizer.step()
    scheduler.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    momentum = optimizer.state[model.weight]["momentum_buffer"].clone()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state)
    optimizer.step()
    scheduler.step()
    seen["batches"].append(3)
    assert checkpointer.wait(30)
    checkpointer.load(1, state)
    assert all(value.equal(expected[name]) for name, value in model.state_dict().items())
    assert optimizer.state[model.weight]["momentum_buffer"].equal(momentum)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert scheduler.last_epoch == 1
    assert seen == {"batches": [1, 2]}


def test_saving_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    gradient = model.weight.grad.clone()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, {"model": model, "optimizer": optimizer}, blocking=True)
    assert not optimizer.state
    assert model.weight.grad.equal(gradient)
    weight = model.weight.detach().clone()
    optimizer.step()
    checkpointer.load(0, {"model": model, "optimizer": optimizer})
    assert not optimizer.state
    assert model.weight.equal(weight)


def test_one_optimizer_for_two_modules(tmp_path: Path) -> None:
    def build() -> dict[str, object]:
        one, two = nn.Linear(2, 2), nn.Linear(2, 2)
        return {"one": one, "two": two, "opt": torch.optim.Adam([*one.parameters(), two.weight])}

    def moments(state: dict[str, object]) -> list[object]:
        return [kept["exp_avg"].tolist() for kept in state["opt"].state.values()]  # type: ignore[attr-defined]

    old, new = build(), build()
    old["two"](old["one"](torch.ones(1, 2))).sum().backward()  # type: ignore[operator]
    old["opt"].step()  # type: ignore[attr-defined]
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, old, blocking=True)
    checkpointer.load(1, new)
    assert moments(new) == moments(old)
    assert new["two"].weight.equal(old["two"].weight)  # type: ignore[attr-defined]


class FullDisk(io.BytesIO):
    """A file with room for so many bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("room", [0, 100, 700, 1200, 5000])
def test_a_disk_that_gets_full_is_told_as_such(room: int) -> None:
    """torch says "unexpected pos 704 vs 598" where it gets full in the middle of a file."""
    with pytest.raises((OSError, RuntimeError)) as caught:
        torch.save({"weights": torch.ones(1000)}, FullDisk(room))
    assert re.search("No space left|is the disk full", one_line(caught.value))


@pytest.mark.parametrize("plain", [False, True])
def test_a_parameter_that_an_optimizer_alone_holds(tmp_path: Path, plain: bool) -> None:
    """The training ended at its first checkpoint."""

    def make(value: float) -> tuple[torch.Tensor, dict[str, Any]]:
        model = nn.Linear(2, 2)
        scale = torch.full((2,), value, requires_grad=True)
        scale = scale if plain else nn.Parameter(scale.detach())
        optimizer = torch.optim.AdamW([*model.parameters(), scale], 0.1)
        for one in (*model.parameters(), scale):
            one.grad = torch.ones_like(one)
        return scale, Tracked({"model": model, "optimizer": optimizer}).objects

    scale, state = make(1.0)
    state["optimizer"].step()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, blocking=True)
    other, fresh = make(5.0)
    checkpointer.load(1, fresh)
    checkpointer.close()
    assert torch.equal(other, scale) and fresh["optimizer"].param_groups[0]["params"][2] is other
    for one, here in ((scale, state), (other, fresh)):
        one.grad = torch.ones_like(one)
        here["optimizer"].step()
    assert torch.equal(other, scale)


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"model": nn.Linear(3, 3)}, blocking=True)
    for state, words in [
        ({"model": nn.Linear(4, 3)}, "Size mismatch"),
        ({"model": nn.Sequential(nn.Linear(3, 3))}, r"has no model\.0\.bias"),
        ({"model": nn.Linear(3, 3, bias=False)}, r"model has no model\.bias"),
        ({"other": 1}, "it has no 'other'"),
    ]:
        with pytest.raises(CheckpointError, match=words) as caught:
            checkpointer.load(1, state)
        assert "\n" not in str(caught.value)


def test_a_state_that_cannot_be_saved_is_an_error_at_once(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"] = torch.ones(2, 2)
    with pytest.raises(UsageError, match="2 parameters of the optimizer 'optimizer'"):
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
    assert checkpointer.wait(0)


def test_bad_places(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        with pytest.raises(CheckpointError, match="a file is in the way"):
            Checkpointer(place)
    with pytest.raises(CheckpointError, match="/proc/sres"):
        Checkpointer("/proc/sres")
    with pytest.raises(UsageError, match="keep"):
        Checkpointer(tmp_path, keep=0)


def test_a_directory_that_vanishes_costs_only_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = filled(tmp_path / "checkpoints", 1)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").touch()
    for step in (2, 3):
        checkpointer.save(step, {"weights": torch.zeros(3)}, blocking=True)
    assert (checkpointer.counts.failed, checkpointer.counts.in_a_row) == (2, 2)
    assert len(lines(caplog)) == 2
    assert checkpointer.readable() == -1
    (tmp_path / "checkpoints").unlink()
    checkpointer.save(4, {"weights": torch.zeros(3)}, blocking=True)
    assert checkpointer.counts.in_a_row == 0
    assert checkpointer.latest() == 4


def test_a_save_waits_for_a_thread_where_the_system_has_none_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the step by a fault, and the training after three."""

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    checkpointer, state = Checkpointer(tmp_path), {"weights": torch.zeros(3)}
    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", refused)
        checkpointer.save(1, state)
        assert not checkpointer.wait(0.0)
        with pytest.raises(RuntimeError, match="can't start"):
            checkpointer.wait()
    assert lines(caplog) == ["checkpoint of step 1 waits for a thread: can't start new thread"]
    assert checkpointer.close(60)
    assert checkpointer.latest() == 1


def test_pruning_keeps_the_newest_good_ones(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3, 4, 5)
    cut(tmp_path / "step-000004" / PART)
    cut(tmp_path / "step-000001" / PART)
    checkpointer = Checkpointer(tmp_path, keep=2)
    assert sorted(checkpointer.prune()) == ["step-000001", "step-000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000003",
        "step-000004",
        "step-000005",
    ]


def test_each_save_prunes(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_what_the_peers_were_told_stays(tmp_path: Path) -> None:
    checkpointer = filled(tmp_path, 1, keep=1)
    assert checkpointer.readable() == 1
    for step in (2, 3):
        checkpointer.save(step, {"weights": torch.zeros(3)}, blocking=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]
    assert checkpointer.readable() == 3
    assert checkpointer.prune() == ["step-000001"]


def test_only_the_valid_attempt_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = tmp_path / "supervisor"
    supervisor.mkdir()
    (supervisor / attempt.FENCE).write_text("12.0.1")
    monkeypatch.setenv("SRES_DIR", str(supervisor))
    monkeypatch.setenv("SRES_TOKEN", "12.0.1")
    checkpointer = filled(tmp_path / "checkpoints", 1)
    assert attempt.read_progress(str(supervisor)) == 1
    (supervisor / attempt.FENCE).write_text("12.0.2")
    checkpointer.save(2, {"weights": torch.zeros(3)}, blocking=True)
    (line,) = lines(caplog)
    assert "step 2 is refused: a later attempt has begun" in line
    caplog.clear()
    (supervisor / attempt.FENCE).unlink()
    checkpointer.save(2, {"weights": torch.zeros(3)}, blocking=True)
    assert f"step 2 is refused: {supervisor} is gone, or not to be seen" in lines(caplog)[0]
    there = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert there == ["step-000001", "written-by"]
    assert attempt.read_progress(str(supervisor)) == 1
    assert checkpointer.prune() == []


def test_due(tmp_path: Path) -> None:
    assert [step for step in range(10) if Checkpointer(tmp_path, every=3).due(step)] == [3, 6, 9]
    assert not any(Checkpointer(tmp_path).due(step) for step in range(10))


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    filled(tmp_path, 7)
    manifest = json.loads((tmp_path / "step-000007" / "manifest.json").read_text())
    assert (manifest["step"], manifest["world"]) == (7, 1)
    assert manifest["torch"] == torch.__version__
    assert {*manifest["files"]} == {PART, ".metadata"}
    assert manifest["files"][PART]["size"] == (tmp_path / "step-000007" / PART).stat().st_size


def test_it_can_be_closed_and_used_again(tmp_path: Path) -> None:
    checkpointer = filled(tmp_path, 1)
    assert checkpointer.close(30)
    assert checkpointer.close(30)
    checkpointer.save(2, {"weights": torch.zeros(3)}, blocking=True)
    assert checkpointer.latest() == 2
    assert checkpointer.close(30)


def test_a_certified_checkpoint_is_preferred_where_that_is_wished(tmp_path: Path) -> None:
    keeper = filled(tmp_path, 10, 20, 30)
    keeper.certify(20)
    keeper.close()
    assert keeper.certified == 20
    assert Checkpointer(tmp_path).latest() == 30
    careful = Checkpointer(tmp_path, prefer_certified=True)
    assert careful.latest() == careful.readable() == 20
    careful.load(20, {"weights": torch.zeros(1000)})
    assert careful.certified == 20


def test_a_doubtful_checkpoint_is_the_last_that_is_read(tmp_path: Path) -> None:
    keeper = filled(tmp_path, 10, 20, 30)
    keeper.certify(10)
    keeper.doubt(15)
    keeper.certify(30)  # what was doubted is not certified by what comes later
    assert keeper.close()
    assert keeper.certified == keeper.latest() == 10
    shutil.rmtree(keeper._catalog.at(10))
    assert Checkpointer(tmp_path).latest() == 30


def test_a_doubtful_checkpoint_is_written_anew(tmp_path: Path) -> None:
    keeper = filled(tmp_path, 10)
    keeper.doubt(5)
    keeper.save(10, {"weights": torch.full((1000,), 7.0)}, blocking=True)
    state = {"weights": torch.zeros(1000)}
    keeper.load(10, state)
    assert state["weights"][0] == 7.0
    keeper.certify(10)
    assert keeper.close()
    assert keeper.certified == 10


def test_what_is_certified_stays_on_the_disk(tmp_path: Path) -> None:
    keeper = filled(tmp_path, 10, keep=2)
    keeper.certify(10)
    for step in (20, 30, 40, 50):
        keeper.save(step, {"weights": torch.zeros(1000)}, blocking=True)
    assert keeper.close()
    assert keeper._catalog.steps() == [50, 40, 10]


def test_a_save_that_hangs_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else says that a training makes no checkpoint any more."""
    goes_on, write = threading.Event(), writing._write

    def hangs(*args: Any) -> Path:
        goes_on.wait()
        return write(*args)

    monkeypatch.setattr(writing, "_write", hangs)
    checkpointer = Checkpointer(tmp_path)
    state = {"weights": torch.zeros(10)}
    checkpointer.save(1, state)
    checkpointer.save(2, state)
    assert not lines(caplog)
    monkeypatch.setattr("slurm_resilience.training.checkpoint.checkpointer.SLOW_SECONDS", 0.0)
    assert not checkpointer.wait(0.01)
    checkpointer._slow = (1, 3600.0)
    checkpointer.save(3, state)
    (line,) = lines(caplog)
    assert "step 1 is still being written" in line and str(tmp_path) in line
    goes_on.set()
    assert checkpointer.close()
