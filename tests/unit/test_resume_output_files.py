"""A further attempt adds to the files of the one before, and marks where it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_resilience.resume.srun.output_files import appending, mark, shared_files
from slurm_resilience.resume.srun.srun_options import BUILTIN, SrunCommand, split


def command(*words: str) -> SrunCommand:
    return split([*words, "train"], BUILTIN)


@pytest.mark.parametrize(
    ("words", "env", "files"),
    [
        (["-o", "out.txt"], {}, ["out.txt"]),
        (["-o", "out.txt", "-e", "/log/err"], {}, ["out.txt", "/log/err"]),
        ([], {"SLURM_STDOUTMODE": "out.txt"}, ["out.txt"]),
        (["-o", "mine"], {"SLURM_STDOUTMODE": "out.txt"}, ["mine"]),
        (["-o", "out.%t"], {}, []),
        (["-o", "none"], {}, []),
        (["-o", "0"], {}, []),
        ([], {}, []),
    ],
)
def test_the_files_that_all_tasks_share(
    words: list[str], env: dict[str, str], files: list[str]
) -> None:
    assert list(shared_files(command(*words), env)) == [Path(name) for name in files]


@pytest.mark.parametrize(
    ("words", "env", "mode"),
    [
        ([], {}, "append"),
        (["--open-mode=truncate"], {}, "truncate"),
        ([], {"SLURM_OPEN_MODE": "t"}, None),
    ],
)
def test_the_user_s_own_choice_stands(
    words: list[str], env: dict[str, str], mode: str | None
) -> None:
    assert appending(command(*words), env).value("open-mode") == mode


@pytest.mark.parametrize("options", [(), ("--open-mode=t",)])
def test_attempts_are_marked_where_nothing_is_emptied(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    path = tmp_path / "out"
    mark(command("-o", str(path)), {}, "attempt 2")
    assert not path.exists()
    path.write_text("first\n")
    mark(command("-o", str(path), "-e", str(path), *options), {}, "attempt 2")
    assert path.read_text() == ("first\n" if options else "first\nsres: attempt 2\n")
