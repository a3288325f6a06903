"""Entry of the supervisor: `srun --auto-resume=1 …` (the plugin), `sres run -- srun …` (without).

Little is loaded here, so that the collector of garbage rests while the rest is.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slurm_resilience.child_exits import keep_exit_codes
from slurm_resilience.errors import MissingTool, SresError, UsageError
from slurm_resilience.resume.call.own_marker import MARKER, is_called_back, own_marker

_SET_BY_PYTHON = ("C.UTF-8", "C.utf8", "UTF-8")
"""Values of LC_CTYPE."""


def find_srun(environment: Mapping[str, str]) -> str:
    """Return the path of srun on PATH.

    Raises:
        MissingTool: there is none.
    """
    import shutil  # late: the plugin knows the path

    path = shutil.which("srun", path=environment.get("PATH"))
    if not path:
        raise MissingTool("srun is not on PATH; install Slurm's client commands")
    return str(Path(path).resolve())


def main() -> None:
    """Run ``sres-resume --srun PATH -- ARG...``, what the plugin executes."""
    argv = sys.argv[1:]
    if len(argv) < 3 or argv[0] != "--srun" or argv[2] != "--":
        print(
            "sres-resume: error: this is what srun --auto-resume=1 becomes; do not call it "
            "yourself, write srun --auto-resume=1 … or sres run -- srun …",
            file=sys.stderr,
        )
        sys.exit(UsageError.exit_code)
    code = run(argv[1], argv[3:])
    # Without taking the interpreter apart: nothing here needs it, and the user would wait for it.
    for stream in (sys.stdout, sys.stderr):
        # None: it was closed when Python started.
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
    os._exit(code)


def run(srun: str, args: Sequence[str]) -> int:
    """Call `start.supervise` at a process border: errors become a line and a code."""
    _open_standard_streams()
    # Else a program that failed would have ended well.
    keep_exit_codes()
    # Nothing of what is loaded is garbage: to look for some is a sixth of the time. On again in
    # `start.load_late`.
    gc.disable()
    # msgspec does without it. Where torch is installed it is there, and loads what no step needs.
    with _taken_for_missing("typing_extensions"):
        from slurm_resilience.resume.call import start

    try:
        if is_called_back(os.environ):
            from slurm_resilience.resume.srun.srun_options import CALLS_BACK

            raise UsageError(
                f"{srun} {CALLS_BACK}: name Slurm's own srun, or have that program call it by its "
                "full path, without --auto-resume and without sres run"
            )
        return start.supervise(srun, args, _own_environment() | {MARKER: own_marker()})
    except SresError as error:
        print(f"srun: error: sres: {error}", file=sys.stderr)
        return error.exit_code
    except (BlockingIOError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "new thread" not in str(error):
            raise
        text = "you may start no more processes here (ulimit -u), so nothing was started"
        print(f"srun: error: sres: {text}; see ps -u {os.geteuid()}", file=sys.stderr)
        return SresError.exit_code


@contextlib.contextmanager
def _taken_for_missing(name: str) -> Iterator[None]:
    """Have no module of this name loaded within a block, as if it were not installed."""
    hidden = name not in sys.modules
    if hidden:
        # Its type does not say so, but None is what tells Python that.
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]


def _own_environment() -> dict[str, str]:
    """Return the caller's environment: in the locale C, Python sets a variable of its own in it,
    which would reach the tasks."""
    environment = dict(os.environ)
    if environment.get("LC_CTYPE") in _SET_BY_PYTHON:
        with contextlib.suppress(OSError):
            began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
            del environment["LC_CTYPE"]
            for entry in began_with:
                name, _, value = entry.partition(b"=")
                if name == b"LC_CTYPE":
                    environment["LC_CTYPE"] = os.fsdecode(value)
    return environment


def _open_standard_streams() -> None:
    """Open closed ones: they would become the next file or connection that is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one


if __name__ == "__main__":
    main()
