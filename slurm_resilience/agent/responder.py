"""Answer sresctld: each kind of question in a thread of its own, so that none waits for another.

One of each kind is under way. A question that this sresd does not know is refused with its version:
sresctld's may be newer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from slurm_resilience import __version__
from slurm_resilience.errors import SresError
from slurm_resilience.wire.frames import UNREADABLE
from slurm_resilience.wire.messages import NodeAnswer, NodeRequest

log = logging.getLogger("sresd.responder")

MAX_ANSWER_BYTES = 1 << 20


class Answerer(NamedTuple):
    """The way to answer one kind of question."""

    question: type[msgspec.Struct]
    answer: Callable[[Any], msgspec.Struct]
    """May raise an SresError: its text is the refusal."""


class Responder:
    """Answers questions; `take` is called in the link's thread and does not wait."""

    def __init__(
        self, answerers: Mapping[str, Answerer], send: Callable[[int, NodeAnswer], None]
    ) -> None:
        """
        Args:
            answerers: by kind of question.
            send: takes the number of the session that asked, and the answer.
        """
        self._answerers = answerers
        self._send = send
        self._lock = threading.Lock()
        self._busy: set[str] = set()

    def take(self, session: int, request: NodeRequest) -> None:
        """Answer a question of a session with sresctld."""
        answerer = self._answerers.get(request.kind)
        if answerer is None:
            text = f"sresd {__version__} does not know '{request.kind[:50]}'"
            known = ", ".join(self._answerers)
            self._refuse(session, request, f"{text}, only {known}: install sresctld's version")
            return
        with self._lock:
            is_busy = request.kind in self._busy
            self._busy.add(request.kind)
        if is_busy:
            self._refuse(session, request, f"the {request.kind} asked for before still runs")
            return
        thread = threading.Thread(
            target=self._work,
            args=(session, request, answerer),
            name=request.kind,
            daemon=True,  # a check that hangs in the kernel must not keep sresd from ending
        )
        try:
            thread.start()
        except RuntimeError as error:
            # A job may have taken all process numbers: sresctld still hears this node.
            with self._lock:
                self._busy.discard(request.kind)
            self._refuse(session, request, f"this node can start nothing: {error}")

    def _work(self, session: int, request: NodeRequest, answerer: Answerer) -> None:
        try:
            question = msgspec.msgpack.decode(request.body, type=answerer.question)
            body = msgspec.msgpack.encode(answerer.answer(question))
            answer = NodeAnswer(request.id, msgspec.Raw(body))
            if len(body) > MAX_ANSWER_BYTES:
                answer = NodeAnswer(request.id, refused=f"the answer has {len(body)} bytes")
        except UNREADABLE as error:
            answer = NodeAnswer(request.id, refused=f"the question cannot be read: {error}")
        except SresError as error:
            answer = NodeAnswer(request.id, refused=str(error))
        except Exception as error:
            log.exception("the question %s could not be answered", request.kind)
            answer = NodeAnswer(request.id, refused=f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._busy.discard(request.kind)
        self._send(session, answer)

    def _refuse(self, session: int, request: NodeRequest, text: str) -> None:
        self._send(session, NodeAnswer(request.id, refused=text))
