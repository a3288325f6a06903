"""Run a probe in a process of its own, which can be killed when it hangs.

The child is started for one probe, so that a driver's library stays in no long-lived process, and
its memory and its open files are gone afterwards. It is given its context on stdin, and writes its
reading to stdout.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import msgspec

from slurm_resilience import config
from slurm_resilience.child_group import end_group
from slurm_resilience.health.check import Check, CheckContext, Expected, Unjudged

KILL_GRACE_SECONDS = 1.0
"""Seconds that a killed child has to end: one that hangs in the kernel does not."""
NICENESS = 10


class ChildContext(msgspec.Struct):
    """The part of a context that a probe may use."""

    check: str
    module: str
    """The module whose ``CHECK`` it is; empty: the registry is asked."""
    sysroot: str
    settings: config.CheckSettings
    expected: Expected
    now: float


class ChildAnswer(msgspec.Struct):
    """The reading of a probe, or the reason why there is none."""

    reading: Any = None
    unjudged: str = ""


class ChildProbes:
    """Starts the children; at most one of a check is left behind."""

    def __init__(self) -> None:
        self._stuck: dict[str, subprocess.Popen[bytes]] = {}

    def probe(self, check: Check, context: CheckContext) -> Any:
        """Return the reading of one probe.

        Raises:
            Unjudged: the child hangs, died, or says itself that it cannot tell.
        """
        stuck = self._stuck.get(check.name)
        if stuck is not None and stuck.poll() is None:
            raise Unjudged(
                f"process {stuck.pid} of an earlier run still hangs and cannot be killed"
            )
        self._stuck.pop(check.name, None)
        asked = ChildContext(
            check.name,
            _module_of(check),
            str(context.sysroot),
            context.settings,
            context.expected,
            context.now,
        )
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(msgspec.json.encode(asked), timeout=check.timeout)
        except subprocess.TimeoutExpired:
            if not end_group(child, KILL_GRACE_SECONDS):
                self._stuck[check.name] = child
            raise Unjudged(
                f"no answer within {check.timeout:g} s; its process was killed"
            ) from None
        return _reading(check, said, child.returncode)


def _module_of(check: Check) -> str:
    """Return the module that defines a check, so that a child loads no other: half of its cost."""
    name = check.probe.__module__
    return name if getattr(sys.modules.get(name), "CHECK", None) is check else ""


def _named(asked: ChildContext) -> Check:
    if asked.module:
        check = importlib.import_module(asked.module).CHECK
        assert isinstance(check, Check)
        return check
    # Only here: the parent, which has the registry, imports this module.
    from slurm_resilience.health import check_registry

    return next(one for one in check_registry.checks() if one.name == asked.check)


def _reading(check: Check, said: bytes, code: int) -> Any:
    """Return a child's reading in the type that the probe says it returns."""
    try:
        answer = msgspec.json.decode(said, type=ChildAnswer)
    except msgspec.MsgspecError:
        raise Unjudged(f"its process ended with code {code} and without an answer") from None
    if answer.unjudged:
        raise Unjudged(answer.unjudged)
    return msgspec.convert(answer.reading, typing.get_type_hints(check.probe)["return"])


def main() -> int:
    """Run one probe: the process that `ChildProbes` starts."""
    os.nice(NICENESS)
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=ChildContext)
    check = _named(asked)
    context = CheckContext(Path(asked.sysroot), asked.settings, asked.expected, asked.now)
    try:
        answer = ChildAnswer(check.probe(context))
    except Unjudged as reason:
        answer = ChildAnswer(unjudged=str(reason) or "cannot tell")
    except Exception as error:
        answer = ChildAnswer(unjudged=f"{type(error).__name__}: {error}")
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
