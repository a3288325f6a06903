"""sresctld with some of its times shortened, where no setting says how long it waits.

    impatient.py NAME=SECONDS…

A name is that of a constant, below `slurm_resilience.controller`: ``registry.RETURN_SECONDS``.
"""

from __future__ import annotations

import importlib
import subprocess
import sys

from slurm_resilience import config, daemon_log
from slurm_resilience.controller import main as daemon
from slurm_resilience.lab import Lab


def start_impatient(lab: Lab, **seconds: float) -> subprocess.Popen[str]:
    """Start it in the place of the lab's own, which must not run; it ends with the lab.

    Args:
        lab: the lab.
        seconds: by the constant's name, with ``__`` for a dot.
    """
    words = [f"{name.replace('__', '.')}={value}" for name, value in seconds.items()]
    with (lab.directory / "log" / "sresctld.log").open("a") as log:
        return lab.popen([sys.executable, __file__, *words], stdout=log, stderr=log)


def main() -> None:
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        module_name, _, constant = name.rpartition(".")
        module = importlib.import_module(f"slurm_resilience.controller.{module_name}")
        assert isinstance(getattr(module, constant), float), name
        setattr(module, constant, float(value))
    daemon_log.set_up("info")
    daemon.serve(config.load(), once=False, dry_run=False)


if __name__ == "__main__":
    main()
