"""The house's rules on shape: how large a class, a folder and a function may grow, and what a
lifecycle looks like."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

from house import FILES, PACKAGE, ROOT, base_names, classes, judge, name_of, nodes, source

MAX_FIELDS = 15
MAX_FILES = 15
ABOUT = 3
"""A folder may have this many files more: "about 15". `__init__` and `__main__` do not count."""

RECORDS_OF_OTHERS = {
    # As wide as what they copy: a line of `scontrol show`, a row of a table, a user's options.
    "Node": "one line of `scontrol show node`",
    "Job": "one line of squeue",
    "Incident": "one row of the journal",
    "Options": "the arguments of `resilient`",
}


def own_fields(cls: ast.ClassDef) -> set[str]:
    """Return the fields that a class declares, and those that its methods give to `self`."""
    fields = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }
    for node in ast.walk(cls):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and _is_self(node.value)
        ):
            fields.add(node.attr)
    return fields


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_no_module_is_taken_from_the_directory_in_which_root_works() -> None:
    """`python -m` looks there first, and in /tmp any user can leave a torch.py to root; `-P` stops
    that."""
    judge(
        "python -m without -P",
        (
            (name_of(path), f"{name_of(path)}:{node.lineno}")
            for path in FILES
            # What stands there is a user's own command.
            if not name_of(path).startswith("demo/")
            for node in nodes(path)
            if isinstance(node, ast.List | ast.Tuple)
            and re.search(r"(?<!\w)sys\.executable, '-m'", ast.unparse(node))
        ),
    )


def test_a_class_has_at_most_fifteen_fields() -> None:
    judge(
        "fields",
        (
            (f"{name_of(path)} {cls.name}", f"{name_of(path)}: {cls.name} has {count} fields")
            for path, cls in classes()
            if (count := len(own_fields(cls))) > MAX_FIELDS and cls.name not in RECORDS_OF_OTHERS
        ),
    )


def test_behaviour_is_inherited_over_one_level_at_most() -> None:
    """Bases that only declare share none: exceptions, Protocols, Structs, empty bases."""
    ours = {cls.name: cls for _, cls in classes()}

    def shares(name: str) -> bool:
        return name in ours and any(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ours[name].body
        )

    def depth(name: str) -> int:
        bases = base_names(ours[name])
        if "Protocol" in bases:
            return 0
        return max([depth(base) + shares(base) for base in bases if base in ours], default=0)

    judge(
        "inheritance",
        (f"{name_of(path)} {cls.name}" for path, cls in classes() if depth(cls.name) > 1),
    )


# --- lifecycles -----------------------------------------------------------------------------

NOT_A_LIFECYCLE = re.compile(r"(Settings|Options|Spec|Config|Facts|Seen|Job|Switches)$")
"""Structs of options or of what was read: their booleans are independent of each other."""
SAID_ONCE = re.compile(r"^_?(told|said|warned)(_|$)")
"""A flag that keeps a line from being logged twice is no state."""


def _flags(cls: ast.ClassDef) -> set[str]:
    flags = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and ast.unparse(node.annotation) == "bool"
    }
    for node in ast.walk(cls):
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, bool)
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            flags |= {
                target.attr
                for target in targets
                if isinstance(target, ast.Attribute) and _is_self(target.value)
            }
    return {flag for flag in flags if not SAID_ONCE.match(flag)}


INDEPENDENT_FLAGS: dict[str, str] = {
    "Ending": "facts about one end, each from a source of its own",
}
"""Classes with three booleans that are no lifecycle, each with its reason."""


def test_a_lifecycle_is_an_enum_and_not_three_booleans() -> None:
    judge(
        "lifecycle",
        (
            (
                f"{name_of(path)} {cls.name}",
                f"{name_of(path)}: {cls.name}: {', '.join(sorted(flags))}",
            )
            for path, cls in classes()
            if len(flags := _flags(cls)) >= 3
            and not NOT_A_LIFECYCLE.search(cls.name)
            and cls.name not in INDEPENDENT_FLAGS
        ),
    )


# --- who changes a state --------------------------------------------------------------------

WRITES = re.compile(r"\b(INSERT INTO|UPDATE) incidents\b")
JOURNAL = "controller/journal/incident_table.py"


def test_a_nodes_state_is_written_by_the_journal_alone() -> None:
    """An act reports an outcome as an event; the table in decide/ says which state follows."""
    writers = {
        name_of(path)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and WRITES.search(node.value)
    }
    assert writers == {JOURNAL}


def test_the_journal_takes_each_new_state_from_the_table() -> None:
    given = [
        ast.unparse(node.value)
        for node in nodes(PACKAGE / JOURNAL)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "state"
    ]
    assert given
    assert [value for value in given if not re.fullmatch(r"step\(.+\)\.state", value)] == []


def test_only_decide_names_a_state_but_to_compare_it() -> None:
    judge("state", sorted(_states_given()))


def _states_given() -> Iterator[tuple[str, str]]:
    """Yield uses of `NodeState.X` as a value: to write one, you have to give one."""
    for path in FILES:
        if name_of(path).startswith("controller/decide/") or name_of(path) == JOURNAL:
            continue
        compared = {
            part
            for node in nodes(path)
            if isinstance(node, ast.Compare | ast.MatchValue)
            for part in ast.walk(node)
        }
        for node in nodes(path):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "NodeState"
                and node not in compared
            ):
                yield name_of(path), f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"


# --- size -----------------------------------------------------------------------------------


def test_a_folder_holds_about_fifteen_files() -> None:
    folders = Counter(path.parent for path in FILES if path.stem not in ("__init__", "__main__"))
    judge(
        "folder",
        (
            (str(folder.relative_to(PACKAGE)), f"{folder.relative_to(PACKAGE)}: {count} files")
            for folder, count in folders.items()
            if count > MAX_FILES + ABOUT
        ),
    )


def test_ruff_refuses_functions_of_a_complexity_over_fifteen() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"][
        "lint"
    ]
    assert "C901" in lint["select"] or "C90" in lint["select"]
    assert lint["mccabe"]["max-complexity"] <= 15
    silenced = [
        f"{name_of(path)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "noqa" in line and "C901" in line
    ]
    judge("complexity", silenced)


# --- time -----------------------------------------------------------------------------------

CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "monotonic"),
    ("time", "monotonic_ns"),
    ("time", "sleep"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
}
KEEPS_ITS_OWN_TIME = ("clock.py", "lab/", "demo/")
"""The clock itself, and what only ever runs on a real machine in real time."""


def test_time_comes_from_the_clock() -> None:
    judge("clock", sorted(_times()))


def _times() -> Iterator[tuple[str, str]]:
    for path in FILES:
        if name_of(path).startswith(KEEPS_ITS_OWN_TIME):
            continue
        for node in nodes(path):
            if _asks_the_machine(node):
                yield name_of(path), f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"


def _asks_the_machine(node: ast.AST) -> TypeGuard[ast.Attribute | ast.ImportFrom]:
    if isinstance(node, ast.ImportFrom):
        return any((node.module, alias.name) in CLOCKS for alias in node.names)
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value.attr if isinstance(node.value, ast.Attribute) else None
    owner = node.value.id if isinstance(node.value, ast.Name) else owner
    return (owner, node.attr) in CLOCKS


# --- callers --------------------------------------------------------------------------------

RUN_BY_NAME = re.compile(r"slurm_resilience(?:\.\w+)+")
"""A module that is started with `python -m` stands in a string, in a script or in a unit."""
BESIDE = re.compile(r"(?P<module>\w+(?:\.\w+)*?)(?:\.py|:\w+)")


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _reached_from(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules that a file imports, or names in a string."""
    names = set[str]()
    folder = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(RUN_BY_NAME.findall(node.value))
            if beside := BESIDE.fullmatch(node.value):
                # `bootstrap.py`, `lab:lab`, `past.review:review`: a module of this folder or below,
                # started or loaded by name.
                names.add(f"{folder}.{beside['module']}")
    for name in list(names):
        if f"{name}.__main__" in modules:
            names.add(f"{name}.__main__")
    return {name for name in names if name in modules}


def test_every_product_module_has_a_product_caller() -> None:
    modules = {_module(path): path for path in FILES}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    starts = {target.partition(":")[0] for target in project["scripts"].values()}
    reached, to_visit = set[str](), starts | _named_outside(modules)
    while to_visit:
        name = to_visit.pop()
        if name in reached:
            continue
        reached.add(name)
        to_visit |= _reached_from(modules[name], modules)
        # A package is run before its modules.
        to_visit |= {parent for parent in [name.rpartition(".")[0]] if parent in modules}
    judge("caller", sorted(name_of(path) for name, path in modules.items() if name not in reached))


def _named_outside(modules: dict[str, Path]) -> set[str]:
    """Return the modules that a unit, a command of scripts/ or the plugin starts."""
    text = ""
    for folder in ("systemd", "packaging", "spank", "lifecycle", "scripts"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (".service", ".c", ".h", ".sh", ".conf", ""):
                text += path.read_text(encoding="utf-8", errors="ignore")
    return {name for name in RUN_BY_NAME.findall(text) if name in modules}


def test_each_name_that_may_look_unused_stands_in_the_product() -> None:
    """`scripts/allowed_unused.py` lists names for vulture, which does not miss those that went."""
    listed = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in nodes(ROOT / "scripts" / "allowed_unused.py")
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and node.id != "_")
    }
    text = "\n".join(source(path) for path in FILES)
    assert listed
    assert [name for name in sorted(listed) if not re.search(rf"\b{name}\b", text)] == []
