"""A directory of checkpoints that hangs while a rank fails: no other one loses its state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from naive import Program

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")

PARTS = """
import threading
from slurm_resilience.training import Checkpointer

readable = Checkpointer.readable

def hangs(keeper):
    if failed or made:
        threading.Event().wait()
    return readable(keeper)

Checkpointer.readable = hangs
failed, made = [], []
"""
BODY = """
say("process", os.getpid())
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = s.ddp(model)
for x, y in s.loader(DATA, global_batch=8, steps=12, epochs=None):
    nn.functional.mse_loss(net(x), y).backward()
    if s.step == 5 and s.rank and not failed:
        failed.append(1)
        raise ValueError("once")
    with s.update():
        opt.step()
        opt.zero_grad()
    made.append(s.step)
"""


def test_ranks_keep_their_state_while_the_directory_hangs(run: Program, tmp_path: Path) -> None:
    options = f"checkpointer=Checkpointer({str(tmp_path / 'checkpoints')!r}, every=2)"
    done = run(BODY, parts=PARTS, options=options)
    assert done.returncode == 0, done.stderr[-4000:]
    processes = re.findall(r"process (\d+)", done.stdout)
    assert len(processes) == 4 and len(set(processes)) == 2, done.stderr[-4000:]
    assert done.stderr.count("their directory has not answered") == 2, done.stderr[-4000:]
    assert done.stdout.count("ends at 12") == 2
