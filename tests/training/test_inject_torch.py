"""Faults that need torch, a signal or another thread."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.training import inject  # noqa: E402

pytestmark = [pytest.mark.training, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    inject.clear()
    yield
    inject.clear()


def test_a_gpus_fault_looks_like_one() -> None:
    inject.at("cuda")
    with pytest.raises(RuntimeError, match="CUDA error") as caught:
        inject.point("before-backward")
    assert isinstance(caught.value, getattr(torch, "AcceleratorError", RuntimeError))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_stop() -> None:
    child = os.fork()
    if child == 0:
        inject.at("stop")
        inject.point("before-backward")
        os._exit(4)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert state(child) == "T"
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 4


class Nudge(BaseException):
    pass


@pytest.mark.parametrize("kind", ["hang", "hang-c"])
def test_a_hang_hears_no_exception_but_a_signal(kind: str) -> None:
    here = threading.get_ident()
    seen: list[str] = []

    def hangs() -> bool:
        frame = sys._current_frames()[here]
        while frame is not None and frame.f_code.co_name != "_happen":
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None

    def disturb() -> None:
        end, pause = time.monotonic() + 30, threading.Event()
        while not hangs() and time.monotonic() < end:
            pause.wait(0.01)
        for _ in range(3):
            pause.wait(0.05)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(here), ctypes.py_object(Nudge)
            )
        pause.wait(0.05)
        seen.append("nudged")
        signal.pthread_kill(here, signal.SIGUSR1)

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGUSR1, handler)
    inject.at(kind)  # type: ignore[arg-type]
    other = threading.Thread(target=disturb)
    try:
        with pytest.raises((KeyboardInterrupt, Nudge)):
            other.start()
            inject.point("before-backward")
        assert seen == ["nudged"]
    finally:
        other.join(30)
        signal.signal(signal.SIGUSR1, old)
