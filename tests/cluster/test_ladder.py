"""Each cause leads to its rung, with GRES and without, under sbatch and under salloc.

`ladder_cells` is the table. The cells that run by default are its core; all of them:

    SRES_TEST_LADDER=all scripts/test tests/cluster/test_ladder.py
    SRES_TEST_LADDER=power,stop scripts/test tests/cluster/test_ladder.py    cells with such a word

They share two labs. A cell leaves a node that is being replaced while the next one begins.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import Job, NodesOf, all_idle, events
from ladder_cells import (
    CORE,
    FIRST,
    NEWEST,
    RUNGS,
    SIZE,
    STEPS,
    STOP,
    Cell,
    reachable,
    table,
)

from slurm_resilience.errors import MissingTool
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.releases import VERSIONS, root_of
from slurm_resilience.slurm.hostlists import expand

WaitFor = Callable[..., Any]
XID = "NVRM: Xid (PCI:0000:04:00): 64, Failed to persist row remap table"
TASK = Path(__file__).with_name("summing_task.py")
NODES = 8
IMPATIENT = "\n[resume]\nswap_wait = 1.0\n"
"""For crowded cells: the lost node is not replaced within that second."""
OFTEN = "\n[resume]\nbackoff = 0.5\n"
OPTIONS = {
    # A cell's fault follows the last one's within seconds. A crowded cell's node comes back after
    # its job gave the exchange up.
    "breaker": {"nodes_at_once": 1000, "partition_at_once": 1000},
    "replace": {"silent_for": 8.0, "evidence_timeout": 1.0, "backoff": 2.0, "attempts": 1000},
    "hang": {"floor": 2.0, "steps": 5, "gather": 10.0},
}


def chosen() -> tuple[Cell, ...]:
    """Return the cells to run: the core, or those that the environment names."""
    words = os.environ.get("SRES_TEST_LADDER", "core").split(",")
    if words in (["core"], ["all"]):
        return CORE if words == ["core"] else tuple(dict.fromkeys((*CORE, *table())))
    cells = dict.fromkeys((*CORE, *table()))
    return tuple(cell for cell in cells if any(word in str(cell) for word in words))


def spec(gres: bool, root: Path | None = None) -> LabSpec:
    """Return the lab of the cells."""
    more = {"gres": "gpu:2"} if gres else {}
    return LabSpec(nodes=NODES, network=True, sres_options=OPTIONS, slurm_root=root, **more)


class CellJob(Job):
    """A cell's job, and what is done to it."""

    def __init__(self, lab: Lab, base: Path, cell: Cell) -> None:
        self.cell = cell
        env = {}
        if cell.crowded or cell.cause == "eater":
            config = base / "sres.toml"
            own = (lab.directory / "etc" / "sres.toml").read_text()
            config.write_text(own + (IMPATIENT if cell.crowded else OFTEN))
            env = {"SRES_CONFIG": str(config)}
        line = ["srun", *cell.srun, sys.executable, str(TASK), str(STEPS), str(STOP)]
        super().__init__(
            lab,
            base,
            *cell.allocation,
            srun=" ".join([*line, cell.fault or "wait"]),
            nodes=cell.nodes,
            launch=cell.launch,
            env=env,
        )
        self.lost = ""

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def has_reached(self, step: int) -> bool:
        return self.read("checkpoint").startswith(f"[{step},")

    def is_known(self, began: float) -> bool:
        """Return whether sresctld knows of the supervisor."""
        kinds = [e["kind"] for e in events(self.lab) if e["job"] == self.id and e["at"] > began]
        return "attempt-started" in kinds

    def strike(self, nodes: list[str]) -> None:
        """Let the cell's cause happen to a job that runs on these nodes."""
        cause, lab = self.cell.cause, self.lab
        self.lost = nodes[0] if cause in FIRST else nodes[1]
        cause = cause.removeprefix("first-")
        words = ["scontrol", "update", f"node={self.lost}"]
        if cause == "power":
            lab.power_off(self.lost)
        elif cause == "cut":
            lab.cut(self.lost)
        elif cause == "xid":
            lab.kmsg(self.lost, XID)
        elif cause == "admin":
            lab.run([*words, "state=fail", "reason=Action:Replace"], check=True)
        elif cause == "down":
            lab.run([*words, "state=down", "reason=a person looks at it"], check=True)
        elif cause in ("rank", "limit"):
            self._process(TASK.name, self.lost).kill()
        elif cause == "cancel":
            lab.run(["scancel", f"{self.id}.0"], check=True)
        elif cause == "signal":
            self._process("sres-resume").terminate()

    def _process(self, word: str, node: str = "") -> psutil.Process:
        """Return the process of this job with such a word, on a node if one is named."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                own = process.cwd() == str(self.folder) and word in " ".join(process.cmdline()[:3])
                if own and (not node or process.environ().get("SLURMD_NODENAME") == node):
                    found.append(process)
        assert len(found) == 1, (word, found, self)
        return found[0]

    def clear(self) -> None:
        """End it, and all that other people wait for, and give a node back that a person took."""
        users = [["--user=bob"], [str(self.id)]] if self.id else [["--user=bob"]]
        for words in users:
            self.lab.run(["scancel", "--quiet", *words])
        if self.cell.cause == "down" and self.lost:
            self.lab.run(["scontrol", "update", f"node={self.lost}", "state=resume"])

    def __repr__(self) -> str:
        return f"{self.cell}, {self.lost} is lost\n{super().__repr__()}\n{NodesOf(self.lab)}"


@pytest.fixture(scope="module")
def lab_for(
    shared_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> Iterator[Callable[..., Lab]]:
    """Labs by GRES and root. In the end every node is idle again."""
    used: dict[str, Lab] = {}

    def factory(gres: bool, root: Path | None = None) -> Lab:
        lab = shared_lab(spec(gres, root))
        return used.setdefault(lab.name, lab)

    yield factory
    for lab in used.values():
        wait_for(lambda lab=lab: all_idle(lab), 90, NodesOf(lab))


def idle(lab: Lab) -> list[str]:
    return [node for node, state in lab.node_states().items() if state == "IDLE"]


def crowd(lab: Lab, wait_for: WaitFor) -> None:
    """Have another user take every idle node, and wait for the next ones."""
    words = ["sbatch", "--nodes=1", "--exclusive", "--output=/dev/null", "--wrap=sleep 600"]
    for _ in range(len(idle(lab)) + 3):
        lab.run(words, cwd="/", user="bob", check=True)
    # One that Slurm has planned for a job is not taken yet.
    wait_for(lambda: "IDLE" not in " ".join(lab.node_states().values()), 30, NodesOf(lab))


def test_the_core_is_a_part_of_the_table() -> None:
    assert len(set(CORE)) == len(CORE) <= 20
    told = [cell for cell in (*CORE, *NEWEST) if not reachable(*astuple(cell)[:4])]
    assert told == []
    for rung in RUNGS:
        assert [cell for cell in CORE if cell.rung == rung], rung


@pytest.mark.parametrize("cell", chosen(), ids=str)
def test_cell(lab_for: Callable[..., Lab], wait_for: WaitFor, tmp_path: Path, cell: Cell) -> None:
    take_rung(lab_for(cell.gres), wait_for, tmp_path, cell)


if not {"SRES_TEST_LADDER", "SRES_TEST_SLURM"} & set(os.environ):

    @pytest.mark.parametrize("cell", NEWEST, ids=str)
    def test_cell_on_the_newest_slurm(
        lab_for: Callable[..., Lab], wait_for: WaitFor, tmp_path: Path, cell: Cell
    ) -> None:
        try:
            root = root_of(VERSIONS[-1])
        except MissingTool as error:
            pytest.skip(f"needs a lab: {error}")
        take_rung(lab_for(cell.gres, root), wait_for, tmp_path, cell)


def take_rung(lab: Lab, wait_for: WaitFor, folder: Path, cell: Cell) -> None:
    """Run a cell."""
    wanted = NODES if cell.crowded else cell.nodes + 1
    wait_for(lambda: len(idle(lab)) >= wanted, 90, NodesOf(lab))
    if cell.crowded:
        # Slurm 22.05 gives a node that an exclusive job has lost to no further one, though it is
        # idle, from the end of the next job there until slurmctld pings it.
        lab.run(["scontrol", "reconfigure"], check=True)
    began = time.time()
    job = CellJob(lab, folder, cell)
    try:
        first = wait_for(lambda: job.running_on(1, SIZE), 30, job)
        nodes = [task["host"] for task in first]
        check_world(lab, first)
        wait_for(lambda: job.has_reached(STOP), 30, job)
        # One that dies within the tenth of a second of its hello is not known to sresctld.
        wait_for(lambda: job.is_known(began), 10, job)
        if cell.crowded:
            crowd(lab, wait_for)
        job.strike(nodes)
        if cell.result:
            check_it_goes_on(job, wait_for, nodes)
        else:
            check_it_stops(job, wait_for)
        marked = {e["node"] for e in events(lab) if e["kind"] == "marked" and e["at"] > began}
        assert marked <= {job.lost}, job
    finally:
        job.clear()


def check_it_goes_on(job: CellJob, wait_for: WaitFor, nodes: list[str]) -> None:
    """Check that the job takes its rung, is told of its new world, and ends with the same bits."""
    cell, lab = job.cell, job.lab
    if cell.rung == "stay":
        wait_for(lambda: cell.plan in job.log(), 30, job)
        (job.folder / "go").touch()
    size = SIZE - (cell.rung == "smaller")
    # A script that is ended by its requeue may still tell of its srun.
    said = "srun ended with 0" if cell.rung == "requeue" else "srun ended with"
    wait_for(lambda: said in job.ended(), 60, job)
    assert "srun ended with 0" in job.ended() and job.read("result") == cell.result, job
    assert cell.plan.format(lost=job.lost) in job.log(), job
    attempts = list(job.attempts().values())
    if cell.rung == "stay":
        assert len(attempts) == 1, job
        return
    assert cell.named.format(lost=job.lost) in job.log(), job
    last = sorted(attempts[-1], key=lambda task: int(task["procid"]))
    check_world(lab, last)
    hosts = {task["host"] for task in last}
    assert len(last) == len(hosts) == size, job
    again = cell.rung == "relaunch"
    # A requeued job may get the new machine of that name.
    assert cell.rung == "requeue" or (job.lost in hosts) == again, job
    assert hosts == set(nodes) if again else True, job
    assert {task["restarts"] for task in last} == {int(cell.rung == "requeue")}, job
    if cell.rung != "requeue":
        # One in between may die before it is seen to run.
        assert f"recovered: attempt {len(attempts)}" in job.log(), job


def check_it_stops(job: CellJob, wait_for: WaitFor) -> None:
    """Check that nothing is started again, and that the log says why."""
    lost_script = job.cell.cause == "first-power"
    over = (lambda: not job.state()) if lost_script else (lambda: job.ended())
    # Without its script sresctld ends it, once its supervisor has been away for so long.
    wait_for(over, 120 if lost_script else 60, job)
    assert "srun ended with 0" not in job.ended() and not job.read("result"), job
    assert job.cell.plan in job.log(), job
    # One more than it needs to show: rank 1's node is left before it is the program's fault.
    tries = 4 if job.cell.cause == "bug" else 1
    assert len(job.attempts()) == tries, job


def check_world(lab: Lab, tasks: list[dict[str, Any]]) -> None:
    """Check that each task is told of the step as Slurm holds it, which has no spare in it."""
    tasks = sorted(tasks, key=lambda task: int(task["procid"]))
    hosts = [task["host"] for task in tasks]
    address = lab.node_fields()[hosts[0]]["NodeAddr"]
    for rank, task in enumerate(tasks):
        assert task["procid"] == task["node_rank"] == rank
        assert task["nnodes"] == int(task["slurm_nnodes"]) == len(hosts)
        assert set(expand(task["node_list"])) == set(hosts)
        assert set(expand(task["slurm_job_nodelist"])) >= set(hosts)
        assert (task["master_node"], task["master_addr"]) == (hosts[0], address)
