"""The sizes that an elastic step may have, and what its ranks are told of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience.config import ElasticSettings
from slurm_resilience.errors import UsageError
from slurm_resilience.launcher import rendezvous_directory
from slurm_resilience.launcher.flags import SeatSpan
from slurm_resilience.launcher.node_rank import find_node_rank
from slurm_resilience.model import Job
from slurm_resilience.resume.elastic.elastic_size import ElasticSize, elastic_size
from slurm_resilience.resume.elastic.size_target import AskedSize, SizeTarget
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.srun.step_size import fewest_nodes, leave_spares
from slurm_resilience.training.rank_environment import read_environment
from slurm_resilience.wire.messages import ResizeOrder, ResizeTaken

JOB = Job(7, 0, "RUNNING", nodes=("n1", "n2"), exclusive=True)


def size(*words: str, program: str = "sres-run", **settings: str) -> ElasticSize | None:
    command = split(["--auto-resume=1", *words, program, "train.py"], BUILTIN)
    placed, environment = leave_spares(command, JOB, {})
    assert placed.argv[-2:] == (program, "train.py") and not placed.has("auto-resume-max-nodes")
    fewest = fewest_nodes(command, placed, JOB, environment)
    given = ElasticSettings(**settings)
    return elastic_size(command, placed, JOB, environment, fewest, given)


def test_a_step_keeps_its_size_unless_asked() -> None:
    assert size() is None and size("--auto-resume-max-nodes=2") is None
    assert size(program="sh") is None


@pytest.mark.parametrize(
    ("words", "groups", "sizes"),
    [
        (["--auto-resume-max-nodes=4"], (1, 1), ()),
        (["--auto-resume-max-nodes=8", "--auto-resume-step-nodes=2"], (2, 2, 2), ()),
        (["--auto-resume-sizes=2,4,8"], (2, 4), (2, 4, 8)),
        (["--auto-resume-sizes=1,8,2,4", "--auto-resume-max-nodes=8"], (2, 4), (1, 2, 4, 8)),
    ],
)
def test_each_group_is_a_companion(
    words: list[str], groups: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    found = size("--auto-resume-min-nodes=1", *words)
    assert found is not None and (found.groups, found.sizes) == (groups, sizes)
    assert found.in_order == bool(sizes)
    assert (found.least, found.core, found.most) == (1, 2, 2 + sum(groups))
    ranks = [rank for number in range(len(groups)) for rank in found.ranks(number)]
    assert ranks == list(range(2, found.most))


def test_an_option_comes_before_the_site_s_setting() -> None:
    words = ["--auto-resume-max-nodes=3", "--auto-resume-partition=mine"]
    found = size(*words, partition="scavenge", qos="low")
    assert found is not None
    assert (found.settings.partition, found.settings.qos) == ("mine", "low")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--auto-resume-max-nodes=1"], r"takes 2 node\(s\) from the start"),
        (["--auto-resume-max-nodes=all"], "write a number of nodes"),
        (["--auto-resume-max-nodes=5", "--auto-resume-step-nodes=2"], "5 is not reached"),
        (["--auto-resume-max-nodes=3000"], "more than 1000 requests"),
        (["--auto-resume-max-nodes=3000000000"], "3000000000 nodes: a Slurm cluster has 65533 at"),
        (["--auto-resume-max-nodes=" + "9" * 5000], "9… nodes: a Slurm cluster has 65533 at most"),
        (["--auto-resume-max-nodes=4", "--auto-resume-step-nodes=99999999"], "has 65533 at most"),
        (["--auto-resume-sizes=2,99999999999999999999999"], "9… nodes: a Slurm cluster has 65533"),
        (["--auto-resume-sizes=2," + "9" * 5000], "has 65533 at most"),
        (["--auto-resume-sizes=2,00"], "write numbers of nodes"),
        (["--auto-resume-sizes=4,8"], r"takes 2 node\(s\) from the start"),
        (["--auto-resume-sizes=2,x"], "write numbers of nodes"),
        (["--auto-resume-sizes=2,4", "--auto-resume-max-nodes=6"], "names all sizes"),
        (["--auto-resume-partition=p"], "add --auto-resume-max-nodes"),
        (
            ["--auto-resume-max-nodes=4", "--ntasks=3"],
            "--ntasks=3 is no multiple of the step's 2 nodes",
        ),
        (
            ["--auto-resume-max-nodes=4", "--gpus=a100:3"],
            "--gpus=3 is no multiple of the step's 2 nodes",
        ),
        (["--auto-resume-max-nodes=4", "-m", "arbitrary", "-w", "n1,n1,n2"], "has its own node"),
    ],
)
def test_sizes_that_no_step_can_have(words: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        size(*words)


def test_a_program_that_cannot_change_its_size() -> None:
    with pytest.raises(UsageError, match="only a program that uses"):
        size("--auto-resume-max-nodes=4", program="./train")


def test_ranks_without_a_launcher() -> None:
    slurm = {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "1", "SRES_MEET": "dir:/x"}
    core = read_environment(slurm | {"SRES_NODES": "2:4", "NNODES": "2"})
    assert (core.seat, core.seats, core.min_world, core.core, core.lent) == (1, 8, 4, 4, False)
    joined = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_LOCALID": "1", "SRES_LENT": "1"}
    joined |= {"SRES_SEATS": "8", "SRES_SEATS_HERE": "6,7", "SRES_NODES": "2:4", "NNODES": "2"}
    lent = read_environment(slurm | joined)
    assert (lent.seat, lent.seats, lent.core, lent.lent) == (7, 8, 4, True)
    assert core.sizes == () and read_environment(slurm).core == 0
    # One of a node's two tasks died, and is started again alone.
    alone = {"SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SRES_SEATS_HERE": "3", "SRES_LENT": ""}
    again = read_environment(slurm | joined | alone)
    assert (again.seat, again.seats, again.min_world, again.core) == (3, 8, 4, 4)
    named = slurm | {"SRES_NODES": "2:8", "NNODES": "2", "SRES_SIZES": "2,4,8"}
    assert read_environment(named).sizes == (4, 8, 16)
    with pytest.raises(UsageError, match="SRES_SIZES"):
        read_environment(named | {"SRES_SIZES": "2,x"})
    with pytest.raises(UsageError, match="SRES_NODES"):
        read_environment(slurm | {"SRES_NODES": "2"})


def test_a_rank_that_starts_late_on_a_lent_node_makes_no_directory_anew(tmp_path: Path) -> None:
    """Its srun has ended, and removed it."""
    home = tmp_path / "job-1-2"
    lent = {"SRES_SEAT": "3", "SRES_SEATS": "4", "SRES_DIR": str(home), "SRES_LENT": "1"}
    with pytest.raises(UsageError, match="is gone: the srun that started this has ended"):
        read_environment(lent)
    with pytest.raises(UsageError, match="is gone"):
        read_environment(lent | {"SRES_MEET": f"dir:{home}/run/mesh"})
    of_launcher = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "NODE_RANK": "3", "NNODES": "2"}
    here = find_node_rank(of_launcher | {"SRES_NODES": "2:4"}, nodes="2")
    with pytest.raises(UsageError, match="is gone"):
        rendezvous_directory.choose(lent, here, 1, tmp_path / "private")
    assert not home.exists()
    home.mkdir()
    assert read_environment(lent).meet == f"dir:{home}/mesh"


def test_ranks_of_a_launcher() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "NODE_RANK": "3", "NNODES": "2"}
    here = find_node_rank(step | {"SRES_NODES": "2:4"}, nodes="2")
    assert (here.rank, here.nodes) == (3, SeatSpan(2, 4))
    seat = {"SRES_SEAT": "7", "SRES_SEATS": "8", "LOCAL_WORLD_SIZE": "2", "SRES_MIN_WORLD": "4"}
    found = read_environment(seat | {"SRES_NODES": "2:4", "NNODES": "2", "SRES_MEET": "dir:/x"})
    assert (found.seat, found.seats, found.min_world, found.core) == (7, 8, 4, 4)


def test_a_person_changes_the_target_of_a_step() -> None:
    news: list[int] = []
    target = SizeTarget(size("--auto-resume-max-nodes=4"), lambda: news.append(1))
    assert target.present == AskedSize(4)
    assert target.take(ResizeOrder(3, 0)) == ResizeTaken(3, 4)
    assert target.present == AskedSize(3, "root") and news
    assert target.take(ResizeOrder(3, 4_000_000)) == ResizeTaken(3, 3)
    assert target.present.by == "root", "who asked first is told"
    target.take(ResizeOrder(2, 4_000_000))
    assert target.present.by == "uid 4000000"


@pytest.mark.parametrize(
    ("words", "nodes", "why"),
    [
        ([], 2, "its srun keeps its size"),
        (["--auto-resume-max-nodes=4"], 1, "keeps the 2 that it was started on"),
        (["--auto-resume-max-nodes=4"], 5, "at most 4, as its srun says"),
        (["--auto-resume-sizes=2,4,8"], 6, "no size of this step; near are 2, 4, 8"),
        (["--auto-resume-max-nodes=8", "--auto-resume-step-nodes=2"], 3, "near are 2, 4, 6, 8"),
    ],
)
def test_a_target_that_a_step_cannot_have_is_refused(
    words: list[str], nodes: int, why: str
) -> None:
    target = SizeTarget(size(*words), lambda: None)
    before = target.present
    with pytest.raises(UsageError, match=why):
        target.take(ResizeOrder(nodes, 0))
    assert target.present == before


def test_after_a_requeue_the_target_holds_where_the_step_can_still_have_it() -> None:
    for asked, held in ((AskedSize(3, "alice"), 3), (AskedSize(9, "alice"), 4), (AskedSize(), 4)):
        target = SizeTarget(size("--auto-resume-max-nodes=4"), lambda: None)
        target.restore(asked)
        assert target.present.nodes == held
