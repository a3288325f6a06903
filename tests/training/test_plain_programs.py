"""Programs that know nothing of the library, under the launcher: all ranks are started again
together, out of a warm interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.training

LIMIT_SECONDS = 120.0

PROGRAM = """
import json, os, sys, time
there = "torch" in sys.modules
began = time.process_time()
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
spent = time.process_time()
here = Path(sys.argv[1])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def write(name, **words):
    words |= dict(pid=os.getpid(), parent=os.getppid(), there=there, spent=spent)
    file = here / f"{name}.{rank}.{attempt}"
    file.with_suffix(".new").write_text(json.dumps(words))
    file.with_suffix(".new").rename(file)

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), 0.1)
saved, step = here / "saved.pt", 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    step = state["step"]
write("up", step=step, port=os.environ["MASTER_PORT"])
while step < 8:
    model(torch.full((2, 4), float(step))).sum().backward()
    opt.step()
    opt.zero_grad()
    step += 1
    if rank == 0:
        torch.save({"model": model.state_dict(), "step": step}, f"{saved}.new")
        os.replace(f"{saved}.new", saved)
    dist.barrier()
    if step == 4 and attempt == 0:
        write("four")
        while not (here / "go").exists():
            dist.barrier()
write("done", weights=[p.flatten().tolist() for p in model.parameters()])
del model  # before the group, as the template does
dist.destroy_process_group()
"""


READY = """
import os, socket
receive = socket.recv_fds
def wait(*given):
    open(os.environ["READY_FILE"], "w").close()
    return receive(*given)
socket.recv_fds = wait
"""
"""A module that a warm interpreter imports last: it tells when forks may be asked for."""


def until(true: Callable[[], Any], what: Callable[[], str]) -> Any:
    """The first true value."""
    end = time.monotonic() + LIMIT_SECONDS
    while not (value := true()):
        assert time.monotonic() < end, what()
        time.sleep(0.01)
    return value


class Plain:
    """One launcher with a program of torch's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *flags: str, program: str = PROGRAM, **more: str) -> psutil.Process:
        script = self.directory / "program" / "train.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(program)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
        (self.directory / "ready_mark.py").write_text(READY)
        tells = {"READY_FILE": str(self.directory / "ready"), "PYTHONPATH": str(self.directory)}
        launcher = [sys.executable, "-m", "slurm_resilience.launcher"]
        with (self.directory / "err").open("ab") as err:
            process = subprocess.Popen(
                [*launcher, *flags, str(script), str(self.directory)],
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=clean | tells | {"GLOO_SOCKET_IFNAME": "lo"} | more,
            )
        self.started.append(process)
        return psutil.Process(process.pid)

    @property
    def err(self) -> str:
        return (self.directory / "err").read_text()

    def read(self, name: str) -> dict[str, Any]:
        file = self.directory / name
        until(lambda: file.exists() or self.has_ended(), lambda: f"{name}: {self.err}")
        assert file.exists(), f"it ended before it wrote {name}: {self.err}"
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def has_ended(self) -> bool:
        return all(process.poll() is not None for process in self.started)

    def end(self) -> int:
        return self.started[-1].wait(LIMIT_SECONDS)


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Plain]:
    run = Plain(tmp_path)
    yield run
    for process in run.started:
        if process.poll() is None:
            process.kill()
            process.wait(10)


@pytest.mark.parametrize("victim", [1, 0])
def test_all_ranks_start_again_out_of_the_warm_interpreter(plain: Plain, victim: int) -> None:
    launcher = plain.start("--nproc-per-node=2", "--standby-import=ready_mark")
    first = [plain.read(f"four.{rank}.0") for rank in (0, 1)]
    until(lambda: (plain.directory / "ready").exists(), lambda: f"no warm interpreter: {plain.err}")
    os.kill(first[victim]["pid"], signal.SIGKILL)
    again = [plain.read(f"up.{rank}.1") for rank in (0, 1)]
    assert [one["there"] for one in first + again] == [False, False, True, True], plain.err
    assert {one["parent"] for one in first + again} == {launcher.pid}
    assert [one["step"] for one in again] == [4, 4], "it goes on from its own checkpoint"
    # Processor time, not time: what else the machine does is not in it.
    assert sum(one["spent"] for one in again) < sum(one["spent"] for one in first) / 4
    assert plain.end() == 0, plain.err
    done = [plain.read(f"done.{rank}.1") for rank in (0, 1)]
    assert done[0]["weights"] == done[1]["weights"]
    assert "all ranks are started again" in plain.err
    assert plain.err.count("a fork of the warm interpreter") == 2


def test_a_prepared_launcher_starts_its_ranks_out_of_the_warm_interpreter(plain: Plain) -> None:
    """It loads its interpreter, and starts nothing before the file is there that it waits for."""
    held = plain.directory / "hold"
    plain.start("--nproc-per-node=2", "--standby-import=ready_mark", SRES_HOLD=str(held))
    until(lambda: (plain.directory / "ready").exists(), lambda: f"no warm interpreter: {plain.err}")
    assert not list(plain.directory.glob("*.0.0")), "no rank has been started"
    (plain.directory / "go").touch()
    held.with_suffix(".new").write_text(json.dumps({"CHANGED": "since"}))
    held.with_suffix(".new").rename(held)
    up = [plain.read(f"up.{rank}.0") for rank in (0, 1)]
    assert [one["there"] for one in up] == [True, True], plain.err
    assert plain.end() == 0, plain.err


def test_without_it_they_start_again_cold(plain: Plain) -> None:
    plain.start("--nproc-per-node=2", "--no-warm", "--standby=0")
    first = [plain.read(f"four.{rank}.0") for rank in (0, 1)]
    os.kill(first[1]["pid"], signal.SIGKILL)
    again = [plain.read(f"up.{rank}.1") for rank in (0, 1)]
    assert [one["there"] for one in again] == [False, False]
    assert plain.end() == 0, plain.err
    assert plain.err.count("a new process") == 2


def test_a_rank_alone_gets_another_port_at_its_next_start(plain: Plain) -> None:
    """The first one may be in use: torch says so only when it listens, after its import."""
    program = """
import os, sys
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"{sys.argv[1]}/port.{attempt}", "w").write(os.environ["MASTER_PORT"])
sys.exit(attempt == "0")
"""
    plain.start("--nproc-per-node=1", "--standby=0", program=program)
    assert plain.end() == 0, plain.err
    ports = [(plain.directory / f"port.{attempt}").read_text() for attempt in (0, 1)]
    assert ports[0] != ports[1]


def test_a_bug_ends_the_program_when_it_comes_again(plain: Plain) -> None:
    bug = PROGRAM.replace("while step < 8:", "while step < 8:\n    assert rank or step < 2, 'bug'")
    plain.start("--nproc-per-node=2", "--standby=0", program=bug)
    assert plain.end() == 1, plain.err
    assert "twice in a row at the same place" in plain.err
    assert plain.err.count("all ranks are started again") == 1


@pytest.mark.parametrize(
    "follows",
    [
        'raise ConnectionError("closed by peer")',
        # As NCCL's watchdog does, a while after another rank's connections have closed.
        "time.sleep(0.7); os.abort()",
    ],
)
def test_the_first_rank_that_fails_is_the_cause(plain: Plain, follows: str) -> None:
    """Another one that failed for it ended sooner, on a busy machine: the bug's place was not known
    again, and all were started once more."""
    program = """
import atexit, os, sys, time
from pathlib import Path
mark = Path(sys.argv[1]) / f"raised.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
if os.environ["RANK"] == "0":
    # The last one is called first, when the launcher has been told.
    atexit.register(time.sleep, 2)
    atexit.register(mark.touch)
    raise AssertionError("bug")
while not mark.exists():
    time.sleep(0.01)
"""
    flags = ("--nproc-per-node=2", "--standby=0", "--restart=all")
    plain.start(*flags, program=program + follows)
    assert plain.end() == 1, plain.err
    assert "rank 0: exit code 1: AssertionError: bug" in plain.err
    assert "twice in a row at the same place" in plain.err
    assert plain.err.count("all ranks are started again") == 1


def test_sigterm_while_all_are_ended(plain: Plain) -> None:
    """One that does not go: the launcher waits for it, and is told to stop meanwhile."""
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PROGRAM.replace(
        "        while not (here",
        "        write('deaf')\n        while rank == 0: time.sleep(0.01)\n        while not (here",
    )
    flags = ("--nproc-per-node=2", "--standby=0", "--shutdown-timeout=3")
    launcher = plain.start(*flags, program=deaf)
    first = [plain.read(f"deaf.{rank}.0") for rank in (0, 1)]
    os.kill(first[1]["pid"], signal.SIGKILL)
    until(lambda: "all ranks are started again" in plain.err, lambda: plain.err)
    launcher.terminate()
    assert plain.end() == 137, plain.err
    assert not (plain.directory / "up.0.1").exists()
