"""One world for each client: two in memory, and labs with real Slurm of several releases.

A test takes ``world`` and runs on the fake, on the simulated Slurm, on the commands of each Slurm
release, and on pyslurm. What is missing is skipped by name. With SRES_TEST_SLURM only that release
is asked.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.errors import MissingTool, SresError
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.bring_up import missing
from slurm_resilience.lab.releases import VERSIONS, own_version, root_of
from slurm_resilience.model import Job, Node
from slurm_resilience.simulate.cluster.sim_slurm import SimSlurm
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.pyslurm import PyslurmClient

T = TypeVar("T")
HERE = Path(__file__).parent
NODES = 4
DEADLINE = 60.0
"""Seconds that a state is waited for: past KillWait, the 30 s that Slurm gives a job which was told
to end while it was just starting, and so did not hear of it."""
SPEC = LabSpec(nodes=NODES, daemons=False, plugin=None, lifecycle=None)
COMMANDS = "scontrol", "squeue", "scancel", "salloc"
CHOSEN = os.environ.get("SRES_TEST_SLURM")
RELEASES = (CHOSEN,) if CHOSEN else VERSIONS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this directory is a contract test, and those on a lab are cluster tests."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.contract)
            if "fake" not in item.name and "simulated" not in item.name:
                item.add_marker(pytest.mark.cluster)


class World(Protocol):
    """A cluster of four nodes, n1 to n4, and its client."""

    client: SlurmClient
    is_real: bool

    def submit(
        self,
        nodes: int,
        *,
        batch: bool = True,
        requeue: bool = True,
        no_kill: bool = False,
        exclusive: bool = True,
        words: tuple[str, ...] = (),
    ) -> int:
        """Submit a job that would run long; its id."""
        ...

    def power_off(self, node: str) -> None: ...

    def shrink(self, job: int, nodes: Sequence[str]) -> None:
        """Leave a job these nodes."""
        ...

    def pass_time(self) -> None:
        """Let a second pass; on a real cluster it passes by itself."""
        ...

    def until(self, look: Callable[[], T], what: str) -> T:
        """Wait until ``look`` returns something true, and return it."""
        ...


class FakeWorld:
    is_real = False

    def __init__(self) -> None:
        self.client: FakeSlurm = FakeSlurm(NODES)

    def submit(self, nodes: int, *, words: tuple[str, ...] = (), **job: bool) -> int:
        return self.client.submit(nodes, uid=0, **job)

    def power_off(self, node: str) -> None:
        self.client.power_off(node)

    def shrink(self, job: int, nodes: Sequence[str]) -> None:
        self.client.shrink(job, nodes)

    def pass_time(self) -> None:
        self.client.pass_time()

    def until(self, look: Callable[[], T], what: str) -> T:
        for _ in range(5):
            if value := look():
                return value
            self.pass_time()
        pytest.fail(f"does not come true: {what}")


class SimulatedWorld:
    """The Slurm that `sres simulate` puts around sresctld."""

    is_real = False

    def __init__(self) -> None:
        self._schedule = Schedule()
        self.client: SimSlurm = SimSlurm(NODES, self._schedule)

    def submit(self, nodes: int, *, words: tuple[str, ...] = (), **job: bool) -> int:
        return self.client.submit(nodes, uid=0, **job)

    def power_off(self, node: str) -> None:
        self.client.lose_contact(node)

    def shrink(self, job: int, nodes: Sequence[str]) -> None:
        self.client.shrink(job, nodes)

    def pass_time(self) -> None:
        self._schedule.run(self._schedule.now + 1.0)

    def until(self, look: Callable[[], T], what: str) -> T:
        for _ in range(5):
            if value := look():
                return value
            self.pass_time()
        pytest.fail(f"does not come true: {what}")


class LabWorld:
    is_real = True

    def __init__(self, lab: Lab, client: SlurmClient) -> None:
        self._lab, self.client = lab, client
        self._release = client.info().version
        self._off: list[str] = []
        self._has_shrunk = False

    def submit(
        self,
        nodes: int,
        *,
        batch: bool = True,
        requeue: bool = True,
        no_kill: bool = False,
        exclusive: bool = True,
        words: tuple[str, ...] = (),
    ) -> int:
        options = [f"--nodes={nodes}", *words]
        options += ["--exclusive"] if exclusive else []
        options += ["--no-kill"] if no_kill else []
        if not batch:
            said = self._lab.run(["salloc", "--no-shell", *options], check=True).stderr
            granted = re.search(r"Granted job allocation (\d+)", said)
            assert granted, said
            return int(granted[1])
        options += ["--requeue" if requeue else "--no-requeue", "--parsable", "--output=/dev/null"]
        script = f"srun --nodes={nodes} --ntasks={nodes} sleep 600; sleep 600"
        said = self._lab.run(["sbatch", *options, f"--wrap={script}"], check=True).stdout
        return int(said)

    def power_off(self, node: str) -> None:
        self._lab.power_off(node)
        self._off.append(node)

    def shrink(self, job: int, nodes: Sequence[str]) -> None:
        self._has_shrunk = True
        self.client.shrink(job, nodes)

    def pass_time(self) -> None:
        return

    def until(self, look: Callable[[], T], what: str) -> T:
        deadline = time.monotonic() + DEADLINE
        pause = threading.Event()
        while True:
            value = look()
            if value:
                return value
            if time.monotonic() > deadline:
                pytest.fail(f"not within {DEADLINE:.0f} s: {what}; last seen: {value!r}")
            pause.wait(0.05)

    def tidy(self) -> None:
        """As it was before the test."""
        for job in self.client.jobs():
            self.client.cancel_job(job.id)
        for node in self._off:
            self.client.set_node([node], state="down", reason="tidied up")
            self._lab.power_on(node)
        self._off.clear()
        self.until(lambda: not self.client.jobs(), "no job is left")
        self.until(lambda: all(map(self._ready, self.client.nodes())), "all nodes are idle")
        if self._release.startswith("22.05") or self._has_shrunk:
            # 22.05 believes for ever that a node which was shrunk out of a job is partly taken: the
            # node is IDLE, and no job starts on it. 26.05 was seen to do so once.
            self._lab.run(["scontrol", "reconfigure"], check=True)

    def _ready(self, node: Node) -> bool:
        if node.comment:
            self.client.set_comment([node.name], "")
        if node.is_down or node.is_fail or node.is_drain:
            self.client.set_node([node.name], state="resume")
            return False
        return node.base == "IDLE" and not node.flags


@pytest.fixture(scope="module")
def labs() -> Iterator[Callable[[str], Lab]]:
    """``labs(release)``: the lab that runs a Slurm release, built when it is first asked for."""
    up: dict[str, Lab] = {}

    def lab(release: str) -> Lab:
        if release not in up:
            try:
                spec = dataclasses.replace(SPEC, slurm_root=root_of(release))
            except MissingTool as error:
                pytest.skip(f"needs a lab: {error}")
            if (lack := missing(spec)) is not None:
                pytest.skip(f"needs a lab: {lack}")
            name = f"contract-{os.getpid()}-{uuid.uuid4().hex[:6]}"
            up[release] = Lab.up(spec, name=name, tied=True)
        return up[release]

    yield lab
    for built in up.values():
        built.down()


def commands_of(lab: Lab) -> CliClient:
    """A client that runs the lab's own commands: those of another release understand no other."""
    if lab.spec.slurm_root is None:
        return CliClient()
    folder = lab.directory / "commands"
    if not folder.exists():
        folder.mkdir()
        for name in COMMANDS:
            script = folder / name
            script.write_text(f'#!/bin/sh\nexec {shlex.join(lab.argv([name], cwd="/"))} "$@"\n')
            script.chmod(0o755)
    return CliClient(str(folder))


@pytest.fixture(
    params=["fake", "simulated", *(f"commands-{release}" for release in RELEASES), "pyslurm"]
)
def world(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    labs: Callable[[str], Lab],
) -> Iterator[World]:
    kind, _, release = request.param.partition("-")
    if kind in ("fake", "simulated"):
        yield FakeWorld() if kind == "fake" else SimulatedWorld()
        return
    lab = labs(release or own_version())
    monkeypatch.setenv("SLURM_CONF", str(lab.directory / "etc" / "slurm.conf"))
    client: SlurmClient = commands_of(lab)
    if kind == "pyslurm":
        try:
            client = PyslurmClient(CliClient(), client.info().version)
        except SresError as error:
            pytest.skip(f"needs pyslurm: {error}")
    real = LabWorld(lab, client)
    yield real
    real.tidy()


@pytest.fixture
def running(world: World) -> Callable[..., Job]:
    """Submit a job and wait until it (and, for a batch job, its step) runs."""

    def run(nodes: int, **how: bool) -> Job:
        job_id = world.submit(nodes, **how)
        world.until(lambda: world.client.job(job_id).state == "RUNNING", "the job runs")
        if how.get("batch", True):
            world.until(lambda: step_of(world.client, job_id), "its step runs")
        return world.client.job(job_id)

    return run


def step_of(client: SlurmClient, job_id: int) -> str:
    """The name of the job's first step of srun, or nothing."""
    names = [step.step for step in client.steps(job_id)]
    return next((name for name in names if name.isdecimal()), "")
