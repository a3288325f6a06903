#!/usr/bin/env python3
"""Draw the loss curves of trainings beside each other, above the number of ranks in each step.

    .venv/bin/pip install -e '.[plots]'
    SRES_TEST_ELASTIC=1 SRES_TEST_CURVES=curves.svg scripts/test tests/cluster/test_elastic_job.py
    .venv/bin/python scripts/elastic_curves.py curves.svg fixed=LOGS elastic=LOGS

LOGS is a directory with the ranks' lines (tests/training/programs/elastic.py).
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Curve(NamedTuple):
    """One training, step by step."""

    losses: tuple[float, ...]
    """The mean over the microbatches of each step."""
    worlds: tuple[int, ...]
    """Ranks that did it."""


def curve(events: Iterable[Sequence[Any]]) -> Curve:
    """Return a training's curve, of the worlds that committed each step. Pure.

    Args:
        events: of all ranks: ``[time, name, *details]``.
    """
    done: dict[int, tuple[int, int]] = {}
    losses: dict[tuple[int, int], dict[int, float]] = {}
    for _, name, *details in events:
        if name == "step":
            step, generation, world = details
            done[step - 1] = max(done.get(step - 1, (0, 0)), (generation, world))
        elif name == "loss":
            step, generation, first_sample, loss = details
            losses.setdefault((step, generation), {})[first_sample] = loss
    steps = sorted(done)
    return Curve(
        # In the order of samples: the same sum in any world.
        tuple(
            statistics.fmean(of for _, of in sorted(losses[step, done[step][0]].items()))
            for step in steps
        ),
        tuple(done[step][1] for step in steps),
    )


def read(logs: Path) -> Curve:
    """Read a training's lines; the last one of a process that died may be cut off."""
    lines = [line for file in logs.glob("*.jsonl") for line in file.read_text().splitlines()]
    return curve(json.loads(line) for line in lines if line.endswith("]"))


def draw(curves: Mapping[str, Curve], file: Path) -> None:
    """Write the picture; its suffix says of which kind.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plots = importlib.import_module("matplotlib.pyplot")
    figure, (above, below) = plots.subplots(
        2, sharex=True, figsize=(8, 5), height_ratios=(3, 1), layout="constrained"
    )
    for number, (name, found) in enumerate(curves.items()):
        steps = range(1, len(found.losses) + 1)
        # A wide pale line below a thin one: both show where they are the same.
        style = {"linewidth": 6, "alpha": 0.35} if number == 0 else {"linewidth": 1.5}
        above.plot(steps, found.losses, label=name, **style)
        below.step(steps, found.worlds, where="mid", label=name, **style)
    above.set_ylabel("loss")
    above.legend()
    below.set_ylabel("ranks")
    below.set_ylim(bottom=0)
    below.set_xlabel("step")
    figure.savefig(file)
    plots.close(figure)


def main(words: Sequence[str]) -> int:
    """Draw what the command line names."""
    named = [word.partition("=") for word in words[1:]]
    if len(words) < 2 or not all(name and logs for name, _, logs in named):
        sys.exit(__doc__)
    curves = {name: read(Path(logs)) for name, _, logs in named}
    try:
        draw(curves, Path(words[0]))
    except ImportError:
        sys.exit("elastic_curves: matplotlib is missing: .venv/bin/pip install -e '.[plots]'")
    first, *others = curves.values()
    apart = [
        abs(one - two)
        for other in others
        for one, two in zip(first.losses, other.losses, strict=False)
    ]
    print(f"{words[0]}: the curves are at most {max(apart, default=0.0):g} apart")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
