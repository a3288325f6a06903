"""Wait, before an update of a model in parts, until every rank has complete gradients.

A model that every rank holds whole needs none of this: a rank that has its gradients may finish the
step, and a rank that lacks them is healed from it. With a model in parts, the ranks of one part
may have theirs while those of another are cut off in the middle of their own exchange. Finished
here and not there, the step would leave parts of two different models.

So all ranks come to a gate. A rank that gets through knows that all came to it, with complete
gradients. A rank that is cut off inside asks how far the others came: if one of them got through,
all at the gate finish the step, else none does. A rank that got through and died took its step
along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import PeerStatus, View
from slurm_resilience.training.recovery.exceptions import Interrupted

PEER_WORD_SECONDS = 1.0
"""An error of a collective waits so long for the mesh to say which peer went away."""
SHARE_OF_ABORT = 0.8
"""A rank that waited longer than this part of the abort timeout would be given up by the others."""


def through(generation: int, step: int, others: Iterable[PeerStatus]) -> bool | None:
    """Tell whether any rank has got through the gate. Pure.

    Args:
        generation: the world's.
        step: committed steps of this process, which was cut off at the gate.
        others: what the world's other living members say.

    Returns:
        None: some are still on their way out, or to the gate.
    """
    waits = False
    for other in others:
        told = other.generation >= generation
        if told and other.phase != "running" and other.step > step:
            return True
        waits = waits or not told or (other.phase == "running" and other.gate <= step)
    return None if waits else False


def come_through(
    mesh: Mesh, view: View, status: PeerStatus, together: Callable[[], None], abort_timeout: float
) -> None:
    """Tell whether this process shall finish its step.

    Args:
        mesh: says how the world ended, and how far the others are.
        view: the world.
        status: of this process, before the step.
        together: a collective of the whole world; it raises when it is cut off.
        abort_timeout: seconds in which a process must be out of its block when its world has ended.

    Raises:
        Interrupted: no rank finishes this step.
        Exception: what the collective raised, if the world goes on.
    """
    try:
        together()
        return
    except Exception:
        mesh.wait_for_end(PEER_WORD_SECONDS)
        end = mesh.end
        if end is None:
            raise
    mesh.say(msgspec.structs.replace(status, gate=status.step + 1))
    found = mesh.hear_out(
        view,
        lambda others: through(view.generation, status.step, others),
        SHARE_OF_ABORT * abort_timeout,
    )
    if not found:
        raise Interrupted(end.reason)
