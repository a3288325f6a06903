"""sresctld ends as by kill -9 at boundaries of its journal, in one whole replacement.

A fault is found on a busy node: it is marked, drained, replaced by a program, and given back. By
default sresctld ends again and again in one replacement, at the boundaries where most is at stake.
With SRES_TEST_BOUNDARIES=all (or some numbers: 36-40,7) each boundary has a replacement of its own,
whose end state is compared with that of one without an end.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import NodesOf, events

from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.programs import own_bin
from slurm_resilience.model import REPLACE

WaitFor = Callable[..., Any]
HERE = Path(__file__).parent
XID = "NVRM: Xid (PCI:0000:04:00): 64, Row Remapper: a row remapping has failed."
CHOSEN = os.environ.get("SRES_TEST_BOUNDARIES", "")
ONCE = ("detected", "marked", "replacing", "replaced", "closed")
"""Events that one replacement has once."""
ENDS = (
    "after marking",  # the intent to set the node aside is written, and Slurm knows nothing of it
    "before replacing",
    "after replacing",  # the intent to start the program is written, and it has not started
    "after replaced",  # its end is written, and nothing follows from it yet
)


class Site:
    """A lab with two nodes, whose sresctld may end at a boundary."""

    def __init__(self, lab: Lab, place: Path, wait_for: WaitFor) -> None:
        self.lab, self.wait_for = lab, wait_for
        self.place, self.calls = place, place / "calls"
        self._state_dir = lab.directory / "ctl" / "sresctld"
        self._sresctld: subprocess.Popen[str] | None = None
        self._log = (place / "sresctld.log").open("a")

    def start(self, *end_at: str) -> None:
        (self.place / "end_at").write_text("\n".join(end_at))
        self.go_on()

    def go_on(self) -> None:
        """Start sresctld with the ends that are still to come."""
        words = [sys.executable, str(HERE / "ended_at_boundary.py"), str(self.place)]
        self._sresctld = self.lab.popen(words, stdout=self._log, stderr=self._log)

    def stop(self) -> None:
        if self._sresctld is not None:
            self._sresctld.terminate()
            assert self._sresctld.wait(30) in (0, -signal.SIGKILL)
            self._sresctld = None

    def end(self) -> None:
        self.stop()
        self._log.close()

    @property
    def has_ended(self) -> bool:
        assert self._sresctld is not None
        return self._sresctld.poll() is not None

    def forget(self) -> None:
        """Begin with an empty journal."""
        shutil.rmtree(self._state_dir)
        self._state_dir.mkdir()
        for name in ("calls", "boundaries", "counts"):
            (self.place / name).unlink(missing_ok=True)

    def health(self) -> str:
        words = [str(own_bin() / "sres"), "node", "list", "n2", "--format", "json"]
        done = self.lab.run(words)
        return str(json.loads(done.stdout)[0]["health"]) if done.stdout else ""

    def boundaries(self) -> list[str]:
        """Return those that were come to, in order, without their numbers."""
        path = self.place / "boundaries"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.partition(" ")[2] for line in lines]

    def ends_to_come(self) -> list[str]:
        return (self.place / "end_at").read_text().splitlines()

    def count(self, kind: str) -> int:
        return sum(event["kind"] == kind and event["node"] == "n2" for event in events(self.lab))

    def program_calls(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def end_state(self) -> dict[str, Any]:
        """Return what is left of the replacement in Slurm and in the journal."""
        shown = self.lab.run(["scontrol", "show", "node", "n2", "-o"], check=True).stdout
        words = dict(word.partition("=")[::2] for word in shown.split())
        journal = Journal(self._state_dir / "journal.db")
        try:
            incidents = journal.incidents_of("n2", 10)
            open_ones = journal.incidents()
        finally:
            journal.close()
        return {
            "state": words["State"],
            "reason": shown.partition(" Reason=")[2],
            "comment": shown.partition(" Comment=")[2].partition(" Reason=")[0],
            "incidents": [
                (one.kind, one.state, one.action, one.attempts, one.ended_by) for one in incidents
            ],
            "open": len(open_ones),
            "program": self.program_calls(),
            "events": {kind: self.count(kind) for kind in ONCE},
        }

    def replacement(self, *end_at: str) -> dict[str, Any]:
        """Have n2 replaced once, with ends of sresctld at boundaries; return the end state."""
        self.forget()
        self.start(*end_at)
        self.wait_for(lambda: self.health() == "healthy", 30, "n2 beats")
        (self.place / "counts").touch()
        batch = ["sbatch", "-w", "n2", "--no-requeue", "-o", "/dev/null", "--wrap", "sleep 2"]
        self.lab.run(batch, cwd=self.place, check=True)
        running = ["squeue", "-h", "-t", "R", "-o", "%T"]
        self.wait_for(lambda: self.lab.run(running).stdout.strip(), 30, "its job runs")
        self.lab.kmsg("n2", XID)
        told = NodesOf(self.lab)
        while True:
            # It may also end just behind the last event: that it answers comes later.
            self.wait_for(
                lambda: self.has_ended or (self.count("closed") and self.health() == "healthy"),
                120,
                told,
            )
            if not self.has_ended:
                break
            if not self.ends_to_come():
                (self.place / "counts").unlink()
            self.go_on()
        self.wait_for(lambda: self.lab.node_states()["n2"] == "IDLE", 30, told)
        self.stop()
        return self.end_state()


@pytest.fixture
def site(fresh_lab: Callable[[LabSpec], Lab], tmp_path: Path, wait_for: WaitFor) -> Iterator[Site]:
    tmp_path.chmod(0o755)
    program = tmp_path / "replace"
    lab = fresh_lab(
        LabSpec(
            nodes=2,
            network=True,
            lifecycle=None,
            sres_options={
                "replace": {"program": [str(program)], "silent_for": 5.0, "backoff": 1.0}
            },
        )
    )
    site = Site(lab, tmp_path, wait_for)
    # The first thing that it does: a second call would show, also of one that fails.
    work = shlex.quote(str(lab.directory / "bin" / "replace-node"))
    program.write_text(f'#!/bin/sh\necho "$@" >> {site.calls}\nexec {work} "$@"\n')
    program.chmod(0o755)
    lab.kill_daemon("sresctld")
    yield site
    site.end()


def expected_after(whole: dict[str, Any], boundary: str) -> dict[str, Any]:
    """Return the end state of a replacement in which sresctld ended there.

    Between the intent and the program's start, the try counts as lost: sresctld looks at everything
    anew and begins a second one, which is the first that starts the program.
    """
    if boundary.startswith("before ") or not boundary.endswith(" replacing"):
        return whole
    incidents = [
        (kind, state, action, 2, end) for kind, state, action, _, end in whole["incidents"]
    ]
    return whole | {"incidents": incidents, "events": whole["events"] | {"replacing": 2}}


WHOLE = {
    "state": "IDLE",
    "reason": "",
    "comment": "",
    "incidents": [("sick", NodeState.HEALTHY, REPLACE, 1, NodeEvent.CLOSED)],
    "open": 0,
    "program": ["replace n2"],
    "events": dict.fromkeys(ONCE, 1),
}
"""The end state of a replacement in which sresctld lived on."""


@pytest.mark.skipif(bool(CHOSEN), reason="SRES_TEST_BOUNDARIES names others")
def test_a_replacement_is_done_once_though_sresctld_ends_again_and_again(site: Site) -> None:
    found = site.replacement(*ENDS)
    assert site.ends_to_come() == [], site.boundaries()
    assert found == expected_after(WHOLE, "after replacing")


def chosen(boundaries: list[str]) -> list[int]:
    """Return the numbers of the boundaries that are asked for."""
    if CHOSEN == "all":
        return list(range(1, len(boundaries) + 1))
    spans = [part.partition("-") for part in CHOSEN.split(",")]
    numbers = [n for first, _, last in spans for n in range(int(first), int(last or first) + 1)]
    return [number for number in numbers if number <= len(boundaries)]


if CHOSEN:

    @pytest.mark.timeout(3600)
    def test_wherever_sresctld_ends_the_replacement_is_done_once(site: Site) -> None:
        whole = site.replacement()
        boundaries = site.boundaries()
        print(whole, *boundaries, sep="\n")
        assert whole == WHOLE
        wrong = {}
        for number in chosen(boundaries):
            found = site.replacement(str(number))
            # The same number is another boundary where a label was written a round later.
            ended_at = site.boundaries()[-1]
            is_right = found == expected_after(whole, ended_at)
            print(number, ended_at, is_right)
            if not is_right:
                wrong[f"{number}: {ended_at}"] = found
        assert wrong == {}
