"""Get ready for the loss of a node that is suspected: a launcher loads its interpreter on a spare.

It is a join step that waits for a file. If the node is lost, the file is written, with the
variables as they are by then, and the launcher takes the node's part; else it ends by itself, or is
ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event as ThreadEvent

import msgspec

from slurm_resilience.errors import SresError
from slurm_resilience.mesh.rank_variables import HOLD_PREFIX
from slurm_resilience.mesh.rendezvous import HOLD, HOLD_SECONDS
from slurm_resilience.resume.attempt import write_file
from slurm_resilience.resume.context import SupervisorContext
from slurm_resilience.resume.live_step.live_events import FoundNodes, StartSearch
from slurm_resilience.resume.live_step.node_search import NodeSearch, find_spare
from slurm_resilience.resume.srun.step import SrunStep, end_step, find_step
from slurm_resilience.resume.task_labels import TaskNumbers

LAST_MOMENT_SECONDS = 5.0
"""Before the launcher ends by itself it is not taken any more."""
_MAY_CHANGE = frozenset({"SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"})
"""The launcher is told of these when it goes on; all else is as it was expected, or it is not
taken."""

Line = Callable[[Mapping[str, str]], tuple[list[str], dict[str, str]]]
"""Returns srun's words and its environment, for a join step with these variables."""


@dataclass(frozen=True)
class PreparedJoin:
    """A join step whose launcher waits."""

    node: str
    variables: Mapping[str, str]
    file: Path
    step: SrunStep
    until: float
    """Monotonic: it is not taken later."""

    def fits(self, node: str, variables: Mapping[str, str]) -> bool:
        """Return whether it is the join step that is needed now."""
        changed = {
            name
            for name in {*variables, *self.variables}
            if variables.get(name) != self.variables.get(name)
        }
        return node == self.node and changed <= _MAY_CHANGE


class Preparation:
    """The join step that waits, if there is one."""

    def __init__(self, context: SupervisorContext, directory: str) -> None:
        """
        Args:
            context: of the supervised srun.
            directory: of the attempt; the launcher sees it too.
        """
        self._context = context
        self._directory = Path(directory)
        self._search: NodeSearch | None = None
        self._begin: Callable[[FoundNodes], None] = lambda _: None
        self._prepared: PreparedJoin | None = None
        self._number = 0

    def look_for_spare(self, wanted: StartSearch, begin: Callable[[FoundNodes], None]) -> None:
        """Look for a spare in a thread, unless one is looked for, or waits.

        Args:
            wanted: the suspected node, and those that the step still has.
            begin: called by `look` with a spare that was found.
        """
        if self._search is not None or self._prepared is not None:
            return

        def search(_: ThreadEvent) -> FoundNodes | None:
            return find_spare(self._context, wanted)

        context = self._context
        self._begin = begin
        self._search = NodeSearch(search, context.wake.set, context.host_calls.start_thread)

    def look(self) -> None:
        """Begin with a spare that was found; end what waited in vain."""
        now = self._context.clock.monotonic()
        waiting = self._prepared
        if waiting is not None and (now > waiting.until or not waiting.step.running):
            self._end_waiting()
        if self._search is not None and self._search.over:
            found, self._search = self._search.found, None
            if found is not None and found.nodes:
                self._begin(found)

    def start(
        self,
        node: str,
        variables: Mapping[str, str],
        line: Line,
        numbers: TaskNumbers | None = None,
    ) -> None:
        """Start a join step that waits.

        Args:
            node: the spare.
            variables: of its tasks, as they are expected to be.
            line: makes its srun.
            numbers: of its tasks among all, where srun labels their lines.
        """
        context = self._context
        self._number += 1
        file = self._directory / f"{HOLD_PREFIX}{self._number}"
        with contextlib.suppress(SresError, OSError):
            file.unlink(missing_ok=True)
            argv, environment = line({**variables, HOLD: str(file)})
            step = context.start_join(argv, environment, numbers)
            until = context.clock.monotonic() + HOLD_SECONDS - LAST_MOMENT_SECONDS
            self._prepared = PreparedJoin(node, dict(variables), file, step, until)
            context.events.write("preparing", nodes=[node])

    def note_as_own(self) -> None:
        """Let the waiting step not make its spare look busy."""
        context = self._context
        if self._prepared is None:
            return
        info = find_step(self._prepared.step, context.client, context.allocation.id, context.host)
        if info is not None:
            context.allocation.own_steps.add(info.step)

    def take(self, node: str, variables: Mapping[str, str]) -> SrunStep | None:
        """Let the waiting step go on as the join step that is needed; None: it is another one, or
        none waits."""
        waiting = self._prepared
        now = self._context.clock.monotonic()
        if waiting is None or now > waiting.until or not waiting.step.running:
            return None
        if not waiting.fits(node, variables):
            self._end_waiting()
            return None
        draft = waiting.file.with_suffix(".new")
        try:
            write_file(draft, msgspec.json.encode(dict(variables)))
            draft.replace(waiting.file)
        except OSError:
            self._end_waiting()
            return None
        self._prepared = None
        return waiting.step

    def end(self) -> None:
        """End what waits."""
        if self._search is not None:
            self._search.stop()
            self._search = None
        self._end_waiting()

    def _end_waiting(self) -> None:
        waiting, self._prepared = self._prepared, None
        if waiting is not None and waiting.step.running:
            context = self._context
            end_step(
                waiting.step,
                context.client,
                context.allocation.id,
                context.host,
                grace=0.0,
                at_once=True,
            )
