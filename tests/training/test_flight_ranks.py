"""Dumps that real gloo ranks write: the rank that does not join a collective is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks

from slurm_resilience.flight.culprit import diagnose_hang
from slurm_resilience.flight.dump_files import read_dumps

Say = Callable[[Any], None]
"""Answers before a rank's end."""


def content(form: str) -> bytes:
    """Return what torch 2.13 knows of this rank; of gloo it writes nothing by itself."""
    from torch._C import _distributed_c10d as c10d

    return bytes(c10d._dump_fr_trace() if form == "pickle" else c10d._dump_fr_trace_json())


def one_hangs(rank: int, say: Say, where: str, form: str, what: str) -> None:
    """Call some collectives, of the world and of a pair; then rank 1 does something else."""
    limit = timedelta(seconds=3)
    everyone, pair = dist.new_group(timeout=limit), dist.new_group([0, 1], timeout=limit)
    for size in range(1, 5):
        dist.all_reduce(torch.ones(size), group=everyone)
    if rank < 2:
        dist.all_reduce(torch.ones(6), group=pair)
    failed = ""
    try:
        if what == "hang" and rank == 1:
            pass
        elif what == "hang" and rank == 0:
            dist.all_reduce(torch.ones(7), group=pair)
        elif what == "type" and rank == 1:
            dist.broadcast(torch.ones(8), 1, group=everyone)
        else:
            dist.all_reduce(torch.ones(8), group=everyone)
    except RuntimeError as error:
        failed = str(error)
    (Path(where) / f"fr_rank_{rank}.{form}").write_bytes(content(form))
    say(failed)
    # Its end would break the others' connections: no collective of theirs would hang.
    deadline = time.monotonic() + 60
    while len(list(Path(where).glob("fr_rank_*"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize(("what", "kind"), [("hang", "not-joined"), ("type", "mismatch")])
def test_the_dumps_of_gloo_name_the_rank(tmp_path: Path, form: str, what: str, kind: str) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    with Ranks(tmp_path, 3, one_hangs, str(dumps), form, what) as ranks:
        failed = [ranks.result(rank) for rank in range(3)]
        ranks.results()
    found = read_dumps(dumps)
    assert found.unread == ()
    diagnosis = diagnose_hang(found.dumps.values())
    assert (diagnosis.kind, [one.rank for one in diagnosis.culprits]) == (kind, [1]), (
        diagnosis,
        failed,
    )
    assert (diagnosis.ranks, diagnosis.world_size) == (3, 3)
