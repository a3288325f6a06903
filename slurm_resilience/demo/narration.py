"""Run the demo on its lab: start trainings, make faults, and tell what happens."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.demo.phases import Account, Fault, account
from slurm_resilience.errors import LabError
from slurm_resilience.lab import Lab

TEMPLATES = Path(__file__).resolve().parent.parent.parent / "scripts" / "templates"
XID = "NVRM: Xid (PCI:0000:04:00): 64, Failed to persist row remap table"
VICTIM = "n3"
NODES, RANKS = 6, 4
LEAST_TEXT_CHARACTERS = 24
"""Room for the text of a line, however narrow the terminal is."""
LOOK_SECONDS = 1.0
"""Between two looks at a job: a command of Slurm's takes a processor from what is waited for."""


class Demo:
    """One run of the main job on a lab."""

    def __init__(
        self,
        lab: Lab,
        fault: Fault,
        steps: int,
        pace: float,
        console: Console,
        folder: str = "demo",
    ) -> None:
        self.lab = lab
        self.fault = fault
        self.steps = steps
        self.pace = pace
        self.console = console
        self.work = lab.directory / folder
        self.work.mkdir(mode=0o755)
        self.began = time.monotonic()
        self._said: set[str] = set()

    def say(self, text: str, speaker: str = "") -> None:
        """Tell one thing that happened; on a terminal, long texts are broken below themselves."""
        clock = f"{time.monotonic() - self.began:6.1f} s  "
        begin = f"{speaker:<11}" if speaker else ""
        if self.console.is_terminal:
            indent = len(clock) + len(begin)
            room = max(self.console.width - indent, LEAST_TEXT_CHARACTERS)
            lines = textwrap.wrap(text, room, break_on_hyphens=False)
            text = ("\n" + " " * indent).join(lines)
        # Not as markup: what stands in brackets, such as a node's labels, would be taken for it.
        self.console.print(Text.assemble((clock, "dim"), (begin, "bold"), text))

    def submit(self, name: str, flags: str, options: list[str]) -> int:
        """Submit a training; return its job id."""
        folder = self.work / name
        folder.mkdir()
        script = folder / "train.sbatch"
        program = shlex.join([sys.executable, str(TEMPLATES / "train_ddp.py")])
        script.write_text(
            "#!/bin/bash\n"
            f"srun {flags} {program} --steps {self.steps}"
            f" --checkpoint-every 50 --pace {self.pace} --folder {folder}/checkpoints"
            f" --log {folder}/steps.jsonl\n"
        )
        words = ["sbatch", "--parsable", f"--nodes={RANKS}", "--ntasks-per-node=1", "--exclusive"]
        words += ["--requeue", "--open-mode=append", f"--output={folder}/log", *options]
        env = {
            "SRES_EVENTS": str(folder / "events.jsonl"),
            "OMP_NUM_THREADS": "1",
            # DDP warns on each rank that it found no unused parameter; that is on purpose.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        done = self.lab.run([*words, str(script)], cwd=folder, env=env, check=True)
        return int(done.stdout.strip().split(";")[0])

    def steps_done(self, name: str) -> list[dict[str, Any]]:
        """Return the training's own log, one entry a step."""
        return read_lines(self.work / name / "steps.jsonl")

    def wait(self, what: str, seconds: float, ready: Callable[[], bool], job: int = 0) -> None:
        """Wait with a deadline, telling what happens meanwhile.

        Raises:
            LabError: it did not come, with the last words of the job's log.
        """
        deadline = time.monotonic() + seconds
        next_look = 0.0
        while not ready():
            now = time.monotonic()
            if now > deadline:
                raise LabError(f"{what}: not within {seconds:.0f} s; {self._tail()}")
            if job and now >= next_look:
                next_look = now + LOOK_SECONDS
                if not self.is_alive(job):
                    if ready():
                        return
                    raise LabError(f"{what}: job {job} has ended before; {self._tail()}")
            self.narrate()
            # The logs are files of other programs: nothing wakes us when they grow.
            time.sleep(0.1)

    def is_alive(self, job: int) -> bool:
        shown = self.lab.run(["squeue", "-h", "-j", str(job), "-o", "%T"])
        return shown.returncode == 0 and bool(shown.stdout.strip())

    def make_fault(self, job: int) -> float:
        """Make the fault; return the time, seconds since the epoch."""
        if self.fault == "power":
            at = time.time()
            self.lab.power_off(VICTIM)
        elif self.fault == "xid":
            at = time.time()
            self.lab.kmsg(VICTIM, XID)
        elif self.fault == "admin":
            at = time.time()
            self.lab.run(
                ["scontrol", "update", f"node={VICTIM}", "state=fail", "reason=Action:Replace"],
                check=True,
            )
        else:
            pid = self.lab.run(
                ["pgrep", "-f", f"^{sys.executable} .*train_ddp.py"], node=VICTIM, check=True
            )
            at = time.time()
            self.lab.run(["kill", "-9", pid.stdout.split()[0]], node=VICTIM, check=True)
        return at

    def journal(self) -> list[dict[str, Any]]:
        """Return sresctld's events, oldest first."""
        path = self.lab.directory / "ctl" / "sresctld" / "journal.db"
        journal = Journal(path)
        try:
            return journal.events(limit=1000)[::-1]
        finally:
            journal.close()

    def account(self, at: float) -> Account:
        return account(
            self.fault,
            at,
            VICTIM,
            self.journal(),
            read_lines(self.work / "main" / "events.jsonl"),
            self.steps_done("main"),
        )

    def narrate(self) -> None:
        """Tell each new event of sresctld and of the supervisor once."""
        for event in self.journal():
            where = event["node"] or (f"job {event['job']}" if event["job"] else "")
            self._tell(f"j{event['id']}", f"{where}: {event['kind']}: {event['text']}", "sresctld")
        log = self.work / "main" / "log"
        for line in log.read_text(errors="replace").splitlines() if log.exists() else []:
            if line.startswith("sres:") and (text := line.removeprefix("sres: ").rstrip("─ ")):
                self._tell(line, text, "supervisor")

    def _tell(self, key: str, text: str, speaker: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.say(text, speaker)

    def _tail(self) -> str:
        logs = [self.work / "main" / "log", self.work / "undisturbed" / "log"]
        texts = [p.read_text(errors="replace")[-1500:] for p in logs if p.exists()]
        return "the job's log ends with:\n" + "\n".join(texts)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; a last line that is still being written is left out."""
    try:
        lines = path.read_text().split("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[:-1] if line]


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM unwind like Ctrl-C, so that the lab is taken down."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
