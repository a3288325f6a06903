"""No user's program takes from sresctld what nodes and administrators need."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import events

from slurm_resilience.config import load
from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]
SRES = str(Path(sys.prefix) / "bin" / "sres")
REPOSITORY = Path(__file__).parents[2]
ANSWER_SECONDS = 5.0
"""`sres status` must be there within this time; the figure that was seen is printed."""
MOST_MEMORY_MIB = 160
ROUNDS = 20


def python_of_users(lab: Lab) -> list[str]:
    """A Python that any user may run, with our packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = [path for path in sys.path if path.endswith("site-packages")]
    where = "PYTHONPATH=" + ":".join([str(REPOSITORY), *packages])
    for python in (sys.executable, f"/usr/bin/{version}"):
        words = ["env", where, python]
        probe = [*words, "-c", "import slurm_resilience.wire.client"]
        if lab.run(probe, user="alice", cwd="/").returncode == 0:
            return words
    pytest.skip(f"no {version} that another user may run")


def memory_mib(lab: Lab) -> float:
    """Resident memory of sresctld."""
    pids = lab.run(["pgrep", "-f", "bin/sresctld"], check=True).stdout.split()
    shown = [lab.run(["cat", f"/proc/{pid}/status"]).stdout for pid in pids]
    sizes = [
        int(line.split()[1]) for text in shown for line in text.splitlines() if "VmRSS" in line
    ]
    return max(sizes) / 1024


def picture(lab: Lab) -> tuple[dict[str, Any], float]:
    """The status as root sees it, and the seconds it took."""
    began = time.monotonic()
    done = lab.run([SRES, "status", "--format", "json"], timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), time.monotonic() - began


def test_a_user_who_takes_all_that_is_to_be_had(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    lab = fresh_lab(LabSpec(nodes=3, network=True))
    wait_for(lambda: picture(lab)[0]["health"] == {"healthy": ["n1", "n2", "n3"]}, 40, "all well")
    words = python_of_users(lab)
    home = lab.directory / "home" / "alice"
    submitted = lab.run(
        ["sbatch", "--parsable", "-N1", "--output=/dev/null"],
        input="#!/bin/bash\nsleep 600\n",
        user="alice",
        cwd=home,
        check=True,
    )
    job = submitted.stdout.strip()
    running = ["squeue", "-h", "-j", job, "-o", "%T"]
    wait_for(lambda: lab.run(running).stdout.strip() == "RUNNING", 30, "alice's job runs")
    settings = load(lab.directory / "etc" / "sres.toml")
    port = str(settings.controller.port)
    calm, calm_memory = picture(lab)[1], memory_mib(lab)
    script = (Path(__file__).parent / "hostile.py").read_text()
    # From a node: its own sresd has the same address. Last on the processor, which is another
    # machine's in a real cluster.
    attack = lab.popen(
        [
            "nice",
            "-n19",
            *words,
            "-c",
            script,
            settings.controller.host,
            port,
            settings.wire.munge_socket,
            job,
        ],
        user="alice",
        node="n1",
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert attack.stdout is not None and attack.stdout.readline().strip() == "begun"
    slowest, most = 0.0, 0.0
    for _ in range(ROUNDS):
        seen, seconds = picture(lab)
        slowest, most = max(slowest, seconds), max(most, memory_mib(lab))
        assert seen["health"] == {"healthy": ["n1", "n2", "n3"]}, seen
        assert not seen["incidents"]
        assert seconds < ANSWER_SECONDS and most < MOST_MEMORY_MIB
    attack.communicate(timeout=30)
    print(
        f"sres status: {calm:.2f} s in calm, at most {slowest:.2f} s under attack; "
        f"sresctld: {calm_memory:.0f} MiB, at most {most:.0f} MiB"
    )
    done = {event["kind"] for event in events(lab)}
    assert not done & {"detected", "marked", "marking", "requeue", "requeue-asked"}, done
