"""Dead processes that their parents do not collect, round after round.

Watched, never acted on: a program's mistake. 20 for five rounds: the limit of AWS's node monitoring
agent.
"""

from __future__ import annotations

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.health.checks.host.process_states import read_states
from slurm_resilience.model import Finding, Severity

ROUNDS = 5


def probe(context: CheckContext) -> int:
    return len(read_states(context, "Z"))


def judge(seen: int, context: CheckContext) -> Judgement:
    limit = context.settings.zombies
    counts = (*context.earlier, seen)
    text = f"{seen} dead processes are not collected"
    if len(counts) < ROUNDS or min(counts) < limit:
        return Judgement(text)
    text = f"{text} (limit {limit}, for {ROUNDS} rounds)"
    return Judgement(text, (Finding(CHECK.name, Severity.MONITOR, text, context.now),))


CHECK = Check(
    "zombies",
    probe,
    judge,
    remembers=ROUNDS - 1,
    source="/proc/*/stat",
    threshold=f"zombies (20) for {ROUNDS} rounds",
    asks_for=(Severity.MONITOR,),
)
