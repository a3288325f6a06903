"""A change outside of an update is never passed off as the step's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from state_ranks import Life, run
from torch import nn

from slurm_resilience.mesh.model import PeerStatus
from slurm_resilience.training.recovery.exceptions import Unrecoverable
from slurm_resilience.training.state import HealFailed, Tracked

pytestmark = pytest.mark.training


def built(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return {"model": model, "opt": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}


def trained(rank: int) -> tuple[Life, dict[str, Any]]:
    """A world whose ranks committed one step."""
    life, objects = Life(rank), built(rank)
    life.meet()
    life.track(**objects)
    objects["model"](torch.ones(1, 3)).sum().backward()
    objects["opt"].step()
    life.commit()
    return life, objects


def spoil(model: nn.Module) -> None:
    with torch.no_grad():
        model.weight.add_(1)


def changed(rank: int, _: Any, anew: bool) -> tuple[str, str, str]:
    life, objects = trained(rank)
    before = Tracked(objects).digest()
    if rank == 1:
        spoil(objects["model"])
    life.meet()
    objects = built(10 + rank) if anew else objects
    kind = life.track(**objects)
    return kind, before, Tracked(objects).digest()


@pytest.mark.parametrize("anew", [False, True], ids=["kept objects", "built anew"])
def test_a_rank_that_changed_its_state_gets_the_steps(tmp_path: Path, anew: bool) -> None:
    found = run(changed, 2, tmp_path, anew)
    assert [kind for kind, _, _ in found] == ["peers", "peers"]
    assert len({digest for _, *both in found for digest in both}) == 1


def late(rank: int, _: Any) -> tuple[str, str, str, str]:
    """Rank 1 changes its state when it has told the others that it is whole."""
    life, objects = trained(rank)
    before, said = Tracked(objects).digest(), ""
    life.meet()
    if rank == 1:
        spoil(objects["model"])
        with pytest.raises(HealFailed) as caught:
            life.track(**objects)
        said = str(caught.value)
    else:
        life.track(**objects)
    life.meet()
    kind = life.track(**objects)
    return said, kind, before, Tracked(objects).digest()


def test_a_change_after_the_others_were_told_has_them_plan_again(tmp_path: Path) -> None:
    found = run(late, 2, tmp_path)
    assert found[1][0].startswith("model.weight changed outside of s.update()")
    assert [kind for _, kind, _, _ in found] == ["peers", "peers"]
    assert len({digest for _, _, *both in found for digest in both}) == 1


def all_changed(rank: int, _: Any) -> str:
    life, objects = trained(rank)
    spoil(objects["model"])
    life.meet()
    with pytest.raises(Unrecoverable) as caught:
        life.track(**objects)
    return str(caught.value)


def test_where_nobody_has_the_steps_state_the_training_gives_up(tmp_path: Path) -> None:
    for said in run(all_changed, 2, tmp_path):
        assert said == (
            "no member has a whole state (model.weight changed outside of s.update()), there is "
            "no common copy in memory, and there is no checkpoint: "
            "will not start from scratch by itself"
        )


def wrapped(rank: int, _: Any) -> list[str]:
    """DDP sends the parameters around when it is made; a fault comes before the first step."""
    life, objects = Life(rank), built(rank)
    kinds = []
    for _ in range(3):
        life.meet()
        kinds.append(life.track(**objects))
        nn.parallel.DistributedDataParallel(objects["model"])
    return kinds


def test_a_ddp_of_ones_own_changes_nothing(tmp_path: Path) -> None:
    assert run(wrapped, 2, tmp_path) == [["fresh", "nothing", "nothing"]] * 2


def one_is_ahead(rank: int, _: Any) -> tuple[str, list[PeerStatus], list[bool]]:
    """The world ended when rank 0 had committed, and the others not."""
    life, objects = trained(rank)
    if rank == 0:
        life.commit()
    life.meet()
    assert life.view is not None
    # In the order in which things happen: what was said when a byte could arrive.
    before: list[bool] = []
    prepare = Tracked.prepare

    def note(tracked: Tracked, descriptor: Any) -> Any:
        before.append(any(status.dirty for status in life.told))
        return prepare(tracked, descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracked, "prepare", note)
        kind = life.track(**objects)
    return kind, life.told, before


def test_a_rank_says_that_its_older_state_is_written_over(tmp_path: Path) -> None:
    """Else the others take it for a holder, and do not wait for the only one, if that is silent."""
    ahead, *behind = run(one_is_ahead, 3, tmp_path)
    assert ahead == ("peers", [], [])
    for kind, told, before in behind:
        assert (kind, before) == ("peers", [True])
        assert [(s.phase, s.step, s.dirty, s.healthy) for s in told] == [
            ("running", 1, True, False)
        ]


def joins(rank: int, _: Any) -> tuple[str, list[PeerStatus]]:
    """Rank 1 is new."""
    life, objects = trained(rank)
    if rank == 1:
        life, objects = Life(rank), built(rank)
    life.meet()
    return life.track(**objects), life.told


def test_a_newcomer_has_nothing_to_say_of_a_state_before(tmp_path: Path) -> None:
    assert run(joins, 2, tmp_path) == [("peers", []), ("peers", [])]
