"""Run one rung once on a lab: start a training, make the fault, wait for the first step after."""

from __future__ import annotations

import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from phases import Phases, has_recovered, phases
from rich.console import Console
from rungs import Rung

from slurm_resilience.demo.narration import RANKS, TEMPLATES, VICTIM, Demo, read_lines
from slurm_resilience.errors import LabError
from slurm_resilience.lab import Lab

STEPS, PACE_SECONDS = 1_000_000, 0.02
"""It is never done: it is cancelled when it has gone on."""
BEGIN_SECONDS, WARM_SECONDS, RECOVER_SECONDS, IDLE_SECONDS = 120.0, 120.0, 180.0, 120.0
STOCK_SECONDS = 900.0
"""For stock Slurm to run the job again."""
FIRST_STEPS = 60
"""The fault comes no sooner: there is a checkpoint, and a way to go from it."""
LOADED_CPU_SECONDS = 0.7
"""Processor time after which an interpreter may have imported torch; then it must be still."""
STILL_SECONDS = 1.0
LOOK_SECONDS = 0.05
STOCK_LOOK_SECONDS = 1.0
"""Between two looks at stock Slurm's nodes."""


class WrongRung(Exception):
    """Training went on, but by another way than was asked for."""


class RungRun(Demo):
    """One run of a rung."""

    def __init__(self, lab: Lab, rung: Rung, number: int, console: Console) -> None:
        super().__init__(lab, rung.fault, STEPS, PACE_SECONDS, console, f"{rung.name}-{number}")
        self._rung = rung
        self._job = 0
        self._victim = VICTIM
        self._seen_down: float | None = None
        self._next_look = 0.0

    def measure(self) -> Phases:
        """Return the phases.

        Raises:
            LabError: the training did not begin, or did not go on.
            WrongRung: it went on in another way.
        """
        job = self._job = self._submit()
        self.wait("step 60", BEGIN_SECONDS, self._is_under_way, job)
        if self._rung.warm:
            self.wait("the warm interpreters", WARM_SECONDS, WarmWatch(self).are_ready, job)
        if self._rung.warm and self._rung.fault == "power":
            self.wait("a living step", WARM_SECONDS, self._lives, job)
        at = self._fault()
        limit = STOCK_SECONDS if self._rung.lab.startswith("stock") else RECOVER_SECONDS
        self.wait("the first step", limit, lambda: has_recovered(self._training(), at))
        self._check_rung()
        return self._phases(at)

    @property
    def _folder(self) -> Path:
        return self.work / "main"

    def _step_node(self) -> str:
        """Return a node of the step, without rank 0 and the batch script."""
        events = read_lines(self._folder / "events.jsonl")
        placed = [e["nodes"] for e in events if e["event"] in ("started", "laid_out")]
        return str(placed[-1][2]) if placed else VICTIM

    def _submit(self) -> int:
        rung, folder = self._rung, self.work / "main"
        folder.mkdir()
        words = [str(TEMPLATES / "train_ddp.py"), f"--steps={self.steps}", "--checkpoint-every=50"]
        words += [f"--pace={self.pace}", f"--folder={folder}/checkpoints"]
        words += [f"--log={folder}/steps.jsonl"]
        if "--no-python" in rung.srun:
            # torchrun takes the script's own options for shortened ones of its own.
            rank = folder / "rank.sh"
            rank.write_text(f"#!/bin/bash\nexec {shlex.join([sys.executable, '-u', *words])}\n")
            rank.chmod(0o755)
            words = [str(rank)]
        script = folder / "train.sbatch"
        script.write_text(
            f"#!/bin/bash\ndate +%s.%N >> {folder}/began\n{rung.srun} {shlex.join(words)}\n"
        )
        sbatch = ["sbatch", "--parsable", f"--nodes={RANKS + rung.spares}", "--exclusive"]
        sbatch += ["--requeue", "--open-mode=append", f"--output={folder}/log", *rung.sbatch]
        environment = {
            "SRES_EVENTS": str(folder / "events.jsonl"),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            # With the shared store, torchrun mostly fails to start a gloo job again.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        done = self.lab.run([*sbatch, str(script)], cwd=folder, env=environment, check=True)
        return int(done.stdout.strip().split(";")[0])

    def _training(self) -> list[dict[str, Any]]:
        return self.steps_done("main")

    def _is_under_way(self) -> bool:
        lines = self._training()
        return bool(lines) and lines[-1]["step"] >= FIRST_STEPS

    def _lives(self) -> bool:
        return any(e["event"] == "living" for e in read_lines(self._folder / "events.jsonl"))

    def _fault(self) -> float:
        self._victim = self._step_node()
        if self._rung.fault == "power":
            at = time.time()
            self.lab.power_off(self._victim)
            return at
        ranks = {
            process.environ().get("SLURMD_NODENAME", ""): process
            for process in self.processes(self._rung.victim)
        }
        if self._victim not in ranks:
            # An srun without the flag tells no one its nodes, and Slurm chose others.
            self._victim = max(ranks, default="")
        rank = ranks.get(self._victim)
        if rank is None:
            raise LabError(f"no process of a rank matches {self._rung.victim}")
        at = time.time()
        rank.send_signal(signal.SIGKILL)
        return at

    def processes(self, pattern: str) -> Iterator[psutil.Process]:
        """Yield the processes of this job whose command line matches."""
        own = str(self._folder)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cwd() == own and re.search(pattern, shlex.join(process.cmdline())):
                    yield process

    def narrate(self) -> None:
        """Note when stock Slurm shows the node as down; say nothing else."""
        now = time.time()
        if not self._rung.lab.startswith("stock") or self._seen_down or now < self._next_look:
            return
        self._next_look = now + STOCK_LOOK_SECONDS
        if self.lab.node_states().get(self._victim, "").startswith("DOWN"):
            self._seen_down = now

    def _check_rung(self) -> None:
        marker, log = self._rung.marker, self._folder / "log"
        deadline = time.monotonic() + 10.0
        while marker and marker not in log.read_text(errors="replace"):
            if time.monotonic() > deadline:
                told = [x for x in log.read_text(errors="replace").splitlines() if "sres" in x]
                last = "; ".join(told[-4:])
                raise WrongRung(f"it went on without '{marker}' in the job's log: {last}")
            time.sleep(LOOK_SECONDS)

    def _phases(self, at: float) -> Phases:
        began = self._folder / "began"
        return phases(
            at,
            [e for e in self.journal() if e["node"] == self._victim]
            if self.lab.spec.daemons
            else [],
            read_lines(self._folder / "events.jsonl"),
            self._training(),
            seen_down=self._seen_down,
            script_began=[float(word) for word in began.read_text().split()],
        )

    def clear(self) -> None:
        """End the job, and have every node back for the next run.

        Raises:
            LabError: not all came back.
        """
        job = self._job
        self.lab.run(["scancel", str(job)])
        with suppress(LabError):
            self.wait("the end of the job", IDLE_SECONDS, lambda: not self.is_alive(job))
        if not self.lab.spec.daemons and self._rung.fault == "power":
            self.lab.power_on(self._victim)
            self.lab.run(["scontrol", "update", f"node={self._victim}", "state=resume"])
        self.wait("idle nodes", IDLE_SECONDS, self._all_idle)

    def _all_idle(self) -> bool:
        return set(self.lab.node_states().values()) == {"IDLE"}


class WarmWatch:
    """Tells when every node's warm interpreter has its imports behind it: it uses no more
    processor time."""

    def __init__(self, run: RungRun) -> None:
        self._run = run
        self._spent: dict[int, float] = {}
        self._still_since = 0.0

    def are_ready(self) -> bool:
        """Return whether as many as there are ranks are still now."""
        now, spent = time.monotonic(), {}
        for process in self._run.processes("fork_server.py"):
            with suppress(psutil.Error):
                times = process.cpu_times()
                spent[process.pid] = times.user + times.system
        loaded = [cpu for cpu in spent.values() if cpu > LOADED_CPU_SECONDS]
        if spent != self._spent or len(loaded) < RANKS:
            self._spent, self._still_since = spent, now
            return False
        return now - self._still_since >= STILL_SECONDS


def end_on_sigterm() -> None:
    """Let SIGTERM unwind like Ctrl-C, so that the lab is taken down."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
