"""Deep checks as jobs of real Slurm: nodes pass, the slow cable is named, nothing stays behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, all_idle

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin
from slurm_resilience.slurm.maintenance import read_busy

WaitFor = Callable[..., Any]
SPEC = LabSpec(nodes=4, network=True, daemons=False)


def words(folder: Path, *asked: str) -> list[str]:
    logs = ["--log-dir", str(folder), "--node-log", str(folder / "%n.log")]
    return [str(own_bin() / "sres"), "deepcheck", "run", *asked, *logs, "--format", "json"]


def deepcheck(lab: Lab, folder: Path, *asked: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the report and the progress."""
    done = lab.run(words(folder, *asked), timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def states(report: dict[str, Any]) -> dict[str, str]:
    return {node["node"]: node["state"] for node in report["nodes"]}


def reservations(lab: Lab) -> str:
    return lab.run(["scontrol", "show", "reservation", "-o"], check=True).stdout


def queue(lab: Lab) -> str:
    return lab.run(["squeue", "-h", "-o", "%j %T"], check=True).stdout.strip()


@contextmanager
def cables(lab: Lab, **rates: str) -> Iterator[None]:
    """Limit what the cables of nodes let through."""
    root = ["dev", "eth0", "root"]
    try:
        for name, rate in rates.items():
            limit = ["tbf", "rate", *rate.split(), "latency", "400ms"]
            lab.run(["tc", "qdisc", "add", *root, *limit], node=name, check=True)
        yield
    finally:
        for name in rates:
            lab.run(["tc", "qdisc", "del", *root], node=name)


@pytest.fixture
def lab(shared_lab: Callable[[LabSpec], Lab], wait_for: WaitFor) -> Lab:
    lab = shared_lab(SPEC)
    # A test that was stopped at its time limit leaves one.
    for name in re.findall(r"ReservationName=(sres-deepcheck-\S+)", reservations(lab)):
        lab.run(["scancel", f"--reservation={name}"])
        lab.run(["scontrol", "delete", f"reservationname={name}"])
    wait_for(lambda: all_idle(lab), 60, "every node is idle")
    return lab


def test_nodes_are_checked_beside_a_busy_one(lab: Lab, tmp_path: Path, wait_for: WaitFor) -> None:
    job = Job(lab, tmp_path, "--nodelist=n4", nodes=1, srun="srun")
    wait_for(lambda: job.state() == "RUNNING", 30, job)
    asked = ("n[1-4]", "--only", "cpu_burn,gpu_count,dcgm_r4", "--seconds", "1")
    code, report, told = deepcheck(lab, tmp_path, *asked)
    passed = {"n1": "Passed", "n2": "Passed", "n3": "Passed"}
    assert states(report) == {**passed, "n4": "Skipped"}, told
    assert code == 12
    outcomes = {one["check"]: one["outcome"] for one in report["nodes"][0]["results"]}
    assert outcomes == {"gpu_count": "absent", "cpu_burn": "passed", "dcgm_r4": "absent"}
    assert "n2: cpu_burn passed: cpu processors:" in told
    assert "cpu_burn passed" in (tmp_path / "n3.log").read_text()
    assert "cpu_burn passed" in (Path(report["logs"]) / "n3.log").read_text()
    # The busy node's job has not noticed, and nothing is left behind.
    assert job.state() == "RUNNING"
    assert "No reservations" in reservations(lab)
    ends = int(time.time())
    job.let_end()
    wait_for(lambda: all_idle(lab), 30, lab.node_states)
    # Slurm shows the job's end as soon as it shows the node idle: the watch needs no other word.
    shown = lab.run(["scontrol", "show", "node", "-o"], check=True).stdout
    assert read_busy(shown)["n4"] >= ends


def test_the_node_with_the_slow_cable_is_named_and_no_other(
    lab: Lab, tmp_path: Path, wait_for: WaitFor
) -> None:
    with cables(lab, n3="40mbit burst 32kbit"):
        asked = ("n[1-4]", "--level", "cluster", "--largest", "1048576")
        code, report, told = deepcheck(lab, tmp_path, *asked)
    assert states(report) == {"n1": "Passed", "n2": "Passed", "n3": "Failed", "n4": "Passed"}, told
    assert code == 11
    (line,) = map(json.loads, report["lines"])
    assert line["node"] == "n3"
    assert line["msg"].startswith("Encountered FaultyInstance. Replace the Instance. Region: ")
    assert [sweep["collective"] for sweep in report["sweeps"]] == ["all_reduce", "all_gather"]
    assert [row["wrong"] for sweep in report["sweeps"] for row in sweep["rows"]].count(0) > 4
    assert "# Out of bounds values : 0 OK" in (Path(report["logs"]) / "cluster.log").read_text()
    assert "No reservations" in reservations(lab)
    wait_for(lambda: all_idle(lab), 30, lab.node_states)


def test_a_link_that_is_slower_than_its_peers_is_worth_watching(
    lab: Lab, tmp_path: Path, wait_for: WaitFor
) -> None:
    measure = [str(own_bin() / "sres"), "deepcheck", "speed", "n[1-4]", "--rounds=6"]
    measure += ["--store", str(tmp_path / "speeds.sqlite"), "--format=json"]
    # All nodes share this machine's processors with whatever else runs on it. What a link does must
    # be its cable's matter, not theirs: 50 MB/s take a processor next to nothing.
    usual = dict.fromkeys(("n1", "n3", "n4"), "400mbit burst 128kb")
    with cables(lab, n2="40mbit burst 64kb", **usual):
        done = lab.run(measure, timeout=120)
    report = json.loads(done.stdout)
    assert report["measured"] == ["n1", "n2", "n3", "n4"], done.stderr
    # Of the other kinds, which are the processors' matter, nothing is asked here.
    assert [one["node"] for one in report["slow"] if one["kind"] == "link"] == ["n2"], report
    shown = json.loads(
        lab.run([str(own_bin() / "sres"), "node", "list", "--format", "json"]).stdout
    )
    labels_of_n2 = next(one["labels"] for one in shown if one["node"] == "n2")
    assert "link" in labels_of_n2["slow"]
    assert "No reservations" in reservations(lab)
    wait_for(lambda: all_idle(lab), 30, lab.node_states)


def test_a_node_that_loses_power_under_the_load_has_failed(
    lab: Lab, tmp_path: Path, wait_for: WaitFor
) -> None:
    asked = words(tmp_path, "n[1-2]", "--only", "cpu_burn", "--seconds", "5")
    process = lab.popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: queue(lab) == "sres-deepcheck RUNNING", 60, lambda: queue(lab))
        lab.power_off("n2")
        # Slurm itself would wait for SlurmdTimeout.
        down = ["scontrol", "update", "nodename=n2", "state=down", "reason=lost"]
        lab.run(down, check=True)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
        lab.power_on("n2")
        lab.run(["scontrol", "update", "nodename=n2", "state=resume"], check=True)
        # Else Slurm 22.05 gives n2 to no exclusive job, though it is idle, until it pings it.
        lab.run(["scontrol", "reconfigure"], check=True)
    report = json.loads(said)
    assert states(report) == {"n1": "Passed", "n2": "Failed"}
    assert "it was lost to Slurm" in report["nodes"][1]["reason"]
    assert process.returncode == 11
    assert "No reservations" in reservations(lab)
    wait_for(lambda: all_idle(lab), 60, lab.node_states)


def labels(lab: Lab) -> dict[str, str]:
    """The deep-check-status of each node that has one, as `sres node list` shows it."""
    done = lab.run([str(own_bin() / "sres"), "node", "list", "--format", "json"])
    shown = {node["node"]: node["labels"] for node in json.loads(done.stdout)}
    return {
        name: has["deep-check-status"] for name, has in shown.items() if "deep-check-status" in has
    }


def test_what_is_due_runs_on_idle_nodes_and_gives_way_to_jobs(
    lab: Lab, tmp_path: Path, wait_for: WaitFor
) -> None:
    logs = ["--log-dir", str(tmp_path), "--node-log", str(tmp_path / "%n.log")]
    watch = [str(own_bin() / "sres"), "deepcheck", "watch", "n[1-2]", "--at-once=2", *logs]
    for name in lab.nodes:
        lab.run(["scontrol", "update", f"nodename={name}", "comment="], check=True)
    done = lab.run([*watch, "--only=cpu_burn", "--seconds=1", "--once"], timeout=120)
    assert done.returncode == 0, done.stderr
    assert "n1: it has had none" in done.stderr
    assert labels(lab) == {"n1": "Passed", "n2": "Passed"}
    again = lab.run([*watch, "--once"], timeout=60)
    assert (again.returncode, again.stderr) == (0, ""), "nothing is due"

    lab.run([str(own_bin() / "sres"), "deepcheck", "request", "n2"], check=True)
    assert labels(lab)["n2"] == "Requested"
    process = lab.popen([*watch, "--only=cpu_burn", "--seconds=300"], stderr=subprocess.PIPE)
    try:
        wait_for(lambda: queue(lab) == "sres-deepcheck RUNNING", 60, lambda: queue(lab))
        wait_for(lambda: labels(lab)["n2"] == "InProgress", 30, lambda: labels(lab))
        job = Job(lab, tmp_path, nodes=4, srun="srun")
        try:
            wait_for(lambda: job.state() == "RUNNING", 90, job)
        finally:
            job.let_end()
        wait_for(lambda: labels(lab)["n2"] == "Unjudged", 30, lambda: labels(lab))
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=90)
    assert "jobs wait for nodes: the checks of n2 are ended" in said
    assert "No reservations" in reservations(lab)
    wait_for(lambda: all_idle(lab), 60, lab.node_states)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_in_the_middle_leaves_no_job(
    lab: Lab, tmp_path: Path, wait_for: WaitFor, number: int
) -> None:
    asked = words(tmp_path, "n[1-2]", "--only", "cpu_burn", "--seconds", "300")
    (scratch := tmp_path / "tmp").mkdir()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = lab.popen(asked, env={"TMPDIR": str(scratch)}, **quiet)
    try:
        wait_for(lambda: queue(lab) == "sres-deepcheck RUNNING", 60, lambda: queue(lab))
        wait_for(lambda: len(list(scratch.iterdir())) == 2, 60, "both nodes have begun")
        process.send_signal(number)
        process.wait(60)
        wait_for(lambda: queue(lab) == "", 60, lambda: queue(lab))
        if number != signal.SIGKILL:
            assert process.returncode == 130
            assert not list(scratch.iterdir())
            assert "No reservations" in reservations(lab)
        else:
            (line,) = reservations(lab).splitlines()
            assert "MAINT" in line
            name = line.split()[0].partition("=")[2]
            lab.run(["scontrol", "delete", f"reservationname={name}"], check=True)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: all_idle(lab), 60, lab.node_states)
