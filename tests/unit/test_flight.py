"""The culprit of a hang: from the dumps of programs with one fault, and none from hostile files."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from flight_programs import Fault, Step, dump, run, written
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_resilience.cli import main
from slurm_resilience.flight import dump_files, plain_pickle, rank_dump
from slurm_resilience.flight.culprit import HangDiagnosis, diagnose_hang
from slurm_resilience.flight.plain_pickle import NotPlain, load_plain
from slurm_resilience.flight.rank_dump import RankDump, UnreadableDump, read_dump

WORLD = [[0, 1, 2, 3]]
WITH_PAIRS = [[0, 1, 2, 3], [0, 1], [2, 3], [0, 2], [1, 3]]


def read(
    program: Sequence[Step],
    groups: Sequence[Sequence[int]],
    fault: Fault | None = None,
    ahead: int = 1,
    backend: str = "nccl",
    kept: int = 2000,
    form: str = "2",
) -> dict[int, RankDump]:
    ran = run(program, groups, fault, ahead)
    return {
        rank: read_dump(written(dump(one, groups, rank, backend, kept), form), rank)
        for rank, one in ran.items()
    }


def ranks_of(diagnosis: HangDiagnosis) -> list[int]:
    return [one.rank for one in diagnosis.culprits]


# -- what is found --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("form", ["2", "4", "5", "json"])
def test_a_rank_that_does_not_come_is_named(backend: str, form: str) -> None:
    program = [Step(0, size=number) for number in range(1, 20)]
    dumps = read(program, WORLD, Fault(3, 10, "hang"), backend=backend, form=form)
    found = diagnose_hang(dumps.values(), {0: "n1", 1: "n1", 2: "n2", 3: "n2"})
    assert (found.kind, ranks_of(found), found.culprits[0].node) == ("not-joined", [3], "n2")
    assert found.reason == "rank 3 did not join all_reduce, number 11 of group 0 (default_pg)"
    assert found.evidence == (
        "group 0 (default_pg), number 11: ranks 0-2 wait in all_reduce [11] Float "
        "(step at train.py:40)",
        "rank 3 on n2: its last there is number 10, all_reduce [10] Float (step at train.py:40)",
    )
    assert (found.ranks, found.world_size) == (4, 4)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("size", "rank 1 called a different size than the others as number 6"),
        ("type", "rank 1 called a different type than the others as number 6"),
        ("operation", "rank 1 called a different collective than the others as number 6"),
        ("skip", "rank 1 called a different size than the others as number 6"),
    ],
)
def test_a_rank_that_calls_something_else_is_named(what: str, said: str) -> None:
    program = [Step(0, size=number) for number in range(1, 20)]
    found = diagnose_hang(read(program, WORLD, Fault(1, 5, what)).values())
    assert (found.kind, ranks_of(found)) == ("mismatch", [1])
    assert found.reason.startswith(said)
    assert len(found.evidence) == 2


def test_of_two_that_differ_both_are_named() -> None:
    program = [Step(0)] * 5
    found = diagnose_hang(read(program, [[0, 1]], Fault(1, 3, "size")).values())
    assert (found.kind, ranks_of(found)) == ("mismatch", [0, 1])
    assert "the dumps do not tell" in found.reason


def test_the_rank_that_others_wait_for_in_another_group_is_the_culprit() -> None:
    """Rank 1 waits for rank 0 in their pair; so neither comes to the world's collective."""
    program = [Step(0), Step(1), Step(2), Step(0)]
    found = diagnose_hang(read(program, WITH_PAIRS, Fault(0, 1, "hang")).values())
    assert (found.kind, ranks_of(found)) == ("not-joined", [0])
    assert any("group 1" in line and "rank 1 waits" in line for line in found.evidence)


def test_a_rank_without_a_dump_is_named() -> None:
    dumps = read([Step(0)] * 9, WORLD, Fault(2, 4, "hang"))
    del dumps[2]
    found = diagnose_hang(dumps.values(), {2: "n9"})
    assert (found.kind, ranks_of(found), found.culprits[0].node) == ("no-dump", [2], "n9")
    assert (found.ranks, found.world_size) == (3, 4)


def test_a_dump_that_was_not_copied_does_not_hide_who_did_not_come() -> None:
    dumps = read([Step(0)] * 9, WORLD, Fault(2, 4, "hang"))
    del dumps[0]
    found = diagnose_hang(dumps.values())
    assert (found.kind, ranks_of(found)) == ("not-joined", [2])
    assert found.evidence[-1] == "rank 0 left no dump"


def test_ranks_that_call_in_different_orders_wait_for_each_other() -> None:
    first, second = [Step(1), Step(3)], [Step(3), Step(1)]
    groups = [[0, 1], [0, 1], [0, 1], [0, 1]]
    ran = {0: run(first, groups)[0], 1: run(second, groups)[1]}
    alone = {rank: one._replace(calls=[(*one.calls[0][:3], False)]) for rank, one in ran.items()}
    dumps = [read_dump(written(dump(one, groups, rank), "2"), rank) for rank, one in alone.items()]
    found = diagnose_hang(dumps)
    assert (found.kind, ranks_of(found)) == ("deadlock", [0, 1])


def changed(content: dict[str, Any], number: int, **fields: Any) -> dict[str, Any]:
    for entry in content["entries"]:
        if entry["collective_seq_id"] == number:
            entry.update(fields)
    return content


def test_a_gpu_that_does_not_come_to_it_is_named() -> None:
    ran = run([Step(0)] * 5, WORLD)
    dumps = [
        read_dump(
            written(
                changed(
                    dump(one, WORLD, rank),
                    5,
                    state="scheduled" if rank == 2 else "started",
                    retired=False,
                ),
                "2",
            ),
            rank,
        )
        for rank, one in ran.items()
    ]
    found = diagnose_hang(dumps)
    assert (found.kind, ranks_of(found)) == ("not-started", [2])


def test_where_all_are_in_it_no_rank_is_named() -> None:
    ran = run([Step(0)] * 5, WORLD)
    dumps = [
        read_dump(
            written(changed(dump(one, WORLD, rank), 5, state="started", retired=False), "2"), rank
        )
        for rank, one in ran.items()
    ]
    found = diagnose_hang(dumps)
    assert (found.kind, found.culprits) == ("in-transit", ())
    assert "the network or a GPU" in found.reason


def message(number: int, way: str, own: int, other: int) -> dict[str, Any]:
    arrow = "->" if way == "send" else "<-"
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 5,
        "p2p_seq_id": number,
        "profiling_name": f"nccl:{way} {own}{arrow}{other}",
        "state": "started",
        "retired": False,
        "is_p2p": True,
    }


def with_messages(made: dict[int, list[dict[str, Any]]], count: int = 4) -> HangDiagnosis:
    groups = [list(range(count))]
    ran = run([Step(0)] * 5, groups)
    dumps = []
    for rank, one in ran.items():
        content = dump(one, groups, rank)
        content["entries"] += made.get(rank, [])
        dumps.append(read_dump(written(content, "2"), rank))
    return diagnose_hang(dumps)


def test_a_receiver_waits_for_a_sender_that_does_not_send() -> None:
    found = with_messages({1: [message(1, "recv", 1, 0)], 2: [message(1, "recv", 2, 1)]})
    assert (found.kind, ranks_of(found)) == ("not-joined", [0])


def test_a_message_with_both_sides_is_the_networks_matter() -> None:
    found = with_messages({1: [message(1, "recv", 1, 0)], 0: [message(1, "send", 0, 1)]})
    assert (found.kind, ranks_of(found)) == ("in-transit", [0, 1])


def test_a_training_that_goes_on_has_no_culprit() -> None:
    found = diagnose_hang(read([Step(0)] * 5, WORLD).values())
    assert (found.kind, found.culprits, found.evidence) == ("none", (), ())


def test_gloos_own_group_has_its_name_in_the_calls_only() -> None:
    """As torch 2.13 writes it."""
    content = dump(run([Step(0)] * 3, WORLD, Fault(0, 2, "hang"))[1], WORLD, 1, "gloo")
    content["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[0, 1, 2, 3]"}}
    (key,) = read_dump(written(content, "2"), 1).calls
    assert (key.name, key.ranks) == ("0", (0, 1, 2, 3))


GROUPS = st.sampled_from([WORLD, WITH_PAIRS, [[0, 1, 2], [0, 1], [1, 2]], [list(range(8))]])


@st.composite
def hangs(draw: st.DrawFn) -> tuple[list[Step], list[list[int]], Fault]:
    """A program in which the sizes of following calls differ, and one rank that is at fault."""
    groups = draw(GROUPS)
    chosen = draw(st.lists(st.integers(0, len(groups) - 1), min_size=3, max_size=25))
    program = [Step(group, size=8 + at) for at, group in enumerate(chosen)] + [
        Step(0, size=7),
        Step(0, size=6),
    ]
    rank = draw(st.sampled_from(sorted({rank for members in groups for rank in members})))
    own = [step for step in program if rank in groups[step.group]]
    return program, groups, Fault(rank, draw(st.integers(0, len(own) - 1)), "hang")


@settings(max_examples=150)
@given(hangs(), st.sampled_from([1, 3, 100]), st.sampled_from(["nccl", "gloo"]))
def test_the_one_rank_that_hangs_is_the_culprit(
    hang: tuple[list[Step], list[list[int]], Fault], ahead: int, backend: str
) -> None:
    program, groups, fault = hang
    found = diagnose_hang(read(program, groups, fault, ahead, backend).values())
    assert (found.kind, ranks_of(found)) == ("not-joined", [fault.rank])


@settings(max_examples=100)
@given(hangs(), st.sampled_from(["size", "type", "operation"]), st.integers(5, 40))
def test_the_one_rank_that_differs_is_the_culprit(
    hang: tuple[list[Step], list[list[int]], Fault], what: str, kept: int
) -> None:
    program, groups, fault = hang
    own = [step for step in program if fault.rank in groups[step.group]]
    members = groups[own[fault.at].group]
    found = diagnose_hang(read(program, groups, fault._replace(what=what), kept=kept).values())
    assert found.kind == "mismatch"
    assert fault.rank in ranks_of(found)
    assert len(members) == 2 or ranks_of(found) == [fault.rank]


@settings(max_examples=50)
@given(hangs(), st.sampled_from([1, 100]))
def test_the_one_rank_without_a_dump_is_the_culprit(
    hang: tuple[list[Step], list[list[int]], Fault], ahead: int
) -> None:
    program, groups, fault = hang
    dumps = read(program, groups, fault, ahead)
    del dumps[fault.rank]
    found = diagnose_hang(dumps.values())
    assert (found.kind, ranks_of(found)) == ("no-dump", [fault.rank])


@settings(max_examples=50)
@given(hangs(), st.sampled_from([1, 100]))
def test_no_rank_is_blamed_where_none_is_at_fault(
    hang: tuple[list[Step], list[list[int]], Fault], ahead: int
) -> None:
    program, groups, _ = hang
    assert diagnose_hang(read(program, groups, None, ahead).values()).kind == "none"


# -- hostile files --------------------------------------------------------------------------------


class Calls:
    """Its pickle is a call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self._path}",))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_call_something_calls_nothing(tmp_path: Path, protocol: int) -> None:
    made = tmp_path / "made"
    data = pickle.dumps({"entries": [], "x": Calls(made)}, protocol)
    with pytest.raises(UnreadableDump, match="no dump of the Flight Recorder"):
        read_dump(data, 0)
    if protocol >= 2:
        with pytest.raises(NotPlain, match="asks to run code"):
            load_plain(data)
    assert not made.exists()


BOMBS = {
    "a table of billions": b"\x80\x02]r\xff\xff\xff\xff.",
    "a text of gigabytes": b"\x80\x02X\xff\xff\xff\xffx.",
    "a text of exabytes": b"\x80\x04\x8d" + b"\xff" * 8 + b"x.",
    "a number of gigabytes": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "a negative size": b"\x80\x02\x8b\xff\xff\xff\xff1.",
    "no end": b"\x80\x02]",
    "nothing": b"\x80",
    "an empty stack": b"\x80\x02.",
    "no mark": b"\x80\x02]Ke.",
    "a mark in a tuple": b"\x80\x02((\x86.",
    "items of a number": b"\x80\x02K\x01K\x01a.",
    "an odd table": b"\x80\x02}(K\x01u.",
    "a list as key": b"\x80\x02}]K\x01s.",
    "an unknown memo": b"\x80\x02h\x07.",
    "half a letter": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "a list within itself": b"\x80\x02]q\x00h\x00a.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02K\x01Q.",
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_one_line(data: bytes) -> None:
    with pytest.raises(UnreadableDump) as failed:
        read_dump(data, 0)
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) < 200


def test_a_deep_pickle_and_deep_json_are_one_line() -> None:
    for data in (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", b"[" * 100_000):
        with pytest.raises(UnreadableDump):
            read_dump(data, 0)


def test_one_long_list_in_many_groups_costs_no_more_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pickle of 8 MB could name one list of a million ranks in each of 10,000 groups."""
    monkeypatch.setattr(rank_dump, "MAX_MEMBERS", 10_000)
    shared = list(range(3000))
    for ranks in (shared, str(shared), ["no rank"] * 3000):
        looked_at = []
        monkeypatch.setattr(
            rank_dump, "_ranks", lambda told, seen=looked_at: seen.append(len(told)) or ()
        )
        groups = {str(number): {"ranks": ranks} for number in range(500)}
        read_dump(pickle.dumps({"entries": [], "pg_config": groups}), 0)
        assert sum(looked_at) <= 10_000


def test_keys_that_were_chosen_to_collide_are_refused() -> None:
    """All have the same hash: a table of a million of them would take hours."""
    keys = {number * (2**61 - 1): 0 for number in range(1, 5)}
    with pytest.raises(UnreadableDump, match="more than 60 bits as key"):
        read_dump(pickle.dumps({"entries": [], "x": keys}), 0)


def test_too_many_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MAX_OBJECTS", 1000)
    with pytest.raises(UnreadableDump, match="more than 1000 objects"):
        read_dump(b"\x80\x02" + b"]" * 1001 + b".", 0)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**500), 2**500)
    | st.floats(allow_nan=False)
    | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=5) | st.integers(-(2**60), 2**60), inner, max_size=5)
        | st.tuples(inner, inner)
        | st.tuples()
        | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=30,
)


@example(b"plain bytes", 4)
@example([b"x" * 300], 3)
@given(PLAIN, st.integers(2, 5))
def test_plain_data_is_read_as_python_reads_it(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    read_back = load_plain(data)
    assert read_back == value
    assert repr(read_back) == repr(value), "types too"


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_give_a_dump_or_one_line(data: bytes, is_pickle: bool) -> None:
    try:
        read_dump(b"\x80" + data if is_pickle else data, 0)
    except UnreadableDump as error:
        assert str(error).isprintable()


@settings(max_examples=200)
@given(st.integers(0, 5000), st.integers(0, 255), st.integers(0, 5000))
def test_a_damaged_dump_gives_a_dump_or_one_line(at: int, byte: int, length: int) -> None:
    whole = bytearray(written(dump(run([Step(0)] * 4, WORLD)[1], WORLD, 1), "2"))
    whole[at % len(whole)] = byte
    for data in (bytes(whole), bytes(whole[: length % len(whole)])):
        try:
            diagnose_hang([read_dump(data, 1)])
        except UnreadableDump as error:
            assert str(error).isprintable()


INTEGERS = st.integers(-(2**500), 2**500)
ODD = st.none() | st.booleans() | INTEGERS | st.text(max_size=5) | st.lists(INTEGERS)


@settings(max_examples=200)
@given(st.data())
def test_fields_of_any_kind_are_borne(data: st.DataObject) -> None:
    dumps = []
    for rank, one in run([Step(0)] * 3, WORLD, Fault(2, 1, "hang")).items():
        content = dump(one, WORLD, rank)
        for _ in range(data.draw(st.integers(0, 3))):
            entry = data.draw(st.sampled_from([content, *content["entries"]]))
            field = data.draw(st.sampled_from(sorted(entry.keys() - {"entries"})))
            entry[field] = data.draw(ODD | st.dictionaries(st.text(max_size=3), ODD))
        dumps.append(read_dump(written(content, "2"), rank))
    found = diagnose_hang(dumps)
    assert "\x00" not in found.kind


# -- the command ----------------------------------------------------------------------------------


def write(directory: Path, fault: Fault | None, name: str = "nccl_trace_rank_{}") -> None:
    for rank, one in run([Step(0, size=at) for at in range(1, 9)], WORLD, fault).items():
        path = directory / name.format(rank)
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(written(dump(one, WORLD, rank), "2"))


def test_a_directory_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, Fault(2, 5, "hang"))
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps(Calls(tmp_path / "made"), 2))
    (tmp_path / "README").write_text("no rank in its name")
    assert main.call(["explain", str(tmp_path), "--nodes", "n[1-2]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "not-joined: rank 2 did not join all_reduce, number 6 of group 0 (default_pg)"
    )
    assert lines[1].split() == ["culprit", "rank", "2", "on", "n2"]
    assert "rank 1 left no dump" in lines[4]
    assert lines[5].split() == ["read", "the", "dumps", "of", "3", "of", "4", "ranks"]
    assert "its name does not end with a rank" in lines[6]
    assert "asks to run code" in lines[7]
    assert not (tmp_path / "made").exists()


def test_a_sub_directory_is_named_after_its_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, one in run([Step(0)] * 9, WORLD, Fault(3, 5, "hang")).items():
        (tmp_path / f"gpu{rank // 2}").mkdir(exist_ok=True)
        file = tmp_path / f"gpu{rank // 2}" / f"fr_{rank}.json"
        file.write_bytes(written(dump(one, WORLD, rank, "gloo"), "json"))
    assert main.call(["explain", str(tmp_path), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "not-joined"
    assert told["culprits"] == [{"rank": 3, "node": "gpu1"}]
    assert (told["ranks"], told["world_size"], told["unread"]) == (4, 4, [])


def test_of_two_dumps_of_a_rank_the_newer_one_counts(tmp_path: Path) -> None:
    write(tmp_path / "old", Fault(1, 2, "hang"))
    write(tmp_path / "new", Fault(2, 5, "hang"))
    for directory, moment in (("old", 1000), ("new", 2000)):
        for file in (tmp_path / directory).iterdir():
            os.utime(file, (moment, moment))
    found = dump_files.read_dumps(tmp_path)
    assert {one.node for one in found.dumps.values()} == {"new"}
    assert len(found.unread) == 4
    assert diagnose_hang(found.dumps.values()).culprits[0].rank == 2


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--nodes", "n[1-3]"], 2, "4 ranks are not as many on each of 3 nodes"),
        (["--nodes", "n["], 2, "is not a hostlist"),
    ],
)
def test_nodes_that_do_not_fit_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, why: str
) -> None:
    write(tmp_path, None)
    assert main.call(["explain", str(tmp_path), *words]) == code
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_a_directory_without_dumps_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.call(["explain", str(tmp_path)]) == 5
    (tmp_path / "rank_0").write_bytes(pickle.dumps(Calls(tmp_path / "made"), 2))
    assert main.call(["explain", str(tmp_path)]) == 5
    log = tmp_path / "slurm-1.out"
    log.write_text("a log")
    assert main.call(["explain", str(log), "--nodes", "n1"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "no dump of PyTorch's Flight Recorder" in said[0]
    assert "rank_0: no dump of the Flight Recorder: it asks to run code" in said[1]
    assert "--nodes belongs to a directory" in said[2]


def test_what_is_no_file_or_too_large_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, None)
    os.mkfifo(tmp_path / "rank_7")
    (tmp_path / "rank_8").symlink_to("/nowhere")
    monkeypatch.setattr(dump_files, "MAX_FILE_BYTES", 100_000)
    (tmp_path / "rank_9").write_bytes(b"\x80" + struct.pack("<I", 0) * 30_000)
    found = dump_files.read_dumps(tmp_path)
    assert sorted(found.dumps) == [0, 1, 2, 3]
    assert [one.reason for one in found.unread] == [
        "it is no regular file",
        "cannot be read: No such file or directory",
        "it has more than 0 MiB",
    ]
