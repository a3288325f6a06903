"""Questions that are asked while others are, and while modules are loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Question(Generic[_T]):
    """One that was asked; its answer can be waited for."""

    def __init__(self, ask: Callable[[], _T], *, beside: bool = True) -> None:
        """
        Args:
            ask: asks it.
            beside: in a thread of its own, begun now; else by who needs the answer.
        """
        self._ask = ask
        self._answers: list[_T] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if beside:
            self._thread = threading.Thread(target=self._run, name="question", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._answers.append(self._ask())
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Wait until there is an answer, or none will come, where it was asked already."""
        if self._thread is not None:
            self._thread.join()

    def answer(self) -> _T:
        """Return the answer, once it is there.

        Raises:
            BaseException: what asking raised.
        """
        self.wait()
        if not self._answers and self._error is None:
            self._run()
        if self._error is not None:
            raise self._error
        return self._answers[0]


class Questions:
    """All that are asked within a block; at its end none is open any more.

    Not a pool of `concurrent.futures`: loading that takes longer than most answers.
    """

    def __init__(self, *, beside: bool = True) -> None:
        """
        Args:
            beside: each in a thread of its own; else each by who needs its answer, as where the
                commands that give them run already.
        """
        self._beside = beside
        self._asked: list[Question[object]] = []

    def __enter__(self) -> Questions:
        return self

    def __exit__(self, *_: object) -> None:
        for question in self._asked:
            question.wait()

    def ask(self, ask: Callable[[], _T]) -> Question[_T]:
        """Ask one."""
        question = Question(ask, beside=self._beside)
        self._asked.append(question)  # type: ignore[arg-type]
        return question
