"""All sruns of one attempt: one in the job, and one in each of its companions."""

from __future__ import annotations

from slurm_resilience.resume.srun.stderr_reader import EndedTasks
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.srun.task_reports import StepReports

_BY_ITSELF = "Exited"
"""srun's word for a task that ended with an exit code of its own."""


class StepSet:
    """One attempt's sruns. Its words and its end are those of the set."""

    def __init__(self, main: SrunStep, expected: int = 1) -> None:
        """
        Args:
            main: the one in the job itself.
            expected: sruns that it is to have.
        """
        self.main = main
        self.parts = [main]
        self.expected = expected

    @property
    def is_complete(self) -> bool:
        """Return whether all of its sruns have been started."""
        return len(self.parts) == self.expected

    @property
    def running(self) -> bool:
        return any(part.running for part in self.parts)

    @property
    def speaker(self) -> SrunStep:
        """Return the srun that tells of the end: the first that failed, else the job's own."""
        failed = [part for part in self.parts if not part.running and part.code]
        return min(failed, key=lambda part: part.ended_at, default=self.main)

    @property
    def code(self) -> int:
        """Return the exit code of the one that speaks; 0 while all that ended have ended well."""
        return self.speaker.code

    @property
    def reports(self) -> StepReports:
        """Return what slurmstepd has told of the tasks of all parts."""
        return self.main.reports

    @property
    def ran_for(self) -> float:
        return self.main.ran_for

    @property
    def killed_by(self) -> int:
        """Return the signal by which srun itself was ended, if not by us, or 0."""
        return self.speaker.killed_by

    @property
    def cancelled(self) -> bool:
        """Return whether Slurm reported that one of its steps was cancelled."""
        return any(part.cancelled for part in self.parts)

    @property
    def aborted(self) -> bool:
        """Return whether Slurm ended one of its steps, and its srun had given no cause before."""
        return any(part.aborted for part in self.parts)

    @property
    def ends_from_outside(self) -> bool:
        """Return whether Slurm, srun or a signal ends one of its steps, or could not start it."""
        return any(part.ends_from_outside for part in self.parts)

    @property
    def prolog_nodes(self) -> frozenset[str]:
        """Return the nodes on which the job's prolog failed as the attempt was to begin there."""
        return frozenset(name for part in self.parts for name in part.prolog_nodes)

    @property
    def failed_nodes(self) -> frozenset[str]:
        """Return the nodes that Slurm gave up while the attempt ran."""
        return frozenset(name for part in self.parts for name in part.failed_nodes)

    @property
    def ended_tasks(self) -> list[EndedTasks]:
        """Return what the sruns reported of tasks that did not end well."""
        return [ended for part in self.parts for ended in part.ended_tasks]

    def wait(self, seconds: float) -> bool:
        """Wait for the end of all of them; True when it came within this time for each."""
        return all(part.wait(seconds) for part in self.parts)

    def lost_part(self) -> SrunStep | None:
        """Return an srun that ended so that the others would wait in vain; None: there is none.

        Tasks that end with codes of their own leave the others to go on, as they do in one step,
        but not where Slurm had the part ended: a task that saves its work then ends as it likes.
        """
        if not self.running:
            return None
        for part in self.parts:
            told = part.told_end
            by_slurm = told.cancelled or told.aborted
            if part.running or not (part.code or by_slurm):
                continue
            ended = part.ended_tasks
            by_itself = bool(ended) and all(task.how.startswith(_BY_ITSELF) for task in ended)
            is_ended = by_slurm or part.cancelled or part.failed_nodes
            if is_ended or not by_itself or part.ends_others:
                return part
        return None
