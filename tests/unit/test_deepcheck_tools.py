"""The checks of a node, with small executables in place of the tools."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import msgspec
import pytest

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepResult
from slurm_resilience.deepcheck.instance import instance_checks, neuron_training
from slurm_resilience.deepcheck.instance.instance_check import InstanceContext
from slurm_resilience.deepcheck.instance.scratch import scratch_directory
from slurm_resilience.deepcheck.instance.this_node import run_check
from slurm_resilience.deepcheck.step_lines import (
    CheckBegun,
    CheckEnded,
    ChecksDone,
    GroupTrouble,
    LineAssembler,
    NeuronTrained,
    StepMessage,
    as_lines,
)
from slurm_resilience.deepcheck.step_requests import InstanceRequest
from slurm_resilience.deepcheck.tool_call import RunningTool, run_tool, start_program
from slurm_resilience.errors import UsageError
from slurm_resilience.health.check import CheckContext, Expected, Unjudged
from slurm_resilience.health.node_profile import NodeProfile
from slurm_resilience.model import Severity

CHECKS = {check.name: check for check in instance_checks.INSTANCE_CHECKS}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is first on PATH, without the machine's own tools behind it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def tool(folder: Path, name: str, text: str = "", code: int = 0, after: str = "") -> None:
    """An executable that prints a recorded text."""
    recorded = folder / f"{name}.txt"
    recorded.write_text(text)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{after}\ncat {recorded}\nexit {code}\n")
    path.chmod(0o755)


def context(tmp_path: Path, **expected: object) -> InstanceContext:
    checks = CheckContext(tmp_path / "root", expected=Expected(**expected))  # type: ignore[arg-type]
    return InstanceContext("n1", checks, 1.0, tmp_path)


def run(name: str, where: InstanceContext) -> DeepResult:
    return run_check(CHECKS[name], where)


def dcgm(severity: int, status: str = "Fail") -> str:
    warnings = [{"warning": "bad memory", "error_severity": severity, "error_id": 1}]
    one = {"entity_group": "GPU", "entity_id": 0, "status": status, "warnings": warnings}
    tests = [{"name": "memory", "results": [one]}]
    body = {"test_categories": [{"category": "Hardware", "tests": tests}]}
    return json.dumps({"DCGM Diagnostic": body, "metadata": {"version": "4.2.3"}})


@pytest.mark.parametrize(
    ("severity", "action", "words"),
    [
        (2, Severity.REPLACE, ("replacementRequired: true", "rebootRequired: false")),
        (4, Severity.REBOOT, ("replacementRequired: false", "rebootRequired: true")),
    ],
)
def test_dcgm_is_judged_by_its_document(
    tools: Path, tmp_path: Path, severity: int, action: Severity, words: tuple[str, ...]
) -> None:
    # As dcgmi does after a failed test: another exit code, and lines of the host engine around it.
    tool(tools, "dcgmi", "Error: cannot {connect}\n" + dcgm(severity) + "\nbye\n", code=226)
    result = run("dcgm_r4", context(tmp_path, gpus=1))
    assert (result.outcome, result.action) == (DeepOutcome.FAILED, action)
    assert all(word in result.block for word in ("dcgmCheckLevel: 4", "dcgmVersion: 4.2.3", *words))
    assert result.output


def test_a_missing_tool_is_never_a_pass(tools: Path, tmp_path: Path) -> None:
    for name, missing in (("dcgm_r4", "dcgmi"), ("cpu_stress", "stress-ng"), ("disk", "fio")):
        result = run(name, context(tmp_path, gpus=1))
        assert result.outcome is DeepOutcome.UNJUDGED, name
        assert result.text == f"{missing} is not installed"


def test_dcgm_without_a_document_is_unjudged(tools: Path, tmp_path: Path) -> None:
    tool(tools, "dcgmi", "Unable to connect to host engine\n", code=1)
    result = run("dcgm_r2", context(tmp_path, gpus=1))
    assert result.outcome is DeepOutcome.UNJUDGED
    assert "dcgmi exited 1 without a document; it said: Unable to connect" in result.text


def test_a_node_that_should_have_no_gpu_is_not_asked_for_one(tools: Path, tmp_path: Path) -> None:
    for name in ("gpu_count", "dcgm_r4", "gpu_burn"):
        assert run(name, context(tmp_path, gpus=0)).outcome is DeepOutcome.ABSENT, name


def test_a_node_that_should_have_gpus_does_not_pass_without(tools: Path, tmp_path: Path) -> None:
    result = run("gpu_count", context(tmp_path, gpus=2))
    assert result.outcome in (DeepOutcome.UNJUDGED, DeepOutcome.FAILED)


def test_the_burn_leaves_gpus_to_dcgm(tools: Path, tmp_path: Path) -> None:
    tool(tools, "dcgmi")
    result = run("gpu_burn", context(tmp_path, gpus=1))
    assert (result.outcome, result.text) == (
        DeepOutcome.ABSENT,
        "DCGM loads the GPUs (dcgm_r4)",
    )


def test_cpu_stress(tools: Path, tmp_path: Path) -> None:
    tool(tools, "stress-ng", "stress-ng: info:  [1] successful run completed in 2.02s\n")
    result = run("cpu_stress", context(tmp_path))
    assert (result.outcome, result.text) == (
        DeepOutcome.PASSED,
        "all processors were loaded for 1 s",
    )
    tool(tools, "stress-ng", "stress-ng: fail:  [1] vm: detected 1 bit errors in memory\n", code=2)
    assert run("cpu_stress", context(tmp_path)).action is Severity.REPLACE


def test_disk(tools: Path, tmp_path: Path) -> None:
    job = {"error": 0, "write": {"bw_bytes": 2e8}, "read": {"bw_bytes": 5e8}}
    tool(tools, "fio", "note: both iodepth\n" + json.dumps({"fio version": "3", "jobs": [job]}))
    result = run("disk", context(tmp_path))
    assert result.outcome is DeepOutcome.PASSED
    assert "200 MB/s written, 500 MB/s read back" in result.text


PINGPONG = """\
bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
64      100     =100     12k         0.00s      2.58      24.82       0.04
1m      100     =100     200m        0.06s   3340.00     313.90       0.00
"""


def efa(root: Path, *names: str) -> None:
    for name in names:
        device = root / "root/sys/class/infiniband" / name / "device"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1d0f\n")
        (device / "device").write_text("0xefa2\n")


def test_loopback_of_every_efa_device(tools: Path, tmp_path: Path) -> None:
    efa(tmp_path, "rdmap0s29", "rdmap0s30")
    tool(tools, "fi_pingpong", PINGPONG)
    result = run("efa_loopback", context(tmp_path))
    assert result.outcome is DeepOutcome.PASSED, result.text
    assert "EFA Loopback check passed for device: rdmap0s30\n  MaxBw: 3340.000000" in result.block
    assert "\n  AvgLat: 24.820000" in result.block


def test_a_device_that_alone_does_not_answer_has_failed(tools: Path, tmp_path: Path) -> None:
    efa(tmp_path, "rdmap0s29", "rdmap0s30")
    refuse = (
        'case "$*" in *rdmap0s30*) echo "[error] util/pingpong.c:408 : refused"; exit 111;; esac'
    )
    tool(tools, "fi_pingpong", PINGPONG, after=refuse)
    result = run("efa_loopback", context(tmp_path))
    assert (result.outcome, result.action) == (DeepOutcome.FAILED, Severity.REBOOT)
    assert "rdmap0s30: [error] util/pingpong.c:408" in result.text
    # Where none answers it may be the tool.
    tool(tools, "fi_pingpong", "[error] util/pingpong.c:408 : refused\n", code=111)
    assert run("efa_loopback", context(tmp_path)).outcome is DeepOutcome.UNJUDGED


def test_devices_that_the_profile_expects_are_missed(tools: Path, tmp_path: Path) -> None:
    where = context(tmp_path, profile=NodeProfile(efa_devices=4))
    result = run("efa_count", where)
    assert (result.outcome, result.action) == (DeepOutcome.FAILED, Severity.REBOOT)
    assert run("efa_count", context(tmp_path)).outcome is DeepOutcome.ABSENT


def test_neuron_counters(tools: Path, tmp_path: Path) -> None:
    assert run("neuron", context(tmp_path)).outcome is DeepOutcome.ABSENT
    counter = tmp_path / "root/sys/devices/virtual/neuron_device/neuron0/stats/hardware"
    counter.mkdir(parents=True)
    (counter / "mem_ecc_uncorrected").write_text("0\n")
    assert run("neuron", context(tmp_path)).outcome is DeepOutcome.PASSED
    (counter / "mem_ecc_uncorrected").write_text("2\n")
    assert run("neuron", context(tmp_path)).action is Severity.REPLACE


NCCOM = """\
     size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)
    33554432        33554432    uint8         768          40.69          40.69
Avg bus bandwidth:      40.6901GB/s
"""


def test_collectives_of_neuron_cores(tools: Path, tmp_path: Path) -> None:
    assert run("neuron_collectives", context(tmp_path)).outcome is DeepOutcome.ABSENT
    where = context(tmp_path, profile=NodeProfile(neuron_devices=2))
    result = run("neuron_collectives", where)
    assert (result.outcome, result.text) == (DeepOutcome.UNJUDGED, "neuron-ls is not installed")
    devices = [{"neuron_device": number, "nc_count": 2} for number in range(2)]
    tool(tools, "neuron-ls", json.dumps(devices))
    tool(tools, "nccom-test", NCCOM, after='[ "$*" = "-r 4 allr" ] || exit 9')
    result = run("neuron_collectives", where)
    assert (result.outcome, result.text) == (
        DeepOutcome.PASSED,
        "4 cores reached 40.69 GB/s on average",
    )
    tool(tools, "nccom-test", "nrt_init failed\n", code=1)
    assert run("neuron_collectives", where).outcome is DeepOutcome.UNJUDGED


def test_training_on_neuron_cores(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("neuron_training", context(tmp_path)).outcome is DeepOutcome.ABSENT
    where = context(tmp_path, profile=NodeProfile(neuron_devices=1))
    result = run("neuron_training", where)
    assert (result.outcome, result.text) == (DeepOutcome.UNJUDGED, "neuron-ls is not installed")
    tool(tools, "neuron-ls", json.dumps([{"neuron_device": 0, "nc_count": 2}]))

    def told(*messages: StepMessage) -> DeepResult:
        """The result, where the core N tells the message N."""
        for core, message in enumerate(messages):
            (tools / f"core{core}").write_text("\n".join(as_lines("neuron", message)))
        tool(tools, "trains", after=f"cat {tools}/core$NEURON_RT_VISIBLE_CORES")
        monkeypatch.setattr(
            neuron_training, "start_program", lambda _, __, env: RunningTool(["trains"], env)
        )
        return run("neuron_training", where)

    right, wrong = NeuronTrained(80, 0), NeuronTrained(80, 3)
    result = told(right, right)
    assert (result.outcome, result.text) == (
        DeepOutcome.PASSED,
        "2 cores were right in 160 steps of training",
    )
    result = told(right, wrong)
    assert (result.outcome, result.action) == (DeepOutcome.FAILED, Severity.REPLACE)
    assert result.text == "core 1: 3 wrong weights"
    result = told(right, GroupTrouble(0, "", "torch_neuronx is not installed", missing=True))
    assert (result.outcome, result.text) == (
        DeepOutcome.UNJUDGED,
        "torch_neuronx is not installed",
    )
    (tools / "core0").write_text("nrt_init failed")
    tool(tools, "trains", code=1, after=f"cat {tools}/core$NEURON_RT_VISIBLE_CORES")
    result = run("neuron_training", where)
    assert (result.outcome, result.text) == (
        DeepOutcome.UNJUDGED,
        "core 0: the training ended with code 1; it said: nrt_init failed",
    )


NCCL = """\
# nThread 1 nGpus 2
    67108864      16777216     float     sum      -1   1234.5   54.36   54.36      0
# Out of bounds values : {wrong}
# Avg bus bandwidth    : 31.4159
"""


def test_collectives_by_nccl_tests(tools: Path, tmp_path: Path) -> None:
    tool(tools, "all_reduce_perf", NCCL.format(wrong="0 OK"))
    result = run("collectives", context(tmp_path, gpus=2))
    assert (result.outcome, result.text) == (DeepOutcome.PASSED, "31.4159 GB/s on average")
    tool(tools, "all_reduce_perf", NCCL.format(wrong="3 FAILED"))
    assert run("collectives", context(tmp_path, gpus=2)).action is Severity.REPLACE
    tool(tools, "all_reduce_perf", "ncclSystemError\n", code=3)
    assert run("collectives", context(tmp_path, gpus=2)).outcome is DeepOutcome.UNJUDGED


def has_not_ended(state: Path) -> bool:
    with contextlib.suppress(OSError):
        return state.read_text().split()[2] != "Z"
    return False


def test_a_tool_that_hangs_is_killed(tools: Path, tmp_path: Path) -> None:
    tool(tools, "hangs", after=f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    with pytest.raises(Unjudged, match=r"hangs did not end within 0\.5 s and was killed"):
        run_tool(["hangs"], 0.5)
    if (tmp_path / "pid").exists():
        state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
        # It is killed in the same moment as what was waited for, and may end after it.
        deadline = time.monotonic() + 30
        while has_not_ended(state):
            assert time.monotonic() < deadline, state.read_text()
            time.sleep(0.01)


def test_nothing_is_taken_from_the_directory_in_which_root_works(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sres deepcheck here` in /tmp, where any user has left a msgspec.py."""
    (tmp_path / "msgspec.py").write_text(f"open('{tmp_path}/taken', 'w')")
    monkeypatch.chdir(tmp_path)
    request = InstanceRequest(("gpu_count",))
    assert start_program("slurm_resilience.deepcheck.instance", request).end(60).code == 0
    assert not (tmp_path / "taken").exists()
    tool(tools, "where", after="pwd")
    assert run_tool(["where"], 10).out == "/\n"


def test_a_check_that_breaks_leaves_the_node_unjudged(tmp_path: Path) -> None:
    def breaks(_: InstanceContext) -> DeepResult:
        raise ZeroDivisionError("by us")

    result = run_check(replace(CHECKS["disk"], run=breaks), context(tmp_path))
    assert (result.outcome, result.text) == (DeepOutcome.UNJUDGED, "ZeroDivisionError: by us")


def test_checks_are_chosen_by_name() -> None:
    assert [one.name for one in instance_checks.chosen(("disk", "gpu_count"))] == [
        "gpu_count",
        "disk",
    ]
    assert "dcgm_r2" not in [one.name for one in instance_checks.chosen(())]
    with pytest.raises(UsageError, match="no deep check 'disks' of a node; there are gpu_count"):
        instance_checks.chosen(("disks",))


def test_the_steps_program_tells_each_check_and_keeps_a_log(tools: Path, tmp_path: Path) -> None:
    tool(tools, "stress-ng", "stress-ng: info:  [1] successful run completed in 2.02s\n")
    request = InstanceRequest(
        only=("cpu_stress", "disk", "dcgm_r4"), gpus=0, seconds=1, log=f"{tmp_path}/logs/%n.log"
    )
    done = subprocess.run(
        [sys.executable, "-m", "slurm_resilience.deepcheck.instance", _json(request)],
        env={**os.environ, "SLURMD_NODENAME": "n7", "SRES_CONFIG": _empty(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assembler = LineAssembler()
    heard = [one for line in done.stdout.splitlines() if (one := assembler.feed(line))]
    ended = {one.result.check: one.result.outcome for one in heard if isinstance(one, CheckEnded)}
    assert ended == {"cpu_stress": "passed", "disk": "unjudged", "dcgm_r4": "absent"}
    assert isinstance(heard[0], CheckBegun) and heard[-1] == ChecksDone("n7")
    log = (tmp_path / "logs" / "n7.log").read_text()
    assert "    info    cpu_stress passed: all processors" in log
    assert "successful run completed" in log


def _json(request: InstanceRequest) -> str:
    import msgspec

    return msgspec.json.encode(request).decode()


def _empty(folder: Path) -> str:
    path = folder / "sres.toml"
    path.write_text("")
    return str(path)


def a_running_check(folder: Path, tools: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Return a program that checks a node, and the process of the tool that it waits for."""
    started = folder / "started"
    tool(
        tools, "stress-ng", after=f"echo $$ > {started}.new; mv {started}.new {started}; sleep 600"
    )
    request = InstanceRequest(only=("cpu_stress",), log=str(folder / "log"), scratch=str(folder))
    words = [sys.executable, "-m", "slurm_resilience.deepcheck.instance"]
    program = subprocess.Popen(
        [*words, msgspec.json.encode(request).decode()], stdout=subprocess.DEVNULL
    )
    deadline = SYSTEM_CLOCK.monotonic() + 30
    while not started.exists() and SYSTEM_CLOCK.monotonic() < deadline:
        SYSTEM_CLOCK.wait(Event(), 0.02)
    return program, int(started.read_text())


def test_sigterm_ends_the_tools_and_removes_the_scratch_directory(
    tools: Path, tmp_path: Path
) -> None:
    program, running = a_running_check(tmp_path, tools)
    assert list(tmp_path.glob("sres-deepcheck-*"))
    program.terminate()
    assert program.wait(30) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("sres-deepcheck-*"))
    assert not Path(f"/proc/{running}").exists()


def test_what_a_killed_run_left_is_removed_and_nothing_else(tools: Path, tmp_path: Path) -> None:
    program, running = a_running_check(tmp_path, tools)
    (in_use,) = tmp_path.glob("sres-deepcheck-*")
    left = tmp_path / "sres-deepcheck-killed"
    left.mkdir(mode=0o700)
    (left / "load.0.0").write_text("256 MiB")
    kept = tmp_path / "of-a-person"
    kept.mkdir(mode=0o700)
    (tmp_path / "sres-deepcheck-link").symlink_to(kept)
    open_to_all = tmp_path / "sres-deepcheck-open"
    open_to_all.mkdir(mode=0o700)
    open_to_all.chmod(0o777)
    try:
        with scratch_directory(str(tmp_path), SYSTEM_CLOCK.now()):
            assert left.exists(), "it may be about to be locked"
        with scratch_directory(str(tmp_path), SYSTEM_CLOCK.now() + 120) as own:
            assert not left.exists()
            assert in_use.exists() and kept.exists() and open_to_all.exists() and own.exists()
        assert not own.exists()
    finally:
        program.kill()
        program.wait()
        os.killpg(running, signal.SIGKILL)
