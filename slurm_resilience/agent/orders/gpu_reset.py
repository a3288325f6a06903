"""Reset the GPUs that ask for it, once for each order, and look whether that helped.

Nothing may run on the node. `nvidia-smi` does it, and tells the GPUs and the programs that have
them. An order that is asked for again is answered as before, also by a sresd that was started anew.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from slurm_resilience.agent.evidence.machine_tools import run_tool
from slurm_resilience.agent.finding_intake import FindingIntake
from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.clock import Clock
from slurm_resilience.errors import SresError
from slurm_resilience.model import FAULTY, Finding, Severity
from slurm_resilience.wire.messages import GpusReset, ResetGpus

log = logging.getLogger("sresd.gpu_reset")

RECORD_NAME = "gpu-reset.json"
LIST_SECONDS = 15.0
RESET_SECONDS = 60.0
"""Seconds that one call has to reset a GPU. A driver that hangs takes for ever."""
CHECK_SECONDS = 30.0
"""Seconds that the checks have afterwards."""
TRIES = 3
TRY_AGAIN_SECONDS = 2.0
"""Until a GPU that is in use is tried again: a check may have it open for a moment."""
MAX_CHARACTERS = 200
_ADDRESS = re.compile(
    r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-9a-f])?", re.IGNORECASE
)

Address = tuple[int, int, int]
"""PCI domain, bus and device."""


class ResetRecord(msgspec.Struct, frozen=True):
    """The last order, kept over a restart of sresd."""

    order: str
    answer: GpusReset | None = None
    """None: it has begun."""


def address_of(text: str) -> Address | None:
    """Return a GPU's address, however many digits its domain is written with; None: it is none."""
    match = _ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    return int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16)


class GpuReset:
    """Carries out orders, one at a time."""

    def __init__(
        self,
        nvidia_smi: str,
        state_dir: Path,
        outbox: Outbox,
        intake: FindingIntake,
        is_busy: Callable[[], bool],
        check: Callable[[float], object],
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        """
        Args:
            nvidia_smi: the program.
            state_dir: where the last order is kept.
            outbox: knows what is found on the node.
            intake: is told of GPUs that were reset.
            is_busy: tells whether a job runs here.
            check: runs the health checks within so many seconds.
            clock: of this machine.
            stop: ends it.
        """
        self._nvidia_smi = nvidia_smi
        self._path = state_dir / RECORD_NAME
        self._outbox = outbox
        self._intake = intake
        self._is_busy = is_busy
        self._check = check
        self._clock = clock
        self._stop = stop

    def answer(self, asked: ResetGpus) -> GpusReset:
        """Carry out an order, or tell how it ended.

        Raises:
            SresError: it was not begun, and why.
        """
        known = self._read()
        if known is not None and known.order == asked.order:
            text = "sresd ended in the middle of the reset"
            return known.answer or GpusReset(False, text)
        targets = self._targets()
        try:
            self._write(ResetRecord(asked.order))
        except OSError as error:
            raise SresError(f"{self._path} cannot be written: {error.strerror}") from None
        answer = self._carry_out(targets, self._clock.monotonic() + asked.seconds)
        log.warning("order %s: %s", asked.order, answer.text)
        try:
            self._write(ResetRecord(asked.order, answer))
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error)
        return answer

    def _asks(self) -> dict[Address, list[Finding]]:
        """Return what asks for a reset, by GPU.

        Raises:
            SresError: nothing does, or something that is no GPU.
        """
        found: dict[Address, list[Finding]] = {}
        for finding in self._outbox.holding():
            if finding.severity is not Severity.RESET:
                continue
            address = address_of(finding.subject)
            if address is None:
                raise SresError(f"{finding.check} asks for the reset of no GPU: {finding.text}")
            found.setdefault(address, []).append(finding)
        if not found:
            raise SresError("no GPU has a finding that asks for its reset")
        return found

    def _targets(self) -> Mapping[str, list[Finding]]:
        """Return the GPUs to reset, by the name that nvidia-smi has for each.

        Raises:
            SresError: nothing is to be reset, or something runs on the node.
        """
        asks, names = self._asks(), self._gpus()
        unknown = [found[0].subject for address, found in asks.items() if address not in names]
        if unknown:
            raise SresError(f"{self._nvidia_smi} knows no GPU {', '.join(unknown)}")
        if self._is_busy():
            raise SresError("a job's step runs on the node")
        users = self._query("--query-compute-apps=gpu_bus_id,pid", "--format=csv,noheader")
        for line in users.splitlines():
            gpu, _, pid = line.partition(",")
            if address_of(gpu) in asks:
                raise SresError(f"process {pid.strip()} has the GPU {gpu}")
        return {names[address]: found for address, found in asks.items()}

    def _gpus(self) -> dict[Address, str]:
        """Return the GPUs that answer, by address.

        Raises:
            SresError: nvidia-smi fails.
        """
        listed = self._query("--query-gpu=pci.bus_id", "--format=csv,noheader").splitlines()
        found = {address_of(line): line.strip() for line in listed}
        return {address: name for address, name in found.items() if address is not None}

    def _query(self, *words: str) -> str:
        end = run_tool((self._nvidia_smi, *words), LIST_SECONDS)
        if end is None:
            raise SresError(f"{self._nvidia_smi} is not there, or did not answer")
        if end.code != 0:
            raise SresError(f"{self._nvidia_smi} ended with {end.code}: {_last(end.text)}")
        return end.text

    def _carry_out(self, targets: Mapping[str, list[Finding]], deadline: float) -> GpusReset:
        for gpu in targets:
            trouble = self._reset(gpu, deadline)
            if trouble:
                return GpusReset(False, trouble)
        try:
            answering = self._gpus().values()
        except SresError as error:
            return GpusReset(False, f"after the reset: {error}")
        missing = [gpu for gpu in targets if gpu not in answering]
        if missing:
            return GpusReset(False, f"{', '.join(missing)} does not answer after its reset")
        for finding in (one for found in targets.values() for one in found):
            self._intake.recovered(finding.subject)
        self._check(max(1.0, min(CHECK_SECONDS, deadline - self._clock.monotonic())))
        addresses = {address_of(gpu) for gpu in targets}
        still = [
            one
            for one in self._outbox.holding()
            if one.severity in FAULTY and address_of(one.subject) in addresses
        ]
        if still:
            return GpusReset(False, f"found after the reset: {still[0].check}: {still[0].text}")
        return GpusReset(True, f"reset {', '.join(targets)}; nothing is found any more")

    def _reset(self, gpu: str, deadline: float) -> str:
        """Reset one GPU; return the trouble, empty: there is none."""
        trouble = ""
        for number in range(TRIES):
            seconds = min(RESET_SECONDS, deadline - self._clock.monotonic())
            again = number and self._clock.wait(self._stop, TRY_AGAIN_SECONDS)
            if seconds <= 0 or again:
                return trouble or f"{gpu} was not reset in time"
            end = run_tool((self._nvidia_smi, "--gpu-reset", "-i", gpu), seconds)
            if end is None:
                return f"{self._nvidia_smi} did not reset {gpu} within {seconds:.0f} s"
            if end.code == 0:
                return ""
            trouble = f"{gpu} was not reset ({end.code}): {_last(end.text)}"
            if "in use" not in end.text.lower():
                return trouble
        return trouble

    def _read(self) -> ResetRecord | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=ResetRecord)
        except (OSError, msgspec.MsgspecError):
            return None

    def _write(self, record: ResetRecord) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{RECORD_NAME}.new")
        new.write_bytes(msgspec.json.encode(record))
        new.replace(self._path)


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:MAX_CHARACTERS] if lines else "it printed nothing"
