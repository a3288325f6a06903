"""HyperPod's published scripts run unchanged, through a node failure, with and without GRES.

SRES_TEST_LADDER=all scripts/test tests/cluster/test_hyperpod.py    on every rung
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jobs import all_idle

from slurm_resilience.lab import Lab, LabSpec

PUBLISHED = Path("shared") / "reference" / "hyperpod-scripts"
_FOUND = [path / PUBLISHED for path in Path(__file__).parents if (path / PUBLISHED).is_dir()]
SCRIPTS = _FOUND[0] if _FOUND else PUBLISHED

# The one word that may be filled in, and what stands behind it: a torch world over the nodes that
# the script found, or nothing goes on.
TRAINING = """\
import datetime, json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
mine = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(mine)
line = {"host": os.uname().nodename, "rank": dist.get_rank(), "world": dist.get_world_size(),
        "sum": mine.item(), "master": os.environ["MASTER_ADDR"], "token": os.environ["SRES_TOKEN"]}
with open("worlds", "a") as file:
    file.write(json.dumps(line) + "\\n")
is_over = torch.zeros(1)
while not is_over.item():
    if os.path.exists("bug"):
        raise AssertionError("the loss is negative")
    time.sleep(0.1)
    is_over = torch.tensor([float(os.path.exists("end"))])
    dist.all_reduce(is_over)
# A world that is torn down by the interpreter's end aborts now and then, and torchrun then waits
# for five minutes for the other node's word.
dist.destroy_process_group()
"""

# `conda run --live-stream -n pytorch COMMAND`, as far as the script needs it.
CONDA = """\
#!/bin/sh
shift 4
PATH={bin}:$PATH exec "$@"
"""

# A node's own /opt, as an image of the site would bring it.
LIFECYCLE = """\
#!/bin/sh
set -e
mount -t tmpfs tmpfs /opt
mkdir -p /opt/conda/bin
cp {conda} /opt/conda/bin/conda
"""


@dataclass(frozen=True)
class Way:
    """A fault, and the way on that it leads to."""

    rung: str
    fault: str = "power"
    gres: bool = False
    sbatch: tuple[str, ...] = ()
    srun: str = ""
    """Words that are added to the script's own srun."""
    said: str = ""
    """In the job's log."""
    ranks: int = 2
    """After the fault; 0: it is stopped."""

    def __str__(self) -> str:
        return f"{self.rung}-{'gres' if self.gres else 'plain'}"


NO_KILL = ("--no-kill",)
SPARE, FEWER = "--auto-resume-spares=1", "--auto-resume-min-nodes=1"
WAYS = (
    Way("swap", said="exchanged for"),
    Way("requeue", gres=True, said="requeued: start number 2"),
)
if "SRES_TEST_LADDER" in os.environ:
    WAYS += (
        Way("relaunch", "rank", said="again on the same nodes"),
        Way("relaunch", "rank", True, said="again on the same nodes"),
        Way("spare", sbatch=("--nodes=3",), srun=SPARE, said="takes the place of"),
        Way("spare", "power", True, ("--nodes=3", *NO_KILL), SPARE, "takes the place of"),
        Way("companion", "power", True, NO_KILL, said="a second allocation, job "),
        Way("smaller", srun=FEWER, said="1 of 2 nodes are left", ranks=1),
        Way("smaller", "power", True, NO_KILL, FEWER, "1 of 2 nodes are left", 1),
        Way("requeue", "first", said="requeued: start number 2"),
        Way("stop", "bug", said="it is a bug", ranks=0),
    )


@pytest.mark.skipif(not SCRIPTS.is_dir(), reason="HyperPod's published scripts are not at hand")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_published_scripts_survive_a_fault(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: Callable[..., Any], tmp_path: Path, way: Way
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    work = tmp_path / "work"
    work.mkdir()
    conda = tmp_path / "conda"
    conda.write_text(CONDA.format(bin=Path(sys.prefix) / "bin"))
    conda.chmod(0o755)
    lifecycle = tmp_path / "lifecycle"
    lifecycle.mkdir()
    script = lifecycle / "10-conda.sh"
    script.write_text(LIFECYCLE.format(conda=conda))
    script.chmod(0o755)
    published = (SCRIPTS / "train_auto_resume.sh").read_text()
    (work / "training.py").write_text(TRAINING)
    train = work / "train_auto_resume.sh"
    train.write_text(published.replace("<your_training_script.py>", "training.py"))
    train.chmod(0o755)
    batch = (SCRIPTS / "batch.sh").read_text()
    flag = "--auto-resume=1"
    (work / "batch.sh").write_text(batch.replace(flag, f"{flag} {way.srun}".strip()))

    lab = fresh_lab(
        LabSpec(nodes=4, network=True, gres="gpu:2" if way.gres else None, lifecycle=lifecycle)
    )
    options = ["--gres=gpu:2"] if way.gres else []
    words = ["sbatch", *options, *way.sbatch, "--open-mode=append", "batch.sh"]
    lab.run(words, cwd=work, check=True)
    log = Log(work, lab)
    first = wait_for(lambda: world(work, 1), 90, log)
    check(lab, first)
    if way.fault == "power":
        lab.power_off(first[1]["host"])
    elif way.fault == "first":
        lab.power_off(first[0]["host"])
    elif way.fault == "rank":
        # torchrun's own process: it would start its rank again by itself.
        lab.run(["pkill", "-KILL", "-f", "torchrun"], node=first[1]["host"], check=True)
    else:
        (work / "bug").touch()
    if way.ranks:
        second = wait_for(lambda: world(work, 2, way.ranks), 120, log)
        check(lab, second)
        (work / "end").touch()
    wait_for(lambda: not lab.run(["squeue", "-h"]).stdout.strip(), 120, log)
    assert way.said in log.said(), log
    wait_for(lambda: all_idle(lab), 60, "every node is idle again")


def world(work: Path, number: int, ranks: int = 2) -> list[dict[str, Any]]:
    """The nth world, once all of its ranks have met."""
    path = work / "worlds"
    lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    tokens = list(dict.fromkeys(line["token"] for line in lines))
    if len(tokens) < number:
        return []
    found = [line for line in lines if line["token"] == tokens[number - 1]]
    return sorted(found, key=lambda line: line["rank"]) if len(found) == ranks else []


def check(lab: Lab, ranks: list[dict[str, Any]]) -> None:
    """The master that the script found is a living node of this world, and rank 0's."""
    addresses = {node: fields["NodeAddr"] for node, fields in lab.node_fields().items()}
    count = len(ranks)
    assert [line["rank"] for line in ranks] == list(range(count))
    assert {line["sum"] for line in ranks} == {count * (count + 1) / 2}
    assert {line["master"] for line in ranks} == {addresses[ranks[0]["host"]]}
    assert len({line["host"] for line in ranks}) == count


class Log:
    """The job's log and what Slurm holds, read when a wait has failed."""

    def __init__(self, work: Path, lab: Lab) -> None:
        self._work = work
        self._lab = lab

    def __str__(self) -> str:
        asked = (["squeue"], ["squeue", "--steps"], ["scontrol", "show", "job"], ["sinfo", "-lN"])
        return "\n".join([self.said(), *(self._lab.run(words).stdout for words in asked)])

    def said(self) -> str:
        """Return all that the job and its supervisor have written."""
        logs = sorted(self._work.glob("slurm-*.out"), key=os.path.getmtime)
        return "\n".join(path.read_text(errors="replace") for path in logs)
