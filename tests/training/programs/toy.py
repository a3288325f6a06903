"""A small training under the library, for the fault tests: DDP, FSDP2 or HSDP.

Every rank appends JSON lines ``[monotonic seconds, event, …]`` to ``LOG/SEAT.PID.jsonl``.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from slurm_resilience.training import Checkpointer, Session, resilient

faulthandler.register(signal.SIGUSR1)
parser = argparse.ArgumentParser()
parser.add_argument("--log", type=Path, required=True)
parser.add_argument("--kind", choices=["ddp", "fsdp", "hsdp"], default="ddp")
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--min-world", type=int, default=0)
parser.add_argument("--sleep", type=float, default=0.005)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--checkpoints", type=Path)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--checksum", action="store_true")
parser.add_argument("--partner-every", type=int, default=0)
parser.add_argument("--digest-every", type=int)
parser.add_argument("--abort-timeout", type=float, default=2.0)
parser.add_argument("--silence", type=float, default=2.0)
parser.add_argument("--max-faults", type=int, default=3)
parser.add_argument("--poke", default="", help="STEP:SEAT of a silent bit flip")
parser.add_argument("--behind", default="", help="STEP:SEAT,… that are left a step behind")
parser.add_argument("--fail", default="", help="SEAT,… that raise after backward in every step")
parser.add_argument("--late", action="store_true", help="replaced only after a step without it")
parser.add_argument("--usage", action="store_true")
parser.add_argument("--batch", type=int, default=24)
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--backend", default="")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument(
    "--forbid-sync", action="store_true", help="an update that waits for the GPU fails"
)
parser.add_argument("--out-of-range", default="", help="STEP:SEAT of an index that faults the GPU")
words = parser.parse_args()

SEAT = int(os.environ["SRES_SEAT"])
SEATS = int(os.environ["SRES_SEATS"])
REPLICA = {"ddp": 1, "fsdp": SEATS, "hsdp": 2}[words.kind]
torch.set_num_threads(1)
logging.basicConfig(level="INFO", format=f"s{SEAT} %(name)s %(message)s")
_log = (words.log / f"{SEAT}.{os.getpid()}.jsonl").open("a", buffering=1)


def usage() -> list[int]:
    """Threads, file descriptors, resident kilobytes."""
    status = Path("/proc/self/status").read_text()
    threads, memory = (
        int(re.search(rf"^{name}:\s*(\d+)", status, re.MULTILINE)[1])
        for name in ("Threads", "VmRSS")
    )
    return [threads, len(list(Path("/proc/self/fd").iterdir())), memory]


def tell(event: str, *details: Any) -> None:
    _log.write(json.dumps([time.monotonic(), event, *details]) + "\n")


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __len__(self) -> int:
        return words.steps * words.batch

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().view(1).sin(), index


def model() -> nn.Module:
    torch.manual_seed(words.seed + SEAT)  # deliberately not alike: the first replica's go round
    dropped = [nn.Dropout(words.dropout)] if words.dropout else []
    layers = [nn.Linear(8, 32), nn.Tanh(), *dropped, nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
    return nn.Sequential(*layers).to(words.device)


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    return net, torch.optim.AdamW(net.parameters(), 1e-3)


def sharded(s: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    mesh = s.mesh()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), 1e-3)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of it that this rank holds."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


asked = threading.Event()
# A fault from outside, at a moment of its own: the next batch raises.
signal.signal(signal.SIGUSR2, lambda *_: asked.set())


class Asked(RuntimeError):
    """SIGUSR2 was sent to this process."""


class Behind(RuntimeError):
    """This rank has its gradients, and does not use them."""


def behind() -> tuple[int, set[int]]:
    """Read ``--behind``: the step, and the seats."""
    when, _, named = words.behind.partition(":")
    return int(when), {int(seat) for seat in named.split(",")}


def until_others_committed(step: int, seats: set[int]) -> None:
    """Earlier, the end of the world could find one of them still waiting for its gradients."""
    committed = re.compile(rf'^\[[0-9.]+, "step", {step + 1}, ', re.MULTILINE)
    deadline = time.monotonic() + 30
    for seat in set(range(SEATS)) - seats:
        while not any(
            committed.search(path.read_text()) for path in words.log.glob(f"{seat}.*.jsonl")
        ):
            if time.monotonic() > deadline:
                sys.exit(f"seat {seat} does not commit step {step}")
            time.sleep(0.01)


def fall_behind(s: Session) -> None:
    """A model in one part: the named ranks raise before their update when the others are through
    it. In several parts: they are cut off at the gate when the others are through it."""
    step, seats = behind()
    if SEAT not in seats or s.step != step:
        return
    if REPLICA == 1:
        until_others_committed(step, seats)
        tell("cut off", step)
        raise Behind(f"at step {step}")
    group = s._participant.group
    together = group.together

    def cut_off() -> None:
        try:
            together()
        except Exception:  # the others were through it, and ended the world, before this rank was
            tell("cut off", step)
            raise
        until_others_committed(step, seats)
        tell("cut off", step)
        raise RuntimeError("connection closed by peer")

    group.together = cut_off  # type: ignore[method-assign]


def end_the_world(s: Session) -> None:
    """The first of those that are through, when the others are at the gate."""
    step, seats = behind()
    if REPLICA > 1 and s.step == step + 1 and min(set(range(SEATS)) - seats) == SEAT:
        raise Behind(f"after step {step}")


class AfterBackward(RuntimeError):
    """Raised while the other ranks may still be in the same step's collectives."""


failing = SEAT in {int(seat) for seat in filter(None, words.fail.split(","))}
failed: set[int] = set()
"""Steps in which this process has failed."""


def fail_after_backward(step: int) -> None:
    """Raise in this step, once."""
    if failing and step not in failed:
        failed.add(step)
        tell("fails", step)
        raise AfterBackward(f"at step {step}")


def out_of_range(s: Session) -> None:
    """Have the GPU fail for good, some time later: this process cannot use it any more."""
    first = os.environ["SRES_INCARNATION"] == "0"
    if first and words.out_of_range == f"{s.step}:{SEAT}":
        tell("out of range", s.step)
        table = torch.zeros(3, 2, device=words.device)
        nn.functional.embedding(torch.tensor([10**9], device=words.device), table)


def forbid_waiting(s: Session, mode: str) -> None:
    """Refuse what waits for the GPU: ``error``; let it wait: ``default``. The first updates of a
    world, in which changes outside of them are looked for, do wait."""
    if words.forbid_sync and s.step > 4:
        torch.cuda.set_sync_debug_mode(mode)


keeper = Checkpointer(words.checkpoints, every=words.every) if words.checkpoints else None


def event(name: str, details: dict[str, Any]) -> None:
    tell(name, details)


@resilient(
    min_world=words.min_world or None,
    replica_size=REPLICA,
    checkpointer=keeper,
    checksum=words.checksum,
    partner_every=words.partner_every,
    digest_every=words.digest_every,
    abort_timeout=words.abort_timeout,
    silence=words.silence,
    max_faults=words.max_faults,
    backend=words.backend,
    on_event=event,
)
def train(s: Session) -> tuple[nn.Module, int]:
    net, opt = s.once(plain) if words.kind == "ddp" else sharded(s)
    s.track(net=net, opt=opt)
    tell("healed", s.step, s.healing)
    # Unused parameters are looked for, so that DDP keeps its buckets and sums in the same order.
    wrapped = s.ddp(net, find_unused_parameters=True) if words.kind == "ddp" else net
    for x, y, index in s.loader(Samples(), global_batch=words.batch, seed=words.seed):
        # Told before it can count: if this world commits the step, every rank's share is in it.
        tell("batch", s.step, s.generation, index.tolist())
        if asked.is_set():
            asked.clear()
            raise Asked(f"at step {s.step}")
        out_of_range(s)
        loss = nn.functional.mse_loss(wrapped(x.to(words.device)), y.to(words.device))
        loss.backward()
        fail_after_backward(s.step)
        time.sleep(words.sleep)
        if words.behind and s.attempt == 1:
            fall_behind(s)
        forbid_waiting(s, "error")
        with s.update():
            opt.step()
            opt.zero_grad()
        forbid_waiting(s, "default")
        if keeper is not None:
            keeper.wait(30)  # what is on the disk must not depend on how fast this machine is
        if words.poke == f"{s.step}:{SEAT}" and s.attempt == 1:
            with torch.no_grad():
                local(next(net.parameters())).view(-1)[0] += 1e-3
        tell("step", s.step, s.generation, s.world, loss.item(), usage() if words.usage else [])
        if words.poke and s.step == int(words.poke.partition(":")[0]) + 1 and s.attempt == 1:
            # Now the poked value counts as a step's. A fault that found the poked rank without
            # this step would heal it from its peers.
            until_others_committed(s.step - 1, {SEAT})
        if words.behind and s.attempt == 1:
            end_the_world(s)
    return net, s.rank % REPLICA


def come_late() -> None:
    """Wait until the others have made a step in a smaller world."""
    stepped = re.compile(r'^\[[0-9.]+, "step", [0-9]+, [0-9]+, ([0-9]+),', re.MULTILINE)
    deadline = time.monotonic() + 30
    while not any(
        int(world) < SEATS
        for path in words.log.glob("*.jsonl")
        for world in stepped.findall(path.read_text())
    ):
        if time.monotonic() > deadline:
            sys.exit("no rank steps in a smaller world")
        time.sleep(0.05)


tell("main")
if words.late and os.environ["SRES_INCARNATION"] != "0":
    come_late()
trained, part = train()
parts = [local(p).detach().cpu().numpy().tobytes() for p in trained.parameters()]
digest = hashlib.sha256(b"".join(parts)).hexdigest()
tell("end", digest, part)
