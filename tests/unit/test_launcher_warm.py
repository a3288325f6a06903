"""The warm interpreter: when it is trusted, and that its forks are what a fresh process is."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from slurm_resilience.errors import UsageError
from slurm_resilience.launcher import group_restart
from slurm_resilience.launcher.group_restart import (
    PORTS,
    AttemptStage,
    GroupRestart,
    ProgramKind,
    RestartSpec,
    free_port,
)
from slurm_resilience.launcher.launcher_world import LauncherWorld
from slurm_resilience.launcher.processes.process import FORK_SERVER, Process, ProcessSpec
from slurm_resilience.launcher.processes.store_sockets import is_on_port, sockets_on
from slurm_resilience.launcher.processes.warm_interpreter import (
    WarmInterpreter,
    WarmSpec,
    program_file,
    program_front,
)
from slurm_resilience.launcher.program_traits import ProgramTraits, check_size, read_traits
from slurm_resilience.launcher.warm_policy import (
    WarmPlan,
    doubt_of_changes,
    doubt_of_environment,
    doubt_of_neighbours,
    plan_warm,
)
from slurm_resilience.mesh.model import GenerationEnd

LIMIT_SECONDS = 120.0

STAND_IN = """
import os
import random
mode = os.environ.get("HEAVY_MODE", "")
rank_at_import = os.environ.get("RANK", "none")
loaded_by = os.getpid()
"""
"""Stands for torch: a module whose import can be seen."""

REPORT = """
import json, os, resource, signal, sys, threading
def report(**more):
    here = os.path.dirname(os.path.abspath(sys.argv[0]))
    mask = os.umask(0)
    os.umask(mask)
    return dict(
        argv=sys.argv[1:], name=__name__, main=sys.modules["__main__"].__name__,
        path=sys.path[0], cwd=os.getcwd(), umask=mask, flags=list(sys.flags),
        parent=os.getppid(), own_group=os.getpgid(0) == os.getpid(), session=os.getsid(0),
        signals={s.name: str(signal.getsignal(s)) for s in signal.Signals},
        blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        limits=[resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        nice=os.getpriority(os.PRIO_PROCESS, 0), group=open("/proc/self/cgroup").read(),
        fds=len(os.listdir("/proc/self/fd")), stdin=os.readlink("/proc/self/fd/0"),
        threads=len(os.listdir("/proc/self/task")),
        thread=threading.main_thread().native_id == os.getpid(),
        environ={k: v for k, v in os.environ.items()}, plain=type(os.environ).__name__,
        executable=sys.executable, file=globals().get("__file__"),
        pickled=sys.modules.get("__mp_main__", sys.modules["__main__"]).__name__, **more)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules that an interpreter may import, apart from the program's directory."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "heavy.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    return tmp_path


def heard(process: Process, word: str) -> dict[str, Any]:
    """Wait for a message."""
    while True:
        for message in process.hear():
            if word in message:
                return message
        assert not process.silent, f"it ended without {word}"
        assert select.select([process.link], [], [], LIMIT_SECONDS)[0], f"no {word}"


def ended(process: Process) -> int:
    assert select.select([process.pidfd], [], [], LIMIT_SECONDS)[0], "it does not end"
    process.hear()
    code = process.reap()
    process.close()
    return code


@pytest.fixture
def servers() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.signal(signal.SIGKILL)
        ended(process)


def serve(servers: list[Process], *modules: str) -> tuple[Process, dict[str, Any]]:
    server = Process.start(dict(os.environ), modules, program=FORK_SERVER)
    servers.append(server)
    return server, heard(server, "warm")


def run(process: Process, order: ProcessSpec) -> int:
    process.give(order)
    return ended(process)


def counted(server: Process) -> list[int]:
    """Count the descriptors here and at the interpreter, and the children of both."""
    here, there = psutil.Process(), psutil.Process(server.pid)
    return [here.num_fds(), there.num_fds(), len(here.children()), len(there.children())]


class TestForks:
    def test_a_fork_is_what_a_fresh_process_is(self, place: Path, servers: list[Process]) -> None:
        """All that a program can look at, but the modules that are there already."""
        script = place / "train.py"
        script.write_text(
            f"{REPORT}\nimport heavy\n"
            "open(os.environ['TO'], 'w').write(json.dumps(report(seen=heavy.rank_at_import)))\n"
        )
        server, word = serve(servers, "heavy")
        assert word["unsafe"] == ""
        found = {}
        for name in ("cold", "warm"):
            process = Process.start(dict(os.environ)) if name == "cold" else Process.fork(server)
            env = {"TO": str(place / name), "RANK": "none"}
            assert run(process, ProcessSpec("script", (str(script), "--a", "b"), env)) == 0
            found[name] = json.loads((place / name).read_text())
            assert found[name].pop("environ") == {**os.environ, **env}
        assert found["warm"] == found["cold"]
        assert found["warm"]["parent"] == os.getpid(), "the launcher is its parent, and reaps it"

    def test_no_import_is_paid_again(self, place: Path, servers: list[Process]) -> None:
        script = place / "train.py"
        script.write_text(
            "import os, sys\nthere = 'heavy' in sys.modules\nimport heavy\n"
            "open(os.environ['TO'], 'w').write(f'{there} {heavy.loaded_by}')\n"
        )
        server, _ = serve(servers, "heavy")
        for name in ("one", "two"):
            order = ProcessSpec("script", (str(script),), {"TO": str(place / name)})
            assert run(Process.fork(server), order) == 0
            assert (place / name).read_text() == f"True {server.pid}"

    def test_modules_run_as_python_m_runs_them(self, place: Path, servers: list[Process]) -> None:
        package = place / "modules" / "pkg"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "train.py").write_text(
            f"{REPORT}\nimport multiprocessing\n"
            "found = report(spec=__spec__.name, zero=sys.argv[0])\n"
            "open(os.environ['TO'], 'w').write(json.dumps(found))\n"
        )
        server, _ = serve(servers, "multiprocessing")
        found = {}
        for name in ("cold", "warm"):
            process = Process.start(dict(os.environ)) if name == "cold" else Process.fork(server)
            order = ProcessSpec("module", ("pkg.train", "x"), {"TO": str(place / name)})
            assert run(process, order) == 0
            found[name] = json.loads((place / name).read_text())
            del found[name]["environ"]
        assert found["warm"] == found["cold"]
        assert found["warm"]["spec"] == "pkg.train"
        assert found["warm"]["zero"] == str(package / "train.py")

    @pytest.mark.parametrize(
        ("line", "code"),
        [
            ("raise SystemExit(7)", 7),
            ("raise ValueError('no')", 1),
            ("os._exit(9)", 9),
            ("os.kill(os.getpid(), signal.SIGKILL)", 137),
            ("os.abort()", 134),
            ("signal.raise_signal(signal.SIGTERM)", 143),
            ("raise KeyboardInterrupt", 130),
        ],
    )
    def test_ends_are_the_same(
        self, place: Path, servers: list[Process], line: str, code: int
    ) -> None:
        script = place / "train.py"
        script.write_text(
            f"import os, resource, signal\n"
            f"resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n{line}\n"
        )
        server, _ = serve(servers, "heavy")
        order = ProcessSpec("script", (str(script),), {}, stderr=str(place / "err"))
        cold, warm = Process.start(dict(os.environ)), Process.fork(server)
        said = []
        for process in (cold, warm):
            (place / "err").unlink(missing_ok=True)
            assert run(process, order) == code
            said.append((place / "err").read_text())
        assert said[0].count("fork_server") == 0
        if code in (1, 7):
            assert said[0] == said[1], "the traceback is the program's own"

    def test_output_goes_through_pipes_in_its_order(
        self, place: Path, servers: list[Process]
    ) -> None:
        script = place / "train.py"
        script.write_text("import os\nprint('a')\nos.write(1, b'b\\n')\nprint('c')\n")
        server, _ = serve(servers, "heavy")
        process = Process.fork(server, piped=True)
        out = os.dup(process.outputs[0])
        assert run(process, ProcessSpec("script", (str(script),), {})) == 0
        with os.fdopen(out, "rb") as stream:
            assert stream.read() == b"a\nb\nc\n"

    def test_random_numbers_differ(self, place: Path, servers: list[Process]) -> None:
        pytest.importorskip("numpy", reason="numpy is not installed")
        script = place / "train.py"
        script.write_text(
            "import os, random, numpy\n"
            "open(os.environ['TO'], 'w').write(f'{random.random()} {numpy.random.rand()}')\n"
        )
        server, _ = serve(servers, "numpy", "numpy.random")
        for name in ("one", "two"):
            order = ProcessSpec("script", (str(script),), {"TO": str(place / name)})
            assert run(Process.fork(server), order) == 0
        one, two = ((place / name).read_text().split() for name in ("one", "two"))
        assert one[0] != two[0]
        assert one[1] != two[1]

    def test_a_fork_dies_with_the_launcher_and_not_with_the_interpreter(
        self, place: Path, servers: list[Process]
    ) -> None:
        script = place / "train.py"
        script.write_text("import os, sys\nsys.stdin.close()\nos.read(int(sys.argv[1]), 1)\n")
        server, _ = serve(servers, "heavy")
        process = Process.fork(server)
        server.signal(signal.SIGKILL)
        servers.remove(server)
        assert ended(server) == 137
        script.write_text("raise SystemExit(5)\n")
        assert run(process, ProcessSpec("script", (str(script),), {})) == 5
        with pytest.raises(OSError):
            Process.fork(server)

    def test_one_that_was_stopped_goes_on_when_it_gets_its_program(
        self, place: Path, servers: list[Process]
    ) -> None:
        script = place / "train.py"
        script.write_text("raise SystemExit(5)\n")
        server, _ = serve(servers, "heavy")
        process = Process.fork(server)
        process.signal(signal.SIGSTOP)
        os.waitid(os.P_PIDFD, process.pidfd, os.WSTOPPED | os.WNOWAIT)
        assert run(process, ProcessSpec("script", (str(script),), {})) == 5

    def test_a_crash_leaves_no_zombie_and_no_descriptor(
        self, place: Path, servers: list[Process]
    ) -> None:
        script = place / "train.py"
        script.write_text("raise SystemExit(3)\n")
        server, _ = serve(servers, "heavy")
        order = ProcessSpec("script", (str(script),), {})
        run(Process.fork(server, piped=True), order)
        before = counted(server)
        for _ in range(5):
            assert run(Process.fork(server, piped=True), order) == 3
        assert counted(server) == before


class TestSafety:
    @pytest.mark.parametrize(
        ("body", "word"),
        [
            (
                "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()",
                "started 1 thread(s)",
            ),
            ("import subprocess\nchild = subprocess.Popen(['sleep', '60'])", "started a process"),
            ("import socket\nline = socket.socket()", "opened socket:"),
            ("import os\nfile = open(os.environ['HOLDS'])", "opened /"),
        ],
    )
    def test_an_import_that_forbids_forks(
        self,
        place: Path,
        servers: list[Process],
        monkeypatch: pytest.MonkeyPatch,
        body: str,
        word: str,
    ) -> None:
        (place / "modules" / "odd.py").write_text(body)
        (place / "held").touch()
        monkeypatch.setenv("HOLDS", str(place / "held"))
        _, report = serve(servers, "odd")
        assert word in report["unsafe"]

    def test_a_gpu_that_an_import_has_touched_forbids_forks(
        self, place: Path, servers: list[Process]
    ) -> None:
        (place / "modules" / "torch").mkdir()
        (place / "modules" / "torch" / "__init__.py").touch()
        (place / "modules" / "torch" / "cuda.py").write_text("def _is_in_bad_fork(): return True\n")
        _, report = serve(servers, "torch.cuda")
        assert report["unsafe"] == "an import used the GPU"

    def test_what_imports_read_is_known(self, place: Path, servers: list[Process]) -> None:
        _, report = serve(servers, "heavy", "no.such.module")
        assert {"RANK", "HEAVY_MODE"} <= set(report["reads"])
        assert report["loaded"]["heavy"] == str(place / "modules")
        assert report["warm"] == ["heavy"]

    def test_an_import_that_looks_through_all_variables_reads_none_of_them(
        self, place: Path, servers: list[Process]
    ) -> None:
        """tqdm does so for names of its own, and torch imports it where it is installed."""
        body = "import os\nown = {k: v for k, v in os.environ.items() if k.startswith('ODD_')}\n"
        (place / "modules" / "odd.py").write_text(body)
        _, report = serve(servers, "odd")
        assert report["warm"] == ["odd"]
        assert not {"PATH", "RANK"} & set(report["reads"])

    def test_torch_itself_is_safe_and_reads_no_rank(self, servers: list[Process]) -> None:
        pytest.importorskip("torch", reason="torch is not installed")
        _, report = serve(servers, "torch", "torch._dynamo", "torch.distributed")
        assert report["unsafe"] == ""
        assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"} & set(report["reads"])


class TestPolicy:
    TORCH = ProgramTraits(frozenset({"torch"}))

    def test_a_plain_program_of_torch_gets_one(self) -> None:
        assert plan_warm(None, False, self.TORCH, False) == WarmPlan(True)

    @pytest.mark.parametrize(
        ("traits", "standby", "doubt"),
        [
            (None, False, ""),
            (ProgramTraits(), False, ""),
            (TORCH, True, ""),
            (read_traits("import torch, slurm_resilience.training"), False, ""),
            (read_traits("import torch\nfrom slurm_resilience import training"), False, ""),
            (read_traits("import torch, sys\nsys.path.insert(0, 'x')"), False, "sys.path"),
            (read_traits("import torch, sys\nsys.path = ['x', *sys.path]"), False, "sys.path"),
            (
                read_traits("import os, torch\nos.environ['OMP_NUM_THREADS'] = '4'"),
                False,
                "OMP_NUM",
            ),
            (read_traits("import os, torch\nos.environ.update(x)"), False, "*"),
        ],
    )
    def test_others_do_not(self, traits: ProgramTraits | None, standby: bool, doubt: str) -> None:
        plan = plan_warm(None, standby, traits, False)
        assert not plan.wanted
        assert doubt in plan.doubt
        assert bool(doubt) == bool(plan.doubt)
        assert plan_warm(True, standby, traits, True) == WarmPlan(True), "who asks gets it"

    def test_gpus_are_untried(self) -> None:
        assert "GPU" in plan_warm(None, False, self.TORCH, True).doubt
        assert plan_warm(False, False, self.TORCH, False) == WarmPlan(False)

    def test_traits(self) -> None:
        found = read_traits(
            "import torch.nn as nn\nfrom os import environ\nfrom . import mine\n"
            "environ['A'] = '1'\nenviron.setdefault('B', '2')\nimport os\nos.putenv('C', '3')\n"
            "os.environ.update({'D': '4'}, E='5')\ndel os.environ['F']\nprint(os.environ['G'])\n"
            "import sys\nsys.path.append('later')\n"
        )
        assert found.imports == {"torch", "os", "sys"}
        assert found.sets == set("ABCDEF")
        assert not found.leads_path
        assert not found.uses_library
        assert read_traits("this is no python(") == read_traits(b"\0") == ProgramTraits()

    @pytest.mark.parametrize(
        "text",
        [
            "import slurm_resilience.training.data as data",
            "from slurm_resilience.training import resilient",
            "import slurm_resilience",
            "from slurm_resilience import *",
        ],
    )
    def test_a_program_that_recovers_by_itself(self, text: str) -> None:
        assert read_traits(text).uses_library

    def test_a_plain_program_of_torch_does_not_change_its_size(self) -> None:
        elastic = {"SRES_NODES": "2:4"}
        with pytest.raises(UsageError, match=r"train.py cannot change its size.*max-nodes"):
            check_size(self.TORCH, elastic, "train.py")
        check_size(self.TORCH, {}, "train.py")
        check_size(self.TORCH, elastic | {"SRES_CHECKPOINTLESS": "1"}, "train.py")
        for text in ("import torch, slurm_resilience.training", "import mine"):
            check_size(read_traits(text), elastic, "train.py")

    def test_to_ask_whether_the_attempt_is_valid_is_no_recovery(self) -> None:
        text = "import torch\nfrom slurm_resilience.resume import attempt\n"
        assert not read_traits(text).uses_library
        template = Path(__file__).parents[2] / "scripts" / "templates" / "train_ddp.py"
        assert plan_warm(None, False, read_traits(template.read_bytes()), False) == WarmPlan(True)

    def test_variables_that_differ(self) -> None:
        own = {"OMP_NUM_THREADS": "1", "MODE": "a"}
        assert doubt_of_environment(own, {"OMP_NUM_THREADS": "1", "RANK": "3"}, ["MODE"]) == ""
        assert "$MODE" in doubt_of_environment(own, {"MODE": "b"}, ["MODE"])
        assert "$PYTHONHASHSEED" in doubt_of_environment(own, {"PYTHONHASHSEED": "0"}, [])
        assert "$LD_PRELOAD" in doubt_of_environment(own, {"LD_PRELOAD": "x.so"}, [])
        assert "$CUDA_VISIBLE_DEVICES" in doubt_of_environment(
            {}, {"CUDA_VISIBLE_DEVICES": "1"}, []
        )
        assert "$RANK" in doubt_of_environment(own, {"RANK": "3"}, ["RANK"])

    def test_neighbours_and_changes(self) -> None:
        assert "yaml" in doubt_of_neighbours(["torch", "yaml"], ["train", "yaml"])
        assert doubt_of_neighbours(["torch"], ["train"]) == ""
        assert "HOME" in doubt_of_changes(["HOME"], ["HOME"])
        assert doubt_of_changes(["WANDB_MODE"], ["HOME"]) == ""

    def test_the_programs_file_and_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "pkg").mkdir()
        (tmp_path / "pkg" / "train.py").touch()
        (tmp_path / "pkg" / "__main__.py").touch()
        assert program_file("module", "pkg.train") == Path("pkg/train.py")
        assert program_file("module", "pkg") == Path("pkg/__main__.py")
        assert program_file("module", "none.such") is None
        assert program_file("script", "pkg") == Path("pkg/__main__.py")
        assert program_front("script", "pkg/train.py") == tmp_path / "pkg"
        assert program_front("module", "pkg.train") == tmp_path
        assert program_front("program", "sh") is None


class _Forks:
    """Stands for the launcher's children: it starts nothing."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.refused = False

    def start_server(self, *_: object) -> Process:
        return self.process

    def fork(self, *_: object) -> Process:
        if self.refused:
            raise OSError(11, "refused")
        return self.process

    def bury(self, _: Process) -> int:
        return 0


def warm_interpreter(forks: _Forks, said: list[str], spec: WarmSpec) -> WarmInterpreter:
    loop: Any = type("Loop", (), {"call_later": lambda _, __, do: do()})()
    children: Any = forks
    return WarmInterpreter(loop, children, {"A": "1"}, spec, said.append)


class TestInterpreter:
    ORDER = ProcessSpec("script", ("train.py",), {"RANK": "1"})

    @pytest.fixture
    def forks(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Forks]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = Process(os.getpid(), ours, (), lambda: 0)
            monkeypatch.setattr(process, "signal", lambda _: None)  # it is this process
            yield _Forks(process)
            os.close(process.pidfd)
            process.close()

    def test_it_forks_when_it_has_reported(self, forks: _Forks) -> None:
        said: list[str] = []
        warm = warm_interpreter(forks, said, WarmSpec(WarmPlan(True)))
        assert warm.fork(self.ORDER, False) is None
        warm.soon()
        assert warm.fork(self.ORDER, False) is None
        assert warm.told(forks.process, {"warm": ["torch"], "reads": ["HOME"]})
        assert warm.fork(self.ORDER, False) is forks.process
        assert [line.rpartition(": ")[2] for line in said] == [
            "there is none yet",
            "it is still importing",
        ]

    @pytest.mark.parametrize(
        ("report", "doubt"),
        [
            ({"unsafe": "an import started 3 thread(s)"}, "started 3 thread(s)"),
            ({"reads": ["RANK"]}, "$RANK differs"),
        ],
    )
    def test_a_doubt_is_said_once(self, forks: _Forks, report: dict[str, Any], doubt: str) -> None:
        said: list[str] = []
        warm = warm_interpreter(forks, said, WarmSpec(WarmPlan(True)))
        warm.soon()
        warm.told(forks.process, {"warm": []} | report)
        for _ in range(2):
            assert warm.fork(self.ORDER, False) is None
        (line,) = said
        assert doubt in line

    def test_a_module_beside_the_program(self, forks: _Forks, tmp_path: Path) -> None:
        said: list[str] = []
        warm = warm_interpreter(forks, said, WarmSpec(WarmPlan(True), front=tmp_path))
        warm.soon()
        loaded = {"yaml": "/lib", "sympy": "/lib", "own": str(tmp_path)}
        (tmp_path / "own.py").touch()
        warm.told(forks.process, {"warm": [], "loaded": loaded})
        assert warm.fork(self.ORDER, False) is forks.process
        (tmp_path / "sympy").mkdir()
        assert warm.fork(self.ORDER, False) is forks.process, "no package, so not in front"
        (tmp_path / "sympy" / "__init__.py").touch()
        assert warm.fork(self.ORDER, False) is None
        assert "sympy" in said[0]

    def test_a_refused_fork_ends_it(self, forks: _Forks) -> None:
        said: list[str] = []
        warm = warm_interpreter(forks, said, WarmSpec(WarmPlan(True)))
        warm.soon()
        warm.told(forks.process, {"warm": []})
        forks.refused = True
        assert warm.fork(self.ORDER, False) is None
        forks.refused = False
        assert warm.fork(self.ORDER, False) is None
        assert said == ["note: no start from a warm interpreter: refused"]

    def test_it_is_started_three_times_at_most(self, forks: _Forks) -> None:
        said: list[str] = []
        warm = warm_interpreter(forks, said, WarmSpec(WarmPlan(True)))
        warm.soon()
        assert [warm.died(forks.process) for _ in range(4)] == [True, True, True, False]
        warm.fork(self.ORDER, False)
        assert "3 times in a row" in said[0]

    def test_who_wants_none_hears_nothing(self, forks: _Forks) -> None:
        said: list[str] = []
        warm = warm_interpreter(forks, said, WarmSpec(WarmPlan(False)))
        warm.soon()
        assert warm.fork(self.ORDER, False) is None
        assert said == []


class TestGroup:
    TABLE = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid "
        " timeout inode\n"
        "   0: 0100007F:7300 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0 0 11 1\n"
        "   1: 0100007F:9C40 0100007F:7300 01 00000000:00000000 00:00000000 00000000  0 0 12 1\n"
        "   2: 0100007F:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000  0 0 13 1\n"
    )

    def test_sockets_of_a_port(self) -> None:
        assert sockets_on(self.TABLE, 0x7300) == {11, 12}
        assert sockets_on(self.TABLE, 22) == {13}
        assert sockets_on("", 22) == set()

    def test_a_process_that_listens_or_is_connected(self) -> None:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen()
            port = server.getsockname()[1]
            assert is_on_port(os.getpid(), port)
            client.connect(("127.0.0.1", port))
            taken, _ = server.accept()
            taken.close()
            server.close()
            assert is_on_port(os.getpid(), port), "its own end is still open"
            client.close()
            assert not is_on_port(os.getpid(), port)
        assert not is_on_port(2**22 + 1, port), "there is no such process"

    def test_what_shows_itself(self) -> None:
        group = GroupRestart(RestartSpec())
        assert not group.is_lost([os.getpid()])
        group.grouped()
        assert group.is_lost([])
        library = GroupRestart(RestartSpec())
        library.recovers()
        library.grouped()
        assert library.kind is ProgramKind.RECOVERS
        assert GroupRestart(RestartSpec("all")).is_lost([])
        alone = GroupRestart(RestartSpec("rank"))
        alone.grouped()
        assert not alone.is_lost([])

    def test_a_rank_that_is_alone_on_its_node_shows_it_while_it_lives(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            plain, library = (GroupRestart(RestartSpec(port=port)) for _ in range(2))
            assert not plain.shows_itself([])
            assert plain.shows_itself([os.getpid()])
            assert library.shows_itself([os.getpid()])
        library.recovers()  # it said so later: its own group is no reason to end all
        assert plain.is_lost([])
        assert not library.is_lost([])

    def test_a_new_port_each_time_unless_it_was_given(self) -> None:
        given = GroupRestart(RestartSpec(port=29500))
        own = GroupRestart(RestartSpec(port=1, own_port=True))
        for group in (given, own):
            group.end("a rank failed")
            group.begin_again()
            assert not group.is_ending
        assert given.port == 29500
        assert own.port in PORTS
        given.new_port()
        assert given.port == 29500

    def test_a_port_that_no_connection_gets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        assert max(PORTS) < int(ephemeral[0])
        free = free_port()
        assert free in PORTS
        with socket.socket() as connection:  # the near end of one: nothing listens on it
            connection.bind(("127.0.0.1", 0))
            taken = connection.getsockname()[1]
            choices = [[taken, free], [taken]]
            monkeypatch.setattr(group_restart.random, "sample", lambda *_: choices.pop(0))
            assert free_port() == free
            assert free_port() not in (0, taken), "the kernel's choice, if all were taken"


class _World:
    """Stands for the other launchers."""

    def __init__(self, has_met: bool) -> None:
        self.has_met = has_met
        self.said: list[str] = []

    def over(self, _: str) -> None:
        self.said.append("over")

    def ready(self) -> None:
        self.said.append("ready")

    def done(self) -> None:
        self.said.append("done")


class TestAttempts:
    def group(self, has_met: bool) -> tuple[GroupRestart, _World]:
        world: Any = _World(has_met)
        group = GroupRestart(RestartSpec("all"))
        group.world = world
        return group, world

    def test_one_node_needs_no_other(self) -> None:
        group = GroupRestart(RestartSpec("all"))
        group.end("a rank failed")
        assert group.is_ending
        assert group.is_next()
        group.begin_again()
        assert group.stage is AttemptStage.RUNNING
        assert group.is_done()

    def test_the_next_attempt_begins_when_all_are_there(self) -> None:
        group, world = self.group(has_met=True)
        assert not group.has_begun(is_first=True), "the ranks run already"
        group.end("a rank failed")
        assert not group.is_next()
        assert not group.is_next()
        assert world.said == ["over", "ready"], "each once"
        assert group.has_begun(is_first=False)

    @pytest.mark.parametrize("left", [True, False])
    def test_a_failure_before_the_nodes_have_met(self, left: bool) -> None:
        """The other nodes' first ranks must not be joined by our second ones."""
        group, world = self.group(has_met=False)
        group.end("a rank failed")
        if not left:
            group.is_next()
        world.has_met = True
        assert not group.has_begun(is_first=True)
        if left:
            group.is_next()
        assert world.said == ["over", "over", "ready"]
        assert group.has_begun(is_first=False)

    def test_a_node_that_came_later_waits(self) -> None:
        group, _ = self.group(has_met=False)
        group.came_later = True
        assert group.has_begun(is_first=True)

    def test_a_node_that_is_done_comes_back(self) -> None:
        group, world = self.group(has_met=True)
        assert not group.is_done()
        assert not group.is_done()
        assert world.said == ["done"]
        assert group.has_begun(is_first=False)

    def test_the_end_of_others_ends_what_depends_on_them(self) -> None:
        lost, fault = GenerationEnd(1, "gone", kind="lost"), GenerationEnd(1, "rank 3: SIGKILL")
        group, world = self.group(has_met=True)
        assert group.ends_with(lost, [])
        group.end("gone")
        assert not group.ends_with(lost, []), "it does already"
        unknown = GroupRestart(RestartSpec())
        unknown.world = cast(LauncherWorld, world)
        world.said.clear()
        assert not unknown.ends_with(lost, [os.getpid()])
        assert world.said == ["ready"], "else the others would give it up"
        assert unknown.ends_with(fault, [])

    def test_the_librarys_programs_go_on_whatever_becomes_of_other_launchers(self) -> None:
        group, world = self.group(has_met=True)
        group.kind = ProgramKind.UNKNOWN
        group.recovers()
        for kind in ("lost", "fault"):
            assert not group.ends_with(GenerationEnd(1, "gone", kind=kind), [os.getpid()])
        assert group.is_done(), "it waits for no other launcher"
        assert not group.has_begun(is_first=False)
        assert world.said == ["ready", "ready"]
