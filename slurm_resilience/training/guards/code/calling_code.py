"""See what the training's code does with a result."""

from __future__ import annotations

import dis
from types import FrameType


def is_result_used(called: FrameType | None) -> bool:
    """Tell whether a call is more than a statement: its result is kept, or given on.

    Args:
        called: the frame of the function that is called.
    """
    caller = called and called.f_back
    if caller is None:
        return True
    after = (one for one in dis.get_instructions(caller.f_code) if one.offset > caller.f_lasti)
    return next((one.opname for one in after), "") != "POP_TOP"
