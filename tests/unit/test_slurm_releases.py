"""Other Slurm releases: where their root directories are, and what is refused in one line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slurm_resilience.errors import MissingTool, UsageError
from slurm_resilience.lab import LabSpec, releases
from slurm_resilience.slurm import pyslurm
from slurm_resilience.slurm.cli import CliClient

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm-root"


def script(cache: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {releases.CACHE_VARIABLE: str(cache)}
    argv = [str(SCRIPT), *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(releases.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(releases, "own_version", lambda: "20.11")
    return tmp_path


def test_the_machines_own_needs_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "own_version", lambda: "24.11")
    assert releases.root_of("24.11") is None


def test_a_root_is_found_by_its_release(cache: Path) -> None:
    (cache / "26.05" / "usr").mkdir(parents=True)
    assert releases.root_of("26.05") == cache / "26.05"


def test_what_is_not_there_is_named_with_what_makes_it(cache: Path) -> None:
    with pytest.raises(MissingTool, match=r"scripts/slurm-root 24\.11 makes it"):
        releases.root_of("24.11")
    with pytest.raises(UsageError, match=r"'19\.05' is no Slurm release known here; one of 22\.05"):
        releases.root_of("19.05")


def test_the_script_knows_the_same_releases(tmp_path: Path) -> None:
    for version in releases.VERSIONS:
        done = script(tmp_path, "--print", version)
        if version == releases.own_version():
            assert (done.returncode, done.stdout) == (0, "/\n")
        else:
            assert (done.returncode, done.stdout) == (1, "")
            assert f"scripts/slurm-root {version} makes it" in done.stderr
    for words in (["19.05"], ["--print", "19.05"], ["--remove", "../x"]):
        done = script(tmp_path, *words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_was_made_otherwise_is_not_taken(tmp_path: Path) -> None:
    version = next(v for v in releases.VERSIONS if v != releases.own_version())
    (tmp_path / version).mkdir()
    (tmp_path / version / ".slurm-resilience").write_text("slurm of long ago\n")
    assert script(tmp_path, "--print", version).returncode == 1


def test_a_root_has_a_plugin_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "no-such-release"
    (root / "usr").mkdir(parents=True)
    assert LabSpec(nodes=1, slurm_root=root).plugin_file() is None


def test_pyslurm_is_not_used_where_it_cannot_tell_exclusive_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pyslurm, "installed_version", lambda: "26.5.0")
    with pytest.raises(MissingTool, match="does not tell which jobs share"):
        pyslurm.PyslurmClient(CliClient(), "26.05.5")
