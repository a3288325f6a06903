"""The configuration file: defaults, and one clear line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience import config
from slurm_resilience.errors import ConfigError


def test_without_a_file_the_defaults_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SRES_CONFIG", raising=False)
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "none.toml")
    assert config.load() == config.Config()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[contoller]\nport = 1", "unknown key 'contoller'; did you mean 'controller'?"),
        ("[detect]\nsilent_aftr = 3.0", "unknown key 'detect.silent_aftr'; did you mean 'silent_"),
        ("[controller]\nport = 'x'", "Expected 'int', got 'str'"),
        ("[controller]\nport = 70000", "controller.port must be between 1 and 65535"),
        ("[controller]\ninterval = 0", "controller.interval must be greater than 0"),
        ("[resume]\ngrace = -1", "resume.grace must be 0 or more"),
        ("[recovery]\nmode = 'auto'", "Invalid enum value 'auto'"),
        ("controller = 3", "'controller' is a table"),
        ("[detect]\nsilent_after = 0.6", "more than two beats"),
        ("[detect]\ndead_after = 1.0", "dead_after must be more than"),
        ("[detect]\ndead_after = nan", "detect.dead_after must be a finite number"),
        ("[replace]\ntimeout = inf", "replace.timeout must be a finite number"),
        ("not toml", "not valid TOML"),
    ],
)
def test_each_mistake_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "sres.toml")
    assert says in str(caught.value)
    assert str(caught.value).startswith("sres.toml: ")
    assert "\n" not in str(caught.value)


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        config.load(tmp_path / "missing.toml")
