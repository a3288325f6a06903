"""Run the lifecycle scripts of a node: ``sres-lifecycle [NODE]``, before slurmd starts.

    sres-lifecycle --dir /etc/slurm-resilience/lifecycle --state DIR --logs DIR NODE

The scripts run in order as ``SCRIPT NODE``, each within a time limit, with its output in a file of
its own. The first failure ends the run: the node must not join. They run with the first boot of a
disk and with each later one, and when their content has changed; what has ended well in this boot
is not run again. So a start of slurmd beside running jobs runs nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from slurm_resilience.child_exits import keep_exit_codes
from slurm_resilience.clock import SYSTEM_CLOCK, Clock
from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.lifecycle import identity
from slurm_resilience.lifecycle.run_record import (
    TIMED_OUT,
    LifecycleError,
    RunRecord,
    ScriptResult,
    due,
    read_record,
    write_record,
)
from slurm_resilience.lifecycle.script_runner import MAX_LOG_BYTES, run_script
from slurm_resilience.lifecycle.script_set import LifecycleScript, scripts_of
from slurm_resilience.trusted_paths import untrusted_state

NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
DEFAULT_TIMEOUT_SECONDS, DEFAULT_TOTAL_SECONDS = 300.0, 600.0
LOG_NAME = "lifecycle.log"
LOCK_NAME = "lock"


@dataclass(frozen=True)
class RunPlan:
    """The scripts to run, where, and for how long at most."""

    directory: Path
    state_dir: Path
    log_dir: Path
    node: str
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    total_timeout: float = DEFAULT_TOTAL_SECONDS
    boot_id: str = ""
    instance: str = ""
    again: bool = False
    """Run all of them, also those that have ended well."""
    resource_config: str = ""
    """HyperPod's description of the cluster, for ``on_create.sh``."""


def run(plan: RunPlan, clock: Clock = SYSTEM_CLOCK) -> RunRecord:
    """Run the scripts that are due.

    Raises:
        UsageError: the directory cannot be read, or a script could be another user's.
        LifecycleError: one failed (the later ones did not run), or another run is under way.
    """
    scripts = scripts_of(plan.directory)
    for folder in (plan.state_dir, plan.log_dir):
        folder.mkdir(parents=True, exist_ok=True)
    if fault := untrusted_state(plan.state_dir):
        raise UsageError(f"{fault}, so nothing was run: a user could forge what was run before")
    with _only_one(plan.state_dir / LOCK_NAME), _open_log(plan.log_dir) as log:
        earlier = None if plan.again else read_record(plan.state_dir)
        done = due(scripts, earlier, plan.boot_id, plan.instance)
        known = {result.name: result for result in earlier.results} if earlier else {}
        kept = tuple(known[script.name] for script in scripts[:done])
        record = RunRecord(plan.node, plan.boot_id, plan.instance, kept)
        if earlier is not None and done == len(scripts):
            record = replace(record, ended=earlier.ended or clock.now())
            write_record(plan.state_dir, record)
            return record
        return _run_rest(plan, scripts[done:], record, log, clock)


def _run_rest(
    plan: RunPlan,
    scripts: Sequence[LifecycleScript],
    record: RunRecord,
    log: BinaryIO,
    clock: Clock,
) -> RunRecord:
    write_record(plan.state_dir, record)
    deadline = clock.monotonic() + plan.total_timeout
    for script in scripts:
        seconds = min(plan.timeout, deadline - clock.monotonic())
        result = _result_of(plan, script, seconds, clock)
        result = replace(result, boot_id=plan.boot_id)
        record = replace(record, results=(*record.results, result))
        write_record(plan.state_dir, record)
        _log_line(log, result)
        if result.has_failed:
            write_record(plan.state_dir, replace(record, ended=clock.now()))
            path = plan.log_dir / f"{script.name}.log"
            raise LifecycleError(f"{result.in_words}; {plan.node} must not join; see {path}")
    record = replace(record, ended=clock.now())
    write_record(plan.state_dir, record)
    return record


def _result_of(
    plan: RunPlan, script: LifecycleScript, seconds: float, clock: Clock
) -> ScriptResult:
    if seconds <= 0:
        text = f"the scripts together took more than {plan.total_timeout:g} s"
        return ScriptResult(script.name, TIMED_OUT, 0.0, text, script.digest, at=clock.now())
    try:
        environment = _environment_of(plan, script)
    except SresError as error:
        return ScriptResult(script.name, 1, 0.0, str(error), script.digest, at=clock.now())
    log = plan.log_dir / f"{script.name}.log"
    return run_script(script, plan.node, seconds, log, environment, clock)


def _environment_of(plan: RunPlan, script: LifecycleScript) -> Mapping[str, str]:
    if not script.runs_once:
        return os.environ
    # Only here: it asks Slurm, and needs more than the standard library.
    from slurm_resilience.lifecycle.hyperpod import environment

    return environment(plan.directory, plan.state_dir, plan.node, plan.resource_config)


def _log_line(log: BinaryIO, result: ScriptResult) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(result.at))
    line = f"{stamp} {result.name}: exit code {result.rc} after {result.seconds} s\n"
    if result.rc is None:
        line = f"{result.name}: skipped, {result.text}\n"
    with suppress(OSError):  # a full disk of logs keeps no node out: the record counts
        log.write(line.encode())


@contextmanager
def _open_log(folder: Path) -> Iterator[BinaryIO]:
    """Open the log of all runs, a line for each script; one older file is kept."""
    path = folder / LOG_NAME
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_name(f"{LOG_NAME}.1"))
    with path.open("ab", buffering=0) as log:
        yield log


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LifecycleError(f"another run holds {lock}; wait for its end") from None
        yield


def _plan_of(words: argparse.Namespace) -> RunPlan | None:
    """Return the plan of a command line, with the configuration where it leaves something out;
    None: no directory is configured."""
    node = words.node or identity.node_name()
    if not NODE.fullmatch(node):
        raise UsageError(f"'{node}' is not a node name")
    if words.dir is None:
        # Only here: it needs more than the standard library.
        from slurm_resilience import config

        settings = config.load(words.config).lifecycle
        if not settings.directory:
            return None
        words.dir, words.state = Path(settings.directory), Path(settings.state_dir)
        words.logs, words.timeout = Path(settings.log_dir), settings.timeout
        words.total, words.resource_config = settings.total_timeout, settings.resource_config
    if words.state is None or words.logs is None:
        raise UsageError("--dir needs --state and --logs beside it")
    if not (words.timeout > 0 and words.total > 0):
        raise UsageError("--timeout and --total must be greater than 0")
    return RunPlan(
        words.dir.absolute(),
        words.state.absolute(),
        words.logs.absolute(),
        node,
        words.timeout,
        words.total,
        identity.boot_id(),
        identity.instance(),
        words.again,
        words.resource_config,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sres-lifecycle",
        description="Run the lifecycle scripts of this node, before its slurmd starts.",
    )
    parser.add_argument("--config", metavar="FILE", help="configuration file, without --dir")
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="directory of the scripts, NN-name (default: all of [lifecycle] in the configuration; "
        "the options down to --resource-config go with --dir alone)",
    )
    parser.add_argument(
        "--state", type=Path, metavar="DIR", help="directory of the record, on the node's own disk"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="directory of the scripts' logs")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_TIMEOUT_SECONDS,
        help="for each script (default: %(default)g)",
    )
    parser.add_argument(
        "--total",
        type=float,
        metavar="SECONDS",
        default=DEFAULT_TOTAL_SECONDS,
        help="for all scripts together (default: %(default)g)",
    )
    parser.add_argument(
        "--resource-config",
        metavar="FILE",
        default="",
        help="HyperPod's description of the cluster, for on_create.sh",
    )
    parser.add_argument(
        "--again", action="store_true", help="run all, also those that ended well in this boot"
    )
    parser.add_argument(
        "node", metavar="NODE", nargs="?", help="this node's name in Slurm (default: the host name)"
    )
    return parser


def main() -> None:
    """Run the command line."""
    keep_exit_codes()
    words = _parser().parse_args()
    try:
        plan = _plan_of(words)
        if plan is None:
            print("sres-lifecycle: no scripts are configured (lifecycle.directory)")
            return
        record = run(plan)
    except SresError as error:
        print(f"sres-lifecycle: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # A write to a full disk has no file's name.
        where = f"{error.filename}: " if error.filename else "the record or a log: "
        print(f"sres-lifecycle: error: {where}{error.strerror}", file=sys.stderr)
        sys.exit(1)
    ran = sum(result.rc is not None for result in record.results)
    print(f"sres-lifecycle: {ran} of {len(record.results)} scripts ran well on {plan.node}")


if __name__ == "__main__":
    main()
