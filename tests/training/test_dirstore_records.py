"""The log of a DirStore: whole records only, the same for all readers, in the file's order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.training.process_group.records import (
    BadNumber,
    Op,
    Record,
    apply,
    decode,
    encode,
    skip,
)

pytestmark = pytest.mark.training

OPS = st.builds(
    Op,
    kind=st.sampled_from(["set", "add", "swap", "append", "delete"]),
    key=st.text(max_size=5),
    value=st.binary(max_size=20),
    expected=st.binary(max_size=3),
    amount=st.integers(-(2**62), 2**62),
)
RECORDS = st.builds(
    Record,
    writer=st.binary(min_size=8, max_size=8),
    number=st.integers(0, 2**40),
    ops=st.lists(OPS, max_size=3).map(tuple),
)


@given(st.lists(RECORDS, max_size=4), st.data())
def test_any_beginning_of_the_file_gives_the_first_records(
    written: list[Record], data: st.DataObject
) -> None:
    log = b"".join(map(encode, written))
    seen = data.draw(st.integers(0, len(log)))
    found, end = decode(log[:seen])
    assert found == written[: len(found)]
    rest, last = decode(log, end)
    assert found + rest == written
    assert last == len(log)


@given(RECORDS, RECORDS, st.data())
def test_half_a_record_is_skipped_and_costs_nobody_elses(
    dead: Record, alive: Record, data: st.DataObject
) -> None:
    whole = encode(dead)
    half = whole[: data.draw(st.integers(1, len(whole) - 1))]
    log = half + encode(alive)
    assert decode(log) == ([], 0)
    assert skip(log, 0) == len(half)
    assert skip(half, 0) == -1


@given(RECORDS, st.data())
def test_a_changed_bit_is_no_record(record: Record, data: st.DataObject) -> None:
    log = bytearray(encode(record))
    log[data.draw(st.integers(0, len(log) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert decode(bytes(log)) == ([], 0)


def test_swap_answers_what_stands_there() -> None:
    values: dict[str, bytes] = {}
    assert apply(values, Op("swap", "k", b"new", b"old")) == b"old"
    assert values == {}
    assert apply(values, Op("swap", "k", b"first", b"")) == b"first"
    assert apply(values, Op("swap", "k", b"new", b"old")) == b"first"
    assert apply(values, Op("swap", "k", b"new", b"first")) == b"new"
    assert values == {"k": b"new"}


def test_add_to_a_word_changes_nothing() -> None:
    values = {"k": b"word"}
    with pytest.raises(BadNumber):
        apply(values, Op("add", "k", amount=1))
    assert values == {"k": b"word"}
