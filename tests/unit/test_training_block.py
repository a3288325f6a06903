"""A process trains once, unless it is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.errors import UsageError
from slurm_resilience.training import block


class Runs:
    """Stands for `BlockRunner`."""

    def __init__(self, *_: Any) -> None:
        pass

    def run(self, _: Any) -> str:
        return "trained"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(block, "BlockRunner", Runs)
    monkeypatch.setattr(block, "_been", set())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def fold(session: Any) -> None:
        pass

    return block.resilient(fold)


def test_a_second_training_is_refused(
    train: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SRES_MEET", f"dir:{tmp_path}/one")
    assert train() == "trained"
    with pytest.raises(UsageError, match=r"one training a process.*\(fold\)"):
        train()
    monkeypatch.setenv("SRES_MEET", f"dir:{tmp_path}/two")
    assert train() == "trained"


def test_who_is_alone_may_train_again(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRES_MEET", "alone")
    assert [train(), train()] == ["trained", "trained"]
