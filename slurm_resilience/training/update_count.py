"""Count batches and updates, to warn of a loop that would not do what it seems to."""

from __future__ import annotations

import logging

from slurm_resilience.training.elastic.microbatch_step import MicrobatchStep

log = logging.getLogger("sres.training")

MANY_BATCHES = 100
"""After so many without an update one was forgotten."""
COUNT_BY_SESSION = "Give s.loader steps=, or go on from s.step: range(s.step, …)"


class UpdateCount:
    """Counts over all worlds of one process; each warning comes once."""

    def __init__(self) -> None:
        self.under_way = False
        """Between the begin and the end of an update."""
        self.asked_step = False
        """The program has asked for the step, so its loop can go on from there."""
        self._asked_at = 0
        """Batches before it did, in this loop."""
        self._batches = 0
        self._began = 0
        """Batches before this loop."""
        self._early = 0
        """Batches of the last loop over a loader, if it ended before the loader did, and without a
        question for the step; else 0."""
        self._updates: int | None = None
        """Since a loader gave a batch; None: no loop over a loader is under way."""
        self._waiting = 0
        """Batches since the last update."""
        self._left_over = 0
        """Those at the end of the last loop over a loader."""
        self._updates_after = 0
        """Updates since that loop was left."""
        self._between = 0
        """Updates since the last loop, for none of its batches, and without a question for the
        step."""
        self._spent_after: int | None = None
        """Batches after which a loader had no other one; None: its loop was left before."""
        self.microbatch_step: MicrobatchStep | None = None
        """The one under way, in a loop over microbatches."""
        self._told: set[str] = set()
        """Names of what was warned of."""

    @property
    def after_update(self) -> bool:
        """True when the loop has committed its batch, and not asked for the next one yet."""
        return bool(self._updates)

    @property
    def is_broken_off(self) -> bool:
        """True when the last loop over a loader has batches that no update has used."""
        return self._waiting + self._left_over > 0

    def ask(self) -> None:
        """Note that the program is told its step."""
        if not self.asked_step:
            self.asked_step, self._asked_at = True, self._batches

    def batch_given(self) -> None:
        """Count a batch; after many without an update, warn."""
        self._batches += 1
        self._updates = self._left_over = 0
        self._spent_after = None
        self._waiting += 1
        if self._batches == MANY_BATCHES:
            self.warn_if_missing()

    def spent(self) -> None:
        """Note that a loader has no batch left."""
        self._spent_after = self._batches
        self.warn_if_missing()

    def _is_new(self, what: str) -> bool:
        """Tell whether nothing was told of this yet; from now on, it was."""
        is_new = what not in self._told
        self._told.add(what)
        return is_new

    def loop_begun(self) -> None:
        """Note that a loop over a loader begins; warn of an update between it and the last one."""
        if self._between and self._is_new("between"):
            log.warning(
                "an update between two loops over s.loader, for no batch (a schedule of epochs?): "
                "when the function is called again after a fault, the first loop has no batch "
                "left, and this update is made once more. Do it in the update of the loop's last "
                "batch (`if (s.step + 1) % steps_of_an_epoch == 0: schedule.step()`)"
            )
        self._between = 0

    def loop_left(self) -> None:
        """Note that no loop over a loader is under way."""
        self._note_end()
        self._left_over, self._waiting, self._updates_after = self._waiting, 0, 0
        self._updates, self.asked_step = None, False
        self.microbatch_step = None

    def updated(self, *, tell: bool) -> None:
        """Count an update. A fault between two for one batch would skip the second: warn.

        Args:
            tell: this rank warns, for all.
        """
        self._told.add("missing")
        self._waiting = 0
        if self._updates is None:
            if self._batches:
                self._updated_after(tell)
            return
        self._updates += 1
        if self._updates == 2 and self._is_new("second") and tell:
            log.warning(
                "two `with s.update():` for one batch: a fault between them skips the second; "
                "put all optimizers of a batch into one"
            )

    def _updated_after(self, tell: bool) -> None:
        """Count an update after a loop that has ended: the first may be for all batches that the
        loop had left over, a second one is for one that was read long before, or given again."""
        self._updates_after += 1
        if self._updates_after == 1:
            spent = self._spent_after is not None and not self._left_over
            self._between = int(tell and spent and not self.asked_step)
            if self.asked_step:
                self._spent_after = None  # it knows where to go on
        is_again = self._left_over > 1 or self._spent_after is not None
        if self._updates_after != 2 or not is_again or not self._is_new("list"):
            return
        if tell and self._left_over > 1:
            log.warning(
                "%d batches were read before their steps (list?): a fault leaves out those "
                "that no update has used. Take each batch in its own step",
                self._left_over,
            )
        elif tell:
            log.warning(
                "updates go on after the loop over s.loader (itertools.cycle?): after a fault the "
                "training ends where the loader does. Give it epochs=, or go on from s.step"
            )

    def _note_end(self) -> None:
        """Note whether a loop that ends here may have counted its steps by itself. A question after
        the last update says nothing, and one batch is too few to see another one."""
        count, self._began = self._batches - self._began, self._batches
        if count > 0:
            knows_place = self.asked_step and self._asked_at < self._batches
            is_early = count > 1 and self._spent_after is None and not knows_place
            self._early = count if is_early else 0

    def warn_if_left_early(self, step: int) -> None:
        """Warn, at the end of the function, if it was entered at a step that its loop did not ask
        for, and has left batches over.

        Args:
            step: at which it was entered.
        """
        self._note_end()
        if step > 0 and self._early:
            log.warning(
                "the function was entered at step %d, and has ended before s.loader did, without "
                "asking s.step: if a count of its own ends the loop (range, enumerate, islice), "
                "it has made more steps than without the fault. %s",
                step,
                COUNT_BY_SESSION,
            )

    def warn_if_missing(self) -> None:
        """Warn if there were batches and no update."""
        if self._batches and self._is_new("missing"):
            log.warning(
                "%d batches and not one `with s.update():` around opt.step(): no step is kept",
                self._batches,
            )
