"""A lab where the machine is not as one expects: a full disk, a bare chroot, a private checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import slurm_resilience
from slurm_resilience.lab import LabSpec, programs, space
from slurm_resilience.lab.bring_up import missing
from slurm_resilience.lab.keeper import _refusal

SPEC = LabSpec(nodes=1, daemons=False, lifecycle=None, plugin=None)
PACKAGE = Path(slurm_resilience.__file__).parent
# What follows are the words of `sres`.
SRES = "import sys; from slurm_resilience.cli.main import main; sys.exit(main())"
_UP = "lab up --nodes 1 --no-daemons --lifecycle none --plugin none --name odd --dir"


def in_mounts_of_its_own(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script, whose mounts end with it."""
    if (lack := missing(SPEC)) is not None:
        pytest.skip(f"needs a lab: {lack}")
    argv = ["unshare", "--mount", "--fork", "--pid", "--mount-proc", "--kill-child"]
    return subprocess.run(
        [*argv, "sh", "-ec", script, "sh", *words],
        env={"PATH": programs.search_path()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose path leaves room for a Unix socket's."""
    return tmp_path_factory.mktemp("o")


def test_a_disk_that_is_too_small_is_named_with_what_is_needed(short_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1m tmpfs "$1"; shift; exec "$@"'
    disk = str(short_path)
    done = in_mounts_of_its_own(script, disk, sys.executable, "-c", SRES, *_UP.split(), f"{disk}/l")
    assert done.returncode == 9
    assert done.stderr == (
        f"sres: error: the file system of {disk} is too full: a lab of 1 nodes takes about "
        f"{space.needed_mib(SPEC)} MiB, 1 are free; choose another --dir\n"
    )


def test_a_disk_that_fills_up_is_named(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device", f"{tmp_path}/ctl/state")
    assert _refusal(full, tmp_path) == (
        f"no space is left on {space.mount_point(tmp_path)}, where the lab is "
        f"({tmp_path}/ctl/state)"
    )
    assert "Permission denied" in _refusal(OSError(13, "Permission denied"), tmp_path)


def test_a_lab_runs_in_a_chroot_whose_root_is_no_mount_point(short_path: Path) -> None:
    root = short_path / "root"
    script = """
root=$1; shift
mkdir -p "$root"
for entry in /*/; do
    mkdir -p "$root$entry"
    mount --rbind "$entry" "$root$entry"
done
touch "$root/marker"
cat >"$short/script" <<'SCRIPT'
"$@"
sres=$1 code=$3
"$sres" -c "$code" lab run --dir /run/odd srun -N1 ls /marker
"$sres" -c "$code" lab down --dir /run/odd
SCRIPT
exec chroot "$root" sh -e "$short/script" "$@"
"""
    script = script.replace("$short", str(short_path))
    done = in_mounts_of_its_own(
        script, str(root), sys.executable, "-c", SRES, *_UP.split(), "/run/odd"
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 1 nodes joined" in done.stdout
    assert "/marker" in done.stdout, "what enters the lab is in the chroot too"


def test_alice_runs_a_checkout_in_a_private_home(short_path: Path) -> None:
    home = short_path / "home"
    shutil.copytree(PACKAGE, home / "checkout" / "slurm_resilience")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    (site,) = (home / "venv" / "lib").glob("*/site-packages")
    paths = [home / "checkout", sysconfig.get_path("purelib")]
    (site / "checkout.pth").write_text("".join(f"{path}\n" for path in paths))
    home.chmod(0o700)
    script = """
cd /
"$@"
"$1" -c "$3" lab run --dir /run/odd --user alice \\
    srun -N1 "$1" -c 'import slurm_resilience; print(slurm_resilience.__file__)' || code=$?
"$1" -c "$3" lab down --dir /run/odd
exit $code
"""
    python = str(home / "venv" / "bin" / "python")
    done = in_mounts_of_its_own(script, python, "-c", SRES, *_UP.split(), "/run/odd")
    assert done.returncode == 0, done.stderr
    assert f"{home}/checkout/slurm_resilience/__init__.py" in done.stdout
