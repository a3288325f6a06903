"""A training without torch, for steps that are started again: each rank's part depends on its rank,
and their sum on its order. Rank 0 writes a checkpoint each five steps, and the ``result``.

    summing_task.py STEPS STOP FAULT

Each rank tells what it finds in a line of the file ``tasks``. At step STOP the first attempt waits
for a file ``go``, or it does what FAULT says; ``bug`` and ``eater`` do it again.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from slurm_resilience.resume import attempt

STEPS, STOP, FAULT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
SAYS = {
    "nccl": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2005, "
    "unhandled system error, ncclSystemError: System call (e.g. socket, malloc) failed",
    "memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "bug": "AssertionError: the loss is negative",
}
"""A rank's last words."""
FAILING_RANK = 1
NAMES = ("NODE_LIST", "MASTER_NODE", "MASTER_ADDR", "SLURM_NNODES", "SLURM_JOB_NODELIST")

rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["NNODES"])
number = int(os.environ["SRES_ATTEMPT"])
host = os.uname().nodename
line: dict[str, Any] = {name.lower(): os.environ[name] for name in NAMES}
line |= {"procid": rank, "token": attempt.token(), "host": host, "nnodes": world}
line |= {"node_rank": int(os.environ["NODE_RANK"]), "attempt": number}
line |= {"restarts": int(os.environ["SRES_RESTARTS"])}
with Path("tasks").open("a") as file:
    file.write(json.dumps(line) + "\n")


def put(path: Path, text: str) -> None:
    """Write a file that is complete or absent."""
    own = path.with_name(f"{path.name}.{host}.{os.getpid()}")
    own.write_text(text)
    own.replace(path)


def parts(step: int) -> list[Path]:
    return [Path(f"part.{line['token']}.{step}.{other}") for other in range(world)]


def fail() -> None:
    """Do at step STOP what this attempt is told to do."""
    if FAULT == "eater" and (number == 1 and rank == FAILING_RANK):
        put(Path("eater"), host)
    while FAULT == "eater" and not Path("eater").exists():
        time.sleep(0.01)
    if FAULT == "eater" and Path("eater").read_text() == host:
        os.kill(os.getpid(), signal.SIGKILL)
    if number > 1 and FAULT != "bug":
        return
    if rank == FAILING_RANK and FAULT == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if rank == FAILING_RANK and FAULT in SAYS:
        print(SAYS[FAULT], file=sys.stderr, flush=True)
        sys.exit(3)
    while not Path("go").exists():
        time.sleep(0.01)


saved = Path("checkpoint")
step, state = json.loads(saved.read_text()) if saved.exists() else (0, 0.5)
if step == STOP:
    fail()
while step < STEPS:
    put(parts(step)[rank], repr(math.sin(state * (rank + 1))))
    while not all(path.exists() for path in parts(step)):
        time.sleep(0.01)
    for path in parts(step):
        state += float(path.read_text()) / 3
    step += 1
    if FAULT == "hang":
        attempt.step(step)
    if rank == 0 and step % 5 == 0 and attempt.is_current():
        put(saved, json.dumps((step, state)))
        attempt.report(step)
    if step == STOP:
        # A fault that comes sooner would take the training further back.
        while json.loads(saved.read_text())[0] < STOP:
            time.sleep(0.01)
        fail()
if rank == 0:
    put(Path("result"), repr(state))
