"""A training that announces itself: then its step can live on when a node of it dies."""

from __future__ import annotations

import contextlib
from pathlib import Path

from slurm_resilience.errors import SresError
from slurm_resilience.mesh.observer import Observer
from slurm_resilience.resume import report
from slurm_resilience.resume.context import Context
from slurm_resilience.resume.live_step import join_step
from slurm_resilience.resume.live_step import training as word
from slurm_resilience.resume.live_step.join_step import ASKED, LAUNCHER, SeatMap, can_live, wants
from slurm_resilience.resume.srun.step import SrunStep, find_step
from slurm_resilience.resume.ward import Ward


class Announced:
    """What the supervisor hears of the training, over all attempts."""

    def __init__(self, context: Context, ward: Ward) -> None:
        self._context = context
        self._ward = ward
        self._told = False
        self.lives = bool(ward.directory) and can_live(context.command, context.environment)
        """Steps are started so that they outlive a node."""

    def meet(self, stack: contextlib.ExitStack) -> tuple[Path, Observer] | None:
        """The training and where it meets, once it has announced itself.

        Args:
            stack: ends the watching.
        """
        meet = word.meeting(self._ward.directory)
        if meet is None:
            return None
        try:
            training = stack.enter_context(word.watch(meet, self._context.wake.set))
        except (SresError, OSError) as error:
            report.say(f"the training cannot be watched ({error}): it is stopped when a node dies")
            self.lives = False
            return None
        self._context.wake.set()
        return meet, training

    def world(self, step: SrunStep, nodes: tuple[str, ...], training: Observer) -> SeatMap | None:
        """Who sits where; None: not everybody has been seen yet.

        Args:
            step: the attempt's.
            nodes: those that it was started on.
            training: the running one.
        """
        picture = training.picture()
        sits = {peer.seat: peer.node for peer in picture.peers}
        seats = max((peer.seats for peer in picture.peers), default=0)
        if not picture.running or not set(nodes) <= set(sits.values()) or len(sits) < seats:
            return None
        context = self._context
        found = find_step(step, context.client, context.allocation.id, context.host)
        return join_step.world(nodes, sits, found.tasks if found else 0, seats)

    def advise(self) -> None:
        """The program could live on, and its step was not started for it: said once."""
        if self.lives or self._told or word.meeting(self._ward.directory) is None:
            return
        self._told = True
        context = self._context
        if context.environment.get(ASKED) != "0" and not wants(
            context.command, context.environment
        ):
            report.say(
                "this program can go on when a node dies, but its step was not started so: write "
                f"export {ASKED}=1 before srun, or start it by python -m {LAUNCHER}"
            )
