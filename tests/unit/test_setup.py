"""scripts/setup: where torch comes from, and what is said when something cannot be had.

The index is a directory with tiny wheels, served on loopback; pip only says what it would install.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
SETUP = REPOSITORY / "scripts" / "setup"
CONSTRAINTS = REPOSITORY / "constraints.txt"
VERSION = next(
    line.partition("==")[2]
    for line in CONSTRAINTS.read_text().splitlines()
    if line.startswith("torch==")
)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Serve the package indexes `public`, `cpu` and `old` below this address."""
    for index, versions in (
        ("public", (VERSION, "2.6.0")),
        ("cpu", (f"{VERSION}+cpu",)),
        ("old", ("2.6.0+cpu",)),
    ):
        folder = tmp_path / "served" / index / "torch"
        folder.mkdir(parents=True)
        names = [_wheel(folder, version).name for version in versions]
        links = (f'<a href="{name.replace("+", "%2B")}">{name}</a>' for name in names)
        (folder / "index.html").write_text("\n".join(links))
    handler = partial(_Quiet, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _wheel(folder: Path, version: str) -> Path:
    path = folder / f"torch-{version}-py3-none-any.whl"
    info = f"torch-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in (("METADATA", metadata), ("WHEEL", kind), ("RECORD", "")):
            wheel.writestr(f"{info}/{name}", text)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose pip is not configured, and a venv that has no torch."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # The pip of these tests; which torch is installed beside it is not told.
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "VENV": str(tmp_path / "venv")}


def in_setup(script: str, env: dict[str, str]) -> str:
    """Run a piece of shell with setup's functions; its output."""
    words = f"venv=$VENV; . {SETUP}; VENV=$venv; exec {{SCREEN}}>&1; {script}"
    done = subprocess.run(
        ["bash", "-c", words], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def would_install(options: list[str], env: dict[str, str], public: str) -> str:
    """Return what pip would install as torch: the last line of its dry run."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    words = [*pip, "--index-url", public, *options, "-c", str(CONSTRAINTS), "torch>=2.6"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip().splitlines()[-1]


CHOOSE = 'choose_torch && printf "%s\\n" "${TORCH_OPTIONS[@]}"'


def test_torchs_cpu_index_is_offered_where_pip_is_not_configured(
    served: str, machine: dict[str, str]
) -> None:
    cpu = f"{served}/cpu"
    options = in_setup(CHOOSE, machine | {"SRES_TORCH_INDEX": cpu}).split()
    assert options == ["--extra-index-url", cpu]
    said = would_install(options, machine, f"{served}/public")
    assert said == f"Would install torch-{VERSION}+cpu"


@pytest.mark.parametrize("index", ["old", "none"])
def test_without_the_cpu_build_the_public_one_is_taken_and_its_size_said(
    served: str, machine: dict[str, str], index: str
) -> None:
    script = f"PUBLIC_TORCH_MIB=0; {CHOOSE}"
    said = in_setup(script, machine | {"SRES_TORCH_INDEX": f"{served}/{index}"}).rstrip()
    assert f"does not offer torch {VERSION}+cpu" in said
    assert said.endswith("about 3 GB to load, and 8 GB on the disk")
    assert would_install([], machine, f"{served}/public") == f"Would install torch-{VERSION}"


def test_the_public_build_is_not_begun_where_it_has_no_room(
    served: str, machine: dict[str, str]
) -> None:
    script = f"PUBLIC_TORCH_MIB=999999999; {CHOOSE} || echo refused"
    said = in_setup(script, machine | {"SRES_TORCH_INDEX": f"{served}/none"})
    assert said.splitlines()[-2:] == ["No space left on device", "refused"]


@pytest.mark.parametrize(
    "name", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"]
)
def test_a_site_that_told_pip_where_to_look_is_left_alone(
    served: str, machine: dict[str, str], name: str
) -> None:
    site = machine | {name: "1" if name == "PIP_NO_INDEX" else f"{served}/public"}
    assert in_setup(CHOOSE, site | {"SRES_TORCH_INDEX": f"{served}/cpu"}).strip() == ""


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        (
            "    The user requested (constraint) torch==2.13.0\n"
            "Additionally, some packages in these conflicts have no matching distributions "
            "available for your environment:\n    torch\n\nERROR: ResolutionImpossible: for help",
            "the torch of constraints.txt is not where pip looks",
        ),
        (
            "ERROR: No matching distribution found for torch==2.13.0\n",
            "the torch of constraints.txt is not where pip looks",
        ),
        (
            "ERROR: No matching distribution found for numpy==2.4.6\n",
            "the numpy of constraints.txt is not where pip looks",
        ),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError("
            "Connection refused)'\nERROR: No matching distribution found for torch==2.13.0\n",
            "pip cannot reach a package index",
        ),
        (
            "The conflict is caused by:\n    x 1 depends on a>=2\n    y 1 depends on a<2\n"
            "ERROR: ResolutionImpossible: for help",
            "the versions of constraints.txt do not fit together",
        ),
        ("Killed\n", "delete .venv and try again"),
    ],
    ids=["in a conflict", "torch", "another", "no network", "conflict", "unknown"],
)
def test_pips_failure_is_one_line_of_advice(
    machine: dict[str, str], tmp_path: Path, log: str, advice: str
) -> None:
    (tmp_path / "log").write_text(log)
    said = in_setup(f"LOG={tmp_path / 'log'}; pip_advice", machine)
    assert advice in said
    assert "\n" not in said


def test_a_file_system_without_room_is_named(machine: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "log").write_text("OSError: [Errno 28] No space left on device\n")
    script = f"(LOG={tmp_path / 'log'}; die_if_full .venv) 2>&1 || true; need_space 0 / nothing; "
    script += "(need_space 999999999 / .venv) 2>&1 || true"
    after, before = in_setup(script, machine).splitlines()
    assert ".venv: no space left; of the file systems that it writes to, /" in after
    assert "the file system of / is too full: .venv takes about 999999999 MiB" in before


def test_a_link_in_the_place_of_the_log_is_not_followed(
    machine: dict[str, str], tmp_path: Path
) -> None:
    """Any user may put one into /tmp, and root runs the setup."""
    (tmp_path / "kept").write_text("kept\n")
    (tmp_path / "log").symlink_to(tmp_path / "kept")
    in_setup(f"LOG={tmp_path / 'log'}; stage working echo done", machine)
    assert (tmp_path / "kept").read_text() == "kept\n"
    assert not (tmp_path / "log").is_symlink()
    assert (tmp_path / "log").read_text() == "done\n"
