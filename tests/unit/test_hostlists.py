from __future__ import annotations

import contextlib

import pytest
from ClusterShell.NodeSet import NodeSet
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import UsageError
from slurm_resilience.slurm.hostlists import expand, fold


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[01-02],m7", ("m7", "n01", "n02")),
        ("rack1-n[1,3]", ("rack1-n1", "rack1-n3")),
    ],
)
def test_expand(text: str, names: tuple[str, ...]) -> None:
    assert sorted(expand(text)) == sorted(names)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "n[1-",
        "n[3-1]",
        "@all",
        "n1;reboot",
        "-n1",
        "$(id)",
        "n*",
        "a!b",
        "n[1-9999999]",
        "n" + "1" * 5000,
        "n[1-3]" * 50,
    ],
)
def test_malformed_is_one_clear_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand(text)
    assert "\n" not in str(caught.value)


@given(st.sets(st.integers(0, 300), min_size=1, max_size=40))
def test_fold_and_expand_are_inverse(numbers: set[int]) -> None:
    names = {f"n{number}" for number in numbers}
    assert set(expand(fold(names))) == names


@given(st.text(max_size=30))
def test_no_text_crashes(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert expand(text)


HEADS = ("n", "node-", "a.b", "rack1-n", "ip-10-0-1-", "x1")
BOUND = st.integers(0, 130).flatmap(
    lambda number: st.sampled_from([str(number), f"{number:02}", f"{number:03}"])
)
PART = st.one_of(BOUND, st.tuples(BOUND, BOUND).map("-".join))


@given(st.sampled_from(HEADS), st.lists(PART, min_size=1, max_size=4))
def test_what_is_read_without_nodeset_is_read_as_by_it(head: str, parts: list[str]) -> None:
    text = f"{head}[{','.join(parts)}]"
    with contextlib.suppress(UsageError):
        assert expand(text) == tuple(NodeSet(text))


@given(st.lists(st.tuples(st.sampled_from(("n", "n", "n", "x1")), BOUND), max_size=8))
def test_what_is_folded_without_nodeset_is_folded_as_by_it(named: list[tuple[str, str]]) -> None:
    names = [head + number for head, number in named]
    nodes = NodeSet()
    for name in names:
        nodes.add(name)
    assert fold(names) == str(nodes)


@pytest.mark.parametrize("names", [["login"], ["n[1-2]", "n4"], ["n1,n2"], ["1"], []])
def test_odd_names_are_folded_as_by_nodeset(names: list[str]) -> None:
    assert fold(names) == str(NodeSet.fromlist(names))
