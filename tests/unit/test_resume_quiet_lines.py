"""`srun --quiet` under a supervisor: srun prints all to it, and the user sees what he asked for."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.resume.srun.command import AttemptCommand
from slurm_resilience.resume.srun.quiet_lines import QuietLines, quietness
from slurm_resilience.resume.srun.srun_options import BUILTIN, split
from slurm_resilience.resume.srun.step import SrunStep

ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
KILLED = "srun: error: n1: task 0: Killed"
PARTS = st.lists(
    st.sampled_from(
        [b"srun: ", b"srun: error: ", b"sru", b"1: srun: ", b"x", b"\r", b"\n", b"\xff"]
    )
)


@pytest.mark.parametrize(
    ("words", "level"), [("-n1", 0), ("-Q", 1), ("-lQQ", 2), ("--quiet -v", 0), ("-n1 x -Q", 0)]
)
def test_how_quiet_it_is(words: str, level: int) -> None:
    command = split(words.split(), BUILTIN)
    assert quietness(command) == level
    argv, _ = AttemptCommand("srun", has_plugin=True).line(command, {}, {})
    # srun refuses both of them together, as ever.
    assert ("--quiet" in argv) == (words == "--quiet -v")
    assert not level or "-Q" not in argv


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (0, f"{ABORTED}\n{KILLED}\nof a task\n"),
        (1, f"{KILLED}\nof a task\n"),
        (2, "of a task\n"),
    ],
)
def test_a_cancel_is_heard_however_quiet_srun_is(
    level: int, shown: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    program = f"printf '{ABORTED}\\n{KILLED}\\nof a task\\n' >&2"
    step = SrunStep(["sh", "-c", program], os.environ, ended.set, quiet=level)
    assert ended.wait(30)
    assert step.aborted
    assert capfd.readouterr().err == shown


@given(parts=PARTS, level=st.sampled_from([1, 2, 3]))
def test_pieces_make_no_difference(parts: list[bytes], level: int) -> None:
    kept = {1: b"error: "}.get(level, b"none")

    def is_shown(line: bytes) -> bool:
        return not line.startswith(b"srun: ") or line.removeprefix(b"srun: ").startswith(kept)

    *whole, last = b"".join(parts).split(b"\n")
    expected = b"".join(line + b"\n" for line in whole if is_shown(line))
    expected += last if is_shown(last) else b""
    quiet = QuietLines(level)
    assert b"".join(map(quiet.take, parts)) + quiet.rest() == expected


def test_a_line_of_a_task_is_not_held_back() -> None:
    """Such as a bar that shows how far it is."""
    quiet = QuietLines(1)
    assert quiet.take(b"10 %\r") == b"10 %\r"
    assert quiet.take(b"sr") == b"sr"
    assert quiet.take(b"\nsr") == b"\n"
    assert quiet.take(b"x") == b"srx"
    assert quiet.take(b"\nsrun: ") == b"\n"
    assert len(quiet.take(bytes(100_000))) == 100_000 + len("srun: ")
    assert quiet.take(b"x") == b"x"
