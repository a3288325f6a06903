"""The launcher with real processes: seats refilled, orders obeyed, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slurm_resilience.launcher import exit_codes

pytestmark = pytest.mark.training

PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
here = Path(sys.argv[1])
seat, incarnation = int(os.environ["SRES_SEAT"]), int(os.environ["SRES_INCARNATION"])
def write(name, /, **words):
    words |= dict(pid=os.getpid(), seat=seat, incarnation=incarnation, torch="torch" in sys.modules)
    file = here / f"{name}.{seat}.{incarnation}"
    file.with_suffix(".new").write_text(json.dumps(words))
    file.with_suffix(".new").rename(file)
def wait(name):
    end = time.monotonic() + 60
    while not (here / name).exists():
        assert time.monotonic() < end, name
        time.sleep(0.01)
"""


def until(true: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The first true value; a failure says what was waited for."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return value


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Run:
    """One launcher, whose ranks write what they are into a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.script = directory / "train.py"
        self.process: subprocess.Popen[bytes] | None = None
        self.private: set[str] = set()

    def start(
        self, body: str, *flags: str, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        self.script.write_text(PRELUDE + body)
        return self.launch(*flags, str(self.script), str(self.directory), env=env)

    def launch(self, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
        with (self.directory / "out").open("wb") as out, (self.directory / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slurm_resilience.launcher", *words],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=clean | {"TMPDIR": str(self.directory)} | (env or {}),
                # A shell has what it starts in the background ignore it, and so do its children.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        return self.process

    def end(self) -> int:
        assert self.process is not None
        return self.process.wait(60)

    def read(self, name: str) -> dict[str, Any]:
        """Wait for what a rank wrote, and return it."""
        file = self.directory / name
        until(lambda: file.exists() or self.ended(), f"{name}; {self.err}")
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def touch(self, name: str) -> None:
        (self.directory / name).touch()

    @property
    def out(self) -> str:
        return (self.directory / "out").read_text()

    @property
    def err(self) -> str:
        return (self.directory / "err").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    if run.process is not None and run.process.poll() is None:
        run.process.kill()
        run.process.wait(10)


def test_a_killed_rank_is_replaced_and_the_rest_goes_on(run: Run) -> None:
    run.start('write("up")\nwait("go")\n', "--nproc-per-node=2", "--standby=0")
    first = run.read("up.1.0")
    other = run.read("up.0.0")
    os.kill(first["pid"], signal.SIGKILL)
    second = run.read("up.1.1")
    assert second["pid"] != first["pid"]
    assert psutil.Process(other["pid"]).is_running()
    run.touch("go")
    assert run.end() == 0
    assert "rank 1: SIGKILL after" in run.err
    assert not (run.directory / "up.0.1").exists()


def test_a_warm_standby_takes_the_seat(run: Run) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    run.start('write("up")\nwait("go")\n', "--nproc-per-node=1", "--standby=1")
    first = run.read("up.0.0")
    assert run.process is not None
    assert first["torch"] is False
    launcher = psutil.Process(run.process.pid)

    def waiting() -> int:
        return next((p.pid for p in launcher.children() if "torch.optim" in p.cmdline()), 0)

    standby = until(waiting, "a standby")
    os.kill(first["pid"], signal.SIGKILL)
    second = run.read("up.0.1")
    assert second["pid"] == standby
    assert second["torch"] is True
    assert os.getpriority(os.PRIO_PROCESS, standby) == os.getpriority(os.PRIO_PROCESS, 0)
    run.touch("go")
    assert run.end() == 0


def test_a_standby_that_dies_in_its_imports_costs_the_seat_nothing(run: Run) -> None:
    """It was counted as a failure of the program, and so were the next ten."""
    waits = "import os, pathlib, time\nwhile not pathlib.Path(os.environ['MARK']).exists():\n"
    (run.directory / "dying.py").write_text(f"{waits}    time.sleep(0.01)\nos._exit(5)\n")
    mark = run.directory / "taken"
    run.start(
        'write("up")\nwait("go")\n',
        *("--nproc-per-node=1", "--standby=1", "--standby-import=dying", "--max-restarts=1"),
        env={"PYTHONPATH": str(run.directory), "MARK": str(mark)},
    )
    first = run.read("up.0.0")
    assert run.process is not None
    launcher = psutil.Process(run.process.pid)
    until(lambda: any("dying" in p.cmdline() for p in launcher.children()), "a standby")
    os.kill(first["pid"], signal.SIGKILL)
    until(lambda: "rank 0: a standby (process" in run.err, "it has the seat")
    mark.touch()
    run.read("up.0.2")
    run.touch("go")
    assert run.end() == 0, run.err
    assert "rank 0: the standby ended in its imports: exit code 5" in run.err


def test_the_program_is_as_python_would_start_it(run: Run) -> None:
    (run.directory / "neighbour.py").write_text("class Thing: pass\n")
    run.start(
        """
import neighbour, pickle, __main__
class Own: pass
write("up", argv=sys.argv, path=sys.path[0], name=__name__, file=__file__,
      own=type(pickle.loads(pickle.dumps(Own()))) is __main__.Own,
      python=[sys.flags.safe_path, "starter" in sys.modules, "codes" in sys.modules],
      omp=os.environ["OMP_NUM_THREADS"], meet=os.environ["SRES_MEET"])
""",
        "--nproc_per_node",
        "2",
    )
    assert run.end() == 0, run.err
    found = run.read("up.1.0")
    assert found["argv"] == [str(run.script), str(run.directory)]
    assert found["path"] == str(run.directory)
    assert (found["name"], found["file"]) == ("__main__", str(run.script))
    assert found["own"] is True
    assert found["python"] == [False, False, False]
    assert found["omp"] == "1"
    assert not Path(found["meet"].removeprefix("dir:")).parent.exists()
    assert run.err == ""


def test_modules_and_programs(run: Run) -> None:
    (run.directory / "pkg.py").write_text("import sys; print(__name__, sys.argv[1:])\n")
    run.launch("-m", "pkg", "--a", env={"PYTHONPATH": f"{run.directory}:{Path.cwd()}"})
    assert run.end() == 0, run.err
    assert run.out == "__main__ ['--a']\n"
    run.launch("--no-python", "sh", "-c", "echo $RANK; exit 0")
    assert run.end() == 0, run.err
    assert run.out == "0\n"


def test_a_spent_budget_ends_everything_with_the_code(run: Run) -> None:
    run.start(
        'write("up")\nif seat == 1: os._exit(7)\nwait("never")\n',
        "--nproc=2",
        "--max-restarts=2",
        "--standby=0",
        "-r=1:2",
    )
    assert run.end() == 7
    other = run.read("up.0.0")
    assert gone(other["pid"])
    assert run.read("up.1.2")["incarnation"] == 2
    assert not (run.directory / "up.1.3").exists()
    assert "rank 1 " in run.err
    assert "--max-restarts" in run.err


def test_the_same_exception_twice_is_a_bug(run: Run) -> None:
    run.start('write("up")\nraise ValueError("no such layer")\n', "-r=2", "--standby=0")
    assert run.end() == 1
    run.read("up.0.1")
    assert not (run.directory / "up.0.2").exists()
    assert f"ValueError at {run.script}" in run.err
    assert "last lines of" in run.err
    # The traceback begins with the user's own frame.
    (log,) = run.directory.glob("none_*/attempt_1/0/stderr.log")
    assert log.read_text().splitlines()[1].startswith(f'  File "{run.script}"')
    assert log.read_text() in run.err.replace("sres-run:     ", "")


@pytest.mark.parametrize(
    ("bug", "told"),
    [
        (
            "raise ValueError('CUDA error\\nCompile with DSA')",
            "exit code 1: ValueError: CUDA error;",
        ),
        (
            "raise ValueError('Errors in Net:\\n\\tsize of a\\n\\tof b')",
            "Errors in Net: size of a;",
        ),
        ("exec('x = = 1')", "exit code 1: SyntaxError: invalid syntax;"),
        ("sys.exit(ValueError('no data\\nat all'))", "exit code 1: no data;"),
    ],
)
def test_the_line_that_says_what_is_wrong(run: Run, bug: str, told: str) -> None:
    """The last line of an error's message is advice, or one of many of its kind."""
    run.start(bug, "--nproc=1", "--standby=0", "--max-restarts=0")
    assert run.end() == 1, run.err
    assert told in run.err


def test_a_rank_that_exits_with_a_signal_s_code_was_not_killed(run: Run) -> None:
    """`sys.exit(137)` was told as SIGKILL: one looked for the OOM killer."""
    run.start("sys.exit(137)", "--standby=0", "--max-restarts=0")
    assert run.end() == 137, run.err
    assert "exit code 137 (as after SIGKILL); replaced 0 times" in run.err


def test_a_rank_that_ended_before_the_others_is_told_of(run: Run) -> None:
    """One that has fewer batches than the others ends well, and their group with it."""
    run.start(
        "write('up')\nif seat == 1:\n    wait('gone')\n    raise ConnectionError('closed by peer')",
        *("--nproc=2", "--standby=0", "--restart=all", "--max-restarts=0"),
    )
    first = run.read("up.0.0")
    until(lambda: not psutil.pid_exists(first["pid"]), "the launcher has seen its end")
    run.touch("gone")
    assert run.end() == 1, run.err
    assert "ConnectionError: closed by peer; replaced 0 times within 3600 s" in run.err
    assert "(after rank 0 had ended with exit code 0)" in run.err


def test_a_failed_rank_that_does_not_end_is_ended(run: Run) -> None:
    run.start(
        """
import threading
write("up")
if incarnation == 0:
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("and a thread that never ends")
""",
        "--shutdown-timeout=0.2",
        "--standby=0",
    )
    assert run.end() == 0, run.err
    run.read("up.0.1")
    assert "does not end" in run.err
    assert "ValueError" in run.err


def test_no_room_for_logs_is_no_reason_to_end(run: Run) -> None:
    logs = run.directory / "logs"
    flags = ("--nproc=2", "-r=0:3", "-t=1:3", f"--log-dir={logs}", "--standby=0")
    run.start(
        """
write("up")
wait("go")
if incarnation == 0:
    os.kill(os.getpid(), 9)
sys.stdout.write(f"rank {seat}\\n")  # in one piece: two ranks write to one file
""",
        *flags,
    )
    for seat in (0, 1):
        run.read(f"up.{seat}.0")
    # Root may write everywhere: a file in the directory's place stops even root.
    (directory,) = logs.iterdir()
    directory.rename(run.directory / "moved")
    directory.write_text("")
    run.touch("go")
    assert run.end() == 0, run.err
    assert sorted(run.out.splitlines()) == ["[default1]:rank 1", "rank 0"]


def test_a_rank_may_say_that_the_training_gives_up(run: Run) -> None:
    run.start(
        f'write("up")\nif seat == 0: sys.exit({exit_codes.STOP})\nwait("never")\n', "--nproc=2"
    )
    assert run.end() == exit_codes.STOP
    assert "gave up" in run.err


def test_what_fails_after_the_training_is_complete_fails_and_the_others_go_on(run: Run) -> None:
    """A new process would find nothing to train, and end as if all had gone well."""
    body = """
from slurm_resilience.training import resilient
write("started")
resilient(lambda s: None)()
write("trained")
if seat == 1: sys.exit(3)
wait("go")
write("saved")
"""
    run.start(body, "--nproc=2")
    run.read("trained.0.0")
    until(lambda: "after the training was complete: it is not started again" in run.err, run.err)
    run.touch("go")
    assert run.end() == 3
    run.read("saved.0.0")
    assert not list(run.directory.glob("started.*.1"))


def test_what_is_asked_for_wrongly_is_said_in_a_line_and_not_tried_again(run: Run) -> None:
    body = """
from slurm_resilience.training import resilient
write("started")
resilient(min_world=9)(lambda s: None)()
"""
    run.start(body, "--nproc=2")
    assert run.end() == exit_codes.STOP
    assert "train.py:" in run.err
    assert "min_world=9 must lie between" in run.err
    assert "Traceback" not in run.err
    assert not list(run.directory.glob("started.*.1"))


def test_sigterm_is_passed_on_and_waited_for(run: Run) -> None:
    run.start(
        """
def term(*_):
    write("term")
    wait("go")
    sys.exit(5 if seat else 0)
signal.signal(signal.SIGTERM, term)
signal.signal(signal.SIGUSR1, lambda *_: write("usr1"))
write("up")
wait("never")
""",
        "--nproc=2",
    )
    for seat in (0, 1):
        run.read(f"up.{seat}.0")
    assert run.process is not None
    run.process.send_signal(signal.SIGUSR1)
    for seat in (0, 1):
        run.read(f"usr1.{seat}.0")
    run.process.send_signal(signal.SIGTERM)
    for seat in (0, 1):
        run.read(f"term.{seat}.0")
    assert run.process.poll() is None
    run.touch("go")
    assert run.end() == 5
    assert not (run.directory / "up.1.1").exists()


def test_a_second_interrupt_kills(run: Run) -> None:
    run.start('signal.signal(signal.SIGINT, lambda *_: write("int"))\nwrite("up")\nwait("never")\n')
    pid = run.read("up.0.0")["pid"]
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    run.read("int.0.0")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == exit_codes.KILLED_BY_HAND
    assert gone(pid)


def test_nothing_outlives_a_killed_launcher(run: Run) -> None:
    run.start(
        """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
write("up", child=child.pid, keeper=os.environ["SRES_KEEPER"])
wait("never")
""",
        "--nproc=2",
    )
    ranks = [run.read(f"up.{seat}.0") for seat in (0, 1)]
    assert run.process is not None
    family = psutil.Process(run.process.pid).children(recursive=True)
    assert {rank["child"] for rank in ranks} <= {process.pid for process in family}
    private = Path(ranks[0]["keeper"]).parent
    assert private.is_dir()
    assert private.stat().st_mode & 0o777 == 0o700
    run.process.kill()
    run.end()
    for process in family:
        until(lambda pid=process.pid: gone(pid), f"end of {process}")
    until(lambda: not private.exists(), "the private directory is removed")


def test_ranks_end_with_the_launcher_even_without_its_guard(run: Run) -> None:
    run.start('write("up", keeper=os.environ["SRES_KEEPER"])\nwait("never")\n', "--standby=0")
    rank = run.read("up.0.0")
    pid = rank["pid"]
    assert run.process is not None
    (guard,) = (p for p in psutil.Process(run.process.pid).children() if p.pid != pid)
    guard.kill()
    run.process.kill()
    until(lambda: gone(pid), "end of the rank")
    shutil.rmtree(Path(rank["keeper"]).parent)


def test_a_stopped_rank_is_evicted(run: Run) -> None:
    run.start(
        """
from slurm_resilience.launcher import control_socket
write("up", ready=control_socket.ready())
if seat == 0 and incarnation == 0:
    wait("stopped")
    for stranger in (os.getppid(), 1):
        assert control_socket.evict(stranger, "not yours")
    assert control_socket.evict(int((here / "stopped").read_text()), "no word for 3 s")
wait("go")
""",
        "--nproc=2",
        "--standby=0",
        env={"PYTHONPATH": str(Path.cwd())},
    )
    hung = run.read("up.1.0")
    assert hung["ready"] is True
    os.kill(hung["pid"], signal.SIGSTOP)
    file = run.directory / "stopped.new"
    file.write_text(str(hung["pid"]))
    file.rename(run.directory / "stopped")
    run.read("up.1.1")
    assert gone(hung["pid"])
    run.touch("go")
    assert run.end() == 0
    assert "evicted: no word for 3 s" in run.err


def test_a_launcher_that_is_held_up_starts_no_rank_again(run: Run) -> None:
    """Its socket is full when the ranks leave their training; they are done all the same."""
    run.start(
        """
from slurm_resilience.launcher import control_socket
assert control_socket.enters()
write("enters", launcher=os.getppid())
wait("stopped")
while control_socket.ready():
    pass
write("full")
control_socket.leaves()
""",
        "--nproc=2",
        "--standby=0",
        env={"PYTHONPATH": str(Path.cwd())},
    )
    for seat in (0, 1):
        run.read(f"enters.{seat}.0")
    assert run.process is not None
    run.process.send_signal(signal.SIGSTOP)
    try:
        run.touch("stopped")
        for seat in (0, 1):
            run.read(f"full.{seat}.0")
    finally:
        run.process.send_signal(signal.SIGCONT)
    assert run.end() == 0
    assert not list(run.directory.glob("enters.*.1")), run.err


def test_scripts_before_and_after(run: Run) -> None:
    before, after = run.directory / "before.sh", run.directory / "after.py"
    before.write_text('#!/bin/sh\necho "before $1 $2"\n')
    before.chmod(0o755)
    after.write_text("import os, sys\nprint('after', os.environ['SRES_EXIT_CODE'], sys.argv[1:])\n")
    run.start(
        "print('train', seat, flush=True)\nsys.exit(3 if incarnation == 0 else 76)\n",
        "--pre-train-script",
        str(before),
        "--pre-train-args=a 'b c; exit 1'",
        "--post-train-script",
        str(after),
        "--post-train-args=$HOME",
        "--standby=0",
    )
    assert run.end() == 76
    lines = run.out.splitlines()
    assert lines == ["before a b c; exit 1", "train 0", "train 0", "after 76 ['$HOME']"]


def test_a_failed_script_before_ends_it(run: Run) -> None:
    before = run.directory / "before.sh"
    before.write_text("#!/bin/sh\nexit 9\n")
    before.chmod(0o755)
    run.start('write("up")\n', "--pre-train-script", str(before))
    assert run.end() == 9
    assert not (run.directory / "up.0.0").exists()
    assert "pre-train script" in run.err


def test_output_with_a_prefix_and_in_files(run: Run) -> None:
    run.start(
        """
print("to stdout", seat, flush=True)
print("to stderr", seat, file=sys.stderr)
if seat == 1 and incarnation == 0:
    os.kill(os.getpid(), 9)
""",
        "--nproc=2",
        "--tee=3",
        f"--log-dir={run.directory}/logs",
        "--rdzv-id=mine",
        "--local-ranks-filter=1",
        "--standby=0",
    )
    assert run.end() == 0, run.err
    assert run.out.splitlines() == ["[default1]:to stdout 1"] * 2
    assert "[default1]:to stderr 1" in run.err
    assert "stderr 0" not in run.err
    (logs,) = (run.directory / "logs").glob("mine_*")
    assert (logs / "attempt_0/0/stdout.log").read_text() == "to stdout 0\n"
    assert (logs / "attempt_1/1/stderr.log").read_text() == "to stderr 1\n"


def test_nodes_that_share_a_directory(run: Run, tmp_path: Path) -> None:
    """Two launchers stand for two nodes; each knows its own seats only."""
    shared = tmp_path / "shared"
    flags = ["--nnodes=1:2", "--nproc=1", "--rdzv-backend=dir", f"--rdzv-endpoint={shared}"]
    body = 'write("up", meet=os.environ["SRES_MEET"], least=os.environ["SRES_MIN_WORLD"])\n'
    for node in ("0", "1"):
        run.start(body, *flags, "--node-rank", node)
        assert run.end() == 0, run.err
    first, second = run.read("up.0.0"), run.read("up.1.0")
    assert first["meet"] == second["meet"] == f"dir:{shared}/run/none/mesh"
    assert first["least"] == "1"
    # A node that comes back goes on counting.
    run.start(body, *flags, "--node-rank=1")
    assert run.end() == 0, run.err
    run.read("up.1.1")
    # A supervisor may know better.
    run.start(body, *flags, "--node-rank=1", env={"SRES_INCARNATION": "5"})
    assert run.end() == 0, run.err
    run.read("up.1.5")


TOGETHER = """
import json, os, sys, time
from pathlib import Path
here, rank = Path(sys.argv[1]), os.environ["RANK"]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
alive = [path for path in here.glob("lives.*") if Path("/proc", path.read_text()).exists()]
(here / f".{rank}").write_text(str(os.getpid()))
(here / f".{rank}").rename(here / f"lives.{rank}.{attempt}")
file = here / f"up.{rank}.{attempt}"
words = {"pid": os.getpid(), "alive": [path.name for path in alive]}
file.with_suffix(".new").write_text(json.dumps(words))
file.with_suffix(".new").rename(file)
while not (here / "go").exists():
    time.sleep(0.01)
if (here / f"fails.{rank}.{attempt}").exists():
    raise SystemExit(9)
"""
"""It says which processes of earlier attempts live when it starts."""


LAUNCHER = ["-m", "slurm_resilience.launcher"]


class Nodes:
    """Launchers of two nodes on this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.script = directory / "train.py"
        self.script.write_text(TOGETHER)
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self, node: int, *flags: str, program: str = "") -> subprocess.Popen[bytes]:
        """Start one.

        Args:
            node: its rank.
            flags: more of them.
            program: Python code in place of the launcher's command.
        """
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
        words = ["--nnodes=2", "--nproc-per-node=2", "--standby=0", "--restart=all"]
        words += [f"--node-rank={node}", "--rdzv-backend=dir"]
        words += [f"--rdzv-endpoint={self.directory / 'shared'}", *flags]
        words += [str(self.script), str(self.directory)]
        with (self.directory / f"err{node}").open("ab") as err:
            launcher = subprocess.Popen(
                [sys.executable, *(["-c", program] if program else LAUNCHER), *words],
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=clean | {"SRES_ADDRESS": "127.0.0.1", "SRES_NODE": f"n{node}"},
            )
        self.launchers.append(launcher)
        return launcher

    def up(self, attempt: int, ranks: range = range(4)) -> list[dict[str, Any]]:
        files = [self.directory / f"up.{rank}.{attempt}" for rank in ranks]
        until(lambda: all(file.exists() for file in files), f"attempt {attempt}: {self.err}")
        return [json.loads(file.read_text()) for file in files]

    @property
    def err(self) -> str:
        return "".join(path.read_text() for path in sorted(self.directory.glob("err?")))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for launcher in nodes.launchers:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait(10)


def test_all_nodes_start_again_together(two: Nodes) -> None:
    launchers = [two.start(0), two.start(1)]
    first = two.up(0)
    os.kill(first[3]["pid"], signal.SIGKILL)
    second = two.up(1)
    old = [name for rank in second for name in rank["alive"] if name.endswith(".0")]
    assert old == [], "no rank starts before the last of the attempt before has ended"
    os.kill(second[0]["pid"], signal.SIGKILL)
    two.up(2)
    (two.directory / "go").touch()
    assert [launcher.wait(60) for launcher in launchers] == [0, 0], two.err
    assert not (two.directory / "up.0.3").exists()
    assert two.err.count("all ranks are started again") == 4
    assert two.err.count("on another node: rank") == 2


def test_a_lost_launcher_is_waited_for(two: Nodes) -> None:
    """A node was exchanged: its new launcher starts nothing before all are there."""
    staying, lost = two.start(0), two.start(1)
    first = two.up(0)
    lost.kill()
    until(lambda: gone(first[0]["pid"]), f"the ranks that stay: {two.err}")
    coming = two.start(1)
    two.up(1)
    (two.directory / "go").touch()
    assert [launcher.wait(60) for launcher in (staying, coming)] == [0, 0], two.err


SOON_SILENT = """
import sys
from slurm_resilience.launcher import launcher_world, main
from slurm_resilience.mesh.protocol.departures import Departures
launcher_world._SILENCE_SECONDS = 3.0
give_up = Departures.give_up
def changed(self, peer_id, reason, fate, now):
    give_up(self, peer_id, reason, FATE if fate == "silent" else fate, now)
Departures.give_up = changed
sys.exit(main.main())
"""


@pytest.mark.parametrize("fate", ["silent", "unreached"])
def test_a_launcher_that_stood_still_starts_again_with_the_others(two: Nodes, fate: str) -> None:
    """It ended, and the others waited ten minutes for another one. It goes on where it is told that
    it was silent, and meets them anew where it is told to leave."""
    program = SOON_SILENT.replace("FATE", repr(fate))
    staying, stopped = (two.start(node, program=program) for node in (0, 1))
    first = two.up(0)
    stopped.send_signal(signal.SIGSTOP)
    try:
        until(lambda: "seat 1 (n1) is given up: silent" in two.err, "it is given up")
        until(lambda: gone(first[0]["pid"]), "the ranks that stay")
    finally:
        stopped.send_signal(signal.SIGCONT)
    second = two.up(1)
    assert not [name for rank in second for name in rank["alive"] if name.endswith(".0")]
    (two.directory / "go").touch()
    assert [launcher.wait(60) for launcher in (staying, stopped)] == [0, 0], two.err
    assert ("this node starts again with them" in two.err) == (fate == "unreached")


def test_a_node_that_gives_up_ends_all(two: Nodes) -> None:
    launchers = [two.start(0), two.start(1, "--max-restarts=0")]
    first = two.up(0)
    os.kill(first[2]["pid"], signal.SIGKILL)
    assert [launcher.wait(60) for launcher in launchers] == [1, 137], two.err
    assert "the training ends: rank 2: SIGKILL" in two.err


BLAMED = re.compile(r"on another node: rank 0: (exit code 1: )?AssertionError: bug")
"""With its exit code where the launchers met only after it had failed, on a busy machine."""

FIRST_FAILS = """
import atexit, os, sys, time
from pathlib import Path
mark = Path(sys.argv[1]) / f"raised.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
entries = Path(sys.argv[1]) / "shared/run/none/restarts/peers"
while len(list(entries.glob("*.json"))) < 2:
    time.sleep(0.01)
time.sleep(1)  # the launchers have met
if os.environ["RANK"] == "0":
    # The last one is called first, when the launcher has been told.
    atexit.register(time.sleep, 4)
    atexit.register(mark.touch)
    raise AssertionError("bug")
while not mark.exists():
    time.sleep(0.01)
"""
"""Rank 0 fails, and ends four seconds later; what follows is done by the other ranks meanwhile."""


def test_the_first_node_that_fails_is_the_cause(two: Nodes) -> None:
    """Another node's rank failed for it and ended sooner: its error was taken for the cause, and
    for a bug when it came again."""
    two.script.write_text(
        FIRST_FAILS
        + """
time.sleep(2)
raise ConnectionError("closed by peer")
"""
    )
    launchers = [two.start(0), two.start(1)]
    assert [launcher.wait(60) for launcher in launchers] == [1, 1], two.err
    assert len(BLAMED.findall(two.err)) == 2, two.err
    assert two.err.count("error: the training ends: rank 0") == 2
    assert two.err.count("all ranks are started again") == 3, two.err


def test_a_rank_that_follows_one_of_another_node_at_once_is_not_the_cause(two: Nodes) -> None:
    """It ended first, within the second that the first one takes: its node told of it."""
    two.script.write_text(
        FIRST_FAILS
        + """
if os.environ["RANK"] == "1":
    time.sleep(600)
time.sleep(0.1)
raise ConnectionError("closed by peer")
"""
    )
    launchers = [two.start(0), two.start(1)]
    assert [launcher.wait(60) for launcher in launchers] == [1, 1], two.err
    assert len(BLAMED.findall(two.err)) == 2, two.err
    assert "on another node: rank 2" not in two.err, two.err
    assert two.err.count("error: the training ends: rank 0") == 2, two.err


def test_a_node_that_is_done_starts_again_with_the_others(two: Nodes) -> None:
    """As under torchrun: no node is done before all are."""
    launchers = [two.start(0), two.start(1)]
    (two.directory / "fails.3.0").touch()
    two.up(0)
    (two.directory / "go").touch()
    assert [launcher.wait(60) for launcher in launchers] == [0, 0], two.err
    assert len(two.up(1)) == 4


def test_nodes_with_other_numbers_of_ranks_end_and_say_so(two: Nodes) -> None:
    """They waited for each other for ever, or one was told that the other one trains already."""
    two.script.write_text(
        "from slurm_resilience.training import resilient\nresilient(lambda s: None)()\n"
    )
    launchers = [two.start(0, "--restart=rank")]
    entries = two.directory / "shared/run/none/mesh/peers"
    until(lambda: len(list(entries.glob("*.json"))) == 2, "node 0 waits", 120.0)
    launchers.append(two.start(1, "--restart=rank", "--nproc-per-node=1"))
    assert [launcher.wait(90) for launcher in launchers] == [exit_codes.STOP] * 2, two.err
    assert "n0 was started for a world of 4, n1 for one of 2: start all nodes" in two.err
    assert "n1 was started for a world of 2, n0 for one of 4: start all nodes" in two.err


@pytest.mark.parametrize(
    "start", ["-m slurm_resilience.launcher --nproc=1 --standby=0", ""], ids=["launcher", "python"]
)
def test_a_step_s_script_trains_one_model_after_the_other(tmp_path: Path, start: str) -> None:
    """`srun bash -c "sres-run train.py 1 && sres-run train.py 2"`, two processes for two nodes."""
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from slurm_resilience.training import resilient\n"
        "name = sys.argv[1]\n"
        "resilient(lambda s: Path(f'trained.{name}.{s.rank}of{s.world}').touch())()\n"
    )
    script = " && ".join(f"{sys.executable} {start} train.py {name}" for name in (1, 2))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "NNODES": "2"}
    step |= {"SRES_ADDRESS": "127.0.0.1", "SRES_DIR": str(tmp_path / "shared")}
    nodes = [
        subprocess.Popen(
            ["sh", "-c", script],
            cwd=tmp_path,
            env=clean | step | {"SLURM_PROCID": n, "NODE_RANK": n, "SLURMD_NODENAME": f"n{n}"},
            stderr=subprocess.PIPE,
        )
        for n in ("0", "1")
    ]
    told = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    trained = sorted(path.name for path in tmp_path.glob("trained.*"))
    assert trained == ["trained.1.0of2", "trained.1.1of2", "trained.2.0of2", "trained.2.1of2"]
