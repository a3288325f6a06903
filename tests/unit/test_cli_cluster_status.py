"""The lines of `sres status` on sresctld itself."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from slurm_resilience.cli.cluster_status import _controller, _lines, status
from slurm_resilience.cli.controller import ClusterView, moment_of
from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.config import Config
from slurm_resilience.errors import SlurmUnreachable, WireError
from slurm_resilience.model import REBOOT, RESET
from slurm_resilience.slurm.client import ClusterInfo

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


AWAY = SlurmUnreachable("Unable to contact slurm controller (connect failure)")


class Away:
    """A slurmctld that does not answer."""

    def nodes(self) -> None:
        raise AWAY

    jobs = nodes


class WithoutSlurm(ClusterView):
    """The commands' view of a cluster whose slurmctld is away."""

    def __init__(self, known: dict[str, Any] | None) -> None:
        super().__init__()
        self.config, self.client = Config(), Away()  # type: ignore[assignment]
        self._known = known

    def settings(self) -> ClusterInfo:
        return ClusterInfo("c", "22.05.8", ("ctl",), 6817, 0, "", "", "", {})

    def try_status(self) -> Any:
        return self._known, None if self._known else WireError("sresctld does not answer")


def test_what_sresctld_knows_is_shown_while_slurmctld_is_away() -> None:
    """Its administrator is on call then, and saw Slurm's error alone."""
    incident: dict[str, Any] = {
        "node": "n2",
        "state": "repairing",
        "kind": "dead",
        "action": "Action:Replace",
    }
    incident |= {"opened": NOW, "reason": "no beat", "attempts": 0}
    known: dict[str, Any] = {"at": NOW, "age": 1.5, "version": "1", "uptime": 60.0, "paused": ""}
    known |= {"mode": "automatic", "can_replace": True, "permits_expansion": True, "sentence": ""}
    known |= {"blind": str(AWAY), "alarms": [], "jobs": {}}
    seen = {"verdict": "dead", "why": "no beat", "sresd": "silent", "incident": incident}
    known["nodes"] = {"n1": {"verdict": "healthy", "sresd": "connected"}, "n2": seen}
    done = CliRunner().invoke(status, [], obj=WithoutSlurm(known))
    shown = " ".join(done.output.split())
    assert "slurm Unable to contact slurm controller (connect failure)" in shown
    assert "n2 repairing dead Action:Replace" in shown
    assert "UNKNOWN" not in shown
    assert done.exception is AWAY


@pytest.mark.parametrize("words", [[], ["--format", "json"]])
def test_without_slurmctld_and_sresctld_slurms_error_is_told(words: list[str]) -> None:
    done = CliRunner().invoke(status, words, obj=WithoutSlurm(None))
    assert (done.output, done.exception) == ("", AWAY)
