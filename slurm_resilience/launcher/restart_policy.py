"""Decide what an ended process means for its seat, and for the training. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from slurm_resilience.launcher import exit_codes
from slurm_resilience.mesh.model import SEAT_TAKEN

EndCause = Literal["signal", "exit"]


class ProcessEnd(msgspec.Struct, frozen=True):
    """The end of one process."""

    code: int
    """As a shell shows it: 128+N for signal N."""
    at: float
    """When, in seconds of the monotonic clock."""
    lived: float
    """Seconds in the user's code."""
    place: str = ""
    """The line at which it raised or called sys.exit; empty: unknown (a signal, os._exit)."""
    error: str = ""
    """The first line of its message."""
    evicted: str = ""
    """The reason why its peers wanted it replaced; empty: they did not."""
    trained: bool = False
    """It was in the middle of a training, and has not left it."""
    complete: bool = False
    """It had left its training, which was complete."""
    by: EndCause = "signal"
    """The cause of its end, where the code may be that of a signal."""

    @property
    def by_signal(self) -> bool:
        return exit_codes.is_signal(self.code) and self.by == "signal"


class RestartRules(msgspec.Struct, frozen=True):
    """The budget for keeping a seat filled."""

    replacements: int = 10
    """At most so many within `window`."""
    window: float = 3600.0
    """Seconds; 0: the launcher's whole life."""
    short_life: float = 120.0
    """Seconds; who ends sooner, twice in a row and at the same place, has a bug."""


class RestartDecision(msgspec.Struct, frozen=True):
    """The next step, and its reason."""

    do: Literal["done", "failed", "replace", "end"]
    """failed: the seat stays empty, and the others go on; end: they are ended too."""
    reason: str
    code: int = 0
    """For `failed` and `end`: the launcher's exit code."""


def judge(ends: Sequence[ProcessEnd], rules: RestartRules) -> RestartDecision:
    """Decide what follows from the last end of a seat's process.

    Args:
        ends: all ends on this seat, the oldest first; at least one.
        rules: the seat's budget.
    """
    last = ends[-1]
    if last.code == exit_codes.DONE and not last.trained:
        return RestartDecision("done", "done")
    own = exit_codes.describe(last.code, exited=last.by == "exit")
    how = f"evicted: {last.evicted}" if last.evicted else own
    if last.code == exit_codes.DONE:
        how = f"{how} in the middle of the training (os._exit?)"
    if last.error:
        how = f"{how}: {last.error}"
    if last.evicted.startswith(SEAT_TAKEN):
        # One more would take it back, and the other launcher's the same, until both give up.
        return RestartDecision(
            "failed",
            f"{last.evicted}, and this launcher did not start it (does another training meet in "
            "the same place? --rdzv-id names each; --nproc-per-node is the same on all nodes)",
            last.code,
        )
    if last.evicted:
        return _within_budget(ends, rules, how)
    if last.code == exit_codes.STOP:
        return RestartDecision("end", how, last.code)
    if last.complete:
        # A new process would find nothing to train, and would not do what came after it either.
        return RestartDecision("failed", f"{how}, after the training was complete", last.code)
    if last.code != exit_codes.POISONED and _again(ends, rules):
        return RestartDecision(
            "end", f"{how}; twice in a row at the same place ({last.place})", last.code
        )
    return _within_budget(ends, rules, how)


def _again(ends: Sequence[ProcessEnd], rules: RestartRules) -> bool:
    """Tell whether it is the same bug twice: same known place, same code, two short lives.

    A signal hides the code: it ended the interpreter after the program had failed at that place
    (gloo's threads abort an exit at times; one that does not end is killed).
    """
    if len(ends) < 2 or not ends[-1].place:
        return False
    before, last = ends[-2:]
    short = max(before.lived, last.lived) < rules.short_life
    hidden = before.by_signal or last.by_signal
    return short and before.place == last.place and (hidden or before.code == last.code)


def _within_budget(ends: Sequence[ProcessEnd], rules: RestartRules, how: str) -> RestartDecision:
    last = ends[-1]
    since = last.at - rules.window if rules.window else float("-inf")
    spent = sum(end.at > since for end in ends)
    if spent <= rules.replacements:
        return RestartDecision("replace", how)
    span = f"within {rules.window:g} s" if rules.window else "in all"
    return RestartDecision(
        "end",
        f"{how}; replaced {rules.replacements} times {span}, all that --max-restarts allows",
        last.code or 1,
    )
