from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import UsageError
from slurm_resilience.slurm.hostlists import expand, fold


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[01-02],m7", ("m7", "n01", "n02")),
        ("rack1-n[1,3]", ("rack1-n1", "rack1-n3")),
    ],
)
def test_expand(text: str, names: tuple[str, ...]) -> None:
    assert sorted(expand(text)) == sorted(names)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "n[1-",
        "n[3-1]",
        "@all",
        "n1;reboot",
        "-n1",
        "$(id)",
        "n*",
        "a!b",
        "n[1-9999999]",
        "n" + "1" * 5000,
        "n[1-3]" * 50,
    ],
)
def test_malformed_is_one_clear_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand(text)
    assert "\n" not in str(caught.value)


@given(st.sets(st.integers(0, 300), min_size=1, max_size=40))
def test_fold_and_expand_are_inverse(numbers: set[int]) -> None:
    names = {f"n{number}" for number in numbers}
    assert set(expand(fold(names))) == names


@given(st.text(max_size=30))
def test_no_text_crashes(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert expand(text)
