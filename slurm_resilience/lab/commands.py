"""Commands inside a lab, and Slurm's view of its nodes: the half of `Lab` that only looks."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from slurm_resilience.errors import LabError, NotFound, UsageError
from slurm_resilience.lab import programs
from slurm_resilience.slurm import hostlists

POLL_SECONDS = 0.05
CONTROLLERS = ("ctl", "ctl2")


class LabCommands:
    """Runs commands on the controller and on the nodes of a lab that is up."""

    def __init__(self, name: str, directory: Path, nodes: tuple[str, ...]) -> None:
        self.name, self.directory, self.nodes = name, directory, nodes
        self._socket = str(directory / "keeper.sock")

    def argv(
        self,
        argv: Sequence[str],
        user: str | int | None = None,
        node: str | None = None,
        cwd: str | Path | None = None,
    ) -> list[str]:
        """Return the command line that runs ``argv`` inside (on ``ctl`` unless a node is named).

        Its process stands for the command: signals sent to it reach the command, its exit status
        is the command's, and the command does not outlive it. Its environment should be
        `environment()`.
        """
        if not argv:
            raise UsageError("no command to run")
        place = str(node) if node in CONTROLLERS else self._one(str(node)) if node else "ctl"
        words = [self._socket, place, "" if user is None else str(user), str(cwd or Path.cwd())]
        return [
            *programs.quick("slurm_resilience.lab.machines.enter", *words),
            "--",
            *map(str, argv),
        ]

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment for a command in this lab: no other Slurm's variables, this one's
        set."""
        return programs.clean_environment(self.directory, dict(extra or {}))

    def run(
        self,
        argv: Sequence[str],
        user: str | int | None = None,
        node: str | None = None,
        timeout: float | None = 60,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = False,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside to its end and return its output.

        Raises:
            LabError: ``check`` and it failed, with what it said.
            subprocess.TimeoutExpired: it took longer than ``timeout``; it has been killed.
        """
        feed: dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        done = subprocess.run(
            self.argv(argv, user, node, cwd),
            env=self.environment(env),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            **feed,
        )
        if check and done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise LabError(f"`{' '.join(map(str, argv))}` exited {done.returncode}: {said}")
        return done

    def popen(
        self,
        argv: Sequence[str],
        user: str | int | None = None,
        node: str | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        **more: Any,
    ) -> subprocess.Popen[str]:
        """Start a command inside; signals sent to the process reach the command itself."""
        command = self.argv(argv, user, node, cwd)
        return subprocess.Popen(
            command, env=self.environment(env), stdin=stdin, text=True, errors="replace", **more
        )

    def node_states(self) -> dict[str, str]:
        """Slurm's state of each node, base and flags in capitals: ``DOWN+DRAIN``."""
        return {node: fields["State"] for node, fields in self.node_fields().items()}

    def node_fields(self) -> dict[str, dict[str, str]]:
        """Every word ``KEY=VALUE`` of `scontrol show node -o`, by node."""
        said = self.run(["scontrol", "show", "node", "-o"], check=True).stdout
        lines = (
            dict(word.split("=", 1) for word in line.split() if "=" in word)
            for line in said.splitlines()
        )
        return {line["NodeName"]: line for line in lines if "NodeName" in line}

    def wait_states(self, wanted: Mapping[str, str], timeout: float = 30) -> dict[str, str]:
        """Wait until Slurm shows these states (hostlist → state), and return all states.

        Raises:
            LabError: not within ``timeout``; the message has the states last seen.
        """
        expected = {node: state.upper() for n, state in wanted.items() for node in self._expand(n)}
        deadline = time.monotonic() + timeout
        while True:
            try:
                seen = self.node_states()
            except (LabError, subprocess.TimeoutExpired) as error:
                seen = {"ctl": str(error)}
            if all(seen.get(node) == state for node, state in expected.items()):
                return seen
            if time.monotonic() > deadline:
                now = {node: seen.get(node, "unknown") for node in expected} | (
                    {"ctl": seen["ctl"]} if "ctl" in seen else {}
                )
                raise LabError(f"after {timeout:g} s the nodes are {now}, not {expected}")
            time.sleep(POLL_SECONDS)

    def _expand(self, nodes: str) -> tuple[str, ...]:
        if nodes in CONTROLLERS:
            return (nodes,)
        names = hostlists.expand(nodes)
        for name in names:
            self._known(name)
        return names

    def _one(self, node: str) -> str:
        names = self._expand(node)
        if len(names) != 1:
            raise UsageError(f"'{node}' names {len(names)} nodes; one is needed")
        return names[0]

    def _known(self, name: str) -> None:
        if name not in self.nodes:
            raise NotFound(
                f"no node '{name}' in lab '{self.name}'; it has {hostlists.fold(self.nodes)}"
            )
