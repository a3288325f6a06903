"""`sres status`: the whole picture on one screen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click

from slurm_resilience.cli.controller import ClusterView, pass_cluster
from slurm_resilience.cli.job_commands import job_views, jobs_table
from slurm_resilience.cli.shared_options import config_option, format_option
from slurm_resilience.cli.tables import (
    clock_time,
    duration,
    field,
    print_json,
    table,
)
from slurm_resilience.cli.view import by_value, near_misses, node_views
from slurm_resilience.errors import SresError

DAY = 86400.0
_STALE_CYCLES = 5
_SHOWN_ALARMS = 10


@click.command()
@format_option
@config_option
@pass_cluster
def status(cluster: ClusterView, form: str) -> None:
    """What sresctld sees, and what is under way.

    Without sresctld: what Slurm itself says, and exit code 8.
    """
    nodes, jobs = cluster.client.nodes(), cluster.client.jobs()
    data, failed = cluster.try_status()
    events: list[dict[str, Any]] = []
    if failed is None:
        events = cluster.history()
    now = time.time()
    views = node_views(nodes, jobs, data)
    picture = {
        "cluster": cluster.info.cluster,
        "slurm": cluster.info.version,
        "controller": _controller(data, failed, now),
        "states": by_value(views, "state"),
        "health": by_value(views, "health"),
        "sresd": by_value(views, "sresd"),
        "incidents": [view["incident"] for view in views if view["incident"]],
        "gave_up": [view["gave_up"] for view in views if view["gave_up"]],
        "jobs": job_views(data, jobs),
        "near_misses": near_misses(nodes),
        "alarms": [e for e in events if e["kind"] == "alarm" and now - e["at"] < DAY],
    }
    if form == "json":
        print_json(picture)
    else:
        click.echo("\n".join(_lines(picture, now, cluster.config.controller.interval)))
    if failed is not None:
        raise failed


def _controller(
    data: dict[str, Any] | None, failed: SresError | None, now: float
) -> dict[str, Any]:
    if data is None or "at" not in data:
        # Without a moment it has not seen Slurm even once.
        said = str(failed) if data is None else f"has not read Slurm yet: {data.get('blind', '')}"
        return {"answers": False, "error": said}
    kept = ("version", "uptime", "mode", "paused", "can_replace", "permits_expansion", "sentence")
    told: dict[str, Any] = {k: data[k] for k in kept}
    age = max(0.0, now - data["at"])
    return {"answers": True, "cycle_age": age, "blind": data.get("blind", "")} | told


def _lines(picture: dict[str, Any], now: float, interval: float) -> Iterator[str]:
    answers = picture["controller"]["answers"]
    yield from _about(picture["controller"], interval)
    yield field("slurm", f"{picture['cluster']}, Slurm {picture['slurm']}")
    for key in ("states", "health", "sresd") if answers else ("states",):
        yield field(key, _groups(picture[key]))
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
    for incident in picture["gave_up"]:
        node, verb = incident["node"], incident["action"].partition(":")[2].lower()
        yield field(
            "gave up",
            f"{incident['action']} of {node} {_age(incident['closed'], now)} ago, attempt "
            f"{incident['attempts']}; a person must look: sres node show {node}; try again: sres "
            f"node {verb} {node}",
        )
    if picture["jobs"]:
        yield "auto-resume"
        yield jobs_table(picture["jobs"], now, indent=2)
    for miss in picture["near_misses"]:
        verb = miss["meant"].partition(":")[2].lower()
        yield field(
            "reason",
            f"of {miss['node']}: '{miss['reason']}' (by {miss['by'] or 'somebody'}) is not "
            f"{miss['meant']}, so nothing is done; correct it: sres node {verb} {miss['node']}",
        )
    if picture["alarms"]:
        yield f"alarms of the last day ({len(picture['alarms'])})"
        rows = [
            (clock_time(e["at"], now), e["node"] or e["job"] or "", e["text"])
            for e in picture["alarms"][-_SHOWN_ALARMS:]
        ]
        yield table(("TIME", "WHAT", "TEXT"), rows, indent=2)


def _groups(names: dict[str, list[str]]) -> str:
    from slurm_resilience.slurm.hostlists import fold

    return ", ".join(
        f"{len(found)} {word} ({fold(found)})" for word, found in sorted(names.items())
    )


def _age(since: float, now: float) -> str:
    return duration(now - since)


def _about(controller: dict[str, Any], interval: float) -> Iterator[str]:
    if not controller["answers"]:
        yield field("sresctld", "does not answer; below is what Slurm says")
        return
    age = controller["cycle_age"]
    late = (
        "; that is long ago: it cannot read Slurm, or hangs (see its log)"
        if age > max(10.0, _STALE_CYCLES * interval)
        else ""
    )
    up = duration(controller["uptime"])
    yield field(
        "sresctld", f"{controller['version']}, up {up}, last cycle {duration(age)} ago{late}"
    )
    program = "" if controller["can_replace"] else ", no replacement program: a person replaces"
    yield field("recovery", f"{controller['mode']}{program}")
    if controller["blind"]:
        yield field("blind", f"{controller['blind']}: nothing is judged, nothing is done")
    if controller["paused"]:
        yield field("paused", f"{controller['paused']}: nothing is done until `sres unpause`")
