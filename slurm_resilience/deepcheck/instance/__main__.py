"""Run the checks of this node: the program of a step, which needs no sresctld.

It is given an `InstanceRequest` as JSON, and prints a line for each check that begins and ends. The
full output of the tools goes into the node's log alone.
"""

from __future__ import annotations

import os
import sys

import msgspec

from slurm_resilience.deepcheck.instance.this_node import check_this_node
from slurm_resilience.deepcheck.step_lines import CheckEnded, StepMessage, as_lines
from slurm_resilience.deepcheck.step_requests import InstanceRequest
from slurm_resilience.deepcheck.tool_call import ended_by_signals
from slurm_resilience.errors import SresError

MAX_TOLD_CHARACTERS = 4000
"""The end of a tool's output that goes over the network; the node's log has all of it."""


def _tell(node: str, message: StepMessage) -> None:
    if isinstance(message, CheckEnded):
        result = message.result
        told = msgspec.structs.replace(result, output=result.output[-MAX_TOLD_CHARACTERS:])
        message = CheckEnded(message.node, told)
    for line in as_lines(node, message):
        print(line, flush=True)


def main() -> int:
    """Run the entry of the step."""
    try:
        request = msgspec.json.decode(sys.argv[1], type=InstanceRequest)
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        with ended_by_signals():
            check_this_node(request, node, lambda message: _tell(node, message))
    except (SresError, OSError, IndexError, msgspec.MsgspecError) as error:
        print(f"sres deepcheck: error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, SresError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
