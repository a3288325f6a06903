"""Tell where the processes of a step stand on this node; print it as one line of JSON.

`python -I -m slurm_resilience.resume.progress.node_stacks TOKEN [DIRECTORY]` runs as a helper step
beside a step that hangs, as the job's own user: of what the kernel shows to root alone it tells
what it can. It takes py-spy where that is on PATH, or installed beside this package. All of it is
bounded: `MOST_PROCESSES`, `PY_SPY_SECONDS`, `RAS_BYTES`, `DUMP_BYTES`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slurm_resilience.clock import SYSTEM_CLOCK

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm's numbers for what is no step of tasks: batch scripts, interactive shells."""
MOST_PROCESSES = 64
MOST_OF_A_RANK = 3
FILE_BYTES = 65536
PY_SPY_SECONDS = 6.0
PY_SPY_AT_ONCE = 8
STACK_FRAMES = 12
MOST_CHARACTERS = 120
LOOK_SECONDS = 0.3
"""Between two looks at the processor time of a process."""
DUMP_SECONDS = 5.0
"""For processes to write the dumps that they are asked for."""
DUMP_LOOK_SECONDS = 0.2
"""Between two looks whether they have; a file that has not grown in between is whole."""
DUMP_BYTES = 32 << 20
RAS_SECONDS = 6.0
RAS_BYTES = 20000
DUMP_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variables with the path of a dump, but for the rank at its end."""
DEFAULT_DUMP = "/tmp/nccl_trace_rank_"
PIPE_NAME = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""Variable with the path of a pipe, but for the rank and `.pipe`: what is written there makes the
process dump."""
RAS_VARIABLE, RAS_ADDRESS = "NCCL_RAS_ADDR", "localhost:28028"

Process = dict[str, Any]


def read(path: str) -> str:
    """Return the beginning of a file; empty where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process began with; empty where it is another user's."""
    pairs = (word.partition("=") for word in read(f"/proc/{pid}/environ").split("\0"))
    return {name: value for name, _, value in pairs if name}


def processes_of(token: str) -> list[tuple[int, dict[str, str]]]:
    """Return the processes of an attempt on this node, with their environments."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        environment = environment_of(int(entry.name))
        # srun has the variables of its tasks too, and the number of the batch script as its own.
        step = environment.get("SLURM_STEP_ID", "")
        in_step = step.isdecimal() and int(step) < FIRST_SPECIAL_STEP
        if environment.get("SRES_TOKEN") == token and in_step:
            found.append((int(entry.name), environment))
    return found


def rank_of(environment: Mapping[str, str], launched: bool) -> int | None:
    """Return a process's rank; None: it is a launcher's, or has none.

    Args:
        environment: its own.
        launched: some process of the step has a RANK: those without are launchers.
    """
    name = "RANK" if launched else "SLURM_PROCID"
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 8 else None


def status_of(pid: int) -> dict[str, str]:
    """Return the lines of a process's status, by their names."""
    lines = (line.partition(":") for line in read(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in lines}


def ticks_of(pid: int) -> int:
    """Return the processor time of a process, in ticks of the clock."""
    words = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(words[11]) + int(words[12]) if len(words) > 12 else 0


def age_of(pid: int) -> float:
    """Return for how long a process has run, seconds; 0 where it has ended."""
    words = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    uptime = read("/proc/uptime").split()
    if len(words) < 20 or not uptime:
        return 0.0
    return max(0.0, float(uptime[0]) - int(words[19]) / os.sysconf("SC_CLK_TCK"))


def kernel_stack(pid: int) -> list[str]:
    """Return the kernel's functions in which a process is, innermost first; root alone sees it."""
    lines = read(f"/proc/{pid}/stack").splitlines()[:STACK_FRAMES]
    return [line.split("] ", 1)[-1].split("+")[0][:MOST_CHARACTERS] for line in lines]


def python_stack(pid: int, py_spy: str | None) -> list[str]:
    """Return the functions of a process's main thread, innermost first."""
    if py_spy is None:
        return []
    try:
        done = subprocess.run(
            [py_spy, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            timeout=PY_SPY_SECONDS,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return main_thread(done.stdout) if done.returncode == 0 else []


def main_thread(text: str) -> list[str]:
    """Return the frames of py-spy's first main thread, innermost first."""
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("Thread "):
            inside = "MainThread" in line
        elif inside and line.startswith("    ") and len(frames) < STACK_FRAMES:
            frames.append(line.strip()[:MOST_CHARACTERS])
    return frames


def look_at(pid: int, rank: int, before: int, seconds: float, py_spy: str | None) -> Process:
    """Return all that is seen of one process."""
    share = (ticks_of(pid) - before) / os.sysconf("SC_CLK_TCK") / max(seconds, 0.01)
    status = status_of(pid)
    return {
        "pid": pid,
        "rank": rank,
        "state": status.get("State", "")[:1],
        "command": status.get("Name", ""),
        "kernel_function": read(f"/proc/{pid}/wchan")[:MOST_CHARACTERS],
        "system_call": read(f"/proc/{pid}/syscall").strip()[:MOST_CHARACTERS],
        "kernel_stack": kernel_stack(pid),
        "python_stack": python_stack(pid, py_spy),
        "core_share": round(max(0.0, share), 2),
    }


def choose(found: list[tuple[int, dict[str, str]]]) -> tuple[list[tuple[int, int]], int]:
    """Return process and rank of those that are looked at, the largest of each rank first, and how
    many are left out."""
    launched = any("RANK" in environment for _, environment in found)
    of_rank: dict[int, list[int]] = {}
    for pid, environment in found:
        rank = rank_of(environment, launched)
        if rank is not None:
            of_rank.setdefault(rank, []).append(pid)

    def size(pid: int) -> tuple[int, int]:
        status = status_of(pid)
        memory = status.get("VmRSS", "0").split()[0]
        return int(status.get("Threads", "0") or 0), int(memory) if memory.isdecimal() else 0

    rows = [sorted(of_rank[rank], key=size, reverse=True) for rank in sorted(of_rank)]
    ranks = sorted(of_rank)
    # Of each rank the largest one first: with many ranks on a node none is to be missing.
    chosen = [
        (row[place], rank)
        for place in range(MOST_OF_A_RANK)
        for rank, row in zip(ranks, rows, strict=True)
        if place < len(row)
    ][:MOST_PROCESSES]
    return chosen, sum(map(len, rows)) - len(chosen)


def _wait(seconds: float) -> None:
    SYSTEM_CLOCK.wait(threading.Event(), seconds)


# -- the Flight Recorder, and NCCL's own service ---------------------------------------------------


def dump_paths(environments: Mapping[int, Mapping[str, str]]) -> Iterator[tuple[int, Path]]:
    """Yield the rank and path of each dump that processes of this node may have written."""
    for rank, environment in environments.items():
        given = [environment[name] for name in DUMP_NAMES if environment.get(name)]
        yield rank, Path(f"{given[0] if given else DEFAULT_DUMP}{rank}")


def ask_for_dumps(environments: Mapping[int, Mapping[str, str]]) -> set[int]:
    """Ask processes for a dump, by their pipes; return the ranks that have one."""
    asked = set()
    for rank, environment in environments.items():
        stem = environment.get(PIPE_NAME)
        if not stem:
            continue
        with contextlib.suppress(OSError):
            pipe = os.open(f"{stem}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(pipe, "wb") as file:
                if stat.S_ISFIFO(os.fstat(pipe).st_mode):
                    file.write(b"1\n")
                    asked.add(rank)
    return asked


def wait_for_dumps(environments: Mapping[int, Mapping[str, str]], ranks: set[int]) -> None:
    """Wait until these ranks have written anew, or their time is over.

    Args:
        environments: of all ranks.
        ranks: those that were asked.
    """
    paths = [path for rank, path in dump_paths(environments) if rank in ranks]
    until = SYSTEM_CLOCK.monotonic() + DUMP_SECONDS
    asked_at = SYSTEM_CLOCK.now() - DUMP_LOOK_SECONDS
    before: list[int] = []
    while SYSTEM_CLOCK.monotonic() < until:
        _wait(DUMP_LOOK_SECONDS)
        sizes = [_size_since(path, asked_at) for path in paths]
        if all(sizes) and sizes == before:
            return
        before = sizes


def _size_since(path: Path, since: float) -> int:
    """Return the size of a file that was written since then; 0: it was not."""
    with contextlib.suppress(OSError):
        about = path.stat()
        return about.st_size if about.st_mtime >= since else 0
    return 0


def find_py_spy() -> str | None:
    """Return py-spy's path; None: it is not installed."""
    return shutil.which("py-spy") or shutil.which(str(Path(sys.executable).with_name("py-spy")))


def copy_dumps(
    environments: Mapping[int, Mapping[str, str]], directory: Path, since: float
) -> list[str]:
    """Copy the dumps of this node's ranks; return the names of the copies.

    Args:
        environments: of the ranks.
        directory: for the copies; it is made.
        since: when the processes began: an older file is another job's. Seconds since the epoch.
    """
    names: list[str] = []
    for rank, path in dump_paths(environments):
        with contextlib.suppress(OSError):
            source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(source, "rb") as file:
                about = os.fstat(source)
                is_own = about.st_uid == os.geteuid() and about.st_mtime >= since
                if not stat.S_ISREG(about.st_mode) or not is_own or about.st_size > DUMP_BYTES:
                    continue
                directory.mkdir(parents=True, exist_ok=True)
                name = f"nccl_trace_rank_{rank}"
                with (directory / name).open("wb") as copy:
                    shutil.copyfileobj(file, copy)
                names.append(name)
    return names


def ask_ras(environments: Mapping[int, Mapping[str, str]]) -> str:
    """Return what NCCL's service for reliability (RAS) says of all ranks; empty: there is none."""
    given = [e[RAS_VARIABLE] for e in environments.values() if e.get(RAS_VARIABLE)]
    host, _, port = (given[0] if given else RAS_ADDRESS).rpartition(":")
    data = b""
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host, int(port)), timeout=RAS_SECONDS) as link,
    ):
        link.settimeout(RAS_SECONDS)
        link.sendall(b"verbose status\n")
        until = SYSTEM_CLOCK.monotonic() + RAS_SECONDS
        while len(data) < RAS_BYTES and SYSTEM_CLOCK.monotonic() < until:
            got = link.recv(FILE_BYTES)
            if not got:
                break
            data += got
    return data[:RAS_BYTES].decode("utf-8", "replace")


def tell(token: str, directory: str) -> dict[str, Any]:
    """Return all that this node tells of an attempt.

    Args:
        token: of the attempt.
        directory: for copies of dumps; empty: none are made.
    """
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    found = processes_of(token)
    chosen, left_out = choose(found)
    before = {pid: ticks_of(pid) for pid, _ in chosen}
    began = SYSTEM_CLOCK.monotonic()
    environments = {rank: dict(found)[pid] for pid, rank in reversed(chosen)}
    _wait(LOOK_SECONDS)
    seconds = SYSTEM_CLOCK.monotonic() - began
    py_spy = find_py_spy()
    with ThreadPoolExecutor(PY_SPY_AT_ONCE) as pool:
        looks = [
            pool.submit(look_at, pid, rank, before[pid], seconds, py_spy) for pid, rank in chosen
        ]
        ras = ask_ras(environments)
        processes = [look.result() for look in looks]
    dumps: list[str] = []
    if directory and Path(directory).is_dir():
        asked = ask_for_dumps(environments)
        if asked:
            wait_for_dumps(environments, asked)
        oldest = max((age_of(pid) for pid, _ in chosen), default=0.0)
        since = SYSTEM_CLOCK.now() - oldest
        dumps = copy_dumps(environments, Path(directory) / node, since)
    return {
        "node": node,
        "processes": processes,
        "dumps": dumps,
        "ras": ras,
        "left_out": left_out,
    }


def main() -> None:
    """Print what this node tells."""
    token, directory = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    sys.stdout.write(json.dumps(tell(token, directory)) + "\n")


if __name__ == "__main__":
    main()
