"""The house's one-way rules: who may import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import house
import pytest
from house import FILES, PACKAGE


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, at its top or inside of functions."""
    for node in house.nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if not HARMLESS.issuperset(names):
                yield node.module or ""
                yield from names


def within(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


def offenders(files: list[Path], *forbidden: str) -> list[str]:
    return [
        f"{module_of(path)} imports {name}"
        for path in files
        for name in imports(path)
        if within(name, *forbidden)
    ]


def room(name: str) -> list[Path]:
    files = sorted((PACKAGE / name).rglob("*.py"))
    assert files, name
    return files


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 50


HOME = "slurm_resilience"
IO = (
    "asyncio",
    "ctypes",
    "datetime",
    "logging",
    "os",
    "pathlib",
    "psutil",
    "random",
    "secrets",
    "shutil",
    "socket",
    "sqlite3",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "urllib",
    "uuid",
)
HARMLESS = {"pathlib.PurePath", "pathlib.PurePosixPath"}
"""Names in these modules that do no I/O."""


PURE = re.compile(r"\bPure\b")


def says_it_is_pure(path: Path) -> bool:
    """Tell whether a module's docstring has the word `Pure`: a promise that this test holds it to.

    Pure means: what goes in decides what comes out. No I/O, no clock, no randomness, no logging, no
    threads, and nothing that is read from the process (its environment, its arguments).
    """
    return bool(PURE.search(ast.get_docstring(house.tree(path)) or ""))


def test_a_module_that_says_pure_is_pure() -> None:
    promised = [path for path in FILES if says_it_is_pure(path)]
    assert len(promised) > 20
    house.judge(
        "pure",
        (
            (house.name_of(path), f"{module_of(path)} imports {name}")
            for path in promised
            for name in imports(path)
            if within(name, *IO, f"{HOME}.clock")
        ),
    )


PROMISED = [
    "model",
    "controller/diagnose",
    "controller/decide/marking",
    "controller/decide/node_lifecycle",
    "controller/decide/jobs",
    "resume/decide/classify",
    "resume/decide/plan",
    "resume/srun/environment",
    "resume/srun/env_option",
    "slurm/parse",
    "slurm/hostlists",
    "wire/messages",
    "wire/frames",
    "mesh/model",
    "mesh/messages",
    "mesh/events",
    "mesh/dial_book",
    "training/recovery/fault_policy",
]
"""Modules that are pure by design: each has to say so."""


def test_what_is_pure_by_design_says_so() -> None:
    deciding = room("controller/decide") + room("resume/decide") + room("mesh/protocol")
    promised = {PACKAGE / f"{name}.py" for name in PROMISED} | set(deciding)
    silent = [p for p in promised if p.stem != "__init__" and not says_it_is_pure(p)]
    assert silent == []


@pytest.mark.parametrize("earlier", ["diagnose", "decide", "observe"])
def test_the_cycle_is_a_one_way_street(earlier: str) -> None:
    order = ["observe", "diagnose", "decide", "act", "main"]
    later = order[order.index(earlier) + 1 :]
    single = PACKAGE / "controller" / f"{earlier}.py"
    files = [single] if single.exists() else room(f"controller/{earlier}")
    assert offenders(files, *(f"{HOME}.controller.{name}" for name in later)) == []


def test_only_training_imports_torch() -> None:
    # The demo is a training script, and deep checks load nodes by programs of their own, each a
    # process that says so where torch is missing; everything else runs where it is not installed.
    programs = PACKAGE / "deepcheck" / "torch_programs"
    others = [
        p
        for p in FILES
        if p.relative_to(PACKAGE).parts[0] not in ("training", "demo") and p.parent != programs
    ]
    assert offenders(others, "torch") == []


def test_training_may_ask_the_launcher_and_never_the_other_way() -> None:
    # The launcher starts without torch, and `slurm_resilience.training` loads it.
    assert offenders(room("launcher"), f"{HOME}.training") == []
    used = {name for path in room("training") for name in imports(path)}
    modules = {module_of(path) for path in room("launcher")} - {f"{HOME}.launcher"}
    doors = ("batch_directory", "control_socket", "exit_codes", "recipe_file")
    assert used & modules == {f"{HOME}.launcher.{name}" for name in doors}


@pytest.mark.parametrize(
    "module", ["launcher.main", "cli.main", "launcher.batch_directory", "launcher.recipe_file"]
)
def test_it_starts_without_torch(module: str) -> None:
    code = f"import sys, {HOME}.{module}; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


SUPERVISOR = f"import {HOME}.resume.supervisor; from {HOME}.resume.call import call_check, start"
FOR_FAULTS = (
    "difflib",
    "statistics",
    *(f"{HOME}.{name}" for name in ("flight", "mesh.connection", "mesh.messages")),
    *(f"{HOME}.mesh.{name}" for name in ("observer", "rendezvous", "transport")),
    *(f"{HOME}.resume.{name}" for name in ("attempt_watch", "crash_watch", "evidence")),
    *(f"{HOME}.resume.{name}" for name in ("observing", "recovery", "requeue_report")),
    *(f"{HOME}.resume.allocation.{name}" for name in ("companion", "requeue", "swap")),
    *(f"{HOME}.resume.elastic.{name}" for name in ("growth", "node_group", "size_plan")),
    *(f"{HOME}.resume.live_step.{name}" for name in ("live_plan", "live_step", "live_steps")),
    *(f"{HOME}.resume.live_step.{name}" for name in ("node_search", "seats", "training")),
    *(f"{HOME}.resume.progress.{name}" for name in ("hang_evidence", "stack_gathering")),
)
"""Modules of which a step needs nothing, until a fault or a training does."""


def loaded_by(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    return set(done.stdout.split())


def test_no_step_waits_for_what_only_a_fault_needs() -> None:
    loaded = loaded_by(SUPERVISOR)
    slow = ("asyncio", "click", "concurrent", "dataclasses", "hashlib", "json", "rich", "shutil")
    slow += ("ClusterShell", "logging")
    assert [name for name in loaded if within(name, *FOR_FAULTS, *slow)] == []


def test_a_first_attempt_loads_nothing_more(tmp_path: Path) -> None:
    """Each of these takes longer to load than the rest of the call that would."""
    code = "; ".join(
        (
            "from slurm_resilience.resume import main",
            "import os; os.environ['SRES_CONFIG'] = '/nonexistent'; main.run('srun', [])",
            "from slurm_resilience.resume import fence",
            "from slurm_resilience.resume.srun.host_calls import HostCalls",
            f"directory = fence.open_directory(fence.Path({str(tmp_path)!r}), 1, 2)",
            "fence.forget_attempt(directory); fence.raise_fence(directory, '1.0.1')",
            "steps = HostCalls().steps(()).expect('127.0.0.1', print)",
            "reports = HostCalls().reports(()).expect('127.0.0.1', print)",
            "assert steps and reports.target",
            "from slurm_resilience.slurm.hostlists import expand, fold",
            "assert fold(expand('n1')) == 'n1' and fold(expand('n[08-11]')) == 'n[08-11]'",
            "fence.remove(directory)",
        )
    )
    loaded = loaded_by(code)
    slow = {"ClusterShell", "encodings.idna", "logging", "shutil", "typing_extensions"}
    assert loaded.isdisjoint(slow)
    assert list(tmp_path.iterdir()) == []


def test_a_supervisor_loads_all_of_itself_soon_after_the_start() -> None:
    """A fault that comes weeks later finds no module on the disk that is another release's."""
    late = {
        name
        for path in room("resume")
        for function in house.nodes(path)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom)
        for name in (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))
        if PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py").exists()
    }
    assert set(FOR_FAULTS) & late
    assert late - loaded_by(f"{SUPERVISOR}; start.load_late()") == set()


def test_public_rooms_of_training_have_no_lazy_names() -> None:
    lazy = [
        module_of(path)
        for path in room("training")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
    ]
    assert lazy == []


def test_what_torch_keeps_to_itself_has_one_door() -> None:
    """Private names of torch stand in training/compat.py alone, with a test for each."""
    own = {"_replace", "_exit", "_current_frames"}  # of named tuples, os and sys
    found = [
        f"{module_of(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in room("training")
        if path.name != "compat.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in own
        and not ast.unparse(node.value).startswith(("self", "cls"))
        and f"self.{node.attr}" not in path.read_text(encoding="utf-8")
    ]
    assert found == []


def test_pyslurm_has_one_door() -> None:
    door = PACKAGE / "slurm" / "pyslurm.py"
    assert offenders([path for path in FILES if path != door], "pyslurm") == []
    users = [path for path in FILES if path.parent.name != "slurm"]
    assert offenders(users, f"{HOME}.slurm.pyslurm") == []


COMMON = {
    "child_exits",
    "child_group",
    "clock",
    "config",
    "daemon_log",
    "errors",
    "model",
    "trusted_paths",
}
MAY_IMPORT = {
    # A room: the rooms it may import, besides its own.
    "agent": COMMON | {"health", "lifecycle", "slurm", "wire"},
    "cli": COMMON
    | {
        "controller",
        "deepcheck",
        "flight",
        "health",
        "inject",
        "lab",
        "lifecycle",
        "replace",
        "resume",
        "simulate",
        "site_check",
        "slurm",
        "wire",
    },
    "config": {"errors"},
    "controller": COMMON | {"replace", "slurm", "wire"},
    "deepcheck": COMMON | {"health", "slurm"},
    "demo": {"clock", "controller", "errors", "lab", "training"},
    "flight": {"errors"},
    "health": COMMON,
    "inject": COMMON | {"health", "lab"},
    "lab": {"config", "errors", "slurm"},
    "launcher": {"clock", "errors", "mesh"},
    "lifecycle": {"child_exits", "clock", "config", "errors", "model", "slurm", "trusted_paths"},
    "mesh": {"clock", "errors", "wire"},
    "replace": COMMON | {"slurm"},
    "resume": COMMON | {"flight", "mesh", "slurm", "wire"},
    "simulate": COMMON
    | {"agent", "controller", "health", "mesh", "replace", "resume", "slurm", "wire"},
    "site_check": COMMON | {"resume", "slurm", "wire"},
    "slurm": COMMON,
    "training": {"clock", "errors", "launcher", "mesh", "resume"},
    "wire": COMMON,
}
"""`simulate` runs pure cores of other rooms, and the whole sresctld and supervisor; `DOORS` says
which."""

DOORS = {
    # A room that imports another may use these modules of it alone.
    ("agent", "lifecycle"): {"identity", "run_record", "script_set"},
    ("lifecycle", "slurm"): {"cli", "client"},
    ("cli", "controller"): {
        "decide.node_lifecycle",
        "decide.recovery_modes",
        "diagnose",
        "journal",
    },
    ("cli", "health"): {
        "check",
        "check_registry",
        "coverage",
        "learn_profile",
        "profile_files",
        "replay",
    },
    ("cli", "replace"): {"replacers"},
    ("cli", "resume"): {"main", "decide.goodput", "decide.signatures", "history", "progress"},
    ("inject", "health"): {
        "checks",  # the files that they read
        "dcgm_tool",
        "documents.dcgm_devices",
        "injected_tree",
        "verdict",
        "xid",
    },
    ("inject", "lab"): {"Lab", "LabSpec", "client", "machines", "state_file"},
    ("mesh", "wire"): {"frames"},
    ("demo", "controller"): {"journal"},
    ("replace", "slurm"): {"client"},
    ("simulate", "agent"): {"outbox"},
    ("simulate", "controller"): {"decide", "journal", "main", "probe", "spares"},
    ("simulate", "health"): {"grouping"},
    ("simulate", "replace"): {"program"},
    ("simulate", "slurm"): {"client", "companion_job", "hostlists", "reservations", "slurmd_port"},
    ("simulate", "wire"): {"messages", "server"},
    ("simulate", "resume"): {
        "allocation",
        "attempt",
        "context",
        "decide",
        "elastic",
        "fence",
        "history",
        "live_step",
        "progress",
        "recovery",
        "report",
        "srun",
        "supervisor",
        "supervisor_link",
    },
    ("site_check", "resume"): {"srun"},
    ("training", "resume"): {"attempt", "progress.straggler"},
}
LATER = {
    # A sub-room: what it may not import, because that comes after it or stands beside it.
    "controller/decide": (
        "act",
        "authorize",
        "cycle",
        "inbox",
        "main",
        "probe",
        "registry",
        "status",
    ),
    "controller/act": ("cycle", "main", "status"),
    "resume/decide": ("srun", "allocation", "live_step", "supervisor", "main", "context", "report"),
    "resume/srun": ("allocation", "live_step", "supervisor", "main", "context"),
    "resume/allocation": ("live_step", "supervisor", "main"),
    "resume/live_step": ("supervisor", "main"),
    "training/checkpoint": (
        "data",
        "process_group",
        "recovery",
        "state",
        "watch",
        "session",
        "block",
    ),
    "training/data": (
        "checkpoint",
        "process_group",
        "recovery",
        "state",
        "watch",
        "session",
        "block",
    ),
    "training/process_group": (
        "checkpoint",
        "data",
        "recovery",
        "state",
        "watch",
        "session",
        "block",
    ),
    "training/state": (
        "checkpoint",
        "data",
        "process_group",
        "recovery",
        "watch",
        "session",
        "block",
    ),
    "training/watch": (
        "checkpoint",
        "data",
        "process_group",
        "recovery",
        "state",
        "session",
        "block",
    ),
    "training/guards": ("recovery", "recipes", "session", "block", "participant", "loaders"),
    "training/recovery": ("recipes", "session", "block", "loaders"),
}


def test_every_room_has_its_row() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert rooms | modules - COMMON <= set(MAY_IMPORT)


def test_rooms_import_only_those_of_their_row() -> None:
    house.judge("import", sorted(set(_crossings())))


def _crossings() -> Iterator[tuple[str, str]]:
    for path in FILES:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != HOME or len(parts) < 2 or own in (parts[1], "__init__"):
                continue
            door = DOORS.get((own, parts[1]))
            is_room = (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists()
            beyond = bool(door and parts[2:]) and not within(".".join(parts[2:]), *door)
            if is_room and (parts[1] not in MAY_IMPORT.get(own, COMMON) or beyond):
                yield house.name_of(path), f"{module_of(path)} imports {name}"


@pytest.mark.parametrize("name", LATER)
def test_a_room_within_a_room_imports_nothing_later(name: str) -> None:
    above = name.partition("/")[0]
    assert offenders(room(name), *(f"{HOME}.{above}.{later}" for later in LATER[name])) == []


def test_click_stays_at_the_borders() -> None:
    mains = {"controller/main.py", "agent/main.py", "demo/main.py"}
    mains.add("launcher/main.py")
    others = [
        path
        for path in FILES
        if path.relative_to(PACKAGE).parts[0] != "cli"
        and str(path.relative_to(PACKAGE)) not in mains
    ]
    assert offenders(others, "click") == []


def test_the_training_scripts_side_needs_nothing_but_python() -> None:
    sender = "slurm_resilience.resume.progress.step_sender"
    files = (PACKAGE / "resume" / "attempt.py", PACKAGE / "resume/progress/step_sender.py")
    names = {name for file in files for name in imports(file)}
    names -= {"__future__", sender, sender.rpartition(".")[0]}
    assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "__future__"}


def test_nothing_is_given_to_a_shell() -> None:
    found = []
    for path in FILES:
        for node in house.nodes(path):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                found.append(f"{path}: shell=")
            if isinstance(node, ast.Attribute) and node.attr in ("system", "popen", "getoutput"):
                found += (
                    [f"{path}: {node.attr}"]
                    if ast.unparse(node).startswith(("os.", "subprocess."))
                    else []
                )
    assert found == []
