"""Kernel log lines: which are ours, what they ask for; nothing else about a line matters."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.health import xid
from slurm_resilience.health.grouping import group
from slurm_resilience.health.kernel_log import Classifier
from slurm_resilience.health.line_rules.line_judge import ALL_RULES, MAX_COUNTED, LineJudge
from slurm_resilience.health.log_frame import record
from slurm_resilience.model import FAULTY, SEVERITIES, Finding, Severity

TESTS = Path(__file__).resolve().parent.parent
SAMPLES = TESTS.parent.parent / "shared" / "reference" / "samples"
SWITCHES = "042_sxid_20034_fatal.txt"
"""Its class is that of the switch errors; they follow an Xid 79, which leads the incident."""
RULE_LINES = tomllib.loads((TESTS / "data" / "rule_lines.toml").read_text(encoding="utf-8"))
LINES = list(csv.DictReader((TESTS / "data" / "kernel_lines.csv").open(encoding="utf-8")))


def feed(*lines: str, accept: bool = False) -> list[Finding]:
    classifier = Classifier(accept)
    return [found for line in lines for found in classifier.feed(line, 0.0)]


def gravest(findings: list[Finding]) -> str:
    severities = [incident.lead.severity for incident in group(findings)]
    return str(max(severities, key=SEVERITIES.index, default=Severity.NONE))


@pytest.mark.parametrize("row", LINES, ids=lambda row: row["line"][:60])
def test_each_of_our_own_lines(row: dict[str, str]) -> None:
    found = feed(row["line"])
    if not row["expected"]:
        assert found == []
        return
    (one,) = found
    assert (one.severity, one.code, one.subject) == (row["expected"], row["code"], row["subject"])
    assert not one.injected
    assert one.text
    assert "\n" not in one.text


def sample_rows() -> list[dict[str, str]]:
    if not SAMPLES.is_dir():
        return []
    rows = csv.DictReader((SAMPLES / "index.csv").open(encoding="utf-8"))
    return [row for row in rows if row["kind"] in ("kmsg", "kmsg-raw", "syslog")]


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the recorded samples are not beside this tree")
@pytest.mark.parametrize("row", sample_rows(), ids=lambda row: row["file"])
def test_each_recorded_sample(row: dict[str, str]) -> None:
    text = (SAMPLES / row["file"]).read_text(encoding="utf-8").split("# ---\n", 1)[1]
    findings = feed(*text.splitlines())
    if row["expected_class"] == "test-only":
        assert findings
        assert all(f.injected and f.severity is Severity.MONITOR for f in findings)
        return
    if row["file"] == SWITCHES:
        assert gravest(findings) == "reboot"
        assert gravest([f for f in findings if f.check == "sxid"]) == row["expected_class"]
    else:
        assert gravest(findings) == row["expected_class"]
    gpus = {f.subject for f in findings if f.check != "sxid"}
    assert len(group(findings)) <= max(1, len(gpus)), "one trouble is one incident"


def test_a_line_that_a_program_wrote_is_marked_and_does_nothing() -> None:
    line = "12,349,872934736,-;NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus."
    (ignored,) = feed(line)
    assert (ignored.severity, ignored.injected) == (Severity.MONITOR, True)
    assert "agent.accept_injected" in ignored.text
    (taken,) = feed(line, accept=True)
    assert (taken.severity, taken.injected) == (Severity.REBOOT, True)


def test_a_drill_is_as_if_injected_lines_were_accepted() -> None:
    line = "12,349,872934736,-;NVRM: Xid (PCI:0000:04:00): 79, GPU has fallen off the bus."
    assert Classifier().feed(line, 0.0, is_drill=True) == feed(line, accept=True)
    assert feed(line, accept=True)[0].text.endswith(" (injected)")
    own = line.replace("12,", "4,", 1)
    (kernels,) = Classifier().feed(own, 0.0, is_drill=True)
    assert not kernels.injected
    assert "injected" not in kernels.text


@pytest.mark.parametrize("priority", ["<12>", "", "12,3,4,-;", "4,3,4,-;"])
def test_the_announcement_of_a_fault_asks_for_nothing(priority: str) -> None:
    (told,) = feed(f"{priority}sres: injected fault node-crash", accept=True)
    assert (told.check, told.severity, told.injected) == ("injected", Severity.MONITOR, True)
    assert "node-crash" in told.text


def test_a_line_that_a_program_wrote_takes_nothing_back() -> None:
    for text in ("162, x", "154, GPU recovery action changed from 0x1 (x) to 0x0 (None)"):
        line = f"12,349,872934736,-;NVRM: Xid (PCI:0000:04:00): {text}"
        assert feed(line) == []
        assert len(feed(line, accept=True)) == 1


GRAVE_LINES = [
    *(row["line"] for row in LINES if row["line"].startswith(("NVRM: ", "nvidia-nvswitch"))),
    *(
        row[4]
        for row in RULE_LINES["lines"]
        if any((r.check, r.code) == (row[0], row[1]) and r.is_grave for r in ALL_RULES)
    ),
]
QUOTING_LINES = (
    "{name}[8185]: segfault at 0 ip 000055ecd4719170 sp 00007fff754ccb90 error 6 in {text}[1170,"
    "55ecd4719000+1000] likely on CPU 0 (core 0, socket 0)",
    "traps: {name}[8185] general protection fault ip:55ec sp:7fff error:0 in {text}[55ec+1000]",
    "{name}[8185]: unhandled exception: DABT, ESR 0x0000000092000046, in {text}[aaaa+1000]",
    "{name} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "process '/tmp/{text}' started with executable stack",
    "tmpfs: Unknown parameter '{text}'",
    "overlayfs: failed to resolve '{text}': -2",
    "Memory cgroup out of memory: Killed process 4711 ({name}) total-vm:204800kB",
)
"""Lines of the kernel in which users choose a part, as Linux 6.18 writes them."""


@pytest.mark.parametrize("quoting", QUOTING_LINES, ids=lambda text: text[:30])
@pytest.mark.parametrize("grave", GRAVE_LINES, ids=lambda text: text[:60])
def test_what_a_user_has_the_kernel_write_takes_no_node_out_of_service(
    quoting: str, grave: str
) -> None:
    classifier, expected = Classifier(), gravest(feed(grave))
    for chosen in (grave, f"x\\x0a{grave}", f"NVRM: \\x0a{grave}"):
        name = chosen.replace("\\x0a", "\n")[:15].replace("\n", "\\x0a")
        line = quoting.format(name=name, text=chosen)
        for time in range(12):
            found = classifier.feed(f"6,110031,{time},-;{line}", 0.0)
            assert not {finding.severity for finding in found} & FAULTY, line
    found = classifier.feed(f"4,110032,5,-;{grave}", 0.0)
    assert gravest(found) == expected, "the kernel's own line still says the same"


def test_a_grave_rule_holds_at_the_beginning_of_a_line() -> None:
    assert [r.code for r in ALL_RULES if r.is_grave and not r.pattern.pattern.startswith("^")] == []


def test_a_record_has_its_own_time() -> None:
    line = "4,349,5000000,-;NVRM: Xid (PCI:0000:04:00): 79, x"
    (found,) = Classifier().feed(line, 900.0, booted=100.0)
    assert (found.at, found.uptime) == (105.0, 5.0)
    assert Classifier().feed(line, 900.0)[0].at == 900.0


def test_a_record_loses_its_framing_and_its_dictionary() -> None:
    assert record("14,344,347340498,-;a\\x0ab\n SUBSYSTEM=pci").text == "a\nb"
    assert record("14,344,347340498,-;x").facility == 1
    assert record("plain; text").text == "plain; text"


def test_three_lines_without_a_number_belong_together_only_when_close() -> None:
    first, last = "NVRM: The NVIDIA GPU 0000:b3:00.0", "NVRM: fallen off the bus and is not there"
    assert [f.check for f in feed(first, "NVRM: (PCI ID: 10de:26b5) has", last)] == ["gpu_lost"]
    assert feed(first, *["other"] * 10, last) == []
    assert feed(last) == []


def test_the_table_is_whole() -> None:
    table = xid.table()
    assert sorted(table) == list(range(1, 174))
    assert all(row.meaning and row.source for row in table.values())
    decided = {48: "reset", 54: "replace", 63: "monitor", 64: "replace", 74: "reset"}
    decided |= {79: "reboot", 94: "job", 95: "reset", 109: "reset", 143: "reset", 151: "reboot"}
    decided |= {31: "job", 43: "monitor", 45: "none", 62: "reset", 121: "monitor", 168: "reboot"}
    assert {code: str(table[code].action) for code in decided} == decided


PREFIXES = st.sampled_from(
    [
        "",
        "[ 12.5] ",
        "[12345.678901] [ T1946] ",
        "[Fri Aug 30 11:43:09 2024] ",
        "kern  :warn  : 2025-01-21T04:41:44,283302+00:00 ",
        "Dec  2 11:38:47 worker4 kernel: [  219.470994] ",
        "kernel: ",
        "4,349,872934736,-;",
        "3,1,2,c,caller=C12;",
    ]
)
WORDS = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "Zs")), max_size=40)


@given(PREFIXES, PREFIXES, st.integers(0, 250), WORDS)
def test_the_prefix_never_matters(one: str, other: str, code: int, rest: str) -> None:
    rest = rest.replace("\\", "/")  # a backslash is an escape in records, and only there
    line = f"NVRM: Xid (PCI:0000:3b:00): {code}, {rest}"

    def without_evidence(prefix: str) -> list[tuple[str, ...]]:
        return [(f.check, f.severity, f.text, f.subject, f.code) for f in feed(prefix + line)]

    assert without_evidence(one) == without_evidence(other)
    assert len(without_evidence(one)) == 1


FRAGMENTS = st.sampled_from(
    [
        "NVRM: ",
        "Xid (",
        "SXid (",
        "PCI:",
        "0000:3b:00",
        "): ",
        "79",
        "154",
        ", to 0x",
        "(",
        "\n",
        "fallen off the bus",
        "The NVIDIA GPU ",
        "12,3,4,-;",
        "\\x0a",
        "\\xff",
        "٣",
        "\x00",
        " ",
    ]
)


@given(st.lists(st.one_of(st.text(), st.lists(FRAGMENTS).map("".join)), max_size=8))
def test_no_line_whatsoever_crashes(lines: list[str]) -> None:
    for found in feed(*lines):
        assert found.severity in SEVERITIES


def test_counting_forgets_what_is_old_and_is_bounded() -> None:
    classifier = Classifier()
    line = "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x24:0xffff:1589)"

    def severity(at: float) -> Severity:
        (found,) = classifier.feed(line, at)
        return found.severity

    assert [severity(at) for at in (0.0, 700.0, 900.0)] == ["monitor", "monitor", "reboot"]
    judge = LineJudge()
    for port in range(2 * MAX_COUNTED):
        assert judge.judge(f"ib{port}: link down", 0.0) is not None
    assert len(judge._seen) == MAX_COUNTED


@pytest.mark.parametrize("row", RULE_LINES["lines"], ids=lambda row: " ".join(row[:2]))
def test_each_rule_by_a_line_of_its_own(row: list[str]) -> None:
    check, code, severity, subject, line, *program = row
    match = LineJudge().judge(line, 0.0, *program)
    assert match is not None
    got = (match.rule.check, match.rule.code, str(match.severity), match.subject)
    assert got == (check, code, severity, subject)


def test_no_rule_is_without_a_line() -> None:
    assert {(rule.check, rule.code) for rule in ALL_RULES} == {
        (row[0], row[1]) for row in RULE_LINES["lines"]
    }


def test_a_rule_that_clears_names_a_rule() -> None:
    keys = {(rule.check, rule.code) for rule in ALL_RULES}
    assert {(rule.check, rule.clears) for rule in ALL_RULES if rule.clears} <= keys


@pytest.mark.parametrize(
    "line",
    [
        f"6,1,{'9' * 5000},-;usb 1-1: new device",
        "0000-00-00T00:00:00Z n1 kernel: usb 1-1: new device",
        "[Mon Jan  1 00:00:00 0000] usb 1-1: new device",
    ],
)
def test_a_number_that_no_clock_shows_ends_nothing(line: str) -> None:
    assert Classifier().feed(line, 1.0, 1.0) == []
