"""The status goes out in pages, and users read of the journal what is theirs to read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from slurm_resilience.controller.pages import PAGE_BYTES, PRIVATE_TEXT, StatusPages, public_event
from slurm_resilience.wire.messages import FRAMES, Status


def status(nodes: int, findings: int = 0, jobs: int = 3) -> dict[str, Any]:
    finding = {"check": "xid", "text": "t" * 200, "evidence": "e" * 200}
    return {
        "version": "1",
        "paused": "",
        "nodes": {
            f"n{i}": {"state": "IDLE", "findings": [finding] * findings} for i in range(nodes)
        },
        "jobs": {str(i): {"nodes": ["n1", "n2"]} for i in range(jobs)},
    }


def collected(pages: StatusPages) -> tuple[dict[str, Any], list[int]]:
    """All pages as a client puts them together, and the size of each frame."""
    whole: dict[str, Any] = {}
    sizes, after = [], ""
    while True:
        data, after = pages.page(after)
        body = FRAMES.encode(Status(data, after))
        sizes.append(len(body))
        page = msgspec.msgpack.decode(body)["data"]
        for name, part in page.items():
            if isinstance(part, dict) and name in whole:
                whole[name].update(part)
            else:
                assert name not in whole
                whole[name] = part
        if not after:
            return whole, sizes


@pytest.mark.parametrize(("nodes", "findings"), [(0, 0), (1, 0), (10_000, 0), (500, 20)])
def test_pages_together_are_the_status(nodes: int, findings: int) -> None:
    known = status(nodes, findings)
    whole, sizes = collected(StatusPages(known))
    assert whole == known
    assert max(sizes) < 2 * PAGE_BYTES
    assert (len(sizes) > 1) is (nodes > 1)


def test_a_page_that_ends_with_the_last_node_goes_on_with_the_jobs() -> None:
    known = status(1, 0)
    known["nodes"]["n0"]["state"] = "x" * PAGE_BYTES
    whole, sizes = collected(StatusPages(known))
    assert whole == known and len(sizes) == 2


def test_nodes_that_go_between_two_pages_are_left_out() -> None:
    first, after = StatusPages(status(10_000)).page()
    rank, _, last = after.partition("/")
    fewer = status(10_000)
    del fewer["nodes"][last]
    rest, _ = StatusPages(fewer).page(after)
    assert rest["nodes"] and not set(rest["nodes"]) & set(first["nodes"])
    assert min(rest["nodes"]) > last and rank == "0"


@pytest.mark.parametrize("after", ["x", "/", "9/n1", "1/zzz", "-1/n1", "²/n1"])
def test_a_mark_that_is_not_ours_gives_some_page(after: str) -> None:
    StatusPages(status(3)).page(after)


def test_the_first_page_tells_the_age_by_no_date() -> None:
    pages = StatusPages({"at": 0.0, "nodes": {}}, 100.0).with_news({"blind": "why"})
    first, _ = pages.page()
    assert pages.with_age(first, 103.0)["age"] == 3.0
    assert pages.with_age({"nodes": {}}, 103.0) == {"nodes": {}}


def test_before_the_first_cycle_there_is_nothing() -> None:
    assert StatusPages({}).page() == ({}, "")
    assert StatusPages({}).with_news({"blind": "why"}).page() == ({"blind": "why"}, "")


def event(kind: str, text: str, **data: Any) -> dict[str, Any]:
    return {"id": 1, "kind": kind, "text": text, "node": "n1", "data": data}


def test_users_do_not_read_what_the_replacement_program_was_told_and_said() -> None:
    started = public_event(event("replacing", "/opt/replace --token s3cret replace n1"))
    assert started["text"] == PRIVATE_TEXT
    failed = public_event(
        event(
            "replacement-failed",
            "the program exited 3: token s3cret: refused; again in 60 s (attempt 1 failed)",
            output="a\ntoken s3cret: refused",
            state="empty",
        )
    )
    assert failed["text"] == "the program exited 3; again in 60 s (attempt 1 failed)"
    assert failed["data"] == {"output": PRIVATE_TEXT, "state": "empty"}


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (
            "the program exited 1: key s3cret; it is replaced",
            "the program exited 1; it is replaced",
        ),
        (
            "the program disappeared: key s3cret; given up after 3 attempts, a person must look",
            "the program disappeared; given up after 3 attempts, a person must look",
        ),
        (
            "the program did not start: no file s3cret; nothing was begun; again in 60 s",
            "the program did not start; again in 60 s",
        ),
        (
            "the program exited 3: key s3cret; Action:Reboot was asked for meanwhile",
            "the program exited 3; Action:Reboot was asked for meanwhile",
        ),
        ("the program exited 3: key s3cret; what else", "the program exited 3"),
        (
            "the cloud exited 7: key s3cret; again in 5 s (attempt 1 failed)",
            "the cloud exited 7; again in 5 s (attempt 1 failed)",
        ),
        *(
            (f"{by} exited 1: it is DOWN; again in 5 s", f"{by} exited 1: it is DOWN; again in 5 s")
            for by in ("Slurm's power saving", "scontrol reboot", "its sresd")
        ),
    ],
)
def test_users_read_no_last_line_of_a_program_whatever_follows(text: str, read: str) -> None:
    assert public_event(event("replacement-failed", text))["text"] == read


def test_users_read_everything_else() -> None:
    known = event("marked", "down: Action:Replace", state="set-aside")
    assert public_event(known) == known
