"""A rank whose process waits in the kernel, where SIGKILL does not end it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

IMPATIENT = """
import sys
from slurm_resilience.launcher import launch, main
launch._KILLED_SECONDS = 0.2
main.cli(sys.argv[1:])
"""
PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
from slurm_resilience.launcher import control_socket
if os.environ["SRES_INCARNATION"] == "0":
    looks = threading.Thread(target=os.stat, args=(sys.argv[1],))
    looks.start()
    waits_in = Path(f"/proc/self/task/{looks.native_id}/wchan")
    while "request" not in waits_in.read_text():
        time.sleep(0.01)
    control_socket.evict(os.getpid(), "its disk hangs")
    signal.pause()
print("filled again", flush=True)
"""
DEADLINE = 60.0


def test_a_process_that_cannot_be_killed_is_told_of(
    dead_server: Path, release: Path, tmp_path: Path
) -> None:
    """Its seat stays empty until it has ended: what it holds of a device is not free before."""
    script, told = tmp_path / "train.py", tmp_path / "err"
    script.write_text(PROGRAM)
    flags = ["--nproc-per-node=1", "--standby=0", str(script), str(dead_server)]
    with told.open("wb") as err:
        words = [sys.executable, "-c", IMPATIENT, *flags]
        launcher = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=err)
        try:
            end = time.monotonic() + DEADLINE
            while b"does not end, though it was killed" not in told.read_bytes():
                assert time.monotonic() < end and launcher.poll() is None, told.read_text()
                time.sleep(0.05)
            release.touch()
            out, _ = launcher.communicate(timeout=DEADLINE)
        finally:
            release.touch()
            launcher.kill()
            launcher.wait()
    assert launcher.returncode == 0 and out == b"filled again\n", told.read_text()
