"""A process that Slurm cannot end: "Kill task failed", by a file server that does not answer."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from impatient import start_impatient
from jobs import all_idle, events, kinds

from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin
from slurm_resilience.lab.releases import own_version

WaitFor = Callable[..., Any]
SLURM = {"UnkillableStepTimeout": "5", "KillWait": "2"}


class HungFiles:
    """A mounted file system of which one file hangs until it is released."""

    def __init__(self, folder: Path) -> None:
        self.mounted, self._release = folder / "mounted", folder / "release"
        self.mounted.mkdir()
        self._log = folder / "log"
        words = [sys.executable, Path(__file__).with_name("hung_fs.py"), self.mounted]
        with self._log.open("wb") as log:
            self._server = subprocess.Popen([*words, self._release], stdout=log, stderr=log)

    def said(self) -> list[str]:
        return self._log.read_text().split("\n")

    def is_up(self) -> bool:
        if self._server.poll() is not None:
            pytest.skip(f"needs FUSE: {self.said()}")
        return "mounted" in self.said()

    def release(self) -> None:
        self._release.touch()

    def end(self) -> None:
        self.release()
        subprocess.run(["umount", "--lazy", self.mounted], check=False, capture_output=True)
        self._server.terminate()
        self._server.wait()


@pytest.fixture
def hung_files(wait_for: WaitFor) -> Iterator[HungFiles]:
    if not Path("/dev/fuse").exists():
        pytest.skip("needs FUSE: there is no /dev/fuse")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        files = HungFiles(Path(folder))
        try:
            wait_for(files.is_up, 10, "the file system is mounted")
            yield files
        finally:
            files.end()


def texts(lab: Lab, kind: str) -> list[str]:
    return [event["text"] for event in events(lab) if event["kind"] == kind]


def test_what_a_job_left_is_ended_and_the_node_resumed(
    hung_files: HungFiles, fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor
) -> None:
    if own_version() == "26.05":
        pytest.skip("Slurm 26.05 does not drain such a node within 150 s: it stays COMPLETING")
    lab = fresh_lab(LabSpec(nodes=2, network=True, options=SLURM))
    lab.kill_daemon("sresctld")
    start_impatient(lab, decide__kill_failed__RETRY_SECONDS=3.0)
    listed = [str(own_bin() / "sres"), "node", "list", "n2", "--format", "json"]
    wait_for(
        lambda: json.loads(lab.run(listed).stdout or "[{}]")[0].get("health") == "healthy",
        30,
        "n2 beats",
    )
    words = ["sbatch", "--parsable", "-w", "n2", "--output=/dev/null"]
    wrapped = f"--wrap=srun cat {hung_files.mounted}/hung"
    job = lab.run([*words, wrapped], cwd="/", user="alice", check=True).stdout.strip()
    wait_for(lambda: "held" in hung_files.said(), 30, "its task waits in the kernel")
    lab.run(["scancel", job], check=True)
    # Slurm itself finds that the task cannot be ended, and drains the node.
    wait_for(lambda: "left-over" in kinds(lab, "n2"), 60, "sresd is to end it")
    shown = lab.run(["scontrol", "show", "node", "n2", "-o"]).stdout
    assert " Reason=Kill task failed [" in shown
    assert "DRAIN" in lab.node_states()["n2"]
    wait_for(lambda: texts(lab, "left-over-remains"), 60, "nothing can end it as yet")
    assert "cat (alice" in texts(lab, "left-over-remains")[0]
    hung_files.release()
    wait_for(lambda: texts(lab, "left-over-ended"), 120, "it is gone")
    wait_for(lambda: all_idle(lab), 30, "the node is resumed")
    assert lab.run(["srun", "-w", "n2", "true"]).returncode == 0
    assert not {"detected", "marked", "replacing"} & {e["kind"] for e in events(lab)}
