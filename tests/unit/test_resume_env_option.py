"""The option with the variables: what goes in comes out, and nothing malformed is let through."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import UsageError
from slurm_resilience.resume.srun.env_option import (
    NODEID,
    PROTOCOL,
    decode,
    encode,
    option_value,
    read_option_value,
)


def shown(data: bytes) -> str:
    """Any bytes an environment can hold, as Python shows them."""
    return data.decode("utf-8", "surrogateescape")


binary = st.binary(max_size=40).map(lambda data: data.replace(b"\0", b""))
values = binary.map(shown)
names = binary.map(lambda data: shown(data.replace(b"=", b""))).filter(bool)


@given(st.dictionaries(names, values))
def test_what_was_encoded_is_decoded(pairs: dict[str, str]) -> None:
    assert decode(encode(pairs)) == pairs


@given(st.dictionaries(names, values))
def test_an_option_value_is_plain_ascii_without_spaces(pairs: dict[str, str]) -> None:
    text = encode(pairs)
    assert text.isascii()
    assert not set(text) & set(" \t\n\"'\\,=:|&$`") - {"="}


@given(st.text())
def test_a_text_is_decoded_or_refused(text: str) -> None:
    try:
        pairs = decode(text)
    except UsageError:
        return
    assert decode(encode(pairs)) == pairs


def test_the_form_that_the_plugin_reads() -> None:
    assert encode({"A_1": "x y", "SLURM_NODEID": NODEID, "E": ""}) == (
        "A_1=x%20y;SLURM_NODEID=%40NODEID;E="
    )
    assert encode({}) == ""
    assert decode("A=1;A=2") == {"A": "2"}


@pytest.mark.parametrize("pairs", [{"": "x"}, {"A=B": "x"}, {"A": "x\0y"}, {"A\0": "x"}])
def test_what_no_environment_can_hold_is_refused(pairs: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="no environment can hold"):
        encode(pairs)


def test_plugin_and_supervisor_have_the_same_protocol() -> None:
    header = Path(__file__).resolve().parents[2] / "spank" / "common.h"
    assert re.findall(r"^#define SRES_PROTOCOL (\d+)$", header.read_text(), re.M) == [str(PROTOCOL)]


def test_the_whole_value_names_the_protocol() -> None:
    assert option_value({"A": "1"}) == f"{PROTOCOL};A=1"
    assert read_option_value(option_value({"A": "1"})) == {"A": "1"}
    # A plugin of before there was a number takes it for malformed, and starts no task.
    for text in (option_value({"A": "1"}), option_value({})):
        with pytest.raises(UsageError, match="malformed"):
            decode(text)


@pytest.mark.parametrize("text", ["A=1", f"{PROTOCOL + 1};A=1", "", "1", "x;A=1"])
def test_a_value_of_another_protocol_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="malformed"):
        read_option_value(text)


MALFORMED = [
    "A",
    "=x",
    "A=1;",
    ";A=1",
    "A=1;;B=2",
    "A=%",
    "A=%4",
    "A=%zz",
    "A=%4a",
    "A=%00",
    "A%3DB=1",
    "A=b c",
    "A=b=c",
    "A=é",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_option_value_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="malformed --sres-env"):
        decode(text)
