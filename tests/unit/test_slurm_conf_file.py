"""slurm.conf on this machine: by it sresctld is found while slurmctld is away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm

from slurm_resilience.cli.controller import ClusterView
from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.slurm.conf_file import settings_of
from slurm_resilience.wire.client import Connection

CONF = """
# SlurmctldHost=old
clustername=c1
SlurmctldHost=ctl1(10.0.0.1)  # the primary
slurmctldhost = ctl2
SlurmUser=daemon
AuthInfo=socket=/run/munge/other.socket
NodeName=n[1-4] CPUs=4
"""


def test_the_lines_that_count_are_read() -> None:
    found = settings_of(CONF)
    assert (found.cluster, found.controllers) == ("c1", ("10.0.0.1", "ctl2"))
    assert (found.slurm_user_uid, found.munge_socket) == (1, "/run/munge/other.socket")
    assert settings_of("ClusterName=c\nSlurmctldHost=h\nSlurmUser=77").slurm_user_uid == 77
    assert settings_of("ClusterName=c\nSlurmctldHost=h").slurm_user_uid == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Include other.conf",
        "ClusterName=c",
        "SlurmctldHost=h",
        "ClusterName=c\nSlurmctldHost=h\nSlurmUser=no-such-user",
    ],
)
def test_what_it_does_not_say_is_not_guessed(text: str) -> None:
    with pytest.raises(SlurmUnreachable):
        settings_of(text)


def test_sresctld_is_found_while_slurmctld_is_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An administrator may want to pause it before slurmctld starts again."""
    asked: list[tuple[str, dict[str, Any]]] = []
    slurm = FakeSlurm()
    slurm.unreachable = True
    cluster = ClusterView()
    cluster.config_path = str(tmp_path / "sres.toml")
    (tmp_path / "sres.toml").touch()
    cluster.client = slurm
    monkeypatch.setattr(Connection, "open", lambda host, *_, **more: asked.append((host, more)))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(SlurmUnreachable, match="Unable to contact"):
        cluster.connect()
    (tmp_path / "slurm.conf").write_text(CONF)
    cluster.connect()
    ((host, more),) = asked
    assert (host, more["trusted_uids"]) == ("10.0.0.1", {0, 1})
