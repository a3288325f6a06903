"""A listing of Slurm's: what has not changed since the last one is not read again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import SlurmError, UsageError
from slurm_resilience.slurm import hostlists, parse
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.hostlists import LastNodeLists
from slurm_resilience.slurm.node_listing import NodeListing

DATA = Path(__file__).parents[1] / "data" / "slurm"


class Commands:
    """Slurm's commands: scontrol prints a text."""

    def __init__(self, directory: Path) -> None:
        self.text = directory / "text"
        self.client = CliClient(str(directory))
        script = directory / "scontrol"
        script.write_text(f"#!/bin/sh\ncat {self.text}\n")
        script.chmod(0o755)

    def nodes(self, text: str) -> dict[str, object]:
        self.text.write_text(text)
        return {node.name: node for node in self.client.nodes()}


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The records that were read."""
    records: list[str] = []
    node = parse.node

    def spy(record: str) -> object:
        records.append(record)
        return node(record)

    monkeypatch.setattr(parse, "node", spy)
    yield records


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_only_what_has_changed_is_read(commands: Commands, read: list[str], release: str) -> None:
    text = (DATA / release / "nodes.txt").read_text()
    first = commands.nodes(text)
    assert list(first.values()) == list(parse.nodes(text))
    read.clear()
    assert commands.nodes(text) == first
    assert read == []
    name = next(iter(first))
    changed = re.sub(rf"(NodeName={name} .*?State=)\S+", r"\1DOWN*", text, count=1)
    assert changed != text
    second = commands.nodes(changed)
    assert [record.split()[0] for record in read] == [f"NodeName={name}"]
    assert list(second.values()) == list(parse.nodes(changed))


def test_a_node_that_is_gone_is_not_remembered(commands: Commands, read: list[str]) -> None:
    text = (DATA / "22.05" / "nodes.txt").read_text()
    records = parse.node_records(text)
    commands.nodes(text)
    assert list(commands.nodes(records[-1])) == [parse.node(records[-1]).name]
    read.clear()
    commands.nodes(text)
    assert len(read) == len(records) - 1


def test_half_an_answer_is_no_answer(commands: Commands) -> None:
    """The rest of `State=DOWN+DRAIN` may be a person's DRAIN."""
    text = (DATA / "22.05" / "nodes.txt").read_text()
    cut = text[: text.index("State=") + len("State=IDL")]
    with pytest.raises(SlurmError, match="half an answer"):
        commands.nodes(cut)


CHANGES = st.sampled_from(["nothing", "state", "gone", "new", "order"])


@given(st.lists(st.tuples(CHANGES, st.integers(0, 99)), max_size=8))
def test_listings_in_a_row_are_read_as_each_alone(changes: list[tuple[str, int]]) -> None:
    records = parse.node_records((DATA / "22.05" / "nodes.txt").read_text())
    listing, number = NodeListing(), 0
    for change, place in changes:
        at, number = place % len(records), number + 1
        match change:
            case "state":
                state = f"State=IDLE+DRAIN Weight={number} "
                records[at] = re.sub(r"State=\S+ ", state, records[at], count=1)
            case "gone" if len(records) > 1:
                del records[at]
            case "new":
                name = f"NodeName=new{number} "
                records.insert(at, re.sub(r"NodeName=\S+ ", name, records[at], count=1))
            case "order":
                records.append(records.pop(at))
            case _:
                pass
        text = "\n".join(record.rstrip("\n") for record in records) + "\n"
        assert listing.read(text) == parse.nodes(text)


def test_node_lists_are_expanded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lists, expanded = LastNodeLists(), list[str]()
    expand = hostlists.expand

    def spy(hostlist: str) -> tuple[str, ...]:
        expanded.append(hostlist)
        return expand(hostlist)

    monkeypatch.setattr(hostlists, "expand", spy)
    for _ in range(3):
        lists.begin()
        assert lists.expand("n[1-3]") == ("n1", "n2", "n3")
    assert expanded == ["n[1-3]"]
    for _ in range(2):
        lists.begin()
        assert lists.expand("n4") == ("n4",)
    lists.begin()
    lists.expand("n[1-3]")
    assert expanded == ["n[1-3]", "n4", "n[1-3]"], "the last listing did not have it"
    with pytest.raises(UsageError):
        lists.expand("[")
