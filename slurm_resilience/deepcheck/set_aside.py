"""Choose the failed nodes that are taken out of service, and what is asked for them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepState, NodeDeepCheck
from slurm_resilience.model import FAULTY, REBOOT, REPLACE, Severity

MOST_BY_ONE_CHECK = 2
"""More nodes that fail the same check in one run, and are more than half of it, are rather a bad
check, driver or tool than bad nodes."""


def to_set_aside(ended: Sequence[NodeDeepCheck]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Choose among the nodes of a run.

    Args:
        ended: all of them, each with its state and results.

    Returns:
        The action to ask for, by node; and why a failed node is left in service, by node.
    """
    by_check: defaultdict[str, set[str]] = defaultdict(set)
    failed = [node for node in ended if node.state is DeepState.FAILED]
    for node in failed:
        for result in node.results:
            if result.outcome is DeepOutcome.FAILED:
                by_check[result.check].add(node.node)
    common = {
        check
        for check, names in by_check.items()
        if len(names) > MOST_BY_ONE_CHECK and 2 * len(names) > len(ended)
    }
    chosen, left = dict[str, str](), dict[str, str]()
    for node in failed:
        own = {r.check for r in node.results if r.outcome is DeepOutcome.FAILED} - common
        if node.action not in FAULTY:
            left[node.node] = "what it failed calls for no repair"
        elif not own:
            checks = ", ".join(sorted(common))
            left[node.node] = f"most nodes of this run fail {checks}, so the check may be at fault"
        else:
            chosen[node.node] = REPLACE if node.action is Severity.REPLACE else REBOOT
    return chosen, left
