"""The house's rules on names: one name for one thing, the field's words first, units in names."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from house import FILES, PACKAGE, ROOT, classes, constants, judge, name_of, nodes, source

SHARED_MODULE_NAMES = {
    # Each room may have one of these: the room says which.
    "__init__",
    "__main__",
    "main",
    "model",
    "errors",
    "messages",
    "client",
    "server",
}
SAME_ROLE = {"jobs", "plan", "cache"}
"""Module names that several rooms may use for the same role, in a folder of decisions or data."""

OLD_WORDS = {
    "buried",
    "carrier",
    "carriers",
    "chase",
    "chased",
    "chasing",
    "hunt",
    "hunted",
    "hunter",
    "hunts",
    "inquest",
    "ledger",
    "meeting",
    "sever",
    "severed",
    "shelf",
    "skeleton",
    "story",
    "ward",
}
"""A private vocabulary that once stood here. The words that replaced it are Slurm's, torch's and
raft's, or have a row in docs/glossary.md."""


def test_a_public_class_name_names_one_class() -> None:
    files = defaultdict(list)
    for path, cls in classes():
        if not cls.name.startswith("_"):
            files[cls.name].append(name_of(path))
    judge(
        "class name",
        ((name, f"{name}: {', '.join(of)}") for name, of in files.items() if len(of) > 1),
    )


def test_a_module_name_names_one_module() -> None:
    files = defaultdict(list)
    for path in FILES:
        if path.stem not in SHARED_MODULE_NAMES | SAME_ROLE:
            files[path.stem].append(name_of(path))
    judge(
        "module name",
        ((name, f"{name}: {', '.join(of)}") for name, of in files.items() if len(of) > 1),
    )


def _identifiers() -> Iterator[tuple[str, str]]:
    """Yield file and name of everything that the product defines, and of every file and folder."""
    for path in FILES:
        yield name_of(path), path.parent.name if path.stem == "__init__" else path.stem
        for node in nodes(path):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield name_of(path), node.name
            elif isinstance(node, ast.arg):
                yield name_of(path), node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield name_of(path), node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield name_of(path), node.attr


def words(name: str) -> list[str]:
    """Split a name: `SeatMap` and `seat_map` are seat and map."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return spaced.lower().split()


def test_the_old_private_words_stay_out() -> None:
    judge(
        "old word",
        sorted(
            {
                (f"{file} {word}", f"{file}: {name}")
                for file, name in _identifiers()
                for word in words(name)
                if word in OLD_WORDS
            }
        ),
    )


# --- the glossary ---------------------------------------------------------------------------

GLOSSARY = ROOT / "docs" / "glossary.md"
ROW = re.compile(r"^\| \*\*(?P<term>[^*]+)\*\* \| .+ \| (?P<code>.*) \|$")


COINED = {
    "act",
    "blind",
    "block",
    "breaker",
    "decide",
    "evict",
    "fence",
    "flap",
    "generation",
    "heal",
    "incarnation",
    "join step",
    "lead",
    "living step",
    "observe",
    "observer",
    "partner",
    "record",
    "replacer",
    "seat",
    "standby",
    "swap",
    "verdict",
    "view",
    "world",
}


def glossary() -> dict[str, list[str]]:
    """Return the glossary's terms, each with the names of code that its row gives."""
    rows = {}
    for line in GLOSSARY.read_text(encoding="utf-8").splitlines():
        if match := ROW.match(line):
            rows[match["term"]] = re.findall(r"`([^`]+)`", match["code"])
    return rows


def test_the_glossary_has_a_row_for_each_coined_word() -> None:
    assert COINED - {term.lower() for term in glossary()} == set()


def test_the_glossary_names_what_exists() -> None:
    defined = {name for _, name in _identifiers()}
    missing = []
    for term, code in glossary().items():
        assert code, f"{term}: no name of code in its row"
        for name in code:
            there = (PACKAGE / name).exists() if "/" in name else name in defined
            if not there:
                missing.append(f"{term}: {name}")
    assert missing == []


def test_the_glossary_is_sorted_and_says_each_word_once() -> None:
    terms = [term.lower() for term in glossary()]
    assert terms == sorted(terms)
    assert max(Counter(terms).values()) == 1


# --- names in texts -------------------------------------------------------------------------

DOTTED = re.compile(r"\bslurm_resilience((?:\.(?!__)[A-Za-z_]\w*)+)")
IMPORTED = re.compile(r"\bfrom slurm_resilience([\w.]*) import (\w+)")
NO_MODULES = {".checks", ".replacers", ".launcher_of_mine"}
"""Groups of entry points; and a module that a test needs not to be there."""


def _leads_somewhere(dotted: str) -> bool:
    """Tell whether `.room.module.name` is a module of the package, or a name that stands in one."""
    at = PACKAGE
    parts = dotted.strip(".").split(".")
    for index, part in enumerate(parts):
        if (at / part).is_dir():
            at /= part
            continue
        file = at / f"{part}.py"
        wanted = parts[index + 1 :][:1] if file.exists() else [part]
        file = file if file.exists() else at / "__init__.py"
        return file.exists() and all(re.search(rf"\b{name}\b", source(file)) for name in wanted)
    return True


def test_a_module_named_in_a_text_exists() -> None:
    """A program within a string, a unit or a page is read by no import and no type checker."""
    folders = ("slurm_resilience", "tests", "scripts", "docs", "packaging", "systemd", "spank")
    suffixes = ("", ".py", ".md", ".sh", ".c", ".h", ".toml", ".service", ".1", ".5", ".8")
    lost = []
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*")):
        if not path.is_file() or path.suffix not in suffixes or "__pycache__" in path.parts:
            continue
        text = source(path)
        names = DOTTED.findall(text) + [f"{a}.{b}" for a, b in IMPORTED.findall(text)]
        lost += [f"{path}: {name}" for name in {*names} - NO_MODULES if not _leads_somewhere(name)]
    assert lost == []


# --- units ----------------------------------------------------------------------------------

UNITS = (
    "SECONDS",
    "MILLISECONDS",
    "BYTES",
    "MIB",
    "SHARE",
    "PERCENT",
    "FACTOR",
    "TOLERANCE",
    "SCORE",
)
SPEAKS_OF_TIME = re.compile(
    r"(^|_)(TIMEOUT|DELAY|GRACE|INTERVAL|PERIOD|PAUSE|POLL|EVERY|WAIT|SILENCE|PATIENCE|DEADLINE)($|_)"
)
SPEAKS_OF_SIZE = re.compile(r"(^|_)(FRAME|BUFFER|CHUNK|BACKLOG|BUCKET|SIZE)($|_)")
COUNTS_OF = re.compile(
    r"(^|_)(BEATS|FRAMES|LINES|LOOKS|NODES|RUNS|SEATS|STEPS|WORDS|RC|VERSION)($|_)"
)
"""A number of things says which things, and needs no other unit."""


def _is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.BinOp):
        return _is_number(value.left) and _is_number(value.right)
    return (
        isinstance(value, ast.Constant)
        and isinstance(value.value, int | float)
        and not isinstance(value.value, bool)
    )


def _has_fraction(value: ast.expr) -> bool:
    return any(isinstance(n, ast.Constant) and isinstance(n.value, float) for n in ast.walk(value))


def test_a_constants_name_says_its_unit() -> None:
    """A float always needs a unit; an int does where its name or its docstring speaks of time or
    size, or where it is written as a shift (`8 << 20`)."""
    judge("unit", sorted(_unitless()))


def _unitless() -> Iterator[tuple[str, str]]:
    for path in FILES:
        for name, value, doc in constants(path):
            if not _is_number(value) or COUNTS_OF.search(name):
                continue
            speaks = SPEAKS_OF_TIME.search(name) or SPEAKS_OF_SIZE.search(name)
            said = re.match(r"\W*(seconds?|bytes?|mib)\b", doc, re.IGNORECASE)
            shift = isinstance(value, ast.BinOp) and isinstance(value.op, ast.LShift)
            needs = _has_fraction(value) or speaks or said or shift
            if needs and not any(unit in name.split("_") for unit in UNITS):
                yield f"{name_of(path)} {name}", f"{name_of(path)}: {name} = {ast.unparse(value)}"
