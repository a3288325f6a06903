"""Injected faults: each says what it leads to, and is only let loose where it may be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from slurm_resilience.agent.drill_window import MAX_SECONDS, DrillWindow
from slurm_resilience.cli import main
from slurm_resilience.cli.controller import ClusterView
from slurm_resilience.cli.drill import inject_command
from slurm_resilience.config import AgentSettings, Config
from slurm_resilience.errors import SresError, UsageError, WireError
from slurm_resilience.health.check import CheckContext
from slurm_resilience.health.check_registry import BUILT_IN
from slurm_resilience.health.grouping import group
from slurm_resilience.health.injected_tree import MARKER, marked
from slurm_resilience.health.kernel_log import Classifier
from slurm_resilience.inject.fault_catalogue import CATALOGUE, find_fault, lines_of
from slurm_resilience.inject.machine_faults import crash, end_in_lab, write_lines
from slurm_resilience.inject.sysfs_faults import changed_files
from slurm_resilience.inject.sysfs_overlay import PLACES
from slurm_resilience.model import SEVERITIES, Node, Severity
from slurm_resilience.wire.messages import ChangeDrill, DrillAnswer


class StandingClock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.moment = 1000.0

    def now(self) -> float:
        return self.moment

    def monotonic(self) -> float:
        return self.moment

    def wait(self, event: Any, seconds: float) -> bool:
        self.moment += seconds
        return False


# -- the catalogue --------------------------------------------------------------------------------

BY_LINE = [fault.name for fault in CATALOGUE if fault.way == "kernel-log"]


@pytest.mark.parametrize("name", [*BY_LINE, "xid48", "xid13", "xid64", "xid45"])
def test_the_lines_of_a_fault_lead_to_what_it_says(name: str) -> None:
    fault = find_fault(name)
    classifier = Classifier()
    found = [
        one
        for line in lines_of(fault, "0000:3B:00")
        for one in classifier.feed(line, 5.0, is_drill=True)
    ]
    assert found
    assert all(one.injected and one.text.endswith("(injected)") for one in found)
    (incident,) = group(found) or (None,)
    severity = incident.lead.severity if incident else Severity.NONE
    assert severity is fault.asks_for
    watched = [one for line in lines_of(fault) for one in Classifier().feed(line, 5.0)]
    assert all(SEVERITIES.index(one.severity) <= 1 for one in watched), "without a drill"


@pytest.mark.parametrize("name", ["node-crash", "cable-cut"])
def test_a_fault_that_happens_is_announced(name: str) -> None:
    (line,) = lines_of(find_fault(name))
    (told,) = Classifier().feed(line, 5.0, is_drill=True)
    assert (told.check, told.code) == ("injected", name)


@pytest.mark.parametrize(
    "name", ["", "xid", "xid7x", "xid999", "XID79", "hang\x1b[31m", "a" * 1000]
)
def test_an_unknown_fault_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageError, match="is no fault; there are xid79, ") as failed:
        find_fault(name)
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) < 300


@pytest.mark.parametrize("gpu", ["", "0", "0000:04:00\nforged", "0000:04:00.0", "zzzz:04:00"])
def test_what_is_no_address_is_refused(gpu: str) -> None:
    with pytest.raises(UsageError, match="is no PCI address"):
        lines_of(find_fault("xid79"), gpu)


BY_TREE = [fault.name for fault in CATALOGUE if fault.way == "sysfs"]


def lay_out(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        file = root / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


@pytest.mark.parametrize("has_hardware", [True, False])
@pytest.mark.parametrize("name", BY_TREE)
def test_a_changed_tree_leads_to_what_it_says(
    tmp_path: Path, name: str, has_hardware: bool
) -> None:
    fault = find_fault(name)
    if has_hardware:
        ports = "/sys/class/infiniband"
        lay_out(
            tmp_path,
            {
                f"{ports}/efa_0/device/vendor": "0x1d0f",
                f"{ports}/efa_0/device/device": "0xefa2",
                f"{ports}/efa_0/ports/1/state": "4: ACTIVE",
                f"{ports}/mlx5_0/ports/1/state": "4: ACTIVE",
                f"{ports}/mlx5_0/ports/1/phys_state": "5: LinkUp",
                "/sys/devices/system/edac/mc/mc1/dimm3/dimm_ue_count": "0",
                "/sys/devices/virtual/neuron_device/neuron2/stats/other": "0",
            },
        )
    elif name == "ib-port-down":
        with pytest.raises(UsageError, match="shows no InfiniBand or RoCE port that is up"):
            changed_files(fault, tmp_path)
        return
    (check,) = (one for one in BUILT_IN if one.name == fault.check)
    context = CheckContext(tmp_path)
    before = check.probe(context)
    context = replace(context, first=before, earlier=(before,))
    assert not check.judge(before, context).findings
    changed = changed_files(fault, tmp_path)
    assert all(path.startswith(PLACES) for path in changed)
    lay_out(tmp_path, changed)
    seen = check.judge(check.probe(context), context)
    assert [one.severity for one in seen.findings] == [fault.asks_for]
    assert marked(check.name, seen, context) == seen, "nothing says that a person did it"
    lay_out(tmp_path, {MARKER: f"another\n{check.name}"})
    (told,) = marked(check.name, seen, context).findings
    assert told.injected and told.text == f"{seen.findings[0].text} (injected)"
    assert marked("disk", seen, context) == seen


def test_what_is_over_at_once_cannot_be_undone() -> None:
    with pytest.raises(UsageError, match="xid79 is over when it has happened"):
        end_in_lab(find_fault("xid79"), None, "n1")  # type: ignore[arg-type]


# -- the drill ------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> StandingClock:
    return StandingClock()


@pytest.fixture
def window(tmp_path: Path, clock: StandingClock) -> Callable[..., DrillWindow]:
    """Make sresd's window as a start of it does."""

    def make(boot_id: str = "boot-1") -> DrillWindow:
        return DrillWindow(tmp_path / "run" / "drill.json", boot_id, False, clock)

    return make


def test_a_drill_ends_by_itself(window: Callable[..., DrillWindow], clock: StandingClock) -> None:
    drill = window()
    assert not drill.covers()
    assert drill.change(ChangeDrill("open", 60.0)) == DrillAnswer(60.0)
    assert drill.covers()
    clock.moment += 59.0
    assert drill.covers()
    assert drill.change(ChangeDrill()) == DrillAnswer(1.0)
    clock.moment += 1.0
    assert not drill.covers()
    assert drill.change(ChangeDrill()) == DrillAnswer(0.0)


def test_a_restart_neither_ends_nor_prolongs_it(
    window: Callable[..., DrillWindow], clock: StandingClock
) -> None:
    window().change(ChangeDrill("open", 60.0))
    clock.moment += 40.0
    again = window()
    assert again.covers()
    assert again.change(ChangeDrill()) == DrillAnswer(20.0)
    clock.moment += 20.0
    assert not again.covers()
    later = window()
    assert not later.covers()
    # A line of the drill is read again after the restart, and counts as it did.
    assert later.covers(1030.0)
    assert not later.covers(999.0)
    assert not later.covers(1060.0)


def test_a_boot_ends_it(window: Callable[..., DrillWindow], clock: StandingClock) -> None:
    window().change(ChangeDrill("open", 60.0))
    assert not window("boot-2").covers()
    clock.moment = 5.0
    assert not window().covers(), "the clock of another boot, under the same id"


def test_closing_ends_it_and_keeps_what_was(
    window: Callable[..., DrillWindow], clock: StandingClock
) -> None:
    drill = window()
    drill.change(ChangeDrill("open", 60.0))
    clock.moment += 10.0
    assert drill.change(ChangeDrill("close")) == DrillAnswer(0.0)
    assert not drill.covers()
    assert drill.covers(1005.0)
    assert window().covers(1005.0)
    clock.moment += 100.0
    drill.change(ChangeDrill("close"))
    assert not drill.covers(1050.0), "a drill that is over cannot be closed later"


def test_opening_again_keeps_what_has_counted(
    window: Callable[..., DrillWindow], clock: StandingClock
) -> None:
    drill = window()
    drill.change(ChangeDrill("open", 60.0))
    clock.moment += 50.0
    assert drill.change(ChangeDrill("open", 60.0)) == DrillAnswer(60.0)
    assert drill.covers(1001.0)
    clock.moment += 200.0
    drill.change(ChangeDrill("open", 60.0))
    assert not drill.covers(1150.0), "no drill was open between the two"


@pytest.mark.parametrize("seconds", [0.0, -1.0, MAX_SECONDS + 1, float("inf"), float("nan")])
def test_a_drill_without_end_is_refused(window: Callable[..., DrillWindow], seconds: float) -> None:
    drill = window()
    with pytest.raises(UsageError, match="at most 60 minutes"):
        drill.change(ChangeDrill("open", seconds))
    assert not drill.covers()


def test_a_file_that_cannot_be_written_opens_nothing(tmp_path: Path, clock: StandingClock) -> None:
    (tmp_path / "run").write_text("in the way")
    drill = DrillWindow(tmp_path / "run" / "drill.json", "boot", False, clock)
    with pytest.raises(SresError, match="cannot be written"):
        drill.change(ChangeDrill("open", 60.0))
    assert not drill.covers()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"boot_id": "boot-1"}',
        b'{"boot_id": "boot-1", "began": 5000.0, "ends": 9000.0}',
        b'{"boot_id": "boot-1", "began": -1.0, "ends": 9000.0}',
    ],
)
def test_a_damaged_file_opens_nothing(
    window: Callable[..., DrillWindow], tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "drill.json").write_bytes(content)
    assert not window().covers()


def test_a_file_that_others_may_write_opens_nothing(
    window: Callable[..., DrillWindow], tmp_path: Path
) -> None:
    window().change(ChangeDrill("open", 60.0))
    file = tmp_path / "run" / "drill.json"
    assert window().covers()
    file.chmod(0o666)
    assert not window().covers()
    file.unlink()
    file.symlink_to("elsewhere")
    (tmp_path / "run" / "elsewhere").write_bytes(
        msgspec.json.encode({"boot_id": "boot-1", "began": 1.0, "ends": 1e9})
    )
    assert not window().covers()


def test_a_far_end_in_the_file_is_cut(
    window: Callable[..., DrillWindow], tmp_path: Path, clock: StandingClock
) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "drill.json"
    file.write_bytes(msgspec.json.encode({"boot_id": "boot-1", "began": 1.0, "ends": 1e300}))
    file.chmod(0o600)
    drill = window()
    clock.moment += MAX_SECONDS
    assert not drill.covers()


# -- the command ----------------------------------------------------------------------------------


class Site(ClusterView):
    """One node, whose sresd answers for its drill."""

    def __init__(self, kernel_log: Path, seconds_left: float) -> None:
        super().__init__()
        self.config = Config(agent=AgentSettings(kernel_log=str(kernel_log)))
        self.seconds_left = seconds_left
        self.asked: list[tuple[str, Any]] = []

    def named(self, hostlist: str) -> dict[str, Node]:
        return {name: Node(name, "IDLE") for name in hostlist.split(",")}

    def ask_node(self, node: str, kind: str, question: Any, seconds: float) -> msgspec.Raw:
        assert kind == ChangeDrill.kind
        self.asked.append((node, question))
        return msgspec.Raw(msgspec.msgpack.encode(DrillAnswer(self.seconds_left)))


@pytest.fixture
def kernel_log(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "kmsg")
    return tmp_path / "kmsg"


@pytest.fixture
def on_n2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, on the node n2, outside of a lab."""
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    monkeypatch.delenv("SRES_LAB", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.mark.usefixtures("on_n2")
def test_a_fault_is_written_as_a_program_must_write_it(kernel_log: Path) -> None:
    reader = os.open(kernel_log, os.O_RDWR | os.O_NONBLOCK)
    assert main.call(["inject", "n2", "ecc", "--yes"], Site(kernel_log, 60.0)) == 0
    lines = os.read(reader, 4096).decode().splitlines()
    os.close(reader)
    assert [line[:34] for line in lines] == [
        "<12>NVRM: Xid (PCI:0000:04:00): 48",
        "<12>NVRM: Xid (PCI:0000:04:00): 64",
    ]


@pytest.mark.usefixtures("on_n2")
@pytest.mark.parametrize(
    ("words", "seconds_left", "code", "why"),
    [
        (["n2", "xid79"], 60.0, 2, "n2 is a real node"),
        (["n2", "xid79", "--yes"], 0.0, 2, "no drill is open on n2"),
        (["n3", "xid79", "--yes"], 60.0, 2, "this is n2, not n3"),
        (["n2", "flood", "--yes"], 60.0, 2, "is no fault"),
        (["n2", "cable-cut", "--yes"], 60.0, 2, "is for a lab"),
        (["n2", "efa-port-down", "--yes"], 60.0, 2, "is for a lab"),
        (["n2", "cable-cut", "--undo"], 60.0, 2, "--undo is for a lab's node"),
        (["n2", "xid79", "--gpu", "4", "--yes"], 60.0, 2, "is no PCI address"),
        (["n2", "xid79", "--lab", "/nowhere/lab"], 60.0, 9, "no lab in /nowhere/lab"),
        (["n2", "xid79", "--yes"], 60.0, 1, "nothing reads it"),
    ],
)
def test_what_may_not_be_is_one_line_and_changes_nothing(
    kernel_log: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    seconds_left: float,
    code: int,
    why: str,
) -> None:
    assert main.call(["inject", *words], Site(kernel_log, seconds_left)) == code
    said = capsys.readouterr()
    assert why in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


DCGMI = """\
#!/bin/sh
echo "$@" >> {asked}
case $1 in
    discovery) cat {listed} ;;
    test) echo '{answer}' ;;
esac
"""
LISTED = """\
| 0      | Name: NVIDIA H100 80GB HBM3                                          |
|        | PCI Bus ID: 00000000:1B:00.0                                         |
| 3      | Name: NVIDIA H100 80GB HBM3                                          |
|        | PCI Bus ID: 00000000:3B:00.0                                         |
"""
DONE = "Successfully injected field info."


@pytest.fixture
def dcgmi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Make a dcgmi that notes what it was asked."""

    def make(listed: str = LISTED, answer: str = DONE) -> Path:
        (tmp_path / "listed").write_text(listed)
        asked, file = tmp_path / "asked", tmp_path / "bin" / "dcgmi"
        file.parent.mkdir()
        file.write_text(DCGMI.format(asked=asked, listed=tmp_path / "listed", answer=answer))
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{file.parent}:/usr/bin:/bin")
        return asked

    return make


def inject(kernel_log: Path, *words: str, seconds_left: float = 60.0) -> str:
    """Inject a fault into n2; return the first line of the kernel log."""
    reader = os.open(kernel_log, os.O_RDWR | os.O_NONBLOCK)
    try:
        site = Site(kernel_log, seconds_left)
        assert main.call(["inject", "n2", *words, "--yes"], site) == 0
        return os.read(reader, 4096).decode().splitlines()[0]
    finally:
        os.close(reader)


@pytest.mark.usefixtures("on_n2")
@pytest.mark.parametrize(
    ("words", "gpu", "number", "values"),
    [
        (["xid79"], "0000:1b:00", 0, ["230 -v 79"]),
        (["xid13", "--gpu", "0000:3B:00"], "0000:3b:00", 3, ["230 -v 13"]),
        (["ecc"], "0000:1b:00", 0, ["319 -v 1", "230 -v 48", "230 -v 64"]),
        (["nvlink-down"], "0000:1b:00", 0, ["409 -v 1", "230 -v 74"]),
        (["disk-lost"], "", 0, []),
    ],
)
def test_dcgm_is_told_of_the_same_gpu_where_it_runs(
    kernel_log: Path,
    dcgmi: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    gpu: str,
    number: int,
    values: list[str],
) -> None:
    asked = dcgmi()
    assert gpu in inject(kernel_log, *words)
    told = [f"test --inject --gpuid {number} -f {value}" for value in values]
    listed = ["discovery -l"] if told else []
    assert (asked.read_text().splitlines() if asked.exists() else []) == [*listed, *told]
    said = capsys.readouterr()
    assert said.err == ""
    assert ("DCGM was told of it too" in said.out) is bool(told)


@pytest.mark.usefixtures("on_n2")
@pytest.mark.parametrize(
    ("listed", "answer", "words", "why"),
    [
        ("Error: no host engine\n", DONE, ["xid79"], "DCGM shows no GPU: Error: no host engine"),
        (LISTED, "Error: bad value", ["xid79"], "DCGM did not take field 230: Error: bad value"),
        (LISTED, DONE, ["xid79", "--gpu", "0000:99:00"], "DCGM has no GPU 0000:99:00; it has "),
    ],
)
def test_a_dcgm_that_does_not_take_it_is_named_and_holds_nothing_up(
    kernel_log: Path,
    dcgmi: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    listed: str,
    answer: str,
    words: list[str],
    why: str,
) -> None:
    dcgmi(listed, answer)
    assert ": 79, " in inject(kernel_log, *words)
    said = capsys.readouterr()
    assert why in said.err
    assert said.err.count("\n") == 1
    assert "n2: xid79 injected" in said.out


@pytest.mark.usefixtures("on_n2")
def test_dcgm_is_not_told_where_nothing_would_mark_it(
    kernel_log: Path, dcgmi: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = dcgmi()
    always = DrillAnswer(0.0, True)
    monkeypatch.setattr(inject_command, "ask_drill", lambda *_: always)
    inject(kernel_log, "xid79")
    assert not asked.exists()


def test_only_root_injects(
    kernel_log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for words in (["n2", "xid79", "--yes"], ["n2", "xid79", "--lab", "lab"]):
        assert main.call(["inject", *words], Site(kernel_log, 60.0)) == 6
    assert "only root" in capsys.readouterr().err


@pytest.mark.usefixtures("on_n2")
def test_a_crash_is_announced_first(
    kernel_log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = os.open(kernel_log, os.O_RDWR | os.O_NONBLOCK)
    clock, seen = StandingClock(), []

    def crashes() -> None:
        seen.append((clock.moment, os.read(reader, 4096).decode()))

    monkeypatch.setattr(inject_command, "SYSTEM_CLOCK", clock)
    monkeypatch.setattr(inject_command, "crash", crashes)
    assert main.call(["inject", "n2", "node-crash", "--yes"], Site(kernel_log, 60.0)) == 0
    os.close(reader)
    assert seen == [
        (1000.0 + inject_command.REPORT_SECONDS, "<12>sres: injected fault node-crash\n")
    ]


def test_the_kernel_is_asked_to_crash(tmp_path: Path) -> None:
    crash(tmp_path / "sysrq")
    assert (tmp_path / "sysrq").read_text() == "c"
    with pytest.raises(SresError, match="cannot be written"):
        crash(tmp_path)


def test_a_plain_file_takes_no_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    with pytest.raises(SresError, match="neither a kernel log device nor a FIFO"):
        write_lines(tmp_path / "log", ["x"])
    with pytest.raises(SresError, match="No such file"):
        write_lines(tmp_path / "none", ["x"])
    assert (tmp_path / "log").read_text() == ""


def test_the_faults_are_listed() -> None:
    done = CliRunner().invoke(inject_command.inject, ["--list"])
    assert done.exit_code == 0
    assert all(fault.name in done.output for fault in CATALOGUE)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["open", "n2,n3", "--minutes", "5"], ChangeDrill("open", 300.0)),
        (["open", "n2,n3"], ChangeDrill("open", 600.0)),
        (["close", "n2,n3"], ChangeDrill("close")),
        (["status", "n2,n3"], ChangeDrill()),
    ],
)
def test_a_drill_is_opened_and_closed_by_sresd(
    kernel_log: Path, capsys: pytest.CaptureFixture[str], words: list[str], asked: ChangeDrill
) -> None:
    site = Site(kernel_log, 90.4)
    assert main.call(["drill", *words], site) == 0
    assert sorted(site.asked, key=lambda one: one[0]) == [("n2", asked), ("n3", asked)]
    assert capsys.readouterr().out.splitlines() == [
        "n2: a drill is open for 1:30 minutes",
        "n3: a drill is open for 1:30 minutes",
    ]


class SiteWithoutN3(Site):
    def ask_node(self, node: str, kind: str, question: Any, seconds: float) -> msgspec.Raw:
        if node == "n3":
            raise WireError("the sresd of n3 is not connected")
        return super().ask_node(node, kind, question, seconds)


def test_a_node_that_is_away_keeps_no_drill_open_on_the_others(
    kernel_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And none opens without a word: n2's would have counted, and n4's not have been closed."""
    site = SiteWithoutN3(kernel_log, 0.0)
    assert main.call(["drill", "close", "n2,n3,n4"], site) == WireError.exit_code
    assert sorted(node for node, _ in site.asked) == ["n2", "n4"]
    assert capsys.readouterr().out.splitlines() == [
        "n2: no drill is open",
        "n3: the sresd of n3 is not connected",
        "n4: no drill is open",
    ]
    words = ["drill", "status", "n3,n4", "--format=json"]
    assert main.call(words, site) == WireError.exit_code
    away, answered = json.loads(capsys.readouterr().out)
    assert away["trouble"] == "the sresd of n3 is not connected"
    assert (answered["seconds_left"], answered["trouble"]) == (0, "")


@pytest.mark.parametrize("minutes", ["0", "-1", "61", "nan", "x"])
def test_a_drill_of_no_length_is_refused(
    kernel_log: Path, capsys: pytest.CaptureFixture[str], minutes: str
) -> None:
    site = Site(kernel_log, 0.0)
    assert main.call(["drill", "open", "n2", f"--minutes={minutes}"], site) == 2
    assert site.asked == []
    assert capsys.readouterr().err.count("\n") == 1
