"""Settings of a dataset that its samples follow from, and that change while it is read."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_resilience.training.data.settings_watch import SettingsWatch


class Dataset:
    def __init__(self) -> None:
        self.level = 0
        self.strength = 0.5
        self.name = "train"
        self.reads = 0
        self.first: int | None = None
        self.file: Any = None

    def set_level(self, level: int) -> None:
        self.level = level

    @property
    def _scale(self) -> float:
        return self.strength * 2

    def _open(self) -> Any:
        if self.file is None:
            self.file = object()
        return self.file

    def __getitem__(self, index: int) -> list[float]:
        self.reads += 1
        self.first = index
        self._open()
        return [self._scale * one * self.level for one in range(index)]


class Part:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class Collate:
    def __init__(self) -> None:
        self.share = 0.15

    def __call__(self, samples: list[Any]) -> Any:
        return [self.share for _ in samples]

    def by_method(self, samples: list[Any]) -> Any:
        return self(samples)


@pytest.mark.parametrize("deep", [0, 1, 2])
def test_a_setting_that_a_sample_follows_from_is_seen_to_change(deep: int) -> None:
    """Samples of a curriculum were those of its first stage, or of any one, without a word."""
    whole = dataset = Dataset()
    for _ in range(deep):
        whole = Part(whole)  # type: ignore[assignment]
    watch = SettingsWatch(whole, list)
    assert watch.changed() == ""
    dataset.set_level(1)
    dataset.strength = 0.7
    assert watch.changed() == "level, strength"


def test_what_reading_sets_and_what_it_does_not_ask_for_may_change() -> None:
    dataset = Dataset()
    watch = SettingsWatch(dataset, list)
    dataset[3]
    dataset.name = "valid"
    assert watch.changed() == ""


class Array:
    """Compares element by element, as those of numpy and torch do."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return self

    def __ne__(self, other: object) -> Any:
        return self

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


def test_arrays_are_no_settings_and_end_nothing() -> None:
    """One that is opened late, and one in the place of datasets."""
    dataset = Dataset()
    whole = Part(dataset)
    vars(whole)["datasets"] = Array()
    watch = SettingsWatch(whole, list)
    vars(dataset)["level"] = Array()
    assert watch.changed() == ""


def test_a_setting_that_is_no_number_has_not_changed() -> None:
    dataset = Dataset()
    dataset.strength = float("nan")
    assert SettingsWatch(dataset, list).changed() == ""


@pytest.mark.parametrize("method", [False, True])
def test_settings_of_a_collate_fn_are_seen_too(method: bool) -> None:
    collate = Collate()
    watch = SettingsWatch([1, 2], collate.by_method if method else collate)
    collate.share = 0.3
    assert watch.changed() == "share"
