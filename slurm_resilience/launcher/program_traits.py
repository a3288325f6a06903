"""Read in a program's text whether a warm interpreter may start it. Pure.

A warm interpreter has imported torch before the program's first line runs. That is no different
from a fresh process unless the program prepares its imports: by variables that libraries read while
they are loaded, or by a place of its own for modules, before all others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import msgspec

from slurm_resilience.errors import UsageError
from slurm_resilience.mesh.rank_variables import CHECKPOINTLESS, ELASTIC_NODES

_OURS = "slurm_resilience"
_RECOVERS = f"{_OURS}.training"
_WRITERS = ("setdefault", "update", "pop", "clear", "popitem")


class ProgramTraits(msgspec.Struct, frozen=True):
    """The traits of a program, as far as its first file shows them."""

    imports: frozenset[str] = frozenset()
    """Top-level names of the modules that it names."""
    sets: frozenset[str] = frozenset()
    """Environment variables that it changes; `*`: some that its text does not name."""
    leads_path: bool = False
    """It puts directories in front of `sys.path`, or replaces it."""
    uses_library: bool = False
    """It recovers in its own process, where a standby is made for it. What only asks
    `slurm_resilience.resume` whether its attempt is valid does not."""

    @property
    def uses_torch(self) -> bool:
        return "torch" in self.imports


def check_size(traits: ProgramTraits, environment: Mapping[str, str], program: str) -> None:
    """Refuse a program whose job is to grow and shrink, and which cannot.

    Args:
        traits: of the program.
        environment: the launcher's.
        program: its name, for people.

    Raises:
        UsageError: it is a plain program of torch.
    """
    plain = traits.uses_torch and not traits.uses_library
    if plain and environment.get(ELASTIC_NODES) and environment.get(CHECKPOINTLESS) != "1":
        raise UsageError(
            f"{program} cannot change its size while it runs: it does not import "
            "slurm_resilience.training. Leave --auto-resume-max-nodes (or --auto-resume-sizes) "
            f"out, or write export {CHECKPOINTLESS}=1 if another file of it imports that library"
        )


def read_traits(source: bytes | str) -> ProgramTraits:
    """Read a program's text. One that is no Python has no traits."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ProgramTraits()
    modules: set[str] = set()
    changed: set[str] = set()
    leads = False
    for node in ast.walk(tree):
        modules |= set(_imported(node))
        changed |= set(_environment_changes(node))
        leads = leads or _leads_path(node)
    imports = frozenset(name.partition(".")[0] for name in modules)
    recovers = any(_is_library(name) for name in modules)
    return ProgramTraits(imports, frozenset(changed), leads, recovers)


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules, and what may be one, that an import names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_library(name: str) -> bool:
    """`slurm_resilience.training`, all that is in it, and what may stand for it."""
    return name in (_OURS, f"{_OURS}.*") or f"{name}.".startswith(f"{_RECOVERS}.")


def _is(node: ast.AST, module: str, name: str) -> bool:
    """`module.name`, or the bare name after `from module import name`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return (node.value.id, node.attr) == (module, name)
    return isinstance(node, ast.Name) and node.id == name


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "*"


def _environment_changes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        if _is(node.value, "os", "environ"):
            yield _text(node.slice)
    elif isinstance(node, ast.Call):
        called = node.func
        if _is(called, "os", "putenv") or _is(called, "os", "unsetenv"):
            yield _text(node.args[0]) if node.args else "*"
        elif (
            isinstance(called, ast.Attribute)
            and called.attr in _WRITERS
            and _is(called.value, "os", "environ")
        ):
            yield from _named_by(called.attr, node)


def _named_by(method: str, call: ast.Call) -> Iterator[str]:
    """Yield the variables that a call of a method of `os.environ` changes."""
    if method == "update":
        yield from (word.arg or "*" for word in call.keywords)
        for given in call.args:
            keys = given.keys if isinstance(given, ast.Dict) else [given]
            yield from ("*" if key is None else _text(key) for key in keys)
    else:
        yield _text(call.args[0]) if call.args else "*"


def _leads_path(node: ast.AST) -> bool:
    """`sys.path.insert(…)`, `sys.path = …`, `sys.path[:0] = …`."""
    if isinstance(node, ast.Call):
        called = node.func
        return (
            isinstance(called, ast.Attribute)
            and called.attr == "insert"
            and _is(called.value, "sys", "path")
        )
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Store) and _is(node, "sys", "path")
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Store) and _is(node.value, "sys", "path")
    return False
