"""A training that announces itself: then its step can live on when a node of it dies."""

from __future__ import annotations

import contextlib
from pathlib import Path

from slurm_resilience.errors import SresError
from slurm_resilience.mesh.observer import Observer
from slurm_resilience.resume import join, report, word
from slurm_resilience.resume.join import ASKED, LAUNCHER, World, can_live, wants
from slurm_resilience.resume.means import Means
from slurm_resilience.resume.step import Step, find_step
from slurm_resilience.resume.ward import Ward


class Announced:
    """What the supervisor hears of the training, over all attempts."""

    def __init__(self, means: Means, ward: Ward) -> None:
        self._means = means
        self._ward = ward
        self._told = False
        self.lives = bool(ward.directory) and can_live(means.command, means.environment)
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
            training = stack.enter_context(word.watch(meet, self._means.wake.set))
        except (SresError, OSError) as error:
            report.say(f"the training cannot be watched ({error}): it is stopped when a node dies")
            self.lives = False
            return None
        self._means.wake.set()
        return meet, training

    def world(self, step: Step, nodes: tuple[str, ...], training: Observer) -> World | None:
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
        means = self._means
        found = find_step(step, means.client, means.allocation.id, means.host)
        return join.world(nodes, sits, found.tasks if found else 0, seats)

    def advise(self) -> None:
        """The program could live on, and its step was not started for it: said once."""
        if self.lives or self._told or word.meeting(self._ward.directory) is None:
            return
        self._told = True
        means = self._means
        if means.environment.get(ASKED) != "0" and not wants(means.command, means.environment):
            report.say(
                "this program can go on when a node dies, but its step was not started so: write "
                f"export {ASKED}=1 before srun, or start it by python -m {LAUNCHER}"
            )
