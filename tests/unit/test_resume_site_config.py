"""A supervisor on a site whose configuration cannot be used: the job goes on with the defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience import config
from slurm_resilience.errors import ConfigError
from slurm_resilience.resume.call.start import read_config


@pytest.mark.parametrize("text", ["[resume]\ngrase = 3.0", "[resume]\ngrace = 3.0"])
def test_a_typo_in_the_sites_file_fails_no_job(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was written while the job was requeued, say. The file that a user names is his own."""
    file = tmp_path / "sres.toml"
    file.write_text(text)
    is_typo = "grase" in text
    monkeypatch.setattr(config, "DEFAULT_PATH", file)
    monkeypatch.delenv("SRES_CONFIG", raising=False)
    used = read_config({})
    assert used.resume.grace == (10.0 if is_typo else 3.0)
    said = capfd.readouterr().err
    assert said.count("\n") == is_typo
    assert ("unknown key 'resume.grase'" in said) is is_typo
    if is_typo:
        with pytest.raises(ConfigError):
            read_config({"SRES_CONFIG": str(file)})
