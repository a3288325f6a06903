"""The product's source as trees, for the tests of the house's rules."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "slurm_resilience"
FILES = sorted(PACKAGE.rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def source(path: Path) -> str:
    """Return the text of a file."""
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(source(path), str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a file's syntax tree."""
    return tuple(ast.walk(tree(path)))


for _path in FILES:
    nodes(_path)
# These nodes live as long as the tests: the garbage collector need not visit them each time.
gc.collect()
gc.freeze()


def name_of(path: Path) -> str:
    """Return a file's path below the package, or below the repository if it is no product file."""
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT))


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    """Yield every class of the product with its file."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                yield path, node


def base_names(cls: ast.ClassDef) -> list[str]:
    """Return the last part of the name of each base: `Struct` for `msgspec.Struct`."""
    return [ast.unparse(base).split("[")[0].rsplit(".", 1)[-1] for base in cls.bases]


def constants(path: Path) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield name, value and docstring of every UPPER_CASE name that a module gives a value."""
    body = tree(path).body
    for at, node in enumerate(body):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        if isinstance(target, ast.Name) and target.id.isupper():
            after = body[at + 1] if at + 1 < len(body) else None
            yield target.id, value, _text(after)


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return ""


def judge(rule: str, offenders: Iterable[str | tuple[str, str]]) -> None:
    """Fail if a rule has an offender: a name, or a name and what to show of it."""
    shown = [item if isinstance(item, str) else item[1] for item in offenders]
    assert not shown, f"{rule}:\n  " + "\n  ".join(shown)
