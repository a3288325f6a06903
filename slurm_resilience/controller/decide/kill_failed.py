"""Decide, for nodes that Slurm drained because it could not end a job's tasks. Pure.

That is a job's fault, or its file system's, and never counts as the machine's: no incident is
opened. What was left behind is ended, and the node given back.
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_resilience.config import Config
from slurm_resilience.controller.actions import ClearLeftOver, RaiseAlarm
from slurm_resilience.controller.calm.notable import notable
from slurm_resilience.controller.decide.marking import mode_of
from slurm_resilience.controller.diagnose import is_speaking, open_findings
from slurm_resilience.controller.observe import ClusterSnapshot
from slurm_resilience.model import Node

KILL_TASK_FAILED = "Kill task failed"
MAX_TRIES = 3
"""Tries within an hour."""
RETRY_SECONDS = 60.0


def left_overs(snapshot: ClusterSnapshot, config: Config) -> Iterator[ClearLeftOver | RaiseAlarm]:
    """Have left-over processes ended, on nodes that nothing else is wrong with."""
    for node in notable(snapshot.nodes).values():
        if node.reason != KILL_TASK_FAILED or not _is_ours_to_clear(snapshot, config, node):
            continue
        tries, last = snapshot.memory.left_overs.get(node.name, (0, 0.0))
        if tries >= MAX_TRIES:
            text = (
                f"processes of a job could not be ended {tries} times: they may hang in the "
                f"kernel; see `sres node history {node.name}`, reboot the node or resume it"
            )
            yield RaiseAlarm(f"left-over-{node.name}-{node.reason_at}", text, node.name)
        elif snapshot.now - last >= RETRY_SECONDS:
            yield ClearLeftOver(node.name)


def _is_ours_to_clear(snapshot: ClusterSnapshot, config: Config, node: Node) -> bool:
    """Tell whether Slurm alone keeps the node, no job is on it, and its sresd finds nothing."""
    name = node.name
    is_slurms = node.reason_by in snapshot.site.slurm_users and not node.reason_unclear
    is_only_drained = node.is_drain and not (node.is_down or node.is_fail or node.has_work)
    is_left_alone = name in snapshot.incidents or name in snapshot.at_rest
    agent = snapshot.agents.get(name)
    has_told = agent is not None and agent.reported and not open_findings(snapshot, name)
    return (
        is_slurms
        and is_only_drained
        and not is_left_alone
        and has_told
        and "MAINTENANCE" not in node.flags
        and is_speaking(snapshot, config.detect, name)
        and mode_of(snapshot, config, name) == "automatic"
    )
