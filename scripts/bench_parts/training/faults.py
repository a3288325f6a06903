"""The faults, one run each: what is started, what is done to it, what is measured."""

from __future__ import annotations

import subprocess
from typing import Literal

from drive import HERE, VICTIM, WORLD, Job, free_port
from figures import downtime, stages
from rivals import Rivals

RUN_SECONDS = 60.0
SURVIVORS = tuple(rank for rank in range(WORLD) if rank != VICTIM)
Fault = Literal["exception", "sigkill"]


def _inject(job: Job, fault: Fault) -> float:
    return job.make_raise(VICTIM) if fault == "exception" else job.kill(VICTIM)


def torchrun(rivals: Rivals, fault: Fault, checkpoint: bool = False) -> dict[str, float]:
    """Measure a fault under torchrun, which then starts all ranks anew.

    Args:
        checkpoint: the script loads its last checkpoint from disk, and makes its data pipeline.
    """
    with Job(RUN_SECONDS) as job:
        # With the shared store, torch 2.13's torchrun mostly fails to start a gloo job again.
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        if checkpoint:
            environment["BENCH_CHECKPOINT"] = str(job.directory / "checkpoint")
        argv = [str(rivals.python), "-m", "torch.distributed.run", "--standalone"]
        argv += [f"--nproc-per-node={WORLD}", "--max-restarts=1", "--monitor-interval=0.1"]
        job.start([*argv, str(HERE / "workers" / "ddp.py")], **environment)
        job.warm()
        at = _inject(job, fault)
        took = job.until(lambda ranks: downtime(ranks, at, range(WORLD), WORLD), "recovery")
        if not checkpoint:
            return {f"torchrun_{fault}_all_s": took}
        spent = job.until(lambda ranks: stages(ranks, at), "stages")
        return {"checkpoint_restart_s": took, **{f"stage {k}": v for k, v in spent.items()}}


def nvrx(rivals: Rivals, fault: Fault) -> dict[str, float]:
    """Measure a fault under nvidia-resiliency-ext: in-process restart, of the survivors after a
    SIGKILL."""
    counted = range(WORLD) if fault == "exception" else SURVIVORS
    with Job(RUN_SECONDS) as job:
        port = str(free_port())
        for rank in range(WORLD):
            job.start(
                [str(rivals.python), str(HERE / "workers" / "nvrx.py")],
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(WORLD),
            )
        job.warm()
        at = _inject(job, fault)
        took = job.until(lambda r: downtime(r, at, counted, len(counted)), "recovery")
        counted_as = "all" if fault == "exception" else "survivors"
        return {f"nvrx_{fault}_{counted_as}_s": took}


def torchft(rivals: Rivals) -> dict[str, float]:
    """Measure a SIGKILL under torchft; the killed replica is started again at once."""
    with Job(RUN_SECONDS) as job:
        port = free_port()
        argv = [str(rivals.bin / "torchft_lighthouse"), "--min_replicas", "2"]
        argv += ["--bind", f"[::]:{port}", "--heartbeat_timeout_ms", "500"]
        job.start([*argv, "--join_timeout_ms", "1000", "--quorum_tick_ms", "20"])

        def start(seat: int) -> subprocess.Popen[bytes]:
            argv = [str(rivals.python), str(HERE / "workers" / "ft.py")]
            lighthouse = f"http://localhost:{port}"
            return job.start(argv, BENCH_SEAT=str(seat), TORCHFT_LIGHTHOUSE=lighthouse)

        children = [start(seat) for seat in range(WORLD)]
        job.warm()
        at = job.kill(VICTIM)
        children[VICTIM].wait(10)
        start(VICTIM)
        survivors = job.until(lambda ranks: downtime(ranks, at, SURVIVORS), "survivors' step")
        all_ranks = job.until(lambda ranks: downtime(ranks, at, range(WORLD), WORLD), "rejoining")
        return {"torchft_sigkill_survivors_s": survivors, "torchft_sigkill_all_s": all_ranks}
