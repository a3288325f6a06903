"""Start programs of this package quickly, and find other programs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

_PACKAGES = str(Path(__file__).resolve().parent.parent.parent)
# No site-packages and no environment: these programs load the standard library and this package
# only, which halves the time a node takes to boot.
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from {module} import main; main()"

_FOREIGN = ("SLURM", "SBATCH", "SALLOC", "SRUN", "SINFO", "SQUEUE", "SACCT", "SRES", "PMI")

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def quick(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``main()`` of a module of this package, with the least to
    load."""
    start = _START.format(module=module)
    return [sys.executable, "-I", "-S", "-c", start, _PACKAGES, *arguments]


def own_directories() -> list[Path]:
    """List the directories of this package, its virtual environment and its Python."""
    return [Path(_PACKAGES), Path(sys.prefix), Path(sys.base_prefix)]


def own_bin() -> Path:
    """Return the directory of this virtual environment's sresctld, sresd and sres-resume."""
    return Path(sys.prefix) / "bin"


def search_path() -> str:
    """PATH inside a lab: this environment, then the system."""
    return f"{own_bin()}:{SYSTEM_PATH}"


def find(program: str, root: str = "") -> str | None:
    """Find a program's absolute path, looked up as the lab will; inside ``root`` if given."""
    system = ":".join(f"{root}{directory}" for directory in SYSTEM_PATH.split(":"))
    path = shutil.which(program, path=f"{own_bin()}:{system}")
    return path.removeprefix(root) if path is not None else None


def environment(directory: Path) -> dict[str, str]:
    """Return the environment that every daemon of a lab starts with, without the caller's Slurm."""
    return {
        "PATH": search_path(),
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "SLURM_CONF": str(directory / "etc" / "slurm.conf"),
        "SRES_CONFIG": str(directory / "etc" / "sres.toml"),
        "SRES_LAB": str(directory),
    }


def clean_environment(directory: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    """Return the caller's environment for a command in the lab, without any other Slurm's
    variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    lab = environment(directory)
    kept["PATH"] = f"{lab['PATH']}:{kept.get('PATH', '')}".rstrip(":")
    kept |= {name: lab[name] for name in ("SLURM_CONF", "SRES_CONFIG", "SRES_LAB")}
    return kept | (extra or {})
