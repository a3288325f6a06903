#!/usr/bin/env python3
"""Run sresctld as it is, and write down what each of its rounds costs: one JSON line a round."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from slurm_resilience import config, daemon_log
from slurm_resilience.controller import main as daemon
from slurm_resilience.controller.cycle import Cycle

SHOWN_CHARACTERS = 200


def spent() -> float:
    """Return the processor seconds of this thread, and of the commands that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_THREAD, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main(figures: Path) -> None:
    """Serve until SIGTERM."""
    run_once = Cycle.run_once
    with figures.open("w", buffering=1, encoding="utf-8") as file:

        def measured(cycle: Cycle) -> str:
            at, began, before = time.time(), time.monotonic(), spent()
            sentence = run_once(cycle)
            cost, took = spent() - before, time.monotonic() - began
            line = {"at": at, "cpu_s": cost, "took_s": took, "says": sentence[:SHOWN_CHARACTERS]}
            file.write(json.dumps(line) + "\n")
            return sentence

        # The daemon as installed has no door for a meter, and needs none.
        Cycle.run_once = measured  # type: ignore[method-assign]
        daemon_log.set_up("info")
        daemon.serve(config.load(), once=False, dry_run=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
