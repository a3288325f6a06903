"""The lines of `sres status` on sresctld itself."""

from __future__ import annotations

from typing import Any

from slurm_resilience.cli.cluster_status import _controller, _lines
from slurm_resilience.cli.controller import moment_of
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.model import REBOOT, RESET

NOW = 1000.0
NEXT = {"node": "n2", "what": "found dead", "because": "no beat", "unless": "it answers before"}


def said(blind: str = "", **more: Any) -> str:
    controller = {
        "answers": True, "cycle_age": 30.0, "blind": blind, "breaker": "", "version": "1",
        "uptime": 60.0, "mode": "automatic", "paused": "", "can_replace": True,
        "permits_expansion": True, "spares": [],
    }  # fmt: skip
    picture: dict[str, Any] = {key: {} for key in ("states", "health", "sresd", "modes")}
    picture |= {
        key: [] for key in ("incidents", "failed", "gave_up", "jobs", "near_misses", "alarms")
    }
    picture |= {"controller": controller, "cluster": "c", "slurm": "22.05.8"}
    picture["queue"] = [NEXT | {"at": NOW, "waits_for": ""}]
    picture |= more
    return "\n".join(_lines(picture, NOW, interval=2.0))


def test_a_blind_sresctld_promises_nothing() -> None:
    """Its disk may be full: Slurm can be read, and what was to come does not come."""
    blind = said("the journal cannot be written: disk is full")
    assert "comes next, as it was last seen; nothing is done now\n  n2: found dead" in blind
    assert "cannot read Slurm" not in blind
    assert "comes next\n  n2: found dead in 0s" in said("")
    # It is broken over lines where the terminal has little room.
    assert "cannot read Slurm, or hangs" in " ".join(said("").split())


def test_another_date_here_makes_no_cycle_late() -> None:
    """A login node's clock may be wrong, and sresctld's machine have been set to another date."""
    data = {"at": NOW - 3600.0, "age": 1.5, "version": "1", "uptime": 60.0, "mode": "automatic"}
    data |= {"paused": "", "can_replace": True, "permits_expansion": True, "sentence": ""}
    assert _controller(data, None, NOW)["cycle_age"] == 1.5
    del data["age"]
    assert _controller(data, None, NOW)["cycle_age"] == 3600.0


def test_ages_and_what_comes_next_are_timed_by_sresctlds_clock() -> None:
    """An hour beside it, a node that was to be replaced in 40 s was so "in 60m", or "in 0s"."""
    assert moment_of({"at": NOW - 3600.0, "age": 1.5}) == NOW - 3598.5
    for without in (None, {}, {"blind": "no Slurm yet"}):
        assert abs(moment_of(without) - SYSTEM_CLOCK.now()) < 60.0


def test_a_partitions_mode_is_shown_where_no_node_has_the_clusters() -> None:
    """It read "automatic" alone, and nothing was done."""
    assert "by node    2 observe (n[1-2])" in said(modes={"observe": ["n1", "n2"]})
    assert "by node" not in said(modes={"automatic": ["n1"], "": ["n2"]})
    assert "by node" in said(modes={"automatic": ["n1"], "none": ["n2"]})


def test_only_commands_that_exist_are_named() -> None:
    gave_up = {"node": "n1", "action": RESET, "closed": NOW, "attempts": 1}
    assert "try again: sres node replace n1" in " ".join(said(gave_up=[gave_up]).split())
    miss = {"node": "n1", "reason": "action:reset", "by": "al", "meant": RESET}
    shown = " ".join(said(near_misses=[miss]).split())
    assert "correct it: scontrol update nodename=n1 state=fail reason=Action:Reset" in shown
    shown = " ".join(said(near_misses=[miss | {"meant": REBOOT}]).split())
    assert "correct it: sres node reboot n1" in shown
