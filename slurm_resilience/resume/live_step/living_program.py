"""Tell which steps can outlive a node, and how such a step is started. Pure.

A program that uses `slurm_resilience.training` re-forms its own world, so its step need not end
when a node dies. It is known by its launcher on srun's line, or by `SRES_CHECKPOINTLESS=1`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from slurm_resilience.mesh.rank_variables import CHECKPOINTLESS
from slurm_resilience.resume.srun.srun_options import SrunCommand

LAUNCHER = "sres-run"
KEEP_RUNNING = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
"""srun's options by which the loss of a node or a task does not end the step."""

_PACKAGE = "slurm_resilience"
_MODULE = rf"(-[A-Za-z]*m)?{_PACKAGE}\.launcher(\.main|\.__main__)?"
_FILE = rf"(.*/)?{_PACKAGE}/launcher(/(main|__main__)\.py)?/?"
_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh"})
_NESTING = 3
"""Shells within shells that are looked into."""


def can_live(command: SrunCommand, environment: Mapping[str, str]) -> bool:
    """Return whether this step may be started so that it outlives a node.

    Only for programs that say so (`uses_training_library`), and not where the user chose otherwise,
    or where srun's own input and output are more than one step can have.
    """
    if not uses_training_library(command, environment) or command.multi_prog or command.has("pty"):
        return False
    if command.value("no-kill") == "off" or command.value("wait") not in (None, "0"):
        return False
    return not command.has("kill-on-bad-exit") or command.value("kill-on-bad-exit") == "0"


def uses_training_library(command: SrunCommand, environment: Mapping[str, str]) -> bool:
    """Return whether its launcher is named, or the user says that the program uses the library."""
    chosen = environment.get(CHECKPOINTLESS, "")
    return chosen == "1" or (chosen != "0" and names_launcher(command.program))


def names_launcher(program: Sequence[str], nesting: int = _NESTING) -> bool:
    """Return whether a command starts the launcher.

    ``sres-run``, with or without its path; ``python -m slurm_resilience.launcher``; either of them
    behind ``env``, ``numactl`` or a container's command, or in the text of ``bash -c``. What stands
    behind another Python script is that script's own.
    """
    for index, word in enumerate(program):
        name = PurePosixPath(word).name
        if name == LAUNCHER or (_PACKAGE in word and re.fullmatch(f"{_MODULE}|{_FILE}", word)):
            return True
        if word.endswith(".py"):
            return False
        if name in _SHELLS:
            text = _shell_text(program[index + 1 :])
            return nesting > 0 and any(names_launcher(c, nesting - 1) for c in _commands(text))
    return False


def living_command(command: SrunCommand) -> SrunCommand:
    """Return the same step, but so that the loss of a node or a task does not end it."""
    named = [word.removeprefix("--").partition("=")[0] for word in KEEP_RUNNING]
    more = (word for word, name in zip(KEEP_RUNNING, named, strict=True) if not command.has(name))
    return command.adding(*more)


def _shell_text(words: Sequence[str]) -> str:
    """Return the text that a shell is given by -c; empty: it runs a file."""
    for index, word in enumerate(words):
        if not word.startswith("-"):
            return ""
        if not word.startswith("--") and "c" in word:
            text = words[index + 1 : index + 2]
            return text[0] if text else ""
    return ""


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the single commands of a shell's text, as far as they can be told apart without a
    shell."""
    lexer = shlex.shlex(text.replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    try:
        for word in lexer:
            if set(word) <= set("();<>|&"):
                yield command
                command = []
            else:
                command.append(word)
    except ValueError:
        pass  # a quotation that does not end: the shell will say so
    yield command
