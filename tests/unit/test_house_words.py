"""The house's rule on words: a docstring, a comment and a log line are plain English.

The first line of a docstring says what the thing does or is, with the actor as its subject. It
opens with no question word and ends with a full stop. No text speaks of nobody or somebody: it
names the one who acts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from house import FILES, ROOT, judge, name_of, nodes, source

OPENINGS = "Who|What|Whoever|Whatever|Whose|How|Where|That|Whether|Of|Why|Which"
NAMELESS = re.compile(
    r"\b(nobody|somebody|anybody|everybody|whoever|whomever|whosever|whoso)\b", re.IGNORECASE
)

SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SHELL = sorted(
    path
    for folder in ("lifecycle", "packaging", "scripts", "spank", "systemd", "docs", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file()
    and path.suffix in ("", ".sh", ".c", ".h", ".service", ".toml", ".md", ".1", ".5", ".8")
    and "__pycache__" not in path.parts
    and path.stat().st_size < 200_000
)
PAGES = sorted(ROOT.glob("*.md"))
EVERY = [*FILES, *SCRIPTS, *TESTS]

NAMES_A_USER = {
    "lab/cluster.py",
    "tests/unit/test_house_words.py",
    "tests/cluster/test_lab.py",
    "tests/training/test_torch_mesh_store.py",
}
"""Files in which `nobody` is a name: the user of that name, a value of a test, this list."""


def strings_that_stand_alone(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring: of modules, classes, functions, fields, constants."""
    for node in nodes(path):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def test_no_docstring_opens_with_a_question_word() -> None:
    opening = re.compile(rf"\s*({OPENINGS})\b")
    judge(
        "docstring opening",
        (
            (name_of(path), f"{name_of(path)}:{line}: {text.strip()[:70]}")
            for path in EVERY
            for line, text in strings_that_stand_alone(path)
            if opening.match(text)
        ),
    )


def test_a_docstrings_first_paragraph_is_a_sentence() -> None:
    judge(
        "docstring full stop",
        (
            (name_of(path), f"{name_of(path)}:{line}: {text.strip()[:70]}")
            for path in EVERY
            for line, text in strings_that_stand_alone(path)
            if not re.sub(r"[`')]+$", "", text.strip().split("\n\n")[0].strip()).endswith(
                (".", ":", "...", "::")
            )
        ),
    )


def test_every_text_names_who_acts() -> None:
    judge("nameless actor", sorted(_nameless()))


def _nameless() -> Iterator[tuple[str, str]]:
    for path in [*EVERY, *SHELL, *PAGES]:
        if name_of(path) in NAMES_A_USER:
            continue
        for number, line in enumerate(source(path).splitlines(), 1):
            if NAMELESS.search(line):
                yield name_of(path), f"{name_of(path)}:{number}: {line.strip()[:90]}"


ERRORS = re.compile(r"\w*(Error|Unreachable|NotFound|NotPermitted|MissingTool|Failed)$")


def test_an_error_is_one_line_without_a_full_stop_at_its_end() -> None:
    judge("error text", sorted(_odd_errors()))


def _odd_errors() -> Iterator[tuple[str, str]]:
    """Yield the raised texts that end a sentence: they follow `<program>: error: ` on one line."""
    for path in FILES:
        for node in nodes(path):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            if not ERRORS.match(ast.unparse(node.exc.func).rsplit(".", 1)[-1]) or not node.exc.args:
                continue
            text = _last_literal(node.exc.args[0])
            if text.endswith((".", "!")) and not text.endswith("..."):
                yield name_of(path), f"{name_of(path)}:{node.lineno}: {text[-70:]}"


def _last_literal(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr) and node.values:
        return _last_literal(node.values[-1])
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
