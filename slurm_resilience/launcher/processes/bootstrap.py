"""Run in each rank's process before the user's program. Standard library only; run by path.
fork_server.py loads it too, and its forks enter at `become`.

    python -u bootstrap.py FD PARENT [MODULE…]

It dies with its launcher, imports the modules (a warm standby; a cold start names none), waits on
the socket FD for one order, and becomes the user's program as `python train.py` would have started
it. Messages are lines of JSON. Launcher → here: ``{"kind": "script" | "module" | "program", "argv":
[…], "env": {…}, "stdout": PATH | null, "stderr": PATH | null}``. Here → launcher: ``{"warm": […]}``
when the modules are there, and ``{"place": …, "error": …, "group": …}`` when the program failed in
Python (group: it was in a process group of torch's).
"""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's directory: its neighbours must not shadow the program's modules

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import traceback
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is not needed to run, and takes time to load
    from typing import Any

_PR_SET_PDEATHSIG = 1
_STOP = 76
"""codes.STOP, which cannot be imported here."""
_LONGEST = 1000
"""Characters of an error that are told."""


def die_with(parent: int) -> None:
    """End when the launcher ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew of our wish
        os._exit(1)


def import_all(names: list[str]) -> list[str]:
    """Import what can be imported; a missing module only makes the start slower."""
    there = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            continue
        there.append(name)
    return there


def send(link: socket.socket, **words: object) -> None:
    try:
        link.sendall(json.dumps(words).encode() + b"\n")
    except OSError:
        return  # the launcher is going; the kernel ends this process with it


def _receive(link: socket.socket) -> "dict[str, Any]":
    line = b""
    while not line.endswith(b"\n"):
        part = link.recv(65536)
        if not part:
            os._exit(0)
        line += part
    order: dict[str, Any] = json.loads(line)
    return order


def _point(fd: int, path: str | None) -> None:
    """Let an output go to the end of a file; if that cannot be written, it stays as it is."""
    if not path:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        print(f"sres-run: {path}: {error.strerror}; output is shown instead", file=sys.stderr)
        return
    os.dup2(file, fd)
    os.close(file)


def _run(kind: str, argv: list[str]) -> None:
    """Run the user's program; return, or raise, as it does."""
    sys.argv[:] = argv
    front = not getattr(sys.flags, "safe_path", False)
    if kind == "module":
        if front:
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
        _new_main()
        runpy._run_module_as_main(argv[0])  # type: ignore[attr-defined]  # as `python -m` does
        return
    path = argv[0]
    if path.endswith(".zip") or os.path.isdir(path):  # noqa: PTH112
        runpy.run_path(path, run_name="__main__")
        return
    if front:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    # runpy.run_path would take `__main__` away again while threads and exit handlers still run.
    main = _new_main()
    main.__dict__.update(__file__=os.path.abspath(path), __cached__=None, __spec__=None)  # noqa: PTH100
    with open(path, "rb") as file:  # noqa: PTH123
        code = compile(file.read(), main.__dict__["__file__"], "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _new_main() -> types.ModuleType:
    """Make the program's `__main__`, which the modules that are loaded already find too."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # what a spawned process sends back is looked up there
        sys.modules["__mp_main__"] = main
    return main


def _in_group() -> bool:
    """Tell whether the program is in a process group of torch's, which is not loaded for that."""
    distributed = sys.modules.get("torch.distributed")
    try:
        return distributed is not None and bool(distributed.is_initialized())
    except Exception:
        return False


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    return f"{type(error).__name__} at {where}"


def _message(error: BaseException) -> str:
    """Return an error's message in a line."""
    lines = traceback.format_exception_only(error)
    if isinstance(error, SyntaxError):
        # The place and the text come before it.
        kind = f"{type(error).__name__}:"
        lines = [line for line in lines if line.startswith(kind)] or lines
    return _head("".join(lines))


def _said(code: object) -> str:
    """Return the line of what sys.exit() was given in place of a code."""
    try:
        return "" if isinstance(code, int) else _head(str(code))
    except Exception:
        return ""


def _head(text: str) -> str:
    """Return the line that says what is wrong: torch's errors go on with advice, and with lists of
    what the first line announces."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return said[:_LONGEST]


def _is_usage(error: BaseException) -> bool:
    """Tell whether our own code refuses what the program asked for: it would be refused again."""
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("slurm_resilience.errors", "UsageError")


def _asked_at(error: BaseException) -> str:
    """Return the line of the program that asked for it."""
    ours = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120
    frames = [
        one
        for one in traceback.extract_tb(error.__traceback__)
        if not one.filename.startswith(ours)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def _show(error: BaseException) -> None:
    """Show the traceback as Python does, without this file's frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def main() -> None:
    """Be born, and wait."""
    fd, parent, *modules = sys.argv[1:]
    die_with(int(parent))
    link = socket.socket(fileno=int(fd))
    link.set_inheritable(False)
    if modules:
        send(link, warm=import_all(modules))
    become(link)


def become(link: socket.socket) -> None:
    """Wait for the order, and become the user's program."""
    order = _receive(link)
    os.environ.update(order["env"])
    _point(1, order["stdout"])
    _point(2, order["stderr"])
    argv = order["argv"]
    if order["kind"] == "program":
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"{argv[0]}: cannot be run: {error.strerror}", file=sys.stderr)
            send(link, place="exec", error=f"{argv[0]}: {error.strerror}")
            sys.exit(126)
    try:
        _run(order["kind"], argv)
    except SystemExit as end:
        if end.code:
            send(link, place=_place(end), error=_said(end.code), group=_in_group())
        raise
    except KeyboardInterrupt as error:
        # If the launcher goes on, no Ctrl-C has done it: a program that raises it does so again.
        send(link, place=_place(error), error="KeyboardInterrupt", group=_in_group())
        raise
    except BaseException as error:
        send(link, place=_place(error), error=_message(error), group=_in_group())
        if _is_usage(error):
            print(f"sres: {_asked_at(error)}{error}", file=sys.stderr)
            sys.exit(_STOP)
        _show(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
