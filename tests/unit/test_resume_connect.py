"""A first step does not wait for the link to sresctld, nor for a thread that cannot be started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_slurm import FakeSlurm
from supervised_srun import supervisor_of

from slurm_resilience.resume.allocation import companion
from slurm_resilience.resume.srun import signals


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, Callable[[], None], list[str]], int]:
    """Run a supervisor whose step ends with code 3 when it has been waited for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signals, "receive", lambda _: None)

    def supervise(restarts: int, connect: Callable[[], None], order: list[str]) -> int:
        slurm = FakeSlurm(2)
        slurm.submit(2)
        for _ in range(restarts):
            slurm.requeue(1)
            slurm.pass_time(300.0)
            slurm.start_now(1)
            slurm.pass_time(10.0)
        supervisor = supervisor_of(slurm)

        def start(_: int, *, again: bool) -> tuple[None, SimpleNamespace]:
            order.append("started")
            return None, SimpleNamespace(running=True, code=3, wait=lambda _: True)

        def watch(*_: object) -> None:
            order.append("watched")
            raise ZeroDivisionError("the way out of the loop")

        monkeypatch.setattr(supervisor, "_start", start)
        monkeypatch.setattr(supervisor, "_watch_over", watch)
        monkeypatch.setattr(companion, "end_earlier", lambda _: order.append("cleared"))
        return supervisor.run(connect)

    return supervise


@pytest.mark.parametrize(
    ("restarts", "expected"),
    [
        (0, ["started", "connected", "watched"]),
        # sresctld is told how the job came back: even where no step is started.
        (1, ["connected", "cleared", "started", "watched"]),
    ],
)
def test_the_link_connects_once_and_a_first_step_does_not_wait_for_it(
    restarts: int, expected: list[str], run: Callable[..., int]
) -> None:
    order: list[str] = []
    assert run(restarts, lambda: order.append("connected"), order) == 3
    assert order == expected


def test_a_thread_that_cannot_be_started_ends_no_step(
    run: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    def connect() -> None:
        raise RuntimeError("can't start new thread")

    order: list[str] = []
    assert run(0, connect, order) == 3
    assert order == ["started", "watched"]
    assert "sresctld cannot be asked (can't start new thread)" in capfd.readouterr().err
