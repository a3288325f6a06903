"""Parse: what Slurm 22.05, 24.11 and 26.05 really printed (tests/data/slurm; scripts/record-slurm
records it anew)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.lab.releases import VERSIONS
from slurm_resilience.model import REPLACE, Node
from slurm_resilience.resume.srun.srun_options import BUILTIN, Takes, parse_help
from slurm_resilience.slurm import parse

DATA = Path(__file__).parents[1] / "data" / "slurm"
MARK = "<8d0c1f6e5a4b3c2d>"
CAROL = "carol@corp.example.com"
NEW_FIELDS = ("ReservationName", "Parameters", "TLSCertTokenSet", "TLSCertLastRenewal", "Topology")
"""Fields that some release prints behind a reason."""


def recorded(version: str, name: str) -> str:
    return (DATA / version / f"{name}.txt").read_text()


def nodes(version: str) -> dict[str, Node]:
    return {node.name: node for node in parse.nodes(recorded(version, "nodes"))}


each_release = pytest.mark.parametrize("version", VERSIONS)


@each_release
@pytest.mark.parametrize(
    ("name", "state", "reason", "by"),
    [
        ("n1", "ALLOCATED", "", ""),
        ("n2", "ALLOCATED+FAIL", REPLACE, "root"),
        ("n3", "MIXED", "", ""),
        ("n4", "IDLE+DRAIN+RESERVED", "vendor on site, hands off", "root"),
        ("n5", "IDLE+FAIL+RESERVED", REPLACE, "root"),
        ("n6", "IDLE+DRAIN+RESERVED", "RMA 4711, keep out", CAROL),
        ("n7", "IDLE+DRAIN", "first line\nsecond a=b\nthird", "root"),
        ("n8", "IDLE+DRAIN", "see https://a.example.com/t?id=7 [bob@ops]. v1.2", "root"),
        ("n9", "IDLE+FAIL", "x [root@2026-01-01T00:00:00] y Comment=no", "root"),
        ("n10", "DOWN", "gres/gpu count reported lower than configured (1 < 2)", "root"),
        ("n11", "IDLE+DRAIN+MAINTENANCE+RESERVED", "fan", CAROL),
        ("n12", "IDLE+RESERVED", "", ""),
        ("n13", "IDLE+DRAIN", "Action:Replace ", "root"),
        ("n15", "IDLE+MAINTENANCE+RESERVED", "", ""),
        ("n16", "DOWN", "Not responding", "root"),
    ],
)
def test_nodes_in_odd_states(version: str, name: str, state: str, reason: str, by: str) -> None:
    node = nodes(version)[name]
    # Slurm shows that a dead node does not answer when it has asked it.
    assert node.state.removesuffix("+NOT_RESPONDING") == state
    assert (node.reason, node.reason_by) == (reason, by)
    assert bool(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", node.reason_at)) == bool(reason)


@each_release
def test_a_comment_ends_where_the_next_field_begins(version: str) -> None:
    seen = nodes(version)
    assert seen["n12"].comment == "spare part ordered, due on Monday"
    assert seen["n11"].comment == "rack 7, see the wiki [bob@2026-01-01T00:00:00]"


@each_release
def test_the_one_reason_that_may_end_in_two_places_is_not_clear(version: str) -> None:
    assert [name for name, node in nodes(version).items() if node.reason_unclear] == ["n11"]


@each_release
def test_what_every_node_has(version: str) -> None:
    seen = nodes(version)
    assert list(seen) == [f"n{number}" for number in range(1, 17)]
    for node in seen.values():
        assert (node.cpus, node.memory, node.partitions) == (4, 1000, ("main",))
        assert (node.gres, node.port) == ("gpu:h100:2", 6818)
        assert re.fullmatch(r"10\.\d+\.\d+\.\d+", node.address)
        assert re.match(r"2\d{3}-", node.boot_time)
    assert seen["n1"].gres_used.startswith("gpu:h100:2")
    assert (seen["n1"].cpus_alloc, seen["n3"].cpus_alloc, seen["n4"].cpus_alloc) == (4, 2, 0)


@each_release
def test_no_field_is_unknown_to_the_parser(version: str) -> None:
    """A new one before the free text would be taken for a word of it on other nodes."""
    heads = re.split(r" (?:Reason|Comment|Extra)=", recorded(version, "nodes").split("\n")[0])
    printed = set(re.findall(r"(?:^| )([A-Z]\w*)=", heads[0]))
    assert printed - {"ReservationName"} <= parse.BEFORE_FREE_TEXT


@each_release
def test_jobs(version: str) -> None:
    exclusive = parse.has_exclusive_column(recorded(version, "squeue_help_format"))
    assert exclusive is (version == "26.05")
    columns = recorded(version, "columns_exclusive" if exclusive else "columns")
    jobs = {job.id: job for job in parse.jobs(recorded(version, "squeue"), MARK, columns)}
    assert [jobs[number].exclusive for number in (1, 2, 3, 4)] == [True, False, False, True]
    assert [jobs[number].requeue for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert (jobs[1].nodes, jobs[1].batch_host, jobs[1].num_nodes) == (("n1", "n2"), "n1", 2)
    assert jobs[1].gres in ("gres:gpu:2", "gres/gpu:2")
    assert (jobs[1].account, jobs[1].qos, jobs[1].partition) == ("root", "normal", "main")
    assert (jobs[4].state, jobs[4].nodes, jobs[4].batch_host) == ("PENDING", (), "")
    assert all(job.is_batch and job.uid == 0 for job in jobs.values())


@each_release
def test_what_scontrol_says_of_sharing_agrees(version: str) -> None:
    lines = recorded(version, "jobs").split("\nJobId=")
    shown = [re.search(r" (?:Exclusive|OverSubscribe)=(\S+) Contiguous", line) for line in lines]
    whole = [match is not None and match[1] in ("NO", "NODE") for match in shown]
    if version == "26.05":
        whole = [match is not None and match[1] == "NODE" for match in shown]
    assert whole == [True, False, False, True]


@each_release
def test_steps(version: str) -> None:
    steps = {step.step: step for step in parse.steps(recorded(version, "steps"), 1)}
    assert set(steps) == {"batch", "0"}
    assert (steps["0"].nodes, steps["0"].tasks, steps["0"].srun_host) == (("n1", "n2"), 2, "n1")
    assert steps["0"].srun_pid > 0


@each_release
def test_the_configuration(version: str) -> None:
    info = parse.config(recorded(version, "config"))
    assert info.version.startswith(version)
    assert info.cluster == f"record-{version.replace('.', '-')}"
    assert info.permits_expansion and info.slurm_user_uid == 0
    assert info.munge_socket.endswith("/munge/munge.socket.2")
    assert len(info.controllers) == 1 and info.accounting == "accounting_storage/slurmdbd"


@each_release
def test_every_option_of_srun_is_in_the_built_in_table(version: str) -> None:
    """Only options whose help is misleading differ in whether they take the next word."""
    listed = parse_help(recorded(version, "srun_help"))
    known = {spec.name: spec for spec in BUILTIN.specs}
    assert {spec.name for spec in listed} <= known.keys()
    listed_takes, known_takes = (
        {spec.name for spec in specs if spec.takes is Takes.VALUE}
        for specs in (listed, [known[spec.name] for spec in listed])
    )
    assert listed_takes ^ known_takes <= {"bcast", "container", "container-id"}
    assert ("async" in {spec.name for spec in listed}) is (version == "26.05")


def test_a_blank_reason_is_none() -> None:
    """All that 24.11 takes in place of the reason of a resumed node."""
    head = recorded("24.11", "nodes").split("\n")[0]
    (node,) = parse.nodes(f"{head} Reason=  [root@2026-11-22T02:56:34] ReservationName=x\n")
    assert (node.reason, node.reason_by, node.reason_at) == ("", "", "")
    assert not node.reason_unclear


# What no release prints yet

KEYS = st.from_regex(r"[A-Z][A-Za-z_]{2,20}", fullmatch=True).filter(
    lambda key: key not in parse.BEFORE_FREE_TEXT | {"Comment", "Extra"}
)
# As a field of Slurm's has it: no blank before a capital and "=", no author's mark.
VALUES = st.text(st.sampled_from("abc XYZ-_.,:/()0123456789"), max_size=30)
REASONS = VALUES.map(str.strip).filter(bool)
AUTHORS = st.sampled_from(("root", "alice@corp.example.com", "alice.b", "x y", "20003"))


@given(
    version=st.sampled_from(VERSIONS),
    reason=REASONS,
    author=AUTHORS,
    new=st.lists(st.tuples(KEYS | st.sampled_from(NEW_FIELDS), VALUES), max_size=3),
)
def test_an_unknown_field_behind_a_reason_changes_nothing_of_it(
    version: str, reason: str, author: str, new: list[tuple[str, str]]
) -> None:
    head = recorded(version, "nodes").split("\n")[0]
    more = "".join(f" {key}={value}" for key, value in new)
    (node,) = parse.nodes(f"{head} Reason={reason} [{author}@2026-11-22T02:23:56]{more}\n")
    assert (node.reason, node.reason_by) == (reason, author)
    assert not node.reason_unclear


@given(
    version=st.sampled_from(VERSIONS),
    text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\n"), max_size=60),
    new=st.lists(st.tuples(KEYS, VALUES), max_size=2),
)
def test_a_reason_is_read_or_the_node_is_held(
    version: str, text: str, new: list[tuple[str, str]]
) -> None:
    """Any text in a Reason: nothing becomes an action that it is not."""
    head = recorded(version, "nodes").split("\n")[0]
    more = "".join(f" {key}={value}" for key, value in new)
    (node,) = parse.nodes(f"{head} Reason={text} [root@2026-11-22T02:23:56]{more}\n")
    assert node.reason == (text if text.strip() else "") or node.reason_unclear
    assert not node.requested_action or text == node.requested_action
    assert node.base == "ALLOCATED" and node.gres == "gpu:h100:2"


@pytest.mark.parametrize(
    "tail",
    [
        "Reason=Action:Replace",  # nothing says where it ends
        "Reason=Action:Replace [root@yesterday]",
        "Reason=Action:Replace [root@2026-11-22T02:23:56] and more",
        "Reason=Action:Replace [a@2026-11-22T02:23:56] Comment=x [b@2026-11-22T02:23:56]",
    ],
)
def test_a_reason_that_is_not_understood_is_present_and_asks_for_nothing(tail: str) -> None:
    head = recorded("22.05", "nodes").split("\n")[0]
    (node,) = parse.nodes(f"{head} {tail}\n")
    assert node.reason.startswith(REPLACE)
    assert node.reason_unclear and not node.requested_action and not node.near_miss
