"""Our side of the faults: the same job under our launcher."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping

from drive import HERE, VICTIM, WORLD, Job, RunFailed
from faults import RUN_SECONDS, SURVIVORS
from figures import Event, downtime, percentile, recoveries

RECOVERIES = 200
RECOVERIES_SECONDS = 300.0


def _start(job: Job, standby: int) -> None:
    argv = [sys.executable, "-m", "slurm_resilience.launcher", "--standalone"]
    argv += ["--nproc-per-node", str(WORLD), "--standby", str(standby)]
    argv += ["--rdzv-backend", "dir", "--rdzv-endpoint", str(job.directory / "meet")]
    argv += ["--standby-import", "job", "--standby-import", "warmed"]
    job.start([*argv, str(HERE / "workers" / "ours.py")])
    job.warm()
    if standby:
        warm = lambda _: any(job.directory.glob("standby*")) or None  # noqa: E731
        job.until(warm, "warm standby")


def exception() -> dict[str, float]:
    """Measure an exception in one rank; all four step again, in their old processes."""
    with Job(RUN_SECONDS) as job:
        _start(job, 1)
        at = job.make_raise(VICTIM)
        took = job.until(lambda ranks: downtime(ranks, at, range(WORLD), WORLD), "recovery")
        return {"exception_all_s": took}


def after_backward(replica_size: int = 1) -> dict[str, float]:
    """Exceptions right after backward, one after the other; no process may end.

    Args:
        replica_size: ranks that share one copy of the model.
    """
    with Job(RECOVERIES_SECONDS) as job:
        argv = [sys.executable, "-m", "slurm_resilience.launcher", "--standalone"]
        argv += ["--nproc-per-node", str(WORLD), "--standby", "0"]
        argv += ["--rdzv-backend", "dir", "--rdzv-endpoint", str(job.directory / "meet")]
        more = {"BENCH_FAULTS": str(RECOVERIES), "BENCH_VICTIM": str(VICTIM)}
        more["BENCH_REPLICA"] = str(replica_size)
        job.start([*argv, str(HERE / "workers" / "after_backward.py")], **more)
        over = lambda ranks: ranks if all_over(ranks) else None  # noqa: E731
        ranks = job.until(over, "end of all recoveries")
        try:
            took = recoveries(ranks, VICTIM, range(WORLD))
        except ValueError as error:
            raise RunFailed(str(error)) from None
        if len(took) != RECOVERIES:
            raise RunFailed(f"{len(took)} faults instead of {RECOVERIES}")
        kind = "" if replica_size == 1 else "_hsdp"
        return {f"exception_after_backward{kind}_p99_s": percentile(took, 0.99)}


def all_over(ranks: Mapping[int, list[Event]]) -> bool:
    """Tell whether every rank has said that it is done."""
    return all(any(e.name == "over" for e in ranks.get(seat, ())) for seat in range(WORLD))


def sigkill(warm: bool) -> dict[str, float]:
    """SIGKILL of one rank, replaced by a warm standby or by a new process."""
    with Job(RUN_SECONDS) as job:
        _start(job, 1 if warm else 0)
        at = job.kill(VICTIM)
        survivors = job.until(lambda ranks: downtime(ranks, at, SURVIVORS), "survivors' step")
        all_ranks = job.until(lambda ranks: downtime(ranks, at, range(WORLD), WORLD), "rejoining")
        name = "sigkill_all_warm_s" if warm else "sigkill_all_cold_s"
        return {"sigkill_survivors_s": survivors, name: all_ranks}


def hang() -> dict[str, float]:
    """SIGSTOP of one rank: until the first survivor is out of its block, and from there on."""
    with Job(RUN_SECONDS) as job:
        _start(job, 1)
        at = job.kill(VICTIM, signal.SIGSTOP)

        def left(ranks: Mapping[int, list[Event]]) -> float | None:
            times = [e.at for r in SURVIVORS for e in ranks[r] if e.name == "left" and e.at > at]
            return min(times) if times else None

        found = job.until(left, "detection")
        took = job.until(lambda ranks: downtime(ranks, at, SURVIVORS), "survivors' step")
        return {"hang_detect_s": found - at, "hang_recover_s": at + took - found}


def plain(warm: bool) -> dict[str, float]:
    """SIGKILL of one rank of a program without the library: all four are started again, by forks
    of the warm interpreter or by new processes.

    The second figure is the processor time that the four spend until torch is imported.
    """
    with Job(RUN_SECONDS) as job:
        argv = [sys.executable, "-m", "slurm_resilience.launcher", "--standalone"]
        argv += ["--nproc-per-node", str(WORLD), "--standby", "0"]
        argv += ["--warm" if warm else "--no-warm", "--standby-import", "forks_wait"]
        job.start([*argv, str(HERE / "workers" / "ddp.py")])
        job.warm()
        if warm:
            ready = job.directory / "forks_wait"
            job.until(lambda _: ready.exists() or None, "warm interpreter")
        at = job.kill(VICTIM)
        took = job.until(lambda ranks: downtime(ranks, at, range(WORLD), WORLD), "recovery")
        spent = [float(file.read_text()) for file in job.directory.glob("import*.cpu")]
        name = "warm" if warm else "cold"
        return {f"plain_sigkill_{name}_s": took, f"plain_import_{name}_s": sum(spent)}
