"""Validate this node before it returns: run the site's command once after a repair.

A node is validated while Slurm keeps it out of service for a request (`Action:Replace`, say), so no
job can come to it. Where sresd finds the node in service, or kept by a person, nothing is run.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from slurm_resilience.child_group import end_with_parent
from slurm_resilience.clock import Clock
from slurm_resilience.errors import IllegalTransition, SresError
from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.lifecycle.script_set import refuse_unsafe
from slurm_resilience.model import REBOOT, REPLACE, Finding, Node, Severity

log = logging.getLogger("sresd.validation")

NAME = "validation"
LOOK_SECONDS = 2.0
"""Between two looks at Slurm, and at the command."""
PERIOD_SECONDS = 1.0
AGAIN_SECONDS = 10.0
"""Until a command is tried again that could not be run."""
KILL_SECONDS = 10.0
"""Until a killed command is waited for no more."""
MAX_OUTPUT_BYTES = 64 << 10
RECORD_NAME = "validation.json"
_LINE_CHARACTERS = 200


class ValidationState(enum.StrEnum):
    """The stage of this boot's validation."""

    UNKNOWN = "unknown"
    """Slurm has not said yet whether the node is in service."""
    NOT_NEEDED = "not-needed"
    """The node was in service, or kept by a person, when sresd first looked."""
    DUE = "due"
    RUNNING = "running"
    PASSED = "passed"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in (
            ValidationState.NOT_NEEDED,
            ValidationState.PASSED,
            ValidationState.FAILED,
        )


_V = ValidationState
VALIDATION_TRANSITIONS: dict[ValidationState, frozenset[ValidationState]] = {
    _V.UNKNOWN: frozenset({_V.NOT_NEEDED, _V.DUE, _V.RUNNING, _V.PASSED, _V.FAILED}),
    _V.DUE: frozenset({_V.NOT_NEEDED, _V.RUNNING}),
    # DUE: sresd ends, and its successor runs it once more.
    _V.RUNNING: frozenset({_V.NOT_NEEDED, _V.DUE, _V.PASSED, _V.FAILED}),
    _V.NOT_NEEDED: frozenset(),
    _V.PASSED: frozenset(),
    _V.FAILED: frozenset(),
}
"""The states that may follow each. An earlier sresd's outcome in this boot may follow UNKNOWN."""


class ValidationRecord(msgspec.Struct, frozen=True):
    """The outcome in one boot, kept over a restart of sresd."""

    boot_id: str
    state: ValidationState
    text: str = ""
    at: float = 0.0


class Validation:
    """Runs the command in a thread of its own, and tells how it stands."""

    def __init__(
        self,
        command: Sequence[str],
        seconds: float,
        node: str,
        boot_id: str,
        state_dir: Path,
        look: Callable[[], Node | None],
        is_busy: Callable[[], bool],
        clock: Clock,
        stop: threading.Event,
    ) -> None:
        """
        Args:
            command: the site's; the node's name is appended.
            seconds: its time limit.
            node: the node's name in Slurm.
            boot_id: of the present boot.
            state_dir: where the outcome is kept.
            look: asks Slurm for the node; None: it does not answer.
            is_busy: tells whether a job runs here, or the lifecycle scripts have not ended well.
            clock: of this machine.
            stop: ends it.
        """
        self._command = (*command, node)
        self._seconds = seconds
        self._boot_id = boot_id
        self._path = state_dir / RECORD_NAME
        self._look = look
        self._is_busy = is_busy
        self._clock = clock
        self._stop = stop
        self._record = ValidationRecord(boot_id, ValidationState.UNKNOWN)
        self._again_at = float("-inf")
        """Not before this is a command tried again that could not be run."""

    @property
    def record(self) -> ValidationRecord:
        return self._record

    def check(self) -> Check:
        """Return the check that reports it."""

        def probe(context: CheckContext) -> ValidationRecord:
            return self._record

        def judge(record: ValidationRecord, context: CheckContext) -> Judgement:
            return judge_validation(record)

        return Check(NAME, probe, judge, period=PERIOD_SECONDS)

    def run(self) -> None:
        """Run the thread, until it is decided whether this boot is validated, and how."""
        known = _read(self._path)
        if known is not None and known.boot_id == self._boot_id and known.state.is_over:
            self._follow(known)
            return
        while not (self._stop.is_set() or self._record.state.is_over):
            self._step(self._look())
            self._clock.wait(self._stop, LOOK_SECONDS)

    def _step(self, node: Node | None) -> None:
        if node is None:
            return
        if not is_out_by_request(node):
            # Also one that a person has put back into service before the command had begun.
            self._become(ValidationState.NOT_NEEDED, f"Slurm shows it {node.state}")
        elif self._clock.monotonic() < self._again_at:
            return
        elif self._is_busy():
            self._become(ValidationState.DUE)
        else:
            self._become(ValidationState.RUNNING)
            self._validate()

    def _validate(self) -> None:
        log.info("validation begins: %s", " ".join(self._command))
        try:
            refuse_unsafe(Path(self._command[0]))
            with tempfile.TemporaryFile() as output:
                rc = self._end_of(output)
                text = _last_line(output)
        except (SresError, OSError) as error:
            # Not the fault of the node: a wrong path, or a job that took all process numbers.
            self._again_at = self._clock.monotonic() + AGAIN_SECONDS
            self._become(ValidationState.DUE, f"it cannot be run: {error}")
            return
        if rc is None:
            return
        if rc == 0:
            self._become(ValidationState.PASSED, text, keep=True)
        else:
            self._become(ValidationState.FAILED, text or f"exit code {rc}", keep=True)

    def _end_of(self, output: IO[bytes]) -> int | None:
        """Run the command; return its exit code, None if it was stopped for the node's sake."""
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
            # Where sresd is killed, its successor would run a second one beside it.
            preexec_fn=end_with_parent,
        )
        deadline = self._clock.monotonic() + self._seconds
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(LOOK_SECONDS, self._seconds))
                _bound(output)
                if self._clock.monotonic() >= deadline:
                    os.write(output.fileno(), f"\nno end within {self._seconds:g} s\n".encode())
                    return 124
                if self._stop.is_set():
                    self._become(ValidationState.DUE)
                    return None
                node = self._look()
                if node is not None and not is_out_by_request(node):
                    text = f"stopped: Slurm shows it {node.state}"
                    self._become(ValidationState.NOT_NEEDED, text)
                    return None
        finally:
            # What it left in its session goes too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # One that hangs in the kernel must not keep the outcome from being told.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)

    def _become(self, state: ValidationState, text: str = "", keep: bool = False) -> None:
        if state is self._record.state:
            return
        log.info("validation: %s%s", state, f": {text}" if text else "")
        self._follow(ValidationRecord(self._boot_id, state, text, self._clock.now()))
        if keep:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                new = self._path.with_name(f"{RECORD_NAME}.new")
                new.write_bytes(msgspec.json.encode(self._record))
                new.replace(self._path)

    def _follow(self, record: ValidationRecord) -> None:
        """Go to a state.

        Raises:
            IllegalTransition: `VALIDATION_TRANSITIONS` does not have the change.
        """
        current = self._record.state
        if record.state not in VALIDATION_TRANSITIONS[current]:
            raise IllegalTransition(f"a validation that is {current} cannot be {record.state}")
        self._record = record


def is_out_by_request(node: Node) -> bool:
    """Tell whether Slurm keeps a node out of service because it was to be repaired. Slurm adds its
    own words behind a reason when it reboots a node."""
    is_out = node.is_fail or node.is_down or node.is_drain
    is_asked = any(
        node.reason == action or node.reason.startswith(f"{action} : ")
        for action in (REPLACE, REBOOT)
    )
    return is_out and is_asked and not node.reason_unclear


def judge_validation(record: ValidationRecord) -> Judgement:
    """Judge how the validation stands.

    Raises:
        Unjudged: it is not over.
    """
    match record.state:
        case ValidationState.PASSED | ValidationState.NOT_NEEDED:
            said = f": {record.text}" if record.text else ""
            return Judgement(f"{record.state}{said}")
        case ValidationState.FAILED:
            finding = Finding(NAME, Severity.REPLACE, record.text, record.at)
            return Judgement(record.text, (finding,))
        case _:
            said = f": {record.text}" if record.text else ""
            raise Unjudged(f"the validation is {record.state}{said}")


def _read(path: Path) -> ValidationRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ValidationRecord)
    except (OSError, msgspec.DecodeError):
        return None


def _bound(output: IO[bytes]) -> None:
    """Keep the end of an output that has grown too long."""
    number = output.fileno()
    size = os.fstat(number).st_size
    if size > MAX_OUTPUT_BYTES:
        tail = os.pread(number, MAX_OUTPUT_BYTES // 2, size - MAX_OUTPUT_BYTES // 2)
        output.seek(0)
        output.truncate(0)
        output.write(tail)
        output.flush()


def _last_line(output: IO[bytes]) -> str:
    number = output.fileno()
    size = os.fstat(number).st_size
    tail = os.pread(number, 4096, max(0, size - 4096)).decode("utf-8", "replace")
    lines = [" ".join(line.split()) for line in tail.splitlines() if line.strip()]
    text = lines[-1][:_LINE_CHARACTERS] if lines else ""
    return "".join(char if char.isprintable() else "?" for char in text)
