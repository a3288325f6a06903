"""Copies in the memory of two nodes: what was lost comes back, and no round counts by half."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_ranks import run, view_of

from slurm_resilience.mesh.model import PeerStatus
from slurm_resilience.training import state
from slurm_resilience.training.state import Partner, StateError, Tracked
from slurm_resilience.training.state.partner import Exchange, PartnerCopy, Round

pytestmark = pytest.mark.training

WAIT = 20.0


def part_of(rank: int) -> torch.Tensor:
    """Each rank's own part of a model: of another size at each."""
    return torch.full((1000 + rank,), float(rank))


def restored(rank: int, group: Any) -> dict[str, Any]:
    world = group.size()
    blank = view_of([PeerStatus()] * world, replica_size=world, generation=1)
    mine = part_of(rank)
    tracked = Tracked({"part": mine})
    partner = Partner(every=2)
    partner.open(blank, rank, dist.new_group())
    for step in range(1, 6):
        mine += 1
        if partner.due(step):
            partner.snapshot(step, tracked)
            assert partner.wait(WAIT)
    assert partner.error == ""
    newest = torch.get_rng_state()
    said = (partner.step, partner.keeps)
    partner.close()
    mine.fill_(-1)
    torch.rand(3)
    if rank == 1:
        # A new process sits here: it has nothing.
        partner = Partner()
    statuses = [
        PeerStatus(
            generation=1, step=5, dirty=True, position=r, snapshot=4, keeps=((r - 1) % world,)
        )
        if r != 1
        else PeerStatus()
        for r in range(world)
    ]
    view = view_of(statuses, replica_size=world)
    plan = state.plan(view)
    report = state.transfer(plan, view, rank, tracked, group, partner=partner)
    return {
        "said": said,
        "plan": (plan.kind, plan.step),
        "part": (mine - 4 - rank).abs().max().item(),
        "moved": (report.received, report.sent),
        "rng": torch.equal(torch.get_rng_state(), newest),
        "cost": str(partner.last or ""),
    }


def test_no_round_comes_after_a_rank_was_told_of() -> None:
    """The plan was made from the round before, which was let go of meanwhile: all ranks ended."""
    partner = Partner()

    def round_of(step: int) -> Round:
        tracked = Tracked({"part": torch.zeros(4)})
        own = PartnerCopy(step, 0, 0, tracked.capture().descriptor, torch.zeros(16))
        return Round(own, None)

    partner.publish(round_of(4), 0.1)
    partner.settle()
    partner.freeze()
    with pytest.raises(StateError, match="the copy of step 6"):
        partner.publish(round_of(6), 0.1)
    assert partner.step == 4
    partner.open(view_of([PeerStatus()]), 0, None)
    partner.publish(round_of(8), 0.1)
    assert partner.step == 8
    partner.close()


def test_a_lost_part_comes_from_its_partner_and_all_go_back_to_the_same_step(
    tmp_path: Path,
) -> None:
    found = run(restored, 3, tmp_path)
    assert [one["said"] for one in found] == [(4, (2,)), (4, (0,)), (4, (1,))]
    assert {one["plan"] for one in found} == {("memory", 4)}
    assert {one["part"] for one in found} == {0.0}
    assert [one["moved"] for one in found] == [(0, 0), (4004, 0), (0, 4004)]
    assert all(one["rng"] for one in found)
    assert found[0]["cost"].startswith("snapshot of step 4: 0.0 MB")


def broken(rank: int, group: Any) -> tuple[int, tuple[int, ...], float]:
    mine = part_of(rank)
    tracked = Tracked({"part": mine})
    partner = Partner()
    partner.open(view_of([PeerStatus()] * 2, replica_size=2), rank, dist.new_group())
    partner.snapshot(1, tracked)
    assert partner.wait(WAIT)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mine += 50
    partner.snapshot(2, tracked)
    assert partner.wait(WAIT)
    assert partner.error
    assert partner.snapshot(3, tracked) is None
    partner.restore_own(tracked, 1)
    with pytest.raises(StateError, match="no copy in memory of step 2"):
        partner.restore_own(tracked, 2)
    return partner.step, partner.keeps, mine.mean().item()


def test_a_fault_during_a_round_leaves_the_round_before(tmp_path: Path) -> None:
    survivor, dead = run(broken, 2, tmp_path)
    assert survivor == (1, (1,), 0.0)
    assert dead == -signal.SIGKILL


def torn(rank: int, group: Any, fatal: int) -> tuple[int, list[float]]:
    """Rank 1 is killed as it comes to one of the points where a round waits for all."""
    mine = part_of(rank)
    tracked = Tracked({"part": mine})
    partner = Partner()
    together, count = Exchange._together, iter(range(10))

    def kill(exchange: Exchange) -> None:
        if rank == 1 and next(count) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        together(exchange)

    Exchange._together = kill  # type: ignore[method-assign]
    partner.open(view_of([PeerStatus()] * 2, replica_size=2), rank, dist.new_group())
    for step in (1, 2):
        mine += 1
        partner.snapshot(step, tracked)
        assert partner.wait(WAIT)
    assert partner.error
    said, found = partner.step, []
    for step in range(said, 0, -1):
        partner.restore_own(tracked, step)
        found.append(mine[0].item())
    return said, found


@pytest.mark.parametrize(("fatal", "said"), [(2, (1, [1.0])), (3, (2, [2.0, 1.0]))])
def test_a_round_is_said_only_when_all_have_it_and_the_one_before_is_kept_until_all_say_so(
    tmp_path: Path, fatal: int, said: Any
) -> None:
    """Killed before it told the others that it has the round, or that it has said so."""
    survivor, dead = run(torn, 2, tmp_path, fatal)
    assert survivor == said
    assert dead == -signal.SIGKILL


def slow(rank: int, group: Any) -> tuple[bool, int, int]:
    """Rank 1 comes late to the first round, so rank 0 is still busy with it at the next step."""
    tracked = Tracked({"part": part_of(rank)})
    partner = Partner()
    partner.open(view_of([PeerStatus()] * 2, replica_size=2), rank, dist.new_group())
    if rank == 1:
        dist.barrier()
    partner.snapshot(1, tracked)
    skipped = partner.snapshot(2, tracked) is None if rank == 0 else False
    if rank == 0:
        dist.barrier()
    else:
        assert partner.wait(WAIT)
        partner.snapshot(2, tracked)
    assert partner.wait(WAIT)
    between = partner.step
    dist.barrier()
    partner.snapshot(3, tracked)
    assert partner.wait(WAIT)
    partner.close()
    return skipped, between, partner.step


def test_a_busy_rank_leaves_the_round_out_everywhere_without_waiting(tmp_path: Path) -> None:
    assert run(slow, 2, tmp_path) == [(True, 1, 3), (False, 1, 3)]


def test_a_world_of_one_keeps_its_own_copy() -> None:
    view = view_of([PeerStatus()])
    mine = torch.zeros(3)
    tracked = Tracked({"x": mine})
    partner = Partner()
    partner.open(view, 0, None)
    end = time.monotonic() + WAIT
    for step in (1, 2, 3):
        mine.fill_(step)
        assert partner.snapshot(step, tracked) is not None
        assert partner.wait(end - time.monotonic())
    mine.fill_(9)
    partner.restore_own(tracked, 3)
    assert mine.tolist() == [3, 3, 3]
    with pytest.raises(StateError, match="no copy of part 1 for seat 5"):
        partner.give(5, 3, 1)
    partner.close()
