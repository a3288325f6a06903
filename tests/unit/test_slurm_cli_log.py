"""A command of Slurm is logged where a log is kept, also while another thread loads the module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOADED_SLOWLY = """
import builtins
builtins.begun.set()
assert builtins.go.wait(60)
def getLogger(name):
    class Log:
        def debug(self, *words): print(name, *words)
    return Log()
"""

ASKED_MEANWHILE = """
import builtins, importlib, sys, threading
from slurm_resilience.slurm.cli import CliClient
sys.modules.pop("logging", None)
sys.path.insert(0, sys.argv[1])
builtins.begun, builtins.go = threading.Event(), threading.Event()
loading = threading.Thread(target=importlib.import_module, args=("logging",))
loading.start()
assert builtins.begun.wait(60)
threading.Timer(0.1, builtins.go.set).start()
CliClient()._run("true")
loading.join()
"""


def test_a_command_ends_while_another_thread_loads_the_log(tmp_path: Path) -> None:
    """A supervisor loads it beside its step: an error there would leave the step without help."""
    (tmp_path / "logging.py").write_text(LOADED_SLOWLY)
    command = [sys.executable, "-c", ASKED_MEANWHILE, str(tmp_path)]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("sres.slurm %s -> %d ")


def test_no_log_is_loaded_for_a_command() -> None:
    code = "from slurm_resilience.slurm.cli import CliClient; CliClient()._run('true')"
    code += "; import sys; assert 'logging' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
