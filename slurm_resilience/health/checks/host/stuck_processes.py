"""Processes that wait in the kernel (state D) round after round.

Watched, never acted on: most wait for a file server that all nodes share. Five rounds: gpud's
default.
"""

from __future__ import annotations

from slurm_resilience.health.check import Check, CheckContext, Judgement
from slurm_resilience.health.checks.host.process_states import ProcessInState, read_states
from slurm_resilience.model import Finding, Severity

ROUNDS = 5
NAMED = 3
"""Processes that the finding names."""


def probe(context: CheckContext) -> tuple[ProcessInState, ...]:
    return read_states(context, "D")


def judge(seen: tuple[ProcessInState, ...], context: CheckContext) -> Judgement:
    if len(context.earlier) < ROUNDS - 1:
        return Judgement(f"{len(seen)} processes wait in the kernel; not yet {ROUNDS} rounds")
    stuck = set(seen).intersection(*map(set, context.earlier[-(ROUNDS - 1) :]))
    if not stuck:
        return Judgement(f"no process waits in the kernel for {ROUNDS} rounds")
    named = ", ".join(f"{one.name} ({one.pid})" for one in sorted(stuck)[:NAMED])
    text = f"{len(stuck)} processes wait in the kernel for {ROUNDS} rounds: {named}"
    finding = Finding(CHECK.name, Severity.MONITOR, text, context.now, evidence=named)
    return Judgement(text, (finding,))


CHECK = Check(
    "stuck_processes",
    probe,
    judge,
    remembers=ROUNDS - 1,
    source="/proc/*/stat",
    threshold=f"the same process in state D for {ROUNDS} rounds",
    asks_for=(Severity.MONITOR,),
)
