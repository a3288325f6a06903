"""Labs for the tests in here: real Slurm, started by the test, gone after it.

    def test_something(shared_lab, wait_for):
        lab = shared_lab(LabSpec(nodes=3, daemons=False))

With SRES_TEST_SLURM=26.05 (scripts/test --slurm 26.05) they run that Slurm.

``shared_lab`` hands the same lab to each test of a file that asks for the same spec: for tests that
leave it as they found it. ``fresh_lab`` builds one for this test alone.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from slurm_resilience.errors import MissingTool
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.bring_up import missing
from slurm_resilience.lab.releases import root_of

T = TypeVar("T")
LabFactory = Callable[[LabSpec], Lab]
WaitFor = Callable[..., T]

HERE = Path(__file__).parent
PATIENCE = 2.0
"""So many times longer may all take on a machine that runs other tests as well."""
SLURM_VARIABLE = "SRES_TEST_SLURM"
"""Names the Slurm release that labs run, unless a test asks for another one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this directory is a cluster test."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)


def slurm_root() -> Path | None:
    """The root directory of the Slurm that labs run; None: the machine's own.

    Skips the test when it is not there.
    """
    version = os.environ.get(SLURM_VARIABLE)
    try:
        return root_of(version) if version else None
    except MissingTool as error:
        pytest.skip(f"needs a lab: {error}")


@pytest.fixture(scope="session")
def plugin_headers() -> list[str]:
    """make's word for the headers of the Slurm that labs run."""
    return [f"SLURM_INCLUDE={root}/usr/include"] if (root := slurm_root()) else []


@pytest.fixture(scope="session")
def built_plugin(tmp_path_factory: pytest.TempPathFactory, plugin_headers: list[str]) -> Path:
    """sres.so, built from scratch, out of its tree, for the Slurm that labs run."""
    directory = tmp_path_factory.mktemp("spank")
    command = ["make", "-C", HERE.parents[1] / "spank", f"BUILD={directory}", *plugin_headers]
    subprocess.run([*command, "all", "check"], check=True, capture_output=True)
    return directory / "sres.so"


class _Labs:
    """Labs with names that no other run on this machine has."""

    def __init__(self) -> None:
        self.up: dict[str, Lab] = {}

    def build(self, spec: LabSpec) -> Lab:
        if spec.slurm_root is None:
            spec = dataclasses.replace(spec, slurm_root=slurm_root())
        lack = missing(spec)
        if lack is not None:
            pytest.skip(f"needs a lab: {lack}")
        name = f"test-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        lab = Lab.up(spec, name=name, tied=True)
        self.up[name] = lab
        return lab

    def end(self) -> None:
        for lab in self.up.values():
            if lab.directory.exists():
                lab.down()


@pytest.fixture(scope="module")
def shared_lab() -> Iterator[LabFactory]:
    """Labs by spec, shared by the tests of a file that do not disturb them.

    Not by all files: other labs would run beside them to the end.
    """
    labs, by_spec = _Labs(), dict[str, Lab]()

    def factory(spec: LabSpec) -> Lab:
        key = spec.to_json()
        if key not in by_spec:
            by_spec[key] = labs.build(spec)
        return by_spec[key]

    yield factory
    labs.end()


@pytest.fixture
def fresh_lab() -> Iterator[LabFactory]:
    """Labs of this test's own."""
    labs = _Labs()
    yield labs.build
    labs.end()


@pytest.fixture(scope="session")
def wait_for() -> WaitFor[object]:
    """``wait_for(predicate, seconds, what)``: poll until the value is true, and return it.

    Fails with the last value seen when it is not by then. The seconds are those of a machine with
    little else to do.
    """

    def wait(predicate: Callable[[], T], seconds: float, what: object) -> T:
        seconds *= PATIENCE
        deadline = time.monotonic() + seconds
        while True:
            asked = time.monotonic()
            value = predicate()
            if value:
                return value
            now = time.monotonic()
            if now > deadline:
                pytest.fail(f"not within {seconds:g} s: {what}; last seen: {value!r}")
            # What starts a program to look would else keep a processor from what is waited for.
            time.sleep(min(max(0.02, 2 * (now - asked)), 0.3))

    return wait
