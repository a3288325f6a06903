"""Refuse to believe, or to run, what another user could have written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_resilience import config
from slurm_resilience.agent import main as agent_main
from slurm_resilience.config import Config, ControllerSettings, ReplaceSettings, SinkSettings
from slurm_resilience.errors import ConfigError
from slurm_resilience.trusted_paths import (
    refuse_at_start,
    refuse_forged_controller,
    untrusted_state,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it gives files away")
USER = 65534


def given(path: Path) -> Path:
    os.chown(path, USER, USER)
    return path


def made(path: Path, mode: int = 0o755) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


def link(path: Path, target: Path, owner: int = 0) -> Path:
    path.symlink_to(target)
    os.chown(path, owner, owner, follow_symlinks=False)
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda at: made(at / "s"), ""),
        (lambda at: at / "not" / "yet", ""),
        (lambda at: made(made(at / "tmp", 0o1777) / "s"), ""),
        (lambda at: link(at / "s", made(at / "t")), ""),
        (lambda at: given(made(at / "s")), "belongs to user 65534"),
        (lambda at: made(given(made(at / "home")) / "s"), "belongs to user 65534"),
        (lambda at: made(at / "s", 0o1777), "may be written by other users"),
        (lambda at: made(at / "s", 0o777), "may be written by other users"),
        (lambda at: made(at / "tmp", 0o1777) / "s", "in which"),
        (lambda at: made(made(at / "open", 0o777) / "s"), "in which"),
        (lambda at: link(at / "s", given(made(at / "t"))), "belongs to user 65534"),
        (lambda at: link(made(at / "tmp", 0o1777) / "s", made(at / "t"), USER), "belongs to user"),
    ],
)
def test_a_directory_that_a_user_can_forge_holds_no_state(
    make: Callable[[Path], Path], says: str, tmp_path: Path
) -> None:
    fault = untrusted_state(make(tmp_path))
    assert (says in fault) if says else not fault


def test_a_group_may_write_if_it_is_roots(tmp_path: Path) -> None:
    ours = made(tmp_path / "s", 0o770)
    assert not untrusted_state(ours)
    os.chown(ours, 0, USER)
    assert "may be written by other users" in untrusted_state(ours)


def test_one_line_names_the_key_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state_dir: .* chown it, or name a dir") as told:
        refuse_at_start([("lifecycle.state_dir", str(given(made(tmp_path / "s"))))])
    assert "\n" not in str(told.value)


def test_sresd_starts_with_no_state_of_a_user(tmp_path: Path) -> None:
    file = tmp_path / "sres.toml"
    file.write_text("")
    state = given(made(tmp_path / "state"))
    settings = config.parse(f'[agent]\nsysroot = "{tmp_path}"\n[checks]\nstate_dir = "/state"\n')
    with pytest.raises(ConfigError, match=r"checks\.state_dir: .*/state belongs to user"):
        agent_main.refuse_forgeries(settings, file)
    os.chown(state, 0, 0)
    agent_main.refuse_forgeries(settings, file)
    given(file)
    with pytest.raises(ConfigError, match=r"the configuration: .*sres\.toml belongs to user"):
        agent_main.refuse_forgeries(settings, file)


def test_sresctld_starts_with_no_journal_and_no_program_of_a_user(tmp_path: Path) -> None:
    program = tmp_path / "replace-node"
    program.write_text("#!/bin/sh\n")
    state = made(tmp_path / "state")
    settings = Config(
        controller=ControllerSettings(state_dir=str(state)),
        replace=ReplaceSettings(program=(str(program), "--now")),
        sinks={"page": SinkSettings(command=("no-such-program",))},
    )
    missing = tmp_path / "sres.toml"
    refuse_forged_controller(settings, missing)
    program.chmod(0o777)
    with pytest.raises(ConfigError, match=r"replace\.program: .* may be written by others"):
        refuse_forged_controller(settings, missing)
    program.chmod(0o755)
    state.chmod(0o1777)
    with pytest.raises(ConfigError, match=r"controller\.state_dir: "):
        refuse_forged_controller(settings, missing)
    given(state).chmod(0o750)
    with pytest.raises(ConfigError, match=r"controller\.state_dir: .* belongs to user"):
        refuse_forged_controller(settings, missing)
    # SlurmUser's, as the daemon that runs as SlurmUser has made it.
    refuse_forged_controller(settings, missing, frozenset({USER}))
