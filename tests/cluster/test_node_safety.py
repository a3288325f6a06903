"""Safe to leave alone, on real Slurm: blips, storms, people in the middle, and sick newcomers."""

from __future__ import annotations

import json
import os
import shlex
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, NodesOf, all_idle, events, kinds

from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import BreakerState
from slurm_resilience.errors import MissingTool
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin
from slurm_resilience.lab.releases import VERSIONS, root_of
from slurm_resilience.model import REPLACE

WaitFor = Callable[..., Any]
STORM = int(os.environ.get("SRES_TEST_STORM", "3"))
"""So many of twice as many nodes die at once."""
WINDOW = float(os.environ.get("SRES_TEST_WINDOW", "12"))
"""The breaker's window in seconds: by default 120."""
XID = "NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus."


def breaker(lab: Lab) -> BreakerState:
    journal = Journal(lab.directory / "ctl" / "sresctld" / "journal.db")
    try:
        return journal.breaker()
    finally:
        journal.close()


def sres(lab: Lab, *words: str) -> Any:
    done = lab.run([str(own_bin() / "sres"), *words, "--format", "json"])
    return json.loads(done.stdout) if done.stdout else {}


def health(lab: Lab, node: str) -> str:
    (shown,) = sres(lab, "node", "list", node)
    return str(shown["health"])


def mark(lab: Lab, node: str, state: str, reason: str) -> None:
    words = ["scontrol", "update", f"nodename={node}", f"state={state}", f"reason={reason}"]
    lab.run(words, check=True)


def reason(lab: Lab, node: str) -> str:
    shown = lab.run(["scontrol", "show", "node", node, "-o"], check=True).stdout
    return shown.partition(" Reason=")[2]


class SlowReplacer:
    """A replacement program that stops between its work and its end until the test lets it go."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "replace"
        self.done, self.go = folder / "done", folder / "go"

    def options(self, **more: Any) -> dict[str, Any]:
        return {"replace": {"program": [str(self.program)], **more}}

    def works_for(self, lab: Lab, *, replaces: bool) -> None:
        work = f'{shlex.quote(str(lab.directory / "bin" / "replace-node"))} "$@" &&' * replaces
        self.program.write_text(
            f"#!/bin/sh\n{work} touch {self.done}\nwhile [ ! -e {self.go} ]; do sleep 0.1; done\n"
        )
        self.program.chmod(0o755)


def test_a_cable_out_for_seconds_under_a_job_without_auto_resume(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Its DOWN would end the job. Slurm itself would wait for five minutes; so does sresctld."""
    lab = fresh_lab(LabSpec(nodes=3, network=True))
    job = Job(lab, tmp_path, srun="srun", nodes=2)
    wait_for(lambda: job.running_on(1, 2), 30, job)
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    lab.cut("n2")
    wait_for(lambda: [e for e in events(lab) if e["kind"] == "alarm"], 30, "it is found dead")
    assert health(lab, "n2") == "dead"
    lab.mend("n2")
    wait_for(lambda: health(lab, "n2") == "healthy", 60, "it beats again")
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 60, job)
    wait_for(lambda: all_idle(lab), 30, "every node is idle")
    assert not [e for e in events(lab) if e["kind"] in ("detected", "marking", "replacing")]


def test_a_sick_node_under_a_suspended_job_is_repaired_after_the_jobs_end(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Slurm shows the node as free of jobs, and ends the job if the node reboots."""
    lab = fresh_lab(LabSpec(nodes=2, network=True))
    job = Job(lab, tmp_path, srun="srun", nodes=1)
    (task,) = wait_for(lambda: job.running_on(1, 1), 30, job)
    name = task["host"]
    lab.run(["scontrol", "suspend", str(job.id)], check=True)
    wait_for(lambda: "ALLOCATED" not in lab.node_states()[name], 30, NodesOf(lab))
    mark(lab, name, "fail", REPLACE)
    wait_for(lambda: "requested" in kinds(lab, name), 30, "sresctld has heard it")
    # Another node's whole repair: there was time enough for this one's.
    other = next(node for node in lab.nodes if node != name)
    mark(lab, other, "fail", REPLACE)
    wait_for(lambda: "resumed" in kinds(lab, other), 90, NodesOf(lab))
    assert not {"emptied", "replacing"} & set(kinds(lab, name))
    lab.run(["scontrol", "resume", str(job.id)], check=True)
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 60, job)
    wait_for(lambda: "resumed" in kinds(lab, name), 90, NodesOf(lab))


@pytest.mark.timeout(1200 if STORM > 3 or WINDOW > 20 else 300)
def test_half_of_the_cluster_dies_at_once(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """The breaker holds through its window; supervised jobs move on; then all is as before."""
    # Slurm itself sets a node DOWN that sresctld may not mark: with its default in 5 minutes.
    options = {"SlurmdTimeout": "25"}
    more = {"breaker": {"window": WINDOW, "quiet": 10.0}}
    lab = fresh_lab(LabSpec(nodes=2 * STORM, network=True, options=options, sres_options=more))
    jobs = [Job(lab, tmp_path, nodes=2) for _ in range(max(1, STORM // 6))]
    first = [wait_for(lambda job=job: job.running_on(1, 2), 60, job) for job in jobs]

    def announced() -> bool:
        return sum(event["kind"] == "attempt-started" for event in events(lab)) == len(jobs)

    wait_for(announced, 10, "sresctld knows of the supervisors")
    busy = {task["host"] for tasks in first for task in tasks}
    lost = {tasks[1]["host"] for tasks in first}
    dead = lost | set([name for name in lab.nodes if name not in busy][: STORM - len(lost)])
    lab.power_off(",".join(sorted(dead)))

    def has_moved(job: Job) -> bool:
        """Tell of the last attempt: on a busy machine the nodes' last beats lie seconds apart, and
        a job that gets a node which is not found dead yet leaves that one too."""
        tasks = list(job.attempts().values())[-1]
        return len(tasks) == 2 and not {task["host"] for task in tasks} & dead

    for job in jobs:
        wait_for(lambda job=job: has_moved(job), 120, job)
    tripped = wait_for(lambda: breaker(lab).tripped_at, 30, "the breaker trips")
    wait_for(lambda: breaker(lab).storm_at - tripped > WINDOW, WINDOW + 40, "the window is over")
    # The idle ones too, so that Slurm does not offer them to the job that moves.
    assert {e["node"] for e in events(lab) if e["kind"] == "marked"} <= dead
    assert not [e for e in events(lab) if e["kind"] == "replacing"]
    assert len([e for e in events(lab) if e["kind"] == "alarm" and "breaker" in e["text"]]) == 1
    assert "tripped" in lab.run([str(own_bin() / "sres"), "breaker"]).stdout
    # And Slurm would leave it so (ReturnToService=0).
    wait_for(lambda: all("DOWN" in lab.node_states()[n] for n in dead), 90, NodesOf(lab))
    lab.power_on(",".join(sorted(dead)))
    wait_for(lambda: not breaker(lab).is_tripped, 120, "the storm is over")
    for job in jobs:
        job.let_end()
        wait_for(lambda job=job: "srun ended with 0" in job.ended(), 60, job)
    wait_for(lambda: all_idle(lab), 120, NodesOf(lab))
    assert not [e for e in events(lab) if e["kind"] == "replacing"]


def test_a_persons_drain_in_mid_replacement_stands(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    slow = SlowReplacer(tmp_path)
    slow.program.touch(0o755)
    lab = fresh_lab(LabSpec(nodes=2, network=True, sres_options=slow.options()))
    slow.works_for(lab, replaces=False)
    mark(lab, "n2", "fail", REPLACE)
    wait_for(slow.done.exists, 60, "the program runs")
    mark(lab, "n2", "drain", "RMA 4711, keep out")
    wait_for(lambda: "taken-over" in kinds(lab, "n2"), 30, "the person is heard")
    run = lab.directory / "ctl" / "sresctld" / "runs" / "1-1" / "rc"
    wait_for(lambda: run.read_text().strip(), 30, "the program was told to end")
    # Also over a restart of sresctld.
    lab.kill_daemon("sresctld")
    lab.start_daemon("sresctld")
    wait_for(lambda: health(lab, "n2") == "held", 30, "sresctld leaves it alone")
    assert reason(lab, "n2").startswith("RMA 4711, keep out")
    assert "DRAIN" in lab.node_states()["n2"]
    assert not {"resuming", "resumed", "replaced"} & set(kinds(lab, "n2"))
    # Another machine, with a state directory of its own, begins nothing beside it.
    own, other = lab.directory / "etc" / "sres.toml", tmp_path / "sres.toml"
    directory = str(lab.directory / "ctl" / "sresctld")
    other.write_text(own.read_text().replace(directory, str(tmp_path / "state")))
    done = lab.run([str(own_bin() / "sresctld"), "--config", str(other), "--once"], node="n1")
    assert done.returncode == 1 and "sresctld on ctl acts already" in done.stderr


def test_our_own_mark_is_known_when_the_time_zone_is_set(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """A mark is known by the time that Slurm shows of it: with another one it is a person's."""
    zone = tmp_path / "zone"
    header = struct.pack(">4sc15x6l", b"TZif", b"2", 0, 0, 0, 0, 1, 4)
    zone.write_bytes(2 * (header + struct.pack(">lbb4s", 9 * 3600, 0, 0, b"JST")) + b"\nJST-9\n")
    lab = fresh_lab(LabSpec(nodes=2, network=True))
    job = Job(lab, tmp_path, "--nodelist=n2", srun="srun", nodes=1)
    wait_for(lambda: job.tasks(), 30, job)
    lab.kmsg("n2", XID)
    wait_for(lambda: "marked" in kinds(lab, "n2"), 30, NodesOf(lab))
    words = f'mount --bind {shlex.quote(str(zone))} "$(readlink -f /etc/localtime)"; date'
    assert "JST" in lab.run(["sh", "-c", words], check=True).stdout
    lab.kill_daemon("sresctld")
    lab.start_daemon("sresctld")
    mark(lab, "n1", "fail", REPLACE)
    wait_for(lambda: "requested" in kinds(lab, "n1"), 30, NodesOf(lab))
    assert "asked-anew" not in kinds(lab, "n2"), kinds(lab, "n2")
    job.let_end()


def test_a_node_that_comes_back_sick_never_gets_a_job(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    slow = SlowReplacer(tmp_path)
    slow.program.touch(0o755)
    lab = fresh_lab(LabSpec(nodes=2, network=True, sres_options=slow.options(attempts=1)))
    slow.works_for(lab, replaces=True)
    mark(lab, "n2", "fail", REPLACE)
    wait_for(slow.done.exists, 90, "the new machine has joined")
    lab.kmsg("n2", XID)

    def finds_it() -> bool:
        (shown,) = sres(lab, "node", "show", "n2")
        return any(found["code"] == "79" for found in shown["findings"])

    wait_for(finds_it, 30, "its sresd reports the Xid")
    slow.go.touch()
    wait_for(lambda: "gave-up" in kinds(lab, "n2"), 60, "it is left to a person")
    assert [e for e in events(lab) if e["kind"] == "gave-up" and "came back sick" in e["text"]]
    assert not {"resuming", "resumed", "closed"} & set(kinds(lab, "n2"))
    refused = lab.run(["srun", "-N2", "--immediate=2", "true"])
    assert refused.returncode != 0


def test_a_node_whose_slow_check_fails_never_gets_a_job(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Its sresd beats and slurmd answers for seconds before the check comes to its end."""
    checks, broken = tmp_path / "checks", tmp_path / "broken"
    checks.mkdir()
    program = checks / "fans"
    program.write_text(
        f'#!/bin/sh\n[ "$(hostname)" = n2 ] && [ -e {broken} ] || exit 0\n'
        "sleep 6; echo replace: fan 3 stands still; exit 2\n"
    )
    program.chmod(0o755)
    options = {"checks": {"directory": str(checks)}, "replace": {"attempts": 1}}
    lab = fresh_lab(LabSpec(nodes=2, network=True, sres_options=options))
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    broken.touch()
    mark(lab, "n2", "fail", REPLACE)
    wait_for(lambda: "gave-up" in kinds(lab, "n2"), 60, "it is left to a person")
    assert [e for e in events(lab) if e["kind"] == "gave-up" and "fan 3 stands" in e["text"]]
    assert not {"resuming", "resumed", "closed"} & set(kinds(lab, "n2"))


def test_slurmd_registers_before_the_program_has_ended(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """ReturnToService=2 would put the node into service, and end the program, untold."""
    slow = SlowReplacer(tmp_path)
    slow.program.touch(0o755)
    options = {"ReturnToService": "2"}
    spec = LabSpec(nodes=2, network=True, options=options, sres_options=slow.options())
    lab = fresh_lab(spec)
    slow.works_for(lab, replaces=True)
    wait_for(lambda: health(lab, "n2") == "healthy", 30, "n2 beats")
    lab.power_off("n2")
    wait_for(slow.done.exists, 90, "the new machine has joined")
    wait_for(lambda: health(lab, "n2") != "dead", 30, "its sresd speaks")
    wait_for(lambda: "NOT_RESPONDING" not in lab.node_states()["n2"], 60, "its slurmd registers")
    assert reason(lab, "n2").startswith(REPLACE)
    assert lab.node_states()["n2"] != "IDLE"
    slow.go.touch()
    wait_for(lambda: "closed" in kinds(lab, "n2"), 60, "it is validated and resumed")
    assert "released" not in kinds(lab, "n2")
    assert kinds(lab, "n2").count("replacing") == 1
    wait_for(lambda: all_idle(lab), 30, "every node is idle again")


@pytest.mark.parametrize("what", ["daemon", "once"])
def test_a_second_sresctld_on_the_same_directory_is_refused(
    shared_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, what: str
) -> None:
    lab = shared_lab(LabSpec(nodes=1))
    wait_for(lambda: sres(lab, "status").get("controller", {}).get("answers"), 30, "the first runs")
    more = ["--once"] if what == "once" else []
    config = lab.directory / "etc" / "sres.toml"
    done = lab.run([str(own_bin() / "sresctld"), "--config", str(config), *more])
    assert done.returncode == 1
    assert "another sresctld works in" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_reserved_node_that_a_person_keeps_is_left_alone(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    """The newest Slurm prints the reservation behind the Reason, which begins like a request."""
    try:
        root = root_of(VERSIONS[-1])
    except MissingTool as error:
        pytest.skip(f"needs a lab: {error}")
    lab = fresh_lab(LabSpec(nodes=3, network=True, slurm_root=root))
    words = ["reservationname=course", "starttime=now", "duration=infinite", "users=root"]
    lab.run(["scontrol", "create", "reservation", *words, "nodes=n2"], check=True)
    mark(lab, "n2", "drain", "Action:Replace after the course, RMA 4711")
    wait_for(lambda: health(lab, "n2") == "held", 30, NodesOf(lab))
    # Slurm looks at its reservations from time to time.
    wait_for(lambda: "ReservationName=course" in reason(lab, "n2"), 30, NodesOf(lab))
    lab.power_off("n2")

    def is_lost() -> bool:
        (shown,) = sres(lab, "node", "list", "n2")
        return bool(shown["sresd"] == "silent")

    wait_for(is_lost, 30, NodesOf(lab))
    # A node that no person keeps is marked by then.
    lab.power_off("n1")
    wait_for(lambda: "marked" in kinds(lab, "n1"), 60, NodesOf(lab))
    assert health(lab, "n2") == "held"
    assert not {"detected", "marked", "replacing"} & set(kinds(lab, "n2"))
    assert reason(lab, "n2").startswith("Action:Replace after the course, RMA 4711")
