"""Exit codes of children reach every program, also where its caller ignores SIGCHLD."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from types import ModuleType

import pytest

from slurm_resilience.agent import main as sresd
from slurm_resilience.child_exits import keep_exit_codes
from slurm_resilience.cli import main as sres
from slurm_resilience.controller import main as sresctld
from slurm_resilience.lifecycle import main as lifecycle


class Kept(Exception):
    """A program has taken SIGCHLD back."""


@pytest.fixture
def ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("ignored")
def test_a_childs_exit_code_is_kept() -> None:
    assert subprocess.run(["false"], check=False).returncode == 0, "so it is taken for success"
    keep_exit_codes()
    assert subprocess.run(["false"], check=False).returncode == 1


@pytest.mark.parametrize("program", [sres, sresctld, sresd, lifecycle], ids=lambda m: m.__name__)
def test_every_program_takes_the_signal_back_first(
    monkeypatch: pytest.MonkeyPatch, program: ModuleType
) -> None:
    def keep() -> None:
        raise Kept

    monkeypatch.setattr(program, "keep_exit_codes", keep)
    with pytest.raises(Kept):
        program.main()
