"""Options that several commands of `sres deepcheck` have in common, each read here alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from slurm_resilience.cli.shared_options import NumberRange
from slurm_resilience.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

LOG_DIRECTORY = "/var/log/slurm-resilience"


def _names(ctx: click.Context, _: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Return the names of the checks; one that there is not, and none at all, is an error."""
    if value is None:
        return ()
    from slurm_resilience.deepcheck.instance.instance_checks import chosen

    names = tuple(name for name in value.replace(" ", "").split(",") if name)
    chosen(names)
    if not names:
        raise UsageError("--only names no check")
    return names


only_option = click.option(
    "--only",
    metavar="CHECKS",
    callback=_names,
    help="Run only these checks of the instance level: names, with commas.",
)

seconds_option = click.option(
    "--seconds",
    type=NumberRange(1, 86400),
    default=60,
    show_default=True,
    help="Seconds for which each load runs.",
)

profile_option = click.option(
    "--profile", default="", metavar="TYPE", help="Node type, or a profile's file."
)

set_aside_option = click.option(
    "--set-aside", is_flag=True, help="Have sresctld repair the nodes that fail."
)


def limit_option(minutes: int) -> Callable[[F], F]:
    """``--limit``.

    Args:
        minutes: the default.
    """
    return click.option(
        "--limit",
        "limit_minutes",
        type=click.IntRange(1, 10080),
        default=minutes,
        show_default=True,
        help="Minutes after which the checks are ended.",
    )


def log_options(command: F) -> F:
    """``--log-dir`` and ``--node-log``."""
    node_log = click.option(
        "--node-log",
        default=f"{LOG_DIRECTORY}/deep-health-check.log",
        show_default=True,
        metavar="FILE",
        help="The log on each node; %n stands for its name.",
    )
    log_dir = click.option(
        "--log-dir",
        default=LOG_DIRECTORY,
        show_default=True,
        metavar="DIR",
        help="Each run gets a directory below DIR/deepcheck.",
    )
    return log_dir(node_log(command))
