"""The arguments that `resilient` refuses at once."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_resilience.errors import UsageError
from slurm_resilience.training.options import Options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_world", "2"),
        ("min_world", 1.5),
        ("replica_size", 0),
        ("max_faults", True),
        ("partner_every", -1),
        ("patience", "x"),
        ("silence", 0),
        ("abort_timeout", float("nan")),
        ("finalize", 3),
        ("on_resize", "log"),
        ("backend", None),
        ("checkpointer", "directory"),
        ("watch", 5),
        ("watch", True),
    ],
)
def test_a_value_that_makes_no_sense_is_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^resilient: {name}={value!r} is not "):
        Options(**{name: value})


def test_patience_may_be_none() -> None:
    assert Options(patience=0, start_patience=0, watch=False, min_world=1).watch is False
