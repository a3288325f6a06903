"""The main job on real Slurm: a node dies or turns bad under a supervised step, which goes on."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, all_idle, events, kinds

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.slurm.hostlists import expand

WaitFor = Callable[..., Any]
VICTIM = "n3"


def break_it(lab: Lab, fault: str, node: str = VICTIM) -> None:
    if fault == "power":
        lab.power_off(node)
    elif fault == "admin":
        words = ["scontrol", "update", f"node={node}", "state=fail", "reason=Action:Replace"]
        lab.run(words, check=True)


def check_world(lab: Lab, tasks: list[dict[str, Any]]) -> None:
    """Every variable of every task describes the world that it runs in."""
    hosts = [task["host"] for task in tasks]
    addresses = {node: fields["NodeAddr"] for node, fields in lab.node_fields().items()}
    assert len({task["master_port"] for task in tasks}) == 1
    for rank, task in enumerate(tasks):
        assert task["procid"] == task["node_rank"] == task["slurm_node"] == rank
        assert task["nnodes"] == task["slurm_nnodes"] == len(tasks)
        assert set(expand(task["node_list"])) == set(hosts)
        assert set(expand(task["job_nodelist"])) == set(hosts)
        assert task["master_node"] == hosts[0]
        assert task["master_addr"] == addresses[hosts[0]]


def test_the_batch_host_is_left_gracefully(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """It cannot be taken out of the job, so the job is requeued."""
    lab = fresh_lab(LabSpec(nodes=6, network=True))
    job = Job(lab, tmp_path)
    first = wait_for(lambda: job.running_on(1, 4), 30, job)
    break_it(lab, "admin", first[0]["host"])
    second = wait_for(lambda: job.running_on(2, 4), 60, job)
    assert {task["restarts"] for task in second} == {1}
    assert "requeued: start number 2" in job.log()
    assert not [e for e in events(lab) if "sent SIGTERM" in e["text"]]
    # SRES_ATTEMPT counts on over the requeue, and the attempts before it are still known.
    assert {task["attempt"] for task in second} == {2}
    words = [sys.executable, "-m", "slurm_resilience.cli.main", "job", "show", str(job.id)]
    shown = lab.run([*words, "--format", "json"], cwd=job.folder, check=True).stdout
    (attempts,) = json.loads(shown)["sruns"]
    assert [(one["attempt"], one["start"]) for one in attempts] == [(1, 1), (2, 2)]
    assert attempts[0]["cause"] and attempts[0]["nodes"] and attempts[1]["ran_for"] is None
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
    wait_for(lambda: all_idle(lab), 60, "every node is idle again")


def test_a_machine_without_its_daemons_is_dead_in_time(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """slurmd's port is refused and sresd is gone: dead, but only after detect.refused_after."""
    lab = fresh_lab(LabSpec(nodes=2, sres_options={"detect": {"refused_after": 6.0}}))
    log = lab.directory / "nodes" / "n2" / "log" / "sresd.log"
    wait_for(
        lambda: log.exists() and "connected" in log.read_text(), 30, "its sresd has spoken once"
    )
    lab.power_off("n2")  # without a network of its own, the machine still answers for it
    wait_for(lambda: "closed" in kinds(lab, "n2"), 60, "n2 is dead and replaced")
    reasons = [e["text"] for e in events(lab) if e["kind"] == "detected"]
    assert len(reasons) == 1
    assert "refused" in reasons[0]


@pytest.mark.parametrize("moment", ["fault", "marked", "replacing"])
def test_sresctld_killed_in_the_middle(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path, moment: str
) -> None:
    lab = fresh_lab(LabSpec(nodes=6, network=True))
    job = Job(lab, tmp_path)
    wait_for(lambda: job.running_on(1, 4), 30, job)
    break_it(lab, "power")
    if moment != "fault":
        wait_for(lambda: moment in kinds(lab, VICTIM), 30, f"the journal says {moment}")
    lab.kill_daemon("sresctld", signal.SIGKILL)
    lab.start_daemon("sresctld")
    second = wait_for(lambda: job.running_on(2, 4), 90, job)
    check_world(lab, second)
    wait_for(lambda: all_idle_but_the_job(lab, second), 60, "the node is back")
    # Between the journal's line and the program's start the kill costs a try, and no second run.
    runners = (lab.directory / "ctl" / "sresctld").rglob("runner")
    assert sum(bool(one.read_text().strip()) for one in runners) == 1, events(lab)
    assert kinds(lab, VICTIM).count("replaced") == 1, events(lab)
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def all_idle_but_the_job(lab: Lab, tasks: list[dict[str, Any]]) -> bool:
    busy = {task["host"] for task in tasks}
    return all(
        state == ("ALLOCATED" if node in busy else "IDLE")
        for node, state in lab.node_states().items()
    )


def test_without_sresctld_an_administrators_down_is_enough(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    lab = fresh_lab(LabSpec(nodes=6, network=True, daemons=False))
    job = Job(lab, tmp_path, "--no-kill", srun="srun --auto-resume=1 --kill-on-bad-exit=1")
    wait_for(lambda: job.running_on(1, 4), 30, job)
    lab.run(["scontrol", "update", f"node={VICTIM}", "state=fail", "reason=fan"], check=True)
    pid = lab.run(["pgrep", "-f", r"task\.sh$"], node=VICTIM, check=True).stdout.split()[0]
    lab.run(["kill", "-9", pid], node=VICTIM, check=True)
    second = wait_for(lambda: job.running_on(2, 4), 60, job)
    assert VICTIM not in {task["host"] for task in second}
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def test_a_plain_user_and_a_plain_srun_beside_it(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    """Only the flagged srun is brought back; the other one of the same allocation is not."""
    lab = fresh_lab(LabSpec(nodes=5, network=True))
    both = "srun -N1 -n1 -w n2 --overlap sh -c 'echo >> plain; exec sleep 600' & "
    both += "srun --auto-resume=1 --overlap"
    # pytest's own directories are root's alone, and are made so again by every pytest that starts.
    job = Job(lab, lab.directory / "home" / "alice", srun=both, user="alice")
    wait_for(lambda: job.running_on(1, 4), 30, job)
    wait_for((job.folder / "plain").exists, 30, "the plain srun runs")
    lab.power_off("n2")
    second = wait_for(lambda: job.running_on(2, 4), 60, job)
    check_world(lab, second)
    assert (job.folder / "plain").read_text() == "\n"
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def test_without_the_plugin(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """`sres run -- srun …` does the same where no SPANK plugin is installed."""
    import sys

    sres = Path(sys.prefix) / "bin" / "sres"
    lab = fresh_lab(LabSpec(nodes=5, network=True, plugin=None))
    job = Job(lab, tmp_path, srun=f"{sres} run -- srun --export=ALL,X=1")
    check_world(lab, wait_for(lambda: job.running_on(1, 4), 30, job))
    break_it(lab, "power")
    second = wait_for(lambda: job.running_on(2, 4), 60, job)
    check_world(lab, second)
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def test_two_faults_in_a_row_with_accounting(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """With slurmdbd an allocation can be changed any number of times."""
    lab = fresh_lab(LabSpec(nodes=6, network=True, slurmdbd=True))
    job = Job(lab, tmp_path)
    nodes = wait_for(lambda: job.running_on(1, 4), 30, job)
    for attempt in (2, 3):
        lab.power_off(nodes[2]["host"])
        nodes = wait_for(lambda n=attempt: job.running_on(n, 4), 60, job)
        check_world(lab, nodes)
        assert {task["restarts"] for task in nodes} == {0}
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def test_on_a_full_cluster_the_exchange_comes_before_the_queue(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """The replaced node goes to the job that lost it, not to jobs that have waited for longer."""
    lab = fresh_lab(LabSpec(nodes=4, network=True))
    job = Job(lab, tmp_path)
    wait_for(lambda: job.running_on(1, 4), 30, job)
    for _ in range(3):
        words = ["sbatch", "--nodes=1", "--exclusive", "--output=/dev/null", "--wrap", "sleep 600"]
        lab.run(words, cwd=tmp_path, check=True)
    lab.power_off(VICTIM)
    second = wait_for(lambda: job.running_on(2, 4), 90, job)
    check_world(lab, second)
    assert {task["restarts"] for task in second} == {0}
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def test_a_cut_off_node_stops_writing(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    """Its cable is pulled, it lives on: its own sresd ends the step, and its token is stale."""
    lab = fresh_lab(
        LabSpec(
            nodes=5,
            network=True,
            sres_options={"agent": {"fence_after": 3.0}, "recovery": {"mode": "automatic"}},
        )
    )
    # A replacement would throw the node away before it can be seen to fence itself.
    job = Job(lab, tmp_path)
    wait_for(lambda: job.running_on(1, 4), 30, job)
    alive = ["pgrep", "-f", r"task\.sh$"]
    assert lab.run(alive, node=VICTIM).returncode == 0
    lab.run(["scontrol", "show", "config"], check=True)
    pause(lab)
    lab.cut(VICTIM)
    wait_for(lambda: lab.run(alive, node=VICTIM).returncode == 1, 30, "its tasks are ended")
    assert lab.node_states()[VICTIM] == "ALLOCATED", "no other program had acted"
    unpause(lab)
    second = wait_for(lambda: job.running_on(2, 4), 60, job)
    assert VICTIM not in {task["host"] for task in second}
    token = next((job.folder / ".sres").glob("*/job-*/token")).read_text().strip()
    assert token == second[0]["token"] != job.running_on(1, 4)[0]["token"]
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def pause(lab: Lab) -> None:
    lab.run([_sres(), "pause", "the test looks on"], check=True)


def unpause(lab: Lab) -> None:
    lab.run([_sres(), "unpause"], check=True)


def _sres() -> str:
    import sys

    return str(Path(sys.prefix) / "bin" / "sres")
