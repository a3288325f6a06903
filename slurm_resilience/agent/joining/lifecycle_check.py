"""The check `lifecycle`: whether this node's scripts have ended well in this boot.

A node whose scripts failed has no slurmd, and its sresd lives: it says which script failed, so that
sresctld keeps the node out and names the script in its Comment.
"""

from __future__ import annotations

from pathlib import Path

from slurm_resilience.config import LifecycleSettings
from slurm_resilience.health.check import Check, CheckContext, Judgement, Unjudged
from slurm_resilience.lifecycle import identity
from slurm_resilience.lifecycle.run_record import RunOutcome, RunRecord, read_record
from slurm_resilience.model import Finding, Severity

NAME = "lifecycle"
PERIOD_SECONDS = 2.0
"""It reads one small file."""


def checks_of_scripts(settings: LifecycleSettings) -> tuple[Check, ...]:
    """Return the check; none where no scripts are configured."""
    if not settings.directory:
        return ()
    state_dir, severity = Path(settings.state_dir), Severity(settings.asks_for)

    def probe(context: CheckContext) -> RunRecord | None:
        return read_record(state_dir)

    def judge(record: RunRecord | None, context: CheckContext) -> Judgement:
        return judge_record(record, identity.boot_id(), severity, settings.log_dir)

    return (Check(NAME, probe, judge, period=PERIOD_SECONDS),)


def awaits_scripts(settings: LifecycleSettings, state_dir: Path) -> bool:
    """Tell whether scripts are configured, and have not ended well in this boot."""
    if not settings.directory:
        return False
    record = read_record(state_dir)
    is_ours = record is not None and record.boot_id == identity.boot_id()
    return not (record is not None and is_ours and record.outcome is RunOutcome.PASSED)


def judge_record(
    record: RunRecord | None, boot_id: str, severity: Severity, log_dir: str
) -> Judgement:
    """Judge the record of the last run.

    Args:
        record: on this node's disk; None: there is none.
        boot_id: of the present boot.
        severity: of a script that failed.
        log_dir: where the scripts' logs are.

    Raises:
        Unjudged: the scripts did not run in this boot, or do now.
    """
    if record is None or record.boot_id != boot_id:
        raise Unjudged("the lifecycle scripts have not run since the boot: see sres-lifecycle")
    if record.outcome is RunOutcome.UNFINISHED:
        done = len(record.results)
        raise Unjudged(f"the lifecycle scripts run, or were cut off; {done} have ended")
    failed = record.failed
    if failed is None:
        seconds = sum(result.seconds for result in record.results)
        return Judgement(f"{len(record.results)} scripts ran well in {seconds:.1f} s")
    finding = Finding(
        NAME,
        severity,
        failed.in_words,
        failed.at,
        subject=failed.name,
        evidence=f"{Path(log_dir) / failed.name}.log on the node",
    )
    return Judgement(failed.in_words, (finding,))
