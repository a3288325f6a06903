"""A second allocation beside a job: how it is asked for, what it is told, and how it ends."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.config import ResumeSettings
from slurm_resilience.errors import SlurmError, SlurmUnreachable
from slurm_resilience.model import Job, Node
from slurm_resilience.resume.allocation import companion
from slurm_resilience.resume.allocation.allocation import Allocation, Companion
from slurm_resilience.resume.allocation.companion_world import (
    companion_variables,
    part_command,
    part_environment,
    world_obstacle,
    world_parts,
    world_variables,
)
from slurm_resilience.resume.allocation.swap import NoIdleNode
from slurm_resilience.resume.decide.classify import Cause, Ending
from slurm_resilience.resume.decide.plan import PlanFacts, plan
from slurm_resilience.resume.srun.environment import Attempt, wrapped
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.slurm.companion_job import (
    CompanionRequest,
    FoundCompanion,
    companion_name,
    companion_of,
    companion_script,
    companion_words,
    per_node_words,
)
from slurm_resilience.slurm.parse import companions as read_companions

LOST = (Ending(137, 60.0, False, "RUNNING", {"n2": "down"}),)
FACTS = PlanFacts(
    job_nodes=("n1", "n2", "n3"),
    step_size=3,
    has_gres=True,
    permits_expansion=True,
    is_batch=True,
    requeue=True,
    batch_host="n1",
    own_nodes=("n1", "n2", "n3"),
    companion_obstacle="",
)
ATTEMPT = Attempt(
    job=12,
    number=2,
    restarts=0,
    step_nodes=("n3", "n4", "n1"),
    job_nodes=("n3", "n4"),
    master_address="10.0.0.3",
    step=5,
    tasks_per_node=2,
)
PARTS = world_parts(12, ATTEMPT.step_nodes, [(57, ("n1",))])


def facts(**changes: object) -> PlanFacts:
    return PlanFacts(**{name: getattr(FACTS, name) for name in FACTS.__struct_fields__} | changes)  # type: ignore[arg-type]


def chosen(given: PlanFacts, *lost: str) -> tuple[str, int, tuple[str, ...]]:
    made = plan(Cause("node", "it died", lost), given, LOST, ResumeSettings())
    return made.kind, made.take, made.nodes


def test_a_job_that_cannot_grow_gets_a_companion_before_it_is_requeued() -> None:
    assert chosen(FACTS, "n2") == ("companion", 1, ("n1", "n3"))
    assert chosen(facts(has_gres=False), "n2")[0] == "swap"
    assert chosen(facts(has_gres=False, permits_expansion=False), "n2")[0] == "companion"
    assert chosen(facts(companion_obstacle="it is multi-prog"), "n2")[0] == "requeue"
    assert chosen(facts(swap_failed="no node came"), "n2")[0] == "requeue"
    assert chosen(FACTS, "n1")[0] == "requeue"  # the batch host
    assert chosen(facts(min_nodes=2), "n2")[0] == "relaunch"
    assert chosen(facts(job_nodes=("n1", "n2", "n3", "n4")), "n2")[0] == "relaunch"


def test_whole_companions_are_kept_and_broken_ones_given_up() -> None:
    held = facts(
        job_nodes=("n1", "n3"),
        step_size=4,
        own_nodes=("n1", "n3", "n5", "n6"),
        companions=(("n5",), ("n6",)),
    )
    assert chosen(held) == ("relaunch", 0, ("n1", "n3", "n5", "n6"))
    assert chosen(held, "n5") == ("companion", 1, ("n1", "n3", "n6"))
    pair = facts(job_nodes=("n1", "n3"), step_size=4, companions=(("n5", "n6"),))
    assert chosen(pair, "n5") == ("companion", 2, ("n1", "n3"))
    assert chosen(facts(job_nodes=("n1",), companions=(("n5", "n6"),)), "n1")[0] == "requeue"


def test_two_steps_are_told_of_one_world() -> None:
    main, other = PARTS
    assert (main.nodes, other.job, other.first_node) == (("n3", "n4"), 57, 2)
    every, shifted = world_variables(ATTEMPT, PARTS), companion_variables(ATTEMPT, PARTS, other)
    assert {every[name] for name in ("NODE_LIST", "SLURM_STEP_NODELIST")} == {"n[3-4],n1"}
    assert (every["SLURM_NNODES"], every["SLURM_NTASKS"]) == ("3", "6")
    assert every["SLURM_TASKS_PER_NODE"] == "2(x3)"
    assert every.items() <= shifted.items()
    assert (shifted["SLURM_NODEID"], shifted["NODE_RANK"]) == ("@NODEID+2", "@NODEID+2")
    assert (shifted["SLURM_PROCID"], shifted["SLURM_JOB_ID"]) == ("@PROCID+4", "12")
    assert shifted["SLURM_STEP_ID"] == shifted["SLURM_STEPID"] == "5"
    assert (shifted["SRES_COMPANION_JOB"], shifted["MASTER_ADDR"]) == ("57", "10.0.0.3")
    assert world_parts(12, ("n3", "n4"), [(57, ("n1",))]) == ()


def test_a_shell_counts_on_where_there_is_no_plugin() -> None:
    variables = companion_variables(ATTEMPT, PARTS, PARTS[1])
    program = wrapped(("sh", "-c", "echo $SLURM_PROCID $SLURM_NODEID $NODE_RANK"), variables)
    own = {"SLURM_PROCID": "1", "SLURM_NODEID": "0", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(program, env=own, capture_output=True, text=True, check=True)
    assert done.stdout == "5 2 2\n"


def test_each_part_gets_its_share_of_the_users_line() -> None:
    words = [
        "-N3",
        "-n6",
        "--gpus=6",
        "-w",
        "n[1-3]",
        "--jobid=12",
        "-o",
        "out.%j.%J",
        "train",
        "--lr",
        "1",
    ]
    command = split(words, BUILTIN)
    main, other = (" ".join(part_command(command, ATTEMPT, part).argv) for part in PARTS)
    assert main == (
        "--jobid=12 -o out.%j.%J --gpus=4 --nodes=2 --ntasks=4 --nodelist=n[3-4] train --lr 1"
    )
    assert other == (
        "--output=out.12.12.5 --gpus=2 --nodes=1 --ntasks=2 --nodelist=n1 --jobid=57 --overlap "
        "--open-mode=append train --lr 1"
    )
    environment = {"SLURM_JOB_ID": "12", "SLURM_NNODES": "3", "SLURM_NTASKS": "6"}
    environment |= {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x3)"}
    own = part_environment(environment, ATTEMPT, PARTS[1])
    assert (own["SLURM_JOB_ID"], own["SLURM_JOB_NODELIST"], own["SLURM_NNODES"]) == (
        "57",
        "n1",
        "1",
    )
    assert (own["SLURM_NTASKS"], own["SLURM_TASKS_PER_NODE"]) == ("2", "2")


@pytest.mark.parametrize(
    ("words", "environment", "tasks", "why"),
    [
        ("train", {}, 6, ""),
        ("--mpi=none -o out.%N train", {}, 3, ""),
        ("--label train", {}, 6, ""),
        ("--label -o out train", {}, 6, "--label"),
        ("-e err train", {"SLURM_LABELIO": "1"}, 6, "--label"),
        ("--multi-prog conf", {}, 6, "--multi-prog"),
        ("--mpi=pmix train", {}, 6, "MPI"),
        ("train", {"SLURM_MPI_TYPE": "pmix"}, 6, "MPI"),
        ("-o out.%5t train", {}, 6, "%t or %n"),
        ("train", {"SLURM_STDERRMODE": "err.%n"}, 6, "%t or %n"),
        ("-i 0 train", {}, 6, "the input of one task"),
        ("train", {}, 7, "do not lie evenly"),
        ("train", {}, 0, "unknown number"),
        ("--gpus=4 train", {}, 6, "--gpus=4 is no multiple"),
        ("-m arbitrary -w n1,n1,n2 train", {}, 3, "arbitrary"),
    ],
)
def test_what_two_steps_cannot_share(
    words: str, environment: dict[str, str], tasks: int, why: str
) -> None:
    told = world_obstacle(split(words.split(), BUILTIN), environment, 3, tasks)
    assert why in told and bool(told) == bool(why)


def test_a_companion_tells_whose_it_is() -> None:
    job = Job(12, 1000, "RUNNING", restarts=2, time_left="1:30:30", gres="gres:gpu:2", qos="high")
    job = Job(**{name: getattr(job, name) for name in job.__struct_fields__} | {"account": "a"})
    words = companion_words(CompanionRequest(job, 3, 4711, ("--mem=100",)))
    name = "sres-companion-of-12.2-4711"
    assert {f"--job-name={name}", "--time=91", "--gres=gpu:2", "--nodes=3"} <= set(words)
    assert {"--no-requeue", "--exclusive", "--mem=100", "--account=a"} <= set(words)
    assert "--no-kill" not in words, "without the node of its script nothing would end it"
    assert companion_name(12, 2, 4711) == name
    assert companion_of(57, name) == (57, 12, 2, 4711, False, "")
    lent = CompanionRequest(job, 3, 4711, lent=True)
    assert f"--job-name={name}-lent" in companion_words(lent)
    assert companion_of(57, f"{name}-lent") == (57, 12, 2, 4711, True, "")
    others = ("train", f"{name}x", f"x{name}", f"{name}-lent-lent", "sres-companion-of-12")
    for other in (*others, "sres-12"):
        assert companion_of(57, other) is None
    text = f"57 R {name}|None\n58 CD {name}|None\n59 PD sres-companion-of-13.0-1|None\n60 R a|x\n"
    text += f"61 R {name} x|None\nx\n|\n62 PD {name}|Resources\n63 PD {name}-lent|QOSMaxWall\n"
    behind = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority "
    text += f"64 PD {name}-lent|{behind}partitions\n"
    found = read_companions(text, 12)
    assert [each.id for each in found] == [57, 62, 63, 64]
    assert [each.needs_a_person for each in found] == [False, False, True, False]


@pytest.mark.parametrize(
    ("told", "gres", "words"),
    [
        ({"SLURM_MEM_PER_NODE": "500"}, "", ("--mem=500",)),
        ({"SLURM_GPUS": "4"}, "", ("--gpus-per-node=2",)),
        (
            {"SLURM_GPUS": "a100:3", "SLURM_MEM_PER_GPU": "9"},
            "",
            ("--mem-per-gpu=9", "--gpus-per-node=a100:2"),
        ),
        ({"SLURM_GPUS": "4"}, "gres:gpu:2", ()),
        ({}, "", ()),
    ],
)
def test_it_has_the_memory_and_gpus_of_a_node_of_its_job(
    told: dict[str, str], gres: str, words: tuple[str, ...]
) -> None:
    """squeue shows neither memory nor what `sbatch --gpus=N` asked for on all nodes together."""
    job = Job(12, 1000, "RUNNING", gres=gres)
    assert per_node_words(told | {"SLURM_JOB_NUM_NODES": "2"}, job) == words


def run_script(folder: Path, tools: Mapping[str, str], *, lent: bool) -> int:
    """Run a companion's script with these commands; return its exit code.

    Its user has a squeue of his own, and nothing else on PATH.
    """
    own = folder / "bin"
    own.mkdir()
    for path, body in {
        own / "squeue": "echo mine",
        **{folder / n: b for n, b in tools.items()},
    }.items():
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    words = ["/bin/sh", "-c", companion_script(12, 0, str(folder), lent=lent)]
    env = {"PATH": str(own), "SLURM_JOB_ID": "57"}
    return subprocess.run(words, env=env, cwd=folder, check=False, timeout=60).returncode


@pytest.mark.parametrize(
    ("shown", "ends"),
    [
        ("12              RUNNING         0           ", False),
        ("12              SUSPENDED       0           ", False),
        ("12              RUNNING         1           ", True),
        ("12              COMPLETING      0           ", True),
        ("112             RUNNING         0           ", True),
        ("", True),
        ("!slurm_load_jobs error: Invalid job id specified", True),
        ("!slurm_load_jobs error: Unable to contact slurm controller", False),
    ],
)
def test_its_script_ends_with_the_run_of_its_job(tmp_path: Path, shown: str, ends: bool) -> None:
    text, code = shown.removeprefix("!"), int(shown.startswith("!"))
    tools = {
        "squeue": f"echo '{text}'; exit {code}",
        "scontrol": 'echo "StepId=57.0 UserId=1"',
        # Time passes by its looks, and the third one is the test's last.
        "sleep": 'echo ".$1" >> looks; [ "$(wc -l < looks)" -lt 3 ]',
    }
    run_script(tmp_path, tools, lent=False)
    looks = (tmp_path / "looks").read_text().split()
    assert len(looks) == (1 if ends else 3)
    assert looks[0] == ".0", "one that its job has left in the queue would hold nodes for nothing"


@pytest.mark.parametrize(("lent", "looks"), [(False, 4), (True, 1)])
def test_its_script_ends_when_nothing_uses_it(tmp_path: Path, lent: bool, looks: int) -> None:
    tools = {
        "squeue": "echo '12 RUNNING 0'",
        "scontrol": "echo 'Job step 57 not found' >&2; exit 1",
        "cut": "echo . >> clock; expr 100 '*' $(wc -l < clock)",
        "sleep": 'echo . >> looks; [ "$(wc -l < looks)" -lt 9 ]',
    }
    assert run_script(tmp_path, tools, lent=lent) == 0
    assert (tmp_path / "looks").read_text().count(".") == looks


@pytest.mark.parametrize("date", [-7200, 7200])
def test_its_script_counts_by_no_date_that_is_set(tmp_path: Path, date: int) -> None:
    """Set back, it would hold nodes for hours, and set on, give them back before their step."""
    tools = {
        "squeue": "echo '12 RUNNING 0'",
        "scontrol": "echo 'Job step 57 not found' >&2; exit 1",
        # Set between the first look and the second.
        "date": f"[ $(wc -l < clock) -lt 2 ] && echo 9000 || expr 9000 + {date}",
        "cut": "echo . >> clock; expr 25 '*' $(wc -l < clock)",
        "sleep": 'echo . >> looks; [ "$(wc -l < looks)" -lt 9 ]',
    }
    (tmp_path / "clock").touch()
    assert run_script(tmp_path, tools, lent=True) == 0
    assert (tmp_path / "looks").read_text().count(".") == 3


def allocation_of(slurm: FakeSlurm) -> Allocation:
    made = Allocation(slurm, slurm.job(1), threading.Event(), patience=1.0, permits_expansion=True)
    made.companions.supervisor = 4711
    return made


def gres_cluster(nodes: int) -> FakeSlurm:
    names = [f"n{number}" for number in range(1, nodes + 1)]
    return FakeSlurm([Node(name, "IDLE", address=name, gres="gpu:2") for name in names])


def test_a_companion_is_got_and_given_back() -> None:
    slurm = gres_cluster(4)
    slurm.submit(3, no_kill=True)
    allocation = allocation_of(slurm)
    assert companion.obtain(allocation, 1, 1.0, ()) == Companion(2, ("n4",))
    assert allocation.companions.nodes == ("n4",)
    assert allocation.bad(("n1", "n4")) == {}
    slurm.cancel_job(2)
    slurm.pass_time()
    assert allocation.bad(("n1", "n4")) == {"n4": "the second allocation, job 2, has ended"}
    companion.release_all(allocation)
    assert allocation.companions.held == []


def test_a_request_that_waits_too_long_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = gres_cluster(3)
    slurm.submit(3)
    allocation = allocation_of(slurm)
    with pytest.raises(NoIdleNode):
        companion.obtain(allocation, 1, 0.1, ())
    assert slurm.companions(allocation.job) == ()
    allocation.user_stop.set()
    assert companion.obtain(allocation, 1, 60.0, ()) is None
    assert slurm.companions(allocation.job) == ()


def test_a_request_that_a_person_cancels_is_not_made_again() -> None:
    slurm = gres_cluster(3)
    slurm.submit(3)
    allocation = allocation_of(slurm)
    # Once it has been asked for.
    slurm.before["ask_companion"] = lambda: slurm.before.update(job=lambda: slurm.cancel_job(2))
    with pytest.raises(companion.CompanionEnded, match="job 2, was ended by another"):
        companion.obtain(allocation, 1, 60.0, ())


@pytest.mark.parametrize(
    ("nodes", "drained", "text"),
    [
        (("n4",), {"n4"}, "the prolog of the second allocation, job 2, failed on n4, which Slurm"),
        ((), {"n4"}, "the second allocation, job 2, has ended, as a prolog failed on n4"),
        (("n5",), {"n4"}, "the second allocation, job 2, was ended by another"),
        ((), set(), "the second allocation, job 2, was ended by another"),
    ],
)
def test_a_companion_whose_prolog_failed_was_ended_by_no_person(
    nodes: tuple[str, ...], drained: set[str], text: str
) -> None:
    """Another companion is asked for, if that node is known to be its own."""
    end = companion._end_of(2, nodes, drained)
    assert str(end).startswith(text)
    assert isinstance(end, companion.PrologFailed) is (nodes == ("n4",))


def test_a_companion_is_over_when_its_number_is_another_jobs() -> None:
    """slurmctld was killed and has forgotten it, say; the other job may have the same node."""
    slurm = gres_cluster(4)
    slurm.submit(3, no_kill=True)
    allocation = allocation_of(slurm)
    assert companion.obtain(allocation, 1, 1.0, ()) == Companion(2, ("n4",))
    assert allocation.is_running(2) and not allocation.is_over(2)
    slurm.forget(2)
    slurm.put(Node("n4", "IDLE", address="n4", gres="gpu:2"))
    assert slurm.submit(1) == 2 and slurm.job(2).nodes == ("n4",)
    assert allocation.bad(("n1", "n4")) == {"n4": "the second allocation, job 2, has ended"}
    assert allocation.is_over(2) and not allocation.is_running(2)


@pytest.mark.parametrize(
    ("reason", "told"),
    [("AssocMaxJobsLimit", "; Slurm's reason: AssocMaxJobsLimit"), ("Resources", "")],
)
def test_the_log_names_what_a_companion_waits_for_that_only_a_person_changes(
    reason: str, told: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    slurm = gres_cluster(3)
    slurm.submit(3, no_kill=True)
    known = slurm.companions
    monkeypatch.setattr(
        slurm,
        "companions",
        lambda job: tuple(found._replace(waits_for=reason) for found in known(job)),
    )
    with pytest.raises(NoIdleNode):
        companion.obtain(allocation_of(slurm), 1, 0.3, ())
    assert f"more at most{told}\n" in capfd.readouterr().err


def test_slurm_may_drain_a_node_after_it_has_given_up_its_companion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slurm = gres_cluster(5)
    slurm.submit(3)
    looks: Iterator[set[str]] = chain((set(), set()), repeat({"n4"}))
    monkeypatch.setattr(companion, "_drained_by_prolog", lambda _: next(looks))
    monkeypatch.setattr(companion, "DRAIN_SECONDS", 0.01)
    allocation = allocation_of(slurm)
    slurm.before["ask_companion"] = lambda: slurm.before.update(job=lambda: slurm.cancel_job(2))
    assert companion.obtain(allocation, 1, 60.0, ()) == Companion(3, ("n5",))


def test_doubtful_nodes_and_lost_answers_leave_no_companion_behind() -> None:
    slurm = gres_cluster(6)
    slurm.submit(3)
    allocation = allocation_of(slurm)
    lost = slurm.ask_companion(CompanionRequest(allocation.job, 1, 4711))
    others = slurm.ask_companion(CompanionRequest(allocation.job, 1, 99))
    got = companion.obtain(
        allocation, 1, 1.0, (), doubts=lambda names: dict.fromkeys({"n4"} & {*names}, "silent")
    )
    assert got is not None and got.nodes == ("n6",)
    slurm.pass_time()
    assert {found.id for found in slurm.companions(allocation.job)} == {others, got.id}
    assert lost not in {others, got.id}
    slurm.refusals["ask_companion"] = SlurmError("Invalid account")
    with pytest.raises(SlurmError, match="Invalid account"):
        companion.obtain(allocation, 1, 1.0, ())


class Passing(FakeSlurm):
    """Time passes with each look at the companions."""

    def companions(self, job: Job) -> tuple[FoundCompanion, ...]:
        self.pass_time()
        return super().companions(job)


def test_companions_of_an_earlier_run_end_before_the_next_one_begins() -> None:
    slurm = Passing(6)
    slurm.submit(3)
    allocation = allocation_of(slurm)
    slurm.ask_companion(CompanionRequest(allocation.job, 1, 99))
    slurm.requeue(1)
    slurm.pass_time(300.0)
    slurm.start_now(1)
    slurm.pass_time(10.0)
    later = allocation_of(slurm)
    assert later.job.restarts == 1
    slurm.refusals["cancel_job"] = SlurmUnreachable("away")
    slurm.before["cancel_job"] = slurm.refusals.clear
    companion.end_earlier(later)
    assert slurm.companions(later.job) == ()
