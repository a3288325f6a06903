"""`sres status`: show the cluster on one screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from slurm_resilience.cli.controller import ClusterView, moment_of, pass_cluster
from slurm_resilience.cli.job_commands import job_views, jobs_table
from slurm_resilience.cli.shared_options import config_option, format_option
from slurm_resilience.cli.tables import (
    BAD,
    alert,
    clock_time,
    duration,
    field,
    item,
    next_in_words,
    print_json,
    style_of,
    table,
)
from slurm_resilience.cli.view import by_value, near_misses, node_views, queue
from slurm_resilience.controller.decide.node_lifecycle import NodeEvent, NodeState
from slurm_resilience.errors import SlurmUnreachable, SresError
from slurm_resilience.model import ACTIONS, REBOOT, RESET, Job, Node

_STALE_CYCLES = 5
_SHOWN_ALARMS, _SHOWN_NEXT = 10, 20


@click.command()
@format_option
@config_option
@pass_cluster
def status(cluster: ClusterView, form: str) -> None:
    """Show nodes, what is under way, and alarms.

    When sresctld does not answer, only what Slurm says is shown, and the exit code is 8. While
    slurmctld is away, what sresctld knows is shown, and the exit code is that of Slurm's error.
    """
    nodes, jobs, away = _read(cluster)
    data, failed = cluster.try_status()
    if away is not None:
        if data is None:
            raise away
        nodes = tuple(Node(name, "UNKNOWN") for name in data.get("nodes", {}))
    settings = cluster.settings()
    now = moment_of(data)
    views = node_views(nodes, jobs, data)
    picture = {
        "cluster": settings.cluster,
        "slurm": settings.version,
        "slurm_away": str(away or ""),
        "controller": _controller(data, failed, now),
        "states": by_value(views, "state"),
        "health": by_value(views, "health"),
        "sresd": by_value(views, "sresd"),
        "modes": by_value(views, "mode"),
        "incidents": [
            *(view["incident"] for view in views if view["incident"]),
            # Of nodes that Slurm does not list, and so none of the views.
            *(data or {}).get("unlisted", []),
        ],
        "gave_up": [view["gave_up"] for view in views if view["gave_up"]],
        "queue": queue(views),
        "jobs": job_views(data, jobs),
        "near_misses": near_misses(nodes),
        "failed": _failed_attempts(cluster, views) if failed is None else [],
        "alarms": (data or {}).get("alarms", []),
    }
    if form == "json":
        print_json(picture)
    else:
        click.echo("\n".join(_lines(picture, now, cluster.usable_config.controller.interval)))
    problem = away or failed
    if problem is not None:
        raise problem


def _read(
    cluster: ClusterView,
) -> tuple[tuple[Node, ...], tuple[Job, ...], SlurmUnreachable | None]:
    """Return Slurm's nodes and jobs, and why there are none while slurmctld is away."""
    try:
        return tuple(cluster.client.nodes()), tuple(cluster.client.jobs()), None
    except SlurmUnreachable as error:
        return (), (), error


def _failed_attempts(cluster: ClusterView, views: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the replacements that failed and will be tried again, each with its reason."""
    failed = []
    for view in views:
        incident = view["incident"]
        if not incident or not incident["attempts"]:
            continue
        if not NodeState(incident["state"]).waits_for_repair:
            continue
        texts = [
            event["text"]
            for event in cluster.history(view["node"])
            if event["kind"] == NodeEvent.REPLACEMENT_FAILED and event["incident"] == incident["id"]
        ]
        failed.append(
            {
                "node": view["node"],
                "attempts": incident["attempts"],
                "next_try": incident["next_try"],
                "text": texts[-1] if texts else "",
            }
        )
    return failed


def _controller(
    data: dict[str, Any] | None, failed: SresError | None, now: float
) -> dict[str, Any]:
    if data is None or "at" not in data:
        # Without a moment it has not seen Slurm even once.
        said = str(failed) if data is None else f"has not read Slurm yet: {data.get('blind', '')}"
        return {"answers": False, "error": said}
    kept = ("version", "uptime", "mode", "paused", "can_replace", "permits_expansion", "sentence")
    told: dict[str, Any] = {k: data[k] for k in kept}
    age = max(0.0, data.get("age", now - data["at"]))
    breaker = data.get("breaker", {})
    tripped = str(breaker.get("text", "")) if breaker.get("tripped_at") else ""
    held = [pool for pool in data.get("spares", []) if pool["state"] == "held"]
    now_told = {
        "cycle_age": age,
        "blind": data.get("blind", ""),
        "breaker": tripped,
        "spares": held,
        "standby": data.get("standby"),
    }
    return {"answers": True} | now_told | told


def _lines(picture: dict[str, Any], now: float, interval: float) -> Iterator[str]:
    answers = picture["controller"]["answers"]
    yield from _about(picture["controller"], interval)
    modes = {m: names for m, names in picture["modes"].items() if m}
    if len(modes) > 1 or not modes.keys() <= {picture["controller"].get("mode")}:
        yield field("by node", _groups(modes))
    away = picture.get("slurm_away")
    text = away or f"{picture['cluster']}, Slurm {picture['slurm']}"
    yield field("slurm", text, alert=bool(away))
    keys = ("states", "health", "sresd") if answers else ("states",)
    for key in keys[1:] if away else keys:
        bad = any(style_of(key.upper(), word) == BAD for word in picture[key])
        yield field(key, _groups(picture[key]), alert=bad)
    if picture["incidents"]:
        yield "under way"
        yield table(
            ("NODE", "STATE", "KIND", "ACTION", "AGE", "REASON"),
            [
                (i["node"], i["state"], i["kind"], i["action"], _age(i["opened"], now), i["reason"])
                for i in picture["incidents"]
            ],
            indent=2,
        )
    elif answers:
        yield field("under way", "nothing")
    if picture["queue"]:
        is_blind = picture["controller"].get("blind")
        yield "comes next, as it was last seen; nothing is done now" if is_blind else "comes next"
        yield from (item(next_in_words(act, now)) for act in picture["queue"][:_SHOWN_NEXT])
    for attempt in picture["failed"]:
        waits = attempt["next_try"] - now
        next_try = f"next try in {duration(waits)}" if waits > 0 else "the next try is due"
        yield field(
            "failed",
            f"attempt {attempt['attempts']} for {attempt['node']}: {attempt['text']}; {next_try}: "
            f"sres node show {attempt['node']}",
            alert=True,
        )
    for incident in picture["gave_up"]:
        node = incident["node"]
        # There is no command that asks for a reset.
        verb = "reboot" if incident["action"] == REBOOT else "replace"
        yield field(
            "gave up",
            f"{incident['action']} of {node} {_age(incident['closed'], now)} ago, attempt "
            f"{incident['attempts']}; a person must look: sres node show {node}; try again: sres "
            f"node {verb} {node}",
            alert=True,
        )
    if picture["jobs"]:
        yield "auto-resume"
        yield jobs_table(picture["jobs"], now, indent=2)
    for miss in picture["near_misses"]:
        node, verb = miss["node"], ACTIONS[miss["meant"]][0]
        right = f"sres node {verb} {node}"
        if miss["meant"] == RESET:
            right = f"scontrol update nodename={node} state=fail reason={RESET}"
        yield field(
            "reason",
            f"of {node}: '{miss['reason']}' (by {miss['by'] or 'unknown'}) is not "
            f"{miss['meant']}, so nothing is done; correct it: {right}",
        )
    if picture["alarms"]:
        # sresctld shows an alarm until ten minutes after its cause is over.
        yield alert(f"alarms ({len(picture['alarms'])})")
        rows = [
            (clock_time(a["at"], now), a["node"] or a["job"] or "", _alarm_text(a, now))
            for a in picture["alarms"][-_SHOWN_ALARMS:]
        ]
        yield table(("TIME", "WHAT", "TEXT"), rows, indent=2)


def _alarm_text(alarm: dict[str, Any], now: float) -> str:
    over = f" (over since {clock_time(alarm['over'], now)})" if alarm["over"] else ""
    return f"{alarm['text']}{over}"


def _groups(names: dict[str, list[str]]) -> str:
    from slurm_resilience.slurm.hostlists import fold

    return ", ".join(
        f"{len(found)} {word} ({fold(found)})" for word, found in sorted(names.items())
    )


def _age(since: float, now: float) -> str:
    return duration(now - since)


def _about_standby(standby: dict[str, Any]) -> str:
    active, other, state = standby["active"], standby["standby"], standby["state"]
    if standby["has_journal"]:
        text = f"on {other}, has the whole journal; {active} is active"
    elif not other:
        text = f"none has connected; {active} is active alone"
    else:
        since = duration(standby["seconds"])
        text = f"on {other}: {state} for {since}; {active} is active alone"
    return field("standby", text, alert=bool(other) and not standby["has_journal"])


def _about(controller: dict[str, Any], interval: float) -> Iterator[str]:
    if not controller["answers"]:
        yield field("sresctld", "does not answer; below is what Slurm says", alert=True)
        return
    age = controller["cycle_age"]
    late = (
        "; that is long ago: it cannot read Slurm, or hangs (see its log)"
        if age > max(10.0, _STALE_CYCLES * interval) and not controller["blind"]
        else ""
    )
    up = duration(controller["uptime"])
    yield field(
        "sresctld", f"{controller['version']}, up {up}, last cycle {duration(age)} ago{late}"
    )
    program = "" if controller["can_replace"] else ", no replacement program: a person replaces"
    yield field("recovery", f"{controller['mode']}{program}")
    if controller.get("standby"):
        yield _about_standby(controller["standby"])
    if not controller["permits_expansion"]:
        yield field(
            "warning",
            "SchedulerParameters lacks permit_job_expansion: a job that loses a node is requeued; "
            "add it to slurm.conf, then scontrol reconfigure",
            alert=True,
        )
    if controller["blind"]:
        text = f"{controller['blind']}: nothing is judged, nothing is done"
        yield field("blind", text, alert=True)
    if controller["breaker"]:
        text = f"tripped: {controller['breaker']}; no node is replaced: sres breaker"
        yield field("breaker", text, alert=True)
    for pool in controller["spares"]:
        yield field("spares", f"of {pool['partition']} are held: {pool['why']}", alert=True)
    if controller["paused"]:
        text = f"{controller['paused']}: nothing is done until `sres unpause`"
        yield field("paused", text, alert=True)
