"""The files installed beside the code: units, the example configuration, exact versions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slurm_resilience import config

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "packaging" / "sres.toml"
UNITS = ("sresctld.service", "sresd.service", "sres-lifecycle.service")


def uncommented() -> str:
    """The example with every default switched on."""
    return re.sub(r"^#(?=[a-z_]+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)


def keys(tree: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for name, value in tree.items():
        found |= keys(value, f"{name}.") if isinstance(value, dict) else {prefix + name}
    return found


def test_the_example_as_it_is_changes_nothing() -> None:
    assert config.parse(EXAMPLE.read_text()) == config.Config()


def test_the_example_names_every_key_with_its_default() -> None:
    assert config.parse(uncommented()) == config.Config()
    assert keys(tomllib.loads(uncommented())) == keys(msgspec.to_builtins(config.Config()))


def unit(name: str) -> dict[str, str]:
    lines = (ROOT / "systemd" / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@pytest.mark.parametrize("name", UNITS)
def test_systemd_understands_the_unit(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # It insists on a program that is there; where ours will be installed is not here.
    text = (ROOT / "systemd" / name).read_text()
    text = re.sub(r"^ExecStart=\S+", f'ExecStart="{sys.executable}"', text, flags=re.MULTILINE)
    (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(tmp_path / name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", UNITS)
def test_the_unit_starts_a_command_that_we_install(name: str) -> None:
    program = Path(unit(name)["ExecStart"].split()[0])
    assert program.parent == Path("/opt/slurm-resilience/bin")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert program.name in project["scripts"]


def test_a_restart_of_sresctld_spares_replacement_programs() -> None:
    assert unit("sresctld.service")["KillMode"] == "process"


def test_sresctld_keeps_its_state_where_its_unit_makes_room() -> None:
    made = Path("/var/lib") / unit("sresctld.service")["StateDirectory"]
    assert Path(config.ControllerSettings().state_dir) == made


def test_sresd_sees_the_node_as_it_is() -> None:
    """Its checks would take a private read-only mount for a broken disk."""
    hidden = [key for key in unit("sresd.service") if key.startswith(("Private", "Protect"))]
    assert hidden == []


def test_every_requirement_is_pinned_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    names = {canonical(name) for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["dev"] + extras["training"]
    wanted += extras["trainers"]
    required = {canonical(match.group()) for w in wanted if (match := re.match(r"[\w.-]+", w))}
    assert required - names == set()
    assert {"pip", "setuptools"} <= names
    # The public index has no +cpu build. tests/unit/test_setup.py: that one is preferred.
    assert re.fullmatch(r"[\d.]+", pins["torch"])


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest loads only one of two; `scripts/test --fast` may not see the other."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_test_file_changes_the_environment_when_it_is_imported() -> None:
    # pytest imports all files before the first test: a change would reach every lab and program.
    # OMP_NUM_THREADS must be set before torch is loaded, and changes no result.
    change = re.compile(r"^os\.(environ\[|environ\.|putenv)(?!.*OMP_NUM_THREADS)", re.MULTILINE)
    changed = [
        path.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if change.search(path.read_text(encoding="utf-8"))
    ]
    assert changed == []
