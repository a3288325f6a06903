"""Decide whether a process may come out of a warm interpreter. Pure.

If anything is doubtful it is started cold, and one line says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from slurm_resilience.launcher.program_traits import ProgramTraits

_READ_BY_C = (
    # Threads and arithmetic.
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "GOTO_",
    "BLIS_",
    "VECLIB_",
    "NUMEXPR_",
    # Devices and torch.
    "CUDA_",
    "NVIDIA_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "ZE_",
    "ONEAPI_",
    "PYTORCH_",
    "TORCH_",
    # The loader, the C library and Python itself.
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "PYTHON",
    "LC_",
    "LANG",
    "TZ",
    # tqdm looks for these among all variables.
    "TQDM_",
)
"""Beginnings of variables that libraries in C, or Python itself, read once, when they start. What
modules in Python read is noted while they are imported."""


class WarmPlan(msgspec.Struct, frozen=True):
    """The answer to whether a node gets a warm interpreter."""

    wanted: bool
    doubt: str = ""
    """The reason why it has none although it would help; said when a rank is started again."""


def plan_warm(
    asked: bool | None, standby_asked: bool, traits: ProgramTraits | None, has_gpu: bool
) -> WarmPlan:
    """Decide whether this node keeps a warm interpreter.

    Args:
        asked: --warm, --no-warm; None: neither.
        standby_asked: --standby was given, which does a part of the same.
        traits: of the program; None: its text cannot be read, or it is no Python.
        has_gpu: the node has one.
    """
    if asked is not None:
        return WarmPlan(asked)
    if standby_asked or traits is None or traits.uses_library or not traits.uses_torch:
        # The library's programs go on in the processes that live: one standby is all they need.
        return WarmPlan(False)
    if traits.leads_path:
        return WarmPlan(False, "the program puts directories before those of torch (sys.path)")
    early = sorted(name for name in traits.sets if read_once(name, ()))
    if early:
        return WarmPlan(False, f"the program sets {', '.join(early)} itself")
    if has_gpu:
        return WarmPlan(False, "it has not been tried with GPUs")
    return WarmPlan(True)


def read_once(name: str, reads: Iterable[str]) -> bool:
    """Tell whether libraries look at a variable once, when they are loaded.

    Args:
        name: of the variable; `*`: unknown.
        reads: names that were read by imports.
    """
    return name == "*" or name.startswith(_READ_BY_C) or name in reads


def doubt_of_environment(
    own: Mapping[str, str], wanted: Mapping[str, str], reads: Iterable[str]
) -> str:
    """Say which variable an interpreter has read with another value; empty: none.

    Args:
        own: the interpreter's environment.
        wanted: what the new process gets in addition to it.
        reads: names that its imports read.
    """
    known = frozenset(reads)
    for name, value in sorted(wanted.items()):
        if own.get(name) != value and read_once(name, known):
            return f"${name} differs, and was read by an import"
    return ""


def doubt_of_neighbours(loaded: Iterable[str], neighbours: Iterable[str]) -> str:
    """Say which file beside the program takes the place of a loaded module; empty: none.

    Args:
        loaded: top-level names of the modules that the interpreter has loaded.
        neighbours: top-level names that can be imported from the program's own directory.
    """
    hidden = sorted(set(loaded) & set(neighbours))
    return f"the program has a module {hidden[0]} of its own" if hidden else ""


def doubt_of_changes(sets: Iterable[str], reads: Iterable[str]) -> str:
    """Say which variable the program sets that imports have read; empty: none."""
    known = frozenset(reads)
    early = sorted(name for name in sets if read_once(name, known))
    return f"the program sets {early[0]} itself, which an import reads" if early else ""
