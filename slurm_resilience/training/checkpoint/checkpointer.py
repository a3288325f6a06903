"""`Checkpointer`: saves in the background, finds the newest good checkpoint, loads it."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import CheckpointError, UsageError
from slurm_resilience.training import thread_ends
from slurm_resilience.training.checkpoint import loading, state_tree, writing
from slurm_resilience.training.checkpoint.agreement import PartFailed, SaveAgreement, one_line
from slurm_resilience.training.checkpoint.catalog import CheckpointCatalog
from slurm_resilience.training.checkpoint.certificates import CertifyOrder
from slurm_resilience.training.checkpoint.directory_claim import DirectoryClaim
from slurm_resilience.training.checkpoint.staging import StagingBuffers

log = logging.getLogger(__name__)

SLOW_SECONDS = 60.0
"""A save that another one waits for, or the end of the training, is told of from so many seconds
on; and each time when that has doubled."""
PARTED_SECONDS = 2.0
"""A rank's death breaks the connections of a save at once; the world is left so much later."""


@dataclass
class Counts:
    """Counts of the saves of this process, by outcome."""

    saved: int = 0
    failed: int = 0
    skipped: int = 0
    in_a_row: int = 0
    """Failures since the last one that went well."""
    last: int = -1
    """Step of the last one that went well."""
    staging_ms: float = 0.0
    """Milliseconds for which the last one held up the step."""
    writing_s: float = 0.0
    """Seconds that the last one took in the background."""
    error: str = ""
    """The reason of the last failure."""
    skipped_in: dist.ProcessGroup | None = None
    """The group of the last save, if that was skipped: on all its ranks alike."""


class Checkpointer:
    """Checkpoints in a shared directory: asynchronous, atomic, verified; for any number of ranks.

    Only one save is under way at a time. One that comes before the last has been written is
    skipped, on all ranks alike, with a log line: a slow disk never holds up a step. Where that was
    the last one, `s.loader` makes up for it when it has no batch left. A save that
    fails is logged and counted (`counts`) and training goes on; a load that fails raises.

    Values other than modules and optimizers are taken from one rank; name those that differ from
    rank to rank in ``per_rank``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int = 0,
        keep: int = 2,
        verify: bool = True,
        per_rank: Collection[str] = (),
        prefer_certified: bool = False,
    ) -> None:
        """
        Args:
            directory: on a disk that all ranks share; made if need be.
            every: steps between checkpoints, for `due`; 0: never.
            keep: good checkpoints to keep, at least 1. With 2, a damaged newest one costs no more
                than the steps between two.
            verify: read and check all content before it is used; else only names and sizes.
            per_rank: names in the state whose values differ between ranks, e.g. a generator's
                state. They come back only in a world of the same size.
            prefer_certified: load the newest checkpoint after which all replicas of the model were
                seen to be equal, even if there are newer ones.

        Raises:
            UsageError: a number is out of range.
            CheckpointError: the directory cannot be used.
        """
        if every < 0 or keep < 1:
            raise UsageError(f"every must be 0 or more and keep 1 or more, not {every} and {keep}")
        self.every, self.keep, self.checks = every, keep, verify
        self.per_rank = frozenset(per_rank)
        self.counts = Counts()
        self._catalog = CheckpointCatalog(directory, prefer_certified=prefer_certified)
        self._claim = DirectoryClaim(self._catalog.path)
        self._stage = StagingBuffers()
        self._jobs: queue.SimpleQueue[writing.SaveJob | CertifyOrder | None] = queue.SimpleQueue()
        self._open: list[writing.SaveJob] = []
        """The saves under way."""
        self._idle = threading.Condition()
        self._thread: threading.Thread | None = None
        self._parted = threading.Event()
        """Set when the ranks part that save together now: all their saves hold it, one that has
        failed, too, and still waits to learn whether it was for that."""
        self._loading: set[int] = set()
        self._slow = (-1, 0.0)
        """Step of the save that was told of as slow, and the seconds that it had taken."""

    def due(self, step: int) -> bool:
        """Tell whether a checkpoint is due after ``step`` completed steps."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def missing(self, step: int, last: int) -> int:
        """Return the newest step up to ``step`` after which one was due; -1: the last one that is
        there, of step ``last`` (-1: none), is as new."""
        due = step - step % self.every if self.every > 0 else -1
        return due if due > max(last, 0) else -1

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        group: dist.ProcessGroup | None = None,
        blocking: bool = False,
    ) -> float:
        """Copy the state to host memory and write it in the background. All ranks call this.

        Args:
            step: completed optimizer steps.
            state: modules, optimizers, things with a state dict, plain values, by name.
            group: the ranks that save together: a gloo group used for nothing else, whose timeout
                is longer than a write takes. None: this process alone. When it breaks, the save
                has failed; a new group may be given next time.
            blocking: wait for the save before, and until this one is written.

        Returns:
            Milliseconds that the copying took.

        Raises:
            UsageError: the state holds what cannot be saved.
        """
        if blocking:
            self.wait()
        with self._idle:
            free = all(job.broken_off.is_set() for job in self._open)
        began = time.perf_counter()
        planner, broken_off = None, self._parted
        if free:
            flat = state_tree.take_apart(state, self.per_rank, SaveAgreement(group).rank)
            planner = self._stage.take(flat, group, broken_off)
            self.counts.staging_ms = (time.perf_counter() - began) * 1e3
        else:
            self._tell_slow()
        job = writing.SaveJob(
            step, planner, group, broken_off, threading.Event(), SYSTEM_CLOCK.monotonic()
        )
        with self._idle:
            self._open.append(job)
            self._catalog.certificates.begin(step)
        self._jobs.put(job)
        try:
            self._work_beside()
        except RuntimeError as error:  # the next save tries again
            log.warning("checkpoint of step %d waits for a thread: %s", step, error)
        if blocking:
            self.wait()
        return (time.perf_counter() - began) * 1e3 if planner is None else self.counts.staging_ms

    def break_off(self) -> None:
        """Note that the ranks which save together part, so that what is under way has failed: it
        ends as soon as it can, and the next save does not wait for that."""
        self._parted.set()
        self._parted = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is being written; False when ``timeout`` seconds were not enough.

        Raises:
            RuntimeError: the system has no thread to give, and there is no ``timeout``.
        """
        try:
            if self._open:
                self._work_beside()
        except RuntimeError:
            if timeout is None:
                raise
        self._tell_slow()
        with self._idle:
            return self._idle.wait_for(lambda: not self._open, timeout)

    def decided(self, timeout: float) -> bool:
        """Wait until it is known of each save whether it is written or skipped; False when
        ``timeout`` seconds were not enough. No rank waits for the writing itself."""
        with self._idle:
            under_way = list(self._open)
        until = SYSTEM_CLOCK.monotonic() + timeout
        return all(
            job.decided.wait(max(0.0, until - SYSTEM_CLOCK.monotonic())) for job in under_way
        )

    def close(self, timeout: float | None = 60.0) -> bool:
        """Finish what is under way and end the thread; False when it did not end in time."""
        done = self.wait(timeout)
        if self._thread is not None:
            self._jobs.put(None)
            if done:
                self._thread.join(timeout)
                self._thread = None
        return done

    def _end(self) -> None:
        """At the end of the process: a training that ends well has called `close` before."""
        self.close(thread_ends.PATIENCE_SECONDS)

    def readable(self) -> int:
        """Return the newest step that looks complete to this rank; -1: none. Cheap, no
        communication.

        Names and sizes are compared with the manifest; content is not read. The peers may rely on
        the answer, so this one is not pruned before the next call.
        """
        return self._catalog.readable()

    def latest(self, group: dist.ProcessGroup | None = None) -> int:
        """Return the newest step with a verified checkpoint; -1: none.

        Args:
            group: ranks that share the reading and come to the same answer; all of them call this.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        self._quiet(group)
        return loading.latest(self._catalog, group, self.checks)

    def load(
        self, step: int, state: dict[str, Any], group: dist.ProcessGroup | None = None
    ) -> None:
        """Load a checkpoint into a state, in place; all ranks of the group call this.

        It may have been written by any number of ranks: tensors are cut anew. Numbers and other
        plain values are put into ``state`` itself.

        Args:
            step: which one.
            state: as it was saved: the same names, modules of the same shapes. Without a value
                of the checkpoint, that one is left out.
            group: the ranks that load together (gloo); None: this process alone.

        Raises:
            CheckpointError: it is damaged, or does not fit; the state may be half loaded then.
            RuntimeError: the group broke meanwhile (a rank died).
        """
        self._quiet(group)
        self._loading.add(step)
        try:
            loading.load(self._catalog, step, state, group, self.checks, self.per_rank)
        finally:
            self._loading.discard(step)
        self._catalog.certificates.loaded(step)

    # -- certified states ---------------------------------------------------------------------

    @property
    def certified(self) -> int:
        """Step of the newest certified checkpoint that this process knows of; -1: none."""
        return self._catalog.certificates.newest

    def certify(self, until: int, *, leads: bool = True) -> None:
        """Note that all replicas were equal after this step: what was saved up to it is certified.

        Args:
            until: the step.
            leads: this rank writes it down for all.
        """
        if self._catalog.certificates.is_awaited:
            self._jobs.put(CertifyOrder(until, leads))

    def doubt(self, after: int, *, leads: bool = True) -> None:
        """Note that replicas differ: what was saved after this step may hold what is wrong. It is
        loaded only where there is nothing else.

        Args:
            after: all replicas were equal then.
            leads: this rank writes it down for all.
        """
        finished: list[int] = []
        try:
            finished = self._catalog.steps() if leads else []
        except CheckpointError as error:
            self._catalog.complain(str(error))
        self._catalog.certificates.doubt(after, finished)

    def begin_at(self, step: int) -> None:
        """Note the step from which the training goes on: what comes after it is done anew."""
        self._catalog.certificates.begin_at(step)

    def prune(self) -> list[str]:
        """Delete all but the newest ``keep`` good checkpoints, and what dead writers left.

        One rank is enough; done after each save. Nothing is deleted where nothing good is left.
        """
        if not writing.current():
            return []
        return self._catalog.prune(
            self.keep,
            writing.me(),
            self._loading | {self._catalog.announced, self.certified},
        )

    def _quiet(self, group: dist.ProcessGroup | None) -> None:
        """Two threads must not use one group at a time. A save of another world may go on."""
        if group is not None:
            with self._idle:
                self._idle.wait_for(lambda: not any(job.group is group for job in self._open))

    def _work_beside(self) -> None:
        """Have saves be written in a thread of their own."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._work, name="sres-checkpoint", daemon=True)
            thread.start()
            self._thread = thread
            thread_ends.at_exit(self._end)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, CertifyOrder):
                self._catalog.certificates.certify(job)
                continue
            saved, failure = False, None
            try:
                saved, failure = self._do(job)
            finally:
                self._catalog.certificates.end(job.step, saved=saved)
                with self._idle:
                    self._open.pop(0)
                    self._idle.notify_all()
                job.decided.set()
            # Not before: a program that waits for this save would not leave its world for so long.
            if failure is not None:
                self._tell_failed(job, failure)

    def _do(self, job: writing.SaveJob) -> tuple[bool, BaseException | None]:
        """Return whether a save went well, and what it failed by, if that is still to be told."""
        counts, began = self.counts, time.perf_counter()
        counts.skipped_in = None
        try:
            writing.write(job, self._catalog)
        except writing.Skipped as reason:
            counts.skipped += 1
            counts.skipped_in = job.group
            if writing.leads(job):
                log.warning("checkpoint of step %d is skipped: %s", job.step, reason)
            return False, None
        except writing.Fenced:
            counts.failed += 1
            counts.error = writing.refusal()
            if writing.leads(job):
                log.error("checkpoint of step %d is refused: %s", job.step, counts.error)
            return False, None
        except BaseException as error:  # torch reports a failed rank by a BaseException
            counts.failed += 1
            counts.error = one_line(error)
            if job.broken_off.is_set():  # the next save may have made its copies already
                return False, None
            self._stage.forget()
            counts.in_a_row += 1
            if job.group is None:  # no world whose end could have broken it off
                self._tell_failed(job, error)
                return False, None
            return False, error
        if job.planner is not None and not job.broken_off.is_set():
            self._stage.learn(job.planner)
        counts.saved += 1
        counts.in_a_row = 0
        counts.last = job.step
        counts.writing_s = time.perf_counter() - began
        if writing.leads(job):
            self._announce(job.step)
        return True, None

    def _tell_failed(self, job: writing.SaveJob, error: BaseException) -> None:
        """Tell of a save that failed, unless the end of its world broke it off."""
        counts, text = self.counts, one_line(error)
        if job.parted(PARTED_SECONDS):
            counts.in_a_row -= 1
            log.debug("checkpoint of step %d is broken off: %s", job.step, text)
            return
        # All have agreed on what a part failed by; a connection is lost to each by itself.
        is_agreed = isinstance(error, PartFailed | CheckpointException)
        if writing.leads(job) or not is_agreed:
            log.error(
                "checkpoint of step %d failed, training goes on without it (%d in a row): %s",
                job.step,
                counts.in_a_row,
                text,
            )

    def _tell_slow(self) -> None:
        """Tell that the save under way takes long: of a disk that hangs nothing else is heard."""
        with self._idle:
            job = next((one for one in self._open if not one.broken_off.is_set()), None)
        if job is None:
            return
        took = SYSTEM_CLOCK.monotonic() - job.began
        step, told = self._slow
        if took < (2 * told if step == job.step else SLOW_SECONDS):
            return
        self._slow = (job.step, took)
        if writing.leads(job):
            log.warning(
                "checkpoint of step %d is still being written after %.0f s, and no other one can "
                "be meanwhile: does the disk of %s hang, on a node?",
                job.step,
                took,
                self._catalog.path,
            )

    def _announce(self, step: int) -> None:
        log.info(
            "checkpoint of step %d: %.0f ms of the step, %.1f s in the background",
            step,
            self.counts.staging_ms,
            self.counts.writing_s,
        )
        writing.report(step)
        if other := self._claim.renew():
            log.error(
                "another training writes its checkpoints into %s as well: %s; each may load what "
                "the other has saved: end one of them, and give each a directory of its own",
                self._catalog.path,
                other,
            )
        try:
            self.prune()
        except (CheckpointError, OSError) as error:
            log.warning("old checkpoints stay: %s", one_line(error))
