"""Ask Slurm about jobs that are younger than the last cycle, at most so often.

Any user can name any job id. So a question costs a place in a rate, of the user's own and of all,
and an answer is remembered for a few seconds, a no as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from slurm_resilience.clock import Clock
from slurm_resilience.controller.authorize import no_such_job
from slurm_resilience.errors import NotFound, NotPermitted, WireError
from slurm_resilience.model import Job
from slurm_resilience.wire.limits import Rate

PER_SECOND, AT_ONCE = 4.0, 8.0
"""Questions of all users."""
PER_SECOND_OF_USER, AT_ONCE_OF_USER = 2.0, 4.0
REMEMBER_SECONDS = 5.0
MAX_REMEMBERED = 1000


class _Answer(NamedTuple):
    job: Job | None
    """None: there is no such job."""
    at: float


class JobLookups:
    """Thread safe."""

    def __init__(
        self,
        find_job: Callable[[int], Job],
        clock: Clock,
        hides_jobs: Callable[[], bool] = bool,
        hides_nodes: Callable[[], bool] = bool,
    ) -> None:
        """
        Args:
            find_job: reads one job from Slurm.
            clock: its monotonic time counts.
            hides_jobs: tells whether Slurm hides users' jobs from each other; by default it does
                not.
            hides_nodes: tells whether Slurm hides the state of nodes from users.
        """
        self._find_job = find_job
        self.hides_jobs = hides_jobs
        self.hides_nodes = hides_nodes
        self._clock = clock
        self._lock = threading.Lock()
        self._answers: dict[int, _Answer] = {}
        self._all = Rate(PER_SECOND, AT_ONCE)
        self._of_user = Rate(PER_SECOND_OF_USER, AT_ONCE_OF_USER)

    def known(self, job_id: int) -> Job | None:
        """Return a job that was found a moment ago; None: ask.

        Raises:
            NotPermitted: a moment ago there was no such job.
        """
        with self._lock:
            answer = self._answers.get(job_id)
        if answer is None or self._clock.monotonic() - answer.at > REMEMBER_SECONDS:
            return None
        if answer.job is None:
            raise no_such_job(job_id)
        return answer.job

    def ask(self, job_id: int, uid: int) -> None:
        """Ask Slurm; `known` has the answer then.

        Raises:
            WireError: too many questions.
            SresError: Slurm does not answer.
        """
        if self._is_known(job_id):
            return
        now = self._clock.monotonic()
        with self._lock:
            # The user's own rate first: what is refused there takes nothing from others.
            if not self._of_user.take(uid, now) or not self._all.take("", now):
                raise WireError(f"job {job_id} is not known yet; try again in a few seconds")
        try:
            found: Job | None = self._find_job(job_id)
        except NotFound:
            found = None
        with self._lock:
            now = self._clock.monotonic()
            if len(self._answers) >= MAX_REMEMBERED:
                self._answers = {
                    known: answer
                    for known, answer in self._answers.items()
                    if now - answer.at <= REMEMBER_SECONDS
                }
            self._answers[job_id] = _Answer(found, now)

    def _is_known(self, job_id: int) -> bool:
        try:
            return self.known(job_id) is not None
        except NotPermitted:
            return True
