"""Threads of the library are ended before the interpreter is."""

import gc
import os
import subprocess
import sys

import pytest

from slurm_resilience.training import thread_ends


class Worker:
    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self.done = name, done

    def stop(self) -> None:
        self.done.append(self.name)
        if self.name == "broken":
            raise OSError("a stop that fails")


@pytest.fixture(autouse=True)
def no_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_ends, "_ends", [])


def test_the_newest_ends_first_and_one_that_fails_spares_no_other() -> None:
    done: list[str] = []
    workers = [Worker(name, done) for name in ("old", "broken", "new")]
    for worker in workers:
        thread_ends.at_exit(worker.stop)
    thread_ends._end_all()
    assert done == ["new", "broken", "old"]


def test_an_object_is_not_kept_for_its_end() -> None:
    done: list[str] = []
    thread_ends.at_exit(Worker("gone", done).stop)
    gc.collect()
    kept = Worker("kept", done)
    thread_ends.at_exit(kept.stop)
    assert len(thread_ends._ends) == 1
    thread_ends._end_all()
    assert done == ["kept"]


def test_the_process_calls_them_and_a_forked_child_does_not() -> None:
    program = """
import os, sys
from slurm_resilience.training import thread_ends
class Worker:
    def stop(self): os.write(1, b"ended in %d\\n" % os.getpid())
worker = Worker()
thread_ends.at_exit(worker.stop)
child = os.fork()
if child: os.waitpid(child, 0)
sys.exit(3)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert said == f"ended in {process.pid}\n"
    assert process.pid != os.getpid()
