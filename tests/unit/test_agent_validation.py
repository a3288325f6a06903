"""A repaired node is validated once, and only while no job can come to it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from slurm_resilience.agent.joining import validation
from slurm_resilience.agent.joining.validation import (
    VALIDATION_TRANSITIONS,
    Validation,
    ValidationRecord,
    ValidationState,
    is_out_by_request,
    judge_validation,
)
from slurm_resilience.clock import SystemClock
from slurm_resilience.errors import IllegalTransition
from slurm_resilience.health.check import Unjudged
from slurm_resilience.model import REBOOT, REPLACE, Node, Severity

OUT = Node("n1", "IDLE", frozenset({"FAIL"}), REPLACE)
IN_SERVICE = Node("n1", "IDLE")
HELD = Node("n1", "IDLE", frozenset({"DRAIN"}), "RMA 4711")


class Site:
    """A node: what Slurm shows of it, one look after the other, and the site's program."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "validate"
        self.state_dir = folder / "state"
        self.ran = folder / "ran"
        self.looks: list[Node | None] = [OUT]
        self.busy = [False]
        self.stop = threading.Event()
        self.write("exit 0")

    def write(self, body: str) -> None:
        self.program.write_text(f"#!/bin/sh\necho $1 >> {self.ran}\n{body}\n")
        self.program.chmod(0o755)

    def look(self) -> Node | None:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def is_busy(self) -> bool:
        return self.busy.pop(0) if len(self.busy) > 1 else self.busy[0]

    def validated(self, boot_id: str = "b1", seconds: float = 60.0) -> ValidationRecord:
        made = self.made(boot_id, seconds)
        made.run()
        return made.record

    def tried(self) -> ValidationRecord:
        """Return what is known after one look at a node that is out of service."""
        made = self.made()
        made._step(OUT)
        return made.record

    def made(self, boot_id: str = "b1", seconds: float = 60.0) -> Validation:
        return Validation(
            (str(self.program),),
            seconds,
            "n1",
            boot_id,
            self.state_dir,
            self.look,
            self.is_busy,
            SystemClock(),
            self.stop,
        )

    @property
    def runs(self) -> int:
        return len(self.ran.read_text().splitlines()) if self.ran.exists() else 0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(validation, "LOOK_SECONDS", 0.02)
    return Site(tmp_path)


def test_it_passes_with_exit_code_0_and_is_run_once_in_a_boot(site: Site) -> None:
    site.write("echo all well")
    first = site.validated()
    assert (first.state, first.text) == (ValidationState.PASSED, "all well")
    assert site.ran.read_text() == "n1\n"
    assert site.validated() == first  # a restart of sresd
    assert site.runs == 1
    assert site.validated("b2").state is ValidationState.PASSED
    assert site.runs == 2


def test_anything_else_fails_with_the_last_line(site: Site) -> None:
    site.write("echo bandwidth 30, expected 80; exit 7")
    assert site.validated().state is ValidationState.FAILED
    text, (finding,) = judge_validation(site.validated())
    assert text == finding.text == "bandwidth 30, expected 80"
    assert finding.severity is Severity.REPLACE
    assert site.runs == 1


def test_its_time_is_limited_with_all_that_it_started(site: Site) -> None:
    site.write("sleep 1000 & sleep 1000")
    record = site.validated(seconds=0.3)
    assert (record.state, record.text) == (ValidationState.FAILED, "no end within 0.3 s")


@pytest.mark.parametrize("node", [IN_SERVICE, HELD])
def test_a_node_in_service_or_kept_by_a_person_is_left_alone(site: Site, node: Node) -> None:
    site.looks = [None, node]
    assert site.validated().state is ValidationState.NOT_NEEDED
    assert site.runs == 0


def test_it_waits_for_jobs_and_scripts_to_end(site: Site) -> None:
    site.busy = [True, True, False]
    assert site.validated().state is ValidationState.PASSED
    site.busy, site.looks = [True], [OUT, OUT, IN_SERVICE]
    assert site.validated("b2").state is ValidationState.NOT_NEEDED
    assert site.runs == 1


@pytest.mark.parametrize("node", [IN_SERVICE, HELD])
def test_a_person_who_takes_the_node_ends_it(site: Site, node: Node) -> None:
    site.write("sleep 1000")
    site.looks = [OUT, OUT, node]
    assert site.validated().state is ValidationState.NOT_NEEDED
    assert not (site.state_dir / "validation.json").exists()


def test_the_end_of_sresd_is_no_outcome(site: Site) -> None:
    """A passed one, or none needed, would give the node back in that very moment."""
    site.write("sleep 1000")
    site.looks = [OUT]
    states = []

    def look() -> Node:
        if site.runs:
            site.stop.set()
        return OUT

    site.look = look  # type: ignore[method-assign]
    states.append(site.validated().state)
    assert states == [ValidationState.DUE]
    assert not (site.state_dir / "validation.json").exists()


def test_each_change_of_state_is_in_the_table(site: Site) -> None:
    made = site.made()
    made.run()
    with pytest.raises(IllegalTransition, match="a validation that is passed cannot be due"):
        made._become(ValidationState.DUE)
    assert set(VALIDATION_TRANSITIONS) == set(ValidationState)
    ends = {state for state, following in VALIDATION_TRANSITIONS.items() if not following}
    assert ends == {state for state in ValidationState if state.is_over}


def test_a_program_that_others_may_write_is_never_run(site: Site) -> None:
    site.program.chmod(0o777)
    record = site.tried()
    assert record.state is ValidationState.DUE and "may be written by others" in record.text
    assert site.runs == 0


def test_a_program_that_is_not_there_does_not_fail_the_node(site: Site) -> None:
    site.program.unlink()
    record = site.tried()
    assert record.state is ValidationState.DUE and "it cannot be run" in record.text
    with pytest.raises(Unjudged, match="it cannot be run"):
        judge_validation(record)


def test_it_is_tried_again_once_it_is_there(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.program.unlink()
    made = site.made()
    made._step(OUT)
    site.write("exit 0")
    made._step(OUT)
    assert made.record.state is ValidationState.DUE  # not at once
    monkeypatch.setattr(made, "_again_at", 0.0)
    made._step(OUT)
    assert made.record.state is ValidationState.PASSED and site.runs == 1


def test_a_long_output_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_OUTPUT_BYTES", 4096)
    site.write("yes middle | head -n 50000; sleep 0.1; echo last; exit 1")
    # The file may be cut within a line.
    assert site.validated().text.endswith("last")


def test_a_record_that_cannot_be_read_counts_for_nothing(site: Site) -> None:
    site.state_dir.mkdir()
    (site.state_dir / "validation.json").write_text("{")
    assert site.validated().state is ValidationState.PASSED


@pytest.mark.parametrize("state", ["unknown", "due", "running"])
def test_what_is_not_over_is_not_judged(state: str) -> None:
    with pytest.raises(Unjudged, match=f"the validation is {state}"):
        judge_validation(ValidationRecord("b1", ValidationState(state)))


@pytest.mark.parametrize(
    ("node", "is_out"),
    [
        (OUT, True),
        (Node("n1", "DOWN", reason=REBOOT), True),
        (Node("n1", "DOWN", reason=f"{REBOOT} : reboot complete"), True),
        (Node("n1", "DOWN", reason="Not responding"), False),
        (Node("n1", "IDLE", frozenset({"DRAIN"}), f"{REPLACE} please"), False),
        (Node("n1", "IDLE", reason=REPLACE), False),
        (Node("n1", "DOWN", reason=REPLACE, reason_unclear=True), False),
        (HELD, False),
        (IN_SERVICE, False),
    ],
)
def test_only_a_request_keeps_a_node_out_for_its_validation(node: Node, is_out: bool) -> None:
    assert is_out_by_request(node) == is_out
