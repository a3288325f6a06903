"""When a rank's own work of a step ends and its waiting begins, seen from the gradients.

With DDP the gradients are exchanged while backward still computes, and backward waits only at its
end. The parameter that is used first gets its gradient last: then the own work is done, what
follows is waiting. (With FSDP2 the exchange of parameters is waited for in between, too, so own
times hold some waiting and a straggler stands out less. On a GPU the host runs ahead: own times are
those of the host.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from slurm_resilience.training.watch.watch import Watch


def listen(watch: Watch, module: torch.nn.Module) -> Callable[[], None]:
    """Mark the waiting in each backward of a module.

    Args:
        watch: gets the marks.
        module: with or without DDP around it.

    Returns:
        Call it to stop listening.
    """
    first: Any = next((one for one in module.parameters() if one.requires_grad), None)
    if first is None:
        return lambda: None
    handle = first.register_post_accumulate_grad_hook(watch.progress.wait_begins)
    remove: Callable[[], None] = handle.remove
    return remove
