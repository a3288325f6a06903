"""Follow the violations of DCGM's policies, Xids among them, where its host engine runs.

A violation names no GPU. For an Xid that has come by no other way, DCGM is asked which GPUs have it
as their last one: a reset needs the GPU's address, and without it the node would be rebooted.

`dcgmi policy --reg` prints them as they come. It does not notice that the host engine has ended:
so it is started anew every few minutes. Where the site has set no policy, the conditions that need
no knowledge of the product are set, with no action: DCGM tells, and does nothing by itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

import msgspec

from slurm_resilience.agent.agent_link import Wakeup
from slurm_resilience.agent.check_loop import context
from slurm_resilience.agent.facts import SlurmFacts
from slurm_resilience.agent.finding_intake import FindingIntake
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import Clock
from slurm_resilience.config import Config
from slurm_resilience.errors import SresError
from slurm_resilience.health.checks.gpu.dcgm_health import MAX_SAID_CHARACTERS, NOT_INSTALLED
from slurm_resilience.health.checks.gpu.nvml_session import no_nvidia_gpu
from slurm_resilience.health.dcgm_tool import ALL_GPUS, ask_dcgmi
from slurm_resilience.health.documents.dcgm_devices import (
    XID_FIELD,
    gpu_addresses,
    gpus_with_xid,
)
from slurm_resilience.health.documents.dcgm_violations import (
    CHECK_NAME,
    ViolationReader,
    of_gpu,
)
from slurm_resilience.health.documents.smi_judge import RETIRED_PAGES_LIMIT
from slurm_resilience.model import CheckResult, Finding

log = logging.getLogger("sresd.dcgm_policies")

CONDITIONS = ("-x", "-e", "-p", "-n", "-M", str(RETIRED_PAGES_LIMIT))
"""Xids, double-bit errors, PCIe replays, NVLink errors, retired pages."""
FOLLOW_SECONDS = 600.0
RETRY_SECONDS = 60.0
IDLE_SECONDS = 600.0
"""Until a node without GPUs, or without DCGM, is looked at again."""
SETTLE_SECONDS = 1.0
"""The kernel log tells of an Xid first, and names its GPU: both become one trouble then."""
KILL_GRACE_SECONDS = 1.0
READ_BYTES = 65536
_NONE_SET = re.compile(r"^\| *Violation conditions *\| *None *\|", re.M)
_REFUSED = re.compile(r"^Error\b|\bUnable to connect\b", re.M)


class DcgmPolicies:
    """Keeps dcgmi following until `stop` is set."""

    def __init__(
        self,
        settings: Config,
        facts: SlurmFacts,
        outbox: Outbox,
        intake: FindingIntake,
        is_drill: Callable[[], bool],
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        """
        Args:
            settings: the agent's, and of the checks.
            facts: what Slurm expects of this node.
            outbox: takes whether it follows.
            intake: takes what DCGM tells.
            is_drill: tells whether a drill is open: what comes then was injected (`dcgmi test`).
            clock: of this machine.
            stop: ends it.
        """
        self._settings = settings
        self._facts = facts
        self._outbox = outbox
        self._intake = intake
        self._is_drill = is_drill
        self._clock = clock
        self._stop = stop
        self._wakeup = Wakeup()

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
        dcgmi = shutil.which("dcgmi")
        if dcgmi is None:
            if expected.expected.gpus is not None:  # else perhaps a node that has no GPU
                self._put_up("unjudged", NOT_INSTALLED)
            return IDLE_SECONDS
        trouble = _set_where_none_is() or self._follow(dcgmi)
        if trouble:
            self._put_up("unjudged", trouble)
            return RETRY_SECONDS
        return 0.0

    def _follow(self, dcgmi: str) -> str:
        """Follow for some minutes; return why it ended before, or nothing."""
        try:
            child = subprocess.Popen(
                [dcgmi, "policy", "-g", ALL_GPUS, "--reg"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"dcgmi cannot be started: {error.strerror}"
        assert child.stdout is not None
        try:
            return self._read(child.stdout.fileno())
        finally:
            _end(child)
            child.stdout.close()

    def _read(self, pipe: int) -> str:
        reader, partial, last = ViolationReader(), b"", ""
        began = self._clock.monotonic()
        while not self._stop.is_set():
            elapsed = self._clock.monotonic() - began
            if elapsed >= FOLLOW_SECONDS:
                return ""
            # What a pipe is given is buffered: that nothing came is no sign of trouble.
            if elapsed >= SETTLE_SECONDS:
                self._put_up("pass", "following DCGM's policies")
            wait = SETTLE_SECONDS if elapsed < SETTLE_SECONDS else FOLLOW_SECONDS - elapsed
            ready, _, _ = select.select([pipe, self._wakeup.fileno()], [], [], wait)
            if pipe not in ready:
                continue
            data = os.read(pipe, READ_BYTES)
            if not data:
                return f"dcgmi has ended: {last}" if last else "dcgmi has ended"
            *lines, partial = (partial + data).split(b"\n")
            for raw in lines:
                line = raw.decode("utf-8", "replace").strip()
                last = line[:MAX_SAID_CHARACTERS] or last
                self._take(reader, line)
            partial = partial[-READ_BYTES:]
        return ""

    def _take(self, reader: ViolationReader, line: str) -> None:
        finding = reader.feed(line)
        if finding is not None:
            self._clock.wait(self._stop, SETTLE_SECONDS)
            now, is_drill = self._clock.now(), self._is_drill()
            seen = msgspec.structs.replace(finding, at=now, injected=is_drill)
            for one in self._by_gpu(seen):
                self._intake.from_dcgm(one)

    def _by_gpu(self, finding: Finding) -> Sequence[Finding]:
        """Return the finding of each GPU that has this Xid; without a GPU where that is unknown."""
        if finding.check != "xid" or self._intake.knows(finding):
            return (finding,)
        shown = _ask("dmon", "-e", str(XID_FIELD), "-c", "1")
        numbers = gpus_with_xid(shown, int(finding.code))
        addresses = gpu_addresses(_ask("discovery", "-l")) if numbers else {}
        gpus = [addresses[number] for number in numbers if number in addresses]
        return [of_gpu(finding, gpu) for gpu in gpus] or (finding,)

    def _put_up(self, verdict: str, text: str) -> None:
        result = CheckResult(CHECK_NAME, "pass" if verdict == "pass" else "unjudged", text)
        if self._outbox.result(result):
            log.info("%s: %s", verdict, text)


def _set_where_none_is() -> str:
    """Set the conditions where the site has set none; return why that cannot be."""
    of_all = ("policy", "-g", ALL_GPUS)
    said = _ask(*of_all, "--get")
    if _NONE_SET.search(said):
        # Action 0 and validation 0: none.
        said = _ask(*of_all, "--set", "0,0", *CONDITIONS)
    if _REFUSED.search(said):
        return f"DCGM's policies cannot be followed: {' '.join(said.split())[:MAX_SAID_CHARACTERS]}"
    return ""


def _ask(*words: str) -> str:
    """Return what dcgmi printed; an error begins like its own errors."""
    try:
        return ask_dcgmi(*words)
    except SresError as error:
        return f"Error: {error}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """End dcgmi; by SIGTERM first, so that it takes its registration back."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILL_GRACE_SECONDS)
            return
