"""Run the node's lifecycle scripts once more, because a person has asked for it.

Never beside a job. They run outside of sresd's own unit, whose restrictions are not theirs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_resilience.agent.processes import steps
from slurm_resilience.config import LifecycleSettings
from slurm_resilience.errors import NotFound, SresError, UsageError
from slurm_resilience.lifecycle.run_record import RunOutcome, read_record
from slurm_resilience.wire.messages import LifecycleEnd, RunLifecycle, ScriptEnd

log = logging.getLogger("sresd.lifecycle")

SYSTEMDS_MARK = "INVOCATION_ID"
"""Set by systemd for each unit. Its directory in /run says less: a container may see the host's."""
OWN_UNIT = ("systemd-run", "--wait", "--collect", "--quiet", "--unit=sres-lifecycle-again")
MARGIN_SECONDS = 30.0
"""Beyond the scripts' own time limit."""
START_SECONDS = 120.0
MAX_OUTPUT_LINES, MAX_OUTPUT_BYTES = 20, 8 << 10
"""Limits of the end of a failed script's log in the answer."""


class LifecycleRerun:
    """Runs the scripts of one node, at most once at a time."""

    def __init__(
        self,
        settings: LifecycleSettings,
        node: str,
        judge_again: Callable[[], object],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """
        Args:
            settings: `[lifecycle]`.
            node: the node's name in Slurm.
            judge_again: has the check look at the record at once.
            environ: of this sresd.
        """
        self._settings = settings
        self._node = node
        self._judge_again = judge_again
        self._has_unit = SYSTEMDS_MARK in environ
        self._work: threading.Thread | None = None
        self._said = ""

    def answer(self, asked: RunLifecycle) -> LifecycleEnd:
        """Run them, and start slurmd if they end well.

        Raises:
            UsageError: none are configured.
            SresError: a job runs on this node, or the scripts run already.
        """
        if not self._settings.directory:
            raise UsageError(
                "this node has no lifecycle scripts (lifecycle.directory in sres.toml)"
            )
        jobs = sorted({step.job for step in steps.running(self._node)})
        if jobs:
            raise SresError(f"job {jobs[0]} runs on {self._node}: drain the node first")
        if self._work is not None and self._work.is_alive():
            raise SresError(f"the lifecycle scripts run on {self._node} already")
        # A thread: should the scripts take longer than the asker waits, slurmd is started all the
        # same when they have ended.
        self._work = threading.Thread(target=self._run, name="lifecycle", daemon=True)
        self._work.start()
        self._work.join(asked.seconds)
        if self._work.is_alive():
            raise SresError(
                f"the lifecycle scripts still run after {asked.seconds:.0f} s; look again: "
                f"sres node check {self._node} lifecycle"
            )
        return self._end()

    def command(self) -> list[str]:
        """Return the command that runs all scripts again."""
        limits = self._settings
        words = [
            *(sys.executable, "-P", "-m", "slurm_resilience.lifecycle", "--again"),
            *("--dir", limits.directory, "--state", limits.state_dir, "--logs", limits.log_dir),
            *("--timeout", str(limits.timeout), "--total", str(limits.total_timeout)),
            *("--resource-config", limits.resource_config, self._node),
        ]
        return [*OWN_UNIT, *words] if self._has_unit else words

    def _run(self) -> None:
        log.info("the lifecycle scripts run again, as a person has asked")
        said = _fault_of(self.command(), self._settings.total_timeout + MARGIN_SECONDS)
        if not said and self._settings.start_slurmd:
            said = _fault_of(self._settings.start_slurmd, START_SECONDS)
            said = f"slurmd could not be started: {said}" if said else ""
        self._said = said
        if said:
            log.warning("the lifecycle scripts did not end well: %s", said)
        with contextlib.suppress(NotFound):  # the check is switched off (checks.disabled)
            self._judge_again()

    def _end(self) -> LifecycleEnd:
        record = read_record(Path(self._settings.state_dir))
        if record is None:
            return LifecycleEnd(False, self._said or "they left no record")
        results = tuple(
            ScriptEnd(result.name, result.rc, result.seconds, result.text)
            for result in record.results
        )
        failed = record.failed
        text = failed.in_words if failed else self._said
        is_well = record.outcome is RunOutcome.PASSED and not self._said
        return LifecycleEnd(is_well, text, results, self._output_of(failed.name) if failed else ())

    def _output_of(self, name: str) -> tuple[str, ...]:
        path = Path(self._settings.log_dir) / f"{name}.log"
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - MAX_OUTPUT_BYTES))
                text = file.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace")
        except OSError:
            return ()
        return tuple(text.splitlines()[-MAX_OUTPUT_LINES:])


def _fault_of(argv: Sequence[str], seconds: float) -> str:
    """Run a program to its end; return the last line that it printed if it failed, else nothing."""
    # Not a pipe: a daemon that it starts may keep its output open.
    with tempfile.TemporaryFile() as output:
        try:
            code = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                timeout=seconds,
                check=False,
                start_new_session=True,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"`{argv[0]}` took more than {seconds:.0f} s"
        except OSError as error:
            return f"`{argv[0]}` cannot be run: {error.strerror}"
        if code == 0:
            return ""
        output.seek(max(0, output.tell() - MAX_OUTPUT_BYTES))
        lines = output.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {code}"
