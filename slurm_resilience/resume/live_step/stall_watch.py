"""Tell which seats of a training step, and for how long most have not. Pure."""

from __future__ import annotations

from collections.abc import Set

from slurm_resilience.resume.live_step.live_events import TrainingSeen

STALL_SECONDS = 60.0
"""Between two lines that most seats do not step."""


def steps_without(seen: TrainingSeen, since: int, lost_peers: Set[str]) -> bool:
    """Return whether all processes that live step together, in a later generation than ``since``.

    Args:
        seen: the training now.
        since: the generation in which seats were lost.
        lost_peers: ids of processes on lost nodes: they do not say goodbye.
    """
    running = set(seen.running)
    living = living_seats(seen, lost_peers)
    return seen.generation > since and bool(running) and running >= living


def living_seats(seen: TrainingSeen, lost_peers: Set[str]) -> set[int]:
    """Return the seats with a living process."""
    return {peer.seat for peer in seen.peers if peer.id not in lost_peers}


class StallWatch:
    """Notices that seats wait for others, and none goes on, whatever the reason.

    A node that died unseen looks alive to an observer: its seats stay in the world that is over.
    They may be the only ones there, when a task died beside them and its process is not back.
    """

    def __init__(self) -> None:
        self._stepped: set[str] = set()
        """Ids of all processes that were seen to step: newcomers have nothing to go on with."""
        self._step = -1
        self._since: float | None = None
        self._told = float("-inf")

    def look(
        self, seen: TrainingSeen, lost_peers: Set[str], now: float, *, is_over: bool
    ) -> tuple[int, ...] | None:
        """Return the seats that have waited for so long that it is to be told; None: none has.

        Args:
            seen: the training now.
            lost_peers: ids of processes on lost nodes.
            now: monotonic seconds.
            is_over: the world that is seen has lost seats, and no later one has been formed: a
                process that still looks as if it stepped waits as well, or died unseen.
        """
        self._stepped |= {peer.id for peer in seen.peers if peer.seat in seen.running}
        running: set[int] = set() if is_over else set(seen.running)
        outside = [
            peer for peer in seen.peers if peer.id not in lost_peers and peer.seat not in running
        ]
        stepped = {peer.seat for peer in outside if peer.id in self._stepped}
        # Newcomers have something to go on with where there are others: those let them in soon.
        newcomers = {peer.seat for peer in outside} - stepped if running else set()
        waiting = stepped | newcomers
        goes_on = bool(running) and not waiting
        if goes_on or seen.step > self._step or self._since is None:
            self._step = max(self._step, seen.step)
            self._since = now
        if goes_on or now - max(self._since, self._told) < STALL_SECONDS:
            return None
        self._told = now
        return tuple(sorted(waiting))

    def seconds(self, now: float) -> float:
        """Return for how long they have waited."""
        return 0.0 if self._since is None else now - self._since
