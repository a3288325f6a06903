"""The standby: the rules of a takeover, the journal's records, and the evidence of control."""

from __future__ import annotations

import contextlib
import io
import sqlite3
import struct
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.config import parse
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.controller.journal.journal import Journal
from slurm_resilience.controller.journal.records import IncidentFacts
from slurm_resilience.controller.sinks.outflow import _read_sent, place_sinks
from slurm_resilience.controller.standby.act_gate import OpenGate, gated
from slurm_resilience.controller.standby.inheritance import (
    follow_copied_runs,
    hold_forgotten,
    hold_possibly_begun,
    skip_numbers,
    skipped_numbers,
    take_over_runs,
)
from slurm_resilience.controller.standby.pair import begin_alone, check_alone
from slurm_resilience.controller.standby.pair_states import (
    PAIR_TABLE,
    Marker,
    PairEvent,
    PairState,
    Takeover,
    judge_takeover,
    next_history,
)
from slurm_resilience.controller.standby.primacy import NotPrimary, Primacy
from slurm_resilience.controller.standby.recorded_connection import (
    RecordedConnection,
    apply_records,
    begin_history,
    history_of,
    open_recorded,
)
from slurm_resilience.errors import SlurmUnreachable, SresError, WireError
from slurm_resilience.model import Node
from slurm_resilience.replace import program
from slurm_resilience.replace.elsewhere import ElsewhereReplacer
from slurm_resilience.replace.repair_order import RepairOrder
from slurm_resilience.slurm import parse as slurm_parse
from slurm_resilience.slurm.client import SlurmClient
from slurm_resilience.slurm.controllers import (
    ControllerHost,
    conf_of_one,
    controller_hosts,
    own_host,
    renumbered,
    write_conf_of_one,
)
from slurm_resilience.wire.messages import JournalRecord

CONFIG = """ClusterName = lab
SlurmctldHost[0] = ctl(10.0.0.1)
SlurmctldHost[1] = ctl2.site.org
SlurmctldTimeout = 120 sec
StateSaveLocation = {}
"""


# -- who is in control --------------------------------------------------------------------------


def test_a_machine_finds_itself_among_slurms_controllers() -> None:
    hosts = controller_hosts(slurm_parse.config(CONFIG.format("/x")))
    assert hosts == (
        ControllerHost(0, "ctl", "10.0.0.1"),
        ControllerHost(1, "ctl2.site.org", "ctl2.site.org"),
    )
    assert own_host(hosts, "ctl2") == hosts[1]
    assert own_host(hosts, "ctl.site.org") == hosts[0]
    assert own_host(hosts, "login1") is None


def test_the_commands_of_one_controller_know_no_other() -> None:
    text = "SlurmctldHost=ctl(10.0.0.1)\nslurmctldhost=ctl2\nClusterName=lab\ninclude nodes.conf\n"
    host, directory = ControllerHost(1, "ctl2", "10.0.0.2"), Path("/etc/slurm")
    files = {"nodes.conf": "NodeName=n1\n"}
    own = conf_of_one(text, host, directory, lambda file: files[file.name])
    assert own.splitlines() == [
        "SlurmctldHost=ctl2(10.0.0.2)", "ClusterName=lab", "Include /etc/slurm/nodes.conf"
    ]  # fmt: skip
    # Nor one that stands in a file which is included, by another one too.
    files = {
        "nodes.conf": "NodeName=n1\nInclude hosts.conf\n",
        "hosts.conf": "  SlurmctldHost=ctl3\nSlurmctldPort=6817\ninclude more.conf\n",
        "more.conf": "MailProg=/bin/true\n",
    }
    own = conf_of_one(text, host, directory, lambda file: files[file.name])
    assert own.splitlines() == [
        "SlurmctldHost=ctl2(10.0.0.2)", "ClusterName=lab", "NodeName=n1", "SlurmctldPort=6817",
        "Include /etc/slurm/more.conf",
    ]  # fmt: skip
    files["more.conf"] = "include hosts.conf\n"
    with pytest.raises(SlurmUnreachable, match="include each other"):
        conf_of_one(text, host, directory, lambda file: files[file.name])


def test_an_included_file_may_have_the_clusters_name(tmp_path: Path) -> None:
    conf, target = tmp_path / "slurm.conf", tmp_path / "own.conf"
    conf.write_text("include hosts-%c.conf\n")
    host = ControllerHost(0, "ctl", "10.0.0.1")
    with pytest.raises(SlurmUnreachable, match=r"hosts-lab\.conf"):
        write_conf_of_one(conf, "lab", host, target)
    (tmp_path / "hosts-lab.conf").write_text("SlurmctldHost=ctl\nSlurmctldHost=ctl2\n")
    write_conf_of_one(conf, "lab", host, target)
    assert target.read_text() == "SlurmctldHost=ctl(10.0.0.1)\n"


def test_a_machine_learns_its_new_place_from_slurm_conf(tmp_path: Path) -> None:
    conf, host = tmp_path / "slurm.conf", ControllerHost(0, "ctl.site.org", "10.0.0.1")
    conf.write_text("# SlurmctldHost=old\nSlurmctldHost=ctl2(10.0.0.2)\n slurmctldhost = ctl\n")
    assert renumbered(host, conf) == host._replace(number=1)
    conf.write_text("Include controllers.conf\n")
    assert renumbered(host, conf) == host
    assert renumbered(host, tmp_path / "none.conf") == host


def test_a_slurmctld_that_says_it_is_in_standby_deposes_its_sresctld() -> None:
    words = ["Unable to contact slurm controller"]

    class Slurm:
        def nodes(self) -> None:
            raise SlurmUnreachable(words[-1])

    gate = OpenGate()
    client = gated(cast(SlurmClient, Slurm()), gate)
    with pytest.raises(SlurmUnreachable):
        client.nodes()
    assert not gate.is_deposed
    words.append("slurm_load_node error: Slurm backup controller in standby mode")
    with pytest.raises(SlurmUnreachable):
        client.nodes()
    assert gate.is_deposed


@pytest.mark.parametrize("named", ["ctl", "ctl.site.org", "10.0.0.1"])
def test_a_sresctld_whose_file_names_the_other_machine_does_not_start(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = slurm_parse.config(CONFIG.format("/x"))
    monkeypatch.setattr("socket.gethostname", lambda: "ctl2")
    with pytest.raises(SresError, match="names ctl alone, and this machine is ctl2"):
        check_alone(parse(f'[controller]\nhost = "{named}"\n'), info)


def test_a_sresctld_does_not_act_beside_one_that_knows_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = slurm_parse.config(CONFIG.format("/x"))
    config = parse('[controller]\nhost = "ctl2"\n')
    monkeypatch.setattr("socket.gethostname", lambda: "ctl2")
    answers: list[str] = []

    def opened(host: str, *words: object, **named: object) -> io.BytesIO:
        if host not in answers:
            raise WireError("no answer")
        return io.BytesIO()

    monkeypatch.setattr("slurm_resilience.wire.client.Connection.open", opened)
    check_alone(config, info)
    answers.append("10.0.0.1")
    with pytest.raises(SresError, match="sresctld on ctl acts already"):
        check_alone(config, info)


@pytest.mark.parametrize(
    ("here", "host", "answers", "refusal"),
    [
        ("ctl", "", "", ""),
        ("login1", "", "", "look for sresctld on ctl, and this machine is login1"),
        ("login1", "", "10.0.0.1", "sresctld on ctl acts already"),
        ("login1", "login1", "", ""),
        ("login1.site.org", "login1", "", ""),
        ("old", "login1", "", "look for sresctld on login1, and this machine is old"),
        ("old", "login1", "login1", "sresctld on login1 acts already"),
        ("old", "login1", "10.0.0.1", "sresctld on ctl acts already"),
        ("old", "127.0.0.1", "", ""),
        ("ctl", "login1", "login1", "sresctld on login1 acts already"),
        ("ctl", "ctl,login1", "login1", "sresctld on login1 acts already"),
    ],
)
def test_where_slurm_has_one_controller_sresctld_runs_on_one_machine(
    here: str, host: str, answers: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one, with a state directory of its own, would replace the same nodes."""

    def opened(place: str, *words: object, **named: object) -> io.BytesIO:
        if place != answers:
            raise WireError("no answer")
        return io.BytesIO()

    monkeypatch.setattr("slurm_resilience.wire.client.Connection.open", opened)
    monkeypatch.setattr("socket.gethostname", lambda: here)
    text = CONFIG.format("/x").replace("SlurmctldHost[1] = ctl2.site.org\n", "")
    info, config = slurm_parse.config(text), parse(f'[controller]\nhost = "{host}"\n')
    if not refusal:
        check_alone(config, info)
        return
    with pytest.raises(SresError, match=refusal):
        check_alone(config, info)


def test_acts_without_a_partner_make_each_copy_of_the_journal_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*words: object, **named: object) -> None:
        raise WireError("no answer")

    monkeypatch.setattr("slurm_resilience.wire.client.Connection.open", opened)
    monkeypatch.setattr("socket.gethostname", lambda: "ctl")
    info = slurm_parse.config(CONFIG.format(tmp_path))
    config = parse(f'[controller]\nstate_dir = "{tmp_path}"\n')
    Journal(tmp_path / "journal.db").close()
    primacy = _primacy(tmp_path)
    primacy.write_marker("4-ctl", "ctl2.site.org")
    begin_alone(config, info, SYSTEM_CLOCK)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.db", isolation_level=None)) as db:
        assert history_of(db) == ""  # it was never shared
        begin_history(db, "4-ctl")
        begin_alone(config, info, SYSTEM_CLOCK)
        history = history_of(db)
    marker = primacy.read_marker()
    assert marker is not None
    assert (marker.history, marker.standby) == (history, "")
    assert not judge_takeover("ctl2.site.org", "4-ctl", marker).is_whole


def _primacy(directory: Path, number: int = 0) -> Primacy:
    info = slurm_parse.config(CONFIG.format(directory))
    return Primacy(controller_hosts(info)[number], info, SYSTEM_CLOCK)


def _beat(directory: Path, number: int, age: float = 0.0) -> None:
    at = int(SYSTEM_CLOCK.now() - age)
    (directory / "heartbeat").write_bytes(struct.pack(">QQ", at, number))


def test_only_a_fresh_beat_of_its_own_slurmctld_lets_it_act(tmp_path: Path) -> None:
    primacy = _primacy(tmp_path)
    with pytest.raises(SlurmUnreachable, match="cannot be told"):
        primacy.check_control()
    _beat(tmp_path, 0)
    primacy.check_control()
    _beat(tmp_path, 0, age=90)
    with pytest.raises(SlurmUnreachable, match="no sign of control"):
        primacy.check_control()
    _beat(tmp_path, 1)
    with pytest.raises(NotPrimary):
        primacy.check_control()


def test_an_old_active_one_sees_that_another_took_its_place(tmp_path: Path) -> None:
    old, new = _primacy(tmp_path, 0), _primacy(tmp_path, 1)
    _beat(tmp_path, 0)
    old.write_marker("1-ctl", "")
    old.check_active("1-ctl")
    with pytest.raises(NotPrimary):
        old.check_active("2-ctl")
    new.write_marker("2-ctl2.site.org", "")
    with pytest.raises(NotPrimary, match="ctl2"):
        old.check_active("1-ctl")
    (tmp_path / "sresctld.active").write_text("{")
    with pytest.raises(SlurmUnreachable):
        old.check_active("1-ctl")


def test_sresctld_has_one_place_or_several() -> None:
    assert parse('[controller]\nhost = "a, b"\n').controller.hosts == ("a", "b")
    assert parse("").controller.hosts == ()


# -- takeovers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("history", "marker", "handed_over_by", "is_whole"),
    [
        ("", None, "", True),
        ("3-ctl", None, "", False),
        ("3-ctl", Marker("ctl", "3-ctl", "ctl2"), "", True),
        ("3-ctl", Marker("ctl", "3-ctl", ""), "", False),
        ("3-ctl", Marker("ctl", "3-ctl", "ctl3"), "", False),
        ("3-ctl", Marker("ctl", "3-ctl", ""), "ctl", True),
        ("3-ctl", Marker("ctl", "4-ctl", ""), "ctl", False),
        ("2-ctl2", Marker("ctl", "3-ctl", "ctl2"), "", False),
        ("4-ctl2", Marker("ctl2", "4-ctl2", ""), "", True),
    ],
)
def test_a_takeover_is_whole_where_nothing_can_be_missing(
    history: str, marker: Marker | None, handed_over_by: str, is_whole: bool
) -> None:
    assert judge_takeover("ctl2", history, marker, handed_over_by).is_whole is is_whole


def test_a_new_history_is_later_than_all_known_ones() -> None:
    assert next_history("ctl2", "", "") == "1-ctl2"
    assert next_history("ctl2", "3-ctl", "5-ctl") == "6-ctl2"


def test_the_marker_is_written_between_the_states_that_it_separates() -> None:
    to_paired = {state for (state, _), to in PAIR_TABLE.items() if to is PairState.PAIRED}
    assert to_paired == {PairState.NAMING}
    out_of_lost = [event for state, event in PAIR_TABLE if state is PairState.LOST]
    assert out_of_lost == [PairEvent.MARKED_ALONE]


def test_a_try_of_another_machine_is_never_begun_again(tmp_path: Path) -> None:
    journal = Journal(":memory:")
    incident = journal.open_incident(
        "n1", NodeEvent.REQUESTED, "requested", "Action:Replace", "asked", 100.0
    )
    journal.apply(incident.id, NodeEvent.EMPTIED, "", 101.0)
    journal.apply(incident.id, NodeEvent.REPLACING, "", 102.0, IncidentFacts(attempts=1))
    take_over_runs(journal, tmp_path, "ctl2", Marker("ctl2", "1-ctl2"))
    assert not (tmp_path / "runs").exists()
    take_over_runs(journal, tmp_path, "ctl2", Marker("ctl", "1-ctl"))
    directory = tmp_path / "runs" / "1-1.elsewhere"
    order = RepairOrder(directory, "replace", "n1", "Action:Replace", 50.0)
    replacer = ElsewhereReplacer()
    assert replacer.status(order, None, 110.0).state == "running"
    assert replacer.status(order, None, 153.0).state == "lost"
    old = Node(name="n1", base="DOWN", boot_time="1970-01-01T00:00:10")
    new = Node(name="n1", base="DOWN", boot_time="1970-01-01T00:01:45")
    ahead = Node(name="n1", base="DOWN", boot_time="2026-01-01T00:00:10")
    assert replacer.status(order, old, 110.0).state == "running"
    assert replacer.status(order, new, 110.0).rc == 0
    assert replacer.status(order, ahead, 110.0).state == "running"  # its clock is


def repairing(journal: Journal, node: str) -> int:
    """An incident whose first try runs."""
    incident = journal.open_incident(
        node, NodeEvent.REQUESTED, "requested", "Action:Replace", "asked", 100.0
    )
    journal.apply(incident.id, NodeEvent.EMPTIED, "", 101.0)
    journal.apply(incident.id, NodeEvent.REPLACING, "", 102.0, IncidentFacts(attempts=1))
    return incident.id


def test_a_note_that_was_cut_off_does_not_end_sresctld(tmp_path: Path) -> None:
    """A disk that was full, or a kill, in the middle of a take-over."""
    directory = tmp_path / "runs" / "1-1.elsewhere"
    directory.mkdir(parents=True)
    (directory / "begun").write_bytes(b'{"host": "ct')
    order = RepairOrder(directory, "replace", "n1", "Action:Replace", 50.0)
    began = directory.stat().st_mtime
    assert ElsewhereReplacer().status(order, None, began + 10.0).state == "running"
    assert ElsewhereReplacer().status(order, None, began + 60.0).state == "lost"


def test_a_copied_state_directory_repeats_no_try_of_its_machine(tmp_path: Path) -> None:
    """The administrator moves sresctld to another machine, and a program runs on the old one."""
    journal, runs = Journal(":memory:"), tmp_path / "runs"
    for node in ("n1", "n2", "n3"):
        repairing(journal, node)
    for run in ("1-1", "2-1"):
        program.THIS_HOST.make(runs / run)
    program.write_in_place(runs / "2-1" / program.RESULT, "0")
    follow_copied_runs(journal, tmp_path, "ctl")
    follow_copied_runs(journal, tmp_path, "ctl")
    assert journal.host == "ctl"
    assert sorted(path.name for path in runs.iterdir()) == ["1-1", "2-1"]
    follow_copied_runs(journal, tmp_path, "new")
    assert journal.host == "new"
    # One that had ended is judged by its exit code.
    assert sorted(path.name for path in runs.iterdir()) == ["1-1.elsewhere", "2-1"]
    order = RepairOrder(runs / "1-1.elsewhere", "replace", "n1", "Action:Replace", 50.0)
    run = ElsewhereReplacer().status(order, None, 110.0)
    assert (run.state, run.by) == ("running", "the try that ctl began")


def test_what_a_lost_journal_had_in_hand_is_left_to_a_person() -> None:
    """The state directory was removed: the machine behind the node may be a new one already."""
    journal = Journal(":memory:")
    repairing(journal, "n3")
    labels = "RMA 7 [sres health-status=pending-replacement fault-type=dead fault-reason=x]"
    nodes = [
        Node(
            name=name,
            base="DOWN",
            reason=reason,
            reason_at="t",
            comment=comment,
        )
        for name, reason, comment in (
            ("n1", "Action:Replace", labels),
            ("n2", "Action:Replace", "a person asked while no sresctld ran"),
            ("n3", "Action:Replace", labels),  # known
            ("n4", "mine", labels),
            ("n5", "", labels),
        )
    ]
    assert hold_forgotten(journal, nodes, 200.0) == ("n1",)
    assert journal.state_of("n1") is NodeState.QUARANTINED
    assert journal.state_of("n2") is NodeState.HEALTHY
    assert journal.state_of("n3") is NodeState.REPAIRING
    assert hold_forgotten(journal, nodes, 201.0) == ()


def test_what_may_have_been_begun_is_left_to_a_person() -> None:
    journal = Journal(":memory:")
    known = journal.open_incident(
        "n1", NodeEvent.REQUESTED, "requested", "Action:Replace", "asked", 100.0
    )
    nodes = [
        Node(name=name, base="IDLE", flags=frozenset({"FAIL"}), reason=reason, reason_at="t")
        for name, reason in (("n1", "Action:Replace"), ("n2", "Action:Replace"), ("n3", "mine"))
    ]
    takeover = Takeover(False, "ctl was active alone")
    assert hold_possibly_begun(journal, nodes, takeover, 200.0) == ("n1", "n2")
    assert journal.state_of("n1") is journal.state_of("n2") is NodeState.QUARANTINED
    assert journal.state_of("n3") is NodeState.HEALTHY
    assert journal.incident(known.id).reason_at == "t"
    # Once is enough, and no number is given again that the other one may have used.
    assert hold_possibly_begun(journal, nodes, takeover, 201.0) == ()
    skip_numbers(journal, journal._db)
    journal.number_after(skipped_numbers(journal._db))
    again = journal.open_incident("n4", NodeEvent.DETECTED, "dead", "Action:Replace", "", 300.0)
    assert again.id > 1000


def test_sinks_send_neither_twice_nor_too_little_after_a_takeover(tmp_path: Path) -> None:
    place_sinks(tmp_path, ("hook",), 7)
    assert _read_sent(tmp_path / "sinks" / "hook", 99) == 7


# -- records ------------------------------------------------------------------------------------

_ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("event"), st.text(max_size=5)),
        st.tuples(st.just("incident"), st.sampled_from(("n1", "n2", "n3"))),
        st.tuples(st.just("fail"), st.just("")),
        st.tuples(st.just("answered"), st.sampled_from(("n1", "n2"))),
        st.tuples(st.just("prune"), st.just("")),
        st.tuples(st.just("pause"), st.text(max_size=5)),
    ),
    max_size=12,
)


@given(_ACTS, st.integers(0, 12), st.integers(0, 3))
def test_records_make_the_same_journal(
    acts: list[tuple[str, str]], cut: int, repeated: int
) -> None:
    journal, records = Journal(":memory:", open_recorded), list[JournalRecord]()
    copy = Journal(":memory:")
    for one in (journal, copy):
        begin_history(one._db, "1-ctl")
    db = journal._db
    assert isinstance(db, RecordedConnection)
    db.begin_with(records.append)
    for number, (kind, word) in enumerate(acts):
        match kind:
            case "event":
                journal.event(float(number), "seen", word)
            case "incident" if journal.state_of(word) is NodeState.HEALTHY:
                found = journal.open_incident(
                    word, NodeEvent.DETECTED, "dead", "Action:Replace", "", 1.0
                )
                journal.apply(found.id, NodeEvent.MARKED, "", 2.0)
            case "fail":
                with pytest.raises(sqlite3.Error):
                    db.execute("INSERT INTO kept VALUES (NULL, 1)")
            case "answered":
                journal.acknowledge(word, {("b", "c", "", ""): 1.0, ("b", "d", "", ""): 2.0})
            case "prune":
                journal.prune(1.0)
            case "pause":
                journal.pause(word)
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    apply_records(copy._db, records[:cut])
    apply_records(copy._db, records[max(0, cut - repeated) :])
    assert list(copy._db.iterdump()) == list(db.iterdump())


def test_a_record_that_is_missing_is_noticed() -> None:
    copy = Journal(":memory:")
    begin_history(copy._db, "1-ctl")
    with pytest.raises(ValueError, match="record 2 follows 0"):
        apply_records(copy._db, [JournalRecord(2, ())])
