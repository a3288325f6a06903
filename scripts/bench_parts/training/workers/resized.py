"""A training of numbered microbatches, on which the driver takes ranks away; the same bits always.

With BENCH_CHECKPOINT it is told to live from checkpoints alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import Any

from events import Events

EVENTS = Events(int(os.environ["RANK"]))
EVENTS.say("start")

import torch  # noqa: E402
from job import STEP_SECONDS, build  # noqa: E402

from slurm_resilience.training import Checkpointer, Session, resilient  # noqa: E402

STEPS = int(os.environ["BENCH_STEPS"])
PAUSE_SECONDS = float(os.environ.get("BENCH_STEP_SECONDS", STEP_SECONDS))
SIZE, COUNT, FEATURES = 4, 8, 64
WARM_STEP = 20
"""Here the ranks wait for the driver."""
GO = EVENTS.directory / "go"
PLACE = os.environ.get("BENCH_CHECKPOINT")
keeper = Checkpointer(PLACE, every=1) if PLACE else None


class Waves(torch.utils.data.Dataset[Any]):
    """Sample i: numbers drawn from i, and i."""

    fingerprint = "waves"

    def __len__(self) -> int:
        return STEPS * SIZE * COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(FEATURES, generator=torch.Generator().manual_seed(index)), index


def tell(**values: Any) -> None:
    """Write a line beside the events: the samples of a step, or the end."""
    with (EVENTS.directory / f"told{EVENTS.seat}.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\n")


def note(event: str, details: dict[str, Any]) -> None:
    """Leave a line of what the library tells, so that a change can be taken apart."""
    EVENTS.say(event, world=details.get("world", 0))


@resilient(min_world=2, checkpointer=keeper, on_event=note)
def train(s: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    s.track(model=model, optimizer=optimizer)
    EVENTS.say("form", world=s.world)
    steps = s.microbatches(Waves(), model, size=SIZE, count=COUNT, steps=STEPS, same_bits=True)
    for step in steps:
        if s.step == WARM_STEP and not GO.exists():
            with s.watch.pause():
                while not GO.exists():
                    time.sleep(0.02)
        time.sleep(PAUSE_SECONDS)
        ids: list[int] = []
        for x, index in step:
            # One that is given so that all ranks make as many calls does not count.
            ids += index.tolist() if step._calls[step._at][1] else []
            step.backward(model(x).square().mean())
        tell(step=s.step, generation=s.generation, ids=ids)
        with s.update():
            optimizer.step()
        if keeper is not None:
            keeper.wait(30)
        EVENTS.say("step", s.step, s.world)
        tell(committed=s.step - 1, generation=s.generation)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()


if __name__ == "__main__":
    digest = train(*build())  # a rank that joins builds before the others let it in
    tell(digest=digest)
    EVENTS.say("over")
