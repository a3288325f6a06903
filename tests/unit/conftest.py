"""No test asserts how long something takes: a loaded machine finds no bugs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from wire_peers import munged, sresctld

__all__ = ["munged", "sresctld"]

settings.register_profile("unhurried", settings.default, deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as their words: workers of pytest-xdist have a COLUMNS of 80."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A file whose being there lets the look-ups in `dead_server` go on."""
    return tmp_path / "release"


@pytest.fixture
def dead_server(tmp_path: Path, release: Path) -> Iterator[Path]:
    """A directory whose every look-up waits in the kernel, where SIGKILL does not end it."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs FUSE: only root may mount")
    where = tmp_path / "mounted"
    where.mkdir()
    program = Path(__file__).parents[1] / "cluster" / "hung_fs.py"
    words = [sys.executable, program, where, release]
    server = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"mounted\n"
        yield where / "hung"
    finally:
        release.touch()
        subprocess.run(["umount", "--lazy", where], check=False)
        server.terminate()
        server.communicate()
