"""The commit point of a step, `with s.update():`.

It is passed at each step, mostly with caches that a step of torch has just filled with other
things: then each function that is called, and each object that is asked, comes from memory anew. So
what happens in every step stands here, side by side, and what happens seldom is called.
"""

from __future__ import annotations

from slurm_resilience.training import inject
from slurm_resilience.training.participant import Participant
from slurm_resilience.training.watch.progress import COLLECTIVE


class Update:
    """Encloses the change of the state: it is finished, or this rank's state is void."""

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._updates = participant.updates
        self._progress = participant.healer.progress
        self._watched = participant.guards.state
        self._replicas = participant.guards.replicas
        self._loaders = participant.loaders
        self._certifies = participant.healer.certifies
        self._in_parts = participant.options.replica_size > 1
        self._planned_end = participant.planned_end
        self._keeps_copies = participant.healer.keeps_copies

    def __enter__(self) -> None:
        """Begin to change the state.

        Raises:
            UsageError: an update is under way, or nothing is tracked, or gradients were not
                exchanged.
            RuntimeError: an earlier update was left by an exception.
            Interrupted: the world is over, or a model is in parts and no rank finishes this step.
        """
        participant, updates, progress = self._participant, self._updates, self._progress
        watched, watch = self._watched, participant.watch
        if updates.under_way or progress.dirty or progress.step < 0:
            participant.refuse_update()
        group = participant.group_now or participant.group
        if group.nccl.is_used and group.nccl.runs_ahead:
            # The host is ahead of it: gradients are complete only when it is done with them.
            if watch is not None:
                watch.mark(COLLECTIVE)
            group.nccl.settle()
        if group.sockets.lost() or participant.mesh.is_left:
            participant.leave_if_cut()
        if updates.microbatch_step is not None:
            updates.microbatch_step.refuse_unfinished()
        if (wrapper := group.wrappers.unreduced()) is not None:
            participant.refuse_unreduced(wrapper)
        if not watched.is_done:
            watched.begin(asked_step=updates.asked_step, loaders=self._loaders.opened)
        certify = self._certifies and participant.healer.is_certificate_due(progress.step)
        is_due = certify or progress.step >= self._replicas.due_at
        if is_due and self._replicas.due(progress.step, certify=certify):
            participant.compare_ranks()
        # Gradients are complete here, and another rank may have committed already: from now on
        # the step is finished even if the world ends meanwhile.
        updates.under_way = True
        if self._in_parts:
            participant.come_through()
        if watch is not None:
            watch.progress.mark("update")
        progress.dirty = True
        if not watched.is_done and watched.looks_closely:
            watched.entered(group.collectives())
        if inject.is_possible:
            participant.point("update")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End an update; one that an exception leaves has left the state void."""
        participant, updates, progress = self._participant, self._updates, self._progress
        watched, watch = self._watched, participant.watch
        try:
            if kind is not None:
                return
            group = participant.group_now or participant.group
            if not watched.is_done and watched.looks_closely:
                watched.left(group.collectives())
            if self._loaders.opened:
                self._loaders.commit()
            progress.step += 1
            updates.updated(tell=group.rank == 0)
            progress.dirty = False
            if (tracked := participant.healer.tracked) is not None:
                tracked.mark()
        finally:
            # Not earlier: an interruption before it is counted would make a whole state void, and
            # one before it is marked would have the next step repeated with other random numbers.
            updates.under_way = False
        if self._keeps_copies:
            participant.healer.committed()
        watched.commit()
        if self._loaders.opened:
            participant.weights.committed()
        if watch is not None:
            watch.progress.commit(progress.step)
        if inject.is_possible:
            participant.point("after-update")
        if not self._loaders.opened:
            if (mesh := participant.mesh).news != self._planned_end.seen_news:
                participant.change_world()
            if mesh.is_left:
                participant.check()
