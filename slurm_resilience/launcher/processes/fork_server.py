"""The warm interpreter of a node. Standard library only; run by path.

    python -u fork_server.py FD PARENT MODULE…

It imports the modules once, and makes a new process for a seat by fork: no import is paid again.
Each fork becomes a child of the launcher, in a process group of its own, and goes on in
bootstrap.py as a fresh process does. Messages on the socket FD: first, from here, ``{"warm": […],
"unsafe": TEXT, "reads": […], "loaded": {…}}``; then, from the launcher, one ``fork`` line for each
process, with its descriptors: its own socket, and its stdout and stderr. The new process says
``{"born": PID}`` on its socket.

A fork copies one thread and shares every open file. So `unsafe` says why no fork is to be made here
when an import has started a thread or a process, opened a device or a connection, or touched a GPU.
"""

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's directory: its neighbours must not shadow the program's modules

import importlib.util
import os
import socket
import types
import warnings
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is not needed to run, and takes time to load
    from collections.abc import Iterator

_HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_GPU_FORK = 9
"""Exit code of the trial fork that could not use a GPU."""


# Without types: it is loaded before typing is, and its class is put on the one `os.environ`.
class _WatchedEnvironment(os._Environ):  # type: ignore[type-arg]
    """`os.environ` while modules are imported: it notes the names that they read."""

    def __getitem__(self, name):  # type: ignore[no-untyped-def]
        _reads.add(os.fsdecode(name))
        return super().__getitem__(name)

    # A module that looks through all of them, as tqdm does for names of its own (torch imports it),
    # reads none of those that differ from node to node.
    def items(self):  # type: ignore[no-untyped-def]
        plain = super().__getitem__
        return {name: plain(name) for name in self}.items()


_reads: "set[str]" = set()


@contextmanager
def _watched_environment() -> "Iterator[None]":
    """Let the one `os.environ`, which modules may keep, note what is read."""
    plain = type(os.environ)
    object.__setattr__(os.environ, "__class__", _WatchedEnvironment)
    try:
        yield
    finally:
        object.__setattr__(os.environ, "__class__", plain)


def _bootstrap() -> types.ModuleType:
    """Load the neighbour, without a place in `sys.modules` that the program might want."""
    path = os.path.join(os.path.dirname(__file__), "bootstrap.py")  # noqa: PTH118, PTH120
    spec = importlib.util.spec_from_file_location("sres_bootstrap", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _descriptors() -> "dict[int, str]":
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # the directory's own
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return found


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _gpu_is_lost() -> bool:
    """Tell, in a fork, whether torch refuses to use a GPU here: an import has asked for one."""
    for name in ("torch.cuda", "torch.xpu"):
        refuses = getattr(sys.modules.get(name), "_is_in_bad_fork", None)
        if refuses is not None and refuses():
            return True
    return False


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which are counted here
        return os.fork()


def _unsafe(before: "dict[int, str]") -> str:
    """Say why a fork would differ from a fresh process; empty: it would not.

    Args:
        before: the descriptors that were open before the imports.
    """
    if _has_children():
        return "an import started a process"
    for fd, target in _descriptors().items():
        if before.get(fd) != target and target not in _HARMLESS:
            return f"an import opened {target}"
    # The first fork is a trial: it ends the threads of libraries that know of forks (OpenBLAS).
    trial = _fork()
    if trial == 0:
        os._exit(_GPU_FORK if _gpu_is_lost() else 0)
    _, status = os.waitpid(trial, 0)
    if status:
        lost = os.waitstatus_to_exitcode(status) == _GPU_FORK
        return "an import used the GPU" if lost else "a trial fork failed"
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    return f"an import started {threads - 1} thread(s)" if threads > 1 else ""


def _warm_up(bootstrap: types.ModuleType, link: socket.socket, names: "list[str]") -> None:
    """Import, and report."""
    known, before = set(sys.modules), _descriptors()
    with _watched_environment():
        there = bootstrap.import_all(names)
    new = {name.partition(".")[0] for name in set(sys.modules) - known}
    bootstrap.send(
        link,
        warm=there,
        unsafe=_unsafe(before),
        reads=sorted(_reads),
        loaded=_places(new),
    )


def _places(names: "set[str]") -> "dict[str, str]":
    """Return the directory from which each of these modules was imported, if it has a file."""
    found = {}
    for name in names:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file:
            inside = os.path.dirname(os.path.realpath(file))  # noqa: PTH120
            found[name] = os.path.dirname(inside) if hasattr(module, "__path__") else inside  # noqa: PTH120
    return found


def _be_another() -> None:
    """Give this fork what each process has of its own, and Python does not give it by itself."""
    with suppress(Exception):
        sys.modules["numpy.random"].seed()
    with suppress(Exception):  # the thread's id, of which Python 3.11 keeps the server's
        sys.modules["threading"].main_thread()._set_native_id()


def _serve(link: socket.socket, launcher: int) -> "list[int]":
    """Fork for each request. Returns in the new processes only: their descriptors."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, 64, 3, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        adopted, release = os.pipe()
        try:
            middle = _fork()
        except OSError:  # the closed socket says so
            middle = -1
        if middle == 0:
            os.close(release)
            # A grandchild goes to the launcher, which asked for orphans, when this one ends.
            try:
                newborn = _fork()
            except OSError:
                os._exit(1)
            if newborn:
                os._exit(0)
            link.close()
            os.read(adopted, 1)
            os.close(adopted)
            if os.getppid() != launcher:
                os._exit(1)
            return descriptors
        if middle > 0:
            os.waitpid(middle, 0)
        for fd in (adopted, release, *descriptors):
            os.close(fd)


def main() -> None:
    """Import, report, and fork."""
    fd, parent, *modules = sys.argv[1:]
    bootstrap = _bootstrap()
    bootstrap.die_with(int(parent))
    link = socket.socket(fileno=int(fd))
    link.set_inheritable(False)
    _warm_up(bootstrap, link, modules)
    own, *outputs = _serve(link, int(parent))
    bootstrap.die_with(int(parent))
    os.setpgid(0, 0)
    for target, fd_given in zip((1, 2), outputs, strict=False):
        os.dup2(fd_given, target)
        os.close(fd_given)
    _be_another()
    born = socket.socket(fileno=own)
    born.set_inheritable(False)
    bootstrap.send(born, born=os.getpid())
    bootstrap.become(born)


if __name__ == "__main__":
    main()
