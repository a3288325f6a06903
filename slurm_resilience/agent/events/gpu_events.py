"""Follow the Xids that the NVIDIA driver tells by events: a second source beside the kernel log.

The library keeps the GPUs open in the process that waits, and a GPU that is open cannot be reset.
So while a finding asks for a reset, that process is ended.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading

import msgspec

from slurm_resilience.agent.agent_link import Wakeup
from slurm_resilience.agent.check_loop import context
from slurm_resilience.agent.events import gpu_event_child
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.agent.finding_intake import FindingIntake
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.child_group import end_group
from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.health.checks.gpu.nvml_session import no_nvidia_gpu
from slurm_resilience.health.gpu_event import GpuEvent
from slurm_resilience.model import CheckResult

log = logging.getLogger("sresd.gpu_events")

NAME = "gpu_events"
SILENT_SECONDS = 30.0
"""Without a beat of the process, six of which are due: the driver hangs."""
KILL_GRACE_SECONDS = 1.0
RETRY_SECONDS = 60.0
IDLE_SECONDS = 600.0
"""Until a node without GPUs, or without the driver, is looked at again."""
RESET_SECONDS = 5.0
"""Between two looks whether the reset that is waited for has been done."""
READ_BYTES = 65536


class GpuEventLine(msgspec.Struct):
    """One line of the process; an empty one is a beat."""

    event: GpuEvent | None = None
    following: int = 0
    ended: str = ""
    library: bool = True


class GpuEvents:
    """Keeps the process that waits for events going until `stop` is set."""

    def __init__(
        self,
        settings: Config,
        facts: SlurmFacts,
        outbox: Outbox,
        intake: FindingIntake,
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._outbox = outbox
        self._intake = intake
        self._clock = clock
        self._stop = stop
        self._wakeup = Wakeup()
        self._stuck: subprocess.Popen[bytes] | None = None

    def wake(self) -> None:
        """Make `run` look at `stop`."""
        self._wakeup.ring()

    def run(self) -> None:
        """Run the thread."""
        while not self._stop.is_set():
            self._clock.wait(self._stop, self._turn())

    def _turn(self) -> float:
        """Follow once; return the seconds until the next try."""
        expected = context(self._settings, self._facts)
        if none_expected := no_nvidia_gpu(expected):
            self._put_up("pass", none_expected)
            return IDLE_SECONDS
        if self._stuck is not None and self._stuck.poll() is None:
            text = f"process {self._stuck.pid} hangs in the driver and cannot be killed"
            self._put_up("unjudged", text)
            return RETRY_SECONDS
        if self._outbox.awaits_reset():
            self._put_up("unjudged", "a GPU waits for its reset: its driver is left alone")
            return RESET_SECONDS
        ended = self._follow()
        if self._stop.is_set() or self._outbox.awaits_reset():
            return 0.0
        if not ended.library and expected.expected.gpus is None:
            return self._settings.agent.check_interval  # perhaps a node that has no GPU
        self._put_up("unjudged", ended.ended)
        return RETRY_SECONDS if ended.library else IDLE_SECONDS

    def _follow(self) -> GpuEventLine:
        """Run the process until it ends, hangs, or must let the GPUs go; return its last line."""
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", gpu_event_child.__name__],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            return GpuEventLine(ended=f"no process can be started: {error.strerror}")
        assert child.stdout is not None
        try:
            return self._read(child.stdout.fileno())
        finally:
            self._end(child)

    def _read(self, pipe: int) -> GpuEventLine:
        partial = b""
        while not (self._stop.is_set() or self._outbox.awaits_reset()):
            ready, _, _ = select.select([pipe, self._wakeup.fileno()], [], [], SILENT_SECONDS)
            if not ready:
                text = f"no word of the driver for {SILENT_SECONDS:g} s; the process was killed"
                return GpuEventLine(ended=text)
            if pipe not in ready:
                continue
            data = os.read(pipe, READ_BYTES)
            if not data:
                return GpuEventLine(ended="the process that waits for events has died")
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                try:
                    said = msgspec.json.decode(line, type=GpuEventLine)
                except msgspec.MsgspecError:
                    return GpuEventLine(ended="the driver's library writes lines of its own")
                if said.event is not None:
                    self._intake.from_driver(said.event, self._clock.now())
                if said.following:
                    self._put_up("pass", f"following {said.following} GPUs")
                if said.ended:
                    return said
        return GpuEventLine(ended="let go")

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        if not end_group(child, KILL_GRACE_SECONDS):
            self._stuck = child

    def _put_up(self, verdict: str, text: str) -> None:
        result = CheckResult(NAME, "pass" if verdict == "pass" else "unjudged", text)
        if self._outbox.result(result):
            log.info("%s: %s", verdict, text)
