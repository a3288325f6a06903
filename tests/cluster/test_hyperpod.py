"""HyperPod's published scripts run unchanged, through a node failure, with and without GRES."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import all_idle

from slurm_resilience.lab import Lab, LabSpec

SCRIPTS = Path(__file__).parents[3] / "shared" / "reference" / "hyperpod-scripts"

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
while not os.path.exists("end"):
    time.sleep(0.1)
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


@pytest.mark.skipif(not SCRIPTS.is_dir(), reason="HyperPod's published scripts are not at hand")
@pytest.mark.parametrize("gres", [None, "gpu:2"], ids=["plain", "gres"])
def test_published_scripts_survive_a_node(
    fresh_lab: Callable[[LabSpec], Lab],
    wait_for: Callable[..., Any],
    tmp_path: Path,
    gres: str | None,
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
    (work / "batch.sh").write_text((SCRIPTS / "batch.sh").read_text())

    lab = fresh_lab(LabSpec(nodes=4, network=True, gres=gres, lifecycle=lifecycle))
    options = [f"--gres={gres}"] if gres else []
    lab.run(["sbatch", *options, "--open-mode=append", "batch.sh"], cwd=work, check=True)
    first = wait_for(lambda: world(work, 1), 90, Log(work))
    check(lab, first)
    lab.power_off(first[1]["host"])
    second = wait_for(lambda: world(work, 2), 120, Log(work))
    check(lab, second)
    (work / "end").touch()
    wait_for(lambda: not lab.run(["squeue", "-h"]).stdout.strip(), 60, "the job ends")
    wait_for(lambda: all_idle(lab), 60, "every node is idle again")


def world(work: Path, number: int) -> list[dict[str, Any]]:
    """The nth world, once both of its ranks have met."""
    path = work / "worlds"
    lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    tokens = list(dict.fromkeys(line["token"] for line in lines))
    if len(tokens) < number:
        return []
    found = [line for line in lines if line["token"] == tokens[number - 1]]
    return sorted(found, key=lambda line: line["rank"]) if len(found) == 2 else []


def check(lab: Lab, ranks: list[dict[str, Any]]) -> None:
    """The master that the script found is a living node of this world, and rank 0's."""
    addresses = {node: fields["NodeAddr"] for node, fields in lab.node_fields().items()}
    assert [line["rank"] for line in ranks] == [0, 1]
    assert {line["sum"] for line in ranks} == {3.0}
    assert {line["master"] for line in ranks} == {addresses[ranks[0]["host"]]}
    assert len({line["host"] for line in ranks}) == 2


class Log:
    """The job's log, read when a wait has failed."""

    def __init__(self, work: Path) -> None:
        self._work = work

    def __str__(self) -> str:
        logs = sorted(self._work.glob("slurm-*.out"), key=os.path.getmtime)
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in logs)
