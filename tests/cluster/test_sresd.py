"""sresd on real nodes: what it tells, and whose steps it ends when the cable is pulled."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nvml_library import StubDriver, built_library

from slurm_resilience.lab import Lab, LabSpec

HERE = Path(__file__).resolve().parent
SRESD = str(Path(sys.executable).parent / "sresd")
FENCE_AFTER = 4.0
SPEC = LabSpec(
    nodes=3,
    network=True,
    daemons=False,
    plugin=None,
    lifecycle=None,
    sres_options={
        "agent": {
            "fence_after": FENCE_AFTER,
            "check_interval": 1.0,
            "read_ahead": [str(HERE / "test_sresd.p*")],
        }
    },
)
XID = "NVRM: Xid (PCI:0000:91:00): 79, pid=1, name=x, GPU has fallen off the bus."

Wait = Callable[..., Any]


class Controller:
    """The real wire server on ``ctl``, writing down what it hears (`recorder.py`)."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.lines: list[dict[str, Any]] = []
        config = json.dumps({name: _address(lab, name) for name in lab.nodes})
        argv = [sys.executable, str(HERE / "recorder.py"), config]
        self.process = lab.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def heard(self, node: str, kind: str) -> list[dict[str, Any]]:
        return [x for x in list(self.lines) if (x["node"], x["type"]) == (node, kind)]

    def findings(self, node: str) -> list[dict[str, Any]]:
        return [f for report in self.heard(node, "Report") for f in report["findings"]]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join(5)


def _address(lab: Lab, node: str) -> str:
    fields = lab.node_fields()[node]
    return f"{fields['NodeAddr']}:{fields.get('Port', '6818')}"


class World:
    """A lab with sresd on every node and the recorder on ctl."""

    def __init__(self, lab: Lab, logs: Path, env: dict[str, str] | None = None) -> None:
        self.lab, self.logs = lab, logs
        self.controller = Controller(lab)
        self.sresd: dict[str, subprocess.Popen[str]] = {}
        for node in lab.nodes:
            log = (logs / f"{node}.log").open("w")
            words = [SRESD, "--node", node]
            self.sresd[node] = lab.popen(words, node=node, stderr=log, env=env or {})

    def log(self, node: str) -> str:
        return (self.logs / f"{node}.log").read_text()

    def end(self) -> None:
        for process in self.sresd.values():
            process.terminate()
        late = []
        for node, process in self.sresd.items():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                late.append(f"{node}: {self.threads(node)}")
                process.kill()
                process.wait()
        self.controller.end()
        assert not late, f"sresd did not end on SIGTERM: {late}"

    def threads(self, node: str) -> str:
        """Show where the threads of a node's sresd are, for the message of a failed test."""
        look = 'for t in /proc/$(pgrep -o -f "sresd --node")/task/*; do cat $t/wchan; echo; done'
        seen = self.lab.run(["bash", "-c", look], node=node)
        return f"{seen.stdout.split()} {self.log(node)[-500:]}"


@pytest.fixture
def world(fresh_lab: Callable[[LabSpec], Lab], tmp_path: Path, wait_for: Wait) -> Iterator[World]:
    one = World(fresh_lab(SPEC), tmp_path)
    try:
        for node in one.lab.nodes:
            wait_for(lambda n=node: one.controller.heard(n, "Beat"), 20, f"{node} beats")
        yield one
    finally:
        one.end()
        for node in one.lab.nodes:
            print(f"--- sresd on {node}\n{one.log(node)}")


def test_a_kernel_line_is_told_with_the_nodes_identity(world: World, wait_for: Wait) -> None:
    lab, controller = world.lab, world.controller
    (hello,) = controller.heard("n2", "NodeHello")
    assert hello["instance"] == lab.instance("n2")
    # Not compared with n1's: a lab's nodes share a kernel, and may boot in the same clock tick.
    assert hello["boot_id"]
    lab.kmsg("n2", XID)
    (finding,) = wait_for(lambda: controller.findings("n2"), 5, "the finding arrives")
    assert (finding["severity"], finding["subject"]) == ("reboot", "0000:91:00")
    assert controller.findings("n1") == []

    def verdicts() -> dict[str, str]:
        reports = controller.heard("n2", "Report")
        return {r["check"]: r["verdict"] for report in reports for r in report["results"]}

    wait_for(lambda: len(verdicts()) >= 6, 10, "every check has a result")
    unjudged = {name for name, verdict in verdicts().items() if verdict == "unjudged"}
    # Of a virtual machine's clock the kernel may know nothing.
    assert unjudged <= {"clock_sync"}


def _step(lab: Lab, node: str, **env: str) -> tuple[int, subprocess.Popen[str]]:
    """A job with one step on a node; its id, once the task runs."""
    words = ["-N1", "-n1", "-w", node, "--exclusive", "bash", "-c", "echo $SLURM_JOB_ID; sleep 900"]
    process = lab.popen(["srun", *words], env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return int(process.stdout.readline()), process


def _sleeps(lab: Lab, node: str) -> str:
    """List what sleeps on the node, as its process table shows it."""
    return lab.run(["pgrep", "-fx", "sleep 900"], node=node).stdout


def test_a_cut_node_ends_the_step_that_asked(world: World, wait_for: Wait) -> None:
    lab = world.lab
    job, srun = _step(lab, "n2", SRES_TOKEN="t")
    lab.cut("n2")
    began = time.monotonic()
    wait_for(lambda: not _sleeps(lab, "n2"), FENCE_AFTER + 15, "the step ends by itself")
    took = time.monotonic() - began
    assert took > FENCE_AFTER, "not before the time is up"
    lab.mend("n2")
    told = wait_for(
        lambda: [f for f in world.controller.findings("n2") if f["check"] == "fence"],
        20,
        "what was ended is told after the reconnect",
    )
    assert (told[0]["subject"], told[0]["severity"]) == (f"{job}.0", "monitor")
    assert "cut off from the controller and 2 nodes" in told[0]["text"]
    srun.kill()


def test_a_cut_node_leaves_a_step_that_did_not_ask(world: World, wait_for: Wait) -> None:
    lab = world.lab
    _, srun = _step(lab, "n2")
    before = _sleeps(lab, "n2")
    lab.cut("n2")
    wait_for(lambda: "cut off" in world.log("n2"), FENCE_AFTER + 15, "sresd knows it is cut off")
    assert _sleeps(lab, "n2") == before != ""
    lab.mend("n2")
    srun.kill()


def test_a_dead_control_plane_ends_nothing(world: World, wait_for: Wait) -> None:
    lab = world.lab
    _, srun = _step(lab, "n2", SRES_TOKEN="t")
    before = _sleeps(lab, "n2")
    world.controller.end()
    lab.kill_daemon("slurmctld", 9)
    wait_for(
        lambda: "machine answers" in world.log("n2"), FENCE_AFTER + 15, "sresd has looked around"
    )
    quiet = time.monotonic() + FENCE_AFTER + 3
    wait_for(lambda: time.monotonic() > quiet, FENCE_AFTER + 5, "fence_after has passed")
    assert _sleeps(lab, "n2") == before != ""
    assert "ending step" not in world.log("n2")
    srun.kill()


def test_files_are_read_ahead_where_no_job_runs(world: World, wait_for: Wait) -> None:
    srun = world.lab.popen(["srun", "-w", "n2", "sleep", "600"])
    wait_for(lambda: "1 file(s), 0 MB, are kept in memory" in world.log("n1"), 60, "n1 reads ahead")
    assert "kept in memory" not in world.log("n2")
    srun.kill()


def test_once_in_a_node(world: World) -> None:
    done = world.lab.run(shlex.split(f"{SRESD} --once --node n1 --format json"), node="n1")
    document = json.loads(done.stdout)
    verdicts = {result["check"]: result["verdict"] for result in document["results"]}
    assert verdicts["memory"] == verdicts["gpu_count"] == "pass"
    assert verdicts["kernel_log"] == "unjudged"
    assert done.returncode == document["exit_code"] == 1


def test_an_error_that_the_driver_and_the_kernel_log_tell_is_one(
    fresh_lab: Callable[[LabSpec], Lab], tmp_path: Path, wait_for: Wait
) -> None:
    """The driver is a library of our own, which a file drives; all else is the real thing."""
    tmp_path.chmod(0o755)
    driver = StubDriver(tmp_path / "state", built_library(tmp_path))
    driver.says("")
    root = tmp_path / "root"
    (root / "sys").mkdir(parents=True)
    (root / "proc").symlink_to("/proc")
    agent = {"check_interval": 1.0, "sysroot": str(root), "health_log": str(tmp_path / "health")}
    spec = dataclasses.replace(SPEC, nodes=1, gres="gpu:2", sres_options={"agent": agent})
    env = {"NVML_STUB": str(driver.state), "LD_LIBRARY_PATH": str(driver.library)}
    one = World(fresh_lab(spec), tmp_path, env)

    def told(subject: str) -> list[dict[str, Any]]:
        return [f for f in one.controller.findings("n1") if f["subject"] == subject]

    def texts() -> set[str]:
        reports = one.controller.heard("n1", "Report")
        return {r["text"] for report in reports for r in report["results"]}

    def kept() -> set[str]:
        lines = map(json.loads, (tmp_path / "health").read_text().splitlines())
        return {line["subject"] for line in lines if line["kind"] == "finding"}

    try:
        wait_for(lambda: "following 2 GPUs" in texts(), 20, "the events are followed")
        driver.event(1, 79)
        (finding,) = wait_for(lambda: told("0000:02:00"), 5, "the event is told")
        assert (finding["check"], finding["code"], finding["severity"]) == ("xid", "79", "reboot")
        driver.event(0, 79)
        one.lab.kmsg("n1", XID.replace("91", "01"))
        wait_for(lambda: told("0000:01:00"), 5, "what both tell is told")
        one.lab.kmsg("n1", XID)
        wait_for(lambda: told("0000:91:00"), 5, "a later line is told")
        assert len(told("0000:01:00")) == 1
        checked = {"2 GPUs, Slurm expects 2", "2 GPUs without a fault"}
        wait_for(lambda: checked <= texts(), 20, "the checks have asked the driver too")
        wait_for(
            lambda: kept() == {"0000:01:00", "0000:02:00", "0000:91:00"}, 5, "the log has them"
        )
    finally:
        one.end()
        print(one.log("n1"))
