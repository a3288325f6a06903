"""NVML without a GPU: a library of our own that the real pynvml loads, driven by a file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml_stub.c")


class StubDriver:
    """The driver as the library shows it; `says` changes it for processes that run already."""

    def __init__(self, state: Path, library: Path) -> None:
        self.state = state
        self.library = library

    def says(self, text: str) -> None:
        """Replace all that the driver says: at once, so that no reader sees a half of it."""
        new = self.state.with_suffix(".new")
        new.write_text(f"count=2\nlinks=18\n{text}\n", encoding="utf-8")
        new.replace(self.state)

    def event(self, gpu: int, xid: int) -> None:
        """Add an event for those that wait for one."""
        with self.state.open("a", encoding="utf-8") as file:
            file.write(f"event={gpu} {xid}\n")


def built_library(folder: Path) -> Path:
    """Build the library; the folder that has it."""
    if not shutil.which("gcc"):
        pytest.skip("gcc is not installed: the NVML stub cannot be built")
    words = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*words, "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)], check=True)
    return folder


def stub_driver(folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    """Let the processes that this test starts find the library."""
    monkeypatch.setenv("NVML_STUB", str(folder / "state"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    driver = StubDriver(folder / "state", library)
    driver.says("")
    return driver
