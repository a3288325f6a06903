"""The lab's fixtures, for trainings that run on its nodes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_machine import WarmMachine

_spec = importlib.util.spec_from_file_location(
    "cluster_fixtures", Path(__file__).parents[1] / "cluster" / "conftest.py"
)
assert _spec is not None and _spec.loader is not None
_cluster = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_cluster)
fresh_lab, shared_lab, wait_for = _cluster.fresh_lab, _cluster.shared_lab, _cluster.wait_for


@pytest.fixture(scope="session")
def warm_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmMachine]:
    """Have torch imported once, not by each rank of each test."""
    machine = WarmMachine(tmp_path_factory.mktemp("warm"))
    yield machine
    machine.end()
