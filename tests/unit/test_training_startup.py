"""The tasks of a process before it joins."""

from __future__ import annotations

import importlib
import sys

import pytest

startup = pytest.importorskip(
    "slurm_resilience.training.recovery.startup", reason="torch is not installed"
)

from slurm_resilience.training import compat  # noqa: E402
from slurm_resilience.training.options import Options  # noqa: E402


@pytest.mark.parametrize(("value", "told"), [("1", 1), ("true", 1), ("0", 0), ("", 0), ("no", 0)])
def test_groups_connect_at_once(value: str, told: int, caplog: pytest.LogCaptureFixture) -> None:
    environment = {startup.LAZY: value, "HOME": "/"}
    startup.connect_at_once(environment)
    assert environment == {"HOME": "/"}
    assert caplog.text.count("is not used") == told
    startup.connect_at_once(environment)
    assert environment == {"HOME": "/"}


def test_forming_the_first_world_imports_nothing_more() -> None:
    importlib.import_module("torch.distributed.tensor")
    startup.warm_up(Options())
    known = set(sys.modules)
    compat.forget_layouts()
    assert set(sys.modules) == known
