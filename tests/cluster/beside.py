"""An srun beside a supervised one: what plain srun does is what the other has to do as well."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_resilience.lab import Lab

WaitFor = Callable[..., Any]
FLAG = "--auto-resume=1"
WAYS = ((), (FLAG,))
"""The words before srun's others: plain, supervised."""


def allocate(lab: Lab, *options: str, user: str | None = None) -> str:
    """A job without a script; its id."""
    done = lab.run(["salloc", "--no-shell", *options], user=user, cwd="/")
    granted = re.search(r"job allocation (\d+)", done.stderr)
    assert granted is not None, done.stderr
    return granted[1]


def own_words(stderr: str) -> list[str]:
    """Return what was said, without the supervisor's lines, numbers, and the order of several
    nodes."""
    lines = [line for line in stderr.splitlines() if not line.startswith("sres: ")]
    return sorted(re.sub(r"\d+", "N", line) for line in lines)


def shown(code: int) -> int:
    """An exit code as a shell shows it."""
    return 128 - code if code < 0 else code


@dataclass(frozen=True)
class End:
    """The end of an srun."""

    code: int
    stdout: str
    stderr: str

    @property
    def alike(self) -> tuple[int, list[str], list[str]]:
        """Return the parts that must not differ."""
        return self.code, sorted(self.stdout.splitlines()), own_words(self.stderr)


@dataclass(frozen=True)
class Site:
    """A job of a lab, and a directory to start sruns in."""

    lab: Lab
    job: str
    directory: Path
    wait_for: WaitFor
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environment(self) -> dict[str, str]:
        # Every process that comes of a test inherits the mark, wherever it runs.
        return {"BESIDE": self.mark} | ({"SLURM_JOB_ID": self.job} if self.job else {})

    def run(self, *argv: str, text: str | None = None, **env: str) -> End:
        done = self.lab.run(
            argv, cwd=self.directory, env=self.environment | env, input=text, timeout=90
        )
        return End(shown(done.returncode), done.stdout, done.stderr)

    def both(self, *words: str, text: str | None = None, **env: str) -> tuple[End, End]:
        """The same srun plain and supervised."""
        plain, supervised = (self.run("srun", *way, *words, text=text, **env) for way in WAYS)
        return plain, supervised

    def shell(self, script: str) -> tuple[End, End]:
        """A script in which ``$SRUN`` stands for either srun."""
        plain, supervised = (
            self.run("bash", "-c", script, SRUN=" ".join(["srun", *way])) for way in WAYS
        )
        return plain, supervised

    def start(self, *argv: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        return self.lab.popen(
            argv,
            cwd=cwd or self.directory,
            env=self.environment | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def acted_on(
        self, act: Callable[[subprocess.Popen[str]], None], program: str, *options: str
    ) -> tuple[End, End]:
        """Both sruns of a shell program that prints ``up``, then ``act`` on its process."""
        ends = []
        for way in WAYS:
            srun = self.start("srun", *way, *options, "sh", "-c", program)
            assert srun.stdout is not None
            assert srun.stdout.readline() == "up\n"
            act(srun)
            out, err = srun.communicate(timeout=60)
            ends.append(End(shown(srun.returncode), out, err))
            self.wait_for(lambda: not self.steps(), 30, "the step's end")
        return ends[0], ends[1]

    def steps(self) -> list[str]:
        said = self.lab.run(["squeue", "-s", "-h", "-j", self.job, "-o", "%i"]).stdout.split()
        return [step for step in said if step.split(".")[1].isdigit()]

    def job_state(self, job: str) -> str:
        return self.lab.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout.strip()

    def inside(self, srun: subprocess.Popen[str]) -> int:
        """The process that stands behind one of `start`."""
        children = Path(f"/proc/{srun.pid}/task/{srun.pid}/children")
        return int(self.wait_for(lambda: children.read_text().split(), 10, "its process")[0])

    def marked(self) -> dict[int, str]:
        """All that came of this test and still runs: process ids and command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    if words:
                        found[int(entry.name)] = words.decode(errors="replace")
            except OSError:
                continue
        return found

    def processes(self) -> list[str]:
        return list(self.marked().values())

    def expect_nothing_left(self) -> None:
        found: list[str] = []

        def nothing() -> bool:
            found[:] = self.left()
            return not found

        try:
            self.wait_for(nothing, 30, found)
        finally:
            # The tests that share the job would fail with this one.
            for step in self.steps() if found else ():
                self.lab.run(["scancel", "--signal=KILL", step])

    def left(self) -> list[str]:
        """List what a test should not have left behind."""
        named = ["squeue", "-h", "-o", "%j"]
        helpers = [n for n in self.lab.run(named).stdout.split() if n.startswith("sres-")]
        folders = [str(path) for path in self.directory.rglob(".sres")]
        return [*self.steps(), *helpers, *folders, *self.processes()]


class Terminal:
    """A command of a lab at a terminal of its own."""

    def __init__(self, site: Site, argv: Sequence[str], env: Mapping[str, str]) -> None:
        command = site.lab.argv(argv, cwd=site.directory)
        environment = site.lab.environment({"BESIDE": site.mark, **env})
        self.seen = ""
        self._pid, self._file = pty.fork()
        if self._pid == 0:
            os.execve(command[0], command, environment)

    def expect(self, text: str, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0 and self._read(left), f"no {text!r} in {self.seen!r}"

    def type(self, keys: str) -> None:
        os.write(self._file, keys.encode())

    def end(self, seconds: float = 60) -> int:
        """Wait for its end; the exit code as a shell shows it."""
        deadline = time.monotonic() + seconds
        while self._read(max(0.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        os.close(self._file)
        return shown(os.waitstatus_to_exitcode(status))

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._file], [], [], min(seconds, 1.0))
        if not ready:
            return True
        try:
            data = os.read(self._file, 65536)
        except OSError:
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)
