"""A job whose supervised tasks write what they find and wait until the test lets them end."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.lab import Lab

# What each task writes: one line of JSON, complete or absent (O_APPEND, one write).
_TASK = """\
#!/bin/sh
printf '{"host":"%s","procid":%s,"token":"%s","attempt":%s,"node_list":"%s","master_node":"%s",\
"master_addr":"%s","master_port":"%s","nnodes":%s,"node_rank":%s,"slurm_node":%s,\
"slurm_nnodes":%s,"job_nodelist":"%s","restarts":%s}\\n' "$(hostname)" "$SLURM_PROCID" \
"$SRES_TOKEN" "${SRES_ATTEMPT:-0}" "$NODE_LIST" "$MASTER_NODE" "$MASTER_ADDR" "$MASTER_PORT" \
"${NNODES:-0}" "${NODE_RANK:--1}" "${SLURM_NODE:--1}" "$SLURM_NNODES" "$SLURM_JOB_NODELIST" \
"${SLURM_RESTART_COUNT:-0}" >> tasks
while [ ! -e end ]; do sleep "${LOOK_SECONDS:-0.05}"; done
exit "$(cat end)"
"""


class Job:
    """One submitted job in a directory of its own."""

    def __init__(
        self,
        lab: Lab,
        base: Path,
        *sbatch: str,
        srun: str = "srun --auto-resume=1",
        nodes: int = 4,
        user: str | None = None,
        launch: str = "sbatch",
        env: dict[str, str] | None = None,
    ) -> None:
        """Submit it with these words, or have salloc run its script outside of the nodes."""
        self.lab = lab
        self._submitted = 0
        self.folder = base / uuid.uuid4().hex[:8]
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o777)
        task = self.folder / "task.sh"
        task.write_text(_TASK)
        task.chmod(0o755)
        script = self.folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{srun} ./task.sh\necho srun ended with $? >> ended\n")
        script.chmod(0o755)
        words = [f"--nodes={nodes}", "--exclusive", *sbatch]
        env = {"SRES_EVENTS": str(self.folder / "events")} | (env or {})
        if launch == "salloc":
            with (self.folder / "log").open("a") as log:
                words = ["salloc", *words, "./job.sh"]
                lab.popen(words, user, cwd=self.folder, env=env, stdout=log, stderr=log)
            return
        words = ["sbatch", "--parsable", "--output=log", "--open-mode=append", *words, "job.sh"]
        done = lab.run(words, cwd=self.folder, user=user, env=env, check=True)
        self._submitted = int(done.stdout.strip().split(";")[0])

    @property
    def id(self) -> int:
        """Return its number; 0 while salloc waits for nodes."""
        granted = re.search(r"Granted job allocation (\d+)", self.log())
        return self._submitted or (int(granted[1]) if granted else 0)

    def tasks(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "tasks")

    def attempts(self) -> dict[str, list[dict[str, Any]]]:
        """Tasks by attempt's token, in order of appearance."""
        found: dict[str, list[dict[str, Any]]] = {}
        for task in self.tasks():
            found.setdefault(task["token"], []).append(task)
        return found

    def running_on(self, attempt: int, tasks: int) -> list[dict[str, Any]]:
        """All tasks of the nth attempt (from 1), or nothing while some are missing."""
        attempts = list(self.attempts().values())
        if len(attempts) < attempt or len(attempts[attempt - 1]) < tasks:
            return []
        return sorted(attempts[attempt - 1], key=lambda task: task["procid"])

    def let_end(self, code: int = 0) -> None:
        (self.folder / "end.new").write_text(str(code))
        (self.folder / "end.new").replace(self.folder / "end")

    def ended(self) -> str:
        path = self.folder / "ended"
        return path.read_text() if path.exists() else ""

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self) -> str:
        shown = self.lab.run(["squeue", "-h", "-j", str(self.id), "-o", "%T"])
        return shown.stdout.strip()

    def __repr__(self) -> str:
        return f"job {self.id}: {self.state()}\n{self.tasks()}\n{self.log()}"


def events(lab: Lab) -> list[dict[str, Any]]:
    """sresctld's journal, oldest first."""
    path = lab.directory / "ctl" / "sresctld" / "journal.db"
    if not path.exists():
        return []
    journal = Journal(path)
    try:
        return journal.events(limit=1000)[::-1]
    finally:
        journal.close()


def kinds(lab: Lab, node: str) -> list[str]:
    """Kinds of a node's events, oldest first."""
    return [event["kind"] for event in events(lab) if event["node"] == node]


class NodesOf:
    """The nodes of a lab, and sresctld's newest events and those of nodes that are out of service,
    as text for a wait that fails."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def __str__(self) -> str:
        known, states = events(self._lab), self._lab.node_states()
        out = {node for node, state in states.items() if state not in ("IDLE", "ALLOCATED")}
        newest = [e for e in known[:-25] if e["node"] in out][-25:] + known[-25:]
        told = [f"{e['node']} {e['kind']}: {e['text']}" for e in newest]
        reasons = self._lab.run(["sinfo", "--noheader", "-N", "-o", "%N %T: %E by %U"]).stdout
        return "\n".join((str(states), reasons, *told))


def all_idle(lab: Lab) -> bool:
    """Every node is idle again (and nothing holds one)."""
    return set(lab.node_states().values()) == {"IDLE"}


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line]
