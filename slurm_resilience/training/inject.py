"""Faults on order, for tests and for drills: which rank, which step, which moment, what happens.

    inject.at(rank=1, step=5, phase="update", fault="kill")

or, without touching the program::

    SRES_INJECT="kill:rank=1,step=5,phase=update;stop:rank=2,step=9;exit:code=3"

Each rule fires once in a process, and only in the incarnation it names (the first, unless it says
otherwise): the process that takes the killed one's seat goes through the same step unharmed. With
``SRES_INJECT_ONCE``, a directory that all nodes share, each fires once in the whole training.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import msgspec

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import UsageError
from slurm_resilience.training.recovery import log_lines

VARIABLE = "SRES_INJECT"
ONCE = "SRES_INJECT_ONCE"

Fault = Literal["exception", "kill", "stop", "hang", "hang-c", "exit", "cuda", "poison", "flip"]
"""exception: an ordinary error of the program. kill: SIGKILL. stop: SIGSTOP. hang: a loop that no
exception raised from outside ends, only a signal. hang-c: blocked in C. exit: the process ends.
cuda: what torch raises when the GPU has faulted. poison: the process asks to be replaced. flip: one
bit of the largest parameter changes, unseen, as by a faulty chip."""

Phase = Literal["start", "before-backward", "backward", "update", "after-update", "recovery"]
"""start: the block is entered. before-backward (or ``forward``): a batch is there. backward: inside
of it. update: inside of the update, before the commit. after-update: just committed (the step
counts already). recovery: while the state is healed."""

_ALIASES = {"forward": "before-backward"}
_DIGITS = re.compile(r"[0-9]{1,9}")


class Rule(msgspec.Struct, frozen=True):
    """One fault, and where it happens. None fits everywhere."""

    fault: Fault
    rank: int | None = None
    seat: int | None = None
    step: int | None = None
    """Steps committed at that moment: 5 is the sixth step, until it is committed."""
    phase: Phase = "before-backward"
    incarnation: int | None = 0
    """The incarnation of the process; None (``any``): every one that takes the seat."""
    code: int = 1
    """The exit code of ``exit``."""
    seconds: float | None = None
    """Seconds that ``hang`` and ``hang-c`` last; None: for ever."""

    def __str__(self) -> str:
        kept = {
            key: getattr(self, key)
            for key in self.__struct_fields__[1:]
            if getattr(self, key) is not None
        }
        if self.incarnation is None:
            kept["incarnation"] = "any"
        told = ",".join(f"{key}={value}" for key, value in kept.items())
        return f"{self.fault}:{told}"


class Injected(RuntimeError):
    """The fault ``exception``."""


def parse(text: str) -> tuple[Rule, ...]:
    """Read ``fault:key=value,key=value;fault…``.

    Raises:
        UsageError: a fault, key or value that does not exist, with the words that are wrong.
    """
    return tuple(_rule(part.strip()) for part in text.split(";") if part.strip())


def at(fault: Fault, **where: Any) -> None:
    """Arm one fault in this process.

    Args:
        fault: one of `Fault`.
        where: fields of `Rule`: rank, seat, step, phase, incarnation, code, seconds.

    Raises:
        UsageError: an unknown fault, field or value.
    """
    global is_possible
    known = _rules()
    told = [f"{key}={'any' if value is None else value}" for key, value in where.items()]
    _state.rules = (*known, _rule(f"{fault}:{','.join(told)}"))
    is_possible = True


def clear() -> None:
    """Disarm everything, the environment's rules too."""
    global is_possible
    _state.rules, is_possible = (), False
    _state.fired.clear()


def armed() -> tuple[Rule, ...]:
    """Return the rules that can still fire in this process. Reads the environment the first time.

    Raises:
        UsageError: the environment's rules are wrong.
    """
    return tuple(rule for i, rule in enumerate(_rules()) if i not in _state.fired)


def flips(flip: Callable[[], None]) -> None:
    """Name what changes one bit of this process's state, for the fault ``flip``."""
    _state.flip = flip


def point(phase: Phase, *, step: int = -1, rank: int = -1) -> None:
    """Let a fault happen here, if one is armed; else this costs nothing.

    Args:
        phase: which place.
        step: committed steps.
        rank: in the current world.

    Raises:
        Injected, PoisonedProcess, RuntimeError: what was ordered.
        UsageError: the environment's rules are wrong.
    """
    if is_possible:
        _look(phase, step, rank)


def fits(rule: Rule, phase: str, step: int, rank: int, seat: int, incarnation: int) -> bool:
    """Tell whether this is the moment that a rule means. Pure."""
    return (
        rule.phase == phase
        and rule.step in (None, step)
        and rule.rank in (None, rank)
        and rule.seat in (None, seat)
        and rule.incarnation in (None, incarnation)
    )


class _State:
    def __init__(self) -> None:
        self.rules: tuple[Rule, ...] | None = None
        """None: the environment has not been read."""
        self.fired: set[int] = set()
        self.flip: Callable[[], None] | None = None


_state = _State()
# Looked at in every point, so it is one global name and nothing more.
is_possible = bool(os.environ.get(VARIABLE))
"""True where any rules were given: a cheaper question than `armed`."""


def _rules() -> tuple[Rule, ...]:
    if _state.rules is None:
        _state.rules = parse(os.environ.get(VARIABLE, ""))
    return _state.rules


def _look(phase: str, step: int, rank: int) -> None:
    # Seat and incarnation are read late: a warm standby gets them after it has loaded this.
    seat = _number("SRES_SEAT", "RANK", "SLURM_PROCID", missing=-1)
    incarnation = _number("SRES_INCARNATION", missing=0)
    for i, rule in enumerate(_rules()):
        if i not in _state.fired and fits(rule, phase, step, rank, seat, incarnation):
            _state.fired.add(i)
            if not _first(i):
                continue
            log_lines.write_out()
            where = f"rank {rank}, step {step}, {phase}"
            # In one piece: between the text and the newline of a print, other threads write theirs.
            log_lines.write(f"sres: injected fault ({where}): {rule}\n")
            _happen(rule)


def _first(rule: int) -> bool:
    """Tell whether this rule, by its number, has not yet fired in another process."""
    place = os.environ.get(ONCE, "")
    if not place:
        return True
    try:
        os.close(os.open(Path(place, f"fired-{rule}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError as error:
        raise UsageError(f"{ONCE}: {place} cannot be written to: {error.strerror}") from None
    return True


def _number(*names: str, missing: int) -> int:
    for name in names:
        if (value := os.environ.get(name, "")).isdigit():
            return int(value)
    return missing


def _happen(rule: Rule) -> None:
    match rule.fault:
        case "exception":
            raise Injected(f"injected: {rule}")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            _hang(rule.seconds)
        case "hang-c":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=-1 if rule.seconds is None else rule.seconds)
        case "exit":
            os._exit(rule.code)
        case "cuda":
            _cuda()
        case "flip":
            if _state.flip is not None:
                _state.flip()
        case "poison":
            from slurm_resilience.training.recovery.exceptions import PoisonedProcess

            raise PoisonedProcess(f"injected: {rule}")


def _hang(seconds: float | None) -> None:
    end = float("inf") if seconds is None else SYSTEM_CLOCK.monotonic() + seconds
    pause = threading.Event()
    while True:
        try:
            while (left := end - SYSTEM_CLOCK.monotonic()) > 0:
                pause.wait(min(0.02, left))
            return
        except (KeyboardInterrupt, SystemExit):
            raise  # a signal's handler
        except BaseException:
            continue  # raised from outside by another thread: a true hang does not hear it


def _cuda() -> NoReturn:
    import torch

    kind: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)
    text = "CUDA error: an illegal memory access was encountered (injected)"
    try:
        error = kind(text)
    except TypeError:
        error = RuntimeError(text)
    raise error


def _rule(text: str) -> Rule:
    fault, _, rest = text.partition(":")
    fault = fault.strip()
    if fault not in get_args(Fault):
        raise _wrong(text, f"{fault!r} is no fault", get_args(Fault))
    values: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in Rule.__struct_fields__[1:]:
            raise _wrong(text, f"{part!r} is not understood", Rule.__struct_fields__[1:])
        if key in values:
            raise _wrong(text, f"{key} is given twice")
        values[key] = _value(text, key, value)
    return Rule(fault, **values)  # type: ignore[arg-type]


def _value(text: str, key: str, value: str) -> Any:
    if key == "phase":
        value = _ALIASES.get(value, value)
        if value not in get_args(Phase):
            raise _wrong(text, f"{value!r} is no phase", (*get_args(Phase), *_ALIASES))
        return value
    if value == "any" and key not in ("code", "seconds"):
        return None
    if key == "seconds" and re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
        return float(value)
    if key != "seconds" and _DIGITS.fullmatch(value) and not (key == "code" and int(value) > 255):
        return int(value)
    raise _wrong(text, f"{key}={value!r} is not a number" + (" up to 255" * (key == "code")))


def _wrong(text: str, what: str, known: tuple[str, ...] = ()) -> UsageError:
    more = f" (known: {', '.join(known)})" if known else ""
    return UsageError(f"{VARIABLE} or inject.at: in {text!r}, {what}{more}")
