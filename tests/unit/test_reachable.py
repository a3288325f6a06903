"""A checkout in a private home, and a root directory that is no mount point (root only)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_resilience.lab import programs, reachable

ALICE = 20001
PACKAGES = Path(__file__).parent.parent.parent
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it makes mounts")

_IN_PRIVATE_MOUNTS = """
import os, sys
from pathlib import Path
from slurm_resilience.lab import reachable
from slurm_resilience.lab.machines import linux
linux.unshare(linux.NEWNS)
linux.make_mounts_private()
"""


def _python(script: str, *words: str, prefix: tuple[str, ...] = ()) -> str:
    argv = [*prefix, sys.executable, "-c", _IN_PRIVATE_MOUNTS + script, *words]
    done = subprocess.run(
        argv,
        env={"PYTHONPATH": str(PACKAGES), "PATH": programs.search_path()},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home of mode 0700 with a checkout, in a directory that is as private."""
    home = tmp_path / "outer" / "home"
    (home / "checkout").mkdir(parents=True)
    (home / "checkout" / "file").write_text("reached")
    (home / "link").symlink_to("checkout/file")
    (home / "note").write_text("the owner's")
    for directory in (tmp_path / "outer", home):
        directory.chmod(0o700)
    return home


def test_what_keeps_others_out_is_found_from_the_outside_in(home: Path) -> None:
    found = reachable.closed([home / "checkout" / "file"])
    assert found[-2:] == [home.parent, home]


@as_root
def test_others_reach_a_checkout_in_a_private_home_but_do_not_list_the_home(home: Path) -> None:
    script = f"""
home = Path(sys.argv[1])
reachable.open_way([home / "checkout"])
print((home / "link").read_text(), (home / "note").read_text(), sorted(os.listdir(home)))
(home / "checkout" / "written").write_text("kept")
os.setresuid({ALICE}, {ALICE}, {ALICE})
print((home / "checkout" / "file").read_text())
try:
    os.listdir(home)
except PermissionError:
    print("not listed")
"""
    root_saw, alice_saw, listed = _python(script, str(home)).splitlines()
    assert root_saw == "reached the owner's ['checkout', 'link', 'note']"
    assert alice_saw == "reached"
    assert listed == "not listed"
    assert (home / "checkout" / "written").read_text() == "kept"
    assert home.stat().st_mode & 0o777 == 0o700


@as_root
def test_a_root_that_is_no_mount_point_becomes_its_namespaces_own(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "marker").touch()
    chroot = 'root=$1; shift; for d in /*/; do mkdir -p "$root$d" && mount --rbind "$d" "$root$d"; '
    chroot += "done; "
    chroot += 'exec chroot "$root" "$@"'
    script = """
with open("/proc/self/ns/mnt") as namespace:
    linux.setns(namespace.fileno(), linux.NEWNS)
print(Path("/marker").exists(), Path("/proc/self/mounts").read_text().count(" / "))
"""
    prefix = ("unshare", "--mount", "sh", "-c", chroot, "sh", str(root))
    assert _python(script, prefix=prefix).split() == ["True", "1"]
