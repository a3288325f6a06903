"""The lab's fixtures, for trainings that run on its nodes."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent

import pytest
from naive import PROGRAM, Program
from warm_machine import WarmMachine

_spec = importlib.util.spec_from_file_location(
    "cluster_fixtures", Path(__file__).parents[1] / "cluster" / "conftest.py"
)
assert _spec is not None and _spec.loader is not None
_cluster = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_cluster)
fresh_lab, shared_lab, wait_for = _cluster.fresh_lab, _cluster.shared_lab, _cluster.wait_for


INTERFACE = "GLOO_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def _interface_of_gloo() -> Iterator[None]:
    """Give the variable back that a world which is formed in this process sets: a lab's nodes would
    have it too, and cannot reach each other over `lo`."""
    before = os.environ.get(INTERFACE)
    yield
    os.environ.pop(INTERFACE, None)
    if before is not None:
        os.environ[INTERFACE] = before


@pytest.fixture(scope="session")
def warm_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmMachine]:
    """Have torch imported once, not by each rank of each test."""
    machine = WarmMachine(tmp_path_factory.mktemp("warm"))
    yield machine
    machine.end()


@pytest.fixture
def run(tmp_path: Path, warm_machine: WarmMachine) -> Program:
    """Runs a program on two ranks."""
    numbers = itertools.count()

    def go(
        body: str, parts: str = "", options: str = "", inject: str = ""
    ) -> subprocess.CompletedProcess[str]:
        (place := tmp_path / str(next(numbers))).mkdir()
        program = place / "train.py"
        body = indent(dedent(body).strip("\n"), " " * 4)
        program.write_text(PROGRAM.format(parts=dedent(parts), options=options, body=body))
        more = {"OMP_NUM_THREADS": "1", "TMPDIR": str(place), "SRES_INJECT": inject}
        words = ("--nproc-per-node=2", "--standby=0", str(program))
        return warm_machine.run(words, more, place)

    return go
