"""A training without torch, for the tests of a living step: it meets the others through the real
mesh, and steps with them.

Each task writes ``log.SEAT.INCARNATION``: one line of JSON a step. The training is done when the
file ``end`` is there; a rank ends with the code in ``die.SEAT`` when there is such a file. With a
file ``after``, rank 0 goes on after the training for so many seconds, and ends with the code in it.
On a node that is lent, a rank leaves at SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path

from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import GenerationEnd, Peer, PeerStatus, View
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.mesh.rendezvous import rendezvous_at
from slurm_resilience.resume import attempt
from slurm_resilience.training.rank_environment import read_environment

PACE = 0.05
MEET_SECONDS = 60
LOOK_SECONDS = 3
"""In so long the mesh looks whether the training has ended."""

here = read_environment(os.environ)
cut = threading.Event()
meet = rendezvous_at(here.meet, here.secret)
log = os.open(f"log.{here.seat}.{here.incarnation}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def on_end(end: GenerationEnd) -> None:
    cut.set()


mesh = Mesh(
    meet,
    Peer(
        id=f"{here.seat}.{here.incarnation}.{uuid.uuid4().hex[:8]}",
        seat=here.seat,
        incarnation=here.incarnation,
        node=here.node,
        host=here.address,
        pid=os.getpid(),
        seats=here.seats,
    ),
    WorldRules(here.seats, here.min_world or 2, core=here.core, sizes=here.sizes),
    on_end=on_end,
)
asked = threading.Event()
if here.lent:
    signal.signal(signal.SIGTERM, lambda *_: asked.set())


def block(view: View, step: int) -> int:
    """Steps until this world ends; the last step."""
    mesh.say(PeerStatus(phase="running", generation=view.generation, step=step))
    mesh.worked(view)
    while not cut.is_set():
        if Path("end").exists():
            mesh.say(PeerStatus(phase="done", generation=view.generation, step=step))
            return step
        if Path(f"die.{here.seat}").exists():
            code = int(Path(f"die.{here.seat}").read_text())
            Path(f"die.{here.seat}").unlink()
            os._exit(code)
        if asked.is_set():
            mesh.over(GenerationEnd(view.generation, "a rank leaves", kind="join"))
            mesh.say(PeerStatus(phase="ready", generation=view.generation, step=step))
            mesh.close("it was asked to")
            sys.exit(0)
        if view.lets_in(mesh.me.id) and mesh.newcomers():
            mesh.over(GenerationEnd(view.generation, "a rank joins", kind="join"))
            break
        step += 1
        mesh.say(PeerStatus(phase="running", generation=view.generation, step=step))
        line = {
            "at": time.time(),
            "step": step,
            "world": view.size,
            "parent": os.getppid(),
            "node": os.environ["SLURMD_NODENAME"],
            "rank": os.environ["NODE_RANK"],
            "nodes": os.environ["NODE_LIST"],
            "token": attempt.token(),
            "current": attempt.is_current(),
        }
        os.write(log, (json.dumps(line) + "\n").encode())
        cut.wait(PACE)
    mesh.say(PeerStatus(phase="ready", generation=view.generation, step=step))
    return step


def next_world() -> View | None:
    """Wait for a world, a minute at most; a standby on a lent node may be asked to leave."""
    for _ in range(MEET_SECONDS // LOOK_SECONDS):
        try:
            return mesh.meet(LOOK_SECONDS)
        except TimeoutError:
            if asked.is_set():
                mesh.close("it was asked to")
                sys.exit(0)
    raise TimeoutError(mesh.waits_for)


print(f"seat {here.seat} is here", flush=True)
mesh.start()
last = 0
mesh.say(PeerStatus())
while (view := next_world()) is not None:
    cut.clear()
    last = block(view, max([last, *(member.status.step for member in view.members)]))
mesh.close()
if here.seat == 0:
    meet.outcome(int(sys.argv[1]) if len(sys.argv) > 1 else 0, last, "as asked")
    if Path("after").exists():
        seconds, code = Path("after").read_text().split()
        time.sleep(float(seconds))
        Path("after.done").touch()
        sys.exit(int(code))
