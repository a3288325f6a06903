"""scripts/skips.py: a failure is named as it happens, whatever becomes of the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
TESTS = """
import pytest

def test_first():
    assert 1 + 1 == 3, "sums are wrong"

@pytest.fixture
def broken():
    raise OSError("no such machine")

def test_second(broken):
    pass

def test_third():
    import os
    os.{end}
"""


def _pytest(folder: Path, *words: str) -> str:
    argv = [sys.executable, "-m", "pytest", "-p", "skips", "-p", "no:cacheprovider", *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env = env | {"PYTHONPATH": str(SCRIPTS), "CI": ""}
    done = subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("words", [(), ("-q",), ("-n", "1")], ids=["plain", "quiet", "xdist"])
def test_each_failure_is_named_before_the_run_ends(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TESTS.format(end="getpid()"))
    said, _, _ = _pytest(tmp_path, *words).partition("= FAILURES")
    lines = [line for line in said.splitlines() if line.startswith("FAILED")]
    assert lines[0].startswith("FAILED: test_it.py::test_first: AssertionError: sums are wrong")
    assert lines[1] == "FAILED in its setup: test_it.py::test_second: OSError: no such machine"
    assert len(lines) == 2


@pytest.mark.parametrize("words", [(), ("-n", "1")], ids=["plain", "xdist"])
def test_a_first_try_that_failed_is_told_in_full(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import os\n"
        "def test_one():\n"
        "    if not os.path.exists('again'):\n"
        "        open('again', 'w').close()\n"
        "        assert False, 'the first line\\nand the log below it'\n"
    )
    said = _pytest(tmp_path, "--reruns", "1", *words)
    assert "TRIED AGAIN: test_it.py::test_one: AssertionError: the first line" in said
    _, _, story = said.partition("first try: test_it.py::test_one")
    assert "and the log below it" in story
    assert "1 passed, 1 rerun" in story


def test_what_failed_is_known_even_of_a_run_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TESTS.format(end="_exit(1)"))
    said = _pytest(tmp_path)
    assert "FAILED: test_it.py::test_first" in said
    assert "= FAILURES" not in said


@pytest.mark.parametrize("broken", ["ast", "ast and traceback"])
def test_a_source_that_python_cannot_parse_does_not_end_the_run(
    tmp_path: Path, broken: str
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(TESTS.format(end="getpid()"))
    (tmp_path / "conftest.py").write_text(
        """
import traceback
import _pytest._code.source, _pytest._code.code

def lost_count(*words, **more):
    raise SystemError("AST constructor recursion depth mismatch (before=63, after=65)")

_pytest._code.source.getstatementrange_ast = lost_count
_pytest._code.code.getstatementrange_ast = lost_count
"""
        + ("traceback.format_exception = lost_count\n" if "traceback" in broken else "")
    )
    said = _pytest(tmp_path, "-p", "no:hypothesispytest")
    assert "INTERNALERROR" not in said
    assert "sums are wrong" in said
    assert "1 failed, 1 passed, 1 error" in said
