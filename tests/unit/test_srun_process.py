"""The process of an srun that our plugin ties to us."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from slurm_resilience.resume.srun.command import BY_PLUGIN, GUARD
from slurm_resilience.resume.srun.srun_process import NO_INPUT, SrunProcess
from slurm_resilience.resume.srun.step import SrunStep

ENVIRONMENT = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
SHELL = "/bin/sh"


def started(program: str, files: Sequence[int | None] = (None, None, None)) -> SrunProcess:
    return SrunProcess([SHELL, "-c", program], ENVIRONMENT, files)


def printed(program: str, stdin: int | None = NO_INPUT) -> tuple[int, str]:
    source, sink = os.pipe()
    process = started(program, (stdin, sink, sink))
    os.close(sink)
    with os.fdopen(source) as output:
        text = output.read()
    return process.wait(), text


@pytest.mark.parametrize(("program", "code"), [("true", 0), ("exit 7", 7), ("kill -9 $$", -9)])
def test_its_end_is_told_as_python_tells_it(program: str, code: int) -> None:
    process = started(program)
    assert process.wait() == process.returncode == code


def test_it_gets_its_files_and_its_variables_alone() -> None:
    assert NO_INPUT == subprocess.DEVNULL
    assert printed('cat; echo "$LC_ALL" >&2') == (0, "C\n")
    first, *_ = Path(__file__).read_text().splitlines(keepends=True)
    with Path(__file__).open() as stdin:
        assert printed("head -n1", stdin.fileno()) == (0, first)


def test_it_blocks_no_signal_that_we_block_and_ignores_none_that_python_does() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        _, text = printed("grep -E '^Sig(Blk|Ign)' /proc/self/status")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    blocked, ignored = (int(line.split()[1], 16) for line in text.splitlines())
    # Our caller's own choice stays: nohup ignores SIGHUP.
    by_python = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    assert (blocked, ignored & by_python) == (0, 0)


def test_it_is_signalled_while_it_lives_and_never_after() -> None:
    process = started("exec sleep 60")
    waiting = threading.Thread(target=process.wait, daemon=True)
    waiting.start()
    process.send_signal(signal.SIGTERM)
    waiting.join(30)
    assert process.returncode == -signal.SIGTERM
    # Its number is free: it may be another's.
    process.kill()


def test_what_cannot_be_started_raises() -> None:
    with pytest.raises(FileNotFoundError):
        SrunProcess(["/nowhere/srun"], ENVIRONMENT, (None, None, None))


def test_an_srun_with_the_plugin_is_told_whose_child_it_is(tmp_path: Path) -> None:
    told, ended = tmp_path / "told", threading.Event()
    words = [SHELL, "-c", f"echo ${GUARD} $PPID >{told}"]
    SrunStep(words, ENVIRONMENT | {GUARD: BY_PLUGIN}, ended.set)
    assert ended.wait(30)
    guard, parent = told.read_text().split()
    assert guard == parent == str(os.getpid())
