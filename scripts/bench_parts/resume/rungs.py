"""The rungs of the ladder: what is started, what fails, and how the job's log names the rung."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, NamedTuple

LabKind = Literal["plain", "gres", "stock", "stock_default"]
FaultKind = Literal["power", "rank"]

_BIN = Path(sys.executable).parent
_LAUNCHER = f"--ntasks-per-node=1 {_BIN}/sres-run --nproc-per-node=1 --warm"
_TORCHRUN = (
    f"--ntasks-per-node=1 {sys.executable} -m torch.distributed.run --nnodes=4 --nproc-per-node=1 "
    "--max-restarts=3 --monitor-interval=0.1 --rdzv-backend=c10d --rdzv-id=bench "
    "--rdzv-endpoint=n1:29411 --no-python"
)
_RANKS = f"--ntasks-per-node=1 {sys.executable} -u"
_GRES = ("--gres=gpu:2",)


class Rung(NamedTuple):
    """One way on after a fault."""

    name: str
    label: str
    fault: FaultKind
    srun: str
    """srun's own words, and what starts the program."""
    marker: str
    """The job's log has it where this rung was taken; empty: there is no other one."""
    target: float | None = None
    lab: LabKind = "plain"
    spares: int = 0
    sbatch: tuple[str, ...] = ()
    victim: str = " -u .*train_ddp.py"
    """The command line of a rank's process matches it."""
    warm: bool = False
    """An interpreter is loaded beside the ranks, and has to be ready before the fault."""

    @property
    def key(self) -> str:
        return f"{self.name}_s"


RUNGS = (
    Rung(
        "warm_rank",
        "sres-run: a rank is killed",
        "rank",
        f"srun --auto-resume=1 {_LAUNCHER}",
        "a fork of the warm interpreter",
        1.5,
        victim="bootstrap.py",
        warm=True,
    ),
    Rung(
        "warm_power",
        "sres-run: a node is lost, a spare inside",
        "power",
        f"srun --auto-resume=1 --auto-resume-spares=1 {_LAUNCHER}",
        "healed: seats",
        6.0,
        spares=1,
        warm=True,
    ),
    Rung(
        "relaunch",
        "a rank is killed: again on the same nodes",
        "rank",
        f"srun --auto-resume=1 {_RANKS}",
        "the step runs again on",
        10.0,
    ),
    Rung(
        "spare",
        "a node is lost: a spare inside the allocation",
        "power",
        f"srun --auto-resume=1 --auto-resume-spares=1 {_RANKS}",
        "takes the place of",
        10.0,
        spares=1,
    ),
    Rung(
        "swap",
        "a node is lost: exchanged for an idle one",
        "power",
        f"srun --auto-resume=1 {_RANKS}",
        "exchanged for",
        12.0,
    ),
    Rung(
        "companion",
        "a node is lost, GRES: a companion allocation",
        "power",
        f"srun --auto-resume=1 {_RANKS}",
        "a second allocation, job",
        14.0,
        lab="gres",
        sbatch=("--no-kill", *_GRES),
    ),
    Rung(
        "requeue",
        "a node is lost, GRES, and input that is kept: requeued at once",
        "power",
        # Two steps cannot share a standard input, so that there is no companion.
        f"echo | srun --auto-resume=1 {_RANKS}",
        "the job was requeued",
        17.0,
        lab="gres",
        sbatch=_GRES,
    ),
    Rung(
        "stock_requeue",
        "stock Slurm, SlurmdTimeout=15: sbatch --requeue",
        "power",
        f"srun {_RANKS}",
        "",
        lab="stock",
    ),
    Rung(
        "torchrun_rank",
        "torchrun: a rank is killed",
        "rank",
        f"srun {_TORCHRUN}",
        "",
        victim="^\\S+ -u .*train_ddp.py",
    ),
)
"""In the order of the ladder, and the rivals last."""

STOCK_DEFAULT = Rung(
    "stock_default_requeue",
    "stock Slurm, its own time-outs: sbatch --requeue",
    "power",
    f"srun {_RANKS}",
    "",
    lab="stock_default",
)
"""It takes nine minutes, so it is measured only where it is asked for."""

KEYS = tuple(rung.key for rung in RUNGS)
