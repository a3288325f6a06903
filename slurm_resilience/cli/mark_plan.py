"""Plan what an administrator's request does to nodes, and find objections. Pure.

Everything is judged before anything is done: one node that may not be touched stops all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from slurm_resilience.cli.tables import count, plain
from slurm_resilience.cli.view import slurm_state
from slurm_resilience.controller.decide.node_lifecycle import NodeState
from slurm_resilience.controller.diagnose import is_a_persons
from slurm_resilience.errors import UsageError
from slurm_resilience.model import ACTIONS, FAULTY, REBOOT, Job, Node
from slurm_resilience.slurm.hostlists import fold

RUNNING = frozenset({"RUNNING", "SUSPENDED", "COMPLETING"})


class MarkRequest(msgspec.Struct, frozen=True):
    """One call of `set_node`."""

    nodes: tuple[str, ...]
    state: Literal["fail", "down", "resume", ""]
    """Empty: only the reason; Slurm refuses to fail a node twice."""
    reason: str
    renew: bool = False
    """The reason stands already, and must get a new time: Slurm keeps the old one when the same
    reason is set, and sresctld takes it for the request that it gave up."""


class MarkPlan(msgspec.Struct, frozen=True):
    changes: tuple[MarkRequest, ...]
    lines: dict[str, str]
    """By node: what is done with it and what comes next."""


def mark(
    nodes: Mapping[str, Node],
    jobs: Sequence[Job],
    action: str,
    *,
    force: bool,
    yes: bool,
    supervised: frozenset[int] = frozenset(),
    gave_up: frozenset[str] = frozenset(),
) -> MarkPlan:
    """Mark nodes for replacement or reboot.

    Args:
        nodes: the nodes, as Slurm shows them now.
        jobs: all jobs.
        action: `Action:Replace` or `Action:Reboot`.
        force: at once (down): running jobs die. Else they end first (fail).
        yes: the caller knows what dies, and whose word is overridden.
        supervised: jobs that auto-resume moves off the nodes.
        gave_up: nodes whose present request sresctld has given up: it is made anew.

    Raises:
        UsageError: something speaks against one of them; nothing is to be done.
    """
    on = {name: [j for j in jobs if name in j.nodes and j.state in RUNNING] for name in nodes}
    again = [node for node in nodes.values() if node.name in gave_up and node.reason == action]
    todo = [n for n in nodes.values() if n in again or not _is_marked(n, action, force)]
    if not yes:
        _refuse_override(todo, action)
        if force and todo:
            raise UsageError(_what_dies(action, todo, on))
    state: Literal["fail", "down"] = "down" if force else "fail"
    changes = [
        MarkRequest(
            tuple(n.name for n in todo if _has_state(n, force) is has and (n in again) is renew),
            "" if has else state,
            action,
            renew,
        )
        for renew in (False, True)
        for has in (False, True)
    ]
    lines = {}
    for node in nodes.values():
        becomes = "down" if force or node.is_down else "fail"
        following = _jobs_next(on[node.name], force, supervised)
        lines[node.name] = (
            f"{becomes}, {action}; {following}"
            if node in todo
            else f"{action} already ({slurm_state(node)}); left as it is"
        )
    return MarkPlan(tuple(c for c in changes if c.nodes), lines)


def _is_marked(node: Node, action: str, force: bool) -> bool:
    return node.reason == action and (
        node.is_down or (not force and (node.is_fail or node.is_drain))
    )


def _has_state(node: Node, force: bool) -> bool:
    return node.is_down or (node.is_fail and not force)


def _refuse_override(nodes: Sequence[Node], action: str) -> None:
    for node in nodes:
        out_of_service = node.is_down or node.is_drain or node.is_fail
        if node.is_powered_off_on_purpose:
            raise UsageError(
                f"{node.name} is {slurm_state(node)}: powered off by Slurm, so sresctld leaves it "
                "alone; add --yes to mark it all the same. Nothing is changed"
            )
        if not out_of_service or action in (node.reason, node.near_miss):
            continue
        if node.requested_action or is_a_persons(node):
            raise UsageError(
                f"{node.name} is {slurm_state(node)} with the reason '{plain(node.reason)}' (by "
                f"{node.reason_by or 'unknown'}); add --yes to override that. Nothing is changed"
            )


def _what_dies(action: str, nodes: Sequence[Node], on: Mapping[str, Sequence[Job]]) -> str:
    verb = ACTIONS[action][0]
    jobs = {job.id: job for node in nodes for job in on[node.name]}
    names = fold(node.name for node in nodes)
    if not jobs:
        text = f"no job runs on {names} now, but one may start any moment"
    else:
        each = ", ".join(
            f"{job.id} ({'is requeued' if job.requeue else 'is lost'})" for job in jobs.values()
        )
        text = f"jobs on {names} die at once: {each}"
    return f"{verb} --force: {text}; add --yes if that is meant. Nothing is changed"


def _jobs_next(jobs: Sequence[Job], force: bool, supervised: frozenset[int]) -> str:
    if not jobs:
        return "no job runs on it"
    named = ", ".join(str(job.id) for job in jobs)
    if force:
        return f"job {named} ends at once" if len(jobs) == 1 else f"jobs {named} end at once"
    moved = ", ".join(str(job.id) for job in jobs if job.id in supervised)
    verb = "runs on it and ends first" if len(jobs) == 1 else "run on it and end first"
    detail = f"job {moved} is moved off by auto-resume" if moved else f"job {named}"
    return f"{count(len(jobs), 'job')} {verb} ({detail})"


def release(nodes: Mapping[str, Node], status: Mapping[str, Any] | None, *, yes: bool) -> MarkPlan:
    """Take the request back: node resume.

    Args:
        nodes: the nodes, as Slurm shows them now.
        status: sresctld's; None: it does not answer.
        yes: abort replacements that run.

    Raises:
        UsageError: a node carries no request, or its replacement runs and ``yes`` is not given.
    """
    idle = [n.name for n in nodes.values() if not (n.requested_action or n.near_miss)]
    if idle:
        raise UsageError(
            f"nothing to cancel on {fold(idle)}: its reason is none of {', '.join(ACTIONS)}. "
            "Nothing is changed"
        )
    lines = {}
    for node in nodes.values():
        seen = (status or {}).get("nodes", {}).get(node.name, {})
        incident = seen.get("incident") or {}
        running = bool(incident) and NodeState(incident["state"]).is_in_repair
        if not yes and running:
            raise UsageError(
                f"the replacement of {node.name} runs already ({incident['state']}); add --yes to "
                "abort it. Nothing is changed"
            )
        if not yes and status is None:
            raise UsageError(
                f"sresctld does not answer, so whether the replacement of {node.name} runs "
                "already is not known; add --yes to take it back all the same. Nothing is changed"
            )
        lines[node.name] = f"resume, {plain(node.reason)} taken back{_after(node, seen)}"
    return MarkPlan((MarkRequest(tuple(nodes), "resume", ""),), lines)


def _after(node: Node, seen: Mapping[str, Any]) -> str:
    faulty = [f for f in seen.get("findings", []) if f["severity"] in FAULTY]
    if faulty:
        found = f"{faulty[0]['check']}: {plain(faulty[0]['text'])}"
        return f"; it still has the finding {found}. Seen once more, it is marked again"
    if not node.is_responding:
        return "; it does not answer Slurm now, and may go down again"
    return ""


def what_next(
    action: str, status: Mapping[str, Any] | None, hostlist: str, nodes: Iterable[str] = ()
) -> str:
    """Return one line on what sresctld will do with marked nodes.

    Args:
        action: `Action:Replace` or `Action:Reboot`.
        status: sresctld's; None: it does not answer.
        hostlist: the nodes, as they were named.
        nodes: the same, one by one.
    """
    done = ACTIONS[action][1]
    if status is None:
        return "sresctld does not answer: nothing follows until it runs"
    if status.get("paused"):
        return (
            f"sresctld is paused ({plain(status['paused'])}): nothing follows until `sres unpause`"
        )
    seen, mode = status.get("nodes", {}), status.get("mode", "automatic")
    modes = {name: seen.get(name, {}).get("mode", mode) for name in nodes} or {hostlist: mode}
    alone = {name: of_node for name, of_node in modes.items() if of_node != "automatic"}
    if alone:
        which = f" of {fold(alone)}" if len(alone) < len(modes) else ""
        words = " and ".join(sorted(set(alone.values())))
        return f"recovery.mode{which} is {words}: nothing follows by itself"
    if not status.get("can_reboot" if action == REBOOT else "can_replace"):
        return f"no replacement program is configured: they wait to be {done} by a person"
    return f"{done} as soon as no job is left on it; follow it: sres node watch {hostlist}"
