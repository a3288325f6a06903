"""scripts/file_order.py: the order in which test files are begun."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_spec = importlib.util.spec_from_file_location("file_order", ROOT / "scripts" / "file_order.py")
assert _spec is not None and _spec.loader is not None
file_order = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(file_order)


def test_the_longest_file_of_a_folder_begins_first() -> None:
    files = ["tests/unit/test_a.py", "tests/unit/test_new.py", "tests/unit/test_b.py"]
    seconds = {"tests/unit/test_a.py": 5.0, "tests/unit/test_b.py": 50.0}
    assert file_order.in_order(files, seconds) == [files[2], files[1], files[0]]


def test_folders_take_turns() -> None:
    trainings = [f"training/{number}" for number in range(3)]
    labs = [f"cluster/{number}" for number in range(6)]
    order = file_order.in_order(trainings + labs, {})
    assert [file.partition("/")[0] for file in order] == 3 * ["cluster", "training", "cluster"]


def test_every_known_file_is_there() -> None:
    known = file_order.known()
    assert known
    assert [file for file in known if not (ROOT / file).is_file()] == []
