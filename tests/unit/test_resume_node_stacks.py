"""The helper that looks at a hung step's processes, on real ones: their states, Python's functions,
dumps that they are asked for, and the words of NCCL's service, for which a server stands in."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from flight_programs import Fault, Step, dump, run, written

from slurm_resilience.resume.progress import node_stacks
from slurm_resilience.resume.progress.hang_evidence import HangEvidence, NodeSigns, name_culprit
from slurm_resilience.resume.progress.hang_rule import Stall
from slurm_resilience.resume.progress.stack_gathering import diagnose_dumps, read_signs

GROUPS = [[0, 1]]
HUNG = run([Step(0)] * 5, GROUPS, Fault(1, 3, "hang"))
"""Rank 1 does not come to the fourth collective."""

# As torch has it: a thread looks at the pipe, and writes the dump when it is asked to.
RANK = """\
import os, sys, threading, time
rank = os.environ["RANK"]
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
os.mkfifo(pipe)
asked = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

def look():
    while not os.read(asked, 128):
        time.sleep(0.05)
    with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "wb") as file:
        file.write(open(sys.argv[1], "rb").read())

def wait_for_the_others():
    print("ready", flush=True)
    time.sleep(1000)

threading.Thread(target=look, daemon=True).start()
wait_for_the_others()
"""


class Ranks:
    """Two ranks of an attempt on this machine."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "SRES_TOKEN": f"{folder.name}.{os.getpid()}",
            "SLURM_STEP_ID": "0",
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{folder}/pipe_",
            "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/dump_",
            "NCCL_RAS_ADDR": f"127.0.0.1:{port}",
        }
        self.processes = [self._start(rank) for rank in range(2)]
        for process in self.processes:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        content = self.folder / f"content_{rank}"
        content.write_bytes(written(dump(HUNG[rank], GROUPS, rank), "2"))
        return subprocess.Popen(
            [sys.executable, "-c", RANK, str(content)],
            env=self.environment | {"RANK": str(rank), "SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
        )

    def look(self) -> NodeSigns:
        """Have the helper look at them, as a helper step does."""
        kept = self.folder / "kept"
        kept.mkdir(exist_ok=True)
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                "-m",
                node_stacks.__name__,
                self.environment["SRES_TOKEN"],
                kept,
            ],
            env={"PATH": os.environ["PATH"], "SLURMD_NODENAME": "n7"},
            capture_output=True,
            timeout=60,
            check=True,
        )
        (signs,) = read_signs(done.stdout.split(b"\n"))
        return signs


@pytest.fixture
def service() -> Iterator[socket.socket]:
    """The stand-in of NCCL's RAS: it answers one question, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            link, _ = listening.accept()
            with link:
                if link.recv(100) == b"verbose status\n":
                    link.sendall(b"Job summary\n  Rank 1 of Comm 0: not in AllReduce 4\n")

        threading.Thread(target=answer, daemon=True).start()
        yield listening


@pytest.fixture
def ranks(tmp_path: Path, service: socket.socket) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path, service.getsockname()[1])
    yield ranks
    for process in ranks.processes:
        process.kill()
        process.wait()


def test_a_node_tells_of_its_processes_dumps_and_service(ranks: Ranks) -> None:
    signs = ranks.look()
    assert signs.node == "n7" and {process.rank for process in signs.processes} == {0, 1}
    assert {process.state for process in signs.processes} == {"S"}
    assert signs.ras.endswith("Rank 1 of Comm 0: not in AllReduce 4\n")
    assert sorted(signs.dumps) == ["nccl_trace_rank_0", "nccl_trace_rank_1"]
    stall = Stall(700.0, 600.0, 1.0, {0: 3, 1: 3})
    evidence = HangEvidence(stall, {0: "n6", 1: "n7"}, (signs,), (), str(ranks.folder / "kept"))
    culprit = name_culprit(evidence, diagnose_dumps(evidence))
    assert (culprit.source, culprit.ranks, culprit.node) == ("dumps", (1,), "n7")


def test_functions_of_python_and_a_stopped_process_are_seen(ranks: Ranks) -> None:
    if node_stacks.find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    ranks.processes[1].send_signal(signal.SIGSTOP)
    signs = ranks.look()
    first, second = sorted(signs.processes, key=lambda process: process.rank)
    assert first.python_stack[0].startswith("wait_for_the_others ("), first
    assert second.state == "T"
    evidence = HangEvidence(Stall(700.0, 600.0, 1.0, {0: 3, 1: 3}), {}, (signs,))
    assert name_culprit(evidence).reason == "rank 1 is stopped by a signal"


def test_a_pipe_that_no_process_reads_and_a_service_that_is_not_there_cost_nothing(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe_0.pipe")
    environments = {0: {node_stacks.PIPE_NAME: f"{tmp_path}/pipe_"}, 1: {}}
    assert node_stacks.ask_for_dumps(environments) == set()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert node_stacks.ask_ras({0: {node_stacks.RAS_VARIABLE: f"127.0.0.1:{port}"}}) == ""
    assert node_stacks.ask_ras({0: {node_stacks.RAS_VARIABLE: "no port"}}) == ""
