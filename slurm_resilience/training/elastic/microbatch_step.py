"""One step of a training whose unit is the microbatch: what a loop over it sees."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from slurm_resilience.errors import UsageError
from slurm_resilience.training.data.order import mix
from slurm_resilience.training.data.warn_once import WarnOnce
from slurm_resilience.training.elastic.gradient_sums import GradientSums, agreed
from slurm_resilience.training.elastic.plan import StepSpan, plan
from slurm_resilience.training.state import rng

NO_TOKENS = (
    "a step of microbatches had no tokens on any rank (tokens=0): its gradient is zero, and its "
    "update is made with that"
)


class Turn(enum.Enum):
    """State of a step: WAITING → GIVEN → WAITING … → DONE."""

    WAITING = "the next microbatch is to be asked for"
    GIVEN = "a microbatch was given, and its backward is missing"
    DONE = "the gradients of the whole step are there"


class StepSetting(NamedTuple):
    """Facts of a step that do not depend on its data."""

    size: int
    """Samples of a full microbatch."""
    seed: int
    rank: int
    world: int
    together: int
    """Ranks that hold one copy of the nets together; 1 unless they are added up in a tree."""
    rate_factor: float
    before_exchange: Callable[[], None]
    """Called before the ranks exchange their gradients."""
    check: Callable[[], None]
    """Called before each microbatch: leaves the step where its world is over."""
    asks: Callable[[], None]
    """Called when the program asks how far the training is."""
    warn: WarnOnce


class MicrobatchStep:
    """The microbatches of this rank in one step; iterate over them, once.

    Attributes:
        samples: of all ranks in this step.
        rate_factor: what to multiply the learning rate with, by the policy ``rate``.
    """

    def __init__(
        self,
        span: StepSpan,
        batches: list[Any],
        sizes: Sequence[int],
        consumed: int,
        sums: GradientSums,
        setting: StepSetting,
    ) -> None:
        self._span = span
        self.samples = sum(sizes)
        self._consumed = consumed
        self.rate_factor = setting.rate_factor
        self._setting = setting
        self._share = plan(span, setting.world, setting.together)[setting.rank]
        self._calls = self._share.calls
        self._batches = batches
        self._sizes = sizes
        self._sums = sums
        self._turn = Turn.WAITING
        self._at = -1
        self._tokens: int | None = None

    @property
    def span(self) -> StepSpan:
        """The microbatches of all ranks together, by global number."""
        self._setting.asks()
        return self._span

    @property
    def consumed(self) -> int:
        """Samples of all steps before: what a schedule should follow when the batch changes."""
        self._setting.asks()
        return self._consumed

    def __len__(self) -> int:
        """Microbatches that this rank computes, those included that count for nothing."""
        return len(self._calls)

    def __iter__(self) -> Iterator[Any]:
        """Give this rank's microbatches, each with the random state that is its own.

        Raises:
            UsageError: one was not followed by `backward`, or the step is over, or there is a
                gradient before its first.
            Interrupted: the world is over, and the step is done again in the next one.
        """
        if self._turn is not Turn.WAITING or self._at >= 0:
            raise UsageError("the microbatches of a step come once: loop over them once")
        # Not before: the program may freeze and unfreeze when it has the step.
        self._sums.begin(self._span)
        for at, (number, _) in enumerate(self._calls):
            self._setting.check()
            self._at, self._turn = at, Turn.GIVEN
            self._sums.before(last=at == len(self._calls) - 1)
            rng.seed(mix(mix(self._setting.seed) + number))
            yield self._batches[min(at, len(self._batches) - 1)]
            self.refuse_unfinished(whole=False)

    @property
    def number(self) -> int:
        """Global number of the microbatch that was given last."""
        return self._calls[max(self._at, 0)][0]

    def backward(self, loss: torch.Tensor, tokens: int | None = None) -> None:
        """Call ``loss.backward()``, weighed as a part of the whole step. After the last microbatch
        every parameter has the gradient of the step, over all ranks.

        Args:
            loss: the mean over the microbatch's samples; with ``tokens`` the sum over those.
            tokens: what the loss is a sum over. The gradient is then divided by the tokens of all
                ranks in this step.

        Raises:
            UsageError: there is no microbatch to which the loss belongs, or ``tokens`` is no whole
                number.
        """
        if self._turn is not Turn.GIVEN:
            raise UsageError("step.backward(loss) comes once for each microbatch of the step")
        if self._at > 0 and (tokens is None) != (self._tokens is None):
            raise UsageError("give step.backward tokens= for each microbatch, or for none")
        if self._at > 0 and self._sums.is_touched():
            raise UsageError(
                "the gradients were changed between two microbatches of a step (zero_grad, "
                "clipping, another backward?), so its sum is lost. They begin at zero with each "
                "step: leave zero_grad out, and clip after the loop over the microbatches"
            )
        many = None if tokens is None else _whole(tokens)
        number, counts = self._calls[self._at]
        own = self._sizes[number - self._span.first] if tokens is None else 1
        factor = own / self._setting.size if counts else 0.0
        (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
        self._sums.after(self._at)
        if many is not None:
            self._tokens = (self._tokens or 0) + (many if counts else 0)
        last = self._at == len(self._calls) - 1
        if last:
            self._finish()
        self._turn = Turn.DONE if last else Turn.WAITING

    def _finish(self) -> None:
        self._setting.before_exchange()
        total = self.samples
        if self._tokens is not None:
            total = agreed([self._tokens])[0] if self._setting.world > 1 else self._tokens
        if not total:
            self._setting.warn(NO_TOKENS)
        # A sum over nothing is zero. An end here would be final: the step comes again as it was.
        self._sums.finish(total / self._setting.size if total else math.inf)
        # What is drawn between two steps is the same on every rank.
        following = self._span.first + self._span.count
        rng.seed(mix(mix(mix(self._setting.seed)) + following))

    def refuse_unfinished(self, *, whole: bool = True) -> None:
        """Refuse to go on without the gradients.

        Args:
            whole: of the whole step; else of the microbatches given so far.

        Raises:
            UsageError: some are missing.
        """
        if self._turn is Turn.GIVEN or (whole and self._turn is Turn.WAITING):
            raise UsageError(
                f"step.backward(loss) was called for {self._at + (self._turn is Turn.WAITING)} of "
                f"this rank's {len(self._calls)} microbatches: call it once for each one, in the "
                "loop that takes them (not after a list of them), before s.update()"
            )


def _whole(tokens: int) -> int:
    """Return a number of tokens, which a program may have as a tensor.

    Raises:
        UsageError: it is a fraction, or less than 0.
    """
    number = float(tokens)
    if number < 0 or not number.is_integer():
        raise UsageError(
            f"step.backward: tokens={number:g} must be a whole number, since those of all ranks "
            "are added up exactly. For weights that are fractions, multiply them, and the loss, "
            "by the same number in each microbatch, and round them"
        )
    return int(tokens)
