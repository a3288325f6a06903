"""Options that several commands have in common, each defined once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from slurm_resilience.cli.controller import ClusterView
from slurm_resilience.config import OPTION_HELP

F = TypeVar("F", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """A range of numbers. `nan`, which click takes since it compares with no limit, is none."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{found} is no number that can be counted with.", param, ctx)
        return found


class DigitRange(click.IntRange):
    """A range of whole numbers in plain digits. Python reads `1_2` as 12: to people who use Slurm,
    it is an element of an array."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not (value.isascii() and value.isdigit()):
            self.fail(f"{value!r} is no whole number in digits.", param, ctx)
        return super().convert(value, param, ctx)


ID = DigitRange(1, 2**63 - 1)
"""The number of an incident or a job: the journal's go so far."""


def _remember_config(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(ClusterView).config_path = value


config_option = click.option(
    "--config",
    metavar="FILE",
    expose_value=False,
    callback=_remember_config,
    help=OPTION_HELP,
)
"""Taken before or after the command's name."""

format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="For people, or for programs (described in sres(1)).",
)


def limit_option(what: str, most: int) -> Callable[[F], F]:
    """``--limit``; ``what`` names what is counted."""
    return click.option(
        "--limit",
        type=click.IntRange(1, most),
        default=100,
        show_default=True,
        help=f"Show at most so many {what}, the newest.",
    )


def yes_option(text: str) -> Callable[[F], F]:
    """``--yes``; ``text`` says to what."""
    return click.option("--yes", is_flag=True, help=text)


hostlist_argument = click.argument("hostlist")


def _check_hostlist(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """Refuse what is no hostlist; an empty one, such as of an unset variable, is not all nodes."""
    if value is not None:
        from slurm_resilience.slurm.hostlists import expand

        expand(value)
    return value


optional_hostlist_argument = click.argument("hostlist", required=False, callback=_check_hostlist)
"""Without it: all nodes."""
