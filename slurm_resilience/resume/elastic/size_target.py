"""The number of nodes that an elastic step is to have: all that it may, until a person asks for
another one."""

from __future__ import annotations

import pwd
import threading
from collections.abc import Callable

import msgspec

from slurm_resilience.errors import UsageError
from slurm_resilience.resume.elastic.elastic_size import ElasticSize
from slurm_resilience.wire.messages import ResizeOrder, ResizeTaken

MOST_NAMED = 8
"""Sizes that a refusal lists."""


class AskedSize(msgspec.Struct, frozen=True):
    """A target, and who asked for it."""

    nodes: int = 0
    by: str = ""
    """Empty: it was not asked for, but follows from srun's options."""


class SizeTarget:
    """The target of one supervised srun: it holds in all its attempts. Each method may be called
    from any thread."""

    def __init__(
        self, size: ElasticSize | None = None, on_news: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            size: what srun's options ask for; None: the step keeps its size.
            on_news: called when there is another target.
        """
        self._size = size
        self._on_news = on_news
        self._lock = threading.Lock()
        self._present = AskedSize(size.most if size is not None else 0)
        self.keep: Callable[[AskedSize], None] = lambda _: None
        """Writes a target down for a requeue of the job; the supervisor's own thread calls it."""

    @property
    def present(self) -> AskedSize:
        """Return the target now."""
        with self._lock:
            return self._present

    def take(self, order: ResizeOrder) -> ResizeTaken:
        """Take a person's target.

        Raises:
            UsageError: the step cannot have this size.
        """
        check_size(self._size, order.nodes)
        asked = AskedSize(order.nodes, _user(order.uid))
        with self._lock:
            before = self._present.nodes
            if before != order.nodes:
                self._present = asked
        self._on_news()
        return ResizeTaken(order.nodes, before)

    def restore(self, asked: AskedSize) -> None:
        """Go on with the target that this srun had before its job was requeued, if it can."""
        if self._size is not None and asked.by and asked.nodes in self._size.reached:
            with self._lock:
                self._present = asked


def check_size(size: ElasticSize | None, nodes: int) -> None:
    """Check that a step can have so many nodes.

    Raises:
        UsageError: it cannot.
    """
    if size is None:
        raise UsageError("its srun keeps its size: it has no --auto-resume-max-nodes, or sizes")
    reached = size.reached
    if nodes in reached:
        return
    if nodes < size.core:
        raise UsageError(f"{nodes} nodes: the step keeps the {size.core} that it was started on")
    if nodes > size.most:
        raise UsageError(f"{nodes} nodes: the step has at most {size.most}, as its srun says")
    near = sorted(sorted(reached, key=lambda each: abs(each - nodes))[:MOST_NAMED])
    raise UsageError(f"{nodes} nodes is no size of this step; near are {', '.join(map(str, near))}")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
