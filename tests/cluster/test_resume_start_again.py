"""A further start on real Slurm: when its tasks run, and what the log says until then."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from beside import FLAG, Site, WaitFor, allocate
from jobs import Job

from slurm_resilience.lab import Lab, LabSpec

HOLDS = """\
#!/bin/sh
touch up
while [ ! -e go ]; do sleep 0.05; done
srun --auto-resume=1 hostname
echo $? >ended.new && mv ended.new ended
"""
LAUNCHES = HOLDS.replace("hostname", "-N2 -n2 sh -c '[ $SRES_ATTEMPT != 1 ] || sleep 100'")
CRASHES = """\
#!/bin/sh
srun --auto-resume=1 sh -c 'touch up; while [ ! -e crash ]; do sleep 0.05; done; kill -9 $$'
"""
HELD = """\
#!/bin/sh
case "$*" in
requeue*) touch {folder}/held; while [ ! -e {folder}/away ]; do sleep 0.05; done ;;
esac
exec {scontrol} "$@"
"""
"""scontrol, which waits before it requeues a job."""
SOON = {"resume": {"backoff": 0.1}}
SLOW = {"resume": {"diagnosis_wait": 5.0}}
"""Another srun starts while the supervisor waits for a finding about its nodes."""


def test_nothing_is_recovered_while_the_step_waits_for_its_turn(
    shared_lab: Callable[[LabSpec], Lab], built_plugin: Path, tmp_path: Path, wait_for: WaitFor
) -> None:
    """Another srun of the job took the nodes meanwhile: it is waited for, as with plain srun."""
    lab = shared_lab(LabSpec(nodes=3, plugin=built_plugin, daemons=False, sres_options=SLOW))
    job = allocate(lab, "-w", "n[1-2]", "--exclusive")
    site = Site(lab, job, tmp_path, wait_for)
    first = "[ $SRES_ATTEMPT = 2 ] || kill -9 $$"
    second = "echo up; while [ ! -e end ]; do sleep 0.05; done"
    log = tmp_path / "log"
    with log.open("w") as stderr:
        words = ["srun", FLAG, "-n1", "-w", "n1", "sh", "-c", first]
        flagged = lab.popen(words, cwd=tmp_path, env=site.environment, stderr=stderr.fileno())
    wait_for(lambda: "Killed" in log.read_text(), 30, "the first attempt's end")
    other = site.start("srun", "-n1", "-w", "n1", "sh", "-c", second)
    assert other.stdout is not None and other.stdout.readline() == "up\n"
    shown = ["scontrol", "show", "step", job, "-o"]
    wait_for(lambda: "State=PENDING" in lab.run(shown).stdout, 30, "it waits for its turn")
    assert "starting attempt 2" in log.read_text()
    assert "recovered" not in log.read_text()
    (tmp_path / "end").touch()
    assert flagged.wait(90) == 0
    assert "recovered: attempt 2" in log.read_text()
    assert other.wait(30) == 0
    site.expect_nothing_left()
    lab.run(["scancel", job])


def test_a_step_that_waits_for_another_one_tells_so_and_starts_in_its_turn(
    shared_lab: Callable[[LabSpec], Lab], built_plugin: Path, tmp_path: Path, wait_for: WaitFor
) -> None:
    """srun says nothing as long as it waits. With --immediate it does not, as plain srun."""
    lab = shared_lab(LabSpec(nodes=3, plugin=built_plugin, daemons=False, sres_options=SLOW))
    job = allocate(lab, "-w", "n[1-2]", "--exclusive")
    site = Site(lab, job, tmp_path, wait_for)
    holds = "echo up; while [ ! -e end ]; do sleep 0.05; done"
    other = site.start("srun", "-N2", "sh", "-c", holds)
    assert other.stdout is not None and other.stdout.readline() == "up\n"
    plain, supervised = site.both("-N2", "--immediate=1", "hostname")
    assert plain.code == supervised.code == 1
    assert "srun was not to wait for other steps of the job (--immediate)" in supervised.stderr
    assert "it is a bug" not in supervised.stderr and "attempt" not in supervised.stderr
    waits = site.start("srun", FLAG, "-N2", "hostname")
    assert waits.stderr is not None
    line = waits.stderr.readline()
    assert "Slurm has had the step wait for" in line and f"{job}.0 on n[1-2] runs there" in line
    (tmp_path / "end").touch()
    out, err = waits.communicate(timeout=90)
    assert (waits.returncode, sorted(out.split())) == (0, ["n1", "n2"]), err
    assert "attempt" not in err and "not resumed" not in err
    assert other.wait(30) == 0
    site.expect_nothing_left()
    lab.run(["scancel", job])


def test_a_batch_script_that_starts_while_slurmctld_is_away_waits_for_it(
    fresh_lab: Callable[[LabSpec], Lab], built_plugin: Path, tmp_path: Path, wait_for: WaitFor
) -> None:
    """After a requeue, say: the script calls srun once."""
    options = {"MessageTimeout": "2"}
    lab = fresh_lab(LabSpec(nodes=2, plugin=built_plugin, daemons=False, options=options))
    (tmp_path / "job.sh").write_text(HOLDS)
    words = ["sbatch", "--output=log", "--nodes=2", "--exclusive", "job.sh"]
    lab.run(words, cwd=tmp_path, check=True)
    wait_for((tmp_path / "up").exists, 30, "the batch script")
    lab.kill_daemon("slurmctld")
    (tmp_path / "go").touch()
    log = tmp_path / "log"
    wait_for(lambda: "waiting for slurmctld: " in log.read_text(), 30, "the log's line")
    lab.start_daemon("slurmctld")
    wait_for((tmp_path / "ended").exists, 150, "the end of the script")
    assert (tmp_path / "ended").read_text() == "0\n", log.read_text()
    assert len([line for line in log.read_text().splitlines() if ":" not in line]) == 2


def test_a_node_on_which_srun_can_start_no_task_is_left(
    fresh_lab: Callable[[LabSpec], Lab], built_plugin: Path, tmp_path: Path, wait_for: WaitFor
) -> None:
    """slurmd is away there, and Slurm does not know it yet: srun ends the step by itself, which
    looks like a person's scancel."""
    lab = fresh_lab(LabSpec(nodes=3, network=True, plugin=built_plugin, daemons=False))
    (tmp_path / "job.sh").write_text(LAUNCHES)
    words = ["sbatch", "--output=log", "--nodes=3", "--exclusive", "job.sh"]
    lab.run(words, cwd=tmp_path, check=True)
    wait_for((tmp_path / "up").exists, 30, "the batch script")
    lab.kill_daemon("slurmd", node="n2")
    (tmp_path / "go").touch()
    wait_for((tmp_path / "ended").exists, 150, "the end of the script")
    log = (tmp_path / "log").read_text()
    assert (tmp_path / "ended").read_text() == "0\n", log
    assert "what failed   srun could start no task on n2: " in log
    assert "starting attempt 2 on n[1,3]" in log
    assert "n2 does not answer (its slurmd takes no connection), and is left; n3 takes" in log


def test_a_job_without_another_node_waits_for_a_slurmd_that_is_away(
    fresh_lab: Callable[[LabSpec], Lab], built_plugin: Path, tmp_path: Path, wait_for: WaitFor
) -> None:
    lab = fresh_lab(
        LabSpec(nodes=2, network=True, plugin=built_plugin, daemons=False, sres_options=SOON)
    )
    (tmp_path / "job.sh").write_text(LAUNCHES)
    words = ["sbatch", "--output=log", "--nodes=2", "--exclusive", "job.sh"]
    lab.run(words, cwd=tmp_path, check=True)
    wait_for((tmp_path / "up").exists, 30, "the batch script")
    lab.kill_daemon("slurmd", node="n2")
    (tmp_path / "go").touch()
    log = tmp_path / "log"
    wait_for(lambda: "starting attempt 2 on n[1-2]" in log.read_text(), 90, log)
    lab.start_daemon("slurmd", node="n2")
    wait_for((tmp_path / "ended").exists, 150, "the end of the script")
    assert (tmp_path / "ended").read_text() == "0\n", log.read_text()
    assert "no exchange of nodes: no idle node" in log.read_text()


def test_a_job_is_requeued_by_its_supervisor_once_slurmctld_is_back(
    fresh_lab: Callable[[LabSpec], Lab], built_plugin: Path, tmp_path: Path, wait_for: WaitFor
) -> None:
    """Its batch host is sick, and slurmctld goes away in the moment in which it is asked."""
    options = {"MessageTimeout": "2"}
    lab = fresh_lab(LabSpec(nodes=2, plugin=built_plugin, daemons=False, options=options))
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("squeue", "scancel", "salloc", "sbatch"):
        (commands / name).symlink_to(str(shutil.which(name)))
    (commands / "scontrol").write_text(
        HELD.format(folder=tmp_path, scontrol=shutil.which("scontrol"))
    )
    (commands / "scontrol").chmod(0o755)
    (tmp_path / "sres.toml").write_text(f"slurm_bin = '{commands}'\n")
    (tmp_path / "job.sh").write_text(CRASHES)
    words = ["sbatch", "--parsable", "--output=log", "--nodes=2", "--exclusive", "--requeue"]
    config = {"SRES_CONFIG": str(tmp_path / "sres.toml")}
    job = lab.run([*words, "job.sh"], cwd=tmp_path, env=config, check=True).stdout.strip()
    wait_for((tmp_path / "up").exists, 30, "its program")
    lab.run(["scontrol", "update", "nodename=n1", "state=fail", "reason=sick"], check=True)
    (tmp_path / "crash").touch()
    wait_for((tmp_path / "held").exists, 60, "its requeue")
    lab.kill_daemon("slurmctld")
    (tmp_path / "away").touch()
    log = tmp_path / "log"
    wait_for(lambda: "waiting for slurmctld: scontrol requeue" in log.read_text(), 30, "its line")
    lab.start_daemon("slurmctld")
    shown = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    wait_for(lambda: lab.run(shown).stdout.strip() == "PENDING", 60, log)


@pytest.mark.parametrize("gres", [None, "gpu:2"])
def test_the_log_names_what_a_request_for_nodes_waits_for(
    fresh_lab: Callable[[LabSpec], Lab], tmp_path: Path, wait_for: WaitFor, gres: str | None
) -> None:
    """An exchange and a second allocation: nodes are free, and only a person has them given."""
    lab = fresh_lab(LabSpec(nodes=3, network=True, gres=gres))
    job = Job(lab, tmp_path, "--no-kill", nodes=2)
    wait_for(lambda: job.running_on(1, 2), 30, job)
    lab.run(["scontrol", "update", "partition=main", "state=DOWN"], check=True)
    lab.power_off("n2")
    wait_for(lambda: "Slurm's reason: PartitionDown" in job.log(), 120, job)
    assert "none is free" not in job.log()
    lab.run(["scontrol", "update", "partition=main", "state=UP"], check=True)
    wait_for(lambda: job.running_on(2, 2), 120, job)
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)


def prolog_that_fails_on(node: str, folder: Path, seconds: str = "0") -> Path:
    """A site's prolog, which takes so long on that node."""
    prolog = folder / "prolog"
    prolog.write_text(
        f'#!/bin/sh\n[ "$SLURMD_NODENAME" != {node} ] || {{ sleep {seconds}; exit 1; }}\n'
    )
    prolog.chmod(0o755)
    return prolog


@pytest.mark.parametrize("seconds", ["0", "0.4"])
def test_a_second_allocation_whose_prolog_fails_is_told_of(
    fresh_lab: Callable[[LabSpec], Lab],
    built_plugin: Path,
    tmp_path: Path,
    wait_for: WaitFor,
    seconds: str,
) -> None:
    """Another one follows where its node is known; where it is gone too soon, a requeue.

    If the prolog takes longer, Slurm shows the allocation as running, and an attempt begins there.
    """
    prolog = prolog_that_fails_on("n4", tmp_path, seconds)
    slurm = {"Prolog": str(prolog), "KillWait": "5"}
    lab = fresh_lab(
        LabSpec(nodes=5, network=True, gres="gpu:2", plugin=built_plugin, options=slurm)
    )
    job = Job(lab, tmp_path, "--no-kill", nodes=3)
    wait_for(lambda: job.running_on(1, 3), 30, job)
    lab.power_off("n3")
    # n5 takes its place, or n3, which is switched on again meanwhile.
    again = re.compile("recovered: attempt|requeued: start number")
    wait_for(lambda: again.search(job.log()), 120, job)
    assert "prolog" in job.log(), job
    assert "was ended by another" not in job.log()
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 60, job)


def test_a_job_that_is_held_for_the_prolog_of_its_new_node_tells_so(
    fresh_lab: Callable[[LabSpec], Lab], built_plugin: Path, tmp_path: Path, wait_for: WaitFor
) -> None:
    """The spare's prolog runs as the step starts there, and Slurm requeues the job for it."""
    prolog = prolog_that_fails_on("n4", tmp_path)
    slurm = {"Prolog": str(prolog), "KillWait": "5"}
    lab = fresh_lab(LabSpec(nodes=4, network=True, plugin=built_plugin, options=slurm))
    job = Job(lab, tmp_path, srun="srun --auto-resume=1 --auto-resume-spares=1")
    wait_for(lambda: job.running_on(1, 3), 30, job)
    lab.power_off("n3")
    wait_for(lambda: "failed on n4, so Slurm drains it" in job.log(), 60, job)
    assert f"`scontrol release {job.id}` has it start again" in job.log()
    assert "recovered: attempt 2" not in job.log()
    checked = lab.run(["sres", "check", "site"]).stdout
    assert "PrologFlags lacks Alloc" in checked and "lacks nohold_on_prolog_fail" in checked
    wait_for(lambda: job.state() == "PENDING", 30, job)
    prolog.write_text("#!/bin/sh\n")
    lab.run(["scontrol", "update", "node=n4", "state=resume"], check=True)
    wait_for(lambda: lab.node_states()["n4"] == "IDLE", 30, "n4 is in service")
    lab.run(["scontrol", "release", str(job.id)], check=True)
    # Slurm lets a requeued job wait for two minutes.
    wait_for(lambda: job.state() == "PENDING", 30, job)
    lab.run(["scontrol", "update", f"jobid={job.id}", "StartTime=now"], check=True)
    again = wait_for(lambda: [t for t in job.tasks() if t["restarts"] == 1], 60, job)
    assert again[0]["attempt"] == 3
    assert "n4: Slurm gave the node up" in job.log()
    job.let_end()
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
