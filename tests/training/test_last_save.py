"""SIGTERM to all ranks of a training: it ends with a checkpoint of the step that was under way."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from naive import Program

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")

BODY = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = s.ddp(model)
for x, y in s.loader(DATA, global_batch=8, steps=12, epochs=None):
    if s.step == {asked_at} and os.environ["SRES_INCARNATION"] == "0":
        {ask}
    nn.functional.mse_loss(net(x), y).backward()
    with s.update():
        opt.step()
        opt.zero_grad()
    say("made", s.step)
say("weights", model.weight.flatten().tolist())
"""
PARTS = """
import signal
import time
from slurm_resilience.training import Checkpointer

def ask(pid):
    for _ in range(2):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
"""
HEARS_LATE = """
from slurm_resilience.mesh.mesh import Mesh

heard, peek = {}, Mesh.peek

def late(mesh, generation, key):
    value, now = peek(mesh, generation, key), time.monotonic()
    if value is None or now - heard.setdefault((generation, key), now) < 0.3:
        return None
    return value

if os.environ["RANK"] == "1":
    Mesh.peek = late
"""
DIES_WRITING = """
from slurm_resilience.training.checkpoint import writing

sums = writing._sums

def dies(directory, team):
    if team.world > 1 and team.rank == 1:
        os._exit(5)
    return sums(directory, team)

writing._sums = dies
"""
FULL_DISK = """
import errno
from slurm_resilience.training.checkpoint import writing

def full(directory, team):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))

writing._sums = full
"""


def test_all_ranks_are_asked_to_end(run: Program, tmp_path: Path) -> None:
    """At a time limit, say. The next start lost all steps since the last checkpoint."""
    place = tmp_path / "checkpoints"
    how = {"parts": PARTS, "options": f"checkpointer=Checkpointer({str(place)!r}, every=100)"}
    # The launcher passes it on to both.
    ask = "s.rank or ask(os.getppid())"
    done = run(BODY.format(asked_at=5, ask=ask), **how)
    assert done.returncode == 128 + signal.SIGTERM, (done.returncode, done.stderr[-4000:])
    assert "ends at" not in done.stdout
    last = max(map(int, re.findall(r"made (\d+)", done.stdout)))
    assert [path.name for path in place.glob("*step*")] == [f"step-{last:06}"], done.stderr[-4000:]
    assert f"the training ends after step {last}" in done.stderr, done.stderr[-4000:]
    assert done.stderr.count("all ranks were asked to end") == 1, done.stderr[-4000:]
    on = run(BODY.format(asked_at=-1, ask="pass"), **how)
    assert on.returncode == 0, on.stderr[-4000:]
    assert min(map(int, re.findall(r"made (\d+)", on.stdout))) == last + 1, on.stdout
    whole = run(BODY.format(asked_at=-1, ask="pass"))
    weights = [set(re.findall("weights .*", one.stdout)) for one in (on, whole)]
    assert len(weights[0]) == 1 and weights[0] == weights[1]


def test_one_rank_alone_is_ended(run: Program, tmp_path: Path) -> None:
    """By something on its node that wants memory: another one takes its place."""
    place = tmp_path / "checkpoints"
    options = f"checkpointer=Checkpointer({str(place)!r}, every=100)"
    # It goes on for the seconds in which the others may be asked, too.
    ask = "s.rank and ask(os.getpid())"
    body = BODY.format(asked_at=5, ask=ask).replace("    say(", "    time.sleep(0.7)\n    say(")
    done = run(body, parts=PARTS, options=options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "SIGTERM came to this rank, and not to seat 0" in done.stderr, done.stderr[-4000:]
    assert done.stdout.count("ends at 12") == 2, done.stdout


def test_a_handler_of_the_programs_own_stays(run: Program, tmp_path: Path) -> None:
    parts = PARTS + "signal.signal(signal.SIGTERM, lambda *_: os._exit(3))\n"
    options = f"checkpointer=Checkpointer({str(tmp_path / 'c')!r}, every=100), max_faults=1"
    done = run(BODY.format(asked_at=5, ask="ask(os.getpid())"), parts=parts, options=options)
    assert "asked to end" not in done.stderr and "SIGTERM came" not in done.stderr, done.stderr


def test_a_rank_hears_late_of_the_request(run: Program, tmp_path: Path) -> None:
    """It had begun another step, and waited in it for ranks that waited for its checkpoint."""
    parts = PARTS + HEARS_LATE
    place = tmp_path / "checkpoints"
    options = f"checkpointer=Checkpointer({str(place)!r}, every=100)"
    body = BODY.format(asked_at=5, ask="s.rank or ask(os.getppid())").replace("12", "400")
    done = run(body, parts=parts, options=options)
    assert done.returncode == 128 + signal.SIGTERM, (done.returncode, done.stderr[-4000:])
    last = max(map(int, re.findall(r"made (\d+)", done.stdout)))
    assert [path.name for path in place.glob("*step*")] == [f"step-{last:06}"], done.stderr[-4000:]


def test_a_request_between_the_batches_of_one_step(run: Program, tmp_path: Path) -> None:
    """The step is finished, by all ranks, wherever in it they were asked."""
    place = tmp_path / "checkpoints"
    options = f"checkpointer=Checkpointer({str(place)!r}, every=100)"
    body = """
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    batches = s.loader(DATA, global_batch=8, steps=60, epochs=None)
    for number, (x, y) in enumerate(batches, 1):
        if number == 10:
            s.rank or ask(os.getppid())
        with contextlib.nullcontext() if number % 4 == 0 else net.no_sync():
            nn.functional.mse_loss(net(x), y).backward()
        # Ranks meet at each fourth batch alone, and are in different ones when they hear of it.
        time.sleep(0.7 if s.rank == 0 else 0.02)
        if number % 4 == 0:
            with s.update():
                opt.step()
                opt.zero_grad()
            say("made", s.step)
    """
    done = run(body, parts=PARTS + "import contextlib\n", options=options)
    assert done.returncode == 128 + signal.SIGTERM, (done.returncode, done.stderr[-4000:])
    last = max(map(int, re.findall(r"made (\d+)", done.stdout)))
    assert [path.name for path in place.glob("*step*")] == [f"step-{last:06}"], done.stderr[-4000:]
    assert last >= 3, done.stdout


def test_a_rank_dies_while_the_last_checkpoint_is_written(run: Program, tmp_path: Path) -> None:
    """The others, if they may go on, write it anew."""
    place = tmp_path / "checkpoints"
    options = f"checkpointer=Checkpointer({str(place)!r}, every=100), min_world=1"
    parts = PARTS + DIES_WRITING
    body = BODY.format(asked_at=5, ask="s.rank or ask(os.getppid())").replace("12", "400")
    done = run(body, parts=parts, options=options)
    assert done.returncode, done.stderr[-4000:]
    last = max(map(int, re.findall(r"made (\d+)", done.stdout)))
    assert [path.name for path in place.glob("step*")] == [f"step-{last:06}"], done.stderr[-4000:]
    assert done.stderr.count(f"the training ends after step {last}") == 1, done.stderr[-4000:]


@pytest.mark.parametrize("moment", ["step", "checkpoint"])
def test_a_rank_is_gone_without_which_no_world_may_be(
    run: Program, tmp_path: Path, moment: str
) -> None:
    """One of the others, which have the whole model each, saves it alone."""
    place = tmp_path / "checkpoints"
    options = f"checkpointer=Checkpointer({str(place)!r}, every=100)"
    ask = "s.rank or ask(os.getppid())"
    if moment == "step":
        ask = "s.rank and (ask(os.getppid()), os._exit(5))"
    parts = PARTS + (DIES_WRITING if moment == "checkpoint" else "")
    done = run(BODY.format(asked_at=5, ask=ask).replace("12", "400"), parts=parts, options=options)
    assert done.returncode, done.stderr[-4000:]
    (last,) = re.findall(
        r"the training ends after step (\d+).*with ranks missing$", done.stderr, re.M
    )
    assert int(last) >= max(map(int, re.findall(r"made (\d+)", done.stdout)))
    assert [path.name for path in place.glob("step*")] == [f"step-{int(last):06}"]
    body = BODY.format(asked_at=-1, ask="pass").replace("12", "30")
    on = run(body, parts=PARTS, options=options)
    assert on.returncode == 0, on.stderr[-4000:]
    assert min(map(int, re.findall(r"made (\d+)", on.stdout))) == int(last) + 1, on.stdout


def test_the_disk_of_the_last_checkpoint_is_full(run: Program, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    options = f"checkpointer=Checkpointer({str(place)!r}, every=100)"
    body = BODY.format(asked_at=5, ask="s.rank or ask(os.getppid())")
    done = run(body, parts=PARTS + FULL_DISK, options=options)
    assert done.returncode == 128 + signal.SIGTERM, (done.returncode, done.stderr[-4000:])
    said = "as it was asked to, without a checkpoint of it"
    assert done.stderr.count(said) == 1, done.stderr[-4000:]
    assert not [*place.glob("step*")]
